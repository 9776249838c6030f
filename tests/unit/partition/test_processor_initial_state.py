"""initial_state= through the harness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from stateflow import BatchOperator, Context, Operator, state
from stateflow.client.delivery import is_hopeless
from stateflow.errors import InvalidArgument, OperatorFailed, SchemaMismatch, StaleBatch
from stateflow.operator.operator import check_initial_columns
from stateflow.partition.positions import INITIAL, Batch
from stateflow.testing import OperatorHarness


class Shop(Operator):
    key = "k"
    event_time = "at"
    output = "k string, n long"

    n = state.counter()
    best = state.reducing(float, max)
    prices = state.map(str, float)
    tags = state.set(str)
    log = state.list(int)
    note = state.value(str, default="-")

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.n.value += 1
        yield row.k, self.n.value


ROWS = [
    {"k": "a", "n": 7, "best": 2.5, "prices": {"x": 1.0}, "tags": ["t"], "log": [1, 2], "note": None},
    {"k": "b", "n": 1, "best": None, "prices": {}, "tags": None, "log": [], "note": "hi"},
    {"k": "a", "n": 8, "best": 1.0, "prices": {"y": 2.0}, "tags": ["u"], "log": [3], "note": "last"},
]


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_columns_go_into_states_of_their_name(backend: str) -> None:
    with OperatorHarness(Shop, backend=backend, initial_state=ROWS) as h:
        a, b = h.state("a"), h.state("b")
        assert (a.n.value, a.best.value, a.prices, a.tags, list(a.log), a.note.value) == (
            8,
            2.5,
            {"x": 1.0, "y": 2.0},
            {"t", "u"},
            [1, 2, 3],
            "last",
        )
        assert (b.n.value, b.best.value, b.note.value, len(b.tags)) == (1, None, "hi", 0)
        assert h.send([{"k": "a", "at": None}]) == [{"k": "a", "n": 9}]


class Own(Shop):
    def init_state(self, row: Any, ctx: Context) -> None:
        if row.total < 0:
            raise ValueError("negative")
        self.n.value = row.total
        ctx.set_timer(row.total)

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        yield ctx.key, self.n.value


def test_init_state_may_do_it_in_its_own_way() -> None:
    with OperatorHarness(Own, initial_state=[{"k": "a", "total": 3}]) as h:
        assert h.advance_watermark(5) == [{"k": "a", "n": 3}]
    with pytest.raises(OperatorFailed, match=r"init_state\(\) raised ValueError: negative .*key='a'"):
        OperatorHarness(Own, initial_state=[{"k": "a", "total": -3}])


def test_rows_that_fit_no_state_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"columns k, x, none of which names a state .*name them n, best"):
        OperatorHarness(Shop, initial_state=[{"k": "a", "x": 1}])


class Underscored(Operator):
    key = "_k"
    output = "_k string, n long"
    _total = state.counter()
    _fields = state.set(str)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        yield row._k, self._total.value


def test_names_of_states_may_begin_with_an_underscore() -> None:
    with OperatorHarness(Underscored, initial_state=[{"_k": "a", "_total": 3, "_fields": ["x"]}]) as h:
        assert h.send([{"_k": "a"}]) == [{"_k": "a", "n": 3}]
        assert h.state("a")._fields == {"x"}


@pytest.mark.parametrize("operator", ["rows", "columns"])
def test_a_column_that_is_no_states_is_refused(operator: str) -> None:
    cls, rows = (Shop, {"k": "a", "n": 1, "tag": "x"}) if operator == "rows" else (Columns, {"k": "a", "l": 1, "n": 5})
    with pytest.raises(InvalidArgument, match=r"the column 'tag' of initial rows is neither a state.*: drop"):
        OperatorHarness(cls, initial_state=[{**rows, "tag": "x"}])
    with pytest.raises(InvalidArgument, match="the column 'tag' of initial rows is neither"):
        check_initial_columns(cls, (*rows, "tag"))
    check_initial_columns(Own, ("k", "total"))


@pytest.mark.parametrize(("key", "kind"), [(7, "int"), (b"7", "bytes"), (7.0, "float"), (True, "bool")])
def test_keys_of_another_type_than_the_rows_are_refused(key: Any, kind: str) -> None:
    """Keys of another type than the rows' are refused: rows would never find them, and readers would see both."""
    with OperatorHarness(Shop, partitions=1, initial_state=[{"k": key, "n": 1}]) as h:
        with pytest.raises(
            SchemaMismatch, match=f"the key column 'k' is of type str, but stored keys are of type {kind} .*: cast"
        ):
            h.send([{"k": "7", "at": None}])
        assert h.state(key).n.value == 1
        assert h.advance_watermark(1) == []


def test_each_column_of_a_key_is_looked_at() -> None:
    with OperatorHarness(Columns, partitions=1, initial_state=[{"k": "a", "l": 1, "n": 5}]) as h:
        with pytest.raises(
            SchemaMismatch, match="the key column 'l' is of type str, but stored keys are of type int"
        ) as caught:
            h.send([{"k": "a", "l": "1"}])
        assert is_hopeless(caught.value), "an outbox would send the rows again for ever"
        assert h.send([{"k": "a", "l": 1}]) == [{"k": "5"}]


class Columns(BatchOperator):
    key = ("k", "l")
    output = "k string"
    n = state.value(int)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.Table:
        keys = pa.StructArray.from_arrays([batch["k"], batch["l"]], names=["k", "l"])
        return pa.table({"k": pa.array([str(n) for n in self.n.get_many(keys).to_pylist()])})


def test_batch_operators_have_initial_state_too() -> None:
    with OperatorHarness(Columns, initial_state=[{"k": "a", "l": 1, "n": 5}, {"k": "b", "l": 1, "n": 6}]) as h:
        assert {row["k"] for row in h.send([{"k": "a", "l": 1}, {"k": "b", "l": 1}])} == {"5", "6"}
    with pytest.raises(InvalidArgument, match="none of which names a state"):
        OperatorHarness(Columns, initial_state=[{"k": "a", "l": 1}])


def test_it_comes_first_and_once() -> None:
    rows = pa.RecordBatch.from_pylist([{"k": "a", "n": 7}])
    schema, message = rows.schema.serialize().to_pybytes(), rows.serialize().to_pybytes()
    with OperatorHarness(Shop, partitions=1) as h:
        processor = h._hosts[0]
        assert not processor.apply(Batch(INITIAL, 0, sparse=True), schema, message, 0).replayed
        h.send([{"k": "a", "at": None}])
        assert processor.apply(Batch(INITIAL, 0, sparse=True), schema, message, 0).replayed
        with pytest.raises(StaleBatch, match=r"has already processed rows .*before the first query"):
            processor.apply(Batch(INITIAL, 1, sparse=True), schema, message, 0)
        assert h.state("a").n.value == 8
