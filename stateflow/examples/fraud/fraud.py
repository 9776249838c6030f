"""Scores how suspicious each payment of a card is."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from stateflow import Context, Operator, Timer, state

HOUR = timedelta(hours=1)


class FraudScore(Operator):
    """Emits a score for each payment. A third country within an hour and an amount above ten times the usual one give
    points."""

    key, event_time = "card", "at"
    output = "card string, at timestamp, amount double, score long, why array<string>"

    payments = state.counter()
    usual = state.value(float, default=0.0)  # the mean of payments that were not suspicious
    countries = state.map(str, datetime)  # country of payments within an hour → time of the newest

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.countries[row.country] = row.at
        ctx.set_timer(row.at + HOUR, name=row.country)  # replaces the country's former timer
        # the timer fires at the end of the batch: decisions here use the rows' own times
        recent = [country for country, at in self.countries.items() if at > row.at - HOUR]
        points = {
            f"{len(recent)} countries in an hour": 60 if len(recent) > 2 else 0,
            "an unusual amount": 40 if self.payments.value >= 3 and row.amount > 10 * self.usual.value else 0,
        }
        why = [reason for reason, of_it in points.items() if of_it]
        if not why:
            self.payments.add(1)
            self.usual.value += (row.amount - self.usual.value) / self.payments.value
        yield row.card, row.at, row.amount, sum(points.values()), why

    def on_timer(self, timer: Timer, ctx: Context) -> None:
        del self.countries[timer.name]  # there was no payment from that country for an hour
