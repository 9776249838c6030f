"""The targets of a record in the form that the report shows: bound, range over the runs, distance and verdict."""

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
    least: float | None  # smallest figure of the runs, if the record has a range
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
        """The figure over its bound; None: the figure was not measured, or the bound is 0."""
        return self.value / self.target if self.value is not None and self.target else None

    @property
    def range(self) -> str:
        return "" if self.least is None or self.most is None else f"{number(self.least)} – {number(self.most)}"

    def scored(self, value: float | None) -> float | None:
        """Returns how many times better than the bound a value is; None if the value or the bound is not positive."""
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
    """Returns (least, most) of the figure whose value a target has; (None, None): the range is not known.

    The value may be that of a figure that was measured several times, or the ratio of two such figures. The range of a
    ratio is the widest one: least over most, and most over least. The range is not known if no figure has this value,
    or figures with different ranges have it.

    Args:
        known: all figures of the record that were measured several times.
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
    """Returns a number as text with about three significant digits and separated thousands; ``–`` for None."""
    if value is None:
        return "–"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.3g}"
