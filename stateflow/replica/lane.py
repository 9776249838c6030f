"""One thread for batches, and another one when it does not come back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from stateflow.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class LeftBehind(Exception):
    """The thread that did it does not come back; what follows is done by another."""


#: callers that are remembered while they give nothing
REMEMBERED_MAX = 1000


class Fair:
    """Whose turn it is: what this process itself wants comes first, then the caller that has had least of the thread's
    time (weightless start-time fair queueing: Goyal et al., SIGCOMM 1996). Who comes anew, or comes back, is level with
    those who wait, so that nobody saves time up. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[_Job]] = {}
        self._had: dict[Hashable, float] = {}  # seconds, from where whoever comes begins
        self._level = 0.0  # of who had a turn last

    def give(self, caller: Hashable, job: _Job) -> None:
        if caller not in self._waiting:
            self._waiting[caller] = deque()
            self._had[caller] = max(self._had.pop(caller, 0.0), self._level)
        self._waiting[caller].append(job)

    def take(self) -> tuple[Hashable, _Job]:
        caller = None if None in self._waiting else min(self._waiting, key=self._had.__getitem__)
        jobs = self._waiting[caller]
        job = jobs.popleft()
        if not jobs:
            del self._waiting[caller]
        self._level = max(self._level, self._had[caller]) if caller is not None else self._level
        return caller, job

    def took(self, caller: Hashable, seconds: float) -> None:
        self._had[caller] = self._had.get(caller, self._level) + seconds
        while len(self._had) > REMEMBERED_MAX + len(self._waiting):
            gone = next(each for each in self._had if each not in self._waiting)
            del self._had[gone]

    def others_wait(self, caller: Hashable) -> bool:
        waiting = self._waiting
        return len(waiting) > (caller in waiting)


class Lane(Executor):
    """Does what it is given, in one thread: what one caller gave in its order, and callers so that each has as much of
    the time as another. :meth:`leave_behind` goes on with the rest in a new thread; the former does nothing more when
    it comes back. Its threads do not keep the process from ending."""

    _max_workers = 1

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._given: SimpleQueue[bool] = SimpleQueue()  # true for each job that waits; false: no more come
        self._turns = Fair()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._current: tuple[Hashable, Future[Any]] | None = None
        self._shut = False
        #: when what is under way began, monotonic seconds; None: nothing is
        self.busy_since: float | None = None

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self.submit_for(None, lambda: work(*args, **kwargs))

    def submit_for(self, caller: Hashable, work: Callable[[], T]) -> Future[T]:
        """Args: caller: whose turn it takes; None: this process's own."""
        future: Future[T] = Future()
        with self._lock:
            if self._shut:
                raise RuntimeError("it does nothing any more")
            self._turns.give(caller, (future, work))
            self._given.put(True)
            if self._thread is None:
                self._start()
        return future

    def others_wait(self, caller: Hashable) -> bool:
        """Than this one. Cheap, and by any thread."""
        return self._turns.others_wait(caller)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me and self._given.get():
            with self._lock:
                caller, (future, work) = self._turns.take()
            if not future.set_running_or_notify_cancel():
                continue
            began = self._clock.monotonic()
            self._current, self.busy_since = (caller, future), began
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:  # noqa: BLE001 - the caller's
                error = caught
            with self._lock:
                if self._thread is not me:
                    return  # the future has been told, and its caller has paid
                self._current = self.busy_since = None
                self._turns.took(caller, self._clock.monotonic() - began)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del future, work, result, error

    def leave_behind(self) -> None:
        """What is under way ends with LeftBehind for whoever waits for it; a new thread does the rest."""
        with self._lock:
            current, since, self._current, self.busy_since = self._current, self.busy_since, None, None
            if current is not None and since is not None:  # the others waited for all of that
                self._turns.took(current[0], self._clock.monotonic() - since)
            self._start()
        if current is not None:
            current[1].set_exception(LeftBehind())

    @property
    def is_over(self) -> bool:
        """Behind :meth:`shutdown`: is everything done, but for what was left behind?"""
        thread = self._thread
        return thread is None or not thread.is_alive()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What was given until now is done, and nothing after it."""
        with self._lock:
            self._shut = True
            self._given.put(False)
        if wait and self._thread is not None:
            self._thread.join()


class Place(Executor):
    """A caller's, in a lane. All of one lane are the same thread, and equal."""

    _max_workers = 1

    def __init__(self, lane: Lane, caller: Hashable) -> None:
        self._lane, self._caller = lane, caller

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and other._lane is self._lane

    def __hash__(self) -> int:
        return hash(self._lane)

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._lane.submit_for(self._caller, lambda: work(*args, **kwargs))
