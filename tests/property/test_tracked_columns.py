"""Maps, sets, counters and expiring states for many keys at once: stores equal those of rows, byte for byte."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow import state
from stateflow.state import ColumnStates, KeyedState, declarations_of
from stateflow.storage import MemoryStore
from tests.sizes import sized

SECOND = 1_000_000
TTL = timedelta(seconds=10)


class Op:
    plain = state.value(int, default=7)
    short = state.value(int, default=3, ttl=TTL)
    bag = state.value(list[int])
    totals = state.map(str, int)
    recent = state.map(int, float, ttl=TTL, ttl_refresh="read_write")
    seen = state.set(str)
    fresh = state.set(int, ttl=TTL, ttl_domain="event")
    count = state.counter()
    most = state.reducing(int, max)


STATES = declarations_of(Op)
KEYS = st.lists(st.sampled_from("abc"), max_size=4)
TEXT, NUMBER = st.sampled_from(["x", "y", "z"]), st.integers(0, 3)


_ANY = ("contains_many", "clear_many", "sizes")
METHODS = [
    *[(name, method) for name in ("plain", "short", "bag") for method in ("put_many", "get_many")],
    *[(n, method) for n in ("totals", "recent") for method in ("put_many", "get_many", "remove_many", "items", *_ANY)],
    *[(name, method) for name in ("seen", "fresh") for method in ("add_many", "discard_many", "members", *_ANY)],
    *[(name, method) for name in ("count", "most") for method in ("add_many", "get_many", "clear_many")],
]


@st.composite
def calls(draw: Any) -> tuple[str, str, list[str], list[Any], list[Any]]:
    """Draws (state, method, keys, entries, values)."""
    name, method = draw(st.sampled_from(METHODS))
    keys = draw(KEYS)
    length = len(keys)

    def many(each: Any) -> list[Any]:
        return draw(st.lists(each, min_size=length, max_size=length))  # type: ignore[no-any-return]

    entries = many({"totals": TEXT, "recent": NUMBER, "seen": TEXT, "fresh": NUMBER}.get(name, st.none()))
    kinds = {"bag": st.lists(NUMBER, max_size=2), "recent": st.sampled_from([0.5, -0.5])}
    return name, method, keys, entries, many(st.none() | kinds.get(name, NUMBER))


TYPES = {"bag": pa.list_(pa.int64()), "recent": pa.float64()}
ENTRIES = {"totals": pa.string(), "recent": pa.int64(), "seen": pa.string(), "fresh": pa.int64()}


def by_columns(states: ColumnStates, call: Any) -> Any:
    name, method, keys, entries, values = call
    column: Any = (states.columns | states.tracked)[name]
    arguments = [pa.array(keys, pa.string())]
    if name in ENTRIES and method not in ("items", "members", "clear_many", "sizes"):
        arguments.append(pa.array(entries, ENTRIES[name]))
    if method == "put_many" or (method == "add_many" and name in ("count", "most")):
        arguments.append(pa.array(values, TYPES.get(name, pa.int64())))
    found = getattr(column, method)(*arguments)
    return None if found is None else found.to_pylist()


def by_rows(states: KeyedState, call: Any) -> Any:
    name, method, keys, entries, values = call
    found: list[Any] = []
    for index, (key, entry, value) in enumerate(zip(keys, entries, values, strict=True)):
        tracked: Any = states.bundle_of(key)[name]
        match method, STATES[name].kind:
            case "put_many", "value":
                if value is None:
                    tracked.clear()
                else:
                    tracked.value = value
            case "put_many", _:
                if value is None:
                    tracked.pop(entry, None)
                else:
                    tracked[entry] = value
            case "get_many", "map":
                found.append(tracked.get(entry))
            case "get_many", _:
                found.append(tracked.value)
            case "remove_many", _:
                tracked.pop(entry, None)
            case "contains_many", _:
                found.append(entry in tracked)
            case "items", _:
                found += [{"index": index, "entry": each, "value": item} for each, item in tracked.items()]
            case "members", _:
                found += [{"index": index, "member": each} for each in tracked]
            case "sizes", _:
                found.append(len(tracked))
            case "clear_many", _:
                tracked.clear()
            case "add_many", "set":
                tracked.add(entry)
            case "add_many", _:
                if value is not None:
                    tracked.add(value)
            case "discard_many", _:
                tracked.discard(entry)
    return found


class Pair:
    def __init__(self) -> None:
        self.stores = MemoryStore(), MemoryStore()
        self.reopen()
        self.now_us = SECOND

    def reopen(self) -> None:
        self.columns = ColumnStates("op", STATES, self.stores[0])
        self.rows = KeyedState("op", STATES, self.stores[1])

    def begin(self, later_s: int) -> None:
        self.now_us += later_s * SECOND
        for states in (self.columns, self.rows):
            states.set_time(self.now_us, self.now_us - 5 * SECOND)

    def end(self, commits: bool, swept: int) -> None:
        for states, store in zip((self.columns, self.rows), self.stores, strict=True):
            if commits:
                store.apply(states.expired(swept) if swept else states.collect())
                states.mark_clean()
            else:
                states.collect()
                states.rollback()
        assert dict(self.stores[0].scan(b"")) == dict(self.stores[1].scan(b""))


BATCHES = st.lists(
    st.tuples(
        st.integers(0, 8),  # seconds until the batch
        st.lists(calls(), max_size=6),
        st.sampled_from([True, True, True, False]),  # commits (else rolls back)
        st.sampled_from([0, 2, 100]),  # entries to sweep
        st.booleans(),  # reopens the store
    ),
    max_size=8,
)


@settings(max_examples=sized(400), deadline=None)
@given(BATCHES)
def test_columns_leave_what_rows_leave(batches: list[Any]) -> None:
    pair = Pair()
    for later_s, each, commits, swept, reopened in batches:
        pair.begin(later_s)
        for call in each:
            found, wanted = by_columns(pair.columns, call), by_rows(pair.rows, call)
            assert (found or []) == wanted
        pair.end(commits, swept)
        if reopened:
            pair.reopen()
