"""The thread in which batches are applied one after the other, and jobs that run between two of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Hashable
from typing import TypeVar

from stateflow.clock import Clock
from stateflow.errors import Unavailable
from stateflow.replica.lane import Lane, LeftBehind, Place
from stateflow.state import CachePool
from stateflow.types import PartitionId

T = TypeVar("T")
#: pause between portions of what a partition left in the cache; a portion takes about a millisecond
FREEING_REST_S = 0.02
#: interval of checking whether the thread has ended
LOOK_S = 0.02


class Turns:
    """The batch thread's turns. ``stopping``: nothing new is begun."""

    def __init__(self, clock: Clock) -> None:
        self._lane = Lane("batches", clock)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.stopping = False

    async def run(self, work: Callable[..., T], *arguments: object, of: Hashable = None) -> T:
        """Runs ``work`` in the batch thread. Raises LeftBehind when the thread does not come back.

        Args:
            of: the caller whose turn it takes; None: this process's own.
        """
        return await self._loop.run_in_executor(Place(self._lane, of), work, *arguments)

    def others_wait(self, caller: Hashable) -> bool:
        """Tells whether callers other than ``caller`` wait for their turns."""
        return self._lane.others_wait(caller)

    async def in_turn(self, work: Callable[..., T], *arguments: object) -> T:
        """Runs ``work`` between two batches.

        Raises Unavailable when the thread does not come back, and when the replica stops before the work begins.
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
                "the request did not finish on this replica", remedy="check the replica's log, then try again"
            ) from error

    def spare(self, work: Callable[[], object]) -> None:
        """Runs ``work`` between two batches, without waiting for it. Does nothing when the replica stops."""
        if not self.stopping:
            self._lane.submit(work)

    @property
    def busy_since(self) -> float | None:
        """Begin of the running job, in monotonic seconds; None: the thread is idle."""
        return self._lane.busy_since

    def leave_behind(self) -> None:
        """Continues with the remaining jobs in another thread, as this one does not come back."""
        self._lane.leave_behind()

    def stop(self) -> None:
        """Begins nothing new; the running job is finished."""
        self.stopping = True
        self._lane.shutdown(wait=False)

    async def is_over(self, wait_s: float = 0.0) -> bool:
        """Tells, after :meth:`stop`, whether the thread has ended within ``wait_s``.

        To see no running batch is not enough: the next one may be about to begin.
        """
        until = self._clock.monotonic() + wait_s
        while not self._lane.is_over and self._clock.monotonic() < until:  # noqa: ASYNC110 - a thread ends it
            await asyncio.sleep(LOOK_S)
        return self._lane.is_over


def stops(partition: PartitionId | None = None) -> Unavailable:
    return Unavailable("the replica is stopping", remedy="try again; nothing was done", partition=partition)


async def free_caches(cache: CachePool, turns: Turns) -> None:
    """Frees the cache entries of partitions that have left, in portions between batches, but not while their seal is on
    its way."""
    with contextlib.suppress(Unavailable):  # the next partition that leaves has it continued
        while cache.has_left:
            await asyncio.sleep(FREEING_REST_S)
            await turns.in_turn(cache.free_some)
