"""Columns of values: what an error while reading leaves."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stateflow import state
from stateflow.errors import DecodeError
from stateflow.state import ColumnStates, declarations_of
from tests.unit.state.dict_store import DictStore


class Op:
    n = state.value(int, default=7)


STATES = declarations_of(Op)


def ints(*values: int) -> pa.Array:
    return pa.array(values, pa.int64())


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
