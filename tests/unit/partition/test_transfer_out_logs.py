"""Change logs of many followed partitions: which one a snapshot belongs to, and what a confirmation costs."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.checkpoint import CheckpointStore
from stateflow.errors import InvariantBroken, MoveUnknown
from stateflow.partition.change_feed import ChangeLog
from stateflow.partition.registry import PartitionRegistry
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.unit.partition.test_replica import Two

PARTITIONS = [PartitionId("Op", number) for number in range(500)]
P = PARTITIONS[0]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ReplicaNode]:
    settings = ReplicaSettings(block_cache_bytes=8 << 20, write_buffer_bytes=8 << 20)
    made = ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path, settings)
    yield made
    made.close()


def follow(node: ReplicaNode, partition: PartitionId, move_id: str) -> str:
    """Adds the change log of a standby, as a snapshot does. Returns the snapshot's id."""
    local = node._registry.local(partition)
    snapshot_id = f"{partition.operator}-{partition.partition}-{move_id}"
    with local.mutex:
        changes = ChangeLog(move_id, snapshot_id, 0, 1 << 20, standby=True)
        changes._sent = 10_000  # as if it had read so far
        node._registry.add_log(local, changes)
    return snapshot_id


def test_a_confirmation_looks_at_no_other_partition(node: ReplicaNode, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = {partition: follow(node, partition, "s1") for partition in PARTITIONS}
    follow(node, P, "s2")
    changed: list[PartitionId] = []
    node.on_change(changed.append)
    monkeypatch.setattr(PartitionRegistry, "local_partitions", lambda _: pytest.fail("all partitions are looked at"))
    for sequence, (partition, snapshot_id) in enumerate(snapshots.items(), 1):
        node.sender.confirm(snapshot_id, sequence)
        assert node.sender.confirmed(partition, sequence)
        assert not node.sender.confirmed(partition, sequence + 1)
        assert node.sender.change_log(snapshot_id).confirmed == sequence
    assert changed == PARTITIONS, "each is woken once, and no other is"


def test_a_snapshot_whose_log_was_dropped_is_unknown(node: ReplicaNode) -> None:
    stale, kept = follow(node, P, "s1"), follow(node, P, "s2")
    changed: list[PartitionId] = []
    node.on_change(changed.append)
    local = node._registry.local(P)
    with local.mutex:
        node._registry.drop_log(local, "s1")
    asked: list[Callable[[str], Any]] = [node.sender.change_log, lambda snapshot: node.sender.confirm(snapshot, 1)]
    for ask in asked:
        with pytest.raises(MoveUnknown, match=f"there is no such snapshot .*snapshot={stale}"):
            ask(stale)
    assert not changed
    node.sender.confirm(kept, 1)
    assert changed == [P]


def test_a_log_that_is_not_found_by_its_snapshot_is_named(node: ReplicaNode) -> None:
    follow(node, P, "s1")
    node._registry.validate()
    node._registry.local(P).logs["s1"] = ChangeLog("s1", "other", 0, 1 << 20)
    with pytest.raises(InvariantBroken, match=r"not found by its snapshot \(partition=Op/0 replica=a\)"):
        node._registry.validate()
    node._registry.local(P).logs.clear()
    with pytest.raises(InvariantBroken, match=r"still found by its snapshot, though it was dropped \(partition=Op/0"):
        node._registry.validate()


def test_a_snapshot_that_cannot_be_read_and_is_cancelled_meanwhile_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path)
    two.send(two.a, 1)
    registry = two.a._registry

    def cancelled(directory: Path) -> Any:
        two.a.cancel(P, "m1")
        directory.mkdir()  # a file that is written after the log was closed
        raise OSError(errno.EMFILE, "Too many open files", str(directory))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Too many open files"):
        patched.setattr(registry.digests, "files", cancelled)
        two.a.sender.snapshot(P, "m1")
    assert not list(registry.snapshots.iterdir())
    two.close()


def _drop_a_log(two: Two) -> None:
    two.a.sender.snapshot(P, "m1")
    two.a.cancel(P, "m1")


def _take_a_checkpoint(two: Two) -> None:
    two.a.checkpointer.take(P, CheckpointStore(str(two.root / "checkpoints")))


def _verify(two: Two) -> None:
    copy = two.a.verifier.begin(P)
    assert copy is not None
    two.a.verifier.end(copy)


@pytest.mark.parametrize("act", [_drop_a_log, _take_a_checkpoint, _verify])
def test_a_snapshot_that_could_not_be_removed_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Two], None]
) -> None:
    """A directory cannot be listed without file handles, and so not be removed."""
    two = Two(tmp_path)
    two.send(two.a, 1)
    two.a.sender.snapshot(P, "kept")
    with monkeypatch.context() as patched:
        patched.setattr(two.a._registry.environment, "remove_tree", lambda _: None)
        act(two)
        two.a.sender.drop_unread()
        assert len(list(two.a._registry.snapshots.iterdir())) == 2
    two.a.sender.drop_unread()
    assert [path.name for path in two.a._registry.snapshots.iterdir()] == ["Op-0-kept-1"]
    two.close()


def test_a_snapshot_that_cannot_be_read_leaves_no_follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(tmp_path)
    two.send(two.a, 1)

    def damaged(directory: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(directory))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output error"):
        patched.setattr(two.a._registry.digests, "files", damaged)
        two.a.sender.snapshot(P, "m1")
    assert not two.a.sender.followers()
    assert not list(two.a._registry.snapshots.iterdir())
    two.a._registry.validate()
    two.a.sender.snapshot(P, "m1")
    two.close()
