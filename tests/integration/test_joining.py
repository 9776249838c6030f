"""A replica that joins a running cluster: what is said of it, and the rebalance that begins by itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.testing import LocalCluster
from stateflow.testing.local_cluster import Process
from tests.integration.operators import Tally

pytestmark = pytest.mark.processes


class Joined(LocalCluster):
    automatic = False

    def _process(self, name: str, arguments: list[str]) -> Process:
        if name == "controller" and self.automatic:
            arguments = [*arguments, "--auto-rebalance"]
        return super()._process(name, arguments)

    def join(self, name: str) -> None:
        self._process(name, self._replica_arguments(name)).start()
        self.processes[name].wait_ready()
        self._wait_for_members({name})

    def owned(self) -> Counter[str]:
        (operator,) = self.cluster.status().operators
        return Counter(operator.owners)

    def status(self) -> str:
        return CliRunner().invoke(app, ["status", "--controller", self.address]).stdout


class Automatic(Joined):
    automatic = True


@pytest.fixture
def automatic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Automatic]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_AUTO_REBALANCE_AFTER_S", "2")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S", "0.2")
    cluster = Automatic(Tally, sites={"cloud": 2}, partitions=6, checkpoint_interval_s=0)
    with cluster:
        yield cluster


def test_status_says_it_and_a_rebalance_ends_it() -> None:
    cluster = Joined(Tally, sites={"cloud": 2}, partitions=6, checkpoint_interval_s=0)
    with cluster:
        said = "cloud-2 owns nothing: `stateflow rebalance` gives a share"
        assert "owns nothing" not in cluster.status()
        cluster.join("cloud-2")
        assert said in cluster.status()
        for move in cluster.cluster.rebalance():
            assert move.wait().state == "COMPLETED"
        assert said not in cluster.status()
        assert cluster.owned()["cloud-2"] == 2


def test_a_replica_that_joins_is_given_its_share_and_one_that_is_drained_stays_empty(automatic: Automatic) -> None:
    stream = automatic.stream("Tally", source="s")
    rows = [{"k": f"k{n}", "v": 1} for n in range(60)]
    stream.send(rows)
    automatic.join("cloud-2")
    deadline = time.monotonic() + 60
    while automatic.owned() != {"cloud-0": 2, "cloud-1": 2, "cloud-2": 2}:
        assert time.monotonic() < deadline, automatic.status()
        stream.send(rows)
        time.sleep(0.1)
    begun = automatic.cluster.reconfigurations()
    assert [each.kind for each in begun] == ["rebalance"]
    for move in automatic.cluster.drain("cloud-2"):
        move.wait()
    time.sleep(4)
    assert automatic.owned() == {"cloud-0": 3, "cloud-1": 3}
    assert [each.kind for each in automatic.cluster.reconfigurations()] == ["drain", "rebalance"]
