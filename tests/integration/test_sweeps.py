"""Checkpoints and verifications of everything while batches go on, though controllers and nodes are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from stateflow.client import Sweep, Sweeping
from stateflow.errors import InvalidArgument, MoveConflict, MoveUnknown, OperatorNotDeployed, UnknownSite
from stateflow.partitioner import partition_of
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Model, command, damage_table, eventually, outputs, rows_of

pytestmark = pytest.mark.processes
PARTITIONS = 6


class Sites:
    """Three sites of one replica each, which have all partitions, with some rows of each."""

    def __init__(self, local: LocalCluster) -> None:
        self.local, self.cluster = local, local.cluster
        self.cluster.deploy(Tally, PARTITIONS)
        self.model = Model()
        self.batches = 0
        self.send(5)

    def send(self, count: int) -> None:
        with self.local.stream("Tally", source="s") as stream:
            for _ in range(count):
                rows = rows_of("s", self.batches)
                assert outputs(stream.send(rows)) == self.model.apply(rows)
                self.batches += 1

    def nodes(self) -> list[str]:
        return sorted(each.name for each in self.cluster.status().replicas)

    def owner(self, partition: int) -> str:
        (operator,) = self.cluster.status().operators
        return operator.owners[partition]

    def told(self, *words: str) -> Any:
        return command(*words, "--controller", self.local.address)

    @contextmanager
    def stopped(self, node: str) -> Iterator[int]:
        """Stops a node, which does nothing meanwhile and still counts as alive."""
        pid = self.local.processes[node].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def come_to(self, sweep: Sweeping, node: str, status: str = "IN_PROGRESS") -> Sweep:
        def there() -> Sweep | None:
            report = self.cluster.sweep(sweep.id).report
            return report if states(report)[node] == status else None

        return eventually(there, f"{node} is {status}")

    def send_to(self, partitions: set[int], count: int) -> None:
        """Sends rows of these partitions only."""
        keys = [key for key in (f"k{number}" for number in range(20)) if partition_of(key, PARTITIONS) in partitions]
        with self.local.stream("Tally", source="others") as stream:
            for _ in range(count):
                rows = [{"k": key, "v": 1} for key in keys]
                assert outputs(stream.send(rows)) == self.model.apply(rows)


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sites]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEAT_INTERVAL_S", "0.2")
    monkeypatch.setenv("STATEFLOW_CONTROLLER_HEARTBEATS_MISSED_MAX", "40")
    where = {"edge-0": 1, "edge-1": 1, "cloud": 1}
    with LocalCluster(sites=where, data_dir=tmp_path / "cluster", checkpoint_interval_s=0) as local:
        yield Sites(local)


def states(sweep: Sweep) -> dict[str, str]:
    return {each.node: each.status for each in sweep.nodes}


def test_a_checkpoint_of_everything_is_a_batch_that_tells_of_each_node(sites: Sites) -> None:
    done = sites.told("checkpoint", "all", "--limit", "2")
    assert done.exit_code == 0, done.output
    sweep = sites.cluster.sweep(done.stdout.split("sweep/")[1].split(":")[0]).report
    assert (sweep.chore, sweep.state, sweep.limit, sweep.faults()) == ("checkpoint", "DONE", 2, [])
    assert states(sweep) == dict.fromkeys([*sites.nodes(), "(moved)"], "COMPLETED")
    assert sum(each.partitions for each in sweep.nodes) == PARTITIONS
    assert all(each.bytes_total >= each.bytes_new > 0 for each in sweep.nodes if each.node != "(moved)")
    info = command("batch", "info", sweep.batch, "--ledger", sites.local.ledger)
    assert "DONE" in info.stdout, info.output
    entities = command("batch", "entities", sweep.batch, "--ledger", sites.local.ledger)
    assert "bytes_new" in entities.stdout.replace("\n", ""), entities.output
    listed = command("batch", "list", "--ledger", sites.local.ledger, "--json")
    assert sweep.batch in listed.stdout
    store = str(sites.local.data_dir / "checkpoints")
    proved = command("checkpoint", "verify", "--checkpoints", store)
    assert proved.exit_code == 0, proved.output
    again = sites.cluster.checkpoint_all("Tally", site="edge-1").wait()
    assert (again.state, sum(each.bytes_new for each in again.nodes)) == ("DONE", 0), "nothing has changed"
    assert 0 < sum(each.partitions for each in again.nodes) < PARTITIONS
    cluster = sites.cluster
    with pytest.raises(OperatorNotDeployed):
        cluster.checkpoint_all("Nothing")
    with pytest.raises(UnknownSite):
        cluster.checkpoint_all(site="nowhere")
    with pytest.raises(InvalidArgument, match="cannot process 0 nodes"):
        cluster.checkpoint_all(limit=0)
    with pytest.raises(MoveUnknown, match="no sweep 'abc'"):
        cluster.sweep("abc")
    with pytest.raises(MoveUnknown, match="no rolling restart"):
        cluster.rolling(sweep.id)


def test_a_controller_that_is_killed_in_the_middle_is_followed_by_one_that_goes_on(sites: Sites) -> None:
    first, second, third = sites.nodes()
    with sites.stopped(second):
        sweep = sites.cluster.checkpoint_all()
        sites.come_to(sweep, second)
        with pytest.raises(MoveConflict, match="checkpoints are being taken"):
            sites.cluster.checkpoint_all()
        sites.local.kill("controller")
    sites.local.restart("controller")
    report = sweep.wait()
    assert (report.state, set(states(report).values())) == ("DONE", {"COMPLETED"}), report
    assert sum(each.partitions for each in report.nodes) == PARTITIONS
    assert [each.node for each in report.nodes] == [first, second, third, "(moved)"]


def test_a_node_that_is_killed_in_the_middle_fails_and_the_others_go_on(sites: Sites) -> None:
    first, second, third = sites.nodes()
    with sites.stopped(second):
        sweep = sites.cluster.checkpoint_all()
        sites.come_to(sweep, second)
        sites.local.kill(second)
    report = sweep.wait()
    assert report.state == "FAILED"
    assert states(report) == {first: "COMPLETED", second: "FAILED", third: "COMPLETED", "(moved)": "COMPLETED"}
    assert "unavailable" in report.nodes[1].error
    assert {each.replica for each in report.faults()} == {second}
    sites.local.restart(second)
    eventually(lambda: all(each.alive for each in sites.cluster.status().replicas), "it is back")
    assert sites.cluster.checkpoint_all().wait().state == "DONE"


def test_what_moves_meanwhile_is_taken_in_the_end(sites: Sites) -> None:
    first, second, third = sites.nodes()
    moved = next(number for number in range(PARTITIONS) if sites.owner(number) == third)
    with sites.stopped(second):
        sweep = sites.cluster.checkpoint_all()
        sites.come_to(sweep, second)
        assert states(sweep.report)[third] == "WAITING"
        assert sites.cluster.migrate("Tally", [moved], to=first).wait().state == "COMPLETED"
    report = sweep.wait()
    assert (report.state, report.nodes[-1].node, report.nodes[-1].partitions) == ("DONE", "(moved)", 1)
    assert sum(each.partitions for each in report.nodes) == PARTITIONS


def test_what_has_not_begun_is_cancelled(sites: Sites) -> None:
    first, second, third = sites.nodes()
    with sites.stopped(second):
        sweep = sites.cluster.checkpoint_all()
        sites.come_to(sweep, second)
        told = command("batch", "cancel", f"sweep/{sweep.id}", "--controller", sites.local.address)
        assert "IN_PROGRESS" in told.stdout, told.output
        report = sweep.wait()  # also while the running node does not come back
    assert report.state == "CANCELLED"
    assert states(report) == {first: "COMPLETED", second: "CANCELLED", third: "CANCELLED", "(moved)": "CANCELLED"}
    info = command("batch", "info", f"sweep/{sweep.id}", "--ledger", sites.local.ledger)
    assert "CANCELLED" in info.stdout
    assert sites.cluster.checkpoint_all().wait().state == "DONE"


# -- verification ---------------------------------------------------------------------------------------------


def test_a_sound_cluster_is_verified_and_compared_with_its_standbys(sites: Sites) -> None:
    sites.cluster.standby("Tally", 1)
    eventually(lambda: len(_following(sites)) == PARTITIONS, "all standbys follow")
    sites.send(2)
    done = sites.told("verify", "--limit", "2")
    assert done.exit_code == 0, done.output
    sweep = sites.cluster.sweep(done.stdout.split("sweep/")[1].split(":")[0]).report
    assert (sweep.chore, sweep.state, sweep.faults()) == ("verify", "DONE", [])
    assert sum(each.partitions for each in sweep.nodes) == PARTITIONS
    assert sum(each.compared for each in sweep.nodes) == PARTITIONS
    assert sum(each.cells for each in sweep.nodes) > 20 * 3
    assert all(each.bytes_read > 0 for each in sweep.nodes if each.node != "(moved)")
    sites.model.check(sites.cluster)


def _following(sites: Sites) -> list[str]:
    return [each.replica for each in sites.cluster.status().standbys if each.phase == "CATCHING_UP"]


def test_a_flipped_byte_is_found_and_named_while_batches_go_on(sites: Sites) -> None:
    assert sites.cluster.checkpoint_all().wait().state == "DONE"  # what it has is in sorted files by now
    damaged, owner = 3, sites.owner(3)
    damage_table(sites.local, owner, damaged)
    sites.send_to(set(range(PARTITIONS)) - {damaged}, 3)
    sweep = sites.cluster.verify_all("Tally")
    sites.send_to(set(range(PARTITIONS)) - {damaged}, 10)
    report = sweep.wait()
    sites.send_to(set(range(PARTITIONS)) - {damaged}, 3)
    assert report.state == "FAILED"
    (fault,) = report.faults()
    assert (fault.operator, fault.partition, fault.replica) == ("Tally", damaged, owner)
    assert "state_damaged" in fault.error
    assert "mismatch" in fault.error
    expected = dict.fromkeys([*sites.nodes(), "(moved)"], "COMPLETED") | {owner: "FAILED"}
    assert states(report) == expected
    assert sum(each.partitions for each in report.nodes) == PARTITIONS
    told = sites.told("verify")
    assert told.exit_code == 1
    assert f"Tally/{damaged} at {owner}" in told.stdout.replace("\n", " ")
    entities = command("batch", "entities", report.batch, "--ledger", sites.local.ledger, "--json")
    assert "state_damaged" in entities.stdout
    assert sites.owner(damaged) == owner, "nothing was changed"
    assert [each.partition for each in sites.cluster.status().damaged] == [damaged]
    shown = sites.told("status").stdout
    assert "Damaged" in shown
    assert f"Tally/{damaged}" in shown
    restored = sites.told("checkpoint", "restore", "Tally", str(damaged))
    assert restored.exit_code == 0, restored.output
    assert sites.cluster.verify_all().wait().state == "DONE", "what the fault says helps"
    assert sites.cluster.status().damaged == ()
    sites.model.check(sites.cluster)


def test_rot_is_found_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any leader finds damage unasked, also where another one began."""
    monkeypatch.setenv("STATEFLOW_CONTROLLER_VERIFY_INTERVAL_S", "2")
    with LocalCluster(sites={"edge": 2}, data_dir=tmp_path / "cluster", checkpoint_interval_s=0) as local:
        sites = Sites(local)
        assert sites.cluster.checkpoint_all().wait().state == "DONE"

        def verified() -> list[str]:
            listed = command("batch", "list", "--ledger", sites.local.ledger, "--json")
            return [each["status"] for each in json.loads(listed.stdout)["batches"] if each["command"] == "verify"]

        eventually(lambda: verified()[:2] == ["DONE", "DONE"], "everything is read, again and again")
        damaged, owner = 2, sites.owner(2)
        damage_table(local, owner, damaged)
        local.kill("controller")
        local.restart("controller")
        (fault,) = eventually(lambda: sites.cluster.status().damaged, "it is found")
        assert (fault.partition, fault.replica) == (damaged, owner)
        assert "state_damaged" in fault.error
        sites.send_to(set(range(PARTITIONS)) - {damaged}, 3)


def test_a_slow_verification_ends_when_it_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_REPLICA_VERIFY_BYTES_PER_S", "20")
    with LocalCluster(sites={"edge": 1}, data_dir=tmp_path / "cluster", checkpoint_interval_s=0) as local:
        sites = Sites(local)
        sweep = sites.cluster.verify_all()
        sites.come_to(sweep, sites.nodes()[0])
        assert sweep.cancel().state == "IN_PROGRESS"
        report = sweep.wait()
        assert report.state == "CANCELLED"
        assert sum(each.partitions for each in report.nodes) < PARTITIONS
        assert report.nodes[0].ms < 20_000, "which one partition alone takes longer than"
