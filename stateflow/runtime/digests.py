"""Digests of rows by their values, so that the same rows have the same digest in any message and beside any other rows.

A digest covers the buffers of each column, as if the part were alone and its nulls had no bytes behind them. Former
versions digested the Arrow message instead, which is not determined by the values. Digests of values are negative, so
that stored digests of the two kinds can be told apart; see :func:`comparable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t
import xxhash

_hash = xxhash.xxh3_64_intdigest
_BITS = (1 << 63) - 1


def digests_of(schema: bytes, rows: pa.RecordBatch | None, bounds: Sequence[int]) -> list[int]:
    """Returns the digest of each part, from one bound to before the next. Args: schema: Arrow IPC schema; rows: None
    for no rows."""
    seed = _hash(schema)
    found = [seed] * (len(bounds) - 1)
    if rows is not None:
        if bounds[0] or bounds[-1] != rows.num_rows:
            rows = rows.slice(bounds[0], bounds[-1] - bounds[0])
            bounds = [bound - bounds[0] for bound in bounds]
        for column in rows.columns:
            _add(column, bounds, found)
    return [
        -1 - ((digest ^ (stop - start)) & _BITS) for digest, (start, stop) in zip(found, pairwise(bounds), strict=True)
    ]


def comparable(one: int, other: int) -> bool:
    """Tells whether two digests are of the same kind."""
    return (one < 0) == (other < 0)


def _add(column: pa.Array, bounds: Sequence[int], found: list[int]) -> None:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        _add(column.storage, bounds, found)
        return
    if column.null_count:
        _add_nulls(np.asarray(pc.is_null(column).cast(pa.uint8())), bounds, found)
    if t.is_null(kind):
        return
    if t.is_boolean(kind):
        _add_bytes(np.asarray(pc.fill_null(column, False).cast(pa.uint8())), 1, bounds, found)
    elif t.is_binary(kind) or t.is_string(kind) or t.is_large_binary(kind) or t.is_large_string(kind):
        _add_texts(column, bounds, found)
    elif t.is_primitive(kind) and kind.bit_width >= 8:
        width = kind.bit_width // 8
        if column.null_count:  # the bytes behind a null are arbitrary
            plain = np.asarray(column.view(f"int{kind.bit_width}").fill_null(0))
            _add_bytes(plain, width, bounds, found)
        else:
            _add_bytes(column.buffers()[1], width, [column.offset + bound for bound in bounds], found)
    else:
        _add_others(column, bounds, found)


def _add_nulls(nulls: Any, bounds: Sequence[int], found: list[int]) -> None:
    """Adds the nulls of each part that has any, so that a null elsewhere does not change a part's digest."""
    for number, (start, stop) in enumerate(pairwise(bounds)):
        part = nulls[start:stop]
        if part.any():
            found[number] = _hash(memoryview(part), found[number])


def _add_bytes(data: Any, width: int, bounds: Sequence[int], found: list[int]) -> None:
    view = memoryview(data).cast("B")
    for number, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            found[number] = _hash(view[start * width : stop * width], found[number])


def _add_texts(column: pa.Array, bounds: Sequence[int], found: list[int]) -> None:
    if column.null_count:
        column = column.fill_null(b"" if t.is_binary(column.type) or t.is_large_binary(column.type) else "")
    _, offsets, data = column.buffers()
    is_large = t.is_large_binary(column.type) or t.is_large_string(column.type)
    where = np.frombuffer(offsets, np.int64 if is_large else np.int32)[column.offset : column.offset + len(column) + 1]
    _add_bytes(np.diff(where), where.itemsize, bounds, found)
    if data is not None:
        _add_bytes(data, 1, where[list(bounds)].tolist(), found)


def _add_others(column: pa.Array, bounds: Sequence[int], found: list[int]) -> None:
    """Adds a column of a nested type, or of one wider than a number, part by part."""
    for number, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            alone = column.slice(start, stop - start).take(pa.array(range(stop - start)))
            message = pa.record_batch([pa.concat_arrays([alone])], names=["c"]).serialize()
            found[number] = _hash(memoryview(message), found[number])
