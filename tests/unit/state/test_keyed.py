from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, NamedTuple

import pytest

from stateflow import state
from stateflow.errors import EncodeError, NullKey, SchemaMismatch, UnknownState, UnsupportedKeyType
from stateflow.state import KeyedState, check_schema, declarations_of, scan_state
from tests.unit.state.dict_store import DictStore


class Op:
    n = state.value(int, default=0)
    total = state.value(float, default=0.0)
    m = state.map(str, float)
    s = state.set(int)


STATES = declarations_of(Op)


def keyed(store: DictStore, **sizes: int) -> KeyedState:
    return KeyedState("Delay", STATES, store, **sizes)


def commit(keyed: KeyedState, store: DictStore) -> None:
    store.apply(keyed.collect())
    keyed.mark_clean()


def cached(keyed: KeyedState) -> int:
    return sum(len(cache) for cache in keyed._caches.values())


def test_a_state_belongs_to_its_key() -> None:
    store = DictStore()
    ks, op = keyed(store), Op()
    ks.bind(op, "a")
    of_a = op.n
    ks.bind(op, "b")
    op.n.value += 1
    of_a.value += 5
    assert op.n is not of_a
    commit(ks, store)
    of_a.value += 5
    commit(ks, store)
    assert keyed(store).peek("a").n.value == 10
    assert keyed(store).peek("b").n.value == 1


def test_two_targets() -> None:
    ks, one, other = keyed(DictStore()), Op(), Op()
    ks.bind(one, "a")
    ks.bind(other, "a")
    one.n.value += 1
    assert other.n.value == 1


LOOKALIKES = ["1", 1, 1.0, True, Decimal(1), (1,), (True,), (1.0,), ((1,),), ((True,),), b"1"]


@pytest.mark.parametrize("cached_keys", [0, 1, 3, 100])
def test_lookalike_keys_have_their_own_state(cached_keys: int) -> None:
    store = DictStore()
    ks, op = keyed(store, cached_keys=cached_keys), Op()
    for _ in range(3):
        for number, key in enumerate(LOOKALIKES):
            ks.bind(op, key)
            op.n.value += number
        commit(ks, store)
    assert [ks.peek(key).n.value for key in LOOKALIKES] == [3 * number for number in range(len(LOOKALIKES))]


class Name(str):
    __slots__ = ()


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("one", "same"),
    [(Name("a"), "a"), (Pair("a", 1), ("a", 1)), (Pair(Name("a"), 1.5), ("a", 1.5)), ((Name("a"),), ("a",))],
)
def test_a_subclass_of_a_plain_type_is_the_same_key(one: Any, same: Any) -> None:
    for first, second in ((one, same), (same, one)):
        ks, op = keyed(DictStore()), Op()
        ks.bind(op, first)
        op.n.value += 1
        ks.bind(op, second)
        assert op.n.value == 1


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (None, NullKey),
        (float("nan"), EncodeError),
        ((1, None), NullKey),
        ([1], UnsupportedKeyType),
        (([1],), UnsupportedKeyType),
        (Decimal("sNaN"), EncodeError),
        (object(), UnsupportedKeyType),
    ],
)
def test_bad_keys_bind_nothing(key: Any, error: type[Exception]) -> None:
    ks, op = keyed(DictStore()), Op()
    with pytest.raises(error):
        ks.bind(op, key)
    with pytest.raises(UnknownState):
        op.n  # noqa: B018
    assert cached(ks) == 0


def test_collect_names_the_culprit() -> None:
    ks, op = keyed(DictStore()), Op()
    ks.bind(op, ("N1", 3))
    op.m["JFK"] = "late"  # type: ignore[assignment]
    with pytest.raises(EncodeError) as caught:
        ks.collect()
    where = caught.value.where
    assert (where["operator"], where["state"], where["key"], where["map_key"]) == ("Delay", "m", ("N1", 3), "'JFK'")
    ks.rollback()
    op.n.value = 1.5  # type: ignore[assignment]
    with pytest.raises(EncodeError, match="operator=Delay state=n key="):
        ks.collect()
    ks.rollback()
    assert not ks.collect()


def test_values_are_normalised_after_the_commit() -> None:
    store = DictStore()
    ks, op = keyed(store), Op()
    ks.bind(op, "a")
    op.total.value = 3  # an int in a state of floats
    op.m["x"] = 4
    assert repr(op.total.value) == "3"
    commit(ks, store)
    assert (repr(op.total.value), repr(op.m)) == ("3.0", "{'x': 4.0}")


def test_the_oldest_clean_keys_leave() -> None:
    store = DictStore()
    ks, op = keyed(store, cached_keys=2), Op()
    for key in "abcd":
        ks.bind(op, key)
        op.n.value += 1
    assert cached(ks) == 4  # dirty keys stay cached
    commit(ks, store)
    assert cached(ks) == 2
    assert set(ks._caches[str]) == {"c", "d"}
    ks.bind(op, "c")
    op.n.value += 1
    ks.bind(op, "e")
    commit(ks, store)
    assert set(ks._caches[str]) == {"c", "e"}  # d is older than c, which was written again
    ks.bind(op, "f")
    commit(ks, store)
    assert set(ks._caches[str]) == {"c", "f"}  # and so is e
    assert ks.peek("a").n.value == 1


def test_a_key_somebody_holds_stays() -> None:
    store = DictStore()
    ks, op = keyed(store, cached_keys=1), Op()
    ks.bind(op, "a")
    held = op.n
    for key in "bcdef":
        ks.bind(op, key)
        op.n.value += 1
        commit(ks, store)
    held.value += 1
    ks.bind(op, "a")
    assert op.n is held
    commit(ks, store)
    assert keyed(store).peek("a").n.value == 1


def test_cached_entries_are_bounded() -> None:
    store = DictStore()
    ks, op = keyed(store, cached_entries=100), Op()
    for key in range(10):
        ks.bind(op, key)
        op.m.update({str(number): 1.0 for number in range(50)})
        commit(ks, store)
    loaded = sum(len(ks.peek(key).m._items) for key in range(10))
    assert loaded <= 100
    assert [len(ks.peek(key).m) for key in range(10)] == [50] * 10


def test_invalidate_reads_again() -> None:
    store = DictStore()
    ks, op = keyed(store), Op()
    ks.bind(op, "a")
    op.n.value = 1
    op.m["x"] = 1.0
    commit(ks, store)
    other, there = keyed(store), Op()
    other.bind(there, "a")
    there.n.value = 2
    there.m["y"] = 1.0
    commit(other, store)
    assert op.n.value == 1
    ks.invalidate()
    assert op.n.value == 2
    assert list(op.m) == ["x", "y"]
    ks.bind(op, "a")
    assert op.n.value == 2


def test_rollback_restores() -> None:
    store = DictStore()
    ks, op = keyed(store), Op()
    ks.bind(op, "a")
    op.n.value = 1
    op.m["x"] = 1.0
    op.s.add(1)
    commit(ks, store)
    op.n.value = 2
    op.m.clear()
    op.m["y"] = 2.0
    op.s |= {2, 3}
    ks.collect()
    ks.rollback()
    assert (op.n.value, op.m, op.s) == (1, {"x": 1.0}, {1})
    assert not ks.collect()


def test_mark_clean_collects_when_nobody_did() -> None:
    ks, op = keyed(DictStore()), Op()
    ks.bind(op, "a")
    op.n.value = 2
    ks.mark_clean()
    assert op.n.value == 2
    assert not ks.collect()


def test_schema() -> None:
    ks = keyed(DictStore())
    stored = json.loads(json.dumps(ks.schema()))
    assert [each["name"] for each in stored] == ["m", "n", "s", "total"]
    check_schema(stored, ks.schema(), "Delay")
    check_schema(stored[1:], ks.schema(), "Delay")
    check_schema(stored, ks.schema()[1:], "Delay")

    class Other:
        n = state.map(str, int)

    with pytest.raises(SchemaMismatch, match=r"'n' is stored as value\(int64\) but declared as map\(utf8, int64\)"):
        check_schema(stored, KeyedState("Delay", declarations_of(Other), DictStore()).schema(), "Delay")


def test_scan_state() -> None:
    store = DictStore()
    ks, op = keyed(store), Op()
    for key in ("a", ("b", 2), 3):
        ks.bind(op, key)
        op.n.value += 1
        op.m.update(x=1.0, y=2.0)
        op.s.add(7)
    commit(ks, store)

    def scanned(name: str) -> list[Any]:
        return sorted(scan_state(STATES[name], store), key=repr)

    assert scanned("n") == [("a", None, 1), (("b", 2), None, 1), (3, None, 1)]
    assert scanned("m")[:2] == [("a", "x", 1.0), ("a", "y", 2.0)]
    assert len(scanned("m")) == 6
    assert scanned("s")[-1] == (3, 7, None)


def test_keys_of_any_length() -> None:
    store = DictStore()
    ks, op = keyed(store), Op()
    for length in (0, 126, 127, 128, 20_000):
        ks.bind(op, "k" * length)
        op.n.value = length
        op.m["x"] = float(length)
    commit(ks, store)
    fresh = keyed(store)
    assert all(fresh.peek("k" * length).m == {"x": length} for length in (0, 126, 127, 128, 20_000))
    assert sorted(key.count("k") for key, _, _ in scan_state(STATES["n"], store)) == [0, 126, 127, 128, 20_000]


class Odd(state.Coder[Any]):
    """A user's own coder whose encode fails."""

    name = "odd"

    def encode(self, value: Any) -> bytes:
        raise TypeError("boom")

    def decode(self, data: bytes) -> Any:
        return data


def test_a_broken_coder_is_named() -> None:
    class Broken:
        v = state.value(object, coder=Odd())

    ks, op = KeyedState("Delay", declarations_of(Broken), DictStore()), Broken()
    ks.bind(op, "a")
    op.v.value = 1
    with pytest.raises(EncodeError, match="coder odd failed: TypeError"):
        ks.collect()


@pytest.mark.parametrize("keys", [["a", "b", "a"], [1, 2, 1], [("a", 1), ("b", 2), ("a", 1)], [True, False, True]])
def test_the_keys_of_a_batch_at_once(keys: list[Any]) -> None:
    ks, op = keyed(DictStore()), Op()
    assert ks.bundles(keys) == [None, None, None], "none of them is cached"
    ks.bind(op, keys[0])
    first, other, again = ks.bundles(keys)
    assert first is again
    assert first is ks.bundle_of(keys[0])
    assert first["n"] is op.n
    assert other is None


@pytest.mark.parametrize("keys", [[1, True], [(1,), (True,)], [(1,), (1.0,)], [Decimal("sNaN")], [[]], []])
def test_keys_that_do_not_tell_themselves_apart_are_looked_up_one_by_one(keys: list[Any]) -> None:
    ks = keyed(DictStore())
    ks.bundle_of(1)
    ks.bundle_of((1,))
    assert ks.bundles(keys) == [None] * len(keys)


def test_without_a_key_there_is_no_state() -> None:
    ks, op = keyed(DictStore()), Op()
    op.__dict__.update(ks.bundle_of("a"))
    assert op.n.value == 0
    ks.unbind(op)
    assert not op.__dict__
