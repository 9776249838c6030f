"""Measurements of a run of the demonstration. Plain data: the run fills it in, the report draws it.

All times ending in ``_s`` without a further word are seconds since the stream's start.
"""

from __future__ import annotations

import statistics
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
    """One request to a replica; of ``total_ms`` it waited ``held_ms`` behind a moving partition."""

    at_s: float
    replica: str
    rows: int
    total_ms: float
    held_ms: float


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
        """Longest pause of the completed moves; None when there was none, as 0 would be a claim."""
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
