"""Names of replicas: which data directory a name belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reconfig.controller import steps
from reconfig.controller.folds import Home
from reconfig.controller.members import Members, Names
from reconfig.decisions.failover import Failover, Said
from reconfig.decisions.plan import PlannedMove, StrategyName
from stateflow.clock import ManualClock
from stateflow.errors import InvalidArgument, NameTaken
from stateflow.ledger import Ledger
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.writing import Written, deploy, write

SETTINGS = ControllerSettings(lease_s=10.0, lease_margin=0.1)
SPEC = OperatorSpec("Op", "m:Op", 4, ("k",), b"", "[]")
A = ReplicaInfo("a", "site", "a:1")
ELSEWHERE = ReplicaInfo("a", "site", "x:1")
HOME, COPY, OTHER = Home("d1", "here"), Home("d1", "there"), Home("d2", "there")
LAPSED_S = 11.1


class Controller:
    def __init__(self, ledger: Ledger) -> None:
        self.clock = ManualClock()
        self.cluster = Written.read(ledger)
        self.members = Members(self.cluster.roster.replicas, SETTINGS, self.clock)
        self.names = Names(self.cluster, self.members, SETTINGS, self.clock)

    def registered(self, info: ReplicaInfo = A, home: Home = HOME) -> None:
        self.names.check(info, home, ())
        write(self.cluster, steps.register, info, home)
        self.members.issue(info.name, "t", {})
        self.members.registered(info.name, "i", "t")

    def deployed(self, owner: str = "a") -> None:
        deploy(self.cluster, SPEC, dict.fromkeys(range(4), owner))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    yield opened
    opened.close()


@pytest.fixture
def controller(ledger: Ledger) -> Controller:
    made = Controller(ledger)
    made.registered()
    made.deployed()
    return made


def test_the_same_directory_is_welcome_at_any_time(controller: Controller) -> None:
    controller.names.check(A, HOME)
    controller.names.check(ELSEWHERE, HOME)
    controller.clock.advance(LAPSED_S)
    controller.names.check(A, HOME)
    assert controller.names.refused() == []


def test_another_directory_is_refused_before_and_after_the_lease(controller: Controller) -> None:
    with pytest.raises(
        NameTaken, match=r"may still be serving \(replica=a directory=d2 belongs_to=d1 address=a:1\): .*--n"
    ):
        controller.names.check(ELSEWHERE, OTHER)
    controller.clock.advance(LAPSED_S)
    with pytest.raises(NameTaken, match=r"which holds its state .*`stateflow replace a`"):
        controller.names.check(ELSEWHERE, OTHER)
    (refused,) = controller.names.refused()
    assert (refused.info, refused.home, refused.error.code) == (ELSEWHERE, OTHER, "name_taken")
    assert not controller.names.awaited("a"), "it has nothing of what the name owns"
    controller.clock.advance(60)
    assert controller.names.refused() == []


def test_a_command_gives_the_name_to_the_one_that_asks(controller: Controller, ledger: Ledger) -> None:
    names, cluster, clock = controller.names, controller.cluster, controller.clock
    with pytest.raises(InvalidArgument, match="no replica 'z'"):
        names.successor("z", "")
    with pytest.raises(InvalidArgument, match="no other data directory claims"):
        names.successor("a", "")
    for home in (OTHER, COPY):
        with pytest.raises(NameTaken):
            names.check(ELSEWHERE, home)
    with pytest.raises(NameTaken, match=r"may still be serving \(replica=a address=a:1 lease_s=11.0\)"):
        names.successor("a", "")
    clock.advance(LAPSED_S)
    for home in (OTHER, Home("d3", "there")):
        with pytest.raises(NameTaken):
            names.check(ELSEWHERE, home)
    with pytest.raises(InvalidArgument, match="choose one with --directory: d2, d3"):
        names.successor("a", "")
    with pytest.raises(InvalidArgument, match="no other data directory claims"):
        names.successor("a", "d1")
    assert names.successor("a", "d2") == "d2"
    write(cluster, steps.rehome, "a", "d2")
    names.check(ELSEWHERE, OTHER, ())
    controller.registered(ELSEWHERE, OTHER)
    with pytest.raises(NameTaken, match="belongs_to=d2"):
        names.check(A, HOME)
    again = Controller(ledger)
    again.names.check(ELSEWHERE, OTHER)
    with pytest.raises(NameTaken, match="belongs_to=d2"):
        again.names.check(A, HOME)


def test_a_replica_that_was_forgotten_comes_back_as_a_new_one(ledger: Ledger) -> None:
    """A forgotten name may be taken by any directory, and the requests refused for it are forgotten, too."""
    controller = Controller(ledger)
    controller.registered()
    with pytest.raises(NameTaken):
        controller.names.check(ELSEWHERE, OTHER)
    controller.clock.advance(LAPSED_S)
    write(controller.cluster, steps.forget, "a")
    controller.members.forget("a")
    controller.names.replaced("a")
    assert controller.names.refused() == []
    assert not controller.members.may_serve("a")
    assert not controller.members.lapsed("a"), "nobody waits for it"
    controller.registered(ELSEWHERE, OTHER)
    assert controller.cluster.roster.homes == {"a": OTHER}
    assert Controller(ledger).cluster.roster.replicas == {"a": ELSEWHERE}


def test_of_two_copies_the_second_waits_for_the_lease_of_the_first(controller: Controller) -> None:
    names, clock = controller.names, controller.clock
    with pytest.raises(NameTaken, match="a copy of this data directory"):
        names.check(ELSEWHERE, COPY)
    assert names.awaited("a")
    names.check(A, HOME)
    clock.advance(LAPSED_S)
    assert not names.awaited("a"), "it asks no more"
    names.check(ELSEWHERE, COPY)
    controller.registered(ELSEWHERE, COPY)
    with pytest.raises(NameTaken, match="a copy of this data directory"):
        names.check(A, HOME)


def test_a_copy_of_one_that_may_be_serving_alone_needs_a_command(controller: Controller) -> None:
    """A lapsed lease does not free the name: the original may serve without a lease."""
    write(controller.cluster, steps.order_failover, "Op", Failover.MANUAL)
    controller.clock.advance(LAPSED_S)
    with pytest.raises(NameTaken, match=r"a copy of this data directory.*stateflow replace"):
        controller.names.check(ELSEWHERE, COPY)
    controller.names.check(A, HOME)
    write(controller.cluster, steps.order_failover, "Op", Failover.AUTOMATIC)
    controller.members.says("a", Said(2, frozenset()))
    controller.names.check(ELSEWHERE, COPY)


def test_a_machine_that_was_started_again_has_the_same_directory(ledger: Ledger) -> None:
    """A restarted machine has the same directory.

    This includes a replica that may be serving alone: its process ended with the machine.
    """
    controller = Controller(ledger)
    controller.registered(A, Home("d1", "boot-1/fd/1a"))
    controller.deployed()
    write(controller.cluster, steps.order_failover, "Op", Failover.MANUAL)
    with pytest.raises(NameTaken, match="a copy of this data directory"):
        controller.names.check(A, Home("d1", "boot-2/fd/1a"))
    controller.clock.advance(LAPSED_S)
    with pytest.raises(NameTaken, match="a copy of this data directory"):
        controller.names.check(A, Home("d1", "boot-1/fd/1b"))
    controller.names.check(A, Home("d1", "boot-2/fd/1a"))


def test_a_copy_beside_its_original_needs_a_command(controller: Controller) -> None:
    """A copy needs a command: it lacks what the original has taken since."""
    names, clock = controller.names, controller.clock
    for _ in range(3):
        with pytest.raises(NameTaken, match="a copy of"):
            names.check(ELSEWHERE, COPY)
        clock.advance(1.0)
        assert controller.members.beat("a", "i")
    assert not names.awaited("a"), "nobody has what the original has"
    clock.advance(LAPSED_S)
    for _ in range(2):
        with pytest.raises(NameTaken, match=r"one that was in use at the same time .*`stateflow replace a`"):
            names.check(ELSEWHERE, COPY)
    names.check(A, HOME)
    assert names.successor("a", "") == "d1"
    write(controller.cluster, steps.rehome, "a", "d1")
    names.replaced("a")
    names.check(ELSEWHERE, COPY)


def test_the_copy_waits_too_when_the_controller_was_started_again(controller: Controller, ledger: Ledger) -> None:
    again = Controller(ledger)
    with pytest.raises(NameTaken, match="a copy of this data directory"):
        again.names.check(ELSEWHERE, COPY)
    again.names.check(A, HOME)


def test_a_name_that_has_nothing_to_lose_needs_no_command(ledger: Ledger) -> None:
    controller = Controller(ledger)
    controller.registered()
    with pytest.raises(NameTaken, match="may still be serving"):
        controller.names.check(ELSEWHERE, OTHER)
    controller.clock.advance(LAPSED_S)
    controller.names.check(ELSEWHERE, OTHER)
    controller.deployed("b")
    controller.names.check(ELSEWHERE, OTHER)
    move = PlannedMove("r", PartitionId("Op", 1), "b", "a", 1, 2, StrategyName.WARM_UP)
    write(controller.cluster, steps.plan_moves, [move])
    with pytest.raises(NameTaken, match="which holds its state"):
        controller.names.check(ELSEWHERE, OTHER)


def test_a_deployment_that_was_not_finished_is_something_to_lose(ledger: Ledger) -> None:
    controller = Controller(ledger)
    controller.registered()
    write(controller.cluster, steps.plan_deployment, SPEC, dict.fromkeys(range(4), "a"))
    controller.clock.advance(LAPSED_S)
    with pytest.raises(NameTaken):
        controller.names.check(ELSEWHERE, OTHER)


def test_a_name_without_a_known_directory_is_for_who_brings_its_partitions(ledger: Ledger) -> None:
    """A ledger of an earlier version does not know the directory of a name."""
    controller = Controller(ledger)
    controller.registered()
    controller.deployed()
    controller.cluster.roster.homes.clear()
    controller.names.check(A, OTHER)
    with pytest.raises(NameTaken, match="none of the replica's partitions"):
        controller.names.check(A, OTHER, {PartitionId("Op", 9)})
    controller.names.check(A, HOME, {PartitionId("Op", 1)})


def test_who_names_no_directory_is_refused(controller: Controller) -> None:
    with pytest.raises(InvalidArgument, match="does not name its data directory"):
        controller.names.check(A, Home())
