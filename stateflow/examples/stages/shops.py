"""Two operators in sequence: the first sums the sales of each shop, the second finds the leading shop of a region."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Context, Operator, state


class Sold(Operator):
    """Keeps a running total of each shop's sales, over all days."""

    key = "shop"
    output = "at timestamp, region string, shop string, total double"

    total = state.value(float, default=0.0)

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.total.value = round(self.total.value + row.amount, 2)
        yield row.at, row.region, row.shop, self.total.value


class Leader(Operator):
    """Emits a row whenever another shop leads its region."""

    key = "region"
    output = "at timestamp, region string, leader string, total double"

    totals = state.map(str, float)
    leader = state.value(str, default="")

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        self.totals[row.shop] = row.total
        best = max(self.totals, key=self.totals.__getitem__)
        if best != self.leader.value:
            self.leader.value = best
            yield row.at, row.region, best, self.totals[best]
