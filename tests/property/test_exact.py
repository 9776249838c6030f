"""Values of every type that Spark and Arrow share, nested three deep, are taken exactly or refused with their place.

There are six doors: a client's rows and its outputs, Spark's rows and its outputs, the harness, and state. Rows of
Spark and of a client with a schema reach an operator on the same path, and all outputs leave on one. Exactness is
defined here a second time, by what was given and what is read back, independent of the tested code. Plain pyarrow and a
state that keeps JSON break the rule, and the tests find that.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as t
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stateflow import Operator, state
from stateflow.client.stream import numbered
from stateflow.errors import EncodeError, InvalidArgument, OutputMismatch
from stateflow.operator.arrow import parse_ddl, read_batch
from stateflow.operator.output import OutputWriter
from stateflow.operator.rows import RowReader
from stateflow.testing import OperatorHarness
from stateflow.types import OperatorSpec
from tests.sizes import sized

SPEC = OperatorSpec("Op", "", 8, ("k",), b"", "[]")
DEPTH = 3

# -- what is drawn ------------------------------------------------------------------------------------------

zones = st.sampled_from([dt.UTC, dt.timezone(dt.timedelta(hours=-5)), dt.timezone(dt.timedelta(seconds=1))])
naive = st.datetimes()
aware = st.datetimes(dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30), timezones=zones)


def whole(bits: int) -> st.SearchStrategy[Any]:
    numbers = st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    return numbers | numbers.map(getattr(np, f"int{bits}"))


#: values that fit each type
FITTING: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans() | st.booleans().map(np.bool_),
    "tinyint": whole(8),
    "smallint": whole(16),
    "int": whole(32),
    "bigint": whole(64),
    "float": st.floats(width=32) | st.integers(-(1 << 24), 1 << 24),
    "double": st.floats() | st.integers(-(1 << 53), 1 << 53) | st.floats(width=32).map(np.float32),
    "string": st.text(),
    "binary": st.binary() | st.binary().map(bytearray),
    "date": st.dates(),
    "timestamp": aware,
    "timestamp_ntz": naive,
    "decimal(9,2)": st.decimals(-9_999_999, 9_999_999, places=2, allow_nan=False) | st.integers(-9_999_999, 9_999_999),
}
ODD = st.sampled_from(
    [
        *(None, True, 1, 1.0, 1.5, -0.0, 2**24 + 1, 2**53 + 1, 2**63, 2**70, 1e300, 1e-300, math.nan, math.inf, ""),
        *("a", "\ud800", b"", b"\xff", bytearray(b"a"), np.float64(0.1), np.int64(7), np.bool_(False), np.str_("a")),
        *(dt.date(2013, 1, 1), dt.datetime(2013, 1, 1, 5), dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC)),
        *(dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=1))), np.datetime64(1, "ns"), dt.time(1)),
        *(
            Decimal("1.005"),
            Decimal("NaN"),
            Decimal(7),
            Decimal(10**9),
            dt.timedelta(1),
            object(),
            (),
            [],
            {},
            {"x": 1},
        ),
        *([1], [1.5], ["a"], [None], (1, 1.5), {1, 2}, {"x": 1.5}, {"y": None}, {1: 2}, {None: 1}, np.array([1.5])),
    ]
)
NAIVE, AWARE = dt.datetime(2013, 1, 1, 5), dt.datetime(2013, 1, 1, 5, tzinfo=dt.UTC)
#: values that nearly fit a type
NEAR: dict[str, list[Any]] = {
    **{kind: [1.5, np.float64(2.5), True, Decimal("1.5"), 2**63] for kind in ("tinyint", "smallint", "int", "bigint")},
    "boolean": [1, 0.0, "true"],
    "float": [1e300, -1e39, 1e-300, 2**24 + 1, True],
    "double": [True, 2**53 + 1, "1.5", Decimal("1.5")],
    "string": [b"a", bytearray(b"a"), 1],
    "binary": ["a"],
    "date": [NAIVE, AWARE, 5],
    "timestamp": [NAIVE, dt.date(2013, 1, 1), 5],
    "timestamp_ntz": [AWARE, dt.date(2013, 1, 1), 5],
    "decimal(9,2)": [Decimal("1.005"), 1.5, 10**8, True],
    "array": ["ab", b"ab", {1: 2}],
    "map": [[("a", 1)], {None: None}, {1.5: 1}],
    "struct": [{}, {"x": 1, "X": 1}, ()],
}

names = st.text(min_size=1, max_size=3) | st.sampled_from(["x", "y", "a b", "a.b", "`", "_1", "µs", "class"])
chances = st.integers(0, 7)
counts = st.integers(0, 3)
atoms = st.sampled_from(sorted(FITTING))
#: keys of maps that Python tells apart as Spark does
keys = {"string": st.text(), "bigint": st.integers(-(1 << 63), (1 << 63) - 1), "date": st.dates()}


@dataclass(frozen=True)
class Type:
    """A type. ``kind``: an atom, array, map or struct. ``inner``: (name, type, NOT NULL); a map's key comes first."""

    kind: str
    inner: tuple[tuple[str, Type, bool], ...] = ()

    @property
    def ddl(self) -> str:
        inside = [each.ddl for _, each, _ in self.inner]
        if self.kind == "struct":
            inside = [
                f"{quoted(name)}:{text}{' NOT NULL' if strict else ''}"
                for (name, _, strict), text in zip(self.inner, inside, strict=True)
            ]
        return f"{self.kind}<{','.join(inside)}>" if self.inner else self.kind


def quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def draw_type(draw: st.DrawFn, depth: int) -> Type:
    chance = draw(chances) if depth else 0
    if chance < 3:
        return Type(draw(atoms))
    if chance < 5:
        return Type("array", (("", draw_type(draw, depth - 1), False),))
    if chance < 6:
        key = Type(draw(st.sampled_from(sorted(keys))))
        return Type("map", (("", key, True), ("", draw_type(draw, depth - 1), False)))
    named = dict.fromkeys([draw(names), draw(names)])
    return Type("struct", tuple((name, draw_type(draw, depth - 1), draw(st.booleans())) for name in named))


def draw_value(draw: st.DrawFn, of: Type, nullable: bool, odd: bool) -> Any:
    """Draws a value of a type.

    Args:
        odd: at any place the value may be one that the type does not take.
    """
    chance = draw(chances)
    if chance == 0 and nullable:
        return None
    if chance in (1, 2) and odd:
        return draw(st.sampled_from(NEAR[of.kind]) if chance == 2 else ODD)
    if of.kind == "array":
        ((_, item, _),) = of.inner
        items = [draw_value(draw, item, True, odd) for _ in range(draw(counts))]
        return items if chance % 2 else tuple(items)
    if of.kind == "map":
        (_, key, _), (_, item, _) = of.inner
        return {draw(keys[key.kind]): draw_value(draw, item, True, odd) for _ in range(draw(counts))}
    if of.kind == "struct":
        row = {name: draw_value(draw, each, not strict, odd) for name, each, strict in of.inner}
        if chance == 3 and odd:
            return {f"{name}'" if draw(st.booleans()) else name: value for name, value in row.items()}
        return row if chance % 2 else tuple(row.values())
    return draw(FITTING[of.kind])


@dataclass(frozen=True)
class Case:
    """``rows`` for the schema ``ddl``. ``fits``: every value fits its type."""

    ddl: str
    rows: list[dict[str, Any]]
    fits: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name, of, odd = draw(names.filter("k".__ne__)), draw_type(draw, DEPTH), draw(st.booleans())
    rows = [{"k": "a", name: draw_value(draw, of, True, odd)} for _ in range(1 + draw(counts))]
    return Case(f"k string NOT NULL, {quoted(name)} {of.ddl}", rows, not odd)


# -- what is exact ------------------------------------------------------------------------------------------


def is_exact(field: pa.Field, value: Any, read: Any) -> bool:
    """Tells whether ``read`` is exactly the ``value`` that was given."""
    kind = field.type
    if value is None or read is None:
        return value is None and read is None and field.nullable
    if t.is_list(kind):
        fits = isinstance(value, list | tuple | set | np.ndarray) and len(value) == len(read)
        return fits and all(is_exact(kind.value_field, *pair) for pair in zip(value, read, strict=True))
    if t.is_map(kind):
        value = dict(value) if isinstance(value, list) else value
        pairs = list(read.items()) if isinstance(read, dict) else read
        if not isinstance(value, dict) or len(value) != len(pairs):
            return False
        return all(
            is_exact(kind.key_field, key, read_key) and is_exact(kind.item_field, item, read_item)
            for (key, item), (read_key, read_item) in zip(value.items(), pairs, strict=True)
        )
    if t.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        if isinstance(value, tuple) and len(value) == len(fields):
            value = dict(zip([each.name for each in fields], value, strict=True))
        if not isinstance(value, dict) or value.keys() != read.keys() or len(value) != len(fields):
            return False
        return all(is_exact(each, value[each.name], read[each.name]) for each in fields)
    return is_exact_scalar(kind, value, read)


def is_exact_scalar(kind: pa.DataType, value: Any, read: Any) -> bool:
    is_bool = isinstance(value, bool | np.bool_)
    if t.is_boolean(kind):
        return is_bool and bool(value) is read
    if t.is_string(kind):
        return isinstance(value, str) and value == read
    if t.is_binary(kind):
        return isinstance(value, bytes | bytearray) and value == read
    if t.is_date(kind):
        return isinstance(value, dt.date) and not isinstance(value, dt.datetime) and value == read
    if t.is_timestamp(kind):
        if not isinstance(value, dt.datetime) or (value.tzinfo is None) != (kind.tz is None):
            return False
        return bool(value == read)
    if is_bool or isinstance(value, str | bytes | bytearray | dt.date | dt.time | dt.timedelta | np.datetime64):
        return False
    if t.is_decimal(kind):
        return isinstance(value, Decimal | int) and value == read
    if t.is_floating(kind) and math.isnan(value):
        return math.isnan(read)
    if t.is_float32(kind) and isinstance(value, float):  # the one type that rounds
        rounded = float(np.float32(value))
        return rounded == read and math.isinf(value) == math.isinf(rounded) and (value == 0) == (rounded == 0)
    return bool(value == read)


Door = Callable[[pa.Schema, list[dict[str, Any]]], list[dict[str, Any]]]


def operator_rows(schema: pa.Schema, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_batch(OutputWriter(schema, "Op").write(list(rows)), schema).to_pylist()
    return found


def client_rows(schema: pa.Schema, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = numbered(SPEC, schema, rows)[0].to_pylist()
    return found


def pyarrow_alone(schema: pa.Schema, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reads rows as earlier versions did: pyarrow makes each column, and only its own null check applies."""
    try:
        columns = [pa.array([row[name] for row in rows], schema.field(name).type) for name in schema.names]
        found: list[dict[str, Any]] = pa.RecordBatch.from_arrays(columns, schema=schema).to_pylist()
    except (pa.ArrowException, ArithmeticError, TypeError, ValueError) as error:
        raise InvalidArgument(str(error), remedy="-", operator="Op", column="?", row=0) from error
    return found


def wrong(door: Door, case: Case) -> str:
    """Describes how the door breaks the rule; empty: it keeps the rule."""
    schema = parse_ddl(case.ddl)
    try:
        read = door(schema, case.rows)
    except (OutputMismatch, InvalidArgument) as error:
        if case.fits:
            return f"what fits was refused: {error}"
        placed = {"operator", "column", "row"} <= error.where.keys() and error.remedy
        return "" if placed and len(str(error).splitlines()) == 1 else f"it does not say where: {error}"
    for row, out in zip(case.rows, read, strict=True):
        for field in schema:
            if not is_exact(field, row[field.name], out[field.name]):
                return f"{field.name}: {row[field.name]!r} became {out[field.name]!r}"
    return ""


@pytest.mark.parametrize("door", [operator_rows, client_rows])
@settings(max_examples=sized(480))
@given(cases())
def test_taken_exactly_or_refused(door: Door, case: Case) -> None:
    assert wrong(door, case) == ""


def test_what_pyarrow_does_alone_is_found() -> None:
    found = []

    @settings(max_examples=500, derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False)
    @given(cases())
    def look(case: Case) -> None:
        if "became" in (said := wrong(pyarrow_alone, case)):
            found.append(case)
            raise AssertionError(said)

    with pytest.raises(AssertionError, match="became"):
        look()
    assert wrong(operator_rows, found[0]) == wrong(client_rows, found[0]) == ""


@settings(max_examples=sized(480))
@given(cases())
def test_columns_of_types_that_pyarrow_made_are_taken_exactly_or_refused(case: Case) -> None:
    schema = parse_ddl(case.ddl)
    try:
        table = pa.table({name: pa.array([row[name] for row in case.rows]) for name in schema.names})
        given = table.to_pylist()
    except (pa.ArrowException, ArithmeticError, TypeError, ValueError):
        return
    try:
        read = OutputWriter(schema, "Op").columns(table, "process_batch").to_pylist()
    except OutputMismatch as error:
        assert {"operator", "column"} <= error.where.keys()  # noqa: PT017
        return
    for row, out in zip(given, read, strict=True):
        assert all(is_exact(field, row[field.name], out[field.name]) for field in schema)


# -- without a schema ---------------------------------------------------------------------------------------


def is_alike(value: Any, seen: Any) -> bool:
    """Tells whether an operator sees what was sent, as Python's own types."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        same = isinstance(seen, dict) and value.keys() == seen.keys()
        return same and all(is_alike(value[key], seen[key]) for key in value)
    if isinstance(value, list | tuple | set):
        same = isinstance(seen, list) and len(value) == len(seen)
        return same and all(map(is_alike, value, seen))
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return bool(value == seen) and value.utcoffset() == seen.utcoffset()
    if isinstance(value, bool | np.bool_) or type(seen) is bool:
        return isinstance(value, bool | np.bool_) and type(seen) is bool and bool(value) is seen
    if isinstance(value, dt.date):
        return type(value) is type(seen) and value == seen
    return bool(value == seen) or (isinstance(seen, float) and math.isnan(value) and math.isnan(seen))


values = st.deferred(
    lambda: ODD | plain | st.lists(values, max_size=3) | st.dictionaries(st.sampled_from("xy"), values)
)
plain = st.one_of(*FITTING.values())


@settings(max_examples=sized(480))
@given(st.lists(st.none() | values, min_size=1, max_size=3))
def test_without_a_schema_a_row_is_what_was_sent_whatever_is_beside_it(given: list[Any]) -> None:
    try:
        batch, _ = numbered(SPEC, None, [{"k": "a", "v": value} for value in given])
    except InvalidArgument as error:
        assert {"operator", "column"} <= error.where.keys()  # noqa: PT017
        return
    _, rows = RowReader(batch.schema, ("k",), "Op").read_each(batch)
    for value, row in zip(given, rows, strict=True):
        assert is_alike(value, row[1]), (value, row[1])


# -- through an operator ------------------------------------------------------------------------------------


class Through(Operator):
    """Keeps the value of each row unchanged, and gives it back."""

    key = "k"
    output: Any = "n int"
    kept = state.value(Any, default=None)
    given: list[Any]

    def process(self, row: Any, ctx: Any) -> Any:
        self.given.append(row[1])
        self.kept.value = self.keeping(row[1])
        yield tuple(row)

    @staticmethod
    def keeping(value: Any) -> Any:
        return value


class ThroughJson(Through):
    @staticmethod
    def keeping(value: Any) -> Any:
        return json.loads(json.dumps(value, default=str))


def is_same(value: Any, read: Any) -> bool:
    """Tells whether both are the same value of the same type.

    A moment may be in another zone, as state gives it back in UTC.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(read, np.ndarray):
        read = read.tolist()
    if type(value) is not type(read):
        return False
    if isinstance(value, dict):
        return list(value) == list(read) and all(is_same(value[key], read[key]) for key in value)
    if isinstance(value, list | tuple):
        return len(value) == len(read) and all(map(is_same, value, read))
    if isinstance(value, dt.datetime):
        return value == read and (value.tzinfo is None) == (read.tzinfo is None)
    return bool(value == read) or (isinstance(value, float) and math.isnan(value) and math.isnan(read))


def wrong_through(case: Case, base: type[Through] = Through) -> str:
    """Describes how rows, outputs of the same schema, or state break the rule; empty: they keep it."""
    schema = parse_ddl(case.ddl)
    try:
        rows = [row | {"k": str(number)} for number, row in enumerate(case.rows)]
        batch, _ = numbered(SPEC, schema, rows)
    except InvalidArgument:
        return "what fits was refused" if case.fits else ""
    column = schema.field(1)
    operator = type("Echo", (base,), {"output": schema, "given": []})
    with OperatorHarness(operator, partitions=1) as harness:
        message = batch.serialize().to_pybytes()
        found = harness._apply(batch.schema.serialize().to_pybytes(), {0: message})
        for number, (sent, given, out) in enumerate(zip(rows, operator.given, found, strict=True)):
            name, kept = column.name, harness.state(str(number)).kept.value
            if not is_exact(column, sent[name], given):
                return f"{case.ddl}: {sent[name]!r} became {given!r} in the row"
            if not is_same(given, kept):
                return f"{case.ddl}: {given!r} became {kept!r} in state"
            if not is_same(given, out[name]):
                return f"{case.ddl}: {given!r} became {out[name]!r} as output"
    return ""


@settings(max_examples=sized(480))
@given(cases())
def test_rows_come_to_an_operator_stay_in_its_state_and_leave_it_exactly(case: Case) -> None:
    assert wrong_through(case) == ""


def test_a_state_that_keeps_json_is_found() -> None:
    case = Case("k string NOT NULL, v struct<a:timestamp>", [{"k": "a", "v": {"a": AWARE}}], True)
    assert "in state" in wrong_through(case, ThroughJson)
    assert wrong_through(case) == ""


@settings(max_examples=sized(480))
@given(st.lists(st.none() | values, min_size=1, max_size=3))
def test_what_the_harness_sends_is_kept_or_refused(given: list[Any]) -> None:
    operator = type("Echo", (Through,), {"given": [], "process": keep})
    with OperatorHarness(operator, partitions=1) as harness:
        try:
            harness.send({"k": number, "v": value} for number, value in enumerate(given))
        except InvalidArgument as error:
            assert {"operator", "column"} <= error.where.keys()  # noqa: PT017
            return
        except EncodeError as error:
            assert {"operator", "state", "key"} <= error.where.keys()  # noqa: PT017
            return
        for number, row in enumerate(operator.given):
            assert is_same(row, harness.state(number).kept.value)


def keep(self: Through, row: Any, ctx: Any) -> None:
    self.given.append(row.v)
    self.kept.value = row.v
