"""Division of long work: which replica does which partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconfig.decisions.sweeps import Chore, chore_named, packed, shares, unpacked, without
from stateflow.errors import InvalidArgument

PARTITIONS = st.dictionaries(
    st.sampled_from(["A", "B", "C"]), st.lists(st.integers(0, 60), unique=True, min_size=1).map(sorted)
)


@given(PARTITIONS)
def test_what_is_packed_is_read_again(partitions: dict[str, list[int]]) -> None:
    assert unpacked(packed(partitions)) == partitions


def test_what_is_packed_is_short() -> None:
    assert packed({"B": [1, 2, 3, 9], "A": []}) == {"B": "1-3 9"}


@given(PARTITIONS, PARTITIONS)
def test_what_is_left_and_what_is_done_are_all(all_: dict[str, list[int]], done: dict[str, list[int]]) -> None:
    left = without(all_, done)
    assert all(left.values())
    for name, numbers in all_.items():
        assert set(left.get(name, ())) == set(numbers) - set(done.get(name, ()))


@given(PARTITIONS, st.integers(0, 70))
def test_each_partition_is_its_owners(partitions: dict[str, list[int]], count: int) -> None:
    owners = {"A": [f"r{number % 3}" for number in range(count)], "B": ["r9"] * count}
    found = shares(partitions, owners)
    flat = {(name, operator, n) for name, mine in found.items() for operator, ns in mine.items() for n in ns}
    assert flat == {
        (owners[operator][n], operator, n)
        for operator, numbers in partitions.items()
        for n in numbers
        if operator in owners and n < count
    }


def test_what_is_done_has_a_name() -> None:
    assert chore_named("verify") is Chore.VERIFY
    with pytest.raises(InvalidArgument, match="restart, checkpoint, verify"):
        chore_named("dust")
