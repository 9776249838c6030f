from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateflow.errors import InvalidArgument
from stateflow.ring import propose
from stateflow.types import ReplicaInfo

PARTITIONS = range(512)


def _replicas(*names: str, **weights: int) -> list[ReplicaInfo]:
    return [ReplicaInfo(name, "site", f"{name}:1", weights.get(name, 1)) for name in names]


@given(st.permutations(_replicas("a", "b", "c", "d", b=3)))
@settings(max_examples=20)
def test_the_order_of_replicas_does_not_matter(replicas: list[ReplicaInfo]) -> None:
    assert propose("Op", range(64), replicas) == propose("Op", range(64), _replicas("a", "b", "c", "d", b=3))


def test_addresses_do_not_matter() -> None:
    moved = [ReplicaInfo(r.name, "elsewhere", "x:9", r.weight) for r in _replicas("a", "b", "c")]
    assert propose("Op", PARTITIONS, moved) == propose("Op", PARTITIONS, _replicas("a", "b", "c"))


def test_every_partition_gets_an_owner_and_operators_differ() -> None:
    one = propose("One", PARTITIONS, _replicas("a", "b", "c"))
    two = propose("Two", PARTITIONS, _replicas("a", "b", "c"))
    assert list(one) == list(PARTITIONS)
    assert set(one.values()) == {"a", "b", "c"}
    assert one != two


@pytest.mark.parametrize("partitions", [7, 8, 64, 3000])
def test_nobody_gets_more_than_its_share_rounded_up(partitions: int) -> None:
    counts = Counter(propose("Op", range(partitions), _replicas("a", "b", "c")).values())
    assert max(counts.values()) <= -(-partitions // 3)


def test_shares_follow_weights() -> None:
    counts = Counter(propose("Op", range(4000), _replicas("big", "small", big=4)).values())
    assert counts == {"big": 3200, "small": 800}


def test_weight_zero_takes_nothing() -> None:
    assert set(propose("Op", PARTITIONS, _replicas("a", "b", b=0)).values()) == {"a"}


@pytest.mark.parametrize("seed", range(5))
def test_few_partitions_move_when_a_replica_joins_or_leaves(seed: int) -> None:
    names = [f"r{random.Random(seed).randrange(10**6)}-{n}" for n in range(5)]
    four = propose("Op", PARTITIONS, _replicas(*names[:4]))
    five = propose("Op", PARTITIONS, _replicas(*names))
    moved = {p for p in PARTITIONS if four[p] != five[p]}
    # the minimum is a fifth; bounded loads push a few more along, four fifths would move without consistency
    assert len(PARTITIONS) // 5 <= len(moved) < len(PARTITIONS) * 0.45
    to_newcomer = sum(five[p] == names[4] for p in moved)
    assert to_newcomer >= len(moved) / 2


@pytest.mark.parametrize("replicas", [[], _replicas("a", a=0)])
def test_without_a_replica_it_says_so(replicas: list[ReplicaInfo]) -> None:
    with pytest.raises(InvalidArgument, match="no replica can take partitions"):
        propose("Op", PARTITIONS, replicas)
