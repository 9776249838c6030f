"""Columns of values: what a small batch costs beside many cached keys, and what an error while reading leaves."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateflow import state
from stateflow.errors import DeclarationError, DecodeError, EncodeError, InvalidArgument
from stateflow.state import ColumnStates, KeyedState, declarations_of
from tests.unit.state.dict_store import DictStore

CACHED = 50_000


class Op:
    n = state.value(int, default=7)


STATES = declarations_of(Op)


def ints(*values: int) -> pa.Array:
    return pa.array(values, pa.int64())


def bytes_taken(work: Callable[[], object]) -> int:
    """Returns the greatest number of bytes that were allocated at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("first", [10, CACHED + 10], ids=["cached keys", "new keys"])
def test_a_small_batch_makes_no_array_as_long_as_all_cached_keys(first: int) -> None:
    states = ColumnStates("op", STATES, DictStore())
    column = states.columns["n"]
    column.get_many(pa.array(np.arange(CACHED)))
    column.get_many(ints(CACHED))  # arrays and lists grow, and have room for the next keys
    states.mark_clean()
    keys = pa.array(np.arange(first, first + 20))
    assert bytes_taken(lambda: column.put_many(keys, keys)) < CACHED // 2
    assert column.get_many(keys).equals(keys)
    assert column.get_many(ints(9, first + 20)).to_pylist() == [7, 7]


@pytest.mark.parametrize("cached", [3, 1_000])
def test_a_repeated_key_is_one_change(cached: int) -> None:
    states = ColumnStates("op", STATES, DictStore())
    states.columns["n"].get_many(pa.array(np.arange(cached)))
    states.columns["n"].put_many(ints(2, 0, 2, 0, 2), ints(1, 2, 3, 4, 5))
    states.columns["n"].put_many(ints(1, 2), ints(6, 8))
    assert states.columns["n"].get_many(ints(0, 1, 2)).to_pylist() == [4, 6, 8]
    assert len(states.collect().puts) == 3
    states.rollback()
    assert states.columns["n"].get_many(ints(0, 1, 2)).to_pylist() == [7, 7, 7]


@pytest.mark.parametrize("keys", [ints(1, 2, 3), pa.array(["a", "b", "c"])], ids=["int", "str"])
def test_after_an_error_no_value_counts_as_absent(keys: pa.Array) -> None:
    """An error while values are read is raised again at the next attempt.

    The value of which the error is, and those that were not read because of it, are neither absent nor zero.
    """
    store = DictStore()
    states = ColumnStates("op", STATES, store)
    states.columns["n"].put_many(keys, ints(10, 20, 30))
    store.apply(states.collect())
    states.invalidate()
    second = sorted(store.cells)[1]
    stored, store.cells[second] = store.cells[second], b"\x07 of a later version"
    for _ in ("the first attempt", "the next one"):
        with pytest.raises(DecodeError, match="a stored cell has format 7"):
            states.columns["n"].put_many(keys, ints(1, 2, 3))
        assert not states.collect()
        states.rollback()
    store.cells[second] = stored
    assert states.columns["n"].get_many(keys).to_pylist() == [10, 20, 30]


# --- values that do not come as declared ---------------------------------------------------------------


class Odd:
    pair = state.value(tuple[int, int])
    mixed = state.value(tuple[str, int])
    late = state.value(tuple[int | None, int | None], ttl=60)
    cost = state.value(Decimal)
    at = state.value(datetime, ttl=60)
    raw = state.value(bytearray)
    named = state.value(dict[str, int])


def odd() -> tuple[dict[str, Any], ColumnStates]:
    states = ColumnStates("op", declarations_of(Odd), DictStore())
    states.set_time(0)
    return states.columns | states.tracked, states


def struct(**fields: Any) -> pa.Array:
    return pa.StructArray.from_arrays([pa.array([each]) for each in fields.values()], names=list(fields))


@pytest.mark.parametrize("name", ["pair", "mixed", "late"])
def test_a_tuple_is_read_by_the_names_of_its_fields(name: str) -> None:
    columns, _ = odd()
    first = "a" if name == "mixed" else 1
    columns[name].put_many(ints(1), struct(_1=2, _0=first))
    assert columns[name].get_many(ints(1)).to_pylist() == [{"_0": first, "_1": 2}]


@pytest.mark.parametrize("name", ["pair", "mixed", "late"])
@pytest.mark.parametrize("fields", [("x", "y"), ("_0", "y"), ("_1", "_2")])
def test_a_tuple_is_not_made_of_other_fields(name: str, fields: tuple[str, str]) -> None:
    columns, states = odd()
    with pytest.raises(EncodeError):
        columns[name].put_many(ints(1), struct(**dict.fromkeys(fields, 1)))
        states.collect()


def test_a_decimal_made_of_an_int_has_one_type_before_and_after_it_is_read_again() -> None:
    columns, states = odd()
    columns["cost"].put_many(ints(1), ints(5))
    assert columns["cost"].get_many(ints(1)).type == pa.decimal128(1, 0)
    states.collect()
    states.mark_clean()
    assert columns["cost"].get_many(ints(1)).to_pylist() == [Decimal(5)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("raw", ints(5)),
        ("raw", pa.array([True])),
        ("raw", pa.array([[1, 2]])),
        ("named", pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))),
        ("at", pa.array([1 << 62], pa.timestamp("us", "UTC"))),
    ],
)
def test_what_would_become_another_value_is_refused(name: str, values: pa.Array) -> None:
    columns, states = odd()
    with pytest.raises(EncodeError, match=rf"operator=op state={name}"):
        columns[name].put_many(ints(1), values)
        states.collect()


@dataclass(frozen=True)
class Fix:
    x: int
    label: str = "a"


class Converted:
    fix = state.value(Fix)
    fixes = state.value(tuple[Fix, int])
    ids = state.value(tuple[UUID, ...])
    mixed = state.value(tuple[UUID, tuple[Fix, str]])


FIX, ONE = {"x": 1, "label": "b"}, str(UUID(int=1))


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("fix", FIX, Fix(1, "b")),
        ("fixes", {"_0": FIX, "_1": 2}, (Fix(1, "b"), 2)),
        ("ids", [ONE], (UUID(int=1),)),
        ("mixed", {"_0": ONE, "_1": {"_0": FIX, "_1": "c"}}, (UUID(int=1), (Fix(1, "b"), "c"))),
    ],
)
def test_records_and_ids_that_cannot_change_are_columns_too(name: str, given: Any, stored: Any) -> None:
    states = ColumnStates("op", declarations_of(Converted), store := DictStore())
    column = (states.columns | states.tracked)[name]
    column.put_many(ints(1), pa.array([given]))
    assert column.get_many(ints(1, 2)).to_pylist() == [given, None]
    store.apply(states.collect())
    states.mark_clean()
    assert getattr(states.peek(1), name).value == stored
    states.invalidate()
    assert column.get_many(ints(1)).to_pylist() == [given]


# --- decimals and ids ----------------------------------------------------------------------------------


class Numbers:
    cost = state.value(Decimal)
    both = state.value(tuple[Decimal, int])
    zero = state.value(Decimal, default=Decimal(0))
    id = state.value(UUID)
    text = state.value(Decimal, ttl=60)


def numbers(*cells: str, name: str = "cost") -> tuple[dict[str, Any], ColumnStates, Any]:
    """Returns columns over these stored values of the keys 1, 2, …"""
    store = DictStore()
    rows = KeyedState("op", declarations_of(Numbers), store)
    for key, cell in enumerate(cells, 1):
        value = Decimal(cell)
        getattr(rows.peek(key), name).value = (value, 1) if name == "both" else value
    store.apply(rows.collect())
    states = ColumnStates("op", declarations_of(Numbers), store)
    states.set_time(0)
    return states.columns | states.tracked, states, store


@pytest.mark.parametrize("name", ["cost", "both"])
def test_a_number_that_is_put_back_stays_as_it_is_stored(name: str) -> None:
    columns, states, _ = numbers("1.5", "1.250", "-0", name=name)
    keys = ints(1, 2, 3)
    columns[name].put_many(keys, columns[name].get_many(keys))
    assert not states.collect()
    columns[name].put_many(ints(1), columns[name].get_many(ints(2)))
    assert len(states.collect().puts) == 1


def test_a_default_that_is_put_back_is_stored_as_declared() -> None:
    columns, states, store = numbers("1.250", name="zero")
    columns["zero"].put_many(ints(1, 2), columns["zero"].get_many(ints(1, 2)))
    store.apply(states.collect())
    assert str(states.peek(2).zero.value) == "0"


def test_columns_without_a_value_have_a_type_that_fits_the_next_values() -> None:
    columns, _, _ = numbers()
    nothing = columns["cost"].get_many(ints(1))
    assert pc.add(pc.fill_null(nothing, Decimal(0)), pa.array([Decimal("1.5")])).to_pylist() == [Decimal("1.5")]
    assert columns["both"].get_many(ints(1)).type == pa.struct([("_0", pa.decimal128(1, 0)), ("_1", pa.int64())])
    assert columns["id"].get_many(ints(1)).type == pa.uuid()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cost", pa.array(["1.50"]), Decimal("1.50")),
        ("cost", pa.array(["NaN"]), Decimal("NaN")),
        ("text", pa.array(["1.50"]), Decimal("1.50")),
        ("both", struct(_0="1.50", _1=1), (Decimal("1.50"), 1)),
        ("id", pa.array([ONE]), UUID(int=1)),
        ("id", pa.array([UUID(int=1).bytes], pa.uuid()), UUID(int=1)),
    ],
)
def test_text_becomes_a_decimal_or_id_exactly(name: str, text: pa.Array, value: Any) -> None:
    columns, states, store = numbers()
    columns[name].put_many(ints(1), text)
    store.apply(states.collect())
    assert repr(getattr(states.peek(1), name).value) == repr(value)


def test_ids_come_back_as_ids() -> None:
    columns, states, store = numbers()
    columns["id"].put_many(ints(1), pa.array([ONE]))
    store.apply(states.collect())
    states.invalidate()
    assert columns["id"].get_many(ints(1, 2)).to_pylist() == [UUID(int=1), None]


@pytest.mark.parametrize("name", ["cost", "id"])
def test_text_that_is_none_is_refused(name: str) -> None:
    columns, _, _ = numbers()
    with pytest.raises(EncodeError, match=rf"str does not fit coder .*state={name}"):
        columns[name].put_many(ints(1), pa.array(["one"]))


@pytest.mark.parametrize("cell", ["NaN", "sNaN", "Infinity", "1E+100"])
def test_a_number_that_no_decimal_column_holds_is_said_and_can_be_replaced(cell: str) -> None:
    columns, _, _ = numbers(cell, "1.5")
    with pytest.raises(EncodeError, match=r"do not fit one Arrow column: .*state=cost\): store finite decimals"):
        columns["cost"].get_many(ints(1, 2))
    columns["cost"].put_many(ints(1), pa.array([Decimal(2)]))
    assert columns["cost"].get_many(ints(1, 2)).to_pylist() == [2, Decimal("1.5")]


# --- values without one Arrow type ---------------------------------------------------------------------


@dataclass
class Loose:
    x: int | str = 0


class Untyped:
    a_dict = state.value(dict)
    a_list = state.value(list)
    anything = state.value(Any)
    either = state.value(int | str)
    record = state.value(Loose)
    inner = state.value(dict[str, list[Any]])
    entries = state.map(str, Any)
    last = state.reducing(Any, lambda _, new: new)


@pytest.mark.parametrize("name", sorted(declarations_of(Untyped)))
def test_what_would_be_json_is_read_and_written_key_by_key(name: str) -> None:
    """The text of a column would be stored as text when it is put back."""
    states = ColumnStates("op", declarations_of(Untyped), DictStore())
    column: Any = states.tracked[name]
    key, text = pa.array(["a"]), pa.array(["1"])
    calls = {
        "entries": [("get_many", text), ("put_many", text, text), ("items",)],
        "last": [("get_many",), ("add_many", text)],
    }
    for method, *arguments in calls.get(name, [("get_many",), ("put_many", text)]):
        with pytest.raises(DeclarationError, match=rf"no Arrow type .* \(operator=op state={name}\): use each"):
            getattr(column, method)(key, *arguments)
    assert not states.collect()
    (tracked,) = column.each(key)
    if name == "entries":
        tracked["a"] = 5
        assert column.contains_many(key, pa.array(["a"])).to_pylist() == [True]
        column.remove_many(key, pa.array(["a"]))
        assert column.sizes(key).to_pylist() == [0]


# --- items of records and containers -------------------------------------------------------------------


@dataclass
class Seen:
    gate: str
    at: datetime | None = None
    times: int = 5


class Times:
    maybe = state.value(datetime | None)
    several = state.value(list[datetime])
    seen = state.value(Seen)
    by_gate = state.map(str, Seen)


NAIVE = datetime(2020, 1, 1, 12)
TIMES: list[tuple[str, Any, Any]] = [
    ("maybe", NAIVE, NAIVE),
    ("several", [NAIVE], [NAIVE]),
    ("seen", Seen("B2", NAIVE), {"gate": "B2", "at": NAIVE}),
    ("by_gate", Seen("B2", NAIVE), {"gate": "B2", "at": NAIVE}),
]


@pytest.mark.parametrize(("name", "stored", "given"), TIMES)
def test_a_time_without_a_zone_is_not_taken_for_one_in_utc(name: str, stored: Any, given: Any) -> None:
    states = ColumnStates("op", declarations_of(Times), DictStore())
    column: Any = states.tracked[name]
    keys, entries = ints(1), [pa.array(["x"])] if name == "by_gate" else []
    with pytest.raises(EncodeError, match=rf"without a time zone .*operator=op state={name}"):
        column.put_many(keys, *entries, pa.array([given]))
    assert not states.collect()
    (tracked,) = column.each(keys)
    if name == "by_gate":
        tracked["x"] = stored
    else:
        tracked.value = stored
    with pytest.raises(EncodeError, match=rf"without a time zone .*operator=op state={name}"):
        column.get_many(keys, *entries)


def test_a_field_that_is_left_out_has_its_default() -> None:
    states = ColumnStates("op", declarations_of(Times), DictStore())
    column: Any = states.tracked["seen"]
    column.put_many(ints(1), pa.array([{"gate": "B2"}]))
    assert [tracked.value for tracked in column.each(ints(1))] == [Seen("B2", None, 5)]
    with pytest.raises(EncodeError, match="state=seen"):
        column.put_many(ints(1), pa.array([{"times": 7}]))
        states.collect()


# --- what is no Arrow array ----------------------------------------------------------------------------

NO_ARRAYS: list[Any] = [np.array([1]), [1], (1,), 1, pa.scalar(1), pa.table({"k": [1]})]


@pytest.mark.parametrize("given", NO_ARRAYS, ids=lambda each: type(each).__name__)
def test_what_is_no_arrow_array_is_refused(given: Any) -> None:
    class Both:
        n = state.value(int)
        m = state.map(int, int)

    states = ColumnStates("op", declarations_of(Both), DictStore())
    n: Any = states.columns["n"]
    m: Any = states.tracked["m"]
    one = ints(1)
    for call in (
        lambda: n.get_many(given),
        lambda: n.put_many(one, given),
        lambda: m.sizes(given),
        lambda: m.get_many(one, given),
        lambda: m.put_many(one, one, given),
    ):
        with pytest.raises(InvalidArgument, match=rf"{type(given).__name__} was passed instead of an Arrow array"):
            call()
