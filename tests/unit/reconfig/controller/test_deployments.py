"""Deployments: one that is reported as failed is not deployed, now or later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from reconfig.controller import steps
from reconfig.controller.controller import Controller
from reconfig.controller.folds import Home
from reconfig.decisions.sweeps import Maintenance
from stateflow.clock import ManualClock
from stateflow.code.loading import VARIABLE, check_signed, digest_of, signed
from stateflow.errors import (
    CodeRefused,
    HoldLost,
    InvalidArgument,
    OperatorFailed,
    OperatorNotImportable,
    ReleaseMismatch,
    Unavailable,
    UnknownSite,
)
from stateflow.ledger import Ledger, Record
from stateflow.operator.operator import describe
from stateflow.settings import ControllerSettings
from stateflow.types import MoveOptions, OperatorSpec, ReplicaInfo
from tests.unit.operators import Count
from tests.writing import Written, write

T = TypeVar("T")
SPEC = describe(Count, 4)
TEXT = replace(SPEC, target="<stdin>:Count", source="class Count: ...", source_digest=digest_of("class Count: ..."))


class Cluster:
    """A controller over two replicas, which records what it asks of them."""

    def __init__(self, ledger: Ledger) -> None:
        self._loop = asyncio.Runner()
        self.server = self._loop.run(_made(ledger))
        self.cluster = self.server.cluster
        self.asked: list[tuple[str, str]] = []
        self.dropped: set[tuple[str, int]] = set()
        self.learnt: list[OperatorSpec] = []
        #: by (replica, whether it creates partitions): the error with which it refuses
        self.refuses: dict[tuple[str, bool], Exception] = {}
        #: by (replica, partition): the error with which the trial of a version ends there
        self.fails: dict[tuple[str, int], Exception] = {}
        self.hangs: set[tuple[str, int]] = set()
        self.moves: dict[tuple[str, int], str] = {}
        self.hung = asyncio.Event()
        #: where versions have been tried, and the replicas whose trial was broken off
        self.tried: list[tuple[str, int]] = []
        self.left: set[str] = set()
        #: replicas that do not answer a command to drop, and those of them that had a lease when others created the
        #: operator
        self.untold: set[str] = set()
        self.may_serve: set[str] = set()
        self.silent: set[str] = set()
        for name in ("a", "b"):
            self._loop.run(self.server.context.record(steps.register, ReplicaInfo(name, "site", f"{name}:1"), Home()))
            self.server.members.issue(name, "ticket", {})
            self.server.members.registered(name, "incarnation", "ticket")
        self.server.context.replicas = self  # type: ignore[assignment]

    async def learn(self, name: str, spec: OperatorSpec) -> None:
        self._asked(name, "learn", creates=False)
        self.learnt.append(spec)

    async def check(self, name: str, spec: OperatorSpec, total: int) -> None:
        self._asked(name, "check", creates=False)

    async def try_out(self, name: str, spec: OperatorSpec, numbers: Collection[int]) -> AsyncGenerator[int]:
        self._asked(name, "try", creates=False)
        try:
            for number in sorted(numbers):
                if (target := self.moves.pop((name, number), "")) != "":
                    self.move(spec.name, number, target)
                if (name, number) in self.hangs:
                    self.hung.set()
                    await asyncio.Event().wait()
                if (error := self.fails.get((name, number))) is not None:
                    raise error
                if self.cluster.operator(spec.name).assignment.owners[number] == name:
                    self.tried.append((name, number))
                    yield number
        finally:
            self.left.add(name)

    def move(self, operator: str, number: int, to: str) -> None:
        deployed = self.cluster.deployed[operator]
        owners = [to if each == number else name for each, name in enumerate(deployed.assignment.owners)]
        assignment = replace(deployed.assignment, owners=tuple(owners))
        self.cluster.deployed[operator] = replace(deployed, assignment=assignment)

    async def create(self, name: str, *_: object) -> None:
        self._asked(name, "create", creates=True)
        self.may_serve |= {each for each in self.untold if self.server.members.may_serve(each)}

    def _asked(self, name: str, what: str, creates: bool) -> None:
        self.asked.append((name, what))
        error = self.refuses.get((name, creates))
        if error is not None:
            raise error

    async def drop(self, name: str, operator: str, epoch: int) -> None:
        self.dropped.add((name, epoch))
        if name in self.untold:
            raise Unavailable(f"no answer from {name}", remedy="see it")

    def deploy(self, spec: OperatorSpec = SPEC, sites: Collection[str] | None = None) -> None:
        self._loop.run(self._deploy(spec, sites))

    async def _deploy(self, spec: OperatorSpec, sites: Collection[str] | None) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            await self.server.deployments.deploy(spec, sites)
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            for name in {"a", "b"} - self.silent:
                self.server.members.beat(name, "incarnation")
            await asyncio.sleep(0.1)

    def silence(self, name: str) -> None:
        """Silences a replica until its lease is all that is known of it."""
        self.silent.add(name)
        self._loop.run(self._silence(name))

    async def _silence(self, name: str) -> None:
        beating = asyncio.create_task(self._beat())
        while self.server.members.alive(name):
            await asyncio.sleep(0.01)
        beating.cancel()

    def register(self, name: str, site: str) -> None:
        self._loop.run(self.server.context.record(steps.register, ReplicaInfo(name, site, f"{name}:1"), Home()))

    def run(self, asked: Coroutine[Any, Any, T]) -> T:
        """Runs ``asked`` while the other replicas are heard."""
        return self._loop.run(self._run(asked))

    async def _run(self, asked: Coroutine[Any, Any, T]) -> T:
        beating = asyncio.create_task(self._beat())
        try:
            await asyncio.sleep(0)
            return await asked
        finally:
            beating.cancel()

    def undeploy(self, operator: str) -> list[str]:
        return self._loop.run(self.server.leaving.undeploy(operator, delete_state=True))[1]

    async def close(self) -> None: ...

    def shut(self) -> None:
        self._loop.run(self.server.close())
        self._loop.close()
        self.server.context.ledger.close()

    def sent(self, *what: str) -> list[tuple[str, str]]:
        return [each for each in self.asked if each[1] in what]


async def _made(ledger: Ledger) -> Controller:
    return Controller(ledger, ControllerSettings(lease_s=1.0, heartbeat_interval_s=0.2))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))
    yield made
    made.shut()


def test_what_a_replica_refuses_when_it_is_asked_is_not_begun(cluster: Cluster) -> None:
    cluster.refuses["b", False] = OperatorNotImportable("ModuleNotFoundError", remedy="install it")
    with pytest.raises(OperatorNotImportable):
        cluster.deploy()
    assert not cluster.cluster.planned
    assert not cluster.cluster.deployed
    assert not cluster.sent("learn", "create"), "nothing is kept of it anywhere"


def test_what_fails_half_way_is_taken_back(cluster: Cluster) -> None:
    """A deployment that fails half-way is undone.

    The deployment used to stay planned, and the next controller deployed it.
    """
    cluster.refuses["b", True] = Unavailable("no answer from b", remedy="see it")
    with pytest.raises(Unavailable, match="no answer from b"):
        cluster.deploy()
    for state in (cluster.cluster, Written.read(cluster.server.context.ledger)):
        assert not state.planned
        assert not state.deployed
        assert state.undeployed == {"Count": 1}, "who does not answer deletes what it has when it registers"
    assert cluster.dropped == {("a", 1), ("b", 1)}
    cluster.refuses.clear()
    cluster.deploy(replace(SPEC, partitions=8))
    assert set(cluster.cluster.operator("Count").assignment.epochs) == {2}
    assert Written.read(cluster.server.context.ledger).operator("Count").spec.partitions == 8


def test_what_was_taken_back_is_nowhere_served_when_it_is_deployed_again(cluster: Cluster) -> None:
    """A deployment that is made again avoids replicas that were not told of the end of the first one.

    Such a replica may have created the operator late, and may serve it as long as its lease runs.
    """
    cluster.refuses["b", True] = Unavailable("no answer from b", remedy="see it")
    cluster.untold = {"b"}
    with pytest.raises(Unavailable, match="no answer from b"):
        cluster.deploy()
    assert cluster.server.members.may_serve("b")
    cluster.may_serve.clear()
    cluster.deploy()
    assert set(cluster.cluster.operator("Count").assignment.owners) == {"a"}
    assert not cluster.may_serve


def test_who_is_silent_when_an_operator_ends_has_to_register_again(cluster: Cluster) -> None:
    """A silent replica has to register again, though its lease still runs.

    Its next heartbeat used to renew the lease, and it served the former deployment beside the next one.
    """
    cluster.deploy()
    cluster.silence("b")
    assert cluster.undeploy("Count") == ["b"]
    assert cluster.server.members.beat("a", "incarnation")
    assert not cluster.server.members.beat("b", "incarnation"), "it is told when it registers"


def test_an_owner_that_is_silent_when_a_version_follows_has_to_register_again(cluster: Cluster) -> None:
    cluster.deploy()
    cluster.silence("b")
    cluster.deploy(TEXT)
    assert cluster.server.members.beat("a", "incarnation")
    assert not cluster.server.members.beat("b", "incarnation"), "it went on with the former version"


def test_a_version_that_a_replica_refuses_does_not_serve_anywhere(cluster: Cluster) -> None:
    cluster.deploy()
    cluster.asked.clear()
    cluster.refuses["b", False] = OperatorNotImportable("SyntaxError", remedy="correct it")
    with pytest.raises(OperatorNotImportable):
        cluster.deploy(TEXT)
    assert cluster.cluster.operator("Count").spec.target == SPEC.target
    assert not cluster.sent("learn", "create")


def test_a_new_version_is_told_to_all_who_serve(cluster: Cluster) -> None:
    cluster.deploy()
    cluster.asked.clear()
    cluster.deploy(TEXT)
    cluster.deploy(TEXT)  # repeated: no error, and no other version
    told = [name for name, _ in cluster.sent("learn", "create")]
    assert told == ["a", "b"]
    assert cluster.cluster.numbers["upgrade", "Count"] == 1


# -- the trial of a version ----------------------------------------------------------------------------------


def owner(cluster: Cluster, number: int) -> str:
    return cluster.cluster.operator("Count").assignment.owners[number]


FAILED = OperatorFailed("migrate_state() raised ValueError: no", remedy="mend it")


def test_a_version_that_fails_on_stored_state_does_not_serve_anywhere(cluster: Cluster) -> None:
    cluster.deploy()
    cluster.fails[owner(cluster, 3), 3] = FAILED
    with pytest.raises(OperatorFailed, match="raised ValueError: no"):
        cluster.deploy(TEXT)
    assert cluster.cluster.operator("Count").spec.target == SPEC.target
    assert cluster.left == {"a", "b"}, "the other one is not asked any more"
    assert not cluster.server.deployments.trials
    cluster.fails.clear()
    cluster.deploy(TEXT)
    assert cluster.cluster.operator("Count").spec.target == TEXT.target


def test_a_version_is_tried_once_on_every_partition_and_not_again_when_it_is_deployed(cluster: Cluster) -> None:
    cluster.deploy()
    assert not cluster.tried, "there is nothing yet that it could fail on"
    cluster.run(cluster.server.deployments.try_out(TEXT))
    assert sorted(number for _, number in cluster.tried) == [0, 1, 2, 3]
    cluster.deploy(TEXT)
    assert len(cluster.tried) == 4
    cluster.deploy(SPEC)
    assert len(cluster.tried) == 8, "another version was deployed meanwhile"


def test_a_partition_that_moves_meanwhile_is_tried_where_it_is_then(cluster: Cluster) -> None:
    cluster.deploy()
    source = owner(cluster, 0)
    (target,) = {"a", "b"} - {source}
    cluster.moves[source, 0] = target
    cluster.deploy(TEXT)
    assert (target, 0) in cluster.tried
    assert len(cluster.tried) == 4


@pytest.mark.parametrize("error", [Unavailable("no answer", remedy="see it"), ReleaseMismatch("old", remedy="upgrade")])
def test_who_cannot_try_a_version_does_not_keep_it_from_serving(cluster: Cluster, error: Exception) -> None:
    """A replica that cannot try a version does not keep it from serving.

    A version that mends the operator is wanted most where something is wrong.
    """
    cluster.deploy()
    cluster.fails.update(((name, number), error) for name in "a" for number in range(4))
    cluster.deploy(TEXT)
    assert {name for name, _ in cluster.tried} == {"b"}
    assert cluster.cluster.operator("Count").spec.target == TEXT.target


def test_a_trial_ends_with_its_caller_and_nothing_is_deployed(cluster: Cluster) -> None:
    cluster.deploy()
    cluster.hangs.add((owner(cluster, 0), 0))

    async def run() -> None:
        trying = asyncio.create_task(cluster.server.deployments.try_out(TEXT))
        await cluster.hung.wait()
        (told,) = cluster.server.status_reporter.status().deploying
        assert (told.name, told.partitions, told.created) == ("Count", 4, 0)
        assert told.tried == len(cluster.tried)
        trying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trying

    cluster.run(run())
    assert owner(cluster, 0) in cluster.left
    assert not cluster.server.deployments.trials
    assert cluster.cluster.operator("Count").spec.target == SPEC.target


# -- sites ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sites(cluster: Cluster) -> Cluster:
    """Registers ``a`` at site ``x`` and ``b`` at ``y``."""
    for name, site in (("a", "x"), ("b", "y")):
        cluster.register(name, site)
    return cluster


def test_an_operator_stays_confined_to_the_sites_it_was_deployed_to_last(sites: Cluster) -> None:
    sites.deploy(SPEC, ["x"])
    before = sites.cluster.operator("Count").assignment
    assert sites.server.status_reporter.status().status().operators[0].sites == ("x",)
    for others in (["y", "x"], ["y"], []):
        sites.deploy(SPEC)
        assert Written.read(sites.server.context.ledger).operator("Count").sites, "nothing was said of sites"
        sites.deploy(SPEC, others)
        assert Written.read(sites.server.context.ledger).operator("Count").sites == tuple(sorted(others))
    assert sites.cluster.operator("Count").assignment == before, "nothing moves by itself"
    with pytest.raises(UnknownSite):
        sites.deploy(SPEC, ["z"])
    assert sites.cluster.numbers["sites", ""] == 3


def test_what_is_confined_leaves_a_replica_for_its_sites_or_not_at_all(sites: Cluster) -> None:
    sites.deploy(SPEC, ["x"])
    with pytest.raises(
        Unavailable, match=r"no other replica at the sites of Count can receive partitions \(replica=a sites=x\)"
    ):
        sites.run(sites.server.reconfigurations.drain("a", MoveOptions()))
    assert sites.run(sites.server.reconfigurations.rebalance("Count", MoveOptions())) == []
    with pytest.raises(InvalidArgument, match="2 replicas, 1 can hold copies at x, the operator's allowed sites"):
        sites.run(sites.server.standbys.want("Count", 1))
    assert not sites.cluster.history
    assert not sites.cluster.standbys


# -- the key --------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "stateflow" / "code.key"


def test_a_user_signs_what_the_users_controller_takes(home: Path) -> None:
    with pytest.raises(CodeRefused, match="has no code key"):
        check_signed(TEXT)
    spec = signed(TEXT)
    check_signed(spec)
    assert signed(TEXT) == spec, "the same code is the same version"
    assert home.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.parent.iterdir()] == ["code.key"]
    for other in (replace(spec, source="import os"), replace(spec, source_mac=""), replace(spec, source_mac="0" * 64)):
        with pytest.raises(CodeRefused, match="not signed with"):
            check_signed(other)
    home.write_text("of somebody else")
    with pytest.raises(CodeRefused):
        check_signed(spec)


def test_a_key_of_an_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0123456789abcdef")
    check_signed(signed(TEXT))
    assert not home.exists()
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(Exception, match="is too short"):
        signed(TEXT)


def test_a_class_of_a_module_needs_no_key(home: Path) -> None:
    check_signed(signed(SPEC))
    assert not home.exists()


def test_a_key_that_others_could_read_or_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed(TEXT)
    home.chmod(0o644)
    signed(TEXT)
    assert home.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(Exception, match=r"belongs to another user.*set STATEFLOW_CODE_KEY"):
        signed(TEXT)


@pytest.mark.parametrize("silent", [False, True])
def test_who_owns_nothing_of_it_and_missed_an_upgrade_hears_of_it_before_anything_is_there(
    cluster: Cluster, silent: bool
) -> None:
    """A replica that owns no partition and missed an upgrade has to register before it is given one.

    A copy on its way to that replica would otherwise be owned, and served, by the former version.
    """
    one = replace(SPEC, partitions=1)
    cluster.deploy(one)
    (owner,) = cluster.cluster.operator("Count").assignment.owners
    other = "b" if owner == "a" else "a"
    if silent:
        cluster.silence(other)
    else:
        cluster.refuses[other, False] = Unavailable("no answer", remedy="see it")
    cluster.deploy(replace(one, target="tests.unit.operators:Picky"))
    assert cluster.cluster.operator("Count").spec.target == "tests.unit.operators:Picky"
    assert cluster.server.members.session(owner)
    assert not cluster.server.members.session(other), "it is to register, which names what is deployed"


def test_what_is_recorded_is_what_is_told_whatever_order_a_client_gives(cluster: Cluster) -> None:
    cluster.deploy(replace(SPEC, recorded_us=1 << 60))
    first = cluster.cluster.operator("Count").spec
    cluster.deploy(replace(SPEC, recorded_us=1 << 61))
    assert cluster.cluster.operator("Count").spec == first, "nothing has changed"
    cluster.deploy(replace(SPEC, target="tests.unit.operators:Picky"))
    second = cluster.cluster.operator("Count").spec
    assert 0 < first.recorded_us < second.recorded_us < 1 << 60
    assert cluster.learnt == [second, second]


def test_a_node_is_forgotten_with_all_its_workers_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is forgotten with all its workers, or not at all.

    A term that ended between the records of two workers left the others, and the node could not be named any more.
    """
    append = Ledger.append
    left: list[int] = []

    def appends(*arguments: Any) -> list[Record]:
        if not left:
            raise HoldLost("another controller leads", remedy="ask it")
        left.pop()
        return append(*arguments)

    async def forgets(ledger: Ledger, appended: int) -> Controller:
        clock = ManualClock()
        controller = Controller(ledger, clock=clock)
        clock.advance(20.0)
        left[:] = range(appended)
        with contextlib.suppress(HoldLost):  # see above
            await controller.leaving.forget("n")
        left[:] = range(100)
        await controller.close()
        return controller

    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        cluster = Written(ledger)
        for name in ("n", "n~1", "n~2"):
            write(cluster, steps.register, ReplicaInfo(name, "site", "n:1"), Home(name))
        write(cluster, steps.maintain, "n", Maintenance(1))
        monkeypatch.setattr(Ledger, "append", appends)
        assert len(asyncio.run(forgets(ledger, 0)).cluster.roster.replicas) == 3
        roster = asyncio.run(forgets(ledger, 1)).cluster.roster
        assert (roster.replicas, roster.maintenance) == ({}, {})


def test_a_node_of_which_only_workers_are_left_is_forgotten(tmp_path: Path) -> None:
    """An earlier version may have forgotten a node without some of its workers."""

    async def forgets(ledger: Ledger) -> None:
        clock = ManualClock()
        controller = Controller(ledger, clock=clock)
        await controller.context.record(steps.register, ReplicaInfo("n~1", "site", "n:1"), Home())
        clock.advance(20.0)
        await controller.leaving.forget("n")
        assert not controller.cluster.roster.replicas
        await controller.close()

    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        asyncio.run(forgets(ledger))
