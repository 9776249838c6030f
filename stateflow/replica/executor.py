"""Runs the threads of a replica, and watches for batches that do not return.

The pools (:class:`Threads`) do work that would block the event loop.

The batch thread (:class:`BatchThread`) applies batches one after the other; other jobs, such as the garbage collector
(:class:`Garbage`), run between two batches. Callers share the thread's time equally (:class:`FairQueue`). A long job
pauses while others go first (``PAUSED``).

The watchdog (:class:`Watch`) has two duties. Every ``BEAT_S`` it notifies callers that their batches are being worked
on. And it prevents operators from delaying others for longer than ``batch_timeout_s``:

1. A batch that takes longer is interrupted repeatedly. Usually the batch then fails, and the thread continues.
2. A batch that cannot be interrupted is taken away from its thread, so that it can never commit. A batch that is being
   committed is allowed to finish.
3. In both cases of step 2, the thread is left behind, and a new thread does the remaining jobs. The caller of the
   running job gets :class:`LeftBehind`, and must not use results that the former thread may still produce.
4. A thread that is busy for longer than ``batch_timeout_s`` without a running batch is left behind, too.

Processed batches that wait to be committed together with a slow batch are dropped after ``LOOK_S``, because a move may
need their partitions. :mod:`stateflow.operator.watchdog` describes how a batch is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from stateflow.clock import Clock
from stateflow.errors import Unavailable
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.operator.watchdog import RunningBatch, stalled_s
from stateflow.partition.replica import ReplicaNode
from stateflow.state import CachePool
from stateflow.storage.faults import meaning
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: number of new objects that are examined at once, which takes about 5 ms
YOUNG: Final = 10_000
#: least number of kept objects before all are examined again
OLD: Final = 500_000
#: thresholds of Python's own collector, for a single batch that creates this many objects
WITHIN_A_BATCH: Final = (100_000, 20, 50)
P = ParamSpec("P")
T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]
#: number of callers that are remembered while they have no job waiting
REMEMBERED_MAX = 1000
#: pause between portions when the cache of a partition that moved away is freed; a portion takes about a millisecond
FREEING_REST_S = 0.02
#: interval at which the end of the batch thread is checked for, in seconds
IDLE_LOOK_S = 0.02
#: interval at which callers with slow batches are notified that the batches are being worked on, in seconds
BEAT_S = 5.0
#: interval at which the watchdog looks for batches that do not return, in seconds
LOOK_S = 1.0
INTERRUPT_EVERY_S = 0.02
INTERRUPTS = 50
#: result of a job that has paused: it is run again, before the other jobs of its caller
PAUSED = object()

# -- Thread pools, and events from threads ---------------------------------------------------------------------------


class Threads:
    """Thread pools of a replica.

    Attributes:
        files: pool for long work on files.
        quick: pool for work that lengthens the pause of a move.
        sizes: pool for measurements of disk usage. They have a pool of their own, because callers assume that a replica
            has no room if it does not answer in time.
    """

    def __init__(self) -> None:
        self.files = ThreadPoolExecutor(4, thread_name_prefix="files")
        self.quick = ThreadPoolExecutor(4, thread_name_prefix="moves")
        self.sizes = ThreadPoolExecutor(1, thread_name_prefix="sizes")
        self._loop = asyncio.get_running_loop()

    async def in_files(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self.files, work, *arguments)

    async def in_quick(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self.quick, work, *arguments)

    async def in_sizes(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self.sizes, work, *arguments)

    def close(self) -> None:
        for pool in (self.files, self.quick, self.sizes):  # a thread may wait for a partition that never returns
            pool.shutdown(wait=False, cancel_futures=True)


class Changed:
    """Events with which callers wait for the next change of a partition's lifecycle.

    Args:
        then: called in the event loop after each change.
    """

    def __init__(self, node: ReplicaNode, then: Callable[[], None]) -> None:
        self._then = then
        self._events: WeakValueDictionary[PartitionId, asyncio.Event] = WeakValueDictionary()  # while a caller waits
        self._loop = asyncio.get_running_loop()
        node.on_change(self._in_thread)

    def next(self, partition: PartitionId) -> asyncio.Event:
        """Returns the event that is set at the next change. Call it before reading the state that may change."""
        return self._events.setdefault(partition, asyncio.Event())

    def _in_thread(self, partition: PartitionId) -> None:
        self._loop.call_soon_threadsafe(self._wake, partition)

    def _wake(self, partition: PartitionId) -> None:
        event = self._events.pop(partition, None)
        if event is not None:
            event.set()
        self._then()


# -- Errors of recurring duties --------------------------------------------------------------------------------------


class ErrorThrottle:
    """Logs the errors of a recurring duty, and lets the duty continue. Repeated errors of one kind are logged once,
    until a round succeeds.

    If a duty ended at its first error, the process would look alive without performing the duty.

    Args:
        log: logger of the duty's module.
        what: beginning of each line, such as "checkpoints are not taken".
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what = log, what
        self._said = ""

    @contextmanager
    def survived(self) -> Iterator[None]:
        """Runs one round, and logs any error in it. The next round may succeed."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - logged
            self.met(error)
        else:
            self.over()

    def over(self) -> None:
        """Notes that a round succeeded, so that the next error is logged."""
        self._said = ""

    def is_new(self, kind: str) -> bool:
        """Tells whether ``kind`` differs from the last kind of error, and records it as the last."""
        former, self._said = self._said, kind
        return kind != former

    def met(self, error: Exception) -> None:
        """Logs an error of the environment in one line, and a bug in stateflow with its stack trace."""
        meant = meaning(error)
        if meant is None:
            self.unforeseen(error)
        elif self.is_new(meant.code):
            self._log.error("%s: %s", self._what, meant)

    def unforeseen(self, error: Exception) -> None:
        """Logs a bug in stateflow with its stack trace. Simulations override this, and fail with the error."""
        kind = type(error).__name__
        if self.is_new(kind):
            self._log.error("%s: %s: %s", self._what, kind, error, exc_info=error)


# -- One thread and its callers --------------------------------------------------------------------------------------


class LeftBehind(Exception):
    """The thread that ran this job does not return. Another thread does the following jobs."""


class FairQueue:
    """Queue of jobs that divides a thread's time fairly among callers. Not thread-safe.

    Jobs of this process itself (caller None) run first, then those of the caller that has used the least of the
    thread's time (start-time fair queueing without weights: Goyal et al., SIGCOMM 1996). A new or returning caller
    starts with as much used time as the waiting callers, so that no caller saves up time.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[_Job]] = {}
        self._had: dict[Hashable, float] = {}  # caller → seconds used
        self._level = 0.0  # seconds used by the caller that ran last, before it ran

    def give(self, caller: Hashable, job: _Job, *, first: bool = False) -> None:
        """Queues a job, behind the caller's other jobs or with ``first`` before them."""
        if caller not in self._waiting:
            self._waiting[caller] = deque()
            self._had[caller] = max(self._had.pop(caller, 0.0), self._level)
        if first:
            self._waiting[caller].appendleft(job)
        else:
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

    def others_go_first(self, caller: Hashable, seconds: float) -> bool:
        """Tells whether a job of another caller would be taken before one of ``caller``, whose running job has used
        ``seconds``."""
        mine = self._had.get(caller, self._level) + seconds
        return any(each is None or self._had[each] < mine for each in self._waiting if each != caller)


class WorkerThread(Executor):
    """Executor with one thread. Jobs of one caller run in order, and callers share the thread's time equally.

    A job that returns ``PAUSED`` is run again when it is its caller's turn, before the caller's other jobs. So of each
    caller one job at most is half done. After :meth:`shutdown`, a job that pauses is over.

    :meth:`leave_behind` continues with the remaining jobs in a new thread; the former thread ends when its job returns.
    The threads do not keep the process from ending.
    """

    _max_workers = 1

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._given: SimpleQueue[bool] = SimpleQueue()  # true for each waiting job; false: shut down
        self._turns = FairQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._current: tuple[Hashable, Future[Any]] | None = None
        self._shut = False
        #: begin of the running job, in monotonic seconds; None while no job runs
        self.busy_since: float | None = None

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self.submit_for(None, lambda: work(*args, **kwargs))

    def submit_for(self, caller: Hashable, work: Callable[[], T]) -> Future[T]:
        """Queues a job.

        Args:
            caller: the caller to which the job's time is charged; None for this process itself.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._shut:
                raise RuntimeError("the thread is shut down")
            self._turns.give(caller, (future, work))
            self._given.put(True)
            if self._thread is None:
                self._start()
        return future

    def others_go_first(self, caller: Hashable) -> bool:
        """Tells whether the running job, which is one of ``caller``, should pause, because a caller waits that has used
        less of the thread's time."""
        with self._lock:
            ran_s = 0.0 if self.busy_since is None else self._clock.monotonic() - self.busy_since
            return self._turns.others_go_first(caller, ran_s)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while self._given.get():
            with self._lock:
                caller, (future, work) = self._turns.take()
                # a job that has paused is running already
                if not (future.running() or future.set_running_or_notify_cancel()):
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
                    return  # leave_behind() has resolved the future, and charged the caller
                self._current = self.busy_since = None
                self._turns.took(caller, self._clock.monotonic() - began)
                if result is PAUSED and not self._shut:
                    self._turns.give(caller, (future, work), first=True)
                    self._given.put(True)
                    continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del future, work, result, error

    def leave_behind(self, since: float | None) -> None:
        """Ends a job with LeftBehind for its caller, and starts a new thread for the remaining jobs. Does nothing if
        the job has returned meanwhile, because then its thread does the remaining jobs.

        Args:
            since: ``busy_since`` when the job was found not to return.
        """
        with self._lock:
            if self._current is None or since is None or self.busy_since != since:
                return
            (caller, future), self._current, self.busy_since = self._current, None, None
            self._turns.took(caller, self._clock.monotonic() - since)  # other callers waited for all of that time
            self._start()
        future.set_exception(LeftBehind())

    @property
    def is_over(self) -> bool:
        """Tells, after :meth:`shutdown`, whether all jobs are done, except those that were left behind."""
        thread = self._thread
        return thread is None or not thread.is_alive()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuses new jobs. Queued jobs are still done."""
        with self._lock:
            self._shut = True
            self._given.put(False)
        if wait and self._thread is not None:
            self._thread.join()


class CallerExecutor(Executor):
    """Executor that submits one caller's jobs to a worker thread. All such executors of one thread are equal."""

    _max_workers = 1

    def __init__(self, worker: WorkerThread, caller: Hashable) -> None:
        self._worker, self._caller = worker, caller

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallerExecutor) and other._worker is self._worker

    def __hash__(self) -> int:
        return hash(self._worker)

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._worker.submit_for(self._caller, lambda: work(*args, **kwargs))


# -- Batch thread ----------------------------------------------------------------------------------------------------


class BatchThread:
    """Thread that applies batches, and runs other jobs between them. While ``stopping`` is True, no new job begins."""

    def __init__(self, clock: Clock) -> None:
        self.worker = WorkerThread("batches", clock)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.stopping = False

    async def run(self, work: Callable[..., T], *arguments: object, of: Hashable = None) -> T:
        """Runs ``work`` in the batch thread. Raises LeftBehind if the thread does not return.

        Args:
            of: the caller to which the time is charged; None for this process itself.
        """
        return await self._loop.run_in_executor(CallerExecutor(self.worker, of), work, *arguments)

    async def between_batches(self, work: Callable[..., T], *arguments: object) -> T:
        """Runs ``work`` between two batches.

        Raises Unavailable if the thread does not return, or if the replica stops before the work begins.
        """

        def do() -> T:
            if self.stopping:
                raise stops()
            return work(*arguments)

        if self.stopping:
            raise stops()
        try:
            return await self.run(do)
        except LeftBehind as error:
            raise Unavailable(
                "the request did not finish on this replica, because its batch thread is stuck",
                remedy="check the replica's log, then try again",
            ) from error

    def spare(self, work: Callable[[], object]) -> None:
        """Runs ``work`` between two batches, without waiting for it. Does nothing if the replica is stopping."""
        if not self.stopping:
            self.worker.submit(work)

    def stop(self) -> None:
        """Lets the running job finish, and begins no other."""
        self.stopping = True
        self.worker.shutdown(wait=False)

    async def is_over(self, wait_s: float = 0.0) -> bool:
        """Tells, after :meth:`stop`, whether the thread has ended within ``wait_s``.

        Checking that no batch runs would not be enough, because the next batch may be about to begin.
        """
        until = self._clock.monotonic() + wait_s
        while not self.worker.is_over and self._clock.monotonic() < until:  # noqa: ASYNC110 - a thread ends it
            await asyncio.sleep(IDLE_LOOK_S)
        return self.worker.is_over


def stops(partition: PartitionId | None = None) -> Unavailable:
    return Unavailable("the replica is stopping", remedy="try again; nothing was done", partition=partition)


async def free_caches(cache: CachePool, batch_thread: BatchThread) -> None:
    """Frees the cache entries of partitions that have moved away, in portions between batches. Begins after a pause, so
    that the seal of such a partition can be sent first."""
    with contextlib.suppress(Unavailable):  # continues when the next partition moves away
        while cache.has_left:
            await asyncio.sleep(FREEING_REST_S)
            await batch_thread.between_batches(cache.free_some)


# -- Watchdog --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Caller:
    """A caller that waits for the batch thread. ``beat`` sends the last sign of life, and may not be done yet."""

    tell: Callable[[], Awaitable[None]]
    said_at: float
    beat: asyncio.Task[None] | None = None

    async def said(self) -> None:
        """Waits until the last sign of life has been sent, because messages must be sent one at a time."""
        if self.beat is not None:
            await asyncio.wait((self.beat,))


class Watch:
    def __init__(self, node: ReplicaNode, batch_thread: BatchThread, clock: Clock) -> None:
        self._node, self._batch_thread, self._clock = node, batch_thread, clock
        self._callers: set[Caller] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watchdog")
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def telling(self, tell: Callable[[], Awaitable[None]]) -> Iterator[Caller]:
        """Sends signs of life to a caller that waits for the batch thread: calls ``tell`` about every ``BEAT_S`` until
        the context ends."""
        caller = Caller(tell, self._clock.monotonic())
        self._callers.add(caller)
        try:
            yield caller
        finally:
            self._callers.remove(caller)

    async def run(self) -> None:
        """Looks for slow batches regularly, until cancelled."""
        limit_s, throttle = self._node.settings.batch_timeout_s, ErrorThrottle(log, "batch watchdog failed")
        while True:
            await asyncio.sleep(min(LOOK_S, limit_s / 4) if limit_s else LOOK_S)
            with throttle.survived():
                await self._look(limit_s)

    async def _look(self, limit_s: float) -> None:
        self._give_signs_of_life()
        running = self._node.batches.running
        if running.keeps_waiting(LOOK_S):
            await self._loop.run_in_executor(self._thread, running.spare, LOOK_S)
        if not limit_s:
            return
        if (run := running.overdue(limit_s)) is not None:
            LIMIT_HITS.note("batch_seconds")
            await self.end(run)
            return
        now, has_batch = self._clock.monotonic(), bool(running.active())
        since = self._batch_thread.worker.busy_since
        if stalled_s(since, has_batch, self._node.served_at, now) > limit_s:
            log.error("batch thread is stuck, continuing in a new thread")
            running.leave_behind()
            self._batch_thread.worker.leave_behind(since)

    def _give_signs_of_life(self) -> None:
        now = self._clock.monotonic()
        for caller in self._callers:
            if now - caller.said_at > BEAT_S and (caller.beat is None or caller.beat.done()):
                caller.said_at = now
                caller.beat = self._loop.create_task(_told(caller.tell))

    async def end(self, run: RunningBatch) -> None:
        """Interrupts a batch, or leaves its thread behind if the batch cannot be interrupted."""
        since = None
        for _ in range(INTERRUPTS):
            run.interrupt()
            await asyncio.sleep(INTERRUPT_EVERY_S)
            since = self._batch_thread.worker.busy_since  # of the batch's job, if the batch has not ended after that
            if run.ended:
                return
        try:
            taken = await self._loop.run_in_executor(self._thread, self._node.batches.running.take_away, run)
        except Exception as error:
            if not (taken := run.taken):
                raise
            # for example an error of a seal that waited for the batch. The seal's caller asks again; the thread is left
            # behind in any case.
            what = f"batch of {run.partition} is taken away from a stuck thread, but work that waited for it failed"
            ErrorThrottle(log, what).met(error)
        if taken:
            log.error("%s", self._node.batches.refusal(run.partition))
        elif run.ended:
            return
        else:
            log.error("commit of a batch of %s is stuck, continuing in a new batch thread", run.partition)
        run.left = True
        self._batch_thread.worker.leave_behind(since)

    async def end_all(self) -> None:
        """Ends all running batches, because the replica is stopping and they take too long."""
        for run in self._node.batches.running.active():
            with ErrorThrottle(log, "cannot end a running batch").survived():
                await self.end(run)


async def _told(tell: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(Exception):  # the caller gets the error when it answers the batch
        await tell()


# -- Garbage collection -----------------------------------------------------------------------------------------------


class Garbage:
    """Runs Python's cyclic collector between batches, so that it does not pause them. Call it from one thread at a
    time.

    A replica holds hundreds of thousands of tracked objects, none of them in a cycle. The collector would examine all
    of them again and again, and stop all threads each time for 60 ms and more, even with raised thresholds, and for 150
    ms for the oldest generation. Here it examines new objects once, in small portions between batches, and all objects
    only when their number, without cached state, has doubled.

    Args:
        known: returns the number of objects, such as cached state, that are known to have no cycles.
    """

    def __init__(self, known: Callable[[], int] = lambda: 0) -> None:
        self._known = known
        gc.set_threshold(*WITHIN_A_BATCH)
        gc.collect()
        gc.freeze()
        self._kept = self._blocks = 0
        self._note_kept()

    def _unknown(self) -> int:
        return gc.get_freeze_count() - self._known()

    def is_due(self) -> bool:
        """Tells whether there are enough new objects to examine. Cheap."""
        return gc.get_count()[0] >= YOUNG

    def collect(self) -> None:
        """Examines new objects. Those that survive are not examined again, but freed as usual with their last
        reference."""
        gc.collect(0)
        gc.freeze()
        # counting frozen objects takes 40 ms for 600,000, because the interpreter walks all of them; it counts
        # allocated blocks, at least one for nearly every object, by pool, which is fast
        blocks = sys.getallocatedblocks()
        self._blocks = min(self._blocks, blocks)
        if blocks > self._blocks + max(self._kept, OLD):
            self._blocks = blocks
            if self._unknown() > self._kept + max(self._kept, OLD):
                self._collect_all()

    def _collect_all(self) -> None:
        """Frees cycles that were still in use when they were first examined."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._note_kept()

    def _note_kept(self) -> None:
        self._kept = self._unknown()
        self._blocks = sys.getallocatedblocks()
