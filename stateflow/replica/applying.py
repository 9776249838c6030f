"""Serving Apply streams: rows in, committed outputs back; parts that come ahead of their partition are held."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import grpc.aio

from stateflow.clock import Clock
from stateflow.errors import InvalidArgument, Moved, NotOwner, StandbyMissing, StateflowError, Unavailable
from stateflow.replica.lane import Lane, LeftBehind
from stateflow.replica.troubles import Troubles
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.fields import checked
from stateflow.rpc.wire import fault_of, pieces, session_of, unexpected
from stateflow.runtime.garbage import Garbage
from stateflow.runtime.host import Applied
from stateflow.runtime.layout import Attempt, Session
from stateflow.runtime.lifecycle import State
from stateflow.runtime.positions import INITIAL, RESERVED, Batch
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.watchdog import InHand
from stateflow.types import PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
SAMPLES_KEPT = 100_000
#: between portions of what a partition left in the cache, each about a millisecond
FREEING_REST_S = 0.02
#: a caller whose batches take longer is told so often that they are being worked on
BEAT_S = 5.0
#: how often it is looked for batches that do not come back
LOOK_S = 1.0
INTERRUPT_EVERY_S = 0.02
INTERRUPTS = 50
#: when the replica stops, for a thread whose batch was interrupted
LAST_S = 0.5
_Outcome = Applied | ReplicaInfo | StateflowError | None
T = TypeVar("T")


@dataclass(slots=True)
class _Part:
    partition: PartitionId
    epoch: int
    rows: bytes
    batch: Batch
    after: int | None = None


@dataclass(slots=True)
class _Call:
    """One Apply stream. ``known``: of the client, until a part has it. ``buffers``: pieces, not complete yet.
    ``waiting``: bytes of these, and of parts whose partition is on its way."""

    batch: Batch
    schema: bytes
    known: bytes = b""
    buffers: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    rows: int = 0
    waiting: int = 0


@dataclass(slots=True)
class _Turn:
    """Of a call in the thread for batches. ``over``: nobody waits for what comes of it any more."""

    outcomes: list[_Outcome] = field(default_factory=list)
    over: bool = False


@dataclass(slots=True)
class _AtWork:
    """A call that waits for the thread for batches. ``beat``: its last sign of life, on its way."""

    context: grpc.aio.ServicerContext
    said_at: float
    beat: asyncio.Task[None] | None = None


class Applier:
    """Args:
    changed: an event that is set at the next change of a partition's lifecycle.
    ask: told of each partition that a batch waits for.
    garbage: collected between batches.
    """

    def __init__(
        self,
        node: ReplicaNode,
        clock: Clock,
        changed: Callable[[PartitionId], asyncio.Event],
        ask: Callable[[PartitionId], None],
        garbage: Garbage | None = None,
    ) -> None:
        self.node = node
        self.rows = 0
        self._clock = clock
        self._changed = changed
        self._ask = ask
        self._garbage = garbage
        self._batches = Lane("batches", clock)
        self._stopping = False
        self._at_work: dict[int, _AtWork] = {}
        self._watchdog = ThreadPoolExecutor(1, thread_name_prefix="watchdog")
        self._loop = asyncio.get_running_loop()
        self._samples: deque[rpb.RequestSample] = deque(maxlen=SAMPLES_KEPT)
        self._sample_number = 0
        self._waiting = 0  # bytes, of all calls

    async def run(self, requests: AsyncIterator[rpb.ApplyRequest], context: grpc.aio.ServicerContext) -> None:
        calls: list[_Call] = []
        try:
            await self._run(requests, context, calls)
        finally:
            self._waiting -= sum(call.waiting for call in calls)

    async def _run(
        self, requests: AsyncIterator[rpb.ApplyRequest], context: grpc.aio.ServicerContext, calls: list[_Call]
    ) -> None:
        started = self._clock.monotonic()
        call: _Call | None = None
        operator = ""
        early: list[_Part] = []
        while (request := await self._next(requests, call)) is not None:
            checked(request)
            if call is None:
                header = checked_header(request)
                operator = header.operator
                watermark_us = header.watermark_us if header.HasField("watermark_us") else None
                a = header.attempt
                attempt = Attempt(a.run, a.use, a.task, a.call)
                event_us = header.event_us if header.HasField("event_us") else None
                session = session_of(header.session) if header.HasField("session") else None
                batch = Batch(
                    header.source, header.batch, header.sparse, watermark_us, attempt, event_us, header.rewind, session
                )
                call = _Call(batch, header.input_schema, header.known)
                calls.append(call)
            self._keep(call, sum(len(p.rows) for p in request.parts if not p.last))
            parts = [
                _Part(
                    PartitionId(operator, p.partition), p.epoch, r, call.batch, p.after if p.HasField("after") else None
                )
                for p, r in self._complete(call, request)
            ]
            if call.known and parts:
                parts[0].batch, call.known = replace(call.batch, known=call.known), b""
            came_early = await self._apply_all(call, parts, context)
            self._keep(call, sum(len(part.rows) for part in came_early))
            early += came_early
        held_from = self._clock.monotonic()
        if call is not None and early:
            await self._apply_early(call, early, context)
        self._sample(operator, call, started, held_from if early else None)

    def _complete(self, call: _Call, request: rpb.ApplyRequest) -> Iterator[tuple[rpb.PartitionRows, bytes]]:
        for part in request.parts:
            if not part.last:
                call.buffers[part.partition].append(part.rows)
            elif part.partition in call.buffers:
                begun = call.buffers.pop(part.partition)
                self._let_go(call, sum(map(len, begun)))
                yield part, b"".join([*begun, part.rows])
            else:
                yield part, part.rows

    async def _next(self, requests: AsyncIterator[rpb.ApplyRequest], call: _Call | None) -> rpb.ApplyRequest | None:
        """None: that was all. Raises Unavailable when nothing comes while pieces wait for their rest."""
        if call is None or not call.buffers:
            return await anext(requests, None)
        silence_s = self.node.settings.hold_timeout_s
        try:
            async with asyncio.timeout(silence_s):
                return await anext(requests, None)
        except TimeoutError as error:
            what = f"the rest of a batch's rows did not come within {silence_s:g} s"
            raise Unavailable(what, remedy="send the batch again") from error

    def _keep(self, call: _Call, bytes_: int) -> None:
        """So many more wait. Raises InvalidArgument for more than one caller may have, Unavailable for now."""
        if not bytes_:
            return
        limit = self.node.settings.waiting_bytes_max
        if call.waiting + bytes_ > limit // 2:
            raise InvalidArgument(
                f"more than {limit // 2} bytes of one batch's rows would wait here",
                remedy="send smaller batches, or raise STATEFLOW_REPLICA_WAITING_BYTES_MAX",
                source=call.batch.source,
            )
        if self._waiting + bytes_ > limit:
            raise Unavailable(
                f"{self._waiting} bytes of rows wait here already, of batches that are not whole",
                remedy="it is tried again; see who sends them, or raise STATEFLOW_REPLICA_WAITING_BYTES_MAX",
            )
        call.waiting += bytes_
        self._waiting += bytes_

    def _let_go(self, call: _Call, bytes_: int) -> None:
        call.waiting -= bytes_
        self._waiting -= bytes_

    async def _apply_all(self, call: _Call, parts: list[_Part], context: grpc.aio.ServicerContext) -> list[_Part]:
        """Apply and answer; returns the parts whose partition is still on its way here."""
        if not parts:
            return []
        outcomes: list[_Outcome] = []
        while len(outcomes) < len(parts):
            if self._stopping:
                outcomes += [_stops(part.partition) for part in parts[len(outcomes) :]]
                break
            turn = _Turn()
            at_work = self._at_work[id(turn)] = _AtWork(context, self._clock.monotonic())
            try:
                await self._loop.run_in_executor(
                    self._batches, self._apply_in_thread, call, parts[len(outcomes) :], turn
                )
                outcomes += turn.outcomes
            except LeftBehind:
                turn.over = True
                outcomes += turn.outcomes
                outcomes.append(self._left(parts[len(outcomes)].partition))
            finally:
                turn.over = True  # a call that was cancelled needs no more of its parts
                del self._at_work[id(turn)]
            if at_work.beat is not None:  # one message at a time
                await asyncio.wait((at_work.beat,))
        if self._garbage is not None and self._garbage.is_due() and not self._stopping:
            self._batches.submit(self._garbage.collect)
        early: list[_Part] = []
        results: list[rpb.PartitionResult] = []
        if self.node.settings.acknowledge == "standby":
            outcomes = await self._replicated(parts, outcomes)
        for part, outcome in zip(parts, outcomes, strict=True):
            if outcome is None:
                early.append(part)
            else:
                results += self._results(part, outcome)
                if isinstance(outcome, Applied):
                    call.rows += outcome.rows
        for response in _packed(results, self.node.settings.chunk_bytes):
            await context.write(response)
        return early

    async def _replicated(self, parts: list[_Part], outcomes: list[_Outcome]) -> list[_Outcome]:
        """When a standby has durably what was applied, or it is not said; a later attempt finds the batch applied."""
        deadline = self._clock.monotonic() + self.node.settings.hold_timeout_s
        said: list[_Outcome] = []
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, Applied):
                said.append(await self._replicated_one(part.partition, outcome.sequence, deadline) or outcome)
            else:
                said.append(outcome)
        return said

    async def _replicated_one(
        self, partition: PartitionId, sequence: int, deadline: float
    ) -> ReplicaInfo | StateflowError | None:
        """None: a standby has everything up to ``sequence``."""
        while True:
            event = self._changed(partition)
            if self.node.sender.confirmed(partition, sequence):
                return None
            lifecycle = self.node.lifecycle(partition)
            if lifecycle.state is State.SEALED and lifecycle.successor is not None:
                return lifecycle.successor  # who has the batch, and standbys of its own: it is asked there again
            if lifecycle.state not in (State.OWNED, State.FENCING):
                return NotOwner("the partition has left this replica", remedy="refresh", partition=partition)
            try:
                await asyncio.wait_for(event.wait(), max(0.0, deadline - self._clock.monotonic()))
            except TimeoutError:
                return StandbyMissing(
                    f"no standby confirmed it within {self.node.settings.hold_timeout_s:g} s",
                    remedy="see that the operator has standbys and that they run; it is asked for again",
                    partition=partition,
                    sequence=sequence,
                )

    async def open_source(self, partitions: Iterable[PartitionId], source: str, session: Session) -> None:
        """Refuse older clients of the source from now on. What its client is told now that partitions contain, it takes
        for acknowledged: so it waits like an answer where that takes a standby. Raises NotOwner, StandbyMissing and
        what :meth:`~stateflow.runtime.replica.ReplicaNode.open_source` does."""
        at = {p: await self.in_turn(self.node.batches.open_source, p, source, session) for p in partitions}
        if self.node.settings.acknowledge != "standby":
            return
        deadline = self._clock.monotonic() + self.node.settings.hold_timeout_s
        for partition, sequence in at.items():
            missing = await self._replicated_one(partition, sequence, deadline)
            if isinstance(missing, ReplicaInfo):
                missing = NotOwner("the partition has left this replica", remedy="refresh", partition=partition)
            if missing is not None:
                raise missing

    def _apply_in_thread(self, call: _Call, parts: list[_Part], turn: _Turn) -> None:
        for part in parts:
            try:
                if self._stopping:
                    raise _stops(part.partition)
                outcome: _Outcome = self.node.batches.apply(
                    part.partition, part.epoch, part.batch, call.schema, part.rows, part.after
                )
            except StateflowError as error:
                outcome = error.with_traceback(None)  # which holds this frame, and so the outcomes, for long
            except BaseException as error:
                log.exception("batch %s failed on %s", call.batch, part.partition)  # what disks do comes named
                outcome = unexpected(error)
            if turn.over:
                return
            turn.outcomes.append(outcome)

    def _left(self, partition: PartitionId) -> StateflowError:
        """What is said of a part that is left behind with its thread."""
        return self.node.batches.refusal(partition) or Unavailable(
            "the partition is held up here",
            remedy="see the replica's log and its disk; whether the batch was applied shows when it is sent again",
            partition=partition,
        )

    # -- batches that do not come back --------------------------------------------------------------------

    async def watch(self) -> None:
        """Until cancelled: callers whose batches take longer hear that they are worked on, and no operator keeps the
        others from theirs for longer than ``batch_timeout_s``."""
        limit_s, troubles = self.node.settings.batch_timeout_s, Troubles(log, "batches are not watched")
        while True:
            await asyncio.sleep(min(LOOK_S, limit_s / 4) if limit_s else LOOK_S)
            with troubles.survived():
                await self._look(limit_s)

    async def _look(self, limit_s: float) -> None:
        self._give_signs_of_life()
        if not limit_s:
            return
        if (hand := self.node.batches.overdue(limit_s)) is not None:
            await self.end(hand)
        elif self._waits_for() > limit_s:
            log.error("the thread for batches does not come back: another one goes on")
            self._batches.leave_behind()

    def _give_signs_of_life(self) -> None:
        now = self._clock.monotonic()
        for waiting in self._at_work.values():
            if now - waiting.said_at > BEAT_S and (waiting.beat is None or waiting.beat.done()):
                waiting.said_at = now
                waiting.beat = self._loop.create_task(_beat(waiting.context))

    def _waits_for(self) -> float:
        """How long the thread has had no batch in hand, seconds, though there is work: it waits for a partition that
        somebody else holds, or frees what an operator's ``__del__`` holds up."""
        since = self._batches.busy_since
        if since is None or self.node.batches.in_hand():
            return 0.0
        return self._clock.monotonic() - max(since, self.node.served_at)

    async def end(self, hand: InHand) -> None:
        """Interrupt a batch, or go on without its thread."""
        for _ in range(INTERRUPTS):
            hand.interrupt()
            await asyncio.sleep(INTERRUPT_EVERY_S)
            if hand.ended:
                return
        try:
            taken = await self._loop.run_in_executor(self._watchdog, self.node.batches.take_away, hand)
        except Exception as error:
            if not (taken := hand.taken):
                raise
            # the seal that waited for it, say: whoever wants that asks again, and this thread is gone all the same
            Troubles(log, f"{hand.partition} was taken away, and not all of that done").met(error)
        if taken:
            log.error("%s", self.node.batches.refusal(hand.partition))
        elif hand.ended:
            return
        else:
            log.error("a write of %s does not come back", hand.partition)
        hand.left = True
        self._batches.leave_behind()

    async def _apply_early(self, call: _Call, early: list[_Part], context: grpc.aio.ServicerContext) -> None:
        """Requests that came ahead of their partition: served as soon as it is here, else sent back."""
        deadline = self._clock.monotonic() + self.node.settings.hold_timeout_s
        for part in early:
            self._ask(part.partition)
        while early:
            events = [self._changed(part.partition) for part in early]
            early = await self._apply_all(call, early, context)
            left = deadline - self._clock.monotonic()
            if early and left <= 0:
                for part in early:
                    late = NotOwner("the partition did not arrive in time", remedy="refresh", partition=part.partition)
                    await context.write(rpb.ApplyResponse(results=self._results(part, late)))
                return
            if early:
                waits = [asyncio.ensure_future(event.wait()) for event in events]
                changed, pending = await asyncio.wait(
                    waits, timeout=min(left, BEAT_S), return_when=asyncio.FIRST_COMPLETED
                )
                if not changed:
                    await context.write(rpb.ApplyResponse())
                for wait in pending:
                    wait.cancel()

    def _results(self, part: _Part, outcome: Applied | ReplicaInfo | StateflowError) -> list[rpb.PartitionResult]:
        number = part.partition.partition
        if isinstance(outcome, Applied):
            results = [
                rpb.PartitionResult(partition=number, output=piece, last=last, replayed=outcome.replayed)
                for piece, last in pieces(outcome.output, self.node.settings.chunk_bytes)
            ]
            results[-1].operator_us, results[-1].commit_us = outcome.operator_us, outcome.commit_us
            return results
        if isinstance(outcome, ReplicaInfo):
            outcome = Moved(
                "the partition went to another replica",
                remedy="send it there",
                owner=outcome.name,
                site=outcome.site,
                address=outcome.address,
                epoch=self.node.lifecycle(part.partition).epoch,
            )
        return [rpb.PartitionResult(partition=number, last=True, fault=fault_of(outcome))]

    def _sample(self, operator: str, call: _Call | None, started: float, held_from: float | None) -> None:
        now = self._clock.monotonic()
        self._sample_number += 1
        rows = call.rows if call else 0
        self.rows += rows
        self._samples.append(
            rpb.RequestSample(
                number=self._sample_number,
                at_us=self._clock.now_us(),
                operator=operator,
                rows=rows,
                total_ms=(now - started) * 1e3,
                held_ms=0.0 if held_from is None else (now - held_from) * 1e3,
            )
        )

    async def in_turn(self, work: Callable[..., T], *arguments: object) -> T:
        """In the thread of the batches, between two of them. Raises Unavailable when it does not come back,
        and when the replica stops before its turn."""

        def do() -> T:
            if self._stopping:
                raise _stops()
            return work(*arguments)

        if self._stopping:
            raise _stops()
        try:
            return await self._loop.run_in_executor(self._batches, do)
        except LeftBehind as error:
            raise Unavailable("the partition is held up here", remedy="see the replica's log; ask again") from error

    async def free_caches(self) -> None:
        """Of partitions that went, portion by portion between batches, and not while their seal is on its way."""
        with contextlib.suppress(Unavailable):  # the next partition that goes has it gone on with
            while self.node.cache.has_left:
                await asyncio.sleep(FREEING_REST_S)
                await self.in_turn(self.node.cache.free_some)

    def samples(self, after: int) -> list[rpb.RequestSample]:
        """What was served since sample number ``after``."""
        return [sample for sample in self._samples if sample.number > after]

    async def close(self) -> None:
        """What is in hand is finished, within half the time there is to stop in, or given up; nothing is begun. When
        this returns nobody works on a batch, but for a thread that does not come back."""
        self._stopping = True
        self._batches.shutdown(wait=False)
        if await self._is_over(self.node.settings.stop_timeout_s / 2):
            return
        for hand in self.node.batches.in_hand():
            with Troubles(log, "a batch is not given up").survived():
                await self.end(hand)
        await self._is_over(LAST_S)

    async def _is_over(self, wait_s: float) -> bool:
        """Has the thread for batches ended, within that time? There may be no batch in hand and the next one begin."""
        until = self._clock.monotonic() + wait_s
        while not self._batches.is_over and self._clock.monotonic() < until:  # noqa: ASYNC110 - a thread's
            await asyncio.sleep(INTERRUPT_EVERY_S)
        return self._batches.is_over


def _stops(partition: PartitionId | None = None) -> Unavailable:
    return Unavailable("the replica stops", remedy="ask again; nothing was done", partition=partition)


async def _beat(context: grpc.aio.ServicerContext) -> None:
    with contextlib.suppress(Exception):  # whoever waits for the batch finds out
        await context.write(rpb.ApplyResponse())


def checked_header(request: rpb.ApplyRequest) -> rpb.ApplyHeader:
    """Raises InvalidArgument without one, and for a source that is not its caller's."""
    header = request.header
    if not request.HasField("header"):
        raise InvalidArgument("a batch begins with its header", remedy="send it in the first message")
    if header.source.startswith(RESERVED) and header.source != INITIAL:
        raise InvalidArgument(f"{header.source!r} is a reserved name", remedy="choose another name for the source")
    return header


def _packed(results: list[rpb.PartitionResult], bytes_max: int) -> Iterator[rpb.ApplyResponse]:
    """Results in as few messages as the limit allows; order kept."""
    response, size = rpb.ApplyResponse(), 0
    for result in results:
        if size and size + len(result.output) > bytes_max:
            yield response
            response, size = rpb.ApplyResponse(), 0
        response.results.append(result)
        size += len(result.output) + 64
    if response.results:
        yield response
