"""Deployed operators that change their states: refused before anything happens, or changed everywhere."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import OperatorOutdated, SchemaMismatch
from stateflow.operator.operator import Operator, describe, load
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.applying import apply_to

SETTINGS = ReplicaSettings(block_cache_bytes=8 << 20, write_buffer_bytes=8 << 20, change_log_bytes_max=1 << 20)
SCHEMA = pa.schema([("k", pa.string())])
OPERATOR = """
import dataclasses
from decimal import Decimal
from typing import Any, Optional
import numpy as np
from stateflow import Operator, state

@dataclasses.dataclass
class Point:
    {point}

class Op(Operator):
    key, output, state_version = "k", "k string", {version}
    {states}
    def process(self, row, ctx):
        {process}
{more}
"""
MIGRATE = """
    def migrate_state(self, version, old):
        self.s.value = {"was": old.s}
"""


class Cluster:
    """One replica with two partitions, deployed to as a controller does."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # an imported module, as a script's class would be sent as text
        self._module = f"redeployed_{re.sub(r'[^a-z0-9]', '_', root.name.lower())}"
        self._file = root / f"{self._module}.py"
        self._batches = self._versions = 0
        self.spec: OperatorSpec | None = None
        self.node = self._started()

    def _started(self) -> ReplicaNode:
        return ReplicaNode(ReplicaInfo("a", "site", "a:1"), self._root / "a", SETTINGS)

    def install(
        self, states: str, process: str = "pass", *, point: str = "x: int", version: int = 1, more: str = ""
    ) -> type[Operator]:
        """Installs new code, and restarts the replica."""
        self._versions += 1
        # each version has another length, as compiled code is identified by its source's size and second
        text = OPERATOR.format(states=states, process=process, point=point, version=version, more=more)
        self._file.write_text(text + "#" * self._versions)
        sys.modules.pop(self._module, None)
        importlib.invalidate_caches()
        cls = load(f"{self._module}:Op")
        self.node.close()
        self.node = self._started()
        return cls

    def deploy(self, cls: type[Operator]) -> None:
        spec = describe(cls, 2)
        if self.spec is None:
            self.spec = spec
            self.node.create(spec, [0, 1], 1)
        else:
            spec = spec.after(self.spec)
            self.node._registry.learn(spec)
            self.spec = spec

    def send(self, *partitions: int, key: str = "") -> None:
        for partition in partitions:
            data = pa.RecordBatch.from_pylist([{"k": key or f"k{partition}"}], schema=SCHEMA).serialize().to_pybytes()
            batch = Batch("s", self._batches, sparse=True)
            self._batches += 1
            apply_to(self.node, PartitionId("Op", partition), 1, batch, SCHEMA.serialize().to_pybytes(), data)

    def read(self, state: str) -> list[Any]:
        return [value for number in (0, 1) for _, _, value in self.node.reader.scan(PartitionId("Op", number), state)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.syspath_prepend(tmp_path)
    made = Cluster(tmp_path)
    yield made
    made.node.close()


@pytest.mark.parametrize("opened", [False, True], ids=["as recovered", "at work"])
@pytest.mark.parametrize(
    ("was", "filled", "now", "said"),
    [
        ("s = state.value(list)", "self.s.value = [1]", "s = state.value(dict)", r"value\(list\) but .* value\(dict\)"),
        ("s = state.value(Optional[int])", "self.s.value = 1", "s = state.value(set)", r"value\(int \| None\) but"),
        ("s = state.value(list[int])", "self.s.value = [1]", "s = state.value(list[str])", r"value\(list\[int\]\) but"),
        ("s = state.list(list[int])", "self.s += [[1]]", "s = state.list(dict)", r"list\(list\[int\]\) but"),
        ("s = state.map(str, float)", "self.s['a'] = 1", "s = state.map(str, str)", r"map\(utf8, float64\) but"),
        ("s = state.value(str)", "self.s.value = 'a'", "s = state.counter()", r"value\(utf8\) but .* counter\(int64\)"),
        ("s = state.value(np.ndarray)", "self.s.value = np.ones(2)", "s = state.value(list)", r"value\(ndarray\) but"),
    ],
)
def test_a_deployment_that_nobody_migrates_is_refused(
    cluster: Cluster, was: str, filled: str, now: str, said: str, opened: bool
) -> None:
    cluster.deploy(cluster.install(was, filled))
    cluster.send(0)
    cls = cluster.install(now)
    if opened:
        cluster.node.reader.sources(PartitionId("Op", 0))
    with pytest.raises(SchemaMismatch, match=rf"state 's' is stored as {said}.*write migrate_state"):
        cluster.deploy(cls)


@pytest.mark.parametrize("opened", [False, True], ids=["as recovered", "at work"])
def test_a_deployment_that_declares_a_tag_as_another_type_is_refused(cluster: Cluster, opened: bool) -> None:
    cluster.deploy(cluster.install("", "ctx.state(state.value(list[int], name='s')).value = [1]"))
    cluster.send(0)
    cls = cluster.install("s = state.value(dict)")
    if opened:
        cluster.node.reader.sources(PartitionId("Op", 0))
    with pytest.raises(SchemaMismatch, match=r"state 's' is stored as value\(list\[int\]\) but .* value\(dict\)"):
        cluster.deploy(cls)
    cluster.deploy(cluster.install("s = state.value(list[float])"))
    assert list(map(repr, cluster.read("s"))) == ["[1.0]"]


def test_a_record_that_cannot_be_read_is_refused_and_one_that_can_is_not(cluster: Cluster) -> None:
    states, filled = "s = state.value(Point)", "self.s.value = self.s.value or Point(1)"
    cluster.deploy(cluster.install(states, filled))
    cluster.send(0, 1)
    for point in ("x: str", "x: int; y: int"):
        with pytest.raises(SchemaMismatch, match=r"stored as value\(Point\(x: int\)\) but declared as value\(Point\(x"):
            cluster.deploy(cluster.install(states, filled, point=point))
    cluster.deploy(cluster.install(states, filled, point="x: float; y: int = 5"))
    assert [(point.x, point.y) for point in cluster.read("s")] == [(1.0, 5), (1.0, 5)]


def test_what_is_wider_or_migrated_is_not_refused(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("s = state.value(list[int])", "self.s.value = [1, 2]"))
    cluster.send(0, 1)
    cluster.deploy(cluster.install("s = state.value(list[float])"))
    cluster.send(0)
    assert list(map(repr, cluster.read("s"))) == ["[1.0, 2.0]"] * 2
    cls = cluster.install("s = state.value(dict)", version=2, more=MIGRATE)
    cluster.deploy(cls)
    assert cluster.read("s") == [{"was": [1.0, 2.0]}] * 2


def test_nothing_stored_is_nothing_refused(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("s = state.value(list)"))
    cluster.deploy(cluster.install("s = state.value(dict)", "self.s.value = {1: 2}"))
    cluster.send(0)
    assert cluster.read("s") == [{1: 2}]


def test_code_that_stores_something_else_is_not_the_deployed_version(cluster: Cluster) -> None:
    """A replica that was not restarted with the new code refuses the new version."""
    cluster.deploy(cluster.install("s = state.value(list)"))
    newer = describe(cluster.install("s = state.value(dict)"), 2)
    cluster.install("s = state.value(list)")
    with pytest.raises(OperatorOutdated, match=r"differs=state s\b"):
        cluster.node._registry.learn(newer)


# --- dropped states ------------------------------------------------------------------------------------

BOTH = "n = state.counter(); s = state.value(list[int])"
ONE = "n = state.counter()"
FILL = "self.n.add(); self.s.value = [1]"


def test_a_dropped_state_is_gone_wherever_it_was(cluster: Cluster) -> None:
    cluster.deploy(cluster.install(BOTH, FILL))
    cluster.send(0, 1)
    cluster.deploy(cluster.install(ONE, "self.n.add()"))
    cluster.send(0)  # this version does not visit partition 1
    cluster.deploy(cluster.install(BOTH, "self.n.add()"))
    assert cluster.read("s") == []
    cluster.send(0, 1)
    assert (cluster.read("s"), cluster.read("n")) == ([], [3, 2])
    cluster.deploy(cluster.install(BOTH, FILL))
    cluster.send(0, 1)
    assert cluster.read("s") == [[1], [1]]
    cluster.deploy(cluster.install(BOTH + "; more = state.counter()", FILL))
    assert cluster.read("s") == [[1], [1]], "dropped once, not again by each deployment"


def test_a_dropped_state_may_come_back_as_another(cluster: Cluster) -> None:
    cluster.deploy(cluster.install(BOTH, FILL))
    cluster.send(0, 1)
    cluster.deploy(cluster.install(ONE))
    cluster.deploy(cluster.install("n = state.counter(); s = state.value(str)", "self.s.value = 'new'"))
    cluster.send(0)
    assert cluster.read("s") == ["new"]


def test_code_alone_drops_nothing(cluster: Cluster) -> None:
    """Code alone drops no state.

    Between a replica's restart and the deployment its code may be another version, or be rolled back.
    """
    cluster.deploy(cluster.install(BOTH, FILL))
    cluster.send(0, 1)
    cluster.install(ONE, "self.n.add()")
    cluster.send(0)
    cluster.install(BOTH, FILL)
    assert cluster.read("s") == [[1], [1]]
    fewer = cluster.install(ONE, "self.n.add()")
    cluster.send(0)
    cluster.deploy(fewer)  # the partitions in use hear of it, too
    cluster.send(0)
    cluster.deploy(cluster.install(BOTH))
    assert (cluster.read("s"), cluster.read("n")) == ([], [4, 1])


def test_what_was_dropped_is_part_of_what_is_deployed(cluster: Cluster) -> None:
    cluster.deploy(cluster.install(BOTH))
    first = cluster.spec
    cluster.deploy(cluster.install(ONE))
    second = cluster.spec
    assert first is not None
    assert second is not None
    assert (first.dropped, second.dropped) == ((), (("s", 1),))
    assert second.after(second) == second
    assert first.after(second).dropped == (("s", 1),)
    assert second.after(first.after(second)).dropped == (("s", 2),)
