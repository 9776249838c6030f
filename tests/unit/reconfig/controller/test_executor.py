"""Execution of reconfigurations: one move's error ends no other move, and no reconfiguration ends before its moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.executor import Executor, Running, RunRegistry
from reconfig.controller.folds import Home
from reconfig.controller.history import planned_report
from reconfig.controller.runners import MoveRunner
from reconfig.decisions import migration as m
from reconfig.decisions.budget import MOVES_ENOUGH, Measured, predicted_pause_ms
from reconfig.decisions.plan import STRATEGIES, Part, PlannedMove, StrategyName
from stateflow.clock import ManualClock
from stateflow.errors import HoldLost, StateflowError, Unavailable
from stateflow.ledger import Ledger
from stateflow.reports import Reconfiguration
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.writing import Written, deploy, write

SPEC = OperatorSpec("Op", "m:Op", 3, ("k",), b"", "[]")
AWAY = Unavailable("it is away", remedy="none")
Fails = Callable[["Carried", int], None]


class Carried:
    """Three moves: two in the first round, one in the second. The first one fails once by ``fails``."""

    def __init__(self, ledger: Ledger, strategy: StrategyName, fails: Fails) -> None:
        self.cluster = Written(ledger)
        for name in "ab":
            write(self.cluster, steps.register, ReplicaInfo(name, "cloud", "127.0.0.1:1"), Home())
        deploy(self.cluster, SPEC, dict.fromkeys(range(3), "a"))
        moves = [
            PlannedMove("r", PartitionId("Op", n), "a", "b", 1, 2, strategy, round=number)
            for n, number in ((0, 0), (1, 0), (2, 1))
        ]
        write(self.cluster, steps.plan_moves, moves)
        self.moves, self.withdrawn = moves, list[int]()
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
        self.runs.keep(self.running)

    async def _record(self, work: Any, *arguments: Any) -> Any:
        return write(self.cluster, work, *arguments)

    async def _asked(self, *_: object) -> None:
        if self.checkpoint_fails:
            raise AWAY

    def _runner(self, _: Running, planned: PlannedMove, machine: m.Move) -> Any:
        async def run(first: list[m.Instruction] | None = None) -> None:
            number = planned.partition.partition
            self.attempts[number] += 1
            if machine.error is not None:
                write(self.cluster, steps.move_aborted, planned, machine.error.to_wire(), {})
                return
            await asyncio.sleep(0.001)
            if number == 0 and self.attempts[0] == 1:
                self.fails(self, number)
            write(self.cluster, steps.grant, planned)
            write(self.cluster, steps.move_owned, planned, {})
            machine.phase = m.Phase.COMPLETED

        async def withdraw() -> None:
            machine.handle(m.Cancel())
            assert machine.error is not None
            self.withdrawn.append(planned.partition.partition)
            write(self.cluster, steps.move_aborted, planned, machine.error.to_wire(), {})

        report = planned_report(planned)
        return SimpleNamespace(
            planned=planned,
            machine=machine,
            handle=machine.handle,
            report=report,
            run=run,
            withdraw=withdraw,
            cancel=lambda: None,
            carry_over=lambda _: None,
            is_moot=False,
        )


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
        other = replace(it.moves[0], reconfiguration="other")
        write(it.cluster, steps.plan_moves, [other])
        it.runs.keep(Running(Reconfiguration("other", "Op", "RUNNING", (), 0.0)))
        it.runs.pause(it.running)
        running = asyncio.ensure_future(it.executor.run(it.running))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            async with it.executor.queue.turn(Part("other"), other) as begins:
                assert begins
                assert it.attempts == [0, 0, 0]
                it.runs.resume(it.running)
                await asyncio.sleep(0.01)
                assert it.attempts == [0, 0, 0], "one at a time"
            await running
        assert it.attempts == [1, 1, 1]

    carried(tmp_path, lambda *_: None, scenario, StrategyName.WARM_UP)


def test_what_waits_and_is_planned_anew_goes_there(tmp_path: Path) -> None:
    async def scenario(it: Carried) -> None:
        write(it.cluster, steps.register, ReplicaInfo("c", "cloud", "127.0.0.1:2"), Home())
        it.runs.pause(it.running)
        running = asyncio.ensure_future(it.executor.run(it.running))
        await asyncio.sleep(0.01)
        write(it.cluster, steps.retarget, it.moves[1], "c", "b does not answer")
        it.executor.queue.leave(it.moves[1])
        async with asyncio.timeout(10):
            while it.running.runners[1].planned.target != "c":
                await asyncio.sleep(0.001)
            it.runs.resume(it.running)
            await running
        assert it.cluster.operator("Op").assignment.owners == ("b", "c", "b")
        assert (it.attempts, it.withdrawn) == ([1, 1, 1], [])

    carried(tmp_path, lambda *_: None, scenario, StrategyName.WARM_UP)


def test_what_is_being_planned_anew_does_not_begin_meanwhile(tmp_path: Path) -> None:
    async def scenario(it: Carried) -> None:
        it.runs.pause(it.running)
        running = asyncio.ensure_future(it.executor.run(it.running))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            with it.executor.queue.withheld(it.moves[0]) as waits:
                assert waits
                it.runs.resume(it.running)
                while it.attempts != [0, 1, 0]:
                    await asyncio.sleep(0.001)
            await running
            with it.executor.queue.withheld(it.moves[0]) as waits:
                assert not waits, "it has ended"
        assert it.attempts == [1, 1, 1]

    carried(tmp_path, lambda *_: None, scenario, StrategyName.WARM_UP)


def test_what_waits_and_has_lost_its_source_ends_at_once(tmp_path: Path) -> None:
    """A waiting move that has lost its source ends at once.

    The partition used to be taken over only when the move's turn came.
    """

    async def scenario(it: Carried) -> None:
        it.runs.pause(it.running)
        running = asyncio.ensure_future(it.executor.run(it.running))
        await asyncio.sleep(0.01)
        it.executor.queue.leave(it.moves[1])
        it.running.runners[2].is_moot = True  # type: ignore[union-attr, misc]
        async with asyncio.timeout(10):
            while it.withdrawn != [1]:
                await asyncio.sleep(0.001)
            it.executor.queue.leave(it.moves[0])
            await running
        assert (it.withdrawn, it.attempts) == ([1, 0, 2], [0, 0, 0])

    carried(tmp_path, lambda *_: None, scenario, StrategyName.WARM_UP)


def test_what_waits_and_is_cancelled_does_not_begin(tmp_path: Path) -> None:
    async def scenario(it: Carried) -> None:
        it.runs.pause(it.running)
        running = asyncio.ensure_future(it.executor.run(it.running))
        await asyncio.sleep(0.01)
        write(it.cluster, steps.cancel, "r")
        assert it.runs.cancel("r").state == "RUNNING", "until each has ended"
        await asyncio.wait_for(running, 10)
        assert it.attempts == [0, 0, 0]
        assert it.withdrawn == [0, 1, 2]
        assert it.running.state == "CANCELLED"
        batch = it.cluster.history["r"].batch
        assert batch is not None
        assert batch.status == "CANCELLED"

    carried(tmp_path, lambda *_: None, scenario, StrategyName.WARM_UP)


@pytest.mark.parametrize(
    ("measured", "true_ms"),
    [
        (Measured(50_000, 0.0, 1e6, 4.0), 12.0),
        (Measured(50_000, 5e5, 1e6, 4.0), 12.0),
        (Measured(50_000, 9e5, 1e6, 4.0), 3.0),
        (Measured(50_000, 5e5, 1e6, 4.0, 2.0), 12.0),
        (Measured(0, 0.0, 0.0, 4.0, 20.0), 25.0),
        (Measured(50_000, 1e6, 0.0, 4.0), 12.0),
    ],
)
def test_the_fixed_cost_that_is_learnt_predicts_the_pauses_it_was_learnt_from(
    tmp_path: Path, measured: Measured, true_ms: float
) -> None:
    async def scenario(carried: Carried) -> None:
        (runner, *_), pause_ms = carried.running.runners, predicted_pause_ms(measured, true_ms)
        for _ in range(MOVES_ENOUGH):
            fixed_ms = carried.executor.cost().expected_ms
            machine = replace(runner.machine, fixed_ms=fixed_ms, phase=m.Phase.CATCHING_UP, settle_s=0.0)
            machine.handle(m.CaughtUp(measured, 0.0))
            machine.phase = m.Phase.COMPLETED
            report = replace(runner.report, predicted_pause_ms=machine.predicted_pause_ms, pause_ms=pause_ms)
            done: Any = SimpleNamespace(planned=runner.planned, machine=machine, report=report)
            carried.executor._learn(done)
        cost = carried.executor.cost()
        assert cost.expected_ms == pytest.approx(true_ms)
        assert predicted_pause_ms(measured, cost.expected_ms) == pytest.approx(pause_ms)

    carried(tmp_path, fault, scenario, StrategyName.WARM_UP)


def test_change_rates_of_an_undeployed_operator_are_forgotten(tmp_path: Path) -> None:
    async def scenario(carried: Carried) -> None:
        carried.executor.change_rates = {PartitionId("Op", 0): 1.0, PartitionId("Other", 0): 2.0}
        carried.executor.undeployed("Op")
        assert carried.executor.change_rates == {PartitionId("Other", 0): 2.0}

    carried(tmp_path, fault, scenario, StrategyName.WARM_UP)
