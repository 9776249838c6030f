"""Segment files of a commit log. A change is durable when the call returns, except an append without ``sync``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from stateflow.durable import sync
from stateflow.storage.commit_records import segment_name


class SegmentFiles(Protocol):
    """Segment files of one commit log. Methods raise OSError; only :meth:`remove` is thread-safe."""

    def read(self) -> Sequence[tuple[int, bytes]]:
        """Returns (number, content) of each segment, by number."""
        ...

    def create(self, number: int, data: bytes) -> None:
        """Creates a segment, or starts it anew, and appends to it from now on, unless this raises.

        What was appended to earlier segments is durable by then, even what a former process appended: power loss leaves
        no gap before the new segment.
        """
        ...

    def append(self, data: bytes, *, sync: bool = True) -> None:
        """Appends with one write. ``sync``: the data is durable when this returns."""
        ...

    def truncate(self, size: int) -> None:
        """Cuts the segment that is appended to down to ``size`` bytes."""
        ...

    def remove(self, numbers: Sequence[int]) -> None:
        """Removes segments in the given order, even across power loss."""
        ...

    def close(self) -> None: ...


class DirectorySegments:
    """Segments in a directory of their own, which is made with the first segment."""

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
            sync(self._directory)  # one by one: power loss must not bring back an older segment without the next

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
