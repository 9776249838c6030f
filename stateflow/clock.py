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


class Throttle:
    """Lets each of many callers pass once in an interval, such as the log line about a caller. Not thread-safe.

    Neither the time of a call nor the memory grows with the number of callers, because a flood of calls must cost
    little: beyond ``callers_max`` callers the one that passed longest ago is forgotten.
    """

    def __init__(self, clock: Clock, interval_s: float, callers_max: int = 1000) -> None:
        self._clock, self._interval_s, self._callers_max = clock, interval_s, callers_max
        self._passed_at: dict[str, float] = {}  # in the order of these times

    def passes(self, caller: str) -> bool:
        """Tells whether the caller passes now: it has not passed within the interval, or was forgotten since."""
        now, passed_at = self._clock.monotonic(), self._passed_at.get(caller)
        if passed_at is not None and now - passed_at < self._interval_s:
            return False
        self._passed_at.pop(caller, None)
        self._passed_at[caller] = now
        if len(self._passed_at) > self._callers_max:
            del self._passed_at[next(iter(self._passed_at))]
        return True
