"""A site's copies of blobs, plain and by digest, in front of a store that is far away.

The replicas of one machine share it. Its content is not trusted: it is hashed each time it is used, and content that
does not match is dropped and fetched again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

import xxhash

from stateflow.checkpoint.backend import CHUNK_BYTES
from stateflow.errors import InvalidArgument


class SiteCache:
    """A directory of blobs. Raises InvalidArgument.

    Args:
        bytes_max: size above which the least recently used blobs are dropped.
    """

    def __init__(self, directory: Path, bytes_max: int) -> None:
        if bytes_max < 1:
            raise InvalidArgument("the cache size must be positive", remedy="pass its size in bytes, at least 1")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(
                f"the cache directory cannot be used: {error.strerror}",
                remedy="name a writable directory",
                path=directory,
            ) from error
        self._directory = directory
        self._bytes_max = bytes_max
        self.hits = 0
        self.misses = 0

    def get(self, digest: str, target: Path) -> bool:
        """Copies verified content to ``target``, a new file. False: the cache does not have it."""
        place = self._place(digest)
        try:
            found = hashed_copy(place, target)
        except FileNotFoundError:
            self.misses += 1
            return False
        if found != digest:
            target.unlink()
            place.unlink(missing_ok=True)
            self.misses += 1
            return False
        with contextlib.suppress(FileNotFoundError):
            os.utime(place)
        self.hits += 1
        return True

    def put(self, digest: str, source: Path) -> None:
        """Keeps a file whose content has this digest. Does nothing if that fails (a full disk)."""
        place = self._place(digest)
        if place.exists() or source.stat().st_size > self._bytes_max:
            return
        temporary = self._directory / f"new-{uuid.uuid4().hex}"
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, temporary)
            temporary.replace(place)
            self._shrink()
        except OSError:
            temporary.unlink(missing_ok=True)

    def _shrink(self) -> None:
        files = []
        for path in self._directory.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    stat = path.stat()
                    files.append((stat.st_mtime_ns, stat.st_size, path))
        excess = sum(size for _, size, _ in files) - self._bytes_max
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size

    def _place(self, digest: str) -> Path:
        return self._directory / digest[:2] / digest


def hashed_copy(source: Path, target: Path) -> str:
    """Copies a file and returns the xxh3_128 of what was copied, hexadecimal. Raises FileNotFoundError."""
    hasher = xxhash.xxh3_128()
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        while data := read.read(CHUNK_BYTES):
            hasher.update(data)
            write.write(data)
    digest: str = hasher.hexdigest()
    return digest
