"""Reads from the partitions owned here: states by key, and positions of sources.

:class:`Reader` reads while batches go on. It holds ``work`` only to evolve states that no batch has evolved since a
deployment. Positions include those of batches that skipped the partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stateflow.errors import StateDamaged
from stateflow.partition import layout
from stateflow.partition.batches import Batches, not_owned
from stateflow.partition.commits import read_sequence
from stateflow.partition.entries import At, StateColumns, declaration_of, entries_of
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import Retired, SourceView, sources_in
from stateflow.partition.processor import is_evolved, read_watermark
from stateflow.partition.registry import PartitionRegistry
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId


class Reader:
    """Reader of one replica. Called from several threads."""

    def __init__(self, registry: PartitionRegistry, batches: Batches) -> None:
        self._registry, self._batches = registry, batches

    def scan(
        self, partition: PartitionId, state: str, keys: Iterable[bytes] = ()
    ) -> Iterator[tuple[object, object, object]]:
        """Yields (key, entry key or None, value) of one state as of one moment, without entries that have expired by
        then. Raises UnknownState, NotOwner.

        Args:
            keys: in their stored encoding; none: all keys.
        """
        store = self._owned_store(partition)  # first: a partition that lost its data knows no operator either
        _, cls = self._registry.operator(partition.operator)
        declaration = declaration_of(cls, state, partition.operator)
        if not is_evolved(cls, store, self._registry.deployed(partition.operator)):
            store = self._evolved(partition)
        processor = self._registry.local(partition).processor
        latest_us = (
            0 if processor is None else processor.latest_us
        )  # time must not go back: what has expired stays gone
        watermark_us = read_watermark(store)
        if processor is not None and (held := self._held(partition)):
            watermark_us = processor.watermark_us(held)
        at = At(max(self._registry.clock.now_us(), latest_us), watermark_us)
        try:
            yield from entries_of(declaration, store, at, keys)
        except Exception as error:
            self._owned_store(partition)  # the partition left meanwhile: NotOwner says it better
            self._batches.judge(self._registry.local(partition), error)
            raise

    def scan_pages(self, partition: PartitionId, state: str, keys: Iterable[bytes] = ()) -> Iterator[list[bytes]]:
        """Yields the results of :meth:`scan` as Arrow IPC streams, see :class:`.StateColumns`."""
        self._owned_store(partition)
        _, cls = self._registry.operator(partition.operator)
        columns = StateColumns(cls, state, partition.operator)
        yield from columns.pages(self.scan(partition, state, keys), partition.partition)

    def _evolved(self, partition: PartitionId) -> PartitionStore:
        """Returns the partition's store, with its states evolved to the present declaration. Raises the errors of
        :meth:`~stateflow.partition.batches.Batches.evolve`."""
        local = self._registry.local(partition)
        with local.work:
            self._owned_store(partition)
            self._batches.evolve(local)
            return self._owned_store(partition)

    def whole_before(self, operator: str, partitions: Iterable[int], source: str, batch: int) -> layout.Position | None:
        """Returns the position of the batch before ``batch``, with the newest event time up to it; None: not all of
        these partitions contain it. Reads memory only, so the result is None also if one of the partitions is not being
        served here."""
        times: list[int] = []
        for number in partitions:
            local = self._registry.local(PartitionId(operator, number))
            skipped, processor = local.skipped, local.processor
            reached = None if processor is None else processor.reached(source)
            if skipped is not None and processor is not None and skipped.sequence == processor.sequence:
                reached = skipped.held.get(source, reached)
            if reached is None or reached.batch < batch - 1 or local.lifecycle.state is not State.OWNED:
                return None
            event_us = reached.event_us if reached.batch < batch else reached.event_before_us
            if event_us is not None:
                times.append(event_us)
        return layout.Position(batch - 1, event_us=max(times, default=None))

    def position(self, partition: PartitionId, source: str) -> layout.Position | None:
        """Returns the position of ``source`` in the partition; None: no batch of it is known. Raises NotOwner."""
        store = self._owned_store(partition)
        if (held := self._held(partition).get(source)) is not None:
            return held
        stored = store.get(layout.POSITION + source.encode())
        if stored is not None:
            return layout.Position.decode(stored)
        retired = store.get(layout.RETIRED + source.encode())
        contained = None if retired is None else Retired.decode(retired).position
        return None if contained is None or contained.batch < 0 else contained

    def outputs(self, partition: PartitionId, source: str, after: int) -> list[tuple[int, bytes]]:
        """Returns (batch, output) of the batches after ``after`` whose output is kept, in order. Raises NotOwner."""
        store = self._owned_store(partition)
        return [(number, piece.output) for number, piece in layout.pieces(store, source, after)]

    def sources(self, partition: PartitionId) -> list[SourceView]:
        """Returns the sources that have sent to the partition, as far as they are known. Raises NotOwner."""
        return sources_in(self._owned_store(partition), self._held(partition))

    def _held(self, partition: PartitionId) -> Mapping[str, layout.Position]:
        """Returns the positions of batches that skipped the partition, beyond what its database has."""
        local = self._registry.look(partition)
        if local.skipped is None:
            return {}
        processor = local.processor
        sequence = read_sequence(self._registry.store(local)) if processor is None else processor.sequence
        return self._registry.skipped_batches.held(local, local.lifecycle.epoch, sequence)

    def _owned_store(self, partition: PartitionId) -> PartitionStore:
        local = self._registry.look(partition)
        if local.lifecycle.state is not State.OWNED:
            raise local.lost or not_owned(local)
        try:
            return self._registry.store(local)
        except StateDamaged as error:
            self._batches.judge(local, error)
            raise
