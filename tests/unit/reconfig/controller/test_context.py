"""State shared by the parts of a controller."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import context as shared
from reconfig.controller import steps
from reconfig.controller.context import FOLDED_AT_ONCE, ControllerContext
from reconfig.controller.controller import Controller
from reconfig.controller.folds import Home
from reconfig.decisions.sweeps import Maintenance
from stateflow.errors import OperatorNotDeployed, Unavailable
from stateflow.fleet import AgentInfo, Spawned
from stateflow.ledger import Ledger
from stateflow.settings import ControllerSettings
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


def test_each_step_is_decided_by_what_the_step_before_it_recorded(tmp_path: Path) -> None:
    """Steps that are asked for at the same time are decided one after another, and are folded when they return."""

    async def scenario() -> None:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            controller = Controller(ledger)
            context, maintenance = controller.context, Maintenance(0, 1)
            asked = (context.record(steps.maintain, node, maintenance) for node in "abc")
            items = [record.item_id for (record,) in await asyncio.gather(*asked)]
            assert items == ["maintenance/a/1", "maintenance/b/2", "maintenance/c/3"]
            assert context.cluster.roster.maintenance == dict.fromkeys("abc", maintenance)
            assert await context.record(steps.cancel, "unknown") == [], "there is nothing to record"
            await controller.close()

    asyncio.run(scenario())


def test_a_large_step_is_folded_whole_and_the_loop_goes_on_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            controller = Controller(ledger)
            context, seen = controller.context, set[int]()
            wanted = [Spawned(f"gw-{number}", "gw", True, 1, 1, 1, 0) for number in range(3 * FOLDED_AT_ONCE)]
            agent = AgentInfo("gw", "edge", "gw:1", {}, 4, 1 << 30, 1 << 30)
            await context.record(steps.register_agent, agent, Home("id", "/data"))
            recording = asyncio.ensure_future(context.record(steps.spawn, wanted))
            while not recording.done():
                await asyncio.sleep(0)
                seen.add(len(context.cluster.roster.spawned))
            assert len(await recording) == len(context.cluster.roster.spawned) == len(wanted)
            assert FOLDED_AT_ONCE in seen, "other work came in between"
            await controller.close()

    asyncio.run(scenario())


def test_an_answer_waits_for_what_is_being_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            controller, may_write = Controller(ledger), threading.Event()
            append = ledger.append

            def slow(*arguments: Any) -> Any:
                may_write.wait(10)
                return append(*arguments)

            ledger.append = slow  # type: ignore[method-assign]
            writing = asyncio.ensure_future(controller.context.record(steps.adopt_ledger, "other"))
            await asyncio.sleep(0)
            answering = asyncio.ensure_future(controller.context.knows_what_it_wrote())
            await asyncio.sleep(0.01)
            assert not answering.done()
            may_write.set()
            await answering
            assert controller.cluster.adopted == {"other"}
            await writing
            await controller.close()

    asyncio.run(scenario())


def test_pauses_before_retries_vary_by_a_quarter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def scenario() -> None:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            controller = Controller(ledger, ControllerSettings(retry_interval_s=4.0), random=Random(5))
            with monkeypatch.context() as patch:
                patch.setattr(shared, "asyncio", SimpleNamespace(sleep=sleep))
                for _ in range(20):
                    await controller.context.pause()
            await controller.close()

    asyncio.run(scenario())
    assert 3.0 <= min(slept) < max(slept) <= 5.0
