"""Operators that the benchmarks deploy. Replicas import this module by name."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from stateflow import BatchOperator, Operator, state


class CountSum(Operator):
    """Counts and sums the values of each key. Emits one row for every input row."""

    key = "k"
    output = "k long, n long, total double"

    figures = state.value(tuple[int, float], default=(0, 0.0))  # one state, as the contestants have

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int, float]]:
        n, total = self.figures.value
        self.figures.value = n, total = n + 1, total + row.v
        yield row.k, n, total


class CountSumColumns(BatchOperator):
    """CountSum for whole batches. Emits one row for every key of a batch."""

    key = "k"
    output = "k long, n long, total double"

    figures = state.value(tuple[int, float], default=(0, 0.0))

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> pa.Table:
        rows = pa.table({"k": batch["k"], "v": batch["v"]})
        sums = rows.group_by("k", use_threads=False).aggregate([("v", "count"), ("v", "sum")])
        keys = sums["k"].combine_chunks()
        n, total = self.figures.get_many(keys).flatten()
        n, total = pc.add(n, sums["v_count"].combine_chunks()), pc.add(total, sums["v_sum"].combine_chunks())
        self.figures.put_many(keys, pa.StructArray.from_arrays([n, total], names=["_0", "_1"]))
        return pa.table({"k": keys, "n": n, "total": total})


#: seconds that CountSumTimed keeps a key's last value, and seconds of silence after which it drops the value
KEPT_S, SILENT_S = 10.0, 1.0


class CountSumTimed(CountSum):
    """CountSum that also keeps the last value of each key. The value is dropped when no rows of the key arrive.

    Each row writes a state with a ttl and resets the key's timer. Outputs and ``figures`` are those of CountSum.
    """

    last = state.value(float, default=0.0, ttl=KEPT_S)

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int, float]]:
        self.last.value = row.v
        ctx.set_timer(time.time_ns() // 1000 + round(SILENT_S * 1e6), domain="processing")
        return super().process(row, ctx)

    def on_timer(self, timer: Any, ctx: Any) -> None:
        self.last.clear()


#: CPU time that Busy takes for a row, in microseconds
BUSY_US = 50


class Busy(CountSum):
    """CountSum that uses ``BUSY_US`` microseconds of CPU time for each row."""

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int, float]]:
        until = time.thread_time() + BUSY_US / 1e6
        while time.thread_time() < until:
            pass
        return super().process(row, ctx)


class Keep(Operator):
    """Keeps the last payload of each key, and emits nothing.

    The payloads determine the size of the state and of its changes.
    """

    key = "k"
    output = "k long"
    payload = state.value(bytes, default=b"")

    def process(self, row: Any, ctx: Any) -> None:
        self.payload.value = row.payload


class Ballast(Operator):
    """Counts and sums as CountSum does, and also keeps a payload for each key.

    A row with a size replaces the key's payload by that many bytes. They are incompressible, and the same in every run.
    """

    key = "k"
    output = "k long, n long, total double"

    figures = state.value(tuple[int, float], default=(0, 0.0))
    payload = state.value(bytes, default=b"")

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int, float]]:
        n, total = self.figures.value
        self.figures.value = n, total = n + 1, total + row.v
        if row.size:
            self.payload.value = random.Random(row.k * 1_000_003 + n).randbytes(row.size)
        yield row.k, n, total
