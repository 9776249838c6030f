"""Carries out reconfigurations, round by round, and learns from their moves how long later ones will take."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial

from reconfig import migration as m
from reconfig.batch import Limits, Part
from reconfig.budget import Experience, FixedCost
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import ControllerContext
from reconfig.controller.history import report_to_record
from reconfig.controller.move_runner import MoveRunner
from reconfig.controller.run_registry import Running, RunRegistry
from reconfig.controller.runner import Hooks
from reconfig.controller.spans import reconfiguring
from reconfig.controller.turns import Turns
from reconfig.links import Links
from reconfig.work import Copy, Planned, PlannedMove
from stateflow.errors import BudgetUnreachable, StateflowError
from stateflow.ledger import RecordState
from stateflow.reports import MoveReport
from stateflow.rpc.wire import unexpected
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: duration of one hold of a stopped operator, in seconds; the hold is renewed before it ends
HOLD_S = 3.0


class Executor:
    """Runs the moves of reconfigurations.

    ``bandwidth``: as the last completed move measured it, in bytes a second; 0: not measured yet. ``change_rates``: by
    partition, in bytes a second.
    """

    def __init__(self, context: ControllerContext, runs: RunRegistry) -> None:
        self._context, self._runs = context, runs
        self.bandwidth, self.links = 0.0, Links()
        self.change_rates: dict[PartitionId, float] = {}
        settings = context.settings
        self.turns = Turns(
            lambda batch: context.cluster.history[batch].limits,
            Limits(settings.concurrent_moves, settings.moves_per_node, settings.moves_per_link),
            runs.goes_on,
            lambda moves: context.record(ClusterState.begin_moves, moves),
            context.spawn,
        )
        runs.on_change, runs.withdraw = self.turns.look, self.turns.withdraw
        self._experience = Experience()
        self._cutovers: dict[str, asyncio.Lock] = {}  # by source
        #: returns the id of the move by which a replica is a standby of a partition; empty: it is none
        self.standby_move: Callable[[PartitionId, str], str] = lambda _, __: ""
        #: called when a partition has a new owner
        self.on_owned: Callable[[PartitionId], None] = lambda _: None
        #: called when a move's target has lost the partition: with the epoch it owned it at, and the reason
        self.on_lost: Callable[[PartitionId, int, StateflowError], None] = lambda *_: None

    def cost(self) -> FixedCost:
        return self._experience.cost(self._context.clock.monotonic())

    def hooks(self, running: Running, planned: Planned) -> Hooks:
        async def record_grant() -> None:
            await self._context.record(ClusterState.grant, planned)

        async def record_owned(report: MoveReport) -> None:
            await self._context.record(ClusterState.move_owned, planned, report_to_record(report))
            self.on_owned(planned.partition)

        async def record_aborted(error: StateflowError, report: MoveReport, distrusted: bool) -> None:
            told = report_to_record(report) | ({"distrusted": True} if distrusted else {})
            await self._context.record(ClusterState.move_aborted, planned, error.to_wire(), told)

        cutover = self._cutovers.setdefault(planned.source, asyncio.Lock())
        lost = partial(self.on_lost, planned.partition, planned.granted_epoch)
        return Hooks(record_grant, record_owned, record_aborted, running.wake, cutover, lost)

    def runner(self, running: Running, planned: Copy, machine: m.Move) -> MoveRunner:
        return MoveRunner(
            planned=planned,
            deployed=self._context.cluster.operator(planned.partition.operator),
            source=self._context.cluster.roster.replicas[planned.source],
            target=self._context.cluster.roster.replicas[planned.target],
            replicas=self._context.replicas,
            hooks=self.hooks(running, planned),
            settings=self._context.settings,
            clock=self._context.clock,
            newest_epoch=lambda: self._context.cluster.next_epoch(planned.partition) - 1,
            standby_move=lambda: self.standby_move(planned.partition, planned.target),
            machine=machine,
            cost=self.cost,
        )

    async def run(self, running: Running, first: Mapping[str, list[m.Instruction]] | None = None) -> None:
        """Runs a reconfiguration until all its moves have ended, or the term has; then the next leader resumes it.

        Args:
            first: by item, instructions of moves that an earlier controller had granted.
        """
        with reconfiguring(running.id, running.told.operator, str(running.told.kind)):
            if running.strategy is not None and running.strategy.stops:
                await self._run_stopped(running, dict(first or {}))
            else:
                await self._run_rounds(running, first or {})
        if not self._context.over.done():
            self._runs.settle(running, self._context.cluster.history[running.id].state)

    async def _run_rounds(self, running: Running, first: Mapping[str, list[m.Instruction]]) -> None:
        for round_ in running.rounds:
            runs = (self._run_one(running, n, round_, first) for n in range(len(round_)))
            for result in await asyncio.gather(*runs, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result

    async def _run_one(
        self, running: Running, number: int, round_: list[MoveRunner], first: Mapping[str, list[m.Instruction]]
    ) -> None:
        """Runs one move of a round to its end.

        An error that is no event of the machine does not end the other moves: the move begins again from its records
        in the ledger, as after a restart.
        """
        resumed = first.get(round_[number].planned.item_id)
        while not self._context.over.done():
            runner = round_[number]
            try:
                if await self._run_in_turn(running, runner, resumed):
                    self._learn(runner)
                    return
            except Exception:
                if self._context.over.done():
                    return
                log.exception("move %s starts again after an unexpected error", runner.planned.move_id)
                await asyncio.sleep(self._context.settings.takeover_retry_s)
            open_move = self._context.cluster.open_moves.get(runner.planned.item_id)
            if open_move is None:
                return
            assert isinstance(open_move.planned, PlannedMove)
            machine, resumed = MoveRunner.resumed(open_move.planned, open_move.granted)
            round_[number] = again = self.runner(running, open_move.planned, machine)
            again.carry_over(runner)
            if running.cancelled:
                again.cancel()
            running.runners = [again if each is runner else each for each in running.runners]

    async def _run_in_turn(self, running: Running, runner: MoveRunner, resumed: list[m.Instruction] | None) -> bool:
        """Runs a move when its turn comes. Returns False where the move was replanned while it waited."""
        if resumed is not None or (running.strategy is not None and running.strategy.stops):
            await runner.run(resumed)  # it has begun already
            return True
        replicas, planned = self._context.cluster.roster.replicas, runner.planned
        part = Part.between(
            running.id,
            replicas[planned.source],
            replicas[planned.target],
            shared=running.strategy is not None and running.strategy.limited,
        )
        if not (running.cancelled or runner.is_moot):
            async with self.turns.turn(part, planned) as begins:
                if begins:
                    await runner.run()
                    return True
        open_move = self._context.cluster.open_moves[planned.item_id]
        if open_move.planned != planned and not (running.cancelled or runner.is_moot):
            return False
        if open_move.record.state is RecordState.NEW:
            await runner.withdraw()
        else:
            await runner.run()  # it had begun before this controller led: its target must be told of the end
        return True

    def _learn(self, runner: MoveRunner) -> None:
        report, machine = runner.report, runner.machine
        if isinstance(machine.error, BudgetUnreachable) and machine.predicted_pause_ms <= machine.max_pause_ms:
            self._experience.kept_out(self._context.clock.monotonic())
        if machine.phase is not m.Phase.COMPLETED:
            return
        self.bandwidth = report.bandwidth or self.bandwidth
        replicas, planned = self._context.cluster.roster.replicas, runner.planned
        if planned.source in replicas and planned.target in replicas:  # else one was forgotten meanwhile
            sites = replicas[planned.source].site, replicas[planned.target].site
            self.links.moved(self._context.clock.monotonic(), *sites, report.bandwidth)
        self.change_rates[runner.planned.partition] = report.change_rate
        predicted = report.predicted_pause_ms
        if predicted and math.isfinite(predicted):
            explained_ms = predicted - machine.fixed_ms
            self._experience.completed(self._context.clock.monotonic(), explained_ms, report.pause_ms)

    async def _run_stopped(self, running: Running, first: dict[str, list[m.Instruction]]) -> None:
        """Runs a reconfiguration during which no partition of the operator is served.

        It corresponds to stopping a job, restoring its state elsewhere, and starting it again.
        """
        operator = running.told.operator
        moves = [runner for round_ in running.rounds for runner in round_]
        await self._context.record(ClusterState.begin_moves, [runner.planned for runner in moves])
        began = self._context.clock.monotonic()
        holding = self._context.spawn(self._keep_holding(operator))
        try:
            await self._hold(operator, HOLD_S)
            if not (first or running.told.moves):  # else the checkpoint was taken before the first move
                try:
                    await self._checkpoint(operator)
                except Exception as error:
                    log.exception("checkpoint before reconfiguration %s failed", running.id)
                    fault = error if isinstance(error, StateflowError) else unexpected(error)
                    first |= {runner.planned.item_id: runner.handle(m.TargetFailed(fault)) for runner in moves}
            await self._run_rounds(running, first)
        finally:
            holding.cancel()
            await self._hold(operator, 0.0)
        stood_ms = (self._context.clock.monotonic() - began) * 1e3
        if not self._context.over.done():
            await self._context.record(ClusterState.operator_stood, running.id, stood_ms)
            running.stood(stood_ms)

    async def _checkpoint(self, operator: str) -> None:
        owners = sorted(set(self._context.cluster.operator(operator).assignment.owners))
        await asyncio.gather(*(self._context.replicas.checkpoint(name, operator) for name in owners))

    async def _keep_holding(self, operator: str) -> None:
        while True:
            await asyncio.sleep(HOLD_S / 3)
            await self._hold(operator, HOLD_S)

    async def _hold(self, operator: str, seconds: float) -> None:
        replicas = self._context.replicas
        calls = (replicas.hold(name, operator, seconds) for name in sorted(self._context.alive()))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, StateflowError):
                log.warning("a replica could not be told to hold %s: %s", operator, result)  # a hold ends by itself
