"""Decoding of rows of several partitions: together where possible, apart where a row cannot be decoded."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import InvalidArgument, NullKey
from stateflow.operator import rows as arriving
from stateflow.operator.rows import RowDecoder, RowReader
from stateflow.partition.positions import Batch
from stateflow.partition.slices import BatchSlices, Part

SCHEMA = pa.schema([("k", pa.int64()), ("at", pa.timestamp("s"))])
BEYOND = 1 << 40  # seconds: a year beyond Python's range


def arrived(monkeypatch: pytest.MonkeyPatch, rows: list[tuple[int | None, int]], stops: list[int]) -> Any:
    """Makes arriving rows. Returns them, and a list that records how many rows were decoded at a time."""
    decoded: list[int] = []
    rows_of = RowReader._rows
    monkeypatch.setattr(
        RowReader, "_rows", lambda reader, columns: decoded.append(len(columns[0])) or rows_of(reader, columns)
    )
    batch = pa.record_batch([pa.array([r[0] for r in rows]), pa.array([r[1] for r in rows], pa.int64())], ["k", "at"])
    batch = pa.record_batch([batch["k"], batch["at"].cast(pa.timestamp("s"))], schema=SCHEMA)
    return RowDecoder(RowReader(SCHEMA, ("k",), "Op"), batch, stops), decoded


def test_neighbours_are_decoded_together_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "WINDOW_ROWS", 4)
    stops = [1, 3, 4, 5, 11, 12]
    whole, decoded = arrived(monkeypatch, [(n, n) for n in range(12)], stops)
    found = [whole.read(start, stop)[0] for start, stop in zip([0, *stops], stops, strict=False)]
    assert found == [[0], [1, 2], [3], [4], [5, 6, 7, 8, 9, 10], [11]]
    assert decoded == [4, 1, 6, 1]
    assert whole.read(1, 3)[0] == [1, 2], "again, where it is asked for again"


def test_a_null_key_is_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = arrived(monkeypatch, [(1, 0), (None, 0), (None, 0), (3, 0)], [1, 3, 4])
    assert whole.read(0, 1)[0] == [1]
    with pytest.raises(NullKey, match=r"in 2 row\(s\)"):
        whole.read(1, 3)
    with pytest.raises(NullKey):
        whole.columns(1, 3)
    assert whole.read(3, 4)[0] == [3]
    assert whole.columns(3, 4)["k"].to_pylist() == [3]


def test_a_value_that_python_has_not_is_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = arrived(monkeypatch, [(1, 0), (2, 0), (3, BEYOND), (4, 0)], [1, 3, 4])
    assert [row.at.year for row in whole.read(0, 1)[1]] == [1970]
    fine, beyond = whole.read(1, 3)[1]
    assert fine.at.year == 1970
    with pytest.raises(InvalidArgument) as caught:
        _ = beyond.at.year
    assert caught.value.where["row"] == 1, "among its partition's"
    assert [row.at.year for row in whole.read(3, 4)[1]] == [1970]


@pytest.mark.parametrize("parts", [[(0, 3)], [(2, 1)], [(1, 2), (0, 1)], [(0, 2), (1, 2)], [(-1, 1)]])
def test_parts_that_are_not_among_the_rows_are_refused(parts: list[tuple[int, int]]) -> None:
    rows = pa.record_batch({"k": [1, 2]})
    with pytest.raises(InvalidArgument, match="are out of order, or beyond the end of the batch"):
        BatchSlices("Op", Batch("s", 0), b"", rows, [Part(p, 1, *part) for p, part in enumerate(parts)])
