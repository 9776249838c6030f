"""Checkpoints on request are of every partition that is assigned, or an error names those that have none."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import sweeping
from reconfig.controller.sweeping import Checkpoints
from stateflow.errors import InvalidArgument, Unavailable
from stateflow.reports import CheckpointReport, Taken

NO_STORE = InvalidArgument("this replica has no checkpoint store", remedy="start it with --checkpoints URL")


class Fleet:
    """Replicas a and b.

    Attributes:
        owned: partitions that each replica has, which may differ from ``owners``.
        dead: replicas whose leases have run out.
        killed: replicas that have died, and whose leases are valid.
    """

    def __init__(self, owners: dict[str, tuple[str, ...]]) -> None:
        self.owners, self.dead, self.killed, self.fails = owners, set[str](), set[str](), set[str]()
        self.owned = {
            name: {
                (operator, number)
                for operator, names in owners.items()
                for number, at in enumerate(names)
                if at == name
            }
            for name in "ab"
        }
        self.asked: list[tuple[str, str, list[int], str]] = []
        self.passes = 0

    def moves_on(self) -> None:
        """Changes the fleet between two passes."""

    async def reach(self, name: str) -> None:
        if name in self.killed:
            raise Unavailable(f"no connection to {name}", remedy="check that it runs")

    async def checkpoint(self, name: str, operator: str, partitions: Collection[int], savepoint: str = "") -> Taken:
        self.asked.append((name, operator, sorted(partitions), savepoint))
        await self.reach(name)
        if name in self.fails:
            raise NO_STORE
        numbers = tuple(
            number
            for each, number in sorted(self.owned[name])
            if operator in ("", each) and (not partitions or number in partitions)
        )
        return Taken(CheckpointReport(len(numbers), len(numbers), 2 * len(numbers), 0.1, "file:///cp"), numbers)

    def take(self, *given: Any) -> Taken:
        async def pause() -> None:
            self.passes += 1
            self.moves_on()
            await asyncio.sleep(0.001)

        async def scenario() -> Taken:
            deployed = {
                name: SimpleNamespace(assignment=SimpleNamespace(owners=names)) for name, names in self.owners.items()
            }
            context: Any = SimpleNamespace(
                cluster=SimpleNamespace(deployed=deployed, operator=lambda name: deployed[name]),
                alive=lambda: {name: None for name in "ab" if name not in self.dead},
                members=SimpleNamespace(alive=lambda name: name not in self.dead),
                replicas=SimpleNamespace(checkpoint=self.checkpoint, reach=self.reach),
                clock=SimpleNamespace(monotonic=lambda: 10.0 * self.passes),
                acquainted=lambda: asyncio.sleep(0),
                check_leads=lambda: None,
                pause=pause,
            )
            self.deployed = deployed
            return await asyncio.wait_for(Checkpoints(context).take(*given), 10)

        return asyncio.run(scenario())

    def assign(self, operator: str, *owners: str) -> None:
        self.deployed[operator] = SimpleNamespace(assignment=SimpleNamespace(owners=owners))


def test_owners_take_their_shares() -> None:
    fleet = Fleet({"Op": ("a", "a", "b"), "Other": ("b",)})
    taken = fleet.take()
    assert fleet.asked == [("a", "Op", [0, 1], ""), ("b", "Op", [2], ""), ("b", "Other", [0], "")]
    assert (taken.report.partitions, taken.report.bytes_total, taken.report.url) == (4, 8, "file:///cp")
    assert taken.numbers == (), "numbers of several operators mean nothing"


def test_of_one_operator_the_numbers_are_told() -> None:
    fleet = Fleet({"Op": ("a", "a", "b"), "Other": ("b",)})
    assert sorted(fleet.take("Op", [0, 2], "s").numbers) == [0, 2]
    assert fleet.asked == [("a", "Op", [0], "s"), ("b", "Op", [2], "s")]
    assert sorted(fleet.take("Op").numbers) == [0, 1, 2]


@pytest.mark.parametrize("operator", ["", "Op"])
def test_partitions_of_a_silent_replica_are_named(operator: str) -> None:
    """The report had a smaller count, and no error; for one operator, the silent replica was called."""
    fleet = Fleet({"Op": ("a", "a", "b", "b", "a")})
    fleet.dead = {"b"}
    with pytest.raises(Unavailable, match=r"no replica served Op 2-3 for 30 s; .* of 3 other partitions") as caught:
        fleet.take(operator)
    assert "command again" in caught.value.remedy
    assert [each[:3] for each in fleet.asked] == [("a", "Op", [0, 1, 4])]


@pytest.mark.parametrize("savepoint", ["", "before"])
def test_a_replica_that_was_just_killed_is_waited_for(savepoint: str) -> None:
    """The command failed at once while the dead replica's lease was valid."""
    fleet = Fleet({"Op": ("a", "b")})
    fleet.killed = {"b"}

    def moves_on() -> None:
        if fleet.passes == 2:
            fleet.assign("Op", "a", "a")
            fleet.owned["a"].add(("Op", 1))

    fleet.moves_on = moves_on  # type: ignore[method-assign]
    assert sorted(fleet.take("Op", [], savepoint).numbers) == [0, 1]
    assert [each[:3] for each in fleet.asked] == [("a", "Op", [0]), ("a", "Op", [1])]


def test_a_savepoint_that_is_not_whole_needs_another_name() -> None:
    fleet = Fleet({"Op": ("a", "b")})
    fleet.dead = {"b"}
    with pytest.raises(Unavailable) as caught:
        fleet.take("Op", [], "before")
    assert "another name" in caught.value.remedy


def test_a_partition_on_the_move_is_taken_where_it_arrives() -> None:
    """The source no longer served it, and the target was not asked or did not serve it yet."""
    fleet = Fleet({"Op": ("a", "a", "b")})
    fleet.owned["a"].discard(("Op", 1))

    def moves_on() -> None:
        if fleet.passes == 2:
            fleet.assign("Op", "a", "b", "b")
            fleet.owned["b"].add(("Op", 1))

    fleet.moves_on = moves_on  # type: ignore[method-assign]
    taken = fleet.take("Op")
    assert (sorted(taken.numbers), taken.report.partitions) == ([0, 1, 2], 3)
    assert [each[:3] for each in fleet.asked[2:]] == [("a", "Op", [1]), ("b", "Op", [1])], "no other is taken twice"


def test_the_wait_begins_anew_whenever_a_partition_was_taken() -> None:
    fleet = Fleet({"Op": ("a", "a", "a")})
    fleet.owned["a"] = set()
    fleet.moves_on = lambda: fleet.owned["a"].add(("Op", fleet.passes // 3 - 1))  # type: ignore[method-assign]
    assert sorted(fleet.take("Op").numbers) == [0, 1, 2]
    assert 10 * fleet.passes > sweeping.PATIENCE_S


def test_an_operator_that_is_undeployed_meanwhile_is_not_waited_for() -> None:
    fleet = Fleet({"Gone": ("a",), "Op": ("b",)})
    fleet.owned["a"].clear()
    fleet.moves_on = lambda: fleet.deployed.pop("Gone", None)  # type: ignore[method-assign]
    assert fleet.take().report.partitions == 1


def test_a_replica_that_refuses_is_not_asked_again() -> None:
    fleet = Fleet({"Op": ("a", "b")})
    fleet.fails = {"b"}
    with pytest.raises(InvalidArgument, match="has no checkpoint store"):
        fleet.take()
    assert len(fleet.asked) == 2


def test_without_operators_there_is_nothing_to_take() -> None:
    assert Fleet({}).take().report.partitions == 0
