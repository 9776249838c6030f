"""Who is there, and whose lease has lapsed, as the controller counts it. No I/O; the clock is handed in.

A replica counts its lease from when it sent a heartbeat, the controller from when it answered, which is later. The
controller adds a margin for clocks that drift apart, and one that has just started takes every replica it knows of
for one whose lease its predecessor renewed at that moment.

What a replica says when it registers, that it lacks a partition for one, holds only as long as it has no lease. So it
asks for a ticket first, by a heartbeat that is not known, and a ticket is good for one registration, and void when the
next is given or the replica's partitions changed: a request that was sent twice, was long on its way, or came from a
process that ended changes nothing. The ticket names the session too: what was asked in an earlier one is void.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stateflow.clock import Clock
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId


@dataclass(slots=True)
class _Member:
    lease_from: float
    heard_at: float | None = None  # None: not since the controller started
    incarnation: str = ""
    session: str = ""


@dataclass(frozen=True, slots=True)
class _Ticket:
    session: str
    assigned: Mapping[PartitionId, int]


class Members:
    def __init__(self, known: Iterable[str], settings: ControllerSettings, clock: Clock) -> None:
        self._settings, self._clock = settings, clock
        now = clock.monotonic()
        self._members = {name: _Member(now) for name in known}
        self._tickets: dict[str, _Ticket] = {}

    def issue(self, name: str, ticket: str, assigned: Mapping[PartitionId, int]) -> str:
        """Args: assigned: the replica's partitions and their epochs, as of now."""
        self._tickets[name] = _Ticket(ticket, assigned)
        return ticket

    def is_good(self, name: str, ticket: str, assigned: Mapping[PartitionId, int]) -> bool:
        """The newest, and since it was issued the replica was given nothing, and nothing was taken from it."""
        return self._tickets.get(name) == _Ticket(ticket, assigned)

    def registered(self, name: str, incarnation: str, ticket: str) -> None:
        """Its lease begins with its first heartbeat, which is taken to be on its way. The ticket is used up."""
        del self._tickets[name]
        now = self._clock.monotonic()
        self._members[name] = _Member(now, now, incarnation, ticket)

    def session(self, name: str) -> str:
        """The ticket that a replica registered with; empty: it has to register yet."""
        member = self._members.get(name)
        return member.session if member is not None and member.incarnation else ""

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
