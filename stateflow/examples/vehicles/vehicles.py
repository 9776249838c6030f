"""Follows the trips of vehicles, whichever site sends a reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class Trips(Operator):
    """Collects the kilometres and the sites of each vehicle. The operator does not know where its state is."""

    key = "vehicle"
    output = "vehicle string, readings long, km double, sites array<string>"

    readings = state.counter()
    km = state.value(float, default=0.0)
    sites = state.list(str)  # in the order of the trip

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.readings.add(1)
        self.km.value += row.km
        if not self.sites or self.sites[-1] != row.site:
            self.sites.append(row.site)
        yield row.vehicle, self.readings.value, self.km.value, list(self.sites)
