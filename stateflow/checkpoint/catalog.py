"""Contents of a checkpoint store: its marker, manifests by partition, savepoints, blobs, and leases on blobs.

=========================================================  ===================================================
``blobs/<2>/<digest>[.zst][.<key id>][.g<generation>]``     content, named by the xxh3_128 of its plain form
``manifests/<operator>/p00003/<epoch>-<sequence>.json``     checkpoints; published last, never changed
``savepoints/<name>/<operator>/p00003.json``                manifests that are kept until deleted
``STORE``                                                   the marker, with the id of the store
``intents/<id>.json``                                       leases: digests that an upload, a restore or a reader
                                                            relies on
``condemned/<id>.json``                                     blobs that a running collection may delete
``tmp/``                                                    files being written (in a local directory), and probes
=========================================================  ===================================================

A manifest describes the checkpoint of one partition at one sequence, and names the blobs that contain its files. The
object's name orders it: ``<epoch>-<sequence>[-<attempt>].json``. The newest is the greatest, so that a late upload by
an earlier owner can never become the newest, on any store. The proof of a checkpoint is a
digest of decoded state: it covers every entry of a partition store, in order, whichever files contain them.

The marker has an id and is created once. It distinguishes a store from the empty directory under its mount point. It
also tells whether two URLs name two stores, or one store in two spellings.

A *lease* tells collections which digests a process relies on. The process writes the lease before it reads or uploads
blobs with these digests.
The protocol needs no locks and no correct clock:

1. a process that relies on blobs writes a lease, *then* reads which blobs are condemned;
2. a collection condemns blobs, *then* reads the leases. Whichever comes later sees the other: the process stores a
   condemned blob again under another name, or the collection spares a leased one;
3. a lease that is a day old, by the clock of the store, has expired: its process died. A collection *removes* it before
   it reads the manifests for the last time;
4. a process that published a manifest checks *afterwards* whether its lease still exists. If so, a collection can
   remove the lease only later, and then reads that manifest. If not, a collection considered the process dead, and the
   process starts over;
5. a process whose publication ends without an answer leaves its lease until it expires, because the manifest may still
   appear.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, Final

import xxhash

from stateflow.checkpoint.backend import Objects
from stateflow.checkpoint.codec import Codec
from stateflow.durable import MALFORMED
from stateflow.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    CheckpointNewer,
    CheckpointStoreMissing,
    StaleCheckpoint,
    StateflowError,
    Unavailable,
    WrongKey,
)
from stateflow.types import NAME, PartitionId, check_name

log = logging.getLogger(__name__)
MANIFESTS, SAVEPOINTS, BLOBS, INTENTS, CONDEMNED = "manifests", "savepoints", "blobs", "intents", "condemned"
#: a larger manifest is damaged; that of a partition with a hundred thousand files is smaller
MANIFEST_BYTES_MAX = 32 << 20
#: a mark older than this, by the clock of the store, belongs to a process that died
MARK_LIFE_S = 24 * 3600.0
#: remedy if a checkpoint or savepoint cannot be used
ANOTHER = "if this is a savepoint, restore another one; recovery uses an older checkpoint by itself"
MARKER: Final = "STORE"
MARKER_FORMAT: Final = 1
_ID: Final = re.compile(r"[0-9a-f]{32}")
_PLACE = re.compile(rf"{MANIFESTS}/([^/]+)/p([0-9]{{5}})/[^/]+\Z")
_SAVEPOINT = re.compile(rf"{SAVEPOINTS}/([^/]+)/([^/]+)/p([0-9]{{5}})\.json\Z")

# -- Manifests -------------------------------------------------------------------------------------------------------

FORMAT = 2
#: parts of a manifest: in the first two, older releases refuse unknown fields; the others are for new fields, and older
#: releases do not read them
_OUTER, _ADDED = {"body", "checksum"}, {"added", "added_checksum"}
_NAME = re.compile(r"([0-9]{12})-([0-9]{16})(?:-([0-9]{1,9}))?\.json\Z")
_DIGEST = re.compile(r"[0-9a-f]{2,64}")
_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2,64}(?:\.[a-z0-9]+)*")
Order = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file of a checkpoint.

    ``digest``: xxh3_128 of the plain content, hexadecimal. ``blob``: name of the blob that contains it, see
    :func:`blob_name`.
    """

    name: str
    size: int
    digest: str
    blob: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes the checkpoint of one partition at one sequence.

    Attributes:
        digest: digest of the files and the sequence.
        positions: last batch that the state contains, by source.
        state_digest: digest of the decoded entries; empty: not computed.
        schema: the states, as KeyedState.schema() describes them.
        target: import path of the operator's class.
        version: version of the states, from the class's ``state_version``; empty: 1.
        tags: the states addressed at run time, as :func:`~stateflow.state.stored_tags` describes them; empty: there are
            none, or the manifest is older.
        stopped_us: clients that began then or earlier are refused by the copy, which is no part of the state; 0: none
            is, or the manifest is older.
    """

    operator: str
    partition: int
    epoch: int
    sequence: int
    digest: str
    positions: dict[str, int]
    created_us: int
    replica: str
    files: tuple[ManifestFile, ...]
    watermark_us: int | None = None
    state_digest: str = ""
    schema: list[dict[str, Any]] = field(default_factory=list)
    target: str = ""
    version: str = ""
    partitions: int = 0  # number of the operator's partitions; 0: not known
    key: tuple[str, ...] = ()
    tags: list[dict[str, Any]] = field(default_factory=list)
    stopped_us: int = 0

    @property
    def order(self) -> Order:
        return self.epoch, self.sequence

    @property
    def id(self) -> PartitionId:
        return PartitionId(self.operator, self.partition)

    @property
    def size(self) -> int:
        """Size of the checkpoint's files in plain form, in bytes."""
        return sum(file.size for file in self.files)

    def is_same_state(self, other: Manifest) -> bool:
        """Returns whether both manifests describe the same state. Their files are not compared, because files change
        when a database is opened."""
        digests = {self.state_digest, other.state_digest} - {""}
        return (self.id, self.sequence, self.positions, self.watermark_us) == (
            other.id,
            other.sequence,
            other.positions,
            other.watermark_us,
        ) and len(digests) < 2

    def encode(self) -> bytes:
        values = {"format": FORMAT, **asdict(self)}
        added = {name: values.pop(name) for name in ("tags", "stopped_us")}
        outer = _checked(values, "body", "checksum")
        if any(added.values()):
            outer |= _checked(added, "added", "added_checksum")
        return json.dumps(outer).encode()

    @classmethod
    def decode(cls, data: bytes, place: str) -> Manifest:
        """Decodes a manifest. Raises CheckpointCorrupt, or CheckpointNewer for an intact manifest whose format is newer
        than this program."""
        try:
            outer = json.loads(data)
            if outer.keys() - _OUTER not in (set(), _ADDED):
                raise ValueError("unknown parts")
            values = _part(outer, "body", "checksum")
            format_ = int(values.pop("format"))
            if format_ > FORMAT:
                raise CheckpointNewer(
                    f"a checkpoint has format {format_}, this program reads up to {FORMAT}",
                    remedy="run the stateflow version that wrote it, or a newer one",
                    place=place,
                )
            if format_ < 1 or not set(values) <= {each.name for each in fields(cls)}:
                raise ValueError("unknown format")
            if "added" in outer:  # unknown fields in it come from a newer release, and are ignored
                added = _part(outer, "added", "added_checksum")
                values["tags"], values["stopped_us"] = added["tags"], added.get("stopped_us", 0)
            _check_types(values)
            files = tuple(_file(each) for each in values.pop("files"))
            if len({file.name for file in files}) < len(files):
                raise ValueError("two files have the same name")
            values["key"] = tuple(values.get("key", ()))
            return cls(files=files, **values)
        except MALFORMED as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise CheckpointCorrupt(f"a manifest cannot be read: {why}", remedy=ANOTHER, place=place) from error


def _checked(values: dict[str, Any], name: str, checksum: str) -> dict[str, str]:
    text = json.dumps(values, sort_keys=True)
    return {name: text, checksum: _checksum(text)}


def _part(outer: dict[str, Any], name: str, checksum: str) -> dict[str, Any]:
    """Returns the fields of a part of a manifest. Raises KeyError, ValueError."""
    if _checksum(outer[name]) != outer[checksum]:
        raise ValueError("the checksum differs")
    found: dict[str, Any] = json.loads(outer[name])
    return found


def _checksum(body: str) -> str:
    digest: str = xxhash.xxh3_128_hexdigest(body.encode())
    return digest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_micros(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_states(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and all(_is_text(each.get(name)) for name in ("name", "kind", "tag"))
        and isinstance(each.get("coders"), list)
        and all(map(_is_text, each["coders"]))
        for each in value
    )


_TYPES: dict[str, Callable[[Any], bool]] = {
    "operator": _is_text,
    "partition": lambda value: _is_count(value) and value < 1 << 32,
    "epoch": _is_count,
    "sequence": _is_count,
    "digest": _is_text,
    "positions": lambda value: isinstance(value, dict) and all(map(_is_micros, value.values())),
    "created_us": _is_micros,
    "replica": _is_text,
    "files": lambda value: isinstance(value, list),
    "watermark_us": lambda value: value is None or _is_micros(value),
    "state_digest": _is_text,
    "schema": _is_states,
    "target": _is_text,
    "version": _is_text,
    "partitions": lambda value: _is_count(value) and value < 1 << 32,
    "key": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "tags": _is_states,
    "stopped_us": _is_micros,
}


def _check_types(values: dict[str, Any]) -> None:
    """Checks the types of all fields, so that no other code gets a field of a wrong type. Raises ValueError."""
    wrong = [name for name, value in values.items() if not _TYPES[name](value)]
    if wrong:
        raise ValueError(f"wrong type: {', '.join(wrong)}")


def _file(values: dict[str, Any]) -> ManifestFile:
    file = ManifestFile(**values)
    if not (isinstance(file.name, str) and NAME.holds(file.name)):
        raise ValueError("invalid file name")
    if not (_is_count(file.size) and _is_text(file.digest) and _DIGEST.fullmatch(file.digest)):
        raise ValueError("invalid file size or digest")
    if not _is_text(file.blob) or (file.blob and not _BLOB.fullmatch(file.blob)):
        raise ValueError("invalid blob name")
    return file if file.blob else ManifestFile(file.name, file.size, file.digest, blob_name(file.digest))


def blob_name(digest: str, suffix: str = "") -> str:
    """Returns the name of a blob below ``blobs/``: the digest of its plain content, and a suffix that tells the
    encoding."""
    return f"{digest[:2]}/{digest}{suffix}"


def digest_of(blob: str) -> str:
    """Returns the digest from the name of a blob, the inverse of :func:`blob_name`."""
    return blob.rpartition("/")[2].partition(".")[0]


def suffix_of(blob: str) -> str:
    """Returns the suffix of a blob's name, without the generation."""
    _, *how = blob.rpartition("/")[2].split(".")
    return "".join(f".{part}" for part in how if not part.startswith("g"))


def manifest_name(order: Order, attempt: int = 0) -> str:
    return f"{order[0]:012d}-{order[1]:016d}" + (f"-{attempt}" if attempt else "") + ".json"


def parse_name(name: str) -> tuple[Order, int] | None:
    """Returns (order, attempt) from the name of a manifest's object; None: the name is not a manifest's."""
    match = _NAME.search(name)
    return None if match is None else ((int(match[1]), int(match[2])), int(match[3] or 0))


#: entries hashed at a time: about a millisecond, which barely delays other threads that wait for the interpreter
ENTRIES_AT_ONCE = 200


def state_digest(
    entries: Iterable[tuple[bytes, bytes]], skip: tuple[bytes, ...], rest: Callable[[], None] = lambda: None
) -> str:
    """Returns the xxh3_128, hexadecimal, of all entries except those whose keys begin with one of ``skip``.

    Args:
        rest: called after every ENTRIES_AT_ONCE entries, to let other threads run.
    """
    hasher = xxhash.xxh3_128()
    iterator = iter(entries)
    while some := list(islice(iterator, ENTRIES_AT_ONCE)):
        parts: list[bytes] = []
        for key, value in some:
            if not key.startswith(skip):
                parts += (len(key).to_bytes(4, "big"), key, len(value).to_bytes(4, "big"), value)
        hasher.update(b"".join(parts))
        rest()
    digest: str = hasher.hexdigest()
    return digest


# -- Contents of a store ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """Object that contains a manifest, as the store lists it.

    Attributes:
        order, attempt: parsed from the object's name.
        savepoint: name of the savepoint; empty: the object is a checkpoint.
        size: size in bytes.
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
    """A lease, or the list of blobs that a collection condemns. ``names``: the digests or blobs; None: the mark is
    torn, and may name any blob."""

    name: str
    written_us: int
    names: frozenset[str] | None


class Catalog:
    """Lists and reads the manifests and marks of a store."""

    def __init__(self, objects: Objects, codec: Codec) -> None:
        self._objects = objects
        self._codec = codec

    def checkpoints(self, partition: PartitionId | None = None) -> list[Found]:
        """Returns all checkpoints, newest first within each partition. It lists names and reads no manifest."""
        prefix = MANIFESTS if partition is None else folder_of(partition)
        found = []
        for stored in self._objects.list(prefix):
            place, parsed = _PLACE.fullmatch(stored.name), parse_name(stored.name)
            if place is not None and parsed is not None and NAME.holds(place[1]):
                id_ = PartitionId(place[1], int(place[2]))
                found.append(Found(stored.name, id_, *parsed, stored.modified_us, size=stored.size))
        return sorted(found, key=lambda each: (each.partition, *(-n for n in (*each.order, each.attempt))))

    def savepoints(self, name: str | None = None) -> list[Found]:
        """Returns the manifests of the savepoint with exactly this name, or of all savepoints. It reads none of them.

        Raises InvalidArgument for an invalid name: as a folder, "." would contain all savepoints.
        """
        found = []
        folder = SAVEPOINTS if name is None else f"{SAVEPOINTS}/{check_name('savepoint', name)}"
        for stored in self._objects.list(folder):
            place = _SAVEPOINT.fullmatch(stored.name)
            if place is not None and name in (None, place[1]) and NAME.holds(place[1]) and NAME.holds(place[2]):
                id_ = PartitionId(place[2], int(place[3]))
                found.append(Found(stored.name, id_, (0, 0), 0, stored.modified_us, place[1], stored.size))
        return sorted(found, key=lambda each: (each.savepoint, each.partition))

    def read(self, found: Found) -> Manifest:
        """Reads a manifest and checks that its content matches its name.

        Raises CheckpointCorrupt, CheckpointNewer, WrongKey; FileNotFoundError when it was deleted since it was listed;
        Unavailable for an incomplete answer, because the manifest itself may be whole.
        """
        if found.size > MANIFEST_BYTES_MAX:
            raise CheckpointCorrupt(
                f"the manifest is too large: {found.size} bytes",
                remedy=ANOTHER,
                place=found.name,
            )
        data = self._objects.read(found.name)
        if found.size and len(data) < found.size:
            raise incomplete(found.name, len(data), found.size, self._objects.url)
        manifest = Manifest.decode(self._codec.unseal(data, found.name), found.name)
        if manifest.id != found.partition or (not found.savepoint and manifest.order != found.order):
            raise CheckpointCorrupt(
                f"the manifest does not match its name: it is {manifest.id}, epoch and sequence {manifest.order}",
                remedy=ANOTHER,
                place=found.name,
            )
        return manifest

    def newest(self, partition: PartitionId, passed_over: list[StateflowError] | None = None) -> Iterator[Manifest]:
        """Yields readable manifests of a partition, newest first.

        Errors of unreadable manifests are appended to ``passed_over``, or logged if it is None. Raises CheckpointNewer
        and WrongKey: such a manifest may be good, and falling back to an older one would lose its state.
        """
        for found in self.checkpoints(partition):
            try:
                manifest = self.read(found)
            except CheckpointNewer:
                raise
            except CheckpointCorrupt as error:
                if passed_over is None:
                    log.error("checkpoint skipped: %s", error)
                else:
                    passed_over.append(error)
            except FileNotFoundError:  # a collection has deleted it
                continue
            else:
                yield manifest

    def has_manifest(self, manifest: Manifest) -> bool:
        """Returns whether the store has the manifest, as a checkpoint or in a savepoint."""
        for found in [*self.checkpoints(manifest.id), *self.savepoints()]:
            if found.partition == manifest.id and (found.savepoint or found.order == manifest.order):
                with contextlib.suppress(CheckpointCorrupt, CheckpointNewer, WrongKey, FileNotFoundError):
                    if self.read(found) == manifest:
                        return True
        return False

    def has_blobs(self, manifest: Manifest) -> bool:
        """Returns whether the store has all blobs of a manifest."""
        return all(self._objects.stat(f"{BLOBS}/{file.blob}") for file in manifest.files)

    def marks(self, folder: str) -> list[Mark]:
        found = []
        for stored in self._objects.list(folder):
            try:
                names = frozenset(str(name) for name in json.loads(self._objects.read(stored.name)))
            except FileNotFoundError:
                continue
            except MALFORMED:
                names = None
            found.append(Mark(stored.name, stored.modified_us, names))
        return found


def incomplete(name: str, read: int, size: int, url: str) -> Unavailable:
    return Unavailable(
        f"the checkpoint store returned {read} of the {size} bytes of {name}",
        remedy="try again; if it happens again, check the store and what is between",
        url=url,
    )


def corrupt(manifest: Manifest, file: ManifestFile, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"blob {file.blob} ({file.name}) {what}",
        remedy="restore an older checkpoint",
        operator=manifest.operator,
        partition=manifest.partition,
        epoch=manifest.epoch,
        sequence=manifest.sequence,
    )


def stale(manifest: Manifest, there: tuple[int, int]) -> StaleCheckpoint:
    return StaleCheckpoint(
        f"the store has a checkpoint with epoch and sequence {there}, and {manifest.order} is not newer",
        remedy="if this replica still owns the partition, move it with `stateflow migrate`, which gives it a newer "
        "epoch; if another cluster uses the store, give this one a URL of its own; a restore would undo later batches"
        if there[0] > manifest.epoch
        else "none needed: the next checkpoint will be newer",
        operator=manifest.operator,
        partition=manifest.partition,
    )


def no_savepoint(name: str, url: str, operator: str | None = None, lacking: Sequence[int] = ()) -> CheckpointMissing:
    return CheckpointMissing(
        f"savepoint {name!r} lacks partitions {list(lacking)}" if lacking else f"no savepoint {name!r}",
        remedy="see `stateflow savepoint list`",
        url=url,
        operator=operator,
    )


def folder_of(partition: PartitionId) -> str:
    return f"{MANIFESTS}/{partition.operator}/p{partition.partition:05d}"


def savepoint_place(name: str, partition: PartitionId) -> str:
    return f"{SAVEPOINTS}/{name}/{partition.operator}/p{partition.partition:05d}.json"


# -- Leases ----------------------------------------------------------------------------------------------------------


class Lease:
    """A lease on digests, which exists until it is released. Raises Unavailable if the store cannot be written."""

    def __init__(self, objects: Objects, digests: Iterable[str]) -> None:
        self._objects = objects
        self._kept = False
        self._name = f"{INTENTS}/{uuid.uuid4().hex}.json"
        objects.create_own(self._name, json.dumps(sorted(set(digests))).encode())

    def stands(self) -> bool:
        """Returns whether the lease still exists. False: a collection considered the process dead, and removed the
        lease."""
        return self._objects.stat(self._name) is not None

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Context in which a manifest that names the leased blobs is published."""
        try:
            yield
        except Unavailable:
            # the outcome is unknown: the call may go on in its thread or in the store, and publish the manifest later,
            # when a collection must not have deleted its blobs
            self._kept = True
            raise

    def release(self) -> None:
        """Deletes the lease, unless a manifest may still be published under it; the lease then expires after a day."""
        if self._kept:
            return
        try:
            self._objects.delete(self._name)
        except (Unavailable, FileNotFoundError) as error:
            log.warning("checkpoint store: lease on blobs not released, it expires after a day: %s", error)

    def __enter__(self) -> Lease:
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
        sound = sound and marker["checksum"] == _marker_checksum(id_, format_)
    except MALFORMED:
        sound = False
    if not sound:
        raise CheckpointCorrupt(
            "the marker of the checkpoint store cannot be read",
            remedy="restore it from a copy; if there is none, remove it and run `stateflow checkpoint init`",
            url=objects.url,
            object=MARKER,
        )
    if format_ > MARKER_FORMAT:
        raise CheckpointNewer(
            f"the checkpoint store has format {format_}, this program supports up to {MARKER_FORMAT}",
            remedy="run the stateflow version that created it, or a newer one",
            url=objects.url,
        )
    return str(id_)


def make_marker(objects: Objects) -> str:
    """Creates the marker of a new store and returns its id. If two processes create it at once, both get the id of the
    first."""
    id_ = uuid.uuid4().hex
    marker = {"format": MARKER_FORMAT, "id": id_, "checksum": _marker_checksum(id_, MARKER_FORMAT)}
    try:
        objects.create(MARKER, json.dumps(marker).encode())
    except FileExistsError:
        pass
    made = read_marker(objects)
    if made is None:
        raise missing(objects.url)
    return made


def _marker_checksum(id_: str, format_: int) -> str:
    """Returns the checksum of a marker. Without it, a damaged marker could pass for the marker of another store."""
    digest: str = xxhash.xxh3_64_hexdigest(f"{format_} {id_}".encode())
    return digest


def missing(url: str) -> CheckpointStoreMissing:
    return CheckpointStoreMissing(
        "the checkpoint store has no marker, and nothing was written",
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
