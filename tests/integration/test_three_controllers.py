"""Three controllers of one ledger on real processes; their clocks and the replicas' are hours apart, or jump."""

from __future__ import annotations

import random

import pytest

from stateflow.client import Cluster
from tests.integration.support import Streaming, check_owners, eventually, wait_alive
from tests.integration.trio import HOURS_APART_S, Trio

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("trio", [HOURS_APART_S], ids=["hours-apart"], indirect=True)
def test_each_leads_in_turn_whatever_its_clock_says(trio: Trio) -> None:
    cluster, led = Cluster(trio.address), []
    with Streaming(cluster.stream("Tally", source="s"), "k") as streaming:
        for site in ("edge", "cloud", "edge", "cloud"):
            streaming.more(2)
            leader = trio.leader()
            led.append(leader)
            trio.kill(leader)
            eventually(lambda leader=leader: trio.leader() != leader, "another one leads")  # type: ignore[misc]
            wait_alive(trio, "cloud-0", "edge-0")
            trio.restart(leader)
            report = cluster.migrate("Tally", range(4), site).wait()
            assert report.state == "COMPLETED", report
        streaming.more(2)
    streaming.model.check(cluster)
    check_owners(trio)
    assert len(set(led)) > 1
    assert not [each for each in cluster.reconfigurations() if each.kind == "failover"], "no lease has lapsed"
    times = [each.created_us for each in cluster.reconfigurations()]
    assert max(times) - min(times) > 1800e6, "their clocks are apart"


def test_clocks_that_jump_move_nothing_and_stop_nothing(trio: Trio) -> None:
    """Every clock jumps by up to two hours, forward or back, before each move and in the midst of it."""
    jumps = random.Random(7)
    cluster, names = Cluster(trio.address), (*trio.controllers, "cloud-0", "edge-0")

    def jump() -> None:
        for name in names:
            trio.set_clock(name, jumps.randrange(-7200, 7200))

    with Streaming(cluster.stream("Tally", source="s"), "k") as streaming:
        for site in ("edge", "cloud", "edge"):
            jump()
            streaming.more(2)
            moving = cluster.migrate("Tally", range(4), site)
            jump()
            report = moving.wait()
            assert report.state == "COMPLETED", report
        streaming.more(2)
    streaming.model.check(cluster)
    check_owners(trio)
    assert not [each for each in cluster.reconfigurations() if each.kind == "failover"], "no lease has lapsed"
    assert not streaming.error
