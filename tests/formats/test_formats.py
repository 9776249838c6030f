"""Reads, serves, moves and restores what earlier releases left behind."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import Writer
from stateflow.ledger import Ledger
from stateflow.operator.arrow import read_table
from stateflow.partition.replica import ReplicaNode
from stateflow.testing import LocalCluster
from stateflow.types import ReplicaInfo
from tests.formats.__main__ import BATCHES, PARTITIONS, SITES, state_of
from tests.formats.everything import KEYS, Everything, rows
from tests.integration.support import check_owners

KEPT = sorted(Path(__file__).parent.glob("*.tar.gz"))


@pytest.fixture(params=KEPT, ids=lambda path: path.name.removesuffix(".tar.gz"))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Unpacks a cluster as a release left it."""
    with tarfile.open(request.param) as packed:
        packed.extractall(tmp_path, filter="data")
    for path in tmp_path.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return tmp_path / "cluster"


def test_something_is_kept() -> None:
    assert "0.1.0.tar.gz" in {path.name for path in KEPT}


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
