"""Operators over whole record batches: the same stored state as row operators, and the same errors."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateflow import BatchOperator, Context, Operator, state
from stateflow.errors import (
    DeclarationError,
    EncodeError,
    InvalidArgument,
    NullKey,
    OperatorFailed,
    OutputMismatch,
    UnknownState,
)
from stateflow.operator.arrow import read_batch
from stateflow.operator.operator import describe, output_schema
from stateflow.operator.timers import TimerColumns
from stateflow.partition.positions import Batch
from stateflow.partition.processor import PartitionProcessor
from stateflow.storage import MemoryStore
from stateflow.testing import OperatorHarness
from stateflow.types import PartitionId


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
    """The same operator row by row, over the same cells."""

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
    with pytest.raises(EncodeError, match="2 keys were passed with 1 values"):
        column.put_many(pa.array(["a", "b"]), pa.array([1]))


class Seats(BatchOperator):
    """A batch operator with a tuple state that is not a row of numbers, and a float key."""

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
            with pytest.raises(EncodeError, match=f"no float equals {value}"):
                harness.send([{"k": "a", "v": value}])
            harness.send([{"k": "a", "v": 2**60}])
            assert harness.state("a").f.value == 2.0**60


class WithList(Totals):
    last = state.list(str)


class Unfinished(BatchOperator):
    key = "k"
    output = "k string"


@pytest.mark.parametrize("cls", [WithList, Unfinished])
def test_what_a_batch_operator_cannot_have(cls: type[Operator]) -> None:
    with pytest.raises(DeclarationError):
        describe(cls)


# -- maps, sets, counters, expiring states, timers -------------------------------------------------------------


class Routes(BatchOperator):
    """Counts each key's destinations, marks first visits, and keeps a count that expires after ten seconds."""

    key = "k"
    output = "k string, dest string, n long, first boolean"

    by_dest = state.map(str, int)
    ever = state.set(str)
    lately = state.value(int, default=0, ttl=timedelta(seconds=10))
    rows = state.counter()

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> Any:
        keys, dests = batch["k"], batch["dest"]
        first = pc.invert(self.ever.contains_many(keys, dests))
        self.ever.add_many(keys, dests)
        n = pc.add(pc.fill_null(self.by_dest.get_many(keys, dests), 0), 1)
        self.by_dest.put_many(keys, dests, n)
        self.rows.add_many(keys, pa.array([1] * len(keys)))
        self.lately.put_many(keys, pc.add(self.lately.get_many(keys), 1))
        ctx.set_timers(keys, pc.add(batch["at"], 60_000_000))
        if "boom" in dests.to_pylist():
            raise RuntimeError("boom")
        return pa.table({"k": keys, "dest": dests, "n": n, "first": first})

    def on_timers(self, timers: TimerColumns, ctx: Context) -> pa.Table:
        sizes = self.by_dest.sizes(timers.keys)
        self.by_dest.clear_many(timers.keys)
        again = pc.equal(timers.name, "")
        if pc.any(again).as_py():
            ctx.set_timers(timers.keys.filter(again), timers.at.filter(again), name="again")
        none = pa.nulls(len(sizes), pa.bool_())
        return pa.table({"k": timers.keys, "dest": timers.name, "n": sizes, "first": none})


def went(*rows: tuple[str, str], at: int = 0) -> list[dict[str, Any]]:
    return [{"k": k, "dest": dest, "at": at * 1_000_000} for k, dest in rows]


def test_maps_sets_and_counters_by_column() -> None:
    with OperatorHarness(Routes, partitions=2) as harness:
        first = harness.send(went(("a", "IAH"), ("b", "ATL")))
        assert [(row["n"], row["first"]) for row in first] == [(1, True)] * 2
        again = harness.send(went(("a", "IAH"), ("a", "ATL")))
        assert {(row["dest"], row["n"], row["first"]) for row in again} == {("IAH", 2, False), ("ATL", 1, True)}
        stored = harness.state("a")
        assert (dict(stored.by_dest), set(stored.ever), stored.rows.value) == (
            {"IAH": 2, "ATL": 1}, {"IAH", "ATL"}, 3,
        )  # fmt: skip
        with pytest.raises(OperatorFailed):
            harness.send(went(("a", "SFO"), ("a", "boom")))
        stored = harness.state("a")
        assert (dict(stored.by_dest), set(stored.ever)) == ({"IAH": 2, "ATL": 1}, {"IAH", "ATL"})


def test_what_expires_is_hidden_and_goes_from_disk() -> None:
    with OperatorHarness(Routes, partitions=1) as harness:
        harness.send(went(("a", "IAH")))
        assert harness.state("a").lately.value == 1
        harness.advance_processing_time(11)
        assert harness.state("a").lately.value == 0
        tag = Routes.lately.tag  # type: ignore[attr-defined]
        assert not list(harness._stores[0].scan(b"c" + tag))


def test_timers_by_column() -> None:
    with OperatorHarness(Routes, partitions=1) as harness:
        harness.send(went(("a", "IAH"), ("b", "ATL"), ("b", "SFO"), at=10))
        harness.send(went(("c", "IAH"), at=100))
        assert harness.advance_watermark(69_999_999) == []
        due = harness.advance_watermark(70_000_000)
        assert [(row["k"], row["dest"], row["n"]) for row in due] == [
            ("a", "", 1), ("b", "", 2), ("a", "again", 0), ("b", "again", 0),
        ]  # fmt: skip
        assert harness.advance_watermark(100_000_000) == [], "each comes once"
        assert [row["k"] for row in harness.advance_watermark(160_000_000)] == ["c", "c"]


class Buffered(BatchOperator):
    """An operator that fills one buffer again in each call, and returns Arrow columns over it."""

    key = "k"
    output = "k string, v long"

    def open(self, ctx: Context) -> None:
        self.buffer, self.calls = np.zeros(1, np.int64), 0

    def filled(self, keys: pa.Array) -> pa.Table:
        self.calls += 1
        self.buffer[0] = self.calls
        return pa.table({"k": keys, "v": pa.array(self.buffer)})

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.Table:
        ctx.set_timers(batch["k"], 0, domain="processing")
        return self.filled(batch["k"])

    def on_watermark(self, watermark: Any, ctx: Context) -> None:
        self.buffer[0] = -1

    def on_timers(self, timers: TimerColumns, ctx: Context) -> pa.Table:
        if self.calls < 3:
            ctx.set_timers(timers.keys, 0, domain="processing")
        return self.filled(timers.keys)


def test_columns_keep_the_values_of_their_call() -> None:
    processor = PartitionProcessor(Buffered, PartitionId("Buffered", 0), MemoryStore(), epoch=1)
    rows = pa.record_batch({"k": ["a"]})
    columns, encoded = (each.serialize().to_pybytes() for each in (rows.schema, rows))
    output = processor.apply(Batch("s", 0, watermark_us=5), columns, encoded, 0).output
    assert read_batch(output, output_schema(Buffered))["v"].to_pylist() == [1, 2, 3, 4]


def test_timers_of_rows_are_those_of_columns() -> None:
    """A batch operator finds the timers that a row operator has set, as both are stored alike."""

    class ByRow(Operator):
        key = "k"
        output = "k string"
        n = state.value(int)

        def process(self, row: Any, ctx: Context) -> None:
            ctx.set_timer(5, name="t")
            ctx.set_timer(9, name="u", domain="processing")
            ctx.delete_timer(name="u", domain="processing")

        def on_timer(self, timer: Any, ctx: Context) -> None: ...

    class ByColumn(BatchOperator):
        key = "k"
        output = "k string"
        n = state.value(int)

        def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
            ctx.set_timers(batch["k"], pa.array([5] * len(batch), pa.timestamp("us", "UTC")), name="t")
            ctx.set_timers(batch["k"], 9, name="u", domain="processing")
            ctx.delete_timers(batch["k"], name="u", domain="processing")

        def on_timers(self, timers: Any, ctx: Context) -> None: ...

    stores = []
    for cls in (ByRow, ByColumn):
        with OperatorHarness(cls, partitions=1) as harness:
            harness.send([{"k": "a"}, {"k": "b"}])
            stores.append([entry for prefix in (b"t", b"u") for entry in harness._stores[0].scan(prefix)])
    assert stores[0] == stores[1]
    assert len(stores[0]) == 4


def test_several_key_columns() -> None:
    class Pairs(BatchOperator):
        key = ("a", "b")
        output = "a string, b long, n long"
        seen = state.set(int)

        def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
            keys = pa.StructArray.from_arrays([batch["a"], batch["b"]], names=["a", "b"])
            self.seen.add_many(keys, batch["v"])
            ctx.set_timers(keys, 5)

        def on_timers(self, timers: TimerColumns, ctx: Context) -> pa.Table:
            a, b = timers.keys.flatten()
            return pa.table({"a": a, "b": b, "n": self.seen.sizes(timers.keys)})

    with OperatorHarness(Pairs, partitions=1) as harness:
        harness.send([{"a": "x", "b": 1, "v": 1}, {"a": "x", "b": 1, "v": 2}, {"a": "y", "b": 1, "v": 1}])
        assert harness.advance_watermark(5) == [{"a": "x", "b": 1, "n": 2}, {"a": "y", "b": 1, "n": 1}]


class Cells(BatchOperator):
    """Two key columns of one type, which the operator names in an order of its own."""

    key = ("a", "b")
    output = "a long, b long, n long"
    names: tuple[str, ...] = ("b", "a")
    into = "n"
    n: Any = state.value(int)
    seen: Any = state.set(int)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        arrays = [batch[{"a": "a", "b": "b"}.get(name, "a")] for name in self.names]
        keys: Any = arrays[0] if len(arrays) == 1 else pa.StructArray.from_arrays(arrays, names=self.names)
        if self.into == "n":
            self.n.put_many(keys, batch["v"])
        elif self.into == "seen":
            self.seen.add_many(keys, batch["v"])
        else:
            ctx.set_timers(keys, 5)
            ctx.set_timers(keys, 5, name="other")
            ctx.delete_timers(keys, name="other")

    def on_timers(self, timers: TimerColumns, ctx: Context) -> pa.Table:
        a, b = timers.keys.flatten()
        return pa.table({"a": a, "b": b, "n": pa.array([1] * len(a))})


@pytest.mark.parametrize("into", ["n", "seen", "timers"])
def test_keys_of_several_columns_go_by_name(into: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cells, "into", into)
    with OperatorHarness(Cells, partitions=1) as harness:
        harness.send([{"a": 1, "b": 2, "v": 7}])
        there, swapped = harness.state(1, 2), harness.state(2, 1)
        fired = harness.advance_watermark(5)
        assert (there.n.value, swapped.n.value) == (7 if into == "n" else None, None)
        assert (list(there.seen), list(swapped.seen)) == ([7] if into == "seen" else [], [])
        assert fired == ([{"a": 1, "b": 2, "n": 1}] if into == "timers" else [])


@pytest.mark.parametrize("into", ["n", "seen", "timers"])
@pytest.mark.parametrize("names", [("a",), ("x", "y"), ("a", "c"), ("a", "b", "c"), ("a", "a"), ("a", "b", "a")])
def test_keys_that_are_not_of_the_key_columns_are_refused(
    names: tuple[str, ...], into: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cells, "into", into)
    monkeypatch.setattr(Cells, "names", names)
    with OperatorHarness(Cells, partitions=1) as harness, pytest.raises(EncodeError, match="of the key columns a, b"):
        harness.send([{"a": 1, "b": 2, "v": 7}])


@pytest.mark.parametrize("into", ["n", "seen", "timers"])
def test_a_struct_is_no_key_of_one_column(into: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cells, "into", into)
    monkeypatch.setattr(Cells, "key", "a")
    with OperatorHarness(Cells, partitions=1) as harness, pytest.raises(EncodeError, match="not the key column a"):
        harness.send([{"a": 1, "b": 2, "v": 7}])


def test_first_state_by_column() -> None:
    first = [{"k": "a", "by_dest": {"IAH": 4}, "ever": ["IAH", "ATL"], "lately": 2, "rows": 4}, {"k": "b"}]
    with OperatorHarness(Routes, partitions=2, initial_state=first) as harness:
        stored = harness.state("a")
        assert (dict(stored.by_dest), set(stored.ever), stored.rows.value) == ({"IAH": 4}, {"IAH", "ATL"}, 4)
        assert harness.send(went(("a", "IAH")))[0]["n"] == 5


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda op, keys: op.by_dest.put_many(keys, pa.array(["x", None]), pa.array([1, 2])), EncodeError, "null"),
        (lambda op, keys: op.by_dest.get_many(keys, pa.array(["x"])), EncodeError, "2 keys were passed with 1 entries"),
        (lambda op, keys: op.ever.add_many(pa.array(["a", None]), pa.array(["x", "y"])), NullKey, "null"),
        (lambda op, keys: op.ever.add_many(keys, pa.array([1, 2])), EncodeError, "does not fit coder utf8"),
        (lambda op, keys: op.by_dest.put_many(keys, keys, pa.array([0.5, 1.5])), EncodeError, "state=by_dest key=a"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], says: str) -> None:
    class Misuse(Routes):
        def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
            call(self, batch["k"])

    with OperatorHarness(Misuse, partitions=1) as harness:
        with pytest.raises(error, match=says):
            harness.send(went(("a", "x"), ("b", "y")))
        assert not list(harness._stores[0].scan(b"c"))


@pytest.mark.parametrize(
    ("at", "says"),
    [
        (pa.array([1]), "2 keys were passed with 1 times"),
        (pa.array([1, None]), "a time is null"),
        (pa.array([1, 2], pa.timestamp("us")), "needs a time zone"),
        (pa.array(["a", "b"]), "string is not a time type"),
        ("soon", "'soon' is not a time"),
        (np.array([1, 2]), r"array\(\[1, 2\]\) is not a time"),
    ],
)
def test_times_that_are_none(at: Any, says: str) -> None:
    class Misuse(Routes):
        def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
            ctx.set_timers(batch["k"], at)

    with OperatorHarness(Misuse, partitions=1) as harness, pytest.raises(InvalidArgument, match=says):
        harness.send(went(("a", "x"), ("b", "y")))


class Halves(BatchOperator):
    """Passes the keys that pandas makes of a column with missing values."""

    key, output = "k", "k long"
    n = state.value(int, default=0)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        ctx.set_timers(batch["k"], 5)
        if "wrong" in batch.schema.names:
            self.n.put_many(batch["wrong"], batch["k"])

    def on_timers(self, timers: TimerColumns, ctx: Context) -> None:
        self.n.put_many(timers.keys.cast(pa.float64()), timers.keys)


def test_keys_of_another_type_do_not_split_the_state() -> None:
    with OperatorHarness(Halves, partitions=1) as harness:
        with pytest.raises(EncodeError, match="keys of type float were passed, but the key column 'k' is of type int"):
            harness.send([{"k": 3, "wrong": 3.0}])
        harness.send([{"k": 3}])
        reopened = OperatorHarness.restore(Halves, harness.checkpoint())
        with reopened, pytest.raises(EncodeError, match="keys of type float were passed"):
            reopened.advance_watermark(5)


KEY = pa.array(["a"])
APART: dict[str, Any] = {
    "values": lambda op, ctx: op.n.put_many(KEY, pa.array([100])),
    "objects": lambda op, ctx: op.seen.add_many(KEY, pa.array([100])),
    "timers": lambda op, ctx: ctx.set_timers(KEY, 5),
    "deleted": lambda op, ctx: ctx.delete_timers(KEY),
}


@pytest.mark.parametrize("when", ["open", "close"])
@pytest.mark.parametrize("call", APART)
def test_nothing_is_read_or_written_outside_of_a_batch(when: str, call: str) -> None:
    """Writes of ``open`` were gone if the first batch failed."""
    refused: list[Exception] = []

    class Apart(BatchOperator):
        key, output = "k", "k string, n long"
        n: Any = state.value(int, default=7)
        seen: Any = state.set(int)

        def open(self, ctx: Context) -> None:
            self.attempt("open", ctx)

        def close(self, ctx: Context) -> None:
            self.attempt("close", ctx)

        def attempt(self, now: str, ctx: Context) -> None:
            if now == when:
                with pytest.raises((UnknownState, InvalidArgument)) as caught:
                    APART[call](self, ctx)
                refused.append(caught.value)

        def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.Table:
            APART["deleted"](self, ctx)
            return pa.table({"k": batch["k"], "n": self.n.get_many(batch["k"])})

        def on_timers(self, timers: TimerColumns, ctx: Context) -> None: ...

    with OperatorHarness(Apart, partitions=1) as harness:
        assert harness.send([{"k": "a"}]) == [{"k": "a", "n": 7}]
    assert refused
