"""Agents as their controller sees them: who owns a name, and which commands are valid. No RPC is made."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from reconfig.controller.agents import Agents
from reconfig.controller.controller import Controller
from reconfig.controller.folds import Home
from reconfig.controller.steps import (
    finish_deployment,
    maintain,
    move_aborted,
    plan_deployment,
    plan_moves,
    register,
    want_standbys,
)
from reconfig.decisions.plan import PlannedMove, PlannedStandby
from reconfig.decisions.sweeps import Maintenance
from stateflow.clock import ManualClock
from stateflow.errors import (
    ForeignLedger,
    InvalidArgument,
    MoveAborted,
    MoveConflict,
    NameTaken,
    NoRoom,
    PartitionsLive,
    Unavailable,
    UnknownSite,
)
from stateflow.fleet import AgentInfo, Beat, Child, Directory, Request, Spawned
from stateflow.ledger import Ledger
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import message_of, value_of
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo, StrategyName

GIB = 1 << 30
INFO = AgentInfo("gw", "edge", "gw:1", {"disk": "ssd"}, 4, 8 * GIB, 100 * GIB)
BEAT = Beat(INFO, Directory("d1", "here"), "i1", 50 * GIB)
SPEC = OperatorSpec("Op", "mod:Op", 2, ("a",), b"\x00", "{}")
LAPSED_S = 12.0


def scenario(tmp_path: Path, steps: Callable[[Controller, ManualClock], Awaitable[None]]) -> None:
    async def run() -> None:
        clock = ManualClock()
        controller = Controller(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"), clock=clock)
        await steps(controller, clock)
        await controller.close()
        controller.context.ledger.close()

    asyncio.run(run())


def test_all_that_is_known_of_an_agent_is_told(tmp_path: Path) -> None:
    async def steps(controller: Controller, clock: ManualClock) -> None:
        await controller.agents.heard(BEAT)
        await controller.agents.spawn(Request("gw"))
        clock.advance(2.0)
        [told] = message_of(cpb.AgentList, agents=controller.agents.states()).agents
        assert value_of(AgentInfo, told.agent) == INFO
        assert (told.alive, told.last_heartbeat_s, told.disk_free_bytes) == (True, 2.0, 50 * GIB)
        assert [each.agent for each in told.wanted] == ["gw"]

    scenario(tmp_path, steps)


def test_a_name_is_its_first_directorys_for_as_long_as_that_may_run_or_has_replicas(tmp_path: Path) -> None:
    async def steps(controller: Controller, clock: ManualClock) -> None:
        agents = controller.agents
        await agents.heard(BEAT)
        others = [replace(BEAT, directory=Directory("d2", "there")), replace(BEAT, directory=Directory("d1", "copy"))]
        others = [replace(each, incarnation="i2") for each in others]
        for other, what in zip(others, ("another data directory", "a copy of this data directory"), strict=True):
            with pytest.raises(NameTaken, match=f"an agent of this name may still be running with {what}"):
                await agents.heard(other)
        await agents.heard(replace(BEAT, incarnation="i3"))  # the same agent, restarted
        await agents.spawn(Request("gw"))
        clock.advance(LAPSED_S)
        with pytest.raises(NameTaken, match="which holds its replicas"):
            await agents.heard(others[0])
        await agents.heard(others[1])  # the agent moved to another machine
        clock.advance(LAPSED_S)
        await agents.forget("gw")
        assert (await agents.heard(others[0])).wanted == []
        assert controller.cluster.roster.agent_homes["gw"] == Home("d2", "there")

    scenario(tmp_path, steps)


def test_what_is_commanded_is_the_answer_to_beats_of_this_controller_and_the_next(tmp_path: Path) -> None:
    async def first(controller: Controller, _: ManualClock) -> None:
        agents = controller.agents
        assert (await agents.heard(BEAT)).wanted == []
        wanted = await agents.spawn(Request("edge", 2, weight=3, labels={"disk": "ssd"}))
        assert [(each.replica, each.weight, each.generation) for each in wanted] == [("gw-0", 3, 1), ("gw-1", 3, 1)]
        stopped = await agents.stop("gw-0", force=False)
        assert (stopped.running, stopped.generation) == (False, 2)
        assert await agents.stop("gw-0", force=False) == stopped, "it is commanded already"
        assert [each.replica for each in await agents.spawn(Request("gw"))] == ["gw-2"], "no name is given twice"
        orders = await agents.heard(BEAT)
        assert orders.wanted == [stopped, *sorted(orders.wanted, key=lambda each: each.replica)[1:]]

    async def second(controller: Controller, _: ManualClock) -> None:
        orders = await controller.agents.heard(BEAT)
        assert [(each.replica, each.running) for each in orders.wanted] == [
            ("gw-0", False),
            ("gw-1", True),
            ("gw-2", True),
        ]
        for node in ("gw-0", "gw-1"):
            await controller.context.record(maintain, node, Maintenance(1))
        await controller.leaving.forget("gw-0")
        assert set(controller.cluster.roster.maintenance) == {"gw-1"}, "the next one of this name is another machine"
        orders = await controller.agents.heard(BEAT)
        assert [each.replica for each in orders.wanted] == ["gw-1", "gw-2"]
        assert [each.replica for each in await controller.agents.spawn(Request("gw"))] == ["gw-3"]

    scenario(tmp_path, first)
    scenario(tmp_path, second)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    async def steps(controller: Controller, clock: ManualClock) -> None:
        agents = controller.agents
        await agents.heard(BEAT)
        with pytest.raises(UnknownSite, match="use one of edge, gw"):
            await agents.spawn(Request("cloud"))
        with pytest.raises(UnknownSite, match="has the labels disk=hdd"):
            await agents.spawn(Request("edge", labels={"disk": "hdd"}))
        with pytest.raises(NoRoom, match="room for 4 of 5 replicas at edge, nothing was started"):
            await agents.spawn(Request("edge", 5))
        with pytest.raises(NoRoom, match="MiB of memory are left"):
            await agents.spawn(Request("gw", memory_bytes=1 << 50))
        assert (await agents.heard(BEAT)).wanted == []
        await agents.spawn(Request("edge", 4))
        await agents.stop("gw-3", force=False)
        await agents.spawn(Request("edge"))
        with pytest.raises(NoRoom, match="0 of 4 cores are left"):
            await agents.restart("gw-3")
        with pytest.raises(InvalidArgument, match="there is no replica 'gw-9'"):
            await agents.stop("gw-9", force=True)
        with pytest.raises(NameTaken, match="may still be running"):
            await agents.forget("gw")
        with pytest.raises(ForeignLedger):
            await agents.heard(replace(BEAT, directory=Directory("d1", "here", "another")))
        clock.advance(6.0)
        with pytest.raises(Unavailable, match="no agent at edge answers"):
            await agents.spawn(Request("edge"))
        with pytest.raises(Unavailable, match="agent gw does not answer"):
            await agents.spawn(Request("gw"))

    scenario(tmp_path, steps)


def test_a_replica_with_partitions_is_stopped_by_force_only_and_not_planned_with_from_then_on(tmp_path: Path) -> None:
    async def steps(controller: Controller, clock: ManualClock) -> None:
        agents, context = controller.agents, controller.context
        await agents.heard(BEAT)
        await agents.spawn(Request("edge"))
        for name in ("gw-0", "gw-0~1"):
            await context.record(register, ReplicaInfo(name, "edge", f"{name[0]}:1"), Home(name, "here"))
            context.members.issue(name, "t", {})
            context.members.registered(name, "i", "t")
        *_, record = await context.record(plan_deployment, SPEC, dict.fromkeys(range(2), "gw-0~1"))
        await context.record(finish_deployment, record)
        assert set(context.alive()) == {"gw-0", "gw-0~1"}
        with pytest.raises(PartitionsLive, match="2 partitions"):
            await agents.stop("gw-0", force=False)
        await agents.stop("gw-0", force=True)
        assert context.alive() == {}
        clock.advance(LAPSED_S)
        with pytest.raises(PartitionsLive):
            await agents.forget("gw")

    scenario(tmp_path, steps)


def test_a_replica_is_stopped_although_it_has_standbys_but_not_during_a_move(tmp_path: Path) -> None:
    """A standby does not end by itself: a replica that had one used to be told to wait until it has moved."""

    async def steps(controller: Controller, _: ManualClock) -> None:
        agents, context = controller.agents, controller.context
        await agents.heard(BEAT)
        await agents.spawn(Request("edge", 2))
        for name in ("gw-0", "gw-1"):
            await context.record(register, ReplicaInfo(name, "edge", f"{name}:1"), Home(name, "here"))
        *_, record = await context.record(plan_deployment, SPEC, dict.fromkeys(range(2), "gw-1"))
        await context.record(finish_deployment, record)
        move = PlannedMove("r", PartitionId("Op", 1), "gw-1", "gw-0", 1, 2, StrategyName.WARM_UP)
        await context.record(plan_moves, [PlannedStandby("s", PartitionId("Op", 0), "gw-1", "gw-0", 1), move])
        with pytest.raises(MoveConflict):
            await agents.stop("gw-0", force=False)
        await context.record(move_aborted, move, MoveAborted("it ends", remedy="-").to_wire(), {})
        assert not (await agents.stop("gw-0", force=False)).running

    scenario(tmp_path, steps)


def test_the_last_replica_that_may_hold_standbys_is_stopped_by_force_only(tmp_path: Path) -> None:
    """`stop` ended the last standby without a word, although a maintenance of the replica was refused."""

    async def steps(controller: Controller, _: ManualClock) -> None:
        agents, context = controller.agents, controller.context
        await agents.heard(BEAT)
        await agents.spawn(Request("edge", 3))
        for name in ("gw-0", "gw-1"):
            await context.record(register, ReplicaInfo(name, "edge", f"{name}:1"), Home(name, "here"))
            context.members.issue(name, "t", {})
            context.members.registered(name, "i", "t")
        *_, record = await context.record(plan_deployment, SPEC, dict.fromkeys(range(2), "gw-1"))
        await context.record(finish_deployment, record)
        assert not (await agents.stop("gw-2", force=False)).running, "it has not registered"
        await context.record(want_standbys, "Op", 1)
        with pytest.raises(Unavailable, match=r"Op would have no standby.*--force"):
            await agents.stop("gw-0", force=False)
        assert not (await agents.stop("gw-0", force=True)).running

    scenario(tmp_path, steps)


def test_what_a_lost_ledger_wanted_goes_on_where_that_was_adopted(tmp_path: Path) -> None:
    async def steps(controller: Controller, _: ManualClock) -> None:
        agents: Agents = controller.agents
        had = Spawned("gw-7", "gw", generation=3)
        beat = replace(BEAT, directory=Directory("d1", "here", "lost"), children=[Child(had, "RUNNING")])
        with pytest.raises(ForeignLedger):
            await agents.heard(beat)
        controller.cluster.adopted.add("lost")
        orders = await agents.heard(beat)
        assert (orders.adopted, orders.wanted) == ("lost", [had])

    scenario(tmp_path, steps)
