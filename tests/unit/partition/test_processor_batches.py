"""One partition at work: exactly once, all or nothing, and the same after every restart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow import state
from stateflow.changes import ChangeSet, Mutations
from stateflow.clock import ManualClock
from stateflow.errors import (
    BatchChanged,
    EncodeError,
    InvalidArgument,
    KeyColumnMissing,
    NullKey,
    OperatorFailed,
    OutputMismatch,
    PositionGap,
    SchemaMismatch,
    StaleBatch,
    StateflowError,
    Unavailable,
)
from stateflow.operator.arrow import read_batch
from stateflow.operator.operator import BatchOperator, Context, Operator, output_schema
from stateflow.operator.timers import TumblingWindows
from stateflow.partition import layout
from stateflow.partition.layout import read_watermark
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied, PartitionProcessor
from stateflow.partitioner import partition_of
from stateflow.state.cells import LATEST_US
from stateflow.storage import MemoryStore, PartitionStore, RocksEngine
from stateflow.testing import OperatorHarness
from stateflow.types import PartitionId
from tests.sizes import sized
from tests.unit.operators import Count, Lifecycled, Pair, Picky

NOW_US = 0
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
P = PartitionId("Op", 3)


def message(rows: Iterable[tuple[str | None, int]], schema: pa.Schema = SCHEMA) -> bytes:
    records = [dict(zip(schema.names, row, strict=True)) for row in rows]
    return pa.RecordBatch.from_pylist(records, schema=schema).serialize().to_pybytes()


class Partition:
    """A host on a store, which can be restarted."""

    def __init__(self, cls: type[Operator] = Count, store: PartitionStore | None = None) -> None:
        self.cls = cls
        self.store = store if store is not None else MemoryStore()
        self.changes: list[bytes] = []
        self.start()

    def start(self, cls: type[Operator] | None = None) -> PartitionProcessor:
        self.cls = cls or self.cls
        self.processor = PartitionProcessor(
            self.cls, P, self.store, epoch=4, on_commit=lambda _, encode: self.changes.append(encode())
        )
        return self.processor

    def apply(
        self, number: int, *rows: tuple[str | None, int], source: str = "s", sparse: bool = False
    ) -> list[tuple[Any, ...]]:
        return self.rows(self.applied(number, *rows, source=source, sparse=sparse))

    def applied(self, number: int, *rows: tuple[str | None, int], source: str = "s", sparse: bool = False) -> Applied:
        data = message(rows) if rows else b""
        return self.processor.apply(Batch(source, number, sparse), SCHEMA.serialize().to_pybytes(), data, NOW_US)

    def rows(self, applied: Applied) -> list[tuple[Any, ...]]:
        table = read_batch(applied.output, output_schema(self.cls))
        return [tuple(row.values()) for row in table.to_pylist()]

    def content(self) -> dict[bytes, bytes]:
        return dict(self.store.scan(b""))


@pytest.mark.parametrize("kind", ["text", "integer", "both"])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
def test_a_key_belongs_to_its_partition(kind: str, columns: bool) -> None:
    keys: dict[str, list[Any]] = {
        "text": [f"k{n}" for n in range(40)],
        "integer": list(range(40)),
        "both": [(f"k{n}", n) for n in range(40)],
    }

    class Rows(Operator):
        key = ("k", "m") if kind == "both" else "k"
        output = "n long"
        n = state.value(int, default=0)

        def process(self, row: Any, ctx: Context) -> Iterator[tuple[int]]:
            self.n.value += 1
            yield (self.n.value,)

    class Columns(BatchOperator):
        key = Rows.key
        output = "n long"
        n = state.value(int, default=0)

        def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> pa.RecordBatch:
            place = batch["k"]
            if kind == "both":
                place = pa.StructArray.from_arrays([batch["k"], batch["m"]], names=["k", "m"])
            found = pc.add(self.n.get_many(place), 1)
            self.n.put_many(place, found)
            return pa.record_batch({"n": found})

    mine = [key for key in keys[kind] if partition_of(key, 4) == 3]
    others = [key for key in keys[kind] if partition_of(key, 4) != 3]
    store = MemoryStore()
    processor = PartitionProcessor(Columns if columns else Rows, PartitionId("Keyed", 3), store, 1, partitions=4)

    def apply(number: int, *sent: Any) -> Applied:
        names = ("k", "m") if kind == "both" else ("k",)
        rows = [dict(zip(names, key if kind == "both" else (key,), strict=True)) for key in sent]
        batch = pa.RecordBatch.from_pylist(rows)
        return processor.apply(
            Batch("s", number), batch.schema.serialize().to_pybytes(), batch.serialize().to_pybytes(), NOW_US
        )

    assert apply(0, *mine[:3]).rows == 3
    before = dict(store.scan(b""))
    for strange in others[:5]:
        with pytest.raises(InvalidArgument, match=f"belongs to partition {partition_of(strange, 4)} of 4"):
            apply(1, *mine, strange)
        assert dict(store.scan(b"")) == before
    assert apply(1, *mine).rows == len(mine)


def test_it_measures_the_operator_and_the_commit() -> None:
    clock = ManualClock()

    class Slow(Count):
        def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
            clock.advance(0.25)
            yield from super().process(row, ctx)

    class SlowStore(MemoryStore):
        def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
            clock.advance(2.0)
            super().apply(mutations, sync=sync)

    processor = PartitionProcessor(Slow, P, SlowStore(), epoch=1, clock=clock)
    schema = SCHEMA.serialize().to_pybytes()
    applied = [processor.apply(Batch("s", 0), schema, message([("a", 1), ("b", 5)]), NOW_US) for _ in range(2)]
    assert [(each.replayed, each.operator_us, each.commit_us) for each in applied] == [
        (False, 500_000, 2_000_000),
        (True, 0, 0),
    ]


def test_rows_in_outputs_out() -> None:
    p = Partition()
    assert p.apply(0, ("a", 1), ("b", 5), ("a", 2)) == [("a", 1, 1), ("b", 1, 5), ("a", 2, 3)]
    assert p.apply(1, ("a", 10)) == [("a", 3, 13)]
    assert p.applied(2, ("a", 1), ("a", 1)).rows == 2


def test_keys_of_several_columns_and_operators_that_stay_silent() -> None:
    store = MemoryStore()
    processor = PartitionProcessor(Pair, P, store, epoch=1)
    schema = pa.schema([("a", pa.string()), ("b", pa.int64())])
    data = message([("x", 1), ("x", 2), ("x", 1), ("quiet", 1)], schema)
    applied = processor.apply(Batch("s", 0), schema.serialize().to_pybytes(), data, NOW_US)
    assert read_batch(applied.output, output_schema(Pair)).to_pylist() == [
        {"a": "x", "n": 1},
        {"a": "x", "n": 1},
        {"a": "x", "n": 2},
    ]


# -- exactly once -------------------------------------------------------------------------------------------


def test_a_replay_returns_the_stored_output_and_changes_nothing() -> None:
    p = Partition()
    p.apply(0, ("a", 1))
    first = p.applied(1, ("a", 2), ("b", 3))
    before, told = p.content(), len(p.changes)
    for rows in ([("a", 2), ("b", 3)], [("z", 99)], []):
        again = p.applied(1, *rows)  # type: ignore[arg-type]
        assert (again.output, again.replayed, again.rows) == (first.output, True, 0)
    assert p.content() == before
    assert len(p.changes) == told
    assert p.processor.sequence == 2
    assert first.replayed is False


@pytest.mark.parametrize(
    ("source", "rows", "refused"),
    [
        ("query:q", [("a", 1)], False),  # a source may have skipped what it no longer holds
        ("query:q", [], False),
        ("query:q", [("a", 1), ("b", 2), ("c", 3)], True),
        ("batch:nightly", [("a", 1)], True),
        ("batch:nightly", [], True),
        ("batch:nightly", [("a", 1), ("b", 2), ("c", 3)], True),
        ("batch:nightly", [("a", 1), ("b", 2)], False),
    ],
)
def test_a_replay_with_other_rows(source: str, rows: list[tuple[str, int]], refused: bool) -> None:
    p = Partition()

    def send(*rows: tuple[str, int]) -> Applied:
        batch = Batch(source, 0, attempt=layout.Attempt(use="u", task=f"{len(rows)}"))
        return p.processor.apply(batch, SCHEMA.serialize().to_pybytes(), message(rows) if rows else b"", NOW_US)

    first = send(("a", 1), ("b", 2))
    before = p.content()
    if refused:
        with pytest.raises(
            BatchChanged, match=rf"^batch_changed: batch 0 had 2 row\(s\) .* and has {len(rows)} now \("
        ):
            send(*rows)
    else:
        assert send(*rows).output == first.output
    assert p.content() == before


def test_a_replay_after_a_restart() -> None:
    p = Partition()
    first = p.applied(0, ("a", 1))
    p.start()
    assert p.applied(0, ("a", 1)) == Applied(first.output, True, 0)
    assert p.apply(1, ("a", 2)) == [("a", 2, 3)]


def test_a_replay_of_a_batch_without_rows_or_without_output() -> None:
    p = Partition()
    assert p.applied(0) == Applied(b"", False, 0)
    assert p.applied(0) == Applied(b"", True, 0)
    assert p.processor.reached("s").batch == 0, "an idle partition's position rises too"
    assert p.processor.sequence == 1


@pytest.mark.parametrize("number", [1, 2, 100])
def test_a_gap_at_the_beginning(number: int) -> None:
    p = Partition()
    before = p.content()
    with pytest.raises(PositionGap, match="expects batch 0") as caught:
        p.applied(number, ("a", 1))
    assert caught.value.remedy == "rewind the source to batch 0"
    assert caught.value.where == {"operator": "Op", "partition": 3, "source": "s", "expected": 0}
    assert p.content() == before


def test_a_gap_in_the_middle_names_the_batch_to_rewind_to() -> None:
    p = Partition()
    p.apply(0, ("a", 1))
    before = p.content()
    with pytest.raises(PositionGap) as caught:
        p.applied(2, ("a", 1))
    assert caught.value.remedy == "rewind the source to batch 1"
    assert p.content() == before
    assert p.apply(1, ("a", 1)) == [("a", 2, 2)]


def test_a_stale_batch() -> None:
    p = Partition()
    for number in range(3):
        p.apply(number, ("a", 1))
    before = p.content()
    for number in (1, 0):
        with pytest.raises(StaleBatch, match=f"batch {number} was sent after batch 2"):
            p.applied(number, ("a", 1))
        with pytest.raises(StaleBatch):
            p.applied(number, ("a", 1), sparse=True)
    assert p.content() == before


def test_a_sparse_source_may_skip_but_not_fall() -> None:
    p = Partition()
    assert p.apply(7, ("a", 1), sparse=True) == [("a", 1, 1)]
    assert p.applied(7, ("a", 1), sparse=True).replayed
    assert p.apply(9, ("a", 1), sparse=True) == [("a", 2, 2)]
    with pytest.raises(StaleBatch):
        p.applied(8, ("a", 1), sparse=True)


def test_sources_are_counted_apart() -> None:
    p = Partition()
    p.apply(0, ("a", 1), source="one")
    assert p.processor.reached("two") is None
    assert p.apply(0, ("a", 1), source="two") == [("a", 2, 2)]
    assert p.applied(0, ("a", 1), source="one").replayed
    assert p.rows(p.applied(0, source="one")) == [("a", 1, 1)]
    assert (p.processor.reached("one").batch, p.processor.reached("two").batch, p.processor.sequence) == (0, 0, 2)


def test_only_the_newest_output_of_a_source_is_kept() -> None:
    p = Partition()
    for number in range(5):
        p.apply(number, ("a", 1))
    assert [key for key in p.content() if key.startswith(layout.OUTPUT)] == [layout.OUTPUT + b"s"]


# -- all or nothing -----------------------------------------------------------------------------------------

BAD: dict[str, tuple[int, type[BaseException]]] = {
    "process raises": (-1, OperatorFailed),
    "process exits": (-6, OperatorFailed),
    "unencodable value": (-2, EncodeError),
    "output of a wrong type": (-3, OutputMismatch),
    "output of a wrong width": (-4, OutputMismatch),
    "interrupted": (-5, KeyboardInterrupt),
}


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_a_failed_batch_leaves_everything_as_it_was(how: str, backend: str, tmp_path: Path) -> None:
    value, error = BAD[how]
    store = MemoryStore() if backend == "memory" else RocksEngine(8 << 20, 8 << 20).open(tmp_path / "p", create=True)
    p = Partition(Picky, store)
    p.apply(0, ("a", 1), ("b", 2))
    before, told = p.content(), len(p.changes)
    for _ in range(2):
        with pytest.raises(error):
            p.applied(1, ("a", 10), ("c", 5), ("a", value), ("b", 5))
    assert p.content() == before
    assert len(p.changes) == told
    assert p.processor.sequence == 1
    assert p.processor.state.peek("a").n.value == 1
    assert p.processor.state.peek("c").n.value == 0
    assert p.apply(1, ("a", 10), ("c", 5)) == [("a", 2, 10), ("c", 1, 5)]
    p.start()
    assert p.apply(2, ("a", 1)) == [("a", 3, 1)]
    store.close()


def test_the_users_error_is_told_with_key_row_and_traceback() -> None:
    p = Partition(Picky)
    with pytest.raises(OperatorFailed) as caught:
        p.applied(0, ("a", 1), ("b", -1))
    error = caught.value
    assert error.what == "process() raised RuntimeError: minus one\nis not liked"
    assert (error.where["operator"], error.where["partition"]) == ("Op", 3)
    assert error.where["key"] == "'b'"
    assert error.where["row"] == "Row(k='b', v=-1)"
    assert 'raise RuntimeError("minus one' in error.where["traceback"]
    assert isinstance(error.__cause__, RuntimeError)
    assert len(str(error).splitlines()) == 1


def test_a_store_that_fails_to_write_leaves_the_state_as_it_was() -> None:
    class Full(MemoryStore):
        full = False

        def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
            if self.full:
                raise OSError("no space left")
            super().apply(mutations, sync=sync)

    store = Full()
    p = Partition(Count, store)
    p.apply(0, ("a", 1))
    store.full = True
    with pytest.raises(OSError, match="no space"):
        p.applied(1, ("a", 2))
    assert (p.processor.sequence, p.processor.reached("s").batch) == (1, 0)
    store.full = False
    with pytest.raises(Unavailable, match="it is unknown whether"):
        p.applied(1, ("a", 2))
    assert Partition(Count, store).apply(1, ("a", 2)) == [("a", 2, 3)]


@pytest.mark.parametrize(
    ("schema", "rows", "error"),
    [
        (pa.schema([("x", pa.string()), ("v", pa.int64())]), [("a", 1)], KeyColumnMissing),
        (SCHEMA, [("a", 1), (None, 2)], NullKey),
        (pa.schema([("k", pa.float64()), ("v", pa.int64())]), [(1.0, 1), (float("nan"), 1)], StateflowError),
        (pa.schema([("k", pa.string()), ("w", pa.int64())]), [("a", 1)], OperatorFailed),
    ],
)
def test_bad_input(schema: pa.Schema, rows: list[Any], error: type[StateflowError]) -> None:
    p = Partition()
    p.apply(0, ("a", 1))
    before = p.content()
    with pytest.raises(error):
        p.processor.apply(Batch("s", 1), schema.serialize().to_pybytes(), message(rows, schema), NOW_US)
    assert p.content() == before
    assert p.apply(1, ("a", 2)) == [("a", 2, 3)]


def test_a_column_that_appears_later_is_seen() -> None:
    p = Partition()
    p.apply(0, ("a", 1))
    wider = pa.schema([*SCHEMA, pa.field("more", pa.string())])
    data = pa.RecordBatch.from_pylist([{"k": "a", "v": 2, "more": "x"}], schema=wider).serialize().to_pybytes()
    assert p.rows(p.processor.apply(Batch("s", 1), wider.serialize().to_pybytes(), data, NOW_US)) == [("a", 2, 3)]


# -- restarts, followers, schema ----------------------------------------------------------------------------


def test_a_follower_that_applies_every_change_set_has_the_same_store() -> None:
    p = Partition()
    follower = MemoryStore(p.content())
    for number in range(4):
        p.apply(number, ("a", number), ("b", 1))
    decoded = [ChangeSet.decode(data) for data in p.changes]
    assert [(c.sequence, c.position, c.epoch, c.source) for c in decoded] == [(n + 1, n, 4, "s") for n in range(4)]
    assert {(c.operator, c.partition) for c in decoded} == {("Op", 3)}
    for change_set in decoded:
        follower.apply(change_set.mutations)
    assert dict(follower.scan(b"")) == p.content()
    there = Partition(Count, follower)
    assert there.processor.sequence == 4
    assert there.applied(3, ("a", 3), ("b", 1)).replayed
    assert there.apply(4, ("a", 4)) == [("a", 5, 10)]


class Widened(Count):
    from stateflow import state as _state

    extra = _state.value(float, default=0.0)


class Changed(Count):
    from stateflow import state as _state

    n = _state.value(str, default="")  # type: ignore[assignment]


def test_a_state_may_be_added_but_not_changed() -> None:
    p = Partition()
    p.apply(0, ("a", 1))
    before = p.content()
    p.start(Changed)
    with pytest.raises(SchemaMismatch, match="'n'"):
        p.apply(1, ("a", 2))
    assert p.content() == before
    p.start(Widened)
    assert p.apply(1, ("a", 2)) == [("a", 2, 3)]
    p.start(Count)
    assert p.apply(2, ("a", 2)) == [("a", 3, 5)]


def test_open_and_close_are_called_once() -> None:
    Lifecycled.calls.clear()
    processor = PartitionProcessor(Lifecycled, P, MemoryStore(), epoch=1)
    processor.apply(Batch("s", 0), SCHEMA.serialize().to_pybytes(), message([("a", 1), ("b", 1)]), NOW_US)
    processor.close()
    assert Lifecycled.calls == ["open 3 None", "process a", "process b", "close"]


def test_positions_and_ownership_have_a_layout_version() -> None:
    for position in (layout.Position(41), layout.Position(41, -7)):
        assert layout.Position.decode(position.encode()) == position
    ownership = layout.Ownership("edge-0", "SEALED", 7, "m1", "cloud-0", "cloud", "c:1", "d")
    assert layout.Ownership.decode(ownership.encode()) == ownership
    newer = bytes([ownership.encode()[0], 2]) + ownership.encode()[2:]
    with pytest.raises(StateflowError, match="layout 2"):
        layout.Ownership.decode(newer)


# -- against a plain model ----------------------------------------------------------------------------------

ops = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=3)),
        st.tuples(st.just("fail"), st.sampled_from([-1, -2, -3])),
        st.just(("replay", None)),
        st.just(("restart", None)),
        st.just(("gap", None)),
    ),
    max_size=15,
)


@given(ops, st.integers(1, 3))
@settings(max_examples=sized(480))
def test_state_is_that_of_every_batch_once_in_order(script: list[tuple[str, Any]], cached: int) -> None:
    store = MemoryStore()
    start: Callable[[], PartitionProcessor] = lambda: PartitionProcessor(Picky, P, store, epoch=1, cached_keys=cached)  # noqa: E731
    processor = start()
    model: dict[str, int] = {}
    number, last = 0, b""
    encoded = SCHEMA.serialize().to_pybytes()
    for what, argument in script:
        if what == "new":
            applied = processor.apply(Batch("s", number), encoded, message(argument) if argument else b"", NOW_US)
            expected = []
            for key, value in argument:
                model[key] = model.get(key, 0) + 1
                expected.append({"k": key, "n": model[key], "total": value})
            assert read_batch(applied.output, output_schema(Picky)).to_pylist() == expected
            number, last = number + 1, applied.output
        elif what == "fail":
            with pytest.raises(StateflowError):
                processor.apply(Batch("s", number), encoded, message([("a", 1), ("b", argument)]), NOW_US)
        elif what == "replay" and number:
            assert processor.apply(Batch("s", number - 1), encoded, b"", NOW_US) == Applied(last, True, 0)
        elif what == "gap":
            with pytest.raises(PositionGap):
                processor.apply(Batch("s", number + 1), encoded, b"", NOW_US)
        elif what == "restart":
            processor = start()
    assert {key: processor.state.peek(key).n.value for key in "ab"} == {key: model.get(key, 0) for key in "ab"}
    assert processor.sequence == number


class Yielding(Operator):
    """An operator that yields objects and goes on changing them."""

    key = "k"
    output = "k string, seen array<long>, raw binary"
    side_outputs = {"side": "seen array<long>"}  # noqa: RUF012
    v = state.value(list[int], default=[])
    log = state.list(int)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        raw = bytearray(b"x")
        for _ in range(2):
            self.v.value.append(row.v)
            self.log.append(row.v)
            raw += b"y"
            ctx.emit("side", {"seen": self.log})
            yield {"k": row.k, "seen": self.v.value, "raw": raw} if row.v % 2 else (row.k, self.v.value, raw)


@pytest.mark.parametrize("value", [1, 2], ids=["dicts", "tuples"])
def test_what_is_yielded_is_what_it_was_then(value: int) -> None:
    with OperatorHarness(Yielding) as harness:
        rows = harness.send([{"k": "a", "v": value}])
        assert [(row["seen"], row["raw"]) for row in rows] == [([value], b"xy"), ([value] * 2, b"xyy")]
        assert [row["seen"] for row in harness.side_outputs["side"]] == [[value], [value] * 2]


class Named(NamedTuple):
    k: str
    n: int


class Reusing(Operator):
    """An operator that fills one dict again for each row, with columns whose values never change."""

    key = "k"
    output = "k string, n long"
    side_outputs = {"side": "k string, n long"}  # noqa: RUF012

    def open(self, ctx: Context) -> None:
        self.out: dict[str, Any] = {}
        self.n = 0

    def filled(self, k: str) -> dict[str, Any]:
        self.n += 1
        self.out.update(k=k, n=self.n)
        return self.out

    def process(self, row: Any, ctx: Context) -> Iterable[Any]:
        ctx.set_timer(0)
        match row.v:
            case 0:
                return (self.filled(row.k) for _ in range(2))
            case 1:
                return [self.filled(row.k)]
            case 2:
                ctx.emit("side", self.filled(row.k))
                ctx.emit("side", self.filled(row.k))
                return []
            case _:
                self.n += 1
                return [Named(row.k, self.n), (row.k, self.n)]

    def on_watermark(self, watermark: Any, ctx: Context) -> Iterator[Any]:
        yield self.filled("w")
        yield self.filled("w")

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[Any]:
        yield self.filled(ctx.key)
        yield self.filled(ctx.key)


@pytest.mark.parametrize(
    ("values", "seen"), [([0, 0], [1, 2, 3, 4]), ([1, 1], [1, 2]), ([3], [1, 1])], ids=["generators", "lists", "tuples"]
)
def test_a_dict_that_is_filled_again_leaves_the_rows_before(values: list[int], seen: list[int]) -> None:
    with OperatorHarness(Reusing) as harness:
        assert [row["n"] for row in harness.send([{"k": "a", "v": value} for value in values])] == seen


def test_a_dict_that_is_filled_again_leaves_what_was_emitted() -> None:
    with OperatorHarness(Reusing) as harness:
        harness.send([{"k": "a", "v": 2}])
        assert harness.side_outputs["side"] == [{"k": "a", "n": 1}, {"k": "a", "n": 2}]


def test_a_dict_that_is_filled_again_leaves_the_rows_of_watermarks_and_timers() -> None:
    with OperatorHarness(Reusing, partitions=1) as harness:
        harness.send([{"k": "a", "v": 2}])
        late = [(row["k"], row["n"]) for row in harness.advance_watermark(1)]
        assert late == [("w", 3), ("w", 4), ("a", 5), ("a", 6)]


# -- the end of a run of a batch DataFrame ----------------------------------------------------------------------------

S = 1_000_000
TIMED = pa.schema([("k", pa.string()), ("at", pa.timestamp("us", "UTC"))])
TIMES = state.counter(name="times")


class Minutes(Operator):
    """Counts rows per key and minute. Rows also see how many of their key's rows event time has not passed by a day."""

    key, event_time, output = "k", "at", "k string, what string, at long, n long"
    minutes = TumblingWindows(timedelta(minutes=1))
    recent = state.value(int, default=0, ttl=timedelta(days=1), ttl_domain="event")

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.recent.value += 1
        for window in self.minutes.of(ctx):
            window.state(TIMES).add()
        yield row.k, "late" if self.minutes.is_late(ctx) else "row", row.at.timestamp(), self.recent.value

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[Any]:
        for window in self.minutes.ended(timer, ctx):
            yield ctx.key, "window", window.start.timestamp(), window.state(TIMES).value


class Hears(Minutes):
    """A :class:`Minutes` that also outputs each watermark."""

    def on_watermark(self, watermark: Any, ctx: Context) -> Iterator[Any]:
        yield "", "watermark", None if watermark.year == 9999 else watermark.timestamp(), 0


class Runs:
    """A partition to which runs of batch DataFrames and queries send rows, given by their seconds."""

    def __init__(self, cls: type[Operator] = Minutes, restarts: bool = False) -> None:
        self.cls, self.restarts, self.store = cls, restarts, MemoryStore()
        self.start()

    def start(self) -> None:
        self.processor = PartitionProcessor(self.cls, P, self.store, epoch=4)

    def applied(self, source: str, number: int, watermark_us: int | None, *seconds: int) -> bytes:
        if self.restarts:
            self.start()
        rows = pa.RecordBatch.from_pylist([{"k": "a", "at": second * S} for second in seconds], schema=TIMED)
        event_us = max(seconds) * S if seconds else None
        batch = Batch(source, number, watermark_us=watermark_us, event_us=event_us)
        data = rows.serialize().to_pybytes() if seconds else b""
        return self.processor.apply(batch, TIMED.serialize().to_pybytes(), data, NOW_US).output

    def send(self, source: str, number: int, watermark_s: int | None, *seconds: int) -> list[tuple[Any, ...]]:
        output = self.applied(source, number, None if watermark_s is None else watermark_s * S, *seconds)
        return self.rows(output)

    def end(self, source: str, number: int, *seconds: int) -> list[tuple[Any, ...]]:
        """Sends the last piece of a run."""
        return self.rows(self.applied(source, number, LATEST_US, *seconds))

    def rows(self, output: bytes) -> list[tuple[Any, ...]]:
        table = read_batch(output, output_schema(self.cls))
        return [tuple(row.values())[1:] for row in table.to_pylist()]


@pytest.fixture(params=[False, True], ids=["", "restarts"])
def runs(request: pytest.FixtureRequest) -> Runs:
    return Runs(restarts=request.param)


DAY_S = 86_400


def test_the_end_of_a_run_ends_its_windows_and_event_time_goes_on_from_its_newest_row(runs: Runs) -> None:
    assert runs.send("batch:monday", 0, None, 10) == [("row", 10, 1)]
    assert runs.end("batch:monday", 1, 70, 75) == [
        ("row", 70, 2),
        ("row", 75, 3),
        ("window", 0, 1),
        ("window", 60, 2),
    ]
    assert read_watermark(runs.store) == 75 * S
    assert runs.end("batch:tuesday", 0, DAY_S + 10, 20) == [
        ("row", DAY_S + 10, 4),
        ("late", 20, 5),
        ("window", DAY_S, 1),
    ]
    day = 2 * DAY_S
    assert runs.send("query:q", 0, None, day) == [("row", day, 6)]
    assert runs.send("query:q", 1, day + 11, day + 61) == [("row", day + 61, 1)], (
        "event time has passed the run by a day"
    )
    assert runs.send("query:q", 2, day + 61) == [("window", day, 1)]
    assert read_watermark(runs.store) == (day + 61) * S


def test_the_end_of_a_run_without_rows_leaves_the_watermark(runs: Runs) -> None:
    assert runs.send("batch:m", 0, None, 10)
    assert runs.end("batch:m", 1) == [("window", 0, 1)]
    assert read_watermark(runs.store) == 10 * S, "of the run's pieces before"
    assert runs.end("batch:n", 0) == []
    assert read_watermark(runs.store) == 10 * S
    assert Runs().end("batch:n", 0) == []


def test_the_end_of_a_run_waits_for_the_watermark_of_another_source(runs: Runs) -> None:
    runs.send("query:q", 0, None, 10)
    assert runs.send("query:q", 1, 50) == []
    assert runs.end("batch:m", 0, 130) == [("row", 130, 2)]
    assert read_watermark(runs.store) == 50 * S
    assert runs.send("query:q", 2, 70) == [("window", 0, 1)], "the run that has ended holds nothing back"
    assert runs.send("query:q", 3, 200) == [("window", 120, 1)]


def test_a_piece_behind_the_end_of_its_run_is_no_end(runs: Runs) -> None:
    runs.end("batch:m", 0, 10)
    assert runs.send("batch:m", 1, None, 70) == [("row", 70, 2)]
    assert runs.end("batch:m", 2, 80) == [("row", 80, 3), ("window", 60, 2)]


def test_a_last_piece_that_comes_again_has_the_same_output(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    runs.send("batch:m", 0, None, 10)
    ended = Minutes.on_timer

    def fails(self: Minutes, timer: Any, ctx: Context) -> Any:
        yield from ended(self, timer, ctx)
        raise ValueError("no")

    monkeypatch.setattr(Minutes, "on_timer", fails)
    with pytest.raises(OperatorFailed):
        runs.end("batch:m", 1, 20)
    monkeypatch.undo()
    assert runs.send("query:q", 0, None, 5) == [("row", 5, 2)], "it is not late"
    found = runs.end("batch:m", 1, 20)
    assert found == [("row", 20, 3), ("window", 0, 3)]
    assert runs.end("batch:m", 1, 20) == found
    assert read_watermark(runs.store) == 20 * S


def test_an_operator_that_hears_watermarks_hears_the_end_of_each_run() -> None:
    runs = Runs(Hears)
    end = ("watermark", None, 0)
    assert runs.end("batch:m", 0, 10) == [("row", 10, 1), end, ("window", 0, 1)]
    assert runs.end("batch:n", 0, 70) == [("row", 70, 2), end, ("window", 60, 1)]
    assert runs.send("query:q", 0, 70) == []
    assert runs.send("query:q", 1, 71, 90) == [("row", 90, 3), ("watermark", 71, 0)]


@pytest.mark.parametrize("watermark_s", [None, 50])
def test_a_partition_that_stored_the_end_of_a_run_goes_on_from_its_sources(watermark_s: int | None) -> None:
    """Earlier builds stored the end of a run as the partition's watermark, and all later rows were late."""
    runs = Runs()
    runs.send("batch:m", 0, None, 10)
    runs.end("batch:m", 1, 20)
    runs.send("query:q", 0, watermark_s)
    stored = {layout.WATERMARK: LATEST_US.to_bytes(8, "big", signed=True)}
    runs.store.apply(Mutations(puts=[*stored.items()]))
    runs.start()
    assert read_watermark(runs.store) is None
    before_s = watermark_s or 0
    assert runs.send("query:q", 1, watermark_s, before_s + 5) == [("row", before_s + 5, 3)]
    assert read_watermark(runs.store) == (None if watermark_s is None else watermark_s * S)
    assert runs.send("query:r", 0, 30) == [], "a source that joins does not lower it"
    runs.start()
    assert runs.send("query:q", 2, 100, 40) == [("row", 40, 4)]
    assert read_watermark(runs.store) == max(30, before_s) * S
