"""Quarantine for copies that cannot be served and may be state: they stay there, unused, until a user removes them."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from stateflow.runtime.environment import Environment

log = logging.getLogger(__name__)
OWNED = "OWNED-"


class Evidence:
    """Quarantined copies, in ``<data directory>/evidence/<operator>/<partition>/<copy>-<number>``. The replica never
    removes one, except in ``transfers``: copies that arrived damaged, while their source serves on; a few are kept."""

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
        """Tells whether any copy that belonged to a partition is in quarantine. True where that cannot be read."""
        try:
            return self._folder.is_dir() and any(path != self.transfers for path in self._folder.iterdir())
        except OSError:
            return True  # there may be one

    def of_move(self, move_id: str, *place: str) -> list[Path]:
        """Returns quarantined copies that this move brought, or that a standby brought and this move made owned."""
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
        where a copy was created at an epoch newer than ``epoch``, by its name."""
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
