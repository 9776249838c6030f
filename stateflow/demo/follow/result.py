"""The measurements of a drive, the figures derived from them, and the expected result.

A run fills in this plain data, and the report draws it. Times whose names end in ``_s`` are seconds since the convoys
set off, unless said otherwise.

The expected result of the convoys' operator is computed independently of the framework, by grouped sums over all rows
that were sent. All values are whole numbers, so comparisons are exact.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pandas as pd

from stateflow.demo.follow.fleet import Change
from stateflow.demo.result import DIFFERENCES_SHOWN, Comparison, MoveRow

# -- Expected result -------------------------------------------------------------------------------------------------

OUTPUTS = ["seq", "vehicle", "way", "told", "metres"]
FACTS = ["vehicle", "fact", "value"]


def expected_outputs(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns the expected outputs of :class:`~stateflow.demo.operators.Trips`, one for each row, in the order of
    ``seq``."""
    told = pd.DataFrame.from_records(list(rows)).sort_values("seq", ignore_index=True)
    by_way = told.groupby(["vehicle", "way"], sort=False)
    told["told"] = by_way.cumcount() + 1
    told["metres"] = by_way["metres"].cumsum()
    return told[OUTPUTS]


def expected_state(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns the expected final state of each vehicle, one fact per row."""
    told = pd.DataFrame.from_records(list(rows))
    sums = told.groupby(["vehicle", "way"])["metres"].agg(["size", "sum"]).reset_index()
    where = told.groupby("vehicle")["site"].agg(lambda sites: "+".join(sorted(set(sites)))).reset_index()
    return pd.concat(
        [
            _facts(sums["vehicle"], "told by " + sums["way"], sums["size"]),
            _facts(sums["vehicle"], "metres by " + sums["way"], sums["sum"]),
            _facts(where["vehicle"], pd.Series(["sites"] * len(where)), where["site"]),
        ],
        ignore_index=True,
    )


def state_facts(
    told: Iterable[Mapping[str, Any]], metres: Iterable[Mapping[str, Any]], sites: Iterable[Mapping[str, Any]]
) -> pd.DataFrame:
    """Returns the actual final state of each vehicle in the form of :func:`expected_state`.

    Args:
        told, metres, sites: entries of the operator's states, as read from the cluster.
    """
    facts = [(row["key"], f"told by {row['map_key']}", str(row["value"])) for row in told]
    facts += [(row["key"], f"metres by {row['map_key']}", str(row["value"])) for row in metres]
    where: dict[str, set[str]] = {}
    for row in sites:
        where.setdefault(row["key"], set()).add(row["map_key"])
    facts += [(vehicle, "sites", "+".join(sorted(seen))) for vehicle, seen in where.items()]
    return pd.DataFrame(facts, columns=FACTS)


def compare(wanted: pd.DataFrame, found: pd.DataFrame, by: list[str]) -> Comparison:
    """Compares the rows of two frames. The order of rows does not matter.

    Args:
        by: columns that identify a row.
    """
    copies = found.duplicated(by)
    both = wanted.merge(found[~copies], on=by, how="outer", suffixes=("", " found"), indicator="where")
    values = [column for column in wanted.columns if column not in by]
    here = both["where"] == "both"
    wrong = here & pd.concat([both[name] != both[f"{name} found"] for name in values], axis=1).any(axis=1)
    missing, extra = both[both["where"] == "left_only"], both[both["where"] == "right_only"]
    lines = [f"{_named(row, by)}: expected, absent" for row in _first(missing)]
    lines += [f"{_named(row, by)}: not expected, present" for row in _first(extra)]
    lines += [f"{_named(row, by)}: duplicated" for row in _first(found[copies])]
    for row in _first(both[wrong]):
        for name in values:
            want, got = row[name], row[f"{name} found"]
            if want != got:
                lines.append(f"{_named(row, by)}: {name}: expected {_said(want)}, got {_said(got)}")
    surplus = len(extra) + int(copies.sum())
    return Comparison(
        equal=not (len(missing) or surplus or wrong.any()),
        compared=int(here.sum()),
        missing=len(missing),
        extra=surplus,
        different=int(wrong.sum()),
        differences=lines[:DIFFERENCES_SHOWN],
    )


def _facts(vehicles: pd.Series[Any], facts: pd.Series[Any], values: pd.Series[Any]) -> pd.DataFrame:
    return pd.DataFrame({"vehicle": vehicles, "fact": facts, "value": values.astype(str)})


def _first(rows: pd.DataFrame) -> list[dict[Any, Any]]:
    return rows.head(DIFFERENCES_SHOWN).to_dict("records")


def _named(row: Mapping[Any, Any], by: list[str]) -> str:
    return " ".join(f"{name} {row[name]}" for name in by)


def _said(value: Any) -> Any:
    """Returns the value, and a whole number as an int, because pandas turns the ints of a column with gaps into
    floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# -- Measurements ----------------------------------------------------------------------------------------------------

#: site of all state at the beginning of the drive
CLOUD = "cloud"
WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch of a gateway. The gateway sent it at ``at_s``, and received the outputs ``took_ms`` later."""

    at_s: float
    took_ms: float
    convoy: int
    site: str
    rows: int

    @property
    def answered_s(self) -> float:
        return self.at_s + self.took_ms / 1e3


class Phase(StrEnum):
    """The place of a convoy's state while a batch waits: at another site than the gateway, moving, or at the gateway's
    site."""

    AWAY = "away"
    MOVING = "moving"
    NEAR = "near"


def site_of(replica: str) -> str:
    return replica.rpartition("-")[0]


class Whereabouts:
    """The sites of each convoy's state over time, derived from the moves.

    The state of a convoy is in the partition with the same number.
    """

    def __init__(self, moves: Iterable[MoveRow]) -> None:
        self._since: dict[int, list[tuple[float, str]]] = defaultdict(list)
        self._under_way: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for move in sorted(moves, key=lambda move: move.pause_at_s):
            self._under_way[move.partition].append((move.started_s, move.started_s + move.duration_s))
            if move.completed:
                served_s = move.pause_at_s + move.pause_ms / 1e3
                self._since[move.partition].append((served_s, site_of(move.target)))

    def stays(self, convoy: int) -> list[tuple[float, str]]:
        """Returns (begin in seconds, site) for each stay of a convoy's state at a site, in order of time."""
        return [(0.0, CLOUD), *self._since[convoy]]

    def site(self, convoy: int, at_s: float) -> str:
        stays = self.stays(convoy)
        return stays[max(0, bisect_right(stays, at_s, key=lambda stay: stay[0]) - 1)][1]

    def is_near(self, sample: Sample) -> bool:
        """Tells whether a sample was answered at the gateway's site."""
        return self.site(sample.convoy, sample.answered_s) == sample.site

    def phase(self, sample: Sample) -> Phase:
        if any(start <= sample.answered_s and sample.at_s <= end for start, end in self._under_way[sample.convoy]):
            return Phase.MOVING
        return Phase.NEAR if self.is_near(sample) else Phase.AWAY


@dataclass(frozen=True, slots=True)
class Band:
    """A stay of a convoy, or of its state, at a site."""

    convoy: int
    site: str
    start_s: float
    end_s: float


def bands_of(convoy: int, stays: Sequence[tuple[float, str]], end_s: float) -> list[Band]:
    """Returns a band for each stay that begins before ``end_s``. The last band ends at ``end_s``.

    Args:
        stays: (begin in seconds, site) in order of time.
    """
    ends = [*(since for since, _ in stays[1:]), end_s]
    return [
        Band(convoy, site, since, min(end, end_s))
        for (since, site), end in zip(stays, ends, strict=True)
        if since < end_s
    ]


def extent_ms(samples: Iterable[Sample], moves: Iterable[MoveRow]) -> tuple[float, float]:
    """Returns (lower end, upper end) of a log axis for waiting times and pauses, in milliseconds."""
    shown = [sample.took_ms for sample in samples] + [move.pause_ms for move in moves if move.completed]
    positive = [value for value in shown if value > 0]
    return min(positive, default=1.0) * 0.6, max(positive, default=100.0) * 2


def by_phase(samples: Iterable[Sample], where: Whereabouts) -> dict[Phase, list[Sample]]:
    found: dict[Phase, list[Sample]] = {phase: [] for phase in Phase}
    for sample in samples:
        found[where.phase(sample)].append(sample)
    return found


def share_near(samples: Sequence[Sample], where: Whereabouts, width_s: float = WINDOW_S) -> list[tuple[float, float]]:
    """Returns (middle of a window, share of the window's rows that were answered at their own site).

    A window without answers has no entry.
    """
    near, rows = defaultdict[int, int](int), defaultdict[int, int](int)
    for sample in samples:
        window = math.floor(sample.answered_s / width_s)
        rows[window] += sample.rows
        near[window] += sample.rows if where.is_near(sample) else 0
    return [((window + 0.5) * width_s, near[window] / rows[window]) for window in sorted(rows)]


@dataclass(frozen=True, slots=True)
class FollowResult:
    """The result of a drive.

    Attributes:
        state: comparison of the final state with the reference.
        output: comparison of Spark's output with the reference.
        answers: comparison of the outputs that gateways received with the reference.
    """

    seconds: float
    rtt_ms: float
    budget_ms: float
    convoys: int
    vehicles: int
    telemetry_rows: int
    reading_rows: int
    changes: Sequence[Change]
    samples: Sequence[Sample]
    moves: Sequence[MoveRow]
    state: Comparison
    output: Comparison
    answers: Comparison
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def completed(self) -> list[MoveRow]:
        return [move for move in self.moves if move.completed]

    @property
    def equal(self) -> bool:
        return self.state.equal and self.output.equal and self.answers.equal

    @property
    def held(self) -> bool:
        """True if everything is equal to the reference and at least one move completed."""
        return self.equal and bool(self.completed)

    @property
    def lost(self) -> int:
        """The number of rows without an output."""
        return self.output.missing + self.answers.missing

    @property
    def duplicated(self) -> int:
        """The number of outputs that are unexpected or second copies."""
        return self.output.extra + self.answers.extra

    @property
    def differences(self) -> list[str]:
        named = (("state", self.state), ("output", self.output), ("answers", self.answers))
        return [f"{name}: {line}" for name, found in named for line in found.differences]

    @property
    def pause_ms_max(self) -> float | None:
        return max((move.pause_ms for move in self.completed), default=None)

    @property
    def budget_kept(self) -> bool | None:
        """True if no pause was longer than the budget; None: no move completed."""
        worst = self.pause_ms_max
        return None if worst is None else worst <= self.budget_ms

    def vehicle_bands(self) -> list[Band]:
        stays = [
            [(change.at_s, change.site) for change in self.changes if change.convoy == convoy]
            for convoy in range(self.convoys)
        ]
        return [band for convoy, each in enumerate(stays) for band in bands_of(convoy, each, self.seconds)]

    def state_bands(self) -> list[Band]:
        where = Whereabouts(self.moves)
        return [band for convoy in range(self.convoys) for band in bands_of(convoy, where.stays(convoy), self.seconds)]

    def summary(self) -> dict[str, Any]:
        """Returns the figures of the drive and its comparisons, ready for JSON."""
        where = Whereabouts(self.moves)
        took = {phase: [each.took_ms for each in found] for phase, found in by_phase(self.samples, where).items()}
        away, moving, near = (took[phase] for phase in (Phase.AWAY, Phase.MOVING, Phase.NEAR))
        served_near = sum(each.rows for each in self.samples if where.is_near(each))
        return {
            "state_equal": self.state.equal,
            "output_equal": self.output.equal and self.answers.equal,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "moves_completed": len(self.completed),
            "moves_failed": len(self.moves) - len(self.completed),
            "site_changes": sum(change.at_s > 0 for change in self.changes),
            "pause_ms_max": self.pause_ms_max,
            "budget_ms": self.budget_ms,
            "budget_kept": self.budget_kept,
            "away_ms_median": statistics.median(away) if away else None,
            "moving_ms_max": max(moving, default=None),
            "near_ms_median": statistics.median(near) if near else None,
            "served_near": served_near / max(1, sum(each.rows for each in self.samples)),
            "rows": self.telemetry_rows + self.reading_rows,
        }
