"""Who is there, and whose lease has lapsed, as the controller counts it. No I/O; the clock is handed in.

A replica counts its lease from when it sent a heartbeat, the controller from when it answered, which is later. The
controller adds a margin for clocks that drift apart, and one that begins to lead takes every replica it knows of
for one whose lease its predecessor renewed at that moment, or as much later as that one may have gone on granting.

What a replica says when it registers, such as that it lacks a partition, holds only as long as it has no lease. So a
heartbeat of a replica that is not known is answered with a ticket. It is good for one registration, and void when the
next is given or the replica's partitions have changed: a request that was sent twice, was long on its way, or came from
a process that ended changes nothing. The ticket also names the session: what was asked in an earlier one is void.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from reconfig.alone import Said
from stateflow.clock import Clock
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId

T = TypeVar("T")


#: of replicas that may yet register; the oldest of a name that never did goes first
TICKETS_MAX = 10_000
#: partitions that one registration may bring
SAID_MAX = 1 << 20


@dataclass(slots=True)
class _Member:
    lease_from: float
    heard_at: float | None = None  # None: not since the controller started
    incarnation: str = ""
    session: str = ""
    opening_from: float | None = None  # it said so first, since it registered last
    opening_at: float = -math.inf  # … and last


@dataclass(frozen=True, slots=True)
class _Ticket:
    session: str
    assigned: Mapping[PartitionId, int]
    said: list[Any] = field(default_factory=list, compare=False)  # what a registration brings, piece by piece


class Members:
    """Args: grace_s: a predecessor may grant leases for so long from now on, by its own clock."""

    def __init__(self, known: Iterable[str], settings: ControllerSettings, clock: Clock, grace_s: float = 0.0) -> None:
        self._settings, self._clock = settings, clock
        self._began = clock.monotonic()
        now = clock.monotonic() + grace_s * (1 + settings.lease_margin)
        self._members = {name: _Member(now) for name in known}
        self._tickets: dict[str, _Ticket] = {}
        self._said: dict[str, Said] = {}
        self._versions: dict[str, str] = {}

    def issue(self, name: str, ticket: str, assigned: Mapping[PartitionId, int]) -> str:
        """Args: assigned: the replica's partitions and their epochs, as of now."""
        self._tickets.pop(name, None)
        self._tickets[name] = _Ticket(ticket, assigned)
        if len(self._tickets) > TICKETS_MAX:  # anybody may ask under any name
            strange = (each for each in self._tickets if each not in self._members)
            del self._tickets[next(strange, next(iter(self._tickets)))]
        return ticket

    def is_good(self, name: str, ticket: str, assigned: Mapping[PartitionId, int]) -> bool:
        """The newest, and since it was issued the replica was given nothing, and nothing was taken from it."""
        return self._tickets.get(name) == _Ticket(ticket, assigned)

    def said(self, name: str, ticket: str, more: Iterable[T]) -> list[T] | None:
        """All that was said with this ticket so far; None: it is void."""
        issued = self._tickets.get(name)
        if issued is None or issued.session != ticket:
            return None
        issued.said.extend(more)
        if len(issued.said) > SAID_MAX:
            del self._tickets[name]
            return None
        return issued.said

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

    def says(self, name: str, said: Said) -> None:
        """What it may serve alone."""
        self._said[name] = said

    def runs(self, name: str, version: str) -> None:
        """Of stateflow."""
        self._versions[name] = version

    def version(self, name: str) -> str:
        """Empty: nothing was heard of it in this term."""
        return self._versions.get(name, "")

    def said_alone(self, name: str) -> Said | None:
        """The last it said of that. None: nothing in this term."""
        return self._said.get(name)

    @property
    def silence_s(self) -> float:
        """Whoever was not heard for longer is not there, to plan with."""
        return self._settings.heartbeat_interval_s * self._settings.heartbeats_missed_max

    def alive(self, name: str) -> bool:
        """Was it heard lately? Good enough to plan with, not to take anything away."""
        member = self._members.get(name)
        if member is None or member.heard_at is None or not member.incarnation:
            return False
        return self._clock.monotonic() - member.heard_at <= self.silence_s

    def expects(self) -> bool:
        """Somebody who was there before this controller led has not been heard yet, and may still be."""
        if self._clock.monotonic() - self._began > self.silence_s:
            return False
        return any(member.heard_at is None for member in self._members.values())

    def heard_at(self, name: str) -> float:
        """Monotonic seconds; minus infinity: not since the controller started."""
        member = self._members.get(name)
        return -math.inf if member is None or member.heard_at is None else member.heard_at

    def heard_s(self, name: str) -> float:
        """Seconds since it was heard; -1: not since the controller started."""
        member = self._members.get(name)
        return -1.0 if member is None or member.heard_at is None else self._clock.monotonic() - member.heard_at

    def lapsed(self, name: str) -> bool:
        """It cannot serve any more, whatever its clock does within the margin."""
        member = self._members.get(name)
        return member is not None and self._clock.monotonic() > self._lapses_at(member)

    def opens(self, name: str) -> None:
        """Its process is there again, with its data directory, and is looking what it has. It has no lease."""
        member = self._members.get(name)
        if member is not None:
            member.opening_at = self._clock.monotonic()
            if member.opening_from is None:
                member.opening_from = member.opening_at

    def is_opening(self, name: str) -> bool:
        """Is it to be waited for? Not for ever, nor when it is not heard any more."""
        member = self._members.get(name)
        if member is None or member.opening_from is None:
            return False
        now = self._clock.monotonic()
        heard = now - member.opening_at <= self._settings.lease_s
        return heard and now - member.opening_from <= self._settings.opening_timeout_s

    def may_serve(self, name: str) -> bool:
        """Whether a lease may still run under the name, whoever has it."""
        return name in self._members and not self.lapsed(name)

    def lease_left_s(self, name: str) -> float:
        """Until it cannot serve any more if it is not heard again."""
        return self._lapses_at(self._members[name]) - self._clock.monotonic()

    def _lapses_at(self, member: _Member) -> float:
        return member.lease_from + self._settings.lease_s * (1 + self._settings.lease_margin)

    def expect(self, name: str) -> None:
        """It is to register anew, and lapses if it does not."""
        self._members[name] = _Member(self._clock.monotonic())
        self._said.pop(name, None)

    def forget(self, name: str) -> None:
        """Nothing was ever heard of it."""
        self._members.pop(name, None)
        self._said.pop(name, None)
        self._versions.pop(name, None)
        self._tickets.pop(name, None)

    def expel(self, name: str) -> None:
        """Its partitions are about to be given away: it gets no lease before it has registered again, and so has
        heard which they are. Nothing for one that is not known: it has none."""
        member = self._members.get(name)
        if member is not None:
            member.incarnation = ""
