"""Columns of values: what a small batch costs beside many cached keys, and what an error while reading leaves."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from stateflow import state
from stateflow.errors import DecodeError
from stateflow.state import ColumnStates, declarations_of
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
