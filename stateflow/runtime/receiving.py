"""Moving in: a copy that is built beside the stream, proved at the seal, and then owned."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from stateflow.changes import ChangeSet, Mutations, chain
from stateflow.errors import DigestMismatch, MoveUnknown, TransferCorrupt
from stateflow.runtime import layout
from stateflow.runtime.lifecycle import State
from stateflow.runtime.shelf import Incoming, Shelf, Slot, discard
from stateflow.runtime.transfer import Seal, SnapshotInfo, base_digest, cutover_digest
from stateflow.types import OperatorSpec, PartitionId


class Receiver:
    """The target's side of moves. Called from several threads."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def prepare(self, spec: OperatorSpec, partition: PartitionId, move_id: str, source_epoch: int) -> None:
        """Become the target of a move. A second call for the same move starts its transfer again."""
        self._shelf.learn(spec)
        slot = self._shelf.slot(partition)
        with slot.work, slot.mutex:
            slot.lifecycle.prepare(move_id, source_epoch)
            if slot.incoming is not None:
                discard(slot.incoming)
            if slot.store is not None:  # what it had before a move away: from now on only files
                slot.store.close()
                slot.store = None
            slot.snapshots += 1
            directory = slot.home / f"{move_id}-{slot.snapshots}"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            slot.incoming = Incoming(move_id, directory)
        self._shelf.on_change(partition)

    def warm_base(self, partition: PartitionId) -> dict[str, Path]:
        """Digest → file, of what an earlier stay of this partition left here."""
        directory = self._shelf.slot(partition).directory
        if directory is None or not directory.is_dir():
            return {}
        return {file.digest: directory / file.name for file in self._shelf.digests.files(directory)}

    def incoming_directory(self, partition: PartitionId, move_id: str) -> Path:
        return self._incoming(partition, move_id).directory

    def open_incoming(self, partition: PartitionId, move_id: str, base: SnapshotInfo) -> None:
        """All base files are there: prove them and open the copy. Raises DigestMismatch."""
        incoming = self._incoming(partition, move_id)
        files = self._shelf.digests.files(incoming.directory)
        _sync([*(incoming.directory / file.name for file in files), incoming.directory, incoming.directory.parent])
        digest = base_digest(files, base.sequence)
        if digest != base.digest:
            raise DigestMismatch(
                "the base that arrived is not the one that was sent",
                remedy="the move was aborted, the source serves on; start it again",
                partition=partition,
                sent=base.digest,
                arrived=digest,
            )
        with self._shelf.slot(partition).work:
            incoming = self._incoming(partition, move_id)
            incoming.store = self._shelf.engine.open(incoming.directory)
            incoming.base = base.digest
            incoming.sequence = base.sequence

    def apply_changes(self, partition: PartitionId, move_id: str, change_sets: Iterable[bytes]) -> int:
        """Apply change sets in order; returns the sequence reached. Raises TransferCorrupt on a gap or bad checksum."""
        with self._shelf.slot(partition).work:
            incoming = self._incoming(partition, move_id)
            assert incoming.store is not None
            for data in change_sets:
                change_set = ChangeSet.decode(data)
                named = PartitionId(change_set.operator, change_set.partition)
                if named != partition or change_set.sequence != incoming.sequence + 1:
                    raise TransferCorrupt(
                        f"change set {change_set.sequence} of {named} came after {incoming.sequence}",
                        remedy="the transfer starts again",
                        partition=partition,
                    )
                incoming.store.apply(change_set.mutations)
                incoming.sequence = change_set.sequence
                incoming.changes = chain(incoming.changes, data)
            return incoming.sequence

    def own(self, partition: PartitionId, move_id: str, seal: Seal) -> None:
        """The commit point of a move: prove the copy, make the ownership durable, serve.

        Raises DigestMismatch when the copy is not what the source sealed; nothing is owned then.
        """
        slot = self._shelf.slot(partition)
        with slot.work:
            incoming = self._incoming(partition, move_id)
            store = incoming.store
            assert store is not None
            digest = cutover_digest(incoming.base, incoming.changes)
            if (incoming.sequence, digest) != (seal.sequence, seal.digest):
                raise DigestMismatch(
                    "the copy differs from what the source sealed",
                    remedy="the transfer starts again from the sealed source",
                    partition=partition,
                    sealed=f"{seal.sequence}:{seal.digest}",
                    copied=f"{incoming.sequence}:{digest}",
                )
            ownership = layout.Ownership(self._shelf.info.name, State.OWNED, seal.epoch, move_id)
            store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode())]), sync=True)
            with slot.mutex:
                slot.lifecycle.own(move_id, seal.epoch)
                old, slot.directory, slot.store, slot.incoming = (
                    slot.directory,
                    incoming.directory,
                    store,
                    None,
                )
        self._shelf.on_change(partition)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def abandon(self, partition: PartitionId, move_id: str) -> None:
        """Give an unfinished move in up. What was here before stays as a warm base."""
        slot = self._shelf.slot(partition)
        with slot.work, slot.mutex:
            self._abandon(slot, move_id)

    def _abandon(self, slot: Slot, move_id: str) -> None:
        if slot.incoming is not None and slot.incoming.move_id == move_id:
            discard(slot.incoming)
            slot.incoming = None
            slot.lifecycle.abandon(move_id)
            self._shelf.on_change(slot.id)

    def _incoming(self, partition: PartitionId, move_id: str) -> Incoming:
        incoming = self._shelf.slot(partition).incoming
        if incoming is None or incoming.move_id != move_id:
            raise MoveUnknown("this move is not under way here", remedy="start it again", move=move_id)
        return incoming


def _sync(paths: Iterable[Path]) -> None:
    """Files and directories survive power loss from here on: the ownership that follows rests on them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
