"""Fetches files of a checkpoint from its store: written, verified by digest, and on disk before they are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import FileIO
from pathlib import Path

import xxhash

from stateflow.checkpoint.cache import SiteCache
from stateflow.checkpoint.catalog import BLOBS
from stateflow.checkpoint.codec import Codec
from stateflow.checkpoint.manifest import Manifest, ManifestFile
from stateflow.checkpoint.objects import FULL, Objects
from stateflow.durable import sync
from stateflow.errors import CheckpointCorrupt, Unavailable

#: bytes hashed at a time, few enough to stay in a core's cache
HASHED_BYTES = 256 << 10
#: context around the verification of a file that is written, such as its sync
Written = Callable[[Path], AbstractContextManager[None]]


def in_memory(_: Path) -> AbstractContextManager[None]:
    """A ``Written`` that does nothing, for files that need not survive power loss."""
    return nullcontext()


class Fetching:
    """Fetches files of checkpoints from one store.

    Args:
        cache: a site's copies, tried before the store; None: no cache.
    """

    def __init__(self, objects: Objects, codec: Codec, cache: SiteCache | None) -> None:
        self._objects, self._codec, self._cache = objects, codec, cache

    def fetch(self, manifest: Manifest, file: ManifestFile, path: Path, written: Written = in_memory) -> None:
        """Fetches one file of a checkpoint and verifies it by its digest. Raises CheckpointCorrupt, Unavailable.

        Args:
            written: entered once all of the file is written, left before it counts as fetched.
        """
        try:
            if self._cache is not None and self._cache.get(file.digest, path):
                with written(path):
                    return
        except OSError as error:
            raise no_room(error, path.parent) from error
        try:
            found = (self._copy if self._codec.is_plain(file.blob) else self._decode)(file, path, written)
        except FileNotFoundError as error:
            raise _corrupt(manifest, file, "is missing") from error
        except CheckpointCorrupt as error:
            raise _corrupt(manifest, file, "cannot be decoded") from error
        if found != (file.size, file.digest):
            raise _corrupt(manifest, file, "does not match its size and digest")
        if self._cache is not None:
            self._cache.put(file.digest, path)

    def _copy(self, file: ManifestFile, path: Path, written: Written) -> tuple[int, str]:
        """Copies a plain blob; returns size and digest of the copy.

        The kernel copies it. Then it is read in pieces that stay in a core's cache, while the disk takes it. Passing it
        through Python would cost another copy.
        """
        with _opened(path) as out:
            try:
                self._objects.download(f"{BLOBS}/{file.blob}", out, file.size)
            except Unavailable as error:
                if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
                    raise no_room(error.__cause__, path.parent) from error
                raise
        hasher, size, piece = xxhash.xxh3_128(), 0, memoryview(bytearray(HASHED_BYTES))
        with written(path), path.open("rb", buffering=0) as copied:
            while count := copied.readinto(piece):
                hasher.update(piece[:count])
                size += count
        return size, hasher.hexdigest()

    def _decode(self, file: ManifestFile, path: Path, written: Written) -> tuple[int, str]:
        hasher, size = xxhash.xxh3_128(), 0
        with _opened(path) as out:
            for data in self._codec.decode(self._objects.chunks(f"{BLOBS}/{file.blob}"), file.blob):
                hasher.update(data)
                size += len(data)
                if size > file.size:  # wrong content, of any length
                    break
                try:
                    out.write(data)
                except OSError as error:
                    raise no_room(error, path.parent) from error
        with written(path):
            return size, hasher.hexdigest()


def _opened(path: Path) -> FileIO:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:  # as no_room, or FileNotFoundError would pass for a missing blob
        raise no_room(error, path.parent) from error


@contextmanager
def synced(disk: Executor, path: Path) -> Iterator[None]:
    syncing = disk.submit(sync, path)
    yield
    syncing.result()


def _corrupt(manifest: Manifest, file: ManifestFile, what: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"blob {file.blob} ({file.name}) {what}",
        remedy="restore an older checkpoint",
        operator=manifest.operator,
        partition=manifest.partition,
        epoch=manifest.epoch,
        sequence=manifest.sequence,
    )


def no_room(error: OSError, directory: Path) -> Unavailable:
    return Unavailable(
        f"cannot write to the local disk: {error.strerror or error}",
        remedy="free space there and try again",
        path=directory,
    )
