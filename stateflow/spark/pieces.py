"""Cuts a task's rows of a batch DataFrame into pieces of a bounded size, each a batch of its own.

The cuts depend on the rows alone, and on their order. An attempt that sends them again cuts them as before, whatever
number of rows Spark then gives at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

#: bytes of rows in Arrow's form. Python holds a few times as much while it sends them.
PIECE_BYTES = 16 << 20
#: bytes of an offset, which each value of variable length takes besides its own, also in a list
_OFFSET_BYTES = 4


def cut(batches: Iterable[pa.RecordBatch], bytes_max: int = PIECE_BYTES) -> Iterator[tuple[list[pa.RecordBatch], bool]]:
    """Yields (rows, whether it is the last) of each piece; there is at least one, which may be empty.

    No piece is larger than ``bytes_max``, except a piece of a single row. A piece is yielded when it is known whether
    more rows come. The list is the caller's, to clear.
    """
    piece: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        ends = np.cumsum(row_bytes(batch))
        start, before = 0, 0
        while start < batch.num_rows:
            stop = int(np.searchsorted(ends, before + bytes_max - size, side="right"))
            if stop <= start:
                if piece:
                    yield piece, False
                    piece, size = [], 0
                    continue
                stop = start + 1
            piece.append(batch.slice(start, stop - start))
            size += int(ends[stop - 1]) - before
            start, before = stop, int(ends[stop - 1])
    yield piece, True


def row_bytes(batch: pa.RecordBatch) -> Any:
    """Returns for each row about the bytes that Arrow takes for its values, wherever in memory they are."""
    total = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        total += _bytes_of(column)
    return total


def _bytes_of(column: pa.Array) -> Any:
    """Returns the bytes of each value, or one figure for all."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _bytes_of(column.storage)
    if t.is_null(kind):
        return 0
    if t.is_struct(kind):
        return sum((_bytes_of(child) for child in column.flatten()), np.zeros(len(column), np.int64))
    if t.is_map(kind):
        column = column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
    if t.is_list(column.type) or t.is_large_list(column.type):
        inner = np.zeros(len(column.flatten()) + 1, np.int64)
        inner[1:] = _bytes_of(column.flatten())
        ends = np.cumsum(_lengths(pc.list_value_length(column)))
        return _OFFSET_BYTES + np.diff(np.cumsum(inner)[np.r_[0, ends]])
    try:
        return -(-kind.bit_width // 8)
    except ValueError:
        return _OFFSET_BYTES + _lengths(pc.binary_length(column))


def _lengths(found: pa.Array) -> Any:
    return found.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
