"""Thread pools for work that would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """The thread pools of a replica.

    ``files``: long work on files. ``quick``: work that a move's pause waits for. ``sizes``: measurements of disk usage;
    those who wait for them take a replica without an answer for one without room.
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
        for pool in (self.files, self.quick, self.sizes):  # a thread may wait for a partition that never comes back
            pool.shutdown(wait=False, cancel_futures=True)
