"""What replicas say: files that begin anew when they are large, and who reads along."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

#: of one file; so many older ones are kept
FILE_BYTES, OLDER = 8 << 20, 4
PIECE_BYTES = 64 << 10


def older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


class Rotating:
    """A file that is appended to. When it is full it becomes ``NAME.1``, that ``NAME.2``, …; the oldest is dropped.

    What the disk does not take is dropped, and what follows is tried again: whoever logs is not to wait for it.
    """

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES, kept: int = OLDER) -> None:
        self._path, self._file_bytes, self._kept = path, file_bytes, kept
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> bool:
        """False: it was dropped."""
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file = self._path.open("ab", buffering=0)
            if self._file.tell() + len(data) > self._file_bytes and self._file.tell():
                self._rotate()
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)
        except OSError:
            self.close()
            return False
        return True

    def _rotate(self) -> None:
        self.close()
        for number in range(self._kept - 1, 0, -1):
            if older(self._path, number).exists():
                older(self._path, number).replace(older(self._path, number + 1))
        if self._kept:
            self._path.replace(older(self._path, 1))
        else:
            self._path.unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def pump(pipe: IO[bytes], path: Path, name: str) -> threading.Thread:
    """A thread that writes what comes out of a pipe to the log, until its end. It goes on whatever the disk does: who
    writes into a pipe that is full waits for ever."""

    def run() -> None:
        log = Rotating(path)
        with pipe:
            while data := os.read(pipe.fileno(), PIECE_BYTES):
                log.write(data)
        log.close()

    thread = threading.Thread(target=run, name=f"log of {name}", daemon=True)
    thread.start()
    return thread


class Reader:
    """Of a log that may be written and begun anew meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def last(self, lines: int) -> Iterator[bytes]:
        """The newest lines, in pieces; also from the file before this one. What comes later, :meth:`more` has."""
        self._open()
        found = b"" if self._file is None else self._file.read()
        data = found
        if data.count(b"\n") < lines:
            try:
                data = older(self._path, 1).read_bytes() + data
            except OSError:
                pass
        kept = data.splitlines(keepends=True)
        data = b"".join(kept[len(kept) - lines :] if 0 < lines < len(kept) else kept if lines else [])
        for at in range(0, len(data), PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]

    def more(self) -> bytes:
        """What was written since; empty: nothing."""
        self._open()
        if self._file is None:
            return b""
        data = self._file.read(PIECE_BYTES)
        if not data and self._is_over():
            data = self._file.read(PIECE_BYTES)  # what came before its turn was over
            if not data:
                self.close()
                self._open()
                data = b"" if self._file is None else self._file.read(PIECE_BYTES)
        return data

    def _open(self) -> None:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except OSError:
                self._file = None

    def _is_over(self) -> bool:
        """Did another file take its place?"""
        assert self._file is not None
        try:
            now, mine = self._path.stat(), os.fstat(self._file.fileno())
        except OSError:
            return False
        return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
