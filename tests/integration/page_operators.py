"""Operators that the pages of docs/ speak of. Replicas import this module by name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from stateflow import Context, Operator, TumblingWindows, state


class DelayByAircraft(Operator):
    """The operator of README, with the side output of docs/spark.md."""

    key = "tailnum"
    output = "tailnum string, flights long, mean_delay double"
    side_outputs = {"late": "tailnum string, arr_delay double"}  # noqa: RUF012
    flights = state.value(int, default=0)
    delay_by_dest = state.map(str, float)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.flights.value += 1
        self.delay_by_dest[row.dest] = self.delay_by_dest.get(row.dest, 0.0) + (row.arr_delay or 0.0)
        if row.arr_delay > 15:
            ctx.emit("late", (row.tailnum, row.arr_delay))
        yield row.tailnum, self.flights.value, sum(self.delay_by_dest.values()) / self.flights.value


class Delays(DelayByAircraft):
    """The operator of docs/ledger.md."""


class Hourly(Operator):
    """The operator of docs/state.md whose states of windows docs/spark.md reads."""

    key, event_time = "gate", "at"
    output = "gate string, hour timestamp, flights long"
    hourly = TumblingWindows(timedelta(hours=1))

    def process(self, row: Any, ctx: Context) -> None:
        for window in self.hourly.of(ctx):
            window.state(COUNT).value += 1

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        for window in self.hourly.ended(timer, ctx):
            yield ctx.key, window.start, window.state(COUNT).value


COUNT = state.counter(name="count")
