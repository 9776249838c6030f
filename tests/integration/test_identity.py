"""Names of replicas: a name belongs to one data directory; another one, or a copy of it, takes nothing over."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.client import StreamClient
from stateflow.local.process import Process
from stateflow.status import RefusedReplica
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Model, eventually, outputs, rows_of, told, wait_alive

pytestmark = pytest.mark.processes
PARTITIONS = 4


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "2")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.2")
    with LocalCluster(
        Tally, partitions=PARTITIONS, data_dir=tmp_path / "cluster", sites={"cloud": 1}, checkpoint_interval_s=0
    ) as cluster:
        yield cluster


def another(local: LocalCluster, directory: str, name: str = "cloud-0", asks_for: str = "cloud-0") -> Process:
    """Starts a second process, with a data directory of its own."""
    arguments = local._replica_arguments(name)
    arguments[arguments.index("--name") + 1] = asks_for
    arguments[arguments.index("--data-dir") + 1] = str(local.data_dir / directory)
    process = local._process(f"process-{directory}", arguments)
    process.start()
    process.wait_ready()
    return process


def refused(local: LocalCluster, what: str) -> RefusedReplica:
    """Waits until one process is refused for this reason, and returns it."""

    def found() -> list[RefusedReplica]:
        return [each for each in local.cluster.status().refused if what in each.error]

    (one,) = eventually(found, f"somebody is refused: {what}")
    return one


def lines(local: LocalCluster, process: str) -> list[str]:
    """Returns what a process logged about its membership."""
    log = (local.data_dir / f"{process}.log").read_text()
    return [line.partition("membership: ")[2] for line in log.splitlines() if "membership: " in line]


def send(stream: StreamClient, model: Model, *batches: int) -> None:
    for batch in batches:
        assert outputs(stream.send(rows_of("k", batch))) == model.apply(rows_of("k", batch))


def failovers(local: LocalCluster) -> list[Any]:
    return [each for each in local.cluster.reconfigurations() if each.kind == "failover"]


def test_a_second_replica_of_a_name_takes_nothing_over(local: LocalCluster) -> None:
    stream, model = local.stream("Tally", source="s"), Model()
    send(stream, model, 0, 1, 2)
    local.cluster.checkpoint("Tally")
    send(stream, model, 3, 4, 5)
    second = another(local, "empty")
    one = refused(local, "may still be serving")
    assert one.address == second.address
    send(stream, model, 6, 7, 8)
    model.check(local.cluster)
    (logged,) = lines(local, "process-empty")
    _, _, line = logged.partition(", will retry: ")
    assert line.startswith("name_taken: the name belongs to another data directory, whose replica may still be serving")
    assert f"address={local.processes['cloud-0'].address}" in line
    assert line.endswith("start this one with another --name, or stop the other one first")
    assert lines(local, "cloud-0") == [f"registered as cloud-0 at {local.address}"]
    (shown,) = told("status", "--controller", local.address)["refused"]
    assert (shown["address"], sorted(shown["error"])) == (second.address, sorted(line))
    second.stop()
    own = another(local, "empty", asks_for="cloud-1")
    wait_alive(local, "cloud-1")
    assert failovers(local) == []
    own.stop()


def test_a_new_directory_needs_a_command_and_the_old_one_is_refused_then(local: LocalCluster) -> None:
    stream, model = local.stream("Tally", source="s"), Model()
    send(stream, model, 0, 1)
    local.cluster.checkpoint("Tally")
    send(stream, model, 2)
    local.kill("cloud-0")
    new = another(local, "new")
    one = refused(local, "which holds its state")
    assert one.error.endswith(
        "start the replica with that directory; if it is lost for good, `stateflow replace cloud-0` gives the name to "
        "this one, and its state comes from standbys and checkpoints"
    )
    local.restart("cloud-0")  # it was not lost
    wait_alive(local, "cloud-0")
    send(stream, model, 3)
    assert failovers(local) == [] or all(each.state == "FAILED" for each in failovers(local))
    refused(local, "may still be serving")  # the new replica has heard so since
    local.kill("cloud-0")
    refused(local, "which holds its state")
    done = told("replace", "cloud-0", "--controller", local.address)
    assert done == {"replica": "cloud-0", "directory": one.directory, "partitions": PARTITIONS}
    wait_alive(local, "cloud-0")
    send(stream, model, 4)  # the client also sends what the checkpoint lacks
    model.check(local.cluster)
    local.restart("cloud-0")
    assert refused(local, "may still be serving").directory != one.directory
    send(stream, model, 5)
    new.stop()


def test_a_directory_that_was_moved_is_welcome_when_the_lease_has_lapsed(local: LocalCluster) -> None:
    """A moved directory is let in once the lease has lapsed; despite a checkpoint, no takeover begins meanwhile."""
    stream, model = local.stream("Tally", source="s"), Model()
    send(stream, model, 0)
    local.cluster.checkpoint("Tally")
    send(stream, model, 1, 2)
    local.kill("cloud-0")
    shutil.copytree(local.data_dir / "cloud-0", local.data_dir / "moved")
    shutil.rmtree(local.data_dir / "cloud-0")
    moved = another(local, "moved")
    eventually(lambda: any(line.startswith("registered") for line in lines(local, "process-moved")), "it is let in")
    send(stream, model, 3, 4)
    model.check(local.cluster)
    assert failovers(local) == []
    moved.stop()
