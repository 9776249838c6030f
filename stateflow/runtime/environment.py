"""The computer under a replica: databases, files, locks. Handed in, so that a simulation can take its place and
forget, on a power loss, whatever was not synced."""

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

#: of the cache of a database that is read once, from its begin to its end
APART_BYTES = 8 << 20


class Closable(Protocol):
    def close(self) -> None: ...


class WorkLock:
    """A re-entrant lock that can be taken away from a thread that never gives it back."""

    __slots__ = ("_lock",)
    #: who waits for it looks this often whether it was taken away, seconds
    LOOK_S = 0.25

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()

    def __enter__(self) -> None:
        while not self.acquire(self.LOOK_S):
            pass

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, wait_s: float) -> bool:
        """Waits so long for it at most. True: it is to be released."""
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
        if lock._is_owned():  # else it was taken away meanwhile
            lock.release()

    def take_away(self) -> None:
        """Whoever has it has it no more."""
        self._lock = threading.RLock()


def claim(directory: Path, file_name: str) -> TextIO:
    """By a file in it, which has the number of the process that has claimed it. See :meth:`Environment.claim`."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o777 & ~UMASK)
        keep_private(directory)
        file = (directory / file_name).open("a+")
    except OSError as error:
        raise InvalidArgument(
            f"the data directory cannot be used: {error.strerror}",
            remedy="name a writable one",
            path=directory,
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise DataDirLocked(
            "another replica holds the data directory",
            remedy="stop that replica, or give this one its own --data-dir",
            path=directory,
            pid=holder,
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def place_of(directory: Path) -> str:
    """Where a claimed directory is: no two processes of one place hold the claim at once. Copies have other places,
    on this machine or another; after a restart of the machine it is another place as well."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = f"{uuid.getnode():x}"
    lock = (directory / "LOCK").stat()
    return f"{machine}/{lock.st_dev:x}/{lock.st_ino:x}"


def disk_of(place: str) -> str:
    """Which one a place is on: of two places on one disk it is the same."""
    return place.rpartition("/")[0] or place


class Environment:
    """The real one."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._engine = RocksEngine(settings.block_cache_bytes, settings.write_buffer_bytes)

    def open(self, directory: Path, *, create: bool = False, up_to_damage: bool = False) -> PartitionStore:
        """A partition's database. Raises StateMissing, StateDamaged, DataDirLocked.

        Args: up_to_damage: what it has logged behind damage is dropped, which a loss of power leaves.
        """
        return self._engine.open(directory, create=create, up_to_damage=up_to_damage)

    def expect(self, databases: int) -> None:
        """So many are to be open at a time. Raises TooFewFiles."""
        self._engine.expect(databases)

    def open_read_only(self, directory: Path, *, up_to_damage: bool = False) -> PartitionStore:
        """A snapshot of one, with nothing written."""
        return self._engine.open_read_only(directory, up_to_damage=up_to_damage)

    def open_apart(self, directory: Path) -> PartitionStore:
        """As ``open_read_only``, with a cache of its own: what is read once is not to push out what is read again."""
        return RocksEngine(APART_BYTES, APART_BYTES).open_read_only(directory)

    def sync_database(self, directory: Path) -> None:
        """What was written to the database there is durable, whether somebody has it open or not."""
        for path in sorted(directory.glob("*.log")):  # in order: a later one says nothing without the former
            with contextlib.suppress(FileNotFoundError):  # it is in a sorted file by now
                self.sync([path])
        self.sync([directory])

    def segments(self, directory: Path) -> SegmentFiles:
        """Of the commit log there."""
        return DirectorySegments(directory)

    def copy(self, directory: Path, to: Path) -> None:
        """A partition's database that nobody has open, as another one. Sorted files never change and are shared.

        A snapshot would do, but for it the database must be opened, and what rocksdict opens holds up every thread.
        """
        to.mkdir(parents=True)
        for path in directory.iterdir():
            if path.suffix == ".sst":
                (to / path.name).hardlink_to(path)
            elif path.is_file() and path.name != "LOCK":
                shutil.copyfile(path, to / path.name)

    def mutex(self) -> AbstractContextManager[Any]:
        """A re-entrant lock between the threads of this process."""
        return threading.RLock()

    def work_lock(self) -> WorkLock:
        return WorkLock()

    def aside(self, work: Callable[[], None], wait_s: float = 0.0) -> None:
        """In a thread of its own, which may never come back. Waits so long for it at most."""
        thread = threading.Thread(target=work, name="aside", daemon=True)
        thread.start()
        thread.join(wait_s)

    def claim(self, directory: Path) -> Closable:
        """This process's alone until closed; made if need be. Raises DataDirLocked, InvalidArgument."""
        return claim(directory, "LOCK")

    def place(self, directory: Path) -> str:
        """See :func:`place_of`."""
        return place_of(directory)

    def new_id(self) -> str:
        """One that was never given before."""
        return uuid.uuid4().hex

    def write_durably(self, path: Path, content: str | bytes) -> None:
        """All of it, or what was there before; the former, power loss or not, once this returns."""
        write_durably(path, content)

    def sync(self, paths: Iterable[Path]) -> None:
        """Contents of these files, and entries of these directories, survive power loss from here on."""
        for path in paths:
            sync(path)

    def free_bytes(self, path: Path) -> int:
        """Of the disk that ``path`` is on."""
        return shutil.disk_usage(path).free

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
