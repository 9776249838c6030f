"""A replica without its sockets: the partitions one process owns, warms and gives away.

Called from several threads. Two locks per partition: ``work`` is held while the store is written or copied
(a batch, a snapshot), ``mutex`` for the instant of a lifecycle transition, so that a fence never waits for a
batch in order to be *heard*. Order: work before mutex.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from stateflow.changes import ChangeSet, Mutations, chain
from stateflow.checkpoint import CheckpointStore, Manifest, ManifestFile, Saved
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import (
    AlreadyDeployed,
    DataDirLocked,
    DigestMismatch,
    InvalidArgument,
    MoveUnknown,
    NotOwner,
    OperatorNotDeployed,
    StateMissing,
    TransferCorrupt,
    UnknownState,
)
from stateflow.runtime import layout
from stateflow.runtime.host import Applied, Batch, PartitionHost, read_sequence
from stateflow.runtime.lifecycle import FenceAnswer, Lifecycle, State, Verdict
from stateflow.runtime.operator import Operator, load
from stateflow.runtime.transfer import (
    NO_CHANGES,
    ChangeLog,
    FileDigests,
    Seal,
    SnapshotInfo,
    base_digest,
    cutover_digest,
)
from stateflow.settings import ReplicaSettings
from stateflow.state import declarations_of, scan_state
from stateflow.storage import PartitionStore, RocksEngine
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Slot:
    """One partition as it is here. ``directory`` holds ``store``; ``incoming`` a copy that is being built."""

    id: PartitionId
    lifecycle: Lifecycle
    home: Path
    directory: Path | None = None
    store: PartitionStore | None = None
    host: PartitionHost | None = None
    incoming: Incoming | None = None
    logs: dict[str, ChangeLog] = field(default_factory=dict)  # by move
    snapshots: int = 0
    work: threading.RLock = field(default_factory=threading.RLock)
    mutex: threading.RLock = field(default_factory=threading.RLock)


@dataclass(slots=True)
class Incoming:
    """A partition on its way in. ``changes`` chains the change sets applied on the base so far."""

    move_id: str
    directory: Path
    sequence: int = -1
    base: str = ""  # digest
    changes: bytes = NO_CHANGES
    store: PartitionStore | None = None


class ReplicaNode:
    """Owns a data directory. Raises DataDirLocked when another process does.

    Layout: ``LOCK``, ``REPLICA`` (its name), ``operators/<name>/operator.json``, ``…/p00003/<copy>/`` (RocksDB),
    ``snapshots/<id>/`` (hard links that serve a transfer; emptied at start).
    """

    def __init__(
        self,
        info: ReplicaInfo,
        data_dir: Path,
        settings: ReplicaSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.info = info
        self.settings = settings or ReplicaSettings()
        self._clock = clock
        self._root = data_dir
        self._lock = _lock_directory(data_dir)
        _check_identity(data_dir / "REPLICA", info.name)
        self._engine = RocksEngine(self.settings.block_cache_bytes, self.settings.write_buffer_bytes)
        self._digests = FileDigests()
        self._operators: dict[str, tuple[OperatorSpec, type[Operator]]] = {}
        self._learning = threading.Lock()
        self._slots: dict[PartitionId, Slot] = {}
        #: called, from any thread, after each change of a partition's lifecycle
        self.on_change: Callable[[PartitionId], None] = lambda _: None
        self._snapshots = data_dir / "snapshots"
        shutil.rmtree(self._snapshots, ignore_errors=True)
        self._snapshots.mkdir(parents=True)
        self._recover()

    # -- operators and partitions -----------------------------------------------------------------------

    def _recover(self) -> None:
        for spec_file in sorted((self._root / "operators").glob("*/operator.json")):
            spec = _spec_from_json(spec_file.read_text())
            self._operators[spec.name] = spec, load(spec.target)
            for home in sorted(spec_file.parent.glob("p[0-9]*")):
                self._recover_partition(PartitionId(spec.name, int(home.name[1:])), home)

    def _recover_partition(self, partition: PartitionId, home: Path) -> None:
        """Of the copies on disk the newest that is this replica's own counts; the others were transfers cut short."""
        found: list[tuple[layout.Ownership, Path, PartitionStore]] = []
        for directory in sorted(path for path in home.iterdir() if path.is_dir()):
            try:
                store = self._engine.open(directory)
            except StateMissing:
                shutil.rmtree(directory)
                continue
            record = store.get(layout.OWNERSHIP)
            ownership = layout.Ownership.decode(record) if record else None
            if ownership is None or ownership.replica != self.info.name:
                store.close()
                shutil.rmtree(directory)
                continue
            found.append((ownership, directory, store))
        if not found:
            return
        found.sort(key=lambda copy: copy[0].epoch)
        *older, (ownership, directory, newest) = found
        for _, superseded, old in older:
            old.close()
            shutil.rmtree(superseded)
        slot = self._slot(partition)
        successor = ReplicaInfo(ownership.target, ownership.target_site, ownership.target_address)
        slot.lifecycle.recover(
            State(ownership.state),
            ownership.epoch,
            ownership.move_id,
            successor if ownership.state == State.SEALED else None,
        )
        slot.directory, slot.store = directory, newest

    def learn(self, spec: OperatorSpec) -> None:
        """Know an operator: load its code and keep its description. Raises OperatorNotImportable."""
        with self._learning:
            known = self._operators.get(spec.name)
            if known is not None and known[0] == spec:
                return
            cls = load(spec.target)
            folder = self._root / "operators" / spec.name
            folder.mkdir(parents=True, exist_ok=True)
            _write_durably(folder / "operator.json", json.dumps(_spec_to_json(spec)))
            self._operators[spec.name] = spec, cls

    def spec(self, operator: str) -> OperatorSpec:
        return self._known(operator)[0]

    def _known(self, operator: str) -> tuple[OperatorSpec, type[Operator]]:
        try:
            return self._operators[operator]
        except KeyError:
            raise OperatorNotDeployed(
                f"there is no operator {operator!r} here",
                remedy="deploy it with `stateflow deploy module:Class`",
                replica=self.info.name,
            ) from None

    def create(self, spec: OperatorSpec, partitions: Iterable[int], epoch: int) -> None:
        """Empty partitions owned from ``epoch`` on. Those that are there already at this epoch stay as they are."""
        self.learn(spec)
        for number in partitions:
            slot = self._slot(PartitionId(spec.name, number))
            with slot.work, slot.mutex:
                if slot.lifecycle.state is State.OWNED and slot.lifecycle.epoch == epoch:
                    continue
                if slot.lifecycle.state is not State.ABSENT or slot.lifecycle.epoch >= epoch:
                    raise AlreadyDeployed(
                        "the partition is here already",
                        remedy="use another operator name or data directory",
                        partition=slot.id,
                        epoch=slot.lifecycle.epoch,
                    )
                slot.directory = slot.home / f"created-{epoch}"
                slot.store = self._engine.open(slot.directory, create=True)
                ownership = layout.Ownership(self.info.name, State.OWNED, epoch)
                slot.store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode())]), sync=True)
                slot.lifecycle.create(epoch)
            self.on_change(slot.id)

    def _slot(self, partition: PartitionId) -> Slot:
        slot = self._slots.get(partition)
        if slot is None:
            home = self._root / "operators" / partition.operator / f"p{partition.partition:05d}"
            slot = self._slots.setdefault(partition, Slot(partition, Lifecycle(partition), home))
        return slot

    def lifecycle(self, partition: PartitionId) -> Lifecycle:
        """What this replica holds of a partition. To be read, not changed."""
        return self._slot(partition).lifecycle

    def inventory(self) -> Iterator[tuple[Lifecycle, int]]:
        """(lifecycle, sequence) of every partition that is here in some form."""
        for slot in list(self._slots.values()):
            if slot.lifecycle.state is not State.ABSENT:
                yield slot.lifecycle, slot.host.sequence if slot.host else 0

    def owned(self, operator: str | None = None) -> list[PartitionId]:
        return sorted(
            (
                slot.id
                for slot in list(self._slots.values())
                if slot.lifecycle.state in (State.OWNED, State.FENCING) and operator in (None, slot.id.operator)
            ),
            key=lambda partition: (partition.operator, partition.partition),
        )

    # -- records ------------------------------------------------------------------------------------------

    def apply(
        self, partition: PartitionId, epoch: int, batch: Batch, input_schema: bytes, rows: bytes
    ) -> Applied | ReplicaInfo | None:
        """Apply a batch to one partition.

        Returns what was applied; or the replica the partition went to; or None: it is on its way here, ask
        again after the next ``on_change``. Raises what is wrong with sender, rows or operator.
        """
        slot = self._slot(partition)
        with slot.work:
            with slot.mutex:
                verdict = slot.lifecycle.begin(epoch)
            if verdict is not Verdict.SERVE:
                return slot.lifecycle.successor if verdict is Verdict.MOVED else None
            try:
                return self._host(slot).apply(batch, input_schema, rows)
            finally:
                with slot.mutex:
                    if slot.lifecycle.finish():
                        self._seal(slot)

    def _host(self, slot: Slot) -> PartitionHost:
        if slot.host is None:
            _, cls = self._known(slot.id.operator)
            assert slot.store is not None
            slot.host = PartitionHost(
                cls,
                slot.id,
                slot.store,
                slot.lifecycle.epoch,
                cached_keys=self.settings.cached_keys,
                sync=self.settings.acknowledge == "fsync",
                on_commit=partial(self._committed, slot),
            )
        return slot.host

    @staticmethod
    def _committed(slot: Slot, sequence: int, encode: Callable[[], bytes]) -> None:
        if slot.logs:
            change_set = encode()
            for follower in list(slot.logs.values()):
                follower.append(sequence, change_set)

    # -- moving out ---------------------------------------------------------------------------------------

    def snapshot(self, partition: PartitionId, move_id: str) -> SnapshotInfo:
        """A base for a move's target, and a change log from there on. A sealed partition gives its own move only one."""
        slot = self._slot(partition)
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
            store = self._store(slot)
            slot.snapshots += 1
            snapshot_id = f"{partition.operator}-{partition.partition}-{move_id}-{slot.snapshots}"
            store.snapshot(self._snapshots / snapshot_id)
            sequence, epoch = read_sequence(store), lifecycle.epoch
            changes = ChangeLog(move_id, snapshot_id, sequence, self.settings.change_log_bytes_max)
            self._drop_log(slot, move_id)
            slot.logs[move_id] = changes
        files = self._digests.files(self._snapshots / snapshot_id)  # hashed while the stream goes on
        changes.base = SnapshotInfo(snapshot_id, sequence, epoch, base_digest(files, sequence), files)
        if sealed:
            changes.end(self._seal_of(changes, epoch, sequence))
        return changes.base

    def snapshot_file(self, snapshot_id: str, name: str) -> Path:
        path = self._snapshots / snapshot_id / name
        if path.parent.parent != self._snapshots or not path.is_file():
            raise MoveUnknown("there is no such base file", remedy="the transfer starts again", path=path)
        return path

    def change_log(self, snapshot_id: str) -> ChangeLog:
        for slot in list(self._slots.values()):
            for changes in list(slot.logs.values()):
                if changes.snapshot_id == snapshot_id:
                    return changes
        raise MoveUnknown("there is no such snapshot", remedy="the transfer starts again", snapshot=snapshot_id)

    def fence(self, partition: PartitionId, move_id: str, epoch: int, target: ReplicaInfo) -> bool:
        """Stop serving for this move, after the batch in hand. True: sealed; False: will be when that batch is done.

        Raises when the move cannot seal; the partition is then served as before.
        """
        slot = self._slot(partition)
        with slot.mutex:
            changes = slot.logs.get(move_id)
            if slot.lifecycle.state is State.OWNED and (changes is None or changes.base is None or changes.overflowed):
                raise MoveUnknown(
                    "the target does not follow this partition", remedy="start the move again", move=move_id
                )
            answer = slot.lifecycle.fence(move_id, epoch, target)
            if answer is FenceAnswer.SEAL_NOW:
                self._seal(slot)
            return answer is not FenceAnswer.SEAL_AFTER_BATCH

    def _seal(self, slot: Slot) -> None:
        """Durable first, then said. Called with ``mutex`` held and no batch in hand."""
        lifecycle, target = slot.lifecycle, slot.lifecycle.successor
        assert target is not None
        store = self._store(slot)
        epoch = lifecycle.granted
        ownership = layout.Ownership(
            self.info.name, State.SEALED, epoch, lifecycle.move_id, target.name, target.site, target.address
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
        self.on_change(slot.id)

    def _seal_of(self, changes: ChangeLog, epoch: int, sequence: int) -> Seal:
        assert changes.base is not None
        digest = cutover_digest(changes.base.digest, changes.changes)
        return Seal(changes.move_id, epoch, sequence, digest, self._clock.now_us())

    def cancel(self, partition: PartitionId, move_id: str) -> bool:
        """Neither send nor receive this move any more. False: it has sealed here and goes forward."""
        slot = self._slot(partition)
        with slot.work, slot.mutex:
            possible = slot.lifecycle.cancel(move_id)
            if slot.lifecycle.state is State.WARMING:
                self._abandon(slot, move_id)
            if possible:
                self._drop_log(slot, move_id)
        self.on_change(partition)
        return possible

    def release(self, partition: PartitionId, move_id: str) -> None:
        """The target owns: nothing of the move is needed any more, its files stay as a warm base for a return."""
        slot = self._slot(partition)
        with slot.work, slot.mutex:
            self._drop_log(slot, move_id)
            if slot.lifecycle.state is State.SEALED and slot.lifecycle.move_id == move_id and slot.store is not None:
                slot.store.close()
                slot.store = None

    def _drop_log(self, slot: Slot, move_id: str) -> None:
        changes = slot.logs.pop(move_id, None)
        if changes is not None:
            changes.close()
            shutil.rmtree(self._snapshots / changes.snapshot_id, ignore_errors=True)

    def _store(self, slot: Slot) -> PartitionStore:
        if slot.store is None:
            if slot.directory is None:
                raise StateMissing("the partition is not here", remedy="ask its owner", partition=slot.id)
            slot.store = self._engine.open(slot.directory)
        return slot.store

    # -- moving in ----------------------------------------------------------------------------------------

    def prepare(self, spec: OperatorSpec, partition: PartitionId, move_id: str, source_epoch: int) -> None:
        """Become the target of a move. A second call for the same move starts its transfer again."""
        self.learn(spec)
        slot = self._slot(partition)
        with slot.work, slot.mutex:
            slot.lifecycle.prepare(move_id, source_epoch)
            if slot.incoming is not None:
                self._discard(slot.incoming)
            if slot.store is not None:  # what it had before a move away: from now on only files
                slot.store.close()
                slot.store = None
            slot.snapshots += 1
            directory = slot.home / f"{move_id}-{slot.snapshots}"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            slot.incoming = Incoming(move_id, directory)
        self.on_change(partition)

    def warm_base(self, partition: PartitionId) -> dict[str, Path]:
        """Digest → file, of what an earlier stay of this partition left here."""
        directory = self._slot(partition).directory
        if directory is None or not directory.is_dir():
            return {}
        return {file.digest: directory / file.name for file in self._digests.files(directory)}

    def incoming_directory(self, partition: PartitionId, move_id: str) -> Path:
        return self._incoming(partition, move_id).directory

    def open_incoming(self, partition: PartitionId, move_id: str, base: SnapshotInfo) -> None:
        """All base files are there: prove them and open the copy. Raises DigestMismatch."""
        incoming = self._incoming(partition, move_id)
        files = self._digests.files(incoming.directory)
        digest = base_digest(files, base.sequence)
        if digest != base.digest:
            raise DigestMismatch(
                "the base that arrived is not the one that was sent",
                remedy="the move was aborted, the source serves on; start it again",
                partition=partition,
                sent=base.digest,
                arrived=digest,
            )
        with self._slot(partition).work:
            incoming = self._incoming(partition, move_id)
            incoming.store = self._engine.open(incoming.directory)
            incoming.base = base.digest
            incoming.sequence = base.sequence

    def apply_changes(self, partition: PartitionId, move_id: str, change_sets: Iterable[bytes]) -> int:
        """Apply change sets in order; returns the sequence reached. Raises TransferCorrupt on a gap or bad checksum."""
        with self._slot(partition).work:
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
        slot = self._slot(partition)
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
            ownership = layout.Ownership(self.info.name, State.OWNED, seal.epoch, move_id)
            store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode())]), sync=True)
            with slot.mutex:
                slot.lifecycle.own(move_id, seal.epoch)
                old, slot.directory, slot.store, slot.incoming = (
                    slot.directory,
                    incoming.directory,
                    store,
                    None,
                )
        self.on_change(partition)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def abandon(self, partition: PartitionId, move_id: str) -> None:
        """Give an unfinished move in up. What was here before stays as a warm base."""
        slot = self._slot(partition)
        with slot.work, slot.mutex:
            self._abandon(slot, move_id)

    def _abandon(self, slot: Slot, move_id: str) -> None:
        if slot.incoming is not None and slot.incoming.move_id == move_id:
            self._discard(slot.incoming)
            slot.incoming = None
            slot.lifecycle.abandon(move_id)
            self.on_change(slot.id)

    def _incoming(self, partition: PartitionId, move_id: str) -> Incoming:
        incoming = self._slot(partition).incoming
        if incoming is None or incoming.move_id != move_id:
            raise MoveUnknown("this move is not under way here", remedy="start it again", move=move_id)
        return incoming

    @staticmethod
    def _discard(incoming: Incoming) -> None:
        if incoming.store is not None:
            incoming.store.close()
        shutil.rmtree(incoming.directory, ignore_errors=True)

    # -- checkpoints and reading --------------------------------------------------------------------------

    def checkpoint(self, partition: PartitionId, store: CheckpointStore) -> Saved | None:
        """Snapshot between two batches, then upload. None: the partition is not owned here any more."""
        slot = self._slot(partition)
        directory = self._snapshots / f"checkpoint-{partition.operator}-{partition.partition}"
        shutil.rmtree(directory, ignore_errors=True)
        if slot.store is not None:
            slot.store.flush()
        with slot.work:
            with slot.mutex:
                if slot.lifecycle.state is not State.OWNED:
                    return None
                epoch = slot.lifecycle.epoch
            db = self._store(slot)
            sequence = read_sequence(db)
            newest = next(store.newest(partition), None)
            if newest is not None and newest.order >= (epoch, sequence):
                return Saved(newest, 0, sum(file.size for file in newest.files))
            db.snapshot(directory)
            positions = {
                key[len(layout.POSITION) :].decode(): layout.decode_position(value)
                for key, value in db.scan(layout.POSITION)
            }
        try:
            files = self._digests.files(directory)
            manifest = Manifest(
                operator=partition.operator,
                partition=partition.partition,
                epoch=epoch,
                sequence=sequence,
                digest=base_digest(files, sequence),
                positions=positions,
                created_us=self._clock.now_us(),
                replica=self.info.name,
                files=tuple(ManifestFile(**asdict(file)) for file in files),
            )
            return store.save(manifest, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def scan(self, partition: PartitionId, state: str) -> Iterator[tuple[object, object, object]]:
        """(key, entry key or None, value) of one state, as of one moment. Raises UnknownState, NotOwner."""
        _, cls = self._known(partition.operator)
        declaration = declarations_of(cls).get(state)
        if declaration is None:
            raise UnknownState(
                f"there is no state {state!r}",
                remedy=f"it has {', '.join(declarations_of(cls)) or 'none'}",
                operator=partition.operator,
            )
        return scan_state(declaration, self._owned_store(partition))

    def position(self, partition: PartitionId, source: str) -> int | None:
        """The last batch of ``source`` that the partition contains. Raises NotOwner."""
        stored = self._owned_store(partition).get(layout.POSITION + source.encode())
        return None if stored is None else layout.decode_position(stored)

    def _owned_store(self, partition: PartitionId) -> PartitionStore:
        slot = self._slot(partition)
        if slot.lifecycle.state is not State.OWNED:
            raise NotOwner("the partition is not owned here", remedy="refresh the assignment", partition=partition)
        return self._store(slot)

    def close(self) -> None:
        for slot in self._slots.values():
            if slot.host is not None:
                slot.host.close()
            if slot.incoming is not None:
                self._discard(slot.incoming)
            if slot.store is not None:
                slot.store.close()
        self._lock.close()


def _lock_directory(directory: Path) -> IO[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "LOCK").open("a+")
    except OSError as error:
        raise InvalidArgument(
            f"the data directory cannot be used: {error.strerror}",
            remedy="name a writable one",
            path=directory,
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise DataDirLocked(
            "another replica holds the data directory",
            remedy="stop that replica, or give this one its own --data-dir",
            path=directory,
            pid=holder,
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _check_identity(file: Path, name: str) -> None:
    """State says which replica it belongs to: under another name it would be taken for unfinished transfers."""
    if not file.exists():
        _write_durably(file, name)
    elif (known := file.read_text()) != name:
        raise InvalidArgument(
            f"the data directory belongs to replica {known!r}",
            remedy=f"start it with --name {known}, or give {name!r} its own --data-dir",
            path=file.parent,
        )


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _spec_to_json(spec: OperatorSpec) -> dict[str, object]:
    return {**asdict(spec), "key": list(spec.key), "output_schema": spec.output_schema.hex()}


def _spec_from_json(text: str) -> OperatorSpec:
    fields = json.loads(text)
    fields["key"] = tuple(fields["key"])
    fields["output_schema"] = bytes.fromhex(fields["output_schema"])
    return OperatorSpec(**fields)
