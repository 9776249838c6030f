"""A task's rows of a batch DataFrame, cut into pieces of a bounded size: each is a batch of its own.

Where it is cut depends on the rows alone, and on their order: who sends them again cuts them as before, however many of
them Spark then gives at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

#: of rows as Arrow has them. Python holds a few times as much while it sends them.
PIECE_BYTES = 16 << 20
#: what a value takes beside its bytes where these are any number, in a list too
_OFFSET_BYTES = 4


def cut(batches: Iterable[pa.RecordBatch], bytes_max: int = PIECE_BYTES) -> Iterator[tuple[list[pa.RecordBatch], bool]]:
    """(rows, is it the last?) of each piece: at least one, whose rows may be none. None is larger than ``bytes_max``
    but one of a single row. It is given when it is known whether more come, and is the caller's, to clear."""
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
    """Of each row, about as many as Arrow takes for it: by its values, wherever they lie."""
    total = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        total += _bytes_of(column)
    return total


def _bytes_of(column: pa.Array) -> Any:
    """Of each value, or of any."""
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
