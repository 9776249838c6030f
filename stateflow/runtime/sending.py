"""Moving out: snapshots and change logs for a move's target, the fence and the seal."""

from __future__ import annotations

import shutil
from pathlib import Path

from stateflow.changes import Mutations
from stateflow.errors import MoveUnknown
from stateflow.runtime import layout
from stateflow.runtime.host import read_sequence
from stateflow.runtime.lifecycle import FenceAnswer, State
from stateflow.runtime.shelf import Shelf, Slot
from stateflow.runtime.transfer import ChangeLog, Seal, SnapshotInfo, base_digest, cutover_digest
from stateflow.types import PartitionId, ReplicaInfo


class Sender:
    """The source's side of moves. Called from several threads."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def snapshot(self, partition: PartitionId, move_id: str) -> SnapshotInfo:
        """A base for a move's target, and a change log from there on. Once sealed only for the move it sealed for."""
        slot = self._shelf.slot(partition)
        if slot.lifecycle.state is State.OWNED and slot.store is not None:
            slot.store.flush()  # outside the lock: what is left to flush inside is little
        with slot.work, slot.mutex:
            lifecycle = slot.lifecycle
            sealed = lifecycle.state is State.SEALED and lifecycle.move_id == move_id
            owned = lifecycle.state is State.OWNED and move_id not in lifecycle.cancelled
            if not (owned or sealed):
                raise MoveUnknown(
                    f"the partition is {lifecycle.state} here and cannot be a source of this move",
                    remedy="plan the move again",
                    partition=partition,
                    move=move_id,
                )
            store = self._shelf.store(slot)
            slot.snapshots += 1
            snapshot_id = f"{partition.operator}-{partition.partition}-{move_id}-{slot.snapshots}"
            store.snapshot(self._shelf.snapshots / snapshot_id)
            sequence, epoch = read_sequence(store), lifecycle.epoch
            changes = ChangeLog(move_id, snapshot_id, sequence, self._shelf.settings.change_log_bytes_max)
            self._drop_log(slot, move_id)
            slot.logs[move_id] = changes
        files = self._shelf.digests.files(self._shelf.snapshots / snapshot_id)  # hashed while the stream goes on
        changes.base = SnapshotInfo(snapshot_id, sequence, epoch, base_digest(files, sequence), files)
        if sealed:
            changes.end(self._seal_of(changes, epoch, sequence))
        return changes.base

    def snapshot_file(self, snapshot_id: str, name: str) -> Path:
        path = self._shelf.snapshots / snapshot_id / name
        if path.parent.parent != self._shelf.snapshots or not path.is_file():
            raise MoveUnknown("there is no such base file", remedy="the transfer starts again", path=path)
        return path

    def change_log(self, snapshot_id: str) -> ChangeLog:
        for slot in self._shelf.slots():
            for changes in list(slot.logs.values()):
                if changes.snapshot_id == snapshot_id:
                    return changes
        raise MoveUnknown("there is no such snapshot", remedy="the transfer starts again", snapshot=snapshot_id)

    def fence(self, partition: PartitionId, move_id: str, epoch: int, target: ReplicaInfo) -> bool:
        """Stop serving for this move, after the batch in hand. True: sealed; False: will be when that batch is done.

        Raises when the move cannot seal; the partition is then served as before.
        """
        slot = self._shelf.slot(partition)
        with slot.mutex:
            changes = slot.logs.get(move_id)
            if slot.lifecycle.state is State.OWNED and (changes is None or changes.base is None or changes.overflowed):
                raise MoveUnknown(
                    "the target does not follow this partition", remedy="start the move again", move=move_id
                )
            answer = slot.lifecycle.fence(move_id, epoch, target)
            if answer is FenceAnswer.SEAL_NOW:
                self.seal(slot)
            return answer is not FenceAnswer.SEAL_AFTER_BATCH

    def seal(self, slot: Slot) -> None:
        """Durable first, then said. Called with ``mutex`` held and no batch in hand."""
        lifecycle, target = slot.lifecycle, slot.lifecycle.successor
        assert target is not None
        store = self._shelf.store(slot)
        epoch = lifecycle.granted
        ownership = layout.Ownership(
            self._shelf.info.name, State.SEALED, epoch, lifecycle.move_id, target.name, target.site, target.address
        )
        store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode())]), sync=True)
        lifecycle.sealed()
        sequence = slot.host.sequence if slot.host else read_sequence(store)
        changes = slot.logs.get(lifecycle.move_id)
        if changes is not None:
            changes.end(self._seal_of(changes, epoch, sequence))
        if slot.host is not None:
            slot.host.close()
            slot.host = None
        self._shelf.on_change(slot.id)

    def _seal_of(self, changes: ChangeLog, epoch: int, sequence: int) -> Seal:
        assert changes.base is not None
        digest = cutover_digest(changes.base.digest, changes.changes)
        return Seal(changes.move_id, epoch, sequence, digest, self._shelf.clock.now_us())

    def cancel(self, partition: PartitionId, move_id: str) -> bool:
        """Never seal for this move. False: it has sealed already and goes forward."""
        slot = self._shelf.slot(partition)
        with slot.work, slot.mutex:
            possible = slot.lifecycle.cancel(move_id)
            if possible:
                self._drop_log(slot, move_id)
        self._shelf.on_change(partition)
        return possible

    def release(self, partition: PartitionId, move_id: str) -> None:
        """The target owns: nothing of the move is needed any more, its files stay as a warm base for a return."""
        slot = self._shelf.slot(partition)
        with slot.work, slot.mutex:
            self._drop_log(slot, move_id)
            if slot.lifecycle.state is State.SEALED and slot.lifecycle.move_id == move_id and slot.store is not None:
                slot.store.close()
                slot.store = None

    def _drop_log(self, slot: Slot, move_id: str) -> None:
        changes = slot.logs.pop(move_id, None)
        if changes is not None:
            changes.close()
            shutil.rmtree(self._shelf.snapshots / changes.snapshot_id, ignore_errors=True)
