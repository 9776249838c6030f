"""Restores: prepared twice, given up, and the last step: repeated, refused, and what it writes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.checkpoint import Adoption, CheckpointStore, Codec
from stateflow.checkpoint.backend import LocalBackend
from stateflow.errors import MoveUnknown, SourceTaken, Unavailable
from stateflow.operator.operator import describe
from stateflow.partition import layout
from stateflow.partition.checkpoints import manifests_of, read_checkpoint
from stateflow.partition.control import Restored, Wanted
from stateflow.partition.environment import Environment
from stateflow.partition.layout import Session
from stateflow.partition.lifecycle import State
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.storage import RocksEngine, RocksStore
from stateflow.types import ReplicaInfo
from tests.contract.backends import Counting
from tests.unit.operators import Count
from tests.unit.partition.test_replica import P, Two


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


@pytest.fixture
def store(two: Two) -> CheckpointStore:
    """Makes a store with a checkpoint of what ``a`` has, and lets ``b`` fetch it."""
    made = CheckpointStore(str(two.root / "store"), codec=Codec())
    two.send(two.a, 1, 2)
    two.a.checkpointer.take(P, made)
    two.b.restorer.prepare(two.spec, P, "r", made, made)
    return made


@pytest.fixture
def left(two: Two, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[list[str], int]]:
    """Tells which copies ``b`` has, and how many leases are in the store."""
    monkeypatch.setattr(Environment, "aside", lambda _, work, wait_s=0.0: work())
    home = two.root / "b" / "operators" / "Op" / "p00000"
    return lambda: (sorted(path.name for path in home.glob("*")), len(store.objects.list("intents")))


def test_a_cancelled_restore_leaves_nothing(
    two: Two, store: CheckpointStore, left: Callable[[], tuple[list[str], int]]
) -> None:
    """A cancelled restore leaves no copy. It used to stay, with an open database and a lease, until a restart."""
    assert two.b.cancel(P, "another")
    assert left() == (["restored-r-1"], 1)
    assert two.b.cancel(P, "r")
    assert left() == ([], 0)
    with pytest.raises(MoveUnknown):
        two.b.restorer.own(P, "r", 2)
    two.b.restorer.prepare(two.spec, P, "r", store, store)
    assert two.b.restorer.own(P, "r", 2).epoch == 2, "the controller may ask again"


def test_an_undeployed_operator_leaves_no_prepared_restore(
    two: Two, store: CheckpointStore, left: Callable[[], tuple[list[str], int]]
) -> None:
    """A prepared copy goes with its operator, which used to stay known, and its files on disk, until a restart."""
    two.b.drop("Op", 9)
    assert left() == ([], 0)
    assert two.b.operators() == []
    assert two.b._registry.local(P).restoring is None


def test_a_restore_that_is_given_up_while_it_fetches_leaves_nothing(
    two: Two, store: CheckpointStore, left: Callable[[], tuple[list[str], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = CheckpointStore.restore

    def meanwhile(*arguments: Any, **options: Any) -> None:
        two.b.cancel(P, "r")
        restore(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "restore", meanwhile)
        with pytest.raises(MoveUnknown):
            two.b.restorer.prepare(two.spec, P, "r", store, store)
    assert left() == ([], 0)


def test_a_store_that_fails_behind_the_fetch_leaves_nothing(
    two: Two, store: CheckpointStore, left: Callable[[], tuple[list[str], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt = CheckpointStore.adopt

    def fails(*_: object) -> None:
        raise Unavailable("the store does not answer", remedy="wait")

    def last(*arguments: Any) -> Adoption:
        monkeypatch.setattr(store.catalog, "checkpoints", fails)
        return adopt(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "adopt", last)
        with pytest.raises(Unavailable):
            two.b.restorer.prepare(two.spec, P, "r", store, store)
    assert left() == ([], 0)


def test_two_requests_at_once_prepare_one_after_another(
    two: Two, store: CheckpointStore, left: Callable[[], tuple[list[str], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a controller and of its successor leave one copy. There used to be two, one of them for ever."""
    restore, inside, most, second = CheckpointStore.restore, 0, 0, threading.Event()

    class Noticed:
        """A lock that tells when a thread has to wait for it."""

        def __init__(self) -> None:
            self._lock = threading.RLock()

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                second.set()
                self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    def prepare() -> None:
        two.b.restorer.prepare(two.spec, P, "r3", store, store)

    def slowly(*arguments: Any, **options: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if other.ident is None:
            other.start()
            second.wait()
        second.set()
        restore(*arguments, **options)
        inside -= 1

    other = threading.Thread(target=prepare)
    two.b.restorer._preparing.clear()
    monkeypatch.setattr(Environment, "mutex", lambda _: Noticed())
    monkeypatch.setattr(CheckpointStore, "restore", slowly)
    prepare()
    other.join()
    assert most == 1
    assert left() == (["restored-r3-3"], 1)
    two.b.restorer.own(P, "r3", 2)
    assert left() == (["restored-r3-3"], 0)


def test_what_is_owned_meanwhile_is_owned(two: Two, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated request finds the partition owned.

    It used to get stale_epoch, which the controller took for the end of the restore: the former owner served again,
    too.
    """
    publish, first = Adoption.publish, []

    def slowly(adoption: Adoption, epoch: int, replica: str) -> None:
        publish(adoption, epoch, replica)
        if not first:
            first.append(None)
            first[0] = two.b.restorer.own(P, "r", 2)

    monkeypatch.setattr(Adoption, "publish", slowly)
    again = two.b.restorer.own(P, "r", 2)
    assert again.epoch == first[0].epoch == two.b.lifecycle(P).epoch
    assert two.states(two.b) == {"k1": 1, "k2": 2}


@pytest.mark.parametrize("stop_sources", [False, True])
def test_clients_are_stopped_where_that_is_asked_for(two: Two, store: CheckpointStore, stop_sources: bool) -> None:
    two.b.restorer.own(P, "r", 2, stop_sources=stop_sources)
    client = Session(1, "me")
    if stop_sources:
        with pytest.raises(SourceTaken, match="restored from a checkpoint"):
            two.b.batches.open_source([P], "new", client)
    else:
        two.b.batches.open_source([P], "new", client)


@pytest.mark.parametrize("on_demand", [False, True])
def test_the_next_checkpoint_has_the_refusal_of_stopped_clients(
    two: Two, store: CheckpointStore, tmp_path: Path, on_demand: bool
) -> None:
    """The first checkpoint after a restore has the stored refusal, though no batch came since.

    It used to be taken for the adopted one, which has the same epoch and sequence, and lacks the refusal.
    """
    two.b.restorer.own(P, "r", 2, stop_sources=True)
    assert two.b.checkpointer.take(P, store, on_demand=on_demand) is not None
    newest = next(store.newest(P))
    store.restore(newest, tmp_path / "newest")
    database = RocksEngine(8 << 20, 8 << 20).open(tmp_path / "newest")
    assert database.get(layout.STOPPED) is not None
    database.close()
    assert two.b.checkpointer.take(P, store, on_demand=False) is None, "it is unchanged now"
    two.b.checkpointer.take(P, store)
    assert next(store.newest(P)) == newest


def test_one_after_another(two: Two, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to own run one after another.

    Otherwise the second makes an epoch durable that the partition is not at.
    """
    publish, published, owned = Adoption.publish, [], []
    others = [threading.Thread(target=lambda: owned.append(two.b.restorer.own(P, "r", 2))) for _ in range(4)]

    def slowly(adoption: Adoption, epoch: int, replica: str) -> None:
        published.append(epoch)
        if len(published) == 1:
            for other in others:
                other.start()
        publish(adoption, epoch, replica)

    monkeypatch.setattr(Adoption, "publish", slowly)
    owned.append(two.b.restorer.own(P, "r", 2))
    for other in others:
        other.join()
    assert published == [2]
    assert {each.epoch for each in owned} == {2}
    assert isinstance(owned[0], Restored)
    again = two.restart("b")
    assert (again.lifecycle(P).state, again.lifecycle(P).epoch) == (State.OWNED, 2)


def test_what_is_fetched_anew_meanwhile_is_not_owned(
    two: Two, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def anew(_: object) -> None:
        monkeypatch.undo()
        two.b.restorer.prepare(two.spec, P, "r", store, store)

    monkeypatch.setattr(two.b.restorer, "_authority", SimpleNamespace(check=anew))
    with pytest.raises(MoveUnknown):
        two.b.restorer.own(P, "r", 2)
    two.b.restorer.own(P, "r", 2)
    assert two.states(two.b) == {"k1": 1, "k2": 2}


def test_an_owner_that_cannot_own_what_was_restored_goes_on_being_checkpointed(
    two: Two, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that fails to own what was restored, as its disk is full, can still be checkpointed.

    The newer epoch used to be published by then, and every checkpoint of the owner was refused from then on.
    """

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    two.a.restorer.prepare(two.spec, P, "r2", store, store)
    with monkeypatch.context() as patch:
        patch.setattr(RocksStore, "apply", full)
        with pytest.raises(OSError, match="no space"):
            two.a.restorer.own(P, "r2", 2)
    two.send(two.a, 4)
    assert two.a.checkpointer.take(P, store) is not None
    assert next(store.newest(P)).epoch == 1
    again = two.restart("a")
    assert (again.lifecycle(P).state, again.lifecycle(P).epoch) == (State.OWNED, 1)
    assert two.states(again) == {"k1": 5, "k2": 2}


def test_of_a_savepoint_only_the_wanted_manifests_are_read(tmp_path: Path) -> None:
    """Each restored partition, and each part of a read, used to read the manifests of all partitions."""
    backend = Counting(LocalBackend(tmp_path / "store"))
    store, spec = CheckpointStore("x", backend=backend, codec=Codec()), describe(Count, 4, "Op")
    nodes = [ReplicaNode(ReplicaInfo(name, "site", f"{name}:1"), tmp_path / name, ReplicaSettings()) for name in "ab"]
    nodes[0].create(spec, range(4), 1)
    partitions = nodes[0].owned()
    for partition in partitions:
        nodes[0].checkpointer.take(partition, store, savepoint="kept")

    def read() -> list[int]:
        """Returns the partitions whose manifests were read since the last call."""
        names = [name for operation, name in backend.done if operation == "read" and name.startswith("savepoints/")]
        backend.done.clear()
        return [int(name[-10:-5]) for name in names]

    for partition in partitions:
        nodes[1].restorer.prepare(spec, partition, "r", store, None, Wanted("kept"))
    assert read() == [0, 1, 2, 3]
    for number in (2, 1):
        list(read_checkpoint(store, "Op", "n", cls=Count, savepoint="kept", partitions=[number]))
    assert read() == [2, 1]
    assert [each.partition for each in manifests_of(store, "Op", "kept")] == read() == [0, 1, 2, 3]
    for node in nodes:
        node.close()
