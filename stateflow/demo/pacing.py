"""Limits that keep the demonstration short on any machine: how much is streamed, and which pause is asked for.

A machine that is slow streams fewer flights. A machine whose pauses scatter cannot promise the usual budget; a move is
then refused before its partition stops, so that only the time is lost that the move waited for a better moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stateflow.client import MoveReport
from stateflow.errors import BudgetUnreachable

#: seconds after the demonstration began when the stream ends; comparing and drawing come then
STREAM_UNTIL_S = 75.0
#: seconds of streaming at least, however long the processes took to start
STREAM_LEAST_S = 20.0
#: slices that wait to be read, so that none comes late, and there is little to work off at the end
AHEAD = 4
BUDGET_MS = 250.0
#: factor by which a budget is larger than needed: the next move may need more
ROOM = 1.5
BUDGET_STEP_MS = 50.0
#: beyond this budget any pause will do: an onlooker would no longer call it a pause
BUDGET_MS_MAX = 3_000.0
#: seconds that a move waits for a better moment, and once a move has found none
PATIENCE_S, PATIENCE_THEN_S = 3.0, 1.0


@dataclass(slots=True)
class Stretch:
    """A stream of ``slices`` slices, until ``until_s``. ``began_s``: when its first slice was done; before that there
    is nothing to move. Every time is on one clock."""

    slices: int
    until_s: float
    began_s: float | None = None
    allowed: int = 0  # number of slices that may have come
    closed: bool = False  # no more slices will be allowed

    def look(self, done: int, now_s: float) -> None:
        """Takes note of how many slices are done, and of the time; allows more slices until the stream is closed."""
        if done and self.began_s is None:
            self.began_s, self.until_s = now_s, max(self.until_s, now_s + STREAM_LEAST_S)
        self.closed = self.closed or (self.began_s is not None and now_s >= self.until_s)
        if not self.closed:
            self.allowed = max(self.allowed, min(self.slices, done + AHEAD))

    def is_over(self, done: int) -> bool:
        """Tells whether every slice that comes was read."""
        return done >= self.slices or (self.closed and done >= self.allowed)

    def share(self, done: int, now_s: float) -> float:
        """Returns how far the story is: by what was read, or by the time that it has, whichever is further."""
        if self.began_s is None:
            return 0.0
        return max(done / self.slices, (now_s - self.began_s) / (self.until_s - self.began_s))


def stretch_of(slices: int, demo_began_s: float, *, whole: bool = False) -> Stretch:
    """Returns the stream of a demonstration.

    Args:
        whole: the stream goes to its end, however long that takes.
    """
    return Stretch(slices, math.inf if whole else demo_began_s + STREAM_UNTIL_S)


@dataclass(slots=True)
class Budget:
    """Budget of each move's pause, in milliseconds; None: any pause will do. ``asked``: the user asked for it, and it
    stays as it is."""

    ms: float | None = BUDGET_MS
    asked: bool = False
    patience_s: float = PATIENCE_S
    former: list[float] = field(default_factory=list)  # budgets that were refused

    def __str__(self) -> str:
        """Returns each budget that was asked for, in order."""
        return ", then ".join([*(f"{ms:g}" for ms in self.former), "none" if self.ms is None else f"{self.ms:g}"])

    def after(self, moves: Sequence[MoveReport]) -> str:
        """Learns from moves that have ended. Returns what there is to say where moves were refused and are to be made
        again; else nothing."""
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
        now = "from now on any pause is allowed" if self.ms is None else f"the budget is now {self.ms:g} ms"
        return (
            f"{_partitions(len(refused))} not moved: pauses vary on this machine, and {former:g} ms could not "
            f"be guaranteed; {now}"
        )


def is_refused(move: MoveReport) -> bool:
    """Tells whether the budget refused a move: its partition never stopped."""
    return move.fault is not None and move.fault.code == BudgetUnreachable.code


def _rounded(ms: float) -> float | None:
    return None if ms > BUDGET_MS_MAX else math.ceil(ms / BUDGET_STEP_MS) * BUDGET_STEP_MS


def _partitions(count: int) -> str:
    return "1 partition was" if count == 1 else f"{count} partitions were"
