"""The operators of the demonstrations: statistics of each aircraft, and counts of each vehicle's rows. Replicas import
this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class DelayByAircraft(Operator):
    """Keeps running delay statistics of each aircraft, in a value, a map and a set."""

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


class Trips(Operator):
    """Counts the rows of a vehicle and sums its metres, separately for each path, and keeps the sites that it visited.

    A vehicle's rows take two paths: telemetry arrives through Spark, and readings arrive from gateways. The two paths
    have no common order. So each path has its own numbers, and the sites are a set: every order gives the same result.
    """

    key = "vehicle"
    output = "seq long, vehicle string, way string, told long, metres long"

    told = state.map(str, int)
    metres = state.map(str, int)
    sites = state.set(str)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        told = self.told[row.way] = self.told.get(row.way, 0) + 1
        metres = self.metres[row.way] = self.metres.get(row.way, 0) + row.metres
        self.sites.add(row.site)
        yield row.seq, row.vehicle, row.way, told, metres
