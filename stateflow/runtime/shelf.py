"""What a replica has: its data directory, the operators it knows, and a slot for every partition.

Two locks per slot: ``work`` is held while the store is written or copied (a batch, a snapshot), ``mutex`` for the
instant of a lifecycle transition, so that a fence never waits for a batch in order to be *heard*. Order: work before
mutex.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stateflow.checkpoint import CheckpointStore, Manifest
from stateflow.clock import Clock
from stateflow.errors import InvalidArgument, OperatorNotDeployed, OperatorOutdated, StateMissing
from stateflow.runtime import layout
from stateflow.runtime.host import PartitionHost, read_sequence
from stateflow.runtime.lifecycle import Lifecycle, State
from stateflow.runtime.machine import Machine
from stateflow.runtime.operator import Operator, describe, load
from stateflow.runtime.rhythm import Rhythm
from stateflow.runtime.rows import get_ready
from stateflow.runtime.transfer import NO_CHANGES, ChangeLog, FileDigests, Kept
from stateflow.settings import ReplicaSettings
from stateflow.storage import PartitionStore
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

#: in the directory of a copy that is being restored and must not be taken for one that is owned
RESTORING = "RESTORING"
#: end of the name of a directory that does not hold a whole copy of a partition; removed at start
PART = ".part"
#: beside a partition's copies: base files of unfinished transfers, so that the next one need not send them again
RECEIVED = "received"


@dataclass(slots=True)
class Slot:
    """One partition as it is here. ``directory`` holds ``store``; ``incoming`` a copy that is being built."""

    id: PartitionId
    lifecycle: Lifecycle
    home: Path
    work: AbstractContextManager[Any]
    mutex: AbstractContextManager[Any]
    directory: Path | None = None
    store: PartitionStore | None = None
    host: PartitionHost | None = None
    incoming: Incoming | None = None
    logs: dict[str, ChangeLog] = field(default_factory=dict)  # by move
    snapshots: int = 0
    restoring: Restoring | None = None
    checkpointed: tuple[str, int, int] = ("", 0, 0)  # store, epoch and sequence of the last checkpoint
    rhythm: Rhythm = field(default_factory=Rhythm)
    kept: Kept | None = None  # what ``directory`` is, once it was sealed for a move
    since: Since | None = None  # it moved in, and might move back

    def replace(self, directory: Path, store: PartitionStore) -> Path | None:
        """Another copy is the partition from now on. Returns where the former one is. Called with ``mutex`` held."""
        former, self.directory, self.store = self.directory, directory, store
        self.kept = self.since = None
        return former if former != directory else None


@dataclass(frozen=True, slots=True)
class Since:
    """Every change set since a partition moved in. ``digest``: of the seal it moved in with."""

    kept: Kept
    digest: str
    changes: ChangeLog


@dataclass(slots=True)
class Incoming:
    """A partition on its way in. ``changes`` chains the change sets applied on the base so far."""

    move_id: str
    directory: Path
    sequence: int = -1
    base: str = ""  # digest
    changes: bytes = NO_CHANGES
    store: PartitionStore | None = None


@dataclass(frozen=True, slots=True)
class Restoring:
    """A checkpoint that was fetched and proved. ``fence``: the store where owning it must be published first."""

    id: str
    directory: Path
    store: PartitionStore
    manifest: Manifest
    epoch_min: int
    fence: CheckpointStore | None


class Shelf:
    """Owns a data directory.

    Raises DataDirLocked when another process does, InvalidArgument when it is another replica's.

    Layout: ``LOCK``, ``REPLICA`` (its name), ``operators/<name>/operator.json``, ``…/p00003/<copy>/`` (RocksDB;
    ``<copy>.part/`` while it is not whole), ``snapshots/<id>/`` (hard links that serve a transfer; emptied at start).
    """

    def __init__(
        self, info: ReplicaInfo, root: Path, settings: ReplicaSettings, clock: Clock, machine: Machine | None = None
    ) -> None:
        self.info = info
        self.settings = settings
        self.clock = clock
        self.root = root
        self.machine = machine or Machine(settings)
        self._claim = self.machine.claim(root)
        self._check_identity(root / "REPLICA")
        self.digests = FileDigests()
        self._operators: dict[str, tuple[OperatorSpec, type[Operator]]] = {}
        self._learning = self.machine.mutex()
        self._slots: dict[PartitionId, Slot] = {}
        #: called, from any thread, after each change of a partition's lifecycle
        self.on_change: Callable[[PartitionId], None] = lambda _: None
        self.served_at = -math.inf  # when a batch was last in hand, monotonic
        self.snapshots = root / "snapshots"
        self.machine.remove_tree(self.snapshots)
        self.snapshots.mkdir(parents=True)
        self._recover()

    def _recover(self) -> None:
        for spec_file in sorted((self.root / "operators").glob("*/operator.json")):
            # what is seen here may not be durable yet: the process may have been killed before it saw to that
            self.machine.sync([spec_file.parent, spec_file.parent.parent, self.root])
            spec = _spec_from_json(spec_file.read_text())
            self._operators[spec.name] = spec, load(spec.target)
            get_ready()
            for home in sorted(spec_file.parent.glob("p[0-9]*")):
                rests = list(home.glob("*" + PART))
                if rests:
                    self.machine.sync([home])  # else a half removed one may come back under the name of a whole one
                for rest in rests:
                    self.machine.remove_tree(rest)
                self._recover_partition(PartitionId(spec.name, int(home.name[1:])), home)

    def _recover_partition(self, partition: PartitionId, home: Path) -> None:
        """Of the copies on disk the newest that is this replica's own counts; the others were transfers cut short."""
        found: list[tuple[layout.Ownership, Path, PartitionStore]] = []
        for directory in sorted(path for path in home.iterdir() if path.is_dir() and path.name != RECEIVED):
            if (directory / RESTORING).exists():
                self.remove(directory)
                continue
            try:
                store = self.machine.open(directory)
            except StateMissing:
                self.remove(directory)
                continue
            record = store.get(layout.OWNERSHIP)
            ownership = layout.Ownership.decode(record) if record else None
            if ownership is None or ownership.replica != self.info.name:
                store.close()
                self.remove(directory)
                continue
            found.append((ownership, directory, store))
        if not found:
            return
        found.sort(key=lambda copy: copy[0].epoch)
        *older, (ownership, directory, newest) = found
        for _, superseded, old in older:
            old.close()
            self.remove(superseded)
        slot = self.slot(partition)
        successor = ReplicaInfo(ownership.target, ownership.target_site, ownership.target_address)
        slot.lifecycle.recover(
            State(ownership.state),
            ownership.epoch,
            ownership.move_id,
            successor if ownership.state == State.SEALED else None,
        )
        slot.replace(directory, newest)
        if ownership.state == State.SEALED and ownership.move_id:
            slot.kept = Kept(ownership.move_id, ownership.epoch, read_sequence(newest))

    def learn(self, spec: OperatorSpec) -> None:
        """Know an operator: load its code and keep its description. Raises OperatorNotImportable, OperatorOutdated."""
        with self._learning:
            known = self._operators.get(spec.name)
            if known is not None and known[0] == spec:
                return
            cls = load(spec.target)
            _check_version(spec, cls)
            get_ready()
            folder = self.root / "operators" / spec.name
            folder.mkdir(parents=True, exist_ok=True)
            self.machine.write_durably(folder / "operator.json", json.dumps(_spec_to_json(spec)))
            self.machine.sync([folder.parent, self.root])  # a file is only as durable as the way to it
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
            slot = Slot(partition, Lifecycle(partition), home, self.machine.mutex(), self.machine.mutex())
            slot = self._slots.setdefault(partition, slot)
        return slot

    def slots(self) -> Iterator[Slot]:
        return iter(list(self._slots.values()))

    def store(self, slot: Slot) -> PartitionStore:
        """Open, when a release closed it. Raises StateMissing."""
        if slot.store is None:
            if slot.directory is None:
                raise StateMissing("the partition is not here", remedy="ask its owner", partition=slot.id)
            slot.store = self.machine.open(slot.directory)
        return slot.store

    def settle(self, store: PartitionStore) -> float:
        """Force it to disk, however long that takes: milliseconds."""
        began = self.clock.monotonic()
        store.sync()
        return (self.clock.monotonic() - began) * 1e3

    def drop_log(self, slot: Slot, move_id: str) -> None:
        """Let go of a follower's log and its snapshot. Called with ``mutex`` held."""
        changes = slot.logs.pop(move_id, None)
        if changes is not None:
            changes.close()
            self.machine.remove_tree(self.snapshots / changes.snapshot_id)

    def close(self) -> None:
        for slot in self._slots.values():
            if slot.host is not None:
                slot.host.close()
            if slot.incoming is not None:
                self.discard(slot.incoming)
            if slot.restoring is not None:
                slot.restoring.store.close()
                self.remove(slot.restoring.directory)
            if slot.store is not None:
                slot.store.close()
        self._claim.close()

    def discard(self, incoming: Incoming) -> None:
        if incoming.store is not None:
            incoming.store.close()
        self.remove(incoming.directory)

    def remove(self, directory: Path) -> None:
        """A copy of a partition. Renamed first: half removed, it would be opened at the next start, in vain."""
        if not directory.name.endswith(PART) and directory.exists():
            directory = directory.rename(directory.parent / (directory.name + PART))
            self.machine.sync([directory.parent])
        self.machine.remove_tree(directory)

    def _check_identity(self, file: Path) -> None:
        """State says which replica it belongs to: under another name it would be taken for unfinished transfers."""
        if not file.exists():
            self.machine.write_durably(file, self.info.name)
        elif (known := file.read_text()) != self.info.name:
            raise InvalidArgument(
                f"the data directory belongs to replica {known!r}",
                remedy=f"start it with --name {known}, or give {self.info.name!r} its own --data-dir",
                path=file.parent,
            )


def _check_version(spec: OperatorSpec, cls: type[Operator]) -> None:
    """Newer code may have more states than what is deployed; with fewer of them it would lose some."""
    here = describe(cls, spec.partitions, spec.name)
    differs = [name for name in ("key", "output_schema") if getattr(here, name) != getattr(spec, name)]
    have = {each["name"] for each in json.loads(here.state_schema)}
    differs += [f"state {each['name']}" for each in json.loads(spec.state_schema) if each["name"] not in have]
    if differs:
        raise OperatorOutdated(
            "the operator's code here is another version than the one that is deployed",
            remedy="install that version on this replica and start it again, or deploy the version that is here",
            operator=spec.name,
            target=spec.target,
            differs=", ".join(differs),
        )


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
