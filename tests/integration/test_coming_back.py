"""A replica that takes longer than its lease to start, or to look through its state: the controller waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.clock import SYSTEM_CLOCK
from stateflow.testing import LocalCluster
from tests.integration.slow_operator import HELD_UP, Slow
from tests.integration.support import check_owners, eventually, read

pytestmark = pytest.mark.processes
LEASE_S = 2.0


@pytest.fixture
def held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(HELD_UP, str(tmp_path / "held-up"))
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", str(LEASE_S))
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.2")
    return tmp_path / "held-up"


@pytest.fixture
def cluster(tmp_path: Path, held_up: Path) -> Iterator[LocalCluster]:
    sites = {"cloud": 1, "edge": 1}
    data = tmp_path / "cluster"
    with LocalCluster(
        Slow, sites=sites, partitions=4, deploy_to=("cloud",), data_dir=data, checkpoint_interval_s=0
    ) as local:
        yield local


def _bring_back_slowly(local: LocalCluster, held_up: Path) -> None:
    """Kills ``cloud-0`` and starts it so that it blocks while it loads its operators."""
    local.kill("cloud-0")
    held_up.touch()
    local.processes["cloud-0"].start()


def test_it_is_waited_for_and_has_everything(cluster: LocalCluster, held_up: Path) -> None:
    local, stream = cluster, cluster.stream("Slow", source="s")
    rows = [{"k": f"k{number}"} for number in range(20)]
    stream.send(rows)
    local.cluster.checkpoint()
    stream.send(rows)
    _bring_back_slowly(local, held_up)
    eventually(lambda: {r.name: r.opening for r in local.cluster.status().replicas}["cloud-0"], "it says that it comes")
    since = SYSTEM_CLOCK.monotonic()
    eventually(lambda: SYSTEM_CLOCK.monotonic() - since > 2 * LEASE_S, "its lease has long lapsed")
    assert set(local.cluster.status().operators[0].owners) == {"cloud-0"}
    held_up.unlink()
    local.processes["cloud-0"].wait_ready()
    assert set(eventually(lambda: read(local.cluster, "Slow", "n"), "it can be read").values()) == {2}
    assert {out["n"] for out in stream.send(rows)} == {3}
    assert set(local.cluster.status().operators[0].epochs) == {1}
    check_owners(local, "Slow")
    assert not [each for each in local.cluster.reconfigurations() if each.kind == "failover"]


def test_it_is_not_waited_for_longer_than_the_setting_says(
    held_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_OPENING_TIMEOUT_S", "1")
    with LocalCluster(
        Slow,
        sites={"cloud": 1, "edge": 1},
        partitions=2,
        deploy_to=("cloud",),
        data_dir=tmp_path / "cluster",
        checkpoint_interval_s=0,
    ) as local:
        local.stream("Slow", source="s").send([{"k": "a"}])
        local.cluster.checkpoint()
        _bring_back_slowly(local, held_up)
        # ``edge-0`` needs the operator to take the partitions over, and is held up by the same file
        eventually(lambda: [each for each in local.cluster.reconfigurations() if each.kind == "failover"], "given away")
        held_up.unlink()
        local.processes["cloud-0"].wait_ready()
        eventually(lambda: set(local.cluster.status().operators[0].owners) == {"edge-0"}, "the other one has them")
        check = eventually(lambda: read(local.cluster, "Slow", "n"), "it can be read")
        assert set(check.values()) == {1}


def test_after_a_stop_of_everything_a_replica_that_is_slower_than_its_lease_has_everything(
    cluster: LocalCluster,
) -> None:
    """The controller counted the lease from its own start, and gave the partitions to the replica that was faster."""
    local, stream = cluster, cluster.stream("Slow", source="s")
    rows = [{"k": f"k{number}"} for number in range(20)]
    stream.send(rows)
    local.cluster.checkpoint()
    stream.send(rows)
    for name in ("controller", "cloud-0", "edge-0"):
        local.processes[name].stop()
    for name in ("controller", "edge-0"):
        local.restart(name)
    log = local.data_dir / "controller.log"
    eventually(lambda: "cloud-0 has not registered since this cold start" in log.read_text(), "its lease has lapsed")
    (shown,) = local.cluster.status().operators[0].unserved
    assert "cloud-0 has not registered since the cluster was started; until" in str(shown.error)
    local.restart("cloud-0")
    assert set(eventually(lambda: read(local.cluster, "Slow", "n"), "it can be read").values()) == {2}
    assert {out["n"] for out in stream.send(rows)} == {3}
    check_owners(local, "Slow")
    assert not [each for each in local.cluster.reconfigurations() if each.kind == "failover"]
