"""States of every type as Arrow columns of the declared types, and back by initial state."""

from __future__ import annotations

import dataclasses
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from stateflow import Operator, state
from stateflow.errors import EncodeError, SchemaMismatch
from stateflow.operator.arrow import read_table
from stateflow.partition.entries import StateColumns, joined
from stateflow.state import coder_for
from stateflow.state.arrays import taken, typed_of
from stateflow.storage import MemoryStore


@dataclasses.dataclass
class Stop:
    name: str
    at: datetime | None = None
    seen: dict[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Node:
    value: int
    below: Node | None = None


NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)
ONE = UUID(int=1)
TYPES: list[tuple[Any, str, Any]] = [
    (int, "int64", 7),
    (float, "double", 7.5),
    (Decimal, "string", Decimal("1.500")),
    (UUID, "string", ONE),
    (datetime, "timestamp[us, tz=UTC]", NOON),
    (date, "date32[day]", date(2013, 1, 1)),
    (bytes, "binary", b"\xff"),
    (tuple[str, int], "struct<_0: string, _1: int64>", ("a", 1)),
    (tuple[UUID, ...], "list<item: string>", (ONE,)),
    (list[float], "list<item: double>", [1.0, 2.0]),
    (set[str], "list<item: string>", {"a"}),
    (dict[int, str], "map<int64, string>", {1: "a", 2: "b"}),
    (dict[str, list[UUID]], "map<string, list<item: string>>", {"a": [ONE]}),
    (int | None, "int64", 7),
    (Stop, "struct<name: string, at: timestamp[us, tz=UTC], seen: map<int64, string>>", Stop("x", NOON, {1: "a"})),
    (list[Stop], None, [Stop("x"), Stop("y", NOON)]),
    (Stop | None, None, Stop("x")),
    (tuple[Stop, int], None, (Stop("x"), 1)),
]


@pytest.mark.parametrize(("type_", "column", "value"), TYPES, ids=lambda x: str(x)[:40])
def test_a_column_is_what_is_declared_and_gives_back_what_was_stored(
    type_: Any, column: str | None, value: Any
) -> None:
    coder = coder_for(type_)
    values = typed_of(coder).array([value, None])
    assert column is None or str(values.type) == column
    for maps in (None, "strict"):
        given, nothing = values.to_pylist(maps_as_pydicts=maps)
        assert taken(coder, given) == value
        assert nothing is None
    assert taken(coder, value) == value, "what is a value already stays one"
    assert typed_of(coder).array([]).type == values.type


@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        (Any, {"a": [1, NOON]}, '{"a": [1, "2013-01-01T12:00:00+00:00"]}'),
        (Any, "a", '"a"'),
        (Any, {1: b"\xff"}, '[[1, "ff"]]'),
        (int | str, 5, "5"),
        (np.ndarray, np.array([[1, 2]]), "[[1, 2]]"),
        (dict[str | None, int], {None: 1, "a": 2}, '[[null, 1], ["a", 2]]'),
        (dict[None, int], {None: 1}, "[[null, 1]]"),
        (Node, Node(1, Node(2)), None),
    ],
    ids=str,
)
def test_what_has_no_one_type_is_json(type_: Any, value: Any, text: str | None) -> None:
    column = typed_of(coder_for(type_)).array([value])
    if text is not None:
        assert (str(column.type), column.to_pylist()) == ("string", [text])
    else:
        assert column.to_pylist() == [{"value": 1, "below": '{"value": 2, "below": null}'}], "itself within itself"


@pytest.mark.parametrize("type_", [Stop, list[Stop], Stop | None, tuple[Stop, int], dict[str, Stop]])
def test_a_record_of_more_fields_is_refused(type_: Any) -> None:
    coder = coder_for(type_)
    stop = {"name": "x", "at": None, "seen": {}, "gate": "B2"}
    given: Any = {list[Stop]: [stop], tuple[Stop, int]: {"_0": stop, "_1": 1}, dict[str, Stop]: [("a", stop)]}
    with pytest.raises(EncodeError):
        coder.encode(taken(coder, given.get(type_, stop)))
    del stop["gate"]
    coder.encode(taken(coder, given.get(type_, stop)))


def test_an_int_beyond_64_bits_is_said() -> None:
    with pytest.raises(EncodeError, match=r"does not fit a column of list<item: int64>: .*: read it in the operator"):
        typed_of(coder_for(list[int])).array([[1 << 70]])


class Many(Operator):
    key = ("k", "n")
    output = "k string"
    last = state.map(int, Stop)


def page(*entries: tuple[Any, Any, Any]) -> pa.Table:
    columns = StateColumns(Many, "last", "Many", MemoryStore())
    (pages,) = columns.pages(iter(entries), 3)
    return joined([read_table(each) for each in pages])


def test_a_key_of_several_columns_is_a_struct_of_them() -> None:
    table = page((("a", 1), 7, Stop("x")), (("b", 2), 8, Stop("y")))
    assert table["key"].to_pylist() == [{"k": "a", "n": 1}, {"k": "b", "n": 2}]
    assert table["map_key"].to_pylist() == [7, 8]


def test_nothing_stored_has_the_declared_types_too() -> None:
    assert page().schema.field("value").type == page((("a", 1), 7, Stop("x"))).schema.field("value").type
    both = joined([page(), page((("a", 1), 7, Stop("x")))])
    assert both.num_rows == 1


def test_keys_of_several_types_are_said() -> None:
    with pytest.raises(SchemaMismatch, match=r"keys of several types are stored: str, int; int, int \(operator=Many\)"):
        page((("a", 1), 7, Stop("x")), ((1, 1), 7, Stop("y")))
    one, other = page((("a", 1), 7, Stop("x"))), page(((1, 1), 7, Stop("x")))
    with pytest.raises(SchemaMismatch, match="keys of several types"):
        joined([one, other])
