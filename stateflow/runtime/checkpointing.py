"""Taking checkpoints: a snapshot between two batches; hashing and upload run while batches go on."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path

from stateflow.checkpoint import CheckpointStore, Manifest, ManifestFile, Saved
from stateflow.checkpoint.proof import state_digest
from stateflow.errors import StaleCheckpoint, Unavailable
from stateflow.runtime import layout
from stateflow.runtime.committing import read_sequence
from stateflow.runtime.host import read_watermark
from stateflow.runtime.lifecycle import State
from stateflow.runtime.rate_limit import DutyCycle
from stateflow.runtime.registry import PartitionRegistry
from stateflow.runtime.schema import read_schema
from stateflow.runtime.slot import Slot
from stateflow.runtime.transfer import base_digest
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId

#: prefixes of entries that describe this copy (its owner, the clients that it refuses), not the partition's state
NOT_STATE = (layout.OWNERSHIP, layout.LAPSED, layout.STOPPED)
#: share of one CPU that computing a state digest may take while batches arrive, so that they find the interpreter free
DIGEST_SHARE = DutyCycle(0.2)


class Checkpointer:
    """Takes checkpoints of this replica's partitions. Thread-safe. Raises what the store raises.

    Args:
        sleep: called with seconds, to give way to batches and to keep the bandwidth limit.
    """

    def __init__(self, registry: PartitionRegistry, sleep: Callable[[float], None] = time.sleep) -> None:
        self._registry = registry
        self._sleep = sleep
        self._proved: dict[PartitionId, float] = {}  # when the state digest was last computed

    def take(
        self, partition: PartitionId, store: CheckpointStore, *, savepoint: str = "", on_demand: bool = True
    ) -> Saved | None:
        """Takes a snapshot between two batches, then hashes, uploads and publishes it.

        Args:
            savepoint: name under which the checkpoint is kept; empty: none.
            on_demand: a caller waits for the checkpoint: it is taken even when nothing changed since the last one, the
                state digest is computed, and no bandwidth limit applies.

        Returns None when the partition is no longer owned here, or unchanged since the last checkpoint and not
        ``on_demand``. Raises StaleCheckpoint when the store has one of a later owner, Unavailable when no snapshot can
        be taken.
        """
        slot = self._registry.slot(partition)
        with contextlib.suppress(Exception):  # outside the lock, where the store may be closed at any moment
            if not on_demand and self._is_unchanged(slot, store):
                return None
            self._registry.store(slot).flush()  # so that little is left to flush under the lock
        directory = self._registry.snapshots / f"checkpoint-{uuid.uuid4().hex}"
        try:
            with slot.work:
                with slot.mutex:
                    if slot.lifecycle.state is not State.OWNED:
                        return None
                    epoch = slot.lifecycle.epoch
                db = self._registry.store(slot)
                try:
                    self._registry.settle(slot)
                    db.snapshot(directory)
                except Exception as error:
                    raise Unavailable(
                        f"cannot take a snapshot: {error}",
                        remedy="free space in the data directory; the next checkpoint retries",
                        partition=partition,
                    ) from error
                manifest = self._describe(partition, epoch, db)
            manifest = self._hashed(manifest, directory, prove=on_demand or self._proof_due(partition))
            saved = store.save(
                manifest, directory, savepoint=savepoint, throttle=self._unhurried if on_demand else self._throttle
            )
            if saved.manifest.epoch != epoch:
                raise StaleCheckpoint(
                    "a later owner has published a checkpoint", remedy="nothing to do", partition=partition
                )
            slot.checkpointed = (store.url, *saved.manifest.order)
            return saved
        finally:
            self._registry.environment.remove_tree(directory)

    def published(self, store: CheckpointStore) -> set[tuple[PartitionId, tuple[int, int]]]:
        """Returns the checkpoints that this process published last in a store, as (partition, (epoch, sequence))."""
        last = ((slot.id, slot.checkpointed) for slot in self._registry.slots())
        return {(partition, (epoch, sequence)) for partition, (url, epoch, sequence) in last if url == store.url}

    def forget(self, gone: Collection[tuple[PartitionId, tuple[int, int]]]) -> None:
        """Forgets checkpoints that are gone from the store, so that they are taken again though nothing has changed."""
        for partition, order in gone:
            slot = self._registry.look(partition)
            if slot.checkpointed[1:] == order:
                slot.checkpointed = ("", 0, 0)

    def _describe(self, partition: PartitionId, epoch: int, db: PartitionStore) -> Manifest:
        spec, cls = self._registry.operator(partition.operator)
        stored = db.get(layout.SCHEMA)
        if stored is None:
            states = {"version": cls.state_version, "states": json.loads(spec.state_schema)}
        else:
            states = read_schema(stored)
        positions = {
            key[len(layout.POSITION) :].decode(): layout.Position.decode(value).batch
            for key, value in db.scan(layout.POSITION)
        }
        return Manifest(
            operator=partition.operator,
            partition=partition.partition,
            epoch=epoch,
            sequence=read_sequence(db),
            digest="",
            positions=positions,
            created_us=self._registry.clock.now_us(),
            replica=self._registry.info.name,
            files=(),
            watermark_us=read_watermark(db),
            schema=states["states"],
            target=spec.target,
            version=str(states["version"]),
            partitions=spec.partitions,
            key=spec.key,
        )

    def _hashed(self, manifest: Manifest, directory: Path, *, prove: bool) -> Manifest:
        files = self._registry.digests.files(directory)
        manifest = replace(
            manifest,
            digest=base_digest(files, manifest.sequence),
            files=tuple(ManifestFile(**asdict(file)) for file in files),
        )
        if prove:
            manifest = replace(manifest, state_digest=self._state_digest(directory))
            self._proved[manifest.id] = self._registry.clock.monotonic()
        return manifest

    @staticmethod
    def _is_unchanged(slot: Slot, store: CheckpointStore) -> bool:
        """Tells whether the partition is unchanged since its last checkpoint by this process."""
        last = (store.url, slot.lifecycle.epoch, 0 if slot.store is None else read_sequence(slot.store))
        return slot.checkpointed == last and not (slot.passing is not None and slot.passing.held)

    def _state_digest(self, directory: Path) -> str:
        """Computes the state digest from the snapshot's own files, which are what a restore gets."""
        copy = self._registry.environment.open_read_only(directory)
        worked_from = self._registry.clock.monotonic()

        def rest() -> None:
            nonlocal worked_from
            now = self._registry.clock.monotonic()
            self._sleep(DIGEST_SHARE.wait_s(now, now - worked_from, self._registry.served_at))
            worked_from = self._registry.clock.monotonic()

        try:
            return state_digest(copy.scan(b""), NOT_STATE, rest)
        finally:
            copy.close()

    def _proof_due(self, partition: PartitionId) -> bool:
        last = self._proved.get(partition)
        interval_s = self._registry.settings.checkpoint_digest_interval_s
        return last is None or self._registry.clock.monotonic() - last >= interval_s

    def _throttle(self, sent: int) -> None:
        limit = self._registry.settings.checkpoint_bytes_per_s
        if limit:
            self._sleep(sent / limit)

    @staticmethod
    def _unhurried(sent: int) -> None:
        """Applies no bandwidth limit, as a caller waits."""
