"""Replanning of waiting moves."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from reconfig.decisions.placement import View, replan
from reconfig.decisions.plan import Asked, Cause, PlannedMove, StrategyName
from stateflow.types import PartitionId, ReplicaInfo

INFOS = {
    name: ReplicaInfo(name, site, "h:1", weight)
    for name, site, weight in (
        ("a", "edge", 1),
        ("b", "cloud", 1),
        ("c", "cloud", 1),
        ("d", "edge", 1),
        ("e", "edge", 0),
    )
}
SITES = {name: info.site for name, info in INFOS.items()}


def moves(
    count: int, cause: Cause, to: str = "", target: str = "b", source: str = "a", **more: Any
) -> list[PlannedMove]:
    asked = Asked(to, **more)
    return [
        PlannedMove("r", PartitionId("Op", n), source, target, 1, 2, StrategyName.WARM_UP, cause=cause, asked=asked)
        for n in range(count)
    ]


def planned(
    waiting: list[PlannedMove],
    alive: str,
    shares: dict[str, int] | None = None,
    gone: Collection[str] = (),
    sites: Collection[str] = ("edge", "cloud"),
) -> list[tuple[int, str, str]]:
    view = View({}, [INFOS[name] for name in alive], allowed={"Op": sites})
    found = replan(waiting, view, gone, SITES, shares or {})
    return [(each.move.partition.partition, each.target, each.reason) for each in found]


def test_a_target_that_is_gone_is_replaced_by_one_that_was_asked_for_as_well() -> None:
    waiting = moves(2, Cause.MIGRATE, "cloud")
    assert planned(waiting, "ac", gone="b") == [(0, "c", "b does not answer"), (1, "c", "b does not answer")]
    assert planned(waiting, "ad", gone="b") == [], "nobody else is at that site"
    assert planned(waiting, "ac") == [], "it may only be late"
    assert planned(moves(1, Cause.MIGRATE, "b"), "ac", gone="b") == [], "that one was asked for, and no other"
    assert planned(waiting, "ac", gone="b", sites=["edge"]) == [], "its operator is not to be there"


def test_who_joins_has_its_share_of_what_still_waits() -> None:
    waiting = moves(6, Cause.DRAIN)
    found = planned(waiting, "abc", {"b": 6})
    assert [(number, target) for number, target, _ in found] == [(0, "c"), (1, "c"), (2, "c")]
    assert found[0][2] == "c is less loaded than b"
    assert planned(moves(6, Cause.MIGRATE, "cloud"), "abc", {"b": 6}) == [], "people asked for that"
    assert planned(waiting, "abc", {"b": 6, "c": 6}) == []
    assert planned(waiting, "abe", {"b": 6}) == [], "one without weight is given nothing"


def test_nearer_is_better_and_what_is_drained_is_given_nothing() -> None:
    assert [target for _, target, _ in planned(moves(1, Cause.DRAIN), "acd", gone="b")] == ["d"], "at its own site"
    assert [target for _, target, _ in planned(moves(1, Cause.DRAIN, leaving="d"), "acd", gone="b")] == ["c"]


def test_no_worker_of_a_node_that_is_drained_is_given_what_waits() -> None:
    """Waiting moves stay off a drained node, also once all moves of its other workers have begun."""
    infos = {name: ReplicaInfo(name, "edge", "h:1") for name in ("n", "n~1", "o")}
    infos["c"] = ReplicaInfo("c", "cloud", "h:1")
    sites = {name: info.site for name, info in infos.items()}
    view = View({}, list(infos.values()))

    def target(leaving: str) -> list[str]:
        waiting = moves(1, Cause.DRAIN, target="c", source="n~1", leaving=leaving)
        return [each.target for each in replan(waiting, view, (), sites, {"c": 9, "o": 1})]

    assert target("n") == ["o"]
    assert target("n~1") == ["n"], "only that worker was named"


def test_nodes_that_were_not_to_be_used_are_not() -> None:
    waiting = moves(2, Cause.MIGRATE, "cloud", only=frozenset("b"))
    assert planned(waiting, "ac", gone="b") == []
    assert planned(moves(1, Cause.MIGRATE, "cloud", only=frozenset("bc")), "ac", gone="b")[0][1] == "c"
