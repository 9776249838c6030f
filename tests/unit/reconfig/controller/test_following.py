"""A controller that does not lead: its knowledge of the cluster, read on from the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.folds import Home
from reconfig.controller.following import Following
from reconfig.decisions.plan import PlannedMove, PlannedStandby
from stateflow.clock import ManualClock
from stateflow.errors import MoveUnknown, OperatorNotDeployed, StateflowError, Unavailable
from stateflow.ledger import App, Ledger, RecordState
from stateflow.reports import FollowerReport
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.writing import Written, deploy, write

SETTINGS = ControllerSettings(follow_interval_s=0.5)
SPEC = OperatorSpec("Op", "m:Op", 2, ("k",), b"schema", "[]", source="class Op")
A, B = ReplicaInfo("a", "cloud", "a:1", 1), ReplicaInfo("b", "edge", "b:1", 1)
MOVE = PlannedMove("r1", PartitionId("Op", 0), "a", "b", 1, 2, "warm-up")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        yield ledger


class Follower:
    """A controller that does not lead, and ``writer``, which writes the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.clock, self.leads = ledger, ManualClock(10**9), False
        self.leader = "a:7070"
        self.following = Following(ledger, SETTINGS, self.clock, lambda: self.leads, lambda: ("b:7070", self.leader))
        self.writer = Written.read(ledger)

    def deployed(self) -> None:
        for info in (A, B):
            write(self.writer, steps.register, info, Home(info.name))
        deploy(self.writer, SPEC, {0: "a", 1: "b"})


def test_it_reads_on_and_says_how_old_it_is(ledger: Ledger) -> None:
    async def scenario() -> None:
        follower = Follower(ledger)
        with pytest.raises(OperatorNotDeployed):
            (await follower.following.overview(0)).deployment("Op")
        follower.deployed()
        # the caller was just told of the deployment
        deployment = (await follower.following.overview(0)).deployment("Op")
        assert [owner.name for owner in deployment.owners] == ["a", "b"]
        assert deployment.spec == replace(follower.writer.operator("Op").spec, source="")
        assert deployment.follower == FollowerReport("b:7070", "a:7070", 0.0)
        write(follower.writer, steps.plan_moves, [MOVE])
        follower.clock.advance(0.75)
        told = await follower.following.overview(0)
        assert [each.id for each in told.history()] == ["r1"]
        assert told.follower.age_s == 0.0
        follower.following.close()

    asyncio.run(scenario())


def test_what_only_the_leader_knows_is_said_to_be_unknown(ledger: Ledger) -> None:
    async def scenario() -> None:
        follower = Follower(ledger)
        follower.deployed()
        write(follower.writer, steps.plan_moves, [MOVE, PlannedStandby("s1", PartitionId("Op", 1), "b", "a", 1)])
        write(follower.writer, steps.pause, "r1", paused=True)
        told = await follower.following.overview(0)
        status = told.status()
        assert [(each.name, each.alive, each.partitions) for each in status.replicas] == [
            ("a", None, 1),
            ("b", None, 1),
        ]
        assert [(each.replica, each.phase) for each in status.standbys] == [("a", "UNKNOWN")]
        (running,) = status.reconfigurations
        assert (running.id, running.state, running.moves[0].state, running.moves[0].note) == (
            "r1",
            "PAUSED",
            "WAITING",
            "",
        )
        write(follower.writer, steps.begin_moves, [MOVE])
        write(follower.writer, steps.grant, MOVE)
        (move,) = (await follower.following.overview(follower.writer.newest)).reconfiguration("r1").moves
        assert (move.state, move.note) == ("UNKNOWN", "its target was granted the partition")
        write(follower.writer, steps.move_owned, MOVE, {"state": "COMPLETED", "pause_ms": 2.5})
        told = await follower.following.overview(follower.writer.newest)
        report = told.reconfiguration("r1")
        assert (report.state, report.moves[0].state, report.moves[0].epoch) == ("COMPLETED", "COMPLETED", 2)
        assert told.status().reconfigurations == ()
        assert told.deployment("Op").owners[0].name == "b"
        with pytest.raises(MoveUnknown):
            told.reconfiguration("r2")
        follower.following.close()

    asyncio.run(scenario())


def test_a_ledger_that_was_put_back_to_an_earlier_day_is_read_anew(ledger: Ledger, tmp_path: Path) -> None:
    async def scenario() -> None:
        follower = Follower(ledger)
        follower.deployed()
        assert len((await follower.following.overview(0)).status().deployments) == 1
        with Ledger(f"sqlite:///{tmp_path / 'earlier.db'}") as earlier:
            write(Written.read(earlier), steps.register, A, Home("a"))
            follower.following._ledger = earlier
            follower.clock.advance(2.0)
            told = await follower.following.overview(0)
            assert (told.status().deployments, [each.name for each in told.status().replicas]) == ((), ["a"])
            with pytest.raises(Unavailable, match="lacks records that the caller knows"):
                await follower.following.overview(follower.writer.newest)
        follower.following.close()

    asyncio.run(scenario())


def test_a_ledger_that_is_away_leaves_what_was_known_and_its_age(ledger: Ledger) -> None:
    async def scenario() -> None:
        follower = Follower(ledger)
        follower.deployed()
        await follower.following.overview(0)

        def away(*_: Any, **__: Any) -> Any:
            raise Unavailable("the ledger is away", remedy="see to its database")

        follower.ledger.records = away  # type: ignore[method-assign]
        follower.clock.advance(30.0)
        told = await follower.following.overview(0)
        assert (told.follower.age_s, told.deployment("Op").version) == (30.0, 1)
        with pytest.raises(Unavailable, match="the ledger is away"):
            await follower.following.overview(follower.writer.newest + 1)
        follower.following.close()

    asyncio.run(scenario())


def test_records_that_it_does_not_understand_are_no_state(ledger: Ledger) -> None:
    """Records of a newer version are refused: half of its state would be answered as if it were all."""

    async def scenario() -> None:
        follower = Follower(ledger)
        follower.deployed()
        await follower.following.overview(0)
        ledger.put("riddle/1", App("reconfig.controller", "9"), RecordState.NEW, None, {})
        follower.clock.advance(2.0)
        with pytest.raises(StateflowError, match="cannot be interpreted: KeyError"):
            await follower.following.overview(0)
        follower.following.close()

    asyncio.run(scenario())


def test_a_watch_tells_of_changes_and_ends_where_somebody_knows_more(ledger: Ledger) -> None:
    async def scenario() -> None:
        follower = Follower(ledger)
        follower.deployed()
        write(follower.writer, steps.plan_moves, [MOVE])
        following = follower.following
        running = asyncio.create_task(following.run())
        watched = following.watch("r1", follower.writer.newest)
        assert (await anext(watched)).state == "RUNNING"
        write(follower.writer, steps.grant, MOVE)
        assert (await anext(watched)).moves[0].note
        write(follower.writer, steps.move_owned, MOVE, {"state": "COMPLETED"})
        assert [each.state async for each in watched] == ["COMPLETED"]
        write(
            follower.writer,
            steps.plan_moves,
            [replace(MOVE, reconfiguration="r2", epoch=2, source="b", target="a", granted_epoch=3)],
        )
        watched = following.watch("r2", follower.writer.newest)
        assert (await anext(watched)).state == "RUNNING"
        follower.leader = "c:7070"
        assert [each.state async for each in watched] == []
        running.cancel()
        following.close()

    asyncio.run(scenario())
