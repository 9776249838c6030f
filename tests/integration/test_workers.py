"""Nodes of several workers: real processes that are killed, stopped, and started with other numbers of workers."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from stateflow.client import Cluster, ReplicaStatus
from stateflow.errors import DataDirLocked, InvalidArgument
from stateflow.partitioner import partition_of
from stateflow.testing import LocalCluster
from stateflow.types import node_of
from tests.integration.operators import Prints, Tally, Works
from tests.integration.support import command, eventually, read

pytestmark = pytest.mark.processes

PARTITIONS = 8
KEYS = 64
NUMBERS = itertools.count()  # of sources


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    with LocalCluster(Tally, sites={"edge": 1, "cloud": 1}, partitions=PARTITIONS, workers=2) as started:
        yield started


@pytest.fixture
def local(running: LocalCluster) -> LocalCluster:
    """Two nodes of two workers, all of which are there. Each test sends keys of its own."""

    def complete() -> bool:
        there = [worker for node in ("edge-0", "cloud-0") for worker in workers_of(running, node)]
        alive = {name for name, replica in members(running.cluster).items() if replica.alive}
        return alive == set(there) and len(there) == 4

    eventually(complete, "all workers are there")
    return running


def members(cluster: Cluster) -> dict[str, ReplicaStatus]:
    return {replica.name: replica for replica in cluster.status().replicas}


def owners(cluster: Cluster) -> list[str]:
    (operator,) = cluster.status().operators
    return list(operator.owners)


def workers_of(local: LocalCluster, node: str) -> dict[str, int]:
    """Returns the process ids of a node's workers, by name."""
    found = {}
    for child in psutil.Process(local.processes[node].pid).children():
        try:
            line = child.cmdline()
        except psutil.Error:  # it has ended right now
            continue
        if "--worker" not in line:  # it has not become a worker yet
            continue
        number = line[line.index("--worker") + 1]
        found[node if number == "0" else f"{node}~{number}"] = child.pid
    return found


class Sender:
    """Sends rows for every one of its ``keys``, and knows what must be stored."""

    def __init__(self, local: LocalCluster, name: str) -> None:
        self.stream = local.stream("Tally", source=name)
        self.prefix = f"{name}-"
        self.keys = [f"{self.prefix}{number}" for number in range(KEYS)]
        self.sent = 0

    def send(self) -> None:
        self.stream.send([{"k": key, "v": 1} for key in self.keys])
        self.sent += 1

    def check(self, local: LocalCluster) -> None:
        assert read(local.cluster, "Tally", "n", self.prefix) == {(key, None): self.sent for key in self.keys}


@pytest.fixture
def sender(local: LocalCluster) -> Sender:
    return Sender(local, f"s{next(NUMBERS)}")


def refused(local: LocalCluster, *arguments: str) -> str:
    """Starts a node that must be refused, and returns the error that it prints."""
    words = [sys.executable, "-m", "stateflow", "replica", "--controller", local.address, *arguments]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    assert ended.returncode == 1
    return ended.stderr


def test_a_node_is_one_and_so_is_who_has_its_directory(local: LocalCluster) -> None:
    assert set(members(local.cluster)) == {"edge-0", "edge-0~1", "cloud-0", "cloud-0~1"}
    assert {owners(local.cluster).count(name) for name in members(local.cluster)} == {PARTITIONS // 4}
    shown = command("status", "--controller", local.address).stdout
    assert "alive, 2 workers" in shown
    assert "~" not in shown, "people see nodes"
    there = ("--data-dir", str(local.data_dir / "edge-0"))
    assert "data directory" in refused(local, "--site", "x", "--name", "other", "--workers", "2", *there)
    # there would be room for more workers
    assert "data_dir_locked" in refused(local, "--site", "edge", "--name", "edge-0", "--workers", "4", *there)
    assert "edge-0~2" not in members(local.cluster)


def test_operators_print_where_the_log_is(local: LocalCluster) -> None:
    """Operators print into the log, and do not wait for a reader."""
    local.cluster.deploy(Prints, 4, sites=["edge"])
    local.stream("Prints", source="s").send([{"k": f"k{number}"} for number in range(400)])
    log = local.data_dir / "edge-0.log"
    eventually(lambda: log.read_text().count("x" * 1000) == 400, "all is there")
    local.cluster.undeploy("Prints", delete_state=True)


@pytest.mark.parametrize("victim", ["edge-0", "edge-0~1"])
def test_a_worker_that_is_killed_comes_back_with_its_partitions(
    local: LocalCluster, sender: Sender, victim: str
) -> None:
    sender.send()
    before = owners(local.cluster)
    os.kill(workers_of(local, "edge-0")[victim], signal.SIGKILL)
    for _ in range(3):
        sender.send()
    assert owners(local.cluster) == before
    sender.check(local)


def test_workers_end_with_their_node_however_that_does_and_it_serves_again(local: LocalCluster, sender: Sender) -> None:
    sender.send()
    pids = workers_of(local, "edge-0").values()
    local.kill("edge-0")
    eventually(lambda: not any(map(psutil.pid_exists, pids)), "its workers end")
    local.restart("edge-0")
    sender.send()
    sender.check(local)
    pids = workers_of(local, "edge-0").values()
    local.processes["edge-0"].stop()
    assert not any(map(psutil.pid_exists, pids))
    local.restart("edge-0")


def test_moves_and_drains_name_nodes_and_standbys_are_at_others(local: LocalCluster, sender: Sender) -> None:
    sender.send()
    assert local.migrate("Tally", list(range(PARTITIONS)), "cloud-0").wait().state == "COMPLETED"
    assert {node_of(owner) for owner in owners(local.cluster)} == {"cloud-0"}
    assert len(set(owners(local.cluster))) == 2, "both workers have some"
    for move in local.cluster.drain("cloud-0"):
        assert move.wait().state == "COMPLETED"
    assert {node_of(owner) for owner in owners(local.cluster)} == {"edge-0"}
    with pytest.raises(InvalidArgument, match="2 standbys need 3 replicas, 2 can hold copies"):
        local.cluster.standby("Tally", 2)
    local.cluster.standby("Tally", 1)
    standbys = eventually(
        lambda: [s for s in local.cluster.status().standbys if s.phase == "CATCHING_UP"] or None, "standbys follow"
    )
    assert {node_of(standby.replica) for standby in standbys} == {"cloud-0"}
    sender.send()
    sender.check(local)
    local.cluster.standby("Tally", 0)


def test_more_and_fewer_workers_at_the_next_start(tmp_path: Path) -> None:
    """A node keeps its state with more and with fewer workers, also when partitions have to leave a worker."""

    def again(local: LocalCluster, workers: int) -> None:
        local.processes["local-0"].stop()
        arguments = local.processes["local-0"]._arguments
        arguments[arguments.index("--workers") + 1] = str(workers)
        local.restart("local-0")

    with LocalCluster(Tally, partitions=PARTITIONS, data_dir=tmp_path, workers=1) as local:
        sender = Sender(local, "s")
        sender.send()
        again(local, 3)
        eventually(lambda: {*owners(local.cluster)} == {"local-0", "local-0~1", "local-0~2"}, "they share")
        sender.send()
        again(local, 1)
        eventually(lambda: {*owners(local.cluster)} == {"local-0"}, "all are at the only one")
        sender.send()
        sender.check(local)
        eventually(lambda: not list((tmp_path / "local-0" / "workers").glob("*/")), "nothing is left of the others")
        sender.send()
        sender.check(local)


def test_a_worker_that_dies_at_every_start_leaves_the_others_alone(tmp_path: Path) -> None:
    with LocalCluster(Tally, partitions=PARTITIONS, data_dir=tmp_path, workers=2) as local:
        sender = Sender(local, "s")
        sender.send()
        log = tmp_path / "local-0.log"
        directory = tmp_path / "local-0" / "workers" / "1"
        pid = workers_of(local, "local-0")["local-0~1"]
        aside = tmp_path / "aside"
        directory.rename(aside)
        directory.write_text("no directory")
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: "local-0~1 fails at every start" in log.read_text(), "it is said")
        assert "local-0" in workers_of(local, "local-0")
        rows = local.cluster.status().replicas
        assert next(row.alive for row in rows if row.name == "local-0")
        directory.unlink()
        aside.rename(directory)
        sender.send()
        sender.check(local)


def test_rows_of_other_workers_go_on_while_a_killed_one_is_away(tmp_path: Path) -> None:
    """Rows of a worker's partitions flow while another worker of the node is killed, and as long as it is away.

    Rows of the killed worker's partitions wait for it. All of them are applied once.
    """
    with LocalCluster(Tally, partitions=PARTITIONS, data_dir=tmp_path, workers=2) as local:
        owned = owners(local.cluster)
        beside, held = Sender(local, "beside"), Sender(local, "held")
        for sender, owner in ((beside, "local-0"), (held, "local-0~1")):
            sender.keys = [key for key in sender.keys if owned[partition_of((key,), PARTITIONS)] == owner]
            assert sender.keys
            sender.send()
        stop = threading.Event()

        def flow() -> None:
            while not stop.is_set():
                beside.send()

        def more(batches: int) -> None:
            goal = beside.sent + batches
            eventually(lambda: flowing.done() or beside.sent >= goal, f"{batches} more batches")
            assert not flowing.done(), flowing.exception()

        with ThreadPoolExecutor(2) as threads:
            flowing = threads.submit(flow)
            try:
                more(5)
                pid = workers_of(local, "local-0")["local-0~1"]
                directory, aside = tmp_path / "local-0" / "workers" / "1", tmp_path / "aside"
                directory.rename(aside)
                directory.write_text("no directory")  # it cannot come back
                os.kill(pid, signal.SIGKILL)
                waiting = threads.submit(held.send)
                eventually(lambda: "worker local-0~1 ended" in (tmp_path / "local-0.log").read_text(), "it is noticed")
                more(20)
                assert not waiting.done(), "nobody has its partitions"
                directory.unlink()
                aside.rename(directory)
                waiting.result(120)
                more(5)
            finally:
                stop.set()
        flowing.result()
        for sender in (beside, held):
            sender.check(local)
        assert owners(local.cluster) == owned


def test_a_skewed_load_is_spread_over_the_workers(tmp_path: Path) -> None:
    """All rows are for the partitions of one worker: half of these go to the other worker while rows flow."""
    with LocalCluster(Works, partitions=PARTITIONS, data_dir=tmp_path, workers=2) as local:
        owned = owners(local.cluster)
        hot = [number for number, owner in enumerate(owned) if owner == "local-0"]
        assert len(hot) == PARTITIONS // 2
        of_each: dict[int, list[str]] = {number: [] for number in hot}
        for key in map("k{}".format, range(100 * PARTITIONS)):
            of_each.get(partition_of((key,), PARTITIONS), []).append(key)
        keys = [key for some in of_each.values() for key in some[:8]]
        assert len(keys) == 8 * len(hot), "each of them has as much to do"
        sent = 0
        with local.stream("Works", source="s") as stream:

            def shared() -> bool:
                nonlocal sent
                sent += 1
                told = stream.send([{"k": key, "loops": 200_000} for key in keys])
                assert {(row["k"], row["n"]) for row in told} == {(key, sent) for key in keys}
                now = owners(local.cluster)
                return Counter(now[number] for number in hot) == {"local-0": len(hot) // 2, "local-0~1": len(hot) // 2}

            eventually(shared, "each worker has half of the load")
        assert read(local.cluster, "Works", "n") == {(key, None): sent for key in keys}


def test_a_worker_that_hangs_keeps_no_other_from_being_started_again(local: LocalCluster, sender: Sender) -> None:
    """A worker that hangs while it starts keeps no other from being started again."""
    first = workers_of(local, "edge-0")
    again = begun_again(local, "edge-0~1")
    os.kill(again, signal.SIGSTOP)
    os.kill(first["edge-0"], signal.SIGKILL)
    eventually(lambda: workers_of(local, "edge-0").get("edge-0", first["edge-0"]) != first["edge-0"], "as does 0")
    os.kill(again, signal.SIGCONT)
    sender.send()
    sender.check(local)


def test_a_node_whose_workers_are_still_ending_is_started_at_once(local: LocalCluster, sender: Sender) -> None:
    pids = workers_of(local, "edge-0")
    os.kill(pids["edge-0~1"], signal.SIGSTOP)  # it takes its time
    local.kill("edge-0")
    threading.Timer(6.0, os.kill, (pids["edge-0~1"], signal.SIGCONT)).start()
    local.restart("edge-0")
    sender.send()
    sender.check(local)
    log = (local.data_dir / "edge-0.log").read_text()
    assert "data_dir_locked" not in log


def begun_again(local: LocalCluster, worker: str) -> int:
    """Kills a worker and returns its new process, which has claimed nothing yet."""
    former = workers_of(local, node_of(worker))[worker]
    os.kill(former, signal.SIGKILL)
    return eventually(lambda: (now := workers_of(local, node_of(worker)).get(worker)) != former and now, "it begins")


@pytest.mark.parametrize("begins", [False, True], ids=["serves", "begins"])
def test_a_directory_is_not_wiped_while_a_worker_has_it(
    local: LocalCluster, sender: Sender, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory is not wiped while a worker hangs, as it serves or as it begins, and its supervisor is killed."""
    sender.send()
    assert local.migrate("Tally", list(range(PARTITIONS)), "cloud-0").wait().state == "COMPLETED"
    pid = begun_again(local, "edge-0~1") if begins else workers_of(local, "edge-0")["edge-0~1"]
    os.kill(pid, signal.SIGSTOP)
    local.kill("edge-0")
    directory = local.data_dir / "edge-0"
    identities = [directory / "REPLICA", directory / "workers" / "1" / "REPLICA"]
    before = [path.read_text() for path in identities]
    monkeypatch.setenv("STATEFLOW_REPLICA_STOP_TIMEOUT_S", "0.5")
    with pytest.raises(DataDirLocked, match="workers of a former node still use the data directory") as caught:
        local.replace("edge-0")
    assert caught.value.where == {"path": directory} | ({} if begins else {"pids": str(pid)})
    assert [path.read_text() for path in identities] == before
    monkeypatch.undo()
    threading.Timer(2.0, os.kill, (pid, signal.SIGCONT)).start()
    local.replace("edge-0")
    assert not psutil.pid_exists(pid)
    assert [path.read_text() for path in identities] != before
    sender.send()
    assert local.migrate("Tally", list(range(PARTITIONS)), "edge-0").wait().state == "COMPLETED"
    sender.send()
    sender.check(local)


def test_what_a_hanging_worker_has_outlives_its_cluster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalCluster(Tally, partitions=1, workers=2) as local:
        pid = workers_of(local, "local-0")["local-0~1"]
        os.kill(pid, signal.SIGSTOP)
        local.kill("local-0")
        monkeypatch.setenv("STATEFLOW_REPLICA_STOP_TIMEOUT_S", "0.5")
        with caplog.at_level(logging.WARNING):
            local.stop()
        assert f"pids={pid}" in caplog.text
        assert (local.data_dir / "local-0" / "workers" / "1" / "REPLICA").exists()
        os.kill(pid, signal.SIGCONT)
    assert not local.data_dir.exists(), "it has ended"
