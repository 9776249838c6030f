"""When a replica that joins is given its share without anybody asking: decided from what is seen, no I/O.

A replica that owns nothing is a *newcomer* where a rebalance would give it something. It is given that once it has been
there for a while with nothing else going on, and once only: what became of it is for people to see, not to be tried
again and again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from reconfig.work import Cause
from stateflow import ring
from stateflow.types import PartitionId, ReplicaInfo, node_of

#: of reconfigurations by which somebody has a replica own less
ON_PURPOSE: Final = frozenset({Cause.DRAIN, Cause.MIGRATE})


class Joining:
    """Args: after_s: a newcomer has been there for so long, and nothing has moved for so long, when it is its turn."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[tuple[str, str], float] = {}
        self._served: set[tuple[str, str]] = set()
        self._quiet_from = float("-inf")

    def step(self, now_s: float, newcomers: Mapping[str, str], busy: bool) -> frozenset[str]:
        """Those for whom a rebalance is to begin now, none: it is not time.

        Args:
            now_s: monotonic.
            newcomers: those there are now, and the session that each registered with: one that was started anew is
                another.
            busy: something moves, is restored, deployed or taken over, or a replica that owns something is silent.
        """
        if busy:
            self._quiet_from = now_s
        there = set(newcomers.items())
        self._since = {each: self._since.get(each, now_s) for each in there}
        self._served &= there
        waited = {each for each in there if now_s - max(self._since[each], self._quiet_from) >= self._after_s}
        if busy or not waited - self._served:
            return frozenset()
        self._served |= there  # a rebalance is for all that are there
        return frozenset(name for name, _ in there)


def newcomers(
    owners: Mapping[PartitionId, str],
    alive: Collection[ReplicaInfo],
    sites: Mapping[str, str],
    confined: ring.Confined = ring.EVERYWHERE,
) -> frozenset[str]:
    """Replicas for whom a rebalance may begin by itself.

    None where an operator is not at every site that would take part: earlier versions did not record that it was
    deployed to some on purpose.

    Args:
        sites: of every replica, alive or not, by name.
    """
    found = ring.newcomers(owners, alive, confined)
    places: dict[str, set[str]] = {}
    for partition, owner in owners.items():
        places.setdefault(partition.operator, set()).add(sites.get(owner, ""))
    taking = {info.site for info in alive if info.weight > 0}
    everywhere = all(taking & set(confined.get(operator, taking)) <= at for operator, at in places.items())
    return found if everywhere else frozenset()


def was_emptied(replica: str, moves: Iterable[tuple[str, str, Cause]]) -> bool:
    """Whether the last that came to or left a replica's node left it on purpose.

    Args: moves: (source, target, cause) of those that were completed, newest first.
    """
    node = node_of(replica)
    for source, target, cause in moves:
        ends = node_of(source), node_of(target)
        if node in ends and ends[0] != ends[1]:
            return ends[0] == node and cause in ON_PURPOSE
    return False
