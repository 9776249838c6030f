"""Identity of a store: a marker with an id, created once.

The marker tells a store from the empty directory under its mount point, and two spellings of one place from two places.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from stateflow.checkpoint.objects import Objects
from stateflow.errors import CheckpointCorrupt, CheckpointNewer, CheckpointStoreMissing

MARKER: Final = "STORE"
FORMAT: Final = 1
_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Known:
    """A store that was used before: its place and its id."""

    place: str
    id: str


def read_marker(objects: Objects) -> str | None:
    """Returns the store's id; None: there is no marker. Raises CheckpointCorrupt, CheckpointNewer."""
    try:
        data = objects.read(MARKER)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        marker = json.loads(data)
        id_, format_ = marker["id"], marker["format"]
        sound = isinstance(format_, int) and isinstance(id_, str) and _ID.fullmatch(id_) is not None
        sound = sound and marker["checksum"] == _checksum(id_, format_)
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise CheckpointCorrupt(
            "the marker of the checkpoint store cannot be read",
            remedy="restore it from a copy; if there is none, remove it and run `stateflow checkpoint init`",
            url=objects.url,
            object=MARKER,
        )
    if format_ > FORMAT:
        raise CheckpointNewer(
            f"the checkpoint store has format {format_}, this program supports up to {FORMAT}",
            remedy="run the stateflow version that created it, or a newer one",
            url=objects.url,
        )
    return str(id_)


def make_marker(objects: Objects) -> str:
    """Creates the marker of a new store and returns its id. Where two processes do so at once, both get the id of the
    first."""
    try:
        id_ = uuid.uuid4().hex
        objects.create(MARKER, json.dumps({"format": FORMAT, "id": id_, "checksum": _checksum(id_, FORMAT)}).encode())
    except FileExistsError:
        pass
    made = read_marker(objects)
    if made is None:
        raise missing(objects.url)
    return made


def _checksum(id_: str, format_: int) -> str:
    """Checksum of a marker, so that a damaged one is not taken for another store's."""
    digest: str = xxhash.xxh3_64_hexdigest(f"{format_} {id_}".encode())
    return digest


def missing(url: str) -> CheckpointStoreMissing:
    return CheckpointStoreMissing(
        "no checkpoint store there: its marker is missing, and nothing was written",
        remedy=f"check that it is mounted; for a new store run `stateflow checkpoint init --checkpoints {url}`",
        url=url,
    )


def another(url: str, found: str, known: str, note: Path | None) -> CheckpointStoreMissing:
    return CheckpointStoreMissing(
        "the checkpoint store is not the one used before",
        remedy="mount the right one"
        + (f"; to continue with this one, remove {note}" if note is not None else ", or restart to use this one"),
        url=url,
        found=found,
        known=known,
    )
