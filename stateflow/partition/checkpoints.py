"""Takes checkpoints of partitions on a replica; verifies and reads checkpoints without a cluster.

Taking: the replica takes the snapshot between two batches, under the partition's lock ``work``. Hashing and upload run
while batches go on. Computing the state digest reads the whole snapshot, so it is done on demand, and otherwise at most
once in ``checkpoint_digest_interval_s``.

Verifying and reading: the files are fetched to a temporary directory. Verifying loads no code of the operator. Reading
loads the operator's class, and evolves the fetched copy to its declarations if necessary.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stateflow.checkpoint import CheckpointStore, Manifest, ManifestFile, Saved
from stateflow.checkpoint.catalog import BLOBS, state_digest
from stateflow.errors import CheckpointCorrupt, CheckpointMissing, StaleCheckpoint, StateflowError, Unavailable
from stateflow.operator.operator import Operator, load
from stateflow.partition import layout
from stateflow.partition.change_feed import base_digest
from stateflow.partition.entries import At, ReadableStates, StateColumns, is_exact, unknown
from stateflow.partition.environment import DutyCycle
from stateflow.partition.layout import read_sequence, read_watermark
from stateflow.partition.lifecycle import State
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.processor import PartitionProcessor, is_evolved, read_schema
from stateflow.partition.registry import PartitionRegistry
from stateflow.partitioner import partition_of
from stateflow.state import declarations_of, encode_row_key, stored_tags
from stateflow.state.cells import CELL, EXPIRES, FORMAT_VERSION, TAGS
from stateflow.storage import PartitionStore, RocksEngine, RocksStore
from stateflow.types import PartitionId

#: prefixes of entries that describe this copy (its owner, the clients that it refuses), not the partition's state
NOT_STATE = (layout.OWNERSHIP, layout.LAPSED, layout.STOPPED)
#: share of one CPU that computing a state digest may take while batches arrive, so that batches do not wait for the
#: interpreter lock
DIGEST_SHARE = DutyCycle(0.2)
_CACHE_BYTES = 32 << 20

# -- Taking ----------------------------------------------------------------------------------------------------------


class Checkpointer:
    """Takes checkpoints of this replica's partitions. Thread-safe. Raises the errors of the store."""

    def __init__(self, registry: PartitionRegistry) -> None:
        self._registry = registry
        self._proved: dict[PartitionId, float] = {}  # when each state digest was last computed, monotonic seconds

    def take(
        self, partition: PartitionId, store: CheckpointStore, *, savepoint: str = "", on_demand: bool = True
    ) -> Saved | None:
        """Takes a snapshot between two batches, then hashes, uploads and publishes it.

        Args:
            savepoint: name under which the checkpoint is kept; empty: it is no savepoint.
            on_demand: a caller waits for the checkpoint. The checkpoint is then taken even if nothing has changed since
                the last one, has a state digest, and is uploaded without a bandwidth limit.

        Returns None if the partition is no longer owned here, or if it is unchanged and ``on_demand`` is False. Raises
        StaleCheckpoint if the store has a later owner's checkpoint, Unavailable if no snapshot can be taken.
        """
        local = self._registry.local(partition)
        with contextlib.suppress(Exception):  # outside the lock, where the store may be closed at any moment
            if not on_demand and self._is_unchanged(local, store):
                return None
            self._registry.store(local).flush()  # so that little is left to flush under the lock
        directory = self._registry.snapshots / f"checkpoint-{uuid.uuid4().hex}"
        try:
            with self._registry.reopening(local, only_unsure=True), local.work:
                with local.mutex:
                    if local.lifecycle.state is not State.OWNED:
                        return None
                    epoch = local.lifecycle.epoch
                db = self._registry.store(local)
                try:
                    self._registry.settle(local)
                    db.snapshot(directory)
                except Exception as error:
                    raise Unavailable(
                        f"cannot take a snapshot: {error}",
                        remedy="check the data directory's disk, and free space there; the next checkpoint retries",
                        partition=partition,
                    ) from error
                manifest = self._describe(partition, epoch, db)
            manifest = self._hashed(manifest, directory, prove=on_demand or self._proof_due(partition))
            saved = store.save(
                manifest, directory, savepoint=savepoint, throttle=self._unhurried if on_demand else self._throttle
            )
            if saved.manifest.epoch != epoch:
                raise StaleCheckpoint(
                    "a later owner has already published a checkpoint",
                    remedy="use the newer checkpoint; this one was not published",
                    partition=partition,
                )
            local.checkpointed = (store.url, *saved.manifest.order)
            return saved
        finally:
            self._registry.remove_snapshot(directory)

    def published(self, store: CheckpointStore) -> set[tuple[PartitionId, tuple[int, int]]]:
        """Returns the last checkpoint of each partition, if this process has saved it in ``store``, as (partition,
        (epoch, sequence))."""
        last = ((local.id, local.checkpointed) for local in self._registry.local_partitions())
        return {(partition, (epoch, sequence)) for partition, (url, epoch, sequence) in last if url == store.url}

    def forget(self, gone: Collection[tuple[PartitionId, tuple[int, int]]]) -> None:
        """Forgets checkpoints that are gone from the store, so that the next checkpoint of each of these partitions is
        taken even if the partition has not changed."""
        for partition, order in gone:
            local = self._registry.look(partition)
            if local.checkpointed[1:] == order:
                local.checkpointed = ("", 0, 0)

    def _describe(self, partition: PartitionId, epoch: int, db: PartitionStore) -> Manifest:
        spec, cls = self._registry.operator(partition.operator)
        stored = db.get(layout.SCHEMA)
        if stored is None:
            states = {"version": cls.state_version, "states": json.loads(spec.state_schema)}
        else:
            states = read_schema(stored)
        return Manifest(
            operator=partition.operator,
            partition=partition.partition,
            epoch=epoch,
            sequence=read_sequence(db),
            digest="",
            positions=layout.positions(db),
            created_us=self._registry.clock.now_us(),
            replica=self._registry.info.name,
            files=(),
            watermark_us=read_watermark(db),
            schema=states["states"],
            target=spec.target,
            version=str(states["version"]),
            partitions=spec.partitions,
            key=spec.key,
            tags=[*stored_tags(db).values()] if any(db.scan(TAGS)) else [],
            stopped_us=int.from_bytes(db.get(layout.STOPPED) or b"", "big"),
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
    def _is_unchanged(local: LocalPartition, store: CheckpointStore) -> bool:
        """Tells whether the partition is unchanged since its last checkpoint by this process."""
        last = (store.url, local.lifecycle.epoch, 0 if local.store is None else read_sequence(local.store))
        return local.checkpointed == last and not (local.skipped is not None and local.skipped.held)

    def _state_digest(self, directory: Path) -> str:
        """Computes the state digest from the snapshot's own files, which a restore will use."""
        copy = self._registry.environment.open_read_only(directory)
        worked_from = self._registry.clock.monotonic()

        def rest() -> None:
            nonlocal worked_from
            now = self._registry.clock.monotonic()
            time.sleep(DIGEST_SHARE.wait_s(now, now - worked_from, self._registry.served_at))
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
            time.sleep(sent / limit)

    @staticmethod
    def _unhurried(sent: int) -> None:
        """Applies no bandwidth limit, because a caller waits."""


# -- Verifying -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Verified:
    """Result of verifying a checkpoint.

    Attributes:
        proved: the recomputed state digest matches the manifest's; False also if the manifest has none.
        entries: number of state cells; None: the database was not opened.
        damaged: blobs with the wrong content.
        missing: blobs that are not in the store.
    """

    operator: str
    partition: int
    epoch: int
    sequence: int
    bytes: int
    proved: bool = False
    entries: int | None = None
    damaged: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(store: CheckpointStore, manifest: Manifest) -> Verified:
    """Reads every blob, opens the database, compares sequence, positions and state digest, and checks the format of
    every cell. Loads no code of the operator, because whoever can write to the store must not decide what code runs
    here.

    Returns faults in the result; raises only the errors of the store, and WrongKey.
    """
    found = Verified(manifest.operator, manifest.partition, manifest.epoch, manifest.sequence, manifest.size)
    with tempfile.TemporaryDirectory(prefix="stateflow-verify-") as folder:
        directory = Path(folder) / "files"
        directory.mkdir()
        store.check_room(manifest, directory)
        with store.leased(manifest):
            for file in manifest.files:
                try:
                    store.fetch(manifest, file, directory / file.name)
                except CheckpointCorrupt as error:
                    absent = isinstance(error.__cause__, FileNotFoundError)
                    (found.missing if absent else found.damaged).append(file.blob)
                    found.error = str(error)
        if found.damaged or found.missing:
            return found
        try:
            _verify_state(directory, manifest, found)
        except StateflowError as error:
            found.error = str(error)
        except Exception as error:  # noqa: BLE001 - files that match their digests may still be invalid
            wrong = CheckpointCorrupt(
                f"the entries cannot be read: {type(error).__name__}: {error}",
                remedy="restore an older checkpoint",
                partition=manifest.id,
            )
            found.error = str(wrong)
    return found


def drop_damaged(store: CheckpointStore, manifests: Iterable[Manifest], blobs: Collection[str]) -> list[str]:
    """Deletes those of ``blobs`` that are damaged, and returns them.

    While the blobs were verified, a new checkpoint may have repaired a blob, or begun to use it. So each blob is read
    again right before it is deleted, and kept if it was rewritten during that read.
    """
    files = {file.blob: (manifest, file) for manifest in manifests for file in manifest.files if file.blob in blobs}
    dropped = []
    with tempfile.TemporaryDirectory(prefix="stateflow-verify-") as folder:
        for blob, (manifest, file) in sorted(files.items()):
            name, copy = f"{BLOBS}/{blob}", Path(folder) / "blob"
            before = store.objects.stat(name)
            if before is None:
                continue
            try:
                store.fetch(manifest, file, copy)
            except CheckpointCorrupt:
                if store.objects.stat(name) == before:
                    store.objects.delete(name)
                    dropped.append(blob)
    return dropped


def _verify_state(directory: Path, manifest: Manifest, found: Verified) -> None:
    with _opened(directory, manifest) as db:
        positions = layout.positions(db)
        if (read_sequence(db), positions) != (manifest.sequence, manifest.positions):
            raise CheckpointCorrupt(
                f"the database has sequence {read_sequence(db)} and positions {positions}, the manifest says "
                f"{manifest.sequence} and {manifest.positions}",
                remedy="restore an older checkpoint",
                partition=manifest.id,
            )
        if manifest.state_digest:
            if state_digest(db.scan(b""), NOT_STATE) != manifest.state_digest:
                raise CheckpointCorrupt(
                    "the state does not match the manifest's digest",
                    remedy="restore an older checkpoint",
                    partition=manifest.id,
                )
            found.proved = True
        found.entries = 0
        for _, value in db.scan(CELL):
            if not value or value[0] & ~EXPIRES != FORMAT_VERSION:
                raise CheckpointCorrupt(
                    "a state cell has an unknown format",
                    remedy="restore an older checkpoint, or run the version that wrote it",
                    partition=manifest.id,
                )
            found.entries += 1


@contextmanager
def _opened(directory: Path, manifest: Manifest) -> Iterator[RocksStore]:
    try:
        db = RocksEngine(_CACHE_BYTES, _CACHE_BYTES).open(directory)
    except Exception as error:
        raise CheckpointCorrupt(
            f"the files are not a database: {error}", remedy="restore an older checkpoint", partition=manifest.id
        ) from error
    try:
        yield db
    finally:
        db.close()


# -- Reading ---------------------------------------------------------------------------------------------------------


def read_checkpoint(
    store: CheckpointStore,
    operator: str,
    state: str,
    *,
    savepoint: str = "",
    key: Any = None,
    cls: type[Operator] | None = None,
    lacking: Callable[[StateflowError], None] | None = None,
    partitions: Collection[int] | None = None,
) -> Iterator[bytes]:
    """Yields the entries of one state as Arrow IPC streams, with the columns of :class:`.StateColumns`. Needs no
    cluster.

    The entries are those that existed when the checkpoint was taken. Entries that had expired by then, by the clock of
    the replica that took it or by the partition's watermark, are left out; entries that have expired since are
    included.

    Args:
        state: name of the state's attribute or tag, or its exact name.
        savepoint: name of the savepoint; empty: the newest checkpoint of each partition.
        key: the only key to read; None: all keys.
        cls: the operator's class, if it is not at the import path in the checkpoint; None: load it from there.
        lacking: called with the error of each partition that cannot be read, which is then left out; None: the error is
            raised.
        partitions: numbers of the partitions to read; None: all.

    Raises CheckpointMissing, CheckpointCorrupt, UnknownState, OperatorNotImportable; SchemaMismatch if the states
    cannot evolve to the class's declarations; InvalidArgument if several tags have the name.
    """
    exact, found = "", True
    for manifest in _manifests(store, operator, savepoint, key, lacking or _fail, partitions):
        made_for = cls or load(manifest.target)
        if not exact:
            exact, found = state, not is_exact(state) or key is not None or partitions is not None
            if not is_exact(state) and state not in declarations_of(made_for):
                exact = readable_states(_readable(store, operator, savepoint), made_for).exact(state, operator)
        with tempfile.TemporaryDirectory(prefix="stateflow-read-") as folder:
            manifest, directory = _fetched(store, manifest, Path(folder), moves_on=not savepoint)
            with _opened(directory, manifest) as db:
                if not is_evolved(made_for, db):  # evolves this copy only
                    PartitionProcessor(made_for, manifest.id, db, manifest.epoch).evolve(manifest.created_us)
                at = At(manifest.created_us, manifest.watermark_us)
                columns = StateColumns(made_for, exact, operator, db)
                found |= columns.is_known
                entries = columns.entries(db, at, [] if key is None else [encode_row_key(key)])
                for pages in columns.pages(entries, manifest.partition):
                    yield from pages
    if not found:
        states = readable_states(_readable(store, operator, savepoint), made_for)
        raise unknown(state, states.by_name(), operator)


def readable_states(manifests: Sequence[Manifest], cls: type[Operator] | None = None) -> ReadableStates:
    """Returns the states that can be read from checkpoints.

    Args:
        manifests: the manifests of all partitions; at least one.
        cls: the operator's class; None: loads it from its import path in the checkpoint.

    Raises OperatorNotImportable.
    """
    attributes = {name: each.describe() for name, each in declarations_of(cls or load(manifests[0].target)).items()}
    return ReadableStates.of(attributes, [tag for manifest in manifests for tag in manifest.tags])


def _readable(store: CheckpointStore, operator: str, savepoint: str) -> list[Manifest]:
    """Returns the manifests of all partitions, as far as they can be read."""
    return list(_manifests(store, operator, savepoint, None, lambda _: None))


def _fetched(store: CheckpointStore, manifest: Manifest, folder: Path, *, moves_on: bool) -> tuple[Manifest, Path]:
    """Fetches a checkpoint's files and returns its manifest with their directory. ``moves_on``: if the checkpoint is
    garbage-collected before it is fetched, fetch the newest one instead. Raises CheckpointMissing,
    CheckpointCorrupt."""
    for attempt in itertools.count():
        directory = folder / f"files-{attempt}"
        try:
            store.restore(manifest, directory)
        except CheckpointCorrupt:
            if not moves_on or store.has(manifest):
                raise
        else:
            return manifest, directory
        newer = next(store.newest(manifest.id), None)
        if newer is None:
            raise without_checkpoint(manifest.id)
        manifest = newer
    raise AssertionError


def _fail(error: StateflowError) -> None:
    raise error


def manifests_of(store: CheckpointStore, operator: str, savepoint: str = "") -> list[Manifest]:
    """Returns the newest manifest of each partition, or those of a savepoint. Raises CheckpointMissing,
    CheckpointCorrupt.
    """
    return list(_manifests(store, operator, savepoint, None, _fail))


def _manifests(
    store: CheckpointStore,
    operator: str,
    savepoint: str,
    key: Any,
    lacking: Callable[[StateflowError], None],
    partitions: Collection[int] | None = None,
) -> Iterator[Manifest]:
    """Yields the manifests of all partitions, or of the one that contains ``key``. Calls ``lacking`` for each partition
    without a checkpoint, so that none is left out silently."""
    store.check()
    if savepoint:
        manifests = {manifest.partition: manifest for manifest in store.savepoint(savepoint, operator, partitions)}
    else:
        manifests = _newest(store, operator, lacking, partitions)
    count = max(manifest.partitions for manifest in manifests.values()) if manifests else 0
    if count and not savepoint:
        wanted = range(count) if key is None else [partition_of(key, count)]
        wanted = [number for number in wanted if partitions is None or number in partitions]
        for number in wanted:
            if number not in manifests and not store.catalog.checkpoints(PartitionId(operator, number)):
                lacking(without_checkpoint(PartitionId(operator, number)))
    for number, manifest in sorted(manifests.items()):
        if partitions is not None and number not in partitions:
            continue
        if key is None or not manifest.partitions or partition_of(key, manifest.partitions) == number:
            yield manifest


def without_checkpoint(partition: PartitionId) -> CheckpointMissing:
    return CheckpointMissing(
        "the partition has no checkpoint",
        remedy="take one with `stateflow checkpoint now`, or pass --incomplete to read the other partitions",
        partition=partition,
    )


def _newest(
    store: CheckpointStore,
    operator: str,
    lacking: Callable[[StateflowError], None],
    partitions: Collection[int] | None,
) -> dict[int, Manifest]:
    """Returns the newest manifests by partition. Leaves out a partition if its newest checkpoint cannot be read,
    because an older one would not be of the same time as the checkpoints of the other partitions."""
    listed = store.catalog.checkpoints()
    numbers = {found.partition.partition for found in listed if found.partition.operator == operator}
    if not numbers:
        known = sorted({found.partition.operator for found in listed})
        raise CheckpointMissing(
            f"there is no checkpoint of {operator!r}",
            remedy=f"choose an operator that has checkpoints: {', '.join(known) or 'none has'}",
            url=store.url,
        )
    found = {}
    for number in sorted(numbers if partitions is None else numbers.intersection(partitions)):
        passed_over: list[StateflowError] = []
        manifest = next(store.newest(PartitionId(operator, number), passed_over), None)
        for error in passed_over:
            error.remedy = "run `stateflow checkpoint verify`, or pass --incomplete to read the rest"
            lacking(error)
        if manifest is not None and not passed_over:
            found[number] = manifest
    return found
