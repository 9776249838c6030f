"""Checkpoints of running clusters: restores beside collections, restores whose disk is lost, unmounted stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateflow.checkpoint import CheckpointStore, Retention, collect
from stateflow.errors import CheckpointStoreMissing, LeaseLost, StateflowError
from stateflow.partition.data_directory import NOTE
from stateflow.testing import LocalCluster
from tests.integration.operators import Tally
from tests.integration.support import Model, eventually, outputs, read, rows_of, told, wait_alive

pytestmark = pytest.mark.processes
PARTITIONS = 3


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(
        Tally, sites={"cloud": 1}, partitions=PARTITIONS, data_dir=tmp_path / "c", checkpoint_interval_s=0
    ) as cluster:
        yield cluster


def store_of(local: LocalCluster) -> Path:
    return local.data_dir / "checkpoints"


def test_what_was_restored_is_there_whatever_is_collected_meanwhile(local: LocalCluster) -> None:
    """A restored checkpoint survives collections that run, two at a time, while partitions go back and forth."""
    stream = local.stream("Tally", source="s")
    everywhere = [{"k": f"key {n}", "v": 1} for n in range(60)]
    stop = threading.Event()
    wrong: list[StateflowError] = []

    def collecting() -> None:
        while not stop.is_set():
            try:
                collect(CheckpointStore(str(store_of(local))), Retention(keep=1))
            except StateflowError as error:
                wrong.append(error)

    threads = [threading.Thread(target=collecting) for _ in range(2)]
    restored = 0
    for round_ in range(4):
        for _ in range(2):
            stream.send(everywhere)
            local.cluster.checkpoint("Tally")
        before = read(local.cluster, "Tally", "n")
        if not round_:
            for thread in threads:
                thread.start()
        reports = local.cluster.restore("Tally", at=("s", stream.position))
        reports += local.cluster.restore("Tally", at=("s", stream.position - 1))
        for report in reports:
            assert not report.error or report.error.startswith("checkpoint_missing: "), "it was collected before"
            restored += not report.error
        verified = told("checkpoint", "verify", "Tally", "--checkpoints", str(store_of(local)))
        assert verified["sound"] is True
        assert set(read(local.cluster, "Tally", "n").values()) <= {*before.values(), *(n - 1 for n in before.values())}
        local.cluster.restore("Tally", at=("s", stream.position))
        stream = local.stream("Tally", source=f"s{round_}")
    stop.set()
    for thread in threads:
        thread.join()
    assert restored >= 4 * PARTITIONS
    assert not wrong


@pytest.mark.parametrize("spelling", ["{}/", "file://{}", "{}/../link", "elsewhere"])
def test_a_restore_outlives_a_disk_that_is_lost_right_after(local: LocalCluster, tmp_path: Path, spelling: str) -> None:
    stream = local.stream("Tally", source="s")
    model = Model()
    stream.send(rows_of("a-", 0))
    model.apply(rows_of("a-", 0))
    local.cluster.savepoint("v1", "Tally")
    url = spelling.format(store_of(local))
    (store_of(local).parent / "link").symlink_to(store_of(local))
    if spelling == "elsewhere":
        url = str(tmp_path / "elsewhere")
        told("savepoint", "export", "v1", "--checkpoints", str(store_of(local)), "--to", url)
    stream.send(rows_of("a-", 1))
    local.cluster.checkpoint("Tally")
    assert [each.error for each in local.cluster.restore("Tally", url=url, savepoint="v1")] == [""] * PARTITIONS
    model.check(local.cluster)
    local.kill("cloud-0")
    local.replace("cloud-0")
    wait_alive(local, "cloud-0")
    eventually(lambda: model.check(local.cluster) is None, "its partitions are taken over, as they were restored")
    assert told("checkpoint", "verify", "Tally", "--checkpoints", str(store_of(local)))["sound"] is True


def refused(local: LocalCluster) -> bool:
    try:
        local.cluster.checkpoint("Tally")
    except CheckpointStoreMissing:
        return True
    except LeaseLost:  # the replica registers
        return False
    raise AssertionError("a checkpoint was taken")


def test_a_store_that_is_not_mounted_is_said_and_not_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is away for longer than checkpoints are kept. Batches go on, and what it had is restored afterwards."""
    monkeypatch.setenv("STATEFLOW_REPLICA_CHECKPOINT_KEEP_S", "1")
    monkeypatch.setenv("STATEFLOW_REPLICA_CHECKPOINT_TIDY_INTERVAL_S", "1")
    with LocalCluster(
        Tally, sites={"cloud": 1}, partitions=PARTITIONS, data_dir=tmp_path / "c", checkpoint_interval_s=3600
    ) as local:
        unmounted(local)


def unmounted(local: LocalCluster) -> None:
    stream, model = local.stream("Tally", source="s"), Model()
    assert outputs(stream.send(rows_of("a-", 0))) == model.apply(rows_of("a-", 0))
    local.cluster.checkpoint("Tally")
    place, away = store_of(local), store_of(local).with_name("away")
    place.rename(away)
    for mount_point in (False, True):
        if mount_point:
            place.mkdir()
        with pytest.raises(CheckpointStoreMissing, match="check that it is mounted"):
            local.cluster.checkpoint("Tally")
        failed = local.cluster.restore("Tally")
        assert {each.error.partition(":")[0] for each in failed} == {"checkpoint_store_missing"}
        for command in (("list",), ("verify",), ("gc",)):
            answer = told("checkpoint", *command, "--checkpoints", str(place), status=1)
            assert answer["error"]["code"] == "checkpoint_store_missing"
        local.kill("cloud-0")
        local.restart("cloud-0")
        wait_alive(local, "cloud-0")
        eventually(lambda: refused(local), "it says so after a restart too")
        rows = rows_of("a-", 1 + mount_point)
        assert outputs(stream.send(rows)) == model.apply(rows), "batches go on"
        assert not place.exists() or not list(place.iterdir()), "nothing is written"
    place.rmdir()
    away.rename(place)
    assert not [each.error for each in local.cluster.restore("Tally", at=("s", 0)) if each.error], "nothing was dropped"
    stream = local.stream("Tally", source="restored")
    first = Model()
    first.apply(rows_of("a-", 0))
    first.check(local.cluster)
    assert local.cluster.checkpoint("Tally").partitions == PARTITIONS
    assert (local.data_dir / "cloud-0" / NOTE).exists()
    made = told("checkpoint", "init", "--checkpoints", str(place))
    assert told("checkpoint", "init", "--checkpoints", f"{place}/")["id"] == made["id"]
