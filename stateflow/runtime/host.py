"""One owned partition at work: applies batches to an operator's state, exactly once.

A batch is identified by (source, batch). Its mutations, its position and its output go into one atomic write, so
that a retry or replay finds the stored output and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import pyarrow as pa
import xxhash

from stateflow.changes import ChangeSet, Mutations
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import OperatorFailed, StateflowError, Unavailable
from stateflow.partitioner import check_belongs
from stateflow.runtime import layout
from stateflow.runtime.failures import failure, is_ours, shown
from stateflow.runtime.keys import check_keys
from stateflow.runtime.operator import BatchOperator, Context, Operator, key_columns, output_schema, side_schemas
from stateflow.runtime.output import OutputReader, join_output
from stateflow.runtime.positions import INITIAL, MIGRATION, Batch, Positions
from stateflow.runtime.retirement import Retention, Tombstones
from stateflow.runtime.rows import OutputWriter, RowReader
from stateflow.runtime.timers import Domain, Timers, to_datetime
from stateflow.state import (
    MAX_VALUE_BYTES,
    CachePool,
    ColumnStates,
    DeployedStates,
    Evolution,
    KeyedState,
    declarations_of,
)
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId

#: stored cells of states with a ttl that each batch looks at, beside two for each of its rows
SWEPT_MIN = 32


class Guard(Protocol):
    """Whoever may end a batch from outside: not while it is being committed."""

    def begin_commit(self) -> None:
        """May raise, before anything is written."""
        ...

    def end_commit(self) -> None: ...


class Unguarded:
    def begin_commit(self) -> None: ...

    def end_commit(self) -> None: ...


UNGUARDED = Unguarded()
#: of an operator that was never deployed: what its code declares is what it has
UNDEPLOYED = DeployedStates()


@dataclass(frozen=True, slots=True)
class Applied:
    """``output``: see :mod:`stateflow.runtime.output`; ``b""`` for nothing. ``sequence``: of the partition, with it.

    ``operator_us``: in the operator, from decoding its rows to encoding its output, with timers and watermark;
    ``commit_us``: collecting what changed, and the write. Both 0 when it was applied before.
    """

    output: bytes
    replayed: bool
    rows: int
    sequence: int = field(default=0, compare=False)
    operator_us: int = field(default=0, compare=False)
    commit_us: int = field(default=0, compare=False)


class PartitionHost:
    """Not thread-safe: one batch at a time.

    Args:
        on_commit: called after each durable commit with a thunk that encodes its change set, so that
            encoding costs nothing when nobody follows.
        clock: of what a batch takes; what time it is comes with each batch.
        deployed: what is decided of its states now; another object when that has changed.
        partitions: of the operator. A key that belongs to another one is refused, when it is first met.
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
        sync: bool = False,
        on_commit: Callable[[int, Callable[[], bytes]], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        retention: Retention = Retention(),  # noqa: B008 - frozen
        deployed: Callable[[], DeployedStates] = lambda: UNDEPLOYED,
        partitions: int | None = None,
    ) -> None:
        self.partition = partition
        self.epoch = epoch
        self._guard: Guard = UNGUARDED
        self._ended = False
        self._clock = clock
        self._store = store
        self._sync = sync
        self._on_commit = on_commit
        self._batches = issubclass(operator, BatchOperator)
        declared = declarations_of(operator)
        self.state: KeyedState | ColumnStates = (ColumnStates if self._batches else KeyedState)(
            partition.operator,
            declared,
            store,
            cached_keys=cached_keys,
            cache=cache,
            max_value_bytes=max_value_bytes,
            belongs=None if partitions is None else partial(check_belongs, partition.partition, partitions),
        )
        self._declared = declared
        self._writer = OutputWriter(output_schema(operator), partition.operator)
        self._freeze = self._writer.freeze
        side = side_schemas(operator)
        self._side_writers = {tag: OutputWriter(schema, partition.operator) for tag, schema in side.items()}
        self._outputs = OutputReader(output_schema(operator), side)
        self.key = key_columns(operator)
        self._readers: dict[bytes, RowReader] = {}
        known = {
            entry[len(layout.POSITION) :].decode(): layout.Position.decode(value)
            for entry, value in store.scan(layout.POSITION)
        }
        sessions = {
            entry[len(layout.SESSION) :].decode(): layout.Session.decode(value)
            for entry, value in store.scan(layout.SESSION)
        }
        lapsed = [entry[len(layout.LAPSED) :].decode() for entry, _ in store.scan(layout.LAPSED)]
        self._positions = Positions(partition, known, sessions, lapsed)
        self._retention = retention
        self._tombstones = Tombstones(store, retention.retired_max)
        self.sequence = read_sequence(store)
        #: a commit has begun, and whether all of it is on disk and known here is not known
        self.is_unsure = False
        #: the newest processing time of a batch here
        self.latest_us = 0
        self._event_time = operator.event_time
        self._timers = Timers(store)
        keyed = self.state if isinstance(self.state, KeyedState) else None
        self._ctx = Context(partition.operator, partition.partition, self._timers, keyed)
        self._ctx._frozen = {tag: freeze for tag, writer in self._side_writers.items() if (freeze := writer.freeze)}
        self._watermark_us = read_watermark(store)
        self._show_watermark(self._watermark_us)
        self._operator = operator()
        if isinstance(self.state, ColumnStates):
            self.state.attach(self._operator)
        self._unsaved: list[tuple[bytes, bytes]] = []
        self._deployed = deployed
        #: what its states were made for
        self._evolved: DeployedStates | None = None
        self._open()

    def _open(self) -> None:
        try:
            self._operator.open(self._ctx)
        except StateflowError:
            raise
        except BaseException as error:
            if not is_ours(error):
                raise
            raise self._operator_failed("open", error, remedy="mend the operator; no batch was applied") from error

    def peek(self, key: Any, now_us: int) -> SimpleNamespace:
        """The states of a key as they are stored, read anew; for tests and the harness."""
        self.state.invalidate()
        self.state.set_time(now_us, self._watermark_us)
        return self.state.peek(key)

    def runs(self, operator: type[Operator]) -> bool:
        """Is it an instance of this version that serves here?"""
        return type(self._operator) is operator

    def evolve(self, now_us: int) -> None:
        """Make the stored states those that are declared now: before the first batch, before the first read, and when
        the operator was deployed anew.

        Raises SchemaMismatch, OperatorFailed.
        """
        deployed = self._deployed()
        if deployed is self._evolved:
            return
        self._unsaved = []
        self._evolve_states(now_us, deployed)
        self._evolved = deployed

    def _evolve_states(self, now_us: int, deployed: DeployedStates) -> None:
        operator = self._operator
        stored, states = self._store.get(layout.SCHEMA), self.state.schema()
        declared = schema_after(stored, operator.state_version, states, deployed)
        if stored == declared:
            return
        self._unsaved = [(layout.SCHEMA, declared)]
        if stored is None:
            return
        evolution = evolution_of(self.partition.operator, type(operator), stored, deployed)
        if not evolution.needed:
            return
        before = read_schema(stored)["version"]
        reader = evolution.evolved(self._store)
        keyed = KeyedState(self.partition.operator, self._declared, reader)

        def migrate(key: Any, old: SimpleNamespace) -> None:
            keyed.bind(operator, key)
            self._ctx.key = key
            try:
                self._call("migrate_state", lambda o, _: operator.migrate_state(before, o), old, [])
            finally:
                self._ctx.key = None

        keyed.set_time(now_us, self._watermark_us)
        try:
            converted = evolution.convert(reader, keyed, migrate)
            self._guard.begin_commit()
            self._commit_changes(MIGRATION, operator.state_version, converted)
            self._guard.end_commit()
            self.state.invalidate()
            self.is_unsure = False
        finally:
            keyed.unbind()
            if isinstance(self.state, ColumnStates):
                self.state.attach(operator)

    # -- batches --------------------------------------------------------------------------------------

    def position(self, source: str) -> int | None:
        """The last batch of ``source`` this partition contains; None when it has seen none."""
        return self._positions.last(source)

    def open_source(self, source: str, session: layout.Session) -> int:
        """Refuse older clients of a source from now on. Returns the sequence of the last commit, this one or an earlier
        one. Raises SourceTaken when this one is older itself."""
        self._recall(source)
        if self._positions.is_newer(source, session):
            put = layout.SESSION + source.encode(), session.encode()
            if self._positions.is_recalled(source):  # it stays retired until it sends
                tombstone = replace(self._positions.tombstone(source), session=session)
                put = layout.RETIRED + source.encode(), tombstone.encode()
            mutations = Mutations(puts=[put], deletes=[layout.LAPSED + source.encode()])
            last = self._positions.last(source)
            # its client is told of no output by which it could learn that this was lost
            self._commit_changes(source, -1 if last is None else last, mutations, sync=True)
            self._positions.taken(source, session)
            self.is_unsure = False
        return self.sequence

    def retire(self, source: str) -> bool:
        """Keep only a tombstone of a source, see :mod:`stateflow.runtime.retirement`. False: nothing is known of it."""
        if not self._positions.knows(source) or self._positions.is_recalled(source) or source == INITIAL:
            return False
        mutations, tombstone = Mutations(), self._positions.tombstone(source)
        self._tombstones.bury({source: tombstone}, mutations)
        self._commit_changes(source, tombstone.batch, mutations)
        self._positions.retired([source])
        self.is_unsure = False
        return True

    def _recall(self, source: str) -> bool:
        """Whether the source is known, perhaps by its tombstone."""
        if self._positions.knows(source):
            return True
        retired = self._tombstones.of(source)
        if retired is not None:
            self._positions.recall(source, retired)
        return retired is not None

    def reached(self, source: str) -> layout.Position | None:
        """Its last batch here, and what is known of it."""
        return self._positions.reached_by(source)

    def apply(
        self,
        batch: Batch,
        input_schema: bytes,
        rows: bytes,
        now_us: int,
        after: int | None = None,
        guard: Guard = UNGUARDED,
    ) -> Applied:
        """Apply one batch, or return the stored output when it was applied before.

        Args:
            input_schema: Arrow IPC schema of ``rows``.
            rows: Arrow record batch message; ``b""`` when the batch has no row for this partition.
            now_us: processing time; timers of that domain fire up to it.
            after: the newest batch of a sparse source, up to this one, that this partition must contain by what the
                sender knows.

        Raises PositionGap, StaleBatch, SourceTaken, SourceRetired, BatchChanged, and whatever is wrong with the rows or
        the operator; the state is then as it was before the call.
        """
        earlier = b""
        self._guard = guard
        began = self._clock.monotonic()
        if not self._recall(batch.source) and self._tombstones.forgotten_us is not None:
            self._positions.refuse_forgotten(batch, after, self._tombstones.forgotten_us)
        digest = None
        if batch.session is not None:
            self._positions.check_client(batch.source, batch.session)
            digest = xxhash.xxh3_64_intdigest(rows, xxhash.xxh3_64_intdigest(input_schema))
        if self._positions.contains(batch):
            return Applied(b"", True, 0, self.sequence)
        self.evolve(now_us)
        started = batch.source == INITIAL and (self._positions.others or self._tombstones.any)
        if self._positions.is_replay(batch, after, started):
            self._positions.check_digest(batch, digest)
            earlier = self._store.get(layout.OUTPUT + batch.source.encode()) or b""
            if not rows or digest is not None or self._positions.rows(batch.source):
                if batch.attempt.use and batch.source != INITIAL:  # somebody who sends the same rows, or is mistaken
                    self._positions.check_rows(batch, len(self._reader(input_schema).batch(rows)) if rows else 0)
                return Applied(earlier, True, 0, self.sequence)
            # Visited before without rows, by a task that did not have them (its batch failed): they come now.
        try:
            outputs: list[Any] = []
            silent = self._positions.silent(now_us, self._retention.watermark_idle_us, batch.source)
            reached_us = self._reached_us(batch, silent)
            self._ctx._side = {tag: [] for tag in self._side_writers}
            self.latest_us = max(self.latest_us, now_us)
            self.state.set_time(now_us, reached_us)
            columns: pa.RecordBatch | None = None
            count = 0
            if rows and self._batches:
                columns, count = self._process_batch(self._reader(input_schema), rows, batch.source == INITIAL)
            elif rows:
                count = self._process(self._reader(input_schema), rows, outputs, batch.source == INITIAL)
            watermark_us = self._advance(reached_us, now_us, outputs)
            side = {tag: self._side_writers[tag].write(emitted) for tag, emitted in self._ctx._side.items() if emitted}
            output = self._outputs.join(earlier, join_output(self._writer.write(outputs, columns), side))
            worked = self._clock.monotonic()
            # twice as fast as state can grow, so that what has expired goes from disk in time
            mutations = self.state.expired(SWEPT_MIN + 2 * count) if self.state.expires else self.state.collect()
            self._timers.collect(mutations)
            position = self._positions.behind(batch, count, now_us, digest)
            guard.begin_commit()
            self._commit(batch, mutations, output, watermark_us, position, silent)
        except BaseException:
            self.state.rollback()
            self._timers.end_batch()
            self._show_watermark(self._watermark_us)
            raise
        ended = self._clock.monotonic()
        return Applied(output, False, count, self.sequence, _micros(worked - began), _micros(ended - worked))

    def _reader(self, schema: bytes) -> RowReader:
        reader = self._readers.get(schema)
        if reader is None:
            reader = RowReader.of(schema, self.key, self.partition.operator)
            check_keys(reader.schema, self.key, self._store, self.partition.operator)
            self._readers[schema] = reader
        return reader

    def _process(self, reader: RowReader, message: bytes, outputs: list[Any], initial: bool) -> int:
        """Rows in order; returns how many."""
        assert isinstance(self.state, KeyedState)
        operator, ctx, bind = self._operator, self._ctx, self.state.bind
        process = operator.init_state if initial else operator.process
        extend = outputs.extend if self._freeze is None else partial(self._extend, outputs)
        timestamp = None if initial else reader.getter(self._event_time)
        count = 0
        key: Any = None
        row: Any = None
        try:
            for key, row in reader.read(message):
                bind(operator, key)
                ctx.key = key
                if timestamp is not None:
                    ctx.timestamp = timestamp(row)
                produced = process(row, ctx)
                if produced is not None:
                    extend(produced)
                count += 1
        except StateflowError as error:
            error.located(**self._here(key))
            raise
        except BaseException as error:  # whatever it raises, also sys.exit() and what asyncio means for itself
            if not is_ours(error):
                raise
            raise self._operator_failed(process.__name__, error, key=key, row=row) from error
        finally:
            ctx.key = ctx.timestamp = None
            self.state.unbind()
        return count

    def _process_batch(self, reader: RowReader, message: bytes, initial: bool) -> tuple[pa.RecordBatch | None, int]:
        """(output columns, how many rows came)."""
        assert isinstance(self._operator, BatchOperator)
        batch = reader.batch(message)
        process = self._operator.init_batch if initial else self._operator.process_batch
        try:
            produced = process(batch, self._ctx)
        except StateflowError:
            raise
        except BaseException as error:
            if not is_ours(error):
                raise
            raise self._operator_failed(process.__name__, error, row=batch.slice(0, 1).to_pylist()) from error
        return (None if produced is None else self._writer.columns(produced)), batch.num_rows

    def _extend(self, outputs: list[Any], produced: Iterable[Any]) -> None:
        """Row by row as they are produced: what comes next may change what they were made from."""
        assert self._freeze is not None
        outputs.extend(map(self._freeze, produced))

    def _reached_us(self, batch: Batch, silent: Collection[str]) -> int | None:
        """The partition's watermark with this batch: the minimum over the sources that have one, but for those that
        are silent, and never less than it was, when a late source joins. It is the event time of the whole batch, for
        its rows, its timers and what they write."""
        lowest_us = self._positions.watermark_us(batch, silent)
        if lowest_us is None or (self._watermark_us is not None and lowest_us <= self._watermark_us):
            return self._watermark_us
        return lowest_us

    def _advance(self, watermark_us: int | None, now_us: int, outputs: list[Any]) -> int | None:
        """Time passes: the watermark, then the timers that are due. Returns the partition's watermark."""
        if watermark_us != self._watermark_us:
            self._show_watermark(watermark_us)
            assert self._ctx.watermark is not None
            self._call("on_watermark", self._operator.on_watermark, self._ctx.watermark, outputs)
        if watermark_us is not None:
            self._fire(Domain.EVENT, watermark_us, outputs)
        self._fire(Domain.PROCESSING, now_us, outputs)
        return watermark_us

    def _fire(self, domain: Domain, until_us: int, outputs: list[Any]) -> None:
        for timer in self._timers.due(domain, until_us):
            assert isinstance(self.state, KeyedState)
            self.state.bind(self._operator, timer.key)
            self._ctx.key = timer.key
            try:
                self._call("on_timer", self._operator.on_timer, timer, outputs)
            finally:
                self._ctx.key = None
                self.state.unbind()

    def _call(self, name: str, method: Callable[[Any, Context], Any], argument: Any, outputs: list[Any]) -> None:
        try:
            produced = method(argument, self._ctx)
            if produced is not None:
                outputs.extend(produced if self._freeze is None else map(self._freeze, produced))
        except StateflowError as error:
            error.located(**self._here(self._ctx.key))
            raise
        except BaseException as error:
            if not is_ours(error):
                raise
            raise self._operator_failed(name, error, key=self._ctx.key, row=argument) from error

    def _show_watermark(self, watermark_us: int | None) -> None:
        self._ctx.watermark = None if watermark_us is None else to_datetime(watermark_us)

    def _here(self, key: Any) -> dict[str, Any]:
        return {"operator": self.partition.operator, "partition": self.partition.partition, "key": shown(key)}

    def _operator_failed(
        self,
        method: str,
        error: BaseException,
        remedy: str = "mend the operator or the row; the batch was not applied",
        **where: Any,
    ) -> OperatorFailed:
        place = {"operator": self.partition.operator, "partition": self.partition.partition}
        return failure(f"{method}()", error, remedy, **place, **where)

    def _commit(
        self,
        batch: Batch,
        mutations: Mutations,
        output: bytes,
        watermark_us: int | None,
        position: layout.Position,
        silent: Mapping[str, layout.Position],
    ) -> None:
        source = batch.source.encode()
        if self._positions.is_recalled(batch.source):
            mutations.deletes.append(layout.RETIRED + source)
            if (session := self._positions.session(batch.source)) is not None:
                mutations.puts.append((layout.SESSION + source, session.encode()))
        mutations.puts += [(layout.POSITION + source, position.encode()), (layout.OUTPUT + source, output)]
        if retired := self._positions.idle(position.at_us, self._retention, batch.source):
            self._tombstones.bury(retired, mutations)
        # with the watermark that comes of it: whoever has the batch finds it decided, and nobody decides it anew
        silent = {source: each for source, each in silent.items() if source not in retired}
        mutations.puts += [(layout.POSITION + name.encode(), each.encode()) for name, each in silent.items()]
        if watermark_us is not None and watermark_us != self._watermark_us:
            mutations.puts.append((layout.WATERMARK, watermark_us.to_bytes(8, "big", signed=True)))
        self._commit_changes(batch.source, batch.number, mutations)
        self._positions.reached(batch.source, position)
        self._positions.silenced(silent)
        self._positions.retired(retired)
        self._watermark_us = watermark_us
        self.state.mark_clean()
        self._timers.end_batch()
        self.is_unsure = False

    def _commit_changes(self, source: str, number: int, mutations: Mutations, sync: bool = False) -> None:
        """One atomic write under the next sequence, and those who follow are told. Raises Unavailable behind
        :meth:`end`.

        Whoever calls this says ``is_unsure = False`` when all of it is known here, too.
        """
        if self._ended:
            raise Unavailable(
                "the partition was closed here meanwhile",
                remedy="send the batch again; it was not applied",
                partition=self.partition,
            )
        if self.is_unsure:
            raise Unavailable(
                "whether the last commit is on disk is not known",
                remedy="open the partition again",
                partition=self.partition,
            )
        sequence = self.sequence + 1
        self.is_unsure = True
        mutations.puts += [*self._unsaved, (layout.SEQUENCE, sequence.to_bytes(8, "big"))]
        self._store.apply(mutations, sync=sync or self._sync)
        self.sequence = sequence
        self._unsaved = []
        if self._on_commit is not None:
            self._on_commit(
                sequence,
                lambda: ChangeSet(
                    self.partition.operator,
                    self.partition.partition,
                    self.epoch,
                    sequence,
                    source,
                    number,
                    mutations,
                ).encode(),
            )

    def close(self) -> None:
        """Lets the operator go, on a thread of its own where it has something to say to that: :meth:`let_go`.

        The store stays open: it may still be a move's source.
        """
        self.let_go(lambda work: work())

    def let_go(self, aside: Callable[[Callable[[], None]], None]) -> None:
        """Args: aside: given the operator's ``close``, when it has one, to be called where nobody waits for it."""
        self.end()
        operator, ctx, name = self._operator, self._ctx, self.partition
        self._operator = Operator()

        def close() -> None:
            nonlocal operator
            try:
                operator.close(ctx)
            except BaseException as error:  # nobody could do anything about it
                if not is_ours(error):
                    raise
                ctx.logger.exception("close() of %s failed", name)
            del operator  # and with it what its __del__ does

        if type(operator).close is not Operator.close or hasattr(operator, "__del__"):
            aside(close)
        self.state.close()

    def end(self) -> None:
        """Nothing is committed any more: a batch that is still being worked on would be written without what is let go
        beneath it, and with its position. To be called from any thread, before anything is let go."""
        self._ended = True

    def discard(self) -> None:
        """Without the operator's ``close``: it did not come back, or was interrupted, and is asked nothing more."""
        self.end()
        self.state.close()


def _micros(seconds: float) -> int:
    return int(seconds * 1e6)


def read_schema(stored: bytes) -> dict[str, Any]:
    """``{"version", "states"}`` as :func:`schema_after` made them."""
    found = json.loads(stored)
    # a list: as written before operators had a state_version
    return found if isinstance(found, dict) else {"version": 1, "states": found}


def schema_after(stored: bytes | None, version: int, states: list[dict[str, Any]], deployed: DeployedStates) -> bytes:
    """What is stored of the states once a partition's are those that are declared."""
    before = [] if stored is None else read_schema(stored)["states"]
    return json.dumps({"version": version, "states": deployed.schema(before, states)}, sort_keys=True).encode()


def evolution_of(operator: str, cls: type[Operator], stored: bytes, deployed: DeployedStates) -> Evolution:
    """From what a partition has stored to what ``cls`` declares. Raises SchemaMismatch."""
    before, migrates = read_schema(stored), cls.migrate_state is not Operator.migrate_state
    declared = declarations_of(cls)
    return Evolution(operator, before["states"], before["version"], declared, cls.state_version, migrates, deployed)


def is_evolved(cls: type[Operator], store: PartitionStore, deployed: DeployedStates = UNDEPLOYED) -> bool:
    """Whether what is stored is what is declared, or nothing is stored yet."""
    stored = store.get(layout.SCHEMA)
    if stored is None:
        return True
    states = [each.describe() for each in declarations_of(cls).values()]
    return stored == schema_after(stored, cls.state_version, states, deployed)


def read_sequence(store: PartitionStore) -> int:
    """Sequence of the last commit in ``store``, 0 when there is none."""
    return int.from_bytes(store.get(layout.SEQUENCE) or b"", "big")


def read_watermark(store: PartitionStore) -> int | None:
    """Of the partition in ``store``, µs; None before the first."""
    stored = store.get(layout.WATERMARK)
    return None if stored is None else int.from_bytes(stored, "big", signed=True)
