"""Checkpoint store: ``blobs/<2>/<digest>`` and ``manifests/<operator>/<partition>/<epoch>-<sequence>.json``.

A blob is written before the manifest that names it. A manifest is one new object whose name orders it by
(epoch, sequence): the newest is the greatest name, so that a late upload of an older owner can never become the
newest, whatever the store thinks of renames. A torn manifest fails its own checksum and is passed over.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from stateflow.errors import CheckpointCorrupt, ExtraMissing, InvalidArgument, StaleCheckpoint
from stateflow.types import PartitionId

FORMAT = 1


@dataclass(frozen=True, slots=True)
class ManifestFile:
    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One partition at one sequence. ``positions``: source → last batch contained."""

    operator: str
    partition: int
    epoch: int
    sequence: int
    digest: str
    positions: dict[str, int]
    created_us: int
    replica: str
    files: tuple[ManifestFile, ...]

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.sequence

    def encode(self) -> bytes:
        body = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return json.dumps({"body": body, "checksum": xxhash.xxh3_128_hexdigest(body.encode())}).encode()

    @classmethod
    def decode(cls, data: bytes, place: str) -> Manifest:
        """Raises CheckpointCorrupt."""
        try:
            outer = json.loads(data)
            body = outer["body"]
            if xxhash.xxh3_128_hexdigest(body.encode()) != outer["checksum"]:
                raise ValueError("the checksum differs")
            fields = json.loads(body)
            if fields.pop("format") != FORMAT:
                raise ValueError("the format is unknown")
            files = tuple(ManifestFile(**file) for file in fields.pop("files"))
            return cls(files=files, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(
                f"a manifest cannot be read: {error}", remedy="an older checkpoint is used", place=place
            ) from error


@dataclass(frozen=True, slots=True)
class Saved:
    manifest: Manifest
    bytes_new: int
    bytes_total: int


class CheckpointStore:
    """Args: url: a directory or any fsspec URL. Raises InvalidArgument or ExtraMissing when it cannot be used."""

    def __init__(self, url: str, **options: Any) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, **options)
            self._fs.makedirs(self._root, exist_ok=True)
        except ImportError as error:
            raise ExtraMissing(str(error), remedy="install the package it names", url=url) from error
        except (ValueError, OSError) as error:
            raise InvalidArgument(
                f"checkpoints cannot be kept there: {error}",
                remedy="name a writable directory or fsspec URL",
                url=url,
            ) from error

    def save(self, manifest: Manifest, directory: Path) -> Saved:
        """Upload what is missing of ``directory``, then publish. Raises StaleCheckpoint unless it is the newest."""
        newest = next(self.newest(PartitionId(manifest.operator, manifest.partition)), None)
        if newest is not None and newest.order >= manifest.order:
            raise StaleCheckpoint(
                f"checkpoint {newest.order} is there, {manifest.order} is not newer",
                remedy="nothing to do",
                operator=manifest.operator,
                partition=manifest.partition,
            )
        new = 0
        for file in manifest.files:
            blob = self._blob(file.digest)
            if not self._has(blob, file.size):
                self._fs.makedirs(blob.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(directory / file.name), blob)
                new += file.size
        place = self._manifests(manifest.operator, manifest.partition)
        self._fs.makedirs(place, exist_ok=True)
        self._fs.pipe_file(f"{place}/{manifest.epoch:012d}-{manifest.sequence:016d}.json", manifest.encode())
        return Saved(manifest, new, sum(file.size for file in manifest.files))

    def newest(self, partition: PartitionId) -> Iterator[Manifest]:
        """Readable manifests of a partition, newest first."""
        place = self._manifests(partition.operator, partition.partition)
        try:
            names = self._fs.ls(place, detail=False)
        except FileNotFoundError:
            return
        for name in sorted(names, reverse=True):
            with contextlib.suppress(CheckpointCorrupt):
                yield Manifest.decode(self._fs.cat_file(name), name)

    def restore(self, manifest: Manifest, directory: Path) -> None:
        """The files of a checkpoint into a new directory. Raises CheckpointCorrupt when a blob is missing or wrong."""
        directory.mkdir(parents=True)
        for file in manifest.files:
            try:
                self._fs.get_file(self._blob(file.digest), str(directory / file.name))
            except FileNotFoundError as error:
                raise self._corrupt(manifest, file, "is missing") from error
            if xxhash.xxh3_128_hexdigest((directory / file.name).read_bytes()) != file.digest:
                raise self._corrupt(manifest, file, "has other content than it should")

    @staticmethod
    def _corrupt(manifest: Manifest, file: ManifestFile, what: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(
            f"blob {file.digest} ({file.name}) {what}",
            remedy="restore an older checkpoint",
            operator=manifest.operator,
            partition=manifest.partition,
            epoch=manifest.epoch,
            sequence=manifest.sequence,
        )

    def _has(self, blob: str, size: int) -> bool:
        try:
            return bool(self._fs.size(blob) == size)
        except FileNotFoundError:
            return False

    def _blob(self, digest: str) -> str:
        return f"{self._root}/blobs/{digest[:2]}/{digest}"

    def _manifests(self, operator: str, partition: int) -> str:
        return f"{self._root}/manifests/{operator}/p{partition:05d}"
