"""Digests of values: the same for the same rows, in messages of any form, and different for other rows."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from stateflow.partition.positions import comparable
from stateflow.partition.slices import digests_of

KINDS: dict[str, tuple[pa.DataType, Any]] = {
    "long": (pa.int64(), lambda r: r.randrange(100)),
    "short": (pa.int16(), lambda r: r.randrange(100)),
    "double": (pa.float64(), lambda r: r.choice((0.0, -0.0, 1.5, float("nan")))),
    "bool": (pa.bool_(), lambda r: r.random() < 0.5),
    "string": (pa.string(), lambda r: "ab"[: r.randrange(3)]),
    "large": (pa.large_binary(), lambda r: b"ab"[: r.randrange(3)]),
    "fixed": (pa.binary(3), lambda r: bytes([r.randrange(3)] * 3)),
    "decimal": (pa.decimal128(10, 2), lambda r: Decimal(r.randrange(100))),
    "time": (pa.timestamp("us", tz="UTC"), lambda r: datetime(2020, 1, r.randrange(1, 28))),
    "interval": (pa.month_day_nano_interval(), lambda r: pa.MonthDayNano([r.randrange(3), 0, 1])),
    "null": (pa.null(), lambda r: None),
    "list": (pa.list_(pa.int64()), lambda r: [r.randrange(3) for _ in range(r.randrange(3))]),
    "texts": (pa.list_(pa.string()), lambda r: ["a" * r.randrange(3) for _ in range(r.randrange(3))]),
    "struct": (pa.struct([("a", pa.int64()), ("b", pa.string())]), lambda r: {"a": r.randrange(3), "b": None}),
    "map": (pa.map_(pa.string(), pa.int64()), lambda r: [("k", r.randrange(3))]),
}


def batch(values: list[Any], kind: pa.DataType) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, kind)], names=["c"])


def arrived(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(rows.serialize(), rows.schema)


@pytest.mark.parametrize("name", KINDS)
def test_the_same_rows_have_the_same_digest_however_they_came(name: str) -> None:
    kind, value = KINDS[name]
    random = Random(name)
    for _ in range(60):
        count = random.randrange(1, 30)
        values = [None if random.random() < 0.2 else value(random) for _ in range(count)]
        bounds = [0, *sorted(random.randrange(count + 1) for _ in range(4)), count]
        whole = batch(values, kind)
        together = digests_of(b"s", arrived(whole), bounds)
        for digest, (start, stop) in zip(together, pairwise(bounds), strict=True):
            alone = batch(values[start:stop], kind)
            assert digests_of(b"s", arrived(alone), [0, stop - start]) == [digest]
            taken = whole.take(pa.array(range(start, stop), pa.int64()))
            assert digests_of(b"s", taken, [0, stop - start]) == [digest]
            later = arrived(whole.slice(bounds[1]))
            if start >= bounds[1]:
                assert digests_of(b"s", later, [start - bounds[1], stop - bounds[1]]) == [digest]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ([0], [None]),
        ([None, 0], [0, None]),
        ([], [None]),
        (["ab", "c"], ["a", "bc"]),
        ([""], [None]),
        ([True], [False]),
        ([[1], [2]], [[1, 2], []]),
        ([None], [[]]),
    ],
    ids=str,
)
def test_other_rows_have_another(one: list[Any], other: list[Any]) -> None:
    kind = pa.infer_type([*one, *other])
    several = [digests_of(b"s", batch(each, kind), [0, len(each)]) for each in (one, other)]
    assert several[0] != several[1]


def test_rows_of_other_columns_have_another() -> None:
    assert digests_of(b"s", None, [0, 0]) != digests_of(b"t", None, [0, 0])


def test_digests_of_messages_are_told_apart() -> None:
    (digest,) = digests_of(b"s", batch([1], pa.int64()), [0, 1])
    assert -(1 << 63) <= digest < 0
    assert comparable(digest, -1)
    assert not comparable(digest, 7)
    assert comparable(3, 7)
