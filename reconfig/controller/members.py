"""Members: registered replicas, their leases as the controller counts them, and the data directory of each name.

The module does no I/O; the clock is handed in.

A replica counts its lease from the moment at which it sent a heartbeat. The controller counts from its answer, which is
later, and adds a margin for clocks that drift apart. A controller that begins to lead assumes that its predecessor
renewed the lease of every known replica at the last moment at which it may still have granted leases.

After a cold start, replicas start together with the controller, and one that has not registered yet may only be slow.
:meth:`Members.may_come` tells for which of them a takeover waits that may lose what they have.

A registration may report that the replica lacks a partition. The report is certain to be true only while the replica
has no lease. So the controller answers a heartbeat of an unregistered replica with a ticket, which is good for one
registration. The ticket becomes void when the next one is issued, or when the replica's partitions change. A request
therefore changes nothing if it was sent twice, was delayed, or came from a process that has ended. The ticket also
names the session; requests of an earlier session are void.

A name belongs to one data directory. :class:`Names` decides which process may register under it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.folds import Home
from reconfig.decisions.failover import Said
from stateflow.clock import Clock
from stateflow.errors import InvalidArgument, NameTaken, StateflowError
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId, ReplicaInfo, one_of

T = TypeVar("T")
#: maximum number of outstanding tickets; beyond it the oldest is dropped, first those of names that never registered
TICKETS_MAX = 10_000
#: partitions that one registration may report
SAID_MAX = 1 << 20
#: maximum number of refused processes that are remembered, because any process may ask under any name
REFUSED_MAX = 1_000
_STOP_ONE = "stop one of the two; if the other one has ended, this one is admitted when the other's lease lapses"


# -- Leases and tickets ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Member:
    lease_from: float
    heard_at: float | None = None  # None: no heartbeat since the controller started
    incarnation: str = ""
    session: str = ""
    opening_from: float | None = None  # when it first said that it is opening, since it last registered
    opening_at: float = -math.inf  # when it last said so


@dataclass(frozen=True, slots=True)
class _Ticket:
    session: str
    assigned: Mapping[PartitionId, int]
    said: list[Any] = field(default_factory=list, compare=False)  # partitions that the registration has reported so far


class Members:
    """Replicas, with their leases and tickets.

    Args:
        grace_s: seconds from now for which a predecessor may grant leases, by its own clock.
        cold_until: time until which replicas may still be starting after a cold start, in monotonic seconds; minus
            infinity: the term did not begin with one.
    """

    def __init__(
        self,
        known: Iterable[str],
        settings: ControllerSettings,
        clock: Clock,
        grace_s: float = 0.0,
        cold_until: float = -math.inf,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._began = clock.monotonic()
        self._cold_until = cold_until
        #: end of the wait after a cold start, by this machine's clock in microseconds; 0: there is no wait
        self.cold_until_us = 0
        if cold_until > self._began:
            self.cold_until_us = clock.now_us() + round((cold_until - self._began) * 1e6)
        self._came: set[str] = set()  # replicas that have registered, or said what they have, in this term
        now = clock.monotonic() + grace_s * (1 + settings.lease_margin)
        self._members = {name: _Member(now) for name in known}
        self._tickets: dict[str, _Ticket] = {}
        self._said: dict[str, Said] = {}
        self._versions: dict[str, str] = {}

    def issue(self, name: str, ticket: str, assigned: Mapping[PartitionId, int]) -> str:
        """Issues a ticket, which replaces the replica's earlier ticket, and returns it.

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
        """Tells whether a ticket is the replica's newest, and the replica's partitions are those for which it was
        issued.
        """
        return self._tickets.get(name) == _Ticket(ticket, assigned)

    def said(self, name: str, ticket: str, more: Iterable[T]) -> list[T] | None:
        """Adds ``more`` to the partitions that were reported with a ticket, and returns all of them. None: the ticket
        is void.

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

        The lease is counted from now, because the replica's first heartbeat may already be on its way.
        """
        del self._tickets[name]
        now = self._clock.monotonic()
        self._members[name] = _Member(now, now, incarnation, ticket)
        self._came.add(name)

    def session(self, name: str) -> str:
        """Returns the ticket that a replica registered with; empty: it has to register first."""
        member = self._members.get(name)
        return member.session if member is not None and member.incarnation else ""

    def beat(self, name: str, incarnation: str) -> bool:
        """Renews the lease of a replica that sent a heartbeat. Returns False if it must register first.

        A lease that has lapsed is not renewed, because its partitions may have been given away since.
        """
        member = self._members.get(name)
        if member is None or not incarnation or member.incarnation != incarnation or self.lapsed(name):
            return False
        member.heard_at = member.lease_from = self._clock.monotonic()
        return True

    def says(self, name: str, said: Said) -> None:
        """Notes the operators that a replica may serve alone."""
        self._said[name] = said

    def runs(self, name: str, version: str) -> None:
        """Notes which version of stateflow a replica runs."""
        self._versions[name] = version

    def version(self, name: str) -> str:
        """Returns the version of stateflow that a replica runs; empty: it has sent no heartbeat in this term."""
        return self._versions.get(name, "")

    def said_alone(self, name: str) -> Said | None:
        """Returns the operators that a replica last reported it may serve alone; None: no report in this term."""
        return self._said.get(name)

    @property
    def silence_s(self) -> float:
        """Seconds of silence after which plans leave a replica out."""
        return self._settings.heartbeat_interval_s * self._settings.heartbeats_missed_max

    def alive(self, name: str) -> bool:
        """Tells whether a replica has sent a heartbeat within ``silence_s``. If not, plans leave it out, but its
        partitions are not taken away yet."""
        member = self._members.get(name)
        if member is None or member.heard_at is None or not member.incarnation:
            return False
        return self._clock.monotonic() - member.heard_at <= self.silence_s

    def expects(self) -> bool:
        """Tells whether a heartbeat is still expected from a replica that was known before this term."""
        if self._clock.monotonic() - self._began > self.silence_s:
            return False
        return any(member.heard_at is None for member in self._members.values())

    def heard_at(self, name: str) -> float:
        """Returns the time of a replica's last heartbeat, in monotonic seconds; minus infinity: none since the
        start."""
        member = self._members.get(name)
        return -math.inf if member is None or member.heard_at is None else member.heard_at

    def heard_s(self, name: str) -> float:
        """Returns the seconds since a replica's last heartbeat; -1: none since the controller started."""
        member = self._members.get(name)
        return -1.0 if member is None or member.heard_at is None else self._clock.monotonic() - member.heard_at

    def lapsed(self, name: str) -> bool:
        """Tells whether a replica's lease has lapsed. The replica then cannot serve, however its clock drifts within
        the margin.
        """
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

        The wait ends after ``opening_timeout_s``, or when the replica has sent nothing for ``lease_s``.
        """
        member = self._members.get(name)
        if member is None or member.opening_from is None:
            return False
        now = self._clock.monotonic()
        heard = now - member.opening_at <= self._settings.lease_s
        return heard and now - member.opening_from <= self._settings.opening_timeout_s

    def may_come(self, name: str) -> bool:
        """Tells whether a replica may still be starting after a cold start: it has not registered in this term, and the
        wait for such replicas is not over."""
        return self._clock.monotonic() < self._cold_until and name not in self._came

    def may_serve(self, name: str) -> bool:
        """Tells whether a lease may still run under the name, whichever process has it."""
        return name in self._members and not self.lapsed(name)

    def lease_left_s(self, name: str) -> float:
        """Returns the seconds until a known replica cannot serve any more, unless a heartbeat renews its lease."""
        return self._lapses_at(self._members[name]) - self._clock.monotonic()

    def _lapses_at(self, member: _Member) -> float:
        return member.lease_from + self._settings.lease_s * (1 + self._settings.lease_margin)

    def expect(self, name: str) -> None:
        """Notes that a replica has to register again. Until it does, its lease is assumed to run, counted from now."""
        self._members[name] = _Member(self._clock.monotonic())
        self._came.add(name)
        self._said.pop(name, None)

    def forget(self, name: str) -> None:
        """Removes all that is known of a replica, as if it had never sent a heartbeat."""
        self._members.pop(name, None)
        self._said.pop(name, None)
        self._versions.pop(name, None)
        self._tickets.pop(name, None)

    def expel(self, name: str) -> None:
        """Grants a replica no lease until it has registered again, because its partitions are about to be given away.

        When it registers, it learns which partitions it has lost. For an unknown replica, which has no lease, nothing
        changes.
        """
        member = self._members.get(name)
        if member is not None:
            member.incarnation = ""


# -- Names -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refused:
    """A process that was refused a name.

    ``at`` is the time at which it last asked, in monotonic seconds, and ``since`` the time from which on it has asked
    without a break.
    """

    info: ReplicaInfo
    home: Home
    error: StateflowError
    at: float
    since: float


class Names:
    """Decides which data directory a replica's name belongs to.

    A name belongs to the directory from which it was first registered, known by the directory's own id.

    ==================================  ================================================================================
    directory of the process            answer
    ==================================  ================================================================================
    its directory, at the known place   admitted at once: no other process has it open
    its directory's id, elsewhere       a copy, or the directory was moved: refused while the lease runs that was
                                        granted at the known place, then admitted; if processes at both places send
                                        requests, the one elsewhere counts as another directory
    another directory                   refused while that lease may run, and after that until `stateflow replace`,
                                        unless the name has nothing to lose
    any, if the ledger has none         admitted if it has some of the name's partitions, or the name has none
    ==================================  ================================================================================

    A refused process keeps asking. While a process with the name's directory waits only for the lease of the other
    place to lapse, the name's partitions are not given to other replicas when the lease lapses, because the waiting
    process has them.
    """

    def __init__(self, cluster: ClusterState, members: Members, settings: ControllerSettings, clock: Clock) -> None:
        self._cluster, self._members, self._settings, self._clock = cluster, members, settings, clock
        self._refused: dict[tuple[str, Home], Refused] = {}
        self._copies: set[tuple[str, Home]] = set()  # directories that are known to be copies

    def check(self, info: ReplicaInfo, home: Home, brings: Collection[PartitionId] | None = None) -> None:
        """Checks that a process may have a replica's name.

        Args:
            brings: partitions that the process has in some form; None: it has not said yet.

        Raises NameTaken, which is remembered while the process keeps asking, and InvalidArgument for a process that
        names no directory.
        """
        try:
            self._check(info, home, brings)
        except NameTaken as error:
            self.note(info, home, error)
            raise
        self._refused.pop((info.name, home), None)

    def note(self, info: ReplicaInfo, home: Home, error: StateflowError) -> None:
        """Remembers that a process was refused, and why."""
        now, before = self._clock.monotonic(), self._refused.get((info.name, home))
        since = before.since if before is not None and before.at >= self._asking_since() else now
        self._refused[info.name, home] = Refused(info, home, error, now, since)
        if len(self._refused) > REFUSED_MAX and len(self.refused()) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def _check(self, info: ReplicaInfo, home: Home, brings: Collection[PartitionId] | None) -> None:
        if not home.directory:
            raise InvalidArgument(
                "the replica does not name its data directory", remedy="run it with the controller's stateflow version"
            )
        name = info.name
        known = self._cluster.roster.homes.get(name)
        assigned = self._cluster.assigned(name).keys()
        if known is None:
            if brings is not None and assigned and assigned.isdisjoint(brings):
                raise self._taken(info, home, "the directory has none of the replica's partitions", self._command(info))
        elif known.directory == home.directory:
            if known.place == home.place:
                self._copies.discard((name, home))
            elif known.place and self._is_copy(name, home):
                raise self._taken(
                    info,
                    home,
                    "the data directory is a copy of one that was in use at the same time",
                    self._command(info),
                )
            elif self._members.may_serve(name) or self._may_be_alone(name, known.place, home.place):
                raise self._taken(
                    info,
                    home,
                    "a copy of this data directory, or the same one on another machine, serves under this name",
                    _STOP_ONE if self._members.may_serve(name) else self._command(info),
                )
        elif self._members.may_serve(name):
            raise self._taken(
                info,
                home,
                "the name belongs to another data directory, whose replica may still be serving",
                "start this one with another --name, or stop the other one first",
            )
        elif not self._cluster.is_free(name):
            raise self._taken(
                info, home, "the name belongs to another data directory, which holds its state", self._command(info)
            )
        # otherwise no partition is assigned to the name or moving to or from it, and no lease runs under which its
        # directory might still serve. That directory holds a base for copies at best, and a process that returns with
        # it is refused in turn. Nothing can be lost, so no command is needed.

    def _may_be_alone(self, name: str, known: str, place: str) -> bool:
        """Tells whether a process at the known place may be serving partitions alone although its lease has lapsed.

        A place that differs only in the boot of its machine is the same place: its process ended with that boot.
        """
        if known.partition("/")[2] == place.partition("/")[2] != "":
            return False
        failovers, said = self._cluster.failovers, self._members.said_alone(name)
        return any(failovers.may_be_alone(each.operator, said) for each in self._cluster.assigned(name))

    def _is_copy(self, name: str, home: Home) -> bool:
        """Tells whether a directory is a copy, rather than moved.

        It is a copy if a process at the known place sent heartbeats while the process with this directory asked,
        because the directory at the known place was then in use after the copy was made.
        """
        waiting = self._refused.get((name, home))
        if waiting is not None and self._members.heard_at(name) > waiting.since:
            self._copies.add((name, home))
        return (name, home) in self._copies

    def replaced(self, name: str) -> None:
        """Forgets copies and refusals under a name, after a command gave the name away or freed it."""
        self._copies = {each for each in self._copies if each[0] != name}
        self._refused = {key: each for key, each in self._refused.items() if key[0] != name}

    def _command(self, info: ReplicaInfo) -> str:
        return (
            "start the replica with that directory; if it is lost for good, `stateflow replace "
            f"{info.name}` gives the name to this one, and its state comes from standbys and checkpoints"
        )

    def _taken(self, info: ReplicaInfo, home: Home, what: str, remedy: str) -> NameTaken:
        known, there = self._cluster.roster.homes.get(info.name), self._cluster.roster.replicas.get(info.name)
        return NameTaken(
            what,
            remedy=remedy,
            replica=info.name,
            directory=home.directory,
            belongs_to=known.directory if known is not None else None,
            address=there.address if there is not None else None,
        )

    def _asking_since(self) -> float:
        """Returns a time, in monotonic seconds: a process that has not asked since then has given up asking."""
        silent_s = self._settings.heartbeat_interval_s * self._settings.heartbeats_missed_max
        return self._clock.monotonic() - silent_s

    def refused(self) -> list[Refused]:
        """Returns the refused processes that still ask, sorted by name."""
        since = self._asking_since()
        for key, refused in list(self._refused.items()):
            if refused.at < since:
                del self._refused[key]
        return sorted(self._refused.values(), key=lambda refused: (refused.info.name, refused.home.directory))

    def awaited(self, name: str) -> bool:
        """Tells whether a process with the name's directory is asking for the name and waits only for a lease to
        lapse."""
        known = self._cluster.roster.homes.get(name)
        return known is not None and any(
            (each.info.name, each.home.directory) == (name, known.directory)
            and isinstance(each.error, NameTaken)
            and not self._is_copy(name, each.home)
            for each in self.refused()
        )

    def successor(self, name: str, directory: str) -> str:
        """Returns the directory to which a command gives the name. Raises InvalidArgument, NameTaken.

        Args:
            directory: id of the directory; empty: the only other directory whose process asks for the name.
        """
        if name not in self._cluster.roster.replicas:
            raise InvalidArgument(
                f"there is no replica {name!r}",
                remedy=one_of(self._cluster.roster.replicas, "replica"),
            )
        known = self._cluster.roster.homes.get(name)
        there = [each.home for each in self.refused() if each.info.name == name and isinstance(each.error, NameTaken)]
        asking = sorted(
            {h.directory for h in there if known is None or h.directory != known.directory or self._is_copy(name, h)}
        )
        if directory:
            asking = [each for each in asking if each == directory]
        if len(asking) != 1:
            what = "no other data directory claims" if not asking else f"{len(asking)} data directories claim"
            raise InvalidArgument(
                f"{what} the name",
                remedy="start the replica with the new directory, and run the command again"
                if not asking
                else f"choose one with --directory: {', '.join(asking)}",
                replica=name,
            )
        if self._members.may_serve(name):
            raise NameTaken(
                "the replica of that name may still be serving",
                remedy="stop it, wait until its lease has lapsed, and run the command again",
                replica=name,
                address=self._cluster.roster.replicas[name].address,
                lease_s=f"{self._members.lease_left_s(name):.1f}",
            )
        return asking[0]
