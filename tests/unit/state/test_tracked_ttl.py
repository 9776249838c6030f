"""States with a ttl, where the state machines do not look: cells, store accesses, declarations, odd times."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from stateflow import state
from stateflow.errors import DeclarationError, DecodeError
from stateflow.state import KeyedState, declarations_of, scan_state
from stateflow.state.cells import unpack_cell_with_expiry
from tests.unit.state.bench import Bench
from tests.unit.state.dict_store import DictStore

SECOND = 1_000_000


class Op:
    last = state.value(int, default=-1, ttl=10)
    kept = state.value(int, ttl=10, ttl_refresh="read_write")
    m = state.map(str, int, ttl=10)
    kept_m = state.map(str, int, ttl=10, ttl_refresh="read_write")
    s = state.set(str, ttl=10)
    kept_s = state.set(str, ttl=10, ttl_refresh="read_write")
    numbers = state.map(int, int, ttl=10, ttl_refresh="read_write")
    pairs = state.set(tuple[int, str], ttl=10, ttl_refresh="read_write")
    log = state.list(int, ttl=10)
    event = state.value(int, ttl=10, ttl_domain="event")
    always = state.value(int)


class Lasting:
    """The same states without a ttl."""

    last = state.value(int, default=-1)
    m = state.map(str, int)
    log = state.list(int)


def expiries(bench: Bench, name: str) -> list[int | None]:
    head = b"c" + getattr(bench.operator, name).tag
    return [unpack_cell_with_expiry(data)[1] for cell, data in sorted(bench.store.cells.items()) if cell[:9] == head]


def test_what_is_old_is_gone_at_once() -> None:
    bench = Bench(Op)
    op = bench.op
    op.last.value = 1
    op.m["a"] = 1
    op.s.add("a")
    op.log += [1, 2]
    op.always.value = 1
    op = bench.at(5 * SECOND)
    op.m["b"] = 2
    op.log.append(3)
    bench.at(10 * SECOND - 1)
    assert (op.last.value, op.m, op.s, op.log) == (1, {"a": 1, "b": 2}, {"a"}, [1, 2, 3])
    bench.at(10 * SECOND)
    assert (op.last.value, op.m, op.s, op.log, op.always.value) == (-1, {"b": 2}, set(), [3], 1)
    assert (len(op.m), len(op.s), len(op.log), op.log[0]) == (1, 0, 1, 3)
    assert len(bench.keyed.collect().deletes) == 1 + 1 + 2 + 2  # last, m, s with its count, log
    bench.keyed.rollback()
    assert op.m == {"b": 2}
    fresh = bench.reopened(10 * SECOND)
    assert (fresh.op.log, len(fresh.op.m)) == ([3], 1)


def test_the_same_value_again_lives_longer_and_reading_does_not() -> None:
    bench = Bench(Op)
    bench.op.last.value = 1
    bench.op.m["a"] = 1
    bench.at(4 * SECOND)
    assert (bench.op.last.value, bench.op.m["a"]) == (1, 1)
    assert not bench.commit()
    bench.op.last.value = 1
    bench.op.m["a"] = 1
    assert len(bench.commit().puts) == 2
    assert expiries(bench, "last") == expiries(bench, "m") == [14 * SECOND]


def test_reads_that_count_are_written_once_a_tenth_of_the_ttl_has_passed() -> None:
    bench = Bench(Op)
    bench.op.kept.value = 1
    bench.op.kept_m.update(a=1, b=2)
    bench.at(SECOND)
    assert (bench.op.kept.value, bench.op.kept_m["a"]) == (1, 1)
    assert not bench.commit()
    bench.at(SECOND + 1)
    assert (bench.op.kept.value, bench.op.kept_m["a"], len(bench.op.kept_m)) == (1, 1, 2)
    assert len(bench.commit().puts) == 2
    assert expiries(bench, "kept_m") == [11 * SECOND + 1, 10 * SECOND]
    assert list(bench.at(5 * SECOND).kept_m) == ["a", "b"]
    assert len(bench.commit().puts) == 2


def test_a_read_by_an_equal_key_of_another_type_renews_the_entry() -> None:
    bench = Bench(Op)
    bench.op.numbers[1] = bench.op.numbers[2] = 10
    bench.op.pairs.add((1, "a"))
    op = bench.at(5 * SECOND)
    assert (op.numbers[1.0], op.numbers.get(Decimal(2)), (True, "a") in op.pairs) == (10, 10, True)
    assert len(bench.commit().puts) == 3
    assert expiries(bench, "numbers") == [15 * SECOND] * 2
    assert expiries(bench, "pairs") == [15 * SECOND]
    op = bench.at(12 * SECOND)
    assert (op.numbers[True], op.numbers[2]) == (10, 10)
    op.numbers[1.0] = 10
    op.pairs.add((1.0, "a"))
    bench.commit()
    assert (bench.reopened(20 * SECOND).op.numbers, bench.op.pairs) == ({1: 10, 2: 10}, {(1, "a")})


def test_taking_the_last_entry_renews_no_other() -> None:
    bench = Bench(Op)
    bench.op.kept_m.update(a=1, b=2)
    bench.op.kept_s.update("ab")
    op = bench.at(5 * SECOND)
    assert (op.kept_m.popitem(), op.kept_s.pop()) == (("b", 2), "b")
    bench.commit()
    assert expiries(bench, "kept_m") == expiries(bench, "kept_s") == [10 * SECOND]
    op = bench.at(10 * SECOND)
    assert (op.kept_m, op.kept_s) == ({}, set())


def test_event_time_starts_with_the_first_watermark() -> None:
    bench = Bench(Op)
    bench.op.event.value = 1
    op = bench.at(10**15)
    assert op.event.value == 1
    assert expiries(bench, "event") == [None]
    bench.keyed.set_time(10**15, 5 * SECOND)
    assert op.event.value == 1
    bench.store.apply(bench.keyed.expired(100))  # the sweep gives the value an expiry
    bench.keyed.mark_clean()
    assert expiries(bench, "event") == [15 * SECOND]
    bench.keyed.set_time(10**15, 15 * SECOND)
    assert op.event.value is None


def test_time_does_not_go_back() -> None:
    bench = Bench(Op)
    bench.op.last.value = 1
    assert bench.at(20 * SECOND).last.value == -1
    bench.keyed.rollback()
    assert bench.at(SECOND).last.value == -1


def test_a_ttl_needs_the_time() -> None:
    keyed, op = KeyedState("op", declarations_of(Op), DictStore()), Op()
    keyed.bind(op, "k")
    op.always.value = 1
    keyed.collect()
    keyed.mark_clean()
    op.m["a"] = 1
    with pytest.raises(RuntimeError, match="set_time"):
        keyed.collect()


def test_the_sweep_goes_on_where_it_stopped() -> None:
    bench = Bench(Op)
    for number in range(20):
        bench.keyed.bind(bench.op, number)
        bench.op.last.value = number
        bench.op.m["a"] = 1
    bench.at(5 * SECOND)
    bench.keyed.bind(bench.op, 3)
    bench.op.last.value = 7
    bench.at(11 * SECOND)
    deleted = []
    for _ in range(10):
        mutations = bench.keyed.expired(5)
        deleted.append(len([cell for cell in mutations.deletes if cell[:1] == b"c"]))
        bench.store.apply(mutations)
        bench.keyed.mark_clean()
    assert (max(deleted), sum(deleted)) == (5, 39)
    assert len(bench.store.cells) == 1
    assert bench.keyed.peek(3).last.value == 7


def test_a_sweep_that_finds_as_much_to_do_as_it_may_is_behind() -> None:
    """Cells from before the ttl count as well: they get their expiry when the sweep meets them."""
    before = Bench(Lasting)
    for number in range(8):
        before.keyed.bind(before.op, number)
        before.op.last.value = number
    before.commit()
    bench, found = Bench(Op, before.store), []
    for now in (0, 0, 10 * SECOND, 10 * SECOND):
        bench.keyed.set_time(now)
        bench.store.apply(bench.keyed.expired(8))
        bench.keyed.mark_clean()
        found.append(bench.keyed.sweep_is_behind)
    assert found == [True, False, True, False]
    assert not bench.store.cells


def test_the_sweep_names_a_damaged_cell() -> None:
    bench = Bench(Op)
    bench.op.m["a"] = 1
    bench.commit()
    bench.store.cells.update({cell: b"\x81ab" for cell in bench.store.cells if cell[:1] == b"c"})
    with pytest.raises(DecodeError, match=r"operator=op state=m key=k entry=61"):
        bench.keyed.expired(5)


def test_the_sweep_within_a_batch_yields_to_its_writes() -> None:
    bench = Bench(Op)
    bench.op.m.update(a=1, b=2)
    bench.at(10 * SECOND)
    bench.op.m["a"] = 3
    bench.keyed.expired(100)
    assert bench.op.m == {"a": 3}
    assert bench.reopened(10 * SECOND).op.m == {"a": 3}


def test_a_ttl_may_come_and_go() -> None:
    bench = Bench(Lasting)
    bench.op.last.value = 1
    bench.op.m["a"] = 1
    bench.op.log += [1, 2, 3]
    bench.commit()
    bench = Bench(Op, bench.store, 10**12)
    assert (bench.op.last.value, bench.op.m, bench.op.log) == (1, {"a": 1}, [1, 2, 3])  # entries without an expiry stay
    bench.op.m["b"] = 2
    bench.op.log[1] = 9
    bench.op.log.append(4)
    bench.at(10**12 + 10 * SECOND)
    assert (bench.op.m, bench.op.log) == ({"a": 1}, [1, 3])
    bench.op.log.append(5)
    bench.op.m["c"] = 3
    bench.commit()
    lasting = Bench(Lasting, bench.store)  # holes in the list stay, unseen
    assert (lasting.op.m, lasting.op.log, len(lasting.op.log)) == ({"a": 1, "c": 3}, [1, 3, 5], 3)
    lasting.op.log.insert(1, 2)
    lasting.op.log.pop()
    lasting.op.log[0:0] = [7, 8]
    assert lasting.reopened().op.log == [7, 8, 1, 2, 3]
    lasting = lasting.reopened()
    assert lasting.op.log.pop(1) == 8
    assert lasting.op.log.changes() == {"put": {}, "deleted": [1]}


def test_a_scan_with_the_time_leaves_out_what_is_gone() -> None:
    bench = Bench(Op)
    bench.op.log += [1, 2]
    bench.op.m["a"] = 1
    bench.at(5 * SECOND).log.append(3)
    bench.commit()
    states: Any = declarations_of(Op)
    assert [each[1:] for each in scan_state(states["log"], bench.store)] == [(0, 1), (1, 2), (2, 3)]
    assert [each[1:] for each in scan_state(states["log"], bench.store, processing_us=10 * SECOND)] == [(0, 3)]
    assert not list(scan_state(states["m"], bench.store, processing_us=10 * SECOND))
    assert list(scan_state(states["m"], bench.store, event_us=10 * SECOND)) == [("k", "a", 1)]


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), "10", True, timedelta(0), 1e-9])
def test_a_ttl_is_a_positive_time(ttl: Any) -> None:
    with pytest.raises(DeclarationError):
        state.value(int, ttl=ttl)


def test_ttl_declarations() -> None:
    declared: Any = state.list(int, ttl=timedelta(minutes=1), ttl_domain="event", ttl_refresh="read_write", name="n")
    assert declared.describe()["ttl"] == {"us": 60 * SECOND, "domain": "event", "refresh": "read_write"}
    assert declared.tag == state.list(int, name="n").tag  # type: ignore[attr-defined]
    assert "ttl" not in state.counter(name="n").describe()  # type: ignore[attr-defined]
    for wrong in ({"ttl_domain": "wall"}, {"ttl_refresh": "read"}):
        with pytest.raises(DeclarationError):
            state.counter(**wrong)  # type: ignore[arg-type]


def test_refreshing_forever_keeps_no_history() -> None:
    bench = Bench(Op)
    for second in range(500):
        bench.at(second * SECOND).m.update(a=second, b=second)
    bench.commit()
    times = bench.op.m._times
    assert len(times._groups) <= 100
    assert times._queued <= 100
