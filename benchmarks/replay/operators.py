"""Operators of the replay queries. Replicas and Spark's workers import this module by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, Timer, state


class Count(Operator):
    """Numbers the rows of each key. Emits every row with its number."""

    key = "k"
    output = "part int, off long, k string, due timestamp, n long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.n.value += 1
        yield row.part, row.off, row.k, row.due, self.n.value


class Seconds(Operator):
    """Counts the rows of a key that were due in each second. Emits the count when the watermark has passed the
    second."""

    key = "k"
    output = "k string, second long, n long"
    counts = state.map(int, int)

    def process(self, row: Any, ctx: Context) -> None:
        second = int(row.due.timestamp())
        self.counts[second] = self.counts.get(second, 0) + 1
        ctx.set_timer((second + 1) * 1_000_000, name=str(second))

    def on_timer(self, timer: Timer, ctx: Context) -> Iterator[Any]:
        second = int(timer.name)
        yield ctx.key, second, self.counts.pop(second)
