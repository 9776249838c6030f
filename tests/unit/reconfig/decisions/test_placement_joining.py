"""Automatic rebalances: when one begins, and when never."""

from __future__ import annotations

import pytest

from reconfig.decisions.placement import Joining, newcomers, was_emptied
from reconfig.decisions.plan import Cause
from stateflow.types import PartitionId, ReplicaInfo

AFTER_S = 60.0
C = {"c": "first session"}
CLOUD = [ReplicaInfo(name, "cloud", f"{name}:1") for name in "abc"]
SITES = {info.name: info.site for info in CLOUD} | {"e": "edge"}
OWNERS = {PartitionId("Op", n): "ab"[n % 2] for n in range(8)}


def test_a_newcomer_waits_its_time_and_is_served_once() -> None:
    joining = Joining(AFTER_S)
    assert not joining.step(0.0, C, busy=False)
    assert not joining.step(59.9, C, busy=False)
    assert joining.step(60.0, C, busy=False) == {"c"}
    joining.began(C)
    assert not any(joining.step(60.0 + n, C, busy=False) for n in range(1000)), "not again and again"


def test_a_newcomer_whose_rebalance_could_not_begin_has_another_after_the_same_time() -> None:
    joining = Joining(AFTER_S)
    joining.step(0.0, C, busy=False)
    assert joining.step(60.0, C, busy=False) == {"c"}
    assert not joining.step(119.9, C, busy=False), "not again and again"
    assert joining.step(120.0, C, busy=False) == {"c"}


def test_not_while_anything_else_goes_on_nor_right_behind_it() -> None:
    joining = Joining(AFTER_S)
    joining.step(0.0, C, busy=False)
    for now in range(0, 300, 10):
        assert not joining.step(float(now), C, busy=True)
    assert not joining.step(349.0, C, busy=False)
    assert joining.step(350.0, C, busy=False) == {"c"}


def test_one_that_comes_and_goes_has_not_been_there_for_long() -> None:
    joining = Joining(AFTER_S)
    for now in range(0, 1000, 50):
        assert not joining.step(float(now), C, busy=False)
        assert not joining.step(now + 40.0, {}, busy=False)


def test_one_that_was_started_anew_is_another() -> None:
    joining = Joining(AFTER_S)
    joining.step(0.0, C, busy=False)
    assert joining.step(60.0, C, busy=False)
    joining.began(C)
    again = {"c": "second session"}
    assert not joining.step(61.0, again, busy=False)
    assert joining.step(121.0, again, busy=False) == {"c"}


def test_a_rebalance_is_for_all_that_are_there() -> None:
    joining = Joining(AFTER_S)
    joining.step(0.0, C, busy=False)
    both = C | {"d": "x"}
    joining.step(59.0, both, busy=False)
    assert joining.step(60.0, both, busy=False) == {"c", "d"}
    joining.began(both)
    assert not joining.step(200.0, both, busy=False)


def test_who_would_be_given_something() -> None:
    assert newcomers(OWNERS, CLOUD, SITES) == {"c"}
    assert newcomers(OWNERS, CLOUD[:2], SITES) == frozenset()
    assert newcomers({}, CLOUD, SITES) == frozenset()
    idle = [*CLOUD[:2], ReplicaInfo("c", "cloud", "c:1", 0)]
    assert newcomers(OWNERS, idle, SITES) == frozenset(), "of weight 0"
    two = {PartitionId("Op", 0): "a", PartitionId("Op", 1): "b"}
    assert newcomers(two, CLOUD, SITES) == frozenset(), "there are not enough for three"


def test_an_operator_that_is_at_some_sites_only_stays_there() -> None:
    edge = ReplicaInfo("e", "edge", "e:1")
    assert newcomers(OWNERS, [*CLOUD, edge], SITES) == frozenset()
    everywhere = OWNERS | {PartitionId("Op", 8): "e"}
    assert newcomers(everywhere, [*CLOUD, edge], SITES) == {"c"}
    confined = everywhere | {PartitionId("Other", n): "a" for n in range(3)}
    assert newcomers(confined, [*CLOUD, edge], SITES) == frozenset()


@pytest.mark.parametrize(
    ("moves", "emptied"),
    [
        ([], False),
        ([("c", "a", Cause.DRAIN)], True),
        ([("c", "a", Cause.MIGRATE), ("a", "c", Cause.REBALANCE)], True),
        ([("a", "b", Cause.MIGRATE), ("c", "a", Cause.FAILOVER), ("c", "b", Cause.DRAIN)], False),
        ([("a", "c", Cause.MIGRATE), ("c", "b", Cause.DRAIN)], False),
    ],
)
def test_one_that_was_emptied_on_purpose(moves: list[tuple[str, str, Cause]], emptied: bool) -> None:
    """Moves are given newest first."""
    assert was_emptied("c", moves) is emptied


def test_a_node_is_emptied_and_joins_as_one() -> None:
    """A node is emptied and joins as a whole.

    A worker without partitions does not join, and moves between workers of a node do not count.
    """
    assert was_emptied("c~1", [("c", "b", Cause.DRAIN)])
    assert not was_emptied("c", [("c", "c~1", Cause.MIGRATE), ("b", "c", Cause.REBALANCE)])
    worker = ReplicaInfo("a~1", "cloud", "a:2")
    assert newcomers(OWNERS, [*CLOUD[:2], worker], SITES) == frozenset(), "a has something"


def test_an_operator_that_is_confined_to_sites_keeps_no_newcomer_there_waiting() -> None:
    edge = ReplicaInfo("e", "edge", "e:1", 1)
    sites = SITES | {"e": "edge"}
    operator = next(iter(OWNERS)).operator
    assert newcomers(OWNERS, [*CLOUD, edge], sites) == frozenset()
    assert newcomers(OWNERS, [*CLOUD, edge], sites, {operator: ["cloud"]}) == {"c"}
