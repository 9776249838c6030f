"""When is a good moment for a fence? Between two batches, and while the disk is quiet: sans-io.

A micro-batch source sends at nearly equal intervals and is silent in between: a partition fenced right behind a
commit stands still while nobody asks for it. A source that sends all the time has no such moment, and is not waited
for. A disk that is writing back what others wrote may take a second for what otherwise takes it a millisecond.
"""

from __future__ import annotations

from dataclasses import dataclass

from stateflow.errors import BudgetUnreachable
from stateflow.types import PartitionId

#: weight of the newest interval in the averages
NEWEST = 0.3
#: a moment is waited for no longer than this many intervals …
INTERVALS_MAX = 1.5
#: … and no longer than this
WAIT_S_MAX = 2.0
#: batches that must have been seen, and how regular they must be, before anything is predicted
BATCHES_MIN = 4
JITTER_MAX = 0.5
#: a disk is quiet when a durable write takes no longer than this, or than the whole pause was to be
QUIET_SYNC_MS = 10.0
#: whether a batch was committed is looked for so often
LOOK_S = 0.002


def disk_is_quiet(sync_ms: float, pause_ms: float) -> bool:
    """May a fence whose pause is to be ``pause_ms`` come now? Its seal is a durable write, too."""
    return sync_ms <= max(pause_ms, QUIET_SYNC_MS)


@dataclass(frozen=True, slots=True)
class QuietDisk:
    """A fence's wait for it."""

    partition: PartitionId
    since: float  # monotonic seconds
    pause_ms: float  # predicted
    max_pause_ms: float = 0.0  # allowed; 0: any

    def has_come(self, sync_ms: float, now: float) -> bool:
        """Is the wait over at ``now``, when a durable write took ``sync_ms``? A disk that does not become quiet is not
        waited for longer than ``WAIT_S_MAX``. Raises BudgetUnreachable where the write alone is longer then than the
        whole pause may be."""
        if disk_is_quiet(sync_ms, self.pause_ms):
            return True
        if now <= self.since + WAIT_S_MAX:
            return False
        if 0 < self.max_pause_ms < sync_ms:
            raise BudgetUnreachable(
                f"a durable write takes the source {sync_ms:.0f} ms, a pause of {self.max_pause_ms:g} ms is allowed",
                remedy="raise max_pause_ms, or move when its disk is not as busy",
                partition=self.partition,
            )
        return True


@dataclass(frozen=True, slots=True)
class QuietMoment:
    """A fence's wait for it: right behind the commit that follows ``sequence``, but no longer than ``until``, monotonic
    seconds."""

    sequence: int
    until: float

    def wait_s(self, now: float, sequence: int) -> float:
        """How long to wait before asking again, when the last commit is ``sequence``; 0: fence now."""
        if sequence != self.sequence:
            return 0.0
        return max(0.0, min(self.until - now, LOOK_S))


@dataclass(slots=True)
class Cadence:
    """Times on one monotonic clock, seconds."""

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
        """Batches a second, as averaged."""
        return 1.0 / self.interval_s if self.interval_s > 0 else 0.0

    def wait_s(self, now: float, pause_s: float) -> float:
        """How long a fence that costs ``pause_s`` should wait for the commit of the next batch; 0: fence now.

        Worth it only when batches come regularly and the gap between them holds the pause, and when the next batch
        would otherwise fall into the pause.
        """
        if self.batches < BATCHES_MIN or self.jitter_s > JITTER_MAX * self.interval_s:
            return 0.0
        if self.interval_s - self.busy_s < pause_s:
            return 0.0
        next_begin = self.began_at + self.interval_s
        if now + pause_s + self.jitter_s <= next_begin or now > next_begin + self.interval_s:
            return 0.0  # it ends before the next, or the source has stopped
        return min(WAIT_S_MAX, INTERVALS_MAX * self.interval_s)
