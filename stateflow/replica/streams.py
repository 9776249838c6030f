"""The replica's end of an Apply stream: its calls run side by side, and each is answered when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence

from stateflow.errors import InvalidArgument, StateflowError, Unavailable
from stateflow.replica.applying import Answer, Applier
from stateflow.replica.messages import FrameReader, Piece, responses_of
from stateflow.replica.watching import BEAT_S
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import fault_of, unexpected

log = logging.getLogger(__name__)
#: bytes of one stream's requests that were read and not taken up; beyond it, reading stops until some are taken up
READ_BYTES_MAX = 8 << 20
#: … of all streams together, divided equally among them, but not below the minimum
ALL_READ_BYTES_MAX = 256 << 20
READ_BYTES_MIN = 64 << 10
#: bytes of answers that the sender has not taken; beyond it, none of its calls begins until it has
UNTAKEN_BYTES_MAX = 8 << 20
#: memory of a request in addition to its bytes
REQUEST_BYTES = 1_000
#: calls of one stream at a time
CALLS_MAX = 4096


class CallStream:
    """One Apply stream. A call that waits, for its partition or for the rest of its rows, does not delay the others.

    Args:
        write: sends a response; called for one at a time.
        bytes_max: limit of the outputs in one response, in bytes.
        caller: whose stream it is; see :meth:`Exchange.caller`.
        streams: returns the number of streams.
    """

    def __init__(
        self,
        applier: Applier,
        write: Callable[[rpb.ApplyResponse], Awaitable[None]],
        bytes_max: int,
        caller: Hashable = None,
        streams: Callable[[], int] = lambda: 1,
    ) -> None:
        self._applier, self._write, self.bytes_max, self.caller = applier, write, bytes_max, caller
        self._streams = streams
        self._writing = asyncio.Lock()
        self._calls: dict[int, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._newest = 0
        self._unread = self._untaken = 0  # bytes
        self._taken = asyncio.Event()
        self._taken.set()
        self._room = asyncio.Event()
        self._room.set()
        self._loop = asyncio.get_running_loop()
        self._read_at = self._said_at = self._loop.time()
        self._reading: asyncio.Task[None] | None = None
        self._ended = False

    async def run(self, requests: AsyncIterator[rpb.ApplyRequest]) -> None:
        """Returns when all calls came and were answered. Raises InvalidArgument for a request that belongs to no
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
        """Reads no more requests; calls that came whole are answered."""
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
            self._unread += size
            call.put(request, size)
            if self._unread > self._read_bytes_max():
                self._room.clear()
                await self._room.wait()
                self._read_at = self._loop.time()

    def _call_of(self, request: rpb.ApplyRequest) -> _Call | None:
        """Returns the call of a request; None: the call is over, for example refused before all of it came."""
        number = request.call
        if 0 < number <= self._newest and not request.HasField("header"):
            return self._calls.get(number)
        if number <= self._newest:
            raise InvalidArgument(
                "a request belongs to no call of its stream",
                remedy="use the replica's stateflow version, and number calls in ascending order",
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
        """Notes that ``size`` bytes of the requests that were read have been taken up."""
        self._unread -= size
        if self._unread <= self._read_bytes_max():
            self._room.set()

    def _read_bytes_max(self) -> int:
        return min(READ_BYTES_MAX, max(READ_BYTES_MIN, ALL_READ_BYTES_MAX // max(1, self._streams())))

    def silent_s(self) -> float:
        """Returns for how many seconds nothing came although the stream was reading; 0 while it does not read."""
        return self._loop.time() - self._read_at if self._room.is_set() else 0.0

    # -- serving ------------------------------------------------------------------------------------------

    async def _serve(self, call: _Call, is_one_too_many: bool) -> None:
        try:
            if is_one_too_many:
                what = f"{CALLS_MAX} batches of this stream are already running"
                raise Unavailable(what, remedy="the request is retried")
            await self._taken.wait()
            await self._applier.run(call)
            error = None
        except StateflowError as caught:
            error = caught
        except Exception as caught:
            log.exception("a batch failed")
            error = unexpected(caught)
        finally:
            del self._calls[call.number]
            call.let_go()
        if not call.told_last:
            fault = None if error is None else fault_of(error)
            with contextlib.suppress(Unavailable):
                await self.say(rpb.ApplyResponse(call=call.number, last=True, fault=fault))

    async def say(self, response: rpb.ApplyResponse) -> None:
        """Sends a response. Raises Unavailable when the sender of the batch is gone."""
        self._said_at = self._loop.time()
        size = response.ByteSize()
        self._untaken += size
        if self._untaken > UNTAKEN_BYTES_MAX:
            self._taken.clear()
        try:
            async with self._writing:
                await self._write(response)
        except Exception as error:
            raise Unavailable("the sender of the batch is gone", remedy="nothing to do") from error
        finally:
            self._untaken -= size
            if self._untaken <= UNTAKEN_BYTES_MAX:
                self._taken.set()

    async def give_sign_of_life(self) -> None:
        """Sends an empty response unless one was sent recently. Any response is a sign of life for all calls."""
        if self._loop.time() - self._said_at > BEAT_S / 2:
            await self.say(rpb.ApplyResponse())


class _Call:
    """One exchange. ``told_last``: the sender knows that nothing more comes."""

    def __init__(self, stream: CallStream, number: int) -> None:
        self.number = number
        self.told_last = False
        self._stream = stream
        self._reader = FrameReader()
        self._came: asyncio.Queue[tuple[rpb.ApplyRequest, int] | None] = asyncio.Queue()
        self._size = 0  # of the request being worked on
        self._all_came = False
        self._unanswered = 0  # shares

    @property
    def caller(self) -> Hashable:
        return self._stream.caller

    def put(self, request: rpb.ApplyRequest, size: int) -> None:
        self._came.put_nowait((request, size))

    def end(self) -> None:
        """Ends the queue: no more requests will come."""
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
                pass  # other requests may have come meanwhile, or reading was suspended

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
