"""The operator of the demonstration: what each aircraft has done so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class DelayByAircraft(Operator):
    """Running delay statistics per aircraft: a value, a map and a set."""

    key = "tailnum"
    output = "seq long, tailnum string, flights long, mean_delay double, carriers array<string>"

    flights = state.value(int, default=0)
    delay_by_dest = state.map(str, float)
    carriers = state.set(str)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.flights.value += 1
        self.delay_by_dest[row.dest] = self.delay_by_dest.get(row.dest, 0.0) + (row.arr_delay or 0.0)
        self.carriers.add(row.carrier)
        mean_delay = sum(self.delay_by_dest.values()) / self.flights.value
        yield row.seq, row.tailnum, self.flights.value, mean_delay, sorted(self.carriers)
