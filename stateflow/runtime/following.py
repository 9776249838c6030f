"""How a copy follows its source: when it confirms what it has, and whether it goes on when that breaks. Sans-io."""

from __future__ import annotations

#: so much is applied at most before the source hears of it, and forgets it
CONFIRM_BYTES = 1 << 20
#: a move's copy begins anew so often
RESTARTS_MAX = 3


class Persistence:
    """A standby tries for ever, a move for ``resume_timeout_s`` after the last byte that came."""

    def __init__(self, standby: bool, resume_timeout_s: float) -> None:
        self._standby, self._resume_timeout_s = standby, resume_timeout_s
        self._restarts = 0

    def goes_on(self, silent_s: float) -> bool:
        """The connection broke: is it made again, when nothing came for so long?"""
        return self._standby or silent_s <= self._resume_timeout_s

    def begins_anew(self) -> bool:
        """The snapshot is gone at the source, or what came of it was damaged: is there another one?"""
        self._restarts += 1
        return self._standby or self._restarts <= RESTARTS_MAX


class Confirming:
    """A standby confirms whatever it has when it has caught up, since acknowledgements may wait for that."""

    def __init__(self, standby: bool) -> None:
        self._standby = standby
        self._bytes, self._confirmed = 0, -1

    def is_due(self, size: int, reached: int, caught_up: bool) -> bool:
        """So many bytes more were applied, up to change set ``reached``: is that to be confirmed now?"""
        self._bytes += size
        if reached <= self._confirmed or not ((self._standby and caught_up) or self._bytes > CONFIRM_BYTES):
            return False
        self._bytes, self._confirmed = 0, reached
        return True


class Rate:
    """Bytes a second, averaged over about the last two seconds. ``now``: monotonic seconds."""

    HALF_LIFE_S = 1.0

    def __init__(self, now: float) -> None:
        self._at = now
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, size: int, now: float) -> float:
        elapsed, self._at = now - self._at, now
        keep = 0.5 ** (elapsed / self.HALF_LIFE_S)
        self._bytes = self._bytes * keep + size
        self._seconds = self._seconds * keep + elapsed
        return self._bytes / self._seconds if self._seconds > 0 else 0.0
