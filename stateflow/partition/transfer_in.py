"""Moves at their target, which builds a copy while the stream goes on, proves the copy at the seal, and then owns
it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from stateflow.changes import ChangeSet, chain
from stateflow.durable import listed
from stateflow.errors import DigestMismatch, DiskFull, MoveUnknown, StateMissing, TransferCorrupt
from stateflow.partition import layout
from stateflow.partition.change_feed import (
    CHANGES,
    BaseFile,
    ChangeLog,
    Kept,
    Seal,
    SnapshotInfo,
    base_digest,
    cutover_digest,
    kept_digest,
)
from stateflow.partition.data_directory import PART, RECEIVED, STORED, Copy
from stateflow.partition.layout import read_sequence
from stateflow.partition.lifecycle import State
from stateflow.partition.local_partition import Incoming, LocalPartition, Since
from stateflow.partition.registry import PartitionRegistry
from stateflow.storage import PartitionStore
from stateflow.types import OperatorSpec, PartitionId

#: size in bytes below which a file is not kept for a later attempt, but sent again
KEPT_BYTES_MIN = 4096
#: number of quarantined transfers that are kept
EVIDENCE_KEPT = 3


class Receiver:
    """The target's side of moves. Called from several threads."""

    def __init__(self, registry: PartitionRegistry) -> None:
        self._registry, self._copies = registry, registry.copies

    def prepare(
        self, spec: OperatorSpec, partition: PartitionId, move_id: str, source_epoch: int, newest_epoch: int = 0
    ) -> Kept | None:
        """Makes this replica the target of a move. A second call for the same move starts its transfer again. Returns
        the sealed copy that remains here since the partition moved away; None: there is none."""
        local = self._registry.local(partition)
        with self._registry.making(spec), local.work, local.mutex:
            self._registry.check_deployed(partition, max(source_epoch, newest_epoch))
            if local.incoming is None:
                self._registry.expect(1)
            replace(local.lifecycle).prepare(move_id, source_epoch, newest_epoch)  # raises before anything is changed
            directory = self._copies.part(local, move_id)  # before any change, as the disk may refuse
            former, local.incoming = local.incoming, Incoming(move_id, directory)
            local.lifecycle.prepare(move_id, source_epoch, newest_epoch)
            if former is not None:
                self._copies.discard(former)
            if local.store is not None:  # the sealed copy from before a move away is used only as files from now on
                local.store.close()
                local.store = None
        self._registry.on_change(partition)
        return local.kept

    def lost(self, partition: PartitionId, move_id: str) -> StateMissing | None:
        """Returns an error if the copy that this move brought was owned and has been quarantined since; otherwise None.

        Batches may have been applied to that copy, so that the source's sealed copy may not contain the whole state any
        more. The move has ended, and cannot start over.
        """
        home = self._registry.local(partition).home
        for copy in self._registry.quarantine.of_move(move_id, partition.operator, home.name):
            if not self._copies.is_incoming(copy):
                return StateMissing(
                    "the move's target owned the partition and lost it to damage",
                    remedy="repair the quarantined copy, put it back and restart the replica; or restore a checkpoint",
                    partition=partition,
                    replica=self._registry.info.name,
                    evidence=copy,
                )
        return None

    def warm_base(self, partition: PartitionId) -> dict[str, Path]:
        """Returns digest → file, for the files here of an earlier copy of the partition, or of an interrupted
        transfer."""
        local = self._registry.local(partition)
        found = {self._registry.digests.of(path): path for path in self._received(local) if path.suffix != PART}
        if local.directory is not None and local.directory.is_dir():
            found |= {
                file.digest: local.directory / file.name for file in self._registry.digests.files(local.directory)
            }
        return found

    def begun(self, partition: PartitionId) -> dict[str, int]:
        """Returns digest → received bytes, for the files of which an interrupted transfer has sent only the
        beginning."""
        parts = (path for path in self._received(self._registry.local(partition)) if path.suffix == PART)
        return {path.stem: path.stat().st_size for path in parts}

    @staticmethod
    def _received(local: LocalPartition) -> list[Path]:
        received = local.home / RECEIVED
        return [path for path in received.iterdir() if path.is_file()] if received.is_dir() else []

    def forget_received(self, partition: PartitionId, digests: Collection[str]) -> None:
        """Removes the files of interrupted transfers, except those with ``digests``."""
        local = self._registry.local(partition)
        for path in self._received(local):
            if path.stem not in digests:
                path.unlink()
        for scratch in listed(local.home / RECEIVED, f"*{STORED}"):
            self._registry.environment.remove_tree(scratch)

    def arriving(self, partition: PartitionId, move_id: str, file: BaseFile) -> Path:
        """Returns the path at which a base file is built from received pieces. The path may hold the file's beginning,
        from this attempt or an earlier one; only :meth:`keep_received` proves the content."""
        if file.size < KEPT_BYTES_MIN:
            return self.incoming_directory(partition, move_id) / file.name
        received = self._registry.local(partition).home / RECEIVED
        received.mkdir(exist_ok=True)
        return received / (file.digest + PART)

    def keep_received(self, partition: PartitionId, move_id: str, file: BaseFile) -> None:
        """Proves a base file that has arrived, and makes it part of the copy. The file is kept for another attempt,
        too. Raises TransferCorrupt if the content is wrong; the received data is then removed."""
        if file.size < KEPT_BYTES_MIN:
            return
        arrived = self.arriving(partition, move_id, file)
        if self._registry.digests.of(arrived) != file.digest:
            arrived.unlink()
            raise TransferCorrupt(
                "a base file arrived damaged", remedy="the file is resent", partition=partition, file=file.name
            )
        kept = arrived.rename(arrived.parent / file.digest)
        (self.incoming_directory(partition, move_id) / file.name).hardlink_to(kept)

    def check_room(self, partition: PartitionId, bytes_needed: int) -> None:
        """Checks that ``bytes_needed`` more bytes fit on the disk. Raises DiskFull if they do not."""
        reserve = self._registry.settings.disk_reserve_bytes
        free = self._registry.environment.free_bytes(self._registry.root)
        if bytes_needed + reserve > free:
            raise DiskFull(
                f"the transfer needs {bytes_needed} bytes besides the reserve, {free} are free",
                remedy="free space at the target, or move the partition to another replica; nothing was changed",
                replica=self._registry.info.name,
                partition=partition,
                reserve=reserve,
            )

    def is_under_way(self, partition: PartitionId, move_id: str) -> bool:
        incoming = self._registry.local(partition).incoming
        return incoming is not None and incoming.move_id == move_id

    def incoming_directory(self, partition: PartitionId, move_id: str) -> Path:
        return self._incoming(partition, move_id).directory

    def open_incoming(self, partition: PartitionId, move_id: str, base: SnapshotInfo) -> None:
        """Proves the base, once all its files have arrived, and opens the copy. Raises DigestMismatch."""
        incoming = self._incoming(partition, move_id)
        self._copies.sync(incoming.directory)
        files = self._registry.digests.files(incoming.directory)
        digest = base_digest(files, base.sequence)
        if digest != base.digest:
            self._registry.environment.remove_tree(
                self._registry.local(partition).home / RECEIVED
            )  # one of its files may be wrong
            raise DigestMismatch(
                "the base that arrived differs from the one sent",
                remedy="inspect the quarantined copy and start the move again; the source keeps serving",
                partition=partition,
                sent=base.digest,
                arrived=digest,
                evidence=self._quarantine(incoming),
            )
        self._open(partition, move_id, base)

    def open_kept(self, partition: PartitionId, move_id: str, base: SnapshotInfo) -> int:
        """Opens the base, which is made of the sealed copy that remains here since an earlier move, and of the received
        changes. Returns the bytes that were here already.

        The sealed copy is copied, and stays unchanged until the move ends. Raises MoveUnknown or StateMissing if it is
        gone, TransferCorrupt if the changes are not those that were sent.
        """
        local = self._registry.local(partition)
        arrived = self._incoming(partition, move_id).directory
        if kept_digest(base.kept, self._registry.digests.files(arrived), base.sequence) != base.digest:
            raise TransferCorrupt("the changes arrived damaged", remedy="the transfer restarts", move=move_id)
        changes = ChangeSet.decode((arrived / CHANGES).read_bytes()).mutations
        with local.work:
            incoming, kept = self._incoming(partition, move_id), local.kept
            if local.directory is None or kept is None:
                raise MoveUnknown(
                    "the copy kept from an earlier move is gone", remedy="the transfer restarts", move=move_id
                )
            self._registry.environment.remove_tree(incoming.directory)
            self._registry.environment.copy(local.directory, incoming.directory)
        size = sum(path.stat().st_size for path in incoming.directory.iterdir() if path.is_file())
        self._copies.sync(incoming.directory)
        changes.deletes.append(layout.OWNERSHIP)  # the record belongs to the sealed copy, not to this one
        with local.work:
            store = self._open(partition, move_id, base)
            self._check_kept(store, kept, move_id)
            store.apply(changes, sync=True)
        return size

    @staticmethod
    def _check_kept(store: PartitionStore, kept: Kept, move_id: str) -> None:
        record = store.get(layout.OWNERSHIP)
        found = layout.Ownership.decode(record) if record else None
        if found is None or (found.state, found.move_id, found.epoch, read_sequence(store)) != (
            State.SEALED,
            kept.move_id,
            kept.epoch,
            kept.sequence,
        ):
            raise MoveUnknown(
                "the copy kept from an earlier move is not the one that the source knows",
                remedy="the transfer restarts by itself",
                move=move_id,
            )

    def _open(self, partition: PartitionId, move_id: str, base: SnapshotInfo) -> PartitionStore:
        with self._registry.local(partition).work:
            incoming = self._incoming(partition, move_id)
            incoming.directory = self._copies.arrive(incoming.directory)
            incoming.store = self._registry.environment.open(incoming.directory)
            incoming.base = base.digest
            incoming.sequence = base.sequence
            return incoming.store

    def apply_changes(
        self, partition: PartitionId, move_id: str, change_sets: Iterable[bytes], *, sync: bool = False
    ) -> int:
        """Applies change sets in order and returns the last sequence. Raises TransferCorrupt for a gap or a wrong
        checksum.

        Args:
            sync: the change sets survive a power loss once this returns; False: they survive only the end of this
                process.
        """
        with self._registry.local(partition).work:
            incoming = self._incoming(partition, move_id)
            assert incoming.store is not None
            change_sets = list(change_sets)
            for number, data in enumerate(change_sets, 1):
                change_set = ChangeSet.decode(data)
                named = PartitionId(change_set.operator, change_set.partition)
                if named != partition or change_set.sequence != incoming.sequence + 1:
                    raise TransferCorrupt(
                        f"change set {change_set.sequence} of {named} arrived after {incoming.sequence}",
                        remedy="the transfer restarts",
                        partition=partition,
                    )
                incoming.store.apply(change_set.mutations, sync=sync and number == len(change_sets))
                incoming.sequence = change_set.sequence
                incoming.changes = chain(incoming.changes, data)
            return incoming.sequence

    def sync(self, partition: PartitionId, move_id: str) -> float:
        """Forces the copy to disk while it follows, so that only the ownership is left to write when the copy is owned.
        Returns the duration in milliseconds."""
        incoming = self._incoming(partition, move_id)
        assert incoming.store is not None
        return self._registry.sync(incoming.store)

    def check_chain(self, partition: PartitionId, move_id: str, sequence: int, changes: bytes) -> None:
        """Compares the copy with the source's chain of changes up to ``sequence``, while a mismatch can still abort the
        move. Compares nothing if the copy is not at ``sequence``.

        Raises DigestMismatch after it has quarantined a copy that differs.
        """
        with self._registry.local(partition).work:
            incoming = self._incoming(partition, move_id)
            if incoming.sequence == sequence and incoming.changes != changes:
                raise DigestMismatch(
                    "the copy differs from its source before the cutover",
                    remedy="inspect the quarantined copy and start the move again; the source keeps serving",
                    partition=partition,
                    sequence=sequence,
                    evidence=self._quarantine(incoming),
                )

    def own(self, partition: PartitionId, move_id: str, seal: Seal) -> list[Path] | None:
        """Proves the copy, makes the ownership durable, and serves. This is the commit point of a move.

        Returns the leftovers on disk, which :meth:`tidy` should remove once no caller waits. Returns None if the copy
        is a standby's, and the seal is for another replica or for a move that was cancelled here; the copy then stays,
        for a takeover. Raises DigestMismatch if the copy differs from the one that the source sealed; the copy is not
        owned then.
        """
        local = self._registry.local(partition)
        with local.work:
            incoming = self._incoming(partition, move_id)
            store = incoming.store
            assert store is not None
            digest = cutover_digest(incoming.base, incoming.changes)
            if (incoming.sequence, digest) != (seal.sequence, seal.digest):
                raise DigestMismatch(
                    "the copy differs from what the source sealed",
                    remedy="the transfer restarts from the sealed source",
                    partition=partition,
                    sealed=f"{seal.sequence}:{seal.digest}",
                    copied=f"{incoming.sequence}:{digest}",
                    evidence=self._quarantine(incoming),
                )
            if seal.move_id != move_id:
                with local.mutex:
                    if seal.owner is not None and seal.owner.name != self._registry.info.name:
                        incoming.seal = seal
                        return None
                    if seal.move_id in local.lifecycle.cancelled:
                        return None
                    self._copies.adopt(local, seal.move_id)
                    move_id = seal.move_id
            copy = Copy(incoming.directory, store, lambda here: here.own(move_id, seal.epoch))
            self._copies.record_ahead(local, copy)  # batches that ask for the partition do not wait for the disk
            with local.mutex:
                leftovers = self._copies.install(local, copy)
                limit = self._registry.settings.return_log_bytes_max
                local.since = Since(
                    Kept(move_id, seal.epoch, seal.sequence), seal.digest, ChangeLog(move_id, "", seal.sequence, limit)
                )
        self._registry.on_change(partition)
        return leftovers

    def tidy(self, partition: PartitionId, leftovers: Iterable[Path]) -> None:
        self._copies.tidy(self._registry.local(partition), leftovers)

    def abandon(self, partition: PartitionId, move_id: str) -> None:
        """Gives up an unfinished incoming move. The former copy here stays as the warm base, unless the incoming copy
        is a standby's and ends with its source's seal. That copy then becomes the warm base, because the new owner has
        all changes after the seal."""
        local = self._registry.local(partition)
        if local.incoming is None:  # without waiting for a running batch
            return
        with local.work, local.mutex:
            self._abandon(local, move_id)

    def _abandon(self, local: LocalPartition, move_id: str) -> None:
        if local.incoming is not None and local.incoming.move_id == move_id:
            incoming, local.incoming = local.incoming, None
            try:
                if incoming.seal is not None:
                    self._keep(local, incoming, incoming.seal)
            finally:
                local.lifecycle.abandon(move_id)  # even if keeping the copy fails; no effect once it is kept
                if local.directory != incoming.directory:
                    self._copies.discard(incoming)
            self._registry.on_change(local.id)

    def _keep(self, local: LocalPartition, incoming: Incoming, seal: Seal) -> None:
        store, owner = incoming.store, seal.owner
        assert store is not None
        assert owner is not None
        copy = Copy(
            incoming.directory, store, lambda here: here.keep(incoming.move_id, seal.move_id, seal.epoch, owner)
        )
        leftovers = self._copies.install(local, copy)
        local.kept = Kept(seal.move_id, seal.epoch, seal.sequence)
        self._copies.tidy(local, leftovers)

    def _quarantine(self, incoming: Incoming) -> Path:
        """Quarantines a copy with wrong content, for inspection, and returns its path. Only the newest such copies are
        kept, as they are not state: their sources still serve."""
        if incoming.store is not None:
            incoming.store.close()
            incoming.store = None
        folder = self._registry.quarantine.transfers
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / f"{incoming.directory.parent.parent.name}-{incoming.directory.parent.name}-{incoming.move_id}"
        self._registry.environment.remove_tree(kept)
        incoming.directory.rename(kept)
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-EVIDENCE_KEPT]:
            self._registry.environment.remove_tree(old)
        return kept

    def _incoming(self, partition: PartitionId, move_id: str) -> Incoming:
        incoming = self._registry.local(partition).incoming
        if incoming is None or incoming.move_id != move_id:
            raise MoveUnknown("this move is not under way here", remedy="start it again", move=move_id)
        return incoming
