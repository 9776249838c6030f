"""The operator of the project NAME, which keeps state for each sensor, and emits a row for each reading."""

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class Alarms(Operator):
    """Emits each reading, with an alarm if the sensor is much hotter than usual."""

    key = "sensor"
    output = "sensor string, celsius double, usual double, alarm boolean"

    readings = state.counter()
    usual = state.value(float, default=0.0)  # a mean in which old readings lose weight
    recent = state.list(float)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.readings.add(1)
        known = self.readings.value > 5
        alarm = known and row.celsius > self.usual.value + 5
        if not alarm:
            weight = 0.2 if known else 1 / self.readings.value
            self.usual.value += weight * (row.celsius - self.usual.value)
        self.recent.append(row.celsius)
        while len(self.recent) > 3:
            self.recent.pop(0)
        yield row.sensor, row.celsius, round(self.usual.value, 2), alarm
