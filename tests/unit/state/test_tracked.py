"""TrackedValue, TrackedMap and TrackedSet: their requests to the store, and the changes that they record."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from stateflow import state
from stateflow.changes import Mutations
from stateflow.errors import DecodeError, EncodeError
from stateflow.state import KeyedState, TrackedList, TrackedMap, TrackedSet, TrackedValue, declarations_of
from tests.unit.state.dict_store import DictStore


class Op:
    n = state.value(int, default=0)
    log = state.value(list, default=[1])
    m = state.map(str, int)
    f = state.map(float, float)
    lists = state.map(str, list)
    sets = state.map(str, set)
    at = state.map(datetime, int)
    s = state.set(str)
    days = state.set(datetime)


class Bench:
    """One key of one operator over a store that counts."""

    def __init__(self, store: DictStore | None = None, **sizes: int) -> None:
        self.store = store or DictStore()
        self.keyed = KeyedState("op", declarations_of(Op), self.store, **sizes)
        self.op: Any = Op()
        self.keyed.bind(self.op, "k")

    def commit(self) -> Mutations:
        mutations = self.keyed.collect()
        self.store.apply(mutations)
        self.keyed.mark_clean()
        self.store.asked()
        return mutations

    def reopened(self) -> Bench:
        self.commit()
        return Bench(self.store)


@pytest.fixture
def filled() -> Bench:
    """Yields a cold cache over m = {a…e: 0…4}, s = {a, b}, lists = {x: [1]}, n = 5, log = [1, 2]."""
    bench = Bench()
    bench.op.m.update({name: number for number, name in enumerate("abcde")})
    bench.op.s.update("ab")
    bench.op.lists["x"] = [1]
    bench.op.n.value = 5
    bench.op.log.value.append(2)
    fresh = bench.reopened()
    fresh.store.asked()
    return fresh


# --- lazy ----------------------------------------------------------------------------------------------


def test_binding_reads_nothing(filled: Bench) -> None:
    assert filled.store.asked() == (0, 0)


def test_a_value_is_read_once(filled: Bench) -> None:
    assert filled.op.n.value + filled.op.n.value == 10
    assert filled.store.asked() == (1, 0)


def test_one_entry_is_one_cell(filled: Bench) -> None:
    assert filled.op.m["c"] == 2
    assert filled.store.asked() == (2, 0)  # the count, the entry
    assert filled.op.m["c"] == 2
    assert filled.op.m.get("nope") is None
    assert "nope" not in filled.op.m
    assert filled.store.asked() == (1, 0)


def test_len_and_clear_do_not_scan(filled: Bench) -> None:
    assert len(filled.op.m) == 5
    assert filled.op.s
    filled.op.m.clear()
    assert filled.store.asked() == (2, 0)


def test_a_complete_map_leaves_the_store_alone(filled: Bench) -> None:
    assert list(filled.op.m) == list("abcde")
    assert filled.store.asked() == (1, 1)
    assert sum(filled.op.m.values()) == 10
    assert "nope" not in filled.op.m
    filled.op.m["new"] = 1
    assert len(list(filled.op.m.items())) == 6
    filled.commit()
    assert list(filled.op.m)[-1] == "new"
    assert filled.store.asked() == (0, 0)


def test_entries_loaded_one_by_one_make_it_complete(filled: Bench) -> None:
    assert "a" in filled.op.s
    assert "b" in filled.op.s
    filled.store.asked()
    assert "c" not in filled.op.s
    assert list(filled.op.s) == ["a", "b"]
    assert filled.store.asked() == (0, 0)


def test_a_new_key_asks_once() -> None:
    bench = Bench()
    for name in "abc":
        bench.op.m[name] = bench.op.m.get(name, 0) + 1
    assert list(bench.op.m) == list("abc")
    assert bench.store.asked() == (1, 0)


def test_a_cold_entry_that_was_removed_stays_removed(filled: Bench) -> None:
    del filled.op.m["b"]
    filled.op.m["c"] = 9
    filled.store.asked()
    assert "b" not in filled.op.m
    assert filled.store.asked() == (0, 0)
    assert filled.op.m == {"a": 0, "c": 9, "d": 3, "e": 4}
    assert filled.reopened().op.m == {"a": 0, "c": 9, "d": 3, "e": 4}


# --- net effect ----------------------------------------------------------------------------------------


def test_only_what_differs_is_written(filled: Bench) -> None:
    op = filled.op
    op.n.value = 6
    op.n.value = 5
    op.m["a"] = 7
    op.m["a"] = 0
    op.m["new"] = 1
    del op.m["new"]
    del op.m["b"]
    op.m["b"] = 1
    op.s.discard("a")
    op.s.add("a")
    op.s.add("b")
    assert op.log.value == [1, 2]
    op.lists["x"].append(1)
    op.lists["x"].pop()
    op.lists["y"] = []
    del op.lists["y"]
    assert not filled.keyed.collect()


def test_one_entry_written_is_one_put(filled: Bench) -> None:
    filled.op.m["a"] = 9
    mutations = filled.commit()
    assert (len(mutations.puts), mutations.deletes, mutations.clears) == (1, [], [])


def test_clear_is_one_range(filled: Bench) -> None:
    filled.op.m.clear()
    mutations = filled.commit()
    assert (mutations.puts, len(mutations.deletes), len(mutations.clears)) == ([], 1, 1)
    assert filled.reopened().op.m == {}
    other = Bench(filled.store)
    other.keyed.bind(other.op, "k2")
    other.op.m["a"] = 1
    other.commit()
    filled.op.m["a"] = 1
    filled.commit()
    filled.op.m.clear()
    filled.commit()
    assert Bench(filled.store).keyed.peek("k2").m == {"a": 1}
    assert filled.reopened().op.s == {"a", "b"}


def test_clear_and_restore_writes_nothing(filled: Bench) -> None:
    before = filled.op.m.copy()
    filled.op.m.clear()
    filled.op.m.update(before)
    assert not filled.keyed.collect()


def test_clear_and_refill_a_large_map() -> None:
    bench = Bench()
    bench.op.m.update({f"{number:04}": number for number in range(1000)})
    bench = bench.reopened()
    bench.op.m.clear()
    bench.op.m["0001"] = 1
    bench.op.m["z"] = 2
    bench.store.asked()
    mutations = bench.commit()
    assert (len(mutations.clears), len(mutations.puts)) == (1, 3)
    assert bench.reopened().op.m == {"0001": 1, "z": 2}


def test_the_default_is_not_stored_until_assigned() -> None:
    bench = Bench()
    assert bench.op.log.value == [1]
    assert bench.op.n.value == 0
    assert not bench.keyed.collect()
    bench.op.log.value = [1]
    bench.op.n.value = 0
    assert len(bench.commit().puts) == 2
    bench.op.log.clear()
    bench.op.n.clear()
    assert len(bench.commit().deletes) == 2
    assert (bench.op.log.value, bench.op.n.value) == ([1], 0)


def test_defaults_are_not_shared() -> None:
    bench = Bench()
    bench.op.log.value.append(2)
    bench.keyed.bind(bench.op, "other")
    assert bench.op.log.value == [1]


# --- mutable values ------------------------------------------------------------------------------------


def test_change_in_place_is_tracked(filled: Bench) -> None:
    filled.op.lists["x"].append(2)
    filled.op.log.value.append(3)
    assert len(filled.commit().puts) == 2
    filled.op.lists["x"].append(3)
    for values in filled.op.lists.values():
        values.append(4)
    again = filled.reopened()
    assert again.op.lists == {"x": [1, 2, 3, 4]}
    assert again.op.log.value == [1, 2, 3]


def test_change_in_place_rolls_back(filled: Bench) -> None:
    filled.op.lists["x"].append(2)
    filled.op.log.value.append(3)
    filled.keyed.rollback()
    assert filled.op.lists["x"] == [1]
    assert filled.op.log.value == [1, 2]


def test_a_value_kept_from_an_earlier_batch_is_a_copy(filled: Bench) -> None:
    kept, log = filled.op.lists["x"], filled.op.log.value
    filled.commit()
    kept.append(2)
    log.append(3)
    assert filled.op.lists["x"] == [1]
    assert filled.op.log.value == [1, 2]
    assert not filled.keyed.collect()


def test_only_handed_out_values_are_encoded_again(filled: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    filled.op.lists.update({str(number): [number] for number in range(50)})
    filled.commit()
    spec = filled.op.lists._spec
    encoded: list[Any] = []
    real = spec.encode
    monkeypatch.setattr(spec, "encode", lambda value: encoded.append(value) or real(value))
    assert filled.op.lists["7"] == [7]
    assert "8" in filled.op.lists
    assert len(list(filled.op.lists)) == 51
    filled.keyed.collect()
    assert encoded == [[7]]


# --- keys ----------------------------------------------------------------------------------------------


def test_an_equal_number_finds_the_entry() -> None:
    bench = Bench()
    bench.op.f[1] = 2
    bench.op.f[-0.0] = 1
    assert repr(bench.op.f) == "{0.0: 1, 1.0: 2}"
    fresh = bench.reopened()
    assert fresh.op.f[True] == 2.0
    assert repr(fresh.op.f) == "{0.0: 1.0, 1.0: 2.0}"
    fresh.op.f[1] = 5
    del fresh.op.f[0]
    assert repr(fresh.reopened().op.f) == "{1.0: 5.0}"


@pytest.mark.parametrize("key", [None, 1, float("nan"), (1,), "\ud800"])
def test_a_new_key_without_a_stored_form_is_refused_at_once(key: Any) -> None:
    bench = Bench()
    assert key not in bench.op.m
    assert bench.op.m.get(key, 7) == 7
    with pytest.raises(EncodeError, match=r"operator=op state=m key=k map_key="):
        bench.op.m[key] = 1
    with pytest.raises(EncodeError, match=r"state=s"):
        bench.op.s.add(key)
    assert not bench.keyed.collect()


def test_unhashable_keys_are_type_errors(filled: Bench) -> None:
    for call in (
        lambda: [] in filled.op.m,
        lambda: filled.op.m[[]],
        lambda: filled.op.m.get([]),
        lambda: filled.op.m.__setitem__([], 1),
        lambda: filled.op.m.pop([], 1),
        lambda: filled.op.s.add([]),
        lambda: filled.op.s.discard([]),
    ):
        with pytest.raises(TypeError):
            call()


def test_datetimes_of_the_repeated_hour_are_keys() -> None:
    """Datetimes of the repeated hour are keys.

    Python finds such a datetime unequal to itself in UTC, which is what the store returns.
    """
    bench = Bench()
    at = datetime(1994, 10, 30, 1, 30, fold=1, tzinfo=ZoneInfo("America/New_York"))
    assert at != at.astimezone(UTC)
    for _ in range(3):
        bench.op.at[at] = bench.op.at.get(at, 0) + 1
        bench.op.days.add(at)
        bench = bench.reopened()
    assert bench.op.at.setdefault(at, 0) == 3
    assert at in bench.op.at
    assert at in bench.op.days
    assert len(bench.op.days) == 1
    bench.op.days.remove(at)
    assert bench.op.at.pop(at) == 3
    assert not bench.op.days
    del bench.op.at
    bench.keyed.bind(bench.op, at)
    bench.op.n.value += 1
    bench.keyed.bind(bench.op, at.replace(tzinfo=ZoneInfo("America/Toronto")))
    assert bench.op.n.value == 1
    bench.keyed.bind(bench.op, at + timedelta(hours=2))
    assert bench.op.n.value == 0


# --- iteration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("standalone", [True, False])
def test_changing_while_iterating(filled: Bench, standalone: bool) -> None:
    tracked: Any = TrackedMap(dict.fromkeys("abcde", 0)) if standalone else filled.op.m
    for change in (
        tracked.pop,
        lambda key: tracked.__setitem__(key + "x", 1),
        lambda key: tracked.popitem(),
        lambda key: tracked.clear(),
    ):
        with pytest.raises(RuntimeError, match="dictionary changed size during iteration"):
            for key in tracked:
                change(key)
    started = iter(tracked)
    tracked["z"] = 1
    with pytest.raises(RuntimeError):
        next(started)
    for key in tracked:
        tracked[key] = 5
    assert set(tracked.values()) == {5}


def test_changing_a_set_while_iterating(filled: Bench) -> None:
    with pytest.raises(RuntimeError, match="Set changed size during iteration"):
        for member in filled.op.s:
            filled.op.s.remove(member)


def test_pop_takes_the_last() -> None:
    tracked = TrackedMap({3: "c", 1: "a", 2: "b"})
    assert [tracked.popitem() for _ in range(3)] == [(3, "c"), (2, "b"), (1, "a")]
    with pytest.raises(KeyError):
        tracked.popitem()
    members = TrackedSet([3, 1, 2])
    assert [members.pop() for _ in range(3)] == [3, 2, 1]
    with pytest.raises(KeyError):
        members.pop()


def test_views() -> None:
    tracked = TrackedMap({"b": 2, "a": 1})
    assert repr(tracked.keys()) == "dict_keys(['a', 'b'])"
    assert repr(tracked.values()) == "dict_values([1, 2])"
    assert repr(tracked.items()) == "dict_items([('a', 1), ('b', 2)])"
    assert tracked.keys() & {"a"} == {"a"}
    assert ("a", 1) in tracked.items()
    assert list(reversed(tracked.items())) == [("b", 2), ("a", 1)]
    for view in (tracked.keys(), tracked.values(), tracked.items()):
        assert type(view.mapping) is MappingProxyType
        assert view.mapping == tracked
        with pytest.raises(TypeError):
            view.mapping["c"] = 3  # type: ignore[index]
    assert TrackedMap.fromkeys("ab", 0) == {"a": 0, "b": 0}
    assert TrackedMap([("a", 1)], b=2) == {"a": 1, "b": 2}


# --- standalone ----------------------------------------------------------------------------------------


def test_standalone_objects_take_anything() -> None:
    thing = object()
    tracked: TrackedMap[Any, Any] = TrackedMap({None: thing, "a": 1, frozenset({1}): [], 2: {}})
    assert list(tracked) == [2, "a", None, frozenset({1})]
    assert tracked[None] is thing
    assert tracked.changes() == {"put": {}, "deleted": []}
    tracked[2]["in"] = "place"
    del tracked["a"]
    assert tracked.changes() == {"put": {2: {"in": "place"}}, "deleted": ["a"]}
    tracked.mark_clean()
    assert tracked.changes() == {"put": {}, "deleted": []}
    assert {1} in TrackedSet([frozenset({1})])


def test_standalone_value() -> None:
    tracked: TrackedValue[Any] = TrackedValue([1])
    tracked.value.append(2)
    assert tracked.changes() == {"put": [1, 2]}
    tracked.mark_clean()
    assert tracked.changes() == {}
    tracked.clear()
    assert tracked.value is None
    assert tracked.changes() == {"deleted": True}
    assert repr(TrackedValue(3)) == "TrackedValue(3)"


@pytest.mark.parametrize(
    ("before", "after"),
    [(0.0, -0.0), (Decimal("1.0"), Decimal("1.00")), (Decimal("sNaN"), Decimal("NaN")), (1, True), (1, 1.0)],
)
def test_standalone_objects_tell_equal_values_apart_as_the_store_does(before: Any, after: Any) -> None:
    value, entries = TrackedValue(before), TrackedMap({"a": before})
    value.value = entries["a"] = after
    assert repr(value.changes()) == repr({"put": after})
    assert repr(entries.changes()) == repr({"put": {"a": after}, "deleted": []})
    value, entries = TrackedValue(float("nan")), TrackedMap({"a": float("nan")})
    value.value = entries["a"] = float("nan")
    assert (value.changes(), entries.changes()) == ({}, {"put": {}, "deleted": []})


def test_a_builtin_on_the_left_decides_the_type() -> None:
    words, tracked = defaultdict(list, a=[1]), TrackedMap({"b": [2]})
    for left in (words, OrderedDict(words), dict(words)):
        made = left | tracked
        assert (type(made), made) == (type(left), left | dict(tracked))
    for kind in (set, frozenset):
        some, members = kind([1, 2]), TrackedSet([2, 3])
        for found, expected in [
            (some | members, kind([1, 2, 3])),
            (some & members, kind([2])),
            (some - members, kind([1])),
            (some ^ members, kind([1, 3])),
        ]:
            assert (type(found), found) == (kind, expected)
            assert type(members | some) is set
    assert {1: 2}.keys() - TrackedSet([1]) == set()


@pytest.mark.parametrize(
    ("sign", "set_made", "list_made"),
    [("|", {1, 2, 3}, None), ("&", {2}, None), ("-", {1}, None), ("^", {1, 3}, None), ("+", None, [1, 2, 2, 3])],
)
def test_a_builtin_before_an_augmented_operator_is_changed_itself(sign: str, set_made: Any, list_made: Any) -> None:
    left, right = ({1, 2}, TrackedSet([2, 3])) if set_made is not None else ([1, 2], TrackedList([2, 3]))
    made, scope = set_made or list_made, {"left": left, "right": right, "frozen": frozenset({1, 2})}
    exec(f"made = left {sign} right; kept = list(left); left {sign}= right", scope)
    assert (scope["made"], scope["kept"], scope["left"]) == (made, [1, 2], made)
    assert scope["left"] is left
    assert list(right) == [2, 3]
    if set_made is not None:
        exec(f"before = frozen; frozen {sign}= right", scope)
        assert (scope["frozen"], scope["before"]) == (frozenset(made), frozenset({1, 2}))


def test_a_set_in_a_map_is_extended_by_a_tracked_set() -> None:
    bench = Bench()
    bench.op.s.update("xy")
    members = bench.op.sets.setdefault("g", set())
    members |= bench.op.s
    assert bench.reopened().op.sets["g"] == {"x", "y"}


def test_bound_objects_tell_their_changes(filled: Bench) -> None:
    op = filled.op
    assert (op.n.changes(), op.m.changes(), op.s.changes()) == (
        {},
        {"put": {}, "deleted": []},
        {"added": set(), "removed": set()},
    )
    op.n.value += 1
    op.m["z"] = 1
    del op.m["a"]
    op.s ^= {"a", "q"}
    assert op.n.changes() == {"put": 6}
    assert op.m.changes() == {"put": {"z": 1}, "deleted": ["a"]}
    assert op.s.changes() == {"added": {"q"}, "removed": {"a"}}
    op.n.clear()
    op.m.clear()
    assert op.n.changes() == {"deleted": True}
    assert op.m.changes() == {"put": {}, "deleted": list("abcde")}
    with pytest.raises(RuntimeError):
        op.m.mark_clean()
    with pytest.raises(RuntimeError):
        op.n.mark_clean()


# --- stored layout -------------------------------------------------------------------------------------


def test_expiry_is_read_over_and_newer_formats_are_refused(filled: Bench) -> None:
    cells = filled.store.cells
    for cell, data in cells.items():
        cells[cell] = b"\x81" + bytes(8) + data[1:]
    assert filled.op.n.value == 5
    assert filled.op.m == dict(zip("abcde", range(5), strict=True))
    for cell, data in cells.items():
        cells[cell] = b"\x02" + data[1:]
    fresh = Bench(filled.store)
    with pytest.raises(DecodeError):
        fresh.op.n.value  # noqa: B018
    with pytest.raises(DecodeError):
        len(fresh.op.m)


def test_a_wrong_count_is_found(filled: Bench) -> None:
    del filled.store.cells[next(cell for cell in filled.store.cells if cell.endswith(b"\x00c"))]
    with pytest.raises(DecodeError, match="says 5 entries, but the store holds 4"):
        list(filled.op.m)
