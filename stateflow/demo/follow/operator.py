"""The operator of the convoys: what each vehicle has told so far, by the way it came. Replicas import this module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class Trips(Operator):
    """Telemetry comes through Spark, readings from gateways, and nobody says which of two rows comes first. So each way
    has its own numbers, and where a vehicle was is a set: the same comes of every order."""

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
