"""Choosing the moment for a fence: between two batches, and while the disk is quiet. Sans-io.

A micro-batch source sends at nearly equal intervals and is silent in between, so a partition fenced right after a
commit pauses while no batch needs it. A source that sends all the time has no such moment, and the fence does not wait.
A disk that is writing back other processes' data may take a second for a write that otherwise takes a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass

from stateflow.errors import BudgetUnreachable
from stateflow.types import PartitionId

#: weight of the newest interval in the averages
NEWEST = 0.3
#: a fence waits for its moment no longer than this many intervals …
INTERVALS_MAX = 1.5
#: … and no longer than this, in seconds
WAIT_S_MAX = 2.0
#: number of batches, and their largest mean deviation as a part of the interval, from which the next one is predicted
BATCHES_MIN = 4
JITTER_MAX = 0.5
#: a disk is quiet when a durable write takes no longer than this, or than the predicted pause
QUIET_SYNC_MS = 10.0
#: interval at which a waiting fence looks for the next commit, in seconds
LOOK_S = 0.002


def disk_is_quiet(sync_ms: float, pause_ms: float) -> bool:
    """Tells whether the disk is quiet enough for a fence with a predicted pause of ``pause_ms``. Its seal is a durable
    write, too."""
    return sync_ms <= max(pause_ms, QUIET_SYNC_MS)


@dataclass(frozen=True, slots=True)
class QuietDisk:
    """Waits for a quiet disk before fencing."""

    partition: PartitionId
    since: float  # monotonic seconds
    pause_ms: float  # predicted
    max_pause_ms: float = 0.0  # allowed; 0: any

    def has_come(self, sync_ms: float, now: float) -> bool:
        """Tells whether the wait is over at ``now``, when a durable write took ``sync_ms``: the disk is quiet, or
        ``WAIT_S_MAX`` has passed. Raises BudgetUnreachable where the write alone then takes longer than the allowed
        pause."""
        if disk_is_quiet(sync_ms, self.pause_ms):
            return True
        if now <= self.since + WAIT_S_MAX:
            return False
        if 0 < self.max_pause_ms < sync_ms:
            raise BudgetUnreachable(
                f"a durable write takes {sync_ms:.0f} ms at the source, the pause limit is {self.max_pause_ms:g} ms",
                remedy="raise max_pause_ms, or move when its disk is less busy",
                partition=self.partition,
            )
        return True


@dataclass(frozen=True, slots=True)
class QuietMoment:
    """Waits for the commit after ``sequence`` before fencing, but no longer than ``until``, monotonic seconds."""

    sequence: int
    until: float

    def wait_s(self, now: float, sequence: int) -> float:
        """Returns the seconds to wait before asking again, when the last commit is ``sequence``; 0: fence now."""
        if sequence != self.sequence:
            return 0.0
        return max(0.0, min(self.until - now, LOOK_S))


@dataclass(slots=True)
class Cadence:
    """Intervals and durations of a partition's batches, in seconds on one monotonic clock."""

    interval_s: float = 0.0  # between the begins of two batches, averaged
    jitter_s: float = 0.0  # mean deviation from it
    busy_s: float = 0.0  # from begin to commit, averaged
    batches: int = 0
    began_at: float = 0.0

    def began(self, now: float) -> None:
        if self.batches:
            interval = now - self.began_at
            weight = NEWEST if self.batches > 1 else 1.0
            self.jitter_s += weight * (abs(interval - self.interval_s) - self.jitter_s) if self.batches > 1 else 0.0
            self.interval_s += weight * (interval - self.interval_s)
        self.batches += 1
        self.began_at = now

    def ended(self, now: float) -> None:
        weight = NEWEST if self.batches > 1 else 1.0
        self.busy_s += weight * ((now - self.began_at) - self.busy_s)

    @property
    def rate(self) -> float:
        """Average number of batches per second; 0: unknown."""
        return 1.0 / self.interval_s if self.interval_s > 0 else 0.0

    def wait_s(self, now: float, pause_s: float) -> float:
        """Returns the seconds that a fence with a pause of ``pause_s`` should wait for the next commit; 0: fence now.

        Waiting pays only when batches come regularly, the gap between them is longer than the pause, and the next batch
        would otherwise fall into the pause.
        """
        if self.batches < BATCHES_MIN or self.jitter_s > JITTER_MAX * self.interval_s:
            return 0.0
        if self.interval_s - self.busy_s < pause_s:
            return 0.0
        next_begin = self.began_at + self.interval_s
        if now + pause_s + self.jitter_s <= next_begin or now > next_begin + self.interval_s:
            return 0.0  # the pause ends before the next batch, or the source has stopped
        return min(WAIT_S_MAX, INTERVALS_MAX * self.interval_s)
