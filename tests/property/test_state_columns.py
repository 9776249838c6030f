"""Columns of state against a dict, on both stores, with small caches, commits, rollbacks and restores in between."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from backends import Backend
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from stateflow import state
from stateflow.errors import EncodeError, NullKey
from stateflow.state import CachePool, ColumnStates, KeyedState, declarations_of
from stateflow.state.cells import encode_row_key, row_part
from stateflow.state.keys import KeyColumns, KeyIndex
from stateflow.storage import MemoryStore
from tests.sizes import sized


class Op:
    n = state.value(int, default=7)
    f = state.value(float)
    flag = state.value(bool, default=False)
    text = state.value(str, default="-")
    pair = state.value(tuple[int, float])
    mixed = state.value(tuple[str, int], default=("-", 0))
    deep = state.value(tuple[str, tuple[int, float]])
    many = state.value(tuple[int, ...])


STATES = declarations_of(Op)
TYPES = {
    "n": pa.int64(),
    "f": pa.float64(),
    "flag": pa.bool_(),
    "text": pa.string(),
    "pair": pa.struct([("_0", pa.int64()), ("_1", pa.float64())]),
    "mixed": pa.struct([("_0", pa.string()), ("_1", pa.int64())]),
    "deep": pa.struct([("_0", pa.string()), ("_1", pa.struct([("_0", pa.int64()), ("_1", pa.float64())]))]),
    "many": pa.list_(pa.int64()),
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": st.sampled_from([7, 2, 7, -(2**63), 2**63 - 1]),
    "f": st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")]),
    "flag": st.booleans(),
    "text": st.sampled_from(["", "a", "é" * 30]),
    "pair": st.tuples(st.integers(-2, 2), st.sampled_from([0.5, -0.5])),
    "mixed": st.tuples(st.sampled_from(["-", "é"]), st.integers(-1, 1)),
    "deep": st.tuples(st.just("a"), st.tuples(st.integers(0, 1), st.just(0.5))),
    "many": st.lists(st.integers(0, 2), max_size=2).map(tuple),
}
INTS = pa.int64(), st.integers(-4, 4) | st.sampled_from([2**63 - 1, -(2**63)])
KEYS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    INTS,
    (pa.int8(), st.integers(-4, 4)),
    (pa.uint32(), st.integers(0, 4)),
    (pa.string(), st.sampled_from("abcde")),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.sampled_from([0.0, -0.0, 1.0, -2.5])),
    (pa.timestamp("us", "UTC"), st.sampled_from([datetime(2013, 1, day, tzinfo=UTC) for day in (1, 2)])),
    (
        pa.struct([("a", pa.string()), ("b", pa.int64())]),
        st.fixed_dictionaries({"a": st.just("x"), "b": st.integers(0, 3)}),
    ),
]


@st.composite
def batches(draw: Any) -> tuple[str, pa.Array, list[Any]]:
    """Draws (state, keys, values to put)."""
    name = draw(st.sampled_from(sorted(VALUES)))
    kind, keys = draw(st.sampled_from([INTS, *KEYS]))
    pairs = draw(st.lists(st.tuples(keys, st.none() | VALUES[name]), max_size=6))
    return name, pa.array([key for key, _ in pairs], kind), [value for _, value in pairs]


def plain(keys: pa.Array) -> list[Any]:
    """Converts keys to what an operator is given."""
    found = [tuple(key.values()) if isinstance(key, dict) else key for key in keys.to_pylist()]
    return [(type(key), key) for key in found]


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


def as_arrow(name: str, values: list[Any]) -> pa.Array:
    return pa.array([as_struct(value) if name != "many" else value for value in values], TYPES[name])


def as_struct(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return {f"_{place}": as_struct(item) for place, item in enumerate(value)}


def as_tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return tuple(map(as_tuple, value.values())) if isinstance(value, dict) else value


class Columns(RuleBasedStateMachine):
    backend: str

    @initialize(
        cached=st.sampled_from([0, 2, 100, 1_000]),
        pool=st.sampled_from([None, 1_000]),
        others=st.sampled_from([0, 300]),
    )
    def start(self, cached: int, pool: int | None, others: int) -> None:
        self.sizes: Any = {"cached_keys": cached, "cache": None if pool is None else CachePool(pool)}
        self.others = pa.array(np.arange(100, 100 + others))
        self.store = Backend(self.backend)
        #: store of the same state, written row by row
        self.twin = MemoryStore()
        self.by_rows = KeyedState("op", STATES, self.twin)
        self.now: dict[Any, Any] = {}
        self.committed: dict[Any, Any] = {}
        self.reopen()

    @rule()
    def reopen(self) -> None:
        self.states = ColumnStates("op", STATES, self.store, **self.sizes)
        self.states.columns["n"].get_many(self.others)  # beside so many keys, a batch is small
        self.by_rows.rollback()
        self.now = dict(self.committed)

    @rule()
    def restore(self) -> None:
        self.store.checkpoint_and_restore()
        self.reopen()

    @rule(batch=batches())
    def get(self, batch: Any) -> None:
        name, keys, _ = batch
        default = {"n": 7, "flag": False, "text": "-", "mixed": ("-", 0)}.get(name)
        got = [as_tuple(value) for value in self.states.columns[name].get_many(keys).to_pylist()]
        assert same(got, [self.now.get((name, *key), default) for key in plain(keys)])

    @rule(batch=batches())
    def put(self, batch: Any) -> None:
        name, keys, values = batch
        column = self.states.columns[name]
        column.get_many(keys)
        column.put_many(keys, as_arrow(name, values))
        for key, value in zip(plain(keys), values, strict=True):
            row = getattr(self.by_rows.peek(key[1]), name)
            if value is None:
                self.now.pop((name, *key), None)
                row.clear()
            else:
                self.now[name, *key] = row.value = value

    @rule()
    def commit(self) -> None:
        mutations = self.states.collect()
        assert self.states.collect() == mutations
        assert len(dict(mutations.puts)) == len(mutations.puts), "a repeated key is one change"
        assert all(self.store.get(cell) != data for cell, data in mutations.puts)
        assert all(self.store.get(cell) is not None for cell in mutations.deletes)
        self.store.apply(mutations)
        self.states.mark_clean()
        self.committed = dict(self.now)
        assert not self.states.collect()
        self.twin.apply(self.by_rows.collect())
        self.by_rows.mark_clean()
        assert dict(self.store.scan(b"")) == dict(self.twin.scan(b""))

    @rule()
    def rollback(self) -> None:
        self.states.rollback()
        self.by_rows.rollback()
        self.now = dict(self.committed)
        assert not self.states.collect()

    @rule()
    def invalidate(self) -> None:
        self.states.invalidate()
        self.by_rows.rollback()
        self.now = dict(self.committed)

    def teardown(self) -> None:
        if hasattr(self, "states"):
            self.commit()
            rows = KeyedState("op", STATES, self.store)
            for (name, _, key), value in self.committed.items():
                assert same(getattr(rows.peek(key), name).value, value)
            self.store.destroy()


class OnMemory(Columns):
    backend = "memory"


class OnRocksDb(Columns):
    backend = "rocksdb"


TestOnMemory = OnMemory.TestCase
TestOnMemory.settings = settings(max_examples=sized(300), stateful_step_count=30)
TestOnRocksDb = OnRocksDb.TestCase
TestOnRocksDb.settings = settings(max_examples=sized(100), stateful_step_count=30)


@given(
    st.sampled_from([0, 1, 300]),
    st.lists(st.tuples(st.lists(st.integers(-5, 700), max_size=9), st.none() | st.integers(0, 400)), max_size=12),
)
@settings(max_examples=sized(300))
def test_each_int_key_has_one_index(known: int, batches: list[tuple[list[int], int | None]]) -> None:
    """Each key has one index, and each index one key, in whichever batches the keys come and whichever are dropped.

    Args:
        known: number of keys in the first batch.
        batches: keys, and how many are kept when the oldest are dropped afterwards.
    """
    index = KeyIndex(KeyColumns("op"))
    for keys, keep in [(list(range(0, 2 * known, 2)), None), *batches]:
        indices = index.of(pa.array(keys, pa.int64())).tolist()
        assert [index.rows[each] for each in indices] == [row_part(encode_row_key(key)) for key in keys]
        assert len(set(index.rows)) == len(index.rows)
        index.end_batch()
        if keep is not None and keep < len(index.rows):
            before = index.rows
            kept = index.drop_oldest(keep)
            assert index.rows == [before[each] for each in kept.tolist()]


def test_what_does_not_fit_is_refused_and_nothing_is_stored() -> None:
    states = ColumnStates("op", STATES, MemoryStore(), max_value_bytes=40)
    keys = pa.array([1, 2])
    for name, values, what in [
        ("n", pa.array([1.5, 2.0]), "Arrow type double do not fit coder int64"),
        ("n", pa.array([2**64 - 1, 1], pa.uint64()), "not in range"),
        ("n", pa.array([True, False]), "Arrow type bool do not fit"),
        ("f", pa.array(["a", "b"]), "Arrow type string do not fit coder float64"),
        ("flag", pa.array([1, 0]), "Arrow type int64 do not fit coder bool"),
        ("text", pa.array([1, 2]), "int does not fit coder utf8"),
        ("pair", pa.array([1, 2]), "not structs of 2 fields"),
        ("pair", pa.array([{"_0": 1, "_1": None}, {"_0": 1, "_1": 0.5}]), "a field is null"),
        ("n", pa.array([1]), "2 keys were passed with 1 values"),
    ]:
        with pytest.raises(EncodeError, match=rf"(?s)({what}).*operator=op state={name}"):
            states.columns[name].put_many(keys, values)
    with pytest.raises(NullKey):
        states.columns["n"].get_many(pa.array([1, None]))
    with pytest.raises(EncodeError, match="beyond 64 bits"):
        states.columns["n"].get_many(pa.array([2**64 - 1], pa.uint64()))
    with pytest.raises(EncodeError, match="NaN"):
        states.columns["n"].get_many(pa.array([float("nan")]))
    assert not states.collect()
    states.columns["text"].put_many(keys, pa.array(["ok", "x" * 41]))
    with pytest.raises(EncodeError, match=r"takes 41 bytes, at most 40 .*state=text key=2"):
        states.collect()
    states.rollback()
    assert not states.collect()


def test_columns_of_objects() -> None:
    class Wide:
        day = state.value(date)
        cost = state.value(Decimal, default=Decimal(0))
        at = state.value(datetime)

    states = ColumnStates("op", declarations_of(Wide), MemoryStore())
    keys = pa.chunked_array([["a"], ["b"]])
    for name, value in [("day", date(2013, 1, 1)), ("cost", Decimal("1.50")), ("at", datetime(2013, 1, 1, tzinfo=UTC))]:
        column = states.columns[name]
        column.put_many(keys, pa.array([value, None]))
        assert column.get_many(keys.dictionary_encode()).to_pylist() == [value, Decimal(0) if name == "cost" else None]
