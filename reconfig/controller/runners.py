"""Runners of moves: turn the instructions of a move's state machine into calls, and the results of calls into events.

A runner feeds one event at a time to its machine, and carries out the instructions in their order. A record is durable
before the next instruction is carried out. A call whose result decides something runs as a task, and its result arrives
as an event. An error that the machine does not know as an event ends the runner: ``run`` raises the error, and the
caller makes a new runner from the ledger's records. Once the end of a move is recorded, its report no longer changes.

The runner of a takeover is in :mod:`reconfig.controller.takeovers`. If tracing is on, each move has a span within the
span of its reconfiguration, and each phase a span within that of its move. Lines that a runner logs contain the ids of
its move.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from random import Random  # noqa: TID251 - the type; which one is handed in
from typing import Any

from reconfig.controller.cluster_state import Deployed
from reconfig.controller.history import ended_as, planned_report
from reconfig.controller.replicas import Replicas
from reconfig.decisions import migration as m
from reconfig.decisions import plan
from reconfig.decisions.budget import FixedCost, Measured
from reconfig.decisions.failover import Takeover
from reconfig.decisions.migration import Move
from reconfig.decisions.plan import Copy, Kind, Planned, PlannedMove, PlannedStandby
from stateflow.clock import Clock
from stateflow.errors import DigestMismatch, LeaseLost, Locked, StaleTerm, StateflowError, StateMissing, Unavailable
from stateflow.partition.control import (
    Cancellation,
    Cancelled,
    Fence,
    Phase,
    Preparation,
    Progress,
)
from stateflow.reports import MoveReport
from stateflow.schedule import jittered
from stateflow.settings import ControllerSettings
from stateflow.tracing import Made, about, tracing
from stateflow.transitions import check
from stateflow.types import ReplicaInfo

log = logging.getLogger(__name__)
#: seconds for which a move waits until its budget can be met, unless its plan sets another time
PATIENCE_S_DEFAULT = 30.0
#: maximum seconds for which a cutover waits for the preceding cutover at the same source
TURN_S_MAX = 0.5
#: maximum seconds to wait for the source's answer to a fence: the target, which has the seal, may answer first
ANSWER_S_MAX = 0.5
#: number of round trips to a replica that are measured for a move
ROUND_TRIPS = 3
#: fields of the target's progress that are copied into a report
SHOWN = (
    *("bytes_warm", "bytes_reused", "bytes_delta", "lag_bytes", "bytes_stored", "base_bytes"),
    *("change_rate", "bandwidth", "rtt_ms"),
)
#: phases in which a move has ended; they have no span
_OVER = frozenset({"COMPLETED", "ABORTED"})


# -- Spans -----------------------------------------------------------------------------------------------------------


class MoveSpan:
    """The span of a move, with one child for each phase."""

    def __init__(self, made: Made) -> None:
        self._made = made
        self._phase = ""
        self._child: Made | None = None

    def phase(self, phase: str) -> None:
        """Notes the phase that the move is in now."""
        if phase == self._phase:
            return
        self._phase = phase
        self._leave()
        if phase not in _OVER:
            self._child = self._made.child(f"stateflow.move.{phase.lower()}")

    def _leave(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def end(self, report: MoveReport, error: BaseException | None) -> None:
        self._leave()
        error = error or report.fault
        self._made.tell(
            state=str(report.state),
            pause_ms=report.pause_ms,
            predicted_pause_ms=report.predicted_pause_ms,
            bytes_warm=report.bytes_warm,
            bytes_delta=report.bytes_delta,
            code=getattr(error, "code", None),
        )
        if error is not None:
            self._made.failed(error)
        self._made.end()


@contextlib.contextmanager
def moving(planned: Planned) -> Iterator[MoveSpan | None]:
    """Opens the span of a move, which the caller ends.

    Yields None if tracing is off, or if the move is a standby, because its span would last as long as the copy.
    """
    ids: dict[str, Any] = {
        "operator": planned.partition.operator,
        "partition": planned.partition.partition,
        "reconfiguration": planned.reconfiguration,
        "move": planned.move_id,
    }
    traces = None if isinstance(planned, PlannedStandby) else tracing()
    with about(lambda: ids):
        if traces is None:
            yield None
            return
        made = traces.begin(
            "stateflow.move",
            from_replica=planned.source,
            to_replica=planned.target,
            strategy=str(planned.strategy),
            cause=str(planned.cause),
            **ids,
        )
        with made.current():
            yield MoveSpan(made)


# -- All runners -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Hooks:
    """Functions of the controller that a runner calls. A record is durable when its awaitable is done.

    Attributes:
        record_aborted: records that the move failed.
        changed: called when the report has changed.
        cutover: held from the fence until the target owns the partition, because two cutovers at one source lengthen
            each other's pause.
        lost: called, with the reason, when a target that owned the partition has lost it.
    """

    record_grant: Callable[[], Awaitable[None]]
    record_owned: Callable[[MoveReport], Awaitable[None]]
    record_aborted: Callable[[StateflowError, MoveReport], Awaitable[None]]
    changed: Callable[[], None]
    cutover: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost: Callable[[StateflowError], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class _Broken:
    """An unexpected error of a task: the machine has no event for it."""

    error: BaseException


@dataclass(slots=True, kw_only=True)
class Runner:
    """Base of the runners of a move and of a takeover: events, report, and the calls that both make."""

    planned: Planned
    machine: Move | Takeover
    deployed: Deployed  # not its spec, so that the newest one is sent each time
    target: ReplicaInfo
    replicas: Replicas
    hooks: Hooks
    settings: ControllerSettings
    clock: Clock
    random: Random  # varies the pauses before retries
    report: MoveReport = field(init=False)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _began: float = 0.0  # monotonic
    _recorded: bool = False
    _events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)  # events of the machine, and _Broken
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _span: MoveSpan | None = None

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """Adds the move's ids to log lines, and traces the move if tracing is on, while it is carried out."""
        with moving(self.planned) as span:
            self._span, error = span, None
            try:
                yield
            except BaseException as caught:
                error = caught
                raise
            finally:
                self._span = None
                if span is not None:
                    span.end(self.report, error)

    async def run(self, first: list[Any] | None = None) -> MoveReport:
        """Runs the move to its end. ``first`` are the instructions of a resumed machine; None: the move begins."""
        with self._followed():
            return await self._run(first)

    async def _run(self, first: list[Any] | None) -> MoveReport:
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancels the move, if it is not too late."""
        raise NotImplementedError

    async def _carry_out(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            await self._carry_out_one(instruction)

    async def _carry_out_one(self, instruction: Any) -> None:
        raise NotImplementedError

    def handle(self, event: Any) -> list[Any]:
        """Feeds an event to the machine. Returns its instructions, which are still to be carried out. Raises the
        machine's errors.
        """
        instructions: list[Any] = self.machine.handle(event)
        if self._span is not None:
            self._span.phase(str(self.machine.phase))
        if self.settings.debug_validate:
            check(self.machine)
        return instructions

    def _begin_report(self, state: str) -> None:
        self._began = self.clock.monotonic()
        self.report = replace(planned_report(self.planned), state=state, started_us=self.clock.now_us())

    def _tell(self, **changes: Any) -> None:
        """Updates the report. Once the end of the move is recorded, the report no longer changes."""
        if not self._recorded:
            self.report = replace(self.report, duration_s=self._duration_s(), **changes)

    def _say(self, state: str) -> None:
        self._tell(state=state)
        self.hooks.changed()

    def _duration_s(self) -> float:
        return self.clock.monotonic() - self._began

    async def _record_owned(self, **changes: Any) -> None:
        final = self._final(True, **changes)
        await self.hooks.record_owned(final)
        self.report, self._recorded = final, True

    async def _record_aborted(self, error: StateflowError) -> None:
        final = self._final(False, fault=error)
        await self.hooks.record_aborted(error, final)
        self.report, self._recorded = final, True

    def _final(self, owned: bool, **changes: Any) -> MoveReport:
        state = ended_as(self.planned, owned)
        return replace(self.report, state=state, duration_s=self._duration_s(), **changes)

    def _end(self) -> None:
        self.ended.set()
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """Passes a task's unexpected error on to the runner, which would otherwise wait forever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.put_nowait(_Broken(error))

    async def _next_event(self) -> Any:
        """Returns the next event. Raises the unexpected error of a task."""
        event = await self._events.get()
        if isinstance(event, _Broken):
            raise event.error
        return event

    async def _later(self, work: Callable[[], Awaitable[None]], seconds: float | None = None) -> None:
        pause_s = self.settings.retry_interval_s if seconds is None else seconds
        await asyncio.sleep(jittered(pause_s, self.random))
        await work()

    async def _cancel_at(self, replica: ReplicaInfo, move_id: str, owned_at: int = 0) -> Cancelled | None:
        """Cancels a move at a replica. Returns the replica's answer; None: it did not answer.

        Args:
            owned_at: the epoch at which the source owned the partition; 0: the replica is the target.

        Raises StateMissing if a source has lost the partition.
        """
        cancellation = Cancellation(self.planned.partition, move_id, owned_at)
        try:
            return await self.replicas.cancel(replica.name, cancellation, at_once=True)
        except StateMissing:
            raise
        except StateflowError as error:
            log.warning("%s move %s: cancellation not confirmed: %s", self.planned.strategy, move_id, error)
            return None


# -- Moves -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class MoveRunner(Runner):
    """Carries out one move."""

    planned: Copy
    source: ReplicaInfo
    machine: m.Move
    newest_epoch: Callable[[], int]  # newest epoch of the partition that was granted to any replica
    cost: Callable[[], FixedCost] | None = None  # expected cost of a cutover, as recent moves show it
    standby_move: Callable[[], str] = lambda: ""  # move id of the standby at the target; empty: none
    #: returns a replica as it last registered: one that restarts may have another address
    current: Callable[[ReplicaInfo], ReplicaInfo] = lambda info: info
    _copied_from: ReplicaInfo | None = None  # the source, as the target was last told
    _preparing: asyncio.Task[None] | None = None
    _joined: str = ""  # move id of the standby whose copy this move uses; empty: none
    _joined_s: float = 0.0  # seconds for which the base copy was complete before this move used it
    _fenced_at: float | None = None
    _in_hand_ms: float = 0.0
    _round_trips_ms: dict[str, float] = field(default_factory=dict)  # from here, by replica
    _source_answered: asyncio.Event = field(default_factory=asyncio.Event)  # the call to fence has ended
    lost: StateflowError | None = None  # why the target lost the partition that it owned; None: not lost
    sequence: int = 0  # newest change set at the target, as last reported
    _source_told: bool = False
    _has_turn: bool = False
    _retry_s: float = 0.25

    @classmethod
    def machine_for(cls, planned: Copy, granted: bool = False) -> m.Move:
        if isinstance(planned, PlannedStandby):
            return m.Move(planned.epoch, planned.granted_epoch, kind=Kind.STANDBY)
        return m.Move(
            planned.epoch,
            planned.granted_epoch,
            planned.max_pause_ms,
            patience_s=planned.patience_s or PATIENCE_S_DEFAULT,
            kind=plan.STRATEGIES[planned.strategy].kind,
            granted=granted,
        )

    @classmethod
    def resumed(cls, planned: Copy, granted: bool) -> tuple[m.Move, list[m.Instruction] | None]:
        """Returns the machine of a move that begins again, and its first instructions; None in their place: the move
        waits for its turn.

        The move continues with what its target has already copied. A granted move begins at once, because its source
        may have sealed the partition.
        """
        machine = cls.machine_for(planned, granted)
        return machine, machine.handle(m.Begin()) if granted else None

    def __post_init__(self) -> None:
        self._begin_report(self.machine.phase)

    def cancel(self) -> None:
        self._events.put_nowait(m.Cancel())

    def source_gone(self) -> None:
        """Tells the machine, once, that the source's lease has lapsed or that the source came back without the
        partition."""
        if self._source_told:
            return
        self._source_told = True
        self._events.put_nowait(m.SourceGone())

    def give_up(self) -> None:
        """Gives the move up, by command: once the target promises never to own the partition, a takeover may begin."""
        self._events.put_nowait(m.GivenUp())

    def follow_source(self) -> None:
        """Tells the target the source's present address, if it copies from another one. A standby's target would try
        that one for ever."""
        preparing = self._preparing
        if preparing is None or preparing.done() or self._copied_from is None:
            return
        if self._copied_from.address != self.current(self.source).address:
            preparing.cancel()
            self._preparing = self._start(self._prepare())

    def taken_over(self) -> None:
        """Ends the move, because a takeover lets the target's copy serve as it is."""
        self._events.put_nowait(m.TakenOver())

    def carry_over(self, former: MoveRunner) -> None:
        """Takes over the events that were sent to ``former``, the failed runner that this one replaces."""
        if former._source_told:
            self.source_gone()
        while not former._events.empty():
            event = former._events.get_nowait()
            if isinstance(event, m.Cancel | m.GivenUp | m.TakenOver):
                self._events.put_nowait(event)

    @property
    def is_moot(self) -> bool:
        """Tells whether an event that ends the move arrived before the move began."""
        return not self._events.empty()

    async def withdraw(self) -> None:
        """Ends a move that has not begun, because it was cancelled or its source is gone. No replica knows of it."""
        self.handle(m.Cancel() if self._events.empty() else self._events.get_nowait())
        assert self.machine.error is not None
        await self._record_aborted(self.machine.error)
        self._say(self.machine.phase)
        self._end()

    async def _run(self, first: list[m.Instruction] | None) -> MoveReport:
        self._began = self.clock.monotonic()
        try:
            await self._carry_out(self.handle(m.Begin()) if first is None else first)
            while self.machine.phase not in m.TERMINAL:
                event = await self._next_event()
                if isinstance(event, m.TargetOwned) and self._fenced_at is not None:
                    elapsed_ms = (self.clock.monotonic() - self._fenced_at) * 1e3
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._source_answered.wait(), ANSWER_S_MAX)
                    self._tell(pause_ms=max(0.0, elapsed_ms - self._in_hand_ms - self._ways_ms))
                if isinstance(event, m.TargetFailed):
                    self._note_proof(event.error)
                if isinstance(event, m.CaughtUp):
                    self._expect()
                await self._carry_out(self.handle(event))
                self._report_promise()
                if self.machine.phase is not m.Phase.FENCED:
                    self._end_turn()
                self._say(self.machine.phase)
        finally:
            self._end_turn()
            self._end()
        return self.report

    def _expect(self) -> None:
        """Updates the expected cost of the cutover by the moves that have ended since this one began."""
        if self.cost is not None and self.machine.phase is m.Phase.CATCHING_UP and not self.machine.granting:
            cost = self.cost()
            self.machine.fixed_ms, self.machine.margin_ms = cost.expected_ms, cost.margin_ms

    def _report_promise(self) -> None:
        machine = self.machine
        self._tell(
            predicted_pause_ms=machine.predicted_pause_ms, rounds=machine.rounds, margin_ms=machine.margin_now_ms
        )

    def _note_proof(self, error: StateflowError) -> None:
        """Sets when a transfer that failed is tried again, and reports a seal that cannot be proved.

        Each retry after such a seal copies everything, so it begins after a longer delay than other retries.
        """
        self._retry_s = self.settings.retry_interval_s
        if self.machine.phase is m.Phase.FENCED and isinstance(error, DigestMismatch):
            self._retry_s = self.settings.takeover_retry_s
            if not self.report.note:
                log.error(
                    "seal of move %s cannot be proved; see `stateflow reconfig resolve %s`: %s",
                    self.planned.move_id,
                    self.planned.reconfiguration,
                    error,
                )
            self._tell(
                note=f"{error.what}: the partition is not served; see `stateflow reconfig resolve "
                f"{self.planned.reconfiguration} --help`"
            )

    async def _cutover_turn(self) -> None:
        """Waits for the turn of this cutover at its source, for ``TURN_S_MAX`` at most.

        Another move may keep the turn while it is fenced and the source does not answer.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.hooks.cutover.acquire(), TURN_S_MAX)
            self._has_turn = True

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self.hooks.cutover.release()

    # -- instructions -------------------------------------------------------------------------------------

    async def _carry_out_one(self, instruction: m.Instruction) -> None:
        match instruction:
            case m.Prepare():
                self._preparing = self._start(self._prepare())
                if self.machine.kind is not Kind.STANDBY:
                    self._start(self._measure(self.source.name))
                    self._start(self._measure(self.target.name))
            case m.RecordGrant():
                try:
                    await self.hooks.record_grant()
                except Locked as error:
                    self._events.put_nowait(m.TargetFailed(error))
                else:
                    self._events.put_nowait(m.GrantRecorded())
            case m.Fence():
                if not instruction.cold:
                    await self._cutover_turn()
                self._tell(fenced_us=self.clock.now_us())
                self._fenced_at = self.clock.monotonic()
                self._start(self._fence(instruction))
            case m.CancelSource(owned_at, tidies=True):
                await self._cancel_at_source(owned_at)
            case m.CancelSource(owned_at):
                self._start(self._cancel_source(owned_at))
            case m.CancelTarget():
                self._start(self._cancel_target())
            case m.AbandonTarget():
                await self._cancel_at(self.target, self.planned.move_id)
            case m.RecordOwned(epoch, digest):
                await self._record_owned(epoch=epoch, digest=digest)
                if self.lost is not None:
                    self.hooks.lost(self.lost)
                self._events.put_nowait(m.OwnedRecorded())
            case m.RecordAborted(error):
                await self._record_aborted(error)
            case m.Release(epoch):
                await self._release(epoch)
            case m.Retry(m.Prepare()):
                self._start(self._later(self._prepare, self._retry_s))
            case m.Retry(m.Fence() as fence):
                self._start(self._later(lambda: self._fence(fence)))
            case m.Retry(m.CancelSource(owned_at)):
                self._start(self._later(lambda: self._cancel_source(owned_at)))
            case m.Retry(m.CancelTarget()):
                self._start(self._later(self._cancel_target))

    # -- calls --------------------------------------------------------------------------------------------

    async def _measure(self, name: str) -> None:
        """Measures the round trip to a replica, which answers before the move can be fenced."""
        for _ in range(ROUND_TRIPS):
            took_s = await self.replicas.round_trip_s(name)
            if took_s is not None:
                self._round_trips_ms[name] = took_s * 1e3

    @property
    def _ways_ms(self) -> float:
        """The time for which the fence travelled to the source, and the news of its end from the target.

        Without a common clock, it is taken as half of both round trips. The partition was served meanwhile.
        """
        return sum(self._round_trips_ms.values()) / 2

    async def _prepare(self) -> None:
        self._copied_from = source = self.current(self.source)
        move = self.planned if isinstance(self.planned, PlannedMove) else None
        incoming = Preparation(
            self.planned.move_id,
            self.deployed.spec,
            self.planned.partition,
            source,
            self.planned.epoch,
            bandwidth_max=move.bandwidth_max if move else 0.0,
            standby=self.machine.kind is Kind.STANDBY,
            on_demand=move is not None and plan.STRATEGIES[move.strategy].on_demand,
            newest_epoch=self.newest_epoch(),
        )
        warm = False
        try:
            async for progress in self.replicas.prepare(self.target.name, incoming, self._join()):
                self._take_over(progress)
                match progress.phase:
                    case Phase.CATCHING_UP:
                        if not warm:
                            warm, self._joined_s = True, progress.waited_s
                            self._events.put_nowait(m.BaseReady())
                        measured = Measured(
                            progress.lag_bytes,
                            progress.change_rate,
                            progress.bandwidth,
                            progress.rtt_ms,
                            progress.sync_ms,
                            progress.stall_ms,
                        )
                        self._events.put_nowait(m.CaughtUp(measured, progress.waited_s - self._joined_s))
                    case Phase.OWNED:
                        self.lost = progress.fault
                        epoch = progress.epoch or self.planned.granted_epoch
                        self._events.put_nowait(m.TargetOwned(epoch, progress.digest))
                        return
                    case Phase.FAILED:
                        self._events.put_nowait(m.TargetFailed(progress.fault or _unsaid()))
                        return
                    case _:
                        self.hooks.changed()
            self._events.put_nowait(m.TargetFailed(_unsaid()))
        except StateflowError as error:
            self._events.put_nowait(m.TargetFailed(error))

    def _join(self) -> str:
        """Returns the move id of the standby whose copy at the target this move uses; empty: there is none.

        Once a standby was found, every later call returns the same one, because a fenced move relies on its copy.
        """
        if self.machine.kind is not Kind.STANDBY and not self._joined:
            self._joined = self.standby_move()
        return self._joined

    def _take_over(self, progress: Progress) -> None:
        if progress.phase is not Phase.FAILED:
            self._tell(**{name: getattr(progress, name) for name in SHOWN})
            self.sequence = progress.sequence

    async def _fence(self, fence: m.Fence) -> None:
        self._source_answered.clear()
        try:
            await self._ask_to_fence(fence)
        finally:
            self._source_answered.set()

    async def _ask_to_fence(self, fence: m.Fence) -> None:
        if self._source_told:  # the source may serve again, so it must not be fenced
            return
        wanted = Fence(
            self.planned.partition,
            self.planned.move_id,
            fence.epoch,
            self.current(self.target),
            cold=fence.cold,
            pause_ms=fence.pause_ms,
            max_pause_ms=fence.max_pause_ms,
            standby_move=self._join(),
        )
        try:
            fenced = await self.replicas.fence(self.source.name, wanted)
        except StateflowError as error:
            log.warning("move %s: fence not confirmed: %s", self.planned.move_id, error)
            self._events.put_nowait(m.SourceUnknown())
            return
        if fenced.refused is None:
            self._in_hand_ms = fenced.in_hand_ms
            self._events.put_nowait(m.SourceSealed())
            return
        unknown = isinstance(fenced.refused, LeaseLost | StaleTerm)
        self._events.put_nowait(m.SourceUnknown() if unknown else m.FenceRefused(fenced.refused))

    async def _cancel_source(self, owned_at: int) -> None:
        reply = await self._cancel_at_source(owned_at)
        if reply is None:
            self._events.put_nowait(m.SourceUnknown())
        else:
            self._events.put_nowait(m.SourceSealed() if reply.sealed else m.SourceCancelled())

    async def _cancel_target(self) -> None:
        reply = await self._cancel_at(self.target, self.planned.move_id)
        if reply is None:
            self._events.put_nowait(m.TargetUnknown())
        else:
            owned = m.TargetOwned(reply.epoch, "")
            self._events.put_nowait(owned if reply.owned else m.TargetCancelled())

    async def _cancel_at_source(self, owned_at: int) -> Cancelled | None:
        try:
            return await self._cancel_at(self.source, self.planned.move_id, owned_at)
        except StateMissing as error:  # the source will never say whether it had sealed
            log.warning("move %s: source lost the partition: %s", self.planned.move_id, error)
            self.source_gone()
            return None

    async def _release(self, epoch: int) -> None:
        partition, move_id = self.planned.partition, self.planned.move_id
        try:
            await self.replicas.release(self.source.name, partition, move_id, epoch, self.current(self.target))
        except StateflowError as error:  # a source that is down releases when it starts again
            log.warning(
                "move %s: %s did not confirm the end of the move, and may keep its change log for now: %s",
                move_id,
                self.source.name,
                error,
            )


def _unsaid() -> Unavailable:
    return Unavailable("the transfer ended without a result", remedy="see the target's log for the cause")
