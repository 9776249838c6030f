"""Backends of checkpoint stores that wrap a sound backend and misbehave, and very small checkpoints."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stateflow.checkpoint import Manifest, ManifestFile
from stateflow.checkpoint.backend import Backend, Stored, Throttle
from stateflow.partition.change_feed import FileDigests, base_digest
from stateflow.types import PartitionId

P = PartitionId("Op", 3)
WRITES = ("create", "upload", "delete")


class Wrapper:
    """A backend that calls ``before`` and ``after`` around each operation of another backend.

    Both get the operation and the name of the object.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def piece_bytes(self) -> int:
        return self.inner.piece_bytes

    def before(self, operation: str, name: str) -> None: ...

    def after(self, operation: str, name: str) -> None: ...

    def _do(self, operation: str, name: str, *arguments: Any) -> Any:
        self.before(operation, name)
        result = getattr(self.inner, operation)(name, *arguments)
        self.after(operation, name)
        return result

    def create(self, name: str, data: bytes) -> None:
        self._do("create", name, data)

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        self._do("upload", name, path, throttle)

    def read(self, name: str) -> bytes:
        return self._do("read", name)

    def chunks(self, name: str) -> Iterator[bytes]:
        self.before("chunks", name)
        yield from self.inner.chunks(name)

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        self._do("download", name, file, expected)

    def list(self, prefix: str) -> list[Stored]:
        return self._do("list", prefix)

    def stat(self, name: str) -> Stored | None:
        return self._do("stat", name)

    def delete(self, name: str) -> None:
        self._do("delete", name)


class Steps(Wrapper):
    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.done: list[tuple[str, str]] = []


class Counting(Steps):
    def after(self, operation: str, name: str) -> None:
        self.done.append((operation, name))


class Failing(Wrapper):
    """A backend whose ``at``-th operation fails.

    Args:
        lost: the operation is done, and only its answer is lost; otherwise it is not done.
        error: the error that is raised.
    """

    def __init__(self, inner: Backend, at: int, *, lost: bool = False, error: OSError | None = None) -> None:
        super().__init__(inner)
        self.left = at
        self.lost = lost
        self.error = error or OSError(errno.EIO, "Input/output error")

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def before(self, operation: str, name: str) -> None:
        if not self.lost:
            self._count()

    def after(self, operation: str, name: str) -> None:
        if self.lost:
            self._count()


class Killing(Wrapper):
    """A backend that sends SIGKILL to this process before or, with ``after``, after the ``at``-th operation."""

    def __init__(self, inner: Backend, at: int, *, after: bool) -> None:
        super().__init__(inner)
        self.left = at
        self._after = after

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, operation: str, name: str) -> None:
        if not self._after:
            self._count()

    def after(self, operation: str, name: str) -> None:
        if self._after:
            self._count()


class Torn(Wrapper):
    """A backend without atomic writes: the ``at``-th write stores half of its content, and fails."""

    def __init__(self, inner: Backend, at: int, scratch: Path) -> None:
        super().__init__(inner)
        self.left = at
        self.scratch = scratch

    def _tears(self) -> bool:
        self.left -= 1
        return self.left == 0

    def create(self, name: str, data: bytes) -> None:
        if self._tears():
            self.inner.create(name, data[: len(data) // 2])
            raise OSError(errno.EIO, "connection reset")
        self.inner.create(name, data)

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        if self._tears():
            half = self.scratch / "half"
            half.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            self.inner.upload(name, half, throttle)
            raise OSError(errno.EIO, "connection reset")
        self.inner.upload(name, path, throttle)


class Lying(Wrapper):
    """A backend that flips one bit in everything that it reads."""

    def __init__(self, inner: Backend, seed: int = 0) -> None:
        super().__init__(inner)
        self.random = random.Random(seed)

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return data
        at = self.random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << self.random.randrange(8))]) + data[at + 1 :]

    def read(self, name: str) -> bytes:
        return self._flip(self.inner.read(name))

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        for data in self.chunks(name):
            file.write(data)

    def chunks(self, name: str) -> Iterator[bytes]:
        yield self._flip(b"".join(self.inner.chunks(name)))


class Later(Wrapper):
    """A backend whose clock has advanced by a number of seconds since its objects were written.

    ``stat``, by which a collection reads that clock, says later times than ``list``.
    """

    def __init__(self, inner: Backend, seconds: float) -> None:
        super().__init__(inner)
        self._micros = int(seconds * 1e6)

    def stat(self, name: str) -> Stored | None:
        found = self.inner.stat(name)
        return found and Stored(found.name, found.size, found.modified_us + self._micros)


class Silent(Wrapper):
    """A backend that blocks every operation until ``answer`` is set."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.answer = threading.Event()

    def before(self, operation: str, name: str) -> None:
        self.answer.wait()


class Slow(Wrapper):
    """A backend that calls ``wait`` before every operation."""

    def __init__(self, inner: Backend, wait: Callable[[], None]) -> None:
        super().__init__(inner)
        self.wait = wait

    def before(self, operation: str, name: str) -> None:
        self.wait()


def small(folder: Path, **content: str) -> Path:
    """Creates a directory with these files below ``folder``, in place of a snapshot of a database."""
    directory = folder / f"snapshot-{len(list(folder.iterdir()))}"
    directory.mkdir(parents=True)
    for name, text in content.items():
        (directory / name).write_text(text)
    return directory


def manifest_of(
    directory: Path, epoch: int = 1, sequence: int = 1, partition: PartitionId = P, **fields: Any
) -> Manifest:
    files = FileDigests().files(directory)
    values: dict[str, Any] = {
        "positions": {"s": sequence},
        "created_us": 1_700_000_000_000_000,
        "replica": "edge-0",
        "watermark_us": 7,
        "schema": [{"name": "n", "kind": "value", "coders": ["int64"], "tag": "00"}],
        "target": "module:Op",
        "partitions": 1,
        "key": ("k",),
    }
    return Manifest(
        operator=partition.operator,
        partition=partition.partition,
        epoch=epoch,
        sequence=sequence,
        digest=base_digest(files, sequence),
        files=tuple(ManifestFile(file.name, file.size, file.digest) for file in files),
        **{**values, **fields},
    )


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
