"""Time, processes and threads of a simulated cluster. Only one real thread runs at any moment.

The loop is an asyncio event loop without a selector. Its clock jumps to the next timer, and one seeded generator makes
every choice. Each callback belongs to a process: callbacks of a dead process never run, those of a stopped process run
once it continues. Most calls that the product submits to a thread pool run between two callbacks without a pause. Some
calls are *sliced*: such a call has its own real thread, which pauses at locks, writes and rows while others run.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

SLICED = 0.06  # share of the calls that run in threads
AT_ONCE_MAX = 20_000  # events without time passing
SWITCH = 0.4  # share of the places where a sliced call may pause


class Stuck(AssertionError):
    """Raised if the loop runs too many callbacks while its clock stands still."""


class Crashed(BaseException):
    """Raised in the code of a process that was killed, so that this code has no further effect."""


class Process:
    """A process: one run of a program.

    Args:
        drift: how much faster than the world's clock the process's clock is, as a fraction.
        offset_s: what the process's clock shows at the world's time 0, in seconds.
    """

    def __init__(self, loop: SimLoop, name: str, drift: float = 0.0, offset_s: float = 0.0) -> None:
        self.loop, self.name, self.drift, self.offset_s = loop, name, drift, offset_s
        self.alive, self.stopped = True, False
        self.writes_left: int | None = None  # writes until it is killed; None: no limit
        self.backlog: list[Handle] = []
        self.pools: dict[Any, _Pool] = {}
        self.sliced: list[Job] = []
        self.killed: Callable[[], None] = lambda: None

    def local(self, now: float) -> float:
        return self.offset_s + now * (1 + self.drift)

    def world(self, local: float) -> float:
        return (local - self.offset_s) / (1 + self.drift)

    def die(self) -> None:
        """Kills the process. Called between two of its callbacks, or at one of its own writes."""
        if not self.alive:
            return
        self.alive = False
        self.backlog.clear()
        for job in list(self.sliced):
            if job is not self.loop.job:
                self.loop.resume(job)  # so that it raises Crashed
        self.killed()

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        self.loop.ready.extend(backlog)


class Handle:
    __slots__ = ("args", "callback", "context", "gone", "process")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], context: Any, process: Process | None):
        self.callback, self.args, self.context, self.process, self.gone = callback, args, context, process, False

    def cancel(self) -> None:
        self.gone = True

    def cancelled(self) -> bool:
        return self.gone


class _Pool:
    def __init__(self, workers: int) -> None:
        self.free, self.waiting = workers, deque[Job]()


class Job:
    """A call in a thread pool. ``notes`` describe for the oracle what the call does."""

    def __init__(self, process: Process, pool: _Pool, work: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        self.process, self.pool, self.work, self.future = process, pool, work, future
        self.notes: dict[str, Any] = {}
        self.thread: _Thread | None = None


class _Thread:
    """A real thread that runs only while the loop waits for it."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.ended: tuple[Any, BaseException | None] | None = None
        self._go, self._back = threading.Lock(), threading.Lock()  # held: the other side waits
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go(self) -> None:
        self._go.release()
        assert self._back.acquire(timeout=60), "a thread waits for something that is not simulated"

    def stand_still(self) -> None:
        self._back.release()
        self._go.acquire()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self.job is None:
                return
            try:
                self.ended = self.job.work(), None
            except BaseException as error:  # noqa: BLE001 - it is raised at the caller
                self.ended = None, error
            self._back.release()

    def end(self) -> None:
        self.job = None
        self._go.release()
        self._thread.join()


class Mutex:
    """A double of threading.RLock; a thread that waits for it pauses, and others run."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop, self._owner, self._depth, self._waiting = loop, None, 0, deque[Job]()

    def __enter__(self) -> None:
        loop = self._loop
        me: Any = loop.job or loop
        if self._owner is not me:
            loop.may_switch()
        while self._owner is not None and self._owner is not me:
            assert loop.job is not None, "an event loop waits for a lock"
            assert loop.job.thread is not None, "a call that runs in one piece waits for a lock"
            self._waiting.append(loop.job)
            loop.stand_still(None)
        self._owner, self._depth = me, self._depth + 1

    def acquire(self, wait_s: float) -> bool:
        """Acquires the lock unless another thread holds it, and returns whether it did. ``wait_s`` is ignored."""
        if self._owner not in (None, self._loop.job or self._loop):
            return False
        self.__enter__()
        return True

    def release(self) -> None:
        self.__exit__()

    def take_away(self) -> None:
        self._owner, self._depth = None, 0
        self._wake()

    def __exit__(self, *_: object) -> None:
        if self._owner is not (self._loop.job or self._loop):
            return
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._wake()

    def _wake(self) -> None:
        while self._waiting:
            self._loop.call_soon(self._loop.resume, self._waiting.popleft())


class SimTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], loop: SimLoop, context: Any) -> None:
        self.number = number
        super().__init__(coro, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.AbstractEventLoop):
    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 0.0
        self.ready: deque[Handle] = deque()
        self.process: Process | None = None  # the process whose callback runs
        self.job: Job | None = None  # the job whose thread runs
        self.notes: dict[str, Any] = {}  # notes of code that runs in no job
        self.events = 0
        self.closed = False
        self.on_event: Callable[[], None] | None = None
        self._timers: list[tuple[float, int, Handle]] = []
        self._number = 0
        self._tasks: list[SimTask] = []
        self._generators: list[Any] = []
        self._threads: list[_Thread] = []
        self._idle: list[_Thread] = []

    # -- methods that asyncio calls -----------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        handle = Handle(callback, args, context, self.process)
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        process = self.process
        if process is not None:
            when = max(process.world(when), self.now + 1e-6)  # every wait moves the clock
        return self.at(when, process, callback, *args, context=context)

    def at(
        self, when: float, process: Process | None, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> Handle:
        """Schedules a callback of ``process`` at a time of the world's clock."""
        handle = Handle(callback, args, context, process)
        self._number += 1
        heapq.heappush(self._timers, (max(when, self.now), self._number, handle))
        return handle

    def time(self) -> float:
        return self.now if self.process is None else self.process.local(self.now)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> SimTask:
        self._number += 1
        task = SimTask(self._number, coro, self, context)
        self._tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignores errors that no code retrieved: they belong to dead processes or abandoned calls."""

    # -- threads ------------------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        process = self.process
        assert process is not None
        pool = process.pools.get(executor)
        if pool is None:
            pool = process.pools[executor] = _Pool(executor._max_workers)
        job = Job(process, pool, lambda: work(*args), self.create_future())
        if pool.free:
            pool.free -= 1
            self._begin(job)
        else:
            pool.waiting.append(job)
        return job.future

    def _begin(self, job: Job) -> None:
        self.at(self.now + self.random.random() * 0.002, job.process, self._start, job)

    def _start(self, job: Job) -> None:
        if job.process.sliced or self.random.random() < SLICED:
            job.thread = self._idle.pop() if self._idle else self._new_thread()
            job.thread.job = job
            job.process.sliced.append(job)
            self.resume(job)
            return
        result, error = None, None
        self.job = job
        try:
            result = job.work()
        except BaseException as caught:  # noqa: BLE001 - it is raised at the caller
            error = caught
        finally:
            self.job = None
        self._end(job, result, error)

    def _new_thread(self) -> _Thread:
        thread = _Thread()
        self._threads.append(thread)
        return thread

    def resume(self, job: Job) -> None:
        """Runs a sliced call until it ends or pauses again."""
        if job not in job.process.sliced:
            return
        assert job.thread is not None
        before = self.process, self.job
        self.process, self.job = job.process, job
        job.thread.go()
        self.process, self.job = before
        if job.thread.ended is None:
            return
        (result, error), job.thread.ended = job.thread.ended, None
        job.process.sliced.remove(job)
        self._idle.append(job.thread)
        self._end(job, result, error)

    def _end(self, job: Job, result: Any, error: BaseException | None) -> None:
        if not job.process.alive:
            return
        before, self.process = self.process, job.process
        if not job.future.cancelled():
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
        if job.pool.waiting:
            self._begin(job.pool.waiting.popleft())
        else:
            job.pool.free += 1
        self.process = before

    def may_switch(self) -> None:
        """Pauses a sliced call at random, so that other code runs first. Raises Crashed if the process is dead."""
        job = self.job
        if job is None:
            return
        if not job.process.alive:
            raise Crashed
        if job.thread is not None and self.random.random() < SWITCH:
            scale = 0.5 if self.random.random() < 0.1 else 0.01
            self.stand_still(self.random.expovariate(1 / scale))

    def stand_still(self, seconds: float | None) -> None:
        """Pauses the running job for a number of seconds, or until ``resume`` if None.

        Raises Crashed if its process is killed meanwhile.
        """
        job = self.job
        assert job is not None
        assert job.thread is not None
        if seconds is not None:
            self.at(self.now + seconds, job.process, self.resume, job)
        job.thread.stand_still()
        if not job.process.alive:
            raise Crashed

    # -- running ------------------------------------------------------------------------------------------

    def spawn(self, process: Process, coro: Coroutine[Any, Any, Any]) -> SimTask:
        before, self.process = self.process, process
        try:
            return self.create_task(coro)
        finally:
            self.process = before

    def run(self, done: Callable[[], bool], until: float) -> None:
        """Runs until ``done`` returns True, no timer is left, or the clock reaches ``until``."""
        asyncio._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._generators.append, lambda _: None)
        ready, timers, at_once = self.ready, self._timers, self.events
        try:
            while True:
                while ready:
                    handle = ready.popleft()
                    process = handle.process
                    if handle.gone or (process is not None and not process.alive):
                        continue
                    if process is not None and process.stopped:
                        process.backlog.append(handle)
                        continue
                    self.events += 1
                    if self.events - at_once > AT_ONCE_MAX:
                        raise Stuck(f"it turns in circles: {_name(handle)}")
                    self.process = process
                    if handle.context is None:
                        handle.callback(*handle.args)
                    else:
                        handle.context.run(handle.callback, *handle.args)
                    self.process = None
                if done() or not timers:
                    return
                when, _, handle = heapq.heappop(timers)
                if handle.gone:
                    continue
                if when > until:
                    self.now = until
                    return
                if when > self.now:
                    at_once = self.events
                self.now = when
                ready.append(handle)
        finally:
            self.process = None
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)

    def close(self) -> None:
        """Drops all tasks, generators, threads and timers; none of them has any further effect."""
        self.closed = True
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _drop(task.get_coro().close)
        for generator in self._generators:
            _drop(generator.aclose().close)
        for thread in self._threads:
            thread.end()
        self._tasks.clear()
        self._generators.clear()
        self.ready.clear()
        self._timers.clear()


def _name(handle: Handle) -> str:
    task = getattr(handle.callback, "__self__", None)
    coro = task.get_coro() if isinstance(task, asyncio.Task) else handle.callback
    at: list[str] = []
    while getattr(coro, "cr_await", None) is not None or hasattr(coro, "cr_code"):
        at.append(f"{coro.cr_code.co_name}:{coro.cr_frame.f_lineno if coro.cr_frame else 0}")
        coro = coro.cr_await
    return " → ".join(at) or repr(coro)


def _drop(close: Callable[[], Any]) -> None:
    try:
        close()
    except BaseException:  # noqa: BLE001 - it is dead, whatever it says
        pass
