"""Nexmark Q3, Q4, Q5 and Q8 as operators. Replicas import this module by name.

Q3  local item suggestion: the persons in OR, ID or CA who sell in category 10. A join that grows.
Q4  average price for a category: the average of the winning bids of all closed auctions.
Q5  hot items: the auctions with the most bids in each sliding window.
Q8  new users: the persons who joined and opened an auction within the same window.

A row has all columns of its query. Columns that belong to other kinds of events are null.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from stateflow import Operator, SlidingWindows, TumblingWindows, state
from stateflow.operator.timers import to_us

Q3_STATES, Q3_CATEGORY = frozenset({"OR", "ID", "CA"}), 10
Q5_SIZE, Q5_EVERY = timedelta(milliseconds=400), timedelta(milliseconds=100)
Q8_SIZE = timedelta(milliseconds=400)


class Q3(Operator):
    key = "person"
    output = "person long, name string, city string, state string, auction long"

    who = state.value(tuple[str, str, str])
    waiting = state.list(int)  # auctions that arrived before their seller

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        if row.auction is None:
            if row.state in Q3_STATES:
                self.who.value = row.name, row.city, row.state
                for auction in self.waiting:
                    yield row.person, row.name, row.city, row.state, auction
            self.waiting.clear()
        elif row.category == Q3_CATEGORY:
            who = self.who.value
            if who is None:
                self.waiting.append(row.auction)
            else:
                yield row.person, *who, row.auction


class Q4Winners(Operator):
    """The first step of Q4. It emits the highest bid at or above the reserve when an auction expires."""

    key, event_time = "auction", "at"
    output = "auction long, category long, price long"

    open_auction = state.value(tuple[int, int, int])  # category, reserve, expires µs
    best = state.value(int, default=0)

    def process(self, row: Any, ctx: Any) -> None:
        if row.expires is not None:
            self.open_auction.value = row.category, row.reserve, to_us(row.expires)
            ctx.set_timer(row.expires, name="expires")
            return
        auction = self.open_auction.value
        if auction is not None and row.price >= auction[1] and to_us(row.at) < auction[2]:
            self.best.value = max(self.best.value, row.price)

    def on_timer(self, timer: Any, ctx: Any) -> Iterator[tuple[int, int, int]]:
        category, _, _ = self.open_auction.value
        if self.best.value:
            yield ctx.key, category, self.best.value
        self.open_auction.clear()
        self.best.clear()


class Q4Average(Operator):
    """The second step of Q4. It emits the average price of a category so far for each closed auction."""

    key = "category"
    output = "category long, closed long, average double"

    closed = state.value(tuple[int, int], default=(0, 0))  # number of closed auctions, sum of their prices

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int, float]]:
        n, total = self.closed.value
        self.closed.value = n, total = n + 1, total + row.price
        yield row.category, n, total / n


BIDS = state.counter(name="bids")


class Q5Counts(Operator):
    """The first step of Q5. It counts the bids of each auction in each window."""

    key, event_time = "auction", "at"
    output = "auction long, window timestamp, bids long"
    side_outputs = {"late": "auction long"}  # noqa: RUF012
    windows = SlidingWindows(Q5_SIZE, Q5_EVERY)

    def process(self, row: Any, ctx: Any) -> None:
        if self.windows.is_late(ctx):
            ctx.emit("late", (row.auction,))
        for window in self.windows.of(ctx):
            window.state(BIDS).value += 1

    def on_timer(self, timer: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        for window in self.windows.ended(timer, ctx):
            yield ctx.key, window.end, window.state(BIDS).value


class Q5Hottest(Operator):
    """The second step of Q5. It emits the auctions with the most bids in a window when the counts of all its auctions
    have arrived."""

    key = "window"
    output = "window timestamp, auction long, bids long"

    most = state.value(int, default=0)
    hottest = state.set(int)

    def process(self, row: Any, ctx: Any) -> None:
        ctx.set_timer(row.window, name="all")
        if row.bids > self.most.value:
            self.most.value = row.bids
            self.hottest.clear()
        if row.bids == self.most.value:
            self.hottest.add(row.auction)

    def on_timer(self, timer: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        for auction in self.hottest:
            yield ctx.key, auction, self.most.value
        self.most.clear()
        self.hottest.clear()


NAME = state.value(str, name="name")
OPENED = state.counter(name="opened")


class Q8(Operator):
    key, event_time = "person", "at"
    output = "person long, name string, window timestamp, auctions long"
    side_outputs = {"late": "person long"}  # noqa: RUF012
    windows = TumblingWindows(Q8_SIZE)

    def process(self, row: Any, ctx: Any) -> None:
        if self.windows.is_late(ctx):
            ctx.emit("late", (row.person,))
        for window in self.windows.of(ctx):
            if row.name is not None:
                window.state(NAME).value = row.name
            else:
                window.state(OPENED).value += 1

    def on_timer(self, timer: Any, ctx: Any) -> Iterator[tuple[Any, ...]]:
        for window in self.windows.ended(timer, ctx):
            name, opened = window.state(NAME).value, window.state(OPENED).value
            if name is not None and opened:
                yield ctx.key, name, window.start, opened


OPERATORS = (Q3, Q4Winners, Q4Average, Q5Counts, Q5Hottest, Q8)
