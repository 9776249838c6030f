"""Applies the batches of Apply streams: receives rows, and returns committed outputs.

A call is an :class:`Exchange`, which consists of the pieces of one batch and the answers. :class:`Applier` serves a
call in these steps:

1. Pieces are received until the rows of some batch slices are complete. If the sender is silent for
   ``hold_timeout_s`` before that, the batch fails.
2. Slices without rows are answered at once if their partitions need no visit.
3. All other slices are applied in the batch thread. When a call has used up its time slice, it pauses between two of
   its partitions, and callers that have had less of the thread's time go first. A call whose sender does not take
   answers is not begun. If the thread does not return, the slices that it has begun are refused.
4. With ``acknowledge=standby``, a commit is acknowledged once a standby has it, too.
5. Each partition is answered with an output or an error. An error of the whole batch ends the call.
6. Slices that arrived before their partition are held until the partition arrives. After ``hold_timeout_s`` they are
   refused.

Rows that wait in steps 1 and 6 count towards ``waiting_bytes_max``. Each traced batch has one span on a replica, with
the commit as a child.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from stateflow.clock import Clock
from stateflow.errors import StateflowError, Unavailable
from stateflow.metrics.figures import BATCH_BUCKETS, Histogram
from stateflow.partition.batches import Outcome as Came
from stateflow.partition.local_partition import acknowledgement, held_up, late, moved, unconfirmed
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.slices import BatchSlices, Frame, Waiting
from stateflow.replica.executor import BEAT_S, PAUSED, BatchThread, Garbage, LeftBehind, Watch, stops
from stateflow.reports import RequestReport
from stateflow.rpc.faults import unexpected
from stateflow.tracing import Ids, Made, Tracing, about, begin_about
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
SAMPLES_KEPT = 100_000
OPERATORS_MAX, OTHERS = 500, "(others)"
#: time limit for the batch thread to end after its batch was interrupted because the replica stops, in seconds
LAST_S = 0.5
#: time slice of a call, in seconds; when it is used up, callers that have had less time go first, between two of the
#: call's partitions
SLICE_S = 0.005
#: outcome of one batch slice; None if its partition has not arrived here yet
Outcome: TypeAlias = Applied | ReplicaInfo | StateflowError | None
#: the outcome for one partition, as reported to the sender
Answer: TypeAlias = tuple[PartitionId, Applied | StateflowError]

# -- Durations of requests -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class OfOperator:
    """Totals of an operator's rows, and of its requests that ended normally. ``held_s`` is the time that these waited
    for partitions to arrive here."""

    rows: int = 0
    held_s: float = 0.0
    took: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))


class Samples:
    """Durations of the newest requests, by number, and totals of all rows and requests, by operator.

    The newest requests are stored in columns of a fixed size, so that a replica's memory does not grow with requests.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._number = 0
        self._at_us, self._rows = array("q", bytes(8 * SAMPLES_KEPT)), array("q", bytes(8 * SAMPLES_KEPT))
        self._total_ms, self._held_ms = array("d", bytes(8 * SAMPLES_KEPT)), array("d", bytes(8 * SAMPLES_KEPT))
        self._operator = [""] * SAMPLES_KEPT
        #: rows that were applied
        self.rows = 0
        self.by_operator: dict[str, OfOperator] = {}

    def applied(self, operator: str, rows: int) -> None:
        """Counts rows that were applied, also those of a request that will fail. Thread-safe."""
        with self._lock:
            self.rows += rows
            self._of(self._shown(operator)).rows += rows

    def _shown(self, operator: str) -> str:
        """Returns the name under which an operator is counted. Callers can send any number of invented names."""
        return operator if operator in self.by_operator or len(self.by_operator) < OPERATORS_MAX else OTHERS

    def _of(self, operator: str) -> OfOperator:
        return self.by_operator.get(operator) or self.by_operator.setdefault(operator, OfOperator())

    def add(self, operator: str, rows: int, started: float, held_from: float | None) -> None:
        """Counts a request that has ended normally.

        Args:
            rows: rows that were applied.
            started: begin of the request, in monotonic seconds.
            held_from: begin of its wait for partitions, in monotonic seconds; None if it did not wait.
        """
        now = self._clock.monotonic()
        self._number += 1
        with self._lock:
            operator = self._shown(operator)
            of = self._of(operator)
        of.took.observe(now - started)
        of.held_s += 0.0 if held_from is None else now - held_from
        place = self._number % len(self._rows)
        self._at_us[place], self._operator[place], self._rows[place] = self._clock.now_us(), operator, rows
        self._total_ms[place] = (now - started) * 1e3
        self._held_ms[place] = 0.0 if held_from is None else (now - held_from) * 1e3

    def after(self, number: int, newest: int = 0) -> list[RequestReport]:
        """Returns the kept requests with numbers above ``number``, oldest first. ``newest``: return at most this many,
        the newest ones; 0: all of them."""
        kept = min(newest or len(self._rows), len(self._rows))
        return [self._report(each) for each in range(max(number, self._number - kept) + 1, self._number + 1)]

    def _report(self, number: int) -> RequestReport:
        at = number % len(self._rows)
        took = self._total_ms[at], self._held_ms[at]
        return RequestReport(number, self._at_us[at], self._operator[at], self._rows[at], *took)


# -- Confirmations by standbys ---------------------------------------------------------------------------------------


class Confirmations:
    """Waits for standbys to confirm commits.

    Args:
        changed: returns an event that is set at the next change of a partition's lifecycle, or of its copies' progress.
    """

    def __init__(self, node: ReplicaNode, clock: Clock, changed: Callable[[PartitionId], asyncio.Event]) -> None:
        self._node, self._clock, self._changed = node, clock, changed

    @property
    def is_needed(self) -> bool:
        return self._node.settings.acknowledge == "standby"

    def deadline(self) -> float:
        """Returns the deadline of a wait that begins now, in monotonic seconds."""
        return self._clock.monotonic() + self._node.settings.hold_timeout_s

    async def of(self, partition: PartitionId, sequence: int, deadline: float) -> ReplicaInfo | StateflowError | None:
        """Waits until a standby durably has everything up to ``sequence``, and then returns None.

        Otherwise returns the replica to which the partition has moved, or the error with which the sender is answered.

        Args:
            deadline: end of the wait, in monotonic seconds.
        """
        while True:
            event = self._changed(partition)
            confirmed = self._node.sender.confirmed(partition, sequence)
            said = acknowledgement(sequence, confirmed, self._node.lifecycle(partition))
            if said is not None:
                return None if isinstance(said, int) else said
            try:
                await asyncio.wait_for(event.wait(), max(0.0, deadline - self._clock.monotonic()))
            except TimeoutError:
                return unconfirmed(partition, sequence, self._node.settings.hold_timeout_s)


# -- Spans -----------------------------------------------------------------------------------------------------------


class BatchSpan:
    """The span of one batch. Both the batch thread and the call that waits for that thread report to it."""

    def __init__(self, made: Made, clock: Clock) -> None:
        self._made, self._clock = made, clock
        self._commits = 0
        self._committing_us = self._committed_us = 0  # begin of the first commit, end of the last one; wall clock
        self._spent = {"rows": 0, "partitions": 0, "replayed": 0, "refused": 0, "operator_us": 0, "commit_us": 0}

    @classmethod
    def begun(cls, tracing: Tracing | None, frame: Frame, started: float, clock: Clock) -> BatchSpan | None:
        """Begins a span. Returns None if the batch is not traced.

        Args:
            started: arrival of the batch's first message, in monotonic seconds.
        """
        batch = frame.batch
        if tracing is None or not batch.traceparent:
            return None
        made = tracing.begin(
            "stateflow.apply",
            parent=batch.traceparent,
            kind="server",
            began_us=clock.now_us() - round((clock.monotonic() - started) * 1e6),
            operator=frame.operator,
            source=batch.source,
            batch=batch.number,
        )
        return cls(made, clock)

    @property
    def id(self) -> str:
        return self._made.traceparent[36:52]

    def committing(self) -> None:
        self._commits += 1
        self._committing_us = self._committing_us or self._clock.now_us()

    def committed(self) -> None:
        """Notes that one of the partitions has committed."""
        self._committed_us = self._clock.now_us()

    def came(self, outcome: Applied | StateflowError) -> None:
        """Adds the outcome of one partition, as reported to its sender."""
        spent = self._spent
        spent["partitions"] += 1
        if isinstance(outcome, StateflowError):
            spent["refused"] += 1
            self._made.tell(code=outcome.code)
            return
        spent["rows"] += outcome.rows
        spent["replayed"] += outcome.replayed
        spent["operator_us"] += outcome.operator_us
        spent["commit_us"] += outcome.commit_us

    def passed(self, partitions: int) -> None:
        self._made.tell(passed=partitions)

    def held(self, partitions: int) -> None:
        """Notes that batch slices wait for partitions that have not arrived yet."""
        self._made.happened("held", partitions=partitions)

    def end(self, error: BaseException | None) -> None:
        made = self._made
        if self._committed_us:
            commit = made.child("stateflow.commit", self._committing_us, groups=self._commits)
            commit.end(self._committed_us)
        made.tell(**self._spent)
        if error is not None:
            made.failed(error)
        made.end()


def answers_seen(span: BatchSpan | None, answers: Sequence[tuple[object, Applied | StateflowError]]) -> None:
    if span is not None:
        for _, outcome in answers:
            span.came(outcome)


# -- Calls -----------------------------------------------------------------------------------------------------------


class Exchange(Protocol):
    """One call, with the requests of one batch and their answers."""

    @property
    def caller(self) -> Hashable:
        """The caller to which time of the batch thread is charged. Callers share that time equally."""
        ...

    @property
    def taken(self) -> asyncio.Event:
        """Event that is set unless too many bytes of answers have not reached the sender."""
        ...

    async def receive(self, patience_s: float | None = None) -> Piece | None:
        """Returns the next piece, or None if the call is complete.

        Raises InvalidArgument for a malformed request, and TimeoutError if the sender was silent for ``patience_s``
        although the replica was reading.
        """
        ...

    async def answer(self, answers: Sequence[Answer]) -> None: ...

    async def passed(self, partitions: Sequence[int]) -> None:
        """Notifies the sender of the partitions that the batch has skipped, because it has no rows for them. They
        contain the batch from then on."""
        ...

    async def give_sign_of_life(self) -> None:
        """Notifies the sender that the replica is working on the batch."""
        ...


class Piece(Protocol):
    """New batch slices, or more rows of the previous slices."""

    @property
    def frame(self) -> Frame | None:
        """The batch slices, or None if the piece continues the previous slices."""
        ...

    @property
    def rows(self) -> bytes: ...

    @property
    def is_whole(self) -> bool:
        """Tells whether this piece completes the rows."""
        ...


@dataclass(slots=True)
class _Call:
    """State of an exchange that is being served.

    Attributes:
        begun: batch slices with incomplete rows.
        pieces: rows of ``begun`` that have arrived.
        waiting: bytes of all rows that wait: of incomplete slices, of completed slices until they are applied, and of
            slices that wait for their partition.
        joined: bytes in ``waiting`` of completed slices that are not applied yet.
        rows: number of rows applied.
        span: None unless the batch is traced.
    """

    exchange: Exchange
    operator: str = ""
    begun: Frame | None = None
    pieces: list[bytes] = field(default_factory=list)
    waiting: int = 0
    joined: int = 0
    rows: int = 0
    batch: Batch | None = None
    span: BatchSpan | None = None

    def ids(self) -> Ids:
        return _ids_of(self.operator, self.batch, self.span)


@dataclass(slots=True)
class _Turn:
    """One job of a call in the batch thread, with the pauses in it.

    Attributes:
        slices: the parsed slices; None until they are parsed.
        outcomes: part's number → outcome.
        reached: number of parts that were begun.
        before: number of parts that were begun before the last pause.
        until: end of the time slice, in monotonic seconds; after it, callers that have had less time go first. None:
            nothing was done since the last pause.
        paused: True if the job has paused because others go first.
        over: True if the caller no longer waits for outcomes.
    """

    batch_thread: BatchThread
    caller: Hashable
    clock: Clock
    samples: Samples
    slices: BatchSlices | None = None
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    reached: int = 0
    before: int = 0
    until: float | None = None
    paused: bool = False
    over: bool = False
    span: BatchSpan | None = None

    def read(self, came: Frame | BatchSlices) -> BatchSlices:
        """Returns the slices of the parts that were not begun yet."""
        self.paused, self.until, self.before = False, None, self.reached
        if self.slices is None:
            self._work()
            self.slices = came.read() if isinstance(came, Frame) else came
        return self.slices.behind(self.before)

    def _work(self) -> None:
        if self.until is None:
            self.until = self.clock.monotonic() + SLICE_S

    @property
    def newest(self) -> int:
        """Number of the part that was begun last; 0 before the first."""
        return max(0, self.reached - 1)

    def begun(self, number: int) -> None:
        self.reached = self.before + number + 1
        self._work()

    def committing(self) -> None:
        if self.span is not None and not self.over:
            self.span.committing()

    def ids(self) -> Ids:
        """Returns identifiers of the part that is being applied, which name it in lines logged meanwhile, for example
        by the operator."""
        if self.slices is None:
            return {}
        partition = self.slices.parts[self.newest].partition
        return {**_ids_of(self.slices.operator, self.slices.batch, self.span), "partition": partition}

    def told(self, number: int, outcome: Came) -> None:
        number += self.before
        if isinstance(outcome, StateflowError):
            outcome = outcome.with_traceback(None)  # the traceback's frames would keep all outcomes in memory
        elif isinstance(outcome, BaseException):
            partition = None if self.slices is None else self.slices.parts[number].partition
            # not an error of a disk, which would be a StateflowError
            log.error("batch failed on partition %s", partition, exc_info=outcome)
            outcome = unexpected(outcome)
        elif isinstance(outcome, Applied) and self.slices is not None:  # also if the caller has gone meanwhile
            self.samples.applied(self.slices.operator, outcome.rows)
        if not self.over:
            self.outcomes[number] = outcome
            if self.span is not None and isinstance(outcome, Applied) and not outcome.replayed:
                self.span.committed()

    def goes_on(self) -> bool:
        if self.over or self.batch_thread.stopping:
            return False
        is_used_up = self.until is not None and self.clock.monotonic() > self.until
        self.paused = is_used_up and self.batch_thread.worker.others_go_first(self.caller)
        return not self.paused


class Applier:
    """Applies the batches of all Apply streams.

    Args:
        changed: returns an event that is set at the next change of a partition's lifecycle.
        ask: called with each partition for which a batch waits.
        garbage: collects garbage between batches; None if other code does.
        tracing: receiver of spans; None turns tracing off.

    Attributes:
        watch: watchdog of ``batch_thread``.
        samples: durations of requests.
        confirmations: waits for standbys.
        waiting: bytes of rows that wait for the rest of their batch, or for their partition.
    """

    def __init__(
        self,
        node: ReplicaNode,
        clock: Clock,
        changed: Callable[[PartitionId], asyncio.Event],
        ask: Callable[[PartitionId], None],
        garbage: Garbage | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.node = node
        self.batch_thread = BatchThread(clock)
        self.watch = Watch(node, self.batch_thread, clock)
        self.samples = Samples(clock)
        self.confirmations = Confirmations(node, clock, changed)
        self._clock, self._changed, self._ask, self._garbage = clock, changed, ask, garbage
        self._tracing = tracing
        self.waiting = Waiting(node.settings.waiting_bytes_max)

    async def run(self, exchange: Exchange) -> None:
        """Serves one call. Raises errors of the whole batch; an error of one partition is part of the answer."""
        call, error = _Call(exchange), None
        begin_about(call.ids)
        try:
            await self._run(call)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.waiting.let_go(call.waiting)
            if call.span is not None:
                call.span.end(error)

    async def _run(self, call: _Call) -> None:
        started = self._clock.monotonic()
        early: list[BatchSlices] = []
        while (came := await self._next(call)) is not None:
            frame = self._whole(call, came)
            if frame is None:
                continue
            if call.batch is None:
                call.operator, call.batch = frame.operator, frame.batch
                call.span = BatchSpan.begun(self._tracing, frame, started, self._clock)
            frame = await self._skip(call, frame)
            left = await self._apply_all(call, frame) if frame.partitions else None
            self._let_go(call, call.joined)
            call.joined = 0
            if left is not None:
                self._keep(call, left.bytes, left.batch.source)
                early.append(left)
        held_from = self._clock.monotonic() if early else None
        if early:
            if call.span is not None:
                call.span.held(len(_partitions(early)))
            await self._apply_early(call, early)
        self.samples.add(call.operator, call.rows, started, held_from)

    # -- receiving ----------------------------------------------------------------------------------------

    async def _next(self, call: _Call) -> Piece | None:
        """Receives the next piece. Raises Unavailable if nothing arrives while slices wait for the rest of their
        rows."""
        if call.begun is None:
            return await call.exchange.receive()
        silence_s = self.node.settings.hold_timeout_s
        try:
            return await call.exchange.receive(silence_s)
        except TimeoutError as error:
            what = f"the remaining rows of a batch did not arrive within {silence_s:g} s"
            raise Unavailable(what, remedy="send the batch again") from error

    def _whole(self, call: _Call, came: Piece) -> Frame | None:
        """Returns the slices that the piece ``came`` completes, or None if more rows of them follow."""
        if came.frame is not None:
            if came.is_whole:
                return came.frame
            call.begun = came.frame
        frame = call.begun
        assert frame is not None
        call.pieces.append(came.rows)
        if not came.is_whole:
            self._keep(call, len(came.rows), frame.batch.source)
            return None
        call.joined = sum(map(len, call.pieces[:-1]))
        whole = frame._replace(message=b"".join(call.pieces))
        call.begun, call.pieces = None, []
        return whole

    def _keep(self, call: _Call, more: int, source: str) -> None:
        """Counts ``more`` bytes of waiting rows. Raises the errors of :meth:`Waiting.admit`."""
        if more:
            self.waiting.admit(more, call.waiting, source)
            call.waiting += more

    def _let_go(self, call: _Call, bytes_: int) -> None:
        call.waiting -= bytes_
        self.waiting.let_go(bytes_)

    # -- applying and answering ---------------------------------------------------------------------------

    async def _skip(self, call: _Call, frame: Frame) -> Frame:
        """Answers the slices whose partitions the batch skips, and returns the other slices."""
        if frame.batch.sparse or all(frame.counts) or self.batch_thread.stopping:
            return frame
        with self.watch.telling(call.exchange.give_sign_of_life) as caller:
            try:
                places = await self.batch_thread.run(self.node.batches.skip, frame, of=call.exchange.caller)
            except LeftBehind:  # then all partitions are visited, though some may already contain the batch
                places = []
        await caller.said()
        if not places:
            return frame
        if call.span is not None:
            call.span.passed(len(places))
        await call.exchange.passed([frame.partitions[place] for place in places])
        return frame.without(places)

    async def _apply_all(self, call: _Call, came: Frame | BatchSlices) -> BatchSlices | None:
        """Applies slices and answers them. Returns the slices that wait for their partition, or None.

        Raises InvalidArgument if the rows cannot be read.
        """
        numbers = came.partitions if isinstance(came, Frame) else [part.partition for part in came.parts]
        partitions = [PartitionId(came.operator, number) for number in numbers]
        outcomes, left = await self._outcomes(call, came, partitions)
        if self._garbage is not None and self._garbage.is_due():
            self.batch_thread.spare(self._garbage.collect)
        if self.confirmations.is_needed:
            outcomes = await self._replicated(partitions, outcomes)
        answers: list[Answer] = []
        for partition, outcome in zip(partitions, outcomes, strict=True):
            if isinstance(outcome, ReplicaInfo):
                answers.append((partition, moved(outcome, self.node.lifecycle(partition).epoch)))
            elif outcome is not None:
                answers.append((partition, outcome))
                call.rows += outcome.rows if isinstance(outcome, Applied) else 0
        answers_seen(call.span, answers)
        if answers:
            await call.exchange.answer(answers)
        return left

    async def _outcomes(
        self, call: _Call, came: Frame | BatchSlices, partitions: list[PartitionId]
    ) -> tuple[list[Outcome], BatchSlices | None]:
        """Applies slices. Returns the outcome of each partition, and the slices that wait for their partition, or None.

        The decoded rows of the other slices are referenced from here only. A caller that waits for its sender to take
        answers thus does not keep them.
        """
        slices = None if isinstance(came, Frame) else came
        by_place: dict[int, Outcome] = {}
        while left := [place for place in range(len(partitions)) if place not in by_place]:
            await call.exchange.taken.wait()
            if self.batch_thread.stopping:
                by_place |= {place: stops(partitions[place]) for place in left}
                break
            some = came if slices is None else slices if len(left) == len(partitions) else slices.only(left)
            turn = _Turn(self.batch_thread, call.exchange.caller, self._clock, self.samples, span=call.span)
            found = await self._in_thread(call, some, [partitions[place] for place in left], turn)
            by_place |= {left[place]: outcome for place, outcome in found.items()}
            slices = slices or turn.slices
        outcomes = [by_place[place] for place in range(len(partitions))]
        early = [place for place, outcome in enumerate(outcomes) if outcome is None]
        return outcomes, slices.only(early) if early and slices is not None else None

    async def _in_thread(
        self, call: _Call, came: Frame | BatchSlices, partitions: list[PartitionId], turn: _Turn
    ) -> dict[int, Outcome]:
        """Runs one turn in the batch thread, and returns index → outcome for ``partitions``.

        Outcomes are missing if the turn ended early, because the thread was left behind, the replica stops, a processed
        batch was dropped, or the sender takes no answers.
        """
        with self.watch.telling(call.exchange.give_sign_of_life) as caller:
            try:
                await self.batch_thread.run(self._apply, came, turn, call.exchange.taken, of=turn.caller)
                outcomes = turn.outcomes
            except LeftBehind:
                turn.over = True
                outcomes = dict(turn.outcomes)
                last = len(partitions) - 1 if turn.slices is None else turn.newest
                for place, partition in enumerate(partitions[: last + 1]):
                    if place not in outcomes:
                        outcomes[place] = self.node.batches.refusal(partition) or held_up(partition)
            finally:
                turn.over = True  # a cancelled call needs no more outcomes
        await caller.said()
        return outcomes

    def _apply(self, came: Frame | BatchSlices, turn: _Turn, taken: asyncio.Event) -> object:
        if turn.over:
            return None
        # calls that were queued before their stream's answers became too many would add to these
        if turn.slices is None and not taken.is_set():
            return None
        with about(turn.ids):
            self.node.batches.apply(turn.read(came), turn)
        return PAUSED if turn.paused else None

    async def _replicated(self, partitions: list[PartitionId], outcomes: list[Outcome]) -> list[Outcome]:
        """Waits until a standby durably has the applied batches. Replaces the outcomes of batches that no standby
        confirms."""
        deadline = self.confirmations.deadline()
        said: list[Outcome] = []
        for partition, outcome in zip(partitions, outcomes, strict=True):
            if isinstance(outcome, Applied):
                said.append(await self.confirmations.of(partition, outcome.sequence, deadline) or outcome)
            else:
                said.append(outcome)
        return said

    async def _apply_early(self, call: _Call, early: list[BatchSlices]) -> None:
        """Applies slices that arrived before their partition as soon as the partition arrives, and refuses them after
        the hold timeout."""
        deadline = self._clock.monotonic() + self.node.settings.hold_timeout_s
        for partition in _partitions(early):
            self._ask(partition)
        while early:
            events = [self._changed(partition) for partition in _partitions(early)]
            early = [later for slices in early if (later := await self._apply_all(call, slices)) is not None]
            left = deadline - self._clock.monotonic()
            if early and left <= 0:
                refused: list[Answer] = [(partition, late(partition)) for partition in _partitions(early)]
                answers_seen(call.span, refused)
                await call.exchange.answer(refused)
                return
            if early:
                waits = [asyncio.ensure_future(event.wait()) for event in events]
                try:
                    changed, _ = await asyncio.wait(
                        waits, timeout=min(left, BEAT_S), return_when=asyncio.FIRST_COMPLETED
                    )
                finally:  # also when the sender has gone: a partition may never change
                    for wait in waits:
                        wait.cancel()
                if not changed:
                    await call.exchange.give_sign_of_life()

    async def close(self) -> None:
        """Finishes or gives up the running batch, and begins no other.

        The batch may take half of the replica's stop timeout to finish. When ``close`` returns, no thread works on a
        batch, except for threads that were left behind.
        """
        self.batch_thread.stop()
        if await self.batch_thread.is_over(self.node.settings.stop_timeout_s / 2):
            return
        await self.watch.end_all()
        await self.batch_thread.is_over(LAST_S)


def _ids_of(operator: str, batch: Batch | None, span: BatchSpan | None) -> Ids:
    if batch is None:
        return {}
    trace = {"trace_id": batch.traceparent[3:35]} if batch.traceparent else {}
    trace |= {"span_id": span.id} if span is not None else {}
    return {"operator": operator, "source": batch.source, "batch": batch.number, **trace}


def _partitions(several: list[BatchSlices]) -> list[PartitionId]:
    return [PartitionId(slices.operator, part.partition) for slices in several for part in slices.parts]
