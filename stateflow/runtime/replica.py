"""A replica without its sockets: the partitions one process owns, warms and gives away."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from stateflow.changes import Mutations
from stateflow.checkpoint import CheckpointStore, Manifest, ManifestFile, Saved
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import AlreadyDeployed, NotOwner, UnknownState
from stateflow.runtime import layout
from stateflow.runtime.host import Applied, Batch, PartitionHost, read_sequence
from stateflow.runtime.lifecycle import Lifecycle, State, Verdict
from stateflow.runtime.receiving import Receiver
from stateflow.runtime.sending import Sender
from stateflow.runtime.shelf import Shelf, Slot
from stateflow.runtime.transfer import base_digest
from stateflow.settings import ReplicaSettings
from stateflow.state import declarations_of, scan_state
from stateflow.storage import PartitionStore
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo


class ReplicaNode:
    """Serves batches; ``sender`` and ``receiver`` are its two sides of a move. Called from several threads.

    Raises what :class:`~stateflow.runtime.shelf.Shelf` raises for its data directory.
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
        self._shelf = Shelf(info, data_dir, self.settings, clock)
        self.sender = Sender(self._shelf)
        self.receiver = Receiver(self._shelf)

    def on_change(self, listener: Callable[[PartitionId], None]) -> None:
        """Have ``listener`` called, from any thread, after each change of a partition's lifecycle."""
        self._shelf.on_change = listener

    # -- operators and partitions -----------------------------------------------------------------------

    def learn(self, spec: OperatorSpec) -> None:
        """Know an operator: load its code and keep its description. Raises OperatorNotImportable."""
        self._shelf.learn(spec)

    def create(self, spec: OperatorSpec, partitions: Iterable[int], epoch: int) -> None:
        """Empty partitions owned from ``epoch`` on. Those that are there already at this epoch stay as they are."""
        self.learn(spec)
        for number in partitions:
            slot = self._shelf.slot(PartitionId(spec.name, number))
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
                slot.store = self._shelf.engine.open(slot.directory, create=True)
                ownership = layout.Ownership(self.info.name, State.OWNED, epoch)
                slot.store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode())]), sync=True)
                slot.lifecycle.create(epoch)
            self._shelf.on_change(slot.id)

    def lifecycle(self, partition: PartitionId) -> Lifecycle:
        """What this replica holds of a partition. To be read, not changed."""
        return self._shelf.slot(partition).lifecycle

    def inventory(self) -> Iterator[tuple[Lifecycle, int]]:
        """(lifecycle, sequence) of every partition that is here in some form."""
        for slot in self._shelf.slots():
            if slot.lifecycle.state is not State.ABSENT:
                yield slot.lifecycle, slot.host.sequence if slot.host else 0

    def owned(self, operator: str | None = None) -> list[PartitionId]:
        return sorted(
            (
                slot.id
                for slot in self._shelf.slots()
                if slot.lifecycle.state in (State.OWNED, State.FENCING) and operator in (None, slot.id.operator)
            ),
            key=lambda partition: (partition.operator, partition.partition),
        )

    def cancel(self, partition: PartitionId, move_id: str) -> bool:
        """Neither send nor receive this move any more. False: it has sealed here and goes forward."""
        possible = self.sender.cancel(partition, move_id)  # first, so that a prepare that comes late is refused …
        self.receiver.abandon(partition, move_id)  # … and one that came before is undone
        return possible

    # -- records ------------------------------------------------------------------------------------------

    def apply(
        self, partition: PartitionId, epoch: int, batch: Batch, input_schema: bytes, rows: bytes
    ) -> Applied | ReplicaInfo | None:
        """Apply a batch to one partition.

        Returns what was applied; or the replica the partition went to; or None: it is on its way here, ask
        again after the next ``on_change``. Raises what is wrong with sender, rows or operator.
        """
        slot = self._shelf.slot(partition)
        with slot.work:
            with slot.mutex:
                verdict = slot.lifecycle.begin(epoch)
            if verdict is not Verdict.SERVE:
                return slot.lifecycle.successor if verdict is Verdict.MOVED else None
            try:
                return self._host(slot).apply(batch, input_schema, rows, self._clock.now_us())
            finally:
                with slot.mutex:
                    if slot.lifecycle.finish():
                        self.sender.seal(slot)

    def _host(self, slot: Slot) -> PartitionHost:
        if slot.host is None:
            _, cls = self._shelf.operator(slot.id.operator)
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

    # -- checkpoints and reading --------------------------------------------------------------------------

    def checkpoint(self, partition: PartitionId, store: CheckpointStore) -> Saved | None:
        """Snapshot between two batches, then upload. None: the partition is not owned here any more."""
        slot = self._shelf.slot(partition)
        directory = self._shelf.snapshots / f"checkpoint-{partition.operator}-{partition.partition}"
        shutil.rmtree(directory, ignore_errors=True)
        if slot.store is not None:
            slot.store.flush()
        with slot.work:
            with slot.mutex:
                if slot.lifecycle.state is not State.OWNED:
                    return None
                epoch = slot.lifecycle.epoch
            db = self._shelf.store(slot)
            sequence = read_sequence(db)
            newest = next(store.newest(partition), None)
            if newest is not None and newest.order >= (epoch, sequence):
                return Saved(newest, 0, sum(file.size for file in newest.files))
            db.snapshot(directory)
            positions = {
                key[len(layout.POSITION) :].decode(): layout.Position.decode(value).batch
                for key, value in db.scan(layout.POSITION)
            }
        try:
            files = self._shelf.digests.files(directory)
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
        _, cls = self._shelf.operator(partition.operator)
        declaration = declarations_of(cls).get(state)
        if declaration is None:
            raise UnknownState(
                f"there is no state {state!r}",
                remedy=f"it has {', '.join(declarations_of(cls)) or 'none'}",
                operator=partition.operator,
            )
        store = self._owned_store(partition)
        try:
            yield from scan_state(declaration, store)
        except Exception:
            self._owned_store(partition)  # it left in the middle: NotOwner says it better
            raise

    def position(self, partition: PartitionId, source: str) -> int | None:
        """The last batch of ``source`` that the partition contains. Raises NotOwner."""
        stored = self._owned_store(partition).get(layout.POSITION + source.encode())
        return None if stored is None else layout.Position.decode(stored).batch

    def _owned_store(self, partition: PartitionId) -> PartitionStore:
        slot = self._shelf.slot(partition)
        if slot.lifecycle.state is not State.OWNED:
            raise NotOwner("the partition is not owned here", remedy="refresh the assignment", partition=partition)
        return self._shelf.store(slot)

    def close(self) -> None:
        self._shelf.close()
