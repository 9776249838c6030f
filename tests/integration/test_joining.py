"""A replica that joins a running cluster: what status says of it, and the rebalance that begins by itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from stateflow.errors import InMaintenance, InvalidArgument
from stateflow.local.process import Process
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import command, eventually

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
        return command("status", "--controller", self.address).stdout


class Automatic(Joined):
    automatic = True


@pytest.fixture
def automatic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Automatic]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_AUTO_REBALANCE_AFTER_S", "2")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S", "0.2")
    cluster = Automatic(Tally, sites={"cloud": 2}, partitions=6, checkpoint_interval_s=0)
    with cluster:
        yield cluster


def test_who_joins_in_the_middle_of_a_drain_has_its_share_until_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that joins during a drain gets waiting moves until it dies; moves that have begun are left alone."""
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S", "0.2")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "2")
    cluster = Joined(Tally, sites={"cloud": 2}, partitions=8, checkpoint_interval_s=0)
    with cluster:
        (drain,) = cluster.cluster.drain("cloud-0", max_pause_ms=1e-6, patience_s=600.0, limit=1)

        def targets() -> Counter[str]:
            moves = cluster.cluster.reconfiguration(drain.id).moves
            return Counter(move.target for move in moves if move.stands == "waiting")

        eventually(lambda: targets() == {"cloud-1": 3}, "one has begun")
        cluster.join("cloud-2")
        eventually(lambda: targets() == {"cloud-2": 3}, "it has less")
        moves = cluster.cluster.reconfiguration(drain.id).moves
        assert [move.target for move in moves if move.stands == "in_progress"] == ["cloud-1"]
        assert {move.reason for move in moves if move.stands == "waiting"} == {"cloud-2 is less loaded than cloud-1"}
        cluster.kill("controller")
        cluster.restart("controller")
        eventually(lambda: targets() == {"cloud-2": 3}, "whoever leads")
        cluster.kill("cloud-2")
        eventually(lambda: targets() == {"cloud-1": 3}, "it does not answer")
        cluster.cluster.cancel(drain.id)
        assert drain.wait().state == "CANCELLED"


def test_a_node_in_maintenance_is_given_nothing_whoever_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S", "0.2")
    local = Joined(Tally, sites={"cloud": 2, "edge": 1}, partitions=6, checkpoint_interval_s=0)
    with local:
        cluster = local.cluster
        would = cluster.would_drain("cloud-0")
        assert {(move.source, move.target) for move in would.moves} == {("cloud-0", "cloud-1")}
        assert local.owned()["cloud-0"] == len(would.moves) > 0, "nothing was moved"
        (drain,) = cluster.maintain("cloud-0", one_of="rack-1", for_s=3600)
        assert drain.wait().state == "COMPLETED"
        (told,) = cluster.status().maintenance
        assert (told.node, told.one_of, told.until_us - told.since_us) == ("cloud-0", "rack-1", 3600 * 10**6)
        with pytest.raises(InMaintenance, match="the set rack-1 allows only one"):
            cluster.maintain("cloud-1", one_of="rack-1")
        assert local.owned() == {"cloud-1": 4, "edge-0": 2}, "what was refused moved nothing"
        local.kill("controller")
        local.restart("controller")
        eventually(lambda: all(each.alive for each in cluster.status().replicas), "they are heard")
        with pytest.raises(InMaintenance, match="cloud-0 is in maintenance"):
            cluster.migrate("Tally", [0], "cloud-0")
        for moved in cluster.rebalance():
            assert moved.wait().state == "COMPLETED"
        assert local.owned() == {"cloud-1": 3, "edge-0": 3}
        assert "maintenance" in local.status()
        assert "cloud-0 owns no partitions" not in local.status(), "it is not to own anything"
        cluster.end_maintenance("cloud-0")
        with pytest.raises(InvalidArgument, match="is not in maintenance"):
            cluster.end_maintenance("cloud-0")
        assert {move.target for move in cluster.would_rebalance().moves} == {"cloud-0"}
        assert cluster.maintain("edge-0", for_s=0.5)[0].wait().state == "COMPLETED"
        eventually(lambda: not cluster.status().maintenance, "its time is over")
        assert cluster.migrate("Tally", [0], "edge").wait().state == "COMPLETED"


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
    owned = automatic.owned()  # one of the others has all of them if the other one was silent for 0.6 s
    assert "cloud-2" not in owned
    assert owned.total() == 6
    assert [each.kind for each in automatic.cluster.reconfigurations()] == ["drain", "rebalance"]
