"""Computes statistics of each aircraft, such as its flights, delays by destination and carriers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class AircraftDelays(Operator):
    """Emits one row for each flight, with the statistics of its aircraft up to that flight."""

    key = "tailnum"
    output = "tailnum string, flights long, mean_delay double, worst string, carriers array<string>"

    flights = state.counter()
    delay_by_dest = state.map(str, float)  # minutes, of all flights there
    carriers = state.set(str)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.flights.add(1)
        # a flight that was cancelled has no delay
        self.delay_by_dest[row.dest] = self.delay_by_dest.get(row.dest, 0.0) + (row.arr_delay or 0.0)
        self.carriers.add(row.carrier)
        mean = sum(self.delay_by_dest.values()) / self.flights.value
        worst = max(self.delay_by_dest, key=self.delay_by_dest.__getitem__)
        yield row.tailnum, self.flights.value, round(mean, 2), worst, sorted(self.carriers)
