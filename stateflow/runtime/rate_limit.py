"""Pacing of transfers and background work. Sans-io: sizes and times in, seconds to wait out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RateLimit:
    """Keeps a stream of pieces at or below ``bytes_per_s``; 0: no limit. Unused time is saved up to ``burst_s``."""

    bytes_per_s: float
    burst_s: float = 0.05
    _free_at: float = 0.0

    def wait_s(self, now: float, size: int) -> float:
        """Returns how long to wait after a piece of ``size`` bytes that was done at ``now``, in seconds."""
        if self.bytes_per_s <= 0:
            return 0.0
        self._free_at = max(self._free_at, now - self.burst_s) + size / self.bytes_per_s
        return max(0.0, self._free_at - now)


@dataclass(frozen=True, slots=True)
class DutyCycle:
    """Limits background work to ``share`` of the time while there is other work: after *t* seconds of work it waits
    ``t·(1/share − 1)``. Other work counts as going on for ``busy_s`` after it was last seen.
    """

    share: float
    busy_s: float = 0.5

    def wait_s(self, now: float, worked_s: float, other_work_at: float) -> float:
        return worked_s * (1 / self.share - 1) if now < other_work_at + self.busy_s else 0.0
