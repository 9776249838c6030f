"""Joins orders with their customers, whichever of the two arrives first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stateflow import Context, Operator, state


@dataclass
class Customer:
    name: str
    tier: str


class Enriched(Operator):
    """Emits each order with the name and tier of its customer.

    Rows of both streams have all columns: ``order`` is null in rows of customers, ``name`` in rows of orders.
    """

    key = "customer"
    output = "order string, customer string, amount double, name string, tier string"

    known = state.value(Customer)
    waiting = state.list(tuple[str, float])  # orders of a customer that is not known yet

    def process(self, row: Any, ctx: Context) -> Iterator[Any]:
        if row.order is None:
            self.known.value = Customer(row.name, row.tier)
        else:
            self.waiting.append((row.order, row.amount))
        if customer := self.known.value:
            for order, amount in self.waiting:
                yield order, row.customer, amount, customer.name, customer.tier
            self.waiting.clear()
