"""One thread for batches, and another one when it does not come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from stateflow.clock import Clock

P = ParamSpec("P")
T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


class LeftBehind(Exception):
    """The thread that did it does not come back; what follows is done by another."""


class Lane(Executor):
    """Does what it is given in order, in one thread. :meth:`leave_behind` goes on with the rest in a new one; the
    former does nothing more when it comes back. Its threads do not keep the process from ending."""

    _max_workers = 1

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._current: Future[Any] | None = None
        self._shut = False
        #: when what is under way began, monotonic seconds; None: nothing is
        self.busy_since: float | None = None

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        if self._shut:
            raise RuntimeError("it does nothing any more")
        future: Future[T] = Future()
        self._jobs.put((future, lambda: work(*args, **kwargs)))
        if self._thread is None:
            self._start()
        return future

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me and (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            self._current, self.busy_since = future, self._clock.monotonic()
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:  # noqa: BLE001 - the caller's
                error = caught
            with self._lock:
                if self._thread is not me:
                    return  # the future has been told
                self._current = self.busy_since = None
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del future, work, job, result, error

    def leave_behind(self) -> None:
        """What is under way ends with LeftBehind for whoever waits for it; a new thread does the rest."""
        with self._lock:
            current, self._current, self.busy_since = self._current, None, None
            self._start()
        if current is not None:
            current.set_exception(LeftBehind())

    @property
    def is_over(self) -> bool:
        """Behind :meth:`shutdown`: is everything done, but for what was left behind?"""
        thread = self._thread
        return thread is None or not thread.is_alive()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """What was given until now is done, and nothing after it."""
        self._shut = True
        self._jobs.put(None)
        if wait and self._thread is not None:
            self._thread.join()
