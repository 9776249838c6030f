"""What earlier releases left is read, served, moved and restored by this one."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from stateflow.testing import LocalCluster
from tests.formats.__main__ import BATCHES, PARTITIONS, SITES, state_of
from tests.formats.everything import KEYS, Everything, rows
from tests.integration.support import check_owners

pytestmark = pytest.mark.processes
KEPT = sorted(Path(__file__).parent.glob("*.tar.gz"))


def test_something_is_kept() -> None:
    assert "0.1.0.tar.gz" in {path.name for path in KEPT}


@pytest.mark.parametrize("archive", KEPT, ids=lambda path: path.name.removesuffix(".tar.gz"))
def test_it_is_gone_on_with(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    folder = tmp_path / "cluster"
    expected = json.loads((folder / "state.json").read_text())
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
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
