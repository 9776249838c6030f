"""A new version of an operator on a running cluster: replicas restarted with its code, then deployed; state evolves."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateflow.errors import AlreadyDeployed, OperatorOutdated
from stateflow.runtime.operator import load
from stateflow.testing import LocalCluster

pytestmark = [pytest.mark.processes]

V1 = """
from stateflow import Operator, state
class Prices(Operator):
    key = "k"
    output = "k string, total double"
    price = state.value(str)
    gone = state.counter()
    def process(self, row, ctx):
        self.price.value = f"{row.v}"
        self.gone.add()
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
    def migrate_state(self, old_version, old):
        self.price.value = float(old.price)
    def process(self, row, ctx):
        self.price.value += row.v
        self.seen.add()
        yield row.k, self.price.value
"""


def version(file: Path, text: str) -> type:
    file.write_text(text)
    import sys

    for name in [name for name in sys.modules if name.endswith(str(file))]:
        del sys.modules[name]
    return load(f"{file}:Prices")


def test_state_evolves_where_it_is_and_where_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "prices.py"
    first = version(file, V1)
    with LocalCluster(first, sites={"cloud": 1, "edge": 1}, partitions=4, deploy_to=("cloud",)) as cluster:
        stream = cluster.stream("Prices", source="s", schema="k string, v double")
        stream.send([{"k": f"k{n}", "v": float(n)} for n in range(20)])
        second = version(file, V2)
        with pytest.raises(OperatorOutdated, match=r"install that version"):
            cluster.cluster.deploy(second, 4)
        for name in ("cloud-0", "edge-0"):
            cluster.kill(name)
            cluster.restart(name)
        cluster.cluster.deploy(second, 4)
        out = stream.send([{"k": f"k{n}", "v": 0.5} for n in range(20)])
        assert {row["k"]: row["total"] for row in out} == {f"k{n}": n + 0.5 for n in range(20)}
        assert cluster.migrate("Prices", partitions=range(4), to="edge").wait().state == "COMPLETED"
        cluster.kill("controller")
        cluster.restart("controller")
        out = stream.send([{"k": f"k{n}", "v": 0.5} for n in range(20)])
        assert {row["k"]: row["total"] for row in out} == {f"k{n}": n + 1.0 for n in range(20)}
        seen = {row["key"]: row["value"] for row in cluster.cluster.read_state("Prices", "seen").to_pylist()}
        assert seen == {f"k{n}": 2 for n in range(20)}
        with pytest.raises(AlreadyDeployed, match="other partitions, key or output"):
            cluster.cluster.deploy(second, 8)
