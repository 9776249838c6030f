"""Replanning of moves that wait for their turn, if their target is gone or a better one has joined. Pure.

Moves that have begun are left alone: they fail by themselves if their target dies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from reconfig.work import Cause, PlannedMove
from stateflow.types import PartitionId, ReplicaInfo

#: causes that spread partitions over all replicas: one that joins gets its share of the moves that still wait
SPREADING = (Cause.REBALANCE, Cause.DRAIN)


@dataclass(frozen=True, slots=True)
class Anew:
    """A move and its new target. ``reason``: for the ledger, and for people."""

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
    """Returns the moves that get another target, in their order. A move without an alternative stays as it is.

    Args:
        waiting: moves that wait for their turn.
        alive: replicas that may be given something, by name.
        gone: replicas that no longer serve, as far as the controller knows.
        sites: site by replica, of all known replicas.
        shares: number of partitions that each replica will have when all planned moves have ended.
        may_be_at: tells whether a partition may be at a replica.
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
                continue  # the target may only be late
            reason = f"{move.target} does not answer"
        elif move.cause in SPREADING and not move.asked.to and filled(best, 1) < filled(target, 0):
            reason = f"{best.name} is less loaded than {target.name}"
        else:
            continue
        counts[move.target] = counts.get(move.target, 0) - 1
        counts[best.name] = counts.get(best.name, 0) + 1
        found.append(Anew(move, best.name, reason))
    return found
