"""State shared by the parts of a controller."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from reconfig.controller.context import ControllerContext
from stateflow.errors import OperatorNotDeployed, Unavailable
from stateflow.types import OperatorSpec

SPEC = OperatorSpec("Op", "m:Op", 4, ("k",), b"", "[]")


def test_of_those_that_are_to_have_an_operator_one_that_fails_keeps_no_other_from_it() -> None:
    asked: list[str] = []

    async def learn(name: str, spec: OperatorSpec) -> None:
        assert spec is SPEC
        asked.append(name)
        if name == "a":
            raise Unavailable("a was forgotten")

    def operator(name: str) -> Any:
        if name != "Op":
            raise OperatorNotDeployed(name)
        return SimpleNamespace(spec=SPEC)

    context: Any = SimpleNamespace(replicas=SimpleNamespace(learn=learn), cluster=SimpleNamespace(operator=operator))
    pairs = {("a", "Op"), ("b", "Gone"), ("b", "Op")}
    assert asyncio.run(ControllerContext.learnt(context, pairs)) == {("b", "Op")}
    assert asked == ["a", "b"]
