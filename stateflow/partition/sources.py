"""Sources of a partition, with their positions, clients and tombstones; and batches that skip the partition.

:mod:`~stateflow.partition.positions` decides what is kept of a source. :class:`Sources` reads the sources from the
partition's store, and adds their changes to the partition's commits.

A batch *skips* a partition for which it has no rows and in which nothing is due. The source's position still advances
in every partition, and writing it partition by partition would cost as much as a row does in each. The positions of the
partitions that a batch skips are therefore kept in one place, a database of the replica's own
(:class:`SkippedBatches`), with one write for all of them. Such a position is *held* for the partition, and becomes the
partition's own with its next commit. Before a copy of the partition is taken (a snapshot, a checkpoint, a seal),
:meth:`SkippedBatches.settle` commits the held positions.

A held position belongs to a partition at one epoch and sequence. The partition's next commit makes it void. So does
everything that rolls a copy back: if a power loss destroys a commit, positions held after that commit are void, too,
and the gap is noticed. A start discards void positions before the replica serves, because other commits may reach the
same sequence. It also discards those of partitions that are not owned here.

A void position is forgotten: in memory at once, in the database with the next write for its source, or by
:meth:`SkippedBatches.tidy` once a move is over or an operator was dropped. After a crash before that, the next start
discards it. A source that has ended disappears in this way, too: each batch that visits a partition makes all positions
void that are held for the partition, and a source without any held position is removed.

A partition is skipped only after one of its own batches, committed here, has determined until when nothing is due: see
:class:`SkipGrant`. Everything else that a visit does, such as sweeping expired state, is done at least every
``VISIT_S_MAX`` seconds as long as batches arrive. While a sweep finds many expired entries, every batch visits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from stateflow.changes import Mutations
from stateflow.durable import listed
from stateflow.errors import DecodeError, StateMissing
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.partition import layout
from stateflow.partition.environment import Environment
from stateflow.partition.held import HeldPositions, name_of, range_of, read
from stateflow.partition.layout import Committer, Position, read_sequence
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import (
    INITIAL,
    Batch,
    Positions,
    Retention,
    Retired,
    Tombstones,
    adopted,
    behind,
    watermark_after,
)
from stateflow.storage import PartitionStore
from stateflow.storage.commit_log import CommitLog
from stateflow.storage.faults import damage
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: folder of the database, in the data directory
FOLDER = "passed"
#: longest time without a visit, seconds; each partition is visited again after half of this time or more, so that not
#: all partitions are visited at once
VISIT_S_MAX = 60.0
_GOLDEN = 0.6180339887498949

# -- Sources of one partition ----------------------------------------------------------------------------------------


class Advance(NamedTuple):
    """Positions of sources after a batch. ``silent``: sources whose watermark no longer counts; ``retired``: sources
    that the batch retires."""

    source: str
    position: Position
    silent: Mapping[str, Position]
    retired: Mapping[str, Retired]


class Sources:
    """Sources of one partition, with their ``positions``. Not thread-safe. Methods add changes to ``mutations``. In
    memory, these take effect only when the caller reports their commit, by :meth:`committed`, or by ``taken`` or
    ``retired`` of the positions."""

    def __init__(self, partition: PartitionId, store: PartitionStore, retention: Retention) -> None:
        known = {
            entry[len(layout.POSITION) :].decode(): Position.decode(value)
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
        self._passed: set[str] = set()  # their last batch skipped the partition; the stored output is of an earlier one

    def contained(self, source: str) -> Position | None:
        """Returns the position of the source's last batch here. None: the source is unknown, or the next batch must
        change more than the position, for example after a retirement.
        """
        return None if self.positions.is_recalled(source) else self.positions.reached_by(source)

    def adopt(self, held: Mapping[str, Position]) -> None:
        """Accepts positions that were held for the partition; its next commit writes them."""
        for source, position in held.items():
            self.positions.reached(source, position)
        self._passed.update(held)

    def _recall(self, source: str) -> bool:
        """Tells whether the source is known. Makes a source that has only a tombstone known again."""
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
        """Returns the stored result of a batch that was applied before; None: the batch is new.

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
            if not self.is_newest(batch):  # the source has sent further batches since it was retired
                raise self.positions.output_is_gone(batch)
        position = self.positions.reached_by(batch.source)
        assert position is not None, batch
        passed = batch.source in self._passed
        output = b"" if passed else self._store.get(layout.OUTPUT + batch.source.encode()) or b""
        return layout.Piece(position.rows, position.digest, len(output), output)

    def is_newest(self, batch: Batch) -> bool:
        """Tells whether the batch is the newest one of its source that the partition contains."""
        return batch.number == self.positions.last(batch.source)

    def takes_rows_later(self, batch: Batch) -> bool:
        """Tells whether a contained batch that brought no rows may still bring some.

        A batch in a run of a batch DataFrame may not, because a task sends all of its rows at once.
        """
        return self.is_newest(batch) and not batch.is_piece

    def silent(self, now_us: int, serving: str) -> dict[str, Position]:
        """Returns the sources whose watermark no longer counts, see
        :meth:`~stateflow.partition.positions.Positions.silent`."""
        return self.positions.silent(now_us, self._retention.watermark_idle_us, serving)

    def advance(
        self,
        source: str,
        position: Position,
        output: bytes,
        silent: Mapping[str, Position],
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
            # written with the resulting watermark, so that a copy with the batch has the same decision
            silent = {each: without for each, without in silent.items() if each not in retired}
            mutations.puts += [(layout.POSITION + each.encode(), without.encode()) for each, without in silent.items()]
        return Advance(source, position, silent, retired)

    def _stored(self, source: str, position: Position, output: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the mutations that store a batch's output.

        A run of a batch DataFrame keeps every output, because another evaluation needs them all. A query in real-time
        mode keeps the outputs that its client has not settled, because Spark may run an epoch again, with another end.
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
        if advance.retired:
            too_many = min(len(advance.retired), self.positions.count - self._retention.sources_max)
            if too_many > 0:  # the others were retired for their age
                LIMIT_HITS.note("sources", too_many)
        self.positions.retired(advance.retired)

    # -- clients and retirement ---------------------------------------------------------------------------

    def open(self, source: str, session: layout.Session, settled: int | None) -> Mutations | None:
        """Returns the mutations that refuse older clients of a source from now on; None: they are refused already.

        Raises SourceTaken if there is a newer client, and SourceRetired if the client may need outputs that were
        removed when the source was retired.

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
        output is not stored here. The batch stays contained; if it is sent again, the answer has no rows."""
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


# -- Batches that skip partitions ------------------------------------------------------------------------------------


class Serving(Protocol):
    """A partition being served, see :class:`~stateflow.partition.processor.PartitionProcessor`."""

    @property
    def sequence(self) -> int: ...

    def runs(self, operator: type) -> bool: ...

    def contains(self, source: str) -> Position | None:
        """Returns the position of the source's last batch here; None also if the next batch must change more than the
        position."""
        ...

    def settle(self, held: dict[str, Position]) -> None: ...


@dataclass(slots=True)
class SkipGrant:
    """Describes batches that need not visit a partition: they arrive before ``until`` (monotonic seconds), have no rows
    for the partition, a watermark below ``event_us`` and a processing time below ``processing_us``."""

    processor: Serving
    until: float
    event_us: float
    processing_us: float


@dataclass(slots=True)
class SkippedPositions:
    """Positions held for one partition at ``epoch`` and ``sequence``. ``held``: positions by source. ``granted``:
    batches that may skip the partition; None: every batch visits the partition."""

    epoch: int
    sequence: int
    held: dict[str, Position] = field(default_factory=dict)
    granted: SkipGrant | None = None


class SkippablePartition(Protocol):
    """The attributes that skipping needs of a :class:`~stateflow.partition.local_partition.LocalPartition`."""

    id: PartitionId
    skipped: SkippedPositions | None
    logs: dict[str, Any]

    @property
    def lifecycle(self) -> Any: ...

    @property
    def processor(self) -> Any: ...

    def tell(self, sequence: int, encode: Any) -> None: ...


class SkippedBatches:
    """Positions held for the partitions of one replica. Called from several threads. Lock order: a partition's
    ``work``, or its ``mutex`` with no batch running, comes before the lock of this class.

    Args:
        root: the data directory.
        durable: whether held positions survive a power loss, as commits do. None: no positions are held, and every
            batch visits all partitions.
    """

    def __init__(self, root: Path, environment: Environment, durable: bool | None) -> None:
        self._directory, self._environment, self._durable = root / FOLDER, environment, durable
        self._lock: AbstractContextManager[Any] = environment.mutex()
        self._granted: dict[str, dict[int, SkippablePartition]] = {}  # partitions with a SkipGrant, by operator
        self._sources: dict[tuple[str, str], HeldPositions] = {}  # by operator and source
        self._gone: set[tuple[str, str]] = set()  # sources that only the database may have
        self._owned: dict[PartitionId, tuple[int, int]] = {}  # epoch and sequence of the partitions found at start
        self._store: PartitionStore | None = None
        self._closed = False
        #: memory has forgotten positions that may still be on disk, see :meth:`tidy`
        self.has_void = False

    # -- at start -----------------------------------------------------------------------------------------

    def find(self) -> None:
        """Reads the positions that the last process left. A database that cannot be read is quarantined; partitions
        then lack batches, which their sources must send again."""
        files = listed(self._directory)
        if not any(path.suffix in (".log", ".sst") or path.name == "CURRENT" for path in files):
            return  # it was never created, or not completely
        try:
            # a database that lost its file CURRENT would be taken for one that is not created yet
            self._store = self._environment.open(self._directory, create=False)
            self._sources = read(self._store.scan(b""))
        except Exception as error:
            if not isinstance(error, StateMissing | DecodeError) and damage(error) is None:
                raise
            self._close()
            aside = self._directory.parent / f"{FOLDER}-damaged-{self._environment.new_id()}"
            self._directory.rename(aside)
            self._environment.sync([self._directory.parent])
            log.error(
                "positions of skipped batches cannot be read and are quarantined as %s: %s; sources resend the missing "
                "batches, or report which batch to rewind to",
                aside,
                str(error),  # whoever keeps the error keeps an iterator, which keeps the new database locked
            )

    def found(self, partition: PartitionId, epoch: int, sequence: int) -> SkippedPositions | None:
        """Returns the positions left for a partition that is owned here; None: there are none."""
        self._owned[partition] = epoch, sequence
        held: dict[str, Position] = {}
        for (operator, source), each in self._sources.items():
            if operator == partition.operator and (position := each.at(partition.partition, epoch, sequence)):
                held[source] = position
        return SkippedPositions(epoch, sequence, held) if held else None

    def begin(self, quarantined: Callable[[str], Collection[int]]) -> None:
        """Durably discards positions that are void, or whose partition is not owned here. Those of quarantined
        partitions stay, because the partitions may be put back.

        Call it after :meth:`found` was called for all partitions. Raises errors of the disk.

        Args:
            quarantined: returns the numbers of an operator's quarantined partitions.
        """
        for (operator, source), each in list(self._sources.items()):
            aside = quarantined(operator)
            void: list[int] = []
            for number in each.partitions():
                owned = self._owned.get(PartitionId(operator, number))
                stands = number in aside if owned is None else each.at(number, *owned) is not None
                if not stands:
                    void.append(number)
            self._discard(operator, source, void)
        self._owned.clear()
        self._remove_void(sync=True)

    # -- while it serves ----------------------------------------------------------------------------------

    def grant(self, local: SkippablePartition, processor: Serving, until: SkipGrant) -> None:
        """Lets the batches that ``until`` describes skip a partition from now on. Callers hold ``work``, after a batch
        that was committed or found committed."""
        epoch, sequence = local.lifecycle.epoch, processor.sequence
        with self._lock:
            skipped = local.skipped
            if skipped is not None and (skipped.epoch, skipped.sequence) != (epoch, sequence):
                self._forget(local)
            if self._durable is None or local.logs:
                return
            if local.skipped is None:
                local.skipped = SkippedPositions(epoch, sequence)
            local.skipped.granted = until
            self._granted.setdefault(local.id.operator, {})[local.id.partition] = local

    def revoke(self, local: SkippablePartition) -> None:
        """Makes every batch visit the partition again, or wait for it, because other work on it is about to begin."""
        if local.skipped is not None:
            with self._lock:
                local.skipped.granted = None
                self._granted.get(local.id.operator, {}).pop(local.id.partition, None)

    def held(self, local: SkippablePartition, epoch: int, sequence: int) -> dict[str, Position]:
        """Returns the positions held for a partition that is at this epoch and sequence."""
        skipped = local.skipped
        if skipped is None or (skipped.epoch, skipped.sequence) != (epoch, sequence):
            return {}
        return skipped.held

    def skip(
        self,
        operator: str,
        cls: type,
        batch: Batch,
        partitions: Sequence[int],
        epochs: Sequence[int],
        counts: Sequence[int],
        now: float,
        now_us: int,
    ) -> list[int]:
        """Makes a batch skip the partitions that need no visit, as durably as commits are. Returns the indices of these
        partitions in ``partitions``, ascending. Raises errors of the disk.

        Args:
            cls: the operator's class that is deployed now.
            counts: rows of each partition.
            now: monotonic seconds.
            now_us: processing time.
        """
        if not _may_skip(batch) or (local_partitions := self._granted.get(operator)) is None:
            return []
        source, last, watermark_us = batch.source, batch.number - 1, batch.watermark_us
        places: list[int] = []
        passed: list[SkippedPositions] = []
        kinds: dict[tuple[Any, ...], int] = {}
        positions: list[Position] = []
        kind: list[int] = []
        with self._lock:
            if self._closed:
                return []
            for place, count in enumerate(counts):
                if count or (local := local_partitions.get(partitions[place])) is None:
                    continue
                skipped = local.skipped
                if skipped is None or (granted := skipped.granted) is None:
                    continue
                epoch, lifecycle = epochs[place], local.lifecycle
                if skipped.epoch != epoch or lifecycle.epoch != epoch or lifecycle.state is not State.OWNED:
                    continue
                if now >= granted.until or now_us >= granted.processing_us:
                    continue
                if watermark_us is not None and watermark_us >= granted.event_us:
                    continue
                processor = granted.processor
                if local.logs or local.processor is not processor or not processor.runs(cls):
                    continue
                before = skipped.held.get(source) or processor.contains(source)
                if before is None or before.batch != last:
                    continue
                if before.watermark_us is None and watermark_us is not None:
                    continue  # the source counts from this batch on: later the order of the batches is not known
                alike = before.watermark_us, before.event_us, before.known
                if (number := kinds.get(alike)) is None:
                    number = kinds[alike] = len(positions)
                    positions.append(behind(before, batch, 0, now_us))
                places.append(place)
                passed.append(skipped)
                kind.append(number)
            if not places:
                return []
            self._write(operator, source, [partitions[place] for place in places], passed, positions, kind)
            for skipped, number in zip(passed, kind, strict=True):
                skipped.held[source] = positions[number]
        return places

    def _write(
        self,
        operator: str,
        source: str,
        numbers: list[int],
        passed: list[SkippedPositions],
        positions: list[Position],
        kind: list[int],
    ) -> None:
        key, mutations = (operator, source), Mutations()
        found = self._sources.get(key)
        if found is None:
            self._gone.add(key)  # should the write fail, the database may still have it
        held = HeldPositions() if found is None else found.copy()  # memory follows the database
        changed = held.advance(
            np.array(numbers),
            np.array(kind, np.uint32),
            positions,
            np.array([skipped.epoch for skipped in passed], np.uint64),
            np.array([skipped.sequence for skipped in passed], np.uint64),
        )
        held.store(name_of(*key), *changed, mutations)
        self._apply(mutations, sync=bool(self._durable))
        self._sources[key] = held

    def settle(self, local: SkippablePartition, store: PartitionStore, commits: CommitLog | None) -> None:
        """Writes the positions held for a partition to its own database. No positions are held for it before its next
        batch.

        Callers hold ``work``, or ``mutex`` with no batch running. Raises errors of the disk.
        """
        self.revoke(local)
        skipped, processor = local.skipped, local.processor
        if skipped is None:
            return
        epoch, sequence = local.lifecycle.epoch, read_sequence(store) if processor is None else processor.sequence
        if (held := self.held(local, epoch, sequence)) and processor is not None:
            processor.settle(held)
        elif held:
            committer = Committer(local.id, store, epoch, commits, local.tell)
            committer.adopted |= adopted(held, watermark_after(store, held))
            committer.commit("", -1, Mutations())
        with self._lock:
            self._forget(local)

    # -- positions that are void --------------------------------------------------------------------------

    def committed(self, local: SkippablePartition, sequence: int) -> None:
        """Forgets the positions held for a partition if a commit other than a batch has included them. Callers hold
        ``work``. ``sequence``: the partition's present one."""
        if local.skipped is not None and local.skipped.sequence != sequence:
            with self._lock:
                self._forget(local)
                if self._gone:
                    self.tidy()

    def drop(self, operator: str, epoch: int) -> None:
        """Forgets the positions held for an operator's partitions at ``epoch`` and older epochs, which were deleted."""
        with self._lock:
            for key, each in list(self._sources.items()):
                if key[0] == operator:
                    self._discard(*key, each.partitions(epoch))
            if not self._granted.get(operator):
                self._granted.pop(operator, None)
            self.tidy()

    def tidy(self) -> None:
        """Removes from disk the positions that memory has forgotten. Errors are only logged: positions that stay are
        void, and the next start removes them."""
        with self._lock:
            if self._closed:
                return
            try:
                self._remove_void(sync=bool(self._durable))
            except Exception as error:  # noqa: BLE001 - it is logged
                log.warning("void positions of skipped batches stay on disk until the next start: %s", error)

    def close(self) -> None:
        with self._lock:
            for held in self._sources.values():
                if held.changes:
                    held.whole_bytes = 0  # whole entries are all that the former release reads
            self.tidy()
            self._closed = True
            self._close()

    def _forget(self, local: SkippablePartition) -> None:
        """Forgets the positions held for a partition, because the partition has committed them, or has left. The
        database forgets them with the next write for their source."""
        skipped, local.skipped = local.skipped, None
        if skipped is not None:
            for source in skipped.held:
                self._discard(local.id.operator, source, [local.id.partition])

    def _discard(self, operator: str, source: str, numbers: Iterable[int]) -> None:
        key = operator, source
        if (held := self._sources.get(key)) is not None:
            held.discard(numbers)
            self.has_void = True
            if not held.count:
                del self._sources[key]
                self._gone.add(key)

    def _remove_void(self, *, sync: bool) -> None:
        mutations = Mutations()
        changed = {key: each.copy() for key, each in self._sources.items() if each.stale or not each.whole_bytes}
        for key, held in changed.items():
            held.store(name_of(*key), [], [], mutations)
        if changed or self._gone:
            self._apply(mutations, sync=sync)
            self._sources.update(changed)
        self.has_void = False

    # -- the database -------------------------------------------------------------------------------------

    def _apply(self, mutations: Mutations, *, sync: bool) -> None:
        """Writes to the database, and removes sources for which no position is held any more."""
        for key in self._gone:
            name = name_of(*key)
            mutations.clears.append(range_of(name))
            mutations.deletes.append(name)
        try:
            self._open().apply(mutations, sync=sync)
        except BaseException:
            for held in self._sources.values():
                held.whole_bytes = 0  # the write may be on disk nevertheless, so that a change would not fit
            self._close()  # the database refuses writes until it is reopened
            raise
        self._gone.clear()

    def _open(self) -> PartitionStore:
        if self._store is None:
            is_new = not self._directory.exists()
            self._store = self._environment.open(self._directory, create=True)
            if is_new:  # its files are only as durable as the directory entries that lead to them
                self._environment.sync([self._directory, self._directory.parent])
        return self._store

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


def _may_skip(batch: Batch) -> bool:
    """Tells whether a batch may skip partitions.

    A source with a named client decides itself which partitions it visits and what they must contain.
    """
    return not (
        batch.sparse
        or batch.rewind
        or batch.session is not None
        or batch.source == INITIAL
        or batch.source.startswith(layout.BATCH_RUN)
    )


def until(partition: PartitionId, now: float) -> float:
    """Returns the latest time at which a partition must be visited again, monotonic seconds."""
    return now + VISIT_S_MAX * (1 + (partition.partition * _GOLDEN) % 1) / 2
