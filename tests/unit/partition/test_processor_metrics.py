"""Metrics that an operator counts by ``ctx.metrics`` count with the commit of its batch, and never twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from stateflow import state
from stateflow.errors import InvalidArgument, OperatorFailed
from stateflow.metrics.figures import Histogram
from stateflow.metrics.own import OwnFigures
from stateflow.operator.operator import BatchOperator, Context, Operator
from stateflow.partition.positions import Batch
from stateflow.partition.processor import PartitionProcessor
from stateflow.storage import MemoryStore
from stateflow.types import PartitionId
from tests.unit.partition.test_processor_batches import NOW_US, SCHEMA, message

P = PartitionId("Counting", 0)


class Counting(Operator):
    key = "k"
    output = "n long"
    n = state.value(int, default=0)

    def open(self, ctx: Context) -> None:
        ctx.metrics.counter("opened").inc()
        self.rows = ctx.metrics.counter("rows", "that came", ["sign"])

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[int]]:
        self.rows.labels(sign="+" if row.v >= 0 else "-").inc()
        ctx.metrics.histogram("v", buckets=[1, 10]).observe(row.v)
        if row.v < 0:
            raise ValueError("negative")
        yield (row.v,)

    def close(self, ctx: Context) -> None:
        ctx.metrics.counter("closed").inc()


class CountingColumns(BatchOperator):
    key = "k"
    output = "n long"

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        ctx.metrics.counter("rows").inc(len(batch))
        ctx.metrics.gauge("newest").set(batch["v"][-1].as_py())


def apply(processor: PartitionProcessor, number: int, *rows: tuple[str, int]) -> bool:
    return processor.apply(Batch("s", number), SCHEMA.serialize().to_pybytes(), message(rows), NOW_US).replayed


def test_a_batch_counts_once_and_only_when_it_is_applied() -> None:
    figures, store = OwnFigures(), MemoryStore()
    processor = PartitionProcessor(Counting, P, store, 1, figures=figures)
    assert figures.value("Counting", "opened", {}) == 1
    apply(processor, 0, ("a", 1), ("b", 2))
    with pytest.raises(OperatorFailed):
        apply(processor, 1, ("a", 1), ("b", -1))
    assert figures.value("Counting", "rows", {"sign": "+"}) == 2
    with pytest.raises(InvalidArgument, match="there is no metric 'rows'"):  # only the failed batch has used it
        figures.value("Counting", "rows", {"sign": "-"})
    assert not apply(processor, 1, ("a", 1), ("b", 11))
    assert apply(processor, 1, ("a", 1), ("b", 11)), "it is sent again, as its answer was lost"
    again = PartitionProcessor(Counting, P, store, 2, figures=figures)
    assert apply(again, 1, ("a", 1), ("b", 11)), "… after a move or restart"
    assert figures.value("Counting", "rows", {"sign": "+"}) == 4
    observed = figures.value("Counting", "v", {})
    assert not isinstance(observed, float)
    assert observed.counts == [2, 1, 1]
    assert figures.value("Counting", "opened", {}) == 2
    processor.close()
    assert figures.value("Counting", "closed", {}) == 1


def test_of_a_batch_operator() -> None:
    figures = OwnFigures()
    processor = PartitionProcessor(
        CountingColumns, PartitionId("CountingColumns", 0), MemoryStore(), 1, figures=figures
    )
    apply(processor, 0, ("a", 1), ("b", 2))
    apply(processor, 1, ("c", 7))
    apply(processor, 1, ("c", 7))
    assert figures.value("CountingColumns", "rows", {}) == 3
    assert figures.value("CountingColumns", "newest", {}) == 7


def test_a_write_that_is_refused_counts_nothing() -> None:
    class Refusing(MemoryStore):
        refuses = False

        def apply(self, mutations: Any, *, sync: bool = False) -> None:
            if self.refuses:
                raise OSError("no")
            super().apply(mutations, sync=sync)

    figures, store = OwnFigures(), Refusing()
    processor = PartitionProcessor(Counting, P, store, 1, figures=figures)
    store.refuses = True
    with pytest.raises(OSError, match="no"):
        apply(processor, 0, ("a", 1))
    store.refuses = False
    assert figures.value("Counting", "v", {}) == Histogram((1.0, 10.0))
    apply(PartitionProcessor(Counting, P, store, 1, figures=figures), 0, ("a", 1))
    assert figures.value("Counting", "rows", {"sign": "+"}) == 1


def test_metrics_that_cannot_be_counted_fail_no_committed_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    figures, store = OwnFigures(), MemoryStore()
    processor = PartitionProcessor(Counting, P, store, 1, figures=figures)
    with monkeypatch.context() as patched:
        patched.setattr(figures, "add", broken)
        assert not apply(processor, 0, ("a", 1))
    assert "were not counted" in caplog.text
    assert apply(processor, 0, ("a", 1)), "it was committed"
    apply(processor, 1, ("a", 1))
    assert figures.value("Counting", "rows", {"sign": "+"}) == 1


def test_who_uses_none_has_none() -> None:
    from tests.unit.operators import Count

    figures = OwnFigures()
    processor = PartitionProcessor(Count, P, MemoryStore(), 1, figures=figures)
    apply(processor, 0, ("a", 1))
    assert processor._instance._ctx._metrics is None
    assert figures.read() == []
