"""Reads partitions that are served here: entries of states, positions of sources, and kept outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from stateflow.errors import StateDamaged
from stateflow.partition import layout
from stateflow.partition.batches import Batches, not_owned
from stateflow.partition.entries import At, Row, StateColumns, listed
from stateflow.partition.layout import read_sequence, read_watermark
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import Retired, SourceView, sources_in
from stateflow.partition.processor import is_evolved
from stateflow.partition.registry import PartitionRegistry
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId


class Reader:
    """Reads states and positions on one replica. Called from several threads."""

    def __init__(self, registry: PartitionRegistry, batches: Batches) -> None:
        self._registry, self._batches = registry, batches

    def scan(self, partition: PartitionId, state: str, keys: Iterable[bytes] = ()) -> Iterator[Row]:
        """Yields the rows of one state as of one moment, see :class:`.StateColumns`, without entries that have expired
        by then. ``state``: an attribute, or an exact name. ``keys``: in their stored encoding; empty: all keys. Raises
        UnknownState, NotOwner."""
        with self._reading(partition) as store:
            _, cls = self._registry.operator(partition.operator)
            columns = StateColumns(cls, state, partition.operator, store)
            if not is_evolved(cls, store, self._registry.deployed(partition.operator)):
                store = self._evolved(partition)
            processor = self._registry.local(partition).processor
            # time must not go back: what has expired stays gone
            latest_us = 0 if processor is None else processor.latest_us
            watermark_us = read_watermark(store)
            if processor is not None and (held := self._held(partition)):
                watermark_us = processor.watermark_us(held)
            yield from columns.entries(store, At(max(self._registry.clock.now_us(), latest_us), watermark_us), keys)

    def scan_pages(self, partition: PartitionId, state: str, keys: Iterable[bytes] = ()) -> Iterator[list[bytes]]:
        """Yields the results of :meth:`scan` as Arrow IPC streams. If ``state`` is empty, yields the list of states,
        see :func:`.listed`."""
        with self._reading(partition) as store:
            _, cls = self._registry.operator(partition.operator)
            found = StateColumns(cls, state, partition.operator, store) if state else [listed(cls, store)]
        if isinstance(found, list):
            yield found
        else:
            yield from found.pages(self.scan(partition, state, keys), partition.partition)

    @contextlib.contextmanager
    def _reading(self, partition: PartitionId) -> Iterator[PartitionStore]:
        """Yields the partition's store. Raises NotOwner, also in place of an error in reading if the partition has left
        meanwhile."""
        store = self._owned_store(partition)  # first: if the partition is lost, its operator may be unknown, too
        try:
            yield store
        except Exception as error:
            self._owned_store(partition)
            self._batches.judge(self._registry.local(partition), error)
            raise

    def _evolved(self, partition: PartitionId) -> PartitionStore:
        """Returns the partition's store, with its states evolved to the present declaration. Raises the errors of
        :meth:`~stateflow.partition.batches.Batches.evolve`."""
        local = self._registry.local(partition)
        with local.work:
            self._owned_store(partition)
            self._batches.evolve(local)
            return self._owned_store(partition)

    def whole_before(self, operator: str, partitions: Iterable[int], source: str, batch: int) -> layout.Position | None:
        """Returns a source's position before ``batch`` if all ``partitions`` contain the batch before it; otherwise
        None. The position has the newest event time of all these partitions. Only memory is read: a partition that is
        not being served here counts as lacking the batch."""
        times: list[int] = []
        for number in partitions:
            local = self._registry.look(PartitionId(operator, number))
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
        """Returns the position of ``source`` in the partition; None: the partition contains no batch of the source.
        Raises NotOwner."""
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
        """Returns the positions held for the partition, which are newer than those in its database."""
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
