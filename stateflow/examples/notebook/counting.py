"""The operator of move.ipynb as a module, for use outside the notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class Counting(Operator):
    """Counts the readings of each sensor, and keeps their mean."""

    key = "sensor"
    output = "sensor string, readings long, mean double"

    readings = state.counter()
    total = state.value(float, default=0.0)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.readings.add(1)
        self.total.value += row.celsius
        yield row.sensor, self.readings.value, self.total.value / self.readings.value
