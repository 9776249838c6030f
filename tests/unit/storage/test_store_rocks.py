"""Memory shared by many databases, and its effects; databases that cannot be opened for lack of files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from stateflow.changes import Mutations
from stateflow.storage.store import ARENA_BYTES, RocksEngine, _is_cut_off
from tests.unit.test_durable import out_of_files


def test_many_databases_of_a_few_entries_each_are_not_flushed_for_lack_of_memory(tmp_path: Path) -> None:
    databases = 32
    engine = RocksEngine(write_buffer_bytes=8 * ARENA_BYTES * databases)  # an eighth of this is enough
    stores = [engine.open(tmp_path / str(number), create=True) for number in range(databases)]
    logs = _logs(tmp_path)
    try:
        for number in range(6):
            for store in stores:
                store.apply(Mutations([(b"%d" % number, b"x" * 1_000)]))
        assert _logs(tmp_path) == logs, "a memtable that is to be flushed has the next one begin with a log of its own"
    finally:
        for store in stores:
            store.close()


def _logs(directory: Path) -> set[Path]:
    return set(directory.rglob("*.log"))


def test_a_database_that_cannot_be_listed_is_not_damaged(tmp_path: Path) -> None:
    engine, directory = RocksEngine(), tmp_path / "db"
    engine.open(directory, create=True).close()
    with out_of_files(directory):
        with pytest.raises(OSError, match="Too many open files"):
            engine.open(directory)
        with pytest.raises(OSError, match="Too many open files"):
            _is_cut_off(directory)  # no log would count as one that was cut off
    engine.open(directory).close()


def test_a_database_that_cannot_be_flushed_is_closed_and_has_all(tmp_path: Path) -> None:
    engine, directory = RocksEngine(), tmp_path / "db"
    store = engine.open(directory, create=True)
    store.apply(Mutations([(b"%d" % number, os.urandom(1_000)) for number in range(100)]))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(Exception, match="File too large"):
            store.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(Exception, match="File too large"):
        store.flush()  # not tried again before it is reopened
    store.close()
    again = engine.open(directory)
    assert len([*again.scan(b"")]) == 100
    again.close()
