"""A replica's verifications: one partition at a time is read, however many are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from stateflow.replica.threads import Threads
from stateflow.runtime.control import Verification
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.verifying import Copy
from stateflow.types import PartitionId


class VerifyShell:
    def __init__(self, node: ReplicaNode, threads: Threads) -> None:
        self._node, self._threads = node, threads
        self._one = ThreadPoolExecutor(1, thread_name_prefix="verifying")
        self._loop = asyncio.get_running_loop()

    async def verify(self, partition: PartitionId, standby_of: int | None) -> AsyncIterator[Verification]:
        """Two: which moment is read, and what was found. None where it is not here. Whoever asks no longer ends it."""
        verifier = self._node.verifier
        beginning = self._threads.files.submit(verifier.begin, partition, standby_of)
        try:
            copy = await asyncio.wrap_future(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._unasked)  # its thread goes on, and nobody else knows what it made
            raise
        if copy is None:
            return
        stop = Event()
        try:
            yield Verification(copy.epoch, copy.sequence)
            yield await self._loop.run_in_executor(self._one, verifier.read, copy, stop.is_set)
        finally:
            stop.set()
            self._one.submit(verifier.end, copy)  # behind what still reads it

    def _unasked(self, begun: Future[Copy | None]) -> None:
        if not begun.cancelled() and begun.exception() is None and (copy := begun.result()) is not None:
            self._one.submit(self._node.verifier.end, copy)

    def close(self) -> None:
        self._one.shutdown(wait=False, cancel_futures=True)
