"""Arrow to rows and back; every bad input has its own error, which names operator and culprit."""

from __future__ import annotations

import copy
import datetime as dt
import pickle
import unicodedata
from collections import namedtuple
from decimal import Decimal
from keyword import iskeyword
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.errors import InvalidArgument, KeyColumnMissing, NullKey, OutputMismatch
from stateflow.operator.arrow import parse_ddl, read_batch
from stateflow.operator.output import OutputWriter
from stateflow.operator.rows import RowReader, alone

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("class", pa.string())])
BATCH = pa.RecordBatch.from_pylist(
    [{"k": "a", "n": 1, "class": "x"}, {"k": "b", "n": None, "class": None}], schema=SCHEMA
)


def _read(batch: pa.RecordBatch, *key: str) -> list[tuple[Any, Any]]:
    reader = RowReader.of(batch.schema.serialize().to_pybytes(), key, "Op")
    return list(zip(*alone(reader, batch).read(), strict=True))


# -- in -----------------------------------------------------------------------------------------------------


def _row(*names: str) -> Any:
    """Makes a row in which each column holds its own number, after a key."""
    columns = ["the key", *names]
    arrays = [pa.array([str(number)] if number == 0 else [number]) for number in range(len(columns))]
    ((_, row),) = _read(pa.RecordBatch.from_arrays(arrays, names=columns), "the key")
    return row


def test_rows_are_tuples_whose_columns_have_names() -> None:
    (first, row), (second, other) = _read(BATCH, "k")
    assert (first, second) == ("a", "b")
    assert row == ("a", 1, "x")
    assert (row.k, row.n, row["class"]) == ("a", 1, "x")
    assert (row[1], row[-1], row[:2], [*row]) == (1, "x", ("a", 1), ["a", 1, "x"])
    assert row._fields == ("k", "n", "class")
    assert (other.n, other["class"]) == (None, None)
    assert repr(row) == "Row(k='a', n=1, class='x')"
    assert row._replace(n=2) == ("a", 2, "x")
    assert row._replace(n=2)._asdict() == {"k": "a", "n": 2, "class": "x"}
    assert type(copy.deepcopy(row)) is type(row)
    assert copy.deepcopy(row) == row
    with pytest.raises(AttributeError):
        row._2  # noqa: B018 - no column is called so
    with pytest.raises(KeyError, match="has no column 'm', only k, n, class"):
        row["m"]


ANY_NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
IDENTIFIER = st.from_regex(r"\A[^\W\d]\w{0,4}\Z") | st.sampled_from(
    ["_1", "_2", "_seq", "_c0", "_id", "_fields", "_asdict", "_replace", "_make", "count", "index", "µs", "ﬁ", "__x"]
)


@given(st.lists(IDENTIFIER | ANY_NAME, unique_by=lambda name: unicodedata.normalize("NFKC", name), max_size=8))
def test_each_column_is_read_by_its_name(names: list[str]) -> None:
    names = [name for name in names if not (name.startswith("__") and name.endswith("__"))]
    row = _row(*names)
    for number, name in enumerate(names, 1):
        assert row[name] == row[number] == number
        if name.isidentifier():
            assert getattr(row, name) == number
        if name.isidentifier() and not iskeyword(unicodedata.normalize("NFKC", name)):
            assert eval(f"row.{name}") == number, "as Python reads it, in its NFKC form"


def test_names_that_are_pythons_own_are_read_as_text() -> None:
    row = _row("__class__", "__len__", "__places__", "__columns__", "__del__", "_Row__place")
    assert [row[name] for name in row._fields[1:]] == [1, 2, 3, 4, 5, 6]
    assert len(row) == 7
    assert row._Row__place == 6


@pytest.mark.parametrize(
    ("names", "shared", "told_apart"),
    [(("x", "x"), "x", {}), (("\u00b5s", "\u03bcs"), "\u03bcs", {"\u00b5s": 1, "\u03bcs": 2})],
)
def test_what_two_columns_are_called_is_refused_when_it_is_read(
    names: tuple[str, ...], shared: str, told_apart: dict[str, int]
) -> None:
    row = _row(*names, "y")
    assert (row.y, row[1], row[2]) == (3, 1, 2)
    with pytest.raises(InvalidArgument, match=r"2 columns are named '.s?': the columns 1, 2 .*: rename one"):
        getattr(row, shared)
    for name, number in told_apart.items():
        assert row[name] == number
    if not told_apart:
        with pytest.raises(InvalidArgument, match="2 columns are named 'x'"):
            row[shared]


def test_a_key_or_time_that_two_columns_are_called_is_refused() -> None:
    schema = pa.schema([("k", pa.string()), ("x", pa.int64()), ("x", pa.int64())])
    with pytest.raises(KeyColumnMissing, match="several columns 'x' in the input"):
        RowReader(schema, ("x",), "Op")
    with pytest.raises(KeyColumnMissing, match="several columns 'x' in the input, which the operator declares"):
        RowReader(schema, ("k",), "Op").getter("x")


@pytest.mark.parametrize("name", ["at", "_1", "a.b", "class", "\u00b5s", "__len__"])
def test_the_time_of_a_row_is_the_column_of_that_name(name: str) -> None:
    schema = pa.schema([("k", pa.string()), (name, pa.int64()), ("\u03bcs", pa.int64())])
    reader = RowReader(schema, ("k",), "Op")
    (row,) = alone(reader, pa.record_batch([pa.array(["a"]), pa.array([7]), pa.array([8])], schema)).read()[1]
    read = reader.getter(name)
    assert read is not None
    assert read(row) == 7


def test_a_key_of_several_columns_is_a_tuple_in_the_declared_order() -> None:
    batch = BATCH.slice(0, 1)
    assert [key for key, _ in _read(batch, "n", "k")] == [(1, "a")]
    assert [key for key, _ in _read(batch, "k")] == ["a"]


def test_no_rows() -> None:
    assert _read(BATCH.slice(0, 0), "k") == []


def test_types_come_as_python_types() -> None:
    row = {
        "k": "a",
        "when": dt.datetime(2013, 1, 1, tzinfo=dt.UTC),
        "day": dt.date(2013, 1, 1),
        "tags": ["x"],
        "d": Decimal("1.50"),
    }
    schema = parse_ddl("k string, when timestamp, day date, tags array<string>, d decimal(5,2)")
    ((_, read),) = _read(pa.RecordBatch.from_pylist([row], schema=schema), "k")
    assert read._asdict() == row


def test_a_missing_key_column_is_named_with_what_is_there() -> None:
    with pytest.raises(KeyColumnMissing, match="no column 'tailnum'") as caught:
        RowReader(SCHEMA, ("k", "tailnum"), "Op")
    assert "k, n, class" in caught.value.remedy
    assert caught.value.where == {"operator": "Op"}


def test_key_columns_are_found_by_their_exact_name() -> None:
    with pytest.raises(KeyColumnMissing):
        RowReader(SCHEMA, ("K",), "Op")


@pytest.mark.parametrize("key", [("n",), ("k", "n"), ("n", "k")])
def test_a_null_key_is_refused_before_any_row_is_seen(key: tuple[str, ...]) -> None:
    reader = RowReader(SCHEMA, key, "Op")
    with pytest.raises(NullKey, match=r"'n' is null in 1 row\(s\)") as caught:
        alone(reader, BATCH).read()
    assert caught.value.where == {"operator": "Op"}


def test_nulls_elsewhere_are_no_matter() -> None:
    assert len(_read(BATCH, "k")) == 2


# -- out ----------------------------------------------------------------------------------------------------

OUT = parse_ddl("k string, n long, x double NOT NULL")


def _write(*rows: Any, schema: pa.Schema = OUT) -> list[dict[str, Any]]:
    return read_batch(OutputWriter(schema, "Op").write(list(rows)), schema).to_pylist()


def test_nothing_is_nothing() -> None:
    assert OutputWriter(OUT, "Op").write([]) == b""
    assert read_batch(b"", OUT).schema == OUT


def test_tuples_dicts_and_named_tuples_mix() -> None:
    row = next(iter(_read(pa.RecordBatch.from_pylist([{"k": "c", "n": 3, "x": 3.0}], schema=OUT), "k")))[1]
    assert _write(("a", 1, 1.0), {"x": 2.0, "n": None, "k": "b"}, row) == [
        {"k": "a", "n": 1, "x": 1.0},
        {"k": "b", "n": None, "x": 2.0},
        {"k": "c", "n": 3, "x": 3.0},
    ]


def test_numbers_widen_but_never_lose() -> None:
    assert _write(("a", 1, 2)) == [{"k": "a", "n": 1, "x": 2.0}]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (("a", 1), "a row has 2 fields, 3 are declared: ('a', 1)"),
        (("a", 1, 1.0, None), "a row has 4 fields, 3 are declared"),
        ((), "a row has 0 fields, 3 are declared: ()"),
        (("a", "one", 1.0), "field 'n' is declared int64 but got 'one'"),
        (("a", 1.5, 1.0), "field 'n' is declared int64 but got 1.5"),
        (("a", 1 << 63, 1.0), "field 'n' is declared int64 but got 9223372036854775808"),
        ((7, 1, 1.0), "field 'k' is declared string but got 7"),
        (("a", 1, "x"), "field 'x' is declared double but got 'x'"),
        (("a", 1, None), "field 'x' is declared NOT NULL but got None"),
        (("a", object, 1.0), "field 'n' is declared int64 but got <class 'object'>"),
        ({"k": "a", "n": 1}, "the fields of a row differ from the declared ones: x"),
        ({"k": "a", "n": 1, "x": 1.0, "y": 2}, "the fields of a row differ from the declared ones: y"),
        ({"k": "a", "n": 1, 3: 1.0}, "the fields of a row differ from the declared ones: 3, x"),
        (["a", 1, 1.0], "a row must be a tuple or a dict, not list: ['a', 1, 1.0]"),
        ("abc", "a row must be a tuple or a dict, not str: 'abc'"),
        (None, "a row must be a tuple or a dict, not NoneType: None"),
        (7, "a row must be a tuple or a dict, not int: 7"),
    ],
)
@pytest.mark.parametrize("beside", [[], [("good", 1, 1.0)]], ids=["alone", "beside a good row"])
def test_rows_that_do_not_fit(row: Any, what: str, beside: list[Any]) -> None:
    with pytest.raises(OutputMismatch) as caught:
        _write(*beside, row)
    assert what in caught.value.what
    assert (caught.value.where["operator"], caught.value.where["row"]) == ("Op", len(beside))
    assert "output" in caught.value.remedy
    assert len(str(caught.value).splitlines()) == 1


def test_a_long_value_is_shown_short() -> None:
    with pytest.raises(OutputMismatch) as caught:
        _write(("a", "x" * 10_000, 1.0))
    assert len(str(caught.value)) < 400


class Odd:
    def __index__(self) -> int:
        raise ValueError  # an error without a text

    def __repr__(self) -> str:
        return "Odd\nindeed"


def test_an_error_without_words_is_still_reported() -> None:
    with pytest.raises(OutputMismatch) as caught:
        _write(("a", Odd(), 1.0))
    assert len(str(caught.value).splitlines()) == 1


def test_nested_types_are_checked_too() -> None:
    schema = parse_ddl("tags array<long>")
    assert _write(([1, 2],), schema=schema) == [{"tags": [1, 2]}]
    with pytest.raises(OutputMismatch, match="'tags'"):
        _write((["a"],), schema=schema)


values = st.tuples(
    st.text() | st.none(), st.integers(-(1 << 63), (1 << 63) - 1) | st.none(), st.floats(allow_nan=False)
)


def test_a_named_tuple_in_another_order_is_refused_and_not_taken_by_position() -> None:
    named = namedtuple("named", "n k x")
    with pytest.raises(OutputMismatch, match="in another order: n, k, x"):
        _write(("a", 1, 1.0), named("1", 1, 1.0))
    other = namedtuple("other", "a b c")
    assert _write(other("a", 1, 1.0)) == [{"k": "a", "n": 1, "x": 1.0}]
    writer = OutputWriter(parse_ddl("k string, tags array<long>"), "Op")
    with pytest.raises(OutputMismatch, match="in another order"):
        writer.write([writer.freeze(namedtuple("named", "tags k")([1], "a"))])


@given(st.lists(values, min_size=1, max_size=20))
def test_round_trip(rows: list[tuple[Any, ...]]) -> None:
    assert [tuple(row.values()) for row in _write(*rows)] == rows


# -- values beyond Python's range ---------------------------------------------------------------------------

FAR_US = 10**18  # in the year 33658
BEYOND = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "America/New_York"))])


def read_beyond(*times_us: int) -> list[Any]:
    times = pa.array(times_us, pa.int64()).cast(BEYOND.field(1).type)
    batch = pa.record_batch([pa.array(["a"] * len(times_us)), times], BEYOND)
    return list(alone(RowReader(BEYOND, ("k",), "Op"), batch).read()[1])


def test_a_time_that_nobody_looks_at_fails_nothing() -> None:
    first, last, far = read_beyond(-62_135_596_800_000_000, 0, FAR_US)
    assert first.at == dt.datetime(1, 1, 1, tzinfo=dt.UTC), "in New York that was a year before the first"
    assert last.at == dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    assert "timestamp" in repr(far)
    for look in (
        lambda: far.at.year,
        lambda: far.at == last.at,
        lambda: last.at < far.at,
        lambda: far.at - last.at,
        lambda: {far.at},
        lambda: bool(far.at),
        lambda: pickle.dumps(far.at),
    ):
        with pytest.raises(
            InvalidArgument, match=r"Python cannot represent .*\(column=at row=2\): filter out such rows"
        ):
            look()


def test_as_a_key_it_is_refused_at_once() -> None:
    schema = pa.schema([("k", pa.date64())])
    batch = pa.record_batch([pa.array([10**17 - 10**17 % 86_400_000], pa.int64()).cast(pa.date64())], schema)
    with pytest.raises(InvalidArgument, match=r"\(column=k row=0\)"):
        alone(RowReader(schema, ("k",), "Op"), batch).read()


def test_maps_are_dicts() -> None:
    inner = pa.map_(pa.string(), pa.int64())
    twice = pa.map_(pa.struct([("x", pa.int64())]), pa.int64())
    schema = pa.schema([("k", pa.string()), ("m", inner), ("l", pa.list_(inner)), ("s", twice)])
    pairs = [("a", 1), ("b", 2)]
    rows = [{"k": "k", "m": pairs, "l": [pairs], "s": [({"x": 1}, 2)]}]
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    _, (row,) = alone(RowReader(schema, ("k",), "Op"), batch).read()
    assert (row.m, row.l) == ({"a": 1, "b": 2}, [{"a": 1, "b": 2}])
    assert row.s == [({"x": 1}, 2)], "its keys are no dict's"
    writer = OutputWriter(pa.schema([("m", inner)]), "Op")
    assert pa.ipc.read_record_batch(pa.py_buffer(writer.write([(row.m,)])), writer.schema)["m"].to_pylist() == [pairs]
