"""Odd keys, odd values, sizes, damaged cells, and the cache's limit in bytes."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from decimal import Decimal
from typing import Any

import pytest

from stateflow import state
from stateflow.errors import DecodeError, EncodeError
from stateflow.state import CachePool, TrackedList, TrackedMap, TrackedSet, cache, scan_state
from stateflow.state.cache import weight_of
from stateflow.state.declare import coder_for
from tests.unit.state.bench import Bench


class Op:
    n = state.value(int, default=0)
    text = state.value(str)
    log = state.value(list)
    m = state.map(str, str)
    f = state.map(float, int)
    d = state.map(Decimal, int)
    ds = state.set(Decimal)
    pairs = state.map(tuple[int, float], int)
    runs = state.set(tuple[int, ...])
    li = state.list(bytes)
    any = state.map(str, Any)
    flags = state.list(bool)
    words = state.list(str)


# --- keys ----------------------------------------------------------------------------------------------


def test_an_equal_tuple_finds_the_entry_before_all_is_loaded() -> None:
    bench = Bench(Op)
    bench.op.pairs[1, 2] = 3
    bench.op.pairs[2, 2.5] = 4
    bench.op.runs.add((1, 2))
    bench.op.runs.add(())
    for key in ((1, 2.0), (1.0, 2), (True, Decimal(2)), (Decimal(1), 2)):
        fresh = bench.reopened()
        assert fresh.op.pairs[key] == 3
        assert key in fresh.op.runs
        fresh.op.pairs[key] = 5
        del fresh.op.pairs[key]
        assert fresh.op.pairs == {(2, 2.5): 4}
    for key in ((1.5, 2), ("1", 2), (1,), (1, None), 1):
        assert bench.reopened().op.pairs.get(key) is None
    with pytest.raises(EncodeError):
        bench.op.pairs[1.0, 7] = 1  # a new key has to fit
    assert coder_for(tuple[tuple[int, str], int]).find_key(((1.0, "a"), True)) == ((1, "a"), 1)


def test_a_signalling_nan_is_refused_as_nan_is() -> None:
    bench = Bench(Op)
    signal = Decimal("sNaN")
    for put in (
        lambda: bench.op.d.__setitem__(signal, 1),
        lambda: bench.op.d.setdefault(signal, 1),
        lambda: bench.op.d.update([(signal, 1)]),
        lambda: bench.op.ds.add(signal),
        lambda: bench.op.m.__setitem__((signal,), "a"),
    ):
        with pytest.raises(EncodeError, match="operator=op state="):
            put()
    with pytest.raises(TypeError):  # as dict does
        signal in bench.op.d  # noqa: B015


def test_a_removed_entry_stays_removed_under_an_int_too_large_for_a_float() -> None:
    """A removed entry stays removed under an int too large for a float.

    2**60 + 1 has the bytes of 2.0**60, to which it is not equal.
    """
    bench = Bench(Op)
    bench.op.f.update({2.0**60: 1, 1.0: 2})
    fresh = bench.reopened()
    assert 2**60 + 1 not in fresh.op.f
    del fresh.op.f[2.0**60]
    assert 2**60 + 1 not in fresh.op.f
    assert 2.0**60 not in fresh.op.f
    assert fresh.op.f == {1.0: 2}
    assert fresh.reopened().op.f == {1.0: 2}


def test_nothing_is_pickled_and_no_second_object_is_made_for_a_cell() -> None:
    bench = Bench(Op)
    bench.op.n.value = 3
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a TrackedValue cannot be pickled or copied: use its value"):
            copied(bench.op.n)
    for tracked in (bench.op.m, bench.op.ds, bench.op.li, TrackedMap(), TrackedSet(), TrackedList()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(tracked)
        assert type(copy.copy(tracked)) in (dict, set, list)
        assert copy.deepcopy(tracked) == copy.copy(tracked)


# --- values --------------------------------------------------------------------------------------------


class Stack(list[Any]):
    pass


class Labels(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"a"),
        [b"a", bytearray(b"b")],
        {"a": {"b": [bytearray()]}},
        (bytearray(b"c"), b"c"),
        [({"x": bytearray(b"\xc4" * 300)},)],
        [bytearray(70_000)],
        ["\u0144", 0xC4, 1.5e300, b"\xc4"],
        Stack([Labels(a=bytearray(b"d"))]),
    ],
)
def test_a_bytearray_comes_back_as_one(value: Any) -> None:
    back = coder_for(Any).decode(coder_for(Any).encode(value))
    assert back == value
    assert repr(back) == repr(value)
    assert coder_for(bytearray).name == "msgpack"


@pytest.mark.parametrize(("before", "after"), [(65, b"A"), (None, b"\xc0"), ([], b"\x90"), ("", b"\xa0")])
def test_bytes_take_the_place_of_a_value_whose_payload_they_equal(before: Any, after: bytes) -> None:
    bench = Bench(Op)
    bench.op.any["a"] = before
    bench.commit()
    bench.op.any["a"] = after
    bench.commit()
    assert bench.reopened().op.any == {"a": after}
    bench.op.any["a"] = before
    bench.commit()
    bench.op.any.clear()
    bench.op.any["a"] = after
    bench.commit()
    assert bench.reopened().op.any == {"a": after}


@pytest.mark.parametrize(("attribute", "before", "after"), [("flags", False, b"\x00"), ("words", "", b"")])
def test_the_payload_of_a_cleared_value_does_not_fit_its_type(attribute: str, before: Any, after: bytes) -> None:
    bench = Bench(Op)
    tracked = getattr(bench.op, attribute)
    tracked.append(before)
    bench.commit()
    tracked.clear()
    tracked.append(after)
    with pytest.raises(EncodeError):
        bench.commit()
    bench.keyed.rollback()
    assert tracked == [before]


def test_a_bytearray_is_changed_in_place() -> None:
    bench = Bench(Op)
    bench.op.log.value = [bytearray(b"a")]
    bench = bench.reopened()
    bench.op.log.value[0] += b"b"
    assert bench.reopened().op.log.value == [bytearray(b"ab")]


@pytest.mark.parametrize("put", ["text", "log", "m", "li"])
def test_a_value_may_be_only_so_large(put: str) -> None:
    bench = Bench(Op, max_value_bytes=100)
    fits: Any = {"text": "x" * 100, "log": [b"x" * 97], "m": "x" * 100, "li": b"x" * 100}
    for more in (0, 1):
        match put:
            case "text":
                bench.op.text.value = fits["text"] + "x" * more
            case "log":
                bench.op.log.value = [fits["log"][0] + b"x" * more]
            case "m":
                bench.op.m["a"] = fits["m"] + "x" * more
            case "li":
                bench.op.li.append(fits["li"] + b"x" * more)
        if more:
            with pytest.raises(EncodeError, match=rf"takes 101 bytes, at most 100 .*operator=op state={put} key=k"):
                bench.keyed.collect()
        else:
            bench.commit()


def test_damaged_cells_are_named() -> None:
    bench = Bench(Op)
    bench.op.n.value = 1
    bench.op.log.value = [1]
    bench.op.f[1.0] = 1
    bench.op.m["a"] = "b"
    bench.commit()
    whole = dict(bench.store.cells)
    for damage in (b"\x01abc\xff", b"\x07abc", b"", b"\x81ab"):
        bench.store.cells.update(dict.fromkeys(whole, damage))
        for name, read in (
            ("n", lambda op: op.n.value),
            ("log", lambda op: op.log.value),
            ("m", len),
            ("f", lambda op: op.f[1.0]),
        ):
            fresh = Bench(Op, bench.store)
            with pytest.raises(DecodeError, match=f"operator=op state={name} key=k"):
                read(fresh.op.m if name == "m" else fresh.op)
    bench.store.cells.update({cell: data for cell, data in whole.items() if cell[:1] == b"n"})
    states: Any = vars(Op)
    for name, read in (("m", list), ("f", lambda m: m[1.0])):
        with pytest.raises(DecodeError, match=f"operator=op state={name} key=k"):
            [*getattr(Bench(Op, bench.store).op, name).values()] if name == "m" else read(Bench(Op, bench.store).op.f)
    with pytest.raises(DecodeError, match="state=m key=k"):
        list(scan_state(states["m"], bench.store))


class Bad(state.Coder[Any]):
    """A user's own coder that cannot decode what it encoded."""

    name = "bad"

    def encode(self, value: Any) -> bytes:
        return b"x"

    def decode(self, data: bytes) -> Any:
        raise KeyError("lost")


def test_a_coder_that_cannot_read_is_named() -> None:
    class Broken:
        v = state.value(object, coder=Bad())

    bench = Bench(Broken)
    bench.op.v.value = 1
    fresh = bench.reopened()
    with pytest.raises(DecodeError, match=r"coder bad failed: KeyError.*state=v key=k"):
        fresh.op.v.value  # noqa: B018


# --- the cache in bytes --------------------------------------------------------------------------------


def test_the_cache_is_bounded_by_bytes() -> None:
    bench = Bench(Op, cache=CachePool(200_000))
    keyed, op = bench.keyed, bench.op
    weights = []
    for number in range(300):
        keyed.bind(op, number)
        op.text.value = "x" * 1000
        op.log.value = [number] * 500
        op.m["a"] = "y" * 2000
        bench.commit()
        weights.append(weight(keyed))
    assert 50_000 < max(weights) <= 200_000
    assert [keyed.peek(number).text.value for number in range(300)] == ["x" * 1000] * 300
    for number in range(300):  # reading alone fills it, too
        keyed.bind(op, number)
        assert op.m == {"a": "y" * 2000}
        keyed.collect()
        keyed.mark_clean()
        assert weight(keyed) <= 200_000 + 20_000


def test_no_batch_looks_at_much_of_a_large_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch looks at a small part of a large cache.

    Weighing everything at once used to stop a replica for 200 ms.
    """
    looked: list[int] = []
    weigh = cache.weight_of
    monkeypatch.setattr(cache, "weight_of", lambda key, bundle: looked.append(1) or weigh(key, bundle))
    limit = 40_000_000
    bench = Bench(Op, cache=CachePool(limit))
    keyed, op = bench.keyed, bench.op
    most = largest = rounds = 0
    for first in range(0, 40_000, 10):
        for number in range(first, first + 10):
            keyed.bind(op, number)
            op.text.value = "x" * 500
        bench.commit()
        most, rounds = max(most, len(looked)), rounds + bool(looked)
        looked.clear()
        if first % 5_000 == 0:
            largest = max(largest, weight(keyed))
    keys = sum(map(len, keyed._caches.values()))
    assert rounds > 50  # the cache was over its limit several times
    assert limit / 2 < largest <= limit
    assert most < keys / 20


def test_a_member_that_joins_makes_nobody_look_at_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new member of the pool does not make the others weigh everything.

    A partition that arrived used to stop all others for half a second, while they halved their caches.
    """
    pool = CachePool(20_000_000)
    bench = Bench(Op, cache=pool)
    keyed, op = bench.keyed, bench.op
    for first in range(0, 10_000, 10):
        for number in range(first, first + 10):
            keyed.bind(op, number)
            op.text.value = "x" * 500
        bench.commit()
    full = weight(keyed)
    assert full > 10_000_000
    looked: list[int] = []
    weigh = cache.weight_of
    monkeypatch.setattr(cache, "weight_of", lambda key, bundle: looked.append(1) or weigh(key, bundle))
    pool.join()
    pool.join()
    most = 0
    for _ in range(100):
        keyed.bind(op, 0)
        op.text.value = "x"
        bench.commit()
        most = max(most, len(looked))
        looked.clear()
    assert most < 1_000
    monkeypatch.undo()
    assert weight(keyed) < pool.share


def test_what_a_closed_partition_leaves_is_freed_in_portions() -> None:
    pool = CachePool(20_000_000)
    bench = Bench(Op, cache=pool)
    for number in range(5_000):
        bench.keyed.bind(bench.op, number)
        bench.op.text.value = "x"
    bench.commit()
    assert pool.objects == 5_001 * (1 + len(bench.keyed._makers))  # the bench begins with a key of its own
    assert weight(bench.keyed) / 2 < pool.bytes < 20_000_000
    left = list(bench.keyed._caches.values())
    bench.keyed.close()
    assert pool.objects > 0, "they are there until they are freed"
    assert pool.bytes == 0, "they count for no partition"
    while pool.has_left:
        before = sum(map(len, left))
        pool.free_some()
        assert 0 < before - sum(map(len, left)) <= 1_000
    assert not any(left)
    assert pool.objects == 0


def test_a_closed_partition_lets_go_of_its_keys_in_the_middle_of_weighing() -> None:
    bench = Bench(Op, cache=CachePool(4_000_000))
    keyed, op = bench.keyed, bench.op
    number = 0
    while keyed._budget is None or keyed._budget._sweep is None:
        keyed.bind(op, number)
        op.text.value = "x" * 500
        bench.commit()
        number += 1
        assert number < 10_000
    budget = weakref.ref(keyed._budget)
    keyed.close()
    gc.collect()
    gc.disable()
    try:
        del bench, keyed, op
        assert budget() is None, "it is in no cycle"
    finally:
        gc.enable()


def test_written_and_held_keys_stay_while_bytes_are_counted() -> None:
    bench = Bench(Op, cache=CachePool(0))
    held = bench.op.text
    held.value = "a"
    assert bench.keyed.peek("k").text is held
    bench.commit()
    held.value = "b"
    bench.keyed.bind(bench.op, "k")
    assert bench.op.text is held
    assert bench.reopened().op.text.value == "b"


def test_weights_are_near_the_truth() -> None:
    bench = Bench(Op)
    bench.op.m.update({f"{number:05}": "v" * 100 for number in range(1000)})
    bench.commit()
    weight_there = weight(bench.keyed)
    truth = sum(sys.getsizeof(key) + sys.getsizeof(value) for key, value in bench.op.m.items())
    assert truth < weight_there < 2 * truth


def weight(keyed: Any) -> int:
    return sum(weight_of(key, bundle) for cache in keyed._caches.values() for key, bundle in cache.items())


# --- small differences from the builtins, and none ------------------------------------------------------


@pytest.mark.parametrize("kind", [list, TrackedList])
def test_a_sort_whose_key_changes_the_list(kind: Any) -> None:
    def changes(item: int) -> int:
        log.append(item)
        return -item

    log = kind([1, 3, 2])
    with pytest.raises(ValueError, match="list modified during sort"):
        log.sort(key=changes)
    assert log == [3, 2, 1]
    with pytest.raises(TypeError):
        kind([1, "a"]).sort()


@pytest.mark.parametrize("kind", [set, TrackedSet])
def test_a_set_is_looked_up_as_the_frozenset_it_equals(kind: Any) -> None:
    inner = kind("ab")
    outer = kind([frozenset("ab"), frozenset("c")])
    assert inner in outer
    outer.discard(inner)
    assert inner not in outer
    outer.remove(kind("c"))
    with pytest.raises(KeyError) as caught:
        outer.remove(inner)
    assert caught.value.args[0] is inner
    with pytest.raises(TypeError, match="unhashable"):
        [] in outer  # noqa: B015


class Clearing:
    """An object that equals any object with its hash, and empties the set when it is compared."""

    def __init__(self) -> None:
        self.set: Any = None

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        if self.set is not None:
            self.set.clear()
        return True


@pytest.mark.parametrize("kind", [set, TrackedSet])
@pytest.mark.parametrize(
    "call",
    [
        lambda s, other: s.discard(other),
        lambda s, other: s.difference_update([other]),
        lambda s, other: s.symmetric_difference_update([other]),
        lambda s, other: s.intersection_update([other]),
        lambda s, other: s.__isub__({other}),
    ],
)
def test_members_whose_comparison_changes_the_set(kind: Any, call: Any) -> None:
    member = Clearing()
    mine = kind([member, 5])
    member.set = mine
    call(mine, Clearing())
    assert len(mine) == len(list(mine))
    assert 5 not in mine


def test_an_iterator_ends_when_the_map_was_emptied_and_filled_anew() -> None:
    tracked = TrackedMap({"a": 1, "b": 2})
    keys = iter(tracked)
    next(keys)
    tracked.clear()
    tracked.update({"c": 3, "d": 4})
    with pytest.raises(RuntimeError, match="changed size during iteration"):
        next(keys)


def test_a_map_that_holds_itself_and_one_made_of_keys_by_a_subclass() -> None:
    tracked = TrackedMap({"a": 1})
    tracked["self"] = tracked
    assert repr(tracked) == "{'a': 1, 'self': {...}}"
    assert repr(tracked.items()) == "dict_items([('a', 1), ('self', {'a': 1, 'self': {...}})])"

    class Named(TrackedMap[str, int]):
        def __init__(self) -> None:
            super().__init__()

    made = Named.fromkeys("ab", 1)
    assert (type(made), made, made.changes()) == (Named, {"a": 1, "b": 1}, {"put": {}, "deleted": []})
