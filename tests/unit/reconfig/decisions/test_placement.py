"""Choice of one replica for a partition or copy, and the commands that need many."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconfig.decisions.placement import AVOIDED_S, Avoided, Terms, View, best, drained, spread, spread_standbys
from stateflow.errors import AlreadyThere, Unavailable
from stateflow.types import PartitionId, ReplicaInfo


def infos(**weights: int) -> list[ReplicaInfo]:
    return [ReplicaInfo(name, f"site-{name[0]}", f"{name}:1", weight) for name, weight in weights.items()]


def partitions(count: int, operator: str = "Op") -> list[PartitionId]:
    return [PartitionId(operator, number) for number in range(count)]


# -- one replica ----------------------------------------------------------------------------------------------


def test_terms_are_compared_before_load_the_first_one_first() -> None:
    replicas, load = infos(a=1, b=1, c=1), {"a": 9, "b": 5, "c": 5}
    terms = [
        Terms(),
        Terms(near=("a",)),
        Terms(near=("a",), at_site={"site-a": 1, "site-b": 1}),
        Terms(near=("a",), at_site={"site-a": 1, "site-b": 1}, tried={"c": 1}),
        Terms(near=("a",), at_site={"site-a": 1}, tried={"b": 1}, sites=("site-a", "site-b")),
        Terms(near=("a",), tried={"b": 1}, sites=("site-a", "site-b"), cordoned=("a", "b")),
    ]
    assert [getattr(best(replicas, load, each), "name", None) for each in terms] == ["b", "a", "c", "a", "a", "c"]
    assert best([], load) is None


def test_weights_count_with_what_is_to_come() -> None:
    moves = spread(partitions(10), infos(large=4, small=1), {}).moves
    assert Counter(moves.values()) == {"large": 8, "small": 2}
    assert moves[PartitionId("Op", 0)] == "large", "an empty replica of small weight is filled by one partition"


def test_each_replica_that_was_named_may_take_a_partition_instead() -> None:
    choice = spread(partitions(2), infos(a=1, b=0), {"a": 3})
    assert choice.moves == dict.fromkeys(partitions(2), "b"), "named replicas of weight 0, too"
    assert choice.instead == dict.fromkeys(partitions(2), (["a", "b"],))


# -- drains ---------------------------------------------------------------------------------------------------


def test_what_leaves_stays_as_near_as_it_can() -> None:
    among = [ReplicaInfo(name, name[0], "", 1) for name in ("a", "a~1", "ab", "c")]
    owners = dict(zip(partitions(3), ("a", "a~1", "c"), strict=True))

    def targets(leaving: set[str], *names: str, replica: str = "a") -> set[str]:
        view = View(owners, [info for info in among if info.name in names])
        return set(drained(view, replica, leaving, "a").moves.values())

    assert targets({"a"}, "a", "a~1", "ab", "c") == {"a~1"}
    assert targets({"a", "a~1"}, "a", "a~1", "ab", "c") == {"ab"}
    assert targets({"a", "a~1"}, "c") == {"c"}
    with pytest.raises(Unavailable, match="no other replica can receive partitions"):
        targets({"a", "a~1"}, "a", "a~1")
    with pytest.raises(AlreadyThere):
        targets({"ab"}, "c", replica="ab")


def test_a_drain_keeps_to_allowed_sites() -> None:
    owners = dict.fromkeys(partitions(2), "a") | dict.fromkeys(partitions(2, "Other"), "a")
    view = View(owners, infos(a=1, b=1, c=1), allowed={"Other": ["site-a", "site-c"]})
    choice = drained(view, "a", {"a"}, "site-a")
    assert {choice.moves[each] for each in partitions(2, "Other")} == {"c"}
    assert {choice.moves[each] for each in partitions(2)} == {"b", "c"}
    assert choice.instead[PartitionId("Other", 0)] == ([], [], ["c"])
    with pytest.raises(Unavailable, match="no other replica at the sites of Other"):
        drained(View(owners, infos(b=1), allowed={"Other": ["site-a"]}), "a", {"a"}, "site-a")


# -- standbys -------------------------------------------------------------------------------------------------


def test_standbys_are_never_with_their_owner_and_rather_elsewhere() -> None:
    replicas = infos(a1=1, a2=1, b1=1)
    partitions = {PartitionId("Op", n): "a1" for n in range(4)}
    one = spread_standbys(partitions, {}, 1, replicas)
    assert {replica for _, replica in one} == {"b1"}
    two = spread_standbys(partitions, {p: [r] for p, r in one}, 2, replicas)
    assert [replica for _, replica in two] == ["a2"] * 4
    assert spread_standbys(partitions, {p: ["b1", "a2"] for p in partitions}, 3, replicas) == []


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
    found = spread_standbys({p: owner}, {}, count, able, {}, {info.name: info.site for info in replicas})
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
        ((_, replica),) = spread_standbys({p: owner}, {p: []}, 1, replicas, {p: near})
        return replica

    assert chosen("a1") == "b1"
    assert chosen("a1", "b2", "b1") == "b2"
    assert chosen("b1", "b1", "a2") == "a2", "its former owner, when it moved to where its standby was"
    assert chosen("a1", "a2") == "b1", "another site comes first"


def test_a_target_that_fails_again_is_avoided_for_longer_and_forgotten_when_it_is_gone() -> None:
    avoided = Avoided()
    avoided.failed(0.0, [("Op", "a"), ("Other", "a")])
    assert avoided.now(AVOIDED_S - 1) == {"Op": {"a"}, "Other": {"a"}}
    avoided.took([("Other", "a")])
    assert avoided.now(AVOIDED_S - 1) == {"Op": {"a"}}
    assert avoided.now(AVOIDED_S) == {}
    avoided.failed(AVOIDED_S, [("Op", "a")])
    assert avoided.now(3 * AVOIDED_S - 1) == {"Op": {"a"}}
    assert avoided.now(5 * AVOIDED_S) == {}
    avoided.failed(5 * AVOIDED_S, [("Op", "a")])
    assert avoided.now(6 * AVOIDED_S) == {}
