"""Access to checkpoint objects: backends that store them, bounded calls of a backend, and a site's cache of blobs.

:class:`Backend` is a small contract, kept by a local directory (:class:`LocalBackend`) and by everything that fsspec
supports (:class:`FsspecBackend`). Names are relative paths with ``/``. ``create`` and ``upload`` store the whole object
or nothing, as far as the store supports that: in a local directory by a hard link to a synced temporary file, in object
stores by one put.

Everything else uses a backend through :class:`Objects`, whose calls cannot hang. A :class:`SiteCache` keeps copies of
blobs near the replicas when the store is far away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, TypeGuard, TypeVar

import fsspec
import xxhash
from fsspec.callbacks import Callback

from stateflow.errors import CheckpointStoreMissing, ExtraMissing, InvalidArgument, StateflowError, Unavailable
from stateflow.private import masked

CHUNK_BYTES = 4 << 20
PIECE_BYTES = 1 << 20
#: called with the number of bytes just written; may wait
Throttle = Callable[[int], None]
T = TypeVar("T")
TIMEOUT_S = 60.0
#: slowest rate of a link that does not count as broken: a piece may show no progress for the timeout plus the time that
#: its bytes take at this rate
BYTES_PER_S_MIN = 32 << 10
#: interval at which the progress of a transfer is checked
LOOK_S = 0.5
#: maximum number of calls of one store that were given up and still run; each costs a thread
HUNG_MAX = 8
#: how to install the extra of this package that a scheme needs
_EXTRAS: Final = {"s3": "pip install 'stateflow-streams[s3]'", "s3a": "pip install 'stateflow-streams[s3]'"}
LOCAL: Final = ("file", "local")
#: folder of files being written (local directories) and of probes (all stores)
TEMPORARY: Final = "tmp"
_END: Final = object()
#: errors of a write to a full disk
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException | None) -> TypeGuard[OSError]:
    """Returns whether a write failed because a disk or its quota is full."""
    return isinstance(error, OSError) and error.errno in FULL


# -- Backends --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    size: int
    modified_us: int


class Backend(Protocol):
    """Storage of objects by name.

    Methods raise FileNotFoundError, FileExistsError, other OSErrors, or any error of their client library.

    Attributes:
        piece_bytes: an upload or download shows progress at least once per this number of bytes.
    """

    @property
    def piece_bytes(self) -> int: ...

    def create(self, name: str, data: bytes) -> None:
        """Creates an object, which readers see whole or not at all. Raises FileExistsError, and changes nothing, if the
        object exists."""
        ...

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        """Stores a file's content as an object, in place of an existing one."""
        ...

    def read(self, name: str) -> bytes: ...

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the content of an object in pieces of at most CHUNK_BYTES."""
        ...

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        """Writes the content of an object to an open, empty file. Content of more than ``expected`` bytes is not read
        to its end, but the file then has more than ``expected`` bytes, too."""
        ...

    def list(self, prefix: str) -> list[Stored]:
        """Returns every object below a folder; empty when there is no such folder."""
        ...

    def stat(self, name: str) -> Stored | None: ...

    def delete(self, name: str) -> None:
        """Deletes an object. It is no error if the object does not exist."""
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
            except FileExistsError:  # damaged, or with the same content: replaced at once, because others may read it
                temporary.replace(self.root / name)
                _sync_folder((self.root / name).parent)
        finally:
            temporary.unlink(missing_ok=True)

    def _temporary(self) -> Path:
        folder = self.root / self.TEMPORARY
        _make_folder(folder)
        return folder / uuid.uuid4().hex

    def _link(self, temporary: Path, name: str) -> None:
        target = self.root / name
        _make_folder(target.parent)
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
        for folder, _, files in os.walk(self.root / prefix, onerror=_raise_unless_gone):
            for file in files:
                path = Path(folder) / file
                with contextlib.suppress(FileNotFoundError):  # deleted since
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


def _raise_unless_gone(error: OSError) -> None:
    """Re-raises an error unless the folder is gone. An unreadable folder must not count as empty: a collection would
    delete the blobs that its manifests name."""
    if not isinstance(error, FileNotFoundError):
        raise error


def write_whole(file: BinaryIO, data: bytes) -> None:
    """Writes all of ``data``. When a disk becomes full, an unbuffered file stores only the beginning of the data, and
    only the next write raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _make_folder(path: Path) -> None:
    """Creates a folder and its parents. The entry of each in its parent survives power loss, too: otherwise what is
    synced inside could be lost with its folder."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        _sync(folder)
    finally:
        os.close(folder)


class FsspecBackend:
    """Any file system that fsspec supports.

    ``create`` is one conditional put if the store supports that (memory, S3, GCS). Otherwise ``create`` first checks
    that the object does not exist; then two writers that create the same name at the same instant both succeed.
    """

    piece_bytes = sys.maxsize  # fsspec sends small objects in one piece, up to a size that is not known here

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._changed = threading.Condition()
        #: objects being created
        self._creating: set[str] = set()

    def create(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._alone(path):
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

    @contextlib.contextmanager
    def _alone(self, path: str) -> Iterator[None]:
        """Lets one thread at a time create an object. Other objects do not wait for it, as the store may hang."""
        with self._changed:
            self._changed.wait_for(lambda: path not in self._creating)
            self._creating.add(path)
        try:
            yield
        finally:
            with self._changed:
                self._creating.discard(path)
                self._changed.notify_all()

    def upload(self, name: str, path: Path, throttle: Throttle) -> None:
        self._folder(self._path(name))
        progress = _Progress(throttle)
        self._fs.put_file(str(path), self._path(name), callback=progress)
        throttle(max(0, path.stat().st_size - progress.bytes))

    def read(self, name: str) -> bytes:
        data: bytes = self._fs.cat_file(self._path(name))
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        with self._fs.open(self._path(name), "rb", block_size=CHUNK_BYTES) as file:
            while data := file.read(CHUNK_BYTES):
                yield data

    def download(self, name: str, file: BinaryIO, expected: int) -> None:
        for data in self.chunks(name):
            write_whole(file, data)
            if file.tell() > expected:
                return

    def list(self, prefix: str) -> list[Stored]:
        self._fs.invalidate_cache()
        try:
            # by default fsspec leaves out folders that it cannot read
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
        """Creates the folder of an object. Object stores have no folders, and the memory store creates them itself."""
        if getattr(self._fs, "protocol", "") not in ("memory",) and not getattr(self._fs, "async_impl", False):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _stored(self, path: str, info: dict[str, Any]) -> Stored:
        when = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("last_modified")
        name = path[len(self._root) + 1 :] if path.startswith(self._root) else path.lstrip("/")[len(self._root) :]
        return Stored(name.lstrip("/"), int(info.get("size") or 0), _micros(when))


class _Progress(Callback):
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


# -- Bounded calls ---------------------------------------------------------------------------------------------------


class Objects:
    """Access to the objects of one store by calls that cannot hang: each is bounded in time.

    A transfer may take any time as long as it makes progress; the time without progress is bounded. If a call does not
    return in time, the caller gets Unavailable, and the call goes on in a daemon thread. While HUNG_MAX such calls go
    on, further ones are not begun.

    Methods raise FileNotFoundError and FileExistsError if these are the store's answer, and Unavailable for every other
    failure.
    """

    def __init__(self, backend: Backend, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._backend = backend
        self._timeout_s = timeout_s
        self._counting = threading.Lock()
        #: calls that were given up
        self._hung: list[threading.Thread] = []

    def create(self, name: str, data: bytes) -> None:
        self._call(self._timeout_s, self._backend.create, name, data)

    def create_own(self, name: str, data: bytes) -> None:
        """Creates an object under a name that no other process uses. If it exists, an earlier attempt has made it:
        clients of object stores repeat a call whose answer was lost."""
        with contextlib.suppress(FileExistsError):
            self.create(name, data)

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
            size: expected size in bytes; of a longer object, little more is read.
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
        """Returns the time of the clock that dates the store's objects, µs. It may differ from this machine's clock."""
        probe = f"{TEMPORARY}/{uuid.uuid4().hex}"
        self.create_own(probe, b"now")
        try:
            made = self.stat(probe)
        finally:
            self.delete(probe)
        if made is None:
            raise Unavailable(
                "the checkpoint store lost an object just written",
                remedy="check that nothing else deletes the store's objects",
                url=self.url,
            )
        return made.modified_us

    def _call(
        self, timeout_s: float, work: Callable[..., T], *arguments: Any, moved: Callable[[], int] = lambda: 0
    ) -> T:
        """Runs a call in a thread and waits for it. Raises Unavailable on timeout, and if too many earlier calls hang.

        Args:
            timeout_s: maximum time without progress: since the call began, or since ``moved`` last returned another
                number.
            moved: returns a number that changes whenever the call makes progress.
        """
        self._check_hung()
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
            with self._counting:
                self._hung.append(thread)
            raise Unavailable(
                f"the checkpoint store did not answer within {timeout_s:.0f} s",
                remedy="check that it is running and reachable; the next checkpoint tries again",
                url=self.url,
            )
        return outcome[0]

    def _check_hung(self) -> None:
        with self._counting:
            self._hung = [thread for thread in self._hung if thread.is_alive()]
            hung = len(self._hung)
        if hung >= HUNG_MAX:
            raise Unavailable(
                f"{hung} earlier calls to the checkpoint store have not returned yet",
                remedy="check that it is running and reachable; if it answers others, restart this process",
                url=self.url,
            )

    def _meaning(self, error: BaseException) -> BaseException:
        if isinstance(error, (FileNotFoundError, FileExistsError, StateflowError)):
            return error
        if not isinstance(error, Exception):
            return error
        said = Unavailable(
            f"the checkpoint store failed: {_first_line(error)}",
            remedy="free space, or delete unneeded checkpoints with `stateflow checkpoint gc`"
            if is_full(error)
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

    Raises InvalidArgument for an unusable URL, CheckpointStoreMissing for a missing directory unless ``create``, and
    ExtraMissing for a scheme whose package is not installed.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme in ("", *LOCAL):
        given = url.partition("://")[2] if scheme else url
        if not given:
            raise _unusable(url, "it is empty")
        root = Path(given).absolute()
        if not root.is_dir():
            if not create:
                raise CheckpointStoreMissing(
                    "the directory of the checkpoint store does not exist", remedy="check that it is mounted", url=url
                )
            there = next(path for path in (root, *root.parents) if path.exists())
            if not there.is_dir():
                raise _unusable(url, f"{there} is not a directory")
        return LocalBackend(root)  # the directory is created together with the store's marker
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
    """Returns the canonical spelling of a store's URL, as far as that is possible without accessing it."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in LOCAL:
        return str(Path(rest if separator else url).resolve())
    return f"{scheme}://{rest.rstrip('/')}"


def _unusable(url: str, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"checkpoints cannot be stored at this URL: {why}",
        remedy="name a writable directory or fsspec URL",
        url=masked(url),
    )


# -- Cache of a site -------------------------------------------------------------------------------------------------


class SiteCache:
    """A directory with a site's copies of blobs, unencoded and named by digest.

    The replicas of one machine share it. Its content is not trusted: it is hashed each time it is used, and content
    that does not match is dropped and fetched again. Raises InvalidArgument for a size below 1, or a directory that
    cannot be made.

    Args:
        bytes_max: total size in bytes above which the least recently used blobs are dropped. A process notices what
            others have stored once it has stored a sixteenth of that itself.
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
        self._spare = bytes_max // 16
        self._counting = threading.Lock()
        #: total size as far as this process knows; at first it knows nothing, so that it lists the directory
        self._total = bytes_max
        #: bytes stored by this process since it listed the directory
        self._added = 0

    def get(self, digest: str, target: Path) -> bool:
        """Copies verified content to ``target``, a new file. Returns False if the cache lacks it, or cannot be read.
        Raises OSError if ``target`` cannot be written."""
        place = self._place(digest)
        try:
            cached = place.open("rb", buffering=0)
        except OSError:  # absent, or not for this user
            return False
        with cached:
            found = _hashed_copy(cached, target)
        if found != digest:
            target.unlink()
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
            return False
        with contextlib.suppress(OSError):
            os.utime(place)
        return True

    def put(self, digest: str, source: Path) -> None:
        """Stores a copy of a file whose content has this digest. A failure, such as a full disk, is ignored."""
        temporary = self._directory / f"new-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            place = self._place(digest)
            if place.exists() or source.stat().st_size > self._bytes_max:
                return
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, temporary)
                temporary.replace(place)
            except OSError:
                temporary.unlink(missing_ok=True)
                return
            size = place.stat().st_size
            with self._counting:
                self._total += size
                self._added += size
                if self._total > self._bytes_max or self._added > self._spare:
                    self._shrink(place)

    def _shrink(self, kept: Path) -> None:
        """Lists the directory. If it exceeds the limit, drops files other than ``kept``: a little more than needed, as
        otherwise each file that is stored in a full cache would cost a listing."""
        files, total = [], 0
        for path in self._directory.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    stat = path.stat()
                    total += stat.st_size
                    if path != kept:
                        files.append((stat.st_mtime_ns, stat.st_size, path))
        least = self._bytes_max - self._spare if total > self._bytes_max else total
        for _, size, path in sorted(files):
            if total <= least:
                break
            path.unlink(missing_ok=True)
            total -= size
        self._total, self._added = total, 0

    def _place(self, digest: str) -> Path:
        return self._directory / digest[:2] / digest


def _hashed_copy(source: FileIO, target: Path) -> str:
    """Copies a file and returns the xxh3_128 of what was copied, hexadecimal; empty if the source cannot be read.
    Raises OSError if the target cannot be written."""
    hasher = xxhash.xxh3_128()
    with target.open("wb", buffering=0) as out:
        while True:
            try:
                data = source.read(CHUNK_BYTES)
            except OSError:
                return ""
            if not data:
                break
            hasher.update(data)
            write_whole(out, data)
    digest: str = hasher.hexdigest()
    return digest
