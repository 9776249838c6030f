"""Placement policies: from a view of the cluster to proposed moves, each with its reason. Sans-io and deterministic.

==============  ====================================================================================================
policy          aim
==============  ====================================================================================================
``ring``        every node has its weight's share of partitions, by as few moves as that takes
``load``        no node has more than 1.2 times its weight's share of rows a second and of bytes, by few moves
``locality``    partitions are where their rows have the shortest round trips: where they come from, or near to it
==============  ====================================================================================================

:func:`decide` asks policies for moves. Each decides from a :class:`View` alone, and makes a :class:`MoveProposal` for
each partition that it would move. It notes in :class:`Left` why a partition stays that it would like to move.

Every policy respects the sites to which an operator is confined and the room that replicas have, and places nothing at
a node in maintenance. Several policies are asked in order: a later one takes the moves of the earlier ones as made, and
does not move a partition away from the site where an earlier one wants it. No move is proposed that costs more than it
brings: within ``PAYBACK_S``, the bytes that no longer cross between sites must make up for the bytes of the move. The
move itself must not take longer than that either, if the bandwidth is known.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from reconfig.decisions.capacity import Room, Space
from stateflow import ring
from stateflow.errors import InvalidArgument
from stateflow.types import PartitionId, ReplicaInfo, node_of

#: a pair of sites
Pair = tuple[str, str]
#: rows a second, below which it does not matter where they come from
ORIGIN_ROWS_MIN = 0.1
#: assumed round trip between two sites that was not measured, in milliseconds
RTT_MS_DEFAULT = 20.0
#: seconds within which a move must pay off; the move itself may take no longer
PAYBACK_S = 600.0
#: the most partitions of which a policy tells why they stay
LEFT_MAX = 100
#: the most that a node may have, as a multiple of its weight's share
UNEVEN_MAX = 1.2
#: rows a second and bytes of an average node, below which it does not matter which node has more
ROWS_THAT_MATTER = 10.0
BYTES_THAT_MATTER = 16 << 20
#: how many takers are looked at for one partition, those with least; and how many partitions, in ``_places``
_LOOKED_AT = 4
#: if the taker would exceed UNEVEN_MAX, it must end so much of its share below what the giver had
_WORTH_IT = 0.05
#: fraction by which the round trips must be shorter elsewhere: rows from two sites alike move nothing to and fro
NEARER_MIN = 0.3
#: milliseconds a row by which a site that none of the rows come from must be nearer: less is no more than noise
NEARER_MS_MIN = 1.0
#: bytes of a row, if they were not measured
ROW_BYTES_GUESS = 100.0
#: how many of the sites nearest to an origin are looked at
_NEAREST = 8


# -- The view, and proposed moves ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements of a partition. ``size``: bytes on disk. ``rows``, ``row_bytes``: rows and their bytes a second.
    ``origins``: rows a second by the site that they come from, of the rows that name one."""

    size: int = 0
    rows: float = 0.0
    row_bytes: float = 0.0
    origins: Mapping[str, float] = field(default_factory=dict)


_UNSEEN = Seen()


@dataclass(frozen=True, slots=True)
class MoveProposal:
    """A proposed move. ``reason``: for people and the ledger."""

    partition: PartitionId
    source: str
    target: str
    reason: str


class Left:
    """Partitions that a policy would move but leaves where they are, and why; at most the first ``most``."""

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
class View:
    """The cluster as it is now.

    Args:
        owners: owner by partition.
        replicas: those that may be given something; other owners keep what they have.
        seen: measurements by partition.
        confined: sites to which operators are confined, see :mod:`stateflow.ring`.
        room: room by replica, of those that have reported it.
        resting: nodes that get nothing and keep what they have: in maintenance, or silent when they were asked.
        rtt_ms: round trips between two sites, in either order.
        tied: partitions that a policy wants at a site; later policies keep them there.
        copies: bytes of a partition's files at a replica that does not own it, which needs that much less room for it.
        bytes_per_s: bandwidth from one site to another.
    """

    owners: Mapping[PartitionId, str]
    replicas: Sequence[ReplicaInfo]
    seen: Mapping[PartitionId, Seen] = field(default_factory=dict)
    confined: ring.Confined = field(default_factory=lambda: ring.EVERYWHERE)
    room: Mapping[str, Room] = field(default_factory=dict)
    resting: Collection[str] = frozenset()
    rtt_ms: Mapping[Pair, float] = field(default_factory=dict)
    tied: Mapping[PartitionId, str] = field(default_factory=dict)
    copies: Mapping[tuple[PartitionId, str], int] = field(default_factory=dict)
    bytes_per_s: Mapping[Pair, float] = field(default_factory=dict)

    def of(self, partition: PartitionId) -> Seen:
        return self.seen.get(partition, _UNSEEN)

    def takers(self) -> list[ReplicaInfo]:
        """Returns the replicas that may be given something."""
        return [info for info in self.replicas if info.weight > 0 and node_of(info.name) not in self.resting]

    def may_be_at(self, partition: PartitionId, site: str) -> bool:
        sites = self.confined.get(partition.operator, ())
        return (not sites or site in sites) and self.tied.get(partition, site) == site

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
        """Returns why a move between two sites would take longer than ``PAYBACK_S``; empty: it would not, or the
        bandwidth is not known."""
        rate = self.bytes_per_s.get((here, there)) if here != there else None
        if rate is None or (seconds := self.of(partition).size / rate) <= PAYBACK_S:
            return ""
        return f"a move from {here} to {there} takes {seconds / 60:,.0f} min, more than {PAYBACK_S / 60:.0f}"

    def after(self, proposals: Iterable[MoveProposal]) -> View:
        proposals = list(proposals)
        owners = {**self.owners, **{proposal.partition: proposal.target for proposal in proposals}}
        if not self.room:
            return replace(self, owners=owners)
        space, copies = Space(self.room), dict(self.copies)
        for proposal in proposals:
            space.take(proposal.target, self.takes(proposal.partition, proposal.target))
            copies.pop((proposal.partition, proposal.target), None)
            copies[proposal.partition, proposal.source] = self.of(proposal.partition).size
        return replace(self, owners=owners, room=space.rooms(), copies=copies)


# -- Nodes, and policy load ------------------------------------------------------------------------------------------


class Nodes:
    """Rows, bytes and partitions of nodes and their workers, kept up to date as moves are proposed."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.space = Space(view.room)
        takers = view.takers()
        self.workers: dict[str, list[str]] = {}
        self.sites: dict[str, str] = {}
        self.weights: dict[str, float] = {}
        for info in sorted(takers, key=lambda info: info.name):
            node = node_of(info.name)
            self.workers.setdefault(node, []).append(info.name)
            self.sites[node] = info.site
            self.weights[node] = self.weights.get(node, 0.0) + info.weight
        self.rows = dict.fromkeys(self.weights, 0.0)
        self.bytes = dict.fromkeys(self.weights, 0.0)
        self.counts: dict[str, tuple[float, int]] = {}  # rows and partitions of a worker
        for partition, owner in view.owners.items():
            self._add(partition, owner, 1)

    def _add(self, partition: PartitionId, owner: str, sign: int) -> None:
        node, seen = node_of(owner), self.view.of(partition)
        if node in self.weights:
            self.rows[node] += sign * seen.rows
            self.bytes[node] += sign * seen.size
            rows, count = self.counts.get(owner, (0.0, 0))
            self.counts[owner] = rows + sign * seen.rows, count + sign

    def move(self, partition: PartitionId, target: str, source: str | None = None) -> None:
        self._add(partition, self.view.owners[partition] if source is None else source, -1)
        self._add(partition, target, 1)
        if self.view.room:
            self.space.take(target, self.view.takes(partition, target))

    def worker(self, node: str, partition: PartitionId) -> str | None:
        """Returns the node's worker with least, of those with room for the partition. None: no worker has room."""
        able = [name for name in self.workers[node] if self.has_room(name, partition)] if self.view.room else None
        if able == []:
            return None
        return min(able or self.workers[node], key=lambda name: (*self.counts.get(name, (0.0, 0)), name))

    def has_room(self, replica: str, partition: PartitionId) -> bool:
        return self.space.holds(replica, self.view.takes(partition, replica))


class Share:
    """Nodes' amounts of one measure (rows a second, or bytes) over their fair shares. ``of``: the measure of a
    partition."""

    def __init__(
        self, have: dict[str, float], weights: Mapping[str, float], of: Callable[[PartitionId], float]
    ) -> None:
        whole = sum(weights.values())
        total = sum(have.values())
        self.have, self.of = have, of
        self.fair = {node: total * weight / whole for node, weight in weights.items()}

    def uneven(self, node: str, more: float = 0.0) -> float:
        """Returns what a node has, or would have with ``more``, over its fair share. 1.0: exactly its share."""
        return (self.have[node] + more) / self.fair[node]


def by_load(view: View, left: Left | None = None) -> tuple[list[MoveProposal], View]:
    """Evens out load among nodes by few moves.

    The policy is greedy: from the node with most over its share to those with least, each time the largest partition
    that fits. Graham's bound for largest-first (SIAM J. Appl. Math. 17, 1969) holds if partitions are small compared
    with a node.
    """
    nodes = Nodes(view)
    if len(nodes.weights) < 2:
        return [], view
    matters = {"rows": ROWS_THAT_MATTER, "bytes": float(BYTES_THAT_MATTER)}
    shares = {
        "rows": Share(nodes.rows, nodes.weights, lambda partition: view.of(partition).rows),
        "bytes": Share(nodes.bytes, nodes.weights, lambda partition: float(view.of(partition).size)),
    }
    count = len(nodes.weights)
    shares = {name: share for name, share in shares.items() if sum(share.have.values()) / count >= matters[name]}
    if not shares:
        return [], view
    return _Evening(view, nodes, shares, left or Left()).run(), view


_Entry = tuple[float, str, int]  # a partition's measure, operator and number


def _places(partitions: Sequence[_Entry], too_much: float, room: float) -> Iterator[int]:
    """Yields indices of the partitions that are worth a try, in this order: the smallest that are enough and fit; the
    largest of the others that fit; the smallest that does not fit, which may be better there all the same.

    Args:
        partitions: partitions of the giver, ascending by the measure.
        too_much: what the giver has beyond the most that it may have.
        room: what the taker may still get.
    """
    fits = bisect_right(partitions, room, key=lambda each: each[0])
    enough = bisect_left(partitions, too_much, key=lambda each: each[0])
    if enough < fits:
        yield from range(enough, min(enough + _LOOKED_AT, fits))
    for place in range(min(fits, enough) - 1, max(-1, min(fits, enough) - 1 - _LOOKED_AT), -1):
        if partitions[place][0] > 0:
            yield place
    if fits < len(partitions):
        yield fits


class _Evening:
    def __init__(self, view: View, nodes: Nodes, shares: Mapping[str, Share], left: Left) -> None:
        self._view, self._nodes, self._shares, self._left = view, nodes, shares, left
        self._owners: dict[PartitionId, str] = {}  # proposed owners, if they differ from the view's
        self._reasons: dict[PartitionId, str] = {}
        #: by giving node and measure: the node's partitions, ascending by the measure
        self._sorted: dict[tuple[str, str], list[_Entry]] = {}
        self._theirs: dict[str, list[PartitionId]] = {}
        giving = {node for node in nodes.weights if self._most(node)[0] > UNEVEN_MAX}
        for partition, owner in view.owners.items():
            if (node := node_of(owner)) in giving:
                self._theirs.setdefault(node, []).append(partition)

    def _most(self, node: str) -> tuple[float, str]:
        return max((share.uneven(node), name) for name, share in self._shares.items())

    def run(self) -> list[MoveProposal]:
        nodes = self._nodes.weights
        self._takers = [(self._most(node)[0], node) for node in nodes]
        heapq.heapify(self._takers)
        givers = [(-self._most(node)[0], node) for node in self._theirs]
        heapq.heapify(givers)
        while givers:
            said, node = heapq.heappop(givers)
            uneven, name = self._most(node)
            if -said != uneven:
                heapq.heappush(givers, (-uneven, node))
            elif uneven > UNEVEN_MAX and self._give(node, name, uneven):
                heapq.heappush(givers, (-self._most(node)[0], node))
        return [
            MoveProposal(partition, self._view.owners[partition], target, self._reasons[partition])
            for partition, target in self._owners.items()
        ]

    def _give(self, node: str, name: str, uneven: float) -> bool:
        """Moves one partition away from ``node``, so that neither node is as uneven as ``node`` was. Returns False if
        no partition does that."""
        share, partitions = self._shares[name], self._by(node, name)
        too_much = share.have[node] - UNEVEN_MAX * share.fair[node]
        looked_at = self._least()
        try:
            for _, taker in looked_at:
                if taker == node:
                    continue
                room = UNEVEN_MAX * share.fair[taker] - share.have[taker]
                for place in _places(partitions, too_much, room):
                    _, operator, number = partitions[place]
                    if self._is_better(partition := PartitionId(operator, number), node, taker):
                        self._take(partition, node, taker, name, uneven)
                        return True
        finally:
            for _, taker in looked_at:
                heapq.heappush(self._takers, (self._most(taker)[0], taker))
        return False

    def _least(self) -> list[tuple[float, str]]:
        """Takes the nodes with least out of the heap, whose entries may be out of date: those are put back anew."""
        found: list[tuple[float, str]] = []
        while self._takers and len(found) < _LOOKED_AT:
            said, node = heapq.heappop(self._takers)
            now = self._most(node)[0]
            if said != now:
                heapq.heappush(self._takers, (now, node))
            else:
                found.append((said, node))
        return found

    def _is_better(self, partition: PartitionId, node: str, taker: str) -> bool:
        view, nodes = self._view, self._nodes
        if not view.may_be_at(partition, nodes.sites[taker]) or not all(
            share.uneven(taker, share.of(partition)) <= max(share.uneven(node) - _WORTH_IT, UNEVEN_MAX)
            for share in self._shares.values()
        ):
            return False
        if view.room and nodes.worker(taker, partition) is None:
            self._left.note(partition, f"{taker} has no room for it")
            return False
        if why := view.bytes_per_s and view.too_long(partition, nodes.sites[node], nodes.sites[taker]):
            self._left.note(partition, why)
            return False
        return True

    def _take(self, partition: PartitionId, node: str, taker: str, name: str, uneven: float) -> None:
        source = self._owners.get(partition, self._view.owners[partition])
        target = self._nodes.worker(taker, partition)
        assert target is not None  # _is_better has checked for room
        self._nodes.move(partition, target, source)
        for each in self._shares:
            if (node, each) in self._sorted:
                self._sorted[node, each].remove(self._entry(partition, each))
            if (taker, each) in self._sorted:
                insort(self._sorted[taker, each], self._entry(partition, each))
        if taker in self._theirs:
            self._theirs[taker].append(partition)
        self._theirs[node].remove(partition)
        self._owners[partition] = target
        self._reasons[partition] = f"{node} has {uneven:.2f} times its share of {name}"

    def _by(self, node: str, name: str) -> list[_Entry]:
        key = node, name
        if key not in self._sorted:
            self._sorted[key] = sorted(self._entry(partition, name) for partition in self._theirs[node])
        return self._sorted[key]

    def _entry(self, partition: PartitionId, name: str) -> _Entry:
        return self._shares[name].of(partition), partition.operator, partition.partition


# -- Policies together -----------------------------------------------------------------------------------------------


class PolicyName(StrEnum):
    RING = "ring"
    LOAD = "load"
    LOCALITY = "locality"


def policies_named(text: str) -> list[PolicyName]:
    """Parses a list such as ``locality,load``, in the order of decision. Raises InvalidArgument."""
    names = [name.strip() for name in text.split(",")]
    known = {policy.value for policy in PolicyName}
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgument(f"there is no policy {unknown[0]!r}", remedy=f"use {', '.join(sorted(known))}")
    if len(set(names)) < len(names):
        raise InvalidArgument("a policy is named twice", remedy="name each policy once, in order of precedence")
    return [PolicyName(name) for name in names]


def decide(names: Sequence[PolicyName], view: View, left: Left | None = None) -> list[MoveProposal]:
    """Returns the moves that the policies propose together, at most one for a partition.

    Args:
        left: collects the partitions that stay where they are, and why.
    """
    whole, left = view, left or Left()
    proposals: dict[PartitionId, MoveProposal] = {}
    for name in names:
        found, view = POLICIES[name](view, left)
        for proposal in found:
            source = whole.owners[proposal.partition]
            proposals[proposal.partition] = replace(proposal, source=source)
        view = view.after(found)
    made = [proposal for proposal in proposals.values() if proposal.source != proposal.target]
    left.moves_after_all(made)
    return made


# -- Policy ring -----------------------------------------------------------------------------------------------------


def by_ring(view: View, left: Left | None = None) -> tuple[list[MoveProposal], View]:
    left = left or Left()
    sites = {
        info.name: info.site for info in view.takers()
    }  # partitions of other replicas wait for a take-over, or for their owners to come back
    free = {
        partition: owner for partition, owner in view.owners.items() if owner in sites and partition not in view.tied
    }
    found = ring.rebalance(free, view.takers(), view.confined)
    nodes = Nodes(view)
    proposals = []
    for partition, target in found.items():
        owner = view.owners[partition]
        if not nodes.has_room(target, partition):
            left.note(partition, f"{node_of(target)} has no room for it")
        elif why := view.too_long(partition, sites[owner], sites[target]):
            left.note(partition, why)
        else:
            nodes.move(partition, target)
            proposals.append(MoveProposal(partition, owner, target, f"{node_of(target)} gets its share of partitions"))
    return proposals, view


# -- Policy locality -------------------------------------------------------------------------------------------------


class _Near:
    """Candidate sites of a partition: those that its rows come from, and the nearest of those whose round trip to one
    of them is known."""

    def __init__(self, view: View, able: Collection[str]) -> None:
        self._view, self._able = view, able
        self._known: dict[str, list[tuple[float, str]]] = {}
        for (one, other), rtt_ms in view.rtt_ms.items():
            self._known.setdefault(one, []).append((rtt_ms, other))
            self._known.setdefault(other, []).append((rtt_ms, one))
        self._nearest: dict[tuple[str, str], list[str]] = {}  # by operator and site

    def worth_a_move(self, partition: PartitionId, seen: Seen, here: str) -> Iterator[str]:
        """Yields the sites that are worth a move, the nearest first; lazily, as callers seldom need a second one.

        A site that none of the rows come from must be nearer by ``NEARER_MS_MIN``, by measured round trips.
        """
        first = next(iter(seen.origins)) if len(seen.origins) == 1 else ""
        if first and first != here and self._may_be(partition, first):
            yield first
        view, now, total = self._view, _trips(self._view, seen, here), sum(seen.origins.values())
        for then, site in sorted((_trips(view, seen, site), site) for site in self._of(partition, seen)):
            if now - then < NEARER_MIN * now:
                return
            if site in (here, first):
                continue
            if site in seen.origins or (now - then >= NEARER_MS_MIN * total and _are_known(view, seen, here, site)):
                yield site

    def _may_be(self, partition: PartitionId, site: str) -> bool:
        return site in self._able and self._view.may_be_at(partition, site)

    def _of(self, partition: PartitionId, seen: Seen) -> list[str]:
        near = set(seen.origins)
        if self._known:
            for origin in seen.origins:
                near.update(self._between(partition.operator, origin))
        return [site for site in near if self._may_be(partition, site)]

    def _between(self, operator: str, origin: str) -> list[str]:
        key = operator, origin
        if key not in self._nearest:
            sites = self._view.confined.get(operator, ())
            known = (each for each in sorted(self._known.get(origin, ())) if not sites or each[1] in sites)
            self._nearest[key] = [site for _, site in known if site in self._able][:_NEAREST]
        return self._nearest[key]


def by_locality(view: View, left: Left | None = None) -> tuple[list[MoveProposal], View]:
    nodes, left = Nodes(view), left or Left()
    at_site: dict[str, list[str]] = {}
    for node, site in nodes.sites.items():
        at_site.setdefault(site, []).append(node)
    sites_of = {info.name: info.site for info in view.replicas if node_of(info.name) not in view.resting}
    near = _Near(view, at_site.keys())
    proposals, tied = [], dict(view.tied)
    for partition in sorted(view.owners, key=_order):
        seen, owner = view.of(partition), view.owners[partition]
        total = sum(seen.origins.values())
        here = sites_of.get(owner)
        if total < ORIGIN_ROWS_MIN or here is None:
            continue
        tied[partition] = here
        if len(seen.origins) == 1 and here in seen.origins:  # most partitions, once placement has settled
            continue
        for best in near.worth_a_move(partition, seen, here):
            if not _pays(seen, here, best):
                left.note(partition, f"a move to {best} costs more bytes than it saves within {PAYBACK_S / 60:.0f} min")
                break  # a move that does not pay for the nearest site does not for the next
            if why := view.too_long(partition, here, best):
                left.note(partition, why)
            elif (target := _least_loaded(nodes, at_site[best], partition)) is None:
                left.note(partition, f"{best} has no room for it")
            else:
                nodes.move(partition, target)
                tied[partition] = best
                proposals.append(MoveProposal(partition, owner, target, _why(view, seen, here, best)))
                break
    return proposals, replace(view, tied=tied)


def _are_known(view: View, seen: Seen, here: str, there: str) -> bool:
    """Tells whether, for each origin, the round trips to both sites are measured, or to neither: a guess is not
    compared with a measurement."""
    return all(
        (view.measured_ms(origin, here) is None) == (view.measured_ms(origin, there) is None) for origin in seen.origins
    )


def _least_loaded(nodes: Nodes, there: Collection[str], partition: PartitionId) -> str | None:
    """Returns the least loaded worker at the least loaded node, of those with room. None: there is no room."""

    def load(node: str) -> tuple[float, str]:
        return nodes.rows[node] / nodes.weights[node], node

    if (target := nodes.worker(min(there, key=load), partition)) is not None:  # the usual case
        return target
    return next((target for node in sorted(there, key=load) if (target := nodes.worker(node, partition))), None)


def _why(view: View, seen: Seen, here: str, best: str) -> str:
    total = sum(seen.origins.values())
    if share := seen.origins.get(best, 0.0) / total:
        return f"{share:.0%} of its {total:,.1f} rows/s come from {best}"
    now, then = _trips(view, seen, here) / total, _trips(view, seen, best) / total
    return f"{best} is nearer to its rows: {then:.1f} ms per round trip, {now:.1f} from {here}"


def _order(partition: PartitionId) -> tuple[str, int]:
    return partition.operator, partition.partition


def _trips(view: View, seen: Seen, site: str) -> float:
    """Returns the milliseconds of round trips that a second's rows would take with the partition at ``site``."""
    return sum(rows * view.between_ms(origin, site) for origin, rows in seen.origins.items())


def _pays(seen: Seen, here: str, there: str) -> bool:
    """Tells whether the rows that no longer cross between sites make up for the bytes of the move within ``PAYBACK_S``.
    A site that no rows come from always pays: it is nearer, and saves time instead of bytes."""
    row_bytes = seen.row_bytes / seen.rows if seen.rows and seen.row_bytes else ROW_BYTES_GUESS
    saved = (seen.origins.get(there, 0.0) - seen.origins.get(here, 0.0)) * row_bytes
    return saved * PAYBACK_S >= seen.size or not seen.origins.get(there)


POLICIES: Final[Mapping[PolicyName, Callable[[View, Left], tuple[list[MoveProposal], View]]]] = MappingProxyType(
    {PolicyName.RING: by_ring, PolicyName.LOAD: by_load, PolicyName.LOCALITY: by_locality}
)


def uneven(view: View, measure: str = "rows") -> float:
    """Returns the greatest multiple of its weight's share of ``rows`` or ``bytes`` that a node has. 1.0: every node has
    exactly its share."""
    nodes = Nodes(view)
    have = nodes.rows if measure == "rows" else nodes.bytes
    share = Share(have, nodes.weights, lambda _: 0.0)
    return max((share.uneven(node) for node in have if share.fair[node]), default=1.0)
