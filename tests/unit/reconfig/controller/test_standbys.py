"""What is wanted changes while it is seen to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from reconfig.controller.standbys import Standbys


def test_standbys_that_are_wanted_while_others_are_begun_keep_none_from_its_turn() -> None:
    async def scenario() -> list[str]:
        cluster = SimpleNamespace(standbys={"A": 1, "B": 1}, deployed={"A": None, "B": None, "C": None})
        context: Any = SimpleNamespace(cluster=cluster, planning=asyncio.Lock())
        standbys = Standbys(context, SimpleNamespace())  # type: ignore[arg-type]
        begun = []

        async def begin(operator: str, count: int) -> None:
            begun.append(operator)
            cluster.standbys["C"] = 1  # its record is folded

        standbys._begin_missing = begin  # type: ignore[method-assign]
        await standbys.reconcile()
        return begun

    assert asyncio.run(scenario()) == ["A", "B"]
