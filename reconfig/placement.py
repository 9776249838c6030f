"""Where partitions had better be, by what is measured: from a view of the cluster to wishes, each with its reason.
Sans-io, and the same view gives the same wishes.

==============  ====================================================================================================
policy          wishes
==============  ====================================================================================================
``ring``        every node has its weight's share of partitions, by as few moves as that takes
``load``        no node has more than 1.2 times its weight's share of rows a second and of bytes, by few moves
``locality``    partitions are where their rows come from, or nearest to it by round trips
==============  ====================================================================================================

Every policy keeps to the sites an operator is confined to, to the room nodes have, and places nothing at a node that
rests for maintenance. Several are asked in order: the later ones take the wishes of the earlier for granted, and leave
at its site what an earlier one wants there. A wish that costs more than it brings is none: the bytes of a move must be
made up for by those that no longer cross between sites within ``PAYBACK_S``.

Evening out is greedy: from the node that has most over its share to those that have least, each time the largest
partition that fits; Graham's bound for largest-first (SIAM J. Appl. Math. 17, 1969) holds where partitions are small
beside a node.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from stateflow import ring
from stateflow.errors import InvalidArgument
from stateflow.types import PartitionId, ReplicaInfo, node_of

#: a node may have so many times its weight's share
UNEVEN_MAX = 1.2
#: what all nodes have on average of either, below which it does not matter who has more
ROWS_THAT_MATTER = 10.0
BYTES_THAT_MATTER = 16 << 20
#: the round trips of its rows must be so much fewer elsewhere: what comes from two sites alike does not go to and fro
NEARER_MIN = 0.3
#: rows a second, below which it does not matter where they come from
ORIGIN_ROWS_MIN = 0.1
#: between two sites of which nothing is known
RTT_MS_DEFAULT = 20.0
#: of a row, where its bytes were not measured
ROW_BYTES_GUESS = 100.0
PAYBACK_S = 600.0
#: nodes that are looked at for one partition, those with least
_LOOKED_AT = 4
#: what is over the most that a node may have is to become less by so much of its share, or it is left
_WORTH_IT = 0.05


@dataclass(frozen=True, slots=True)
class Seen:
    """What is measured of a partition: ``size`` on disk, bytes; ``rows`` and ``row_bytes`` that come a second;
    ``origins``: of the rows that say from which site they are, how many a second."""

    size: int = 0
    rows: float = 0.0
    row_bytes: float = 0.0
    origins: Mapping[str, float] = field(default_factory=dict)


_UNSEEN = Seen()


@dataclass(frozen=True, slots=True)
class Wish:
    """``reason``: for people and the ledger."""

    partition: PartitionId
    source: str
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class View:
    """What there is now.

    Args:
        replicas: that may be given something; who else owns something keeps it.
        confined: see :mod:`stateflow.ring`.
        room: bytes of state that a node may have, by name; none: any.
        resting: nodes that are given nothing, and keep what they have: in maintenance, or silent when they were asked.
        rtt_ms: between two sites, in either order.
        tied: partitions that a policy wants at a site, which the later ones keep to.
    """

    owners: Mapping[PartitionId, str]
    replicas: Sequence[ReplicaInfo]
    seen: Mapping[PartitionId, Seen] = field(default_factory=dict)
    confined: ring.Confined = field(default_factory=lambda: ring.EVERYWHERE)
    room: Mapping[str, float] = field(default_factory=dict)
    resting: Collection[str] = frozenset()
    rtt_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    tied: Mapping[PartitionId, str] = field(default_factory=dict)

    def of(self, partition: PartitionId) -> Seen:
        return self.seen.get(partition, _UNSEEN)

    def takers(self) -> list[ReplicaInfo]:
        """Who may be given something."""
        return [info for info in self.replicas if info.weight > 0 and node_of(info.name) not in self.resting]

    def may_be_at(self, partition: PartitionId, site: str) -> bool:
        sites = self.confined.get(partition.operator, ())
        return (not sites or site in sites) and self.tied.get(partition, site) == site

    def between_ms(self, one: str, other: str) -> float:
        if one == other:
            return 0.0
        return self.rtt_ms.get((one, other)) or self.rtt_ms.get((other, one)) or RTT_MS_DEFAULT

    def after(self, wishes: Iterable[Wish]) -> View:
        return replace(self, owners={**self.owners, **{wish.partition: wish.target for wish in wishes}})


class PolicyName(StrEnum):
    RING = "ring"
    LOAD = "load"
    LOCALITY = "locality"


def policies_named(text: str) -> list[PolicyName]:
    """``locality,load``: in this order. Raises InvalidArgument."""
    names = [name.strip() for name in text.split(",")]
    known = {policy.value for policy in PolicyName}
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgument(f"there is no policy {unknown[0]!r}", remedy=f"use {', '.join(sorted(known))}")
    if len(set(names)) < len(names):
        raise InvalidArgument("a policy is named twice", remedy="name each once, the one that decides first")
    return [PolicyName(name) for name in names]


def decide(names: Sequence[PolicyName], view: View) -> list[Wish]:
    """What all of them together wish: a partition at most once."""
    whole = view
    wishes: dict[PartitionId, Wish] = {}
    for name in names:
        found, view = POLICIES[name](view)
        for wish in found:
            source = whole.owners[wish.partition]
            wishes[wish.partition] = replace(wish, source=source)
        view = view.after(found)
    return [wish for wish in wishes.values() if wish.source != wish.target]


# -- ring -----------------------------------------------------------------------------------------------------


def by_ring(view: View) -> tuple[list[Wish], View]:
    there = {info.name for info in view.takers()}  # what others own is for a take-over, or for them when they are back
    free = {
        partition: owner for partition, owner in view.owners.items() if owner in there and partition not in view.tied
    }
    found = ring.rebalance(free, view.takers(), view.confined)
    nodes = _Nodes(view)
    wishes = []
    for partition, target in found.items():
        if nodes.has_room(node_of(target), view.of(partition).size):
            nodes.move(partition, target)
            why = f"{node_of(target)} is to have its share of partitions"
            wishes.append(Wish(partition, view.owners[partition], target, why))
    return wishes, view


# -- load -----------------------------------------------------------------------------------------------------


class _Nodes:
    """What nodes and their workers have, as wishes are added."""

    def __init__(self, view: View) -> None:
        self.view = view
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

    def worker(self, node: str) -> str:
        """That has least."""
        return min(self.workers[node], key=lambda name: (*self.counts.get(name, (0.0, 0)), name))

    def has_room(self, node: str, size: int) -> bool:
        return self.bytes.get(node, 0.0) + size <= self.view.room.get(node, math.inf)


class _Share:
    """Of one measure, rows a second or bytes: what each node has over what it is to have."""

    def __init__(
        self, have: dict[str, float], weights: Mapping[str, float], of: Callable[[PartitionId], float]
    ) -> None:
        whole = sum(weights.values())
        total = sum(have.values())
        self.have, self.of = have, of
        self.fair = {node: total * weight / whole for node, weight in weights.items()}

    def uneven(self, node: str, more: float = 0.0) -> float:
        """1.0: exactly its share."""
        return (self.have[node] + more) / self.fair[node]


def by_load(view: View, uneven_max: float = UNEVEN_MAX) -> tuple[list[Wish], View]:
    nodes = _Nodes(view)
    if len(nodes.weights) < 2:
        return [], view
    matters = {"rows": ROWS_THAT_MATTER, "bytes": float(BYTES_THAT_MATTER)}
    shares = {
        "rows": _Share(nodes.rows, nodes.weights, lambda partition: view.of(partition).rows),
        "bytes": _Share(nodes.bytes, nodes.weights, lambda partition: float(view.of(partition).size)),
    }
    count = len(nodes.weights)
    shares = {name: share for name, share in shares.items() if sum(share.have.values()) / count >= matters[name]}
    if not shares:
        return [], view
    return _Evening(view, nodes, shares, uneven_max).run(), view


_Entry = tuple[float, str, int]  # what a partition has of a measure, and which it is


def _places(partitions: Sequence[_Entry], too_much: float, room: float) -> Iterator[int]:
    """Of those worth a try, ascending by what they have: the least that is enough, where there is room for it; the
    largest that there is room for; the least that there is none for, as it may be better there all the same."""
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
    def __init__(self, view: View, nodes: _Nodes, shares: Mapping[str, _Share], uneven_max: float) -> None:
        self._view, self._nodes, self._shares, self._uneven_max = view, nodes, shares, uneven_max
        self._owners: dict[PartitionId, str] = {}  # where that is not as in the view
        self._reasons: dict[PartitionId, str] = {}
        #: of a node that gives, by measure: what each partition has of it, ascending
        self._sorted: dict[tuple[str, str], list[_Entry]] = {}
        self._theirs: dict[str, list[PartitionId]] = {}
        giving = {node for node in nodes.weights if self._most(node)[0] > uneven_max}
        for partition, owner in view.owners.items():
            if (node := node_of(owner)) in giving:
                self._theirs.setdefault(node, []).append(partition)

    def _most(self, node: str) -> tuple[float, str]:
        return max((share.uneven(node), name) for name, share in self._shares.items())

    def run(self) -> list[Wish]:
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
            elif uneven > self._uneven_max and self._give(node, name, uneven):
                heapq.heappush(givers, (-self._most(node)[0], node))
        return [
            Wish(partition, self._view.owners[partition], target, self._reasons[partition])
            for partition, target in self._owners.items()
        ]

    def _give(self, node: str, name: str, uneven: float) -> bool:
        """One partition, so that neither has as much over its share as it had. False: there is none."""
        share, partitions = self._shares[name], self._by(node, name)
        too_much = share.have[node] - self._uneven_max * share.fair[node]
        looked_at = self._least()
        try:
            for _, taker in looked_at:
                if taker == node:
                    continue
                room = self._uneven_max * share.fair[taker] - share.have[taker]
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
        """The nodes with least, taken out of the heap; what is said there of others may be old."""
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
        if not view.may_be_at(partition, nodes.sites[taker]) or not nodes.has_room(taker, view.of(partition).size):
            return False
        return all(
            share.uneven(taker, share.of(partition)) <= max(share.uneven(node) - _WORTH_IT, self._uneven_max)
            for share in self._shares.values()
        )

    def _take(self, partition: PartitionId, node: str, taker: str, name: str, uneven: float) -> None:
        source = self._owners.get(partition, self._view.owners[partition])
        target = self._nodes.worker(taker)
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
        return self._shares[name].of(partition), *_order(partition)


# -- locality -------------------------------------------------------------------------------------------------


def by_locality(view: View) -> tuple[list[Wish], View]:
    nodes = _Nodes(view)
    at_site: dict[str, list[str]] = {}
    for node, site in nodes.sites.items():
        at_site.setdefault(site, []).append(node)
    sites_of = {info.name: info.site for info in view.replicas if node_of(info.name) not in view.resting}
    known: dict[str, set[str]] = {}
    for one, other in view.rtt_ms:
        known.setdefault(one, set()).add(other)
        known.setdefault(other, set()).add(one)
    wishes, tied = [], dict(view.tied)
    for partition in sorted(view.owners, key=_order):
        seen, owner = view.of(partition), view.owners[partition]
        total = sum(seen.origins.values())
        here = sites_of.get(owner)
        if total < ORIGIN_ROWS_MIN or here is None:
            continue
        if len(seen.origins) == 1 and here in seen.origins:  # as most are, where it has settled
            tied[partition] = here
            continue
        # others than these are not known to be nearer
        near = {here, *seen.origins}.union(*(known.get(site, ()) for site in seen.origins))
        able = [site for site in near if site in at_site and view.may_be_at(partition, site)]
        best = min(able, key=lambda site: (_trips(view, seen, site), site != here, site), default=here)
        now, then = _trips(view, seen, here), _trips(view, seen, best)
        if best == here or now - then < NEARER_MIN * now:
            tied[partition] = here
            continue
        share = seen.origins.get(best, 0.0) / total
        if not _pays(seen, here, best):
            tied[partition] = here
            continue
        room = [node for node in at_site[best] if nodes.has_room(node, seen.size)]
        if not room:
            continue
        target = nodes.worker(min(room, key=lambda node: (nodes.rows[node] / nodes.weights[node], node)))
        nodes.move(partition, target)
        tied[partition] = best
        why = f"{share:.0%} of its {total:,.1f} rows/s come from {best}" if share else f"{best} is nearer to its rows"
        wishes.append(Wish(partition, owner, target, why))
    return wishes, replace(view, tied=tied)


def _order(partition: PartitionId) -> tuple[str, int]:
    return partition.operator, partition.partition


def _trips(view: View, seen: Seen, site: str) -> float:
    """Milliseconds of round trips that its rows take in a second, were it there."""
    return sum(rows * view.between_ms(origin, site) for origin, rows in seen.origins.items())


def _pays(seen: Seen, here: str, there: str) -> bool:
    """Do the rows that no longer cross make up for the bytes of the move, within ``PAYBACK_S``? A site between those of
    its rows is nearer, and saves time and no bytes."""
    row_bytes = seen.row_bytes / seen.rows if seen.rows and seen.row_bytes else ROW_BYTES_GUESS
    saved = (seen.origins.get(there, 0.0) - seen.origins.get(here, 0.0)) * row_bytes
    return saved * PAYBACK_S >= seen.size or not seen.origins.get(there)


POLICIES: Final[Mapping[PolicyName, Callable[[View], tuple[list[Wish], View]]]] = MappingProxyType(
    {PolicyName.RING: by_ring, PolicyName.LOAD: by_load, PolicyName.LOCALITY: by_locality}
)


# -- maintenance ----------------------------------------------------------------------------------------------


def may_rest(node: str, resting: Collection[str], copies: Iterable[Collection[str]]) -> bool:
    """May a node be stopped for maintenance, while others are? Never two that have copies of one partition.

    Args: copies: of each partition, the replicas that own it or follow it.
    """
    others = {other for other in resting if other != node}
    for each in copies:
        nodes = {node_of(name) for name in each}
        if node in nodes and nodes & others:
            return False
    return True


def uneven(view: View, measure: str = "rows") -> float:
    """The most that a node has over its weight's share of ``rows`` or ``bytes``; 1.0: all have exactly that."""
    nodes = _Nodes(view)
    have = nodes.rows if measure == "rows" else nodes.bytes
    share = _Share(have, nodes.weights, lambda _: 0.0)
    return max((share.uneven(node) for node in have if share.fair[node]), default=1.0)
