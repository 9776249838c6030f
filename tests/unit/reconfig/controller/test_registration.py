"""Heartbeats and registrations of replicas: who may copy their partitions, and who has a name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import registration, steps
from reconfig.controller.controller import Controller
from reconfig.controller.folds import Home
from reconfig.controller.members import Members, Names
from reconfig.controller.registration import Arrival, Beat, Incoming, Piece, Registration
from reconfig.decisions.plan import PlannedMove, PlannedStandby
from stateflow.clock import ManualClock
from stateflow.errors import HoldLost, NameTaken
from stateflow.ledger import Ledger, Record
from stateflow.partition.control import NamedFollower, PartitionView
from stateflow.partition.lifecycle import State
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo, StrategyName
from tests.writing import Written, deploy, write

SPEC = OperatorSpec("Op", "m:Op", 4, ("k",), b"", "[]")
ERROR = {"code": "move_aborted", "what": "w", "remedy": "r", "where": {}}
P0, P1 = PartitionId("Op", 0), PartitionId("Op", 1)
MOVE = PlannedMove("r", P0, "a", "b", 1, 2, StrategyName.WARM_UP)
STANDBY = PlannedStandby("s", P1, "a", "c", 1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Written]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        made = Written(ledger)
        deploy(made, SPEC, dict.fromkeys(range(4), "a"))
        write(made, steps.plan_moves, [MOVE])
        write(made, steps.plan_moves, [STANDBY])
        yield made


def told(cluster: Written, replica: str, *copies: tuple[PartitionId, str]) -> list[NamedFollower]:
    """Returns the answer to a replica that asks who may have these copies."""
    nothing = lambda *_: None  # noqa: E731 - a stand-in for several methods
    members = SimpleNamespace(beat=lambda *_: True, says=nothing, runs=nothing)
    context: Any = SimpleNamespace(
        cluster=cluster, members=members, names=None, ledger_id="l", settings=ControllerSettings()
    )
    claims: Any = SimpleNamespace(heard=lambda _: False)
    registration = Registration(context, claims, SimpleNamespace())  # type: ignore[arg-type]
    outgoing = [Incoming(*copy) for copy in copies]
    beat = Beat(ReplicaInfo(replica, "cloud", "127.0.0.1:1"), Home(), "i", outgoing=outgoing)
    return list(registration.heard(beat).followers)


def test_the_targets_of_open_moves_and_standbys_are_named(cluster: Written) -> None:
    assert told(cluster, "a", (P0, MOVE.move_id), (P1, STANDBY.move_id)) == [
        NamedFollower(P0, MOVE.move_id, "b"),
        NamedFollower(P1, STANDBY.move_id, "c", standby=True),
    ]
    assert told(cluster, "a") == []


def test_nobody_is_named_for_what_the_controller_did_not_begin(cluster: Written) -> None:
    for copy in ((P0, "made-up"), (P0, STANDBY.move_id), (P1, MOVE.move_id)):
        assert told(cluster, "a", copy) == [NamedFollower(*copy)]
    other = P0, MOVE.move_id
    assert told(cluster, "b", other) == [NamedFollower(*other)], "it is copied from another replica"
    write(cluster, steps.move_aborted, MOVE, ERROR, {})
    assert told(cluster, "a", other) == [NamedFollower(*other)], "it is over"


FORMER, NEXT = Home("d1", "here"), Home("d2", "there")
A = ReplicaInfo("a", "cloud", "a:1")


class Naming:
    """A controller whose replica ``a`` has lapsed: its former process registers again, and another directory asks."""

    def __init__(self, cluster: Written) -> None:
        write(cluster, steps.register, A, FORMER)
        clock = ManualClock()
        members = Members(cluster.roster.replicas, ControllerSettings(lease_s=10.0), clock)
        names = Names(cluster, members, ControllerSettings(lease_s=10.0), clock)
        clock.advance(20.0)
        self.cluster, self.members, self.names = cluster, members, names
        context: Any = SimpleNamespace(
            cluster=cluster,
            members=members,
            names=names,
            record=self._record,
            check_leads=lambda: None,
            planning=asyncio.Lock(),
        )
        takeovers: Any = SimpleNamespace(registered=lambda *_: [])
        claims: Any = SimpleNamespace(registered=lambda _: None)
        self.registration = Registration(context, claims, takeovers)
        with pytest.raises(NameTaken):
            names.check(A, NEXT)
        members.issue("a", "t", cluster.assigned("a"))

    async def _record(self, step: Any, *arguments: Any) -> Any:
        for _ in range(3):
            await asyncio.sleep(0)
        return write(self.cluster, step, *arguments)

    async def registers(self) -> Any:
        return await self.registration.register(Arrival(A, FORMER, "", "i", "t", ()))


@pytest.mark.parametrize("ahead", range(6))
@pytest.mark.parametrize("first", ["register", "replace"])
def test_a_name_is_not_given_away_while_its_former_directory_registers(
    cluster: Written, first: str, ahead: int
) -> None:
    """Either the former directory is refused, or the command is."""

    async def both() -> None:
        naming = Naming(cluster)
        work: list[Callable[[], Any]] = [naming.registers, lambda: naming.registration.replace("a", "d2")]
        tasks = list[asyncio.Future[Any]]()
        for each in work if first == "register" else reversed(work):
            tasks.append(asyncio.ensure_future(each()))
            for _ in range(ahead):
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in results if isinstance(each, Exception)] == [NameTaken]
        assert naming.members.may_serve("a") is (cluster.roster.homes["a"].directory == "d1")

    asyncio.run(both())


@pytest.mark.parametrize("fails_at", range(1, 6))
def test_an_adoption_that_ends_half_way_is_completed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """An adoption is recorded whole or not at all.

    A controller that ended between the records of two operators left the first one deployed: the adoption was refused
    from then on, and so were the owners.
    """
    monkeypatch.setattr(registration, "check_signed", lambda _: None)
    specs = {"a": SPEC, "b": OperatorSpec("Op2", "m:Op2", 4, ("k",), b"", "[]")}
    appended: list[int] = []
    append = Ledger.append

    def appends(*arguments: Any) -> list[Record]:
        appended.append(1)
        if len(appended) == fails_at:
            raise HoldLost("another controller leads", remedy="ask it")
        return append(*arguments)

    async def adopts(ledger: Ledger) -> Controller:
        controller = Controller(ledger, clock=ManualClock())
        for name, spec in specs.items():
            views = [PartitionView(PartitionId(spec.name, each), State.OWNED, 3, 0) for each in range(4)]
            info = ReplicaInfo(name, "s", f"{name}:1")
            controller.registration._claims.note(Piece(info, Home(name, "p"), "lost", (spec,), views, True, True))
        with contextlib.suppress(HoldLost):  # the error of an append that fails, see above
            await controller.adopter.adopt(dry_run=False, partial=False)
        await controller.close()
        return controller

    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        monkeypatch.setattr(Ledger, "append", appends)
        cluster = asyncio.run(adopts(ledger)).cluster
        if not cluster.adopted:
            cluster = asyncio.run(adopts(ledger)).cluster
        assert (set(cluster.deployed), cluster.adopted) == ({"Op", "Op2"}, {"lost"})
        assert set(cluster.roster.replicas) == {"a", "b"}
