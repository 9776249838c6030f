"""The next controller reports a finished reconfiguration as the one that carried it out did, field by field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.executor import Executor, Running, RunRegistry
from reconfig.controller.folds import Home
from reconfig.controller.history import past, report_to_record
from reconfig.controller.runners import MoveRunner
from reconfig.controller.takeovers import TakeoverRunner
from reconfig.decisions import failover as f
from reconfig.decisions.plan import STRATEGIES, Change, MoveOptions, PlannedMove, PlannedTakeover, StrategyName
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import MoveConflict, TransferCorrupt, Unavailable
from stateflow.ledger import Ledger
from stateflow.operator.operator import describe
from stateflow.partition.control import Cancelled, Fenced, Origin, Phase, Progress, TakenOver
from stateflow.reports import MoveReport, Reconfiguration
from stateflow.settings import ControllerSettings
from stateflow.types import How, PartitionId, ReplicaInfo
from tests.unit.operators import Count
from tests.writing import Written, deploy, write

SPEC, P = describe(Count, 4), PartitionId("Count", 0)
A, B = ReplicaInfo("a", "a", "a:1"), ReplicaInfo("b", "b", "b:1")
PROGRESS = Progress(
    bytes_warm=1, bytes_reused=2, bytes_delta=3, bytes_stored=4, base_bytes=5,
    change_rate=6.5, bandwidth=1e9 / 3, rtt_ms=0.125, sequence=7,
)  # fmt: skip


class Replicas:
    """Source and target of a move in one."""

    def __init__(self, fails: bool) -> None:
        self._fails, self._sealed = fails, asyncio.Event()

    async def prepare(self, *_: object) -> AsyncIterator[Progress]:
        yield replace(PROGRESS, phase=Phase.CATCHING_UP)
        if self._fails:
            yield Progress(
                Phase.FAILED, fault=TransferCorrupt("a file arrived damaged", remedy="see the link", file="1.sst")
            )
            return
        await self._sealed.wait()
        yield replace(PROGRESS, phase=Phase.OWNED, epoch=2, digest="d" * 32)

    async def fence(self, *_: object) -> Fenced:
        self._sealed.set()
        return Fenced(0.01)

    async def round_trip_s(self, _: str) -> float | None:
        return None

    async def cancel(self, *_: object, at_once: bool) -> Cancelled:
        return Cancelled()

    async def release(self, *_: object) -> None:
        await asyncio.sleep(0.001)  # what follows the record is not reported any more

    async def take_over(self, *_: object) -> TakenOver:
        if self._fails:
            raise MoveConflict("it is being restored", remedy="wait")
        return TakenOver(2, 9, {"s": 4}, Origin(1, 5, 10**15))

    async def hold(self, *_: object) -> None: ...

    async def checkpoint(self, *_: object) -> None:
        if self._fails:
            raise MoveConflict("it is being restored", remedy="wait")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as made:
        yield made


class First:
    """The controller that carries the move out."""

    def __init__(self, ledger: Ledger, planned: Change, fails: bool) -> None:
        self.cluster = Written(ledger)
        deploy(self.cluster, SPEC, dict.fromkeys(range(4), "a"))
        write(self.cluster, steps.plan_moves, [planned])
        self.replicas = Replicas(fails)
        context: Any = SimpleNamespace(
            cluster=self.cluster,
            settings=ControllerSettings(retry_interval_s=0.001),
            clock=SYSTEM_CLOCK,
            random=Random(5),
            over=asyncio.get_running_loop().create_future(),
            spawn=asyncio.ensure_future,
            alive=lambda: {"a": A, "b": B},
            replicas=self.replicas,
            record=self._record,
        )
        self.runs = RunRegistry(self.cluster)
        self.executor = Executor(context, self.runs)
        for info in (A, B):
            write(self.cluster, steps.register, info, Home())
        self.running = Running(replace(past(self.cluster.history[planned.reconfiguration]), moves=()))
        self.runs.keep(self.running)
        self.shared: dict[str, Any] = {
            "deployed": self.cluster.operator(SPEC.name),
            "target": B,
            "replicas": self.replicas,
            "hooks": self.executor.hooks(self.running, planned),
            "settings": context.settings,
            "clock": SYSTEM_CLOCK,
            "random": Random(5),
        }

    async def _record(self, work: Any, *arguments: Any) -> Any:
        return write(self.cluster, work, *arguments)

    async def moved(self, planned: PlannedMove) -> Reconfiguration:
        machine = MoveRunner.machine_for(planned)
        runner = MoveRunner(planned=planned, source=A, machine=machine, newest_epoch=lambda: 1, **self.shared)
        self.running.strategy = STRATEGIES[planned.strategy]
        self.running.runners, self.running.rounds = [runner], [[runner]]
        await asyncio.wait_for(self.executor.run(self.running), 10)
        return self.running.report()

    async def taken_over(self, planned: PlannedTakeover) -> Reconfiguration:
        runner = TakeoverRunner(planned=planned, machine=f.Takeover(P, 2), **self.shared)
        self.running.runners = [runner]
        await asyncio.wait_for(runner.run(), 10)
        self.runs.settle(self.running, self.cluster.history[planned.reconfiguration].state)
        return self.running.report()


def told_twice(ledger: Ledger, planned: Change, fails: bool) -> tuple[Reconfiguration, Reconfiguration]:
    async def run() -> Reconfiguration:
        first = First(ledger, planned, fails)
        if isinstance(planned, PlannedMove):
            return await first.moved(planned)
        return await first.taken_over(planned)

    before = asyncio.run(run())
    return before, RunRegistry(Written.read(ledger)).found("r").report()


def set_of(move: MoveReport) -> set[str]:
    """Returns the names of the fields that are set."""
    return {each.name for each in fields(move) if getattr(move, each.name) not in (0, "", None)}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("strategy", [StrategyName.WARM_UP, StrategyName.STOP_AND_RESTART])
def test_a_move(ledger: Ledger, strategy: StrategyName, fails: bool) -> None:
    planned = PlannedMove("r", P, "a", "b", 1, 2, strategy, MoveOptions(1e9 if strategy == "warm-up" else None))
    before, after = told_twice(ledger, planned, fails)
    assert before.to_dict() == after.to_dict()
    assert (after.state, after.moves[0].state) == (("FAILED", "ABORTED") if fails else ("COMPLETED", "COMPLETED"))


def test_nothing_of_a_move_is_told_by_nothing(ledger: Ledger) -> None:
    measured = {"bandwidth", "base_bytes", "change_rate", "rtt_ms", "bytes_stored", "rounds", "duration_s"}
    planned = PlannedMove("r", P, "a", "b", 1, 2, StrategyName.WARM_UP, MoveOptions(1e9))
    (move,) = told_twice(ledger, planned, False)[1].moves
    assert set_of(move) >= measured | {"started_us", "fenced_us", "digest", "epoch"}


def test_an_error_is_told_with_all_that_it_says(ledger: Ledger) -> None:
    planned = PlannedMove("r", P, "a", "b", 1, 2, StrategyName.WARM_UP)
    (move,) = told_twice(ledger, planned, True)[1].moves
    assert move.error == "transfer_corrupt: a file arrived damaged (file=1.sst): see the link"


def test_an_operator_that_was_stopped_paused_until_its_last_move_had_ended(ledger: Ledger) -> None:
    planned = PlannedMove("r", P, "a", "b", 1, 2, StrategyName.STOP_AND_RESTART)
    (move,) = told_twice(ledger, planned, False)[1].moves
    assert move.pause_ms > move.duration_s * 1e3, "the move itself, and what came before and after it"


@pytest.mark.parametrize("fails", [False, True])
def test_a_take_over(ledger: Ledger, fails: bool) -> None:
    planned = PlannedTakeover("r", P, "a", "b", 1, 2, How.CHECKPOINT)
    before, after = told_twice(ledger, planned, fails)
    assert before.to_dict() == after.to_dict()
    (move,) = after.moves
    assert (after.kind, after.state) == ("failover", "FAILED" if fails else "COMPLETED")
    assert move.state == ("ABANDONED" if fails else "COMPLETED")
    assert set_of(move) >= {"duration_s", "started_us", "note"} | ({"fault"} if fails else {"epoch"})


def test_what_has_no_bound(ledger: Ledger) -> None:
    cluster = Written(ledger)
    deploy(cluster, SPEC, dict.fromkeys(range(4), "a"))
    planned = PlannedMove("r", P, "a", "b", 1, 2, StrategyName.WARM_UP)
    write(cluster, steps.plan_moves, [planned])
    error = Unavailable("the source died", remedy="wait")
    report = MoveReport("r-0", 0, "a", "b", "ABORTED", "warm-up", predicted_pause_ms=float("inf"), fault=error)
    write(cluster, steps.move_aborted, planned, error.to_wire(), report_to_record(report))
    (move,) = RunRegistry(Written.read(ledger)).found("r").report().moves
    assert move.to_dict() == report.to_dict()
