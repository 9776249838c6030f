"""A backend that cannot hang or surprise: every call is bounded in time, and fails with an error of ours.

A call that does not come back is left behind in a daemon thread; the caller goes on with Unavailable.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import fsspec

from stateflow.checkpoint.backend import Backend, FsspecBackend, LocalBackend, Stored, Throttle
from stateflow.errors import ExtraMissing, InvalidArgument, StateflowError, Unavailable

T = TypeVar("T")
TIMEOUT_S = 60.0
#: a transfer may take this long beside the timeout, so that slow links are slow and not broken
BYTES_PER_S_MIN = 1 << 20
#: schemes whose fsspec implementation is an extra of ours
_EXTRAS: Final = {"s3": "pip install 'stateflow[s3]'", "s3a": "pip install 'stateflow[s3]'"}
_END: Final = object()
#: the disk that was written to is full
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Objects:
    """Raises FileNotFoundError and FileExistsError where that is an answer, Unavailable for everything else."""

    def __init__(self, backend: Backend, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._backend = backend
        self._timeout_s = timeout_s

    def create(self, name: str, data: bytes) -> None:
        self._call(self._timeout_s, self._backend.create, name, data)

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        timeout_s = self._timeout_s + path.stat().st_size / BYTES_PER_S_MIN
        self._call(timeout_s, self._backend.upload, name, path, throttle)

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
        """Args: size: expected, bytes; it may take longer the larger it is."""
        self._call(self._timeout_s + size / BYTES_PER_S_MIN, self._backend.download, name, file)

    def list(self, prefix: str) -> list[Stored]:
        return self._call(self._timeout_s, self._backend.list, prefix)

    def stat(self, name: str) -> Stored | None:
        return self._call(self._timeout_s, self._backend.stat, name)

    def delete(self, name: str) -> None:
        self._call(self._timeout_s, self._backend.delete, name)

    def _call(self, timeout_s: float, work: Callable[..., T], *arguments: Any) -> T:
        outcome: list[T] = []
        failure: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work(*arguments))
            except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
                failure.append(error)

        thread = threading.Thread(target=run, name="checkpoint store", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if failure:
            raise self._meaning(failure[0])
        if not outcome:
            raise Unavailable(
                f"the checkpoint store did not answer within {timeout_s:.0f} s",
                remedy="check that it runs and can be reached; the next checkpoint tries again",
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
            remedy="free space, or collect what is not needed with `stateflow checkpoint gc`"
            if full
            else "check that it can be reached and written; the next checkpoint tries again",
            url=self.url,
        )
        said.__cause__ = error
        return said


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def open_backend(url: str, *, create: bool = True, **options: Any) -> Backend:
    """The backend of a directory or fsspec URL.

    Raises InvalidArgument for a place that cannot be, ExtraMissing for a scheme whose package is not installed.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in ("", "file", "local"):
        root = Path(url.partition("://")[2] if scheme else url).absolute()
        try:
            if create:
                root.mkdir(parents=True, exist_ok=True)
            elif not root.is_dir():
                raise FileNotFoundError(errno.ENOENT, "there is no such directory")
        except OSError as error:
            raise _unusable(url, error.strerror or str(error)) from error
        return LocalBackend(root)
    try:
        if scheme in _EXTRAS:
            options.setdefault("use_listings_cache", False)
        fs, root_path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ExtraMissing(
            f"{scheme}:// needs a package that is not installed: {_first_line(error)}",
            remedy=_EXTRAS.get(scheme, "install the package it names"),
            url=url,
        ) from error
    except (ValueError, OSError) as error:
        raise _unusable(url, _first_line(error)) from error
    return FsspecBackend(fs, root_path)


def _unusable(url: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"checkpoints cannot be kept there: {why}", remedy="name a writable directory or fsspec URL", url=url
    )
