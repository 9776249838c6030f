"""Operators that benchmarks deploy. Replicas import this module by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stateflow import Operator, state


class CountSum(Operator):
    """Count and sum per key; one output row for every input row."""

    key = "k"
    output = "k long, n long, total double"

    figures = state.value(tuple[int, float], default=(0, 0.0))  # one state, as the contestants have it

    def process(self, row: Any, ctx: Any) -> Iterator[tuple[int, int, float]]:
        n, total = self.figures.value
        self.figures.value = n, total = n + 1, total + row.v
        yield row.k, n, total
