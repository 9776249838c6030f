"""Knowledge of links, and which links are measured next."""

from __future__ import annotations

from reconfig.decisions.budget import (
    ASKED_MAX,
    ASKED_OF_SITE_MAX,
    MOVES_KEPT_S,
    PAIRS_MAX,
    RTT_ASKED_S,
    RTT_KEPT_S,
    Links,
    pairs_that_matter,
)
from reconfig.decisions.placement import Pair, Seen, View
from stateflow.types import PartitionId, ReplicaInfo


def view_of(at: list[str], *sites: str, allowed: dict[str, list[str]] | None = None, **origins: float) -> View:
    """Makes a view of partitions at these sites, all with the same origins."""
    partitions = [PartitionId("Op", number) for number in range(len(at))]
    infos = [ReplicaInfo(f"{site}-0", site, "x:1") for site in sites]
    owners = {partition: f"{site}-0" for partition, site in zip(partitions, at, strict=True)}
    seen = Seen(rows=sum(origins.values()), origins=origins)
    return View(owners, infos, dict.fromkeys(partitions, seen), allowed or {})


def test_a_pair_is_asked_for_once_in_a_while_and_answers_are_kept_for_longer() -> None:
    links, pair = Links(), ("a", "b")
    assert links.due(0, [pair]) == {"a": ["b"]}
    links.measured(0, "a", {"b": 7.0})
    assert links.due(RTT_ASKED_S - 1, [pair]) == {}
    assert links.due(RTT_ASKED_S, [pair]) == {"a": ["b"]}
    assert links.rtts_ms(RTT_KEPT_S - 1) == {pair: 7.0}, "one answer may fail"
    assert links.rtts_ms(RTT_KEPT_S) == {}


def test_who_does_not_answer_is_left_alone_for_as_long() -> None:
    links = Links()
    assert links.due(0, [("a", "b")])
    assert links.due(5, [("a", "b")]) == {}


def test_no_look_asks_for_more_than_so_many_and_the_next_goes_on() -> None:
    links = Links()
    pairs: list[Pair] = [(f"s{n}", f"t{m}") for n in range(20) for m in range(40)]
    asked: set[Pair] = set()
    for now in range(4):
        due = links.due(now, pairs)
        assert sum(map(len, due.values())) <= ASKED_MAX
        assert max(map(len, due.values())) <= ASKED_OF_SITE_MAX
        found = {(site, other) for site, others in due.items() for other in others}
        assert not found & asked
        asked |= found
    assert asked == set(pairs)


def test_the_fastest_of_the_last_moves_is_what_a_link_can() -> None:
    links = Links()
    for now, rate in enumerate((5.0, 9.0, 2.0, 0.0)):
        links.moved(now, "a", "b", rate)
    links.moved(0, "a", "a", 1e9)
    assert links.bytes_per_s(10) == {("a", "b"): 9.0}
    assert links.bytes_per_s(MOVES_KEPT_S + 10) == {}
    assert not links._moves, "sites may be gone for good"


def test_what_is_where_its_rows_come_from_needs_no_figure() -> None:
    assert pairs_that_matter(view_of(["a", "a"], "a", "b", "c", a=5.0)) == []


def test_of_rows_from_elsewhere_their_site_and_the_owner_s() -> None:
    assert pairs_that_matter(view_of(["b"], "a", "b", "c", a=5.0)) == [("a", "b")]


def test_others_where_it_cannot_be_at_the_site_of_its_rows_or_they_come_from_several() -> None:
    allowed = {"Op": ["b", "c"]}
    assert set(pairs_that_matter(view_of(["b"], "a", "b", "c", "d", allowed=allowed, a=5.0))) == {
        ("a", "b"),
        ("a", "c"),
    }
    several = pairs_that_matter(view_of(["c"], "a", "b", "c", "d", a=5.0, b=4.0))
    assert set(several) == {("a", "c"), ("b", "c"), ("a", "b"), ("a", "d"), ("b", "d")}


def test_a_site_without_replicas_and_few_rows_have_none() -> None:
    assert pairs_that_matter(view_of(["a"], "a", "b", mars=5.0)) == []
    assert pairs_that_matter(view_of(["b"], "a", "b", a=0.05)) == []


def test_of_many_sites_only_so_many_pairs() -> None:
    sites = [f"s{number:03}" for number in range(400)]
    partitions = [PartitionId("Op", number) for number in range(400)]
    infos = [ReplicaInfo(f"{site}-0", site, "x:1") for site in sites]
    owners = dict.fromkeys(partitions, "s000-0")
    seen = {
        partition: Seen(rows=9.0, origins={sites[partition.partition]: 5.0, "s001": 4.0}) for partition in partitions
    }
    assert len(pairs_that_matter(View(owners, infos, seen))) == PAIRS_MAX
