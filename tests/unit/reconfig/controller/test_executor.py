"""One move's error ends no other move, and no reconfiguration is over while a move of it is open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig import migration as m
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.executor import Executor
from reconfig.controller.history import planned_report
from reconfig.controller.move_runner import MoveRunner
from reconfig.controller.run_registry import Running, RunRegistry
from reconfig.policies import STRATEGIES, StrategyName
from reconfig.work import PlannedMove
from stateflow.clock import ManualClock
from stateflow.errors import HoldLost, StateflowError, Unavailable
from stateflow.ledger import Ledger
from stateflow.reports import Reconfiguration
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId

SPEC = OperatorSpec("Op", "m:Op", 3, ("k",), b"", "[]")
AWAY = Unavailable("it is away", remedy="none")
Fails = Callable[["Carried", int], None]


class Carried:
    """Three moves: two in the first round, one in the second. The first one fails once by ``fails``."""

    def __init__(self, ledger: Ledger, strategy: StrategyName, fails: Fails) -> None:
        self.cluster = ClusterState(ledger)
        self.cluster.finish_deployment(self.cluster.plan_deployment(SPEC, dict.fromkeys(range(3), "a")))
        moves = [
            PlannedMove("r", PartitionId("Op", n), "a", "b", 1, 2, strategy, round=number)
            for n, number in ((0, 0), (1, 0), (2, 1))
        ]
        self.cluster.plan_moves(moves)
        self.fails, self.attempts, self.checkpoint_fails = fails, [0, 0, 0], False
        self.over: asyncio.Future[StateflowError] = asyncio.get_running_loop().create_future()
        context: Any = SimpleNamespace(
            cluster=self.cluster,
            settings=ControllerSettings(takeover_retry_s=0.001, concurrent_moves=1),
            clock=ManualClock(1),
            over=self.over,
            spawn=asyncio.ensure_future,
            alive=dict,
            replicas=SimpleNamespace(hold=self._asked, checkpoint=self._asked),
            record=self._record,
        )
        self.runs = RunRegistry(self.cluster)
        self.executor = Executor(context, self.runs)
        self.executor.runner = self._runner  # type: ignore[method-assign]
        self.running = Running(Reconfiguration("r", "Op", "RUNNING", (), 0.0), STRATEGIES[strategy])
        runners = [self._runner(self.running, move, MoveRunner.machine_for(move)) for move in moves]
        self.running.runners = list(runners)
        self.running.rounds = [runners[:2], runners[2:]]
        self.running.go.set()

    async def _record(self, work: Any, *arguments: Any) -> Any:
        return work(self.cluster, *arguments)

    async def _asked(self, *_: object) -> None:
        if self.checkpoint_fails:
            raise AWAY

    def _runner(self, _: Running, planned: PlannedMove, machine: m.Move) -> Any:
        async def run(first: list[m.Instruction] | None = None) -> None:
            number = planned.partition.partition
            self.attempts[number] += 1
            if machine.error is not None:
                self.cluster.move_aborted(planned, machine.error.to_wire(), {})
                return
            await asyncio.sleep(0.001)
            if number == 0 and self.attempts[0] == 1:
                self.fails(self, number)
            self.cluster.grant(planned)
            self.cluster.move_owned(planned, {})
            machine.phase = m.Phase.COMPLETED

        report = planned_report(planned)
        return SimpleNamespace(planned=planned, machine=machine, handle=machine.handle, report=report, run=run)


def carried(
    tmp_path: Path, fails: Fails, scenario: Callable[[Carried], Coroutine[Any, Any, None]], strategy: StrategyName
) -> None:
    async def run() -> None:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            await scenario(Carried(ledger, strategy, fails))

    asyncio.run(run())


def fault(_: Carried, __: int) -> None:
    raise ZeroDivisionError


def refused(_: Carried, __: int) -> None:
    raise AWAY


@pytest.mark.parametrize("fails", [fault, refused])
@pytest.mark.parametrize("strategy", [StrategyName.FLUID, StrategyName.WARM_UP, StrategyName.STOP_AND_RESTART])
def test_a_move_begins_again_and_the_others_go_on(tmp_path: Path, fails: Fails, strategy: StrategyName) -> None:
    async def scenario(it: Carried) -> None:
        await asyncio.wait_for(it.executor.run(it.running), 10)
        assert it.attempts == [2, 1, 1]
        assert it.cluster.open_moves == {}
        assert it.running.state == "COMPLETED"

    carried(tmp_path, fails, scenario, strategy)


def test_a_term_that_ends_settles_nothing(tmp_path: Path) -> None:
    def lost(it: Carried, _: int) -> None:
        error = HoldLost("another leads", remedy="none")
        it.over.set_result(error)
        raise error

    async def scenario(it: Carried) -> None:
        await asyncio.wait_for(it.executor.run(it.running), 10)
        assert it.running.state == "RUNNING"
        assert it.attempts == [1, 1, 0]

    carried(tmp_path, lost, scenario, StrategyName.FLUID)


def test_a_checkpoint_that_fails_ends_the_moves(tmp_path: Path) -> None:
    async def scenario(it: Carried) -> None:
        it.checkpoint_fails = True
        await asyncio.wait_for(it.executor.run(it.running), 10)
        assert it.cluster.open_moves == {}
        assert it.running.state == "FAILED"

    carried(tmp_path, fault, scenario, StrategyName.STOP_AND_RESTART)


def test_what_is_paused_takes_no_turn_from_others(tmp_path: Path) -> None:
    async def scenario(it: Carried) -> None:
        it.running.go.clear()
        running = asyncio.ensure_future(it.executor.run(it.running))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            async with it.executor._slots:
                assert it.attempts == [0, 0, 0]
                it.running.go.set()
            await running
        assert it.attempts == [1, 1, 1]

    carried(tmp_path, lambda *_: None, scenario, StrategyName.WARM_UP)
