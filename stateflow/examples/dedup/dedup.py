"""Passes each event once, even if it is sent again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from stateflow import Context, Operator, state


class Once(Operator):
    """Passes an event unless its device has sent the same id within a day."""

    key = "device"
    output = "device string, event string, at timestamp, celsius double"

    seen = state.set(str, ttl=timedelta(days=1), ttl_domain="event")  # each id expires a day after it was added
    repeated = state.counter()

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        if row.event in self.seen:
            self.repeated.add(1)
        else:
            self.seen.add(row.event)
            yield row.device, row.event, row.at, row.celsius
