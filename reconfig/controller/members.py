"""Who is there, and whose lease has lapsed, as the controller counts it. No I/O; the clock is handed in.

A replica counts its lease from when it sent a heartbeat, the controller from when it answered, which is later. The
controller adds a margin for clocks that drift apart, and one that has just started takes every replica it knows of
for one whose lease its predecessor renewed at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stateflow.clock import Clock
from stateflow.settings import ControllerSettings


@dataclass(slots=True)
class _Member:
    lease_from: float
    heard_at: float | None = None  # None: not since the controller started
    incarnation: str = ""


class Members:
    def __init__(self, known: Iterable[str], settings: ControllerSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        now = clock.monotonic()
        self._members = {name: _Member(now) for name in known}

    def registered(self, name: str, incarnation: str) -> None:
        """Its lease begins with its first heartbeat, which is taken to be on its way."""
        now = self._clock.monotonic()
        self._members[name] = _Member(now, now, incarnation)

    def beat(self, name: str, incarnation: str) -> bool:
        """A heartbeat. True: it is known, and its lease is renewed; False: it must register again."""
        member = self._members.get(name)
        if member is None or not incarnation or member.incarnation != incarnation:
            return False
        member.heard_at = member.lease_from = self._clock.monotonic()
        return True

    def alive(self, name: str) -> bool:
        """Was it heard lately? Good enough to plan with, not to take anything away."""
        member = self._members.get(name)
        if member is None or member.heard_at is None or not member.incarnation:
            return False
        limit = self._settings.heartbeat_interval_s * self._settings.heartbeats_missed_max
        return self._clock.monotonic() - member.heard_at <= limit

    def heard_s(self, name: str) -> float:
        """Seconds since it was heard; -1: not since the controller started."""
        member = self._members.get(name)
        return -1.0 if member is None or member.heard_at is None else self._clock.monotonic() - member.heard_at

    def lapsed(self, name: str) -> bool:
        """It cannot serve any more, whatever its clock does within the margin."""
        member = self._members.get(name)
        return member is not None and self._clock.monotonic() > self._lapses_at(member)

    def _lapses_at(self, member: _Member) -> float:
        return member.lease_from + self._settings.lease_s * (1 + self._settings.lease_margin)

    def expel(self, name: str) -> None:
        """Its partitions are about to be given away: it gets no lease before it has registered again, and so has
        heard which they are."""
        self._members[name].incarnation = ""
