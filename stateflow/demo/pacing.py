"""What keeps the demonstration short on any machine: how much is streamed, and which pause is asked for.

A machine that is slow streams fewer flights. One whose pauses scatter cannot promise the usual budget; it is refused
before anything stands still, so that nothing is lost but the time that a move waits for a better moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stateflow.client import MoveReport
from stateflow.errors import BudgetUnreachable

#: so long after the demonstration began nothing more is streamed; comparing and drawing come then
STREAM_UNTIL_S = 75.0
#: of it at least, however long the processes took to start
STREAM_LEAST_S = 20.0
#: slices that wait to be read: none comes late, and at the end there is little to work off
AHEAD = 4
BUDGET_MS = 250.0
#: a larger budget than needed: the next move may need more
ROOM = 1.5
BUDGET_STEP_MS = 50.0
#: no pause, to whoever looks on
BUDGET_MS_MAX = 3_000.0
#: for a better moment, and once there was none for a move
PATIENCE_S, PATIENCE_THEN_S = 3.0, 1.0


@dataclass(slots=True)
class Stretch:
    """A stream of so many ``slices``, until ``until_s``. It began with the first that was done, at ``began_s``: before
    that there is nothing to move. Every time is on one clock."""

    slices: int
    until_s: float
    began_s: float | None = None
    allowed: int = 0  # so many slices may have come
    closed: bool = False  # no more will

    def look(self, done: int, now_s: float) -> None:
        """So many are done."""
        if done and self.began_s is None:
            self.began_s, self.until_s = now_s, max(self.until_s, now_s + STREAM_LEAST_S)
        self.closed = self.closed or (self.began_s is not None and now_s >= self.until_s)
        if not self.closed:
            self.allowed = max(self.allowed, min(self.slices, done + AHEAD))

    def is_over(self, done: int) -> bool:
        """Was everything read that comes?"""
        return done >= self.slices or (self.closed and done >= self.allowed)

    def share(self, done: int, now_s: float) -> float:
        """How far the story is: by what was read, or by the time that it has."""
        if self.began_s is None:
            return 0.0
        return max(done / self.slices, (now_s - self.began_s) / (self.until_s - self.began_s))


def stretch_of(slices: int, demo_began_s: float, *, whole: bool = False) -> Stretch:
    """Args: whole: it is streamed to its end, however long that takes."""
    return Stretch(slices, math.inf if whole else demo_began_s + STREAM_UNTIL_S)


@dataclass(slots=True)
class Budget:
    """Of each move's pause, in milliseconds; None: any pause will do. Whoever asked for one (``asked``) keeps it."""

    ms: float | None = BUDGET_MS
    asked: bool = False
    patience_s: float = PATIENCE_S
    former: list[float] = field(default_factory=list)  # that were refused

    def __str__(self) -> str:
        """Each that was asked for, in their order."""
        return ", then ".join([*(f"{ms:g}" for ms in self.former), "none" if self.ms is None else f"{self.ms:g}"])

    def after(self, moves: Sequence[MoveReport]) -> str:
        """Learn from moves that have ended. What there is to say where some were refused, and are to be made again;
        else nothing."""
        refused = [move for move in moves if is_refused(move)]
        if not refused:
            return ""
        self.patience_s = PATIENCE_THEN_S
        if self.asked or self.ms is None:
            return ""
        needed = max(move.predicted_pause_ms + move.margin_ms for move in refused)
        former = self.ms
        self.former.append(former)
        self.ms = _rounded(max(needed, self.ms) * ROOM)
        now = "from now on any pause will do" if self.ms is None else f"from now on it is {self.ms:g} ms"
        return (
            f"{_partitions(len(refused))} not moved: pauses scatter on this machine, and {former:g} ms could not "
            f"be promised; {now}"
        )


def is_refused(move: MoveReport) -> bool:
    """By its budget: its partition never stood still."""
    return move.fault is not None and move.fault.code == BudgetUnreachable.code


def _rounded(ms: float) -> float | None:
    return None if ms > BUDGET_MS_MAX else math.ceil(ms / BUDGET_STEP_MS) * BUDGET_STEP_MS


def _partitions(count: int) -> str:
    return "1 partition was" if count == 1 else f"{count} partitions were"
