"""Following a source: when a copy confirms its changes, and whether it goes on when the connection breaks. Sans-io."""

from __future__ import annotations

#: bytes that a copy applies at most before it confirms them, and the source can drop them
CONFIRM_BYTES = 1 << 20
#: how often a move's copy starts over
RESTARTS_MAX = 3


class Persistence:
    """Decides how long to retry: a standby forever, a move until ``resume_timeout_s`` after the last received byte."""

    def __init__(self, standby: bool, resume_timeout_s: float) -> None:
        self._standby, self._resume_timeout_s = standby, resume_timeout_s
        self._restarts = 0

    def goes_on(self, silent_s: float) -> bool:
        """Tells whether to connect again after the connection broke, when nothing was received for ``silent_s``."""
        return self._standby or silent_s <= self._resume_timeout_s

    def begins_anew(self) -> bool:
        """Tells whether to start over with a new snapshot, when the former is gone at the source or arrived damaged.
        Counts the restarts."""
        self._restarts += 1
        return self._standby or self._restarts <= RESTARTS_MAX


class Confirming:
    """Decides when a copy confirms its changes. A standby does so whenever it has caught up, as acknowledgements may
    wait for that."""

    def __init__(self, standby: bool) -> None:
        self._standby = standby
        self._bytes, self._confirmed = 0, -1

    def is_due(self, size: int, reached: int, caught_up: bool) -> bool:
        """Tells whether to confirm now, after ``size`` more bytes were applied, up to change set ``reached``."""
        self._bytes += size
        if reached <= self._confirmed or not ((self._standby and caught_up) or self._bytes > CONFIRM_BYTES):
            return False
        self._bytes, self._confirmed = 0, reached
        return True


class Rate:
    """Bytes per second, averaged over about the last two seconds. ``now``: monotonic seconds."""

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
