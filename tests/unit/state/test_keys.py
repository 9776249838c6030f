"""Arrays of keys: which are of the key columns, and which are hashed to find their partition."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from stateflow import state
from stateflow.errors import EncodeError, InvalidArgument
from stateflow.operator.timers import Timers
from stateflow.state import ColumnStates, declarations_of
from stateflow.state.keys import KeyColumns
from stateflow.storage import MemoryStore

KEYS: dict[str, pa.Array] = {
    "int": pa.array([3]),
    "float": pa.array([3.0]),
    "bool": pa.array([True]),
    "str": pa.array(["a"]),
    "bytes": pa.array([b"a"]),
    "date": pa.array([date(2013, 1, 1)]),
    "timestamp": pa.array([datetime(2013, 1, 1, tzinfo=UTC)]),
}


class Op:
    n = state.value(int)
    seen = state.set(int)


Call = Callable[[pa.Array], object]


def calls(keys: KeyColumns) -> dict[str, Call]:
    states = ColumnStates("op", declarations_of(Op), MemoryStore(), keys=keys)
    timers = Timers(MemoryStore(), keys)
    return {
        "values": states.columns["n"].get_many,
        "objects": states.tracked["seen"].each,
        "timers": lambda given: timers.set_many(given, "", 5, "event"),
        "deleted": lambda given: timers.delete_many(given, "", "event"),
    }


@pytest.mark.parametrize("call", ["values", "objects", "timers", "deleted"])
@pytest.mark.parametrize("wanted", KEYS)
def test_keys_of_another_type_than_the_key_column_are_refused(wanted: str, call: str) -> None:
    keys = KeyColumns("op", ("k",))
    keys.kinds = (wanted,)
    given = calls(keys)[call]
    for kind, array in KEYS.items():
        if kind == wanted:
            given(array)
            continue
        with pytest.raises(EncodeError, match=rf"of type {kind} were passed, .* 'k' is of type {wanted}"):
            given(array)
    given(pa.array([]))


def test_fields_of_keys_are_compared_by_name() -> None:
    keys = KeyColumns("op", ("a", "b"))
    keys.kinds = ("int", "str")
    assert keys.plain(pa.StructArray.from_arrays([pa.array(["x"]), pa.array([1])], names=["b", "a"])) == [(1, "x")]
    with pytest.raises(EncodeError, match="of type float were passed, but the key column 'a' is of type int"):
        keys.plain(pa.StructArray.from_arrays([pa.array([1.0]), pa.array(["x"])], names=["a", "b"]))


@pytest.mark.parametrize("first", ["values", "objects"])
def test_each_timer_belongs_to_the_partition(first: str) -> None:
    """A timer of another partition's key would fail each batch once it is due."""
    hashed: list[Any] = []

    def belongs(key: Hashable) -> None:
        hashed.append(key)
        if key == "wrong":
            raise InvalidArgument("of another partition", remedy="")

    given = calls(KeyColumns("op", ("k",), belongs))
    given["timers"](pa.array(["a", "b", "a"]))
    assert hashed == ["a", "b"], "once each"
    with pytest.raises(InvalidArgument):
        given["timers"](pa.array(["a", "wrong"]))
    hashed.clear()
    given[first](looked_up := pa.array(["c"]))
    given["timers"](looked_up)
    assert hashed == ["c"], "not again"
