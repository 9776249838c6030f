"""Operators that benchmarks deploy. Replicas import this module by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Operator, state


class CountSum(Operator):
    """Count and sum per key; one output row for every input row."""

    key = "k"
    output = "k long, n long, total double"

    n = state.value(int, default=0)
    total = state.value(float, default=0.0)

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int, float]]:
        self.n.value += 1
        self.total.value += row.v
        yield row.k, self.n.value, self.total.value
