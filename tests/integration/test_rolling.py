"""Replicas restarted one after another while rows come, though the controller dies; and one that stays away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.client import Cluster, Rolling
from stateflow.errors import InvalidArgument, MoveConflict
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Streaming, command, eventually

pytestmark = pytest.mark.processes
PARTITIONS = 6


class Sites:
    """Two agents, whose replicas have all partitions."""

    def __init__(self, local: LocalCluster) -> None:
        self.local, self.cluster = local, local.cluster
        for name in ("gw-a", "gw-b"):
            self.start(name)
        eventually(lambda: [each.alive for each in self.cluster.agents()] == [True, True], "both register")
        names = [*self.cluster.spawn("gw-a", count=2).wait(), *self.cluster.spawn("gw-b").wait()]
        assert names == ["gw-a-0", "gw-a-1", "gw-b-0"]
        self.cluster.deploy(Tally, PARTITIONS, sites=["edge"])

    def start(self, name: str) -> None:
        data_dir = self.local.data_dir / name
        arguments = ["agent", "--site", "edge", "--name", name, "--controller", self.local.address, "--cores", "4"]
        agent = self.local._process(name, [*arguments, "--data-dir", str(data_dir)])
        agent.start()
        agent.wait_ready()

    def owners(self) -> set[str]:
        (operator,) = self.cluster.status().operators
        return set(operator.owners)

    def started(self) -> dict[str, int]:
        """Returns how often each replica was started."""
        return {child.replica: child.runs for agent in self.cluster.agents() for child in agent.replicas}


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sites]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_SPAWN_DISK_BYTES", str(1 << 20))
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S", "0.2")
    # on a busy machine a restart may take longer than the default lease, and is then taken over, as it should be
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "60")
    with LocalCluster(sites={"cloud": 1}, data_dir=tmp_path / "cluster", checkpoint_interval_s=0) as local:
        yield Sites(local)


def states(rolling: Rolling) -> dict[str, str]:
    return {each.node: each.status for each in rolling.nodes}


def test_all_are_restarted_one_after_another_whoever_leads(sites: Sites) -> None:
    before = sites.started()
    with sites.local.stream("Tally", source="s") as stream, Streaming(stream, "s") as streaming:
        rolling = sites.cluster.restart_all()
        assert list(states(rolling.report)) == ["gw-a-0", "gw-a-1", "gw-b-0"]
        with pytest.raises(MoveConflict, match="are being restarted"):
            sites.cluster.restart_all()
        eventually(lambda: states(sites.cluster.rolling(rolling.id).report)["gw-a-0"] == "COMPLETED", "the first")
        sites.local.kill("controller")
        sites.local.restart("controller")
        seen: list[int] = []
        for report in rolling.progress():
            seen.append(sum(each.status == "IN_PROGRESS" for each in report.nodes))
        assert max(seen) == 1, "never two at a time"
        assert (rolling.report.state, set(states(rolling.report).values())) == ("DONE", {"COMPLETED"})
        assert all(each.ms > 0 for each in rolling.report.nodes)
        streaming.more(1)
    streaming.model.check(sites.cluster)
    assert sites.started() == {name: runs + 1 for name, runs in before.items()}
    assert sites.owners() == set(before), "nothing was taken over"


def test_after_one_that_does_not_come_back_nothing_more_is_restarted(sites: Sites) -> None:
    before = sites.started()
    blocked = sites.local.data_dir / "gw-a" / "replicas" / "gw-a-1"
    identity = next(blocked.rglob("REPLICA"))
    kept = identity.read_bytes()
    identity.write_text('{"name": "another", "id": "x"}')
    done = command("restart", "--all", "--controller", sites.local.address)
    assert done.exit_code == 1, done.output
    assert "gw-a-1 was not restarted" in done.stderr
    assert "gw-a-0 completed" in done.stderr
    assert sites.started()["gw-b-0"] == before["gw-b-0"]
    roll = done.stderr.split("roll/")[1].split("`")[0]
    assert states(sites.cluster.rolling(roll).report) == {
        "gw-a-0": "COMPLETED",
        "gw-a-1": "FAILED",
        "gw-b-0": "CANCELLED",
    }
    told = command("batch", "info", f"roll/{roll}", "--ledger", sites.local.ledger)
    assert "FAILED" in told.stdout, told.output
    identity.write_bytes(kept)
    eventually(lambda: all(each.alive for each in sites.cluster.status().replicas), "it is mended")
    assert sites.cluster.restart_all("gw-b").wait().state == "DONE"


def test_what_cannot_be_restarted_and_what_is_called_off(sites: Sites) -> None:
    cluster: Cluster = sites.cluster
    with pytest.raises(InvalidArgument, match="no agent runs a replica at nowhere"):
        cluster.restart_all("nowhere")
    with pytest.raises(InvalidArgument, match="cannot process 0 nodes"):
        cluster.restart_all(limit=0)
    done = command("restart", "gw-a-0", "--all", "--controller", sites.local.address)
    assert "exactly one of a replica and --all is required" in done.stderr
    before = sites.started()
    rolling = cluster.restart_all()
    told = command("batch", "cancel", f"roll/{rolling.id}", "--controller", sites.local.address)
    assert told.exit_code == 0, told.output
    assert set(states(rolling.cancel()).values()) >= {"CANCELLED"}
    assert rolling.wait().state == "CANCELLED"
    assert sites.started()["gw-b-0"] == before["gw-b-0"]
    assert cluster.restart_all(limit=3).wait().state == "DONE"
