"""A schedule with three controllers: each of a hundred times runs once, while the leader is killed again and again."""

from __future__ import annotations

from collections import Counter

import pytest

from stateflow.client import Cluster
from stateflow.errors import StateflowError
from stateflow.ledger import Ledger
from tests.integration.support import eventually
from tests.integration.trio import Trio

pytestmark = pytest.mark.processes
TIMES, KILLS = 100, 5


def began(trio: Trio) -> Counter[str]:
    """Counts how often the run of each time was begun, by the ledger's records."""
    with Ledger(trio.ledger) as ledger:
        return Counter(r.item_id for r in ledger.records(archived=True) if r.item_id.startswith("run/") and r.seq == 1)


def test_each_of_a_hundred_times_is_run_for_once(trio: Trio) -> None:
    cluster, led = Cluster(trio.address), set()
    cluster.create_job("often", "every 0.1", "checkpoint", operator="Tally")
    for number in range(1, KILLS + 1):
        eventually(lambda number=number: len(began(trio)) >= number * TIMES // (KILLS + 1), "it goes on")  # type: ignore[misc]
        leader = trio.leader()
        led.add(leader)
        trio.kill(leader)
        eventually(lambda leader=leader: trio.leader() != leader, "another one leads")  # type: ignore[misc]
        trio.restart(leader)
    eventually(lambda: len(began(trio)) >= TIMES, "a hundred times")
    eventually(lambda: paused(cluster), "it is paused")
    eventually(lambda: all(run.ended_us for run in cluster.job("often").runs), "the last has ended")
    assert len(led) > 1
    assert set(began(trio).values()) == {1}
    runs = cluster.job("often").runs
    assert len({run.at_us for run in runs}) == len(runs) == TIMES
    assert {run.state for run in runs} == {"PROCESSED"}


def paused(cluster: Cluster) -> bool:
    try:
        return cluster.change_job("often", "pause").paused
    except StateflowError:
        return False
