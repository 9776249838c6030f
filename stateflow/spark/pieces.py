"""A task's rows of a batch DataFrame, cut into pieces of a bounded size: each is a batch of its own.

Where it is cut depends on the rows alone, and on their order: who sends them again cuts them as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

#: of rows as Arrow has them. Python holds a few times as much while it sends them.
PIECE_BYTES = 16 << 20


def cut(batches: Iterable[pa.RecordBatch], bytes_max: int = PIECE_BYTES) -> Iterator[tuple[list[pa.RecordBatch], bool]]:
    """(rows, is it the last?) of each piece: at least one, whose rows may be none. One is given when it is known
    whether more come."""
    piece: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if size >= bytes_max:
            yield piece, False
            piece, size = [], 0
        piece.append(batch)
        size += batch.nbytes
    yield piece, True
