"""Room of replicas, and moves without room."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from reconfig.decisions.placement import Choice, Room, Seen, Space, View, lacking, no_room
from stateflow.reports import LackOfRoom
from stateflow.types import PartitionId


def test_replicas_of_a_disk_share_what_it_has_free() -> None:
    space = Space({"a": Room(disk="d", free=100), "b": Room(own=30, disk="d", free=90), "c": Room(free=100)})
    assert [space.left(name) for name in "abc"] == [90, 30, 100], "looked at at different times"
    space.take("a", 70)
    assert [space.left(name) for name in "abc"] == [20, 20, 100]
    assert space.rooms()["b"] == Room(30, "d", 20)


def test_who_has_said_nothing_has_no_end_of_room() -> None:
    space = Space({})
    space.take("a", 1e18)
    assert space.left("a") == math.inf


def test_where_nothing_is_left_nothing_fits() -> None:
    assert not Space({"a": Room(own=0)}).holds("a", 0)
    assert Space({"a": Room(own=1)}).holds("a", 0)
    assert lacking([("a", 0)], {"a": Room(own=-5)}) == [LackOfRoom(("a",), 0, 0)]


def test_what_has_no_room_is_said_of_each_replica_and_of_disks() -> None:
    rooms = {"a": Room(disk="d", free=100), "b": Room(disk="d", free=100), "c": Room(own=10)}
    coming = [("a", 60), ("b", 30), ("b", 30), ("c", 11), ("unknown", 1e9)]
    assert lacking(coming, rooms) == [LackOfRoom(("c",), 10, 11), LackOfRoom(("a", "b"), 100, 120)]
    assert lacking([("a", 60), ("b", 40), ("c", 10)], rooms) == []


def test_a_refusal_says_who_has_what() -> None:
    error = no_room([LackOfRoom(("a", "b"), 1 << 20, 3 << 20)])
    assert error.code == "no_room"
    assert "a, b: 1.0 MiB free for state, 3.0 MiB needed" in str(error)


def test_the_largest_has_the_first_choice_and_the_first_rank_is_preferred() -> None:
    small, large = PartitionId("Op", 0), PartitionId("Op", 1)
    sizes = {small: 10, large: 20}
    rooms = {"a": Room(own=21), "near": Room(own=12), "far": Room(own=99)}
    choice = Choice({small: "a", large: "a"}, dict.fromkeys(sizes, (["near"], ["near", "far"])))

    def fitted(rooms: dict[str, Room]) -> dict[PartitionId, str]:
        return View({}, (), {each: Seen(size) for each, size in sizes.items()}, room=rooms).fitted(choice)

    assert fitted(rooms) == {large: "a", small: "near"}
    assert fitted(rooms | {"near": Room(own=5)}) == {large: "a", small: "far"}
    full = {name: Room(own=5) for name in rooms}
    assert fitted(full) == choice.moves, "it is refused where it was to go"


NAMES = st.sampled_from("abcd")


@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.integers(-5, 100), st.sampled_from(["", "d"]), st.integers(0, 100))
    ),
    st.lists(st.tuples(NAMES, st.integers(0, 60))),
)
def test_what_is_counted_one_by_one_is_what_is_told_of_all(
    told: dict[str, tuple[int, str, int]], coming: list[tuple[str, int]]
) -> None:
    rooms = {name: Room(*each) for name, each in told.items()}
    space, fits = Space(rooms), True
    for replica, size in coming:
        fits = fits and space.left(replica) >= size
        space.take(replica, size)
    full = any(Space(rooms).left(replica) <= 0 for replica, _ in coming)
    assert (lacking(coming, rooms) == []) == (fits and not full)
