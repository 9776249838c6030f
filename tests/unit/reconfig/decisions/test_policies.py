"""Placement policies: the moves that they propose, and those that they never do; and the autopilot."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconfig.decisions.placement import PAYBACK_S, Left, MoveProposal, Room, Seen, View
from reconfig.decisions.policies import (
    MATTERS,
    UNEVEN_MAX,
    Autopilot,
    AutopilotSettings,
    PolicyName,
    by_load,
    by_locality,
    decide,
    policies_named,
    uneven,
)
from stateflow.errors import InvalidArgument
from stateflow.types import PartitionId, ReplicaInfo, node_of, worker_name
from tests.sizes import sized

LOAD, LOCALITY, RING = PolicyName.LOAD, PolicyName.LOCALITY, PolicyName.RING


def replicas(**sites: int) -> list[ReplicaInfo]:
    return [ReplicaInfo(f"{site}-{n}", site, "x:1") for site, count in sites.items() for n in range(count)]


def partitions(count: int) -> list[PartitionId]:
    return [PartitionId("Op", number) for number in range(count)]


def zipf(count: int, seed: int, total: float = 100_000.0) -> dict[PartitionId, Seen]:
    ranks = list(range(1, count + 1))
    random.Random(seed).shuffle(ranks)
    whole = sum(1 / rank for rank in ranks)
    return {
        partition: Seen(size=int(total / rank / whole * 1e4), rows=total / rank / whole)
        for partition, rank in zip(partitions(count), ranks, strict=True)
    }


# -- load -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_skewed_load_is_evened_out_by_few_moves(seed: int) -> None:
    infos = replicas(cloud=4)
    seen = zipf(256, seed)
    owners = {partition: infos[partition.partition % 4].name for partition in partitions(256)}
    hottest = max(each.rows for each in seen.values())
    assert hottest < sum(each.rows for each in seen.values()) / 4 * UNEVEN_MAX, "a partition cannot be cut"
    view = View(owners, infos, seen)
    proposals, _ = by_load(view)
    assert uneven(view.after(proposals)) <= UNEVEN_MAX
    assert uneven(view.after(proposals), "bytes") <= UNEVEN_MAX
    assert len(proposals) <= 32


def test_what_is_even_enough_stays() -> None:
    infos = replicas(cloud=2)
    seen = {partition: Seen(rows=100.0) for partition in partitions(21)}
    owners = {partition: infos[partition.partition >= 10].name for partition in partitions(21)}
    assert by_load(View(owners, infos, seen))[0] == []


def test_little_load_is_no_reason() -> None:
    infos = replicas(cloud=2)
    seen = {partition: Seen(rows=0.5, size=1000) for partition in partitions(8)}
    assert by_load(View(dict.fromkeys(partitions(8), infos[0].name), infos, seen))[0] == []


def test_one_partition_that_is_more_than_a_share_moves_nothing_round_and_round() -> None:
    infos = replicas(cloud=2)
    seen = {partitions(3)[0]: Seen(rows=1000.0), partitions(3)[1]: Seen(rows=1.0), partitions(3)[2]: Seen(rows=1.0)}
    owners = dict.fromkeys(partitions(3), infos[0].name)
    view = View(owners, infos, seen)
    proposals, _ = by_load(view)
    assert by_load(view.after(proposals))[0] == []


def test_a_partition_that_has_nothing_of_what_is_uneven_stays() -> None:
    """No partition moves without relieving its node; one without rows did, with all its bytes, for the sake of rows."""
    (first, second, third), mib = replicas(cloud=3), 1 << 20
    large = [(first, 150.0, 50), (first, 0.0, 9), (first, 0.0, 9), (second, 130.0, 60), (third, 20.0, 190)]
    owners = {each: info.name for each, (info, *_) in zip(partitions(5), large, strict=True)}
    seen = {each: Seen(size * mib, rows) for each, (_, rows, size) in zip(partitions(5), large, strict=True)}
    proposals, _ = by_load(View(owners, [first, second, third], seen))
    assert proposals == []


def test_weights_are_shares() -> None:
    infos = [ReplicaInfo("a", "s", "x:1", weight=3), ReplicaInfo("b", "s", "x:1", weight=1)]
    seen = {partition: Seen(rows=10.0) for partition in partitions(40)}
    proposals, _ = by_load(view := View(dict.fromkeys(partitions(40), "b"), infos, seen))
    counts = Counter(view.after(proposals).owners.values())
    assert counts["a"] >= 24
    assert counts["b"] <= 10 * UNEVEN_MAX


def does_it_matter(view: View, measure: str) -> bool:
    """Returns whether the load matters: below this average for each node it may be uneven."""
    takers = {info.name for info in view.takers()}
    theirs = [view.of(partition) for partition, owner in view.owners.items() if owner in takers]
    total = sum(seen.rows if measure == "rows" else seen.size for seen in theirs)
    least = MATTERS[measure]
    return total >= least * len({node_of(name) for name in takers})


PAIRS = [("edge", "cloud"), ("cloud", "edge"), ("edge", "else"), ("cloud", "else")]


def check_room(view: View, proposals: list[MoveProposal]) -> None:
    """Asserts that no replica is given more than it has room for, nor replicas on one disk more than the disk has."""
    came: Counter[str] = Counter()
    for proposal in proposals:
        came[proposal.target] += view.of(proposal.partition).size
    for name in came:
        if (there := view.room.get(name)) is not None:
            assert came[name] <= there.own
            assert there.own > 0
            together = [other for other, each in view.room.items() if other == name or each.disk == there.disk != ""]
            assert sum(came[other] for other in together) <= min(view.room[other].free for other in together)


@given(st.data())
@settings(max_examples=sized(600), deadline=None)
def test_a_policy_never_makes_it_worse_nor_breaks_a_rule(data: st.DataObject) -> None:
    sites = {"edge": data.draw(st.integers(1, 3)), "cloud": data.draw(st.integers(1, 3))}
    infos = replicas(**sites)
    count = data.draw(st.integers(1, 24))
    rows = data.draw(st.lists(st.floats(0, 1e4), min_size=count, max_size=count))
    sizes = data.draw(st.lists(st.integers(0, 1 << 30), min_size=count, max_size=count))
    owners = {partition: data.draw(st.sampled_from(infos)).name for partition in partitions(count)}
    origins = [
        data.draw(st.dictionaries(st.sampled_from(["edge", "cloud", "else"]), st.floats(0, 100), max_size=3))
        for _ in range(count)
    ]
    seen = {
        partition: Seen(size, rate, 0.0, where)
        for partition, size, rate, where in zip(partitions(count), sizes, rows, origins, strict=True)
    }
    allowed = {"Op": ["edge"]} if data.draw(st.booleans()) else {}
    cordoned = set(data.draw(st.lists(st.sampled_from([info.name for info in infos]), max_size=2)))
    own, disk, free = st.integers(-1, 1 << 32), st.sampled_from(["", "disk"]), st.integers(0, 1 << 33)
    room = {info.name: Room(*data.draw(st.tuples(own, disk, free))) for info in infos if data.draw(st.booleans())}
    known = data.draw(st.dictionaries(st.sampled_from(PAIRS), st.floats(0.1, 200.0)))
    rates = data.draw(st.dictionaries(st.sampled_from(PAIRS), st.floats(1e3, 1e8)))
    view = View(owners, infos, seen, allowed, room, cordoned, rtt_ms=known, bytes_per_s=rates)
    names = data.draw(st.lists(st.sampled_from(list(PolicyName)), min_size=1, unique=True))
    proposals = decide(names, view, left := Left())
    assert left.reasons.keys().isdisjoint(proposal.partition for proposal in proposals)
    assert len({proposal.partition for proposal in proposals}) == len(proposals)
    where = {info.name: info.site for info in infos}
    check_room(view, proposals)
    for proposal in proposals:
        assert proposal.source == owners[proposal.partition] != proposal.target
        assert proposal.reason
        assert proposal.target not in cordoned
        assert not allowed or where[proposal.target] == "edge"
        between = where[proposal.source], where[proposal.target]
        rate = rates.get(between) if between[0] != between[1] else None
        assert rate is None or len(names) > 1 or view.of(proposal.partition).size / rate <= PAYBACK_S
    alone = by_load(view)[0]
    matters = [measure for measure in ("rows", "bytes") if does_it_matter(view, measure)]
    worst = max([UNEVEN_MAX, *(uneven(view, measure) for measure in matters)])
    for measure in matters:
        assert uneven(view.after(alone), measure) <= worst + 1e-9
    assert decide(names, view) == proposals


@pytest.mark.parametrize("policy", PolicyName)
def test_nothing_is_wished_of_what_a_silent_replica_owns(policy: PolicyName) -> None:
    seen = {partition: coming(cloud=100.0) for partition in partitions(8)}
    assert decide([policy], View(dict.fromkeys(partitions(8), "gone-0"), replicas(cloud=2), seen)) == []


@pytest.mark.parametrize("policy", PolicyName)
def test_a_node_that_rests_is_given_nothing_and_keeps_what_it_has(policy: PolicyName) -> None:
    infos, half = replicas(cloud=2, edge=1), {"cloud-0": "cloud-0", "cloud-1": "cloud-1"}
    seen = {partition: coming(edge=100.0) for partition in partitions(8)}
    owners = {partition: list(half)[partition.partition < 7] for partition in partitions(8)}
    proposals = decide([policy], View(owners, infos, seen, cordoned={"cloud-1"}))
    assert all("cloud-1" not in (proposal.source, proposal.target) for proposal in proposals)


@pytest.mark.parametrize("policy", PolicyName)
def test_a_replica_that_could_not_take_an_operator_is_given_none_of_it(policy: PolicyName) -> None:
    infos, owners = replicas(cloud=3, edge=1), dict.fromkeys(partitions(8), "cloud-0")
    seen = {partition: coming(edge=100.0) for partition in partitions(8)}
    avoided, left = {"Op": {"cloud-1", "edge-0"}}, Left()
    targets = {proposal.target for proposal in decide([policy], View(owners, infos, seen, avoided=avoided), left)}
    assert not targets & avoided["Op"]
    assert targets == ({"cloud-2"} if policy is not LOCALITY else set())
    other = {"Other": avoided["Op"]}
    assert decide([policy], View(owners, infos, seen, avoided=other)) == decide([policy], View(owners, infos, seen))


# -- locality -------------------------------------------------------------------------------------------------


def coming(**origins: float) -> Seen:
    return Seen(rows=sum(origins.values()), row_bytes=100 * sum(origins.values()), origins=origins)


def test_state_follows_the_site_its_rows_come_from() -> None:
    infos = replicas(edge=1, cloud=1)
    p = partitions(1)[0]
    (proposal,), after = by_locality(View({p: "cloud-0"}, infos, {p: coming(edge=9.0, cloud=1.0)}))
    assert (proposal.source, proposal.target) == ("cloud-0", "edge-0")
    assert proposal.reason == "90% of its 10.0 rows/s come from edge"
    assert after.pinned == {p: "edge"}


@pytest.mark.parametrize("origins", [{}, {"edge": 0.01}, {"edge": 5.5, "cloud": 4.5}, {"mars": 5.0}])
def test_without_a_clear_majority_it_stays(origins: Mapping[str, float]) -> None:
    p = partitions(1)[0]
    assert by_locality(View({p: "cloud-0"}, replicas(edge=1, cloud=1), {p: coming(**origins)}))[0] == []


def test_rows_of_a_site_without_replica_go_to_the_nearest() -> None:
    p = partitions(1)[0]
    near = {("mars", "edge"): 1.0, ("mars", "cloud"): 80.0}
    (proposal,), _ = by_locality(View({p: "cloud-0"}, replicas(edge=1, cloud=1), {p: coming(mars=5.0)}, rtt_ms=near))
    assert proposal.target == "edge-0"
    assert proposal.reason == "edge is nearer to its rows: 1.0 ms per round trip, 80.0 from cloud"


def test_a_move_that_costs_more_than_it_brings_is_none() -> None:
    p, infos = partitions(1)[0], replicas(edge=1, cloud=1)
    large = Seen(10**10, 1.0, 100.0, {"edge": 1.0})
    assert by_locality(View({p: "cloud-0"}, infos, {p: large}))[0] == []


def test_the_load_keeps_to_the_site_that_locality_wants() -> None:
    infos = replicas(edge=2, cloud=2)
    seen = {partition: coming(edge=100.0) for partition in partitions(16)}
    view = View(dict.fromkeys(partitions(16), "cloud-0"), infos, seen)
    proposals = decide([LOCALITY, LOAD], view)
    counts = Counter(proposal.target for proposal in proposals)
    assert counts == {"edge-0": 8, "edge-1": 8}


def test_a_worker_of_a_node_is_chosen_by_what_it_has() -> None:
    infos = [ReplicaInfo(worker_name("e", n), "edge", "x:1") for n in range(2)] + replicas(cloud=1)
    seen = {partition: coming(edge=10.0) for partition in partitions(4)}
    proposals = decide([LOCALITY], View(dict.fromkeys(partitions(4), "cloud-0"), infos, seen))
    assert Counter(proposal.target for proposal in proposals) == {worker_name("e", 0): 2, worker_name("e", 1): 2}


def away(*sites: str, **origins: float) -> tuple[PartitionId, View]:
    """Makes one partition at the first of these sites, each of which has one replica."""
    p = partitions(1)[0]
    return p, View({p: f"{sites[0]}-0"}, replicas(**dict.fromkeys(sites, 1)), {p: coming(**origins)})


def test_of_two_sites_the_one_that_is_measured_to_be_nearer() -> None:
    _, view = away("cloud", "far", "near", edge=10.0)
    measured = {("cloud", "edge"): 60.0, ("far", "edge"): 30.0, ("edge", "near"): 5.0}
    (proposal,) = decide([LOCALITY], replace(view, rtt_ms=measured))
    assert (proposal.target, proposal.reason) == (
        "near-0",
        "near is nearer to its rows: 5.0 ms per round trip, 60.0 from cloud",
    )
    full = {"near-0": Room(own=0)}
    (proposal,) = decide([LOCALITY], replace(view, rtt_ms=measured, room=full))
    assert proposal.target == "far-0", "the next one, where the nearest is full"


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {("far", "edge"): 5.0},  # the current distance is unknown
        {("cloud", "edge"): 20.0, ("far", "edge"): 15.0},
        {("cloud", "edge"): 0.9, ("far", "edge"): 0.3},  # differences within noise
        {("cloud", "edge"): 20.0, ("far", "edge"): 40.0},
    ],
)
def test_without_a_measured_gain_it_stays(measured: Mapping[tuple[str, str], float]) -> None:
    _, view = away("cloud", "far", edge=10.0)
    assert decide([LOCALITY], replace(view, rtt_ms=measured)) == []


def test_a_site_between_those_of_its_rows_may_be_best() -> None:
    _, view = away("a", "b", "hub", a=4.0, b=3.0, c=3.0)
    measured = {("a", "b"): 100.0, ("a", "c"): 100.0, ("b", "c"): 100.0}
    measured |= {(site, "hub"): 10.0 for site in "abc"}
    (proposal,) = decide([LOCALITY], replace(view, rtt_ms=measured))
    assert proposal.target == "hub-0"


SITES = ["a", "b", "c", "d"]


@given(st.data())
@settings(max_examples=sized(800), deadline=None)
def test_locality_never_goes_further_away_by_measure(data: st.DataObject) -> None:
    infos = replicas(**dict.fromkeys(SITES[:3], 1))
    count = data.draw(st.integers(1, 6))
    owners = {partition: data.draw(st.sampled_from(infos)).name for partition in partitions(count)}
    where = st.dictionaries(st.sampled_from(SITES), st.floats(0.0, 50.0), max_size=3)
    seen = {partition: coming(**data.draw(where)) for partition in partitions(count)}
    every = {(one, other): data.draw(st.floats(0.01, 300.0)) for one in SITES for other in SITES if one < other}
    view = View(owners, infos, seen, rtt_ms=every)
    sites = {info.name: info.site for info in infos}
    for proposal in decide([LOCALITY], view):
        origins = seen[proposal.partition].origins

        def trips(site: str, origins: Mapping[str, float] = origins) -> float:
            return sum(rows * view.between_ms(origin, site) for origin, rows in origins.items())

        assert trips(sites[proposal.target]) < trips(sites[proposal.source])


# -- room and bandwidth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PolicyName)
def test_what_would_take_longer_than_it_pays_back_stays_and_is_said(policy: PolicyName) -> None:
    infos = replicas(edge=1, cloud=1)
    seen = {partition: Seen(1 << 30, 100.0, 1e9, {"edge": 100.0}) for partition in partitions(8)}
    view = View(dict.fromkeys(partitions(8), "cloud-0"), infos, seen)
    assert decide([policy], replace(view, bytes_per_s={("cloud", "edge"): 2e6}))
    assert decide([policy], replace(view, bytes_per_s={("edge", "cloud"): 1e6})), "the other way"
    left = Left()
    assert decide([policy], replace(view, bytes_per_s={("cloud", "edge"): 1e6}), left) == []
    assert "a move from cloud to edge takes 18 min, more than 10" in left.reasons.values()


@pytest.mark.parametrize("policy", PolicyName)
def test_what_has_no_room_stays_and_is_said(policy: PolicyName) -> None:
    infos = replicas(edge=1, cloud=1)
    seen = {partition: Seen(1 << 30, 100.0, 1e9, {"edge": 100.0}) for partition in partitions(8)}
    room = {"edge-0": Room(own=2.5 * (1 << 30))}
    view = View(dict.fromkeys(partitions(8), "cloud-0"), infos, seen, room=room)
    left = Left()
    assert len(decide([policy], view, left)) == 2
    assert set(left.reasons.values()) & {"edge has no room for it", "edge-0 has no room for it"}


def test_what_lies_there_already_needs_no_room() -> None:
    p, infos = partitions(1)[0], replicas(edge=1, cloud=1)
    view = View({p: "cloud-0"}, infos, {p: replace(coming(edge=100.0), size=1000)}, room={"edge-0": Room(own=10)})
    assert decide([LOCALITY], view) == []
    (proposal,) = decide([LOCALITY], replace(view, copies={(p, "edge-0"): 995}))
    assert proposal.target == "edge-0"


def test_workers_of_one_disk_are_not_given_the_same_room_twice() -> None:
    infos = [ReplicaInfo(worker_name("e", n), "edge", "x:1") for n in range(2)] + replicas(cloud=1)
    seen = {partition: replace(coming(edge=10.0), size=600) for partition in partitions(4)}
    room = {info.name: Room(disk="d", free=1000) for info in infos[:2]}
    proposals = decide([LOCALITY], View(dict.fromkeys(partitions(4), "cloud-0"), infos, seen, room=room))
    assert len(proposals) == 1


def test_no_more_of_what_stays_is_kept_than_is_shown() -> None:
    left = Left(2)
    for partition in partitions(5):
        left.note(partition, "why")
    assert list(left.reasons) == partitions(2)


@pytest.mark.parametrize("text", ["", "speed", "load,load", "load,"])
def test_policies_that_are_not_there(text: str) -> None:
    with pytest.raises(InvalidArgument):
        policies_named(text)


# -- the autopilot --------------------------------------------------------------------------------------------


def test_a_wish_that_comes_and_goes_moves_nothing() -> None:
    p, infos = partitions(1)[0], replicas(edge=1, cloud=1)
    pilot = Autopilot(AutopilotSettings((LOCALITY,), cool_down_s=40))
    wanted = View({p: "cloud-0"}, infos, {p: coming(edge=5.0)})
    other = View({p: "cloud-0"}, infos, {p: coming(cloud=5.0)})
    for now in range(0, 100, 5):
        assert pilot.step(now, wanted if now % 10 else other) == []


def test_a_wish_that_stands_is_carried_out_once_and_the_partition_rests() -> None:
    p, infos = partitions(1)[0], replicas(edge=1, cloud=1)
    pilot = Autopilot(AutopilotSettings((LOCALITY,), cool_down_s=40))
    there = View({p: "cloud-0"}, infos, {p: coming(edge=5.0)})
    assert pilot.step(0, there) == []
    (proposal,) = pilot.step(10, there)
    pilot.began(10, there, [proposal])
    back = View({p: "edge-0"}, infos, {p: coming(cloud=5.0)})
    assert all(pilot.step(now, back) == [] for now in range(11, 50))
    assert [proposal.target for proposal in pilot.step(50, back)] == ["cloud-0"]


def test_a_move_that_fails_again_and_again_begins_less_and_less_often() -> None:
    """The move began again after each cool-down, for ever."""
    p, infos = partitions(1)[0], replicas(edge=1, cloud=1, hub=1)
    pilot = Autopilot(AutopilotSettings((LOCALITY,), cool_down_s=40))
    there, began = View({p: "cloud-0"}, infos, {p: coming(edge=5.0)}), list[int]()
    for now in range(0, 12_000, 10):
        if proposals := pilot.step(now, there):
            pilot.began(now, there, proposals)
            began.append(now)
    assert [later - sooner for sooner, later in pairwise(began)] == [80, 160, 320, 640, 1280, 2560, 2560, 2560]
    hub = View({p: "cloud-0"}, infos, {p: coming(hub=5.0)})
    assert [pilot.step(now, hub) for now in (12_000, 12_009)] == [[], []]
    (proposal,) = pilot.step(12_010, hub)
    pilot.began(12_010, hub, [proposal])
    back = View({p: "hub-0"}, infos, {p: coming(edge=5.0)})
    assert not any(pilot.step(now, back) for now in range(12_010, 12_050))
    assert pilot.step(12_050, back), "the move to another site succeeded"


def test_what_moves_already_is_left_alone() -> None:
    p, infos = partitions(1)[0], replicas(edge=1, cloud=1)
    pilot = Autopilot(AutopilotSettings((LOCALITY,), cool_down_s=4))
    there = View({p: "cloud-0"}, infos, {p: coming(edge=5.0)})
    assert all(pilot.step(now, there, {p}) == [] for now in range(20))


def test_no_more_moves_begin_in_a_minute_than_was_said() -> None:
    infos = replicas(edge=1, cloud=1)
    seen = {partition: coming(edge=10.0) for partition in partitions(500)}
    pilot = Autopilot(AutopilotSettings((LOCALITY,), cool_down_s=600, moves_per_minute=30))
    view, begun = View(dict.fromkeys(partitions(500), "cloud-0"), infos, seen), 0
    for now in range(150, 450):
        proposals = pilot.step(now, view)
        pilot.began(now, view, proposals)
        view, begun = view.after(proposals), begun + len(proposals)
    assert 60 <= begun <= 80, "what stood, for two and a half minutes"


@pytest.mark.parametrize("fields", [{"cool_down_s": 0}, {"moves_per_minute": -1}, {"max_pause_ms": float("nan")}])
def test_orders_that_are_none(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        AutopilotSettings((LOAD,), **fields)


def test_orders_as_the_ledger_has_them() -> None:
    orders = AutopilotSettings((LOCALITY, LOAD), 50.0, 30.0, 10.0)
    assert AutopilotSettings.of(orders.to_dict()) == orders
    assert AutopilotSettings.of(AutopilotSettings().to_dict()) == AutopilotSettings()


@pytest.mark.parametrize(("cool_down_s", "look_s"), [(60.0, 5.0), (20.0, 5.0), (12.0, 3.0), (8.0, 2.0), (1.0, 2.0)])
def test_a_wish_that_stood_for_long_enough_is_seen_soon(cool_down_s: float, look_s: float) -> None:
    assert AutopilotSettings(cool_down_s=cool_down_s).look_s == look_s
