"""The assignment of partitions to replicas, and proposals for it by consistent hashing with weights and bounded loads.

The :class:`Assignment` is authoritative and immutable; a change makes a new one with a higher version.

:func:`propose` places the partitions of a new operator. :func:`rebalance` moves as few partitions as possible, to their
places on the ring, when replicas join or leave. Both only return a proposal.

The library uhashring builds the ring, with ketama's points, and searches it. A plain ring spreads few partitions badly
(8 partitions on 2 replicas are split 6 to 2 as easily as 4 to 4), so no replica gets more than its weight's share,
rounded up: if the replica of a partition is full, the partition goes to the next one on the ring (Mirrokni, Thorup,
Zadimoghaddam: "Consistent Hashing with Bounded Loads", 2016). As loads are bounded, few points for each replica are
enough, and a ring of 10,000 replicas is built in seconds. Full replicas are skipped by path compression, so that the
last partition costs no more than the first. :func:`propose` and :func:`rebalance` take seconds for a million partitions
on ten thousand replicas (``python -m benchmarks plan``).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from uhashring import HashRing

from stateflow.errors import REPORT_LINE, InvalidArgument, InvariantBroken, StaleEpoch, UnknownPartition
from stateflow.types import WORKER, PartitionId, ReplicaInfo, node_of

K = TypeVar("K")
#: operator → the sites at which it is allowed; an operator with no sites, or missing here, is allowed at all sites
AllowedSites = Mapping[str, Collection[str]]
EVERYWHERE: AllowedSites = MappingProxyType({})
#: uhashring's virtual nodes of a replica of average weight; each gives four points
_VNODES = 4


@dataclass(frozen=True, slots=True)
class Assignment:
    """The owner and the epoch of each partition of one operator.

    Partition n has owner ``owners[n]`` and epoch ``epochs[n]``. Epochs start at 1 and rise with each change of owner.
    """

    operator: str
    version: int
    owners: tuple[str, ...]
    epochs: tuple[int, ...]

    @classmethod
    def initial(cls, operator: str, owners: Mapping[int, str], epoch: int = 1) -> Assignment:
        """Returns the first assignment of an operator.

        Args:
            epoch: epoch of all partitions, greater than every epoch of a former deployment of that name.
        """
        ordered = tuple(owners[p] for p in range(len(owners)))
        return cls(operator, 1, ordered, (epoch,) * len(ordered))

    def owner(self, partition: int) -> tuple[str, int]:
        """Returns (replica name, epoch). Raises UnknownPartition."""
        if not 0 <= partition < len(self.owners):
            raise UnknownPartition(
                f"there is no partition {partition}",
                remedy=f"use 0 to {len(self.owners) - 1}",
                operator=self.operator,
            )
        return self.owners[partition], self.epochs[partition]

    def moved(self, partition: int, owner: str, epoch: int) -> Assignment:
        """Returns the assignment after ``partition`` went to ``owner``. Raises StaleEpoch unless the epoch rises."""
        _, current = self.owner(partition)
        if epoch <= current:
            raise StaleEpoch(
                f"epoch {epoch} is not newer than {current}",
                remedy="read the assignment again",
                operator=self.operator,
                partition=partition,
            )
        owners, epochs = list(self.owners), list(self.epochs)
        owners[partition], epochs[partition] = owner, epoch
        return Assignment(self.operator, self.version + 1, tuple(owners), tuple(epochs))

    def validate(self) -> None:
        """Checks the invariants. Raises InvariantBroken, which only a bug can cause."""
        if len(self.owners) != len(self.epochs) or not all(self.owners) or min(self.epochs, default=1) < 1:
            raise InvariantBroken(
                f"some of {len(self.owners)} partitions lack an owner or have an epoch below 1",
                remedy=REPORT_LINE,
                operator=self.operator,
                version=self.version,
            )

    def of(self, replica: str) -> dict[int, int]:
        """Returns the partitions that ``replica`` owns, with their epochs."""
        return {p: self.epochs[p] for p, owner in enumerate(self.owners) if owner == replica}


def propose(operator: str, partitions: Iterable[int], replicas: Iterable[ReplicaInfo]) -> dict[int, str]:
    """Places the partitions of a new operator. Returns partition → replica name.

    The result depends on names and weights but not on the order of ``replicas``. Raises InvalidArgument if no replica
    has a positive weight.
    """
    workers = _weights(replicas)
    if not workers:
        raise InvalidArgument(
            "no replica can take partitions", remedy="start one with `stateflow replica`", operator=operator
        )
    weights = _nodes(workers)
    numbers = sorted(partitions)
    total = sum(weights.values())
    room = {name: math.ceil(len(numbers) * weight / total) for name, weight in weights.items()}
    ring = _ring(tuple(weights.items()))
    placed = ring.placed((_key(operator, number) for number in numbers), room)
    return _at_workers(dict(zip(numbers, placed, strict=True)), workers, {})


def by_sites(
    owners: Mapping[PartitionId, str], replicas: Iterable[ReplicaInfo], allowed: AllowedSites
) -> Iterator[tuple[frozenset[str], dict[PartitionId, str], list[ReplicaInfo]]]:
    """Yields (allowed sites, partition → owner, replicas there) for each group of operators with the same sites.

    An empty set of allowed sites stands for all sites.
    """
    sites = {operator: frozenset(where) for operator, where in allowed.items()}
    groups: dict[frozenset[str], dict[PartitionId, str]] = {}
    for partition, owner in owners.items():
        groups.setdefault(sites.get(partition.operator, frozenset()), {})[partition] = owner
    able = list(replicas)
    for where, theirs in groups.items():
        yield where, theirs, [info for info in able if not where or info.site in where]


def rebalance(
    owners: Mapping[PartitionId, str], replicas: Iterable[ReplicaInfo], allowed: AllowedSites = EVERYWHERE
) -> dict[PartitionId, str]:
    """Returns partition → new owner, for the moves that give every node its share of the partitions of all operators.

    :func:`share_out` is applied to each group of operators with the same allowed sites, with the replicas there.
    """
    moves: dict[PartitionId, str] = {}
    for _, theirs, able in by_sites(owners, replicas, allowed):
        moves |= share_out(theirs, able)
    return moves


def share_out(owners: Mapping[PartitionId, str], replicas: Iterable[ReplicaInfo]) -> dict[PartitionId, str]:
    """Returns partition → new owner, for the fewest moves that give every node its share by weight.

    A share is rounded up if that spares a move, otherwise down. Partitions of an owner that is not among ``replicas``
    move in any case. A node gives away partitions of the operator of which it has most, beginning with those that the
    ring places on another node. Each partition goes to the next node on the ring that has room, and there to the
    worker with the fewest partitions for its weight. No partition moves between workers of one node. Returns an empty
    dictionary if no replica has a positive weight.
    """
    workers = _weights(replicas)
    if not workers:
        return {}
    weights, places = _nodes(workers), _places(owners.values(), workers)
    counts = Counter(places[owner] for owner in owners.values())
    quota = _quotas(len(owners), weights, counts)
    giving = {name: counts[name] - quota.get(name, 0) for name in counts if counts[name] > quota.get(name, 0)}
    if not giving:
        return {}
    theirs: dict[str, list[PartitionId]] = {name: [] for name in giving}
    for partition, owner in owners.items():
        if places[owner] in theirs:
            theirs[places[owner]].append(partition)
    room = {name: max(0, quota[name] - counts[name]) for name in weights}
    ring = _ring(tuple(weights.items()))
    given: list[PartitionId] = []
    for name in sorted(giving):
        given += theirs[name] if name not in weights else _leaving(theirs[name], giving[name], name, ring, room)
    given.sort(key=lambda partition: (partition.operator, partition.partition))
    keys = (_key(partition.operator, partition.partition) for partition in given)
    return _at_workers(dict(zip(given, ring.placed(keys, room), strict=True)), workers, Counter(owners.values()))


def drain(
    leaving: Collection[str], owners: Mapping[PartitionId, str], takers: Iterable[ReplicaInfo]
) -> dict[PartitionId, str]:
    """Returns partition → new owner, for all partitions of the ``leaving`` replicas.

    All partitions that ``takers`` and ``leaving`` own together are divided into the takers' shares by weight. Each
    taker receives as many partitions as it lacks of its share. Returns an empty dictionary if no taker has a positive
    weight.
    """
    takers = list(takers)
    among = {*leaving, *(info.name for info in takers)}
    moves = share_out({partition: owner for partition, owner in owners.items() if owner in among}, takers)
    return {partition: target for partition, target in moves.items() if owners[partition] in leaving}


def newcomers(
    owners: Mapping[PartitionId, str], replicas: Iterable[ReplicaInfo], allowed: AllowedSites = EVERYWHERE
) -> frozenset[str]:
    """Returns the replicas of nodes that own no partition yet, and would get some from :func:`rebalance`."""
    owning, found = {node_of(owner) for owner in owners.values()}, set[str]()
    for _, theirs, able in by_sites(owners, replicas, allowed):
        if workers := _weights(able):
            counts = Counter(map(_places(theirs.values(), workers).__getitem__, theirs.values()))
            quota = _quotas(len(theirs), _nodes(workers), counts)
            found |= {name for name in workers if quota[node_of(name)] and node_of(name) not in owning}
    return frozenset(found)


def _weights(replicas: Iterable[ReplicaInfo]) -> dict[str, int]:
    return {info.name: info.weight for info in sorted(replicas, key=lambda info: info.name) if info.weight > 0}


def _nodes(workers: Mapping[str, int]) -> dict[str, int]:
    """Returns node → total weight of its workers, in the order of names."""
    nodes: dict[str, int] = {}
    for name, weight in workers.items():
        nodes[node_of(name)] = nodes.get(node_of(name), 0) + weight
    return dict(sorted(nodes.items()))


def _places(owners: Iterable[str], workers: Mapping[str, int]) -> dict[str, str]:
    """Returns owner → its node; an owner that is not among ``workers`` gets a node of its own."""
    return {owner: node_of(owner) if owner in workers else owner + WORKER for owner in set(owners)}


def _at_workers(nodes: Mapping[K, str], workers: Mapping[str, int], counts: Mapping[str, int]) -> dict[K, str]:
    """Returns item → worker for the items of ``nodes``, item → node.

    Each item in turn gets the worker of the item's node that has the fewest partitions relative to the worker's weight.

    Args:
        workers: worker → weight.
        counts: worker → number of partitions that it already has.
    """
    queues: dict[str, list[tuple[float, str]]] = {}
    for name, weight in workers.items():
        queues.setdefault(node_of(name), []).append((counts.get(name, 0) / weight, name))
    for queue in queues.values():
        heapq.heapify(queue)
    placed: dict[K, str] = {}
    for key, node in nodes.items():
        load, name = queues[node][0]
        placed[key] = name
        heapq.heapreplace(queues[node], (load + 1 / workers[name], name))
    return placed


def _key(operator: str, partition: int) -> str:
    return f"{operator}/{partition}"


class _Ring:
    """uhashring's ring, with bounded loads added."""

    def __init__(self, weights: Sequence[tuple[str, int]]) -> None:
        whole = sum(weight for _, weight in weights)
        # at least one: a replica without points is never found, however much room it has
        points = {name: max(1, _VNODES * len(weights) * weight // whole) for name, weight in weights}
        ring = HashRing({name: {"vnodes": vnodes} for name, vnodes in points.items()}, hash_fn="ketama")
        self.home = ring.get_node
        self._position = ring.get_node_pos
        self._names: list[str] = [name for _, name in ring.get_points()]

    def placed(self, keys: Iterable[str], room: Mapping[str, int]) -> Iterator[str]:
        """Yields for each key the next name on the ring that still has room.

        Args:
            room: name → number of keys; the numbers must suffice for all keys.
        """
        left, names, position = dict(room), self._names, self._position
        following = [*range(1, len(names)), 0]  # point → point to try next if its node is full; later skips full nodes
        for key in keys:
            point = position(key)
            while not left[names[point]]:
                step = following[point]
                if not left[names[step]]:
                    following[point] = following[step]
                point = step
            left[names[point]] -= 1
            yield names[point]


@lru_cache(maxsize=4)
def _ring(weights: tuple[tuple[str, int], ...]) -> _Ring:
    return _Ring(weights)


def _quotas(total: int, weights: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Returns node → number of partitions; the numbers add up to ``total``.

    Each node gets its share rounded down. What is left of ``total`` is given out one by one, first to nodes where that
    spares a move.
    """
    whole = sum(weights.values())
    quota = {name: total * weight // whole for name, weight in weights.items()}
    left = total - sum(quota.values())
    uneven = [name for name, weight in weights.items() if total * weight % whole]
    uneven.sort(key=lambda name: (counts.get(name, 0) <= quota[name], -(total * weights[name] % whole), name))
    for name in uneven[:left]:
        quota[name] += 1
    return quota


def _leaving(
    partitions: list[PartitionId], count: int, owner: str, ring: _Ring, room: Mapping[str, int]
) -> list[PartitionId]:
    """Chooses ``count`` partitions for a node to give away, each from the operator of which the node has most left.

    Partitions that the ring places on another node with room come first, then those that it places on a full node, and
    last those that it places on this node.
    """

    def kept(partition: PartitionId) -> tuple[int, int]:
        home = ring.home(_key(partition.operator, partition.partition))
        return 2 if home == owner else 0 if room[home] else 1, -partition.partition

    by_operator: dict[str, list[PartitionId]] = {}
    for partition in partitions:
        by_operator.setdefault(partition.operator, []).append(partition)
    for theirs in by_operator.values():
        theirs.sort(key=kept, reverse=True)
    chosen = []
    for _ in range(count):
        operator = max(by_operator, key=lambda name: (len(by_operator[name]), name))
        chosen.append(by_operator[operator].pop())
    return chosen
