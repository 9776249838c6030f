"""Access of a replica to its machine: databases, files, locks. A replica gets it as an object, so that a simulation can
replace it and lose, at a power loss, all data that was not synced."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TextIO

from stateflow.durable import sync, write_durably
from stateflow.errors import DataDirLocked, InvalidArgument
from stateflow.private import UMASK, keep_private
from stateflow.settings import ReplicaSettings
from stateflow.storage import PartitionStore, RocksEngine
from stateflow.storage.segments import DirectorySegments, SegmentFiles

#: cache of a database that is read once, from begin to end, in bytes
APART_BYTES = 8 << 20


class Closable(Protocol):
    def close(self) -> None: ...


class WorkLock:
    """A re-entrant lock that can be taken away from a thread that never gives it back."""

    __slots__ = ("_lock",)
    #: interval at which a waiting thread checks whether the lock was taken away, in seconds
    LOOK_S = 0.25

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()

    def __enter__(self) -> None:
        while not self.acquire(self.LOOK_S):
            pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, wait_s: float) -> bool:
        """Waits at most ``wait_s`` seconds for the lock. Returns whether it was acquired, and must be released."""
        while True:
            lock, look_s = self._lock, min(wait_s, self.LOOK_S)
            if lock.acquire(timeout=look_s):
                if lock is self._lock:
                    return True
                lock.release()
            elif (wait_s := wait_s - look_s) <= 0:
                return False

    def release(self) -> None:
        lock = self._lock
        if lock._is_owned():  # otherwise it was taken away meanwhile
            lock.release()

    def take_away(self) -> None:
        """Takes the lock away from the thread that holds it, and frees it for others."""
        self._lock = threading.RLock()


def claim(directory: Path, file_name: str) -> TextIO:
    """Claims a directory by locking a file in it, which holds the id of the claiming process. See
    :meth:`Environment.claim`."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o777 & ~UMASK)
        keep_private(directory)
        file = (directory / file_name).open("a+")
    except OSError as error:
        raise InvalidArgument(
            f"the data directory cannot be used: {error.strerror}",
            remedy="choose a writable directory",
            path=directory,
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise DataDirLocked(
            "another replica uses the data directory",
            remedy="stop that replica, or give this one its own --data-dir",
            path=directory,
            pid=holder,
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def place_of(directory: Path) -> str:
    """Identifies a claimed directory by machine boot and lock file: no two processes with the same place hold the claim
    at once. Copies of a directory, on this machine or another, have other places; a reboot changes the place, too."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = f"{uuid.getnode():x}"
    lock = (directory / "LOCK").stat()
    return f"{machine}/{lock.st_dev:x}/{lock.st_ino:x}"


def disk_of(place: str) -> str:
    """Returns the disk part of a place, which two places on one disk share."""
    return place.rpartition("/")[0] or place


class Environment:
    """The real machine."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._engine = RocksEngine(settings.block_cache_bytes, settings.write_buffer_bytes)

    def open(self, directory: Path, *, create: bool = False, up_to_damage: bool = False) -> PartitionStore:
        """Opens a partition's database. Raises StateMissing, StateDamaged, DataDirLocked.

        Args:
            up_to_damage: drop the end of its write-ahead log from the first damage on, as a power loss leaves it.
        """
        return self._engine.open(directory, create=create, up_to_damage=up_to_damage)

    def expect(self, databases: int) -> None:
        """Checks that so many databases can be open at once. Raises TooFewFiles."""
        self._engine.expect(databases)

    def open_read_only(self, directory: Path, *, up_to_damage: bool = False) -> PartitionStore:
        """Opens a database without writing to it."""
        return self._engine.open_read_only(directory, up_to_damage=up_to_damage)

    def open_apart(self, directory: Path) -> PartitionStore:
        """Opens a database read-only with a cache of its own, so that data read once does not evict data that is read
        again."""
        return RocksEngine(APART_BYTES, APART_BYTES).open_read_only(directory)

    def sync_database(self, directory: Path) -> None:
        """Makes all writes to a database durable, whether it is open or not."""
        for path in sorted(directory.glob("*.log")):  # in order: a later log is of no use without the earlier ones
            with contextlib.suppress(FileNotFoundError):  # its data is in a sorted file by now
                self.sync([path])
        self.sync([directory])

    def segments(self, directory: Path) -> SegmentFiles:
        """Returns access to the segments of the commit log in a directory."""
        return DirectorySegments(directory)

    def copy(self, directory: Path, to: Path) -> None:
        """Copies a database that is not open to another directory. Sorted files never change, and are hard-linked.

        A snapshot would do as well, but needs the database open, and opening one with rocksdict blocks every thread.
        """
        to.mkdir(parents=True)
        for path in directory.iterdir():
            if path.suffix == ".sst":
                (to / path.name).hardlink_to(path)
            elif path.is_file() and path.name != "LOCK":
                shutil.copyfile(path, to / path.name)

    def mutex(self) -> AbstractContextManager[Any]:
        """Makes a re-entrant lock between the threads of this process."""
        return threading.RLock()

    def work_lock(self) -> WorkLock:
        return WorkLock()

    def aside(self, work: Callable[[], None], wait_s: float = 0.0) -> None:
        """Runs ``work`` in a thread of its own, which may never end. Waits at most ``wait_s`` seconds for it."""
        thread = threading.Thread(target=work, name="aside", daemon=True)
        thread.start()
        thread.join(wait_s)

    def claim(self, directory: Path) -> Closable:
        """Claims a data directory for this process until the result is closed, and creates the directory if necessary.
        Raises DataDirLocked, InvalidArgument."""
        return claim(directory, "LOCK")

    def place(self, directory: Path) -> str:
        """See :func:`place_of`."""
        return place_of(directory)

    def new_id(self) -> str:
        """Makes an id that was never given before."""
        return uuid.uuid4().hex

    def write_durably(self, path: Path, content: str | bytes) -> None:
        """Replaces a file atomically and durably: a power loss leaves the old content or the new one, and the new one
        once this returns."""
        write_durably(path, content)

    def sync(self, paths: Iterable[Path]) -> None:
        """Makes the contents of files and the entries of directories survive a power loss."""
        for path in paths:
            sync(path)

    def free_bytes(self, path: Path) -> int:
        """Returns the free bytes of the disk that ``path`` is on."""
        return shutil.disk_usage(path).free

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
