"""Operators over whole record batches: the same stored state as row operators, and the same errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateflow import BatchOperator, Context, Operator, state
from stateflow.errors import DeclarationError, EncodeError, NullKey, OperatorFailed, OutputMismatch
from stateflow.runtime.operator import describe
from stateflow.testing import OperatorHarness


class Totals(BatchOperator):
    key = "k"
    output = "k string, n long, total double"

    n = state.value(int, default=0)
    total = state.value(float, default=0.0)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> Any:
        grouped = pa.table({"k": batch["k"], "v": batch["v"]}).group_by("k").aggregate([("v", "count"), ("v", "sum")])
        keys = grouped["k"].combine_chunks()
        n = pc.add(self.n.get_many(keys), grouped["v_count"].combine_chunks())
        total = pc.add(self.total.get_many(keys), grouped["v_sum"].combine_chunks())
        self.n.put_many(keys, n)
        self.total.put_many(keys, total)
        spoil = pc.max(batch["v"]).as_py()
        if spoil == 13:
            raise RuntimeError("thirteen")
        if spoil == 14:
            return pa.table({"k": keys, "n": n})
        if spoil == 15:
            self.n.put_many(keys, pa.array(["text"] * len(keys)))
        return pa.table({"n": n, "total": total, "k": keys})


class RowTotals(Operator):
    """The same, row by row, over the same cells."""

    key = "k"
    output = "k string, n long, total double"

    n = state.value(int, default=0)
    total = state.value(float, default=0.0)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.n.value += 1
        self.total.value += row.v
        yield row.k, self.n.value, self.total.value


@pytest.fixture(params=["memory", "rocksdb"])
def harness(request: pytest.FixtureRequest) -> Iterator[OperatorHarness]:
    with OperatorHarness(Totals, partitions=3, backend=request.param) as made:
        yield made


def rows(*pairs: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"k": k, "v": float(v)} for k, v in pairs]


def by_key(outputs: list[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    return {row["k"]: (row["n"], row["total"]) for row in outputs}


def test_it_counts_and_sums(harness: OperatorHarness) -> None:
    assert by_key(harness.send(rows(("a", 1), ("b", 2), ("a", 3)))) == {"a": (2, 4.0), "b": (1, 2.0)}
    assert by_key(harness.send(rows(("a", 5), ("c", 7)))) == {"a": (3, 9.0), "c": (1, 7.0)}
    assert (harness.state("a").n.value, harness.state("a").total.value) == (3, 9.0)


def test_the_stored_state_is_that_of_a_row_operator(harness: OperatorHarness) -> None:
    sent = rows(("a", 1), ("b", 2), ("a", 3))
    harness.send(sent)
    with OperatorHarness(RowTotals, partitions=3) as by_rows:
        by_rows.send(sent)
        for key in "ab":
            cells = [entry for entry in harness.changes(key).puts if entry[0].startswith(b"c")]
            assert sorted(cells) == sorted(e for e in by_rows.changes(key).puts if e[0].startswith(b"c"))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [(13, OperatorFailed), (14, OutputMismatch), (15, EncodeError)],
    ids=["raises", "output", "type"],
)
def test_a_failed_batch_changes_nothing(harness: OperatorHarness, spoil: int, error: type[Exception]) -> None:
    harness.send(rows(("a", 1)))
    with pytest.raises(error):
        harness.send(rows(("a", 2), ("a", spoil)))
    assert (harness.state("a").n.value, harness.state("a").total.value) == (1, 1.0)
    assert by_key(harness.send(rows(("a", 2)))) == {"a": (2, 3.0)}


def test_a_value_written_back_as_it_was_is_no_change() -> None:
    class Touch(BatchOperator):
        key = "k"
        output = "k string"
        n = state.value(int, default=7)

        def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
            keys = batch["k"]
            self.n.put_many(keys, pa.array([int(v) for v in batch["v"].to_pylist()]))

    with OperatorHarness(Touch, partitions=1) as harness:
        harness.send(rows(("a", 1)))
        harness.send(rows(("a", 2), ("a", 1)))
        assert [e for e in harness.changes("a").puts if e[0].startswith(b"c")] == []


def test_null_clears_and_the_default_returns() -> None:
    class Forget(BatchOperator):
        key = "k"
        output = "k string, n long"
        n = state.value(int, default=7)

        def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> Any:
            keys, was = batch["k"], self.n.get_many(batch["k"])
            self.n.put_many(keys, pc.cast(batch["v"], pa.int64()))
            return pa.table({"k": keys, "n": was})

    with OperatorHarness(Forget, partitions=1) as harness:
        assert harness.send([{"k": "a", "v": 1.0}])[0]["n"] == 7
        assert harness.send([{"k": "a", "v": None}])[0]["n"] == 1
        assert harness.send([{"k": "a", "v": 2.0}])[0]["n"] == 7
        assert len(harness.changes("a").deletes) == 0


def test_null_keys_and_unequal_lengths_are_refused(harness: OperatorHarness) -> None:
    column = harness._hosts[0].state.columns["n"]
    with pytest.raises(NullKey):
        column.get_many(pa.array(["a", None]))
    with pytest.raises(EncodeError, match="2 keys came with 1 values"):
        column.put_many(pa.array(["a", "b"]), pa.array([1]))


class Seats(BatchOperator):
    """A tuple state that is no row of numbers, and a float key."""

    key = "k"
    output = "k double, who string, n long"
    seat = state.value(tuple[str, int], default=("nobody", 0))

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> Any:
        grouped = pa.table(batch).group_by("k", use_threads=False).aggregate([("who", "max"), ("who", "count")])
        keys = grouped["k"].combine_chunks()
        before = pc.struct_field(self.seat.get_many(keys), "_1")
        counted = pc.add(before, grouped["who_count"].combine_chunks())
        seats = pa.StructArray.from_arrays([grouped["who_max"].combine_chunks(), counted], names=["_0", "_1"])
        self.seat.put_many(keys, seats)
        return pa.table({"k": keys, "who": seats.field(0), "n": counted})


class RowSeats(Operator):
    key = "k"
    output = "k double, who string, n long"
    seat = state.value(tuple[str, int], default=("nobody", 0))

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.seat.value = (row.who, self.seat.value[1] + 1)
        yield row.k, *self.seat.value


def test_a_tuple_state_and_a_key_of_minus_zero_are_those_of_a_row_operator() -> None:
    sent = [{"k": k, "who": who} for k, who in ((0.0, "a"), (-0.0, "b"), (1.5, "a"), (-0.0, "c"))]
    found = []
    for cls in (Seats, RowSeats):
        with OperatorHarness(cls, partitions=1, backend="rocksdb") as harness:
            last = {row["k"]: (repr(row["k"]), row["who"], row["n"]) for row in harness.send(sent)}
            cells = [entry for entry in harness.changes(0.0).puts if entry[0].startswith(b"c")]
            found.append((last, cells, harness.state(-0.0).seat.value))
    assert found[0] == found[1]
    assert found[0][0] == {0.0: ("0.0", "c", 3), 1.5: ("1.5", "a", 1)}
    assert found[0][2] == ("c", 3)


class Clears(BatchOperator):
    key = "k"
    output = "k string"
    n = state.value(int, default=7)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        for row in range(len(batch)):
            self.n.put_many(batch["k"][row : row + 1], pa.array([batch["v"][row].as_py()], pa.int64()))


class RowClears(Operator):
    key = "k"
    output = "k string"
    n = state.value(int, default=7)

    def process(self, row: Any, ctx: Context) -> None:
        if row.v is None:
            self.n.clear()
        else:
            self.n.value = row.v


@pytest.mark.parametrize("cls", [Clears, RowClears])
def test_clearing_and_then_assigning_the_default_assigns_it(cls: type[Operator]) -> None:
    with OperatorHarness(cls, partitions=1) as harness:
        for values in ((None, 7), (7,), (None, 7), (3, None, 7)):
            harness.send([{"k": "a", "v": value} for value in values])
            assert len([1 for store in harness._stores for _ in store.scan(b"c")]) == 1, values
        harness.send([{"k": "a", "v": None}])
        assert not any(True for store in harness._stores for _ in store.scan(b"c"))


@pytest.mark.parametrize("value", [2**53 + 1, -(2**60) - 1, 2**63 - 1])
def test_one_rule_for_numbers_that_no_float_holds(value: int) -> None:
    class Batchwise(BatchOperator):
        key = "k"
        output = "k string"
        f = state.value(float)

        def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
            self.f.put_many(batch["k"], batch["v"])

    class Rowwise(Operator):
        key = "k"
        output = "k string"
        f = state.value(float)

        def process(self, row: Any, ctx: Context) -> None:
            self.f.value = row.v

    for cls in (Batchwise, Rowwise):
        with OperatorHarness(cls, partitions=1) as harness:
            with pytest.raises(EncodeError, match=f"no float holds {value}"):
                harness.send([{"k": "a", "v": value}])
            harness.send([{"k": "a", "v": 2**60}])
            assert harness.state("a").f.value == 2.0**60


class WithMap(Totals):
    by_dest = state.map(str, int)


class Unfinished(BatchOperator):
    key = "k"
    output = "k string"


@pytest.mark.parametrize("cls", [WithMap, Unfinished])
def test_what_a_batch_operator_cannot_have(cls: type[Operator]) -> None:
    with pytest.raises(DeclarationError):
        describe(cls)
