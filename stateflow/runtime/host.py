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
from stateflow.errors import (
    BatchChanged,
    OperatorFailed,
    OperatorUsedTwice,
    PositionGap,
    StaleBatch,
    StateflowError,
    TasksMerged,
)
from stateflow.runtime import layout
from stateflow.runtime.layout import UNKNOWN_ATTEMPT, Attempt
from stateflow.runtime.operator import BatchOperator, Context, Operator, key_columns, output_schema, side_schemas
from stateflow.runtime.output import OutputReader, join_output
from stateflow.runtime.rows import OutputWriter, RowReader
from stateflow.runtime.timers import Domain, Timers, to_datetime
from stateflow.state import MAX_VALUE_BYTES, CachePool, ColumnStates, Evolution, KeyedState, declarations_of
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId

#: sources whose names begin so are not the user's
RESERVED = "stateflow:"
#: the source whose rows are not processed but become the operator's first state
INITIAL = "stateflow:initial"
#: what the source of one run of a batch DataFrame begins with
BATCH_RUN = "batch:"
#: the source of the change set that migrates a partition's state; its number is the new state version
MIGRATION = "stateflow:migration"
#: stored cells of states with a ttl that each batch looks at, beside two for each of its rows
SWEPT_MIN = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """Where rows come from. ``number`` rises by one per batch; a *sparse* source may skip numbers.

    ``rewind``: an older batch is sent again, for partitions that lost it; those that contain it skip it, and have
    its output no more.

    ``watermark_us``: this source promises no older rows from its next batch on, µs; None: it makes no promise.
    ``event_us``: the newest event time among the rows its sender has, for all partitions, µs.
    ``attempt``: who sends it, where that is known.
    """

    source: str
    number: int
    sparse: bool = False
    watermark_us: int | None = None
    attempt: Attempt = UNKNOWN_ATTEMPT
    event_us: int | None = None
    rewind: bool = False


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
        self._positions = {
            entry[len(layout.POSITION) :].decode(): layout.Position.decode(value)
            for entry, value in store.scan(layout.POSITION)
        }
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
        known = self._positions.get(source)
        return None if known is None else known.batch

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
        known = self.position(batch.source)
        if batch.rewind and known is not None and batch.number < known:
            return Applied(b"", True, 0, self.sequence)
        self._evolve(now_us)
        if self._is_replay(batch, after):
            earlier = self._store.get(layout.OUTPUT + batch.source.encode()) or b""
            if not rows or self._positions[batch.source].rows:
                self._refuse_other_rows(batch, input_schema, rows)
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

    def _is_replay(self, batch: Batch, after: int | None) -> bool:
        last = self.position(batch.source)
        if batch.source == INITIAL and self._positions.keys() - {INITIAL}:
            if last is not None and batch.number <= last:
                return True
            raise StaleBatch(
                "the operator has processed rows already",
                remedy="load initial state before the first query or stream starts",
                operator=self.partition.operator,
                partition=self.partition.partition,
            )
        if batch.number == last:
            self._refuse_others(self._positions[batch.source].attempt, batch.attempt)
            return True
        where = {
            "operator": self.partition.operator,
            "partition": self.partition.partition,
            "source": batch.source,
        }
        if last is not None and batch.number < last:
            raise StaleBatch(
                f"batch {batch.number} was sent after batch {last}",
                remedy="only the newest batch can be replayed; start the query from its latest checkpoint",
                **where,
            )
        expected = 0 if last is None else last + 1
        if batch.number != expected and not batch.sparse:
            raise PositionGap(
                f"batch {batch.number} was sent, the state expects batch {expected}",
                remedy=f"rewind the source to batch {expected}",
                expected=expected,
                **where,
            )
        if after is not None and after >= expected:  # a sparse source may skip, but not what was acknowledged
            raise PositionGap(
                f"batch {after} was acknowledged, the state contains none after {expected - 1}",
                remedy=f"send the batches from {expected} on again, with rewind",
                expected=expected,
                **where,
            )
        return False

    def _refuse_others(self, earlier: Attempt, now: Attempt) -> None:
        """A retry is welcome to the stored output; somebody else, who has other rows, is not."""
        if not now.run or earlier.run != now.run:
            return
        if earlier.use != now.use:
            raise OperatorUsedTwice(
                "the operator is applied twice in one query",
                remedy="pass a different source= to each apply_operator",
                operator=self.partition.operator,
            )
        if earlier.task == now.task and earlier.call != now.call:
            raise TasksMerged(
                "Spark runs several tasks of the operator as one, as it does for a coalesce right behind it",
                remedy="put .repartition(n) between the operator and the coalesce",
                operator=self.partition.operator,
            )

    def _refuse_other_rows(self, batch: Batch, input_schema: bytes, rows: bytes) -> None:
        """The stored output is of the rows that came first; given to Spark for others, those would be lost silently.

        A query's replay may lack rows, as its source may skip what is gone; one run of a batch DataFrame may not.
        """
        if not batch.attempt.use or batch.source == INITIAL:
            return
        then = self._positions[batch.source].rows
        now = len(self._reader(input_schema).batch(rows)) if rows else 0
        if now > then or (now < then and batch.source.startswith(BATCH_RUN)):
            raise BatchChanged(
                f"batch {batch.number} had {then} row(s) when it was applied, and has {now} now",
                remedy="other rows need another source= or query; a source and the stages behind it must replay",
                operator=self.partition.operator,
                partition=self.partition.partition,
                source=batch.source,
            )

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
        watermarks = {source: position.watermark_us for source, position in self._positions.items()}
        if batch.watermark_us is not None:
            watermarks[batch.source] = max(batch.watermark_us, watermarks.get(batch.source) or batch.watermark_us)
        known = [watermark for watermark in watermarks.values() if watermark is not None]
        watermark_us = self._watermark_us
        if known and (watermark_us is None or min(known) > watermark_us):
            watermark_us = min(known)
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
        source = batch.source.encode()
        before = self._positions.get(batch.source, layout.Position(-1))
        promised = [w for w in (batch.watermark_us, before.watermark_us) if w is not None]
        again = before.batch == batch.number
        event_before_us = before.event_before_us if again else before.event_us
        events = [e for e in (before.event_us, batch.event_us) if e is not None]
        position = layout.Position(
            batch.number,
            max(promised, default=None),
            rows,
            batch.attempt,
            max(events, default=None),
            event_before_us,
        )
        mutations.puts += [(layout.POSITION + source, position.encode()), (layout.OUTPUT + source, output)]
        if watermark_us is not None and watermark_us != self._watermark_us:
            mutations.puts.append((layout.WATERMARK, watermark_us.to_bytes(8, "big", signed=True)))
        self._commit_changes(batch.source, batch.number, mutations)
        self._positions[batch.source] = position
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
