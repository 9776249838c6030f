"""One RocksDB per partition, all sharing one block cache and one write-buffer manager.

Facts about rocksdict this rests on: an iterator sees the moment it was made (those of its ``Snapshot`` do too,
not the snapshot's), it reads freed memory when its ReadOptions with a bound are gone, and a live one keeps the LOCK
after ``close()``; a checkpoint's directory must not exist; a
checkpoint flushes the memtable first; writes, checkpoints and opens hold every thread of the process up until they
return, flushes and closes do not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    UniversalCompactOptions,
    WriteBatch,
    WriteBufferManager,
)

from stateflow.changes import Mutations
from stateflow.errors import DataDirLocked, StateMissing
from stateflow.storage.store import prefix_end

_ADDRESS = itemgetter(0)
#: Of one partition: what the processor's cache can hold. A large batch is written into 64 MiB in twice the time; less
#: than 8 gains little and is flushed more often. And what is not flushed is read again when the partition is opened.
MEMTABLE_BYTES = 8 << 20
#: memtables that wait for their flush, and runs that wait to be merged, before writes must wait: 128 MiB and 1.25 GiB
MEMTABLES_MAX, RUNS_SLOW, RUNS_STOP = 16, 160, 288
#: of overwritten and deleted entries beside the live ones, before everything is merged into one
SIZE_AMPLIFICATION_PERCENT = 100
#: sorted runs a lookup may have to ask, before some are merged
RUNS_MAX = 8


class RocksEngine:
    """The parts partition databases of one process share.

    Args:
        block_cache_bytes: capacity of the block cache; memtables are charged to it too.
        write_buffer_bytes: memtables of all partitions together are flushed beyond this.
    """

    def __init__(self, block_cache_bytes: int = 256 << 20, write_buffer_bytes: int = 256 << 20) -> None:
        self._cache = Cache(block_cache_bytes)
        self._buffers = WriteBufferManager.new_write_buffer_manager_with_cache(write_buffer_bytes, False, self._cache)

    def open_read_only(self, directory: Path) -> RocksStore:
        """As its files are, with nothing written: for a snapshot that others hold hard links of."""
        return RocksStore(Rdict(str(directory), options=self._options(False), access_type=AccessType.read_only()))

    def open(self, directory: Path, *, create: bool = False) -> RocksStore:
        """Raises StateMissing when there is no database and ``create`` is false, DataDirLocked when
        another process has it open."""
        if not create and not (directory / "CURRENT").exists():
            raise StateMissing("there is no partition database", remedy="restore it from a checkpoint", path=directory)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            return RocksStore(Rdict(str(directory), options=self._options(create)))
        except Exception as error:
            if "lock" in str(error).lower():
                raise DataDirLocked(
                    "another process has this partition open",
                    remedy="stop that process first",
                    path=directory,
                ) from error
            raise

    def _options(self, create: bool) -> Options:
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
        options.set_max_write_buffer_number(MEMTABLES_MAX)
        options.set_allow_concurrent_memtable_write(False)  # a partition has one writer
        options.set_compression_type(DBCompressionType.lz4())
        # Runs of like size are merged, and the large oldest one only when the others have grown to its size: a
        # checkpoint uploads what is new, and levelled compaction makes everything new each few checkpoints.
        compaction = UniversalCompactOptions()
        compaction.max_size_amplification_percent = SIZE_AMPLIFICATION_PERCENT
        options.set_compaction_style(DBCompactionStyle.universal())
        options.set_universal_compaction_options(compaction)
        options.set_level_zero_file_num_compaction_trigger(RUNS_MAX)
        options.set_level_zero_slowdown_writes_trigger(RUNS_SLOW)
        options.set_level_zero_stop_writes_trigger(RUNS_STOP)
        options.set_max_background_jobs(2)
        options.set_keep_log_file_num(1)
        options.set_max_open_files(128)
        # a write the process was killed in the middle of is dropped, whole; anything else is corruption
        return options


class RocksStore:
    def __init__(self, db: Rdict) -> None:
        self._db = db
        self.get = db.get  # one call less on the hot path
        self._closing = threading.Lock()  # a flush comes from another thread than the close it may meet
        self._closed = False

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._range(prefix, prefix_end(prefix))

    def scan_from(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._range(start, end)

    def _range(self, start: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        options = ReadOptions()
        if end is not None:
            options.set_iterate_upper_bound(end)
        return _scan(self._db.items(from_key=start, read_opt=options), options)

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
        self._db.write(batch)
        if sync:  # apart from the write, which no other thread of the process gets past
            self._db.flush_wal(True)

    def sync(self) -> None:
        with self._closing:
            if not self._closed:
                self._db.flush_wal(True)

    def snapshot(self, directory: Path) -> None:
        directory.parent.mkdir(parents=True, exist_ok=True)
        Checkpoint(self._db).create_checkpoint(str(directory))

    def flush(self) -> None:
        with self._closing:
            if not self._closed:
                self._db.flush()

    def close(self) -> None:
        with self._closing:
            self._closed = True
            self._db.close()


def _scan(entries: Any, options: ReadOptions) -> Iterator[tuple[bytes, bytes]]:
    """The iterator points into the upper bound that ``options`` owns: they must live as long as it does."""
    yield from entries
    del options
