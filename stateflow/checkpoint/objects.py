"""Access to a backend that cannot hang: every call is bounded in time, and fails with an error of stateflow's.

A transfer may take any time, but only a bounded time without progress. A call that does not return is left behind in a
daemon thread, and the caller gets Unavailable.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import fsspec

from stateflow.checkpoint.backend import Backend, FsspecBackend, LocalBackend, Stored, Throttle
from stateflow.errors import CheckpointStoreMissing, ExtraMissing, InvalidArgument, StateflowError, Unavailable
from stateflow.masking import masked

T = TypeVar("T")
TIMEOUT_S = 60.0
#: a piece that is sent or fetched without visible progress may take the timeout and the time for it at this rate, as a
#: slow link is not a broken one
BYTES_PER_S_MIN = 32 << 10
#: interval at which the progress of a transfer is checked
LOOK_S = 0.5
#: schemes whose fsspec implementation is an extra of this package
_EXTRAS: Final = {"s3": "pip install 'stateflow-streams[s3]'", "s3a": "pip install 'stateflow-streams[s3]'"}
LOCAL: Final = ("file", "local")
#: folder of files being written (local directories) and of probes (all stores)
TEMPORARY: Final = "tmp"
_END: Final = object()
#: errors of a write to a full disk
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Objects:
    """Objects of one store.

    Methods raise FileNotFoundError and FileExistsError where that is an answer, Unavailable for everything else.
    """

    def __init__(self, backend: Backend, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._backend = backend
        self._timeout_s = timeout_s

    def create(self, name: str, data: bytes) -> None:
        self._call(self._timeout_s, self._backend.create, name, data)

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        sent = 0

        def moved(size: int) -> None:
            nonlocal sent
            sent += 1
            throttle(size)
            sent += 1  # waiting for the throttle counts as progress

        piece = self._piece(path.stat().st_size)
        self._call(piece, self._backend.upload, name, path, moved, moved=lambda: sent)

    def read(self, name: str) -> bytes:
        return self._call(self._timeout_s, self._backend.read, name)

    def chunks(self, name: str) -> Iterator[bytes]:
        pieces = self._backend.chunks(name)
        while True:
            piece = self._call(self._timeout_s, next, pieces, _END)
            if piece is _END:
                return
            yield piece

    def download(self, name: str, file: BinaryIO, size: int) -> None:
        """Writes an object to an open, empty file.

        Args:
            size: expected size in bytes; of a longer object little more is read.
        """
        descriptor = file.fileno()
        piece = self._piece(size)
        self._call(piece, self._backend.download, name, file, size, moved=lambda: os.fstat(descriptor).st_size)

    def _piece(self, size: int) -> float:
        """Returns how long a transfer of ``size`` bytes may show no progress, in seconds."""
        return self._timeout_s + min(size, self._backend.piece_bytes) / BYTES_PER_S_MIN

    def list(self, prefix: str) -> list[Stored]:
        return self._call(self._timeout_s, self._backend.list, prefix)

    def stat(self, name: str) -> Stored | None:
        return self._call(self._timeout_s, self._backend.stat, name)

    def delete(self, name: str) -> None:
        self._call(self._timeout_s, self._backend.delete, name)

    def now_us(self) -> int:
        """Returns the time of the clock that dates objects in the store, which need not be this machine's."""
        probe = f"{TEMPORARY}/{uuid.uuid4().hex}"
        self.create(probe, b"now")
        try:
            made = self.stat(probe)
        finally:
            self.delete(probe)
        if made is None:
            raise Unavailable(
                "the checkpoint store lost an object just written", remedy="check the store", url=self.url
            )
        return made.modified_us

    def _call(
        self, timeout_s: float, work: Callable[..., T], *arguments: Any, moved: Callable[[], int] = lambda: 0
    ) -> T:
        """Runs a call in a thread and waits for it. Raises Unavailable on timeout.

        Args:
            timeout_s: maximum time from the beginning, and from the last time that ``moved`` returned another number.
        """
        outcome: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work(*arguments))
            except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
                failure.append(error)

        thread = threading.Thread(target=run, name="checkpoint store", daemon=True)
        thread.start()
        last, left = moved(), timeout_s
        while left > 0:
            thread.join(min(left, LOOK_S))
            if not thread.is_alive():
                break
            left -= LOOK_S
            if (now := moved()) != last:
                last, left = now, timeout_s
        if failure:
            raise self._meaning(failure[0])
        if not outcome:
            raise Unavailable(
                f"the checkpoint store did not answer within {timeout_s:.0f} s",
                remedy="check that it is running and reachable; the next checkpoint tries again",
                url=self.url,
            )
        return outcome[0]

    def _meaning(self, error: BaseException) -> BaseException:
        if isinstance(error, (FileNotFoundError, FileExistsError, StateflowError)):
            return error
        if not isinstance(error, Exception):
            return error
        full = isinstance(error, OSError) and error.errno in FULL
        said = Unavailable(
            f"the checkpoint store failed: {_first_line(error)}",
            remedy="free space, or delete unneeded checkpoints with `stateflow checkpoint gc`"
            if full
            else "check that it is reachable and writable; the next checkpoint tries again",
            url=self.url,
        )
        said.__cause__ = error
        return said


def _first_line(error: BaseException) -> str:
    lines = masked(str(error)).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def open_backend(url: str, *, create: bool = True, **options: Any) -> Backend:
    """Returns the backend of a directory or fsspec URL.

    Raises InvalidArgument for an unusable place, CheckpointStoreMissing for a missing directory unless ``create``, and
    ExtraMissing for a scheme whose package is not installed.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in ("", *LOCAL):
        root = Path(url.partition("://")[2] if scheme else url).absolute()
        if not root.is_dir():
            if not create:
                raise CheckpointStoreMissing(
                    "no checkpoint store there: no such directory", remedy="check that it is mounted", url=url
                )
            there = next(path for path in (root, *root.parents) if path.exists())
            if not there.is_dir():
                raise _unusable(url, f"{there} is not a directory")
        return LocalBackend(root)  # its directory is made with its marker, not before
    try:
        if scheme in _EXTRAS:
            options.setdefault("use_listings_cache", False)
        fs, root_path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ExtraMissing(
            f"{scheme}:// needs a package that is not installed: {_first_line(error)}",
            remedy=_EXTRAS.get(scheme, "install that package"),
            url=masked(url),
        ) from error
    except (ValueError, OSError) as error:
        raise _unusable(url, _first_line(error)) from error
    return FsspecBackend(fs, root_path)


def place_of(url: str) -> str:
    """Returns one spelling of a place, as far as that is possible without accessing it."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in LOCAL:
        return str(Path(rest if separator else url).resolve())
    return f"{scheme}://{rest.rstrip('/')}"


def _unusable(url: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"checkpoints cannot be stored there: {why}", remedy="name a writable directory or fsspec URL", url=masked(url)
    )
