"""When a node's workers are started again, and which partitions they hand to each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.node.supervising import BACKOFF_S_MAX, GAIN, HOPELESS, WELL_S, Supervision, spread
from stateflow.types import PartitionId


def test_who_was_well_is_started_again_at_once_and_who_was_not_later_and_later() -> None:
    node = Supervision(1)
    now, pauses = 0.0, []
    for _ in range(10):
        node.started(0, now)
        pauses.append(node.died(0, now + 1))
        assert node.due(now + 1) == ([0] if pauses[-1] == 0 else [])
        now += 1 + pauses[-1]
        assert node.due(now) == [0]
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == BACKOFF_S_MAX
    node.started(0, now)
    assert node.due(now) == [], "it runs"
    assert node.died(0, now + WELL_S) == 0.0, "it was well"
    assert not node.dies_at_every_start(0)


def test_a_node_is_hopeless_when_every_wanted_worker_is() -> None:
    node = Supervision(2)
    node.started(0, 0.0), node.started(1, 0.0), node.started(2, 0.0)
    for number in (0, 2):
        for _ in range(HOPELESS):
            node.started(number, 0.0)
            node.died(number, 0.0)
    assert node.dies_at_every_start(0)
    assert not node.is_hopeless(), "worker 1 runs"
    for _ in range(HOPELESS):
        node.started(1, 0.0)
        node.died(1, 0.0)
    assert node.is_hopeless()


def test_workers_beyond_the_wanted_number_leave() -> None:
    node = Supervision(2)
    for number in range(4):
        node.started(number, 0.0)
    assert node.leaving() == [2, 3]
    node.ended(3)
    assert (node.leaving(), node.due(1e9)) == ([2], [])


def p(number: int) -> PartitionId:
    return PartitionId("Op", number)


@pytest.mark.parametrize(
    ("loads", "moves"),
    [
        ({}, {}),
        ({"n": {0: 1.0}}, {}),
        ({"n": {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}, "n~1": {}}, {0: "n~1", 1: "n~1"}),
        ({"n": {0: 5.0, 1: 1.0, 2: 1.0}, "n~1": {3: 1.0}}, {1: "n~1", 2: "n~1"}),
        ({"n": {0: 9.0}, "n~1": {}}, {}),  # it would only change places
        ({"n": {0: 1.0, 1: 1.0, 2: 1.0}, "n~1": {3: 1.0, 4: 1.0, 5: 0.9}}, {}),
    ],
)
def test_as_few_partitions_as_it_takes_go_to_who_is_less_busy(
    loads: dict[str, dict[int, float]], moves: dict[int, str]
) -> None:
    given_loads = {worker: {p(number): load for number, load in each.items()} for worker, each in loads.items()}
    assert spread(given_loads) == {p(number): worker for number, worker in moves.items()}


@given(st.lists(st.lists(st.floats(0, 100), max_size=8), min_size=1, max_size=4))
def test_it_comes_to_rest_and_nobody_is_worse_off(loads: list[list[float]]) -> None:
    numbers = iter(range(100))
    now = {f"n~{worker}": {p(next(numbers)): load for load in each} for worker, each in enumerate(loads)}
    most = max(sum(each.values()) for each in now.values())
    for partition, worker in spread(now).items():
        owner = next(name for name, each in now.items() if partition in each)
        now[worker][partition] = now[owner].pop(partition)
    assert max(sum(each.values()) for each in now.values()) <= most * (1 + GAIN) + 1
    assert spread(now) == {}
