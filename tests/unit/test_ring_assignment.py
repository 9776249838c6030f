from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.errors import InvariantBroken, StaleEpoch, UnknownPartition
from stateflow.ring import Assignment

FIRST = Assignment.initial("Op", {0: "a", 2: "a", 1: "b"})


def test_initial() -> None:
    assert Assignment("Op", 1, ("a", "b", "a"), (1, 1, 1)) == FIRST
    assert FIRST.owner(1) == ("b", 1)
    assert FIRST.of("a") == {0: 1, 2: 1}
    assert FIRST.of("nobody") == {}


def test_a_move_changes_one_partition_and_leaves_the_old_assignment_alone() -> None:
    second = FIRST.moved(1, "c", 4)
    assert second == Assignment("Op", 2, ("a", "c", "a"), (1, 4, 1))
    assert FIRST.owner(1) == ("b", 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        FIRST.version = 7  # type: ignore[misc]


@pytest.mark.parametrize("epoch", [4, 3, 0, -1])
def test_an_epoch_that_does_not_rise_is_refused(epoch: int) -> None:
    second = FIRST.moved(1, "c", 4)
    with pytest.raises(StaleEpoch) as caught:
        second.moved(1, "d", epoch)
    assert caught.value.where == {"operator": "Op", "partition": 1}
    assert second.owner(1) == ("c", 4)


@pytest.mark.parametrize("partition", [-1, 3, 1000])
def test_unknown_partitions(partition: int) -> None:
    with pytest.raises(UnknownPartition, match="0 to 2"):
        FIRST.owner(partition)
    with pytest.raises(UnknownPartition):
        FIRST.moved(partition, "c", 9)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.integers(0, 6)), max_size=30))
def test_epochs_rise_and_every_partition_has_one_owner(moves: list[tuple[int, str, int]]) -> None:
    assignment = Assignment.initial("Op", dict.fromkeys(range(4), "a"))
    model = dict.fromkeys(range(4), ("a", 1))
    for partition, owner, epoch in moves:
        before = assignment
        if epoch > model[partition][1]:
            assignment = assignment.moved(partition, owner, epoch)
            model[partition] = owner, epoch
            assert assignment.version == before.version + 1
        else:
            with pytest.raises(StaleEpoch):
                assignment.moved(partition, owner, epoch)
        assert {p: assignment.owner(p) for p in range(4)} == model
        held = [assignment.of(name) for name in "abc"]
        assert sorted(p for part in held for p in part) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong", [{"owners": ("a", "b")}, {"epochs": (1, 1, 1, 1)}, {"owners": ("a", "", "a")}, {"epochs": (1, 0, 1)}]
)
def test_an_assignment_that_no_history_leads_to_is_named(wrong: dict[str, tuple[object, ...]]) -> None:
    FIRST.validate()
    with pytest.raises(InvariantBroken, match=r"lack an owner.*operator=Op.*please report it"):
        dataclasses.replace(FIRST, **wrong).validate()  # type: ignore[arg-type]
