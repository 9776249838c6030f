"""A deployed operator with other states: refused before anything happens, or made what it is everywhere."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import DecodeError, EncodeError, OperatorFailed, OperatorOutdated, SchemaMismatch
from stateflow.runtime.evolving import Sample
from stateflow.runtime.operator import Operator, describe, load
from stateflow.runtime.positions import Batch
from stateflow.runtime.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.state.cells import CELL, COUNT, pack_cell, row_part, split_address
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
    """One replica with two partitions, and what a controller makes of deployments."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # one that is imported: a script's class goes along as text
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
        """New code, and the replica restarted."""
        self._versions += 1
        # of another length each time: compiled code is known by its source's size and second
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
            self.node.learn(spec)
            self.spec = spec

    def send(self, *partitions: int) -> None:
        for partition in partitions:
            data = pa.RecordBatch.from_pylist([{"k": f"k{partition}"}], schema=SCHEMA).serialize().to_pybytes()
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
    """The replica was not restarted with the new code."""
    cluster.deploy(cluster.install("s = state.value(list)"))
    newer = describe(cluster.install("s = state.value(dict)"), 2)
    cluster.install("s = state.value(list)")
    with pytest.raises(OperatorOutdated, match=r"differs=state s\b"):
        cluster.node.learn(newer)


# --- dropped states ------------------------------------------------------------------------------------

BOTH = "n = state.counter(); s = state.value(list[int])"
ONE = "n = state.counter()"
FILL = "self.n.add(); self.s.value = [1]"


def test_a_dropped_state_is_gone_wherever_it_was(cluster: Cluster) -> None:
    cluster.deploy(cluster.install(BOTH, FILL))
    cluster.send(0, 1)
    cluster.deploy(cluster.install(ONE, "self.n.add()"))
    cluster.send(0)  # partition 1 sees nothing of this version
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
    """Between a replica's restart and the deployment its code may be another version; or is rolled back."""
    cluster.deploy(cluster.install(BOTH, FILL))
    cluster.send(0, 1)
    cluster.install(ONE, "self.n.add()")
    cluster.send(0)
    cluster.install(BOTH, FILL)
    assert cluster.read("s") == [[1], [1]]
    fewer = cluster.install(ONE, "self.n.add()")
    cluster.send(0)
    cluster.deploy(fewer)  # which the partitions at work hear of, too
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


# --- tried before it serves ----------------------------------------------------------------------------

FAILING = """
    def migrate_state(self, version, old):
        raise RuntimeError("no such column")
"""
OPENED = """
    def open(self, ctx):
        self.by = 10

    def migrate_state(self, version, old):
        self.s.value = {"was": [each * self.by for each in old.s]}
"""


def check(cluster: Cluster, cls: type[Operator]) -> None:
    """As the controller asks before it records the version."""
    assert cluster.spec is not None
    cluster.node.check(describe(cls, 2).after(cluster.spec), 2)


def test_a_migration_that_fails_is_refused_before_it_serves(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("s = state.value(list[int])", "self.s.value = [1]"))
    cluster.send(0, 1)
    with pytest.raises(
        OperatorFailed,
        match=r"migrate_state\(\) raised RuntimeError: no such column .*deploy again, or go back: .*upgrade Op --to",
    ) as raised:
        check(cluster, cluster.install("s = state.value(dict)", version=2, more=FAILING))
    assert raised.value.where["key"] == "'k0'"
    cluster.install("s = state.value(list[int])", "self.s.value += [2]")
    cluster.send(0)
    assert cluster.read("s") == [[1, 2], [1]], "the version that was deployed serves on"


def test_a_migration_is_tried_as_it_will_run_and_changes_nothing(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("s = state.value(list[int])", "self.s.value = [1]"))
    cluster.send(0, 1)
    cls = cluster.install("s = state.value(dict)", version=2, more=OPENED)
    check(cluster, cls)
    assert not list((cluster.node._registry.snapshots).glob("tried-*"))
    cluster.deploy(cls)
    assert cluster.read("s") == [{"was": [10]}] * 2


def test_what_a_migration_makes_of_a_state_must_fit_it(cluster: Cluster) -> None:
    cluster.deploy(cluster.install("s = state.value(list[int])", "self.s.value = [1]"))
    cluster.send(0)
    more = "\n    def migrate_state(self, version, old):\n        self.s.value = str(old.s)\n"
    with pytest.raises(EncodeError, match=r"partition=0"):
        check(cluster, cluster.install("s = state.value(dict)", version=2, more=more))


POINT = "s = state.value(Point)"
LARGE = "self.s.value = self.s.value or Point(2**53 + 1)"
LIFTED = """
    def migrate_state(self, version, old):
        self.s.value = Point(float(old.s["x"]))
"""


def test_values_that_a_wider_field_does_not_hold_are_found_before_it_serves_and_its_remedies_work(
    cluster: Cluster,
) -> None:
    cluster.deploy(cluster.install(POINT, LARGE))
    cluster.send(0, 1)
    with pytest.raises(DecodeError, match=r"declare it as int \| float, which reads both, or write migrate_state and"):
        check(cluster, cluster.install(POINT, point="x: float"))
    both = cluster.install(POINT, point="x: int | float")
    check(cluster, both)
    cluster.deploy(both)
    assert [point.x for point in cluster.read("s")] == [2**53 + 1] * 2
    lifted = cluster.install(POINT, point="x: float", version=2, more=LIFTED)
    check(cluster, lifted)
    cluster.deploy(lifted)
    assert [point.x for point in cluster.read("s")] == [float(2**53)] * 2


@pytest.mark.parametrize("remedy", ["both", "migrate_state"])
def test_a_value_that_cannot_be_read_can_be_after_each_of_its_remedies(cluster: Cluster, remedy: str) -> None:
    """Its old type alone was refused with schema_mismatch: others were stored with the new one meanwhile."""
    cluster.deploy(cluster.install(POINT, LARGE))
    cluster.send(0, 1)
    cluster.deploy(cluster.install(POINT, "self.s.value = Point(0.5)", point="x: float"))
    cluster.send(0)
    with pytest.raises(DecodeError, match=r"declare it as int \| float, .* or write migrate_state and raise"):
        cluster.read("s")
    if remedy == "both":
        mended = cluster.install(POINT, point="x: int | float")
        expected = [0.5, 2**53 + 1]
    else:
        mended = cluster.install(POINT, point="x: float", version=2, more=LIFTED)
        expected = [0.5, float(2**53)]
    check(cluster, mended)
    cluster.deploy(mended)
    assert [point.x for point in cluster.read("s")] == expected


def test_of_many_keys_some_are_tried_and_of_every_state_those_of_the_same_keys() -> None:
    tags = [bytes([number]) * 8 for number in (1, 2)]
    keys = [f"k{number:03d}".encode() for number in range(50)]
    cells = {
        space + tag + row_part(key): pack_cell(b"v")
        for space in (CELL, COUNT)
        for tag, some in zip(tags, (keys, keys[::2]), strict=True)
        for key in some
    }
    sample = Sample(DictReader(cells), tags, 10)
    found = [{split_address(address)[0] for address, _ in sample.scan(CELL + tag)} for tag in tags]
    assert found == [set(keys[:10]), set(keys[:10:2])]
    assert {split_address(address)[0] for address, _ in sample.scan(COUNT + tags[0])} == set(keys[:10])
    assert len(list(sample.scan(CELL + tags[0] + row_part(keys[40])))) == 1, "a key is there where it is asked for"
    few = Sample(DictReader(cells), tags, 100)
    assert len(list(few.scan(CELL + tags[0]))) == 50


class DictReader:
    def __init__(self, cells: dict[bytes, bytes]) -> None:
        self._cells = cells

    def get(self, cell: bytes, /) -> bytes | None:
        return self._cells.get(cell)

    def scan(self, prefix: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        return iter(sorted(each for each in self._cells.items() if each[0].startswith(prefix)))
