"""TrackedList: its requests to the store, and the changes that it records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stateflow import state
from stateflow.errors import DecodeError, EncodeError
from stateflow.state import TrackedList
from stateflow.state.encoding import order_int
from tests.unit.state.bench import Bench


class Op:
    log = state.list(int)
    rows = state.list(list)


@pytest.fixture
def filled() -> Bench:
    """Makes a cold cache over log = 0…99, rows = [[0], [1], [2]]."""
    bench = Bench(Op)
    bench.op.log += range(100)
    bench.op.rows.extend([[0], [1], [2]])
    fresh = bench.reopened()
    fresh.store.asked()
    return fresh


def test_the_ends_do_without_the_rest(filled: Bench) -> None:
    log = filled.op.log
    assert len(log) == 100
    assert filled.store.asked() == (1, 0)
    log.append(100)
    assert filled.store.asked() == (0, 0)
    assert (log[-1], log[0], log[50], log[-3:]) == (100, 0, 50, [98, 99, 100])
    assert filled.store.asked() == (4, 0)
    assert (log.pop(), log.pop(), log.pop(0)) == (100, 99, 0)
    log[7] = 0
    assert filled.store.asked() == (1, 0)  # log[7]
    mutations = filled.commit()
    assert (len(mutations.puts), len(mutations.deletes)) == (2, 2)  # an element and the count; both ends
    assert filled.reopened().op.log == [*range(1, 8), 0, *range(9, 99)]


@pytest.mark.parametrize(
    ("change", "puts", "deletes"),
    [
        (lambda log: log.append(7), 2, 0),
        (lambda log: log.pop(), 1, 1),
        (lambda log: log.pop(0), 1, 1),
        (lambda log: log.insert(0, 7), 2, 0),
        (lambda log: log.__setitem__(50, 7), 1, 0),
        (lambda log: log.__setitem__(50, 50), 0, 0),
        (lambda log: log.insert(97, 7), 5, 0),
        (lambda log: log.__delitem__(2), 3, 1),
        (lambda log: log.__delitem__(97), 3, 1),
        (lambda log: log.append(log.pop()), 0, 0),
        (lambda log: log.append(log.pop(0)), 2, 1),
        (lambda log: log.sort(), 0, 0),
        (lambda log: log.clear() or log.extend(range(100)), 0, 0),
    ],
)
def test_the_net_change(filled: Bench, change: Any, puts: int, deletes: int) -> None:
    want = list(range(100))
    change(filled.op.log)
    change(want)
    mutations = filled.commit()
    assert (len(mutations.puts), len(mutations.deletes), len(mutations.clears)) == (puts, deletes, 0)
    again = filled.reopened()
    assert again.op.log == want
    again.keyed.rollback()
    assert again.op.log == want


def test_an_unbounded_queue_slides(filled: Bench) -> None:
    for number in range(100, 400):
        filled.op.log.append(number)
        assert filled.op.log.pop(0) == number - 100
        if number % 7 == 0:
            filled = filled.reopened()
    assert list(filled.reopened().op.log) == list(range(300, 400))
    assert len([cell for cell in filled.store.cells if cell[:1] == b"c"]) == 103


def test_clear_is_one_range(filled: Bench) -> None:
    filled.op.log.clear()
    assert filled.store.asked() == (1, 0)
    mutations = filled.commit()
    assert (mutations.puts, len(mutations.deletes), len(mutations.clears)) == ([], 1, 1)
    filled.op.log.append(1)
    filled.op.rows.clear()
    filled.commit()
    assert len(filled.store.cells) == 2


def test_change_in_place_is_tracked(filled: Bench) -> None:
    kept = filled.op.rows[1]
    kept.append(9)
    assert len(filled.commit().puts) == 1
    kept.append(10)  # a copy by now
    for row in filled.op.rows:
        row.append(5)
    assert filled.op.rows == [[0, 5], [1, 9, 5], [2, 5]]
    filled.op.rows.insert(0, [7])
    assert filled.reopened().op.rows == [[7], [0, 5], [1, 9, 5], [2, 5]]
    filled.keyed.rollback()
    assert filled.op.rows == [[7], [0, 5], [1, 9, 5], [2, 5]]


def test_changes() -> None:
    tracked = TrackedList("abc")
    assert tracked.changes() == {"put": {}, "deleted": []}
    tracked.append("d")
    tracked[1] = "x"
    assert tracked.changes() == {"put": {1: "x", 3: "d"}, "deleted": []}
    tracked.mark_clean()
    assert tracked.pop(0) == "a"
    assert tracked.changes() == {"put": {}, "deleted": [0]}
    tracked.insert(0, "y")
    tracked.mark_clean()
    del tracked[:2]
    assert (tracked, tracked.changes()) == (["c", "d"], {"put": {}, "deleted": [0, 1]})
    bench = Bench(Op)
    bench.op.log += [1, 2, 3]
    bench.commit()
    bench.op.log.pop(0)
    bench.op.log += [4]
    assert bench.op.log.changes() == {"put": {2: 4}, "deleted": [0]}
    with pytest.raises(RuntimeError):
        bench.op.log.mark_clean()


def test_standalone() -> None:
    loop: TrackedList[Any] = TrackedList([1])
    loop.append(loop)
    assert repr(loop) == "[1, [...]]"
    with pytest.raises(TypeError):
        hash(loop)
    inner = TrackedList([[1]])
    inner[0].append(2)
    assert inner.changes() == {"put": {0: [1, 2]}, "deleted": []}


@pytest.mark.parametrize("where", [slice(2, 5), slice(1, 2), slice(0, 2), slice(4, 5)])
@pytest.mark.parametrize("change", ["pop", "clear", "append"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_slice_is_assigned_what_changes_the_list_as_it_is_made(where: slice, change: str, stored: bool) -> None:
    results = []
    for make in (list, TrackedList):
        values: Any = make([0, 1, 2, 3, 4])
        if stored and make is TrackedList:
            bench = Bench(Op)
            bench.op.log += values
            values = bench.reopened().op.log

        def changing(values: Any = values) -> Iterator[int]:
            for number in (10, 20):
                getattr(values, change)(*[number] * (change == "append"))
                yield number

        values[where] = changing()
        results.append(list(values))
    assert results[1] == results[0]


def test_an_extended_slice_is_that_of_the_list_when_the_values_are_made() -> None:
    values = TrackedList([0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="sequence of size 2 to extended slice of size 1"):
        values[0:4:3] = (values.pop() for _ in range(2))
    values[::2] = (values.append(9) or 5 for _ in range(3))  # type: ignore[func-returns-value]
    assert values == [5, 1, 5, 9, 5, 9]


def test_errors_name_the_element(filled: Bench) -> None:
    filled.op.log[3] = "x"
    with pytest.raises(EncodeError, match=r"operator=op state=log key=k index=3"):
        filled.keyed.collect()
    filled.keyed.rollback()
    cell = next(cell for cell in filled.store.cells if cell.endswith(order_int(3)) and cell[1:9] == _tag("log"))
    filled.store.cells[cell] = b"\x01abc"
    with pytest.raises(DecodeError, match=r"operator=op state=log key=k index=3"):
        filled.op.log[3]
    del filled.store.cells[cell]
    with pytest.raises(DecodeError, match="says 100 entries, but the store holds 99"):
        filled.op.log[3]


def _tag(name: str) -> bytes:
    tag: bytes = getattr(Op, name).tag
    return tag
