"""Sorts callers' rows by partition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from stateflow.errors import InvalidArgument, KeyColumnMissing
from stateflow.partitioner import partition_of
from stateflow.rpc.rows import BatchRows
from stateflow.runtime.exact import Misfit, column_of, type_of
from stateflow.types import OperatorSpec


def by_partition(spec: OperatorSpec, schema: pa.Schema | None, rows: list[Mapping[str, Any]]) -> BatchRows:
    """Sorts rows by partition. Raises KeyColumnMissing, InvalidArgument, NullKey.

    Args:
        schema: schema of the rows; None: inferred from them.
    """
    if not rows:
        return BatchRows.visit([])
    table, numbers = numbered(spec, schema, rows)
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    ends = {numbers[index]: end for end, index in enumerate(order, 1)}  # the end of each partition's last row stays
    batch = table.take(pa.array(order))
    return BatchRows(batch.schema.serialize().to_pybytes(), batch, list(ends), list(ends.values()))


def numbered(
    spec: OperatorSpec, schema: pa.Schema | None, rows: list[Mapping[str, Any]]
) -> tuple[pa.RecordBatch, list[int]]:
    """Returns the rows, at least one, in one schema, and the partition of each.

    Clients and the test harness both convert rows to batches here. Without a schema, the batch has every column of any
    row. A column that a row lacks is null; values are taken exactly as they are, or refused. Arguments and errors as
    with :func:`by_partition`.
    """
    for index, row in enumerate(rows):
        if missing := [column for column in spec.key if column not in row]:
            raise _no_key(spec, f"row {index} has no {missing[0]!r}")
    names = dict.fromkeys(name for row in rows for name in row) if schema is None else dict.fromkeys(schema.names)
    for column in spec.key:
        if column not in names:
            raise _no_key(spec, f"the schema has no {column!r}")
    if schema is not None:
        _check_names(spec, names, rows)
    fields, arrays = [], []
    for number, name in enumerate(names):
        values = [row.get(name) for row in rows]
        try:
            field = pa.field(name, type_of(values, name in spec.key)) if schema is None else schema.field(number)
            arrays.append(column_of(field).array(values))
            fields.append(field)
        except Misfit as misfit:
            raise _refused(spec, name, misfit, schema is not None) from misfit
    table = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields) if schema is None else schema)
    # from the keys as the replica will see them: an int in a double column is a double
    keys = zip(*(table.column(column).to_pylist() for column in spec.key), strict=True)
    return table, [partition_of(values, spec.partitions) for values in keys]


def _check_names(spec: OperatorSpec, names: Mapping[str, None], rows: list[Mapping[str, Any]]) -> None:
    for index, row in enumerate(rows):
        if not row.keys() <= names.keys():
            unknown = next(name for name in row if name not in names)
            raise InvalidArgument(
                f"a row has column {unknown!r}, which is not in the schema",
                remedy=f"leave it out, or add it to schema=, which has {', '.join(names)}",
                operator=spec.name,
                column=unknown,
                row=index,
            )


def _refused(spec: OperatorSpec, name: str, misfit: Misfit, declared: bool) -> InvalidArgument:
    what = misfit.what if declared else misfit.what.replace("is declared", "would be")
    remedy = "fix the row, or declare another type in schema=" if declared else "pass schema=, or fix the rows"
    return InvalidArgument(
        f"the rows do not fit {'the' if declared else 'one'} schema: column {name!r}{misfit.path} {what}",
        remedy=f"{misfit.how}; {remedy}" if misfit.how else remedy,
        operator=spec.name,
        column=f"{name}{misfit.path}",
        row=misfit.row,
    )


def _no_key(spec: OperatorSpec, what: str) -> KeyColumnMissing:
    return KeyColumnMissing(what, remedy="include every key column in each row", operator=spec.name)
