"""A replica's side of failover and of transfers cut short, without sockets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stateflow.changes import Mutations
from stateflow.checkpoint import Adoption, CheckpointStore
from stateflow.errors import (
    CheckpointStoreMissing,
    DigestMismatch,
    DiskFull,
    LeaseLost,
    MoveAborted,
    MoveUnknown,
    PositionGap,
    StaleCheckpoint,
    StaleEpoch,
    StateMissing,
    TransferCorrupt,
)
from stateflow.partition.change_feed import BaseFile, Kept, Seal, SnapshotInfo
from stateflow.partition.control import Command
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.types import ReplicaInfo
from tests.applying import apply_to
from tests.unit.partition.test_replica import SCHEMA, P, Two

C = ReplicaInfo("c", "site", "c:1")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "checkpoints"))


def position(two: Two, source: str) -> int | None:
    found = two.a.reader.position(P, source)
    return None if found is None else found.batch


# -- a standby ----------------------------------------------------------------------------------------------


def followed(two: Two) -> SnapshotInfo:
    """Makes ``b`` follow ``a`` for the standby move s1, and lets it have everything."""
    two.send(two.a, 1, 2, 3)
    base = two.warm(two.a, two.b, "s1")
    two.b.receiver.open_incoming(P, "s1", base)
    two.send(two.a, 4)
    two.follow(two.a, two.b, "s1", base, base.sequence)
    return base


def test_a_standby_takes_over_with_what_it_has(two: Two) -> None:
    followed(two)
    expected = two.states(two.a)
    taken = two.b.successor.from_standby(P, "t1", 2, "s1")
    assert (taken.epoch, taken.positions) == (2, {"s": 1})
    assert two.b.successor.from_standby(P, "t1", 2, "s1") == taken, "asked for twice, done once"
    assert two.states(two.b) == expected
    two.send(two.b, 5, epoch=2)
    with pytest.raises(MoveUnknown):
        two.b.receiver.apply_changes(P, "s1", [])
    assert two.restart("b").lifecycle(P).epoch == 2


def test_what_was_owned_in_a_standbys_copy_and_lost_by_damage_is_not_brought_again(two: Two) -> None:
    """State that was owned in a standby's copy and lost by damage is not copied again.

    The source's sealed copy lacks what the target took after the seal.
    """
    base = followed(two)
    assert two.a.sender.fence(P, "m7", 2, two.b.info, standby_move="s1") is True
    seal = two.follow(two.a, two.b, "s1", base, base.sequence + 1)
    assert seal is not None
    two.b.receiver.tidy(P, two.b.receiver.own(P, "s1", seal))
    two.send(two.b, 5, epoch=2)
    assert two.b.receiver.lost(P, "m7") is None
    two.nodes["b"].close()
    (copy,) = (two.root / "b" / "operators" / "Op" / "p00000").glob("s1-*")
    for file in copy.glob("MANIFEST-*"):
        file.write_bytes(b"")
    two.start("b")
    lost = two.b.receiver.lost(P, "m7")
    assert lost is not None
    assert lost.where["evidence"].name == copy.name + "-1"
    assert two.b.receiver.lost(P, "m8") is None


def test_a_take_over_that_was_cancelled_never_happens_however_late_it_comes(two: Two) -> None:
    followed(two)
    assert two.b.cancel(P, "t1")
    with pytest.raises(MoveAborted):
        two.b.successor.from_standby(P, "t1", 2, "s1")
    with pytest.raises(MoveUnknown):
        two.b.successor.from_standby(P, "t2", 2, "s9")
    assert two.b.lifecycle(P).state is State.WARMING


def test_an_old_owner_that_comes_back_seals_durably_what_it_lost(two: Two) -> None:
    followed(two)
    two.b.successor.from_standby(P, "t1", 2, "s1")
    assert two.a.successor.supersede(P, 2, two.b.info)
    assert not two.a.successor.supersede(P, 2, two.b.info), "it has heard it"
    assert two.send(two.a, 9) == two.b.info
    again = two.restart("a").lifecycle(P)
    assert (again.state, again.epoch, again.successor) == (State.SEALED, 2, two.b.info)
    two.move(two.b, two.a, "m2", 2)
    assert two.states(two.a) == {"k0": 3, "k1": 5, "k2": 2}


def test_a_sealed_owner_serves_again_when_its_move_can_never_end(two: Two) -> None:
    two.send(two.a, 1, 2)
    expected = two.states(two.a)
    assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
    with pytest.raises(StaleEpoch):
        two.a.successor.from_local(P, "t0", 2)
    taken = two.a.successor.from_local(P, "t1", 3)
    assert taken.epoch == 3
    assert two.states(two.a) == expected
    assert two.send(two.a, 3, epoch=3).rows == 1


class Overtaken:
    """A partition's lock. The next thread that takes it stands still until its replica has registered again."""

    def __init__(self, node: ReplicaNode) -> None:
        self._node, self._local = node, node._registry.local(P)
        self._mutex, self._local.mutex = self._local.mutex, self

    def __enter__(self) -> None:
        self._local.mutex = self._mutex
        self._node.begin_session(Command("ledger", 1, "second"))
        self._mutex.__enter__()

    def __exit__(self, *_: object) -> None:
        self._mutex.__exit__(None, None, None)


@pytest.mark.parametrize("how", ["standby", "local"])
def test_a_take_over_that_a_registration_overtakes_is_void(two: Two, how: str) -> None:
    """A takeover that a registration overtakes is void.

    The registration reported that the partition is not owned here: the controller may have given the takeover up by
    then.
    """
    if how == "standby":
        followed(two)
        node, take_over = two.b, lambda: two.b.successor.from_standby(P, "t1", 3, "s1", command)
    else:
        assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True)
        node, take_over = two.a, lambda: two.a.successor.from_local(P, "t1", 3, command)
    node.begin_session(command := Command("ledger", 1, "first"))
    before = replace(node.lifecycle(P))
    Overtaken(node)
    with pytest.raises(LeaseLost):
        take_over()
    assert node.lifecycle(P) == before


def moved_to_its_standby(two: Two) -> None:
    """Seals ``a`` for the move m1 to ``b``, which follows as standby s1."""
    followed(two)
    snapshot = two.a._registry.local(P).logs["s1"].snapshot_id
    with two.a.sender.reading(snapshot):
        assert two.a.sender.is_followed(P, "m1", "s1")
    assert two.a.sender.fence(P, "m1", 2, two.b.info, standby_move="s1")


def end_of_standby(two: Two) -> Seal:
    seal = two.a._registry.local(P).logs["s1"].seal
    assert seal is not None
    return seal


def test_a_move_to_its_own_standby_is_owned_by_the_copy_that_follows(two: Two) -> None:
    moved_to_its_standby(two)
    two.b.receiver.own(P, "s1", end_of_standby(two))
    lifecycle = two.b.lifecycle(P)
    assert (lifecycle.state, lifecycle.epoch, lifecycle.move_id) == (State.OWNED, 2, "m1")
    assert two.states(two.b) == {"k0": 3, "k1": 5, "k2": 2}
    two.send(two.b, 5, epoch=2)
    base = two.move(two.b, two.a, "s2", 2)
    assert base.kept, "the former owner becomes its standby with nothing but what changed"


def test_a_fence_needs_somebody_who_follows(two: Two) -> None:
    followed(two)
    with pytest.raises(MoveUnknown):
        two.a.sender.fence(P, "m1", 2, two.b.info, standby_move="s9")
    assert two.a.lifecycle(P).state is State.OWNED


def test_a_move_that_was_cancelled_at_its_target_leaves_the_standby_for_a_take_over(two: Two) -> None:
    moved_to_its_standby(two)
    assert two.b.cancel(P, "m1")
    assert two.b.receiver.own(P, "s1", end_of_standby(two)) is None
    assert two.b.successor.from_standby(P, "t1", 3, "s1").epoch == 3


def test_a_standby_of_what_moved_elsewhere_stays_until_that_is_recorded_and_then_as_a_former_owner(two: Two) -> None:
    followed(two)
    base = two.a.sender.snapshot(P, "m1")
    assert two.a.sender.fence(P, "m1", 2, C)
    seal = two.a.sender.change_log(base.snapshot_id).seal
    assert seal is not None
    assert two.b.receiver.own(P, "s1", end_of_standby(two)) is None
    assert two.b.lifecycle(P).state is State.WARMING, "the target may die before it owns"
    assert two.b.cancel(P, "s1")
    for node in (two.b, two.restart("b")):
        lifecycle = node.lifecycle(P)
        assert (lifecycle.state, lifecycle.epoch, lifecycle.successor) == (State.SEALED, 2, C)
    kept = two.b.receiver.prepare(two.spec, P, "s2", 2)
    assert kept == Kept("m1", 2, seal.sequence), "what the new owner says has changed since is all that it needs"


def test_a_standby_that_began_before_the_seal_and_was_copied_behind_it_hears_of_it(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.send(two.a, 1)
    base = two.a.sender.snapshot(P, "m1")
    digests = two.a._registry.digests.files

    def sealed_meanwhile(directory: Path) -> tuple[BaseFile, ...]:
        assert two.a.sender.fence(P, "m1", 2, C)
        return digests(directory)

    monkeypatch.setattr(two.a._registry.digests, "files", sealed_meanwhile)
    standby = two.a.sender.snapshot(P, "s1", True)
    seal = two.a.sender.change_log(standby.snapshot_id).seal
    assert seal is not None
    assert seal.owner == C
    assert two.a.sender.change_log(base.snapshot_id).seal is not None


# -- a checkpoint -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_served_under_the_new_epoch_and_fences_the_old_owner(
    two: Two, checkpoints: CheckpointStore
) -> None:
    two.send(two.a, 1, 2)
    two.a.checkpointer.take(P, checkpoints)
    expected = two.states(two.a)
    two.send(two.a, 7)
    taken = two.b.successor.from_checkpoint(two.spec, P, "t1", 2, checkpoints)
    assert (taken.epoch, taken.positions) == (2, {"s": 0})
    assert two.b.successor.from_checkpoint(two.spec, P, "t1", 2, checkpoints).epoch == 2
    assert two.states(two.b) == expected
    newest = next(checkpoints.newest(P))
    assert (newest.epoch, newest.replica) == (2, "b")
    with pytest.raises(PositionGap, match="expects batch 1"):
        two.send(two.b, 9, epoch=2, number=2)
    two.send(two.b, 7, epoch=2, number=1)
    try:
        saved = two.a.checkpointer.take(P, checkpoints)
    except StaleCheckpoint:
        saved = None
    assert saved is None or saved.bytes_new == 0
    assert next(checkpoints.newest(P)).epoch == 2, "the old owner's is not the newest"


def test_a_move_ends_the_refusals_that_a_takeover_given_up_behind_its_publication_leaves(
    two: Two, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A move, which gets a newer epoch, makes the partition's checkpoints the newest again.

    The error named a restore as the remedy, which undoes all batches since the last checkpoint.
    """
    publish = Adoption.publish

    def lapses(adoption: Adoption, epoch: int, replica: str) -> None:
        publish(adoption, epoch, replica)
        two.b.lease.revoke()

    two.send(two.a, 1, 2)
    two.a.checkpointer.take(P, checkpoints)
    two.send(two.a, 4)
    with monkeypatch.context() as patch:
        patch.setattr(Adoption, "publish", lapses)
        with pytest.raises(LeaseLost):
            two.b.successor.from_checkpoint(two.spec, P, "t1", 2, checkpoints)
    two.b.lease.granted(0.0, math.inf)
    with pytest.raises(StaleCheckpoint, match=r"move it with `stateflow migrate`.* a restore would undo"):
        two.a.checkpointer.take(P, checkpoints)
    base = two.warm(two.a, two.b, "m1")
    two.b.receiver.open_incoming(P, "m1", base)
    assert two.a.sender.fence(P, "m1", 3, two.b.info), "epoch 2 was granted for the takeover"
    seal = two.follow(two.a, two.b, "m1", base, base.sequence)
    assert seal is not None
    two.b.receiver.own(P, "m1", seal)
    assert two.b.checkpointer.take(P, checkpoints) is not None
    assert (next(checkpoints.newest(P)).epoch, two.states(two.b)) == (3, {"k1": 5, "k2": 2})


def test_a_checkpoint_of_a_former_deployment_is_not_taken(two: Two, checkpoints: CheckpointStore) -> None:
    """A checkpoint of a former deployment is not taken.

    An operator that was undeployed and deployed again began empty: its namesake's state must not come back.
    """
    two.send(two.a, 1, 2)
    two.a.checkpointer.take(P, checkpoints)
    with pytest.raises(StateMissing, match="no checkpoint"):
        two.b.successor.from_checkpoint(two.spec, P, "t1", 9, checkpoints, oldest_epoch=2)
    assert two.b.successor.from_checkpoint(two.spec, P, "t2", 9, checkpoints, oldest_epoch=1).epoch == 9


def test_without_a_checkpoint_nothing_is_taken_over(two: Two, checkpoints: CheckpointStore) -> None:
    with pytest.raises(CheckpointStoreMissing, match="check that it is mounted"):
        two.b.successor.from_checkpoint(two.spec, P, "t1", 2, checkpoints)
    checkpoints.check(first_use=True)
    with pytest.raises(StateMissing, match="no checkpoint"):
        two.b.successor.from_checkpoint(two.spec, P, "t1", 2, checkpoints)
    assert two.b.lifecycle(P).state is State.ABSENT


# -- gaps of sources that may skip --------------------------------------------------------------------------


def test_a_sparse_source_may_skip_but_not_what_was_acknowledged(two: Two) -> None:
    schema = SCHEMA.serialize().to_pybytes()
    apply_to(two.a, P, 1, Batch("x", 3, sparse=True), schema, b"")
    apply_to(two.a, P, 1, Batch("x", 7, sparse=True), schema, b"", 3)
    with pytest.raises(PositionGap) as caught:
        apply_to(two.a, P, 1, Batch("x", 12, sparse=True), schema, b"", 9)
    assert caught.value.where["expected"] == 8
    again = apply_to(two.a, P, 1, Batch("x", 5, sparse=True, rewind=True), schema, b"")
    assert again == Applied(b"", True, 0)
    assert position(two, "x") == 7


# -- leases -------------------------------------------------------------------------------------------------


def test_a_lease_that_lapses_during_a_batch_lets_nothing_be_said(two: Two) -> None:
    two.a.lease.until = -1.0
    with pytest.raises(LeaseLost):
        two.send(two.a, 1)
    assert position(two, "s") is None

    class Lapsing:
        asked = 0

        def check(self, now: float, operator: str = "") -> None:
            self.asked += 1
            if self.asked == 2:
                raise LeaseLost("meanwhile")

    two.a.batches._lease = Lapsing()  # type: ignore[assignment]
    with pytest.raises(LeaseLost):
        two.send(two.a, 1)
    assert position(two, "s") == 0, "committed, but not said"


# -- transfers ----------------------------------------------------------------------------------------------


def test_files_of_a_transfer_cut_short_are_there_for_the_next(two: Two) -> None:
    for n in range(400):
        two.send(two.a, *range(n, n + 20))
    base = two.warm(two.a, two.b, "m1")
    large = {file.digest for file in base.files if file.size >= 4096}
    assert large
    directory = two.b.receiver.incoming_directory(P, "m1")
    for file in base.files:
        if file.digest in large:
            (directory / file.name).rename(two.b.receiver.arriving(P, "m1", file))
            two.b.receiver.keep_received(P, "m1", file)
    two.b.receiver.abandon(P, "m1")
    assert large <= set(two.b.receiver.warm_base(P))
    assert large <= set(two.restart("b").receiver.warm_base(P)), "also after a restart"
    two.move(two.a, two.b, "m2", 1)
    assert not (two.root / "b" / "operators" / "Op" / "p00000" / "received").exists()


def test_a_file_that_arrived_in_part_is_there_for_the_next_and_proved_when_it_is_whole(two: Two) -> None:
    for n in range(400):
        two.send(two.a, *range(n, n + 20))
    base = two.warm(two.a, two.b, "m1")
    file = max(base.files, key=lambda each: each.size)
    with two.a.sender.open_file(base.snapshot_id, file.name) as sent_file:
        sent = sent_file.read()
    two.b.receiver.arriving(P, "m1", file).write_bytes(sent[:5000])
    two.b.receiver.abandon(P, "m1")
    b = two.restart("b").receiver
    assert b.begun(P) == {file.digest: 5000}
    assert file.digest not in b.warm_base(P), "half a file is no file"
    b.prepare(two.spec, P, "m2", 1)
    b.forget_received(P, {file.digest})
    arriving = b.arriving(P, "m2", file)
    arriving.write_bytes(b"?" * 5000 + sent[5000:])
    with pytest.raises(TransferCorrupt):
        b.keep_received(P, "m2", file)
    assert b.begun(P) == {}, "nothing of it is believed"
    b.arriving(P, "m2", file).write_bytes(sent[:5000])
    b.forget_received(P, set())
    assert b.begun(P) == {}, "no base has that file any more"


def test_a_copy_that_differs_is_kept_as_evidence(two: Two) -> None:
    two.send(two.a, 1)
    base = two.warm(two.a, two.b, "m1")
    two.b.receiver.open_incoming(P, "m1", base)
    two.send(two.a, 2)
    two.follow(two.a, two.b, "m1", base, base.sequence)
    reading = two.a.sender.change_log(base.snapshot_id).read(base.sequence, 1 << 20)
    two.b.receiver.check_chain(P, "m1", reading.head_sequence, reading.chain)
    with pytest.raises(DigestMismatch) as caught:
        two.b.receiver.check_chain(P, "m1", reading.head_sequence, bytes(16))
    kept = Path(caught.value.where["evidence"])
    assert (kept / "CURRENT").exists()
    two.b.receiver.abandon(P, "m1")
    assert kept.exists()
    two.move(two.a, two.b, "m2", 1)


def test_a_disk_that_is_too_small(two: Two) -> None:
    with pytest.raises(DiskFull, match="are free"):
        two.b.receiver.check_room(P, 1 << 60)
    two.b.receiver.check_room(P, 1)


def test_a_log_that_nobody_reads_is_dropped(two: Two) -> None:
    """A change log that is not read is dropped, as the message that its move is over may be lost."""
    two.send(two.a, 1)
    base = two.a.sender.snapshot(P, "m1")
    changes = two.a.sender.change_log(base.snapshot_id)
    with two.a.sender.reading(base.snapshot_id):
        assert two.a.sender.is_followed(P, "m1")
        changes.read_at = -1e9
        two.a.sender.drop_unread()
        assert not changes.closed
    two.a.sender.drop_unread()
    assert not changes.closed, "it was read a moment ago"
    changes.read_at = -1e9
    two.a.sender.drop_unread()
    assert changes.closed
    with pytest.raises(MoveUnknown):
        two.a.sender.change_log(base.snapshot_id)


def test_a_flush_after_the_close_is_no_error(two: Two) -> None:
    local = two.a._registry.local(P)
    assert local.store is not None
    local.store.apply(Mutations(puts=[(b"a", b"b")]))
    store, local.store = local.store, None
    store.close()
    store.flush()


def test_only_what_a_standby_confirmed_is_confirmed(two: Two) -> None:
    two.send(two.a, 1)
    plain, standby = two.a.sender.snapshot(P, "m1"), two.a.sender.snapshot(P, "s1", True)
    two.a.sender.confirm(plain.snapshot_id, 1)
    assert not two.a.sender.confirmed(P, 1)
    two.a.sender.confirm(standby.snapshot_id, 1)
    assert two.a.sender.confirmed(P, 1)
    assert not two.a.sender.confirmed(P, 2)
