"""Consistent hashing with weights and bounded loads: a proposal of which replica each partition should live on.

Ketama points on uhashring. The ring proposes, the assignment decides. A plain ring spreads a few partitions badly
(8 over 2 replicas fall 6 to 2 as easily as 4 to 4), so no replica gets more than its weight's share, rounded up: a
partition whose replica is full goes to the next on the ring (Mirrokni, Thorup, Zadimoghaddam: "Consistent Hashing
with Bounded Loads", 2016).

uhashring hashes ``str(key)``, so partitions are named by one canonical string, and a ring is rebuilt from its nodes
rather than shipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from uhashring import HashRing

from stateflow.errors import InvalidArgument
from stateflow.types import ReplicaInfo


def propose(operator: str, partitions: Iterable[int], replicas: Iterable[ReplicaInfo]) -> dict[int, str]:
    """Partition → replica name. Depends only on names and weights, never on the order of ``replicas``.

    Raises InvalidArgument when no replica has a positive weight.
    """
    weights = {info.name: info.weight for info in sorted(replicas, key=lambda info: info.name) if info.weight > 0}
    if not weights:
        raise InvalidArgument(
            "no replica can take partitions", remedy="start one with `stateflow replica`", operator=operator
        )
    ring = HashRing(nodes={name: {"weight": weight} for name, weight in weights.items()})
    numbers = sorted(partitions)
    total = sum(weights.values())
    room = {name: math.ceil(len(numbers) * weight / total) for name, weight in weights.items()}
    placed: dict[int, str] = {}
    for partition in numbers:
        for name in ring.iterate_nodes(f"{operator}/{partition}"):
            if room[name]:
                room[name] -= 1
                placed[partition] = name
                break
    return placed
