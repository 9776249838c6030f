"""Data directory of a replica: its identity, the checkpoint store in use, copies of partitions, and the quarantine.

Identity of a data directory: the file ``REPLICA`` in it, JSON ``{"id", "name"}``. ``id`` is made once and never
changes; a copy of the directory has the same id. ``name`` is the name of the replica that serves from the directory.
Earlier versions stored the bare name; such a file is upgraded in place.

Checkpoint store: the file ``CHECKPOINTS``, JSON, notes the store that the replica uses. The replica writes it at the
first use. With the note, the replica does not mistake a missing mount for a new store.

Quarantine: ``evidence/<operator>/<partition>/<copy>-<number>`` holds copies that cannot be served but may contain
state. They stay there, unused, until a user removes them.

Copies: a copy of a partition is a directory with a database, in the home of its partition. A copy arrives by a move or
for a standby, is fetched from a checkpoint, is created empty, or was sealed here before. In each case,
:meth:`Copies.install` makes it the partition while a replica runs. A start installs nothing: it reads the ownership
records in the databases, and restores the state that they describe (:class:`~stateflow.partition.replica.Recovery`).

States of a copy on disk, and what the next start does with it:

===========  ==============================================================  ==========================================
state        on disk                                                         at the next start
===========  ==============================================================  ==========================================
PART         the name ends with ``.part``                                    removed unread
UNFINISHED   a file ``RESTORING``                                            removed, whatever its ownership record says
INCOMING     a file ``INCOMING``, and no record that names this replica      removed: its source has the partition
installed    a record that names this replica, and no file ``RESTORING``     the copy with the newest epoch is the
                                                                             partition, the others are removed
unknown      anything else                                                   quarantined: it may be state
===========  ==============================================================  ==========================================

A copy becomes the partition in one of two ways, which differ in the step that commits it:

* PART → INCOMING → installed: a copy that another replica sends (:meth:`Copies.part`, :meth:`Copies.arrive`). Its
  ownership *record* commits it, so that the pause of a move has one durable write. This requires that the base was
  readable when it was marked, and that no record in it says that this replica owns the partition. An INCOMING copy has
  the source's record. If it was made from this replica's own sealed copy, it has that copy's record (SEALED, at the
  same epoch), and a start chooses the original.
* UNFINISHED → installed: a copy fetched from a checkpoint, which may contain an old record of this replica, or a copy
  created empty, which a start may find unreadable (:meth:`Copies.unfinished`). The *removal of the mark* commits it.
  The record is durable before that, and has no effect until then.

A copy that was sealed here is installed already. Taking it over writes a record at a newer epoch, which commits the
takeover.

Steps of :meth:`Copies.install`, and what a crash or a power loss after each of them leaves:

1. The transition is tried on a copy of the lifecycle. It raises before anything is changed.
2. The ownership record is written and synced. If the copy is INCOMING or was sealed here, it is the partition now. If
   it is UNFINISHED, the former copy is still the partition.
3. The mark UNFINISHED is removed, and the directory synced. This copy is the partition now. If the sync fails, the mark
   is written again; otherwise the former copy would be served while a copy with a newer epoch is on disk.
4. The transition is made, and the local partition points to this copy. Commits that were logged for the former copy are
   void because of their older epoch.
5. The mark INCOMING is removed, and files that interrupted transfers left get a name that ends with ``.part``. A mark
   that remains has no meaning beside this replica's record, and the next start removes it.
6. Later, when no batch or move waits (:meth:`Copies.tidy`), the directory is synced, and the former copy and all
   leftovers are removed.

Invariants:

* A directory and its parents are synced before the change of its name or mark that makes it count as a copy.
* At each point at most one copy is the partition, and that copy is whole.
* A failure before the commit leaves the partition as it was.

Duties of callers:

* They prove the copy: by the digest of its base and the chain of changes, or, for a checkpoint, by its files and its
  sequence (:meth:`Copies.fetch`).
* They hold ``work``, and ``mutex`` if a method requires it.
* They check, with ``mutex`` held, that the command is still valid.
* They report the change of the lifecycle, call :meth:`Copies.tidy`, and discard a copy that was not installed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from stateflow.changes import Mutations
from stateflow.checkpoint import CheckpointStore, Known, Manifest
from stateflow.checkpoint.catalog import ANOTHER
from stateflow.durable import MALFORMED, listed
from stateflow.errors import CheckpointCorrupt, InvalidArgument, StateDamaged, StateMissing, Unavailable
from stateflow.partition import layout
from stateflow.partition.environment import Environment
from stateflow.partition.layout import Commits, read_sequence
from stateflow.partition.lifecycle import SERVED, Lifecycle
from stateflow.partition.local_partition import Incoming, LocalPartition, Restoring
from stateflow.storage import PartitionStore
from stateflow.types import NAME

log = logging.getLogger(__name__)
#: end of the name of a directory that does not hold a whole copy of a partition
PART = ".part"
#: file that marks an incoming copy
INCOMING = "INCOMING"
#: file that marks a copy that is being restored or created
UNFINISHED = "RESTORING"
#: folder beside a partition's copies, with base files of unfinished transfers, which the next transfer does not send
#: again
RECEIVED = "received"
#: end of the name of a directory in that folder, into which a file is fetched from the checkpoint store
STORED = ".stored"

# -- Checkpoint store in use -----------------------------------------------------------------------------------------

NOTE = "CHECKPOINTS"


def remember(environment: Environment, data_dir: Path, store: CheckpointStore) -> None:
    """Checks that ``store`` is the one noted in the file ``CHECKPOINTS``, which is created at the first use of a store.
    Raises InvalidArgument if the file cannot be read."""
    note = data_dir / NOTE

    def keep(known: Known) -> None:
        environment.write_durably(note, json.dumps(asdict(known)))

    store.remember(_read_note(note), keep, note)


def _read_note(note: Path) -> Known | None:
    if not note.exists():
        return None
    try:
        return Known(**json.loads(note.read_text()))
    except MALFORMED as error:
        raise InvalidArgument(
            "the record of the checkpoint store in use cannot be read",
            remedy="check that the store is mounted, then remove the record",
            path=note,
        ) from error


# -- Quarantine ------------------------------------------------------------------------------------------------------

OWNED = "OWNED-"


class Quarantine:
    """Quarantined copies of one data directory. The replica never removes them, except old copies in ``transfers``:
    these arrived damaged while their source still serves, and only a few are kept."""

    def __init__(self, root: Path, environment: Environment) -> None:
        self._root, self._environment = root, environment
        self._folder = root / "evidence"
        self.transfers = self._folder / ".transfers"

    def put_aside(self, path: Path, *place: str) -> Path:
        """Moves a copy into quarantine, durably. Returns its new path."""
        folder = self._at(*place)
        folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while (kept := folder / f"{path.name}-{number}").exists():
            number += 1
        ways = [folder.parent]
        while ways[-1] != self._root:
            ways.append(ways[-1].parent)
        self._environment.sync(ways)  # the folders must be durable before they hold the only copy
        path.rename(kept)
        self._environment.sync([folder, path.parent])
        return kept

    def has(self, *place: str) -> bool:
        folder = self._at(*place)
        return folder.is_dir() and any(True for _ in folder.iterdir())

    @property
    def any(self) -> bool:
        """Tells whether any copy of a partition is in quarantine, apart from the copies in ``transfers``. True if the
        quarantine cannot be read."""
        try:
            return self._folder.is_dir() and any(path != self.transfers for path in self._folder.iterdir())
        except OSError:
            return True  # there may be one

    def of_move(self, move_id: str, *place: str) -> list[Path]:
        """Returns the quarantined copies that arrived by the move ``move_id``, and those that arrived for a standby and
        were then owned by that move."""
        folder, mark = self._at(*place), owned_mark(move_id)
        copies = sorted(folder.iterdir()) if folder.is_dir() else []
        return [
            path
            for path in copies
            if path.name.rsplit("-", 2)[0] == move_id or (path / mark).exists()  # <move>-<copy>-<number>
        ]

    def partitions(self, operator: str) -> list[int]:
        """Returns the partitions with quarantined copies, in order."""
        return sorted(int(home.name[1:]) for home in listed(self._at(operator), "p[0-9][0-9][0-9][0-9][0-9]"))

    def undeployed(self, epoch: int, *place: str) -> None:
        """Renames the quarantine of an undeployed partition, so that the partition can be deployed again. Does nothing
        if a copy's name says that it was created at an epoch newer than ``epoch``."""
        home = self._at(*place)
        if all(_created_at(copy) <= epoch for copy in home.iterdir()):
            home.rename(home.parent / f"{home.name}-undeployed-{epoch}")
            self._environment.sync([home.parent])

    def _at(self, *place: str) -> Path:
        return functools.reduce(lambda folder, name: folder / name, place, self._folder)

    def say(self) -> None:
        """Logs the size of the quarantine, unless it is empty."""
        kept = [file for operator in listed(self._folder) if operator.is_dir() for file in _files(operator)]
        if kept:
            log.warning(
                "quarantine %s holds %d bytes of copies; remove those that are no longer needed",
                self._folder,
                sum(file.stat().st_size for file in kept),
            )


def owned_mark(move_id: str) -> str:
    """Returns the name of the file that marks a standby's copy as owned by a later move."""
    return OWNED + move_id


def _created_at(copy: Path) -> int:
    """Returns the epoch at which a copy was created empty here; 0 for other copies."""
    made, _, rest = copy.name.partition("-")  # created-<epoch>-<number>
    return int(rest.partition("-")[0]) if made == "created" else 0


def _files(directory: Path) -> list[Path]:
    found: list[Path] = []
    for path in directory.iterdir():
        found += _files(path) if path.is_dir() else [path]
    return found


def _size_of(directory: Path) -> int:
    """Returns the bytes of the files in a directory, to which another thread writes; 0 if it is being removed."""
    try:
        return sum(path.stat().st_size for path in directory.iterdir())
    except FileNotFoundError:
        return 0


# -- Identity --------------------------------------------------------------------------------------------------------

FILE = "REPLICA"


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a data directory. ``place``: identifies the machine and the lock file on it; not stored. Two
    processes with the same place cannot both have the directory open. Two processes with the same ``id`` and different
    places use copies of one directory."""

    id: str
    name: str
    place: str = ""


def identify(environment: Environment, root: Path, name: str) -> Identity:
    """Returns the identity of a claimed data directory, made or upgraded if necessary. Raises InvalidArgument.

    A directory without operators may get another name, because a replica that was refused under its first name has no
    state to lose. A directory with operators keeps its name: under another name, its copies would look like unfinished
    transfers.
    """
    file = root / FILE
    place = environment.place(root)
    known = _read(file) if file.exists() else None
    if known is None:
        return _keep(environment, root, Identity(environment.new_id(), name, place))
    if known.name != name:
        if (root / "operators").exists():
            raise InvalidArgument(
                f"the data directory belongs to replica {known.name!r}",
                remedy=f"start the replica with --name {known.name}, or give {name!r} its own --data-dir",
                path=root,
            )
        return _keep(environment, root, Identity(environment.new_id(), name, place))
    if not known.id:
        return _keep(environment, root, Identity(environment.new_id(), name, place))
    return replace(known, place=place)


def _keep(environment: Environment, root: Path, identity: Identity) -> Identity:
    """Writes an identity durably, and returns it."""
    environment.write_durably(root / FILE, json.dumps({"id": identity.id, "name": identity.name}))
    return identity


def _read(file: Path) -> Identity:
    data = file.read_bytes()
    if NAME.holds(text := data.decode(errors="replace")):
        return Identity("", text)
    try:
        fields = json.loads(data)
        return Identity(str(fields["id"]), str(fields["name"]))
    except MALFORMED as error:
        raise InvalidArgument(
            f"the file does not name the replica it belongs to: {text[:40]!r}",
            remedy="write only the replica's name into it, or give the replica another --data-dir",
            path=file,
        ) from error


# -- Copies of partitions --------------------------------------------------------------------------------------------

#: makes a change of a lifecycle, or raises and changes nothing
Transition = Callable[[Lifecycle], object]
Entries = Iterable[tuple[bytes, bytes]]


@dataclass(slots=True)
class Copy:
    """A proved copy that is to be installed.

    Attributes:
        transition: changes the lifecycle, or raises.
        also: entries that are written with the ownership record.
        recorded: whether the record is durable already.
    """

    directory: Path
    store: PartitionStore
    transition: Transition
    also: list[tuple[bytes, bytes]] = field(default_factory=list)
    recorded: bool = False


class Copies:
    """Copies of the partitions in one data directory. Methods for one partition are called one at a time.

    Args:
        reserve_bytes: disk space that a restore leaves free.
    """

    def __init__(self, replica: str, environment: Environment, commits: Commits, reserve_bytes: int) -> None:
        self._replica, self._environment, self._commits = replica, environment, commits
        self._reserve_bytes = reserve_bytes
        self._mutex = environment.mutex()
        self._fetched: dict[Path, Manifest] = {}  # checkpoints that are being fetched, by directory

    # -- on the way ---------------------------------------------------------------------------------------

    def part(self, local: LocalPartition, name: str) -> Path:
        """Creates the directory of a copy in state PART. The copy's files arrive there one by one, and its database is
        not opened in this state."""
        directory = local.home / f"{_numbered(local, name)}{PART}"
        self._environment.remove_tree(directory)
        directory.mkdir(parents=True)
        return directory

    def sync(self, directory: Path) -> None:
        """Makes the files of a copy durable, which may take long. The database is not open."""
        self._environment.sync([*(path for path in directory.iterdir() if path.is_file()), directory])

    def arrive(self, directory: Path) -> Path:
        """Turns a copy in state PART into an INCOMING copy. All its files are present, proved and synced by then.
        Returns its new path."""
        (directory / INCOMING).write_bytes(b"")
        self._environment.sync([directory])  # otherwise a power loss might leave the name without the mark
        arrived = directory.rename(directory.parent / directory.name.removesuffix(PART))
        self._environment.sync([arrived.parent, arrived.parent.parent])
        return arrived

    def adopt(self, local: LocalPartition, by: str) -> None:
        """Lets ``by``, a takeover or another move, install the copy that arrived for a standby. The standby's transfer
        applies nothing more to it. Callers hold ``mutex``. Raises MoveAborted.

        A mark beside the database records this; it remains readable even if the copy is damaged. It is written first,
        so that an attempt that found the disk full can be repeated. :meth:`tidy` makes it durable.
        """
        incoming = local.incoming
        assert incoming is not None
        if incoming.move_id != by:
            replace(local.lifecycle).adopt(incoming.move_id, by)  # refuses a move that was cancelled
            (incoming.directory / owned_mark(by)).write_bytes(b"")
            local.lifecycle.adopt(incoming.move_id, by)
            incoming.move_id = by

    @contextmanager
    def unfinished(self, local: LocalPartition, name: str) -> Iterator[Path]:
        """Creates the directory of a copy in state UNFINISHED, durably. The caller may open the copy there. If the
        caller raises before the copy is installed, the directory is removed."""
        directory, mark = local.home / name, local.home / name / UNFINISHED
        if directory.exists() and (mark.exists() or not any(directory.iterdir())):  # the rest of an attempt that failed
            self.remove(directory)
        directory.mkdir(parents=True)
        mark.write_bytes(b"")
        self._environment.sync([directory, local.home, local.home.parent])
        try:
            yield directory
        except BaseException:
            if mark.exists():
                self.remove(directory)
            raise

    def fetch(
        self, local: LocalPartition, name: str, manifest: Manifest, source: CheckpointStore, own: CheckpointStore | None
    ) -> Restoring:
        """Fetches a checkpoint as a copy in state UNFINISHED, verifies it and opens it.

        Args:
            own: store that adopts the checkpoint; None: no store does.

        Raises CheckpointCorrupt, and the errors of the disk and the stores.
        """
        with self.unfinished(local, _numbered(local, name)) as directory, contextlib.ExitStack() as undo:
            with self._room(manifest, directory):
                source.restore(manifest, directory, durable=True)
            self._environment.sync([directory])
            # before it is opened, which changes files
            adoption = None if own is None else undo.enter_context(own.adopt(manifest, directory))
            store = self._open(manifest, directory)
            undo.pop_all()
        return Restoring(name, directory, store, manifest, manifest.epoch, adoption, self._environment.mutex())

    @contextmanager
    def _room(self, manifest: Manifest, directory: Path) -> Iterator[None]:
        """Checks that a checkpoint fits on the disk, besides the reserve and what other restores have yet to fetch. Its
        room is taken until the context ends. Raises Unavailable."""
        with self._mutex:
            coming = sum(max(0, each.size - _size_of(path)) for path, each in self._fetched.items())
            free = self._environment.free_bytes(directory)
            if manifest.size + self._reserve_bytes + coming > free:
                raise Unavailable(
                    f"the checkpoint has {manifest.size} bytes, {free} are free",
                    remedy="free space there and try again",
                    path=directory,
                    partition=manifest.id,
                    reserve=self._reserve_bytes,
                    other_restores=coming or None,
                )
            self._fetched[directory] = manifest
        try:
            yield
        finally:
            with self._mutex:
                del self._fetched[directory]

    def _open(self, manifest: Manifest, directory: Path) -> PartitionStore:
        """Opens a copy, and checks that it is at its manifest's sequence. Raises CheckpointCorrupt."""
        try:
            store = self._environment.open(directory)
        except (StateMissing, StateDamaged) as error:
            raise CheckpointCorrupt(
                f"the files are not a database: {error}", remedy=ANOTHER, partition=manifest.id
            ) from error
        sequence = read_sequence(store)
        if sequence != manifest.sequence:
            store.close()
            raise CheckpointCorrupt(
                f"the database is at sequence {sequence}, the manifest says {manifest.sequence}",
                remedy=ANOTHER,
                partition=manifest.id,
            )
        return store

    # -- installing ---------------------------------------------------------------------------------------

    def record(self, lifecycle: Lifecycle, store: PartitionStore, transition: Transition, also: Entries = ()) -> None:
        """Writes the ownership record for the lifecycle after a transition, durably; ``lifecycle`` itself stays
        unchanged. Raises the errors of the transition and of the disk."""
        after = replace(lifecycle, running=False)  # a running batch will have ended
        transition(after)
        to = after.successor
        target = () if to is None else (to.name, to.site, to.address)
        ownership = layout.Ownership(self._replica, after.state, after.epoch, after.move_id, *target)
        store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode()), *also]), sync=True)

    def record_ahead(self, local: LocalPartition, copy: Copy) -> None:
        """Writes the ownership record of a copy before :meth:`install`, for callers that do not hold ``mutex`` yet.
        These are steps 1 and 2 of an installation."""
        self.record(local.lifecycle, copy.store, copy.transition, copy.also)
        copy.recorded = True

    def publish(self, local: LocalPartition, restoring: Restoring, copy: Copy, epoch: int) -> None:
        """Publishes a fetched checkpoint as the new owner's first one, so that no checkpoint of an earlier epoch can
        become the newest. Raises StaleCheckpoint if a later owner has already published one.

        The ownership record is made durable first; it has no effect while the copy is UNFINISHED. If that fails because
        the disk is full, the present owner continues at its epoch. If the newer epoch were published already, that
        owner could never publish a checkpoint again.
        """
        self.record_ahead(local, copy)
        if restoring.adoption is not None:
            restoring.adoption.publish(epoch, self._replica)

    def install(self, local: LocalPartition, copy: Copy) -> list[Path]:
        """Makes ``copy`` the partition, durably, in place of the former copy. Callers hold ``work`` and ``mutex``.

        Returns the leftovers for :meth:`tidy`. Raises the errors of the transition and of the disk; the partition is
        then as it was.
        """
        copy.transition(replace(local.lifecycle))
        if not copy.recorded:
            self.record_ahead(local, copy)
        self._finish(copy.directory)
        was_served = local.lifecycle.state in SERVED
        copy.transition(local.lifecycle)
        processor, store, incoming, former = local.processor, local.store, local.incoming, local.directory
        local.directory, local.store = copy.directory, copy.store
        local.processor = local.incoming = local.kept = local.since = local.lost = local.unkept = None
        local.seal_unsure = False
        if local.restoring is not None and local.restoring.directory == copy.directory:
            local.restoring = None
        if was_served:
            self._commits.left(local.id)
        if processor is not None:
            processor.let_go(self._environment.aside)
        if store is not None and store is not copy.store:
            store.close()
        with contextlib.suppress(OSError):
            (copy.directory / INCOMING).unlink()
        leftovers = [] if former in (None, copy.directory) else [former]
        if incoming is not None and incoming.directory != copy.directory:
            if incoming.store is not None:
                incoming.store.close()
            leftovers.append(incoming.directory)
        if (received := local.home / RECEIVED).exists():
            with contextlib.suppress(OSError):  # the next transfer looks through it
                leftovers.append(received.rename(local.home / f"{copy.directory.name}-{RECEIVED}{PART}"))
        return leftovers

    def _finish(self, directory: Path) -> None:
        mark = directory / UNFINISHED
        if not mark.exists():
            return
        mark.unlink()
        try:
            self._environment.sync([directory])
        except OSError:
            mark.write_bytes(b"")  # the former copy stays the partition
            raise

    def tidy(self, local: LocalPartition, leftovers: Iterable[Path]) -> None:
        """Makes the marks of an installed copy durable, and removes leftovers. No batch or move waits for this."""
        if local.directory is not None:
            with contextlib.suppress(FileNotFoundError):  # the copy was replaced or removed by then
                self._environment.sync([local.directory])  # makes durable which marks it has
        for directory in leftovers:
            self.remove(directory)

    def recovered(self, directory: Path) -> None:
        """Removes the mark INCOMING of a copy that was installed before this process started. If the copy were
        quarantined with the mark, it would seem that it was never served."""
        if self.is_incoming(directory):
            with contextlib.suppress(OSError):
                (directory / INCOMING).unlink()
                self._environment.sync([directory])

    @staticmethod
    def is_incoming(directory: Path) -> bool:
        return (directory / INCOMING).exists()

    # -- giving up ----------------------------------------------------------------------------------------

    def discard(self, copy: Incoming | Restoring) -> None:
        """Closes and removes a copy that is not installed."""
        if copy.store is not None:
            copy.store.close()
        self.remove(copy.directory)

    def remove(self, directory: Path) -> None:
        """Removes a copy of a partition. Renames it first: the next start would otherwise try to open a half removed
        copy."""
        if not directory.name.endswith(PART) and directory.exists():
            directory = directory.rename(directory.parent / (directory.name + PART))
            self._environment.sync([directory.parent])
        self._environment.remove_tree(directory)


def _numbered(local: LocalPartition, name: str) -> str:
    """Returns a name that no copy of the partition has yet, because an existing copy may be the partition."""
    while True:
        local.snapshots += 1
        numbered = f"{name}-{local.snapshots}"
        if not (local.home / numbered).exists():
            return numbered
