"""The thread in which batches are applied, one after the other, and what has its turn between two of them."""

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
#: between portions of what a partition left in the cache, each about a millisecond
FREEING_REST_S = 0.02
#: whether the thread has ended is looked for so often
LOOK_S = 0.02


class Turns:
    """``stopping``: nothing is begun any more."""

    def __init__(self, clock: Clock) -> None:
        self._lane = Lane("batches", clock)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.stopping = False

    async def run(self, work: Callable[..., T], *arguments: object, of: Hashable = None) -> T:
        """Args: of: the caller whose turn it takes. Raises LeftBehind when the thread does not come back."""
        return await self._loop.run_in_executor(Place(self._lane, of), work, *arguments)

    def others_wait(self, caller: Hashable) -> bool:
        """For their turns."""
        return self._lane.others_wait(caller)

    async def in_turn(self, work: Callable[..., T], *arguments: object) -> T:
        """Between two batches. Raises Unavailable when the thread does not come back, and when the replica stops before
        its turn."""

        def do() -> T:
            if self.stopping:
                raise stops()
            return work(*arguments)

        if self.stopping:
            raise stops()
        try:
            return await self.run(do)
        except LeftBehind as error:
            raise Unavailable("the partition is held up here", remedy="see the replica's log; ask again") from error

    def spare(self, work: Callable[[], object]) -> None:
        """Between two batches, and nobody waits for it."""
        if not self.stopping:
            self._lane.submit(work)

    @property
    def busy_since(self) -> float | None:
        """When what has its turn began, monotonic seconds; None: nothing has."""
        return self._lane.busy_since

    def leave_behind(self) -> None:
        """The thread does not come back: another one goes on with the rest."""
        self._lane.leave_behind()

    def stop(self) -> None:
        """Begin nothing any more; what has its turn is finished."""
        self.stopping = True
        self._lane.shutdown(wait=False)

    async def is_over(self, wait_s: float = 0.0) -> bool:
        """Behind :meth:`stop`: does nobody work on a batch, within that time? There may be none in hand and the next
        one begin."""
        until = self._clock.monotonic() + wait_s
        while not self._lane.is_over and self._clock.monotonic() < until:  # noqa: ASYNC110 - a thread's
            await asyncio.sleep(LOOK_S)
        return self._lane.is_over


def stops(partition: PartitionId | None = None) -> Unavailable:
    return Unavailable("the replica stops", remedy="ask again; nothing was done", partition=partition)


async def free_caches(cache: CachePool, turns: Turns) -> None:
    """Of partitions that went, portion by portion between batches, and not while their seal is on its way."""
    with contextlib.suppress(Unavailable):  # the next partition that goes has it gone on with
        while cache.has_left:
            await asyncio.sleep(FREEING_REST_S)
            await turns.in_turn(cache.free_some)
