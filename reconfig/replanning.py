"""Moves that wait for their turn, planned anew: where their target is gone, or a better one has joined. Pure.

What has begun is left alone: it fails by itself where its target dies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from reconfig.work import Cause, PlannedMove
from stateflow.types import PartitionId, ReplicaInfo

#: that spread partitions over whoever is there: a replica that joins has its share of what still waits
SPREADING = (Cause.REBALANCE, Cause.DRAIN)


@dataclass(frozen=True, slots=True)
class Anew:
    """``reason``: for the ledger, and people."""

    move: PlannedMove
    target: str
    reason: str


def replan(
    waiting: Iterable[PlannedMove],
    alive: Mapping[str, ReplicaInfo],
    gone: Collection[str],
    sites: Mapping[str, str],
    shares: Mapping[str, int],
    may_be_at: Callable[[PartitionId, ReplicaInfo], bool],
) -> list[Anew]:
    """Those that get another target, in their order. One for whose target there is no other stays as it is.

    Args:
        gone: replicas that do not serve any more, for all that is known.
        sites: of all replicas that are known.
        shares: replica → partitions that it has when all that is planned has ended.
        may_be_at: whether the operator of a partition is to have a replica.
    """
    counts, found = dict(shares), []

    def filled(info: ReplicaInfo, more: int) -> float:
        return (counts.get(info.name, 0) + more) / info.weight

    for move in waiting:
        home = sites.get(move.source, "")
        able = [
            info
            for info in alive.values()
            if info.weight > 0
            and info.name != move.source
            and move.asked.allows(info)
            and may_be_at(move.partition, info)
        ]
        if not able:
            continue
        best = min(able, key=lambda info: (info.site != home, filled(info, info.name != move.target), info.name))
        if best.name == move.target:
            continue
        target = alive.get(move.target)
        if target is None:
            if move.target not in gone:
                continue  # it may only be late
            reason = f"{move.target} does not answer"
        elif move.cause in SPREADING and not move.asked.to and filled(best, 1) < filled(target, 0):
            reason = f"{best.name} has less than {target.name}"
        else:
            continue
        counts[move.target] = counts.get(move.target, 0) - 1
        counts[best.name] = counts.get(best.name, 0) + 1
        found.append(Anew(move, best.name, reason))
    return found
