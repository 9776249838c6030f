"""The source's side of a copy: the files of a snapshot, and the changes written after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import xxhash

from stateflow.clock import Clock
from stateflow.errors import MoveUnknown
from stateflow.replica.threads import Threads
from stateflow.runtime.rate_limit import DutyCycle
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.transfer import ChangeLog, Reading

FOLLOW_IDLE_S = 1.0
#: bytes of a base file in one message; packing a larger one delays the batches that arrive meanwhile
PIECE_BYTES = 1 << 18
#: fraction of this process's time for sending base files while batches come
SENDING_SHARE = 0.4


class Feeder:
    def __init__(self, node: ReplicaNode, clock: Clock, threads: Threads) -> None:
        self._node, self._clock, self._threads = node, clock, threads
        self._share = DutyCycle(SENDING_SHARE)
        self._loop = asyncio.get_running_loop()

    async def file(self, snapshot_id: str, name: str, offset: int) -> AsyncIterator[tuple[bytes, int]]:
        """Yields (piece, checksum) of a base file, from ``offset`` on. Raises MoveUnknown."""
        with self._node.sender.reading(snapshot_id):
            size = min(PIECE_BYTES, self._node.settings.chunk_bytes)
            with self._node.sender.open_file(snapshot_id, name) as file:
                file.seek(offset)
                while True:
                    began = self._clock.monotonic()
                    data, checksum = await self._threads.in_files(_chunk, file, size)
                    if not data:
                        return
                    yield data, checksum
                    now = self._clock.monotonic()
                    wait = self._share.wait_s(now, now - began, self._node.served_at)
                    if wait:
                        await asyncio.sleep(wait)

    async def changes(self, snapshot_id: str, after: int) -> AsyncIterator[Reading]:
        """Yields the changes after change set ``after``, up to the seal.

        While there are none, an empty reading comes every ``FOLLOW_IDLE_S``, so that a silent stream is a broken one.
        Raises MoveUnknown.
        """
        with self._node.sender.reading(snapshot_id) as changes:
            more = asyncio.Event()

            def wake() -> None:
                self._loop.call_soon_threadsafe(more.set)

            changes.wake = wake
            said = False
            changes.confirm(after)
            while True:
                more.clear()
                _check_log(changes)
                reading = changes.read(after, self._node.settings.chunk_bytes)
                after += len(reading.change_sets)
                if reading.change_sets or reading.seal or not said:
                    yield reading
                    said = True
                if reading.seal is not None:
                    return
                if not reading.lag_bytes:
                    try:
                        await asyncio.wait_for(more.wait(), FOLLOW_IDLE_S)
                    except TimeoutError:
                        said = False


def _chunk(file: Any, size: int) -> tuple[bytes, int]:
    data = file.read(size)
    return data, xxhash.xxh64_intdigest(data)


def _check_log(changes: ChangeLog) -> None:
    if changes.closed:
        raise MoveUnknown("the move was cancelled or restarted", remedy="start it again", move=changes.move_id)
    if changes.overflowed:
        raise MoveUnknown(
            "changes arrived faster than the target fetched them",
            remedy="raise STATEFLOW_REPLICA_CHANGE_LOG_BYTES_MAX",
            move=changes.move_id,
        )
