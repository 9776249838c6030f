from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from stateflow import state
from stateflow.errors import (
    DeclarationError,
    DecodeError,
    EncodeError,
    InvalidArgument,
    NullKey,
    SchemaMismatch,
    UnsupportedKeyType,
)
from stateflow.state import (
    KeyedState,
    Namespace,
    coders,
    declarations_of,
    encoding,
    scan_entries,
    scan_state,
    stored_tags,
)
from stateflow.state.cells import pack_cell
from tests.unit.state.bench import Bench

ONE = Namespace.window(0, 10)
TWO = Namespace.window(5, 15)


class Op:
    n = state.value(int, default=0)
    m = state.map(str, int)


COUNT: Any = state.counter(name="count")
WORDS: Any = state.list(str, name="words")
SAME_NAME: Any = state.map(str, int, name="count")


def test_namespaces_are_apart() -> None:
    bench = Bench(Op)
    keyed = bench.keyed
    for number, space in enumerate((b"", ONE, TWO, Namespace.named("x"))):
        keyed.at("k", space, COUNT).add(number)
        keyed.at("k", space, SAME_NAME)["a"] = number
        keyed.at("k", space, Op.n).value = number
    assert bench.op.n.value == 0
    assert keyed.at("k", ONE, COUNT) is keyed.at("k", ONE, COUNT)
    fresh = bench.reopened().keyed
    assert fresh.at("k", TWO, COUNT).value == 2
    assert fresh.at("k", TWO, SAME_NAME) == {"a": 2}
    assert fresh.at("k", Namespace.named("x"), Op.n).value == 3
    assert fresh.at("other", TWO, COUNT).value == 0
    assert list(scan_state(COUNT, bench.store)) == [("k", None, 0)]
    assert [each.namespace for each in scan_entries(COUNT, bench.store)] == [b"", Namespace.named("x"), ONE, TWO]
    assert list(scan_state(COUNT, bench.store, namespace=TWO)) == [("k", None, 2)]


def test_the_operators_own_states_in_the_global_namespace_are_those_of_bind() -> None:
    bench = Bench(Op)
    assert bench.keyed.at("k", b"", Op.n) is bench.op.n
    assert bench.keyed.at("k", Namespace(), Op.m) is bench.op.m
    assert bench.keyed.at("z", b"", Op.n) is bench.keyed.peek("z").n


def test_they_are_part_of_the_batch() -> None:
    bench = Bench(Op)
    bench.keyed.at("k", ONE, WORDS).append("a")
    bench.keyed.rollback()
    assert not bench.keyed.collect()
    bench.keyed.at("k", ONE, WORDS).append("b")
    bench.commit()
    held = bench.keyed.at("k", ONE, WORDS)
    bench.keyed.invalidate()
    assert held == ["b"]
    assert bench.keyed.at("k", ONE, WORDS) is held


def test_they_leave_the_cache_too() -> None:
    bench = Bench(Op, cached_keys=2)
    for number in range(10):
        bench.keyed.at("k", Namespace.window(number, number), COUNT).add()
        bench.commit()
    assert sum(map(len, bench.keyed._caches.values())) <= 3
    assert bench.keyed.at("k", Namespace.window(3, 3), COUNT).value == 1


def test_a_namespace_is_cleared_whole() -> None:
    bench = Bench(Op)
    for space in (ONE, TWO):
        bench.keyed.at("k", space, COUNT).add()
        bench.keyed.at("k", space, WORDS).extend("ab")
        bench.keyed.at("k", space, Op.m)["a"] = 1
    bench.op.m["a"] = 1
    fresh = bench.reopened()
    fresh.keyed.at("k", ONE, WORDS).append("c")
    fresh.keyed.clear_namespace("k", ONE)  # this process does not know COUNT
    fresh.keyed.clear_namespace("k", ONE)
    fresh.commit()
    assert {each.namespace for tag in (COUNT, WORDS, Op.m) for each in scan_entries(tag, fresh.store)} == {b"", TWO}
    assert fresh.keyed.at("k", ONE, COUNT).value == 0
    fresh.keyed.clear_namespace("k", b"")
    assert fresh.op.m == {}
    fresh.keyed.rollback()
    assert fresh.op.m == {"a": 1}


def test_a_tag_that_is_met_after_the_clear_is_empty() -> None:
    bench = Bench(Op)
    bench.keyed.at("k", ONE, WORDS).extend("ab")
    fresh = bench.reopened()
    fresh.keyed.clear_namespace("k", ONE)
    words = fresh.keyed.at("k", ONE, WORDS)
    assert words == []
    words.append("a")
    assert fresh.reopened().keyed.at("k", ONE, WORDS) == ["a"]


def test_tags_made_at_run_time_are_written_down_once() -> None:
    bench = Bench(Op)
    bench.keyed.at("k", ONE, COUNT).value  # noqa: B018
    assert not bench.commit()
    bench.keyed.at("k", ONE, COUNT).add()
    assert len(bench.commit().puts) == 2
    bench.keyed.at("k", ONE, COUNT).add()
    assert len(bench.commit().puts) == 1
    assert stored_tags(bench.store) == {COUNT.tag: COUNT.describe()}
    other = bench.reopened()
    other.keyed.at("k", ONE, COUNT).add()
    assert len(other.commit().puts) == 1
    del other.store.cells[b"r" + COUNT.tag]
    other.keyed.invalidate()
    other.keyed.at("k", ONE, COUNT).add()
    assert len(other.commit().puts) == 2


# --- after a restart, before they are used again -----------------------------------------------------


class Mine(coders.Utf8):
    """A coder that a process without its declaration does not have."""

    name = "mine"


SECOND = 1_000_000
BRIEF: Any = {
    "value": state.value(str, name="v", ttl=10, coder=Mine()),
    "counter": state.counter(name="c", ttl=10),
    "reducing": state.reducing(list, lambda a, b: a + b, name="r", ttl=10),
    "map": state.map(str, int, name="m", ttl=10, key_coder=Mine()),
    "set": state.set(tuple[str, int], name="s", ttl=10),
    "list": state.list(dict, name="l", ttl=10),
    "event": state.map(str, int, name="e", ttl=10, ttl_domain="event"),
}


def fill(keyed: KeyedState, number: int) -> None:
    keyed.at("k", ONE, BRIEF["value"]).value = f"v{number}"
    keyed.at("k", ONE, BRIEF["counter"]).add(number)
    keyed.at("k", ONE, BRIEF["reducing"]).add([number])
    for kind in ("map", "event"):
        keyed.at("k", ONE, BRIEF[kind])[f"m{number}"] = number
    keyed.at("k", ONE, BRIEF["set"]).add(("s", number))
    keyed.at("k", ONE, BRIEF["list"]).append({"n": number})


def swept(bench: Bench, now: int, event: int | None = None) -> dict[bytes, bytes]:
    """Returns the cells that are left after a sweep by a process that has not met any of the states."""
    fresh = bench.reopened(now)
    fresh.keyed.set_time(now, event)
    assert fresh.keyed.expires
    fresh.store.apply(fresh.keyed.expired(100))
    fresh.keyed.mark_clean()
    return {cell: data for cell, data in fresh.store.cells.items() if cell[:1] in b"cn"}


def test_states_made_at_run_time_are_swept_before_they_are_used_again() -> None:
    bench = Bench(Op)
    fill(bench.keyed, 1)
    bench.at(5 * SECOND, event=5 * SECOND)
    for kind in ("map", "set", "list"):
        assert len(bench.keyed.at("k", ONE, BRIEF[kind])) == 1
    fill(bench.keyed, 2)
    whole = len(swept(bench, 5 * SECOND))
    assert whole == len(swept(bench, 10 * SECOND - 1))
    left = swept(bench, 10 * SECOND, event=10 * SECOND)
    assert len(left) == whole - 3, "the older entry of map, set and list"
    other = bench.reopened(10 * SECOND)
    assert other.keyed.at("k", ONE, BRIEF["map"]) == {"m2": 2}
    assert other.keyed.at("k", ONE, BRIEF["set"]) == {("s", 2)}
    assert other.keyed.at("k", ONE, BRIEF["list"]) == [{"n": 2}]
    assert other.keyed.at("k", ONE, BRIEF["counter"]).value == 3
    assert not other.keyed.collect()
    swept(bench, 15 * SECOND, event=10 * SECOND)
    assert bench.reopened(15 * SECOND).keyed.at("k", ONE, BRIEF["event"]) == {"m1": 1, "m2": 2}
    assert not swept(bench, 15 * SECOND, event=25 * SECOND)


def test_a_state_that_is_met_in_the_batch_that_cleared_or_swept_it() -> None:
    bench = Bench(Op)
    fill(bench.keyed, 1)
    fresh = bench.reopened(SECOND)
    fresh.keyed.clear_namespace("k", ONE)
    fill(fresh.keyed, 2)
    assert fresh.keyed.at("k", ONE, BRIEF["map"]) == {"m2": 2}
    assert fresh.keyed.at("k", ONE, BRIEF["value"]).value == "v2"
    again = fresh.reopened(2 * SECOND)
    again.keyed.expired(100)
    assert again.keyed.at("k", ONE, BRIEF["counter"]).value == 2
    again.keyed.rollback()
    again.keyed.clear_namespace("k", ONE)
    again.keyed.rollback()
    assert again.keyed.at("k", ONE, BRIEF["list"]) == [{"n": 2}]
    again.keyed.invalidate()
    again.keyed.set_time(3 * SECOND)
    assert again.keyed.at("k", ONE, BRIEF["set"]) == {("s", 2)}


def test_another_ttl_is_written_down_too() -> None:
    bench = Bench(Op)
    bench.keyed.at("k", ONE, state.map(str, int, name="t", ttl=10))["a"] = 1
    lasting = bench.reopened(SECOND)
    forever: Any = state.map(str, int, name="t")
    lasting.keyed.at("k", ONE, forever)["b"] = 2
    assert stored_tags(lasting.reopened(SECOND).store) == {forever.tag: forever.describe()}
    fresh = lasting.reopened(2 * SECOND)
    assert not fresh.keyed.expires
    assert not fresh.keyed.expired(100)
    assert fresh.keyed.at("k", ONE, forever) == {"a": 1, "b": 2}


def test_a_damaged_description_is_an_error() -> None:
    bench = Bench(Op)
    bench.store.cells[b"r12345678"] = pack_cell(encoding.dumps({"name": "n"}))
    with pytest.raises(DecodeError, match="made at run time cannot be read"):
        bench.reopened()


@pytest.mark.parametrize("name", ["\ud800", 7, None])
def test_what_cannot_name_a_namespace(name: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot name a namespace"):
        Namespace.named(name)
    with pytest.raises(InvalidArgument, match="cannot name a namespace"):
        Namespace.window(0, 1, of=name)


@pytest.mark.parametrize("namespace", ["mon", 7, [b"mon"]])
def test_what_is_no_namespace_is_refused(namespace: Any) -> None:
    bench = Bench(Op)
    with pytest.raises(InvalidArgument, match=r"not a namespace: make one: Namespace.named"):
        bench.keyed.at("k", namespace, COUNT)
    with pytest.raises(InvalidArgument, match="not a namespace"):
        bench.keyed.clear_namespace("k", namespace)


def test_what_is_no_tag_is_refused() -> None:
    bench = Bench(Op)
    for wrong in (state.counter(), bench.op.n, "count"):
        with pytest.raises(DeclarationError, match="not a tag"):
            bench.keyed.at("k", ONE, wrong)
    bench.keyed.at("k", ONE, state.value(int, default=1, name="d"))
    with pytest.raises(DeclarationError, match="declared twice"):
        bench.keyed.at("k", ONE, state.value(int, default=2, name="d"))
    with pytest.raises(DeclarationError, match="declared twice"):
        bench.keyed.at("k", ONE, state.value(int, name="n", default=0, ttl=5))
    for key, error in ((None, NullKey), (float("nan"), EncodeError), ([], UnsupportedKeyType)):
        with pytest.raises(error):
            bench.keyed.at(key, ONE, COUNT)


@pytest.mark.parametrize(
    ("first", "second"),
    [(list[int], dict[str, int]), (list[int], list), (list, list[int]), (list[int], list[float])],
    ids=["other", "any", "from any", "wider"],
)
def test_two_tags_of_one_name_and_other_types_are_refused(first: Any, second: Any) -> None:
    bench = Bench(Op)
    bench.keyed.at("k", ONE, state.value(first, name="t")).value = None
    bench.keyed.at("k", ONE, state.value(first, name="t"))
    with pytest.raises(DeclarationError, match="'t' is declared twice, with different types"):
        bench.keyed.at("k", ONE, state.value(second, name="t"))
    bench.keyed.at("k", ONE, state.map(str, second, name="t"))
    assert bench.keyed.at("k", ONE, state.value(int, name="t")).value is None, "no container, so it is apart"


@pytest.mark.parametrize("timed", [False, True], ids=["first use", "after a stand-in"])
def test_a_tag_stored_with_other_types_is_refused_before_it_is_used(timed: bool) -> None:
    bench = Bench(Op)
    bench.keyed.at("k", ONE, state.value(list[int], name="t")).value = [1]
    bench.commit()
    for other in (dict[str, int], list[str]):
        keyed = KeyedState("op", declarations_of(Op), bench.store)
        if timed:
            keyed.set_time(1)
        for _ in range(2):
            with pytest.raises(SchemaMismatch, match=r"stored as value\(list\[int\]\)") as caught:
                keyed.at("k", ONE, state.value(other, name="t"))
            assert "another name=" in caught.value.remedy
        assert not keyed.collect()
        keyed.mark_clean()
        assert keyed.at("k", ONE, state.value(list[int], name="t")).value == [1]


def test_a_tag_stored_with_narrower_numbers_is_read() -> None:
    bench = Bench(Op)
    bench.keyed.at("k", ONE, state.value(list[int], name="t")).value = [1]
    floats: Any = state.value(list[float], name="t")
    fresh = bench.reopened()
    assert fresh.keyed.at("k", ONE, floats).value == [1]
    fresh.keyed.at("k", ONE, floats).value.append(0.5)
    assert fresh.reopened().keyed.at("k", ONE, floats).value == [1.0, 0.5]


def test_errors_name_the_namespace() -> None:
    bench = Bench(Op)
    bench.keyed.at("k", ONE, Op.n).value = "x"
    with pytest.raises(EncodeError, match=r"state=n key=k namespace=Namespace.window\(0, 10\)"):
        bench.keyed.collect()


def test_windows_sort_by_end_then_start() -> None:
    windows = [(0, 10), (5, 10), (-5, 11), (-20, -10), (0, 0)]
    spaces = [Namespace.window(*each) for each in windows]
    assert [each.bounds for each in sorted(spaces)] == sorted(windows, key=lambda each: (each[1], each[0]))
    at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert Namespace.window(0, at) == Namespace.window(0, 1_000_000)
    assert Namespace.named("w") != Namespace.window(0, 0)
    assert (Namespace.named("é").name, Namespace.named("é").bounds, ONE.name) == ("é", None, None)
    of = Namespace.window(-5, 5, "hourly")
    assert (of.bounds, of.name, repr(of)) == ((-5, 5), "hourly", "Namespace.window(-5, 5, 'hourly')")
    assert [repr(each) for each in (Namespace(), ONE, Namespace.named("x"), Namespace(b"\0"))] == [
        "Namespace()",
        "Namespace.window(0, 10)",
        "Namespace.named('x')",
        "Namespace(b'\\x00')",
    ]
    with pytest.raises(InvalidArgument):
        Namespace.window(10, 0)
    with pytest.raises(InvalidArgument):
        Namespace.window(0, 2**63)
