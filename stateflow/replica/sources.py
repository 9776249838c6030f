"""Sources of partitions, and how far each has come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

from stateflow.partition.layout import Position, Session
from stateflow.partition.local_partition import left
from stateflow.partition.positions import SourceView
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.applying import Confirmations
from stateflow.replica.executor import BatchThread, Threads
from stateflow.types import PartitionId, ReplicaInfo


class Sources:
    """Positions, kept outputs and retirement of sources. Methods raise NotOwner, LeaseLost."""

    def __init__(
        self, node: ReplicaNode, threads: Threads, batch_thread: BatchThread, confirmations: Confirmations
    ) -> None:
        self._node, self._threads, self._turns, self._confirmations = node, threads, batch_thread, confirmations

    async def positions(
        self, operator: str, source: str, partitions: Collection[int], before: int | None = None
    ) -> Position | dict[int, Position]:
        """Returns a source's positions, by partition; partitions without a batch of it are left out.

        If all partitions contain the batch before ``before``, returns one position, from memory; every task of a
        micro-batch asks this way.
        """
        if before is not None:
            whole = self._node.reader.whole_before(operator, partitions, source, before)
            if whole is not None:
                return whole
        found: dict[int, Position] = {}
        for number in partitions:
            position = await self._threads.in_files(self._node.reader.position, PartitionId(operator, number), source)
            if position is not None:
                found[number] = position
        return found

    async def open(
        self, operator: str, source: str, partitions: Collection[int], session: Session, settled: int | None = None
    ) -> Position | dict[int, Position]:
        """Opens a session of a source, and refuses older clients of it from then on. Returns its positions.

        The client treats the batches that partitions contain now as acknowledged. So if acknowledgements wait for a
        standby, this call waits, too. Raises SourceTaken, StandbyMissing, SourceRetired.

        Args:
            settled: see :meth:`~stateflow.partition.sources.Sources.open`.
        """
        at: dict[PartitionId, int] = {}
        for number in partitions:
            partition = PartitionId(operator, number)
            at[partition] = await self._turns.between_batches(
                self._node.batches.open_source, partition, source, session, settled
            )
        if self._confirmations.is_needed:
            deadline = self._confirmations.deadline()
            for partition, sequence in at.items():
                missing = await self._confirmations.of(partition, sequence, deadline)
                if missing is not None:
                    raise left(partition) if isinstance(missing, ReplicaInfo) else missing
        return await self.positions(operator, source, partitions)

    async def outputs(
        self, operator: str, source: str, partitions: Collection[int], after: int
    ) -> AsyncIterator[tuple[int, int, bytes]]:
        """Yields (partition, batch, kept output) of batches after ``after``."""
        for number in partitions:
            partition = PartitionId(operator, number)
            for batch, output in await self._threads.in_files(self._node.reader.outputs, partition, source, after):
                yield number, batch, output

    async def views(self, operator: str, partitions: Collection[int]) -> AsyncIterator[tuple[int, list[SourceView]]]:
        """Yields (partition, sources that have sent to it)."""
        for number in partitions:
            yield number, await self._threads.in_files(self._node.reader.sources, PartitionId(operator, number))

    async def retire(self, operator: str, source: str, partitions: Collection[int]) -> int:
        """Retires a source, and returns how many partitions had more of it than a tombstone."""
        retired = 0
        for number in partitions:
            retired += await self._turns.between_batches(
                self._node.batches.retire_source, PartitionId(operator, number), source
            )
        return retired

    async def drop_output(
        self, operator: str, source: str, batch: int, partitions: Collection[int], apply: bool
    ) -> dict[int, int]:
        """Returns the size of a batch's stored output, by partition, and drops the output if ``apply``.

        Partitions that kept no output are left out.
        """
        found: dict[int, int] = {}
        for number in partitions:
            partition = PartitionId(operator, number)
            size = await self._turns.between_batches(self._node.batches.drop_output, partition, source, batch, apply)
            if size:
                found[number] = size
        return found
