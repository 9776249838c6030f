"""A batch of one partition, given to a replica without a network."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import pyarrow as pa

from stateflow.operator.arrow import read_batch, read_schema
from stateflow.partition.batches import Outcome
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.slices import BatchSlices, Part, digests_of
from stateflow.rpc.apply import BatchRows
from stateflow.types import PartitionId


class Told:
    """The caller of a batch, which keeps the outcome of each part by number."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}

    def begun(self, number: int) -> None: ...

    def committing(self) -> None: ...

    def told(self, number: int, outcome: Outcome) -> None:
        assert number not in self.outcomes, "it was told before"
        self.outcomes[number] = outcome

    def goes_on(self) -> bool:
        return True

    def applied(self) -> list[Applied]:
        """Returns what was applied, of all parts in order."""
        found = [self.outcomes[number] for number in range(len(self.outcomes))]
        assert all(isinstance(each, Applied) for each in found), found
        return found  # type: ignore[return-value]


def shares_of(operator: str, batch: Batch, rows: dict[int, pa.RecordBatch], epoch: int = 1) -> BatchSlices:
    """Makes the batch slices of the rows of each partition."""
    parts, reached = [], 0
    for partition, mine in rows.items():
        parts.append(Part(partition, epoch, reached, reached := reached + mine.num_rows))
    whole = pa.concat_batches(list(rows.values()))
    return BatchSlices(operator, batch, whole.schema.serialize().to_pybytes(), whole, parts)


def rows_of(parts: Mapping[int, pa.RecordBatch | None], schema: bytes = b"") -> BatchRows:
    """Makes a batch of the rows of each partition."""
    found = [(p, rows) for p, rows in sorted(parts.items())]
    ends = list(accumulate(0 if rows is None else rows.num_rows for _, rows in found))
    some = [rows for _, rows in found if rows is not None and rows.num_rows]
    whole = pa.concat_batches(some) if some else None
    if whole is not None and not schema:
        schema = whole.schema.serialize().to_pybytes()
    return BatchRows(schema, whole, [p for p, _ in found], ends)


WORD = pa.schema([("word", pa.binary())])


def words(parts: Mapping[int, bytes], schema: bytes = b"") -> BatchRows:
    """One row for a partition, which is a word; none for an empty one."""
    rows = {p: pa.record_batch([[word]], schema=WORD) if word else None for p, word in parts.items()}
    return rows_of(rows, schema)


def word_of(rows: BatchRows, partition: int) -> bytes:
    mine = rows.only([partition])
    word: bytes = b"" if mine.rows is None or not mine.ends[-1] else mine.rows["word"][0].as_py()
    return word


def apply_to(
    node: ReplicaNode,
    partition: PartitionId,
    epoch: int,
    batch: Batch,
    schema: bytes,
    rows: bytes,
    after: int | None = None,
) -> Any:
    """Applies a record batch message or ``b""`` for none, to one partition. Raises an outcome that is an error."""
    read = read_batch(rows, read_schema(schema)) if rows else None
    stop = 0 if read is None else read.num_rows
    digest = None if batch.session is None else digests_of(schema, read, [0, stop])[0]
    part = Part(partition.partition, epoch, 0, stop, after, digest)
    told = Told()
    node.batches.apply(BatchSlices(partition.operator, batch, schema, read, [part]), told)
    outcome = told.outcomes[0]
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
