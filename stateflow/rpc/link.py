"""One Apply stream to a replica, shared by all threads of a process, and opened when it is needed.

A call (:meth:`Link.call`) begins on the open stream, or on a new one if that is over. Messages of several calls go in
turn. Each call has a waiter (:class:`Reply`), which receives the responses, or a call of ``broke`` if the call ends
early.

A stream is over when the replica ends it, when it breaks, when it has had no call for a while, or when the caller gives
it up because it is silent (:meth:`Link.give_up`). Its open calls then break; nothing is sent again here.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import grpc

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import StateflowError, Unavailable
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import remote_error, unexpected

T = TypeVar("T")
#: a stream without calls is closed after this long: replicas serve a limited number
IDLE_S = 60.0
Requests = Iterator[rpb.ApplyRequest]


class Calls(Generic[T]):
    """The calls under way on one stream. Each has a number, and a waiter for its answers. Sans-io.

    ``heard_at``: start of the present silence while an answer is due, in monotonic seconds: the time of the last
    message, or the begin of a call if none was open before. Any message is a sign of life for all calls.
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
        begin: opens a stream of these requests, and returns an iterable of responses that can be cancelled.
    """

    def __init__(
        self, address: str, begin: Callable[[Requests], Any], clock: Clock = SYSTEM_CLOCK, idle_s: float = IDLE_S
    ) -> None:
        self.address = address
        self._begin, self._clock, self._idle_s = begin, clock, idle_s
        self._lock = threading.Lock()
        self._stream: _Stream | None = None

    def call(self, requests: Requests, reply: Reply) -> None:
        """Sends the messages of one call, in order, interleaved with those of other calls.

        The stream's thread iterates ``requests``.
        """
        try:
            while not self._opened().take(requests, reply):
                pass
        except Exception as error:  # noqa: BLE001 - the call's waiter gets it
            reply.broke(unexpected(error))

    @property
    def heard_at(self) -> float | None:
        """Time at which a message last came, in monotonic seconds; None: there is no stream."""
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
            Unavailable(f"{self.address} is silent", remedy="check that it is healthy; the batch is sent again")
        )

    def _opened(self) -> _Stream:
        with self._lock:
            if self._stream is None or self._stream.over:
                self._stream = None
                self._stream = _Stream(self.address, self._begin, self._clock, self._idle_s)
            return self._stream


class _Stream:
    """One open stream. A thread of gRPC takes its requests, and a thread of its own hands its responses out."""

    def __init__(self, address: str, begin: Callable[[Requests], Any], clock: Clock, idle_s: float) -> None:
        self.calls: Calls[Reply] = Calls()
        self.over = False
        self._address, self._clock, self._idle_s = address, clock, idle_s
        self._lock = threading.Lock()
        self._begun: queue.SimpleQueue[tuple[int, Requests] | None] = queue.SimpleQueue()
        self._responses = begin(self._requests())
        try:
            threading.Thread(target=self._read, name=f"answers of {address}", daemon=True).start()
        except BaseException:
            self.cancel(
                Unavailable("cannot start a thread for answers", remedy="check how many threads this process has")
            )
            raise

    def take(self, requests: Requests, reply: Reply) -> bool:
        """Begins a call. Returns False if the stream is over."""
        with self._lock:
            if self.over:
                return False
            number = self.calls.begin(reply, self._clock.monotonic())
            # still locked: a call with a greater number must not be sent first, the replica would end the stream
            self._begun.put((number, requests))
        return True

    def cancel(self, error: StateflowError) -> None:
        self._end(error)
        self._responses.cancel()

    # -- sending, in gRPC's thread ------------------------------------------------------------------------

    def _requests(self) -> Requests:
        """Yields one message of each call in turn, so that a large call does not hold up the others."""
        turns: deque[tuple[int, Requests]] = deque()
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
                turns.append(begun)
            number, requests = turns.popleft()
            if (request := self._next(number, requests)) is not None:
                request.call = number
                if not request.last:
                    turns.append((number, requests))
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
        """Tells whether the stream has no calls; it is over then, and begins no new ones."""
        with self._lock:
            self.over = self.over or not self.calls
            return self.over

    # -- receiving, in its own thread ---------------------------------------------------------------------

    def _read(self) -> None:
        error: StateflowError = Unavailable(f"{self._address} ended the stream", remedy="see its log")
        try:
            for response in self._responses:
                with self._lock:
                    reply = self.calls.came(response.call, response.last, self._clock.monotonic())
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
