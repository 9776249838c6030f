"""Data directory of a replica: its identity, the checkpoint store that its replica uses, and its quarantine.

Identity of a data directory: the file ``REPLICA`` in it, JSON ``{"id", "name"}``.

``id`` is made once and never changes; a copy of the directory has the same id. ``name`` is the name of the replica that
serves from the directory. Earlier versions stored the bare name; such a file is upgraded in place.

Checkpoint store: the file ``CHECKPOINTS``, JSON, notes the store that the replica uses. The replica writes it at the
first use. With the note, the replica does not mistake a missing mount for a new store.

Quarantine: ``evidence/<operator>/<partition>/<copy>-<number>`` holds copies that cannot be served but may contain
state. They stay there, unused, until a user removes them.
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stateflow.checkpoint import CheckpointStore, Known
from stateflow.errors import InvalidArgument
from stateflow.partition.environment import Environment
from stateflow.types import NAME

log = logging.getLogger(__name__)

# -- Checkpoint store in use -----------------------------------------------------------------------------------------

NOTE = "CHECKPOINTS"


def remember(environment: Environment, data_dir: Path, store: CheckpointStore) -> None:
    """Checks that ``store`` is the noted one, or notes it. Raises InvalidArgument for a note that cannot be read."""
    note = data_dir / NOTE

    def keep(known: Known) -> None:
        environment.write_durably(note, json.dumps(asdict(known)))

    store.remember(_read_note(note), keep, note)


def _read_note(note: Path) -> Known | None:
    if not note.exists():
        return None
    try:
        return Known(**json.loads(note.read_text()))
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            "the record of the checkpoint store in use cannot be read",
            remedy="check that the store is mounted, then remove the record",
            path=note,
        ) from error


# -- Quarantine ------------------------------------------------------------------------------------------------------

OWNED = "OWNED-"


class Quarantine:
    """Quarantined copies of one data directory. The replica never removes one, except copies in ``transfers``, which
    arrived damaged while their source goes on serving; it keeps only a few of these."""

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
        self._environment.sync(ways)  # before they hold the only copy of anything
        path.rename(kept)
        self._environment.sync([folder, path.parent])
        return kept

    def has(self, *place: str) -> bool:
        folder = self._at(*place)
        return folder.is_dir() and any(True for _ in folder.iterdir())

    @property
    def any(self) -> bool:
        """Tells whether any copy of a partition is in quarantine. True if the quarantine cannot be read."""
        try:
            return self._folder.is_dir() and any(path != self.transfers for path in self._folder.iterdir())
        except OSError:
            return True  # there may be one

    def of_move(self, move_id: str, *place: str) -> list[Path]:
        """Returns quarantined copies that this move brought, or that a standby brought and this move came to own."""
        folder, mark = self._at(*place), owned_mark(move_id)
        copies = sorted(folder.iterdir()) if folder.is_dir() else []
        return [
            path
            for path in copies
            if path.name.rsplit("-", 2)[0] == move_id or (path / mark).exists()  # <move>-<copy>-<number>
        ]

    def partitions(self, operator: str) -> list[int]:
        """Returns the partitions with quarantined copies, in order."""
        return sorted(int(home.name[1:]) for home in self._at(operator).glob("p[0-9][0-9][0-9][0-9][0-9]"))

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
        """Logs the size of the quarantine in one line; nothing if it is empty."""
        kept = [file for operator in self._folder.glob("*") if operator.is_dir() for file in _files(operator)]
        if kept:
            log.warning(
                "%s holds %d bytes of quarantined copies; remove them once nobody needs them",
                self._folder,
                sum(file.stat().st_size for file in kept),
            )


def owned_mark(move_id: str) -> str:
    """Returns the name of the file that marks a standby's copy as owned by a later move."""
    return OWNED + move_id


def _created_at(copy: Path) -> int:
    """Returns the epoch of a copy that was created empty here; 0 for others."""
    made, _, rest = copy.name.partition("-")  # created-<epoch>-<number>
    return int(rest.partition("-")[0]) if made == "created" else 0


def _files(directory: Path) -> list[Path]:
    found: list[Path] = []
    for path in directory.iterdir():
        found += _files(path) if path.is_dir() else [path]
    return found


# -- Identity --------------------------------------------------------------------------------------------------------

FILE = "REPLICA"


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a data directory. ``place``: the machine and the lock file on it; not stored. Two processes with the
    same place cannot both have the directory open; two processes with one ``id`` and different places have copies of
    it."""

    id: str
    name: str
    place: str = ""


def identify(environment: Environment, root: Path, name: str) -> Identity:
    """Returns the identity of a claimed data directory, made or upgraded if necessary. Raises InvalidArgument.

    A directory without operators may get another name: a replica that was refused under its first name has nothing to
    lose. If the directory had state, it would look like unfinished transfers under another name.
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
                remedy=f"start it with --name {known.name}, or give {name!r} its own --data-dir",
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
    text = file.read_text()
    if NAME.holds(text):
        return Identity("", text)
    try:
        fields = json.loads(text)
        return Identity(str(fields["id"]), str(fields["name"]))
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidArgument(
            f"the file does not name the replica it belongs to: {text[:40]!r}",
            remedy="write only the replica's name into it, or give the replica another --data-dir",
            path=file,
        ) from error
