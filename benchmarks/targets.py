"""Targets of a record as the report shows them: bound, range over the runs, distance from the bound, verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.results import Spread, spreads

_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Aim:
    experiment: str
    name: str
    value: float | None
    target: float
    at_least: bool
    met: bool
    least: float | None  # over the runs, where the record has it
    most: float | None

    @property
    def missed(self) -> bool:
        return self.value is not None and not self.met

    @property
    def verdict(self) -> str:
        return "met" if self.met else "missed" if self.missed else "not measured"

    @property
    def bound(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {number(self.target)}"

    @property
    def ratio(self) -> float | None:
        """Returns the figure over its bound; None if it was not measured, or the bound is 0."""
        return self.value / self.target if self.value is not None and self.target else None

    @property
    def range(self) -> str:
        return "" if self.least is None or self.most is None else f"{number(self.least)} – {number(self.most)}"

    def scored(self, value: float | None) -> float | None:
        """Returns how many times better than the bound a value is; None if that has no meaning."""
        if value is None or self.target <= 0 or value <= 0:
            return None
        return value / self.target if self.at_least else self.target / value

    @property
    def score(self) -> float | None:
        return self.scored(self.value)


def aims_of(record: Mapping[str, Any]) -> list[Aim]:
    known = list(spreads(record["figures"]))
    aims = []
    for target in record["targets"]:
        least, most = range_of(target["value"], known)
        aims.append(
            Aim(
                record["experiment"],
                target["name"],
                target["value"],
                target["target"],
                target["bound"] == "at_least",
                target["met"],
                least,
                most,
            )
        )
    return aims


def range_of(value: float | None, known: list[Spread]) -> tuple[float | None, float | None]:
    """Returns the range of the figure a target was computed from.

    The figure was measured several times, or is a ratio of two such figures.

    A ratio has the widest range: least over most, most over least. (None, None) when the figure is neither, or
    ambiguous.
    """
    if not value:
        return None, None
    several = [spread for spread in known if spread.runs > 1]
    found = {
        (spread.least, spread.most)
        for spread in several
        if any(math.isclose(value, each, rel_tol=_SAME) for each in (spread.median, spread.least, spread.most))
    }
    for above, below in itertools.permutations(several, 2) if not found else ():
        if below.least > 0 and math.isclose(value, above.median / below.median, rel_tol=_SAME):
            found.add((above.least / below.most, above.most / below.least))
    return found.pop() if len(found) == 1 else (None, None)


def number(value: float | None) -> str:
    """Formats a number for people: three significant digits, thousands separated."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.3g}"
