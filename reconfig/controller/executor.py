"""The executor of reconfigurations: gives turns to their moves, runs them round by round, and learns from them.

:class:`RunRegistry` knows all reconfigurations, as callers see them: it finds, watches, pauses and cancels them, and
remembers those that are over. :class:`MoveQueue` holds the moves that wait, and lets them begin in the order that
:mod:`reconfig.decisions.plan` decides. The ledger records that a move begins before the move begins. :class:`Executor`
runs the moves to their end, and learns how long later ones will take. A move that fails unexpectedly begins again from
its records in the ledger, as after a restart of the controller. :class:`Replanning` gives a waiting move another
target. The move cannot begin while the new target is recorded; afterwards it leaves the queue and begins again from its
records.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from reconfig.controller import steps
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import ControllerContext
from reconfig.controller.history import is_waiting, past, progress_of, report_to_record, with_downtime
from reconfig.controller.runners import Hooks, MoveRunner, Runner
from reconfig.decisions import migration as m
from reconfig.decisions.budget import Experience, FixedCost, Links, experience_of
from reconfig.decisions.placement import View, replan
from reconfig.decisions.plan import Copy, Limits, Part, Planned, PlannedMove, ReconfigurationState, Strategy, next_turns
from stateflow.errors import BudgetUnreachable, MoveConflict, MoveUnknown, StateflowError
from stateflow.ledger import RecordState
from stateflow.metrics.figures import PAUSE_BUCKETS, Histogram
from stateflow.reports import MoveReport, Reconfiguration
from stateflow.rpc.faults import unexpected
from stateflow.tracing import about, tracing
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: duration of one hold of a stopped operator, in seconds; the hold is renewed before it ends
HOLD_S = 3.0
#: seconds between two reports to a watcher: the least, and the most
WATCH_INTERVAL_S = 0.1
WATCH_IDLE_S = 10.0
#: maximum number of ended reconfigurations that stay in memory
FINISHED_KEPT = 1000


# -- Reconfigurations ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Running:
    """A reconfiguration with its moves, and the event that wakes its watchers.

    ``told`` is the report of the reconfiguration; of the moves it contains only those that have no runner, because they
    ended before this object was made. ``order`` maps move ids to positions in the plan.
    """

    told: Reconfiguration
    strategy: Strategy | None = None
    order: Mapping[str, int] = field(default_factory=dict)
    runners: list[Runner] = field(default_factory=list)
    rounds: list[list[MoveRunner]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    #: returns the fields of the report that describe limits and progress
    progress: Callable[[], Mapping[str, Any]] = dict

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def report(self) -> Reconfiguration:
        moves = [*self.told.moves, *(runner.report for runner in self.runners)]
        moves.sort(key=lambda move: self.order.get(move.id, 0))
        return replace(self.told, moves=tuple(moves), **self.progress())

    def note_downtime(self, downtime_ms: float) -> None:
        """Adds to the report how long the operator was stopped."""
        self.told = replace(self.told, moves=tuple(with_downtime(move, downtime_ms) for move in self.told.moves))
        for runner in self.runners:
            runner.report = with_downtime(runner.report, downtime_ms)
        self.wake()

    @property
    def id(self) -> str:
        return self.told.id

    @property
    def state(self) -> ReconfigurationState:
        return ReconfigurationState(self.told.state)

    @state.setter
    def state(self, state: ReconfigurationState) -> None:
        self.told = replace(self.told, state=state)

    @property
    def over(self) -> bool:
        return self.state.over


def no_such(reconfiguration: str) -> MoveUnknown:
    return MoveUnknown(f"there is no reconfiguration {reconfiguration!r}", remedy="see `stateflow reconfig list`")


class RunRegistry:
    """All reconfigurations: those that this process began or resumed, and others in the ledger."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self.running: dict[str, Running] = {}
        #: called when a reconfiguration resumes or its limits change, so that turns are assigned again
        self.on_change: Callable[[], None] = lambda: None
        #: withdraws all moves of a reconfiguration that wait for their turn
        self.withdraw: Callable[[str], None] = lambda _: None
        #: moves that have ended since this controller began, by kind and state
        self.ended: Counter[tuple[str, str]] = Counter()
        #: pauses of completed moves in seconds, by kind
        self.pauses: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(PAUSE_BUCKETS))

    def goes_on(self, reconfiguration: str) -> bool:
        return self.running[reconfiguration].state is ReconfigurationState.RUNNING

    def keep(self, running: Running) -> None:
        """Remembers a reconfiguration, and forgets ended ones beyond the newest ``FINISHED_KEPT``."""
        self.running[running.id] = running
        running.progress = partial(self._progress, running.id)
        over = [key for key, each in self.running.items() if each.over]
        for key in over[: max(0, len(over) - FINISHED_KEPT)]:
            del self.running[key]

    def _progress(self, reconfiguration: str) -> Mapping[str, Any]:
        recorded = self._cluster.history.get(reconfiguration)
        return {} if recorded is None else progress_of(recorded, self._cluster.now_us())

    def settle(self, running: Running, state: ReconfigurationState) -> None:
        running.state = state
        kind = str(running.told.kind)
        for report in (runner.report for runner in running.runners):
            self.ended[kind, str(report.state)] += 1
            if report.state == "COMPLETED" and report.pause_ms > 0:
                self.pauses[kind].observe(report.pause_ms / 1e3)
        running.changed.set()

    def found(self, reconfiguration: str) -> Running:
        """Returns a reconfiguration, under way or over. Raises MoveUnknown."""
        running = self.running.get(reconfiguration)
        if running is not None:
            return running
        if reconfiguration in self._cluster.history:
            return Running(past(self._cluster.history[reconfiguration]))
        raise no_such(reconfiguration)

    def failed(self, reconfiguration: str, allow_cancelled: bool = True) -> list[PlannedMove]:
        """Returns the failed moves of a reconfiguration, whichever process began them.

        Args:
            allow_cancelled: include moves that were cancelled by command.
        """
        recorded = self._cluster.history.get(reconfiguration)
        if recorded is None:
            return []
        left = [] if allow_cancelled else recorded.withdrawn
        return [move for move in recorded.failed if isinstance(move, PlannedMove) and move not in left]

    def cancel(self, reconfiguration: str) -> Reconfiguration:
        """Cancels a reconfiguration. Waiting moves do not begin; moves that are not past their fence roll back."""
        running = self.found(reconfiguration)
        running.cancelled = True
        for runner in running.runners:
            runner.cancel()
        self.withdraw(reconfiguration)
        self._go_on(running)
        return running.report()

    def stuck(self, reconfiguration: str) -> list[MoveRunner]:
        """Returns the stuck moves of a reconfiguration: the source may have sealed the partition, and the target does
        not own it yet.

        Raises MoveUnknown, and MoveConflict if no move is stuck.
        """
        found = [
            runner
            for runner in self.found(reconfiguration).runners
            if isinstance(runner, MoveRunner) and runner.machine.fenced
        ]
        if not found:
            raise MoveConflict(
                "the reconfiguration has no fenced move",
                remedy="cancel the reconfiguration, or wait until it has ended",
                reconfiguration=reconfiguration,
            )
        return found

    def pause(self, running: Running) -> Reconfiguration:
        """Pauses a reconfiguration. Moves that have not begun wait; moves under way complete."""
        if not running.over:
            running.state = ReconfigurationState.PAUSED
            running.wake()
        return running.report()

    def resume(self, running: Running) -> Reconfiguration:
        self._go_on(running)
        return running.report()

    def _go_on(self, running: Running) -> None:
        if running.state is ReconfigurationState.PAUSED:
            running.state = ReconfigurationState.RUNNING
        running.wake()
        self.on_change()

    def unfinished(self, reconfiguration: str) -> Running:
        """Returns a reconfiguration that is not over. Raises MoveUnknown, and MoveConflict if it is over."""
        running = self.found(reconfiguration)
        if running.over:
            raise MoveConflict(
                f"the reconfiguration has already ended, and is {running.state}",
                remedy="if it failed, retry it with `stateflow reconfig retry`",
                reconfiguration=reconfiguration,
            )
        return running

    async def watch(self, reconfiguration: str) -> AsyncIterator[Reconfiguration]:
        running = self.found(reconfiguration)
        while True:
            changed = running.changed
            report = running.report()
            over = running.over  # taken with the report: it may end while the report is sent
            yield report
            if over:
                return
            with suppress(TimeoutError):  # an unchanged report is sent again, to tell idleness from a hang
                await asyncio.wait_for(changed.wait(), WATCH_IDLE_S)
            if not running.over:
                await asyncio.sleep(WATCH_INTERVAL_S)  # moves change many times a second; watchers need not

    def moving(self) -> list[MoveRunner]:
        """Returns all moves under way, without standbys."""
        return [
            runner
            for running in self.running.values()
            if not running.over
            for runner in running.runners
            if isinstance(runner, MoveRunner) and not runner.ended.is_set()
        ]

    def history(self, limit: int = 0) -> Iterator[Reconfiguration]:
        """Yields reports of reconfigurations: first those that this process knows, then others in the ledger, newest
        first, and at most ``limit`` of them; 0: all.

        The call decides which reconfigurations are reported; each report is made when it is yielded.
        """
        known = list(reversed(self.running.values()))
        names = {running.id for running in known}
        earlier = [moves for name, moves in reversed(self._cluster.history.items()) if name not in names]
        everything = itertools.chain((running.report() for running in known), map(past, earlier))
        return itertools.islice(everything, limit or None)


# -- Moves that wait -------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Ticket:
    part: Part
    planned: Planned
    turn: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    withheld: bool = False


class MoveQueue:
    """The queue of moves: those that wait for their turn, and those that run.

    Args:
        limits: returns the limits of a batch, by its id.
        of_all: limits over all batches together.
        goes_on: tells whether a batch is running, and not paused or over.
        begin: records that moves begin, and returns when the record is durable.
    """

    def __init__(
        self,
        limits: Callable[[str], Limits],
        of_all: Limits,
        goes_on: Callable[[str], bool],
        begin: Callable[[Sequence[Planned]], Awaitable[Any]],
        spawn: Callable[[Any], Any],
    ) -> None:
        self._limits, self._of_all, self._goes_on = limits, of_all, goes_on
        self._begin, self._spawn = begin, spawn
        self._waiting: dict[str, _Ticket] = {}  # by ledger item, in the order of their arrival
        self._under_way: dict[str, _Ticket] = {}
        self._looks = False  # a check is scheduled for this pass of the event loop

    @asynccontextmanager
    async def turn(self, part: Part, planned: Planned) -> AsyncIterator[bool]:
        """Waits for the turn of a move, and holds it to the end of the block.

        Yields False if the move was withdrawn and must not begin. Raises the ledger's error if the ledger cannot record
        the begin of the move.
        """
        ticket = _Ticket(part, planned)
        self._waiting[planned.item_id] = ticket
        self.look()
        try:
            yield await ticket.turn
        finally:
            for those in (self._waiting, self._under_way):
                if those.get(planned.item_id) is ticket:  # and not the ticket of a move planned in its place
                    del those[planned.item_id]
            self.look()

    def withdraw(self, batch: str) -> None:
        """Withdraws all waiting moves of a batch: they do not begin."""
        left = [item for item, each in self._waiting.items() if each.part.batch == batch]
        for item in left:
            _tell(self._waiting.pop(item), False)

    def has(self, planned: Planned) -> bool:
        """Tells whether a move waits for its turn and has not been withdrawn."""
        return self._ticket(planned) is not None

    def _ticket(self, planned: Planned) -> _Ticket | None:
        """Returns the ticket of a waiting move; None: the move does not wait, or its turn is already decided."""
        ticket = self._waiting.get(planned.item_id)
        return ticket if ticket is not None and ticket.planned == planned and not ticket.turn.done() else None

    @contextmanager
    def withheld(self, planned: Planned) -> Iterator[bool]:
        """Keeps a move from beginning during the block. Yields False if the move does not wait, or has begun."""
        ticket = self._ticket(planned)
        if ticket is None:
            yield False
            return
        ticket.withheld = True
        try:
            yield True
        finally:
            ticket.withheld = False
            self.look()

    def leave(self, planned: Planned) -> None:
        """Withdraws a waiting move, which then does not begin. A move that does not wait is left alone."""
        if (ticket := self._ticket(planned)) is not None:
            _tell(ticket, False)

    def look(self) -> None:
        """Schedules a check of which moves may begin. Call it when a batch is paused or resumed, or its limits change.

        One check serves all moves that arrive or end together, because a round may have thousands. It runs in an empty
        context, so that its records have no author: no caller asked for these moves to begin now.
        """
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look, context=Context())

    def _look(self) -> None:
        self._looks = False
        batches = {each.part.batch for each in self._waiting.values()}
        going = {batch for batch in batches if self._goes_on(batch)}
        waiting = [
            each
            for each in self._waiting.values()
            if each.part.batch in going and not (each.withheld or each.turn.done())
        ]
        if not waiting:
            return
        limits = {batch: self._limits(batch) for batch in going}
        under_way = [each.part for each in self._under_way.values()]
        places = next_turns([each.part for each in waiting], under_way, limits, self._of_all)
        chosen = [waiting[place] for place in places]
        if chosen:
            for ticket in chosen:
                item = ticket.planned.item_id
                self._under_way[item] = self._waiting.pop(item)
            self._spawn(self._let_begin(chosen))

    async def _let_begin(self, chosen: Sequence[_Ticket]) -> None:
        """Records in one step that the chosen moves begin, and wakes the tasks that wait for their turns."""
        try:
            await self._begin([each.planned for each in chosen])
        except Exception as error:  # noqa: BLE001 - each waiting task raises it
            for ticket in chosen:
                if not ticket.turn.done():
                    ticket.turn.set_exception(error)
            return
        for ticket in chosen:
            _tell(ticket, True)


def _tell(ticket: _Ticket, begins: bool) -> None:
    if not ticket.turn.done():  # otherwise no task waits for it any more
        ticket.turn.set_result(begins)


# -- Runs ------------------------------------------------------------------------------------------------------------


@contextmanager
def reconfiguring(reconfiguration: str, operator: str, kind: str) -> Iterator[None]:
    """Opens the span of a reconfiguration, around all its moves."""
    ids = {"operator": operator, "reconfiguration": reconfiguration}
    traces = tracing()
    with about(lambda: ids):
        if traces is None:
            yield
        else:
            with traces.span("stateflow.reconfiguration", kind="internal", cause=kind, **ids):
                yield


class Executor:
    """Runs the moves of reconfigurations.

    ``bandwidth`` is in bytes a second, measured by the last completed move; 0: not measured yet. ``change_rates`` are
    the bytes written a second, by partition.
    """

    def __init__(self, context: ControllerContext, runs: RunRegistry) -> None:
        self._context, self._runs = context, runs
        self.bandwidth, self.links = 0.0, Links()
        self.change_rates: dict[PartitionId, float] = {}
        settings = context.settings
        self.queue = MoveQueue(
            lambda batch: context.cluster.history[batch].limits,
            Limits(settings.concurrent_moves, settings.moves_per_node, settings.moves_per_link),
            runs.goes_on,
            lambda moves: context.record(steps.begin_moves, moves),
            context.spawn,
        )
        runs.on_change, runs.withdraw = self.queue.look, self.queue.withdraw
        self._experience = Experience()
        self._cutovers: dict[str, asyncio.Lock] = {}  # by source
        #: returns the id of the move that makes a replica a standby of a partition; empty: it is not a standby
        self.standby_move: Callable[[PartitionId, str], str] = lambda _, __: ""
        #: called when a partition has a new owner
        self.on_owned: Callable[[PartitionId], None] = lambda _: None
        #: called when a move's target has lost the partition, with the epoch of its ownership and the reason
        self.on_lost: Callable[[PartitionId, int, StateflowError], None] = lambda *_: None

    def cost(self) -> FixedCost:
        return self._experience.cost(self._context.clock.monotonic())

    def undeployed(self, operator: str) -> None:
        """Forgets the partitions of an undeployed operator."""
        self.change_rates = {each: rate for each, rate in self.change_rates.items() if each.operator != operator}

    def hooks(self, running: Running, planned: Planned) -> Hooks:
        async def record_grant() -> None:
            await self._context.record(steps.grant, planned)

        async def record_owned(report: MoveReport) -> None:
            await self._context.record(steps.move_owned, planned, report_to_record(report))
            self.on_owned(planned.partition)

        async def record_aborted(error: StateflowError, report: MoveReport) -> None:
            await self._context.record(steps.move_aborted, planned, error.to_wire(), report_to_record(report))

        cutover = self._cutovers.setdefault(planned.source, asyncio.Lock())
        lost = partial(self.on_lost, planned.partition, planned.granted_epoch)
        return Hooks(record_grant, record_owned, record_aborted, running.wake, cutover, lost)

    def runner(self, running: Running, planned: Copy, machine: m.Move) -> MoveRunner:
        made = MoveRunner(
            planned=planned,
            deployed=self._context.cluster.operator(planned.partition.operator),
            source=self._context.cluster.roster.replicas[planned.source],
            target=self._context.cluster.roster.replicas[planned.target],
            replicas=self._context.replicas,
            hooks=self.hooks(running, planned),
            settings=self._context.settings,
            clock=self._context.clock,
            random=self._context.random,
            newest_epoch=lambda: self._context.cluster.next_epoch(planned.partition) - 1,
            standby_move=lambda: self.standby_move(planned.partition, planned.target),
            current=lambda info: self._context.cluster.roster.replicas.get(info.name, info),
            machine=machine,
            cost=self.cost,
        )
        open_move = self._context.cluster.open_moves.get(planned.item_id)
        if open_move is not None and open_move.resolution:
            made.give_up()
        return made

    async def run(self, running: Running, first: Mapping[str, list[m.Instruction]] | None = None) -> None:
        """Runs a reconfiguration until all its moves have ended. If the term ends first, the next leader resumes it.

        Args:
            first: instructions, by item, for moves that an earlier controller had granted.
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

        An unexpected error does not affect the other moves: this move begins again from its records in the ledger, as
        after a restart.
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
        """Runs a move when its turn comes. Returns False if the move was replanned while it waited."""
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
            async with self.queue.turn(part, planned) as begins:
                if begins:
                    await runner.run()
                    return True
        open_move = self._context.cluster.open_moves[planned.item_id]
        if open_move.planned != planned and not (running.cancelled or runner.is_moot):
            return False
        if open_move.record.state is RecordState.NEW:
            await runner.withdraw()
        else:
            await runner.run()  # it began before this controller led, so its target must be told that it ends
        return True

    def _learn(self, runner: MoveRunner) -> None:
        report, machine = runner.report, runner.machine
        if isinstance(machine.error, BudgetUnreachable) and machine.predicted_pause_ms <= machine.max_pause_ms:
            self._experience.kept_out(self._context.clock.monotonic())
        if machine.phase is not m.Phase.COMPLETED:
            return
        self.bandwidth = report.bandwidth or self.bandwidth
        replicas, planned = self._context.cluster.roster.replicas, runner.planned
        if planned.source in replicas and planned.target in replicas:  # unless one was forgotten
            sites = replicas[planned.source].site, replicas[planned.target].site
            self.links.moved(self._context.clock.monotonic(), *sites, report.bandwidth)
        self.change_rates[runner.planned.partition] = report.change_rate
        shown = None if machine.measured is None else experience_of(machine.measured, report.pause_ms)
        if shown is not None:
            self._experience.completed(self._context.clock.monotonic(), *shown)

    async def _run_stopped(self, running: Running, first: dict[str, list[m.Instruction]]) -> None:
        """Runs a reconfiguration during which no partition of the operator is served.

        This corresponds to stopping a job, restoring its state elsewhere, and starting the job again.
        """
        operator = running.told.operator
        moves = [runner for round_ in running.rounds for runner in round_]
        await self._context.record(steps.begin_moves, [runner.planned for runner in moves])
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
        downtime_ms = (self._context.clock.monotonic() - began) * 1e3
        if not self._context.over.done():
            await self._context.record(steps.operator_downtime, running.id, downtime_ms)
            running.note_downtime(downtime_ms)

    async def _checkpoint(self, operator: str) -> None:
        owners = sorted(set(self._context.cluster.operator(operator).assignment.owners))
        await asyncio.gather(*(self._context.replicas.checkpoint(name, operator) for name in owners))

    async def _keep_holding(self, operator: str) -> None:
        while True:
            await asyncio.sleep(HOLD_S / 3)
            await self._hold(operator, HOLD_S)

    async def _hold(self, operator: str, seconds: float) -> None:
        replicas = self._context.replicas
        names = sorted(self._context.alive())
        calls = (replicas.hold(name, operator, seconds) for name in names)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for name, result in zip(names, results, strict=True):
            if isinstance(result, StateflowError):  # a hold ends by itself
                log.warning("replica %s could not be told to hold batches of operator %s: %s", name, operator, result)


# -- Other targets ---------------------------------------------------------------------------------------------------


class Replanning:
    """Gives moves that wait for their turn another target, see :func:`reconfig.decisions.placement.replan`."""

    def __init__(self, context: ControllerContext, executor: Executor) -> None:
        self._context, self._executor = context, executor

    async def watch(self) -> None:
        await self._context.again_and_again(self._look, "waiting moves not replanned")

    async def _look(self) -> None:
        if not self._waiting():
            return
        cluster, members = self._context.cluster, self._context.members
        async with self._context.planning:
            gone = {name for name in cluster.roster.replicas if members.lapsed(name) and not members.is_opening(name)}
            sites = {name: info.site for name, info in cluster.roster.replicas.items()}
            view = View({}, list(self._context.fit().values()), allowed=cluster.allowed_sites())
            found = replan(self._waiting(), view, gone, sites, self._shares())
        able = await self._context.learnt({(each.target, each.move.partition.operator) for each in found})
        async with self._context.planning:
            fit = self._context.fit()
            for each in found:
                if each.target not in fit or (each.target, each.move.partition.operator) not in able:
                    continue
                with self._executor.queue.withheld(each.move) as waits:
                    if not (waits and self._waits(each.move)):
                        continue  # its turn came first
                    await self._context.record(steps.retarget, each.move, each.target, each.reason)
                    log.warning("move %s retargeted to %s: %s", each.move.move_id, each.target, each.reason)
                    self._executor.queue.leave(each.move)

    def _waiting(self) -> list[PlannedMove]:
        moves = (each.planned for each in self._context.cluster.open_moves.values())
        return [move for move in moves if isinstance(move, PlannedMove) and self._waits(move)]

    def _waits(self, move: PlannedMove) -> bool:
        open_move = self._context.cluster.open_moves.get(move.item_id)
        if open_move is None or open_move.granted or not is_waiting(open_move.record):
            return False
        return open_move.planned == move and self._executor.queue.has(move)

    def _shares(self) -> dict[str, int]:
        """Returns how many partitions each replica will own when all planned changes have ended."""
        shares = self._context.cluster.owned_counts()
        for change in self._context.cluster.changes():
            shares[change.source] = shares.get(change.source, 0) - 1
            shares[change.target] = shares.get(change.target, 0) + 1
        return shares
