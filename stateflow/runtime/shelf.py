"""What a replica has: its data directory, the operators it knows, and a slot for every partition.

Two locks per slot: ``work`` is held while the store is written or copied (a batch, a snapshot), ``mutex`` for the
instant of a lifecycle transition, so that a fence never waits for a batch in order to be *heard*. Order: work before
mutex.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from stateflow.clock import Clock
from stateflow.errors import DataDirLocked, InvalidArgument, OperatorNotDeployed, StateMissing
from stateflow.runtime import layout
from stateflow.runtime.host import PartitionHost
from stateflow.runtime.lifecycle import Lifecycle, State
from stateflow.runtime.operator import Operator, load
from stateflow.runtime.transfer import NO_CHANGES, ChangeLog, FileDigests
from stateflow.settings import ReplicaSettings
from stateflow.storage import PartitionStore, RocksEngine
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo


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


class Shelf:
    """Owns a data directory.

    Raises DataDirLocked when another process does, InvalidArgument when it is another replica's.

    Layout: ``LOCK``, ``REPLICA`` (its name), ``operators/<name>/operator.json``, ``…/p00003/<copy>/`` (RocksDB),
    ``snapshots/<id>/`` (hard links that serve a transfer; emptied at start).
    """

    def __init__(self, info: ReplicaInfo, root: Path, settings: ReplicaSettings, clock: Clock) -> None:
        self.info = info
        self.settings = settings
        self.clock = clock
        self.root = root
        self._lock = _lock_directory(root)
        _check_identity(root / "REPLICA", info.name)
        self.engine = RocksEngine(settings.block_cache_bytes, settings.write_buffer_bytes)
        self.digests = FileDigests()
        self._operators: dict[str, tuple[OperatorSpec, type[Operator]]] = {}
        self._learning = threading.Lock()
        self._slots: dict[PartitionId, Slot] = {}
        #: called, from any thread, after each change of a partition's lifecycle
        self.on_change: Callable[[PartitionId], None] = lambda _: None
        self.snapshots = root / "snapshots"
        shutil.rmtree(self.snapshots, ignore_errors=True)
        self.snapshots.mkdir(parents=True)
        self._recover()

    def _recover(self) -> None:
        for spec_file in sorted((self.root / "operators").glob("*/operator.json")):
            spec = _spec_from_json(spec_file.read_text())
            self._operators[spec.name] = spec, load(spec.target)
            for home in sorted(spec_file.parent.glob("p[0-9]*")):
                self._recover_partition(PartitionId(spec.name, int(home.name[1:])), home)

    def _recover_partition(self, partition: PartitionId, home: Path) -> None:
        """Of the copies on disk the newest that is this replica's own counts; the others were transfers cut short."""
        found: list[tuple[layout.Ownership, Path, PartitionStore]] = []
        for directory in sorted(path for path in home.iterdir() if path.is_dir()):
            try:
                store = self.engine.open(directory)
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
        slot = self.slot(partition)
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
            folder = self.root / "operators" / spec.name
            folder.mkdir(parents=True, exist_ok=True)
            _write_durably(folder / "operator.json", json.dumps(_spec_to_json(spec)))
            self._operators[spec.name] = spec, cls

    def operator(self, operator: str) -> tuple[OperatorSpec, type[Operator]]:
        try:
            return self._operators[operator]
        except KeyError:
            raise OperatorNotDeployed(
                f"there is no operator {operator!r} here",
                remedy="deploy it with `stateflow deploy module:Class`",
                replica=self.info.name,
            ) from None

    def slot(self, partition: PartitionId) -> Slot:
        """The slot of a partition; an empty one when nothing of it is here."""
        slot = self._slots.get(partition)
        if slot is None:
            home = self.root / "operators" / partition.operator / f"p{partition.partition:05d}"
            slot = self._slots.setdefault(partition, Slot(partition, Lifecycle(partition), home))
        return slot

    def slots(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    def store(self, slot: Slot) -> PartitionStore:
        """Open, when a release closed it. Raises StateMissing."""
        if slot.store is None:
            if slot.directory is None:
                raise StateMissing("the partition is not here", remedy="ask its owner", partition=slot.id)
            slot.store = self.engine.open(slot.directory)
        return slot.store

    def close(self) -> None:
        for slot in self._slots.values():
            if slot.host is not None:
                slot.host.close()
            if slot.incoming is not None:
                discard(slot.incoming)
            if slot.store is not None:
                slot.store.close()
        self._lock.close()


def discard(incoming: Incoming) -> None:
    if incoming.store is not None:
        incoming.store.close()
    shutil.rmtree(incoming.directory, ignore_errors=True)


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
    return {
        **asdict(spec),
        "key": list(spec.key),
        "output_schema": spec.output_schema.hex(),
        "side_schemas": {tag: schema.hex() for tag, schema in spec.side_schemas},
    }


def _spec_from_json(text: str) -> OperatorSpec:
    fields = json.loads(text)
    fields["key"] = tuple(fields["key"])
    fields["output_schema"] = bytes.fromhex(fields["output_schema"])
    fields["side_schemas"] = tuple((tag, bytes.fromhex(s)) for tag, s in sorted(fields["side_schemas"].items()))
    return OperatorSpec(**fields)
