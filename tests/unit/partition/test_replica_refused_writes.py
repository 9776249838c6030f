"""Disks that refuse a write, or leave its outcome unknown, at every place where a partition changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.changes import ChangeSet, Mutations
from stateflow.checkpoint import CheckpointStore
from stateflow.errors import MoveConflict, OutOfMemory, StateDamaged, Unavailable
from stateflow.partition import layout
from stateflow.partition.lifecycle import State
from stateflow.partition.processor import PartitionProcessor
from stateflow.storage import RocksStore
from stateflow.types import ReplicaInfo
from tests.unit.partition.test_replica import P, Two
from tests.unit.partition.test_sources_skipped import frame
from tests.unit.partition.test_takeover import end_of_standby, followed, moved_to_its_standby

C = ReplicaInfo("c", "site", "c:1")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


class Refusing:
    """Makes the writes fail that ``applies`` chooses. ``late``: they are written all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.applies: Any = lambda mutations: False
        self.late, self.error = False, Exception("IO error: No space left on device: While appending to file")
        real = RocksStore.apply

        def apply(store: RocksStore, mutations: Mutations, *, sync: bool = False) -> None:
            refused = self.applies(mutations)
            if not refused or self.late:
                real(store, mutations, sync=sync)
            if refused:
                raise self.error

        monkeypatch.setattr(RocksStore, "apply", apply)

    def all(self) -> None:
        self.applies = lambda mutations: True

    def ownerships(self) -> None:
        self.applies = lambda mutations: any(key == layout.OWNERSHIP for key, _ in mutations.puts)

    def end(self) -> None:
        self.applies = lambda mutations: False


class Stuck:
    """Makes flushes and snapshots fail while there is a ``cause``. As in RocksDB, a database that failed goes on to
    fail until it is reopened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cause, self.failed = False, list[RocksStore]()
        self.error = Exception("IO error: While open a file for random read: /x/000009.sst: Too many open files")
        for way in ("flush", "snapshot"):
            monkeypatch.setattr(RocksStore, way, self._failing(getattr(RocksStore, way)))

    def _failing(self, real: Any) -> Any:
        def way(store: RocksStore, *args: Any) -> Any:
            if self.cause:
                self.failed.append(store)
            if store in self.failed:
                raise self.error
            return real(store, *args)

        return way


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Stuck:
    return Stuck(monkeypatch)


def _take_a_checkpoint(two: Two) -> object:
    return two.a.checkpointer.take(P, CheckpointStore(str(two.root / "checkpoints")))


def _begin_a_move(two: Two) -> object:
    return two.a.sender.snapshot(P, "m1")


def _verify(two: Two) -> object:
    return two.a.verifier.begin(P)


def _rewrite(two: Two) -> object:
    two.a._registry._reopen(P, flush=True)
    return P


@pytest.mark.parametrize("act", [_take_a_checkpoint, _begin_a_move, _verify, _rewrite])
def test_a_partition_whose_flush_failed_is_copied_once_the_cause_is_gone(two: Two, stuck: Stuck, act: Any) -> None:
    """No batch comes, which would have the database opened anew."""
    two.send(two.a, 1)
    stuck.cause = True
    for _ in range(2):
        with pytest.raises(Exception, match="Too many open files"):
            act(two)
    stuck.cause = False
    assert act(two) is not None
    assert two.states(two.a) == {"k1": 1}


def test_a_snapshot_that_has_no_room_leaves_the_database_open(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers would start over."""
    two.send(two.a, 1)
    two.a.sender.snapshot(P, "m1")
    full = Exception("IO error: No space left on device: While mkdir: /x/snapshots/checkpoint-1.tmp")
    monkeypatch.setattr(RocksStore, "snapshot", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(Unavailable, match="No space left"):
        _take_a_checkpoint(two)
    local = two.a._registry.local(P)
    assert local.store is not None
    assert "m1" in local.logs


def test_a_move_is_released_although_its_source_cannot_flush(two: Two, stuck: Stuck) -> None:
    two.send(two.a, 1)
    assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    stuck.cause = True
    two.a.sender.release(P, "m1")
    assert two.a._registry.local(P).store is None


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    return Refusing(monkeypatch)


@pytest.mark.parametrize("late", [True, False])
def test_a_batch_of_which_it_is_not_known_whether_it_was_written_is_applied_once(
    two: Two, refusing: Refusing, late: bool
) -> None:
    """A batch whose write has an unknown outcome is applied once.

    The log could not be forced to disk, for an unfamiliar reason.
    """
    followed(two)
    refusing.late, refusing.error = late, Exception("IO error: Stale file handle: While fsync")
    refusing.all()
    with pytest.raises(Exception, match="Stale"):
        two.send(two.a, 7)
    refusing.end()
    assert two.send(two.a, 7).replayed is late
    assert two.states(two.a) == {"k0": 3, "k1": 12, "k2": 2}
    assert two.send(two.a, 8).replayed is False
    assert two.states(two.a) == {"k0": 3, "k1": 12, "k2": 10}


def test_a_batch_of_which_a_follower_could_not_be_told_is_applied_once_and_not_missing_there(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose change set could not be encoded is applied once, and a follower begins anew.

    There was no memory for the change set with its checksum.
    """
    followed(two)

    def encode(_: ChangeSet) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ChangeSet, "encode", encode)
        with pytest.raises(OutOfMemory):
            two.send(two.a, 7)
    assert two.send(two.a, 7).replayed
    assert two.states(two.a) == {"k0": 3, "k1": 12, "k2": 2}
    assert not two.a._registry.local(P).logs, "whoever follows begins anew: this one lacks a batch"
    two.b.cancel(P, "s1")
    two.move(two.a, two.b, "m1", 1)
    assert two.states(two.b) == {"k0": 3, "k1": 12, "k2": 2}


def test_a_move_that_cannot_begin_changes_nothing(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", full)
        with pytest.raises(OSError, match="No space"):
            two.b.receiver.prepare(two.spec, P, "m1", 1)
    assert two.b.lifecycle(P).state is State.ABSENT
    two.send(two.a, 1)
    two.move(two.a, two.b, "m2", 1)


def test_a_standby_that_cannot_be_kept_leaves_room_for_another_move(two: Two, refusing: Refusing) -> None:
    moved_to_its_standby(two)
    assert two.b.cancel(P, "m1")
    assert two.b.receiver.own(P, "s1", end_of_standby(two)) is None
    two.b._registry.local(P).incoming.seal = end_of_standby(two)  # type: ignore[union-attr]
    refusing.ownerships()
    with pytest.raises(Exception, match="No space"):
        two.b.cancel(P, "s1")
    refusing.end()
    assert two.b.lifecycle(P).state is State.ABSENT
    two.b.receiver.prepare(two.spec, P, "m2", 2)
    with pytest.raises(MoveConflict):
        two.b.receiver.prepare(two.spec, P, "m3", 2)


def test_what_was_sealed_stays_sealed_where_serving_it_again_cannot_be_written(two: Two, refusing: Refusing) -> None:
    two.send(two.a, 1, 2)
    assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    refusing.ownerships()
    with pytest.raises(Exception, match="No space"):
        two.a.successor.from_local(P, "t1", 3)
    refusing.end()
    lifecycle = two.a.lifecycle(P)
    assert (lifecycle.state, lifecycle.epoch, lifecycle.move_id) == (State.SEALED, 2, "m1")
    assert two.a._registry.local(P).store is None, "one that could not be written takes no more writes"
    assert two.a.successor.from_local(P, "t2", 3).epoch == 3
    two.send(two.a, 3, epoch=3)


def test_a_seal_that_cannot_be_written_is_asked_for_again(two: Two, refusing: Refusing) -> None:
    two.send(two.a, 1)
    refusing.ownerships()
    store = two.a._registry.local(P).store
    with pytest.raises(Exception, match="No space"):
        two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    refusing.end()
    assert two.a._registry.local(P).store is not store, "one that could not be written takes no more writes"
    assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)


def test_a_seal_that_fails_behind_a_batch_for_an_unknown_reason_leaves_no_database_open(
    two: Two, refusing: Refusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition is fenced during its batch, and the database refuses the seal at the end of the batch.

    A database that has refused a write refuses all later ones until it is reopened, so the next attempt would fail,
    too.
    """
    two.send(two.a, 1)
    store = two.a._registry.local(P).store
    real = PartitionProcessor.run

    def run(processor: PartitionProcessor, *args: Any) -> Any:
        assert not two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
        refusing.ownerships()
        refusing.error = Exception("Aborted: the database does not say why")
        return real(processor, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PartitionProcessor, "run", run)
        with pytest.raises(Exception, match="does not say why"):
            two.send(two.a, 2)
    refusing.end()
    assert two.a._registry.local(P).store is not store
    assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    kept = two.a._registry.local(P).kept
    assert kept is not None
    assert kept.sequence == 2, "the batch itself is committed"


def settling_failed(two: Two, refusing: Refusing) -> None:
    """Lets a snapshot fail as it writes the position of a batch that skipped the partition."""
    two.send(two.a, 1)
    assert two.a.batches.skip(frame(1)) == [0]
    refusing.all()
    with pytest.raises(Exception, match="No space"):
        two.a.sender.snapshot(P, "m0")
    refusing.end()


@pytest.mark.parametrize("late", [True, False])
def test_a_snapshot_that_could_not_settle_can_be_taken_later(two: Two, refusing: Refusing, late: bool) -> None:
    refusing.late = late
    settling_failed(two, refusing)
    assert two.a.sender.snapshot(P, "m1").sequence == 2
    assert layout.positions(two.a._registry.store(two.a._registry.local(P))) == {"s": 1}


def test_a_checkpoint_that_could_not_settle_can_be_taken_later(two: Two, refusing: Refusing, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "store"))
    two.send(two.a, 1)
    assert two.a.batches.skip(frame(1)) == [0]
    refusing.all()
    with pytest.raises(Unavailable, match="No space"):
        two.a.checkpointer.take(P, store)
    refusing.end()
    saved = two.a.checkpointer.take(P, store)
    assert saved is not None
    assert saved.manifest.positions == {"s": 1}


def test_a_fence_that_could_not_settle_succeeds_later(two: Two, refusing: Refusing) -> None:
    two.send(two.a, 1)
    assert two.a.batches.skip(frame(1)) == [0]
    refusing.all()
    local = two.a._registry.local(P)
    with pytest.raises(Exception, match="No space"), local.work:
        two.a._registry.settle(local)
    refusing.end()
    with pytest.raises(Unavailable, match="it is unknown"):
        two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)


def test_a_seal_that_failed_and_was_cancelled_is_not_found_at_the_next_start(two: Two, refusing: Refusing) -> None:
    """A partition whose seal failed is served again after the move was cancelled, by the next process, too.

    The seal was written, but its outcome was unknown, as after a failed sync.
    """
    two.send(two.a, 1)
    refusing.late = True
    refusing.ownerships()
    for _ in range(2):
        with pytest.raises(Exception, match="No space"):
            two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    with pytest.raises(Exception, match="No space"):
        two.a.cancel(P, "m1")
    assert two.a.lifecycle(P).state is State.FENCING, "it is not served before that is durable"
    refusing.end()
    assert two.a.cancel(P, "m1")
    two.send(two.a, 2)
    assert (two.restart("a").lifecycle(P).state, two.a.lifecycle(P).epoch) == (State.OWNED, 1)
    assert two.send(two.a, 4).replayed is False
    assert two.states(two.a) == {"k1": 5, "k2": 2}
    assert two.a.sender.fence(P, "m2", 2, two.b.info, cold=True)


def test_a_partition_that_is_damaged_when_a_failed_seal_is_cancelled_is_lost(two: Two, refusing: Refusing) -> None:
    two.send(two.a, 1)
    refusing.ownerships()
    with pytest.raises(Exception, match="No space"):
        two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    refusing.end()
    local = two.a._registry.local(P)
    two.a._registry.close_store(local)
    assert local.directory is not None
    (local.directory / "CURRENT").write_bytes(b"MANIFEST-999999\n")
    with pytest.raises(StateDamaged):
        two.a.cancel(P, "m1")
    assert two.a.lifecycle(P).state is State.ABSENT
    assert two.a.cancel(P, "m1")


def test_a_partition_that_was_given_away_is_sealed_by_the_second_attempt(two: Two, refusing: Refusing) -> None:
    two.send(two.a, 1)
    refusing.ownerships()
    with pytest.raises(Exception, match="No space"):
        two.a.successor.supersede(P, 2, C)
    refusing.end()
    assert two.a.lifecycle(P).state is State.OWNED
    assert two.a._registry.local(P).store is None, "one that could not be written takes no more writes"
    assert two.a.successor.supersede(P, 2, C)
    assert two.restart("a").lifecycle(P).state is State.SEALED


def test_a_partition_that_is_lost_is_told_of_although_it_cannot_be_put_aside(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.send(two.a, 1)

    def read_only(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(type(two.a._registry.quarantine), "put_aside", read_only)
    two.a._registry.lose(two.a._registry.local(P), StateDamaged("it cannot be read", remedy="-"))
    assert two.a.lifecycle(P).state is State.ABSENT
    assert two.a.lost_some
