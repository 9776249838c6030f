"""Rows from clients and the harness: each is taken as if it were alone, or refused with its place."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from stateflow import Context, Operator
from stateflow.client.stream import by_partition, numbered, rows_given
from stateflow.errors import (
    DeclarationError,
    InvalidArgument,
    KeyColumnMissing,
    NullKey,
    StateflowError,
    UnsupportedKeyType,
)
from stateflow.operator.arrow import parse_ddl, schema_of
from stateflow.operator.rows import RowReader
from stateflow.partitioner import partition_of
from stateflow.testing import OperatorHarness
from stateflow.types import OperatorSpec

SPEC = OperatorSpec("Seen", "", 8, ("k",), b"", "[]")
BERLIN, ROME = ZoneInfo("Europe/Berlin"), ZoneInfo("Europe/Rome")
NOON = dt.datetime(2013, 1, 1, 12)
INSTANT = NOON.replace(tzinfo=dt.UTC)


def rows_of(*values: Any) -> list[dict[str, Any]]:
    return [{"k": "a", "v": value} for value in values]


def taken(rows: list[dict[str, Any]], schema: str | None = None) -> list[dict[str, Any]]:
    """Returns rows as ``process`` is given them."""
    batch, _ = numbered(SPEC, schema and parse_ddl(schema), rows)
    return [row._asdict() for row in RowReader(batch.schema, ("k",), "Seen").read(batch)[1]]


def refused(rows: list[dict[str, Any]], schema: str | None = None) -> StateflowError:
    with pytest.raises(StateflowError) as caught:
        by_partition(SPEC, schema and parse_ddl(schema), rows)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.remedy
    return caught.value


# -- without a schema ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [1, None, 2],
        [1.5, float("inf")],
        ["a", ""],
        [b"a", bytearray(b"\xff")],
        [True, False],
        [dt.date(2013, 1, 1)],
        [NOON, NOON.replace(microsecond=1)],
        [INSTANT],
        [NOON.replace(tzinfo=BERLIN), dt.datetime(2013, 7, 1, tzinfo=BERLIN), dt.datetime(1880, 1, 1, tzinfo=BERLIN)],
        [NOON.replace(tzinfo=dt.timezone(dt.timedelta(hours=-5)))],
        [dt.timedelta(1), dt.timedelta(microseconds=1)],
        [dt.time(1)],
        [Decimal("1.50"), Decimal("-7.25")],
        [[], [1], None, [None]],
        [[[1.5], None], []],
        [{"x": 1, "y": {"z": "a"}}, None, {"y": None, "x": None}],
        [[{"x": 1}], [{"x": 2}, None]],
        [{"x": 1, "y": "a"}, {"y": "b", "x": 2}],
        [{"x": 1}, None, {"y": 2, "z": None}, {}],
        [{"x": {"a": 1}}, {"y": {"b": 1}}],
        [{1: "a"}, {2: "b", 3: None}],
        [{}],
        [None, None],
    ],
)
def test_values_are_as_they_are_whatever_is_beside_them(values: list[Any]) -> None:
    together = [row["v"] for row in taken(rows_of(*values))]
    alone = [taken(rows_of(value))[0]["v"] for value in values]
    assert together == alone == values
    for value, found in zip(values, together, strict=True):
        if isinstance(value, dt.datetime):
            assert (found.hour, found.utcoffset()) == (value.hour, value.utcoffset())
        else:
            assert isinstance(value, bytearray) or type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int8(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([1, 2]), [1, 2]),
        (np.array([[1.5]]), [[1.5]]),
        (np.datetime64("2013-01-01T12:00"), NOON),
        (np.datetime64("2013-01-01"), dt.date(2013, 1, 1)),
        ((1, 2), [1, 2]),
        ({7}, [7]),
        (pa.scalar(7), 7),
    ],
)
def test_values_of_numpy_and_the_like_are_those_of_python(value: Any, plain: Any) -> None:
    (row,) = taken(rows_of(value))
    assert row["v"] == plain
    assert type(row["v"]) is type(plain)


@pytest.mark.skipif(not hasattr(pa, "uuid"), reason="an older Arrow has no UUIDs")
def test_uuids() -> None:
    assert taken(rows_of(UUID(int=5)))[0]["v"] == UUID(int=5)


def test_ints_become_the_equal_floats_and_decimals_beside_them() -> None:
    assert [row["v"] for row in taken(rows_of(1, 1.5))] == [1, 1.5]
    assert [row["v"] for row in taken(rows_of(Decimal("1.5"), 1))] == [Decimal("1.5"), 1]
    assert "no float equals 9007199254740993" in refused(rows_of(1.5, 2**53 + 1)).what


@pytest.mark.parametrize(
    ("values", "path", "row", "what"),
    [
        ([dt.date(2013, 1, 1), NOON], "", 1, "an earlier value is datetime.date(2013, 1, 1)"),
        ([NOON, dt.date(2013, 1, 1)], "", 1, "got datetime.date(2013, 1, 1), but an earlier value is"),
        ([NOON, INSTANT], "", 1, "an earlier value is datetime.datetime(2013, 1, 1, 12, 0)"),
        ([INSTANT, NOON.replace(tzinfo=BERLIN)], "", 1, "an earlier value is datetime.datetime(2013"),
        ([NOON.replace(tzinfo=ROME), NOON.replace(tzinfo=BERLIN)], "", 1, "an earlier value is datetime.datetime(2013"),
        ([NOON.replace(tzinfo=dt.timezone(dt.timedelta(seconds=1)))], "", 0, "whose time zone is not supported"),
        (["a", b"\xff"], "", 1, "got b'\\xff', but an earlier value is 'a'"),
        ([None, True, 1], "", 2, "got 1, but an earlier value is True"),
        ([1, "a"], "", 1, "got 'a', but an earlier value is 1"),
        ([1.5, Decimal("1.5")], "", 1, "an earlier value is 1.5"),
        ([Decimal(1), Decimal("NaN")], "", 1, "which a decimal column cannot hold"),
        ([Decimal("1E+38"), Decimal("1E-38")], "", None, "Decimals without a common type"),
        ([{"x": 1}, None, {"y": "a"}], "['y']", 2, "got 'a', but an earlier value is 1"),
        ([{"x": 1}, {1: 1}], ".key", 1, "got 1, but an earlier value is 'x'"),
        ([{1: 1}, {1.5: 1}], ".key", 1, "got 1.5, but an earlier value is 1"),
        ([{None: 1}], ".key", 0, "which cannot be a map key"),
        ([{None: 1, "a": 1}], ".key", 0, "NOT NULL"),
        ([{"x": [1]}, {"x": [1, "a"]}], ".x[1]", 1, "got 'a', but an earlier value is 1"),
        ([[1], 1], "", 1, "got 1, but an earlier value is [1]"),
        ([[1, "a"]], "[1]", 0, "got 'a', but an earlier value is 1"),
        ([1, 2**63], "", 1, "would be int64 but got 9223372036854775808"),
        ([np.datetime64(1, "ns")], "", 0, "would be timestamp[us]"),
        ([object()], "", 0, "which has no supported type"),
        (["\ud800"], "", 0, "surrogates"),
        ([dt.datetime(1, 1, 1, tzinfo=BERLIN)], "", 0, "out of range"),
    ],
)
def test_values_that_do_not_go_together(values: list[Any], path: str, row: int | None, what: str) -> None:
    error = refused(rows_of(*values))
    assert isinstance(error, InvalidArgument)
    assert what in error.what
    place = {"operator": "Seen", "column": f"v{path}", "row": row}
    assert error.where == {name: value for name, value in place.items() if value is not None}


@pytest.mark.parametrize("keys", [[1, 1.0], [1, True], ["a", b"a"], [np.int64(1), 1.5]])
def test_another_kind_of_key_is_another_key(keys: list[Any]) -> None:
    assert refused([{"k": key} for key in keys]).where == {"operator": "Seen", "column": "k", "row": 1}


# -- with a schema ------------------------------------------------------------------------------------------

SCHEMA = "k long, v struct<at:timestamp,tags:array<long>>, n int NOT NULL"


def test_rows_of_a_schema() -> None:
    rows = [{"k": np.int64(1), "n": 2.0}, {"n": 1, "k": 2, "v": {"at": INSTANT, "tags": (1,)}}]
    assert taken(rows, SCHEMA) == [
        {"k": 1, "v": None, "n": 2},
        {"k": 2, "v": {"at": INSTANT, "tags": [1]}, "n": 1},
    ]


@pytest.mark.parametrize(
    ("row", "column", "what"),
    [
        ({"k": 1.5, "n": 1}, "k", "int64 but got 1.5"),
        ({"k": 1, "n": 1.5}, "n", "int32 but got 1.5"),
        ({"k": 1, "n": 2**31}, "n", "int32 but got 2147483648"),
        ({"k": 1}, "n", "is declared NOT NULL but got None"),
        ({"k": 1, "n": 1, "N": 1}, "N", "a row has column 'N', which is not in the schema"),
        ({"k": 1, "n": 1, "v": {"at": NOON, "tags": []}}, "v.at", "does not name an instant"),
        ({"k": 1, "n": 1, "v": {"at": None, "tags": [1, 1.5]}}, "v.tags[1]", "int64 but got 1.5"),
        ({"k": 1, "n": 1, "v": {"at": None}}, "v", "declared ones: tags"),
        ({"k": 1, "n": 1, "v": {"at": None, "tags": [], "x": 1}}, "v", "declared ones: x"),
    ],
)
def test_rows_that_are_not_of_the_schema(row: dict[str, Any], column: str, what: str) -> None:
    good = {"k": 7, "n": 7}
    error = refused([good, row, good], SCHEMA)
    assert isinstance(error, InvalidArgument)
    assert what in error.what
    assert error.where == {"operator": "Seen", "column": column, "row": 1}


def test_keys_that_are_none() -> None:
    assert isinstance(refused([{"k": "a"}, {"v": 1}]), KeyColumnMissing)
    assert isinstance(refused([{"k": "a"}], "v long"), KeyColumnMissing)
    assert isinstance(refused([{"k": None}]), NullKey)
    assert isinstance(refused([{"k": [1]}]), UnsupportedKeyType)


def test_an_int_in_a_double_column_is_that_double_and_in_its_partition() -> None:
    _, numbers = numbered(SPEC, parse_ddl("k double"), [{"k": 7}, {"k": 7.0}])
    assert numbers == [partition_of(7.0, SPEC.partitions)] * 2
    assert partition_of(7, SPEC.partitions) not in numbers


def test_schemas_whose_columns_could_not_be_told_apart() -> None:
    with pytest.raises(DeclarationError, match="named twice"):
        schema_of(pa.schema([("k", pa.int64()), ("k", pa.int64())]))


# -- client and harness -------------------------------------------------------------------------------------


class Seen(Operator):
    key = "k"
    output = "seen string"

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[str]]:
        yield (repr(tuple(row)),)


@pytest.mark.parametrize(
    "rows",
    [
        [{"k": "a"}, {"k": "a", "v": 2}, {"w": 3, "k": "a"}],
        [{"k": 1}, {"k": 1.0}],
        [{"k": np.int64(1), "v": np.float32(0.5)}, {"k": 2, "v": np.bool_(True)}],
        [{"k": np.int64(1), "v": np.array([1, 2])}],
        [{"k": "a", "v": {"x": 1}}, {"k": "a", "v": {"y": 1}}],
        [{"k": "a", "v": {"x": 1}}, {"k": "a", "v": {"y": "b"}}],
        [{"k": None}],
        [{"v": 1}],
        [{"k": "a", 7: 1}],
        ["a"],
        {"k": "a"},
    ],
)
def test_the_harness_takes_and_refuses_what_a_client_does(rows: Any) -> None:
    def sent() -> list[str]:
        return [repr(tuple(row.values())) for row in taken(rows_given(rows))]

    def told(send: Any) -> Any:
        try:
            return sorted(send())
        except StateflowError as error:
            return str(error)

    expected = told(sent)
    with OperatorHarness(Seen) as harness:
        assert told(lambda: [row["seen"] for row in harness.send(rows)]) == expected
    if isinstance(expected, str):
        assert told(lambda: OperatorHarness(Seen, initial_state=rows)) == expected


@pytest.mark.parametrize("zone", ["GMT+2", "PST", "+14:00", "-12:00", "Nowhere/Land"])
def test_the_partition_of_a_time_does_not_depend_on_the_zone_of_its_column(zone: str) -> None:
    """A zone that only Spark knows, or one in which Python lacks the time's year, gave an error of pyarrow."""
    times = [INSTANT, dt.datetime.max.replace(tzinfo=dt.UTC), dt.datetime.min.replace(tzinfo=dt.UTC)]
    for time in times:
        for unit in ("us", "ms", "s"):
            (exact,) = pa.array([time], pa.timestamp("us", "UTC")).cast(pa.timestamp(unit, "UTC"), safe=False)
            rows = [{"k": exact.as_py()}]
            _, numbers = numbered(SPEC, pa.schema([("k", pa.timestamp(unit, zone))]), rows)
            assert numbers == [partition_of(exact.as_py(), SPEC.partitions)]
