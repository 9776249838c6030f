"""Stores of a partition's bytes, in memory and in RocksDB, with a contract that tests/contract/ checks for both.

In RocksDB each partition has its own database. All databases share one block cache and one write-buffer manager. Each
gets a part of the files that this process may open (:func:`file_limits`). A database whose write-ahead log has an
unreadable end opens only if that end is a write that was cut off (:func:`cut_off`), or with ``up_to_damage``.

Facts about rocksdict that the code relies on:

- ``items()`` ends at a damaged block as if nothing followed; only the iterator's ``status()`` reports it.
- An iterator shows the data as of its own creation, even an iterator of a ``Snapshot`` that was made earlier.
- An iterator with a bound reads freed memory once its ReadOptions are freed.
- A live iterator keeps the database's LOCK after ``close()``.
- A checkpoint's directory must not exist, and a checkpoint flushes the memtable first.
- Writes, checkpoints and opens block every thread of the process until they return; flushes and closes do not.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import msgpack
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DbClosedError,
    DBCompactionStyle,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    UniversalCompactOptions,
    WriteBatch,
    WriteBufferManager,
)

from stateflow.changes import Mutations
from stateflow.durable import listed
from stateflow.errors import DataDirLocked, StateDamaged, StateMissing, TooFewFiles, Unavailable
from stateflow.storage.faults import DAMAGED, meaning

log = logging.getLogger(__name__)
#: number of files that a database always has open: its directory twice, log, LOCK, LOG and MANIFEST
PER_DATABASE = 6
#: number of open files reserved for sockets, snapshots that are read and sent, and files that are being written
RESERVED = 96
#: least number of sorted files that RocksDB lets a database keep open, and the greatest number that is set
TABLES_MIN, TABLES_MAX = 10, 118
#: least and greatest number of sorted runs at which some are merged; a lookup may have to read all runs
RUNS_MIN, RUNS_MAX = 1, 8
#: number of sorted files that are new while others are merged
RUNS_NEW = 2
_ADDRESS = itemgetter(0)
#: Size of a partition's memtable, chosen to fit the processor's cache. A large batch takes twice as long to write into
#: a memtable of 64 MiB. A smaller memtable gains little and is flushed more often. Data that is not flushed is replayed
#: when the partition is opened.
MEMTABLE_BYTES = 8 << 20
#: Step in which a memtable allocates memory, and in which that memory counts towards the shared write buffer. With
#: RocksDB's default of 1 MiB, 256 partitions of a few rows each fill the write buffer; then each write makes another
#: partition flush, and takes half a millisecond. A smaller step costs large batches more than it saves in small ones.
ARENA_BYTES = 32 << 10
#: numbers of memtables waiting for their flush (128 MiB) and of runs waiting to be merged (1.25 GiB) that slow down or
#: stop writes
MEMTABLES_MAX, RUNS_SLOW, RUNS_STOP = 16, 160, 288
#: size of overwritten and deleted entries, relative to the live ones, at which all runs are merged into one
SIZE_AMPLIFICATION_PERCENT = 100
#: number of files that RocksDB reserves for other uses, out of its limit of open files
OTHER_FILES = 10

# -- Contract --------------------------------------------------------------------------------------------------------


def prefix_end(prefix: bytes) -> bytes | None:
    """Returns the smallest key greater than every key with ``prefix``; None: there is none (all bytes 0xff)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


class PartitionStore(Protocol):
    """An ordered map of bytes to bytes. ``apply`` is atomic: after a crash, all of its changes are there, or none."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields entries whose key starts with ``prefix``, in byte order, all as of one moment at or after the call."""
        ...

    def scan_from(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields entries of ``[start, end)``, in byte order, all as of one moment at or after the call."""
        ...

    def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
        """Applies clears, then deletes, then puts.

        Once this returns, the change survives a kill -9 of this process, and with ``sync`` also a power loss.
        """
        ...

    def sync(self) -> None:
        """Makes all applied changes durable: they survive a power loss. Does nothing once the store is closed."""
        ...

    def snapshot(self, directory: Path) -> None:
        """Writes a consistent, openable copy to ``directory``, which must not exist yet."""
        ...

    def flush(self) -> None:
        """Writes buffered changes to files, so that the next ``snapshot`` is faster. Does nothing once the store is
        closed."""
        ...

    def entries(self) -> int | None:
        """Estimates the number of entries without reading them; None: no estimate is possible.

        Overwritten or deleted entries may still count, and entries that are not in files may be missing.
        """
        ...

    def close(self) -> None:
        """Closes the store. Raises no errors of the disk: everything applied survives, as after a kill."""
        ...


# -- In memory -------------------------------------------------------------------------------------------------------

_FILE = "store.msgpack"


class MemoryStore:
    """A store in a dict, for tests and harnesses."""

    def __init__(self, entries: dict[bytes, bytes] | None = None) -> None:
        self._entries = dict(entries or {})

    @classmethod
    def open(cls, directory: Path) -> MemoryStore:
        """Opens a copy that ``snapshot`` wrote."""
        return cls(msgpack.unpackb((directory / _FILE).read_bytes()))

    def get(self, key: bytes) -> bytes | None:
        return self._entries.get(key)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter([(key, self._entries[key]) for key in self._range(prefix, prefix_end(prefix))])

    def scan_from(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return iter([(key, self._entries[key]) for key in self._range(start, end)])

    def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
        for start, end in mutations.clears:
            for key in self._range(start, end):
                del self._entries[key]
        for key in mutations.deletes:
            self._entries.pop(key, None)
        self._entries.update(mutations.puts)

    def sync(self) -> None:
        pass

    def snapshot(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / _FILE).write_bytes(msgpack.packb(self._entries))

    def flush(self) -> None:
        pass

    def entries(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        pass

    def _range(self, start: bytes, end: bytes | None) -> list[bytes]:
        keys = sorted(self._entries)
        return keys[bisect_left(keys, start) : None if end is None else bisect_left(keys, end)]


# -- RocksDB: open files ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of one database. ``tables``: maximum of sorted files that it keeps open; ``runs``: number of sorted runs
    at which they are merged."""

    tables: int
    runs: int


def file_limits(databases: int, limit: int) -> FileLimits:
    """Returns the limits of each database if ``databases`` are open and the process may open ``limit`` files.

    A database has ``PER_DATABASE`` files open, and keeps the sorted files open that it has read, up to a limit that
    RocksDB raises to at least ``TABLES_MIN``. If the process may open only few files, sorted files are merged sooner,
    so that there are fewer of them. The databases then fit as long as merges keep up.

    Raises TooFewFiles if the databases cannot all be open.
    """
    tables = (limit - RESERVED) // max(databases, 1) - PER_DATABASE
    if tables < 1:
        needed = databases * (PER_DATABASE + TABLES_MIN) + RESERVED
        raise TooFewFiles(
            f"{databases} partitions need about {needed} open files, the limit is {limit}",
            remedy=f"raise it with `ulimit -n {needed}` (LimitNOFILE= in a systemd unit) and start the replica again, "
            "or use more replicas",
        )
    return FileLimits(min(tables, TABLES_MAX), min(max(tables - RUNS_NEW, RUNS_MIN), RUNS_MAX))


def limit() -> int:
    """Returns the maximum number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> None:
    """Increases this process's limit of open files to the maximum that the system allows. The default is meant for
    small programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS says "unlimited" and means less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- RocksDB: ends of write-ahead logs -------------------------------------------------------------------------------

# Format: blocks of 32 KiB; records of ``crc32c u32 | length u16 | type u8 | payload``, split where a block ends into
# first, middle and last; a payload begins with the sequence of its first entry, u64, and the number of entries, u32.
# All little endian.

BLOCK = 32 << 10
_HEADER = struct.Struct("<IHB")
_BATCH = struct.Struct("<QI")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
#: a record counts as a later one only if its sequence is less than this many entries after the last whole record
AHEAD_MAX = 1 << 32


def cut_off(logs: Sequence[bytes]) -> bool:
    """Tells whether the unreadable bytes in a database's logs are only the end of a write that was cut off. Does no
    I/O.

    A process that is killed in the middle of a write leaves the beginning of a record, and nothing after it. That write
    was never acknowledged. RocksDB cannot distinguish this from a damaged length, which makes a record seem to reach
    beyond the end of the file: RocksDB would drop that record and all that follow. This function therefore looks at the
    bytes that follow. It returns False if whole records follow, or if the unreadable record is whole except for its
    length.

    Args:
        logs: contents of all logs of the database, in order.
    """
    expected: int | None = None
    torn = False
    for data in logs:
        first, after, end = _walk(data)
        if torn and first is not None and first != expected:
            return False  # a later log continues after the missing record
        expected = after if after is not None else expected
        torn = end < len(data)
        if torn and _goes_on(data, end, expected or 0):
            return False
    return True


def _walk(data: bytes) -> tuple[int | None, int | None, int]:
    """Returns (sequence of the first record, sequence after the last whole record, offset of that record's end)."""
    first = after = None
    end = 0
    begun: tuple[int, int] | None = None
    for at, length, kind in _records(data):
        if kind in (FULL, FIRST) and length >= _BATCH.size:
            begun = _BATCH.unpack_from(data, at + _HEADER.size)
        if kind in (FULL, LAST) and begun is not None:
            first = begun[0] if first is None else first
            after, begun = sum(begun), None
        if kind not in (FIRST, MIDDLE):
            end = at + _HEADER.size + length
    return first, after, end


def _records(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields (offset, length, type) of records according to their headers, up to the first header that is not valid."""
    at = 0
    while True:
        left = BLOCK - at % BLOCK
        if left < _HEADER.size:
            at += left
            continue
        if at + _HEADER.size > len(data):
            return
        _, length, kind = _HEADER.unpack_from(data, at)
        if not kind or _HEADER.size + length > left or at + _HEADER.size + length > len(data):
            return
        yield at, length, kind
        at += _HEADER.size + length


def _goes_on(data: bytes, end: int, expected: int) -> bool:
    """Returns whether a whole record is found from ``end`` on: the record at ``end`` if only its length is damaged, or
    a later one."""
    if len(data) - end > _HEADER.size and _is_whole(data, end, len(data) - end - _HEADER.size):
        return True
    for at in range(end + 1, len(data) - _HEADER.size - _BATCH.size + 1):
        kind = data[at + 6]
        if kind not in (FULL, FIRST):
            continue
        length = _HEADER.unpack_from(data, at)[1]
        fits = _HEADER.size + length <= min(BLOCK - at % BLOCK, len(data) - at)
        sequence = _BATCH.unpack_from(data, at + _HEADER.size)[0]
        if fits and expected <= sequence < expected + AHEAD_MAX and _is_whole(data, at, length):
            return True
    return False


def _is_whole(data: bytes, at: int, length: int) -> bool:
    stored: int = _HEADER.unpack_from(data, at)[0]
    return stored == _masked(_crc32c(data[at + 6 : at + _HEADER.size + length]))


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def _crc32c(data: bytes) -> int:
    """CRC-32C in Python: slow, but called for a few records only."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


# -- RocksDB: databases ----------------------------------------------------------------------------------------------


class RocksEngine:
    """Opens the partition databases of one process. They share a block cache, a write buffer and the limit of open
    files.

    Args:
        block_cache_bytes: capacity of the block cache; memtables are charged to it too.
        write_buffer_bytes: total size of all partitions' memtables above which memtables are flushed.
    """

    def __init__(self, block_cache_bytes: int = 256 << 20, write_buffer_bytes: int = 256 << 20) -> None:
        self._cache = Cache(block_cache_bytes)
        self._files = file_limits(1, limit())
        self._buffers = WriteBufferManager.new_write_buffer_manager_with_cache(write_buffer_bytes, False, self._cache)

    def expect(self, databases: int) -> None:
        """Divides the files that this process may open among ``databases`` open databases. Raises TooFewFiles.

        Databases that are opened from now on get the new limits.
        """
        self._files = file_limits(databases, limit())

    def open_read_only(self, directory: Path, *, up_to_damage: bool = False) -> RocksStore:
        """Opens a database without writing anything. Raises the same errors as ``open``.

        Use it for a database that is only inspected, or whose files are hard-linked elsewhere.
        """
        return self._open(directory, AccessType.read_only(), create=False, up_to_damage=up_to_damage)

    def open(self, directory: Path, *, create: bool = False, up_to_damage: bool = False) -> RocksStore:
        """Opens a partition's database.

        Args:
            create: create the directory and the database if they do not exist.
            up_to_damage: drop the write-ahead log from the first damage on, because the commit log contains the rest.

        Raises StateMissing if there is no database and ``create`` is false, DataDirLocked if another process has it
        open, Unavailable if this process has it open, StateDamaged if some of its files are missing or damaged, and the
        disk's errors.
        """
        if create:
            directory.mkdir(parents=True, exist_ok=True)
        return self._open(directory, AccessType.read_write(), create=create, up_to_damage=up_to_damage)

    def _open(self, directory: Path, access: AccessType, *, create: bool, up_to_damage: bool) -> RocksStore:
        if not create and not (directory / "CURRENT").exists():
            raise StateMissing("there is no partition database", remedy="restore it from a checkpoint", path=directory)
        if not create and not any(path.suffix == ".log" for path in directory.iterdir()):
            raise StateDamaged("the write-ahead log is missing", remedy=DAMAGED, path=directory)
        strict, lenient = DBRecoveryMode.absolute_consistency(), DBRecoveryMode.tolerate_corrupted_tail_records()
        if up_to_damage:
            strict = DBRecoveryMode.point_in_time()
        try:
            try:
                return RocksStore(Rdict(str(directory), options=self._options(create, strict), access_type=access))
            except Exception as error:
                if not str(error).startswith("Corruption: truncated") or not _is_cut_off(directory):
                    raise
                # the process was killed in the middle of a write that was never acknowledged
                return RocksStore(Rdict(str(directory), options=self._options(create, lenient), access_type=access))
        except Exception as error:
            if str(error).startswith("IO error: lock hold by current process"):
                raise Unavailable(
                    "the partition was closed, and a reader of this process still holds its database open",
                    remedy="the request is retried; if this goes on, end long reads of the partition's state",
                    path=directory,
                ) from error
            if str(error).startswith("IO error: ") and "/LOCK: " in str(error):
                raise DataDirLocked(
                    "another process has this partition open",
                    remedy="stop that process first",
                    path=directory,
                ) from error
            meant = meaning(error)
            if meant is None:
                raise
            meant.located(path=directory)
            raise meant from error

    def _options(self, create: bool, recovery: DBRecoveryMode) -> Options:
        table = BlockBasedOptions()
        table.set_block_cache(self._cache)
        table.set_bloom_filter(10, False)
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_l0_filter_and_index_blocks_in_cache(True)
        options = Options(raw_mode=True)
        options.create_if_missing(create)
        options.set_block_based_table_factory(table)
        options.set_write_buffer_manager(self._buffers)
        options.set_write_buffer_size(MEMTABLE_BYTES)
        options.set_arena_block_size(ARENA_BYTES)
        options.set_max_write_buffer_number(MEMTABLES_MAX)
        options.set_allow_concurrent_memtable_write(False)  # a partition has one writer
        options.set_compression_type(DBCompressionType.lz4())
        # Universal compaction merges runs of similar size, and the large oldest one only when the others have grown to
        # its size. A checkpoint uploads new files, and levelled compaction rewrites all files every few checkpoints.
        compaction = UniversalCompactOptions()
        compaction.max_size_amplification_percent = SIZE_AMPLIFICATION_PERCENT
        options.set_compaction_style(DBCompactionStyle.universal())
        options.set_universal_compaction_options(compaction)
        options.set_level_zero_file_num_compaction_trigger(self._files.runs)
        options.set_level_zero_slowdown_writes_trigger(RUNS_SLOW)
        options.set_level_zero_stop_writes_trigger(RUNS_STOP)
        options.set_max_background_jobs(2)
        options.set_keep_log_file_num(1)
        options.set_max_open_files(self._files.tables + OTHER_FILES)
        options.set_table_cache_num_shard_bits(0)  # with shards the cache holds more files than the limit
        options.set_wal_recovery_mode(recovery)  # the default drops everything after a damaged record
        return options


def _is_cut_off(directory: Path) -> bool:
    return cut_off([path.read_bytes() for path in listed(directory, "*.log")])


class RocksStore:
    def __init__(self, db: Rdict) -> None:
        self._db = db
        self.get = db.get  # one call less on the hot path
        self._writing = _Writing()

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._range(prefix, prefix_end(prefix))

    def scan_from(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._range(start, end)

    def _range(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        options = ReadOptions()
        if end is not None:
            options.set_iterate_upper_bound(end)
        entries = self._db.iter(read_opt=options)
        entries.seek(start)
        return _scan(entries, options)

    def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
        batch = WriteBatch(raw_mode=True)
        for start, end in mutations.clears:
            batch.delete_range(start, end)
        delete, put = batch.delete, batch.put
        for key in mutations.deletes:
            delete(key)
        # in order: neighbours share their path into the memtable, which halves the cost of a large batch
        for key, value in sorted(mutations.puts, key=_ADDRESS):
            put(key, value)
        with self._writing:
            self._db.write(batch)
            if sync:  # separate from the write, which blocks all threads of the process
                self._db.flush_wal(True)

    def sync(self) -> None:
        with contextlib.suppress(DbClosedError), self._writing:
            self._db.flush_wal(True)

    def snapshot(self, directory: Path) -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with self._writing:
            Checkpoint(self._db).create_checkpoint(str(directory))

    def flush(self) -> None:
        with contextlib.suppress(DbClosedError), self._writing:
            self._db.flush()

    def entries(self) -> int | None:
        """Estimates the number of entries from files, each of which has a key only once. None: no written data is in a
        file yet, or the store is closed.

        RocksDB's own estimate counts each write in memtables: a few keys that are written again and again would seem to
        be thousands.
        """
        try:
            files = self._db.live_files()
            if not files:
                return None if self._db.property_int_value("rocksdb.estimate-num-keys") else 0
        except DbClosedError:
            return None
        # a deletion counts as an entry, and removes another
        found: int = sum(each["num_entries"] - 2 * each["num_deletions"] for each in files)
        return max(0, found)

    def close(self) -> None:
        """Closes the database. It holds everything that was applied, as after a kill, even if it cannot be flushed."""
        self._writing.end()
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001 - also reports the error of an earlier flush, and is closed
            log.warning("a database was closed without a last flush: %s", error)


class _Writing:
    """Counts the threads in a call that writes, so that ``close`` can wait for them.

    rocksdict releases the interpreter lock in some of these calls, and refuses to close a database while another thread
    is in one. Reads hold the interpreter lock to their end, so that they need not be counted.
    """

    __slots__ = ("_changed", "_ended", "_threads")

    def __init__(self) -> None:
        self._threads, self._ended = 0, False
        self._changed = threading.Condition(threading.Lock())

    def __enter__(self) -> None:
        with self._changed:
            if self._ended:
                raise DbClosedError("the database was closed")
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._threads -= 1
            if self._ended:
                self._changed.notify_all()

    def end(self) -> None:
        """Refuses new writes, and returns once no thread writes."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._threads)


def _scan(entries: RdictIter, options: ReadOptions) -> Iterator[tuple[bytes, bytes]]:
    """Yields entries, and keeps ``options`` alive meanwhile: the iterator points into the upper bound that ``options``
    owns."""
    valid, key, value, advance = entries.valid, entries.key, entries.value, entries.next
    while valid():
        yield key(), value()
        advance()
    entries.status()  # raises when it ended at a damaged block, and not at the end
    del options
