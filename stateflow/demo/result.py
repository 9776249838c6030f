"""Measurements of a run of the demonstration, and the figures that its charts derive from them. Plain data: the run
fills it in, the report draws it.

All times ending in ``_s`` without a further word are seconds since the stream's start.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COMPLETED = "COMPLETED"


@dataclass(frozen=True, slots=True)
class MoveRow:
    """One move of one partition; ``pause_at_s`` is when the pause began, ``duration_s`` the whole move."""

    partition: int
    source: str
    target: str
    started_s: float
    pause_at_s: float
    duration_s: float
    bytes_warm: int
    bytes_reused: int
    bytes_delta: int
    rounds: int
    predicted_pause_ms: float
    pause_ms: float
    state: str
    error: str
    margin_ms: float = 0.0  # beyond the prediction: both together are promised to the budget

    @property
    def promised_ms(self) -> float:
        return self.predicted_pause_ms + self.margin_ms

    @property
    def completed(self) -> bool:
        return self.state.upper() == COMPLETED


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One micro-batch of the Spark query; ``at_s`` is when its trigger began."""

    batch: int
    at_s: float
    rows: int
    duration_ms: float


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request to a replica."""

    at_s: float
    replica: str
    rows: int
    total_ms: float


@dataclass(frozen=True, slots=True)
class Incident:
    """Something done to a replica from outside, for example ``SIGKILL`` or ``restart``."""

    at_s: float
    kind: str
    replica: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    rows: int
    keys: int
    rows_per_s: float
    duration_s: float
    batches: Sequence[BatchRow]
    requests: Sequence[RequestSample]
    moves: Sequence[MoveRow]
    incidents: Sequence[Incident]
    state_equal: bool
    output_equal: bool
    state_keys: int
    output_rows: int
    differences: Sequence[str]
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]

    @property
    def moves_completed(self) -> int:
        return sum(move.completed for move in self.moves)

    @property
    def moves_failed(self) -> int:
        """Moves that did not complete, in any state."""
        return len(self.moves) - self.moves_completed

    @property
    def held(self) -> bool:
        """Tells whether state and output are equal to the reference, and every move completed."""
        return self.state_equal and self.output_equal and not self.moves_failed

    @property
    def pause_ms_max(self) -> float | None:
        """Longest pause of the completed moves; None: there was no move, so nothing can be claimed."""
        return max(self._pauses_ms(), default=None)

    @property
    def pause_ms_median(self) -> float | None:
        return statistics.median(pauses) if (pauses := self._pauses_ms()) else None

    def summary(self) -> dict[str, Any]:
        """The verdict of the run, ready for JSON."""
        return {
            "state_equal": self.state_equal,
            "output_equal": self.output_equal,
            "moves_completed": self.moves_completed,
            "moves_failed": self.moves_failed,
            "pause_ms_max": self.pause_ms_max,
            "pause_ms_median": self.pause_ms_median,
            "rows": self.rows,
            "rows_per_s": self.rows_per_s,
        }

    def _pauses_ms(self) -> list[float]:
        return [move.pause_ms for move in self.moves if move.completed]


# -- What the charts show: latency per window, throughput per window, lanes of moves ---------------------------------

LATENCY_WINDOW_S = 0.25


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """Latencies of the requests in ``[at_s - width / 2, at_s + width / 2)``, all in milliseconds."""

    at_s: float
    requests: int
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rows per second in consecutive windows; every series has one value per entry of ``at_s``."""

    at_s: list[float]
    width_s: float
    rows_per_s: dict[str, list[float]]


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: always one of ``values``, which must not be empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def latency_windows(requests: Sequence[RequestSample]) -> list[LatencyWindow]:
    """One entry per window that saw a request, in order; an idle window has none."""
    gathered: dict[int, list[float]] = defaultdict(list)
    for request in requests:
        gathered[math.floor(request.at_s / LATENCY_WINDOW_S)].append(request.total_ms)
    return [
        LatencyWindow(
            (index + 0.5) * LATENCY_WINDOW_S, len(times), percentile(times, 50), percentile(times, 99), max(times)
        )
        for index, times in sorted(gathered.items())
    ]


def throughput(
    requests: Sequence[RequestSample], batches: Sequence[BatchRow], width_s: float | None = None
) -> Throughput:
    """Returns rows per second by replica, or of the whole query if no request was sampled."""
    arrivals = [(request.at_s, request.replica, request.rows) for request in requests]
    arrivals = arrivals or [(batch.at_s, "query", batch.rows) for batch in batches]
    if not arrivals:
        return Throughput([], 1.0, {})
    end_s = max(at_s for at_s, _, _ in arrivals)
    width = width_s or round_step(end_s / 100)
    count = math.floor(end_s / width) + 1
    series = {name: [0.0] * count for name in sorted({name for _, name, _ in arrivals})}
    for at_s, name, rows in arrivals:
        series[name][math.floor(at_s / width)] += rows / width
    return Throughput([(index + 0.5) * width for index in range(count)], width, series)


def round_step(at_least: float) -> float:
    """Returns the smallest 1, 2 or 5 times a power of ten that is at least ``at_least``, and at least 0.5."""
    wanted = max(at_least, 0.5)
    decade: float = 10.0 ** math.floor(math.log10(wanted))
    return next(step * decade for step in (1, 2, 5, 10) if step * decade >= wanted * (1 - 1e-9))


def log_extent(values: Sequence[float]) -> tuple[float, float]:
    """Ends of a log axis for ``values``, with room above them for the names of incidents."""
    positive = [value for value in values if value > 0]
    return min(positive, default=1.0) * 0.6, max(positive, default=1000.0) * 6


def lanes(moves: Sequence[MoveRow]) -> list[int]:
    """Assigns a lane to each move so that moves of one lane do not overlap in time, with as few lanes as possible."""
    free_from: list[float] = []
    chosen = [0] * len(moves)
    for index in sorted(range(len(moves)), key=lambda position: moves[position].started_s):
        move = moves[index]
        lane = next((number for number, free in enumerate(free_from) if free <= move.started_s), len(free_from))
        free_from[lane : lane + 1] = [move.started_s + move.duration_s]
        chosen[index] = lane
    return chosen


def human_bytes(count: float) -> str:
    """``1536`` → ``1.5 kB`` (decimal units)."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if abs(value) < 999.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
