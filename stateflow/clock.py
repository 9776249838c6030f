"""Clocks. Components receive a clock as an argument, so that tests can pass a :class:`ManualClock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_us(self) -> int:
        """Returns wall clock time, in microseconds since 1970-01-01 UTC. Use it for display and records, never for
        durations."""
        ...

    def monotonic(self) -> float:
        """Returns seconds since an arbitrary start. The value never falls. Use it for durations and leases."""
        ...


class SystemClock:
    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only by :meth:`advance`."""

    def __init__(self, now_us: int = 0) -> None:
        self._now_us = now_us

    def now_us(self) -> int:
        return self._now_us

    def monotonic(self) -> float:
        return self._now_us / 1e6

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._now_us += round(seconds * 1e6)


SYSTEM_CLOCK = SystemClock()
