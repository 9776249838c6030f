"""Waiting for the next change of a partition's lifecycle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from stateflow.runtime.replica import ReplicaNode
from stateflow.types import PartitionId


class Changed:
    """Events of lifecycle changes, by partition.

    Args:
        then: called in the event loop after each change.
    """

    def __init__(self, node: ReplicaNode, then: Callable[[], None]) -> None:
        self._then = then
        self._events: WeakValueDictionary[PartitionId, asyncio.Event] = WeakValueDictionary()  # while a caller waits
        self._loop = asyncio.get_running_loop()
        node.on_change(self._in_thread)

    def next(self, partition: PartitionId) -> asyncio.Event:
        """Returns the event that is set at the next change. Take it before looking at the state that may change."""
        return self._events.setdefault(partition, asyncio.Event())

    def _in_thread(self, partition: PartitionId) -> None:
        self._loop.call_soon_threadsafe(self._wake, partition)

    def _wake(self, partition: PartitionId) -> None:
        event = self._events.pop(partition, None)
        if event is not None:
            event.set()
        self._then()
