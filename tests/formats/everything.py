"""An operator with every kind of state, whose outputs say what its state was."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stateflow import Context, Operator, state

KEYS = [f"k{number}" for number in range(24)]
NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
STATES = ("seen", "best", "by_tag", "by_pair", "tags", "log", "money", "named", "short")


@dataclass
class Named:
    name: str
    at: dt.datetime | None = None


class Everything(Operator):
    key = "k"
    output = "k string, seen long, timers long"
    seen = state.counter()
    best = state.reducing(float, max)
    by_tag = state.map(str, int)
    by_pair = state.map(tuple[int, str], list[int])
    tags = state.set(bytes)
    log = state.list(str)
    money = state.map(dt.date, decimal.Decimal)
    named = state.value(Named)
    short = state.map(uuid.UUID, float, ttl=dt.timedelta(days=36_500))
    fired = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        number = row.v
        self.seen.add(1)
        self.best.add(number / 3)
        self.by_tag[f"t{number % 5}"] = number
        self.by_pair[number % 3, "p"] = [number, number + 1]
        self.tags.add(bytes([number % 7]))
        if number % 11 == 10:
            self.tags.clear()
        self.log.append(f"row {number}")
        self.money[dt.date(2026, 1, 1 + number % 28)] = decimal.Decimal(number) / 4
        self.named.value = Named(row.k, NOON + dt.timedelta(seconds=number))
        self.short[uuid.UUID(int=number)] = float(number)
        if number % 4 == 0:
            ctx.set_timer(NOON + dt.timedelta(days=365 * 50), name="late")
        yield row.k, self.seen.value, self.fired.value

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[Any]:
        self.fired.value += 1
        yield from ()


def rows(batch: int) -> list[dict[str, Any]]:
    return [{"k": key, "v": batch * len(KEYS) + number} for number, key in enumerate(KEYS)]
