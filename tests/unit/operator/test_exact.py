"""Columns take exactly what was given, and refuse all else with its place."""

from __future__ import annotations

import datetime as dt
from collections import OrderedDict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from stateflow.errors import OutputMismatch
from stateflow.operator.arrow import parse_ddl, read_batch
from stateflow.operator.exact import Misfit, column_of
from stateflow.operator.output import OutputWriter, cast_column

BERLIN = ZoneInfo("Europe/Berlin")
NOON = dt.datetime(2013, 1, 1, 12)
INSTANT = NOON.replace(tzinfo=dt.UTC)


class Size(IntEnum):
    L = 3


class Color(StrEnum):
    RED = "red"


Pair = namedtuple("Pair", "a b")

#: type, value as the operator gives it, value as it is read back
TAKEN: list[tuple[str, Any, Any]] = [
    ("long", Size.L, 3),
    ("long", np.int8(3), 3),
    ("long", 2.0, 2),
    ("long", Decimal("2.0"), 2),
    ("tinyint", np.uint64(127), 127),
    ("double", 2, 2.0),
    ("double", 2**60, 2.0**60),
    ("double", np.float32(0.1), float(np.float32(0.1))),
    ("float", 0.1, float(np.float32(0.1))),
    ("float", float("inf"), float("inf")),
    ("float", 16777216, 16777216.0),
    ("boolean", np.bool_(True), True),
    ("string", Color.RED, "red"),
    ("string", np.str_("a"), "a"),
    ("binary", bytearray(b"a"), b"a"),
    ("binary", memoryview(b"a"), b"a"),
    ("decimal(10,2)", 7, Decimal("7.00")),
    ("decimal(10,2)", Decimal("1E+3"), Decimal("1000.00")),
    ("date", np.datetime64("2013-01-01"), dt.date(2013, 1, 1)),
    ("timestamp", NOON.replace(tzinfo=BERLIN), dt.datetime(2013, 1, 1, 11, tzinfo=dt.UTC)),
    ("timestamp", NOON.replace(tzinfo=dt.timezone(dt.timedelta(microseconds=-1))), INSTANT.replace(microsecond=1)),
    ("timestamp_ntz", NOON, NOON),
    ("timestamp_ntz", np.datetime64("2013-01-01T12:00"), NOON),
    ("array<long>", (1, None), [1, None]),
    ("array<long>", {7}, [7]),
    ("array<long>", range(2), [0, 1]),
    ("array<long>", deque([1]), [1]),
    ("array<double>", np.array([1.5, 2.0]), [1.5, 2.0]),
    ("array<array<long>>", np.array([[1], [2]]), [[1], [2]]),
    ("array<struct<a:long,b:string>>", [None, {"b": "x", "a": 1}], [None, {"a": 1, "b": "x"}]),
    ("struct<a:long,b:string>", (1, "x"), {"a": 1, "b": "x"}),
    ("struct<a:long,b:string>", Pair(b="x", a=1), {"a": 1, "b": "x"}),
    ("struct<a:long,b:string>", OrderedDict(b=None, a=1), {"a": 1, "b": None}),
    ("map<string,long>", {"a": 1, "b": None}, [("a", 1), ("b", None)]),
    ("map<string,array<long>>", [("a", [1]), ("b", [])], [("a", [1]), ("b", [])]),
    ("map<struct<a:long>,long>", [({"a": 1}, 2)], [({"a": 1}, 2)]),
]

#: type, value, place inside it, text of the error
REFUSED: list[tuple[str, Any, str, str]] = [
    ("long", True, "", "int64 but got True"),
    ("long", np.True_, "", "int64 but got"),
    ("long", 1.5, "", "int64 but got 1.5"),
    ("long", np.float64(1.5), "", "int64 but got"),
    ("long", float("nan"), "", "int64 but got nan"),
    ("long", "1", "", "int64 but got '1'"),
    ("tinyint", 128, "", "int8 but got 128"),
    ("double", True, "", "double but got True"),
    ("double", 2**60 + 1, "", "double but got 1152921504606846977"),
    ("float", 1e300, "", "float but got 1e"),
    ("float", -1e300, "", "float but got -1e"),
    ("float", 1e-300, "", "float but got 1e-300"),
    ("float", 16777217, "", "float but got 16777217"),
    ("boolean", 1, "", "bool but got 1"),
    ("string", b"a", "", "string but got b'a'"),
    ("string", bytearray(b"a"), "", "string but got bytearray"),
    ("string", "\ud800", "", "surrogates"),
    ("binary", "a", "", "binary but got 'a'"),
    ("decimal(10,2)", Decimal("1.005"), "", "data loss"),
    ("decimal(10,2)", Decimal("NaN"), "", "got Decimal('NaN')"),
    ("decimal(10,2)", 1.5, "", "but got 1.5"),
    ("decimal(4,2)", 100, "", "decimal128(4, 2) but got"),
    ("date", NOON, "", "it has a time of day"),
    ("date", 5, "", "but got 5"),
    ("timestamp", NOON, "", "does not name an instant"),
    ("timestamp", dt.date(2013, 1, 1), "", "but got datetime.date"),
    ("timestamp", 5, "", "but got 5"),
    ("timestamp", dt.datetime(1, 1, 1, tzinfo=BERLIN), "", "out of range"),
    ("timestamp", dt.datetime(9999, 12, 31, 23, tzinfo=dt.timezone(dt.timedelta(hours=-5))), "", "out of range"),
    ("timestamp_ntz", INSTANT, "", "it has a time zone"),
    ("timestamp_ntz", np.datetime64("NaT"), "", "NaT"),
    ("timestamp_ntz", np.datetime64(1, "ns"), "", "but got"),
    ("array<long>", [1, 1.5], "[1]", "int64 but got 1.5"),
    ("array<long>", np.array([1.5]), "[0]", "int64 but got 1.5"),
    ("array<string>", "ab", "", "it is not a list"),
    ("array<long>", b"ab", "", "it is not a list"),
    ("array<timestamp>", [INSTANT, NOON], "[1]", "does not name an instant"),
    ("struct<a:long,b:string>", {"a": 1, "c": "x"}, "", "ones: b, c"),
    ("struct<a:long,b:string>", {"a": 1}, "", "ones: b"),
    ("struct<a:long,b:string>", {"a": 1, "b": "x", "c": 1}, "", "ones: c"),
    ("struct<a:long,b:string>", (1,), "", "it has 1 fields, 2 are declared"),
    ("struct<a:long,b:string>", {"a": 1.5, "b": "x"}, ".a", "int64 but got 1.5"),
    ("struct<a:long NOT NULL,b:string>", {"a": None, "b": "x"}, ".a", "NOT NULL but got None"),
    ("array<struct<a:long NOT NULL>>", [None, {"a": None}], "[1].a", "NOT NULL but got None"),
    ("array<struct<a:long,b:string>>", [{"a": 1, "b": "x"}, {"a": 1, "B": "x"}], "[1]", "ones: B, b"),
    ("map<string,long>", {"a": 1, "b": 1.5}, "['b']", "int64 but got 1.5"),
    ("map<long,long>", {1.5: 1}, ".key", "int64 but got 1.5"),
    ("map<string,long>", {None: 1}, ".key", "NOT NULL but got None"),
    ("map<string,long>", [("a", 1), ("a", 2)], "", "it has a duplicate key"),
    ("map<float,long>", {0.1: 1}, ".key", "it would be rounded"),
    ("map<string,struct<a:array<double>>>", {"x": {"a": [1.0, True]}}, "['x'].a[1]", "double but got True"),
]


def declared(text: str) -> pa.Field:
    return parse_ddl(f"c {text}").field(0)


@pytest.mark.parametrize(("text", "value", "read"), TAKEN)
@pytest.mark.parametrize("beside", [[], [None], [None, None]])
def test_taken_as_it_is(text: str, value: Any, read: Any, beside: list[Any]) -> None:
    array = column_of(declared(text)).array([*beside, value, *beside])
    array.validate(full=True)
    assert array.type == declared(text).type
    assert array.to_pylist() == [*beside, read, *beside]


@pytest.mark.parametrize("text", ["long", "string", "array<long>"])
def test_a_number_of_thousands_of_digits_is_refused(text: str) -> None:
    """Python refuses to write such a number, also for an error."""
    with pytest.raises(Misfit, match="cannot be shown"):
        column_of(declared(text)).array([[10**5000] if text.startswith("array") else 10**5000])


@pytest.mark.parametrize(("text", "value", "path", "what"), REFUSED)
def test_refused_with_its_place(text: str, value: Any, path: str, what: str) -> None:
    good = [read for kind, read, _ in TAKEN if kind == text][:1]
    for before in ([], [None], [*good, None, *good]):
        with pytest.raises(Misfit) as caught:
            column_of(declared(text)).array([*before, value, None])
        assert (caught.value.path, caught.value.row) == (path, len(before))
        assert what in caught.value.what


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (pa.large_list(pa.int64()), [1], [1]),
        (pa.list_(pa.int64(), 2), [1, 2], [1, 2]),
        (pa.large_string(), "a", "a"),
        (pa.binary(2), b"ab", b"ab"),
        (pa.uint64(), 2**64 - 1, 2**64 - 1),
        (pa.timestamp("s"), NOON, NOON),
        (pa.duration("ms"), dt.timedelta(1), dt.timedelta(1)),
        (pa.time64("us"), dt.time(1), dt.time(1)),
        (pa.struct([]), {}, {}),
    ],
)
def test_types_that_only_arrow_has(kind: pa.DataType, value: Any, read: Any) -> None:
    assert column_of(pa.field("c", kind)).array([value, None]).to_pylist() == [read, None]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.list_(pa.int64(), 2), [1]),
        (pa.binary(2), b"a"),
        (pa.uint8(), -1),
        (pa.timestamp("s"), NOON.replace(microsecond=1)),
        (pa.timestamp("ns"), NOON.replace(year=2300)),
        (pa.duration("ms"), dt.timedelta(microseconds=1)),
        (pa.time64("us"), dt.time(1, tzinfo=dt.UTC)),
        (pa.struct([]), {"a": 1}),
        (pa.null(), 1),
    ],
)
def test_types_that_only_arrow_has_refuse_too(kind: pa.DataType, value: Any) -> None:
    with pytest.raises(Misfit) as caught:
        column_of(pa.field("c", kind)).array([None, value])
    assert caught.value.row == 1


def test_a_row_is_refused_with_operator_column_row_and_remedy() -> None:
    writer = OutputWriter(parse_ddl("k string, s struct<tags:array<long>,at:timestamp>"), "Op")
    good = ("a", {"tags": [1], "at": INSTANT})
    with pytest.raises(OutputMismatch) as caught:
        writer.write([good, ("b", {"tags": [1, 1.5], "at": INSTANT})])
    assert caught.value.where == {"operator": "Op", "column": "s.tags[1]", "row": 1}
    with pytest.raises(OutputMismatch) as caught:
        writer.write([good, good, ("b", {"tags": None, "at": NOON})])
    assert caught.value.where == {"operator": "Op", "column": "s.at", "row": 2}
    assert "value.replace(tzinfo=timezone.utc)" in caught.value.remedy


def test_a_row_of_a_side_output_is_refused_with_its_tag() -> None:
    with pytest.raises(OutputMismatch) as caught:
        OutputWriter(parse_ddl("tags array<long>"), "Op", "late").write([([1.5],)])
    assert caught.value.where == {"operator": "Op", "side_output": "late", "column": "tags[0]", "row": 0}
    assert "`side_outputs` declares for 'late'" in caught.value.remedy


# -- of Arrow -----------------------------------------------------------------------------------------------


def chunks(*arrays: pa.Array) -> pa.ChunkedArray:
    return pa.chunked_array(arrays)


@pytest.mark.parametrize(
    ("text", "given", "read"),
    [
        ("long", chunks(pa.array([1.0]), pa.array([None, 2.0])), [1, None, 2]),
        ("long", chunks(pa.array([Decimal("2.00")])), [2]),
        ("decimal(10,2)", chunks(pa.array([7])), [Decimal("7.00")]),
        ("float", chunks(pa.array([0.5, None, float("inf")])), [0.5, None, float("inf")]),
        ("string", chunks(pa.array(["a", None]).dictionary_encode()), ["a", None]),
        ("string", chunks(pa.array(["a"], pa.large_string())), ["a"]),
        ("array<long>", chunks(pa.nulls(2)), [None, None]),
        ("array<long>", chunks(pa.array([[9.5], None, [1.0, None], []]).slice(1)), [None, [1, None], []]),
        ("array<long>", chunks(pa.array([[1, 2]], pa.list_(pa.int32(), 2))), [[1, 2]]),
        (
            "timestamp",
            chunks(pa.array([0], pa.timestamp("ns", "Europe/Berlin"))),
            [dt.datetime(1970, 1, 1, 0, 0, 0, 0, dt.UTC)],
        ),
        ("struct<a:long NOT NULL,b:long>", chunks(pa.array([{"b": 1.0, "a": 2}, None])), [{"a": 2, "b": 1}, None]),
        (
            "map<string,long>",
            chunks(pa.array([[("a", 1.0)], None], pa.map_(pa.string(), pa.float64()))),
            [[("a", 1)], None],
        ),
    ],
)
def test_columns_are_taken_as_they_are(text: str, given: pa.ChunkedArray, read: list[Any]) -> None:
    array = cast_column(given, declared(text))
    array.validate(full=True)
    assert (array.type, array.to_pylist()) == (declared(text).type, read)


@pytest.mark.parametrize(
    ("text", "given", "path", "row"),
    [
        ("long", chunks(pa.array([1.0]), pa.array([2.0, 2.5])), "", 2),
        ("long", chunks(pa.array([True])), "", None),
        ("long", chunks(pa.array(["1"])), "", None),
        ("string", chunks(pa.array([1])), "", None),
        ("string", chunks(pa.array([b"a"])), "", None),
        ("double", chunks(pa.array([Decimal("1.5")])), "", None),
        ("float", chunks(pa.array([1.0, None, 1e300])), "", 2),
        ("float", chunks(pa.array([1.0, 1e-300])), "", 1),
        ("tinyint", chunks(pa.array([1, 128])), "", 1),
        ("date", chunks(pa.array([NOON])), "", None),
        ("timestamp", chunks(pa.array([NOON])), "", None),
        ("timestamp_ntz", chunks(pa.array([INSTANT])), "", None),
        ("timestamp_ntz", chunks(pa.array([1000, 1], pa.timestamp("ns"))), "", 1),
        ("array<long>", chunks(pa.array([[1.0], [2.0, 1.5]])), "[1]", 1),
        ("array<timestamp>", chunks(pa.array([[NOON]])), "[]", None),
        ("struct<a:long,b:long>", chunks(pa.array([{"a": 1}])), "", None),
        ("struct<a:long,b:long>", chunks(pa.array([{"a": 1, "b": 1, "c": 1}])), "", None),
        ("struct<a:struct<b:long>>", chunks(pa.array([{"a": {"b": "x"}}])), ".a.b", None),
        ("struct<a:long NOT NULL>", chunks(pa.array([None, {"a": 1}, {"a": None}])), ".a", 2),
        ("array<struct<a:long NOT NULL>>", chunks(pa.array([None, [{"a": 1}, {"a": None}]])), "[1].a", 1),
        ("map<string,long>", chunks(pa.array([None, [("a", 1.5)]], pa.map_(pa.string(), pa.float64()))), "['a']", 1),
    ],
)
def test_columns_are_refused_with_their_place(text: str, given: pa.ChunkedArray, path: str, row: int | None) -> None:
    with pytest.raises(Misfit) as caught:
        cast_column(given, declared(text))
    assert (caught.value.path, caught.value.row) == (path, row)


def test_columns_that_a_batch_operator_returns() -> None:
    writer = OutputWriter(parse_ddl("k string, tags array<long>"), "Op")
    batch = writer.columns(pa.table({"tags": [[1.0]], "k": ["a"]}), "process_batch")
    assert read_batch(writer.write([], [batch]), writer.schema).to_pylist() == [{"k": "a", "tags": [1]}]
    with pytest.raises(OutputMismatch) as caught:
        writer.columns(pa.table({"k": ["a", "b"], "tags": [[1.0], [1.5]]}), "process_batch")
    assert caught.value.where == {"operator": "Op", "column": "tags[0]", "row": 1}
