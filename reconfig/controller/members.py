"""Replicas that are there, and leases that have lapsed, as the controller counts them. No I/O; the clock is handed in.

A replica counts its lease from when it sent a heartbeat. The controller counts from when it answered, which is later,
and adds a margin for clocks that drift apart. A controller that begins to lead assumes that its predecessor renewed the
lease of every known replica at that moment, or later by as long as the predecessor may have gone on granting leases.

What a replica says when it registers, for example that it lacks a partition, holds only while it has no lease. So the
controller answers a heartbeat of an unknown replica with a ticket, which is good for one registration. The ticket
becomes void when the next one is issued, or when the replica's partitions change. A request therefore changes nothing
if it was sent twice, was long on its way, or came from a process that has ended. The ticket also names the session:
requests of an earlier session are void.
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


#: outstanding tickets; beyond that the oldest one is dropped, those of names that never registered first
TICKETS_MAX = 10_000
#: partitions that one registration may report
SAID_MAX = 1 << 20


@dataclass(slots=True)
class _Member:
    lease_from: float
    heard_at: float | None = None  # None: not since the controller started
    incarnation: str = ""
    session: str = ""
    opening_from: float | None = None  # when it first said that it is opening, since it last registered
    opening_at: float = -math.inf  # when it last said so


@dataclass(frozen=True, slots=True)
class _Ticket:
    session: str
    assigned: Mapping[PartitionId, int]
    said: list[Any] = field(default_factory=list, compare=False)  # what the registration has reported so far


class Members:
    """Replicas, with their leases and tickets.

    Args:
        grace_s: seconds from now for which a predecessor may grant leases, by its own clock.
    """

    def __init__(self, known: Iterable[str], settings: ControllerSettings, clock: Clock, grace_s: float = 0.0) -> None:
        self._settings, self._clock = settings, clock
        self._began = clock.monotonic()
        now = clock.monotonic() + grace_s * (1 + settings.lease_margin)
        self._members = {name: _Member(now) for name in known}
        self._tickets: dict[str, _Ticket] = {}
        self._said: dict[str, Said] = {}
        self._versions: dict[str, str] = {}

    def issue(self, name: str, ticket: str, assigned: Mapping[PartitionId, int]) -> str:
        """Issues a ticket, which replaces the replica's earlier one. Returns it.

        Args:
            assigned: the replica's partitions and their epochs, as of now.
        """
        self._tickets.pop(name, None)
        self._tickets[name] = _Ticket(ticket, assigned)
        if len(self._tickets) > TICKETS_MAX:  # any process may ask under any name
            strange = (each for each in self._tickets if each not in self._members)
            del self._tickets[next(strange, next(iter(self._tickets)))]
        return ticket

    def is_good(self, name: str, ticket: str, assigned: Mapping[PartitionId, int]) -> bool:
        """Tells whether the ticket is the replica's newest, and its partitions have not changed since it was issued."""
        return self._tickets.get(name) == _Ticket(ticket, assigned)

    def said(self, name: str, ticket: str, more: Iterable[T]) -> list[T] | None:
        """Adds to what was reported with this ticket, and returns all of it; None: the ticket is void.

        A ticket with which more than ``SAID_MAX`` partitions are reported becomes void.
        """
        issued = self._tickets.get(name)
        if issued is None or issued.session != ticket:
            return None
        issued.said.extend(more)
        if len(issued.said) > SAID_MAX:
            del self._tickets[name]
            return None
        return issued.said

    def registered(self, name: str, incarnation: str, ticket: str) -> None:
        """Registers a replica, and uses up its ticket.

        Its lease begins with its first heartbeat, which is assumed to be on its way.
        """
        del self._tickets[name]
        now = self._clock.monotonic()
        self._members[name] = _Member(now, now, incarnation, ticket)

    def session(self, name: str) -> str:
        """Returns the ticket that a replica registered with; empty: it has to register first."""
        member = self._members.get(name)
        return member.session if member is not None and member.incarnation else ""

    def beat(self, name: str, incarnation: str) -> bool:
        """Renews the lease of a replica that sent a heartbeat. Returns False where it must register first."""
        member = self._members.get(name)
        if member is None or not incarnation or member.incarnation != incarnation:
            return False
        member.heard_at = member.lease_from = self._clock.monotonic()
        return True

    def says(self, name: str, said: Said) -> None:
        """Notes what a replica may serve alone."""
        self._said[name] = said

    def runs(self, name: str, version: str) -> None:
        """Notes which version of stateflow a replica runs."""
        self._versions[name] = version

    def version(self, name: str) -> str:
        """Returns the version of stateflow that a replica runs; empty: it was not heard in this term."""
        return self._versions.get(name, "")

    def said_alone(self, name: str) -> Said | None:
        """Returns what a replica last said it may serve alone; None: it said nothing in this term."""
        return self._said.get(name)

    @property
    def silence_s(self) -> float:
        """Seconds of silence after which a replica is not planned with."""
        return self._settings.heartbeat_interval_s * self._settings.heartbeats_missed_max

    def alive(self, name: str) -> bool:
        """Tells whether a replica was heard lately: enough to plan with it, not to take its partitions away."""
        member = self._members.get(name)
        if member is None or member.heard_at is None or not member.incarnation:
            return False
        return self._clock.monotonic() - member.heard_at <= self.silence_s

    def expects(self) -> bool:
        """Tells whether a replica that was known before this term has not been heard yet, and may still be."""
        if self._clock.monotonic() - self._began > self.silence_s:
            return False
        return any(member.heard_at is None for member in self._members.values())

    def heard_at(self, name: str) -> float:
        """Returns when a replica was last heard, in monotonic seconds; minus infinity: not since the start."""
        member = self._members.get(name)
        return -math.inf if member is None or member.heard_at is None else member.heard_at

    def heard_s(self, name: str) -> float:
        """Returns the seconds since a replica was heard; -1: not heard since the controller started."""
        member = self._members.get(name)
        return -1.0 if member is None or member.heard_at is None else self._clock.monotonic() - member.heard_at

    def lapsed(self, name: str) -> bool:
        """Tells whether a replica's lease has lapsed: it cannot serve, whatever its clock does within the margin."""
        member = self._members.get(name)
        return member is not None and self._clock.monotonic() > self._lapses_at(member)

    def opens(self, name: str) -> None:
        """Notes that a replica is opening: its process is back with its data directory, and has no lease yet."""
        member = self._members.get(name)
        if member is not None:
            member.opening_at = self._clock.monotonic()
            if member.opening_from is None:
                member.opening_from = member.opening_at

    def is_opening(self, name: str) -> bool:
        """Tells whether to wait for a replica that is opening.

        That ends after ``opening_timeout_s``, or when the replica has not been heard for ``lease_s``.
        """
        member = self._members.get(name)
        if member is None or member.opening_from is None:
            return False
        now = self._clock.monotonic()
        heard = now - member.opening_at <= self._settings.lease_s
        return heard and now - member.opening_from <= self._settings.opening_timeout_s

    def may_serve(self, name: str) -> bool:
        """Tells whether a lease may still run under the name, whichever process has it."""
        return name in self._members and not self.lapsed(name)

    def lease_left_s(self, name: str) -> float:
        """Returns the seconds until a known replica cannot serve any more, unless it is heard again."""
        return self._lapses_at(self._members[name]) - self._clock.monotonic()

    def _lapses_at(self, member: _Member) -> float:
        return member.lease_from + self._settings.lease_s * (1 + self._settings.lease_margin)

    def expect(self, name: str) -> None:
        """Expects a replica to register anew; otherwise its lease lapses, counted from now."""
        self._members[name] = _Member(self._clock.monotonic())
        self._said.pop(name, None)

    def forget(self, name: str) -> None:
        """Removes all that is known of a replica, as if it had never been heard."""
        self._members.pop(name, None)
        self._said.pop(name, None)
        self._versions.pop(name, None)
        self._tickets.pop(name, None)

    def expel(self, name: str) -> None:
        """Grants a replica no lease until it has registered again, as its partitions are about to be given away.

        When it registers, it learns which partitions those are. An unknown replica has no lease, and nothing changes.
        """
        member = self._members.get(name)
        if member is not None:
            member.incarnation = ""
