"""Rows of a batch DataFrame, cut into pieces."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from stateflow.spark.task import cut, row_bytes

SOME = st.none() | st.text(max_size=5)
ROW = st.fixed_dictionaries(
    {
        "number": st.none() | st.integers(0, 9),
        "text": SOME,
        "list": st.none() | st.lists(st.none() | st.lists(SOME, max_size=3), max_size=3),
        "map": st.none() | st.dictionaries(st.text(max_size=2), SOME, max_size=2).map(lambda each: list(each.items())),
        "struct": st.none() | st.fixed_dictionaries({"flag": st.none() | st.booleans(), "text": SOME}),
    }
)
SCHEMA = pa.schema(
    [
        ("number", pa.int32()),
        ("text", pa.string()),
        ("list", pa.list_(pa.list_(pa.string()))),
        ("map", pa.map_(pa.string(), pa.string())),
        ("struct", pa.struct([("flag", pa.bool_()), ("text", pa.string())])),
    ]
)


def test_no_piece_is_larger_than_asked_for_and_none_is_empty_but_the_only_one() -> None:
    batch = pa.RecordBatch.from_pydict({"a": list(range(100))})

    def cuts(count: int, bytes_max: int) -> list[tuple[int, bool]]:
        return [(sum(map(len, piece)), last) for piece, last in cut([batch] * count, bytes_max)]

    assert cuts(0, 10) == [(0, True)]
    assert cuts(5, 2 * batch.nbytes) == [(200, False), (200, False), (100, True)]
    assert cuts(4, 2 * batch.nbytes) == [(200, False), (200, True)]
    assert cuts(1, batch.nbytes // 4) == [(25, False), (25, False), (25, False), (25, True)]
    assert cuts(1, 1) == [(1, False)] * 99 + [(1, True)]


@given(st.lists(ROW, max_size=30), st.lists(st.integers(0, 30), max_size=5), st.integers(1, 300))
def test_where_it_is_cut_does_not_depend_on_how_many_rows_come_at_a_time(
    rows: list[dict[str, Any]], ends: list[int], bytes_max: int
) -> None:
    whole = pa.RecordBatch.from_pylist(rows, SCHEMA)
    bounds = [0, *sorted(min(end, len(rows)) for end in ends), len(rows)]
    some = [whole.slice(start, stop - start) for start, stop in pairwise(bounds)]
    alone = [pa.RecordBatch.from_pylist([row], SCHEMA) for row in rows]
    found = [
        [sum(map(len, piece)) for piece, _ in cut(batches, bytes_max)] for batches in ([whole], some, alone, [*some])
    ]
    assert found[0] == found[1] == found[2]
    assert sum(found[0]) == len(rows)
    sizes = row_bytes(whole).tolist()
    assert all(size > 0 for size in sizes)
    start = 0
    for count in found[0]:
        assert count <= 1 or sum(sizes[start : start + count]) <= bytes_max
        start += count


def test_rows_of_every_type_have_a_size() -> None:
    row = {
        "null": pa.nulls(2),
        "bool": [True, None],
        "decimal": pa.array([Decimal("1.00"), None], pa.decimal128(10, 2)),
        "time": pa.array([1, None], pa.timestamp("us", "UTC")),
        "span": pa.array([1, None], pa.duration("us")),
        "binary": [b"123", None],
        "large": pa.array(["123", None], pa.large_string()),
        "listed": pa.array([[1], None], pa.large_list(pa.int8())),
        "fixed": pa.array([b"12345", None], pa.binary(5)),
    }
    assert row_bytes(pa.RecordBatch.from_pydict(row)).tolist() == [57, 50]


def test_what_was_given_is_held_no_longer_than_its_receiver_holds_it() -> None:
    """No more than what comes at a time is held beside the current piece, however many pieces there are."""
    before = pa.total_allocated_bytes()
    batch_bytes = 1 << 20

    def batches() -> Any:
        for number in range(50):
            yield pa.RecordBatch.from_pydict({"a": pa.array([number] * (batch_bytes // 8))})

    most = 0
    for piece, _ in cut(batches(), 4 * batch_bytes):
        piece.clear()
        most = max(most, pa.total_allocated_bytes() - before)
    assert most <= 2 * batch_bytes
