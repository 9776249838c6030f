"""Automatic rebalancing: when a replica that joins gets its share without a command. Decisions only, no I/O.

A replica that owns nothing is a *newcomer* if a rebalance would give it partitions. The rebalance begins once the
newcomer has been there for a while with nothing else going on, and once only: if it fails, people decide what to do,
instead of the controller trying again and again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from reconfig.work import Cause
from stateflow import ring
from stateflow.types import PartitionId, ReplicaInfo, node_of

#: causes of reconfigurations by which people make a replica own less
ON_PURPOSE: Final = frozenset({Cause.DRAIN, Cause.MIGRATE})


class Joining:
    """Decides when a rebalance for newcomers begins.

    Args:
        after_s: seconds for which a newcomer must have been there, and nothing else been going on.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[tuple[str, str], float] = {}
        self._served: set[tuple[str, str]] = set()
        self._quiet_from = float("-inf")

    def step(self, now_s: float, newcomers: Mapping[str, str], busy: bool) -> frozenset[str]:
        """Returns the newcomers for which a rebalance begins now; empty: it is not time.

        Args:
            now_s: monotonic seconds.
            newcomers: each newcomer that is there now, and the session that it registered with; a replica that was
                started anew has another session, and counts as another newcomer.
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
        self._served |= there  # one rebalance serves all newcomers that are there
        return frozenset(name for name, _ in there)


def newcomers(
    owners: Mapping[PartitionId, str],
    alive: Collection[ReplicaInfo],
    sites: Mapping[str, str],
    confined: ring.Confined = ring.EVERYWHERE,
) -> frozenset[str]:
    """Returns the replicas for which a rebalance may begin without a command.

    Returns none if any operator is missing at a site that would take part: earlier versions did not record that an
    operator was deployed to some sites on purpose.

    Args:
        owners: owner by partition.
        alive: replicas that may be given something.
        sites: site by replica, of all replicas, alive or not.
        confined: the sites to which operators are confined.
    """
    found = ring.newcomers(owners, alive, confined)
    places: dict[str, set[str]] = {}
    for partition, owner in owners.items():
        places.setdefault(partition.operator, set()).add(sites.get(owner, ""))
    taking = {info.site for info in alive if info.weight > 0}
    everywhere = all(taking & set(confined.get(operator, taking)) <= at for operator, at in places.items())
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
