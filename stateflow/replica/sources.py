"""Who sends to partitions, and how far they have come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

from stateflow.replica.threads import Threads
from stateflow.replica.turns import Turns
from stateflow.runtime.layout import Position, Session
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.retirement import SourceView
from stateflow.types import PartitionId


class Sources:
    """Methods raise NotOwner, LeaseLost."""

    def __init__(self, node: ReplicaNode, threads: Threads, turns: Turns) -> None:
        self._node, self._threads, self._turns = node, threads, turns

    async def positions(
        self, operator: str, source: str, partitions: Collection[int], before: int | None = None
    ) -> Position | dict[int, Position]:
        """How far a source has come, by partition; those that have seen nothing of it are left out. One position where
        all of them contain the batch before ``before``, as every task of a micro-batch asks: from memory."""
        if before is not None:
            whole = self._node.whole_before(operator, partitions, source, before)
            if whole is not None:
                return whole
        found: dict[int, Position] = {}
        for number in partitions:
            position = await self._threads.in_files(self._node.position, PartitionId(operator, number), source)
            if position is not None:
                found[number] = position
        return found

    async def open(
        self, operator: str, source: str, partitions: Collection[int], session: Session
    ) -> Position | dict[int, Position]:
        """Refuse older clients of it from now on. Raises SourceTaken."""
        for number in partitions:
            await self._turns.in_turn(self._node.open_source, PartitionId(operator, number), source, session)
        return await self.positions(operator, source, partitions)

    async def views(self, operator: str, partitions: Collection[int]) -> AsyncIterator[tuple[int, list[SourceView]]]:
        """(partition, who has sent to it)."""
        for number in partitions:
            yield number, await self._threads.in_files(self._node.sources, PartitionId(operator, number))

    async def retire(self, operator: str, source: str, partitions: Collection[int]) -> int:
        """Returns how many partitions had more of it than a tombstone."""
        retired = 0
        for number in partitions:
            retired += await self._turns.in_turn(self._node.retire_source, PartitionId(operator, number), source)
        return retired
