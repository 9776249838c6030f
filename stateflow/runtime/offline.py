"""Checkpoints without a cluster: prove them, read their states."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stateflow.checkpoint import CheckpointStore, Manifest
from stateflow.checkpoint.proof import state_digest
from stateflow.errors import CheckpointCorrupt, CheckpointMissing, OperatorNotImportable, StateflowError
from stateflow.partitioner import partition_of
from stateflow.runtime import layout
from stateflow.runtime.checkpointing import NOT_STATE
from stateflow.runtime.host import read_sequence
from stateflow.runtime.operator import Operator, load
from stateflow.runtime.reading import declaration_of, entries_of, scan_pages
from stateflow.state import check_schema, declarations_of, encode_row_key, scan_state
from stateflow.storage import RocksEngine, RocksStore
from stateflow.types import PartitionId

_CACHE_BYTES = 32 << 20


@dataclass(slots=True)
class Verified:
    """What a checkpoint was found to be.

    ``proved``: its state digest was recomputed and is the manifest's; False when that has none. ``entries``: of the
    declared states, decoded; None when the operator's class cannot be loaded here. ``damaged``: blobs.
    """

    operator: str
    partition: int
    epoch: int
    sequence: int
    bytes: int
    proved: bool = False
    entries: int | None = None
    damaged: list[str] = field(default_factory=list)
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(store: CheckpointStore, manifest: Manifest) -> Verified:
    """Read every blob, open the database, compare positions and state digest, decode every entry.

    What is wrong is in the answer; it raises only what the store raises, and WrongKey.
    """
    found = Verified(manifest.operator, manifest.partition, manifest.epoch, manifest.sequence, manifest.size)
    with tempfile.TemporaryDirectory(prefix="stateflow-verify-") as folder:
        directory = Path(folder) / "files"
        directory.mkdir()
        for file in manifest.files:
            try:
                store.fetch(manifest, file, directory / file.name)
            except CheckpointCorrupt as error:
                found.damaged.append(file.blob)
                found.error = str(error)
        if found.damaged:
            return found
        try:
            _verify_state(directory, manifest, found)
        except StateflowError as error:
            found.error = str(error)
    return found


def _verify_state(directory: Path, manifest: Manifest, found: Verified) -> None:
    with _opened(directory, manifest) as db:
        positions = {
            key[len(layout.POSITION) :].decode(): layout.Position.decode(value).batch
            for key, value in db.scan(layout.POSITION)
        }
        if (read_sequence(db), positions) != (manifest.sequence, manifest.positions):
            raise CheckpointCorrupt(
                f"it is at sequence {read_sequence(db)} and {positions}, its manifest says {manifest.sequence} and "
                f"{manifest.positions}",
                remedy="restore an older checkpoint",
                partition=manifest.id,
            )
        if manifest.state_digest:
            if state_digest(db.scan(b""), NOT_STATE) != manifest.state_digest:
                raise CheckpointCorrupt(
                    "its state is not the one that was digested when it was taken",
                    remedy="restore an older checkpoint",
                    partition=manifest.id,
                )
            found.proved = True
        try:
            cls = load(manifest.target)
        except OperatorNotImportable:
            return
        check_schema(manifest.schema, [each.describe() for each in declarations_of(cls).values()], manifest.operator)
        found.entries = sum(1 for each in declarations_of(cls).values() for _ in scan_state(each, db))


@contextmanager
def _opened(directory: Path, manifest: Manifest) -> Iterator[RocksStore]:
    try:
        db = RocksEngine(_CACHE_BYTES, _CACHE_BYTES).open(directory)
    except Exception as error:
        raise CheckpointCorrupt(
            f"its files are no database: {error}", remedy="restore an older checkpoint", partition=manifest.id
        ) from error
    try:
        yield db
    finally:
        db.close()


def read_checkpoint(
    store: CheckpointStore,
    operator: str,
    state: str,
    *,
    savepoint: str = "",
    key: Any = None,
    cls: type[Operator] | None = None,
) -> Iterator[bytes]:
    """Entries of one state as Arrow IPC streams: columns key, map_key, value, partition. No cluster is needed.

    Args:
        savepoint: its name; the newest checkpoint of each partition by default.
        key: of this key only.
        cls: the operator's class, when it is not where the checkpoint says.

    Raises CheckpointMissing, CheckpointCorrupt, UnknownState, OperatorNotImportable.
    """
    for manifest in _manifests(store, operator, savepoint):
        if key is not None and manifest.partitions and partition_of(key, manifest.partitions) != manifest.partition:
            continue
        declaration = declaration_of(cls or load(manifest.target), state, operator)
        check_schema(manifest.schema, [declaration.describe()], operator)
        with tempfile.TemporaryDirectory(prefix="stateflow-read-") as folder:
            store.restore(manifest, Path(folder) / "files")
            with _opened(Path(folder) / "files", manifest) as db:
                entries = entries_of(declaration, db, [] if key is None else [encode_row_key(key)])
                while pages := scan_pages(entries, manifest.partition):
                    yield from pages


def _manifests(store: CheckpointStore, operator: str, savepoint: str) -> Iterator[Manifest]:
    if savepoint:
        yield from store.savepoint(savepoint, operator)
        return
    numbers = {
        found.partition.partition for found in store.catalog.checkpoints() if found.partition.operator == operator
    }
    if not numbers:
        known = sorted({found.partition.operator for found in store.catalog.checkpoints()})
        raise CheckpointMissing(
            f"there is no checkpoint of {operator!r}",
            remedy=f"there are checkpoints of {', '.join(known) or 'nothing'}",
            url=store.url,
        )
    for number in sorted(numbers):
        manifest = next(store.newest(PartitionId(operator, number)), None)
        if manifest is None:
            raise CheckpointMissing(
                "no checkpoint of the partition can be read",
                remedy="see `stateflow checkpoint verify`",
                partition=PartitionId(operator, number),
            )
        yield manifest
