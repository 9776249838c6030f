"""Environment of a replica: databases, files and locks of its machine, the memory of its process, and pacing.

A replica gets :class:`Environment`, its access to the machine, as an object, so that a simulation can replace it and
lose, at a power loss, all data that was not synced. A process that applies batches calls :func:`keep_buffers`, so that
the kernel does not delay its batches. :class:`RateLimit` and :class:`DutyCycle` slow transfers and background work
down.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import struct
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from stateflow.durable import sync, write_durably
from stateflow.errors import DataDirLocked, InvalidArgument
from stateflow.private import UMASK, keep_private
from stateflow.settings import ReplicaSettings
from stateflow.storage import PartitionStore, RocksEngine
from stateflow.storage.commit_log import DirectorySegments, SegmentFiles

#: size of the cache of a database that is read only once, in bytes
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
        """Waits at most ``wait_s`` seconds for the lock. Returns whether it was acquired; then the caller must release
        it."""
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
        if lock._is_owned():  # otherwise it was taken away
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
    """Returns the place of a claimed directory: the id of the machine's boot, the device and the inode of the lock
    file. Two processes with the same place cannot both hold the claim. Copies of a directory, on this machine or
    another, have other places; a reboot changes the place, too."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = f"{uuid.getnode():x}"
    lock = (directory / "LOCK").stat()
    return f"{machine}/{lock.st_dev:x}/{lock.st_ino:x}"


def disk_of(place: str) -> str:
    """Returns the disk part of a place, which two places on one disk share."""
    return place.rpartition("/")[0] or place


class RunningNote:
    """A note of what the process is doing, in a memory-mapped file.

    To change the note takes no system call. The kernel keeps it when the process ends, however it ends; a power loss
    may lose it.

    Attributes:
        found: note of the last process, and its number; None if that process ended without a note.
    """

    _BYTES = 4096
    _HEADER: Final = struct.Struct("<IIi")  # length of the text, CRC-32 of the text, number
    _NUMBER: Final = struct.Struct("<i")

    def __init__(self, file: Path) -> None:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            data = os.pread(descriptor, self._BYTES, 0)
            # written, not only reserved: the write of a mapped page for which a disk has no room would end the process
            os.pwrite(descriptor, bytes(self._BYTES), 0)
            os.ftruncate(descriptor, self._BYTES)
            self._page = mmap.mmap(descriptor, self._BYTES)
        finally:
            os.close(descriptor)
        self.found = self._read(data)

    def _read(self, data: bytes) -> tuple[str, int] | None:
        if len(data) < self._HEADER.size:
            return None
        length, crc, number = self._HEADER.unpack_from(data)
        text = data[self._HEADER.size : self._HEADER.size + length]
        if not length or len(text) != length or zlib.crc32(text) != crc:
            return None
        return text.decode(errors="replace"), number

    def begin(self, text: str) -> None:
        """Notes a text, with the number -1. A text that is too long is not noted."""
        data = text.encode()
        if len(data) > self._BYTES - self._HEADER.size:
            return
        self._page[self._HEADER.size : self._HEADER.size + len(data)] = data
        self._HEADER.pack_into(self._page, 0, len(data), zlib.crc32(data), -1)

    def at(self, number: int) -> None:
        """Changes the number of the note."""
        self._NUMBER.pack_into(self._page, self._HEADER.size - self._NUMBER.size, number)

    def end(self) -> None:
        self._HEADER.pack_into(self._page, 0, 0, 0, -1)


class Environment:
    """Access to the real machine: its databases, files, locks and threads."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._engine = RocksEngine(settings.block_cache_bytes, settings.write_buffer_bytes)

    def open(self, directory: Path, *, create: bool = False, up_to_damage: bool = False) -> PartitionStore:
        """Opens a partition's database. Raises StateMissing, StateDamaged, DataDirLocked, Unavailable.

        Args:
            up_to_damage: drop the end of the write-ahead log from the first damage on, which a power loss may cause.
        """
        return self._engine.open(directory, create=create, up_to_damage=up_to_damage)

    def expect(self, databases: int) -> None:
        """Checks that this number of databases can be open at once. Raises TooFewFiles."""
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
        logs = (path for path in directory.iterdir() if path.suffix == ".log")
        for path in sorted(logs):  # in order: a later log is of no use without the earlier ones
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
        """Returns the place of a claimed directory, see :func:`place_of`."""
        return place_of(directory)

    def new_id(self) -> str:
        """Returns a new unique id."""
        return uuid.uuid4().hex

    def write_durably(self, path: Path, content: str | bytes) -> None:
        """Replaces a file atomically and durably: a power loss leaves the old or the new content, and the new one once
        this returns."""
        write_durably(path, content)

    def sync(self, paths: Iterable[Path]) -> None:
        """Makes the contents of files and the entries of directories survive a power loss."""
        for path in paths:
            sync(path)

    def running_note(self, file: Path) -> RunningNote:
        """Returns the note of what this process is doing. Raises OSError."""
        return RunningNote(file)

    def free_bytes(self, path: Path) -> int:
        """Returns the free bytes of the disk that ``path`` is on."""
        return shutil.disk_usage(path).free

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


# -- Memory of the process between batches ---------------------------------------------------------------------------


#: mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: buffers up to this size, in bytes, stay with the process; it is the largest value that glibc accepts
KEPT_WHOLE_BYTES: Final = 32 << 20
#: free memory at the end of a heap that stays with the process, in bytes
KEPT_FREE_BYTES: Final = 64 << 20


def keep_buffers() -> bool:
    """Makes this process keep the memory of freed buffers for later ones. Returns False if the C library is not glibc;
    then nothing was set.

    glibc takes large buffers from the kernel and gives them back when they are freed; the kernel clears each page at
    its first touch. A batch needs several such buffers per megabyte of rows, of similar sizes from batch to batch.
    Encoding a message of 800 KB took 0.94 ms, of which 0.91 ms were page faults.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_WHOLE_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_FREE_BYTES))


# -- Pacing of transfers and background work. Sans-io: sizes and times in, seconds to wait out -----------------------


@dataclass(slots=True)
class RateLimit:
    """Keeps a stream of pieces at or below ``bytes_per_s``; 0: no limit. Unused time is saved up to ``burst_s``."""

    bytes_per_s: float
    burst_s: float = 0.05
    _free_at: float = 0.0

    def wait_s(self, now: float, size: int) -> float:
        """Returns the seconds to wait after a piece of ``size`` bytes that ended at ``now``."""
        if self.bytes_per_s <= 0:
            return 0.0
        self._free_at = max(self._free_at, now - self.burst_s) + size / self.bytes_per_s
        return max(0.0, self._free_at - now)


@dataclass(frozen=True, slots=True)
class DutyCycle:
    """Limits background work to ``share`` of the time while there is other work. After *t* seconds of background work,
    it waits ``t·(1/share − 1)``. Other work is assumed to continue for ``busy_s`` seconds after it was last seen."""

    share: float
    busy_s: float = 0.5

    def wait_s(self, now: float, worked_s: float, other_work_at: float) -> float:
        return worked_s * (1 / self.share - 1) if now < other_work_at + self.busy_s else 0.0
