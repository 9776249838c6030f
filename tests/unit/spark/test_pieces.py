"""Rows of a batch DataFrame, cut into pieces."""

from __future__ import annotations

import pyarrow as pa

from stateflow.spark.pieces import cut


def test_no_piece_is_larger_than_asked_for_and_none_is_empty_but_the_only_one() -> None:
    batch = pa.RecordBatch.from_pydict({"a": list(range(100))})

    def cuts(count: int, bytes_max: int) -> list[tuple[int, bool]]:
        return [(len(piece), last) for piece, last in cut([batch] * count, bytes_max)]

    assert cuts(0, 10) == [(0, True)]
    assert cuts(5, 2 * batch.nbytes) == [(2, False), (2, False), (1, True)]
    assert cuts(4, 2 * batch.nbytes) == [(2, False), (2, True)]
    assert cuts(2, 1) == [(1, False), (1, True)]
