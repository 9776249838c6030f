"""Operators that are undeployed, replicas that are forgotten, and the report of partitions that are missing."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.client import OperatorStatus
from stateflow.errors import (
    InvalidArgument,
    NameTaken,
    OperatorNotDeployed,
    OperatorOutdated,
    PartitionsLive,
    StateMissing,
)
from stateflow.settings import RouterSettings
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Model, command, eventually, one_line, outputs, rows_of, wait_alive

pytestmark = pytest.mark.processes
PARTITIONS = 6


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "2")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.2")
    with LocalCluster(
        Tally,
        sites={"cloud": 1, "edge": 1},
        partitions=PARTITIONS,
        data_dir=tmp_path / "cluster",
        checkpoint_interval_s=0,
    ) as cluster:
        yield cluster


def partitions(local: LocalCluster, replica: str) -> list[Path]:
    """Folders of the partitions that a replica has on disk."""
    return list((local.data_dir / replica / "operators").glob("*/p*"))


def deployed(local: LocalCluster) -> OperatorStatus:
    (operator,) = local.cluster.status().operators
    return operator


def test_a_client_of_the_former_operator_sends_no_former_rows_to_the_new_one(
    local: LocalCluster, tmp_path: Path
) -> None:
    """The client keeps rows in case partitions lose them, and the new operator's partitions contain none of them."""
    stream = local.stream("Tally", source="s")
    stream.send(rows_of("k", 0))
    with local.cluster.forwarding("Tally", "gateway", outbox=tmp_path / "outbox") as gateway:
        gateway.send(rows_of("k", 1))
        local.cluster.undeploy("Tally", delete_state=True)
        local.cluster.deploy(Tally, PARTITIONS)
        for call in (lambda: stream.send(rows_of("k", 2)), stream.verify):
            with pytest.raises(OperatorOutdated, match="undeployed and deployed anew"):
                call()
        gateway.send(rows_of("k", 2))
        assert {each.code for each in gateway.waiting().errors.values()} == {"operator_outdated"}
    model = Model()
    again = local.stream("Tally", source="s")
    assert outputs(again.send(rows_of("k", 3))) == model.apply(rows_of("k", 3))
    model.check(local.cluster)


def test_an_operator_goes_with_its_state_and_a_new_one_begins_empty(local: LocalCluster) -> None:
    """A replica that was away deletes the undeployed operator when it comes back, and nothing of the new one."""
    stream = local.stream("Tally", source="s")
    stream.send(rows_of("k", 0))
    local.cluster.migrate("Tally", [deployed(local).owners.index("edge-0")], to="cloud").wait()
    with pytest.raises(PartitionsLive, match=r"partitions are live.*pass --delete-state"):
        local.cluster.undeploy("Tally")
    local.kill("edge-0")
    assert local.cluster.undeploy("Tally", delete_state=True) == ["edge-0"]
    assert partitions(local, "cloud-0") == []
    assert partitions(local, "edge-0")
    with pytest.raises(OperatorNotDeployed):
        stream.send(rows_of("k", 1))
    with pytest.raises(OperatorNotDeployed):
        local.cluster.undeploy("Tally", delete_state=True)
    eventually(lambda: not any(r.alive for r in local.cluster.status().replicas if r.site == "edge"), "it is away")
    local.cluster.deploy(Tally, PARTITIONS + 1)
    assert set(deployed(local).owners) == {"cloud-0"}
    model = Model()
    again = local.stream("Tally", source="s")
    assert outputs(again.send(rows_of("k", 0))) == model.apply(rows_of("k", 0))
    local.restart("edge-0")
    wait_alive(local, "edge-0")
    eventually(lambda: not partitions(local, "edge-0"), "it has heard that they are nobody's any more")
    move = local.cluster.migrate("Tally", range(PARTITIONS + 1), to="edge").wait()
    assert move.state == "COMPLETED"
    assert outputs(again.send(rows_of("k", 1))) == model.apply(rows_of("k", 1))
    model.check(local.cluster)
    done = command("undeploy", "Tally", "--delete-state", "--json", "--controller", local.address)
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"operator": "Tally", "waiting": []})
    assert local.cluster.status().operators == ()


def test_a_replica_is_forgotten_when_it_owns_nothing_and_has_ended(local: LocalCluster) -> None:
    with pytest.raises(NameTaken, match="may still be serving"):
        local.cluster.forget("edge-0")
    with pytest.raises(InvalidArgument, match=r"no replica 'moon'.*cloud-0, edge-0"):
        local.cluster.forget("moon")
    for migration in local.cluster.drain("edge-0"):
        assert migration.wait().state == "COMPLETED"
    local.processes["edge-0"].stop()
    done = eventually(lambda: _forgotten(local), "its lease lapses")
    assert done == "edge-0 forgotten\n"
    assert [r.name for r in local.cluster.status().replicas] == ["cloud-0"]
    assert "unknown_site" in command("migrate", "Tally", "0", "--to", "edge", "--controller", local.address).stderr
    shutil.rmtree(local.data_dir / "edge-0")
    local.restart("edge-0")  # with another directory it is a new replica
    wait_alive(local, "edge-0", "cloud-0")
    assert local.cluster.migrate("Tally", [0], to="edge").wait().state == "COMPLETED"


def _forgotten(local: LocalCluster) -> str:
    done = command("forget", "edge-0", "--controller", local.address)
    assert done.exit_code == 0 or done.stderr.startswith("name_taken: "), done.stderr
    return done.stdout


def test_partitions_whose_owner_came_without_them_are_said(local: LocalCluster) -> None:
    """Partitions whose owner came without them are reported.

    ``status`` says so, with the command that helps, and so does each call that sends to them, reads them or asks for
    their positions.
    """
    stream = local.stream("Tally", source="s", settings=RouterSettings(unavailable_timeout_s=3))
    stream.send(rows_of("k", 0))
    lost = sorted(p for p, owner in enumerate(deployed(local).owners) if owner == "edge-0")
    local.kill("edge-0")
    shutil.rmtree(local.data_dir / "edge-0" / "operators")
    local.restart("edge-0")
    wait_alive(local, "edge-0")

    def told() -> bool:
        return ["no takeover" in each.error for each in deployed(local).unserved] == [True]

    eventually(told, "the loss of all is known, and that nobody has them")
    (unserved,) = deployed(local).unserved
    assert (unserved.partitions, unserved.owner) == (tuple(lost), "edge-0")
    assert unserved.error.startswith("state_missing: edge-0 registered without these partitions")
    assert "`stateflow checkpoint restore Tally" in unserved.error
    shown = command("status", "--controller", local.address).stdout
    assert "not served" in shown
    assert "unserved" in shown
    for ask in (
        lambda: stream.send(rows_of("k", 1)),
        lambda: local.stream("Tally", source="another"),
        lambda: local.cluster.read_state("Tally", "n"),
    ):
        began = time.monotonic()
        with pytest.raises(StateMissing) as caught:
            ask()
        print(time.monotonic() - began, one_line(caught.value))
        assert "edge-0 registered without these partitions" in one_line(caught.value)
