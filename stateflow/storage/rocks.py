"""One RocksDB per partition, all sharing one block cache and one write-buffer manager.

Facts about rocksdict this rests on: ``items()`` ends at a damaged block as if nothing came behind it, an iterator's
``status()`` says so; an iterator sees the moment it was made (those of its ``Snapshot`` do too,
not the snapshot's), it reads freed memory when its ReadOptions with a bound are gone, and a live one keeps the LOCK
after ``close()``; a checkpoint's directory must not exist; a
checkpoint flushes the memtable first; writes, checkpoints and opens hold every thread of the process up until they
return, flushes and closes do not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

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
from stateflow.errors import DataDirLocked, StateDamaged, StateMissing
from stateflow.storage import files
from stateflow.storage.faults import DAMAGED, meaning
from stateflow.storage.store import prefix_end
from stateflow.storage.wal import cut_off

_ADDRESS = itemgetter(0)
#: Of one partition: what the processor's cache can hold. A large batch is written into 64 MiB in twice the time; less
#: than 8 gains little and is flushed more often. And what is not flushed is read again when the partition is opened.
MEMTABLE_BYTES = 8 << 20
#: what a memtable takes at a time, and what of it counts for all of them together. RocksDB's default of 1 MiB fills
#: that with 256 partitions of a few rows each: then each write has another partition flushed, and takes half a
#: millisecond. Less than this costs large batches more than it gives small ones.
ARENA_BYTES = 32 << 10
#: memtables that wait for their flush, and runs that wait to be merged, before writes must wait: 128 MiB and 1.25 GiB
MEMTABLES_MAX, RUNS_SLOW, RUNS_STOP = 16, 160, 288
#: of overwritten and deleted entries beside the live ones, before everything is merged into one
SIZE_AMPLIFICATION_PERCENT = 100
#: what RocksDB keeps for other things of the open files it is told
OTHER_FILES = 10


class RocksEngine:
    """The parts partition databases of one process share.

    Args:
        block_cache_bytes: capacity of the block cache; memtables are charged to it too.
        write_buffer_bytes: memtables of all partitions together are flushed beyond this.
    """

    def __init__(self, block_cache_bytes: int = 256 << 20, write_buffer_bytes: int = 256 << 20) -> None:
        self._cache = Cache(block_cache_bytes)
        self._files = files.file_limits(1, files.limit())
        self._buffers = WriteBufferManager.new_write_buffer_manager_with_cache(write_buffer_bytes, False, self._cache)

    def expect(self, databases: int) -> None:
        """So many are to be open at a time, with those that are. Raises TooFewFiles when that cannot be."""
        self._files = files.file_limits(databases, files.limit())

    def open_read_only(self, directory: Path, *, up_to_damage: bool = False) -> RocksStore:
        """As its files are, with nothing written: for what is only looked at, or others hold hard links of. Raises what
        ``open`` raises."""
        return self._open(directory, AccessType.read_only(), create=False, up_to_damage=up_to_damage)

    def open(self, directory: Path, *, create: bool = False, up_to_damage: bool = False) -> RocksStore:
        """Args: up_to_damage: what is in its write-ahead log behind damage is dropped: somebody else has it.

        Raises StateMissing when there is no database and ``create`` is false, DataDirLocked when another process has
        it open, StateDamaged when something of it is missing or not what was written, and what the disk says."""
        if create:
            directory.mkdir(parents=True, exist_ok=True)
        return self._open(directory, AccessType.read_write(), create=create, up_to_damage=up_to_damage)

    def _open(self, directory: Path, access: AccessType, *, create: bool, up_to_damage: bool) -> RocksStore:
        if not create and not (directory / "CURRENT").exists():
            raise StateMissing("there is no partition database", remedy="restore it from a checkpoint", path=directory)
        if not create and not any(directory.glob("*.log")):
            raise StateDamaged("its write-ahead log is missing", remedy=DAMAGED, path=directory)
        strict, lenient = DBRecoveryMode.absolute_consistency(), DBRecoveryMode.tolerate_corrupted_tail_records()
        if up_to_damage:
            strict = DBRecoveryMode.point_in_time()
        try:
            try:
                return RocksStore(Rdict(str(directory), options=self._options(create, strict), access_type=access))
            except Exception as error:
                if not str(error).startswith("Corruption: truncated") or not _is_cut_off(directory):
                    raise
                # the process was killed in the middle of a write, which nobody was told of
                return RocksStore(Rdict(str(directory), options=self._options(create, lenient), access_type=access))
        except Exception as error:
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
        # Runs of like size are merged, and the large oldest one only when the others have grown to its size: a
        # checkpoint uploads what is new, and levelled compaction makes everything new each few checkpoints.
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
        options.set_table_cache_num_shard_bits(0)  # else there is more room in it than was said
        options.set_wal_recovery_mode(recovery)  # the default drops whatever is behind a damaged record
        return options


def _is_cut_off(directory: Path) -> bool:
    return cut_off([path.read_bytes() for path in sorted(directory.glob("*.log"))])


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
        # in order: neighbours share the way into the memtable, which halves the cost of a large batch
        for key, value in sorted(mutations.puts, key=_ADDRESS):
            put(key, value)
        with self._writing:
            self._db.write(batch)
            if sync:  # apart from the write, which no other thread of the process gets past
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
        """Of files, each of which has a key once; None before there is one of what was written, and once closed.
        RocksDB's own estimate has each write of memtables: a few keys that are written again and again would seem to be
        thousands."""
        try:
            files = self._db.live_files()
            if not files:
                return None if self._db.property_int_value("rocksdb.estimate-num-keys") else 0
        except DbClosedError:
            return None
        # a deletion is an entry itself, and takes one away
        found: int = sum(each["num_entries"] - 2 * each["num_deletions"] for each in files)
        return max(0, found)

    def close(self) -> None:
        self._writing.end()
        self._db.close()


class _Writing:
    """Who is in a call that writes. rocksdict gives the interpreter away there, and refuses to close a database that
    another thread is in a call of. Reads hold the interpreter to their end, so that they need not be known of."""

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
        """Nobody begins to write from now on; returns when nobody does any more."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._threads)


def _scan(entries: RdictIter, options: ReadOptions) -> Iterator[tuple[bytes, bytes]]:
    """The iterator points into the upper bound that ``options`` owns: they must live as long as it does."""
    valid, key, value, advance = entries.valid, entries.key, entries.value, entries.next
    while valid():
        yield key(), value()
        advance()
    entries.status()  # raises when it ended at a damaged block, and not at the end
    del options
