"""Files of a commit log. What is appended, made or removed is durable when the call returns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from stateflow.durable import sync
from stateflow.storage.commit_records import segment_name


class SegmentFiles(Protocol):
    """Raises OSError. Not thread-safe but for :meth:`remove`."""

    def read(self) -> Sequence[tuple[int, bytes]]:
        """(number, content) of each segment, by number."""
        ...

    def create(self, number: int, data: bytes) -> None:
        """Or begin it anew. It is the one that is appended to, unless this raises. What was appended to those before is
        durable by then, also by a process that has ended: a loss of power leaves no gap in front of it."""
        ...

    def append(self, data: bytes, *, sync: bool = True) -> None:
        """One write."""
        ...

    def truncate(self, size: int) -> None:
        """Of the one that is appended to: what is behind so many bytes goes."""
        ...

    def remove(self, numbers: Sequence[int]) -> None:
        """In this order, power loss or not."""
        ...

    def close(self) -> None: ...


class DirectorySegments:
    """In a directory of their own, which is made with the first one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: int | None = None

    def read(self) -> Sequence[tuple[int, bytes]]:
        paths = sorted(self._directory.glob("*" + Path(segment_name(0)).suffix))
        return [(int(path.stem), path.read_bytes()) for path in paths]

    def create(self, number: int, data: bytes) -> None:
        self._directory.mkdir(exist_ok=True)
        if self._file is not None:
            os.fdatasync(self._file)
        else:
            for path in sorted(self._directory.glob("*" + Path(segment_name(0)).suffix)):
                sync(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self._directory / segment_name(number), flags, 0o600)
        try:
            _write(file, data)
            os.fsync(file)
            sync(self._directory)
            sync(self._directory.parent)
        except BaseException:
            os.close(file)
            raise
        self.close()
        self._file = file

    def append(self, data: bytes, *, sync: bool = True) -> None:
        assert self._file is not None
        _write(self._file, data)
        if sync:
            os.fdatasync(self._file)

    def truncate(self, size: int) -> None:
        assert self._file is not None
        os.ftruncate(self._file, size)
        os.fsync(self._file)

    def remove(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            (self._directory / segment_name(number)).unlink(missing_ok=True)
            sync(self._directory)  # one by one: a loss of power may not bring an older one back beside a gap

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
