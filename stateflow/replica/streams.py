"""Serves the calls of an Apply stream, and translates messages of batches between protobuf and types of replicas.

The calls of a stream run concurrently, and each is answered when it ends. The first request of a call has a header and
a number above those of earlier calls; the other requests of the call have the same number. Reading stops while too many
bytes of requests have been read but not processed. No call begins while too many bytes of answers have not reached the
sender yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from operator import lt
from typing import NamedTuple

from stateflow.errors import InvalidArgument, StateflowError, Unavailable
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.partition.layout import Attempt, Session
from stateflow.partition.positions import Batch, check_source
from stateflow.partition.processor import Applied
from stateflow.partition.slices import Frame
from stateflow.replica.applying import Answer, Applier
from stateflow.replica.executor import BEAT_S
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.faults import fault_of, unexpected
from stateflow.rpc.fields import checked
from stateflow.rpc.wire import pieces

log = logging.getLogger(__name__)
#: most bytes of one stream's requests that are read but not processed; above it, reading stops until some are processed
READ_BYTES_MAX = 8 << 20
#: most bytes of answers that have not reached the sender; above it, no call of the stream begins until some have
UNTAKEN_BYTES_MAX = 8 << 20
#: least share of one stream in the memory of all streams, for either of them
SHARE_BYTES_MIN = 64 << 10
#: memory of a request in addition to its bytes
REQUEST_BYTES = 1_000
#: calls of one stream at a time
CALLS_MAX = 4096

# -- Messages of batches ---------------------------------------------------------------------------------------------


def batch_of(header: rpb.ApplyHeader) -> Batch:
    """Returns the batch that a header announces. Raises InvalidArgument for a name that callers must not give to a
    source."""
    check_source(header.source)
    sent, session = header.attempt, header.session
    return Batch(
        header.source,
        header.batch,
        header.sparse,
        header.watermark_us if header.HasField("watermark_us") else None,
        Attempt(sent.run, sent.use, sent.task, sent.call),
        header.event_us if header.HasField("event_us") else None,
        header.rewind,
        Session(session.generation_us, session.id) if header.HasField("session") else None,
        header.known,
        header.site,
        header.site_column,
        header.traceparent,
    )


class Piece(NamedTuple):
    """Contents of one request.

    Attributes:
        frame: batch slices; None if ``rows`` continue those of the previous slices.
        rows: rows, or a part of them.
        is_whole: True if the rows of the slices are complete with this piece.
    """

    frame: Frame | None
    rows: bytes
    is_whole: bool


class FrameReader:
    """Reads batch slices from the requests of one call. The header of the first request applies to all requests."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._operator, self._schema = "", b""
        self._goes_on = False
        self._newest = -1  # partition number

    def read(self, request: rpb.ApplyRequest) -> Piece:
        """Returns the contents of the next request.

        Raises InvalidArgument if the first request has no header, a field has a forbidden value, or numbers contradict
        each other. All of this is checked before anything is built from the request.
        """
        checked(request)
        if self._batch is None:
            self._begin(request)
        if self._goes_on:
            self._check(not request.partitions, "new partitions before the previous rows are complete")
            self._check(bool(request.rows), "a piece of rows is empty")  # any number of them would wait, uncounted
            self._goes_on = request.more
            self._check(not (request.more and request.last), "a batch ends before its rows are complete")
            return Piece(None, request.rows, not request.more)
        frame = self._frame(request)
        self._goes_on = request.more
        self._check(not (request.more and request.last), "a batch ends before its rows are complete")
        return Piece(frame, request.rows, not request.more)

    def _frame(self, request: rpb.ApplyRequest) -> Frame:
        assert self._batch is not None
        partitions = list(request.partitions)
        several = request.epochs, request.counts, request.afters, request.digests
        epochs, counts, afters, digests = map(list, several)
        count = len(partitions)
        self._check(len(epochs) == len(counts) == count, "partitions, epochs and row counts differ in number")
        self._check(
            len(afters) in (0, count) and len(digests) in (0, count),
            "afters or digests are not given for all partitions",
        )
        if partitions:
            ascend = partitions[0] > self._newest and all(map(lt, partitions, partitions[1:]))
            self._check(ascend, "partition numbers are not strictly ascending")
            self._newest = partitions[-1]
        self._check(bool(request.rows) == any(counts), "rows and row counts contradict each other")
        return Frame(
            self._operator, self._batch, self._schema, partitions, epochs, counts, afters, digests, request.rows
        )

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvalidArgument(
                what, remedy="check which client sends these batches, and its version", operator=self._operator
            )

    def _begin(self, request: rpb.ApplyRequest) -> None:
        header = request.header
        if not request.HasField("header"):
            raise InvalidArgument("the first message of a batch has no header", remedy="send the header first")
        self._batch = batch_of(header)
        self._operator, self._schema = header.operator, header.input_schema


def responses_of(call: int, answers: Iterable[Answer], bytes_max: int) -> Iterator[rpb.ApplyResponse]:
    """Packs answers, in order, into as few messages as ``bytes_max`` allows."""
    response, size = rpb.ApplyResponse(call=call), 0
    for partition, answer in answers:
        for result in _results_of(partition.partition, answer, bytes_max):
            if size and size + len(result.output) > bytes_max:
                yield response
                response, size = rpb.ApplyResponse(call=call), 0
            response.results.append(result)
            size += len(result.output) + 64
    if response.results:
        yield response


def _results_of(number: int, answer: Applied | StateflowError, bytes_max: int) -> list[rpb.PartitionResult]:
    if isinstance(answer, StateflowError):
        return [rpb.PartitionResult(partition=number, last=True, fault=fault_of(answer))]
    end = rpb.PartitionResult(
        partition=number,
        output=answer.output,
        last=True,
        replayed=answer.replayed,
        operator_us=answer.operator_us,
        commit_us=answer.commit_us,
    )
    if len(answer.output) <= bytes_max:
        return [end]
    *begun, (end.output, _) = pieces(answer.output, bytes_max)
    results = [rpb.PartitionResult(partition=number, output=piece, replayed=answer.replayed) for piece, _ in begun]
    results.append(end)
    return results


# -- Streams and their calls -----------------------------------------------------------------------------------------


class CallStream:
    """One Apply stream. A call that waits for its partition, or for the rest of its rows, does not delay other calls.

    Args:
        write: sends a response. It is not called again before it has returned.
        bytes_max: limit of the outputs in one response, in bytes.
        caller: owner of the stream, see :meth:`.Exchange.caller`.
        streams: returns the number of streams.
        all_bytes_max: limit of what all streams have read but not processed, and of answers that have not reached their
            senders, in bytes. Each stream has an equal share.

    Attributes:
        unread: bytes of requests that were read but not processed.
        untaken: bytes of answers that have not reached the sender.
    """

    def __init__(
        self,
        applier: Applier,
        write: Callable[[rpb.ApplyResponse], Awaitable[None]],
        bytes_max: int,
        caller: Hashable = None,
        streams: Callable[[], int] = lambda: 1,
        all_bytes_max: int = 256 << 20,
    ) -> None:
        self._applier, self._write, self.bytes_max, self.caller = applier, write, bytes_max, caller
        self._streams, self._all_bytes_max = streams, all_bytes_max
        self._writing = asyncio.Lock()
        self._calls: dict[int, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._newest = 0
        self.unread = self.untaken = 0  # bytes
        #: set unless too many bytes of answers have not reached the sender
        self.taken_up = asyncio.Event()
        self.taken_up.set()
        self._room = asyncio.Event()
        self._room.set()
        self._loop = asyncio.get_running_loop()
        self._read_at = self._said_at = self._loop.time()
        self._reading: asyncio.Task[None] | None = None
        self._ended = False

    async def run(self, requests: AsyncIterator[rpb.ApplyRequest]) -> None:
        """Runs until all calls have been received and answered. Raises InvalidArgument for a request that belongs to no
        call."""
        reading = self._reading = self._loop.create_task(self._read(requests))
        try:
            if self._ended:
                reading.cancel()
            await asyncio.wait((reading,))
            for call in self._calls.values():
                call.end()
            if self._tasks:
                await asyncio.wait(self._tasks)
            if not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()
            for task in self._tasks:
                task.cancel()

    def end(self) -> None:
        """Stops reading requests. Calls that were received completely are still answered."""
        self._ended = True
        if self._reading is not None:
            self._reading.cancel()

    # -- reading ------------------------------------------------------------------------------------------

    async def _read(self, requests: AsyncIterator[rpb.ApplyRequest]) -> None:
        async for request in requests:
            self._read_at = self._loop.time()
            call = self._call_of(request)
            if call is None:
                continue
            size = request.ByteSize() + REQUEST_BYTES
            self.unread += size
            call.put(request, size)
            if self.unread > self._share(READ_BYTES_MAX):
                self._room.clear()
                await self._room.wait()
                self._read_at = self._loop.time()

    def _call_of(self, request: rpb.ApplyRequest) -> _Call | None:
        """Returns the call of a request, or None if the call is over, for example because it was refused early."""
        number = request.call
        if 0 < number <= self._newest and not request.HasField("header"):
            return self._calls.get(number)
        if number <= self._newest:
            raise InvalidArgument(
                "a request's call number is not above the earlier ones of its stream",
                remedy="use a client of the replica's stateflow version, which numbers calls in ascending order",
                call=number,
            )
        self._newest = number
        is_one_too_many = len(self._calls) >= CALLS_MAX
        call = self._calls[number] = _Call(self, number)
        task = self._loop.create_task(self._serve(call, is_one_too_many))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return call

    def taken(self, size: int) -> None:
        """Notes that ``size`` bytes of the received requests have been processed."""
        self.unread -= size
        if self.unread <= self._share(READ_BYTES_MAX):
            self._room.set()

    def _share(self, most: int) -> int:
        """Returns this stream's share of the memory of all streams, but not more than ``most``, in bytes."""
        return min(most, max(SHARE_BYTES_MIN, self._all_bytes_max // max(1, self._streams())))

    def used(self) -> tuple[float, float]:
        """Returns which part of its share the stream uses for requests, and which for answers."""
        return self.unread / self._share(READ_BYTES_MAX), self.untaken / self._share(UNTAKEN_BYTES_MAX)

    def silent_s(self) -> float:
        """Returns for how many seconds nothing has arrived while the stream was reading; 0 while reading is stopped."""
        return self._loop.time() - self._read_at if self._room.is_set() else 0.0

    # -- serving ------------------------------------------------------------------------------------------

    async def _serve(self, call: _Call, is_one_too_many: bool) -> None:
        try:
            if is_one_too_many:
                LIMIT_HITS.note("stream_batches")
                what = f"{CALLS_MAX} batches of this stream are already running"
                raise Unavailable(what, remedy="the request is retried")
            await self.taken_up.wait()
            await self._applier.run(call)
            error = None
        except StateflowError as caught:
            error = caught
        except Exception as caught:
            log.exception(
                "batch from %s failed unexpectedly (call %d of its stream); the client gets the error",
                self.caller,
                call.number,
            )
            error = unexpected(caught)
        finally:
            del self._calls[call.number]
            call.let_go()
        if not call.told_last:
            fault = None if error is None else fault_of(error)
            with contextlib.suppress(Unavailable):
                await self.say(rpb.ApplyResponse(call=call.number, last=True, fault=fault))

    async def say(self, response: rpb.ApplyResponse) -> None:
        """Sends a response. Raises Unavailable if the sender of the batch is gone."""
        self._said_at = self._loop.time()
        size = response.ByteSize()
        self.untaken += size
        if self.untaken > self._share(UNTAKEN_BYTES_MAX):
            self.taken_up.clear()
        try:
            async with self._writing:
                await self._write(response)
        except Exception as error:
            raise Unavailable(
                "the sender of the batch is gone", remedy="send the batch again if its answer is missing"
            ) from error
        finally:
            self.untaken -= size
            if self.untaken <= self._share(UNTAKEN_BYTES_MAX):
                self.taken_up.set()

    async def give_sign_of_life(self) -> None:
        """Sends an empty response unless one was sent recently. Any response is a sign of life for all calls."""
        if self._loop.time() - self._said_at > BEAT_S / 2:
            await self.say(rpb.ApplyResponse())


class _Call:
    """One exchange. ``told_last`` is True once the sender has been told that no more answers follow."""

    def __init__(self, stream: CallStream, number: int) -> None:
        self.number = number
        self.told_last = False
        self._stream = stream
        self._reader = FrameReader()
        self._came: asyncio.Queue[tuple[rpb.ApplyRequest, int] | None] = asyncio.Queue()
        self._size = 0  # of the request being worked on
        self._all_came = False
        self._unanswered = 0  # slices

    @property
    def caller(self) -> Hashable:
        return self._stream.caller

    @property
    def taken(self) -> asyncio.Event:
        return self._stream.taken_up

    def put(self, request: rpb.ApplyRequest, size: int) -> None:
        self._came.put_nowait((request, size))

    def end(self) -> None:
        """Ends the queue, because no more requests will arrive."""
        self._came.put_nowait(None)

    def let_go(self) -> None:
        """Releases the bytes of all requests in the queue."""
        self._stream.taken(self._size)
        while not self._came.empty():
            if (left := self._came.get_nowait()) is not None:
                self._stream.taken(left[1])

    async def receive(self, patience_s: float | None = None) -> Piece | None:
        self._stream.taken(self._size)
        self._size = 0
        if self._all_came or (came := await self._next(patience_s)) is None:
            return None
        request, self._size = came
        self._all_came = request.last
        piece = self._reader.read(request)
        if piece.frame is not None:
            self._unanswered += len(piece.frame.partitions)
        return piece

    async def _next(self, patience_s: float | None) -> tuple[rpb.ApplyRequest, int] | None:
        if patience_s is None:
            return await self._came.get()
        while True:
            left_s = patience_s - self._stream.silent_s()
            if left_s <= 0 and self._came.empty():
                raise TimeoutError
            try:
                async with asyncio.timeout(left_s):
                    return await self._came.get()
            except TimeoutError:
                pass  # requests of other calls may have arrived in that time, or reading was stopped

    async def answer(self, answers: Sequence[Answer]) -> None:
        self._unanswered -= len(answers)
        responses = list(responses_of(self.number, answers, self._stream.bytes_max))
        responses[-1].last = self.told_last = self._all_came and not self._unanswered
        for response in responses:
            await self._stream.say(response)

    async def passed(self, partitions: Sequence[int]) -> None:
        self._unanswered -= len(partitions)
        self.told_last = self._all_came and not self._unanswered
        await self._stream.say(rpb.ApplyResponse(call=self.number, passed=partitions, last=self.told_last))

    async def give_sign_of_life(self) -> None:
        await self._stream.give_sign_of_life()
