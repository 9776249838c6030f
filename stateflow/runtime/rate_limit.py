"""How fast may a transfer go? Sans-io: sizes and times in, seconds to wait out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RateLimit:
    """Keeps a stream of pieces at or below ``bytes_per_s``; 0: no limit. Time that was not used is not saved up
    beyond ``burst_s``."""

    bytes_per_s: float
    burst_s: float = 0.05
    _free_at: float = 0.0

    def wait_s(self, now: float, size: int) -> float:
        """To be waited after a piece of ``size`` bytes that was done at ``now``."""
        if self.bytes_per_s <= 0:
            return 0.0
        self._free_at = max(self._free_at, now - self.burst_s) + size / self.bytes_per_s
        return max(0.0, self._free_at - now)


@dataclass(frozen=True, slots=True)
class DutyCycle:
    """Lets background work have at most ``share`` of the time while there is other work: who worked for *t* seconds
    waits ``t·(1/share − 1)``. Other work is taken to go on for ``busy_s`` after it was last seen."""

    share: float
    busy_s: float = 0.5

    def wait_s(self, now: float, worked_s: float, other_work_at: float) -> float:
        return worked_s * (1 / self.share - 1) if now < other_work_at + self.busy_s else 0.0
