"""Room for moves: a move is refused where there is none, and only there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller.measuring import Said, heard, loads_of, room_of, with_room
from reconfig.decisions.placement import Choice, Room
from reconfig.decisions.plan import Load
from stateflow.errors import NoRoom, Unavailable
from stateflow.partition.control import DiskView, PartitionView
from stateflow.partition.lifecycle import State
from stateflow.types import PartitionId

MIB = 1 << 20


def partition(number: int) -> PartitionId:
    return PartitionId("Op", number)


def here(sizes: dict[int, int], disk: DiskView) -> Said:
    return [PartitionView(partition(n), State.OWNED, 1, 1, bytes=size) for n, size in sizes.items()], disk


def context(said: dict[str, Said], owners: str, under_way: dict[int, str]) -> Any:
    async def views(name: str, _: float) -> Said:
        if name not in said:
            raise Unavailable("no answer")
        return said[name]

    planned = {
        f"{number}": SimpleNamespace(planned=SimpleNamespace(partition=partition(number), target=target))
        for number, target in under_way.items()
    }
    assignment = SimpleNamespace(owner=lambda number: (owners[number], 1))
    cluster = SimpleNamespace(open_moves=planned, operator=lambda _: SimpleNamespace(assignment=assignment))
    alive = {*said, *owners}
    return SimpleNamespace(cluster=cluster, alive=lambda: dict.fromkeys(alive), replicas=SimpleNamespace(views=views))


def fitted(context: Any, choice: Choice) -> dict[PartitionId, str]:
    return with_room(context, choice, asyncio.run(heard(context, choice, {}, 1.0)))


def check(said: dict[str, Said], moves: dict[int, str], owners: str = "aaaa", **under_way: str) -> None:
    on_their_way = {int(number.lstrip("p")): target for number, target in under_way.items()}
    wanted = {partition(number): target for number, target in moves.items()}
    assert fitted(context(said, owners, on_their_way), Choice(wanted)) == wanted


A = here(dict.fromkeys(range(4), 10 * MIB), DiskView("d1", 1000 * MIB))


def test_it_is_said_who_has_how_much_and_what_would_come() -> None:
    said = {"a": A, "b": here({}, DiskView("d2", 15 * MIB))}
    check(said, {0: "b"})
    with pytest.raises(NoRoom, match=r"b: 15\.0 MiB free for state, 20\.0 MiB needed"):
        check(said, {0: "b", 1: "b"})


def test_what_is_on_its_way_there_has_its_room_already() -> None:
    said = {"a": A, "b": here({}, DiskView("d2", 15 * MIB))}
    with pytest.raises(NoRoom):
        check(said, {0: "b"}, p1="b")
    check(said, {0: "b"}, p1="a")


def test_of_a_copy_that_lies_there_only_the_rest_comes() -> None:
    check({"a": A, "b": here({0: 9 * MIB}, DiskView("d2", 1 * MIB))}, {0: "b"})


def test_of_one_disk_the_free_bytes_are_there_once() -> None:
    said = {"a": A, "b": here({}, DiskView("d2", 15 * MIB)), "c": here({}, DiskView("d2", 15 * MIB))}
    with pytest.raises(NoRoom, match="b, c: "):
        check(said, {0: "b", 1: "c"})


def test_who_else_may_have_it_gets_what_has_no_room_where_it_was_to_go() -> None:
    said = {"a": A, "b": here({}, DiskView("d2", 15 * MIB)), "c": here({}, DiskView("d3", 25 * MIB))}
    moves = {partition(0): "b", partition(1): "b"}
    instead = dict.fromkeys(moves, (["b"], ["b", "c"]))
    made = fitted(context(said, "aaaa", {}), Choice(moves, instead))
    assert made == {partition(0): "b", partition(1): "c"}
    with pytest.raises(NoRoom, match=r"c: 15\.0 MiB free for state, 20\.0 MiB needed"):
        fitted(context(said, "aaaa", {2: "c"}), Choice(dict.fromkeys(moves, "c")))


def test_who_else_may_have_it_is_asked_when_there_is_no_room() -> None:
    said = {"a": A, "b": here({}, DiskView("d2", 15 * MIB)), "c": here({}, DiskView("d3", 25 * MIB))}
    one, two = {partition(0): "b"}, {partition(0): "b", partition(1): "b"}
    for moves, asked in ((one, {"a", "b"}), (two, {"a", "b", "c"})):
        choice = Choice(moves, dict.fromkeys(moves, (["b", "c"],)))
        assert asyncio.run(heard(context(said, "aaaa", {}), choice, {}, 1.0)).keys() == asked


def test_who_does_not_answer_decides_for_itself() -> None:
    check({"a": A}, {0: "z"})
    check({"b": here({}, DiskView("d2", 1))}, {0: "b"})


def test_room_of_its_own_is_beside_all_that_lies_there() -> None:
    assert room_of(*here({0: 5, 1: 7}, DiskView("d", 100, 20))) == Room(8, "d", 100)
    assert room_of(*here({0: 5}, DiskView("d", 100))) == Room(disk="d", free=100)
    assert room_of(*here({0: 5}, DiskView())) == Room(), "it has not said anything"


def test_each_is_asked_once_also_one_that_does_not_answer() -> None:
    said = {"a": A, "b": here({}, DiskView("d2", 15 * MIB))}
    world = context(said, "aaaz", {})
    asked: list[str] = []
    views = world.replicas.views

    async def noted(name: str, within_s: float) -> Said:
        asked.append(name)
        return await views(name, within_s)

    world.replicas.views = noted

    async def scenario() -> None:
        first = await heard(world, Choice({partition(3): "b"}), {}, 1.0)
        assert (sorted(asked), first["z"]) == (["b", "z"], None)
        then = await heard(world, Choice({partition(0): "b", partition(3): "b"}), first, 1.0)
        assert sorted(asked) == ["a", "b", "z"]
        assert loads_of(world, map(partition, (0, 3)), then) == {partition(0): Load(10 * MIB, 0.0)}

    asyncio.run(scenario())


def test_a_load_is_what_the_owner_says_and_not_who_had_it_before() -> None:
    world = context({}, "aaaa", {})
    said = {"a": here({0: 7}, DiskView()), "b": here({0: 5, 1: 5}, DiskView())}
    assert loads_of(world, [partition(0)], said) == {partition(0): Load(7, 0.0)}
