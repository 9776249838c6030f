"""Placing: moves that begin without a command."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller.placing import AutoRebalance, Placing
from reconfig.decisions.budget import FixedCost
from reconfig.decisions.placement import Choice, MoveProposal, View
from reconfig.decisions.policies import AutopilotSettings, PolicyName
from stateflow.clock import ManualClock
from stateflow.errors import Unavailable
from stateflow.reports import LeftPartition
from stateflow.types import PartitionId

FIRST, SECOND = PartitionId("Op", 0), PartitionId("Op", 1)


class World:
    """Records what an automatic placement asks of the reconfigurations; ``avoided`` is what they answer."""

    def __init__(self) -> None:
        self.avoided: dict[str, set[str]] = {}
        self.asked: list[dict[str, Any]] = []
        self.clock = ManualClock(1)
        self.reconfigurations: Any = SimpleNamespace(
            avoided=lambda: self.avoided, busy=set, place=self._begun, rebalance=self._begun
        )
        self.context: Any = SimpleNamespace(
            cluster=SimpleNamespace(autopilot=AutopilotSettings((PolicyName.RING,))),
            clock=self.clock,
            settings=SimpleNamespace(auto_rebalance_after_s=0.0),
            members=SimpleNamespace(session=lambda name: f"session of {name}"),
            aside=self._aside,
        )

    async def _begun(self, *_: Any, **options: Any) -> list[Any]:
        self.asked.append(options)
        return [SimpleNamespace(id="r", operator="Op", moves=(SimpleNamespace(partition=0),))]

    @staticmethod
    async def _aside(work: Any, *arguments: Any) -> Any:
        return work(*arguments)


def test_the_autopilot_avoids_what_refused_and_only_what_moves_cools_down() -> None:
    world, views = World(), list[View]()
    world.avoided = {"Op": {"b"}}

    async def rates() -> None: ...

    measuring: Any = SimpleNamespace(rates=rates, view=lambda: View({}, []))
    pilot = Placing(world.context, world.reconfigurations, measuring)
    cooling = list[PartitionId]()

    def step(now_s: float, view: View, busy: Any) -> list[MoveProposal]:
        views.append(view)
        return [MoveProposal(each, "a", "c", "why") for each in (FIRST, SECOND)]

    def began(now_s: float, view: View, proposals: list[MoveProposal]) -> None:
        cooling.extend(proposal.partition for proposal in proposals)

    autopilot: Any = SimpleNamespace(orders=AutopilotSettings(), step=step, began=began)
    pilot._autopilot = autopilot
    asyncio.run(pilot._step())
    assert [view.avoided for view in views] == [{"Op": {"b"}}]
    assert world.asked == [{"in_part": True}]
    assert cooling == [FIRST]


def test_what_a_command_leaves_out_is_proposed_with_its_reason() -> None:
    world = World()

    async def rates() -> None: ...

    measuring: Any = SimpleNamespace(rates=rates, view=lambda: View({}, []), silent=set())
    pilot = Placing(world.context, world.reconfigurations, measuring)
    found = asyncio.run(pilot.costs(Choice({}, left={SECOND: "c does not answer"}), {}, FixedCost()))
    assert found.left == (LeftPartition("Op", 1, "c does not answer"),)


def test_a_newcomer_that_could_not_take_its_share_has_another_chance(monkeypatch: Any) -> None:
    world = World()
    rebalance = AutoRebalance(world.context, SimpleNamespace(), world.reconfigurations)  # type: ignore[arg-type]

    async def newcomers() -> list[str]:
        return ["b"]

    monkeypatch.setattr(rebalance, "_newcomers", newcomers)
    monkeypatch.setattr(rebalance, "_is_busy", lambda: False)
    for avoided, rounds in (({}, 1), ({"Op": {"b"}}, 1), ({"Op": {"b"}}, 1), ({}, 2), ({}, 2)):
        world.avoided = avoided
        asyncio.run(rebalance._look())
        assert world.asked == [{"in_part": True}] * rounds


def test_a_newcomer_whose_rebalance_was_refused_has_another_chance(monkeypatch: Any) -> None:
    world = World()
    rebalance = AutoRebalance(world.context, SimpleNamespace(), world.reconfigurations)  # type: ignore[arg-type]
    refusals = [Unavailable("the placement kept changing", remedy="")]

    async def begun(*arguments: Any, **options: Any) -> list[Any]:
        if refusals:
            raise refusals.pop()
        return await world._begun(*arguments, **options)

    async def newcomers() -> list[str]:
        return ["b"]

    world.reconfigurations.rebalance = begun
    monkeypatch.setattr(rebalance, "_newcomers", newcomers)
    monkeypatch.setattr(rebalance, "_is_busy", lambda: False)
    with pytest.raises(Unavailable):
        asyncio.run(rebalance._look())
    for _ in range(3):
        asyncio.run(rebalance._look())
        assert world.asked == [{"in_part": True}], "once, and not again"
