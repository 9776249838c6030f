"""Sends batches to replicas, as calls on a shared stream, with their rows arranged by partition.

Rows
    :class:`BatchRows` holds a batch's rows as one record batch in which the rows of each partition are contiguous.

Calls
    A batch goes to a replica as one call, in as few messages as the limit allows (:func:`requests_of`). The answers of
    the partitions arrive in any order and in pieces, which :class:`Replies` joins.

Stream
    All threads of a process share one Apply stream to a replica (:class:`Link`), which is opened when it is needed. A
    call begins on the open stream, or on a new one if that stream is over. Messages of several calls are sent in turn.
    Each call has a waiter (:class:`Reply`), which receives the responses, or a call of ``broke`` if the call ends
    early.

    A stream is over when the replica ends it, when it breaks, when it has had no call for a while, or when the caller
    gives it up because it is silent (:meth:`Link.give_up`). Its open calls then break; the caller may send their
    batches again.
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import grpc
import numpy as np
import pyarrow as pa

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import StateflowError, Unavailable
from stateflow.partition.layout import UNKNOWN_ATTEMPT
from stateflow.partition.positions import Batch
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.faults import WHAT_RUNS, error_of, remote_error, unexpected
from stateflow.rpc.wire import JOINED_BYTES_MAX, answered, pieces

#: bytes of a partition in a message, in addition to its rows
PART_BYTES = 32
#: a stream without calls is closed after this many seconds, because replicas serve a limited number of streams
IDLE_S = 60.0
Requests = Iterator[rpb.ApplyRequest]
T = TypeVar("T")


# -- Rows by partition -----------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """The rows of some partitions, in ascending order.

    Attributes:
        counts: number of rows of each partition.
        digests: digest of each partition's rows; empty: not computed.
        message: Arrow record batch message; ``b""`` for no rows.
    """

    partitions: list[int]
    counts: list[int]
    digests: list[int]
    message: bytes


class BatchRows:
    """The rows of a batch, by partition. Immutable.

    Args:
        schema: Arrow IPC schema of ``rows``.
        rows: rows of all partitions; None: no partition has rows.
        partitions: visited partitions, ascending.
        ends: for each partition, the position after its last row; its first row is where the previous partition ends.
        digests: 64-bit digest of each partition's rows, if the rows must be the same each time they are sent. The
            digest of a partition without rows has no meaning.
    """

    def __init__(
        self,
        schema: bytes,
        rows: pa.RecordBatch | None,
        partitions: Sequence[int],
        ends: Sequence[int],
        digests: Sequence[int] = (),
    ) -> None:
        self.schema, self.rows = schema, rows
        self.partitions, self.ends, self.digests = partitions, ends, digests

    def __len__(self) -> int:
        """Returns the number of partitions."""
        return len(self.partitions)

    def __iter__(self) -> Iterator[int]:
        return iter(self.partitions)

    @classmethod
    def visit(cls, partitions: Collection[int]) -> BatchRows:
        """Returns a batch without rows that visits partitions, so that they react to time.

        Args:
            partitions: partitions to visit, ascending.
        """
        return cls(b"", None, list(partitions), [0] * len(partitions))

    @property
    def size(self) -> int:
        """Size of the batch in bytes, in memory and in messages."""
        return len(self.schema) + PART_BYTES * len(self) + (0 if self.rows is None else self.rows.nbytes)

    @cached_property
    def digest(self) -> bytes:
        """Digest of the batch: equal for the same rows in the same arrangement."""
        found = hashlib.blake2b(digest_size=16)
        rows = b"" if self.rows is None else self.rows.serialize()
        for part in (self.schema, repr((list(self.partitions), list(self.ends))).encode(), rows):
            found.update(len(part).to_bytes(8, "big"))
            found.update(part)
        return found.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchRows) and (self is other or self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def only(self, partitions: Iterable[int]) -> BatchRows:
        """Returns the rows of ``partitions``; a copy, unless these are all partitions of the batch."""
        wanted = sorted(partitions)
        if len(wanted) == len(self.partitions):
            return self
        place_of = self._places
        places = [place_of[partition] for partition in wanted]
        starts = [self.ends[place - 1] if place else 0 for place in places]
        counts = [self.ends[place] - start for place, start in zip(places, starts, strict=True)]
        ends = np.cumsum(counts, dtype=np.int64)
        rows = None
        if self.rows is not None and len(ends) and ends[-1]:
            shifts = np.asarray(starts, np.int64) - (ends - np.asarray(counts, np.int64))
            rows = self.rows.take(pa.array(np.arange(ends[-1]) + np.repeat(shifts, counts)))
        digests = [self.digests[place] for place in places] if self.digests else ()
        return BatchRows(self.schema, rows, wanted, ends.tolist(), digests)

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return {partition: place for place, partition in enumerate(self.partitions)}

    def merged(self, newer: BatchRows) -> BatchRows | None:
        """Returns the rows, with those of ``newer`` in place of the former rows of its partitions.

        Returns None if one batch cannot hold both, because the schemas differ.
        """
        if len(newer) >= len(self) and set(newer.partitions) >= set(self.partitions):
            return newer
        older = self.only(set(self.partitions) - set(newer.partitions))
        rows = [each.rows for each in (older, newer) if each.rows is not None]
        if len(rows) > 1 and older.schema != newer.schema:
            return None
        behind = older.ends[-1] if older.ends else 0
        both = BatchRows(
            newer.schema or older.schema,
            pa.concat_batches(rows) if rows else None,
            [*older.partitions, *newer.partitions],
            [*older.ends, *(behind + end for end in newer.ends)],
        )
        return both._sorted()

    def _sorted(self) -> BatchRows:
        order = sorted(range(len(self)), key=self.partitions.__getitem__)
        starts = [0, *self.ends]
        counts = [self.ends[place] - starts[place] for place in order]
        rows = self.rows
        if rows is not None:
            picked = [np.arange(starts[place], self.ends[place]) for place in order]
            rows = rows.take(pa.array(np.concatenate(picked)))
        return BatchRows(
            self.schema, rows, [self.partitions[place] for place in order], np.cumsum(counts, dtype=np.int64).tolist()
        )

    def frames(self, bytes_max: int) -> Iterator[Frame]:
        """Yields all rows in messages of about ``bytes_max`` bytes at most; only a message with a single partition may
        be larger.
        """
        if self.size <= bytes_max:
            yield self._frame(0, len(self))
            return
        first, size = 0, 0
        for place in range(len(self)):
            start, end = self.ends[place - 1] if place else 0, self.ends[place]
            more = PART_BYTES
            if self.rows is not None and end > start:
                more += self.rows.slice(start, end - start).nbytes
            if place > first and size + more > bytes_max:
                yield self._frame(first, place)
                first, size = place, 0
            size += more
        yield self._frame(first, len(self))

    def _frame(self, first: int, behind: int) -> Frame:
        begin = self.ends[first - 1] if first else 0
        ends = self.ends[first:behind]
        counts = [end - start for start, end in zip([begin, *ends[:-1]], ends, strict=True)]
        message = b""
        if self.rows is not None and ends and ends[-1] > begin:
            message = self.rows.slice(begin, ends[-1] - begin).serialize().to_pybytes()
        return Frame(list(self.partitions[first:behind]), counts, list(self.digests[first:behind]), message)


# -- A call to a replica, and the answers ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one partition; see :class:`~stateflow.partition.processor.Applied`."""

    output: bytes
    replayed: bool
    operator_us: int
    commit_us: int


#: answer of a partition that the batch skipped, because it has no rows for the partition and nothing is due
PASSED = Answer(b"", False, 0, 0)
#: (partition, its answer or the error in its place)
Answers: TypeAlias = list[tuple[int, Answer | StateflowError]]


def requests_of(
    operator: str,
    batch: Batch,
    rows: BatchRows,
    parts: Iterable[tuple[int, int]],
    chunk_bytes: int,
    after: Mapping[int, int] | None = None,
) -> Iterator[rpb.ApplyRequest]:
    """Packs a batch into as few messages as the limit allows.

    Args:
        parts: (partition, epoch) of the partitions of ``rows`` to send.
        after: see :class:`~stateflow.client.delivery.Deliver`.
    """
    request = rpb.ApplyRequest(header=header_of(operator, batch, rows.schema))
    epochs = dict(parts)
    before: rpb.ApplyRequest | None = None
    for frame in rows.only(epochs).frames(chunk_bytes):
        request.partitions.extend(frame.partitions)
        request.epochs.extend([epochs[partition] for partition in frame.partitions])
        request.counts.extend(frame.counts)
        if after:
            request.afters.extend([after.get(partition, -1) for partition in frame.partitions])
        request.digests.extend(frame.digests)
        for piece, last in pieces(frame.message, chunk_bytes):
            if before is not None:
                yield before
            request.rows, request.more = piece, not last
            before, request = request, rpb.ApplyRequest()
    if before is None:
        before = request
    before.last = True
    yield before


def header_of(operator: str, batch: Batch, schema: bytes) -> rpb.ApplyHeader:
    sent, session, sender = batch.attempt, batch.session, None
    if sent != UNKNOWN_ATTEMPT:
        sender = rpb.Attempt(run=sent.run, use=sent.use, task=sent.task, call=sent.call)
    return rpb.ApplyHeader(
        operator=operator,
        source=batch.source,
        batch=batch.number,
        input_schema=schema,
        sparse=batch.sparse,
        watermark_us=batch.watermark_us,
        attempt=sender,
        event_us=batch.event_us,
        rewind=batch.rewind,
        session=None if session is None else rpb.SourceSession(generation_us=session.generation_us, id=session.id),
        known=batch.known,
        site=batch.site,
        site_column=batch.site_column,
        traceparent=batch.traceparent,
    )


class Replies:
    """Joins answers that arrive in pieces, and reports each partition of a call once.

    Args:
        tell: called with answers as they arrive, in the stream's thread.
    """

    def __init__(self, address: str, partitions: Iterable[int], tell: Callable[[Answers], None]) -> None:
        self._address, self._tell = address, tell
        self._begun: dict[int, list[bytes]] = {partition: [] for partition in partitions}
        self._joining = 0  # bytes of outputs that have not arrived completely

    def came(self, response: rpb.ApplyResponse) -> None:
        try:
            answered(response, self._address)
        except Unavailable as error:
            self.broke(error)
            return
        found: Answers = [(number, PASSED) for number in response.passed if self._begun.pop(number, None) is not None]
        for result in response.results:
            begun = self._begun.get(result.partition)
            if begun is None:
                continue
            outcome: Answer | StateflowError
            if result.HasField("fault"):
                outcome = error_of(result.fault)
            elif not result.last:
                begun.append(result.output)
                self._joining += len(result.output)
                if result.output and self._joining <= JOINED_BYTES_MAX:
                    continue
                what = f"invalid answer from {self._address}: its output does not end"
                outcome = Unavailable(what, remedy=WHAT_RUNS)
            else:
                output = b"".join([*begun, result.output]) if begun else result.output
                outcome = Answer(output, result.replayed, result.operator_us, result.commit_us)
            self._joining -= sum(map(len, begun))
            # a thread that gives the stream up may have ended the call, and reported the partition
            if self._begun.pop(result.partition, None) is not None:
                found.append((result.partition, outcome))
        if found:
            self._tell(found)
        if response.HasField("fault"):
            self.broke(error_of(response.fault))
        elif response.last:
            what = f"{self._address} ended the call without an answer"
            self.broke(Unavailable(what, remedy="check the replica's log; the batch is sent again"))

    def broke(self, error: StateflowError) -> None:
        begun, self._begun = self._begun, {}
        if left := list(begun):
            self._tell([(partition, error) for partition in left])


# -- The stream to a replica -----------------------------------------------------------------------------------------


class Calls(Generic[T]):
    """The calls under way on one stream. Each has a number, and a waiter for its answers. Sans-io.

    ``heard_at`` is the time of the last message, or of the beginning of a call when no other call was open, in
    monotonic seconds. Any message is a sign of life for all calls.
    """

    def __init__(self) -> None:
        self._open: dict[int, T] = {}
        self._newest = 0
        self.heard_at = -math.inf

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, waits: T, now: float) -> int:
        """Opens a call, and returns its number, which is larger than any before."""
        if not self._open:
            self.heard_at = now
        self._newest += 1
        self._open[self._newest] = waits
        return self._newest

    def is_open(self, number: int) -> bool:
        return number in self._open

    def came(self, number: int, last: bool, now: float) -> T | None:
        """Notes a message for a call, and returns its waiter; None: the call is not open, or the message is only a sign
        of life."""
        self.heard_at = now
        return self._open.pop(number, None) if last else self._open.get(number)

    def end(self, number: int) -> T | None:
        """Closes a call that its waiter has given up, and returns the waiter; None: the call is not open."""
        return self._open.pop(number, None)

    def end_all(self) -> list[T]:
        """Closes all calls, because the stream is over, and returns their waiters."""
        left, self._open = list(self._open.values()), {}
        return left


class Reply(Protocol):
    """The waiter for the responses of one call. The stream's thread calls its methods, which must not block."""

    def came(self, response: rpb.ApplyResponse) -> None: ...

    def broke(self, error: StateflowError) -> None:
        """Ends the call with an error: no more responses follow."""
        ...


class Link:
    """The Apply stream to one replica. Thread-safe.

    Args:
        begin: opens a stream that sends the given requests, and returns an iterable of the responses, with a method
            ``cancel``.
    """

    def __init__(self, address: str, begin: Callable[[Requests], Any], idle_s: float = IDLE_S) -> None:
        self.address = address
        self._begin, self._idle_s = begin, idle_s
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def call(self, requests: Requests, reply: Reply) -> None:
        """Sends the messages of one call, in order, interleaved with those of other calls.

        A thread of gRPC iterates ``requests``.
        """
        try:
            while not self._opened().take(requests, reply):
                pass
        except Exception as error:  # noqa: BLE001 - the call's waiter gets it
            reply.broke(unexpected(error))

    @property
    def is_closed(self) -> bool:
        """True while there is no stream, so that no call waits for an answer."""
        stream = self._stream
        return stream is None or stream.over

    @property
    def heard_at(self) -> float | None:
        """Time at which the last message arrived, in monotonic seconds; None: there is no stream."""
        stream = self._stream
        return None if stream is None else stream.calls.heard_at

    def give_up(self, since: float) -> None:
        """Fails the calls of a stream that has been silent since ``since``; the next call gets a new stream."""
        with self._lock:
            stream = self._stream
            if stream is None or stream.calls.heard_at > since:
                return
            self._stream = None
        stream.cancel(
            Unavailable(
                f"{self.address} has been silent for too long",
                remedy="check that the replica runs and is reachable; the batch is sent again",
            )
        )

    def _opened(self) -> _Stream:
        with self._lock:
            if self._stream is None or self._stream.over:
                self._stream = None
                self._stream = _Stream(self.address, self._begin, self._idle_s)
            return self._stream


class _Stream:
    """One open stream. A thread of gRPC reads the requests to send, and a thread of the stream hands out the
    responses."""

    def __init__(self, address: str, begin: Callable[[Requests], Any], idle_s: float) -> None:
        self.calls: Calls[Reply] = Calls()
        self.over = False
        self._address, self._idle_s = address, idle_s
        self._lock = threading.Lock()
        self._begun: queue.SimpleQueue[tuple[int, Requests] | None] = queue.SimpleQueue()
        self._responses = begin(self._requests())
        try:
            threading.Thread(target=self._read, name=f"answers of {address}", daemon=True).start()
        except RuntimeError as error:  # not a fault of the batch, which is sent again
            few = Unavailable(
                "cannot start a thread for answers", remedy="reduce the number of threads in this process"
            )
            self.cancel(few)
            raise few from error

    def take(self, requests: Requests, reply: Reply) -> bool:
        """Begins a call. Returns False if the stream is over."""
        with self._lock:
            if self.over:
                return False
            number = self.calls.begin(reply, SYSTEM_CLOCK.monotonic())
            # still locked: a call with a greater number must not be sent first, the replica would end the stream
            self._begun.put((number, requests))
        return True

    def cancel(self, error: StateflowError) -> None:
        self._end(error)
        self._responses.cancel()

    # -- sending, in gRPC's thread ------------------------------------------------------------------------

    def _requests(self) -> Requests:
        """Yields one message of each call in turn, so that a large call does not hold up the others."""
        turns: deque[tuple[int, Requests, bool]] = deque()  # call, its messages, whether one of them was sent
        while True:
            while not turns or not self._begun.empty():
                try:
                    begun = self._begun.get(timeout=self._idle_s)
                except queue.Empty:
                    if self._rests():
                        return
                    continue
                if begun is None:
                    return
                turns.append((*begun, False))
            number, requests, is_sent = turns.popleft()
            request = self._next(number, requests)
            if request is None and is_sent:
                request = rpb.ApplyRequest(last=True)  # otherwise the replica waits for the rest as long as the stream
            if request is not None:
                request.call = number
                if not request.last:
                    turns.append((number, requests, True))
                yield request

    def _next(self, number: int, requests: Requests) -> rpb.ApplyRequest | None:
        if not self.calls.is_open(number):
            return None  # the call was refused before all of it was sent
        try:
            return next(requests)
        except BaseException as error:  # noqa: BLE001 - it concerns this call only
            with self._lock:
                reply = self.calls.end(number)
            if reply is not None:
                reply.broke(unexpected(error))
            return None

    def _rests(self) -> bool:
        """Ends the stream if it has no calls, and returns whether it is over."""
        with self._lock:
            self.over = self.over or not self.calls
            return self.over

    # -- receiving, in its own thread ---------------------------------------------------------------------

    def _read(self) -> None:
        error: StateflowError = Unavailable(f"{self._address} ended the stream", remedy="check the replica's log")
        try:
            for response in self._responses:
                with self._lock:
                    reply = self.calls.came(response.call, response.last, SYSTEM_CLOCK.monotonic())
                if reply is not None:
                    self._hand_out(response, reply)
        except grpc.RpcError as caught:
            error = remote_error(caught, self._address)
        except Exception as caught:  # noqa: BLE001 - the calls' waiters get it
            error = unexpected(caught)
        self._end(error)

    def _hand_out(self, response: rpb.ApplyResponse, reply: Reply) -> None:
        try:
            reply.came(response)
        except Exception as error:  # noqa: BLE001 - it concerns this call only
            with self._lock:
                self.calls.end(response.call)
            reply.broke(unexpected(error))

    def _end(self, error: StateflowError) -> None:
        with self._lock:
            self.over = True
            left = self.calls.end_all()
        self._begun.put(None)
        for reply in left:
            reply.broke(error)
