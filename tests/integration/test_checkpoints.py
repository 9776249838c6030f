"""Checkpoints of a running cluster: taken, proved, restored, carried to another cluster; by library and command."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from reconfig.controller.restores import AT_ONCE
from stateflow.checkpoint import CheckpointStore
from stateflow.errors import MoveConflict, SchemaMismatch, SourceTaken, StateflowError
from stateflow.reports import RestoredPartition
from stateflow.testing import LocalCluster
from tests.integration.operators import Blob, Tally
from tests.integration.support import (
    Model,
    check_owners,
    command,
    eventually,
    outputs,
    read,
    rows_of,
    settled,
    told,
    wait_alive,
)

pytestmark = pytest.mark.processes
PARTITIONS = 6


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    # long enough that no partition is taken over before a test restores it
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "15")
    with LocalCluster(
        Tally,
        Blob,
        sites={"cloud": 1, "edge": 1},
        partitions=PARTITIONS,
        data_dir=tmp_path / "c",
        deploy_to=("cloud",),
        checkpoint_interval_s=0,
    ) as cluster:
        yield cluster


def url(local: LocalCluster) -> str:
    return str(local.data_dir / "checkpoints")


def restored(reports: list[RestoredPartition]) -> list[RestoredPartition]:
    assert [each.error for each in reports] == [""] * len(reports)
    return reports


def test_an_operator_is_put_back_and_its_source_starts_again_from_there(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="s")
    model = Model()
    for batch in range(3):
        model.apply(rows_of("a-", batch))
        stream.send(rows_of("a-", batch))
    local.cluster.checkpoint("Tally")
    for batch in range(3, 6):
        stream.send(rows_of("a-", batch))
    reports = restored(local.cluster.restore("Tally"))
    assert [each.epoch for each in reports] == [2] * PARTITIONS
    model.check(local.cluster)
    check_owners(local)
    again = local.stream("Tally", source="s")
    for batch in range(again.position + 1, 6):
        assert outputs(again.send(rows_of("a-", batch))) == model.apply(rows_of("a-", batch))
    model.check(local.cluster)
    local.kill("cloud-0")
    local.restart("cloud-0")
    eventually(lambda: model.check(local.cluster) is None, "with its disk alive it needs no restore")


def test_a_lost_data_directory_is_restored_unasked_and_again_by_command(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="s")
    model = Model()
    model.apply(rows_of("a-", 0))
    stream.send(rows_of("a-", 0))
    assert told("checkpoint", "now", "Tally", "--controller", local.address)["partitions"] == PARTITIONS
    local.kill("cloud-0")
    local.replace("cloud-0")
    wait_alive(local, "cloud-0")
    eventually(lambda: model.check(local.cluster) is None, "its partitions are restored")
    eventually(lambda: settled(local), "their takeovers have ended")
    check_owners(local)
    answer = told("checkpoint", "restore", "Tally", "--controller", local.address, "--to", "cloud")
    assert {each["replica"] for each in answer["partitions"]} == {"cloud-0"}
    assert answer["sources"] == [{"operator": "Tally", "source": "s", "next_batch": 1, "agree": True, "then": ""}]
    model.check(local.cluster)
    outputs(stream.send(rows_of("a-", 1)))
    model.apply(rows_of("a-", 1))
    model.check(local.cluster)
    local.cluster.checkpoint("Tally")


def test_partitions_of_a_dead_replica_are_restored_on_another_which_fences_it(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="s")
    model = Model()
    model.apply(rows_of("a-", 0))
    stream.send(rows_of("a-", 0))
    local.cluster.checkpoint("Tally")
    local.kill("cloud-0")
    eventually(lambda: not _alive(local, "cloud-0"), "it is missed")
    reports = restored(local.cluster.restore("Tally"))
    assert {each.replica for each in reports} == {"edge-0"}
    model.check(local.cluster)
    local.restart("cloud-0")
    wait_alive(local, "cloud-0")
    eventually(lambda: _sealed(local), "it has stopped")
    check_owners(local)
    assert outputs(stream.send(rows_of("a-", 1))) == model.apply(rows_of("a-", 1))
    model.check(local.cluster)


def _alive(local: LocalCluster, name: str) -> bool:
    return any(r.name == name and r.alive for r in local.cluster.status().replicas)


def _sealed(local: LocalCluster) -> bool:
    (cloud,) = [r for r in local.cluster.status().replicas if r.name == "cloud-0"]
    views = local.cluster.replica_stats(cloud.address).partitions
    return all(view.state == "SEALED" for view in views if view.operator == "Tally")


def test_live_partitions_are_restored_elsewhere_while_rows_come(local: LocalCluster) -> None:
    """The old owner stops after the running batch and the stream follows; what the restore lost of it is sent again."""
    local.stream("Tally", source="before").send(rows_of("a-", 0))
    local.cluster.checkpoint("Tally")
    expected = read(local.cluster, "Tally", "n", "a-")
    local.stream("Tally", source="gone").send(rows_of("a-", 1))
    live = local.stream("Tally", source="live")
    stop = threading.Event()
    sent: list[int] = []
    errors: list[StateflowError] = []

    def send() -> None:
        try:
            while not stop.is_set():
                live.send(rows_of("b-", len(sent)))
                sent.append(len(sent))
        except StateflowError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    eventually(lambda: sent, "rows come")
    restored(local.cluster.restore("Tally", to="edge"))
    so_far = len(sent)
    eventually(lambda: len(sent) > so_far + 3 or errors, "rows still come")
    stop.set()
    thread.join(60)
    assert errors == []
    assert read(local.cluster, "Tally", "n", "a-") == expected
    wanted = Model()
    for number in sent:
        wanted.apply(rows_of("b-", number))
    wanted.check(local.cluster, keys="b-")
    check_owners(local)


def test_a_restore_that_stops_sources_is_not_undone_by_clients_that_run(local: LocalCluster) -> None:
    model = Model()
    stream = local.stream("Tally", source="s")
    stream.send(rows_of("a-", 0))
    model.apply(rows_of("a-", 0))
    local.cluster.checkpoint("Tally")
    stream.send(rows_of("a-", 1))
    since = local.stream("Tally", source="began since")
    since.send(rows_of("a-", 2))
    restored(local.cluster.restore("Tally", to="edge", stop_sources=True))
    for each in (stream, since):
        with pytest.raises(SourceTaken, match="restored from a checkpoint"):
            each.send(rows_of("a-", 3))
    model.check(local.cluster, keys="a-")
    for source in ("s", "began since"):
        anew = local.stream("Tally", source=source)
        anew.send(rows_of("a-", 4))
        model.apply(rows_of("a-", 4))
    model.check(local.cluster, keys="a-")


def test_restoring_falls_back_past_what_is_damaged_and_says_so(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="s")
    model = Model()
    stream.send(rows_of("a-", 0))
    model.apply(rows_of("a-", 0))
    local.cluster.checkpoint("Tally")
    older = read(local.cluster, "Tally", "n")
    stream.send(rows_of("a-", 1))
    local.cluster.checkpoint("Tally")
    store = CheckpointStore(url(local))
    newest = {p: list(store.newest(_id(p))) for p in range(PARTITIONS)}
    spoiled = next(p for p, found in newest.items() if len(found) == 2)
    first, second = newest[spoiled][1], newest[spoiled][0]
    own = {f.blob for f in second.files} - {f.blob for f in first.files}
    sst = next(f.blob for f in second.files if f.blob in own and f.name.endswith(".sst"))
    path = Path(url(local)) / "blobs" / sst
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    answer = told("checkpoint", "verify", "--checkpoints", url(local), status=1)
    assert answer["damaged_blobs"] == [sst]
    assert sum(bool(each["error"]) for each in answer["checkpoints"]) == 1
    (report,) = restored(local.cluster.restore("Tally", [spoiled]))
    assert len(report.passed_over) == 1
    assert report.passed_over[0].startswith("checkpoint_corrupt: ")
    assert report.sequence == first.sequence
    mine = {key: value for key, value in read(local.cluster, "Tally", "n").items() if _of(key[0]) == spoiled}
    assert mine == {key: value for key, value in older.items() if _of(key[0]) == spoiled}
    told("checkpoint", "verify", "--checkpoints", url(local), "--all", "--drop-damaged", status=1)
    assert not path.exists()


def _id(partition: int) -> Any:
    from stateflow.types import PartitionId

    return PartitionId("Tally", partition)


def _of(key: str) -> int:
    from stateflow.partitioner import partition_of

    return partition_of(key, PARTITIONS)


def test_a_savepoint_moves_to_another_cluster_with_another_number_of_replicas(
    local: LocalCluster, tmp_path: Path
) -> None:
    stream = local.stream("Tally", source="s")
    model = Model()
    for batch in range(3):
        stream.send(rows_of("a-", batch))
        model.apply(rows_of("a-", batch))
    assert told("savepoint", "create", "v1", "Tally", "--controller", local.address)["partitions"] == PARTITIONS
    stream.send(rows_of("a-", 3))
    local.cluster.checkpoint("Tally")
    assert told("savepoint", "list", "--checkpoints", url(local))["savepoints"].keys() == {"v1"}
    away = str(tmp_path / "away")
    copied = told("savepoint", "export", "v1", "--checkpoints", url(local), "--to", away)["bytes_copied"]
    assert copied > 0
    assert told("checkpoint", "verify", "--checkpoints", away, "--savepoint", "v1")["sound"] is True
    local.stop()
    with LocalCluster(
        Tally, sites={"north": 1, "south": 2}, partitions=PARTITIONS, data_dir=tmp_path / "d", checkpoint_interval_s=0
    ) as other:
        done = told(
            "checkpoint", "restore", "Tally", "--from", away, "--savepoint", "v1", "--controller", other.address
        )
        assert len({each["replica"] for each in done["partitions"]}) == 3
        model.check(other.cluster)
        again = other.stream("Tally", source="s")
        assert again.position == 2
        assert outputs(again.send(rows_of("a-", 3))) == model.apply(rows_of("a-", 3))
        other.cluster.checkpoint("Tally")
    assert told("savepoint", "delete", "v1", "--checkpoints", away)["partitions"] == PARTITIONS


def test_what_does_not_fit_is_refused_and_changes_nothing(local: LocalCluster, tmp_path: Path) -> None:
    stream = local.stream("Tally", source="s")
    stream.send(rows_of("a-", 0))
    expected = read(local.cluster, "Tally", "n")
    failed = local.cluster.restore("Tally")
    assert all(each.error.startswith("checkpoint_missing: ") for each in failed)
    local.cluster.savepoint("v1", "Tally")
    failed = local.cluster.restore("Tally", at=("s", 17))
    assert all(each.error.startswith("checkpoint_missing: ") for each in failed)
    for nowhere in ("nowhere", "."):
        failed = local.cluster.restore("Tally", [0], url=str(tmp_path / nowhere))
        assert failed[0].error.startswith("checkpoint_store_missing: ")
    failed = local.cluster.restore("Tally", [0], savepoint="v2")
    assert failed[0].error.startswith("checkpoint_missing: ")
    assert read(local.cluster, "Tally", "n") == expected
    stream.send(rows_of("a-", 1))
    with LocalCluster(Tally, sites={"x": 1}, partitions=2, data_dir=tmp_path / "e", checkpoint_interval_s=0) as other:
        failed = other.cluster.restore("Tally", [0], url=url(local), savepoint="v1")
        assert failed[0].error.startswith(f"{SchemaMismatch.code}: ")
        assert f"--partitions {PARTITIONS}" in failed[0].error
        other.stream("Tally", source="s").send(rows_of("a-", 0))


def test_the_newest_that_ends_with_a_batch(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="s")
    everywhere = [{"k": f"key {n}", "v": 1} for n in range(60)]
    for _ in range(3):
        stream.send(everywhere)
        local.cluster.checkpoint("Tally")
    answer = told("checkpoint", "restore", "Tally", "--at", "s=1", "--controller", local.address)
    assert answer["sources"] == [{"operator": "Tally", "source": "s", "next_batch": 2, "agree": True, "then": ""}]
    assert set(read(local.cluster, "Tally", "n").values()) == {2}
    local.cluster.checkpoint("Tally")
    report = told("checkpoint", "gc", "--checkpoints", url(local), "--keep", "1")
    assert report["checkpoints_kept"] == PARTITIONS
    assert told("checkpoint", "verify", "--checkpoints", url(local))["sound"] is True
    listed = told("checkpoint", "list", "Tally", "--checkpoints", url(local))["checkpoints"]
    assert [each["epoch"] for each in listed] == [2] * PARTITIONS


def test_state_is_read_live_and_from_a_checkpoint(local: LocalCluster, tmp_path: Path) -> None:
    stream = local.stream("Tally", source="s")
    stream.send(rows_of("a-", 0))
    local.cluster.checkpoint("Tally")
    expected = read(local.cluster, "Tally", "by_tag")
    stream.send(rows_of("a-", 1))
    out = tmp_path / "tags.parquet"
    assert told("state", "export", "Tally", "by_tag", "--from", url(local), "--out", str(out))["rows"] == len(expected)
    assert {(r["key"], r["map_key"]): r["value"] for r in pq.read_table(out).to_pylist()} == expected
    assert told("state", "export", "Tally", "by_tag", "--controller", local.address, "--out", str(out))["rows"] > 0
    live = {(r["key"], r["map_key"]): r["value"] for r in pq.read_table(out).to_pylist()}
    assert live == read(local.cluster, "Tally", "by_tag") != expected
    for place in (("--controller", local.address), ("--from", url(local))):
        (entry,) = told("state", "get", "Tally", "n", "a-0", *place)["entries"]
        assert entry["key"] == "a-0"
        assert told("state", "get", "Tally", "n", "nobody", *place, status=1)["entries"] == []
        assert len(told("state", "scan", "Tally", "n", "--limit", "3", *place)["entries"]) == 3
    assert command("state", "scan", "Tally", "n", "--controller", local.address).exit_code == 0


def test_what_has_not_begun_of_a_restore_that_is_cancelled_stays_as_it_is(local: LocalCluster) -> None:
    stream = local.stream("Tally", source="s")
    stream.send(rows_of("a-", 0))
    local.cluster.checkpoint("Tally")
    local.freeze("cloud-0")
    with ThreadPoolExecutor(1) as aside:
        waits = aside.submit(local.cluster.restore, "Tally")

        def planned() -> str:
            batches = told("batch", "list", "--ledger", local.ledger)["batches"]
            return next((each["bid"] for each in batches if each["command"] == "restore"), "")

        eventually(planned, "it is planned")
        bid = planned()
        for _ in range(2):
            assert command("batch", "cancel", bid, "--controller", local.address).exit_code == 0
        local.thaw("cloud-0")
        reports = waits.result(60)
    cancelled = [each for each in reports if "move_cancelled" in each.error]
    assert len(cancelled) == PARTITIONS - AT_ONCE
    restored([each for each in reports if each not in cancelled])
    found = told("batch", "info", bid, "--ledger", local.ledger)
    assert (found["status"], found["succeeded"], found["cancelled"]) == ("CANCELLED", AT_ONCE, len(cancelled))
    assert "move_unknown" in command("batch", "cancel", bid, "--controller", local.address).stderr
    restored(local.cluster.restore("Tally"))


def test_a_partition_that_moves_is_not_restored_meanwhile(local: LocalCluster) -> None:
    """A move and a restore never ask one owner to stop at the same time."""
    local.stream("Blob", source="s").send([{"k": f"k{n}", "size": 1 << 20} for n in range(40)])
    local.cluster.checkpoint("Blob")
    move = local.migrate("Blob", list(range(PARTITIONS)), "edge")
    refused: list[StateflowError] = []
    try:
        local.cluster.restore("Blob")
    except MoveConflict as error:
        refused.append(error)
    assert move.wait().state == "COMPLETED"
    assert len(read(local.cluster, "Blob", "blob")) == 40
    check_owners(local, "Blob")
    restored(local.cluster.restore("Blob"))
    assert len(read(local.cluster, "Blob", "blob")) == 40
