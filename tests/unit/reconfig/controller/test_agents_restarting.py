"""Restart of one node: what it waits for, step by step, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import agents as restarting
from reconfig.controller.agents import DEATHS_MAX, Restarting
from reconfig.controller.folds import Outcome
from stateflow.clock import ManualClock
from stateflow.errors import DataDirLocked, MoveConflict, Unavailable
from stateflow.fleet import Child, Spawned
from stateflow.types import PartitionId

NODE, PARTITION = "gw-0", PartitionId("Op", 0)
PATIENCE_S = 30.0


class Fleet:
    """One node of one process under one agent. Tests script step by step what becomes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sessions, self.alive, self.orphaned = {NODE: "before"}, True, False
        self.spawned = Spawned(NODE, "gw")
        self.child = Child(self.spawned, "RUNNING")
        self.steps: list[Callable[[], None]] = []
        clock = ManualClock(0)
        roster = SimpleNamespace(spawned={NODE: self.spawned}, replicas={NODE: object(), "gw-1": object()})
        self.roster = roster
        context: Any = SimpleNamespace(
            members=SimpleNamespace(session=lambda name: self.sessions[name], alive=lambda name: self.alive),
            cluster=SimpleNamespace(roster=roster, assigned=lambda name: {PARTITION: 1}),
            settings=SimpleNamespace(opening_timeout_s=PATIENCE_S),
            clock=clock,
        )
        agents: Any = SimpleNamespace(child=lambda node: self.child)
        takeovers: Any = SimpleNamespace(concerns=lambda partition: self.orphaned)
        self.restarting = Restarting(context, agents, takeovers)

        async def sleep(seconds: float) -> None:
            clock.advance(seconds)
            if self.steps:
                self.steps.pop(0)()

        monkeypatch.setattr(restarting, "asyncio", SimpleNamespace(sleep=sleep))

    def restart(self) -> Outcome | None:
        return asyncio.run(self.restarting.carry("s", NODE, self.begin))

    async def begin(self) -> bool:
        """Records the command to the agent."""
        self.spawned = self.roster.spawned[NODE] = replace(self.spawned, generation=2)
        return True

    def restarted(self) -> None:
        self.child, self.alive = Child(self.spawned, "STARTING"), False

    def set(self, **values: Any) -> Callable[[], None]:
        return lambda: vars(self).update(values)

    def runs(self) -> None:
        self.child = replace(self.child, state="RUNNING")

    def registers(self) -> None:
        self.alive, self.sessions[NODE], self.orphaned = True, "after", True


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


def test_it_is_over_when_the_node_serves_again_what_it_owns(fleet: Fleet) -> None:
    fleet.steps = [fleet.restarted, fleet.runs, fleet.registers, fleet.set(orphaned=False)]
    assert fleet.restart() == Outcome()
    assert fleet.steps == [], "neither the agent's word, nor the process, nor its registration was enough"


def test_the_process_that_is_still_there_is_not_the_next_one(fleet: Fleet) -> None:
    """The old process, which runs and answers until its agent stops it, is not taken for the new one."""
    with pytest.raises(Unavailable, match="its agent has not restarted it") as caught:
        fleet.restart()
    assert f"after {PATIENCE_S:g} s" in str(caught.value)
    assert "stateflow logs gw-0" in caught.value.remedy

    def answers_still() -> None:
        fleet.restarted()
        fleet.runs()
        fleet.alive = True

    fleet.spawned = fleet.roster.spawned[NODE] = fleet.child.spawned
    fleet.steps = [answers_still]
    with pytest.raises(Unavailable, match="gw-0 has not registered"):
        fleet.restart()


def test_a_node_that_was_not_well_is_waited_for_before_it_is_touched(fleet: Fleet) -> None:
    fleet.orphaned = True
    with pytest.raises(Unavailable, match="has no serving owner"):
        fleet.restart()
    assert fleet.spawned.generation == 1, "nothing was commanded"


def test_a_node_that_dies_at_each_start_fails_with_its_own_error(fleet: Fleet) -> None:
    def dies() -> None:
        fault = DataDirLocked("-", remedy="-")
        fleet.child = Child(fleet.spawned, "WAITS", deaths=DEATHS_MAX, fault=fault)

    fleet.steps = [dies]
    with pytest.raises(DataDirLocked):
        fleet.restart()


def test_deaths_before_it_ran_well_are_over(fleet: Fleet) -> None:
    """A rolling restart failed at a node that had died three times days before."""

    def runs_after_deaths() -> None:
        fleet.child = Child(fleet.spawned, "RUNNING", deaths=DEATHS_MAX, fault=DataDirLocked("-", remedy="-"))

    fleet.steps = [fleet.restarted, runs_after_deaths, fleet.registers, fleet.set(orphaned=False)]
    assert fleet.restart() == Outcome()


def test_another_command_takes_its_place(fleet: Fleet) -> None:
    def stopped() -> None:
        fleet.roster.spawned[NODE] = replace(fleet.spawned, running=False, generation=3)

    fleet.steps = [stopped]
    with pytest.raises(MoveConflict, match="another command"):
        fleet.restart()


def test_it_may_be_called_off_before_it_begins(fleet: Fleet) -> None:
    async def called_off() -> bool:
        return False

    assert asyncio.run(fleet.restarting.carry("s", NODE, called_off)) is None
