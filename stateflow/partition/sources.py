"""Sources of a partition: the position and the client of each, and the tombstone of a source that no longer sends.

:mod:`~stateflow.partition.positions` decides what is kept. This module reads this data from the partition's store, and
writes changes with its commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from stateflow.changes import Mutations
from stateflow.partition import layout
from stateflow.partition.positions import INITIAL, Batch, Positions, Retention, Retired, Tombstones
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId


class Advance(NamedTuple):
    """Positions of sources after a batch. ``silent``: sources whose watermark no longer counts; ``retired``: sources
    that the batch retires."""

    source: str
    position: layout.Position
    silent: Mapping[str, layout.Position]
    retired: Mapping[str, Retired]


class Sources:
    """Sources of one partition. Not thread-safe. ``positions``: what is known of them.

    Changes added to ``mutations`` take effect in memory once :meth:`committed`, or ``taken`` or ``retired`` of the
    positions, reports that they are on disk.
    """

    def __init__(self, partition: PartitionId, store: PartitionStore, retention: Retention) -> None:
        known = {
            entry[len(layout.POSITION) :].decode(): layout.Position.decode(value)
            for entry, value in store.scan(layout.POSITION)
        }
        sessions = {
            entry[len(layout.SESSION) :].decode(): layout.Session.decode(value)
            for entry, value in store.scan(layout.SESSION)
        }
        lapsed = [entry[len(layout.LAPSED) :].decode() for entry, _ in store.scan(layout.LAPSED)]
        self._store, self._retention = store, retention
        stopped = store.get(layout.STOPPED)
        stopped_us = -1 if stopped is None else int.from_bytes(stopped, "big")
        self.positions = Positions(partition, known, sessions, lapsed, stopped_us)
        self._tombstones = Tombstones(store, retention.retired_max)
        self._passed: set[str] = set()  # their last batch skipped the partition; the stored output is of the one before

    def contained(self, source: str) -> layout.Position | None:
        """Returns the position of the source's last batch here. None: the source is unknown, or the next batch must
        change more than the position, for example after a retirement.
        """
        return None if self.positions.is_recalled(source) else self.positions.reached_by(source)

    def adopt(self, held: Mapping[str, layout.Position]) -> None:
        """Accepts positions that were held for the partition; its next commit writes them."""
        for source, position in held.items():
            self.positions.reached(source, position)
        self._passed.update(held)

    def _recall(self, source: str) -> bool:
        """Tells whether the source is known. A source known by its tombstone is taken back."""
        if self.positions.knows(source):
            return True
        retired = self._tombstones.of(source)
        if retired is not None:
            self.positions.recall(source, retired)
        return retired is not None

    # -- a batch ------------------------------------------------------------------------------------------

    def check(self, batch: Batch, after: int | None) -> None:
        """Checks that the client may send the batch. Raises SourceTaken, SourceRetired, PositionGap."""
        if not self._recall(batch.source) and self._tombstones.forgotten_us is not None:
            self.positions.refuse_forgotten(batch, after, self._tombstones.forgotten_us)
        if batch.session is not None:
            self.positions.check_client(batch.source, batch.session)

    def replayed(self, batch: Batch, after: int | None, digest: int | None) -> layout.Piece | None:
        """Returns the stored result of a batch that was applied before: its source's newest one, or any of a run of a
        batch DataFrame; None: the batch is new.

        Raises BatchChanged, SourceRetired, and the errors of
        :meth:`~stateflow.partition.positions.Positions.is_replay`.
        """
        started = batch.source == INITIAL and (self.positions.others or self._tombstones.any)
        if not self.positions.is_replay(batch, after, started):
            return None
        contained = self._contained(batch)
        self.positions.check_digest(batch, contained.digest, digest)
        return contained

    def _contained(self, batch: Batch) -> layout.Piece:
        if batch.is_piece or batch.source.startswith(layout.REAL_TIME):
            stored = self._store.get(layout.piece_key(batch.source, batch.number))
            if stored is not None:
                return layout.Piece.decode(stored)
            if not self.is_newest(batch):  # the source has gone on since it was retired
                raise self.positions.output_is_gone(batch)
        position = self.positions.reached_by(batch.source)
        assert position is not None, batch
        passed = batch.source in self._passed
        output = b"" if passed else self._store.get(layout.OUTPUT + batch.source.encode()) or b""
        return layout.Piece(position.rows, position.digest, len(output), output)

    def is_newest(self, batch: Batch) -> bool:
        """Tells whether the batch is its source's newest one that is contained."""
        return batch.number == self.positions.last(batch.source)

    def takes_rows_later(self, batch: Batch) -> bool:
        """Tells whether a contained batch that brought no rows may still bring some.

        In a run of a batch DataFrame it may not, because a task has all of its rows at once.
        """
        return self.is_newest(batch) and not batch.is_piece

    def silent(self, now_us: int, serving: str) -> dict[str, layout.Position]:
        """See :meth:`~stateflow.partition.positions.Positions.silent`."""
        return self.positions.silent(now_us, self._retention.watermark_idle_us, serving)

    def advance(
        self,
        source: str,
        position: layout.Position,
        output: bytes,
        silent: Mapping[str, layout.Position],
        mutations: Mutations,
    ) -> Advance:
        """Adds a batch's changes to ``mutations``: to its source, to silent sources, and to sources that it retires."""
        positions, name = self.positions, source.encode()
        if positions.is_recalled(source):
            mutations.deletes.append(layout.RETIRED + name)
            if (session := positions.session(source)) is not None:
                mutations.puts.append((layout.SESSION + name, session.encode()))
        mutations.puts += [(layout.POSITION + name, position.encode()), *self._stored(source, position, output)]
        if retired := positions.idle(position.at_us, self._retention, source):
            self._tombstones.bury(retired, mutations)
        if silent:
            # written with the resulting watermark: a copy that has the batch keeps that decision
            silent = {each: without for each, without in silent.items() if each not in retired}
            mutations.puts += [(layout.POSITION + each.encode(), without.encode()) for each, without in silent.items()]
        return Advance(source, position, silent, retired)

    def _stored(self, source: str, position: layout.Position, output: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the mutations that store a batch's output.

        A run of a batch DataFrame keeps every output, because another evaluation needs them all. A query in real-time
        mode keeps those that its client has not settled, because Spark may run an epoch again and end it elsewhere.
        """
        if source.startswith(layout.REAL_TIME):
            piece = layout.Piece(position.rows, position.digest, len(output), output)
            return [(layout.piece_key(source, position.batch), piece.encode())] if output else []
        if position.client or not source.startswith(layout.BATCH_RUN):
            return [(layout.OUTPUT + source.encode(), output)]
        before = self._store.get(layout.piece_key(source, position.batch - 1)) if position.batch else None
        bytes_before = 0 if before is None else layout.Piece.decode(before).bytes_up_to
        piece = layout.Piece(position.rows, position.digest, bytes_before + len(output), output)
        return [(layout.piece_key(source, position.batch), piece.encode())]

    def committed(self, advance: Advance) -> None:
        self._passed.discard(advance.source)
        self.positions.reached(advance.source, advance.position)
        self.positions.silenced(advance.silent)
        self.positions.retired(advance.retired)

    # -- a client, or none any more -----------------------------------------------------------------------

    def open(self, source: str, session: layout.Session, settled: int | None) -> Mutations | None:
        """Returns the mutations that refuse older clients of a source from now on; None: they are refused already.

        Raises SourceTaken if this client is older itself, and SourceRetired if the client may need outputs of a source
        that has none.

        Args:
            settled: outputs of batches up to this one are no longer needed; None: remove none.
        """
        self._recall(source)
        if settled is not None and self.positions.is_recalled(source):
            last = self.positions.last(source)
            if last is not None and last > settled:
                raise self.positions.output_is_gone(Batch(source, last))
        if not self.positions.is_newer(source, session):
            return None
        put = layout.SESSION + source.encode(), session.encode()
        if self.positions.is_recalled(source):  # it stays retired until it sends
            tombstone = replace(self.positions.tombstone(source), session=session)
            put = layout.RETIRED + source.encode(), tombstone.encode()
        mutations = Mutations(puts=[put], deletes=[layout.LAPSED + source.encode()])
        if settled is not None and settled >= 0:
            mutations.clears.append((layout.piece_key(source, 0), layout.piece_key(source, settled + 1)))
        return mutations

    def retire(self, source: str) -> tuple[int, Mutations] | None:
        """Returns (the source's last batch, mutations that leave only its tombstone); None: the source is unknown."""
        if not self.positions.knows(source) or self.positions.is_recalled(source) or source == INITIAL:
            return None
        mutations, tombstone = Mutations(), self.positions.tombstone(source)
        self._tombstones.bury({source: tombstone}, mutations)
        return tombstone.batch, mutations

    def without_output(self, source: str, batch: int) -> tuple[int, Mutations]:
        """Returns (bytes of one batch's stored output, mutations that remove it); (0, no mutations) if the batch or its
        output is not stored here. The batch stays contained; sent again, it is answered with no rows."""
        mutations, key = Mutations(), layout.piece_key(source, batch)
        stored = self._store.get(key)
        if stored is not None:
            piece = layout.Piece.decode(stored)
            if piece.output:
                mutations.puts.append((key, replace(piece, output=b"").encode()))
            return len(piece.output), mutations
        key = layout.OUTPUT + source.encode()
        if source in self._passed or self.positions.last(source) != batch or not (output := self._store.get(key)):
            return 0, mutations
        mutations.puts.append((key, b""))
        return len(output), mutations
