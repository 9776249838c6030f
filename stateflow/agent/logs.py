"""Logs of replicas: files that rotate when they are large, and their readers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

#: size of one file, and number of older files that are kept
FILE_BYTES, OLDER = 8 << 20, 4
PIECE_BYTES = 64 << 10


def older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


class Rotating:
    """A file that is appended to. A full file becomes ``NAME.1``, that one ``NAME.2``, …; the oldest one is dropped.

    Data that the disk does not take is dropped, as logging must not wait. The next write is tried again.
    """

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES, kept: int = OLDER) -> None:
        self._path, self._file_bytes, self._kept = path, file_bytes, kept
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> bool:
        """Appends data. Returns False where it was dropped."""
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
    """Starts a thread that copies a pipe to a log, to the end of the pipe. Returns the thread.

    It goes on even if the disk takes nothing, as a process that writes into a full pipe waits for ever.
    """

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
    """Reads a log that may be written and rotated meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def last(self, lines: int) -> Iterator[bytes]:
        """Yields the newest lines in pieces, also from the file before this one. :meth:`more` returns later ones."""
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
        """Returns what was written since the last read; empty: nothing."""
        self._open()
        if self._file is None:
            return b""
        data = self._file.read(PIECE_BYTES)
        if not data and self._is_over():
            data = self._file.read(PIECE_BYTES)  # what was written before the file was rotated
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
        """Tells whether the file was rotated, so that another one has its name."""
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
