"""Standbys: wanted copies are compared with existing ones, and missing ones are begun."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.folds import Home
from reconfig.controller.standbys import Standbys
from stateflow.clock import ManualClock
from stateflow.errors import MoveAborted, NoRoom, Unavailable
from stateflow.fleet import AgentInfo, Spawned
from stateflow.ledger import Ledger
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.writing import Written, deploy, write


class Wanting:
    """Two operators of three partitions each, owned by ``a``. Each operator wants one standby."""

    def __init__(self, ledger: Ledger) -> None:
        self.cluster = Written(ledger)
        for name in "ab":
            write(self.cluster, steps.register, ReplicaInfo(name, "cloud", "127.0.0.1:1"), Home())
        for name in ("A", "B"):
            spec = OperatorSpec(name, f"m:{name}", 3, ("k",), b"", "[]")
            deploy(self.cluster, spec, dict.fromkeys(range(3), "a"))
            write(self.cluster, steps.want_standbys, name, 1)
        self.records: list[Any] = []
        self.runners: list[Any] = []
        self.followed: list[PartitionId] = []
        self.fails = self.cancelled = 0
        self.full: set[str] = set()
        self.away: set[str] = set()  # replicas whose standbys follow, and then lose their connection
        self.clock = ManualClock(1)
        self.waits: asyncio.Event | None = None
        self.tasks: list[asyncio.Task[None]] = []
        ids = iter(range(10_000))
        context: Any = SimpleNamespace(
            cluster=self.cluster,
            settings=ControllerSettings(takeover_retry_s=0.001),
            planning=asyncio.Lock(),
            clock=self.clock,
            over=asyncio.get_running_loop().create_future(),
            new_id=lambda: f"i{next(ids)}",
            alive=lambda: self.cluster.roster.replicas,
            fit=lambda: self.cluster.roster.replicas,
            record=self._record,
            spawn=lambda work: self.tasks.append(asyncio.ensure_future(work)),
        )
        self.standbys = Standbys(context, SimpleNamespace(runner=self._runner))  # type: ignore[arg-type]

    def _cancelled(self) -> None:
        self.cancelled += 1

    async def _record(self, work: Any, *arguments: Any) -> Any:
        self.records.append(work)
        return write(self.cluster, work, *arguments)

    def _runner(self, _: Any, planned: Any, machine: Any) -> Any:
        async def run() -> None:
            if self.fails:
                self.fails -= 1
                raise ZeroDivisionError("a field that nobody thought of")
            if self.waits is not None:
                await self.waits.wait()
            machine.error = MoveAborted("it ends", remedy="-")
            if planned.target in self.full:
                machine.error = NoRoom("no room", remedy="-")
            if planned.target in self.away:
                machine.rounds, machine.error = 1, Unavailable("no answer", remedy="-")
            write(self.cluster, steps.move_aborted, planned, machine.error.to_wire(), {})

        former: list[Any] = []
        made = SimpleNamespace(
            planned=planned,
            machine=machine,
            run=run,
            carry_over=former.append,
            former=former,
            cancel=self._cancelled,
            follow_source=lambda: self.followed.append(planned.partition),
        )
        self.runners.append(made)
        return made


def scenario(tmp_path: Path, acts: Any) -> None:
    async def run() -> None:
        with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            await acts(Wanting(ledger))

    asyncio.run(run())


def test_all_that_lack_are_recorded_at_once(tmp_path: Path) -> None:
    """Missing copies are recorded in one transaction.

    Takeovers wait for the lock: with a transaction for each copy they waited for thousands.
    """

    async def acts(wanting: Wanting) -> None:
        await wanting.standbys.reconcile()
        assert wanting.records == [steps.plan_moves]
        begun = {(r.planned.partition.operator, r.planned.partition.partition) for r in wanting.runners}
        assert begun == {(name, number) for name in "AB" for number in range(3)}
        await asyncio.gather(*wanting.tasks)

    scenario(tmp_path, acts)


def test_one_that_breaks_off_begins_again_with_what_it_was_told(tmp_path: Path) -> None:
    """A standby that breaks off is begun again.

    It used to stay open in the ledger, with no runner to carry it out.
    """

    async def acts(wanting: Wanting) -> None:
        wanting.fails = 1
        await wanting.standbys.reconcile()
        await asyncio.gather(*wanting.tasks)
        assert not wanting.cluster.open_moves
        assert wanting.runners[-1].former == [wanting.runners[0]]
        assert not wanting.standbys.views()

    scenario(tmp_path, acts)


def test_a_copy_of_an_operator_that_is_undeployed_holds_up_no_others(tmp_path: Path) -> None:
    """A copy of an undeployed operator holds up no other.

    While it was being ended, no standby of any operator used to begin.
    """

    async def acts(wanting: Wanting) -> None:
        wanting.waits = asyncio.Event()
        del wanting.cluster.standbys["B"]
        await wanting.standbys.reconcile()
        write(wanting.cluster, steps.want_standbys, "B", 1)
        del wanting.cluster.deployed["A"]
        await wanting.standbys.reconcile()
        assert {r.planned.partition.operator for r in wanting.runners} == {"A", "B"}
        assert wanting.cancelled == 3
        wanting.followed.clear()
        await wanting.standbys.reconcile()
        assert wanting.followed == [PartitionId("B", number) for number in range(3)], "at its present address"
        wanting.waits.set()
        await asyncio.gather(*wanting.tasks)

    scenario(tmp_path, acts)


def test_a_standby_at_a_replica_that_stops_ends(tmp_path: Path) -> None:
    async def acts(wanting: Wanting) -> None:
        wanting.waits = asyncio.Event()
        await wanting.standbys.reconcile()
        write(wanting.cluster, steps.register_agent, AgentInfo("gw", "cloud", "127.0.0.1:1"), Home())
        write(wanting.cluster, steps.spawn, [Spawned("b", "gw", running=True)])
        await wanting.standbys.reconcile()
        assert wanting.cancelled == 0
        write(wanting.cluster, steps.spawn, [Spawned("b", "gw", running=False)])
        await wanting.standbys.reconcile()
        assert wanting.cancelled == len(wanting.runners) == 6
        wanting.waits.set()
        await asyncio.gather(*wanting.tasks)

    scenario(tmp_path, acts)


def test_a_standby_that_failed_is_tried_elsewhere_and_ever_later(tmp_path: Path) -> None:
    """A standby that failed is tried at another replica, and less often if it fails everywhere.

    One for which a replica had no room was tried there every two seconds for ever, although others had room. Each try
    stayed in the ledger, and its cancellation in the memory of both replicas.
    """

    async def acts(wanting: Wanting) -> None:
        write(wanting.cluster, steps.register, ReplicaInfo("c", "cloud", "127.0.0.1:1"), Home())
        write(wanting.cluster, steps.want_standbys, "B", 0)
        wanting.full = {"b", "c"}
        began: list[float] = []
        for _ in range(200):
            before = len(wanting.runners)
            await wanting.standbys.reconcile()
            await asyncio.gather(*wanting.tasks)
            if len(wanting.runners) > before:
                began.append(wanting.clock.monotonic())
            wanting.clock.advance(1.0)
        apart = [later - earlier for earlier, later in itertools.pairwise(began)]
        assert apart == pytest.approx([2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0], abs=1.0), "it looks every second"
        targets = [r.planned.target for r in wanting.runners if r.planned.partition == PartitionId("A", 0)]
        assert sorted(targets[:2]) == ["b", "c"]
        wanting.full = set()
        wanting.clock.advance(64.0)
        await wanting.standbys.reconcile()
        await asyncio.gather(*wanting.tasks)
        assert not wanting.cluster.open_moves

    scenario(tmp_path, acts)


def test_a_standby_that_lost_its_connection_is_tried_where_it_was(tmp_path: Path) -> None:
    """A standby that followed and lost its connection begins again at the same replica.

    It began at another one, with a copy of the whole state, whenever the controller could not reach a replica for a
    moment.
    """

    async def acts(wanting: Wanting) -> None:
        write(wanting.cluster, steps.register, ReplicaInfo("c", "cloud", "127.0.0.1:1"), Home())
        write(wanting.cluster, steps.want_standbys, "B", 0)
        await wanting.standbys.reconcile()
        first = {runner.planned.partition: runner.planned.target for runner in wanting.runners}
        assert set(first.values()) == {"b", "c"}
        for wanting.away in ({"b", "c"}, set[str]()):
            await asyncio.gather(*wanting.tasks)
            wanting.runners.clear()
            wanting.clock.advance(3.0)
            await wanting.standbys.reconcile()
            assert {runner.planned.partition: runner.planned.target for runner in wanting.runners} == first
        await asyncio.gather(*wanting.tasks)

    scenario(tmp_path, acts)


def test_nothing_is_remembered_of_an_undeployed_operator(tmp_path: Path) -> None:
    async def acts(wanting: Wanting) -> None:
        wanting.full = {"b"}
        await wanting.standbys.reconcile()
        await asyncio.gather(*wanting.tasks)
        kept = (wanting.standbys._near, wanting.standbys._tried, wanting.standbys._not_before)
        assert [{partition.operator for partition in each} for each in kept] == [{"A", "B"}] * 3
        wanting.standbys.undeployed("A")
        assert [{partition.operator for partition in each} for each in kept] == [{"B"}] * 3

    scenario(tmp_path, acts)
