"""Rounds, matchings and slices: what is moved where, and in which order."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconfig.decisions import plan
from reconfig.decisions import plan as policies
from reconfig.decisions.migration import Kind
from reconfig.decisions.plan import Load, Transfer
from stateflow.moves import ORDERS
from stateflow.types import PartitionId, ReplicaInfo


def transfer(number: int, source: str, target: str, rate: float = 0.0) -> Transfer:
    return Transfer(PartitionId("Op", number), source, target, Load(100, rate))


def infos(**weights: int) -> list[ReplicaInfo]:
    return [ReplicaInfo(name, f"site-{name[0]}", f"{name}:1", weight) for name, weight in weights.items()]


def test_orders() -> None:
    some = [transfer(2, "a", "b", 1.0), transfer(0, "a", "b", 5.0), transfer(1, "a", "b", 3.0)]
    numbers = {order: [t.partition.partition for t in plan.ordered(some, order)] for order in ORDERS}
    assert numbers == {"hot-first": [0, 1, 2], "hot-last": [2, 1, 0], "number": [0, 1, 2]}


pairs = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("wxyz")), max_size=12)


@given(pairs)
def test_every_strategy_moves_everything_once(ends: list[tuple[str, str]]) -> None:
    transfers = [transfer(number, *pair) for number, pair in enumerate(ends)]
    for strategy in policies.STRATEGIES.values():
        rounds = strategy.rounds(transfers)
        assert Counter(itertools.chain(*rounds)) == Counter(transfers)
        assert all(rounds), "no empty round"


@given(pairs)
def test_a_matched_round_uses_each_replica_once_and_is_as_large_as_can_be(ends: list[tuple[str, str]]) -> None:
    left = [transfer(number, *pair) for number, pair in enumerate(ends)]
    for round_ in plan.matched(left):
        assert len({t.source for t in round_}) == len({t.target for t in round_}) == len(round_)
        assert len(round_) == _largest({(t.source, t.target) for t in left})
        left = [t for t in left if t not in round_]


def _largest(edges: set[tuple[str, str]]) -> int:
    """Returns the size of the largest matching, by trying every choice."""
    if not edges:
        return 0
    source = min(edges)[0]
    without = {edge for edge in edges if edge[0] != source}
    with_one = [1 + _largest({e for e in without if e[1] != target}) for s, target in edges if s == source]
    return max(_largest(without), *with_one)


def test_standbys_are_never_with_their_owner_and_rather_elsewhere() -> None:
    replicas = infos(a1=1, a2=1, b1=1)
    partitions = {PartitionId("Op", n): "a1" for n in range(4)}
    one = plan.spread_standbys(partitions, {}, 1, replicas)
    assert {replica for _, replica in one} == {"b1"}
    two = plan.spread_standbys(partitions, {p: [r] for p, r in one}, 2, replicas)
    assert [replica for _, replica in two] == ["a2"] * 4
    assert plan.spread_standbys(partitions, {p: ["b1", "a2"] for p in partitions}, 3, replicas) == []


@given(
    st.dictionaries(st.sampled_from([f"{site}{n}" for site in "abc" for n in range(3)]), st.integers(0, 2), min_size=1),
    st.integers(1, 3),
    st.data(),
)
def test_copies_are_at_as_many_sites_as_there_are(weights: dict[str, int], count: int, data: st.DataObject) -> None:
    replicas = infos(**weights)
    owner = data.draw(st.sampled_from(sorted(weights)))
    able = data.draw(st.lists(st.sampled_from(replicas), unique=True))
    p = PartitionId("Op", 0)
    found = plan.spread_standbys({p: owner}, {}, count, able, {}, {info.name: info.site for info in replicas})
    names = [replica for _, replica in found]
    free = {info.name for info in able if info.weight > 0} - {owner}
    assert set(names) <= free
    assert len(set(names)) == len(names) == min(count, len(free))
    sites = {name[0] for name in free} - {owner[0]}
    assert len({name[0] for name in names} - {owner[0]}) == min(len(names), len(sites)), (
        "another site, while there is one"
    )


def test_a_standby_is_begun_again_where_most_of_it_is() -> None:
    replicas, p = infos(a1=1, a2=1, b1=1, b2=1), PartitionId("Op", 0)

    def chosen(owner: str, *near: str) -> str:
        ((_, replica),) = plan.spread_standbys({p: owner}, {p: []}, 1, replicas, {p: near})
        return replica

    assert chosen("a1") == "b1"
    assert chosen("a1", "b2", "b1") == "b2"
    assert chosen("b1", "b1", "a2") == "a2", "its former owner, when it moved to where its standby was"
    assert chosen("a1", "a2") == "b1", "another site comes first"


# -- policies -----------------------------------------------------------------------------------------------


def test_names() -> None:
    assert policies.strategy_named("auto") is None
    assert policies.strategy_named("fluid") is policies.STRATEGIES["fluid"]
    assert [s.name for s in policies.STRATEGIES.values() if s.kind is Kind.WARM] == ["warm-up"]


@pytest.mark.parametrize(
    ("sizes", "change", "budget", "bandwidth", "chosen"),
    [
        ([10**9], 0.0, 0.0, 0.0, "warm-up"),
        ([10**9], 5e7, 0.0, 1e8, "warm-up"),
        ([10**6], 2e8, 0.0, 1e8, "pause-and-copy"),  # changes never cross as fast as they come
        ([10**6], 2e8, 50.0, 1e8, "warm-up"),  # a move with a budget waits, or is refused
        ([10**10], 5e7, 0.0, 1e8, "warm-up"),
        ([], 0.0, 0.0, 0.0, "warm-up"),
    ],
)
def test_auto(sizes: list[int], change: float, budget: float, bandwidth: float, chosen: str) -> None:
    loads = [Load(size) for size in sizes]
    assert policies.choose(loads, change, budget, bandwidth).name == chosen
