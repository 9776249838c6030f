"""How fast may a transfer go? Sans-io: sizes and times in, seconds to wait out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
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


@dataclass(slots=True)
class Share:
    """Lets background work have at most ``share`` of the time while there is other work: who worked for *t* seconds
    waits ``t·(1/share − 1)``. ``busy_until`` is when the other work is taken to have ended."""

    share: float = 0.5
    busy_s: float = 0.25
    busy_until: float = 0.0

    def other_work(self, now: float) -> None:
        self.busy_until = now + self.busy_s

    def wait_s(self, now: float, worked_s: float) -> float:
        return worked_s * (1 / self.share - 1) if now < self.busy_until else 0.0
