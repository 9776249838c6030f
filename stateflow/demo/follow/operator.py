"""The operator of the convoys: what each vehicle has told so far, by the way it came. Replicas import this module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class Trips(Operator):
    """Counts the rows of a vehicle and sums its metres, by the way that they came, and keeps the sites where it was.

    Telemetry comes through Spark, readings come from gateways, and no order between them is defined. Each way therefore
    has its own numbers, and the sites are a set: every order gives the same result.
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
