"""Decides which data directory a replica's name belongs to. No I/O; the clock is handed in.

A name belongs to the directory from which it was first registered, known by the directory's own id.

====================================  ==================================================================================
who asks for the name                 answer
====================================  ==================================================================================
its directory, at the known place     admitted at once: no other process has it open
its directory's id, elsewhere         a copy, or the directory was moved: refused while the lease runs that was granted
                                      at the known place, then admitted; if both are heard at the same time, the one
                                      elsewhere is treated as another directory
another directory                     refused while that lease may run, and after that until `stateflow replace`, unless
                                      the name has nothing to lose
any, if the ledger knows none         admitted where it brings some of the name's partitions, or the name has none
====================================  ==================================================================================

A refused process goes on asking. While a process with the name's directory waits only for the lease of the other place
to lapse, the name's partitions are not given to other replicas when the lease lapses, as the waiting process has them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.members import Members
from reconfig.controller.roster import Home
from stateflow.clock import Clock
from stateflow.errors import InvalidArgument, NameTaken, StateflowError
from stateflow.settings import ControllerSettings
from stateflow.types import PartitionId, ReplicaInfo

_STOP_ONE = "stop one of the two; if the other one has ended, this one is admitted when its lease has lapsed"
#: refused processes that are remembered at a time: any process may ask under any name
REFUSED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Refused:
    """A process that was refused a name.

    ``at``: when it last asked, in monotonic seconds. ``since``: since when it has asked without a break.
    """

    info: ReplicaInfo
    home: Home
    error: StateflowError
    at: float
    since: float


class Names:
    def __init__(self, cluster: ClusterState, members: Members, settings: ControllerSettings, clock: Clock) -> None:
        self._cluster, self._members, self._settings, self._clock = cluster, members, settings, clock
        self._refused: dict[tuple[str, Home], Refused] = {}
        self._copies: set[tuple[str, Home]] = set()  # directories that are known to be copies

    def check(self, info: ReplicaInfo, home: Home, brings: Collection[PartitionId] | None = None) -> None:
        """Checks that a process may have a replica's name.

        Args:
            brings: partitions that the process has in some form; None: it has not said yet.

        Raises NameTaken, which is remembered while the process goes on asking, and InvalidArgument for a process that
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
            raise InvalidArgument("the replica does not name its data directory", remedy="run the controller's version")
        name = info.name
        known = self._cluster.roster.homes.get(name)
        assigned = self._cluster.assigned(name).keys()
        if known is None:
            if brings is not None and assigned and assigned.isdisjoint(brings):
                raise self._taken(info, home, "it has none of the replica's partitions", self._command(info))
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
        # else no partition is assigned to the name or on its way to or from it, and no lease runs by which its
        # directory might serve what it was last given. What is in that directory is a base for copies at best, and a
        # process that comes back with it is refused in turn. Nothing can be lost, so no command is needed.

    def _may_be_alone(self, name: str, known: str, place: str) -> bool:
        """Tells whether a process at the known place may serve partitions alone, though its lease has lapsed.

        A place that differs only in the boot of its machine is the same place: its process ended with that boot.
        """
        if known.partition("/")[2] == place.partition("/")[2] != "":
            return False
        failovers, said = self._cluster.failovers, self._members.said_alone(name)
        return any(failovers.may_be_alone(each.operator, said) for each in self._cluster.assigned(name))

    def _is_copy(self, name: str, home: Home) -> bool:
        """Tells whether a directory is a copy, rather than moved.

        It is a copy if the directory with the same id was heard at the known place while this one asked: that directory
        has gone on since the copy was made.
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
        """Returns a time, in monotonic seconds: a process that asked last before it asks no more."""
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
        """Tells whether a process with the name's directory asks for the name, and waits only for a lease to lapse."""
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
            directory: empty: the only other directory that asks for the name.
        """
        if name not in self._cluster.roster.replicas:
            raise InvalidArgument(
                f"there is no replica {name!r}",
                remedy=f"use one of {', '.join(sorted(self._cluster.roster.replicas)) or 'none'}",
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
