"""Manifest of a checkpoint: one partition of one operator at one sequence, and the blobs that contain its files.

An object's name orders it: ``<epoch>-<sequence>[-<attempt>].json``. The newest is the greatest, so that a late upload
by an earlier owner can never become the newest, whatever the store thinks of renames.

The proof of a checkpoint is a digest of decoded state: it covers every entry of a partition store, in order, whichever
files contain them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any

import xxhash

from stateflow.errors import CheckpointCorrupt, CheckpointNewer
from stateflow.types import NAME, PartitionId

FORMAT = 2
_NAME = re.compile(r"(\d{12})-(\d{16})(?:-(\d+))?\.json\Z")
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
    """One partition at one sequence.

    ``positions``: source → last batch contained. ``digest``: of the files and the sequence. ``state_digest``: of the
    decoded entries; empty: not computed. ``schema``: the states, as KeyedState.schema() describes them. ``target``:
    import path of the operator's class. ``version``: of the operator's class.
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

    @property
    def order(self) -> Order:
        return self.epoch, self.sequence

    @property
    def id(self) -> PartitionId:
        return PartitionId(self.operator, self.partition)

    @property
    def size(self) -> int:
        """Size of its files in plain form, in bytes."""
        return sum(file.size for file in self.files)

    def is_same_state(self, other: Manifest) -> bool:
        """Returns whether both manifests describe the same state. Files do not count: they change when a database is
        opened."""
        digests = {self.state_digest, other.state_digest} - {""}
        return (self.id, self.sequence, self.positions, self.watermark_us) == (
            other.id,
            other.sequence,
            other.positions,
            other.watermark_us,
        ) and len(digests) < 2

    def encode(self) -> bytes:
        body = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return json.dumps({"body": body, "checksum": _checksum(body)}).encode()

    @classmethod
    def decode(cls, data: bytes, place: str) -> Manifest:
        """Decodes a manifest. Raises CheckpointCorrupt; CheckpointNewer for an intact one in the format of a later
        program."""
        try:
            outer = json.loads(data)
            body = outer["body"]
            if _checksum(body) != outer["checksum"]:
                raise ValueError("the checksum differs")
            values = json.loads(body)
            format_ = int(values.pop("format"))
            if format_ > FORMAT:
                raise CheckpointNewer(
                    f"a checkpoint has format {format_}, this program reads up to {FORMAT}",
                    remedy="run the stateflow version that wrote it, or a newer one",
                    place=place,
                )
            if format_ < 1 or not set(values) <= {each.name for each in fields(cls)}:
                raise ValueError("unknown format")
            _check_types(values)
            files = tuple(_file(each) for each in values.pop("files"))
            if len({file.name for file in files}) < len(files):
                raise ValueError("two files have the same name")
            values["key"] = tuple(values.get("key", ()))
            return cls(files=files, **values)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            why = " ".join(str(error).split())[:200] or type(error).__name__
            raise CheckpointCorrupt(
                f"a manifest cannot be read: {why}", remedy="an older checkpoint is used", place=place
            ) from error


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
}


def _check_types(values: dict[str, Any]) -> None:
    """Checks the types of all fields, before other code meets a wrong one. Raises ValueError."""
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
    """Inverse of :func:`blob_name`, for any suffix."""
    return blob.rpartition("/")[2].partition(".")[0]


def manifest_name(order: Order, attempt: int = 0) -> str:
    return f"{order[0]:012d}-{order[1]:016d}" + (f"-{attempt}" if attempt else "") + ".json"


def parse_name(name: str) -> tuple[Order, int] | None:
    """Returns (order, attempt) from the name of a manifest's object; None: the name is not a manifest's."""
    match = _NAME.search(name)
    return None if match is None else ((int(match[1]), int(match[2])), int(match[3] or 0))


#: takes about a millisecond, which other threads that wait for the interpreter do not feel
ENTRIES_AT_ONCE = 200


def state_digest(
    entries: Iterable[tuple[bytes, bytes]], skip: tuple[bytes, ...], rest: Callable[[], None] = lambda: None
) -> str:
    """Returns the xxh3_128, hexadecimal, of all entries except those whose keys begin with one of ``skip``.

    Args:
        rest: called after each ENTRIES_AT_ONCE, to let others run.
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
