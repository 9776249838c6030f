"""Contents of a store: its marker, manifests by partition, savepoints, blobs, and marks that make collecting safe.

=========================================================  ===================================================
``blobs/<2>/<digest>[.zst][.<key id>][.g<generation>]``     content, named by the xxh3_128 of its plain form
``manifests/<operator>/p00003/<epoch>-<sequence>.json``     checkpoints; published last, never changed
``savepoints/<name>/<operator>/p00003.json``                manifests that are kept until deleted
``STORE``                                                   the marker: which store this is
``intents/<id>.json``                                       digests that an upload, a restore or a reader relies on
``condemned/<id>.json``                                     blobs a collection under way may delete
``tmp/``                                                    of a local directory: files being written
=========================================================  ===================================================

The marker has an id and is created once. It distinguishes a store from the empty directory under its mount point, and
two stores from two spellings of one URL.

A *hold*, an object in ``intents/``, tells collections which digests a process relies on. The process writes it before
it reads or uploads them. The protocol needs no locks and no correct clock:

1. a process that relies on blobs writes a hold, *then* reads which blobs are condemned;
2. a collection condemns blobs, *then* reads the holds. Whichever comes later sees the other: the process stores a
   condemned blob again under another name, or the collection spares a held one;
3. a hold that is a day old, by the clock of the store, belongs to a process that died. A collection *removes* it before
   it reads the manifests for the last time;
4. a process that published something looks *afterwards* whether its hold stands. If it does, a collection can remove
   the hold only later, and then reads what was published. If not, a collection took the process for dead, and the
   process starts over.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from stateflow.checkpoint.backend import TEMPORARY, Objects
from stateflow.checkpoint.codec import Codec
from stateflow.checkpoint.manifest import Manifest, Order, parse_name
from stateflow.errors import CheckpointCorrupt, CheckpointNewer, CheckpointStoreMissing, StateflowError, Unavailable
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
MANIFESTS, SAVEPOINTS, BLOBS, INTENTS, CONDEMNED = "manifests", "savepoints", "blobs", "intents", "condemned"
__all__ = ["BLOBS", "CONDEMNED", "INTENTS", "MANIFESTS", "SAVEPOINTS", "TEMPORARY", "Catalog", "Found", "Mark"]
#: a larger manifest is damaged; that of a partition with a hundred thousand files is smaller
MANIFEST_BYTES_MAX = 32 << 20
#: a hold older than this, by the clock of the store, belongs to a process that died
MARK_LIFE_S = 24 * 3600.0
MARKER: Final = "STORE"
FORMAT: Final = 1
_ID: Final = re.compile(r"[0-9a-f]{32}")
_PLACE = re.compile(rf"{MANIFESTS}/([^/]+)/p(\d+)/[^/]+\Z")
_SAVEPOINT = re.compile(rf"{SAVEPOINTS}/([^/]+)/([^/]+)/p(\d+)\.json\Z")

# -- Manifests and marks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The object of a manifest.

    ``savepoint``: name of the savepoint, empty for a checkpoint; ``order`` and ``attempt``: parsed from the object's
    name; ``size``: bytes.
    """

    name: str
    partition: PartitionId
    order: Order
    attempt: int
    modified_us: int
    savepoint: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """An intent's digests or a collection's condemned blobs. ``names`` None: the mark is torn, and may name any
    blob."""

    name: str
    written_us: int
    names: frozenset[str] | None


class Catalog:
    def __init__(self, objects: Objects, codec: Codec) -> None:
        self._objects = objects
        self._codec = codec

    def checkpoints(self, partition: PartitionId | None = None) -> list[Found]:
        """Returns all checkpoints, newest first within each partition. Reads names only."""
        prefix = MANIFESTS if partition is None else folder_of(partition)
        found = []
        for stored in self._objects.list(prefix):
            place, parsed = _PLACE.search(stored.name), parse_name(stored.name)
            if place is not None and parsed is not None:
                id_ = PartitionId(place[1], int(place[2]))
                found.append(Found(stored.name, id_, *parsed, stored.modified_us, size=stored.size))
        return sorted(found, key=lambda each: (each.partition, *(-n for n in (*each.order, each.attempt))))

    def savepoints(self, name: str | None = None) -> list[Found]:
        found = []
        for stored in self._objects.list(SAVEPOINTS if name is None else f"{SAVEPOINTS}/{name}"):
            place = _SAVEPOINT.search(stored.name)
            if place is not None:
                id_ = PartitionId(place[2], int(place[3]))
                found.append(Found(stored.name, id_, (0, 0), 0, stored.modified_us, place[1], stored.size))
        return sorted(found, key=lambda each: (each.savepoint, each.partition))

    def read(self, found: Found) -> Manifest:
        """Reads a manifest and checks that its content matches its name.

        Raises CheckpointCorrupt, CheckpointNewer, WrongKey; FileNotFoundError when it was deleted meanwhile.
        """
        if found.size > MANIFEST_BYTES_MAX:
            raise CheckpointCorrupt(
                f"the manifest is too large: {found.size} bytes",
                remedy="an older checkpoint is used",
                place=found.name,
            )
        manifest = Manifest.decode(self._codec.unseal(self._objects.read(found.name), found.name), found.name)
        if manifest.id != found.partition or (not found.savepoint and manifest.order != found.order):
            raise CheckpointCorrupt(
                f"the manifest belongs to {manifest.id} at {manifest.order}",
                remedy="an older checkpoint is used",
                place=found.name,
            )
        return manifest

    def newest(self, partition: PartitionId, passed_over: list[StateflowError] | None = None) -> Iterator[Manifest]:
        """Yields readable manifests of a partition, newest first.

        Errors of unreadable ones are added to ``passed_over``, or logged. Raises CheckpointNewer and WrongKey: such a
        manifest may be good, and falling back to an older one would lose its state.
        """
        for found in self.checkpoints(partition):
            try:
                manifest = self.read(found)
            except CheckpointNewer:
                raise
            except CheckpointCorrupt as error:
                if passed_over is None:
                    log.error("%s", error)
                else:
                    passed_over.append(error)
            except FileNotFoundError:  # a collection deleted it meanwhile
                continue
            else:
                yield manifest

    def marks(self, folder: str) -> list[Mark]:
        found = []
        for stored in self._objects.list(folder):
            try:
                names = frozenset(str(name) for name in json.loads(self._objects.read(stored.name)))
            except FileNotFoundError:
                continue
            except (ValueError, TypeError, RecursionError):
                names = None
            found.append(Mark(stored.name, stored.modified_us, names))
        return found


def folder_of(partition: PartitionId) -> str:
    return f"{MANIFESTS}/{partition.operator}/p{partition.partition:05d}"


def savepoint_place(name: str, partition: PartitionId) -> str:
    return f"{SAVEPOINTS}/{name}/{partition.operator}/p{partition.partition:05d}.json"


# -- Holds -----------------------------------------------------------------------------------------------------------


class Pin:
    """A hold on digests, from its creation on. Raises Unavailable if the store cannot be written."""

    def __init__(self, objects: Objects, digests: Iterable[str]) -> None:
        self._objects = objects
        self._name = f"{INTENTS}/{uuid.uuid4().hex}.json"
        objects.create(self._name, json.dumps(sorted(set(digests))).encode())

    def stands(self) -> bool:
        """Returns whether the hold still exists. False: a collection took its process for dead."""
        return self._objects.stat(self._name) is not None

    def release(self) -> None:
        try:
            self._objects.delete(self._name)
        except (Unavailable, FileNotFoundError) as error:
            log.warning("hold not released, it expires after a day: %s", error)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# -- Marker of a store -----------------------------------------------------------------------------------------------


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
    """Creates the marker of a new store and returns its id. If two processes create it at once, both get the id of the
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
