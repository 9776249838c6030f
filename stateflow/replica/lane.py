"""One worker thread for batches, replaced by another when it does not come back."""

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
    """The thread that ran this job does not come back; another thread does the following jobs."""


#: callers that are remembered while they have no job waiting
REMEMBERED_MAX = 1000


class Fair:
    """The order of waiting jobs, fair among callers. Not thread-safe.

    Jobs of this process itself (caller None) come first, then those of the caller that has had least of the thread's
    time (weightless start-time fair queueing: Goyal et al., SIGCOMM 1996). A caller that is new or comes back starts
    level with those who wait, so that no caller saves up time.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[_Job]] = {}
        self._had: dict[Hashable, float] = {}  # seconds; a caller that comes back begins there
        self._level = 0.0  # of the caller that had the last turn

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
    """An executor with one thread: jobs of one caller run in order, and callers share the thread's time equally.

    :meth:`leave_behind` continues with the remaining jobs in a new thread; the former thread does nothing more when
    it comes back. The threads do not keep the process from ending.
    """

    _max_workers = 1

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._given: SimpleQueue[bool] = SimpleQueue()  # true for each waiting job; false: shut down
        self._turns = Fair()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._current: tuple[Hashable, Future[Any]] | None = None
        self._shut = False
        #: when the running job began, in monotonic seconds; None: idle
        self.busy_since: float | None = None

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self.submit_for(None, lambda: work(*args, **kwargs))

    def submit_for(self, caller: Hashable, work: Callable[[], T]) -> Future[T]:
        """Queues a job.

        Args:
            caller: whose turn the job takes; None: this process's own.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._shut:
                raise RuntimeError("the lane is shut down")
            self._turns.give(caller, (future, work))
            self._given.put(True)
            if self._thread is None:
                self._start()
        return future

    def others_wait(self, caller: Hashable) -> bool:
        """Tells whether callers other than ``caller`` wait. Cheap, and callable from any thread."""
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
            except BaseException as caught:  # noqa: BLE001 - goes to the caller
                error = caught
            with self._lock:
                if self._thread is not me:
                    return  # the future has been resolved, and its caller charged
                self._current = self.busy_since = None
                self._turns.took(caller, self._clock.monotonic() - began)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del future, work, result, error

    def leave_behind(self) -> None:
        """Ends the running job with LeftBehind for its caller; a new thread does the remaining jobs."""
        with self._lock:
            current, since, self._current, self.busy_since = self._current, self.busy_since, None, None
            if current is not None and since is not None:  # the others waited for all of that time
                self._turns.took(current[0], self._clock.monotonic() - since)
            self._start()
        if current is not None:
            current[1].set_exception(LeftBehind())

    @property
    def is_over(self) -> bool:
        """Tells, after :meth:`shutdown`, whether all jobs are done, except those that were left behind."""
        thread = self._thread
        return thread is None or not thread.is_alive()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuses new jobs; those queued until now are done."""
        with self._lock:
            self._shut = True
            self._given.put(False)
        if wait and self._thread is not None:
            self._thread.join()


class Place(Executor):
    """One caller's view of a lane, as an executor. All places of one lane are equal: they are the same thread."""

    _max_workers = 1

    def __init__(self, lane: Lane, caller: Hashable) -> None:
        self._lane, self._caller = lane, caller

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and other._lane is self._lane

    def __hash__(self) -> int:
        return hash(self._lane)

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._lane.submit_for(self._caller, lambda: work(*args, **kwargs))
