"""A controller with a ledger that knows nothing: it creates no partition anew that a replica has."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.errors import AdoptionRefused, PartitionsClaimed
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import (
    Model,
    Streaming,
    check_owners,
    eventually,
    one_line,
    outputs,
    rows_of,
    told,
    wait_alive,
)

pytestmark = pytest.mark.processes
PARTITIONS = 6


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "2")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.2")
    with LocalCluster(
        Tally,
        partitions=PARTITIONS,
        data_dir=tmp_path / "cluster",
        sites={"cloud": 1, "edge": 1},
        checkpoint_interval_s=0,
    ) as cluster:
        yield cluster


def lose_the_ledger(local: LocalCluster, *replicas: str) -> None:
    """Moves the ledger away while all processes are down, then starts the controller and the given replicas."""
    for name in ("controller", "cloud-0", "edge-0"):
        local.kill(name)
    for file in local.data_dir.glob("ledger.db*"):
        file.rename(file.with_name(f"lost-{file.name}"))
    for name in ("controller", *replicas):
        local.restart(name)


def adopt(local: LocalCluster, *options: str) -> dict[str, Any]:
    (operator,) = told("adopt", *options, "--controller", local.address)["operators"]
    return dict(operator)


def test_a_ledger_that_was_lost_is_rebuilt_from_what_replicas_have(local: LocalCluster) -> None:
    stream, model = local.stream("Tally", source="s"), Model()
    for batch in range(4):
        assert outputs(stream.send(rows_of("k", batch))) == model.apply(rows_of("k", batch))
    (tally,) = local.cluster.status().operators
    moved = tally.owners.index("cloud-0")
    assert local.migrate("Tally", [moved], "edge").wait().state == "COMPLETED"
    before = local.cluster.status().operators
    lose_the_ledger(local, "cloud-0", "edge-0")

    def refused() -> str:
        try:
            local.cluster.deploy(Tally, PARTITIONS)
        except PartitionsClaimed as error:
            return one_line(error) if error.where["replicas"] == "cloud-0 edge-0" else ""
        raise AssertionError("partitions were created empty")

    line = eventually(refused, "both replicas are heard")
    print(line)
    assert "replicas have partitions of this operator that the ledger does not know" in line
    assert "`stateflow adopt` records their partitions in this controller's ledger" in line
    whole = list(range(PARTITIONS))
    shown = eventually(lambda: (a := adopt(local, "--dry-run"))["partitions"] == whole and a, "all of it is found")
    assert (shown["count"], shown["missing"], shown["sealed"], shown["done"]) == (PARTITIONS, [], [], False)
    assert local.cluster.status().operators == ()
    assert adopt(local)["done"]
    wait_alive(local, "cloud-0", "edge-0")
    (after,) = local.cluster.status().operators
    assert (after.owners, after.epochs) == (before[0].owners, before[0].epochs)
    again = local.stream("Tally", source="s")
    for batch in range(4, 8):
        assert outputs(again.send(rows_of("k", batch))) == model.apply(rows_of("k", batch))
    model.check(local.cluster)
    check_owners(local)
    assert local.migrate("Tally", [moved], "cloud").wait().state == "COMPLETED"
    (after,) = local.cluster.status().operators
    assert after.epochs[moved] > 1000, "replicas that were not heard may have seen some"
    for name in ("controller", "cloud-0", "edge-0"):
        local.kill(name)
        local.restart(name)
    wait_alive(local, "cloud-0", "edge-0")
    with Streaming(again, "x") as streaming:
        streaming.more(3)
    check_owners(local)


def test_a_replica_with_nothing_goes_to_another_ledger_and_back(local: LocalCluster) -> None:
    """A replica without partitions may go to another ledger; one with partitions stays with its ledger."""
    owners = local.cluster.status().operators[0].owners
    local.cluster.migrate("Tally", [p for p, owner in enumerate(owners) if owner == "edge-0"], "cloud").wait()
    local.cluster.undeploy("Tally", delete_state=True)
    local.cluster.deploy(Tally, PARTITIONS, sites=["cloud"])
    stream, model = local.stream("Tally", source="s"), Model()
    assert outputs(stream.send(rows_of("k", 0))) == model.apply(rows_of("k", 0))
    lose_the_ledger(local, "cloud-0", "edge-0")
    wait_alive(local, "edge-0")
    assert [r.name for r in local.cluster.status().replicas if r.alive] == ["edge-0"]
    local.kill("controller")
    for file in local.data_dir.glob("ledger.db*"):
        file.rename(file.with_name(f"other-{file.name}"))
    for file in local.data_dir.glob("lost-ledger.db*"):
        file.rename(file.with_name(file.name.removeprefix("lost-")))
    local.restart("controller")
    wait_alive(local, "cloud-0", "edge-0")
    assert local.migrate("Tally", [0], "edge").wait().state == "COMPLETED"
    assert outputs(stream.send(rows_of("k", 1))) == model.apply(rows_of("k", 1))


def test_what_is_missing_is_said_and_never_created_empty(local: LocalCluster) -> None:
    stream, model = local.stream("Tally", source="s"), Model()
    for batch in range(2):
        assert outputs(stream.send(rows_of("k", batch))) == model.apply(rows_of("k", batch))
    (tally,) = local.cluster.status().operators
    missing = [p for p, owner in enumerate(tally.owners) if owner == "edge-0"]
    local.cluster.checkpoint("Tally")
    lose_the_ledger(local, "cloud-0")
    eventually(lambda: local.cluster.adopt(dry_run=True), "it is heard")
    with pytest.raises(AdoptionRefused) as caught:
        local.cluster.adopt()
    assert f"{len(missing)} partitions are missing" in one_line(caught.value)
    assert caught.value.where["partitions"] == " ".join(map(str, missing))
    assert local.cluster.status().operators == ()
    (found,) = local.cluster.adopt(partial=True)
    assert (list(found.missing), found.done) == (missing, True)
    eventually(lambda: model.check(local.cluster) is None, "they come from the checkpoint")
    again = local.stream("Tally", source="s")
    assert outputs(again.send(rows_of("k", 2), sequence=2)) == model.apply(rows_of("k", 2))
    shutil.rmtree(local.data_dir / "edge-0")
