"""Rounds, matchings and slices: what is moved where, and in which order."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconfig.decisions import plan
from reconfig.decisions.plan import Kind, Load, Transfer
from stateflow.types import ORDERS, PartitionId


def transfer(number: int, source: str, target: str, rate: float = 0.0) -> Transfer:
    return Transfer(PartitionId("Op", number), source, target, Load(100, rate))


def test_orders() -> None:
    some = [transfer(2, "a", "b", 1.0), transfer(0, "a", "b", 5.0), transfer(1, "a", "b", 3.0)]
    numbers = {order: [t.partition.partition for t in plan.ordered(some, order)] for order in ORDERS}
    assert numbers == {"hot-first": [0, 1, 2], "hot-last": [2, 1, 0], "number": [0, 1, 2]}


pairs = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("wxyz")), max_size=12)


@given(pairs)
def test_every_strategy_moves_everything_once(ends: list[tuple[str, str]]) -> None:
    transfers = [transfer(number, *pair) for number, pair in enumerate(ends)]
    for strategy in plan.STRATEGIES.values():
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


# -- strategies -----------------------------------------------------------------------------------------------


def test_names() -> None:
    assert plan.strategy_named("auto") is None
    assert plan.strategy_named("fluid") is plan.STRATEGIES["fluid"]
    assert [s.name for s in plan.STRATEGIES.values() if s.kind is Kind.WARM] == ["warm-up"]


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
    assert plan.choose(loads, change, budget, bandwidth).name == chosen


def test_copies_under_the_limit_share_it_and_others_come_on_top() -> None:
    four = [transfer(number, "a", "b") for number in range(4)]
    plans = {name: (strategy, strategy.rounds(four)) for name, strategy in plan.STRATEGIES.items()}
    assert plan.copies_at_once([], 3) == 0
    assert plan.copies_at_once([plans["fluid"]], 3) == 1
    assert plan.copies_at_once([plans["warm-up"], plans["warm-up"]], 3) == 3
    assert plan.copies_at_once([plans["warm-up"], plans["pause-and-copy"]], 3) == 7
    assert plan.copies_at_once([plans["warm-up"]], 8) == 4
