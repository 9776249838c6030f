"""Undeployed operators: a replica keeps nothing of them, and drops nothing that is newer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.errors import NotOwner, OperatorNotDeployed, StaleEpoch, StateDamaged, StateMissing
from stateflow.partition.lifecycle import State
from stateflow.partition.registry import PartitionRegistry
from stateflow.types import PartitionId
from tests.unit.partition.test_replica import P, Two


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def test_nothing_of_it_is_left(two: Two) -> None:
    """The owner's copy, a sealed copy and an incoming copy all go."""
    two.send(two.a, 1, 2)
    two.move(two.a, two.b, "m1", 1)
    two.a.create(two.spec, [1], 1)
    two.warm(two.b, two.a, "m2", 2)
    changed: list[object] = []
    two.b.on_change(changed.append)
    assert (two.a.drop("Op", 2), two.b.drop("Op", 2)) == (2, 1)
    assert changed == [P], "whoever waits for it is told"
    for node in (two.a, two.b):
        assert node.operators() == []
        assert list(node.inventory()) == []
        assert node.drop("Op", 2) == 0, "twice is no error"
    with pytest.raises(NotOwner):
        two.send(two.b, 3, epoch=2)
    with pytest.raises((NotOwner, OperatorNotDeployed)):
        two.states(two.b)
    for name in "ab":
        assert list((two.root / name / "operators").iterdir()) == []
        assert list(two.restart(name).inventory()) == []


def test_what_was_deployed_again_stays(two: Two) -> None:
    two.send(two.a, 1, 2)
    two.a.drop("Op", 1)
    two.a.create(two.spec, [0], 2)
    two.send(two.a, 5, epoch=2, number=0)
    assert two.a.drop("Op", 1) == 0
    assert two.states(two.a) == {"k2": 5}
    again = two.restart("a")
    assert (again.lifecycle(P).state, again.lifecycle(P).epoch) == (State.OWNED, 2)


def test_one_that_was_cut_short_is_done_again(two: Two) -> None:
    """A removal that was cut short is repeated.

    A crash leaves the description, some partitions, and part of another.
    """
    two.a.create(two.spec, [1], 1)
    two.send(two.a, 1)
    home = two.root / "a" / "operators" / "Op" / "p00000"
    (copy,) = home.iterdir()
    two.a.close()
    copy.rename(copy.with_name(copy.name + ".part"))
    node = two.start("a")
    assert [lifecycle.partition.partition for lifecycle, _ in node.inventory()] == [1]
    assert node.drop("Op", 1) == 1
    assert not home.parent.exists()


def test_what_was_put_aside_stays_and_is_in_nobodys_way(two: Two) -> None:
    """A quarantined copy stays, and does not hinder the next deployment.

    A deployment that was undone or undeployed could not be made again where a copy had been damaged.
    """
    two.send(two.a, 1, 2)
    two.a.close()
    home = two.root / "a" / "operators" / "Op" / "p00000"
    (home / "created-1" / "CURRENT").unlink()
    node = two.start("a")
    with pytest.raises(StateMissing, match="is quarantined"):
        node.create(two.spec, [0], 2)
    node.drop("Op", 1)
    node.create(two.spec, [0], 2)
    kept = two.root / "a" / "evidence" / "Op" / "p00000-undeployed-1" / "created-1-1"
    assert any(path.name.startswith("MANIFEST-") for path in kept.iterdir())


def test_what_is_deployed_again_beside_it_stays(two: Two) -> None:
    """The next deployment stays, though it begins while the former one is removed.

    The former one's last partition is gone, and the next one's first is here, before the description is removed.
    """
    two.send(two.a, 1)

    def dropped(_: PartitionId) -> None:
        two.a.on_change(lambda _: None)
        two.a.create(two.spec, [1], 2)

    two.a.on_change(dropped)
    assert two.a.drop("Op", 1) == 1
    assert [spec.name for spec in two.a.operators()] == ["Op"]
    assert [each.partition.partition for each, _ in two.restart("a").inventory()] == [1]


def test_an_operator_is_not_forgotten_while_a_copy_of_it_is_about_to_come(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator is not forgotten while a copy of it is about to come.

    A replica that prepares a move has learnt the operator, and has nothing of it yet.
    """
    dropped: list[int] = []
    monkeypatch.setattr(PartitionRegistry, "expect", lambda _self, _more: dropped.append(two.b.drop("Op", 1)))
    two.warm(two.a, two.b, "m1")
    assert dropped == [0]
    assert [spec.name for spec in two.b.operators()] == ["Op"]
    assert two.b.lifecycle(P).state is State.WARMING


def test_nothing_is_created_that_was_dropped_meanwhile(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation is refused whose deployment was undone while the request stood still.

    There was nothing to drop yet.
    """
    dropped: list[int] = []
    monkeypatch.setattr(PartitionRegistry, "expect", lambda _self, _more: dropped.append(two.b.drop("Op", 1)))
    with pytest.raises(StaleEpoch, match="was undeployed at epoch 1"):
        two.b.create(two.spec, [0], 1)
    assert dropped == [0]
    assert list(two.b.inventory()) == []
    two.b.create(two.spec, [0], 2)
    assert two.b.lifecycle(P).state is State.OWNED


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_put_aside_of_a_later_deployment_stays_in_the_way(two: Two, restarted: bool) -> None:
    """A late end of the former deployment does not permit the later one to begin empty."""
    two.a.drop("Op", 1)
    two.a.create(two.spec, [0], 2)
    local = two.a._registry.local(P)
    two.a._registry.lose(local, StateDamaged("it cannot be read"))
    node = two.restart("a") if restarted else two.a
    node.drop("Op", 1)
    with pytest.raises(StateMissing, match="is quarantined"):
        node.create(two.spec, [0], 3)
    node.drop("Op", 2)
    node.create(two.spec, [0], 3)
