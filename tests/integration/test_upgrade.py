"""A new version of an operator on a running cluster, whose state evolves.

A module is installed, replicas are restarted, and then it is deployed; a text goes along with the deployment.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from stateflow.checkpoint import CheckpointStore
from stateflow.errors import AlreadyDeployed, OperatorOutdated
from stateflow.operator.operator import load
from stateflow.partition.checkpoints import read_checkpoint, verify
from stateflow.partition.entries import joined
from stateflow.testing import LocalCluster
from stateflow.types import PartitionId

pytestmark = [pytest.mark.processes]

V1 = """
from stateflow import Operator, state
class Prices(Operator):
    key = "k"
    output = "k string, total double"
    price = state.value(str)
    gone = state.counter()
    rows = state.value(int, default=0)
    def process(self, row, ctx):
        self.price.value = f"{row.v}"
        self.gone.add()
        self.rows.value += 1
        yield row.k, row.v
"""
V2 = """
from stateflow import Operator, state
class Prices(Operator):
    key = "k"
    output = "k string, total double"
    state_version = 2
    price = state.value(float, default=0.0)
    seen = state.counter()
    rows = state.value(float, default=0.0)
    def migrate_state(self, old_version, old):
        self.price.value = float(old.price)
    def process(self, row, ctx):
        self.price.value += row.v
        self.seen.add()
        yield row.k, self.price.value
"""


def version(file: Path, text: str, how: str) -> type:
    file.write_text(text)
    sys.modules.pop(file.stem, None)
    importlib.invalidate_caches()
    return load(f"{file.stem if how == 'module' else file}:Prices")


@pytest.mark.parametrize("how", ["module", "text"])
def test_state_evolves_where_it_is_and_where_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    file = tmp_path / "prices.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    first = version(file, V1, how)
    with LocalCluster(first, sites={"cloud": 1, "edge": 1}, partitions=4, deploy_to=("cloud",)) as cluster:
        stream = cluster.stream("Prices", source="s", schema="k string, v double")
        stream.send([{"k": f"k{n}", "v": float(n)} for n in range(20)])
        cluster.cluster.checkpoint("Prices")
        store = CheckpointStore(str(cluster.data_dir / "checkpoints"))
        keys = [f"k{n}" for n in range(20)]
        second = version(file, V2, how)
        if how == "module":
            with pytest.raises(OperatorOutdated, match=r"install the deployed version"):
                cluster.cluster.deploy(second, 4)
            for name in ("cloud-0", "edge-0"):
                cluster.kill(name)
                cluster.restart(name)
        cluster.cluster.deploy(second, 4)
        for state, expected in (("price", {f"k{n}": float(n) for n in range(20)}), ("rows", dict.fromkeys(keys, 1.0))):
            found = cluster.cluster.read_state("Prices", state).to_pylist()
            assert {row["key"]: row["value"] for row in found} == expected, "before any batch has come"
        offline = joined([pa.ipc.open_stream(page).read_all() for page in read_checkpoint(store, "Prices", "price")])
        assert {row["key"]: row["value"] for row in offline.to_pylist()} == {f"k{n}": float(n) for n in range(20)}
        found = [verify(store, manifest) for p in range(4) for manifest in store.newest(PartitionId("Prices", p))]
        assert len(found) >= 4
        assert not [each.error for each in found if each.error]
        out = stream.send([{"k": f"k{n}", "v": 0.5} for n in range(20)])
        assert {row["k"]: row["total"] for row in out} == {f"k{n}": n + 0.5 for n in range(20)}
        rows = cluster.cluster.read_state("Prices", "rows").to_pylist()
        assert {row["key"]: row["value"] for row in rows} == dict.fromkeys(keys, 1.0)
        assert cluster.migrate("Prices", partitions=range(4), to="edge").wait().state == "COMPLETED"
        cluster.kill("controller")
        cluster.restart("controller")
        out = stream.send([{"k": f"k{n}", "v": 0.5} for n in range(20)])
        assert {row["k"]: row["total"] for row in out} == {f"k{n}": n + 1.0 for n in range(20)}
        seen = {row["key"]: row["value"] for row in cluster.cluster.read_state("Prices", "seen").to_pylist()}
        assert seen == {f"k{n}": 2 for n in range(20)}
        with pytest.raises(AlreadyDeployed, match="other partitions, key or output"):
            cluster.cluster.deploy(second, 8)
