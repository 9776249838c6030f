"""Two replicas without sockets, and moves between them step by step: what is proved, what is refused, what survives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import (
    AlreadyDeployed,
    DataDirLocked,
    DigestMismatch,
    InvalidArgument,
    MoveAborted,
    MoveUnknown,
    NotOwner,
    OperatorFailed,
    StateflowError,
    StateMissing,
    TransferCorrupt,
    UnknownState,
)
from stateflow.operator.operator import Operator, describe
from stateflow.partition.change_feed import Seal, SnapshotInfo
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.settings import ReplicaSettings
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo
from tests.applying import apply_to
from tests.unit.operators import BadEnds, BadStart, Count, Gate

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
P = PartitionId("Op", 0)
SETTINGS = ReplicaSettings(
    block_cache_bytes=8 << 20, write_buffer_bytes=8 << 20, change_log_bytes_max=1 << 20, return_log_bytes_max=16 << 10
)


def path_of(source: ReplicaNode, base: SnapshotInfo, name: str) -> Path:
    with source.sender.open_file(base.snapshot_id, name) as file:
        return Path(file.name)


class Two:
    """Replicas ``a`` and ``b``; the operator's partition 0 is at ``a``, at epoch 1."""

    def __init__(self, root: Path, cls: type[Operator] = Count) -> None:
        self.root = root
        self.infos = {name: ReplicaInfo(name, "site", f"{name}:1") for name in "ab"}
        self.nodes: dict[str, ReplicaNode] = {}
        self.spec: OperatorSpec = describe(cls, 1, "Op")
        for name in "ab":
            self.start(name)
        self.a.create(self.spec, [0], 1)
        self.sent = 0

    def start(self, name: str) -> ReplicaNode:
        self.nodes[name] = ReplicaNode(self.infos[name], self.root / name, SETTINGS)
        return self.nodes[name]

    def restart(self, name: str) -> ReplicaNode:
        """Restarts a replica as after a kill: its files stay as they were, nothing flushed, nothing tidied up."""
        shutil.copytree(self.root / name, self.root / "as-it-was")
        self.nodes[name].close()
        shutil.rmtree(self.root / name)
        (self.root / "as-it-was").rename(self.root / name)
        return self.start(name)

    @property
    def a(self) -> ReplicaNode:
        return self.nodes["a"]

    @property
    def b(self) -> ReplicaNode:
        return self.nodes["b"]

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

    def send(self, node: ReplicaNode, *values: int, epoch: int = 1, number: int | None = None) -> Any:
        rows = [{"k": f"k{value % 3}", "v": value} for value in values]
        data = pa.RecordBatch.from_pylist(rows, schema=SCHEMA).serialize().to_pybytes()
        batch = Batch("s", self.sent if number is None else number)
        outcome = apply_to(node, P, epoch, batch, SCHEMA.serialize().to_pybytes(), data)
        if isinstance(outcome, Applied) and number is None:
            self.sent += 1
        return outcome

    # -- a move, step by step -------------------------------------------------------------------------------

    def warm(self, source: ReplicaNode, target: ReplicaNode, move: str, epoch: int = 1) -> SnapshotInfo:
        kept = target.receiver.prepare(self.spec, P, move, epoch)
        base = source.sender.snapshot(P, move, kept=kept)
        have = target.receiver.warm_base(P)
        directory = target.receiver.incoming_directory(P, move)
        for file in base.files:
            near = have.get(file.digest) or path_of(source, base, file.name)
            shutil.copy(near, directory / file.name)
        return base

    def follow(
        self, source: ReplicaNode, target: ReplicaNode, move: str, base: SnapshotInfo, after: int
    ) -> Seal | None:
        reading = source.sender.change_log(base.snapshot_id).read(after, 1 << 20)
        target.receiver.apply_changes(P, move, reading.change_sets)
        return reading.seal

    def move(self, source: ReplicaNode, target: ReplicaNode, move: str, epoch: int) -> SnapshotInfo:
        base = self.warm(source, target, move, epoch)
        (target.receiver.open_kept if base.kept else target.receiver.open_incoming)(P, move, base)
        assert source.sender.fence(P, move, epoch + 1, target.info) is True
        seal = self.follow(source, target, move, base, base.sequence)
        assert seal is not None
        target.receiver.tidy(P, target.receiver.own(P, move, seal))
        source.sender.release(P, move)
        return base

    def leave_a(self) -> None:
        """Moves the partition to ``b``, where it changes."""
        self.send(self.a, 1)
        self.move(self.a, self.b, "m1", 1)
        self.send(self.b, 2, epoch=2)

    def states(self, node: ReplicaNode) -> dict[Any, Any]:
        return {key: value for key, _, value in node.reader.scan(P, "total")}


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def test_a_move_while_batches_come(two: Two) -> None:
    two.send(two.a, 1, 2, 3)
    base = two.warm(two.a, two.b, "m1")
    two.send(two.a, 4)
    two.b.receiver.open_incoming(P, "m1", base)
    assert two.follow(two.a, two.b, "m1", base, base.sequence) is None
    last = two.send(two.a, 5, 6)
    assert two.send(two.b, 7, epoch=2) is None, "it comes early and is held"
    with pytest.raises(NotOwner):
        two.send(two.b, 7, epoch=1)
    assert two.a.sender.fence(P, "m1", 2, two.b.info) is True
    seal = two.follow(two.a, two.b, "m1", base, base.sequence + 1)
    assert seal is not None
    assert (seal.epoch, seal.sequence) == (2, 3)
    two.b.receiver.own(P, "m1", seal)
    assert two.send(two.a, 7) == two.b.info, "the source sends on"
    assert two.send(two.b, number=two.sent - 1, epoch=1) == Applied(last.output, True, 0), "the output moved along"
    two.send(two.b, 7, epoch=2)
    assert two.states(two.b) == {"k0": 9, "k1": 12, "k2": 7}
    with pytest.raises(NotOwner):
        two.states(two.a)
    assert (two.a.lifecycle(P).state, two.b.lifecycle(P).state) == (State.SEALED, State.OWNED)
    assert two.a.owned() == []
    assert two.b.owned() == [P]


@pytest.mark.parametrize("forgets", [False, True])
def test_to_and_fro_reuses_what_is_there(two: Two, forgets: bool) -> None:
    """A move back reuses what is there: the changes since, or the files, if the owner does not remember all changes."""
    two.send(two.a, *range(50))
    expected = two.states(two.a)
    two.move(two.a, two.b, "m1", 1)
    two.send(two.b, 3, epoch=2)
    two.b.receiver.warm_base(P)
    have = set(two.a.receiver.warm_base(P))
    if forgets:
        two.restart("b")
    base = two.move(two.b, two.a, "m2", 2)
    assert bool(base.kept) is not forgets
    if forgets:
        assert {file.digest for file in base.files if file.name.endswith(".sst")} & have
    assert two.states(two.a) == {**expected, "k0": expected["k0"] + 3}
    assert two.send(two.a, 6, epoch=3).rows == 1
    (left,) = (two.root / "a" / "operators" / "Op" / "p00000").iterdir()
    assert left.name.startswith("m2-")


def test_a_partition_goes_back_and_forth_on_its_changes_alone(two: Two) -> None:
    expected = dict.fromkeys(("k0", "k1", "k2"), 0)
    sides = two.a, two.b
    for epoch in range(1, 7):
        here, there = sides[(epoch + 1) % 2], sides[epoch % 2]
        for value in range(3):
            two.send(here, value, epoch=epoch)
            expected[f"k{value}"] += value
        base = two.move(here, there, f"m{epoch}", epoch)
        assert bool(base.kept) is (epoch > 1)
        assert two.states(there) == expected
    two.restart("a" if here is two.b else "b")
    assert two.states(two.nodes["a" if here is two.b else "b"]) == expected


def test_what_was_sealed_is_known_again_after_a_restart(two: Two) -> None:
    two.leave_a()
    two.restart("a")
    assert two.move(two.b, two.a, "m2", 2).kept
    assert two.states(two.a) == {"k1": 1, "k2": 2}


def test_more_changes_than_are_kept(two: Two) -> None:
    two.send(two.a, 1)
    two.move(two.a, two.b, "m1", 1)
    for value in range(100):
        two.send(two.b, value, epoch=2)
    assert not two.move(two.b, two.a, "m2", 2).kept


def test_a_move_back_that_is_given_up_leaves_what_was_kept(two: Two) -> None:
    two.leave_a()
    base = two.warm(two.b, two.a, "m2", 2)
    two.a.receiver.open_kept(P, "m2", base)
    assert two.follow(two.b, two.a, "m2", base, base.sequence) is None
    two.a.receiver.abandon(P, "m2")
    two.b.sender.cancel(P, "m2")
    two.send(two.b, 4, epoch=2)
    assert two.move(two.b, two.a, "m3", 2).kept
    assert two.states(two.a) == {"k1": 5, "k2": 2}


def test_a_move_back_that_is_cut_short_leaves_what_was_kept(two: Two) -> None:
    """A move back that is cut short leaves the former copy.

    The incoming copy, which has more by now, is not taken for it.
    """
    two.leave_a()
    base = two.warm(two.b, two.a, "m2", 2)
    two.a.receiver.open_kept(P, "m2", base)
    two.restart("a")
    assert two.a.lifecycle(P).state is State.SEALED
    (left,) = (two.root / "a" / "operators" / "Op" / "p00000").iterdir()
    assert left.name.startswith("created-")
    two.b.sender.cancel(P, "m2")
    assert two.move(two.b, two.a, "m3", 2).kept
    assert two.states(two.a) == {"k1": 1, "k2": 2}


def test_a_copy_that_served_again_is_no_base(two: Two) -> None:
    """A copy that served again is not a base: move, epoch and sequence do not show that it was written to."""
    two.leave_a()
    two.a.successor.from_local(P, "f1", 3)
    two.send(two.a, 5, epoch=3, number=1)
    two.a.successor.supersede(P, 4, two.b.info)
    assert two.a.receiver.prepare(two.spec, P, "m2", 4) is None


# -- what is proved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "more"])
def test_a_damaged_base_is_refused(two: Two, damage: str) -> None:
    two.send(two.a, *range(20))
    base = two.warm(two.a, two.b, "m1")
    directory = two.b.receiver.incoming_directory(P, "m1")
    file = max(directory.iterdir(), key=lambda path: path.name.endswith(".sst"))
    data = bytearray(file.read_bytes())
    match damage:
        case "flip":
            data[len(data) // 2] ^= 1
            file.write_bytes(bytes(data))
        case "cut":
            file.write_bytes(bytes(data[:-1]))
        case "missing":
            file.unlink()
        case "more":
            (directory / "999999.sst").write_bytes(b"")
    with pytest.raises(DigestMismatch):
        two.b.receiver.open_incoming(P, "m1", base)
    assert two.b.lifecycle(P).state is State.WARMING
    assert two.send(two.a, 1).rows == 1, "the source keeps serving"


def test_change_sets_must_come_in_order_and_whole(two: Two) -> None:
    base = two.warm(two.a, two.b, "m1")
    two.b.receiver.open_incoming(P, "m1", base)
    for value in range(3):
        two.send(two.a, value)
    sets = two.a.sender.change_log(base.snapshot_id).read(0, 1 << 20).change_sets
    with pytest.raises(TransferCorrupt, match="arrived after 0"):
        two.b.receiver.apply_changes(P, "m1", sets[1:])
    assert two.b.receiver.apply_changes(P, "m1", sets[:1]) == 1
    with pytest.raises(TransferCorrupt):
        two.b.receiver.apply_changes(P, "m1", sets[:1])
    with pytest.raises(TransferCorrupt):
        two.b.receiver.apply_changes(P, "m1", [sets[1][:-1]])
    assert two.b.receiver.apply_changes(P, "m1", sets[1:]) == 3
    assert two.b.receiver.apply_changes(P, "m1", []) == 3


@pytest.mark.parametrize("wrong", ["sequence", "digest"])
def test_a_copy_that_is_not_what_was_sealed_is_not_owned(two: Two, wrong: str) -> None:
    base = two.warm(two.a, two.b, "m1")
    two.b.receiver.open_incoming(P, "m1", base)
    two.send(two.a, 1)
    two.a.sender.fence(P, "m1", 2, two.b.info)
    reading = two.a.sender.change_log(base.snapshot_id).read(0, 1 << 20)
    assert reading.seal is not None
    seal = reading.seal
    if wrong == "digest":
        two.b.receiver.apply_changes(P, "m1", reading.change_sets)
        seal = Seal(seal.move_id, seal.epoch, seal.sequence, "0" * 32, seal.sealed_at_us)
    with pytest.raises(DigestMismatch, match="differs from what the source sealed"):
        two.b.receiver.own(P, "m1", seal)
    assert two.b.lifecycle(P).state is State.WARMING
    two.restart("b")
    assert two.b.lifecycle(P).state is State.ABSENT, "nothing of it was durable"


def test_a_target_that_is_lost_after_the_seal_starts_again(two: Two) -> None:
    two.send(two.a, 1, 2)
    base = two.warm(two.a, two.b, "m1")
    two.b.receiver.open_incoming(P, "m1", base)
    two.send(two.a, 3)
    two.a.sender.fence(P, "m1", 2, two.b.info)
    two.restart("b")
    base = two.warm(two.a, two.b, "m1")
    assert base.sequence == 2, "the base is the sealed state"
    two.b.receiver.open_incoming(P, "m1", base)
    seal = two.follow(two.a, two.b, "m1", base, base.sequence)
    assert seal is not None
    two.b.receiver.own(P, "m1", seal)
    assert two.states(two.b) == {"k0": 3, "k1": 1, "k2": 2}
    with pytest.raises(MoveUnknown):
        two.a.sender.snapshot(P, "m2")


# -- fences -------------------------------------------------------------------------------------------------


def test_no_fence_for_a_target_that_does_not_follow(two: Two) -> None:
    with pytest.raises(MoveUnknown, match="does not follow"):
        two.a.sender.fence(P, "m1", 2, two.b.info)
    base = two.warm(two.a, two.b, "m1")
    for value in range(60):
        two.send(two.a, *range(value, value + 800))  # more than the log may hold
    assert two.a.sender.change_log(base.snapshot_id).overflowed
    with pytest.raises(MoveUnknown, match="does not follow"):
        two.a.sender.fence(P, "m1", 2, two.b.info)
    assert two.send(two.a, 1).rows == 1


def test_a_cancelled_move_neither_seals_nor_begins_again(two: Two) -> None:
    two.warm(two.a, two.b, "m1")
    assert two.a.cancel(P, "m1") is True
    assert two.b.cancel(P, "m1") is True
    with pytest.raises(MoveUnknown):
        two.a.sender.fence(P, "m1", 2, two.b.info)
    with pytest.raises(MoveUnknown):
        two.a.sender.snapshot(P, "m1")
    with pytest.raises(MoveAborted):
        two.b.receiver.prepare(two.spec, P, "m1", 1)
    assert two.b.lifecycle(P).state is State.ABSENT
    assert list((two.root / "a" / "snapshots").iterdir()) == []
    two.move(two.a, two.b, "m2", 1)


def test_a_cancel_that_overtakes_the_prepare(two: Two) -> None:
    assert two.b.cancel(P, "m1") is True
    with pytest.raises(MoveAborted):
        two.b.receiver.prepare(two.spec, P, "m1", 1)
    two.move(two.a, two.b, "m2", 1)


def test_a_cancel_after_the_seal_is_refused_even_after_a_restart(two: Two) -> None:
    two.warm(two.a, two.b, "m1")
    two.a.sender.fence(P, "m1", 2, two.b.info)
    assert two.a.cancel(P, "m1") is False
    two.restart("a")
    assert two.a.cancel(P, "m1") is False
    assert two.send(two.a, 1) == two.b.info


def test_a_fence_waits_for_the_batch_in_hand(tmp_path: Path) -> None:
    two = Two(tmp_path, Gate)
    Gate.entered.clear()
    Gate.opened.clear()
    base = two.warm(two.a, two.b, "m1")
    two.b.receiver.open_incoming(P, "m1", base)
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(two.send(two.a, -1)))
    thread.start()
    assert Gate.entered.wait(20)
    assert two.a.sender.fence(P, "m1", 2, two.b.info) is False, "heard while the batch is being processed"
    assert two.a.lifecycle(P).state is State.FENCING
    assert two.follow(two.a, two.b, "m1", base, 0) is None, "no seal yet"
    Gate.opened.set()
    thread.join(20)
    assert outcomes[0].rows == 1, "the batch in hand is acknowledged"
    assert two.a.lifecycle(P).state is State.SEALED
    seal = two.follow(two.a, two.b, "m1", base, 0)
    assert seal is not None
    two.b.receiver.own(P, "m1", seal)
    assert two.states(two.b) == {"k2": -1}
    two.close()


def test_an_operator_whose_close_fails_does_not_spoil_the_seal(tmp_path: Path) -> None:
    two = Two(tmp_path, BadEnds)
    two.send(two.a, 1)
    heard: list[PartitionId] = []
    two.a.on_change(heard.append)
    two.move(two.a, two.b, "m1", 1)
    assert heard, "who waits for the seal is told"
    assert two.states(two.b) == {"k1": 1}
    two.close()


def test_an_operator_whose_open_fails_is_named(tmp_path: Path) -> None:
    two = Two(tmp_path, BadStart)
    with pytest.raises(OperatorFailed, match="no such file") as caught:
        two.send(two.a, 1)
    assert caught.value.where["operator"] == "Op"
    assert len(str(caught.value).splitlines()) == 1
    two.close()


# -- restarts -----------------------------------------------------------------------------------------------


def test_everything_durable_comes_back(two: Two) -> None:
    two.send(two.a, 1, 2)
    two.restart("a")
    assert two.states(two.a) == {"k1": 1, "k2": 2}
    assert two.send(two.a, 3).rows == 1
    two.move(two.a, two.b, "m1", 1)
    for name in "ab":
        two.restart(name)
    assert two.send(two.a, 9) == two.b.info
    assert (two.b.lifecycle(P).epoch, two.b.lifecycle(P).move_id) == (2, "m1")
    assert two.states(two.b) == {"k0": 3, "k1": 1, "k2": 2}


def test_a_transfer_cut_short_leaves_nothing(two: Two) -> None:
    two.send(two.a, 1)
    base = two.warm(two.a, two.b, "m1")
    two.b.receiver.open_incoming(P, "m1", base)
    two.restart("b")
    assert two.b.lifecycle(P).state is State.ABSENT
    assert list((two.root / "b" / "operators" / "Op").glob("p*/*")) == []
    two.restart("a")
    assert list((two.root / "a" / "snapshots").iterdir()) == []
    two.move(two.a, two.b, "m2", 1)


def test_of_two_copies_the_newer_one_counts(two: Two) -> None:
    """The newer of two copies counts.

    The process ended after it owned the new copy and before it removed the old one.
    """
    two.send(two.a, 1)
    two.move(two.a, two.b, "m1", 1)
    home = two.root / "a" / "operators" / "Op" / "p00000"
    shutil.copytree(home / "created-1", two.root / "old")
    two.send(two.b, 5, epoch=2)
    two.move(two.b, two.a, "m2", 2)
    shutil.copytree(two.root / "old", home / "zz-old")
    two.restart("a")
    assert two.a.lifecycle(P).state is State.OWNED
    assert two.states(two.a) == {"k1": 1, "k2": 5}
    (left,) = home.iterdir()
    assert left.name.startswith("m2-")


# -- mistakes -----------------------------------------------------------------------------------------------


def test_creating_twice_and_too_late(two: Two) -> None:
    two.send(two.a, 1)
    two.a.create(two.spec, [0], 1)
    assert two.states(two.a) == {"k1": 1}, "what is there stays"
    with pytest.raises(AlreadyDeployed):
        two.a.create(two.spec, [0], 2)
    two.b.receiver.prepare(two.spec, P, "m1", 1)
    two.b.receiver.abandon(P, "m1")
    with pytest.raises(AlreadyDeployed):
        two.b.create(two.spec, [0], 1)
    assert not (two.root / "b" / "operators" / "Op" / "p00000" / "created-1").exists()


def test_a_data_directory_has_one_process_and_one_name(two: Two) -> None:
    with pytest.raises(DataDirLocked, match=f"pid={os.getpid()}"):
        ReplicaNode(two.a.info, two.root / "a", SETTINGS)
    two.a.close()
    with pytest.raises(InvalidArgument, match="belongs to replica 'a'"):
        ReplicaNode(two.b.info, two.root / "a", SETTINGS)
    two.start("a")


def test_what_is_not_here(two: Two) -> None:
    with pytest.raises(NotOwner):
        two.send(two.b, 1)
    with pytest.raises(UnknownState, match="'m'"):
        list(two.a.reader.scan(P, "m"))
    with pytest.raises(NotOwner):
        list(two.a.reader.scan(PartitionId("Other", 0), "n"))
    with pytest.raises(MoveUnknown):
        two.a.sender.open_file("nothing", "CURRENT")
    base = two.a.sender.snapshot(P, "m1")
    for name in ("../../LOCK", "../LOCK", "nothing", "CURRENT/nothing"):
        with pytest.raises(MoveUnknown):
            two.a.sender.open_file(base.snapshot_id, name)
    with pytest.raises(MoveUnknown):
        two.b.receiver.open_incoming(P, "m1", base)
    with pytest.raises((StateMissing, StateflowError)):
        two.b.sender.snapshot(P, "m1")


def test_a_replica_starts_where_a_copy_is_not_whole(tmp_path: Path) -> None:
    """A replica starts though a copy is not whole, and cannot be opened.

    The replica was killed between two files of a base, or while it removed an old copy.
    """
    two = Two(tmp_path)
    two.send(two.a, 1)
    two.b.receiver.prepare(two.spec, P, "m1", 1)
    base = two.a.sender.snapshot(P, "m1")
    arrived = two.b.receiver.incoming_directory(P, "m1")
    shutil.copy(path_of(two.a, base, "CURRENT"), arrived)
    half_removed = two.root / "b" / "operators" / "Op" / "p00000" / "m0-0-1.part"
    shutil.copytree(arrived, half_removed)
    two.restart("b")
    assert two.b.lifecycle(P).state is State.ABSENT
    assert not arrived.exists()
    assert not half_removed.exists()
    two.close()


FIRST_BATCH = """
import gc
import sys
from pathlib import Path
from stateflow.operator.operator import describe
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to
from tests.unit.operators import Count

folder = Path(sys.argv[1])
node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), folder / "a")
gc.disable()
node.create(describe(Count, 1, "Op"), [0], 1)
young = gc.get_count()[0]
before = set(sys.modules)
schema, rows = (folder / "schema").read_bytes(), (folder / "rows").read_bytes()
apply_to(node, PartitionId("Op", 0), 1, Batch("s", 0), schema, rows)
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}), young < 5000)
node.close()
"""


def test_the_first_batch_imports_nothing(tmp_path: Path) -> None:
    """The first batch imports nothing.

    At the target of a move it would wait, after the fence, for the import and for the garbage collector to look at what
    was imported.
    """
    (tmp_path / "schema").write_bytes(SCHEMA.serialize())
    (tmp_path / "rows").write_bytes(pa.RecordBatch.from_pylist([{"k": "a", "v": 1}], schema=SCHEMA).serialize())
    command = [sys.executable, "-c", FIRST_BATCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[] True\n"), done.stderr


def test_rows_of_one_batch_are_counted_by_the_site_that_each_says(tmp_path: Path) -> None:
    two = Two(tmp_path)
    try:
        sites = [("k1", 1, "east"), ("k2", 2, "west"), ("k3", 3, "east"), ("k1", 4, None)]
        schema = pa.schema([*SCHEMA, ("site", pa.string())])
        rows = pa.RecordBatch.from_pylist([dict(zip("kvs", row, strict=True)) for row in sites])
        data = rows.rename_columns(schema.names).cast(schema).serialize().to_pybytes()
        encoded = schema.serialize().to_pybytes()
        apply_to(two.a, P, 1, Batch("s", 0, site_column="site"), encoded, data)
        apply_to(two.a, P, 1, Batch("s", 1, site="north"), encoded, data)
        traffic = two.a.view(P)
        assert traffic.rows == 8
        assert traffic.origins == {"east": 2, "west": 1, "north": 4}
    finally:
        two.close()


def test_replicas_of_one_disk_name_the_same_one(tmp_path: Path) -> None:
    two = Two(tmp_path)
    assert two.a.disk().disk == two.b.disk().disk != ""
    assert two.a.disk().disk_free_bytes > 0
    two.a.close()
    two.b.close()


def test_a_limit_of_its_own_and_a_reserve_that_is_all_there_is(tmp_path: Path) -> None:
    settings = ReplicaSettings(room_bytes=5, disk_reserve_bytes=1 << 60)
    node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path, settings)
    assert (node.disk().room_bytes, node.disk().disk_free_bytes) == (5, 0)
    node.close()
