"""TrackedList, standalone and bound, against list: results, errors, net changes and stored bytes."""

from __future__ import annotations

import copy
import operator
from functools import partial
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stateflow import state
from stateflow.changes import Mutations
from stateflow.state import KeyedState, TrackedList, declarations_of, scan_state
from tests.sizes import sized


class Store:
    def __init__(self) -> None:
        self.cells: dict[bytes, bytes] = {}

    def get(self, cell: bytes) -> bytes | None:
        return self.cells.get(cell)

    def scan(self, prefix: bytes) -> Any:
        return iter(sorted(item for item in self.cells.items() if item[0].startswith(prefix)))

    def apply(self, mutations: Mutations) -> None:
        for start, end in mutations.clears:
            for cell in [cell for cell in self.cells if start <= cell < end]:
                del self.cells[cell]
        for cell in mutations.deletes:
            del self.cells[cell]
        self.cells.update(mutations.puts)


class Op:
    numbers = state.list(int)
    things = state.list(list)
    days = state.list(int, ttl=10**9)
    lasting = state.list(list, ttl=10**9, ttl_refresh="read_write")


STATES = declarations_of(Op)


def outcome(call: Any) -> Any:
    try:
        return call()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return type(error), str(error) if isinstance(error, IndexError | ValueError) else ""


def listed(got: Any) -> Any:
    return got.copy() if isinstance(got, TrackedList) else got


def delete(x: Any, at: Any) -> None:
    del x[at]


def assign(x: Any, at: Any, value: Any) -> None:
    x[at] = value


def appending(x: Any, value: Any) -> list[Any]:
    """Appends during iteration: an iterator sees what is appended while it runs."""
    seen = []
    for each in x:
        seen.append(each)
        if len(x) < 7:
            x.append(value)
    return seen


def shrinking(x: Any) -> list[Any]:
    seen = []
    for each in reversed(x):
        seen.append(each)
        x.pop(0)
    return seen


CALLS: list[Any] = [
    lambda x, i, s, v, o: x[i],
    lambda x, i, s, v, o: x[s],
    lambda x, i, s, v, o: x["a"],
    lambda x, i, s, v, o: assign(x, i, v),
    lambda x, i, s, v, o: assign(x, s, o),
    lambda x, i, s, v, o: assign(x, s, iter(o)),
    lambda x, i, s, v, o: assign(x, s, 5),
    lambda x, i, s, v, o: assign(x, slice(i, i), x),
    lambda x, i, s, v, o: delete(x, i),
    lambda x, i, s, v, o: delete(x, s),
    lambda x, i, s, v, o: x.append(v),
    lambda x, i, s, v, o: x.append(v),
    lambda x, i, s, v, o: x.insert(i, v),
    lambda x, i, s, v, o: x.insert(i, v),
    lambda x, i, s, v, o: x.insert(0, v),
    lambda x, i, s, v, o: x.pop(),
    lambda x, i, s, v, o: x.pop(0),
    lambda x, i, s, v, o: x.append(x.pop(0)),
    lambda x, i, s, v, o: x.pop(i),
    lambda x, i, s, v, o: x.pop("a"),
    lambda x, i, s, v, o: x.remove(v),
    lambda x, i, s, v, o: x.extend(o),
    lambda x, i, s, v, o: x.extend(x),
    lambda x, i, s, v, o: x.extend(5),
    lambda x, i, s, v, o: x.clear(),
    lambda x, i, s, v, o: x.sort(),
    lambda x, i, s, v, o: x.sort(key=str, reverse=True),
    lambda x, i, s, v, o: x.reverse(),
    lambda x, i, s, v, o: x.index(v),
    lambda x, i, s, v, o: x.index(v, i),
    lambda x, i, s, v, o: x.index(v, 1, i),
    lambda x, i, s, v, o: x.count(v),
    lambda x, i, s, v, o: v in x,
    lambda x, i, s, v, o: len(x),
    lambda x, i, s, v, o: bool(x),
    lambda x, i, s, v, o: x.copy(),
    lambda x, i, s, v, o: copy.deepcopy(x),
    lambda x, i, s, v, o: list(reversed(x)),
    lambda x, i, s, v, o: appending(x, v),
    lambda x, i, s, v, o: shrinking(x),
    lambda x, i, s, v, o: repr(x),
    lambda x, i, s, v, o: hash(x),
    lambda x, i, s, v, o: x + o,
    lambda x, i, s, v, o: o + x,
    lambda x, i, s, v, o: x + tuple(o),
    lambda x, i, s, v, o: x * i,
    lambda x, i, s, v, o: i * x,
    lambda x, i, s, v, o: x * 1.5,
    lambda x, i, s, v, o: operator.iadd(x, tuple(o)),
    lambda x, i, s, v, o: operator.imul(x, min(i, 3)),
    lambda x, i, s, v, o: operator.imul(x, "a"),
    lambda x, i, s, v, o: [].__iadd__(x),
    *(
        lambda x, i, s, v, o, op=op, flip=flip: op(o, x) if flip else op(x, o)
        for op in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
        for flip in (False, True)
    ),
    lambda x, i, s, v, o: x == tuple(o),
    lambda x, i, s, v, o: x < 3,
]
INDEX = st.integers(-6, 6)
PLACES = st.none() | INDEX
SLICES = st.builds(slice, PLACES, PLACES, st.sampled_from([None, None, 1, 2, -1, -2, 3]))
NUMBER = st.integers(0, 3)
CALL = st.tuples(st.sampled_from(CALLS), INDEX, SLICES, NUMBER, st.lists(NUMBER, max_size=3))


def same(real: Any, want: list[Any], call: Any, make: Any) -> None:
    """Makes one call on both lists and compares the outcomes."""
    do, index, where, value, other = call
    mine, theirs = make(value), make(value)
    got = outcome(partial(do, real, index, where, mine, [make(each) for each in other]))
    wanted = outcome(partial(do, want, index, where, theirs, [make(each) for each in other]))
    assert (got is real) == (wanted is want)
    assert listed(got) == listed(wanted)


@settings(max_examples=sized(600))
@given(start=st.lists(NUMBER, max_size=6), calls=st.lists(CALL, max_size=12))
def test_list_does_what_list_does(start: list[int], calls: list[Any]) -> None:
    real, want = TrackedList(start), list(start)
    for call in calls:
        same(real, want, call, lambda value: value)
        assert (list(real), len(real), repr(real)) == (want, len(want), repr(want))
        changes = real.changes()
        assert all(want[index] == value for index, value in changes["put"].items())
        assert want == start or changes != {"put": {}, "deleted": []}
    real.mark_clean()
    assert real.changes() == {"put": {}, "deleted": []}


@settings(max_examples=sized(1200))
@example("days", [0], [*((CALLS[at], 0, slice(None), 0, []) for at in (24, 10))])  # cleared unread, then put back
@given(
    name=st.sampled_from(list(STATES)),
    start=st.lists(NUMBER, max_size=6),
    calls=st.lists(CALL | st.sampled_from(["commit", "rollback", "reopen", "change", "reopen"]), max_size=20),
)
def test_a_stored_list_does_what_list_does(name: str, start: list[int], calls: list[Any]) -> None:
    make: Any = (lambda value: [value]) if STATES[name].coder.mutable else (lambda value: value)
    store = Store()

    def opened() -> tuple[KeyedState, Any]:
        keyed, op = KeyedState("op", STATES, store), Op()
        keyed.set_time(0)
        keyed.bind(op, "k")
        return keyed, getattr(op, name)

    keyed, real = opened()
    want: list[Any] = [make(each) for each in start]
    committed: list[Any] = []
    real += copy.deepcopy(want)
    for call in ["reopen", *calls, "reopen"]:
        match call:
            case "change":
                if make(1) == [1] and want:
                    real[0].append(9)
                    want[0].append(9)
            case "rollback":
                keyed.rollback()
                want = copy.deepcopy(committed)
            case "commit" | "reopen":
                mutations = keyed.collect()
                assert keyed.collect() == mutations
                if not mutations.clears:
                    assert all(store.cells.get(cell) != data for cell, data in mutations.puts)
                store.apply(mutations)
                keyed.mark_clean()
                # one object at two places becomes two from here on
                want = [copy.copy(each) for each in want]
                committed = copy.deepcopy(want)
                if call == "reopen":
                    keyed, real = opened()
            case _:
                same(real, want, call, make)
    assert (list(real), len(real)) == (want, len(want))
    assert not keyed.collect()
    assert list(scan_state(STATES[name], store)) == [("k", index, value) for index, value in enumerate(want)]
    real.clear()
    store.apply(keyed.collect())
    assert not store.cells
