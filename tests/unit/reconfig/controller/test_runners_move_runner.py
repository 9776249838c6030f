"""Moves, with source and target heard in any order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import runners
from reconfig.controller.cluster_state import Deployed
from reconfig.controller.runners import Hooks, MoveRunner
from reconfig.decisions import migration as m
from reconfig.decisions.budget import FixedCost
from reconfig.decisions.plan import PlannedMove, StrategyName
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import StateMissing, Unavailable
from stateflow.operator.operator import describe
from stateflow.partition.control import Cancellation, Cancelled, Fence, Fenced, Phase, Preparation, Progress
from stateflow.reports import MoveReport
from stateflow.ring import Assignment
from stateflow.settings import ControllerSettings
from stateflow.types import MoveOptions, PartitionId, ReplicaInfo
from tests.unit.operators import Count

#: in milliseconds, far more than the whole move takes
IN_HAND_MS = 60_000.0


class Pair:
    """Source and target in one. The target has the seal before the source has answered."""

    def __init__(self, reports: int = 1) -> None:
        self.reports = reports
        self.sealed, self.owned = asyncio.Event(), asyncio.Event()

    async def prepare(self, name: str, move: Preparation, standby_move: str) -> AsyncIterator[Progress]:
        for _ in range(self.reports):
            yield Progress(Phase.CATCHING_UP, bandwidth=1e9)
        await self.sealed.wait()
        self.owned.set()
        yield Progress(Phase.OWNED, epoch=move.source_epoch + 1, digest="d" * 32)

    async def fence(self, name: str, fence: Fence) -> Fenced:
        self.sealed.set()
        while not self.owned.is_set():
            await asyncio.sleep(0)
        for _ in range(20):  # event loop iterations, in which the controller hears the target
            await asyncio.sleep(0)
        return Fenced(IN_HAND_MS)

    async def round_trip_s(self, name: str) -> float | None:
        return None

    async def release(self, *_: object) -> None: ...


async def _nothing(*_: object) -> None:
    return None


async def _cancelled(*_: object, **__: object) -> Cancelled:
    return Cancelled()


def runner_of(pair: Pair, hooks: Hooks, max_pause_ms: float | None = None, **options: Any) -> MoveRunner:
    source, target = ReplicaInfo("a", "a", "a:1"), ReplicaInfo("b", "b", "b:1")
    planned = PlannedMove("r", PartitionId("Count", 0), "a", "b", 1, 2, StrategyName.WARM_UP, MoveOptions(max_pause_ms))
    return MoveRunner(
        planned=planned,
        deployed=Deployed(describe(Count, 4), Assignment.initial("Count", dict.fromkeys(range(4), "a"))),
        source=source,
        target=target,
        replicas=pair,  # type: ignore[arg-type]
        hooks=hooks,
        settings=ControllerSettings(),
        clock=SYSTEM_CLOCK,
        random=Random(5),
        machine=MoveRunner.machine_for(planned),
        newest_epoch=lambda: 1,
        **options,
    )


def test_a_pause_is_without_the_batch_in_hand_though_the_target_is_heard_first() -> None:
    async def run() -> tuple[MoveReport, MoveReport]:
        recorded: list[MoveReport] = []

        async def owned(report: MoveReport) -> None:
            recorded.append(report)

        report = await asyncio.wait_for(runner_of(Pair(), Hooks(_nothing, owned, _nothing, lambda: None)).run(), 10)
        assert report.state == "COMPLETED", report
        return report, recorded[0]

    report, recorded = asyncio.run(run())
    assert report.pause_ms == 0.0
    assert recorded == report, "what is recorded is all that is told afterwards"


def test_a_pause_is_without_the_ways_from_and_to_the_controller() -> None:
    """A controller 100 ms away from two replicas side by side told of a pause of 100 ms, and refused shorter ones."""
    now_s = 0.0
    trips = {"a": iter([0.5, 0.08, None]), "b": iter([0.3, 0.12, 0.12])}  # one request was not answered

    class Far(Pair):
        """The source is 40 ms away, the target 60 ms."""

        async def round_trip_s(self, name: str) -> float | None:
            return next(trips[name])

        async def fence(self, name: str, fence: Fence) -> Fenced:
            nonlocal now_s
            now_s += 0.25
            return replace(await super().fence(name, fence), in_hand_ms=50.0)

    async def run() -> MoveReport:
        runner = runner_of(Far(), Hooks(_nothing, _nothing, _nothing, lambda: None))
        runner.clock = SimpleNamespace(monotonic=lambda: now_s, now_us=SYSTEM_CLOCK.now_us)  # type: ignore[assignment]
        return await asyncio.wait_for(runner.run(), 10)

    assert asyncio.run(run()).pause_ms == pytest.approx(250 - 50 - 40 - 60)


def test_a_move_is_admitted_by_what_is_known_then_and_says_meanwhile_what_it_waits_for() -> None:
    """The cost of a move follows from moves that ended while it waited."""
    costs = iter([FixedCost(8.0, 60.0), FixedCost(8.0, 50.0), FixedCost(7.0, 30.0)])
    said: list[tuple[str, float, float]] = []

    async def run() -> str:
        runner = runner_of(Pair(3), Hooks(_nothing, _nothing, _nothing, _note), 50.0, cost=lambda: next(costs))
        watched.append(runner)
        return (await asyncio.wait_for(runner.run(), 10)).state

    watched: list[MoveRunner] = []

    def _note() -> None:
        report = watched[0].report
        said.append((report.state, report.predicted_pause_ms, report.margin_ms))

    assert asyncio.run(run()) == "COMPLETED"
    waiting = [(predicted, margin) for phase, predicted, margin in said if phase == "CATCHING_UP" and margin]
    assert waiting[:2] == [(8.0, 60.0), (8.0, 50.0)]
    assert next(costs, None) is None
    assert said[-1] == ("COMPLETED", 7.0, 30.0)


def test_a_move_that_was_granted_before_asks_for_no_grant_and_waits_for_its_turn() -> None:
    async def run() -> None:
        async def grant() -> None:
            raise AssertionError("it is in the ledger")

        hooks = Hooks(grant, _nothing, _nothing, lambda: None)
        runner = runner_of(pair := Pair(), hooks)
        runner.machine, first = MoveRunner.resumed(runner.planned, granted=True)
        async with hooks.cutover:
            running = asyncio.ensure_future(runner.run(first))
            while runner.machine.phase is not m.Phase.FENCED:
                await asyncio.sleep(0)
            assert not pair.sealed.is_set()
        report = await asyncio.wait_for(running, 10)
        assert report.state == "COMPLETED", report
        assert not hooks.cutover.locked()

    asyncio.run(run())


def test_patience_begins_anew_with_the_term_that_carries_a_move_on() -> None:
    """The time for which the ledger was away does not count against a move's patience."""

    class Waited(Pair):
        async def prepare(self, *asked: Any) -> AsyncIterator[Progress]:
            for waited_s in (100.0, 129.0):
                yield Progress(Phase.CATCHING_UP, lag_bytes=10**9, bandwidth=1e6, waited_s=waited_s)
            async for progress in super().prepare(*asked):
                yield replace(progress, waited_s=129.9)

    async def run() -> str:
        runner = runner_of(Waited(), Hooks(_nothing, _nothing, _nothing, lambda: None), 50.0)
        return (await asyncio.wait_for(runner.run(), 10)).state

    assert asyncio.run(run()) == "COMPLETED"


@pytest.mark.parametrize("owned", [False, True])
def test_a_fenced_move_whose_source_has_lost_the_partition_ends_as_its_target_says(owned: bool) -> None:
    """The target decides a fenced move whose source has lost the partition.

    The source answers, but cannot know; it used to be asked for ever.
    """

    class Lost(Pair):
        async def prepare(self, *_: Any) -> AsyncIterator[Progress]:
            yield Progress(Phase.FAILED, fault=Unavailable("nothing to copy"))

        async def cancel(self, name: str, cancellation: Cancellation, *, at_once: bool) -> Cancelled:
            assert at_once
            if cancellation.owned_at:
                raise StateMissing("its data is gone", remedy="a takeover restores it")
            return Cancelled(owned=owned, epoch=2 if owned else 0)

    async def run() -> tuple[str, object]:
        runner = runner_of(Lost(), Hooks(_nothing, _nothing, _nothing, lambda: None))
        runner.machine, first = MoveRunner.resumed(runner.planned, granted=True)
        report = await asyncio.wait_for(runner.run(first), 10)
        return report.state, runner.machine.error

    phase, error = asyncio.run(run())
    assert phase == ("COMPLETED" if owned else "ABORTED")
    assert isinstance(error, Unavailable)


def test_a_transfer_that_is_asked_for_again_is_of_the_version_that_is_deployed_now() -> None:
    """A repeated transfer names the version that is deployed now, as the target runs that version from then on."""
    sent: list[str] = []

    class Failing(Pair):
        async def prepare(self, name: str, move: Preparation, standby_move: str) -> AsyncIterator[Progress]:
            sent.append(move.spec.target)
            yield Progress(Phase.FAILED, fault=Unavailable("no answer", remedy="see it"))

    async def run() -> None:
        runner = runner_of(Failing(), Hooks(_nothing, _nothing, _nothing, lambda: None))
        await runner._prepare()
        runner.deployed.spec = replace(runner.deployed.spec, target="tests.unit.operators:Picky")
        await runner._prepare()

    asyncio.run(run())
    assert sent == ["tests.unit.operators:Count", "tests.unit.operators:Picky"]


class Surprising(Pair):
    """Source and target, one call of which ends in an unexpected error."""

    async def prepare(self, *asked: Any) -> AsyncIterator[Progress]:
        raise ZeroDivisionError("a field that nobody thought of")
        yield


async def ended(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Runs ``work`` for as many event loop iterations as it could need: nothing here waits for time."""
    task = asyncio.ensure_future(work)
    for _ in range(200):
        await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        pytest.fail("it hangs")
    return task


def test_an_error_in_a_call_that_nobody_planned_for_ends_the_run_and_is_not_swallowed() -> None:
    async def run() -> None:
        runner = runner_of(Surprising(), Hooks(_nothing, _nothing, _nothing, lambda: None))
        with pytest.raises(ZeroDivisionError):
            (await ended(runner.run())).result()
        assert runner.ended.is_set()

    asyncio.run(run())


def test_what_begins_again_knows_what_it_was_told_while_it_was_broken_off() -> None:
    async def run() -> None:
        hooks = Hooks(_nothing, _nothing, _nothing, lambda: None)
        former = runner_of(Surprising(), hooks)
        with pytest.raises(ZeroDivisionError):
            (await ended(former.run())).result()
        former.source_gone()
        former.cancel()
        pair = Pair()
        pair.cancel = _cancelled  # type: ignore[attr-defined]
        again = runner_of(pair, hooks)
        again.carry_over(former)
        (await ended(again.run())).result()
        assert again.machine.phase is m.Phase.ABORTED

    asyncio.run(run())


def test_pauses_before_retries_vary_by_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[float]:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        runner = runner_of(Pair(), Hooks(_nothing, _nothing, _nothing, lambda: None))
        runner.settings = ControllerSettings(retry_interval_s=4.0)
        with monkeypatch.context() as patch:
            patch.setattr(runners, "asyncio", SimpleNamespace(sleep=sleep))
            for _ in range(20):
                await runner._later(_nothing)
            await runner._later(_nothing, 40.0)
        return slept

    *few, long = asyncio.run(run())
    assert 3.0 <= min(few) < max(few) <= 5.0
    assert 30.0 <= long <= 50.0


def test_source_and_target_are_named_with_their_present_addresses() -> None:
    """A replica that restarts may have another address, as those of agents do.

    The target of a standby tried the former one for ever; a fenced move did until the controller was restarted.
    """
    copied_from, successors = list[str](), list[str]()
    there = {name: ReplicaInfo(name, name, f"{name}:1") for name in "ab"}

    class Moved(Pair):
        async def prepare(self, name: str, move: Preparation, standby_move: str) -> AsyncIterator[Progress]:
            copied_from.append(move.source.address)
            yield Progress(Phase.WARMING)
            await self.sealed.wait()

        async def fence(self, name: str, fence: Fence) -> Fenced:
            successors.append(fence.target.address)
            return Fenced()

        async def release(
            self, name: str, partition: PartitionId, move_id: str, epoch: int, owner: ReplicaInfo
        ) -> None:
            successors.append(owner.address)

    async def run() -> None:
        hooks = Hooks(_nothing, _nothing, _nothing, lambda: None)
        runner = runner_of(Moved(), hooks, current=lambda info: there[info.name])
        running = asyncio.ensure_future(runner.run())
        while not copied_from:
            await asyncio.sleep(0)
        runner.follow_source()
        there.update({name: ReplicaInfo(name, name, f"{name}:2") for name in "ab"})
        runner.follow_source()
        while len(copied_from) < 2:
            await asyncio.sleep(0)
        runner.follow_source()
        await runner._ask_to_fence(m.Fence(2, cold=False, pause_ms=0.0, max_pause_ms=0.0))
        await runner._release(2)
        running.cancel()

    asyncio.run(run())
    assert copied_from == ["a:1", "a:2"]
    assert successors == ["b:2", "b:2"]
