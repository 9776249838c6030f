"""A node's supervision: when its workers are restarted, and which partitions they hand to each other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.node.supervising import (
    BACKOFF_S_MAX,
    BUSY,
    COMPARE_S,
    COMPARE_S_MAX,
    GAIN,
    HOPELESS,
    SLOW_S,
    WELL_S,
    Balance,
    Seen,
    Supervision,
    is_spare,
    spread,
)
from stateflow.reports import PartitionReport
from stateflow.types import PartitionId


def test_who_was_well_is_started_again_at_once_and_who_was_not_later_and_later() -> None:
    node = Supervision(1)
    now, pauses = 0.0, []
    for _ in range(10):
        node.started(0, 0.0)
        node.ready(0, now)
        pauses.append(node.died(0, now + 1))
        assert node.due(now + 1) == ([0] if pauses[-1] == 0 else [])
        now += 1 + pauses[-1]
        assert node.due(now) == [0]
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == BACKOFF_S_MAX
    node.started(0, 0.0)
    assert node.due(now) == [], "it runs"
    assert node.died(0, now + WELL_S) == BACKOFF_S_MAX, "it was not ready in all that time"
    node.started(0, 0.0)
    node.ready(0, now)
    assert node.died(0, now + WELL_S) == 0.0, "it was well"
    assert not node.dies_at_every_start(0)


def test_who_is_slow_to_be_ready_is_named_once_for_each_start() -> None:
    node = Supervision(3)
    for number in range(3):
        node.started(number, 0.0)
    node.ready(1, 1.0)
    assert node.slow(SLOW_S - 1) == []
    node.died(2, SLOW_S - 1)
    assert (node.slow(SLOW_S), node.slow(SLOW_S)) == ([0], [])
    node.ready(0, 2 * SLOW_S)
    node.died(0, 2 * SLOW_S)
    node.started(0, 2 * SLOW_S)
    assert (node.slow(2 * SLOW_S), node.slow(3 * SLOW_S)) == ([], [0])


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
    assert (node.leaving(), node.gone(), node.due(1e9)) == ([2], [3], [])


def p(number: int) -> PartitionId:
    return PartitionId("Op", number)


@pytest.mark.parametrize(
    ("loads", "moves"),
    [
        ({}, {}),
        ({"n": {0: 1.0}}, {}),
        ({"n": {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}, "n~1": {}}, {0: "n~1", 1: "n~1"}),
        ({"n": {0: 5.0, 1: 1.0, 2: 1.0}, "n~1": {3: 1.0}}, {1: "n~1", 2: "n~1"}),
        ({"n": {0: 9.0}, "n~1": {}}, {}),  # the move would only shift the load
        # equally busy partitions, as far as can be measured, beside idle ones: each worker gets half of them
        ({"n": {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.98}, "n~1": {4: 0.0, 5: 0.0, 6: 0.0, 7: 0.0}}, {0: "n~1", 1: "n~1"}),
        ({"n": {0: 1.0, 1: 1.0, 2: 1.0}, "n~1": {3: 1.0, 4: 1.0, 5: 0.9}}, {}),
        # a move would relieve the busier one by a twelfth, which is not worth it
        ({"n": dict.fromkeys(range(12), 1.0), "n~1": dict.fromkeys(range(12, 22), 1.0)}, {}),
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


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("skew", [0.5, 1.0, 1.5, 2.0])
def test_a_skewed_load_is_shared_by_all_workers(workers: int, skew: float) -> None:
    """Loads by Zipf, the heaviest all at one worker: nobody keeps more than a share, or one partition that is more.

    Few partitions move for that, and none of them twice.
    """
    count = 32
    load = {p(number): float((number + 1) ** -skew) for number in range(count)}
    owner = {p(number): f"n~{number * workers // count}" for number in range(count)}
    share = sum(load.values()) / workers

    def busiest() -> float:
        return max(math.fsum(load[each] for each in load if owner[each] == f"n~{n}") for n in range(workers))

    assert busiest() >= 1.3 * share
    loads = {f"n~{n}": {each: load[each] for each in load if owner[each] == f"n~{n}"} for n in range(workers)}
    moves = spread(loads)
    owner |= moves
    assert busiest() <= max(load[p(0)], share / (1 - GAIN)) * (1 + 1e-9)
    assert set(owner.values()) == {f"n~{n}" for n in range(workers)}
    assert len(moves) <= count // 2


# -- over time ----------------------------------------------------------------------------------------------


class Node:
    """Workers whose partitions have fixed costs, of which only each worker's CPU time is visible."""

    def __init__(self, cost: dict[int, float], owned: dict[str, list[int]]) -> None:
        self.cost, self.owned = cost, owned
        self.now, self.batches = 0.0, dict.fromkeys(cost, 1)
        self.used = dict.fromkeys(owned, 0.0)
        self.balance = Balance()
        self.moved_at: list[float] = []

    def look(self, seconds: float = 5.0) -> dict[PartitionId, str]:
        self.now += seconds
        for worker, numbers in self.owned.items():
            for number in numbers:
                self.batches[number] += 10  # a micro-batch visits every partition
                self.used[worker] += self.cost[number] * seconds
        committed = {w: {p(n): self.batches[n] for n in numbers} for w, numbers in self.owned.items()}
        moves = self.balance.look(Seen(self.now, committed, dict(self.used)))
        for partition, worker in moves.items():
            next(each for each in self.owned.values() if partition.partition in each).remove(partition.partition)
            self.owned[worker].append(partition.partition)
        if moves:
            self.moved_at.append(self.now)
        return moves

    def load(self, worker: str) -> float:
        return sum(self.cost[number] for number in self.owned[worker])


def test_a_new_worker_is_given_its_part_at_once_and_by_number() -> None:
    node = Node(dict.fromkeys(range(8), 0.0), {"n": list(range(8)), "n~1": []})
    assert len(node.look()) == 4
    assert [node.look() for _ in range(100)] == [{}] * 100


@pytest.mark.parametrize("hot", range(8))
def test_a_hot_partition_ends_up_alone_though_batches_do_not_tell_which_it_is(hot: int) -> None:
    node = Node({n: 0.9 if n == hot else 0.01 for n in range(8)}, {"n": [0, 1, 2, 3], "n~1": [4, 5, 6, 7]})
    for _ in range(400):
        node.look()
    assert [hot] in node.owned.values() or len(node.moved_at) <= 12
    busy = next(worker for worker, numbers in node.owned.items() if hot in numbers)
    assert len(node.owned[busy]) <= 2
    assert node.moved_at[-1] < 1000, "it comes to rest"


def test_loads_that_can_be_told_are_evened_out() -> None:
    node = Node({n: 0.2 if n < 4 else 0.01 for n in range(8)}, {"n": [0, 1, 2, 3], "n~1": [4, 5, 6, 7]})
    for _ in range(200):
        node.look()
    assert max(node.load("n"), node.load("n~1")) <= 0.65, "0.84 before"
    assert len(node.moved_at) <= 8


def test_workers_that_have_little_to_do_hand_on_nothing() -> None:
    node = Node({n: BUSY / 5 if n < 4 else 0.0 for n in range(8)}, {"n": [0, 1, 2, 3], "n~1": [4, 5, 6, 7]})
    assert [node.look() for _ in range(100)] == [{}] * 100


def test_what_comes_and_goes_is_not_run_after() -> None:
    """A load that alternates is not chased: partitions are moved less and less often."""
    node = Node(dict.fromkeys(range(8), 0.1), {"n": [0, 1, 2, 3], "n~1": [4, 5, 6, 7]})
    for step in range(1000):
        busy = ["n", "n~1"][step // 3 % 2]
        node.cost = {n: 0.2 if n in node.owned[busy] else 0.01 for n in range(8)}
        node.look()
    assert len(node.moved_at) <= 1000 * 5 / COMPARE_S / 4
    assert max(b - a for a, b in zip(node.moved_at, node.moved_at[1:], strict=False)) <= 4 * COMPARE_S_MAX


def test_a_worker_that_was_started_again_is_compared_with_nothing_before() -> None:
    before = Seen(0.0, {"n": {p(0): 10}, "n~1": {p(1): 10}}, {"n": 5.0, "n~1": 5.0})
    after = Seen(20.0, {"n": {p(0): 20}, "n~1": {p(1): 20}}, {"n": 9.0, "n~1": 0.5})
    assert not after.follows(before)
    assert not Seen(20.0, {"n": {p(0): 700}, "n~1": {p(1): 20}}).follows(Seen(0.0, {"n": {p(0): 0}, "n~1": {p(1): 9}}))
    assert not Seen(20.0, {"n": {p(0): 1, p(1): 1}, "n~1": {}}).follows(Seen(0.0, {"n": {p(0): 1}, "n~1": {p(1): 1}}))


def test_where_processor_time_cannot_be_told_batches_are_counted() -> None:
    before = Seen(0.0, {"n": {p(0): 100, p(1): 100}, "n~1": {p(2): 100}})
    after = Seen(10.0, {"n": {p(0): 400, p(1): 300}, "n~1": {p(2): 200}})
    assert after.loads(before) == {"n": {p(0): 0.6, p(1): 0.4}, "n~1": {p(2): 0.2}}


# -- copies of a worker that left ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "epoch", "spare"),
    [
        ("OWNED", 1, False),
        ("FENCING", 1, False),
        ("SEALED", 2, False),  # sealed for an owner that, as far as the ledger knows, does not own yet
        ("SEALED", 1, True),
        ("WARMING", 9, True),
    ],
)
def test_a_directory_is_spare_when_the_newest_is_elsewhere(state: str, epoch: int, spare: bool) -> None:
    has = PartitionReport("Op", 0, state, epoch, 10, "move", 0.0)
    assert is_spare([has], {p(0): 1}) is spare
    assert is_spare([], {p(0): 1})
    assert is_spare([has], {}) is (state == "WARMING"), "of an operator that nobody knows"
