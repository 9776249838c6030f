"""Automatic checkpoints of a replica: when it takes them, and that a failing store disturbs nothing else."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow.checkpoint import CheckpointStore, Codec
from stateflow.checkpoint.backend import LocalBackend
from stateflow.checkpoint.store import Saved
from stateflow.cli.checkpoint import store_for_replica
from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import InvalidArgument, Unavailable
from stateflow.operator.operator import describe
from stateflow.partition.checkpoints import verify
from stateflow.partition.control import NOBODY, Restore, Restored
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.replica import checkpoints
from stateflow.replica.checkpoints import CheckpointShell
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to
from tests.contract.backends import Wrapper
from tests.unit.operators import Count

INTERVAL_S = 50.0


class Refusing(Wrapper):
    refuses = True

    def before(self, operation: str, name: str) -> None:
        if self.refuses:
            raise OSError(errno.EIO, "Input/output error")


def test_periodic_checkpoints_drift_apart_and_outlive_a_failing_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ReplicaSettings(checkpoint_interval_s=INTERVAL_S)
    node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path / "a", settings)
    node.create(describe(Count, 2, "Op"), [0, 1], 1)
    backend = Refusing(LocalBackend(tmp_path / "store"))
    store = CheckpointStore("x", backend=backend, codec=Codec())

    async def first_sleeps(seed: int, count: int) -> list[float]:
        shell = CheckpointShell(node, store, SYSTEM_CLOCK, Random(seed))
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == count:
                raise asyncio.CancelledError
            backend.refuses = len(slept) < 3

        monkeypatch.setattr(checkpoints.asyncio, "sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await shell.periodically()
        shell.close()
        return slept

    one, other = asyncio.run(first_sleeps(1, 5)), asyncio.run(first_sleeps(2, 5))
    assert 0 <= one[0] < INTERVAL_S
    assert one[0] != other[0]
    assert all(0.9 * INTERVAL_S <= each <= 1.1 * INTERVAL_S for each in one[1:] + other[1:])
    assert [next(store.newest(PartitionId("Op", p))).epoch for p in (0, 1)] == [1, 1], "taken once it worked again"
    node.close()


def test_on_demand_says_what_failed(tmp_path: Path) -> None:
    node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path / "a", ReplicaSettings())
    node.create(describe(Count, 1, "Op"), [0], 1)

    async def ask(store: CheckpointStore | None) -> None:
        shell = CheckpointShell(node, store, SYSTEM_CLOCK, Random(1))
        try:
            await shell.on_demand()
        finally:
            shell.close()

    with pytest.raises(Unavailable, match="Input/output error"):
        asyncio.run(ask(CheckpointStore("x", backend=Refusing(LocalBackend(tmp_path)), codec=Codec())))
    with pytest.raises(InvalidArgument, match="no checkpoint store"):
        asyncio.run(ask(None))
    node.close()


def test_where_nothing_can_ever_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument):
        store_for_replica(str(tmp_path / "file"), ReplicaSettings(), None)
    with pytest.raises(InvalidArgument):
        store_for_replica(str(tmp_path / "store"), ReplicaSettings(), tmp_path / "file")
    store_for_replica(str(tmp_path / "store"), ReplicaSettings(), tmp_path / "cache")


def test_a_store_is_tidied_and_what_is_gone_is_taken_again(tmp_path: Path) -> None:
    settings = ReplicaSettings(checkpoint_keep=2, checkpoint_keep_s=0)
    node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path / "a", settings)
    node.create(describe(Count, 2, "Op"), [0, 1], 1)
    store = CheckpointStore(str(tmp_path / "store"), codec=Codec())

    async def run() -> None:
        shell = CheckpointShell(node, store, SYSTEM_CLOCK, Random(1))

        async def round_(*, on_demand: bool = False) -> list[int]:
            taken, errors = await shell._take(node.owned(), "", on_demand=on_demand)
            assert not errors
            return sorted(taken.numbers)

        for number in range(5):
            send(node, number)
            assert await round_() == ([0, 1] if number == 0 else [0])
        assert await round_() == [], "nothing has changed"
        shell._tidy(store)
        counts = [len(store.catalog.checkpoints(PartitionId("Op", number))) for number in (0, 1)]
        assert counts == [2, 1]
        assert await round_() == [], "nothing is gone that counts"
        for found in store.catalog.checkpoints():
            store.objects.delete(found.name)
        for blob in store.blobs():
            store.objects.delete(blob.name)
        assert await round_() == []
        shell._tidy(store)
        assert await round_() == [0, 1]
        assert [verify(store, next(store.newest(PartitionId("Op", number)))).error for number in (0, 1)] == ["", ""]
        shell.close()

    asyncio.run(run())
    node.close()


def test_a_replica_that_did_not_publish_last_drops_nothing(tmp_path: Path) -> None:
    one, other = (
        ReplicaNode(ReplicaInfo(name, "site", f"{name}:1"), tmp_path / name, ReplicaSettings(checkpoint_keep_s=0))
        for name in "ab"
    )
    one.create(describe(Count, 2, "Op"), [0], 1)
    store = CheckpointStore(str(tmp_path / "store"), codec=Codec())

    async def run() -> None:
        shells = [CheckpointShell(node, store, SYSTEM_CLOCK, Random(1)) for node in (one, other)]
        for number in range(5):
            send(one, number)
            await shells[0]._take(one.owned(), "", on_demand=False)
        shells[1]._tidy(store)
        assert len(store.catalog.checkpoints()) == 5
        shells[0]._tidy(store)
        assert len(store.catalog.checkpoints()) == 3
        for shell in shells:
            shell.close()

    asyncio.run(run())
    one.close()
    other.close()


def send(node: ReplicaNode, number: int) -> None:
    schema = pa.schema([("k", pa.string()), ("v", pa.int64())])
    rows = pa.RecordBatch.from_pylist([{"k": "a", "v": number}], schema=schema).serialize().to_pybytes()
    apply_to(node, PartitionId("Op", 0), 1, Batch("s", number), schema.serialize().to_pybytes(), rows)


@pytest.mark.parametrize("store_fails", [False, True])
def test_a_partition_that_cannot_be_saved_keeps_none_behind_it_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_fails: bool
) -> None:
    """A partition that cannot be saved does not stop the others, unless the store fails.

    They would only wait for the store, too.
    """
    node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path / "a", ReplicaSettings())
    node.create(describe(Count, 3, "Op"), [0, 1, 2], 1)
    backend = Refusing(LocalBackend(tmp_path / "store"))
    backend.refuses = False
    store = CheckpointStore("x", backend=backend, codec=Codec())
    take, tried = node.checkpointer.take, list[int]()

    def taken(partition: PartitionId, *asked: Any, **how: Any) -> Saved | None:
        tried.append(partition.partition)
        if partition.partition == 0:
            backend.refuses = store_fails
            raise Unavailable("cannot take a snapshot", remedy="free space")
        return take(partition, *asked, **how)

    monkeypatch.setattr(node.checkpointer, "take", taken)

    async def run() -> list[int]:
        shell = CheckpointShell(node, store, SYSTEM_CLOCK, Random(1))
        done, errors = await shell._take(node.owned(), "", on_demand=False)
        assert [error.code for error in errors] == ["unavailable"]
        shell.close()
        return sorted(done.numbers)

    assert asyncio.run(run()) == ([] if store_fails else [1, 2])
    assert tried == ([0] if store_fails else [0, 1, 2])
    node.close()


def test_the_last_step_of_a_restore_does_not_wait_for_the_fetches_of_others(tmp_path: Path) -> None:
    """A partition whose owner has stopped used to wait until checkpoints of other partitions were fetched."""
    fetched, spec = Event(), describe(Count, 4, "Op")
    began: list[PartitionId] = []
    restored = Restored(2, 0, {}, 0)

    def prepare(_: object, partition: PartitionId, *__: object) -> Restored:
        began.append(partition)
        assert fetched.wait(60)
        return restored

    def own(*_: object, **__: object) -> Restored:
        fetched.set()
        return restored

    restorer = SimpleNamespace(prepare=prepare, own=own)
    node: Any = SimpleNamespace(restorer=restorer, remember=lambda _: None, settings=ReplicaSettings())

    async def restores() -> list[Restored]:
        shell = CheckpointShell(node, CheckpointStore(str(tmp_path), codec=Codec()), SYSTEM_CLOCK, Random(1))
        try:
            fetches = [
                asyncio.create_task(shell.prepare(Restore("r", spec, PartitionId("Op", number), 2)))
                for number in range(1, 4)
            ]
            while len(began) < checkpoints.RESTORES_AT_ONCE:
                await asyncio.sleep(0)
            owning = shell.own(Restore("r", spec, PartitionId("Op", 0), 2), NOBODY)
            return [await asyncio.wait_for(owning, 30), *await asyncio.gather(*fetches)]
        finally:
            fetched.set()
            shell.close()

    assert asyncio.run(restores()) == [restored] * 4
