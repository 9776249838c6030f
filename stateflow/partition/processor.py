"""The processor of one owned partition: applies batches to an operator's state, exactly once.

A batch is identified by (source, batch). Its mutations, its position and its output go into one atomic write, so
that a retry or replay finds the stored output and changes nothing.

Before the first batch after a deployment, :class:`Evolver` evolves the stored states to the declared ones. A partition
stores the version and the declarations of its states, and these are compared with the deployed ones. If the stored
cells can stay unchanged, or nothing is stored yet, the new declarations are written with the next commit. Otherwise one
commit of the whole partition converts the cells and writes the new declarations. Its source is ``MIGRATION``, its batch
number the new state version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from stateflow.changes import Mutations
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import StateflowError
from stateflow.metrics.own import OwnFigures
from stateflow.operator.arrow import read_batch
from stateflow.operator.instance import OperatorInstance, Produced
from stateflow.operator.operator import BatchOperator, Operator, key_columns
from stateflow.operator.output import Outputs, encode
from stateflow.operator.rows import DecodedRows, RowReader, alone, check_keys
from stateflow.operator.timers import BY_TIME, Domain, Timers
from stateflow.operator.watchdog import UNGUARDED, Guard
from stateflow.partition import layout
from stateflow.partition.layout import Committer, Staged
from stateflow.partition.positions import INITIAL, MIGRATION, Batch, Retention, adopted, watermark_of
from stateflow.partition.slices import digests_of
from stateflow.partition.sources import Advance, SkipGrant, Sources
from stateflow.partitioner import check_belongs
from stateflow.state import (
    MAX_VALUE_BYTES,
    CachePool,
    CellReader,
    ColumnStates,
    DeployedStates,
    Evolution,
    KeyedState,
    declarations_of,
)
from stateflow.state.cells import LATEST_US, TAGS
from stateflow.state.evolution import Evolved
from stateflow.state.keyed import described
from stateflow.state.keys import KeyColumns
from stateflow.storage import PartitionStore
from stateflow.storage.commit_log import CommitLog
from stateflow.types import PartitionId

#: number of stored cells of states with a ttl that each batch checks for expiry, plus two for each of its rows
SWEPT_MIN = 32

# -- Evolution of stored states --------------------------------------------------------------------------------------

#: states of an operator that was never deployed: those that its code declares
UNDEPLOYED = DeployedStates()


def read_schema(stored: bytes) -> dict[str, Any]:
    """Decodes a schema that :func:`schema_after` encoded: ``{"version", "states"}``."""
    found = json.loads(stored)
    # a list: as written before operators had a state_version
    return found if isinstance(found, dict) else {"version": 1, "states": found}


class StoredStates(NamedTuple):
    """The descriptions of the states that one partition stores.

    Attributes:
        schema: the states that its operator declared, see :func:`schema_after`.
        tags: the states made at run time, see :func:`.stored_tags`.
        timers: whether timers are stored.
    """

    schema: bytes
    tags: tuple[bytes, ...] = ()
    timers: bool = False

    @classmethod
    def of(cls, store: CellReader) -> StoredStates | None:
        """Reads a partition's descriptions. None: nothing is stored yet."""
        schema = store.get(layout.SCHEMA)
        if schema is None:
            return None
        return cls(schema, tuple(data for _, data in store.scan(TAGS)), any(store.scan(BY_TIME)))

    @property
    def version(self) -> int:
        """The operator's ``state_version`` when the states were stored."""
        return int(read_schema(self.schema)["version"])


def schema_after(stored: bytes | None, version: int, states: list[dict[str, Any]], deployed: DeployedStates) -> bytes:
    """Returns the schema to store for a partition whose states match their declarations."""
    before = [] if stored is None else read_schema(stored)["states"]
    return json.dumps({"version": version, "states": deployed.schema(before, states)}, sort_keys=True).encode()


def evolution_of(operator: str, cls: type[Operator], stored: StoredStates, deployed: DeployedStates) -> Evolution:
    """Returns the evolution from a partition's stored states to those that ``cls`` declares. Raises SchemaMismatch."""
    states, tags = read_schema(stored.schema)["states"], [described(each) for each in stored.tags]
    version, migrates = cls.state_version, cls.migrate_state is not Operator.migrate_state
    return Evolution(operator, states, stored.version, declarations_of(cls), version, migrates, deployed, tags)


def is_evolved(cls: type[Operator], store: PartitionStore, deployed: DeployedStates = UNDEPLOYED) -> bool:
    """Tells whether the stored schema is the declared one, or nothing is stored yet."""
    stored = store.get(layout.SCHEMA)
    if stored is None:
        return True
    states = [each.describe() for each in declarations_of(cls).values()]
    return stored == schema_after(stored, cls.state_version, states, deployed)


class Evolver:
    """Evolves the stored states of one partition.

    Args:
        deployed: returns the states of the present deployment; a new object after each change.
    """

    def __init__(
        self,
        partition: PartitionId,
        store: PartitionStore,
        instance: OperatorInstance,
        committer: Committer,
        deployed: Callable[[], DeployedStates],
    ) -> None:
        self._partition, self._store = partition, store
        self._instance, self._committer, self._deployed = instance, committer, deployed
        #: deployment to which the stored states were evolved; None: not checked yet
        self._evolved: DeployedStates | None = None

    def evolve(self, now_us: int, watermark_us: int | None, guard: Guard) -> None:
        """Evolves the stored states if the deployment has changed. Raises SchemaMismatch, OperatorFailed."""
        deployed = self._deployed()
        if deployed is self._evolved:
            return
        self._committer.unsaved = []
        try:
            self._evolve(now_us, watermark_us, guard, deployed)
        except BaseException:
            self._committer.unsaved = []  # otherwise the next commit would record the new schema without evolving
            raise
        self._evolved = deployed

    def _evolve(self, now_us: int, watermark_us: int | None, guard: Guard, deployed: DeployedStates) -> None:
        instance = self._instance
        operator, state = instance.operator, instance.state
        schema = self._store.get(layout.SCHEMA)
        declared = schema_after(schema, operator.state_version, state.schema(), deployed)
        if schema == declared:
            return
        self._committer.unsaved = [(layout.SCHEMA, declared)]
        stored = StoredStates.of(self._store)
        if stored is None:
            return
        evolution = evolution_of(self._partition.operator, type(operator), stored, deployed)
        if not evolution.needed:
            return
        reader = evolution.evolved(self._store)
        times_us = now_us, watermark_us
        try:
            made = converted(self._partition.operator, evolution, reader, instance, stored.version, times_us)
            guard.begin_commit()
            self._committer.commit(MIGRATION, operator.state_version, made)
            guard.end_commit()
            state.invalidate()
            self._committer.known()
        finally:
            instance.attach()


def converted(
    operator: str,
    evolution: Evolution,
    reader: Evolved,
    instance: OperatorInstance,
    before: int,
    times_us: tuple[int, int | None],
) -> Mutations:
    """Returns the mutations that turn the stored states into the declared ones.

    Args:
        before: version of the stored states.
        times_us: processing time and watermark.
    """
    declarations, bytes_max = declarations_of(type(instance.operator)), instance.state.max_value_bytes
    keyed = KeyedState(operator, declarations, reader, max_value_bytes=bytes_max)

    def migrate(key: Any, old: SimpleNamespace) -> None:
        keyed.bind(instance.operator, key)
        instance.migrate_state(before, key, old)

    keyed.set_time(*times_us)
    try:
        return evolution.convert(reader, keyed, migrate)
    finally:
        keyed.unbind(instance.operator)


# -- Batches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of an applied batch.

    Attributes:
        output: see :mod:`stateflow.operator.output`; ``b""`` for nothing.
        replayed: the batch had been applied before.
        rows: number of processed rows; 0 if ``replayed``.
        sequence: a sequence of the partition that includes the batch.
        operator_us: time in the operator, including decoding of rows, timers and watermark, µs; 0 if ``replayed``.
        commit_us: time to collect the changes and write them, µs; 0 if ``replayed``.
    """

    output: bytes
    replayed: bool
    rows: int
    sequence: int = field(default=0, compare=False)
    operator_us: int = field(default=0, compare=False)
    commit_us: int = field(default=0, compare=False)


class Ran(NamedTuple):
    """A batch that the operator has processed but that is not written yet. ``outputs``: rows to be encoded, together
    with those of other batches."""

    batch: Batch
    outputs: Outputs
    produced: Produced
    earlier: bytes
    rows: int
    watermark_us: int | None
    silent: Mapping[str, layout.Position]
    position: layout.Position
    mutations: Mutations
    operator_us: int
    commit_us: int


class Commit(NamedTuple):
    """A batch that is ready to be logged, then written. ``output``: the batch's whole output, including earlier
    parts."""

    output: bytes
    advance: Advance
    staged: Staged


class Opening(NamedTuple):
    """Commit with which a source gets a newer client, ready to be logged, then written."""

    source: str
    session: layout.Session
    staged: Staged


class PartitionProcessor:
    """Processes the batches of one partition. Not thread-safe: one batch at a time.

    Args:
        log: see :class:`~stateflow.partition.layout.Committer`.
        on_commit: see :class:`~stateflow.partition.layout.Committer`.
        clock: measures durations; the time of day is an argument of each batch.
        deployed: returns the states of the present deployment; a new object after each change.
        partitions: number of the operator's partitions. A key that belongs to another partition is refused when it
            first occurs. None: keys are not checked.
        figures: collects the metrics that the operator defines, with each commit; None: they are not read.
    """

    def __init__(
        self,
        operator: type[Operator],
        partition: PartitionId,
        store: PartitionStore,
        epoch: int,
        *,
        cached_keys: int = 262_144,
        cache: CachePool | None = None,
        max_value_bytes: int = MAX_VALUE_BYTES,
        log: CommitLog | None = None,
        on_commit: Callable[[int, Callable[[], bytes]], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        retention: Retention = Retention(),  # noqa: B008 - frozen
        deployed: Callable[[], DeployedStates] = lambda: UNDEPLOYED,
        partitions: int | None = None,
        figures: OwnFigures | None = None,
    ) -> None:
        self.partition = partition
        self.epoch = epoch
        self._clock = clock
        self._store = store
        #: names of the key columns
        self.key = key_columns(operator)
        belongs = None if partitions is None else partial(check_belongs, partition.partition, partitions)
        self._keys = KeyColumns(partition.operator, self.key, belongs)
        kind = (
            partial(ColumnStates, keys=self._keys)
            if issubclass(operator, BatchOperator)
            else partial(KeyedState, belongs=belongs)
        )
        self.state: KeyedState | ColumnStates = kind(
            partition.operator,
            declarations_of(operator),
            store,
            cached_keys=cached_keys,
            cache=cache,
            max_value_bytes=max_value_bytes,
        )
        self._reader: RowReader | None = None  # last reader whose key types were checked against the stored keys
        self._sources = Sources(partition, store, retention)
        self._committer = Committer(partition, store, epoch, log, on_commit)
        #: newest processing time of a batch here
        self.latest_us = 0
        #: time that the operator took for the last batch
        self.operator_us = 0
        self._timers = Timers(store, self._keys)
        #: watermark of the partition, which its next batch's rows see
        self._watermark_us = layout.read_watermark(store)
        if self._watermark_us is None:  # earlier builds stored the end of a run in its place, or did not store it
            self._catch_up()
        self._instance = OperatorInstance(
            operator, partition, self.state, self._timers, self._watermark_us, figures or OwnFigures()
        )
        self._evolver = Evolver(partition, store, self._instance, self._committer, deployed)
        self._instance.open()
        self._instance.count()

    @property
    def sequence(self) -> int:
        """Sequence of the last commit."""
        return self._committer.sequence

    @property
    def is_unsure(self) -> bool:
        """Tells whether a commit has begun and is perhaps not completely on disk and in memory."""
        return self._committer.is_unsure

    def runs(self, operator: type[Operator]) -> bool:
        """Tells whether an instance of this class, and so of this version of the operator, serves here."""
        return type(self._instance.operator) is operator

    def peek(self, key: Any, now_us: int) -> SimpleNamespace:
        """Reads the stored states of a key, bypassing the cache; for tests and the harness."""
        self.state.invalidate()
        self.state.set_time(now_us, self._watermark_us)
        return self.state.peek(key)

    def evolve(self, now_us: int, guard: Guard = UNGUARDED) -> None:
        """Evolves the stored states to those declared now. Called before the first batch, before the first read, and
        after the operator was deployed again.

        Raises SchemaMismatch, OperatorFailed.
        """
        try:
            self._evolver.evolve(now_us, self._watermark_us, guard)
        except BaseException as error:
            self._instance.forget()
            if isinstance(error, StateflowError):
                error.located(cause="migrate_state")
            raise
        self._instance.count()

    # -- sources ------------------------------------------------------------------------------------------

    def reached(self, source: str) -> layout.Position | None:
        """Returns the position of ``source``: its last batch here and details of it; None: there is none."""
        return self._sources.positions.reached_by(source)

    def open_source(self, source: str, session: layout.Session, settled: int | None = None) -> int:
        """Stores a client as the newest one of its source, so that older clients are refused from now on. Returns the
        sequence of the last commit. There is no new commit if this client was the newest already. Raises SourceTaken if
        there is a newer client.

        Args:
            settled: see :meth:`~stateflow.partition.sources.Sources.open`.
        """
        opening = self.stage_opening(source, session, settled)
        if opening is not None:
            self._committer.log(opening.staged)
            self.write_opening(opening)
        return self.sequence

    def stage_opening(self, source: str, session: layout.Session, settled: int | None = None) -> Opening | None:
        """Prepares the commit of :meth:`open_source`, which may still be dropped. None: no commit is needed, because
        this client was the newest already. Raises SourceTaken, Unavailable."""
        mutations = self._sources.open(source, session, settled)
        if mutations is None:
            return None
        last = self._sources.positions.last(source)
        return Opening(source, session, self._committer.stage(source, -1 if last is None else last, mutations))

    def write_opening(self, opening: Opening) -> None:
        """Writes a prepared commit. Raises the store's errors."""
        # synced, because the client gets no output from which it could learn that this commit was lost
        self._committer.write(opening.staged, sync=True)
        self._sources.positions.taken(opening.source, opening.session)
        self._committer.known()

    def retire(self, source: str) -> bool:
        """Retires a source, so that only a tombstone is left of it, see :mod:`stateflow.partition.positions`. Returns
        False if there is nothing to retire: the source is unknown or already retired."""
        retiring = self._sources.retire(source)
        if retiring is None:
            return False
        self._committer.commit(source, *retiring)
        self._sources.positions.retired([source])
        self._committer.known()
        return True

    def drop_output(self, source: str, batch: int, apply: bool) -> int:
        """Drops the stored output of a batch that the partition contains. Returns the output's size in bytes; 0: there
        is none. With ``apply`` False, drops nothing and only returns the size."""
        size, mutations = self._sources.without_output(source, batch)
        if size and apply:
            self._committer.commit(source, batch, mutations, sync=True)
            self._committer.known()
        return size

    # -- batches that skip the partition ------------------------------------------------------------------

    def contains(self, source: str) -> layout.Position | None:
        """Returns the position of the source's last batch here, see
        :meth:`~stateflow.partition.sources.Sources.contained`."""
        return self._sources.contained(source)

    def adopt(self, held: Mapping[str, layout.Position]) -> None:
        """Accepts positions of sources whose batches skipped this partition; the next commit writes them."""
        if held:
            self._sources.adopt(held)
            self._catch_up(held)
            self._instance.show_watermark(self._watermark_us)
            self.latest_us = max(self.latest_us, *(position.at_us for position in held.values()))

    def _catch_up(self, held: Mapping[str, layout.Position] = MappingProxyType({})) -> None:
        """Advances the partition's watermark to what its sources have now; the next commit writes it, with ``held``."""
        self._watermark_us = self.watermark_us({})
        self._committer.adopted |= adopted(held, self._watermark_us)

    def settle(self, held: Mapping[str, layout.Position]) -> None:
        """Commits positions of sources whose batches skipped this partition, without a batch. Raises the store's
        errors."""
        self.adopt(held)
        self._committer.commit("", -1, Mutations())
        self._committer.known()

    def watermark_us(self, held: Mapping[str, layout.Position]) -> int | None:
        """Returns the partition's watermark, with the positions held for it taken into account; None: there is none."""
        return self._later(watermark_of(self._sources.positions.overlaid(held)))

    def needs_no_visit(self, until: float) -> SkipGrant:
        """Returns the conditions under which batches may skip this partition, at most up to ``until`` (monotonic
        seconds). While the sweep finds many expired entries, no batch may. Call it between batches."""
        event_us, processing_us = (self._timers.next_us(domain) for domain in (Domain.EVENT, Domain.PROCESSING))
        if self._instance.hears_watermarks:
            event_us = -math.inf if self._watermark_us is None else min(event_us, self._watermark_us + 1)
        if self.state.sweep_is_behind:
            until = -math.inf  # the next batch sweeps on
        return SkipGrant(self, until, event_us, processing_us)

    # -- batches ------------------------------------------------------------------------------------------

    def apply(
        self,
        batch: Batch,
        input_schema: bytes,
        rows: bytes,
        now_us: int,
        after: int | None = None,
        guard: Guard = UNGUARDED,
        digest: int | None = None,
    ) -> Applied:
        """Applies one batch, or returns the stored output if the batch was applied before.

        Args:
            input_schema: Arrow IPC schema of ``rows``.
            rows: Arrow record batch message; ``b""`` when the batch has no row for this partition.
            now_us, after, guard, digest: see :meth:`run`. A missing digest is computed from the rows if the batch names
                a client.

        Raises the errors of :meth:`run`, :meth:`stage` and :meth:`write`; the state is then as it was before the call.
        """
        arrived, read = None, None
        if rows:
            reader = RowReader.of(input_schema, self.key, self.partition.operator)
            read = read_batch(rows, reader.schema)
            arrived = alone(reader, read)
        if digest is None and batch.session is not None:
            (digest,) = digests_of(input_schema, read, [0, 0 if read is None else read.num_rows])
        ran = self.run(batch, arrived, now_us, after, digest, guard)
        if isinstance(ran, Applied):
            return ran
        (encoded,) = encode([ran.outputs])
        commit = self.stage(ran, encoded)
        try:
            self._committer.log(commit.staged)
        except BaseException:
            self.rollback()
            raise
        return self.write(ran, commit)

    def run(
        self,
        batch: Batch,
        rows: DecodedRows | None,
        now_us: int,
        after: int | None = None,
        digest: int | None = None,
        guard: Guard = UNGUARDED,
    ) -> Applied | Ran:
        """Makes the operator process one batch, or finds that the batch was applied before.

        Callers stage and write the result, or roll it back, before they call anything else.

        Args:
            rows: None when the batch has no row for this partition.
            now_us: processing time; timers of that domain fire up to it.
            after: newest batch of a sparse source, up to this one, that this partition must contain as far as the
                sender knows.
            digest: digest of the rows, see :func:`~stateflow.partition.slices.digests_of`, or the sender's own; None:
                not known.

        Raises PositionGap, StaleBatch, SourceTaken, SourceRetired, BatchChanged, and the errors of wrong rows and of
        the operator; the state is then as it was before the call.
        """
        earlier = b""
        sources, instance, initial = self._sources, self._instance, batch.source == INITIAL
        began = self._clock.monotonic()
        sources.check(batch, after)
        if sources.positions.contains(batch):
            return Applied(b"", True, 0, self.sequence)
        self.evolve(now_us, guard)
        if (replayed := sources.replayed(batch, after, digest)) is not None:
            earlier, named = replayed.output, batch.session is not None
            if rows is None or named or replayed.rows or not sources.takes_rows_later(batch):
                if batch.attempt.use and not initial:  # a retry must have the same number of rows
                    now = 0 if rows is None else len(self._checked(rows).columns())
                    sources.positions.check_rows(batch, replayed.rows, now)
                return Applied(earlier, True, 0, self.sequence)
            # A task without the rows has visited before (its batch failed): the rows arrive now.
        try:
            outputs: list[Any] = []
            silent = sources.silent(now_us, batch.source)
            watermark_us = until_us = self._later(sources.positions.watermark_us(batch, silent))
            if until_us == LATEST_US:  # all timers fire, but event time goes on from the newest row
                watermark_us = self._later(sources.positions.newest_us(batch))
            instance.begin()
            self.latest_us = max(self.latest_us, now_us)
            self.state.set_time(now_us, watermark_us)
            count = 0
            if rows is not None and instance.takes_batches:
                count = instance.process_batch(self._checked(rows), initial)
            elif rows is not None:
                count = instance.process(self._checked(rows), outputs, initial)
            self._advance(until_us, watermark_us, now_us, outputs)
            produced = instance.produced(outputs)
            worked = self._clock.monotonic()
            # sweeps twice as fast as state can grow, so that expired cells leave the disk in time
            mutations = self.state.expired(SWEPT_MIN + 2 * count) if self.state.expires else self.state.collect()
            self._timers.collect(mutations)
            position = sources.positions.behind(batch, count, now_us, digest)
            guard.begin_commit()
        except BaseException:
            self.rollback()
            raise
        ended = self._clock.monotonic()
        to_encode = Outputs(instance.writer, produced.rows)
        spent = _micros(worked - began), _micros(ended - worked)
        self.operator_us = spent[0]
        return Ran(batch, to_encode, produced, earlier, count, watermark_us, silent, position, mutations, *spent)

    def _checked(self, rows: DecodedRows) -> DecodedRows:
        """Checks once per reader that the key columns have the types of the stored keys. Raises SchemaMismatch."""
        if rows.reader is not self._reader:
            check_keys(rows.reader.schema, self._keys, self._store)
            self._reader = rows.reader
        return rows

    def _later(self, watermark_us: int | None) -> int | None:
        """Returns the partition's watermark after a batch, given the minimum watermark of its sources then. The
        partition's watermark never decreases, even if a late source joins. It is the event time of the whole batch: of
        its rows, its timers and their writes."""
        if watermark_us is None or (self._watermark_us is not None and watermark_us <= self._watermark_us):
            return self._watermark_us
        return watermark_us

    def _advance(self, until_us: int | None, watermark_us: int | None, now_us: int, outputs: list[Any]) -> None:
        """Advances time: calls the operator for a new watermark, then fires the timers that are due.

        Args:
            until_us: the watermark, or LATEST_US at the end of a run, which the operator sees as the watermark while
                timers of event time fire.
        """
        if until_us is not None:
            if until_us != self._watermark_us:
                self._instance.on_watermark(until_us, outputs)
            self._instance.fire(Domain.EVENT, until_us, outputs)
            if until_us != watermark_us:
                self._instance.show_watermark(watermark_us)
        self._instance.fire(Domain.PROCESSING, now_us, outputs)

    def stage(self, ran: Ran, encoded: bytes | Exception) -> Commit:
        """Prepares the commit of a processed batch. Raises Unavailable, and ``encoded`` if that is an error; the state
        is then as it was before the batch."""
        try:
            if isinstance(encoded, Exception):
                raise encoded
            output, mutations = self._instance.join(ran.earlier, ran.produced, encoded), ran.mutations
            source, watermark_us = ran.batch.source, ran.watermark_us
            advance = self._sources.advance(source, ran.position, output, ran.silent, mutations)
            if watermark_us is not None and watermark_us != self._watermark_us:
                mutations.puts += adopted({}, watermark_us).items()
            return Commit(output, advance, self._committer.stage(source, ran.batch.number, mutations))
        except BaseException:
            self.rollback()
            raise

    def write(self, ran: Ran, commit: Commit) -> Applied:
        """Writes a prepared commit. Raises the store's errors. The state is then as it was before the batch, unless
        :attr:`is_unsure` is True: then the batch may be committed."""
        began = self._clock.monotonic()
        try:
            self._committer.write(commit.staged)
            self._sources.committed(commit.advance)
            self._watermark_us = ran.watermark_us
            self.state.mark_clean()
            self._timers.end_batch()
            self._committer.known()
            self._instance.count()
        except BaseException:
            self.rollback()
            raise
        took_us = ran.commit_us + _micros(self._clock.monotonic() - began)
        return Applied(commit.output, False, ran.rows, self.sequence, ran.operator_us, took_us)

    def rollback(self) -> None:
        """Restores the state as it was before the batch."""
        self.state.rollback()
        self._timers.rollback()
        self._instance.forget()
        self._instance.show_watermark(self._watermark_us)

    # -- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the operator on this thread, see :meth:`let_go`.

        The store stays open, because a move may still copy the partition from it.
        """
        self.let_go(lambda work: work())

    def let_go(self, aside: Callable[[Callable[[], None]], None]) -> None:
        """Ends commits and releases the operator, whose ``close`` runs in ``aside``; see
        :meth:`~stateflow.operator.instance.OperatorInstance.let_go`."""
        self.end()
        self._instance.let_go(aside)
        self.state.close()

    def end(self) -> None:
        """Refuses all commits from now on. Call it before anything is released: a batch that is still running would
        otherwise be written with its position, but without the released state. Thread-safe."""
        self._committer.end()

    def discard(self) -> None:
        """Closes the processor without calling the operator's ``close``, because the operator did not return or was
        interrupted."""
        self.end()
        self.state.close()


def _micros(seconds: float) -> int:
    return int(seconds * 1e6)
