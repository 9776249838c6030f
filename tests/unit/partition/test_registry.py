"""Invariants of a replica's partitions, and that they are checked where that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import InvalidArgument, InvariantBroken, OperatorNotImportable, StateDamaged, StateflowError
from stateflow.operator.operator import describe
from stateflow.partition.lifecycle import Lifecycle, State
from stateflow.partition.local_partition import Incoming, LocalPartition
from stateflow.partition.positions import Batch
from stateflow.partition.registry import PartitionRegistry
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ControllerSettings, ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to
from tests.unit.operators import Count

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
SPEC = describe(Count, 2, "Op")
P = PartitionId("Op", 0)
ELSEWHERE = ReplicaInfo("b", "site", "b:1")


def started(root: Path, *, checked: bool) -> ReplicaNode:
    settings = ReplicaSettings(block_cache_bytes=8 << 20, write_buffer_bytes=8 << 20, debug_validate=checked)
    return ReplicaNode(ReplicaInfo("a", "site", "a:1"), root, settings)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ReplicaNode]:
    made = started(tmp_path, checked=True)
    made.create(SPEC, [0], 1)
    send(made, 0)
    yield made
    made.close()


def send(node: ReplicaNode, number: int, epoch: int = 1) -> Any:
    rows = pa.RecordBatch.from_pylist([{"k": "a", "v": 1}], schema=SCHEMA).serialize().to_pybytes()
    return apply_to(node, P, epoch, Batch("s", number), SCHEMA.serialize().to_pybytes(), rows)


def registry(node: ReplicaNode) -> PartitionRegistry:
    return node._registry


def _both_owned_and_incoming(local: LocalPartition) -> None:
    local.incoming = Incoming("m1", local.home / "m1-1")


def _warms_for_another_move(local: LocalPartition) -> None:
    local.processor, local.lifecycle.state, local.lifecycle.move_id = None, State.WARMING, "m2"
    local.incoming = Incoming("m1", local.home / "m1-1")


def _one_directory_twice(local: LocalPartition) -> None:
    assert local.directory is not None
    local.processor, local.lifecycle.state, local.lifecycle.move_id = None, State.WARMING, "m1"
    local.incoming = Incoming("m1", local.directory)


def _another_partition(local: LocalPartition) -> None:
    local.lifecycle.partition = PartitionId("Op", 1)


def _not_on_disk(local: LocalPartition) -> None:
    local.store = local.processor = local.directory = None


def _elsewhere_on_disk(local: LocalPartition) -> None:
    local.directory = local.home.parent


def _at_work_behind_its_seal(local: LocalPartition) -> None:
    local.lifecycle.state, local.lifecycle.successor = State.SEALED, ELSEWHERE


def _at_work_without_a_database(local: LocalPartition) -> None:
    local.store = None


def _served_and_lost(local: LocalPartition) -> None:
    local.lost = StateDamaged("it was")


def _in_hand_beside_one_taken_away(local: LocalPartition) -> None:
    local.lifecycle.running, local.stuck = True, object()  # type: ignore[assignment]


def _sealed_to_nobody(local: LocalPartition) -> None:
    local.lifecycle.state = State.SEALED


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (_both_owned_and_incoming, "comes in only while the partition warms"),
        (_warms_for_another_move, "for the same move"),
        (_one_directory_twice, "each copy has its own directory"),
        (_another_partition, "a local partition and its lifecycle are of the same partition"),
        (_not_on_disk, "an owned or sealed partition is on disk"),
        (_elsewhere_on_disk, "in the partition's"),
        (_at_work_behind_its_seal, "only an owned partition has a processor"),
        (_at_work_without_a_database, "the owned epoch and an open database"),
        (_served_and_lost, "a lost partition is not served"),
        (_in_hand_beside_one_taken_away, "beside a stuck one"),
        (_sealed_to_nobody, "a sealed partition has a successor"),
    ],
)
def test_a_partition_in_a_state_that_no_history_leads_to_is_named(
    node: ReplicaNode, corrupt: Callable[[LocalPartition], None], words: str
) -> None:
    registry(node).validate()
    served = registry(node).local(P)
    local = replace(served, lifecycle=replace(served.lifecycle))
    corrupt(local)
    with pytest.raises(InvariantBroken, match=rf"{words}.*please report it with this line"):
        local.validate()


def test_a_partition_of_an_operator_that_nobody_knows_is_named(node: ReplicaNode) -> None:
    del registry(node)._operators["Op"]
    with pytest.raises(InvariantBroken, match=r"an operator that is unknown here \(partition=Op/0 replica=a\)"):
        registry(node).validate()


def test_a_corruption_is_caught_behind_the_next_change(node: ReplicaNode, caplog: pytest.LogCaptureFixture) -> None:
    local = registry(node).local(P)
    local.lost = StateDamaged("it was")
    with pytest.raises(InvariantBroken, match="a lost partition is not served"):
        send(node, 1)
    assert "invariant_broken: an invariant is broken in OWNED: a lost partition is not served" in caplog.text


def test_a_lifecycle_is_looked_at_after_each_event(node: ReplicaNode) -> None:
    lifecycle = registry(node).local(P).lifecycle
    lifecycle.running, lifecycle.state, lifecycle.successor = True, State.SEALED, ELSEWHERE
    with pytest.raises(InvariantBroken, match="only while the partition is OWNED or FENCING"):
        lifecycle.cancel("m1")


def test_nobody_looks_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATEFLOW_DEBUG_VALIDATE", raising=False)
    node = started(tmp_path, checked=ReplicaSettings().debug_validate)
    node.create(SPEC, [0], 1)
    local = registry(node).local(P)
    assert type(local.lifecycle) is Lifecycle
    local.lost = StateDamaged("it was")
    assert send(node, 0).rows == 1
    node.close()


def test_what_was_lost_and_undeployed_is_created_again(node: ReplicaNode) -> None:
    local = registry(node).local(P)
    registry(node).lose(local, StateDamaged("it was"))
    node.drop("Op", 1)
    node.create(SPEC, [0], 2)
    assert send(node, 0, epoch=2).rows == 1


def test_all_is_closed_although_some_of_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that fails to close one part closes all others, raises the first error, and leaves its directory."""
    node = started(tmp_path, checked=True)
    node.create(SPEC, [0, 1], 1)
    send(node, 0)
    made = registry(node)
    store, other = (made.store(made.local(PartitionId("Op", number))) for number in (0, 1))
    closed: list[str] = []

    def noting(part: Any, name: str, error: str = "") -> None:
        close = part.close

        def noted() -> None:
            closed.append(name)
            close()
            if error:
                raise OSError(error)

        monkeypatch.setattr(part, "close", noted)

    noting(store, "store", "the first error")
    noting(other, "other store")
    noting(made.skipped_batches, "skipped batches", "another error")
    noting(made.commits, "commits")
    with pytest.raises(OSError, match="the first error"):
        node.close()
    assert closed == ["store", "other store", "skipped batches", "commits"]
    again = started(tmp_path, checked=True)
    assert send(again, 0).replayed
    again.close()


@pytest.mark.parametrize("damaged", ["TERM", "REPLICA", "commits/000000000001.commits"])
def test_a_replica_that_cannot_start_leaves_its_directory(tmp_path: Path, damaged: str) -> None:
    """A directory in which a replica failed to start is free for the next one, which used to get data_dir_locked."""
    node = started(tmp_path, checked=True)
    node.create(SPEC, [0], 1)
    registry(node).keep_term("ledger", 1)
    node.close()
    path = tmp_path / damaged
    path.parent.mkdir(exist_ok=True)
    sound = path.read_bytes() if path.exists() else b""
    path.write_bytes(b"x" * 2000)
    errors = []
    for _ in range(2):  # each error is kept, and with it the replica that raised it
        with pytest.raises(StateflowError) as caught:
            started(tmp_path, checked=True)
        errors.append(caught.value)
    assert "data_dir_locked" not in {each.code for each in errors}
    path.write_bytes(sound)
    started(tmp_path, checked=True).close()


def test_it_is_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_DEBUG_VALIDATE", "1")
    assert ReplicaSettings().debug_validate
    assert ControllerSettings().debug_validate
    monkeypatch.setenv("STATEFLOW_DEBUG_VALIDATE", "often")
    with pytest.raises(InvalidArgument, match="STATEFLOW_DEBUG_VALIDATE cannot be 'often'"):
        ReplicaSettings()


OLDER = replace(SPEC, recorded_us=10)
NEWER = replace(SPEC, dropped=(("former", 1),), recorded_us=20)


def test_no_late_command_takes_a_replica_back_to_an_older_version(tmp_path: Path) -> None:
    """No late command brings an older version back.

    Late commands are a transfer that was sent, or is begun again, after an upgrade, and a creation.
    """
    node = started(tmp_path, checked=True)
    node.create(OLDER, [0], 1)
    node._registry.learn(NEWER)
    node.receiver.prepare(OLDER, PartitionId("Op", 1), "m1", 1)
    node.create(OLDER, [0], 1)
    node._registry.learn(SPEC)  # from a program that kept no order
    assert node.operators() == [NEWER]
    assert registry(node).deployed("Op").dropped == {"former": 1}
    node.close()
    again = started(tmp_path, checked=True)
    again._registry.learn(OLDER)
    assert again.operators() == [NEWER]
    again.close()


def test_what_was_a_version_before_is_one_again(node: ReplicaNode) -> None:
    """A former version can be deployed again, though this replica missed the one between, which may yet arrive."""
    node._registry.learn(OLDER)
    back = replace(OLDER, recorded_us=30)
    node._registry.learn(back)
    node._registry.learn(NEWER)
    assert node.operators() == [back]


def test_a_description_without_an_order_is_the_oldest(tmp_path: Path) -> None:
    node = started(tmp_path, checked=True)
    node.create(SPEC, [0], 1)
    node.close()
    file = tmp_path / "operators" / "Op" / "operator.json"
    kept = json.loads(file.read_text())
    del kept["recorded_us"]
    file.write_text(json.dumps(kept))
    again = started(tmp_path, checked=True)
    assert again.operators() == [SPEC]
    again._registry.learn(NEWER)
    assert again.operators() == [NEWER]
    again.close()


def test_no_older_version_serves_for_one_that_cannot_be_loaded(node: ReplicaNode) -> None:
    node._registry.learn(OLDER)
    node.follow(replace(NEWER, target="not_here:Op"))
    for _ in ("as it was told", "asked by what was sent before"):
        with pytest.raises(OperatorNotImportable):
            node.reader.scan(P, "n").__next__()
        with pytest.raises(OperatorNotImportable):
            node.receiver.prepare(OLDER, PartitionId("Op", 1), "m1", 1)
    node.follow(NEWER)
    assert send(node, 1).rows == 1
