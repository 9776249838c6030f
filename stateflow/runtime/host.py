"""One owned partition at work: applies batches to an operator's state, exactly once.

A batch is identified by (source, batch). Its mutations, its position and its output go into one atomic write, so
that a retry or replay finds the stored output and changes nothing.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from stateflow.changes import ChangeSet, Mutations
from stateflow.errors import OperatorFailed, PositionGap, StaleBatch, StateflowError
from stateflow.runtime import layout
from stateflow.runtime.operator import Context, Operator, key_columns, output_schema
from stateflow.runtime.rows import OutputWriter, RowReader
from stateflow.state import KeyedState, check_schema, declarations_of
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId


@dataclass(frozen=True, slots=True)
class Batch:
    """Where rows come from. ``number`` rises by one per batch; a *sparse* source may skip numbers."""

    source: str
    number: int
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Applied:
    """``output``: Arrow record batch message in the operator's output schema, or ``b""``."""

    output: bytes
    replayed: bool
    rows: int


class PartitionHost:
    """Not thread-safe: one batch at a time.

    Args:
        on_commit: called after each durable commit with a thunk that encodes its change set, so that
            encoding costs nothing when nobody follows.
    """

    def __init__(
        self,
        operator: type[Operator],
        partition: PartitionId,
        store: PartitionStore,
        epoch: int,
        *,
        cached_keys: int = 262_144,
        sync: bool = False,
        on_commit: Callable[[int, Callable[[], bytes]], None] | None = None,
    ) -> None:
        self.partition = partition
        self.epoch = epoch
        self._store = store
        self._sync = sync
        self._on_commit = on_commit
        self.state = KeyedState(partition.operator, declarations_of(operator), store, cached_keys=cached_keys)
        self._check_stored_schema()
        self._writer = OutputWriter(output_schema(operator), partition.operator)
        self.key = key_columns(operator)
        self._readers: dict[bytes, RowReader] = {}
        self._positions: dict[str, int | None] = {}
        self.sequence = read_sequence(store)
        self._ctx = Context(partition.operator, partition.partition)
        self._operator = operator()
        self._operator.open(self._ctx)

    def _check_stored_schema(self) -> None:
        declared = json.dumps(self.state.schema(), sort_keys=True).encode()
        stored = self._store.get(layout.SCHEMA)
        if stored == declared:
            return
        if stored is not None:
            check_schema(json.loads(stored), self.state.schema(), self.partition.operator)
        self._store.apply(Mutations(puts=[(layout.SCHEMA, declared)]))

    # -- batches --------------------------------------------------------------------------------------

    def position(self, source: str) -> int | None:
        """The last batch of ``source`` this partition contains; None when it has seen none."""
        if source not in self._positions:
            stored = self._store.get(layout.POSITION + source.encode())
            self._positions[source] = None if stored is None else layout.decode_position(stored)
        return self._positions[source]

    def apply(self, batch: Batch, input_schema: bytes, rows: bytes) -> Applied:
        """Apply one batch, or return the stored output when it was applied before.

        Args:
            input_schema: Arrow IPC schema of ``rows``.
            rows: Arrow record batch message; ``b""`` when the batch has no row for this partition.

        Raises PositionGap, StaleBatch, and whatever is wrong with the rows or the operator; the state is then
        as it was before the call.
        """
        if self._is_replay(batch):
            output = self._store.get(layout.OUTPUT + batch.source.encode())
            return Applied(output or b"", True, 0)
        try:
            outputs, count = self._process(self._reader(input_schema), rows) if rows else ([], 0)
            output = self._writer.write(outputs)
            self._commit(batch, self.state.collect(), output)
        except BaseException:
            self.state.rollback()
            raise
        return Applied(output, False, count)

    def _is_replay(self, batch: Batch) -> bool:
        last = self.position(batch.source)
        if batch.number == last:
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
                **where,
            )
        return False

    def _reader(self, schema: bytes) -> RowReader:
        reader = self._readers.get(schema)
        if reader is None:
            reader = self._readers[schema] = RowReader.of(schema, self.key, self.partition.operator)
        return reader

    def _process(self, reader: RowReader, message: bytes) -> tuple[list[Any], int]:
        operator, ctx, bind = self._operator, self._ctx, self.state.bind
        process = operator.process
        outputs: list[Any] = []
        extend = outputs.extend
        count = 0
        key: Any = None
        row: Any = None
        try:
            for key, row in reader.read(message):
                bind(operator, key)
                ctx.key = key
                produced = process(row, ctx)
                if produced is not None:
                    extend(produced)
                count += 1
        except StateflowError:
            raise
        except (Exception, SystemExit) as error:  # sys.exit() must not take the replica with it
            raise self._operator_failed(error, key, row) from error
        return outputs, count

    def _operator_failed(self, error: BaseException, key: Any, row: Any) -> OperatorFailed:
        trace = "".join(traceback.format_exception(error)[-6:])
        return OperatorFailed(
            f"process() raised {type(error).__name__}: {error}",
            remedy="mend the operator or the row; the batch was not applied",
            operator=self.partition.operator,
            partition=self.partition.partition,
            key=repr(key),
            row=repr(row)[:500],
            traceback="\n" + trace,
        )

    def _commit(self, batch: Batch, mutations: Mutations, output: bytes) -> None:
        sequence = self.sequence + 1
        source = batch.source.encode()
        mutations.puts += [
            (layout.SEQUENCE, sequence.to_bytes(8, "big")),
            (layout.POSITION + source, layout.encode_position(batch.number)),
            (layout.OUTPUT + source, output),
        ]
        self._store.apply(mutations, sync=self._sync)
        self.sequence = sequence
        self._positions[batch.source] = batch.number
        self.state.mark_clean()
        if self._on_commit is not None:
            self._on_commit(
                sequence,
                lambda: ChangeSet(
                    self.partition.operator,
                    self.partition.partition,
                    self.epoch,
                    sequence,
                    batch.source,
                    batch.number,
                    mutations,
                ).encode(),
            )

    def close(self) -> None:
        """Lets the operator go. The store stays open: it may still be a move's source."""
        self._operator.close(self._ctx)


def read_sequence(store: PartitionStore) -> int:
    """Sequence of the last commit in ``store``, 0 when there is none."""
    return int.from_bytes(store.get(layout.SEQUENCE) or b"", "big")


def read_batch(message: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """The rows of a record batch message; an empty batch for ``b""``."""
    if not message:
        return pa.RecordBatch.from_pylist([], schema=schema)
    return pa.ipc.read_record_batch(pa.py_buffer(message), schema)
