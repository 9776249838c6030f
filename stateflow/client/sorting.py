"""Rows as callers give them, sorted by the partitions that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from stateflow.errors import InvalidArgument, KeyColumnMissing
from stateflow.partitioner import partition_of
from stateflow.rpc.rows import BatchRows
from stateflow.types import OperatorSpec


def by_partition(spec: OperatorSpec, schema: pa.Schema | None, rows: list[Mapping[str, Any]]) -> BatchRows:
    """Args: schema: of the rows; None: as they are. Raises KeyColumnMissing, InvalidArgument, NullKey."""
    if not rows:
        return BatchRows.visit([])
    table, numbers = numbered(spec, schema, rows)
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    ends = {numbers[index]: end for end, index in enumerate(order, 1)}  # the last one's stays
    batch = table.take(pa.array(order))
    return BatchRows(batch.schema.serialize().to_pybytes(), batch, list(ends), list(ends.values()))


def numbered(
    spec: OperatorSpec, schema: pa.Schema | None, rows: list[Mapping[str, Any]]
) -> tuple[pa.RecordBatch, list[int]]:
    """The rows, of which one at least, in one schema, which has every column that any of them has; and the partition of
    each. Args and errors as of :func:`by_partition`."""
    key, partitions = spec.key, spec.partitions
    for index, row in enumerate(rows):
        missing = [column for column in key if column not in row]
        if missing:
            raise _no_key(spec, f"row {index} has no {missing[0]!r}")
    names = schema.names if schema is not None else dict.fromkeys(name for row in rows for name in row)
    for column in key:
        if column not in names:
            raise _no_key(spec, f"the schema has no {column!r}")
    try:
        columns = {name: [row.get(name) for row in rows] for name in names}
        table = pa.RecordBatch.from_pydict(columns, schema=schema)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"the rows do not fit one schema: {str(error).splitlines()[0]}",
            remedy="give schema=, or mend the rows",
        ) from error
    # of the keys as the replica will see them: an int in a double column is a double
    keys = zip(*(table.column(column).to_pylist() for column in key), strict=True)
    return table, [partition_of(values, partitions) for values in keys]


def _no_key(spec: OperatorSpec, what: str) -> KeyColumnMissing:
    return KeyColumnMissing(what, remedy="every row needs the key", operator=spec.name)
