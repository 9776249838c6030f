"""Plans: the order and rounds of transfers, and where standbys go. Sans-io.

The transfers of a round run side by side; a round begins when the one before has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from stateflow.moves import Order
from stateflow.types import PartitionId, ReplicaInfo, node_of


@dataclass(frozen=True, slots=True)
class Load:
    """A partition's load. ``size``: bytes on disk. ``rate``: batches a second."""

    size: int = 0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    partition: PartitionId
    source: str
    target: str
    load: Load = Load()


# -- order and rounds ---------------------------------------------------------------------------------------


def ordered(transfers: Iterable[Transfer], order: Order) -> list[Transfer]:
    """Sorts transfers. ``hot-first`` relieves an overloaded source soonest; ``hot-last`` keeps most of the traffic
    undisturbed until the end."""
    by_number = sorted(transfers, key=lambda t: (t.partition.operator, t.partition.partition))
    match order:
        case "hot-first":
            return sorted(by_number, key=lambda t: -t.load.rate)
        case "hot-last":
            return sorted(by_number, key=lambda t: t.load.rate)
        case "number":
            return by_number


def all_at_once(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    return [list(transfers)] if transfers else []


def one_by_one(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    return [[transfer] for transfer in transfers]


def matched(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Returns rounds in which no replica sends twice or receives twice. Each round is as large as possible: a maximum
    matching of sources and targets, found by augmenting paths (Kuhn 1955; the "batched" strategy of Megaphone, VLDB
    2019)."""
    left = list(transfers)
    rounds: list[list[Transfer]] = []
    while left:
        chosen = _maximum_matching(left)
        rounds.append(chosen)
        taken = set(map(id, chosen))
        left = [transfer for transfer in left if id(transfer) not in taken]
    return rounds


def _maximum_matching(transfers: Sequence[Transfer]) -> list[Transfer]:
    of_source: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        of_source.setdefault(transfer.source, []).append(transfer)
    into: dict[str, Transfer] = {}  # by target

    def augment(source: str, seen: set[str]) -> bool:
        for transfer in of_source[source]:
            if transfer.target in seen:
                continue
            seen.add(transfer.target)
            other = into.get(transfer.target)
            if other is None or augment(other.source, seen):
                into[transfer.target] = transfer
                return True
        return False

    for source in of_source:
        augment(source, set())
    chosen = {id(transfer) for transfer in into.values()}
    return [transfer for transfer in transfers if id(transfer) in chosen]


# -- standbys -----------------------------------------------------------------------------------------------


def spread_standbys(
    partitions: Mapping[PartitionId, str],
    existing: Mapping[PartitionId, Sequence[str]],
    count: int,
    replicas: Sequence[ReplicaInfo],
    near: Mapping[PartitionId, Sequence[str]] = MappingProxyType({}),
    sites: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[PartitionId, str]]:
    """Returns (partition, replica) for every missing standby.

    A standby is never at the owner's node, and no node has two standbys of a partition. Preferred are, in this order:
    the site with the fewest of owner and standbys; a replica in ``near``, earlier entries first; the replica with the
    fewest standbys for its weight. Fewer than ``count`` are returned if there are not enough nodes.

    Args:
        partitions: owner by partition.
        existing: replicas with a standby, by partition.
        count: standbys wanted of each partition.
        near: by partition, replicas that were owner or standby until now.
        sites: sites of replicas that have something, including those that are given nothing more.
    """
    infos = {info.name: info for info in replicas if info.weight > 0}
    at = {**sites, **{info.name: info.site for info in replicas}}
    copies = dict.fromkeys(infos, 0)
    for names in existing.values():
        for name in names:
            if name in copies:
                copies[name] += 1
    missing: list[tuple[PartitionId, str]] = []
    for partition, owner in sorted(partitions.items(), key=lambda item: item[0].partition):
        have, close = list(existing.get(partition, ())), near.get(partition, ())

        def cost(
            info: ReplicaInfo, owner: str = owner, have: list[str] = have, close: Sequence[str] = close
        ) -> tuple[int, int, float, str]:
            there = sum(at.get(name) == info.site for name in (owner, *have))
            nearness = close.index(info.name) if info.name in close else len(close)
            return there, nearness, copies[info.name] / info.weight, info.name

        while len(have) < count:
            taken = {node_of(owner), *map(node_of, have)}
            free = [info for info in infos.values() if node_of(info.name) not in taken]
            if not free:
                break
            chosen = min(free, key=cost)
            copies[chosen.name] += 1
            have.append(chosen.name)
            missing.append((partition, chosen.name))
    return missing
