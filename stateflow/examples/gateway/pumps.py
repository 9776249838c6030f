"""Counts the readings of each pump, and raises alarms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class Pumps(Operator):
    """Emits each reading, with an alarm if the pump's pressure has fallen at least three times in a row."""

    key = "pump"
    output = "pump string, reading long, bar double, alarm boolean"

    readings = state.counter()
    last = state.value(float)
    falls = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.readings.add(1)
        fell = self.last.value is not None and row.bar < self.last.value
        self.falls.value = self.falls.value + 1 if fell else 0
        self.last.value = row.bar
        yield row.pump, self.readings.value, row.bar, self.falls.value >= 3
