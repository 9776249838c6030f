"""An operator that is confined to sites, on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.errors import Unavailable
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Streaming, eventually

pytestmark = pytest.mark.processes


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "3")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")
    made = LocalCluster(
        sites={"cloud": 1, "edge": 2},
        data_dir=tmp_path,
        checkpoint_interval_s=0.5,
    )
    with made as cluster:
        cluster.cluster.deploy(Tally, 4, sites=["edge"])
        yield cluster


def owners(cluster: LocalCluster) -> set[str]:
    (operator,) = cluster.cluster.status().operators
    return set(operator.owners)


def test_it_stays_there_until_nobody_there_is_left(cluster: LocalCluster) -> None:
    (operator,) = cluster.cluster.status().operators
    assert operator.sites == ("edge",)
    with Streaming(cluster.stream("Tally", source="s"), "k") as streaming:
        streaming.more()
        assert cluster.cluster.rebalance("Tally") == [], "the cloud's replica gets no share"
        for move in cluster.cluster.drain("edge-0"):
            assert move.wait().state == "COMPLETED"
        assert owners(cluster) == {"edge-1"}
        cluster.migrate("Tally", [0], "cloud").wait()
        assert owners(cluster) == {"cloud-0", "edge-1"}, "that was said"
        for move in cluster.cluster.rebalance("Tally"):
            assert move.wait().state == "COMPLETED"
        assert owners(cluster) == {"edge-0", "edge-1"}
        streaming.more()
    cluster.cluster.checkpoint()
    cluster.kill("edge-0")
    eventually(lambda: owners(cluster) == {"edge-1"}, "they are taken over there")
    with pytest.raises(Unavailable, match="no other replica at the sites of Tally can receive partitions"):
        cluster.cluster.drain("edge-1")
    assert owners(cluster) == {"edge-1"}
    cluster.cluster.checkpoint()
    cluster.kill("edge-1")
    eventually(lambda: owners(cluster) == {"cloud-0"}, "nobody there is left")
    notes = {
        each.moves[0].note
        for each in cluster.cluster.reconfigurations()
        if each.moves[0].target == "cloud-0" and each.kind == "failover"
    }
    assert notes
    assert all("cloud-0 is at cloud, outside the operator's sites (edge)" in note for note in notes)
