"""One owned partition at work: applies batches to an operator's state, exactly once.

A batch is identified by (source, batch). Its mutations, its position and its output go into one atomic write, so
that a retry or replay finds the stored output and changes nothing.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from stateflow.changes import ChangeSet, Mutations
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import OperatorFailed, StateflowError
from stateflow.runtime import layout
from stateflow.runtime.operator import BatchOperator, Context, Operator, key_columns, output_schema, side_schemas
from stateflow.runtime.output import OutputReader, join_output
from stateflow.runtime.positions import INITIAL, MIGRATION, Batch, Positions
from stateflow.runtime.rows import OutputWriter, RowReader
from stateflow.runtime.timers import Domain, Timers, to_datetime
from stateflow.state import MAX_VALUE_BYTES, CachePool, ColumnStates, Evolution, KeyedState, declarations_of
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId

#: stored cells of states with a ttl that each batch looks at, beside two for each of its rows
SWEPT_MIN = 32


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
    ) -> None:
        self.partition = partition
        self.epoch = epoch
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
        )
        self._declared = declared
        self._writer = OutputWriter(output_schema(operator), partition.operator)
        side = side_schemas(operator)
        self._side_writers = {tag: OutputWriter(schema, partition.operator) for tag, schema in side.items()}
        self._outputs = OutputReader(output_schema(operator), side)
        self.key = key_columns(operator)
        self._readers: dict[bytes, RowReader] = {}
        known = {
            entry[len(layout.POSITION) :].decode(): layout.Position.decode(value)
            for entry, value in store.scan(layout.POSITION)
        }
        self._positions = Positions(partition, known)
        self.sequence = read_sequence(store)
        self._event_time = operator.event_time
        self._timers = Timers(store)
        keyed = self.state if isinstance(self.state, KeyedState) else None
        self._ctx = Context(partition.operator, partition.partition, self._timers, keyed)
        self._watermark_us = read_watermark(store)
        self._show_watermark(self._watermark_us)
        self._operator = operator()
        if isinstance(self.state, ColumnStates):
            self.state.attach(self._operator)
        self._unsaved: list[tuple[bytes, bytes]] = []
        self._evolved = False
        self._open()

    def _open(self) -> None:
        try:
            self._operator.open(self._ctx)
        except StateflowError:
            raise
        except (Exception, SystemExit) as error:
            raise OperatorFailed(
                f"open() raised {type(error).__name__}: {error}",
                remedy="mend the operator; no batch was applied",
                operator=self.partition.operator,
                partition=self.partition.partition,
                traceback="\n" + "".join(traceback.format_exception(error)[-6:]),
            ) from error

    def _evolve(self, now_us: int) -> None:
        """Make the stored states those that are declared now. Raises SchemaMismatch, OperatorFailed."""
        if self._evolved:
            return
        self._unsaved = []
        self._evolve_states(now_us)
        self._evolved = True

    def _evolve_states(self, now_us: int) -> None:
        operator = self._operator
        schema = {"version": operator.state_version, "states": self.state.schema()}
        declared = layout.SCHEMA, json.dumps(schema, sort_keys=True).encode()
        stored = self._store.get(layout.SCHEMA)
        if stored == declared[1]:
            return
        self._unsaved = [declared]
        if stored is None:
            return
        before = json.loads(stored)
        if isinstance(before, list):  # as written before operators had a state_version
            before = {"version": 1, "states": before}
        migrates = type(operator).migrate_state is not Operator.migrate_state
        evolution = Evolution(
            self.partition.operator,
            before["states"],
            before["version"],
            self._declared,
            operator.state_version,
            migrates,
        )
        if not evolution.needed:
            return
        keyed = self.state
        if not isinstance(keyed, KeyedState):
            keyed = KeyedState(self.partition.operator, self._declared, self._store)

        def migrate(key: Any, old: SimpleNamespace) -> None:
            keyed.bind(operator, key)
            self._ctx.key = key
            try:
                self._call("migrate_state", lambda o, _: operator.migrate_state(before["version"], o), old, [])
            finally:
                self._ctx.key = None

        keyed.set_time(now_us, self._watermark_us)
        try:
            self._commit_changes(MIGRATION, operator.state_version, evolution.convert(self._store, keyed, migrate))
            keyed.mark_clean()
        except BaseException:
            keyed.rollback()
            raise
        finally:
            if isinstance(self.state, ColumnStates):
                self.state.attach(operator)

    # -- batches --------------------------------------------------------------------------------------

    def position(self, source: str) -> int | None:
        """The last batch of ``source`` this partition contains; None when it has seen none."""
        return self._positions.last(source)

    def apply(self, batch: Batch, input_schema: bytes, rows: bytes, now_us: int, after: int | None = None) -> Applied:
        """Apply one batch, or return the stored output when it was applied before.

        Args:
            input_schema: Arrow IPC schema of ``rows``.
            rows: Arrow record batch message; ``b""`` when the batch has no row for this partition.
            now_us: processing time; timers of that domain fire up to it.
            after: the newest batch of a sparse source that this partition acknowledged, where the sender knows it.

        Raises PositionGap, StaleBatch, and whatever is wrong with the rows or the operator; the state is then
        as it was before the call.
        """
        earlier = b""
        began = self._clock.monotonic()
        if self._positions.contains(batch):
            return Applied(b"", True, 0, self.sequence)
        self._evolve(now_us)
        if self._positions.is_replay(batch, after):
            earlier = self._store.get(layout.OUTPUT + batch.source.encode()) or b""
            if not rows or self._positions.rows(batch.source):
                if batch.attempt.use and batch.source != INITIAL:  # somebody who sends the same rows, or is mistaken
                    self._positions.check_rows(batch, len(self._reader(input_schema).batch(rows)) if rows else 0)
                return Applied(earlier, True, 0, self.sequence)
            # Visited before without rows, by a task that did not have them (its batch failed): they come now.
        try:
            outputs: list[Any] = []
            self._ctx._side = {tag: [] for tag in self._side_writers}
            self.state.set_time(now_us, self._watermark_us)
            columns: pa.RecordBatch | None = None
            count = 0
            if rows and self._batches:
                columns, count = self._process_batch(self._reader(input_schema), rows, batch.source == INITIAL)
            elif rows:
                count = self._process(self._reader(input_schema), rows, outputs, batch.source == INITIAL)
            watermark_us = self._advance(batch, now_us, outputs)
            side = {tag: self._side_writers[tag].write(emitted) for tag, emitted in self._ctx._side.items() if emitted}
            output = self._outputs.join(earlier, join_output(self._writer.write(outputs, columns), side))
            worked = self._clock.monotonic()
            # twice as fast as state can grow, so that what has expired goes from disk in time
            mutations = self.state.expired(SWEPT_MIN + 2 * count) if self.state.expires else self.state.collect()
            self._timers.collect(mutations)
            self._commit(batch, mutations, output, watermark_us, count)
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
            reader = self._readers[schema] = RowReader.of(schema, self.key, self.partition.operator)
        return reader

    def _process(self, reader: RowReader, message: bytes, outputs: list[Any], initial: bool) -> int:
        """Rows in order; returns how many."""
        assert isinstance(self.state, KeyedState)
        operator, ctx, bind = self._operator, self._ctx, self.state.bind
        process, extend = operator.init_state if initial else operator.process, outputs.extend
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
        except (Exception, SystemExit) as error:  # sys.exit() must not take the replica with it
            raise self._operator_failed(process.__name__, error, key, row) from error
        finally:
            ctx.key = ctx.timestamp = None
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
        except (Exception, SystemExit) as error:
            raise self._operator_failed(process.__name__, error, None, batch.slice(0, 1).to_pylist()) from error
        return (None if produced is None else self._writer.columns(produced)), batch.num_rows

    def _advance(self, batch: Batch, now_us: int, outputs: list[Any]) -> int | None:
        """Time passes: the watermark, then the timers that are due. Returns the partition's watermark.

        It is the minimum over the sources that have one, and never goes back when a late source joins.
        """
        watermark_us, lowest_us = self._watermark_us, self._positions.watermark_us(batch)
        if lowest_us is not None and (watermark_us is None or lowest_us > watermark_us):
            watermark_us = lowest_us
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

    def _call(self, name: str, method: Callable[[Any, Context], Any], argument: Any, outputs: list[Any]) -> None:
        try:
            produced = method(argument, self._ctx)
            if produced is not None:
                outputs.extend(produced)
        except StateflowError as error:
            error.located(**self._here(self._ctx.key))
            raise
        except (Exception, SystemExit) as error:
            raise self._operator_failed(name, error, self._ctx.key, argument) from error

    def _show_watermark(self, watermark_us: int | None) -> None:
        self._ctx.watermark = None if watermark_us is None else to_datetime(watermark_us)

    def _here(self, key: Any) -> dict[str, Any]:
        shown = None if key is None else repr(key)
        return {"operator": self.partition.operator, "partition": self.partition.partition, "key": shown}

    def _operator_failed(self, method: str, error: BaseException, key: Any, row: Any) -> OperatorFailed:
        trace = "".join(traceback.format_exception(error)[-6:])
        return OperatorFailed(
            f"{method}() raised {type(error).__name__}: {error}",
            remedy="mend the operator or the row; the batch was not applied",
            operator=self.partition.operator,
            partition=self.partition.partition,
            key=repr(key),
            row=repr(row)[:500],
            traceback="\n" + trace,
        )

    def _commit(self, batch: Batch, mutations: Mutations, output: bytes, watermark_us: int | None, rows: int) -> None:
        source, position = batch.source.encode(), self._positions.behind(batch, rows)
        mutations.puts += [(layout.POSITION + source, position.encode()), (layout.OUTPUT + source, output)]
        if watermark_us is not None and watermark_us != self._watermark_us:
            mutations.puts.append((layout.WATERMARK, watermark_us.to_bytes(8, "big", signed=True)))
        self._commit_changes(batch.source, batch.number, mutations)
        self._positions.reached(batch.source, position)
        self._watermark_us = watermark_us
        self.state.mark_clean()
        self._timers.end_batch()

    def _commit_changes(self, source: str, number: int, mutations: Mutations) -> None:
        """One atomic write under the next sequence, and those who follow are told."""
        sequence = self.sequence + 1
        mutations.puts += [*self._unsaved, (layout.SEQUENCE, sequence.to_bytes(8, "big"))]
        self._store.apply(mutations, sync=self._sync)
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
        """Lets the operator go; an error of its ``close`` is logged, for nobody could do anything about it.

        The store stays open: it may still be a move's source.
        """
        try:
            self._operator.close(self._ctx)
        except Exception:
            self._ctx.logger.exception("close() of %s failed", self.partition)
        self.state.close()


def _micros(seconds: float) -> int:
    return int(seconds * 1e6)


def read_sequence(store: PartitionStore) -> int:
    """Sequence of the last commit in ``store``, 0 when there is none."""
    return int.from_bytes(store.get(layout.SEQUENCE) or b"", "big")


def read_watermark(store: PartitionStore) -> int | None:
    """Of the partition in ``store``, µs; None before the first."""
    stored = store.get(layout.WATERMARK)
    return None if stored is None else int.from_bytes(stored, "big", signed=True)
