"""Consistent hashing with weights: a proposal of which replica each partition should live on.

Ketama points on uhashring. The ring proposes, the assignment decides. uhashring hashes ``str(key)``, so
partitions are named by one canonical string, and a ring is rebuilt from its nodes rather than shipped.
"""

from __future__ import annotations

from collections.abc import Iterable

from uhashring import HashRing

from stateflow.errors import InvalidArgument
from stateflow.types import ReplicaInfo


def propose(operator: str, partitions: Iterable[int], replicas: Iterable[ReplicaInfo]) -> dict[int, str]:
    """Partition → replica name. Depends only on names and weights, never on the order of ``replicas``.

    Raises InvalidArgument when no replica has a positive weight.
    """
    nodes = {info.name: {"weight": info.weight} for info in sorted(replicas, key=lambda i: i.name) if info.weight > 0}
    if not nodes:
        raise InvalidArgument(
            "no replica can take partitions", remedy="start one with `stateflow replica`", operator=operator
        )
    ring = HashRing(nodes=nodes)
    return {partition: ring.get_node(f"{operator}/{partition}") for partition in partitions}
