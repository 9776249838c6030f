"""Write-ahead logs that cannot be read to their end: cut off by the end of a process, or damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stateflow.changes import Mutations
from stateflow.errors import StateDamaged
from stateflow.storage import RocksEngine
from stateflow.storage.store import cut_off

BATCHES = 300
BATCH_BYTES = 242  # in the log


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a database as a killed process leaves it: everything is in its log."""
    folder = tmp_path_factory.mktemp("wal")
    store = RocksEngine().open(folder / "db", create=True)
    for number in range(BATCHES):
        puts = [(b"k%05d" % number, os.urandom(200)), (b"ms", number.to_bytes(8, "big"))]
        store.apply(Mutations(puts=puts))
    shutil.copytree(folder / "db", folder / "killed")
    store.close()
    return folder / "killed"


def _log(database: Path) -> Path:
    return next(database.glob("*.log"))


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def _record(data: bytes, number: int) -> int:
    """Returns the offset of a record in the last block, counted from its first whole one."""
    block = len(data) // (32 << 10) * (32 << 10)
    # skips the rest of a record that began in the block before
    length = int.from_bytes(data[block + 4 : block + 6], "little")
    return block + 7 + length + number * BATCH_BYTES


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a byte in the middle": lambda data: _flip(data, len(data) // 2),
    "a byte of the last record": lambda data: _flip(data, len(data) - 3),
    "a length, so that the record seems to be cut off": lambda data: _flip(data, _record(data, 3) + 5),
    "the length of the last record": lambda data: _flip(data, len(data) - BATCH_BYTES + 5),
    "a type": lambda data: _flip(data, _record(data, 3) + 6),
    "zeros in the middle": lambda data: data[:33_000] + bytes(2000) + data[35_000:],
    "a block of zeros": lambda data: data[: 32 << 10] + bytes(32 << 10) + data[64 << 10 :],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_log_is_refused(killed: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(killed, tmp_path / "db")
    log = _log(tmp_path / "db")
    log.write_bytes(DAMAGES[damage](log.read_bytes()))
    with pytest.raises(StateDamaged, match="the database files are corrupt"):
        RocksEngine().open(tmp_path / "db")
    with pytest.raises(StateDamaged):
        RocksEngine().open_read_only(tmp_path / "db")


@pytest.mark.parametrize("damage", DAMAGES)
def test_up_to_its_damage_a_log_can_be_read_where_that_is_asked_for(killed: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(killed, tmp_path / "db")
    log = _log(tmp_path / "db")
    log.write_bytes(DAMAGES[damage](log.read_bytes()))
    found = []
    for opened in (RocksEngine().open_read_only, RocksEngine().open):
        store = opened(tmp_path / "db", up_to_damage=True)
        last = int.from_bytes(store.get(b"ms") or b"", "big")
        found.append(last)
        assert [key for key, _ in store.scan(b"k")] == [b"k%05d" % number for number in range(last + 1)]
        store.close()
    assert found[0] == found[1] < BATCHES - 1
    RocksEngine().open(tmp_path / "db").close()


def test_of_two_logs_the_second_one_says_nothing_without_the_whole_first(killed: Path, tmp_path: Path) -> None:
    """The second of two logs is not used without the whole first one.

    A power failure may leave that, where neither was synced: the system writes in any order.
    """
    shutil.copytree(killed, tmp_path / "db")
    first = _log(tmp_path / "db")
    data = first.read_bytes()
    first.write_bytes(data[: _record(data, 3) + 100])
    first.with_name("000099.log").write_bytes(data[_record(data, 4) :])
    with pytest.raises(StateDamaged):
        RocksEngine().open(tmp_path / "db")
    store = RocksEngine().open(tmp_path / "db", up_to_damage=True)
    last = int.from_bytes(store.get(b"ms") or b"", "big")
    assert 0 < last < BATCHES - 10
    assert [key for key, _ in store.scan(b"k")] == [b"k%05d" % number for number in range(last + 1)]
    store.close()


def test_a_log_that_is_gone_is_refused(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "db")
    _log(tmp_path / "db").unlink()
    with pytest.raises(StateDamaged, match="the write-ahead log is missing"):
        RocksEngine().open(tmp_path / "db")


@pytest.mark.parametrize("missing", [1, 100, BATCH_BYTES - 7, BATCH_BYTES - 3, BATCH_BYTES - 1])
def test_a_write_that_was_cut_off_is_dropped_and_no_other(killed: Path, tmp_path: Path, missing: int) -> None:
    shutil.copytree(killed, tmp_path / "db")
    log = _log(tmp_path / "db")
    log.write_bytes(log.read_bytes()[:-missing])
    for opened in (RocksEngine().open_read_only, RocksEngine().open):
        store = opened(tmp_path / "db")
        assert store.get(b"ms") == (BATCHES - 2).to_bytes(8, "big")
        assert len(list(store.scan(b"k"))) == BATCHES - 1
        store.close()


def test_what_is_missing_between_two_logs_is_found(killed: Path) -> None:
    data = _log(killed).read_bytes()
    cut = _record(data, 3)
    begin = _record(data, 4)
    before, behind = data[: cut + 100], data[begin:]  # the torn record was never continued: the next one follows
    assert cut_off([before])
    assert not cut_off([before, behind])
    assert cut_off([data[: cut + 100], data[cut : cut + BATCH_BYTES]])  # written again by a process that found it torn


def test_every_length_of_a_cut(killed: Path) -> None:
    data = _log(killed).read_bytes()[: (32 << 10) + 3000]
    for end in range(len(data) - 600, len(data)):
        assert cut_off([data[:end]])


def test_a_scan_that_meets_a_damaged_block_says_so(tmp_path: Path) -> None:
    """A scan reports a damaged block.

    ``items()`` of the library would end there, as if nothing followed.
    """
    store = RocksEngine().open(tmp_path / "db", create=True)
    store.apply(Mutations(puts=[(b"a%05d" % number, os.urandom(50)) for number in range(3000)]))
    store.flush()
    store.close()
    sst = next((tmp_path / "db").glob("*.sst"))
    sst.write_bytes(_flip(sst.read_bytes(), sst.stat().st_size // 2))
    store = RocksEngine().open(tmp_path / "db")
    with pytest.raises(Exception, match="Corruption: "):
        list(store.scan(b"a"))
    store.close()
