"""Contents of a store: manifests by partition, savepoints, blobs, and the marks that make collecting safe.

=========================================================  ===================================================
``blobs/<2>/<digest>[.zst][.<key id>][.g<generation>]``     content, named by the xxh3_128 of its plain form
``manifests/<operator>/p00003/<epoch>-<sequence>.json``     checkpoints; published last, never changed
``savepoints/<name>/<operator>/p00003.json``                manifests that are kept until deleted
``STORE``                                                   the marker: which store this is
``intents/<id>.json``                                       digests that an upload, a restore or a reader relies on
``condemned/<id>.json``                                     blobs a collection under way may delete
``tmp/``                                                    of a local directory: files being written
=========================================================  ===================================================
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

from stateflow.checkpoint.codec import Codec
from stateflow.checkpoint.manifest import Manifest, Order, parse_name
from stateflow.checkpoint.objects import TEMPORARY, Objects
from stateflow.errors import CheckpointCorrupt, CheckpointNewer, StateflowError
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
MANIFESTS, SAVEPOINTS, BLOBS, INTENTS, CONDEMNED = "manifests", "savepoints", "blobs", "intents", "condemned"
__all__ = ["BLOBS", "CONDEMNED", "INTENTS", "MANIFESTS", "SAVEPOINTS", "TEMPORARY", "Catalog", "Found", "Mark"]
#: a larger manifest is damaged; that of a partition with a hundred thousand files is smaller
MANIFEST_BYTES_MAX = 32 << 20
_PLACE = re.compile(rf"{MANIFESTS}/([^/]+)/p(\d+)/[^/]+\Z")
_SAVEPOINT = re.compile(rf"{SAVEPOINTS}/([^/]+)/([^/]+)/p(\d+)\.json\Z")


@dataclass(frozen=True, slots=True)
class Found:
    """The object of a manifest.

    ``savepoint``: name of the savepoint, empty for a checkpoint; ``order`` and ``attempt``: as the object's name says;
    ``size``: bytes.
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
    """An intent's digests or a collection's condemned blobs. ``names`` None: the mark is torn, and may name any."""

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
        return sorted(found, key=lambda each: (_by(each.partition), *(-n for n in (*each.order, each.attempt))))

    def savepoints(self, name: str | None = None) -> list[Found]:
        found = []
        for stored in self._objects.list(SAVEPOINTS if name is None else f"{SAVEPOINTS}/{name}"):
            place = _SAVEPOINT.search(stored.name)
            if place is not None:
                id_ = PartitionId(place[2], int(place[3]))
                found.append(Found(stored.name, id_, (0, 0), 0, stored.modified_us, place[1], stored.size))
        return sorted(found, key=lambda each: (each.savepoint, _by(each.partition)))

    def read(self, found: Found) -> Manifest:
        """Reads a manifest and checks that it is the one its name says.

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
        manifest cannot be judged, and falling back to an older one would lose it.
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


def _by(partition: PartitionId) -> tuple[str, int]:
    return partition.operator, partition.partition
