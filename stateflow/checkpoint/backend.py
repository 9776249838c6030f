"""Storage of checkpoint objects: a small contract, kept by a local directory and by everything that fsspec supports.

Names are relative paths with ``/``. ``create`` and ``upload`` leave the whole object or none, as far as the store
can: a local directory by a hard link of a synced temporary file, object stores by one put.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fsspec.callbacks import Callback

CHUNK_BYTES = 4 << 20
PIECE_BYTES = 1 << 20
#: called with the number of bytes just written; may wait
Throttle = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    size: int
    modified_us: int


class Backend(Protocol):
    """Storage of objects by name.

    Methods raise FileNotFoundError, FileExistsError, other OSErrors, or any error of their client library.

    Attributes:
        piece_bytes: an upload or download shows progress at least once for each so many bytes.
    """

    @property
    def piece_bytes(self) -> int: ...

    def create(self, name: str, data: bytes) -> None:
        """Creates an object, which readers see whole or not at all. Raises FileExistsError and then changes nothing."""
        ...

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        """Stores a file's content; replaces an existing object."""
        ...

    def read(self, name: str) -> bytes: ...

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the content in pieces of at most CHUNK_BYTES."""
        ...

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        """Writes the content to an open, empty file; not all of it if it is longer than ``expected``."""
        ...

    def list(self, prefix: str) -> list[Stored]:
        """Returns every object below a folder; empty when there is no such folder."""
        ...

    def stat(self, name: str) -> Stored | None: ...

    def delete(self, name: str) -> None:
        """Deletes an object. No error when it does not exist."""
        ...


class LocalBackend:
    """A directory. Objects survive power loss once ``create`` or ``upload`` has returned."""

    TEMPORARY = "tmp"
    piece_bytes = PIECE_BYTES

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self, name: str, data: bytes) -> None:
        temporary = self._temporary()
        try:
            with temporary.open("xb") as file:
                file.write(data)
                _sync(file.fileno())
            self._link(temporary, name)
        finally:
            temporary.unlink(missing_ok=True)

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        temporary = self._temporary()
        try:
            with path.open("rb") as source, temporary.open("xb") as file:
                while sent := os.sendfile(file.fileno(), source.fileno(), None, PIECE_BYTES):
                    throttle(sent)
                _sync(file.fileno())
            try:
                self._link(temporary, name)
            except FileExistsError:  # damaged, or of the same content, and another process may rely on its being there
                temporary.replace(self.root / name)
                _sync_folder((self.root / name).parent)
        finally:
            temporary.unlink(missing_ok=True)

    def _temporary(self) -> Path:
        folder = self.root / self.TEMPORARY
        folder.mkdir(parents=True, exist_ok=True)
        return folder / uuid.uuid4().hex

    def _link(self, temporary: Path, name: str) -> None:
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.hardlink_to(temporary)
        _sync_folder(target.parent)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def chunks(self, name: str) -> Iterator[bytes]:
        with (self.root / name).open("rb", buffering=0) as file:
            while data := file.read(CHUNK_BYTES):
                yield data

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        with (self.root / name).open("rb") as source:
            left = expected + 1
            while left > 0 and (sent := os.sendfile(file.fileno(), source.fileno(), None, min(left, PIECE_BYTES))):
                left -= sent

    def list(self, prefix: str) -> list[Stored]:
        found = []
        for folder, _, files in os.walk(self.root / prefix, onerror=_unless_it_is_gone):
            for file in files:
                path = Path(folder) / file
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    found.append(self._stored(path))
        return found

    def _stored(self, path: Path) -> Stored:
        stat = path.stat()
        return Stored(path.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime_ns // 1000)

    def stat(self, name: str) -> Stored | None:
        try:
            return self._stored(self.root / name)
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)


def _unless_it_is_gone(error: OSError) -> None:
    """Re-raises an error unless the folder is gone. An unreadable folder is not empty: what it names would be
    collected."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        _sync(folder)
    finally:
        os.close(folder)


class FsspecBackend:
    """Any file system that fsspec supports.

    ``create`` is one conditional put where the store has that (memory, S3, GCS). Elsewhere it looks first, so that two
    writers that create the same name at the same instant are not told apart.
    """

    piece_bytes = sys.maxsize  # fsspec sends small objects in one piece, up to a size that is not known here

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._creating = threading.Lock()

    def create(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._creating:
            self._folder(path)
            try:
                self._fs.pipe_file(path, data, mode="create")
            except (NotImplementedError, ValueError, TypeError):  # the file system knows no such mode
                if self._fs.exists(path):
                    raise FileExistsError(path) from None
                self._fs.pipe_file(path, data)
            except OSError as error:
                if not isinstance(error, FileExistsError) and "PreconditionFailed" in f"{error!r}{error.__cause__!r}":
                    raise FileExistsError(path) from error
                raise

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        self._folder(self._path(name))
        told = _Told(throttle)
        self._fs.put_file(str(path), self._path(name), callback=told)
        throttle(max(0, path.stat().st_size - told.bytes))

    def read(self, name: str) -> bytes:
        data: bytes = self._fs.cat_file(self._path(name))
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        with self._fs.open(self._path(name), "rb", block_size=CHUNK_BYTES) as file:
            while data := file.read(CHUNK_BYTES):
                yield data

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        for data in self.chunks(name):
            file.write(data)
            if file.tell() > expected:
                return

    def list(self, prefix: str) -> list[Stored]:
        self._fs.invalidate_cache()
        try:
            # by default folders that cannot be read are left out
            strictly = {} if getattr(self._fs, "async_impl", False) else {"on_error": "raise"}
            found = self._fs.find(self._path(prefix), detail=True, **strictly)
        except FileNotFoundError:
            return []
        return [self._stored(path, info) for path, info in found.items() if info.get("type") != "directory"]

    def stat(self, name: str) -> Stored | None:
        self._fs.invalidate_cache()
        try:
            return self._stored(self._path(name), self._fs.info(self._path(name)))
        except FileNotFoundError:
            return None

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _folder(self, path: str) -> None:
        """Makes the folder of an object. Object stores have no folders, and the memory store makes them itself."""
        if getattr(self._fs, "protocol", "") not in ("memory",) and not getattr(self._fs, "async_impl", False):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _stored(self, path: str, info: dict[str, Any]) -> Stored:
        when = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("last_modified")
        name = path[len(self._root) + 1 :] if path.startswith(self._root) else path.lstrip("/")[len(self._root) :]
        return Stored(name.lstrip("/"), int(info.get("size") or 0), _micros(when))


class _Told(Callback):
    """Counts the bytes that fsspec reports as sent, and passes them to the throttle."""

    def __init__(self, throttle: Throttle) -> None:
        super().__init__()
        self._throttle, self.bytes = throttle, 0

    def relative_update(self, inc: int = 1) -> None:
        self.bytes += inc
        self._throttle(inc)


def _micros(when: Any) -> int:
    if isinstance(when, datetime):
        return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1e6)
    if isinstance(when, str):
        return _micros(datetime.fromisoformat(when))
    return int(float(when or 0) * 1e6)
