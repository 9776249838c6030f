"""Expired state is not read: from a live partition, from a checkpoint, by a migration or by the harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow import Namespace, Operator, state
from stateflow.checkpoint import CheckpointStore, Manifest
from stateflow.checkpoint.collecting import Retention, collect
from stateflow.clock import ManualClock
from stateflow.errors import CheckpointCorrupt
from stateflow.operator.arrow import read_table
from stateflow.operator.operator import describe
from stateflow.partition.checkpoints import read_checkpoint
from stateflow.partition.entries import At, declaration_of, entries_of, joined
from stateflow.partition.layout import read_watermark
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.state import encode_row_key, scan_entries
from stateflow.testing import OperatorHarness
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to

P = PartitionId("Mortal", 0)
SCHEMA = pa.schema({"k": pa.string(), "n": pa.int64()})
VISITS = state.counter(ttl=10, name="visits")


class Mortal(Operator):
    key, output = "k", "k string"
    last = state.value(int, ttl=10)
    by_name = state.map(str, int, ttl=10)
    names = state.set(str, ttl=10)
    log = state.list(int, ttl=10)
    most = state.reducing(int, max, ttl=10)
    count = state.counter(ttl=10)
    event = state.map(str, int, ttl=10, ttl_domain="event")
    always = state.value(int)

    def process(self, row: Any, ctx: Any) -> None:
        self.last.value = self.always.value = row.n
        self.by_name[str(row.n)] = self.event[str(row.n)] = row.n
        self.names.add(str(row.n))
        self.log.append(row.n)
        self.most.add(row.n)
        self.count.value += 1
        ctx.state(VISITS, Namespace.named("w")).value += 1


EXPIRING = ("last", "by_name", "names", "log", "most", "count")


class Served:
    """One partition of a replica, with a clock that the test advances."""

    def __init__(self, root: Path) -> None:
        self.clock = ManualClock(1_000_000_000_000_000)
        info = ReplicaInfo("a", "site", "a:1")
        self.node = ReplicaNode(info, root / "a", ReplicaSettings(), clock=self.clock)
        self.node.create(describe(Mortal, 1), [0], 1)
        self.sent = 0

    def send(self, *rows: tuple[str, int], watermark_s: int | None = None) -> None:
        data = pa.RecordBatch.from_pylist([{"k": k, "n": n} for k, n in rows], schema=SCHEMA).serialize().to_pybytes()
        watermark_us = None if watermark_s is None else watermark_s * 1_000_000
        batch = Batch("s", self.sent, watermark_us=watermark_us)
        self.sent += 1
        apply_to(self.node, P, 1, batch, SCHEMA.serialize().to_pybytes(), data if rows else b"")

    def read(self, name: str, *keys: str) -> list[tuple[Any, Any, Any]]:
        return list(self.node.reader.scan(P, name, [encode_row_key(key) for key in keys]))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.node.close()


@pytest.mark.parametrize("name", EXPIRING)
def test_a_live_partition_shows_nothing_that_has_expired(served: Served, name: str) -> None:
    served.send(("k", 1))
    assert [each[0] for each in served.read(name)] == ["k"]
    served.clock.advance(10)
    assert served.read(name) == []
    assert served.read(name, "k") == []
    assert served.read("always", "k") == [("k", None, 1)]


def test_entries_go_one_by_one_and_a_list_moves_up(served: Served) -> None:
    served.send(("k", 1))
    served.clock.advance(6)
    served.send(("k", 2))
    served.clock.advance(6)
    assert served.read("by_name") == [("k", "2", 2)]
    assert served.read("log", "k") == [("k", 0, 2)]


def test_event_time_is_the_watermark_of_the_partition(served: Served) -> None:
    served.send(*((f"k{n}", n) for n in range(100)), watermark_s=100)  # more than one batch sweeps
    served.clock.advance(1000)
    assert len(served.read("event")) == 100
    served.send(watermark_s=110)
    assert served.read("event") == []


def test_time_does_not_go_back_for_readers(served: Served) -> None:
    served.send(*((f"k{n}", n) for n in range(100)))  # more than one batch sweeps
    served.clock.advance(10)
    served.send(("other", 2))
    served.clock._now_us -= 5_000_000
    assert [each[0] for each in served.read("last")] == ["other"]


@pytest.mark.parametrize("name", EXPIRING)
def test_a_checkpoint_shows_what_was_there_when_it_was_taken(served: Served, tmp_path: Path, name: str) -> None:
    served.send(("old", 1), watermark_s=100)
    served.clock.advance(6)
    served.send(("new", 2), watermark_s=105)
    served.clock.advance(6)
    store = CheckpointStore(f"{tmp_path}/checkpoints")
    served.node.checkpointer.take(P, store)
    served.clock.advance(1000)

    def read(name: str, key: str | None = None) -> list[str]:
        pages = read_checkpoint(store, "Mortal", name, key=key, cls=Mortal)
        return joined([read_table(page) for page in pages])["key"].to_pylist()

    assert read(name) == ["new"]
    assert (read(name, "old"), read(name, "new")) == ([], ["new"])
    assert read("event") == ["new", "old"]


def test_a_checkpoint_that_is_collected_while_it_is_read_is_not_taken_for_a_damaged_one(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is collected while it is read does not count as damaged: the newer one is read."""
    store = CheckpointStore(f"{tmp_path}/checkpoints")
    served.send(("a", 1))
    served.node.checkpointer.take(P, store)
    restore = store.restore

    def beside(manifest: Manifest, directory: Path) -> None:
        monkeypatch.setattr(store, "restore", restore)
        served.send(("b", 2))
        served.node.checkpointer.take(P, store)
        collect(store, Retention(1, 0.0))
        restore(manifest, directory)

    monkeypatch.setattr(store, "restore", beside)
    pages = list(read_checkpoint(store, "Mortal", "always", cls=Mortal))
    assert joined([read_table(page) for page in pages])["key"].to_pylist() == ["a", "b"]
    (left,) = store.catalog.checkpoints(P)
    for blob in store.blobs():
        store.objects.delete(blob.name)
    with pytest.raises(CheckpointCorrupt, match="is missing"):
        list(read_checkpoint(store, "Mortal", "always", cls=Mortal))
    assert store.catalog.checkpoints(P) == [left]


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_of_every_kind_on_both_backends(backend: Any) -> None:
    with OperatorHarness(Mortal, partitions=1, backend=backend) as h:
        h.send([{"k": "k", "n": 1}])
        store = h._stores[0]
        for name in (*EXPIRING, "always"):
            declaration = declaration_of(Mortal, name, "Mortal")
            for second, there in ((9, True), (10, name == "always")):
                at = At(second * 1_000_000, read_watermark(store))
                assert bool(list(entries_of(declaration, store, at))) is there
                assert bool(list(entries_of(declaration, store, at, [encode_row_key("k")]))) is there
        assert not list(scan_entries(VISITS, store, processing_us=10_000_000)), "in namespaces, too"


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_a_harness_that_was_restored_shows_nothing_that_has_expired(backend: Any) -> None:
    with OperatorHarness(Mortal, partitions=1, backend=backend) as h:
        h.send([{"k": "k", "n": 1}])
        h.advance_watermark(0)
        h._now_us += 10_000_000  # no batch comes that would sweep it
        snapshot = h.checkpoint()
    with OperatorHarness.restore(Mortal, snapshot) as h:
        assert (h.state("k").last.value, len(h.state("k").log), h.state("k").always.value) == (None, 0, 1)


class Later(Operator):
    key, output, state_version = "k", "k string", 2
    seen = state.map(str, int)

    def migrate_state(self, old_version: int, old: SimpleNamespace) -> None:
        self.seen["last"] = -1 if old.last is None else old.last
        self.seen["log"] = len(old.log)
        self.seen["event"] = len(old.event)

    def process(self, row: Any, ctx: Any) -> None: ...


Later.__name__ = "Mortal"


def test_a_migration_is_given_nothing_that_has_expired(one_partition: Callable[[], OperatorHarness]) -> None:
    h = one_partition()
    h.send([{"k": "k", "n": 1}])
    h._now_us += 10_000_000
    with OperatorHarness.restore(Later, h.checkpoint()) as later:
        later.send([{"k": "other", "n": 1}])
        assert dict(later.state("k").seen) == {"last": -1, "log": 0, "event": 1}


@pytest.fixture
def one_partition() -> Iterator[Callable[[], OperatorHarness]]:
    made: list[OperatorHarness] = []

    def make() -> OperatorHarness:
        made.append(OperatorHarness(Mortal, partitions=1))
        return made[-1]

    yield make
    for each in made:
        each.close()
