"""Decides where partitions and their copies are placed, from a view of the cluster. Sans-io and deterministic.

Every target is chosen in one of three ways.

:func:`best` chooses one of the replicas that may have a partition, or a copy of it. The criteria other than load are
passed in as :class:`Terms`, and the decisions differ only in these criteria:

==========================  ==============================  ===========================================================
decision                    never at                        preferred, the most important first
==========================  ==============================  ===========================================================
takeover                    weight 0                        nodes not in maintenance; allowed sites; the fewest failed
                                                            attempts; the former owner's site
restore, its owner silent   maintenance, unless all are     allowed sites
:func:`spread_standbys`     weight 0, other sites than      the fewest failed attempts; the site with the fewest
                            allowed, nodes with a copy      copies; replicas that had a copy
:func:`replan`, of a move   weight 0, other sites than      the source's site
that waits                  allowed, others than named
:func:`spread`, by command  maintenance, others than named
==========================  ==============================  ===========================================================

:mod:`stateflow.ring` gives each node its share of the number of partitions, by as few moves as that takes: for
deployments, rebalances, drains (:func:`drained`) and the policy ``ring``.

:mod:`reconfig.decisions.policies` evens out the measured load, and moves partitions nearer to where their rows come
from.

Neither the ring nor the policies apply :func:`best` repeatedly. A share by number is exact, and the ring keeps
partitions where they are when replicas join and leave. A share of load is an upper bound, which few moves of large
partitions reach.

Two similar decisions are made elsewhere. A node spreads its partitions over its workers by their CPU time, which no
other process knows (:mod:`stateflow.node.supervising`). Where replicas are started is a matter of cores and memory
(:mod:`reconfig.controller.agents`).

The room of a replica is what its disk has free, up to the limit that it was configured with. Replicas on one disk share
its free bytes. A partition that moves away frees nothing, because its files stay there for a move back. The room that
moves under way need is subtracted (:meth:`View.reserved`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from reconfig.decisions.plan import Cause, PlannedMove
from stateflow import ring
from stateflow.errors import AlreadyThere, NoRoom, Unavailable
from stateflow.reports import LackOfRoom
from stateflow.types import PartitionId, ReplicaInfo, node_of

MIB = 1 << 20
#: a pair of sites
Pair = tuple[str, str]
#: assumed round trip between two sites that was not measured, in milliseconds
RTT_MS_DEFAULT = 20.0
#: seconds within which a move must pay off; the move itself may take no longer
PAYBACK_S = 600.0
#: seconds for which moves without a command avoid a target after its first failure; doubled by each further failure
AVOIDED_S = 30.0
MOST_DOUBLINGS = 5
#: maximum number of partitions for which a policy says why they stay
LEFT_MAX = 100
#: causes that spread partitions over all replicas: a replica that joins gets its share of the waiting moves
SPREADING: Final = frozenset({Cause.REBALANCE, Cause.DRAIN})
#: causes of reconfigurations by which people make a replica own less
ON_PURPOSE: Final = frozenset({Cause.DRAIN, Cause.MIGRATE})


# -- Room ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Room:
    """The room of one replica, in bytes. A negative number means that the limit or the disk is exceeded.

    Attributes:
        own: what the replica's limit still allows.
        disk: name of its disk, which replicas that report the same name share; empty: a disk of its own.
        free: free bytes of that disk.
    """

    own: float = math.inf
    disk: str = ""
    free: float = math.inf


class Space:
    """Room that remains while expected partitions are subtracted. A replica that has not reported its room has no
    limit."""

    def __init__(self, rooms: Mapping[str, Room]) -> None:
        self._own = {name: room.own for name, room in rooms.items()}
        self._disks = {name: room.disk or name for name, room in rooms.items()}
        self._free: dict[str, float] = {}
        for name, room in rooms.items():
            disk = self._disks[name]  # replicas on one disk may have reported at different times
            self._free[disk] = min(room.free, self._free.get(disk, math.inf))

    def holds(self, replica: str, size: float) -> bool:
        """Tells whether ``size`` more bytes fit. If no room is left, not even an empty partition fits, because it will
        not stay empty."""
        return size <= (left := self.left(replica)) and left > 0

    def left(self, replica: str) -> float:
        if replica not in self._own:
            return math.inf
        return min(self._own[replica], self._free[self._disks[replica]])

    def take(self, replica: str, size: float) -> None:
        if replica in self._own:
            self._own[replica] -= size
            self._free[self._disks[replica]] -= size

    def rooms(self) -> dict[str, Room]:
        return {
            name: Room(own, disk, self._free[disk]) for name, own in self._own.items() if (disk := self._disks[name])
        }


def lacking(coming: Iterable[tuple[str, float]], rooms: Mapping[str, Room]) -> list[LackOfRoom]:
    """Returns the replicas and disks that would receive more than they have room for: single replicas first, then
    disks.

    Args:
        coming: (replica, bytes) of each partition.
        rooms: room by replica; a replica that is missing has no limit.
    """
    own: dict[str, float] = {}
    for replica, size in coming:
        if replica in rooms:
            own[replica] = own.get(replica, 0.0) + size
    space, found = Space(rooms), list[LackOfRoom]()
    disks: dict[str, list[str]] = {}
    for replica in sorted(own):
        if not space.holds(replica, own[replica]):
            found.append(LackOfRoom((replica,), _whole(space.left(replica)), int(own[replica])))
        else:
            disks.setdefault(rooms[replica].disk or replica, []).append(replica)
    for together in disks.values():
        free, size = min(rooms[name].free for name in together), sum(own[name] for name in together)
        if size > free:
            found.append(LackOfRoom(tuple(together), _whole(free), int(size)))
    return found


def _whole(left: float) -> int:
    return max(0, int(left))


def no_room(lacks: list[LackOfRoom]) -> NoRoom:
    """Returns the error for the replicas and disks that :func:`lacking` found, at least one."""
    said = "; ".join(
        f"{', '.join(each.replicas)}: {mib(each.free_bytes)} free for state, {mib(each.coming_bytes)} needed"
        for each in lacks
    )
    return NoRoom(
        f"not enough room, nothing was moved: {said}",
        remedy="free space on them, or move fewer partitions or to other nodes; `stateflow nodes` shows free space",
        replicas=[name for each in lacks for name in each.replicas],
    )


def mib(size: float) -> str:
    return f"{size / MIB:,.1f} MiB"


# -- The view, and proposed moves ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements of a partition.

    Attributes:
        size: bytes on disk.
        rows: rows a second.
        row_bytes: bytes a second of these rows.
        origins: rows a second by site of origin; rows that name no site are left out.
    """

    size: int = 0
    rows: float = 0.0
    row_bytes: float = 0.0
    origins: Mapping[str, float] = field(default_factory=dict)


_UNSEEN = Seen()


@dataclass(frozen=True, slots=True)
class MoveProposal:
    """A proposed move. ``reason``: shown to people and recorded in the ledger."""

    partition: PartitionId
    source: str
    target: str
    reason: str


class Left:
    """Partitions that a policy would move but leaves where they are, with the reasons. Keeps the first ``most``."""

    def __init__(self, most: int = LEFT_MAX) -> None:
        self._most = most
        self.reasons: dict[PartitionId, str] = {}

    def note(self, partition: PartitionId, reason: str) -> None:
        if len(self.reasons) < self._most:
            self.reasons.setdefault(partition, reason)

    def moves_after_all(self, proposals: Iterable[MoveProposal]) -> None:
        for proposal in proposals:
            self.reasons.pop(proposal.partition, None)


@dataclass(frozen=True, slots=True)
class Choice:
    """The target that a command chooses for each partition. ``instead`` maps a partition to groups of other replicas
    that may receive it; preferred groups come first. ``left`` maps partitions that stay, although the command may mean
    them, to the reason.
    """

    moves: dict[PartitionId, str]
    instead: Mapping[PartitionId, Sequence[Collection[str]]] = field(default_factory=dict)
    left: Mapping[PartitionId, str] = field(default_factory=dict)

    def others(self) -> set[str]:
        return {name for ranks in self.instead.values() for rank in ranks for name in rank}


@dataclass(frozen=True, slots=True)
class View:
    """The cluster as it is now.

    Args:
        owners: owner by partition.
        replicas: replicas that may receive partitions; other owners keep theirs.
        seen: measurements by partition.
        allowed: sites at which operators are allowed, see :mod:`stateflow.ring`.
        room: room by replica; a replica that has not reported its room is missing.
        cordoned: nodes that receive no partitions and keep theirs, because they are in maintenance or did not answer.
        rtt_ms: round trips between two sites, in either order.
        pinned: site by partition, if a policy wants the partition there; later policies keep it there.
        copies: size, in bytes, of the files that a replica has of a partition that it does not own, by partition and
            replica. A move of the partition to the replica needs that much less room.
        bytes_per_s: bandwidth from one site to another.
        avoided: by operator, replicas that receive none of its partitions, because they could not lately.
    """

    owners: Mapping[PartitionId, str]
    replicas: Sequence[ReplicaInfo]
    seen: Mapping[PartitionId, Seen] = field(default_factory=dict)
    allowed: ring.AllowedSites = field(default_factory=lambda: ring.EVERYWHERE)
    room: Mapping[str, Room] = field(default_factory=dict)
    cordoned: Collection[str] = frozenset()
    rtt_ms: Mapping[Pair, float] = field(default_factory=dict)
    pinned: Mapping[PartitionId, str] = field(default_factory=dict)
    copies: Mapping[tuple[PartitionId, str], int] = field(default_factory=dict)
    bytes_per_s: Mapping[Pair, float] = field(default_factory=dict)
    avoided: Mapping[str, Collection[str]] = field(default_factory=dict)

    def of(self, partition: PartitionId) -> Seen:
        return self.seen.get(partition, _UNSEEN)

    def takers(self) -> list[ReplicaInfo]:
        """Returns the replicas that may receive partitions."""
        return [info for info in self.replicas if info.weight > 0 and node_of(info.name) not in self.cordoned]

    def may_be_at(self, partition: PartitionId, site: str) -> bool:
        sites = self.allowed.get(partition.operator, ())
        return (not sites or site in sites) and self.pinned.get(partition, site) == site

    def measured_ms(self, one: str, other: str) -> float | None:
        """Returns the measured round trip between two sites, 0 within a site. None: not known."""
        if one == other:
            return 0.0
        found = self.rtt_ms.get((one, other))
        return self.rtt_ms.get((other, one)) if found is None else found

    def between_ms(self, one: str, other: str) -> float:
        found = self.measured_ms(one, other)
        return RTT_MS_DEFAULT if found is None else found

    def takes(self, partition: PartitionId, replica: str) -> int:
        """Returns the bytes of room that a partition would need at a replica."""
        return max(0, self.of(partition).size - self.copies.get((partition, replica), 0))

    def too_long(self, partition: PartitionId, here: str, there: str) -> str:
        """Returns why a move between two sites would take longer than ``PAYBACK_S``; empty: it would not take longer,
        or the bandwidth is not known."""
        rate = self.bytes_per_s.get((here, there)) if here != there else None
        if rate is None or (seconds := self.of(partition).size / rate) <= PAYBACK_S:
            return ""
        return f"a move from {here} to {there} takes {seconds / 60:,.0f} min, more than {PAYBACK_S / 60:.0f}"

    def after(self, proposals: Iterable[MoveProposal]) -> View:
        proposals = list(proposals)
        view = replace(self, owners={**self.owners, **{proposal.partition: proposal.target for proposal in proposals}})
        if not self.room:
            return view
        copies = dict(self.copies)
        for proposal in proposals:
            copies.pop((proposal.partition, proposal.target), None)
            copies[proposal.partition, proposal.source] = self.of(proposal.partition).size
        return replace(view.reserved((proposal.partition, proposal.target) for proposal in proposals), copies=copies)

    def reserved(self, moves: Iterable[tuple[PartitionId, str]]) -> View:
        """Returns the view less the room that the moved partitions need at their targets."""
        space = Space(self.room)
        for partition, target in moves:
            space.take(target, self.takes(partition, target))
        return replace(self, room=space.rooms())

    def lacks(self, moves: Mapping[PartitionId, str]) -> list[LackOfRoom]:
        return lacking(((target, self.takes(partition, target)) for partition, target in moves.items()), self.room)

    def fitted(self, choice: Choice) -> dict[PartitionId, str]:
        """Returns the target of each partition, changed if the target lacks room for it. Larger partitions come first.

        The new target is the replica with most room left, in the first group of ``instead`` where the partition fits. A
        partition that fits nowhere keeps its target.
        """
        space, found = Space(self.room), dict(choice.moves)
        for partition in sorted(found, key=lambda each: -self.takes(each, found[each])):
            if not space.holds(found[partition], self.takes(partition, found[partition])):
                for rank in choice.instead.get(partition, ()):
                    able = [name for name in sorted(rank) if space.holds(name, self.takes(partition, name))]
                    if able:
                        found[partition] = max(able, key=space.left)
                        break
            space.take(found[partition], self.takes(partition, found[partition]))
        return found

    def fitting(self, moves: Mapping[PartitionId, str]) -> dict[PartitionId, str]:
        """Returns the moves for which their targets have room together. Smaller partitions come first, because more of
        them fit."""
        space, found = Space(self.room), dict[PartitionId, str]()
        for partition, target in sorted(moves.items(), key=lambda each: self.takes(*each)):
            if space.holds(target, size := self.takes(partition, target)):
                space.take(target, size)
                found[partition] = target
        return {partition: target for partition, target in moves.items() if partition in found}


class Avoided:
    """Remembers which replicas could not take an operator's partitions, so that moves without a command avoid them for
    a while. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str], tuple[int, float]] = {}  # by operator and replica: failures, and until when

    def failed(self, now_s: float, failures: Iterable[tuple[str, str]]) -> None:
        """Notes failures.

        Args:
            failures: (operator, replica) of each failure.
        """
        for key in failures:
            count = self._failed.get(key, (0, 0.0))[0] + 1
            self._failed[key] = count, now_s + self._lasts_s(count)

    def took(self, done: Iterable[tuple[str, str]]) -> None:
        """Forgets the failures of replicas that can take an operator's partitions, given as (operator, replica)."""
        for key in done:
            self._failed.pop(key, None)

    def now(self, now_s: float) -> dict[str, frozenset[str]]:
        """Returns the replicas to avoid, by operator."""
        # a replica that is not asked again, because it is gone or not wanted, is forgotten
        self._failed = {
            key: (count, until) for key, (count, until) in self._failed.items() if now_s < until + self._lasts_s(count)
        }
        found: dict[str, frozenset[str]] = {}
        for (operator, replica), (_, until) in self._failed.items():
            if now_s < until:
                found[operator] = found.get(operator, frozenset()) | {replica}
        return found

    @staticmethod
    def _lasts_s(count: int) -> float:
        return math.ldexp(AVOIDED_S, min(count - 1, MOST_DOUBLINGS))


# -- One replica for each partition ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Terms:
    """The criteria by which a partition or copy is placed; load decides only among replicas equal in all of them.

    Args:
        cordoned: nodes that get the partition or copy only if no other node may have it.
        sites: sites that are preferred to all others; empty: none.
        tried: failed attempts by replica.
        at_site: cost of a site, in any unit; a site that is missing costs 0.
        near: replicas that have most data of the partition, the best first.
    """

    cordoned: Collection[str] = ()
    sites: Collection[str] = ()
    tried: Mapping[str, int] = field(default_factory=dict)
    at_site: Mapping[str, int] = field(default_factory=dict)
    near: Sequence[str] = ()


NO_TERMS: Final = Terms()


def best(able: Iterable[ReplicaInfo], load: Mapping[str, int], terms: Terms = NO_TERMS) -> ReplicaInfo | None:
    """Returns the replica that a partition, or a copy of it, is placed at. None: ``able`` is empty.

    Among replicas equal in all ``terms``, it is the one that will have the least load for its weight, and then the
    first by name.

    Args:
        able: replicas that may have the partition or copy.
        load: number of partitions, or of copies, by replica.
    """

    def cost(info: ReplicaInfo) -> tuple[bool, bool, int, int, int, float, str]:
        return (
            node_of(info.name) in terms.cordoned,
            bool(terms.sites) and info.site not in terms.sites,
            terms.tried.get(info.name, 0),
            terms.at_site.get(info.site, 0),
            terms.near.index(info.name) if info.name in terms.near else len(terms.near),
            _filled(info, load),
            info.name,
        )

    return min(able, key=cost, default=None)


def _filled(info: ReplicaInfo, load: Mapping[str, int]) -> float:
    """Returns a replica's load in relation to its weight, with one partition more."""
    return (load.get(info.name, 0) + 1) / max(info.weight, 1)


def spread(partitions: Iterable[PartitionId], able: Collection[ReplicaInfo], owned: Mapping[str, int]) -> Choice:
    """Spreads partitions over replicas. Every replica is also an alternative target for each partition.

    Args:
        able: the replicas that may receive partitions, at least one.
        owned: number of partitions by replica.
    """
    load, moves = Counter(owned), dict[PartitionId, str]()
    for partition in partitions:
        if (target := best(able, load)) is not None:
            moves[partition] = target.name
            load[target.name] += 1
    return Choice(moves, dict.fromkeys(moves, ([info.name for info in able],)))


def spread_standbys(
    partitions: Mapping[PartitionId, str],
    existing: Mapping[PartitionId, Sequence[str]],
    count: int,
    replicas: Sequence[ReplicaInfo],
    near: Mapping[PartitionId, Sequence[str]] = MappingProxyType({}),
    sites: Mapping[str, str] = MappingProxyType({}),
    tried: Mapping[PartitionId, Mapping[str, int]] = MappingProxyType({}),
) -> list[tuple[PartitionId, str]]:
    """Returns (partition, replica) for every missing standby.

    A standby is never at the owner's node, and no node has two standbys of a partition. Preference, in this order: the
    replica with the fewest failed attempts, e.g. for lack of room; the site with the fewest copies of the partition; a
    replica in ``near``, earlier entries first; the replica with the fewest standbys for its weight. Fewer than
    ``count`` are returned if there are not enough nodes.

    Args:
        partitions: owner by partition.
        existing: replicas with a standby, by partition.
        count: standbys wanted of each partition.
        near: by partition, replicas that were owner or standby until now.
        sites: site by replica, including replicas that have copies but receive no more.
        tried: by partition, failed attempts by replica.
    """
    takers = [info for info in replicas if info.weight > 0]
    at = {**sites, **{info.name: info.site for info in replicas}}
    copies = Counter(name for names in existing.values() for name in names)
    missing: list[tuple[PartitionId, str]] = []
    for partition, owner in sorted(partitions.items(), key=lambda item: item[0].partition):
        have = [owner, *existing.get(partition, ())]
        while len(have) <= count:
            taken = set(map(node_of, have))
            at_site = Counter(at[name] for name in have if name in at)
            terms = Terms(tried=tried.get(partition, {}), at_site=at_site, near=near.get(partition, ()))
            chosen = best((info for info in takers if node_of(info.name) not in taken), copies, terms)
            if chosen is None:
                break
            copies[chosen.name] += 1
            have.append(chosen.name)
            missing.append((partition, chosen.name))
    return missing


@dataclass(frozen=True, slots=True)
class Retargeted:
    """A move and its new target. ``reason``: recorded in the ledger and shown to people."""

    move: PlannedMove
    target: str
    reason: str


def replan(
    waiting: Iterable[PlannedMove],
    view: View,
    gone: Collection[str],
    sites: Mapping[str, str],
    shares: Mapping[str, int],
) -> list[Retargeted]:
    """Returns, in order, the moves that get another target because their target is gone or a better one has joined.

    A move without an alternative stays as it is. Moves that have begun are not considered: they fail by themselves if
    their target dies.

    Args:
        waiting: moves that wait for their turn.
        view: ``replicas`` are those that may be given partitions.
        gone: replicas that no longer serve, as far as the controller knows.
        sites: site by replica, of all known replicas.
        shares: number of partitions that each replica will have when all planned moves have ended.
    """
    alive, counts, found = {info.name: info for info in view.replicas}, Counter(shares), list[Retargeted]()
    for move in waiting:
        able = (
            info
            for info in view.takers()
            if info.name != move.source and move.asked.allows(info) and view.may_be_at(move.partition, info.site)
        )
        counts[move.target] -= 1
        chosen = best(able, counts, Terms(at_site={sites.get(move.source, ""): -1}))
        if chosen is not None and (reason := _why_retargeted(move, chosen, alive.get(move.target), gone, counts)):
            found.append(Retargeted(move, chosen.name, reason))
            counts[chosen.name] += 1
        else:
            counts[move.target] += 1
    return found


def _why_retargeted(
    move: PlannedMove, chosen: ReplicaInfo, target: ReplicaInfo | None, gone: Collection[str], load: Mapping[str, int]
) -> str:
    """Returns why a move goes to ``chosen`` instead of its target; empty: it keeps its target. ``target`` is None if it
    does not answer."""
    if target is None:
        return f"{move.target} does not answer" if move.target in gone else ""  # it may only be late
    spreads = move.cause in SPREADING and not move.asked.to and chosen != target
    is_less = spreads and _filled(chosen, load) < _filled(target, load)
    return f"{chosen.name} is less loaded than {target.name}" if is_less else ""


# -- Many partitions at once -----------------------------------------------------------------------------------------


def drained(view: View, replica: str, leaving: Collection[str], home: str) -> Choice:
    """Returns the targets for the partitions of a replica or node that is drained: other workers of its node, else
    other nodes of its site, else other sites.

    Args:
        view: ``replicas`` are those that may be given partitions.
        replica: name of the replica or node.
        leaving: names of the replicas that are to own nothing.
        home: site of the replicas in ``leaving``.

    Raises AlreadyThere if those replicas own nothing, and Unavailable if no other replica answers, or none at the
    allowed sites of an operator with partitions to move away.
    """
    others = [info for info in view.takers() if info.name not in leaving]
    if not set(view.owners.values()).intersection(leaving):
        raise AlreadyThere("the replica owns no partitions", remedy="it can be stopped", replica=replica)
    if not others:
        raise Unavailable(
            "no other replica can receive partitions",
            remedy="start one, or end the maintenance of another node",
            replica=replica,
        )
    moves: dict[PartitionId, str] = {}
    instead: dict[PartitionId, Sequence[Collection[str]]] = {}
    for sites, theirs, able in ring.by_sites(view.owners, others, view.allowed):
        operators = sorted({partition.operator for partition, owner in theirs.items() if owner in leaving})
        if not operators:
            continue
        if not able:
            raise Unavailable(
                f"no other replica at the sites of {', '.join(operators)} can receive partitions",
                remedy="start one there, deploy the operator again with other sites, or migrate its partitions",
                replica=replica,
                sites=", ".join(sorted(sites)),
            )
        siblings = [info for info in able if node_of(info.name) == node_of(replica)]
        same_site = [info for info in able if info.site == home]
        moves |= (leaves := ring.drain(leaving, theirs, siblings or same_site or able))
        ranks = tuple([info.name for info in rank] for rank in (siblings, same_site, able))
        instead |= dict.fromkeys(leaves, ranks)
    return Choice(moves, instead)


# -- Replicas that join ----------------------------------------------------------------------------------------------


class Joining:
    """Decides when a rebalance for newcomers begins.

    Args:
        after_s: seconds for which a newcomer must have been present while nothing else was under way.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[tuple[str, str], float] = {}
        self._served: set[tuple[str, str]] = set()
        self._quiet_from = float("-inf")

    def step(self, now_s: float, newcomers: Mapping[str, str], busy: bool) -> frozenset[str]:
        """Returns the newcomers for which a rebalance begins now; empty: not yet.

        Call :meth:`began` when the rebalance has begun. Otherwise it could not begin, and is due again ``after_s``
        later.

        Args:
            now_s: monotonic seconds.
            newcomers: session by name, of the newcomers that are there now; a replica that was started again has
                another session, and counts as another newcomer.
            busy: a move, restore, deployment or takeover is under way, or a replica that owns partitions is silent.
        """
        if busy:
            self._quiet_from = now_s
        there = set(newcomers.items())
        self._since = {each: self._since.get(each, now_s) for each in there}
        self._served &= there
        waited = {each for each in there if now_s - max(self._since[each], self._quiet_from) >= self._after_s}
        if busy or not waited - self._served:
            return frozenset()
        self._quiet_from = now_s
        return frozenset(name for name, _ in there)

    def began(self, newcomers: Mapping[str, str]) -> None:
        """Notes that a rebalance has begun, which serves all ``newcomers``, the same that :meth:`step` was told."""
        self._served |= set(newcomers.items())


def newcomers(
    owners: Mapping[PartitionId, str],
    alive: Collection[ReplicaInfo],
    sites: Mapping[str, str],
    allowed: ring.AllowedSites = ring.EVERYWHERE,
) -> frozenset[str]:
    """Returns the replicas for which a rebalance may begin without a command.

    Returns an empty set if some operator has no partition at a site that would receive partitions: the operator may
    have been kept away from that site on purpose, which earlier versions did not record.

    Args:
        owners: owner by partition.
        alive: replicas that may receive partitions.
        sites: site by replica, of all replicas, alive or not.
        allowed: the sites at which operators are allowed.
    """
    found = ring.newcomers(owners, alive, allowed)
    places: dict[str, set[str]] = {}
    for partition, owner in owners.items():
        places.setdefault(partition.operator, set()).add(sites.get(owner, ""))
    taking = {info.site for info in alive if info.weight > 0}
    everywhere = all(taking & set(allowed.get(operator, taking)) <= at for operator, at in places.items())
    return found if everywhere else frozenset()


def was_emptied(replica: str, moves: Iterable[tuple[str, str, Cause]]) -> bool:
    """Tells whether the last move to or from a replica's node moved a partition away on purpose.

    Args:
        moves: (source, target, cause) of completed moves, newest first.
    """
    node = node_of(replica)
    for source, target, cause in moves:
        ends = node_of(source), node_of(target)
        if node in ends and ends[0] != ends[1]:
            return ends[0] == node and cause in ON_PURPOSE
    return False
