"""Groups a user's clicks into visits, with no more than half an hour between two clicks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from stateflow import Context, Operator, SessionWindows, Timer, Window, state

GAP = timedelta(minutes=30)
CLICKS = state.counter(name="clicks")
PAGES = state.set(str, name="pages")


def join(into: Window, ended: Window) -> None:
    """Joins two visits when a click between them arrives."""
    into.state(CLICKS).add(ended.state(CLICKS).value)
    into.state(PAGES).update(ended.state(PAGES))


class Visits(Operator):
    """Emits one row for each visit, when the visit is over."""

    key, event_time = "user", "at"
    output = "user string, began timestamp, minutes double, clicks long, pages array<string>"
    side_outputs = {"late": "user string, at timestamp, page string"}

    visits = SessionWindows(GAP, join, allowed_lateness=timedelta(minutes=5))

    def process(self, row: Any, ctx: Context) -> None:
        if self.visits.is_late(ctx):
            ctx.emit("late", (row.user, row.at, row.page))
        for visit in self.visits.of(ctx):
            visit.state(CLICKS).add(1)
            visit.state(PAGES).add(row.page)

    def on_timer(self, timer: Timer, ctx: Context) -> Iterator[Any]:
        for visit in self.visits.ended(timer, ctx):
            minutes = (visit.end - visit.start - GAP) / timedelta(minutes=1)  # from the first click to the last
            yield ctx.key, visit.start, minutes, visit.state(CLICKS).value, sorted(visit.state(PAGES))
