"""Reads, serves, moves and restores what earlier releases left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from reconfig.controller import steps
from reconfig.controller.cluster_state import EVENTS, ClusterState
from reconfig.controller.context import Writer
from reconfig.controller.folds import Home
from reconfig.controller.history import APP
from reconfig.decisions.plan import PlannedMove
from stateflow.ledger import Ledger
from stateflow.operator.arrow import read_table
from stateflow.partition.replica import ReplicaNode
from stateflow.release import FIRST, VERSION
from stateflow.testing import LocalCluster
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo, StrategyName
from tests.formats import BEFORE, RELEASES, archive, unpack, unpack_code
from tests.formats.__main__ import BATCHES, MORE, MORE_BATCHES, PARTITIONS, SITES, state_of
from tests.formats.everything import KEYS, Everything, rows
from tests.integration.support import check_owners
from tests.writing import Written, deploy, write

#: releases before this one: each has all of its archives
KEPT = RELEASES[:-1]


@pytest.fixture(params=KEPT)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Unpacks a cluster as a release left it."""
    unpack(archive(request.param), tmp_path)
    return tmp_path / "cluster"


def test_every_release_before_this_one_has_its_archives(tmp_path: Path) -> None:
    assert (RELEASES[0], RELEASES[-1]) == (FIRST.version, VERSION), "a new release is added to tests/formats"
    for release in KEPT:
        for kind in ("", "more", "code"):
            assert archive(release, kind).exists(), "see tests/formats/__init__.py"
        code = unpack_code(release, tmp_path / release)
        assert f'VERSION = "{release}"' in (code / "stateflow" / "release.py").read_text()
        assert release in (code / "README").read_text()


class Left:
    """The replicas of a cluster, opened in this process in place of a cluster's client."""

    def __init__(self, folder: Path, cluster: ClusterState) -> None:
        assignment = cluster.operator("Everything").assignment
        self.nodes = {name: ReplicaNode(ReplicaInfo(name, "-", "-:1"), folder / name) for name in {*assignment.owners}}
        owners = enumerate(zip(assignment.owners, assignment.epochs, strict=True))
        self.expected = dict(owners)

    def owned(self) -> dict[int, tuple[str, int]]:
        return {
            partition.partition: (name, node.lifecycle(partition).epoch)
            for name, node in self.nodes.items()
            for partition in node.owned()
        }

    def read_state(self, operator: str, state: str) -> pa.Table:
        return pa.concat_tables(
            read_table(record)
            for node in self.nodes.values()
            for partition in node.owned(operator)
            for page in node.reader.scan_pages(partition, state)
            for record in page
        )

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()


def test_ledger_and_replicas_are_read(folder: Path) -> None:
    with Ledger(f"sqlite:///{folder / 'ledger.db'}") as ledger:
        left = Left(folder, Writer.read(ledger).cluster)
    try:
        assert left.owned() == left.expected
        assert state_of(left) == json.loads((folder / "state.json").read_text())["now"]
    finally:
        left.close()


@pytest.mark.processes
def test_it_is_gone_on_with(folder: Path) -> None:
    expected = json.loads((folder / "state.json").read_text())
    with LocalCluster(
        Everything, sites=SITES, partitions=PARTITIONS, data_dir=folder, checkpoint_interval_s=0
    ) as local:
        assert state_of(local.cluster) == expected["now"]
        stream = local.stream("Everything", source="s")
        assert stream.position == BATCHES - 1
        outputs = stream.send(rows(BATCHES))
        assert {row["k"]: row["seen"] for row in outputs} == dict.fromkeys(KEYS, BATCHES + 1)
        for to in ("edge", "cloud"):
            assert local.migrate("Everything", list(range(PARTITIONS)), to).wait().state == "COMPLETED"
        check_owners(local, "Everything")
        local.cluster.restore("Everything", range(PARTITIONS))
        assert state_of(local.cluster) == expected["at_checkpoint"], "of the release before, which is the newest"
        local.cluster.restore("Everything", range(PARTITIONS), savepoint="kept")
        seen = local.cluster.read_state("Everything", "seen").column("value").to_pylist()
        assert seen == [3] * len(KEYS)


@pytest.mark.processes
@pytest.mark.parametrize("release", KEPT)
def test_what_only_some_clusters_have_is_gone_on_with(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit log ahead of its databases, an outbox, a bundle, and checkpoints that are compressed and encrypted."""
    for name, value in MORE.items():
        monkeypatch.setenv(name, value)
    unpack(archive(release, "more"), tmp_path)
    folder = tmp_path / "cluster"
    kept = [path for path in (folder / "checkpoints" / "blobs").rglob("*") if path.is_file()]
    assert kept
    assert all(path.suffixes and path.read_bytes().startswith(b"SFE1") for path in kept), "encrypted"
    assert [path for path in (folder / "edge-0" / "commits").iterdir() if path.stat().st_size > 1000]
    with LocalCluster(sites=SITES, data_dir=folder, checkpoint_interval_s=0) as local:
        with local.cluster.forwarding("Everything", "gateway", folder / "outbox") as gateway:
            assert gateway.waiting()
            gateway.flush(60)
        seen = local.cluster.read_state("Everything", "seen").column("value").to_pylist()
        assert seen == [MORE_BATCHES] * len(KEYS)
        local.cluster.restore("Everything", range(PARTITIONS))
        expected = json.loads((folder / "state.json").read_text())["at_checkpoint"]
        assert state_of(local.cluster) == expected
        for to in ("edge", "cloud"):
            assert local.migrate("Packed", list(range(PARTITIONS)), to).wait().state == "COMPLETED"
        outputs = local.stream("Packed", source="p").send([{"k": str(number)} for number in range(20)])
        assert {row["n"] for row in outputs} == {2}


#: run with the code of 0.1: folds a ledger, and prints the kinds that it knows and the moves that it distrusts
FOLD = """
import json, sys
from reconfig.controller.cluster_state import FOLDS, ClusterState
from stateflow.ledger import Ledger

with Ledger(sys.argv[1]) as ledger:
    cluster = ClusterState(ledger)
    for record in ledger.records(archived=True):
        cluster.fold(record)
print(json.dumps([sorted(FOLDS), sorted(cluster.distrusted)]))
"""


@pytest.mark.parametrize("how", ["restore", "serve-source"])
def test_the_release_before_reads_what_this_one_recorded(how: str, tmp_path: Path) -> None:
    """One `resolve` made the ledger unreadable for 0.1, for good, and 0.1 could not know which copy was rejected."""
    move = PlannedMove("r", PartitionId("Op", 0), "a", "b", 1, 2, StrategyName.WARM_UP)
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with Ledger(url) as ledger:
        cluster = Written(ledger)
        for name in "ab":
            write(cluster, steps.register, ReplicaInfo(name, "s", f"{name}:1"), Home())
        deploy(cluster, OperatorSpec("Op", "m:Op", 1, ("k",), b"", "{}"), {0: "a"})
        for step in (steps.plan_moves, steps.begin_moves):
            write(cluster, step, [move])
        write(cluster, steps.grant, move)
        write(cluster, steps.resolve, [move], how)
        write(cluster, steps.move_aborted, move, {"code": "move_aborted", "what": "given up"}, {})
        distrusted = cluster.distrusted
    code = str(unpack_code(BEFORE, tmp_path / "code"))
    command = [sys.executable, "-P", "-c", FOLD, url]
    folded = subprocess.run(
        command,
        cwd=code,
        env=os.environ | {"PYTHONPATH": code},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert folded.returncode == 0, folded.stderr
    kinds, distrusted_before = json.loads(folded.stdout)
    assert {kind for kind, event in EVENTS.items() if event.app == APP} <= set(kinds), "the others are skipped"
    assert set(distrusted_before) == distrusted == ({move.move_id} if how == "restore" else set())
