"""Manual failover: a site cut off from every controller serves on, and no other replica serves its partitions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.client import OperatorStatus
from stateflow.errors import InvalidArgument, LossPossible, PartitionsLive, Unavailable
from stateflow.testing import LocalCluster
from tests.crash_matrix.proxy import Proxy
from tests.integration.operators import Tally
from tests.integration.support import Model, command, eventually, outputs, rows_of

pytestmark = pytest.mark.processes
PARTITIONS = 6
LEASE_S = 2.0
EDGE = "edge-0"


class Sites(LocalCluster):
    """A cluster whose ``edge-0`` and the other processes reach each other through links that can be cut.

    A client at the edge, as this process is, reaches ``edge-0`` all the same.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(sites={"cloud": 1, "edge": 1}, data_dir=folder, checkpoint_interval_s=0)
        self.to_controller = Proxy(lambda: self.processes["controller"].address)
        self.to_edge = Proxy(lambda: self.processes[EDGE].address)
        self.model, self.sent = Model(), 0

    def _replica_arguments(self, name: str) -> list[str]:
        arguments = super()._replica_arguments(name)
        if name != EDGE:
            return arguments
        arguments[arguments.index(self.address)] = self.to_controller.address
        return [*arguments, "--advertise", self.to_edge.address]

    def stop(self) -> None:
        self.heal()
        super().stop()
        self.to_controller.close()
        self.to_edge.close()

    def cut(self) -> None:
        self.to_controller.hold()
        self.to_edge.hold(frozenset({self.processes["controller"].pid, self.processes["cloud-0"].pid}))

    def heal(self) -> None:
        self.to_controller.heal()
        self.to_edge.heal()

    def told(self, operator: str = "Tally") -> OperatorStatus:
        return next(each for each in self.cluster.status().operators if each.name == operator)

    def may_alone(self) -> list[str]:
        """Operators that the edge has recorded it may serve alone."""
        file = self.data_dir / EDGE / "ALONE"
        found: list[str] = json.loads(file.read_text())["operators"] if file.exists() else []
        return found

    def lapsed(self) -> None:
        """Waits until the edge's lease has lapsed and the controller could have begun what follows from that."""
        time.sleep(2 * LEASE_S)
        assert not next(each for each in self.cluster.status().replicas if each.name == EDGE).alive

    def heard_after(self, since: float) -> None:
        """Waits for a heartbeat of the edge that came after ``since``, a monotonic time."""

        def heard() -> bool:
            asked = time.monotonic()
            edge = next(each for each in self.cluster.status().replicas if each.name == EDGE)
            return bool(edge.alive) and edge.last_heartbeat_s < asked - since

        eventually(heard, "it is heard")


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sites]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", str(LEASE_S))
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S", "0.2")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.2")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_RPC_TIMEOUT_S", "1")
    with Sites(tmp_path / "cluster") as sites:
        sites.cluster.deploy(Tally, PARTITIONS, failover="manual")
        yield sites


def test_it_serves_on_and_is_one_of_the_cluster_again(sites: Sites) -> None:
    cluster = sites.cluster
    cluster.deploy(Tally, PARTITIONS, name="Automatic")
    cluster.standby("Automatic", 1)
    before = sites.told()
    mine = [p for p, owner in enumerate(before.owners) if owner == EDGE]
    assert mine
    assert before.failover == "manual"
    eventually(lambda: {s.phase for s in cluster.status().standbys} == {"CATCHING_UP"}, "copies follow")
    eventually(lambda: sites.may_alone() == ["Tally"], "the edge knows that it may")
    with sites.stream("Tally", source="s") as stream:

        def send() -> None:
            rows = rows_of("s", sites.sent)
            sites.sent += 1
            assert outputs(stream.send(rows)) == sites.model.apply(rows)

        send()
        sites.cut()
        until = time.monotonic() + 3 * LEASE_S
        while time.monotonic() < until:
            send()
            time.sleep(0.05)
        assert set(sites.told("Automatic").owners) == {"cloud-0"}, "others fail over as ever"
        now = sites.told()
        assert (now.owners, now.epochs) == (before.owners, before.epochs)
        (lacks,) = now.unserved
        assert lacks.partitions == tuple(mine)
        assert "may be serving these partitions alone" in lacks.error
        assert "takeover Tally" in lacks.error
        with pytest.raises(PartitionsLive, match="may be serving partitions alone"):
            cluster.undeploy("Tally", delete_state=True)
        with pytest.raises(Unavailable, match="may still serve the partition"):
            cluster.restore("Tally", mine[:1])
        sites.kill(EDGE)
        sites.restart(EDGE)
        for _ in range(20):
            send()
        sites.kill("controller")
        sites.restart("controller")
        sites.lapsed()
        send()
        assert sites.told().owners == before.owners, "whoever leads"
        sites.heal()
        eventually(lambda: not sites.told().unserved, "it is heard again")
        send()
    now = sites.told()
    assert (now.owners, now.epochs) == (before.owners, before.epochs)
    sites.model.check(cluster)
    assert cluster.migrate("Tally", mine, "cloud").wait().state == "COMPLETED"


def test_nobody_takes_over_but_by_command(sites: Sites) -> None:
    cluster = sites.cluster
    cluster.standby("Tally", 1)
    rows = rows_of("s", 0)
    with sites.stream("Tally", source="s") as stream:
        sites.model.apply(rows)
        stream.send(rows)
        eventually(lambda: {s.phase for s in cluster.status().standbys} == {"CATCHING_UP"}, "copies follow")
        mine = [p for p, owner in enumerate(sites.told().owners) if owner == EDGE]
        with pytest.raises(InvalidArgument, match="answers, or its lease is valid"):
            cluster.take_over("Tally", mine[:1], accept_loss=True)
        for ask in (cluster.take_over, cluster.would_take_over):
            with pytest.raises(InvalidArgument, match="nothing to take over: each owner answers"):
                ask("Tally")
        eventually(lambda: sites.may_alone() == ["Tally"], "the edge knows that it may")
        sites.cut()
        sites.lapsed()
        with pytest.raises(LossPossible, match=f"batches that {EDGE} may have served"):
            cluster.take_over("Tally")
        done = command("takeover", "Tally", "--controller", sites.address)
        assert (done.exit_code, "loss_possible" in done.stderr) == (1, True)
        done = command("takeover", "Tally", "--dry-run", "--controller", sites.address)
        assert (done.exit_code, f"{len(mine)} takeovers" in done.stdout) == (0, True), done.output
        would = cluster.would_take_over("Tally", mine[:1]).moves
        assert [(each.partition, each.source, each.target) for each in would] == [(mine[0], EDGE, "cloud-0")]
        assert would[0].reason == "from its standby copy"
        assert EDGE in sites.told().owners
        done = command("takeover", "Tally", "--accept-loss", "--controller", sites.address)
        assert done.exit_code == 0, done.stderr
        assert done.stdout.count("COMPLETED") == len(mine)
        assert set(sites.told().owners) == {"cloud-0"}
        sites.model.check(cluster)
        lost = rows_of("s", 1)
        stream.send(lost)  # clients at the edge do not know of the takeover yet
    sites.heal()
    eventually(lambda: all(each.alive for each in cluster.status().replicas), "it is heard again")
    assert set(sites.told().owners) == {"cloud-0"}
    found = {key for key, _ in read_keys(sites)}
    assert found >= set(sites.model.n)
    log = sites.data_dir / f"{EDGE}.log"
    eventually(lambda: log.read_text().count("moved to cloud-0 at epoch") == len(mine), "it says what it lost")


def read_keys(sites: Sites) -> set[tuple[str, int]]:
    return {(row["key"], row["value"]) for row in sites.cluster.read_state("Tally", "n").to_pylist()}


def test_it_is_automatic_again_when_the_replica_has_heard_so(sites: Sites) -> None:
    cluster = sites.cluster
    cluster.standby("Tally", 1)
    eventually(lambda: {s.phase for s in cluster.status().standbys} == {"CATCHING_UP"}, "copies follow")
    eventually(lambda: sites.may_alone() == ["Tally"], "the edge knows that it may")
    sites.cut()
    sites.lapsed()
    cluster.deploy(Tally, PARTITIONS, failover="automatic")
    assert sites.told().failover == "automatic"
    sites.lapsed()
    assert EDGE in sites.told().owners, "it has not heard of it"
    sites.heal()
    eventually(lambda: not sites.told().unserved, "it is heard again")
    eventually(lambda: sites.may_alone() == [], "it has heard it")
    sites.heard_after(time.monotonic())  # a later heartbeat has said so
    eventually(lambda: {s.phase for s in cluster.status().standbys} == {"CATCHING_UP"}, "copies follow again")
    sites.cut()
    eventually(lambda: EDGE not in sites.told().owners, "it fails over")
    with pytest.raises(InvalidArgument, match="'sometimes' is not a failover mode"):
        cluster.deploy(Tally, PARTITIONS, failover="sometimes")
    cluster.deploy(Tally, 2, name="Fresh", failover="automatic")
    fresh = sites.told("Fresh")
    assert (fresh.failover, len(fresh.owners)) == ("automatic", 2)
