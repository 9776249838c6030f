"""Measurements of the controller: rates from the counters of replicas, room, and links."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller.measuring import SHOWN_S, Measuring, seen_of
from reconfig.decisions.budget import Links
from reconfig.decisions.placement import Room, Seen
from reconfig.decisions.policies import PolicyName, decide
from stateflow.clock import ManualClock
from stateflow.partition.control import DiskView, PartitionView
from stateflow.partition.lifecycle import State
from stateflow.status import LinkReport
from stateflow.types import PartitionId, ReplicaInfo

P = PartitionId("Op", 0)


def view(epoch: int = 1, **counted: Any) -> PartitionView:
    return PartitionView(P, State.OWNED, epoch, 7, **counted)


def test_two_looks_tell_a_rate() -> None:
    before = 10.0, view(rows=100, row_bytes=1000, origins={"edge": 40})
    now = view(bytes=5, rows=300, row_bytes=5000, origins={"edge": 40, "cloud": 20})
    assert seen_of(now, 12.0, before, None) == Seen(5, 100.0, 2000.0, {"cloud": 10.0})


def test_what_is_counted_from_nothing_keeps_the_rate_that_was_known() -> None:
    known = Seen(1, 50.0, 500.0, {"edge": 50.0})
    for before in (
        None,
        (10.0, view(rows=100)),  # the replica was restarted
        (10.0, view(epoch=2, rows=0)),  # the partition has moved
        (12.0, view(rows=0)),
    ):
        assert seen_of(view(bytes=9, rows=30), 12.0, before, known) == Seen(9, 50.0, 500.0, {"edge": 50.0})


def test_nothing_is_made_up_of_what_was_never_seen_twice() -> None:
    assert seen_of(view(bytes=9, rows=30), 12.0, None, None) == Seen(9)


# -- what replicas say -------------------------------------------------------------------------------------------

INFOS = {name: ReplicaInfo(f"{name}-0", name, f"{name}:1") for name in ("edge", "cloud", "near")}
OP, OTHER = PartitionId("Op", 0), PartitionId("Op", 1)


class World:
    """Three replicas: ``cloud-0`` owns both partitions, whose rows come from the edge; ``edge-0`` owns nothing."""

    def __init__(self) -> None:
        self.clock, self.rows, self.asked = ManualClock(1), 0, list[tuple[str, list[str]]]()
        deployed = SimpleNamespace(assignment=SimpleNamespace(owners=("cloud-0", "cloud-0")))
        replicas = {info.name: info for info in INFOS.values()}
        self.open_moves: dict[str, Any] = {}
        cluster = SimpleNamespace(
            deployed={"Op": deployed},
            replicas=replicas,
            allowed_sites=lambda: {"Op": ["cloud", "near"]},
            open_moves=self.open_moves,
        )
        context: Any = SimpleNamespace(
            acquainted=self._done,
            clock=self.clock,
            cluster=cluster,
            alive=lambda: replicas,
            fit=lambda: replicas,
            aside=self._aside,
            replicas=SimpleNamespace(views=self._views, round_trips_ms=self._round_trips_ms),
        )
        self.links = Links()
        self.measuring = Measuring(context, self.links)

    async def _done(self) -> None: ...

    async def _aside(self, work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    async def _views(self, name: str, _: float) -> Any:
        if name == "near-0":
            return [view(bytes=30)], DiskView("d2", 100, 50)  # an old copy
        if name == "edge-0":
            return [], DiskView("d1", 70)
        self.rows += 100
        return [
            PartitionView(each, State.OWNED, 1, 7, bytes=40, rows=self.rows, origins={"edge": self.rows})
            for each in (OP, OTHER)
        ], DiskView("d1", 80)

    async def _round_trips_ms(self, name: str, to: list[str], _: float) -> dict[str, float]:
        self.asked.append((name, to))
        return {other: {"cloud-0": 40.0, "near-0": 2.0}[other] for other in to}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    async def sleep(seconds: float) -> None:
        made.clock.advance(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return made


def test_the_view_has_room_and_round_trips_that_were_measured(world: World) -> None:
    asyncio.run(world.measuring.rates())
    found = world.measuring.view()
    assert found.rtt_ms == {("edge", "cloud"): 40.0, ("edge", "near"): 2.0}
    assert world.asked == [("edge-0", ["cloud-0", "near-0"])]
    assert found.room["near-0"] == Room(20, "d2", 100)
    assert found.room["edge-0"].free == found.room["cloud-0"].free == 70, "one disk"
    assert found.copies == {(P, "near-0"): 30}
    assert world.measuring.room_bytes() == {"cloud-0": 70, "edge-0": 70, "near-0": 20}
    (proposal,) = decide([PolicyName.LOCALITY], found)
    assert (proposal.partition, proposal.target) == (P, "near-0"), "of the other one the whole would have to come"


def test_what_is_on_its_way_has_its_room(world: World) -> None:
    asyncio.run(world.measuring.rates())
    world.open_moves["m"] = SimpleNamespace(planned=SimpleNamespace(partition=OTHER, target="near-0"))
    assert world.measuring.view().room["near-0"].own == 20 - 40


def test_links_are_shown_as_far_as_they_are_known(world: World) -> None:
    asyncio.run(world.measuring.room())
    world.links.moved(world.clock.monotonic(), "cloud", "edge", 1e6)
    world.links.measured(world.clock.monotonic(), "edge", {"cloud": 40.0, "near": 2.0})
    assert world.measuring.links() == (LinkReport("cloud", "edge", 40.0, 1e6), LinkReport("edge", "near", 2.0, None))


def test_room_that_was_seen_long_ago_is_not_shown(world: World) -> None:
    assert world.measuring.room_bytes() == {}
    asyncio.run(world.measuring.room())
    world.clock.advance(SHOWN_S + 1)
    assert world.measuring.room_bytes() == {}
