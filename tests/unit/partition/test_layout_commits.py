"""Durable commits: one write for all partitions of a group.

Databases have all of a group when they serve, after a kill, a power failure or a disk that refuses.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import CommitLogDamaged, DiskFull, NotOwner, SourceTaken, StateDamaged, Unavailable
from stateflow.operator.operator import describe
from stateflow.partition import batches, layout, running
from stateflow.partition.environment import Environment
from stateflow.partition.layout import COMMITS_FILE, COMMITS_FOLDER
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import Batch
from stateflow.partition.replica import ReplicaNode
from stateflow.partitioner import partition_of
from stateflow.storage import RocksStore
from stateflow.storage.commit_log import Commit, DirectorySegments, decode, encode, read, segment_header
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import Told, shares_of
from tests.unit.operators import Count
from tests.unit.partition.test_replica import SETTINGS, Two

PARTITIONS = 64
SPEC = describe(Count, PARTITIONS, "Op")
#: a key of each partition
KEYS = {partition_of(f"k{number}", PARTITIONS): f"k{number}" for number in reversed(range(2000))}
P, Q = PartitionId("Op", 0), PartitionId("Op", 1)


class Place:
    """A data directory, its current replica, and accidents that may happen to it."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.settings = SETTINGS.model_copy(update={"acknowledge": "fsync", **settings})
        self.sizes: dict[Path, int] = {}
        self.node: ReplicaNode = None  # type: ignore[assignment]
        self.start()

    def start(self) -> ReplicaNode:
        self.node = ReplicaNode(ReplicaInfo("a", "site", "a:1"), self.root, self.settings)
        return self.node

    def send(self, number: int, *partitions: int, epoch: int = 1) -> Told:
        """Sends a row to each of these partitions, by default to two."""
        told = Told()
        rows = {each: pa.RecordBatch.from_pylist([{"k": KEYS[each], "v": number}]) for each in partitions or (0, 1)}
        self.node.batches.apply(shares_of("Op", Batch("s", number), rows, epoch), told)
        return told

    def logs(self) -> dict[Path, int]:
        """Returns the bytes that each database has logged."""
        found = sorted((self.root / "operators").glob("Op/p*/*/*.log"))
        return {path.relative_to(self.root): path.stat().st_size for path in found}

    def kill(self) -> None:
        """Kills the replica: its files stay as they were, nothing flushed, nothing tidied up."""
        aside = self.root.parent / "as-it-was"
        shutil.copytree(self.root, aside)
        self.node.close()
        shutil.rmtree(self.root)
        aside.rename(self.root)

    def lose_power(self, had: dict[Path, int]) -> None:
        """Cuts the power. ``had``: what databases had logged by then, and keep."""
        self.kill()
        for name, size in had.items():
            os.truncate(self.root / name, size)

    def totals(self) -> dict[str, int]:
        """Returns the sum of what was sent to each partition that is served, by its one key."""
        found: dict[str, int] = {}
        for partition in self.node.owned("Op"):
            found |= {f"k{partition.partition}": value for _, _, value in self.node.reader.scan(partition, "total")}
        return found

    def aside(self, partition: PartitionId = P) -> list[Path]:
        return sorted((self.root / "evidence" / "Op" / f"p{partition.partition:05d}").glob("*"))

    @property
    def home(self) -> Path:
        return self.root / "operators" / "Op" / "p00000"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "a")
    made.node.create(SPEC, [0, 1], 1)
    yield made
    made.node.close()


def tear(path: Path) -> None:
    """Zeroes the middle of a file, as if its sectors had never been written."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)


def counted(patch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets an entry, "log" or "database", with each sync of the commit log or of a database."""
    synced: list[str] = []
    real = RocksStore.apply, os.fdatasync

    def apply(store: RocksStore, mutations: Any, *, sync: bool = False) -> None:
        synced.extend(["database"] * sync)
        real[0](store, mutations, sync=sync)

    def fdatasync(file: int) -> None:
        synced.append("log")
        real[1](file)

    patch.setattr(RocksStore, "sync", lambda store: synced.append("database"))
    patch.setattr(RocksStore, "apply", apply)
    patch.setattr(os, "fdatasync", fdatasync)
    return synced


def test_a_batch_of_many_partitions_is_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path / "a")
    place.node.create(SPEC, range(64), 1)
    place.send(0, *range(64))  # opens the operators
    with monkeypatch.context() as patch:
        patch.setattr(running, "GROUP_S", math.inf)  # the group ends with the batch, however slow this machine is
        patch.setattr(batches, "SLOW_US", math.inf)
        synced = counted(patch)
        assert len(place.send(1, *range(64)).applied()) == 64
    assert synced == ["log"]
    place.node.close()


def test_in_wal_mode_there_is_no_log(tmp_path: Path) -> None:
    place = Place(tmp_path / "a", acknowledge="wal")
    place.node.create(SPEC, [0, 1], 1)
    place.send(0)
    place.node.close()
    assert not (place.root / COMMITS_FOLDER).exists()


@pytest.mark.parametrize("acknowledge", ["fsync", "standby"])
def test_what_was_acknowledged_survives_a_loss_of_power(tmp_path: Path, acknowledge: str) -> None:
    place = Place(tmp_path / "a", acknowledge=acknowledge)
    place.node.create(SPEC, [0, 1], 1)
    had = place.logs()
    for number in range(5):
        place.send(number)
    place.lose_power(had)
    place.start()
    assert place.totals() == {"k0": 10, "k1": 10}
    assert [each.replayed for each in place.send(4).applied()] == [True, True]
    assert [each.sequence for each in place.send(5).applied()] == [6, 6]
    assert not list(place.home.glob(f"*/{COMMITS_FILE}*"))
    place.node.close()


def test_a_kill_takes_nothing_and_begins_another_log(place: Place) -> None:
    place.send(0)
    place.kill()
    before = {path.name for path in (place.root / COMMITS_FOLDER).iterdir()}
    place.start()
    after = {path.name for path in (place.root / COMMITS_FOLDER).iterdir()}
    assert len(after) == 1
    assert not before & after
    assert place.totals() == {"k0": 0, "k1": 0}


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """Sizes to which the logs of databases are cut when the databases are closed, which then flush nothing.

    After a failed write to a disk, a database flushes nothing more, and a kernel may drop what was written before.
    """
    real, sizes = RocksStore.close, dict[Path, int]()

    def close(store: RocksStore) -> None:
        directory = Path(store._db.path())
        before = directory.parent / "before"
        shutil.copytree(directory, before)
        real(store)
        shutil.rmtree(directory)
        before.rename(directory)
        for path, size in sizes.items():
            if path.parent == directory and path.exists():
                os.truncate(path, size)

    monkeypatch.setattr(RocksStore, "close", close)
    return sizes


@pytest.mark.parametrize("unwritten", [False, True])
def test_what_a_disk_dropped_from_a_database_comes_from_the_log_when_it_is_opened_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, dropping: dict[Path, int], unwritten: bool
) -> None:
    """A database that is opened again in the same process gets all commits from the log that it lacks by then.

    ``unwritten``: the database was closed because a commit could not be written.
    """
    dropping |= {place.root / name: size for name, size in place.logs().items()}
    for number in range(3):
        place.send(number)
    if unwritten:
        with monkeypatch.context() as patch:
            patch.setattr(RocksStore, "apply", lambda *_, **__: 1 / 0)
            assert isinstance(place.send(3).outcomes[0], ZeroDivisionError)
    else:
        for partition in (P, Q):
            place.node._registry.close_store(place.node._registry.local(partition))
    assert [each.replayed for each in place.send(3).applied()] == [unwritten, unwritten]
    assert place.totals() == {"k0": 6, "k1": 6}
    dropping.clear()
    had = place.logs()
    assert [each.sequence for each in place.send(4).applied()] == [5, 5]
    place.lose_power(had)
    place.start()
    assert place.totals() == {"k0": 10, "k1": 10}


def test_a_database_that_lacks_what_the_log_lacks_too_is_lost(place: Place, dropping: dict[Path, int]) -> None:
    dropping |= {place.root / name: size for name, size in place.logs().items()}
    for number in range(3):
        place.send(number)
    place.node._registry.close_store(place.node._registry.local(P))
    (log,) = (place.root / COMMITS_FOLDER).iterdir()
    (found,) = DirectorySegments(place.root / COMMITS_FOLDER).read()
    log.write_bytes(segment_header(1) + encode(1, read([found]).logged.of(P)[1:]))
    assert isinstance(place.send(3, 0).outcomes[0], StateDamaged)
    assert place.node.lifecycle(P).state is State.ABSENT
    assert len(place.aside()) == 1


def test_a_source_that_was_opened_survives_a_loss_of_power(place: Place) -> None:
    place.send(0)
    had = place.logs()
    session = layout.Session(5, "c")
    place.node.batches.open_source([P], "t", session)
    place.lose_power(had)
    place.start()
    with pytest.raises(Exception, match="source_taken"):
        place.node.batches.open_source([P], "t", layout.Session(4, "b"))


def test_a_hole_in_the_log_of_a_database_is_filled(place: Place) -> None:
    """A hole in a database's log is filled: a power failure may leave anything in what was not synced."""
    for number in range(9):
        place.send(number)
    place.kill()
    for name in place.logs():
        tear(place.root / name)
    place.start()
    assert place.aside() == []
    assert place.totals() == {"k0": 36, "k1": 36}
    assert [each.sequence for each in place.send(9).applied()] == [10, 10]


def test_a_hole_that_the_log_does_not_fill_is_damage(place: Place) -> None:
    for number in range(9):
        place.send(number)
    place.kill()
    place.start()  # the log restarts after what the databases have durably
    place.kill()
    tear(next(place.root / name for name in place.logs() if "p00000" in str(name)))
    place.start()
    assert [path.name for path in place.aside()] == ["created-1-1"]
    assert place.totals() == {"k1": 36}


def test_a_gap_between_database_and_log_is_refused_and_what_is_there_is_put_aside(place: Place) -> None:
    had = place.logs()
    for number in range(3):
        place.send(number)
    place.lose_power(had)
    (log,) = (place.root / COMMITS_FOLDER).iterdir()
    (found,) = DirectorySegments(place.root / COMMITS_FOLDER).read()
    logged = read([found]).logged
    commits = [*logged.of(P)[1:], *logged.of(Q)]  # as if the log began later
    log.write_bytes(segment_header(1) + encode(1, commits))
    place.start()
    assert place.totals() == {"k1": 3}
    (aside,) = place.aside()
    assert (aside / COMMITS_FILE).exists()


def test_what_is_put_aside_takes_what_was_logged_of_it_along(place: Place) -> None:
    had = place.logs()
    for number in range(4):
        place.send(number)
    place.lose_power(had)
    current = place.home / "created-1" / "CURRENT"
    mended = current.read_bytes()
    current.unlink()
    place.start()
    (aside,) = place.aside()
    assert place.totals() == {"k1": 6}
    place.send(4, 1)
    place.kill()
    aside.rename(place.home / "created-1")
    (place.home / "created-1" / "CURRENT").write_bytes(mended)
    place.start()
    assert place.totals() == {"k0": 6, "k1": 10}
    assert not (place.home / "created-1" / COMMITS_FILE).exists()


def test_one_that_is_lost_while_it_serves_takes_it_along_too(place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.home / "created-1", tmp_path / "before")
    for number in range(4):
        place.send(number)
    place.node._registry.lose(place.node._registry.local(P), StateDamaged("a block of it"))
    (aside,) = place.aside()
    place.kill()
    shutil.copytree(tmp_path / "before", place.home / "created-1")
    (aside / COMMITS_FILE).rename(place.home / "created-1" / COMMITS_FILE)
    place.start()
    assert place.totals() == {"k0": 6, "k1": 6}


@pytest.mark.parametrize("step", ["open", "apply", "sync", "unlink"])
@pytest.mark.parametrize("hole", [False, True])
def test_a_start_that_was_cut_short_is_gone_on_with(
    place: Place, monkeypatch: pytest.MonkeyPatch, step: str, hole: bool
) -> None:
    """An interrupted start is completed, also where the log is gone by then.

    What was being completed is recorded, and has all it needs.
    """
    had = place.logs()
    for number in range(9):
        place.send(number)
    if hole:
        place.kill()
        for name in had:
            tear(place.root / name)
    else:
        place.lose_power(had)

    class Cut(Exception):
        pass

    def cut(*_: Any, **__: Any) -> None:
        raise Cut

    real = RocksStore.apply
    done: list[int] = []

    def apply(store: RocksStore, mutations: Any, *, sync: bool = False) -> None:
        done.append(1)
        if len(done) > 2:
            raise Cut
        real(store, mutations, sync=sync)

    places = {"open": (Environment, "open", cut), "apply": (RocksStore, "apply", apply)}
    places |= {"sync": (RocksStore, "sync", cut), "unlink": (Path, "unlink", cut)}
    with monkeypatch.context() as patch:
        patch.setattr(*places[step])
        with pytest.raises(Cut):
            place.start()
    shutil.rmtree(place.root / COMMITS_FOLDER) if step == "apply" else None
    (place.root / "LOCK").unlink()
    place.start()
    assert place.totals()["k0"] == 36
    assert place.aside() == []
    assert [each.sequence for each in place.send(9, 0).applied()] == [10]


def test_one_that_was_being_completed_and_cannot_be_any_more_is_not_served(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    had = place.logs()
    for number in range(3):
        place.send(number)
    place.lose_power(had)
    with monkeypatch.context() as patch:
        patch.setattr(RocksStore, "sync", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            place.start()
    (place.root / "LOCK").unlink()
    kept = place.home / "created-1" / COMMITS_FILE
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    place.start()
    assert [path.name for path in place.aside()] == ["created-1-1"]
    assert place.totals() == {"k1": 3}


@pytest.mark.parametrize("acknowledge", ["fsync", "wal"])
def test_a_log_that_is_damaged_is_said_and_nothing_is_served(place: Place, acknowledge: str) -> None:
    for number in range(3):
        place.send(number)
    place.kill()
    (log,) = (place.root / COMMITS_FOLDER).iterdir()
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    place.settings = place.settings.model_copy(update={"acknowledge": acknowledge})
    with pytest.raises(CommitLogDamaged, match="follows it"):
        place.start()
    (place.root / "LOCK").unlink()
    shutil.rmtree(place.root / COMMITS_FOLDER)  # the remedy that the error names
    place.start()
    assert place.totals() == {"k0": 3, "k1": 3}


def test_another_way_to_acknowledge_begins_with_all_that_was_logged(place: Place) -> None:
    had = place.logs()
    for number in range(3):
        place.send(number)
    place.lose_power(had)
    place.settings = place.settings.model_copy(update={"acknowledge": "wal"})
    place.start()
    assert place.totals() == {"k0": 3, "k1": 3}
    assert list((place.root / COMMITS_FOLDER).iterdir()) == []


def test_what_was_logged_of_a_deployment_is_nothing_to_the_next_one(place: Place) -> None:
    for number in range(3):
        place.send(number)
    assert place.node.drop("Op", 1) == 2
    place.kill()
    place.start().create(SPEC, [0, 1], 1)  # as for a controller that starts over
    had = place.logs()
    place.send(0)
    place.lose_power(had)
    place.start()
    assert place.totals() == {"k0": 0, "k1": 0}


def test_a_batch_that_its_database_refuses_behind_the_log_is_committed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.send(0)
    with monkeypatch.context() as patch:
        patch.setattr(RocksStore, "apply", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        told = place.send(1)
    assert all(isinstance(each, DiskFull) for each in told.outcomes.values())
    assert [each.replayed for each in place.send(1).applied()] == [True, True]
    assert place.totals() == {"k0": 1, "k1": 1}
    assert [each.sequence for each in place.send(2).applied()] == [3, 3]


def test_a_batch_that_the_log_refuses_is_not_committed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.send(0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        told = place.send(1)
    assert all(isinstance(each, DiskFull) for each in told.outcomes.values())
    assert place.totals() == {"k0": 0, "k1": 0}
    assert [each.replayed for each in place.send(1).applied()] == [False, False]
    assert place.totals() == {"k0": 1, "k1": 1}
    place.kill()
    place.start()
    assert place.totals() == {"k0": 1, "k1": 1}


def test_what_is_deployed_again_while_a_drop_ends_keeps_its_commits(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits of a new deployment stay in the log if the drop of the former one ends after them."""
    place.send(0)
    had: dict[Path, int] = {}

    def deployed_again(_operator: str, _epoch: int) -> None:
        place.node.create(SPEC, [0, 1], 2)
        had.update(place.logs())
        assert len(place.send(0, epoch=2).applied()) == 2

    with monkeypatch.context() as patch:
        patch.setattr(place.node._registry.skipped_batches, "drop", deployed_again)
        assert place.node.drop("Op", 1) == 2
    assert len(place.send(1, epoch=2).applied()) == 2
    place.lose_power(had)
    place.start()
    assert place.totals() == {"k0": 1, "k1": 1}


def test_a_drop_that_cannot_be_logged_keeps_no_segment_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Environment, "aside", lambda _self, work, _wait_s=0.0: work())
    place = Place(tmp_path / "a", commit_log_bytes_max=4096)
    place.node.create(SPEC, [0, 1], 1)
    place.send(0)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(DirectorySegments, "append", full)
        for _ in range(2):
            with pytest.raises(OSError, match="no room"):
                place.node.drop("Op", 1)
    place.node.drop("Op", 1)
    place.node.create(SPEC, [1], 2)
    for number in range(100):
        assert len(place.send(number, 1, epoch=2).applied()) == 1
    assert place.node._registry.commits.log is not None
    assert place.node._registry.commits.log.size < 8192
    place.node.close()


def test_behind_its_end_nothing_is_logged(place: Place) -> None:
    place.send(0)
    place.node._registry.commits.close()
    assert all(isinstance(each, Unavailable) for each in place.send(1).outcomes.values())
    place.kill()
    place.start()
    assert place.totals() == {"k0": 0, "k1": 0}


def test_a_database_that_cannot_be_synced_is_lost_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asides = Environment.sync_database, list[Callable[[], None]]()
    monkeypatch.setattr(Environment, "aside", lambda _self, work, _wait_s=0.0: asides.append(work))
    place = Place(tmp_path / "a", commit_log_bytes_max=4096)
    place.node.create(SPEC, [0, 1], 1)

    def refused(environment: Environment, directory: Path) -> None:
        if directory.parent.name == "p00000":
            raise OSError(errno.EIO, "Input/output error")
        real(environment, directory)

    monkeypatch.setattr(Environment, "sync_database", refused)
    number = 0
    while place.node.lifecycle(P).state is State.OWNED:
        assert number < 100
        place.send(number)
        number += 1
        while asides:
            asides.pop(0)()
    assert place.node.lost_some
    (aside,) = place.aside()
    assert (aside / COMMITS_FILE).exists()
    for later in range(number, number + 50):
        assert len(place.send(later, 1).applied()) == 1
        while asides:
            asides.pop(0)()
    assert place.node._registry.commits.log is not None
    assert place.node._registry.commits.log.size < 8192
    place.node.close()


@pytest.mark.parametrize("fails", ["quarantine", "commits"])
def test_one_that_is_lost_and_cannot_be_put_aside_is_put_aside_later_and_keeps_no_segment_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    asides = list[Callable[[], None]]()
    monkeypatch.setattr(Environment, "aside", lambda _self, work, _wait_s=0.0: asides.append(work))
    place = Place(tmp_path / "a", commit_log_bytes_max=4096)
    place.node.create(SPEC, [0, 1], 1)
    place.send(0)
    place.send(1)
    registry = place.node._registry

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        if fails == "quarantine":
            patch.setattr(registry.quarantine, "put_aside", read_only)
        else:
            patch.setattr(registry.commits, "forget", read_only)
        registry.lose(registry.local(P), StateDamaged("it cannot be read", remedy="-"))
    sizes = []
    for number in range(2, 100):
        assert len(place.send(number, 1).applied()) == 1
        while asides:
            asides.pop(0)()
        sizes.append(sum(path.stat().st_size for path in (place.root / COMMITS_FOLDER).iterdir()))
    assert max(sizes) < 8192
    (aside,) = place.aside()
    frames = decode(COMMITS_FILE, (aside / COMMITS_FILE).read_bytes())
    assert frames is not None
    assert [commit.sequence for commit in frames.records if isinstance(commit, Commit)] == [1, 2]
    place.node.close()


def test_a_database_that_could_not_be_synced_on_a_full_disk_is_rewritten_before_its_commits_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits stay in the log after a failed sync until the database is rewritten.

    A kernel may drop what it could not write, and then the next sync succeeds all the same.
    """
    real, asides, failed = Environment.sync_database, list[Callable[[], None]](), list[Path]()
    monkeypatch.setattr(Environment, "aside", lambda _self, work, _wait_s=0.0: asides.append(work))
    place = Place(tmp_path / "a", commit_log_bytes_max=4096)
    place.node.create(SPEC, [0, 1], 1)
    had = place.logs()

    def full(environment: Environment, directory: Path) -> None:
        if directory.parent.name == "p00000" and not failed:
            failed.append(directory)
            raise OSError(errno.ENOSPC, "no room")
        real(environment, directory)

    def refused(_: RocksStore) -> None:
        raise OSError(errno.ENOSPC, "no room")

    def send(numbers: range) -> list[int]:
        for number in numbers:
            assert len(place.send(number).applied()) == 2
            while asides:
                asides.pop(0)()
        log = place.node._registry.commits.log
        assert log is not None
        return [commit.sequence for commit in log.logged(P)]

    monkeypatch.setattr(Environment, "sync_database", full)
    with monkeypatch.context() as patch:
        patch.setattr(RocksStore, "flush", refused)
        logged = send(range(100))
    assert failed
    assert logged == list(range(logged[0], 101))
    place.lose_power(had)  # P has not more than when the sync failed
    place.start()
    assert place.totals() == {"k0": 4950, "k1": 4950}
    failed.clear()
    assert send(range(100, 200))[0] > 100
    assert failed
    place.node.close()


@pytest.mark.parametrize("broken", [errno.ENOSPC, errno.EIO])
def test_a_database_that_cannot_be_synced_at_start_is_rewritten_before_its_commits_go(
    place: Place, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """A disk fails the sync of a database once, at start, and drops what it did not write.

    If the start ended with that error, the next one would believe the sync that succeeds then.
    """
    real, failed, had = Environment.sync_database, list[Path](), place.logs()
    for number in range(3):
        place.send(number)
    place.kill()

    def refused(environment: Environment, directory: Path) -> None:
        if directory.parent.name == "p00000" and not failed:
            failed.append(directory)
            raise OSError(broken, "no")
        real(environment, directory)

    monkeypatch.setattr(Environment, "sync_database", refused)
    with contextlib.suppress(OSError):
        place.start()
        place.kill()
    assert failed
    place.start()
    place.lose_power({name: size for name, size in had.items() if "p00000" in name.parts and name in place.logs()})
    place.start()
    assert place.totals() == {"k0": 3, "k1": 3}


def test_a_database_that_cannot_be_rewritten_at_start_is_put_aside_alone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Environment.sync_database
    place.send(0)
    place.kill()

    def refused(environment: Environment, directory: Path) -> None:
        if directory.parent.name == "p00000":
            raise OSError(errno.EIO, "Input/output error")
        real(environment, directory)

    def broken(_: RocksStore) -> None:
        raise Exception("IO error: Input/output error: While fsync")

    monkeypatch.setattr(Environment, "sync_database", refused)
    with monkeypatch.context() as patch:
        patch.setattr(RocksStore, "flush", broken)
        # code of the product raises it, see stateflow.storage.faults
        patch.setitem(broken.__globals__, "__name__", "stateflow.test")
        place.start()
    assert list(place.node.owned("Op")) == [Q]
    (aside,) = place.aside()
    assert (aside / COMMITS_FILE).exists()


def test_segments_are_retired_while_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Environment, "aside", lambda _self, work, _wait_s=0.0: work())
    place = Place(tmp_path / "a", commit_log_bytes_max=4096)
    place.node.create(SPEC, [0, 1], 1)
    sizes = []
    for number in range(100):
        place.send(number)
        sizes.append(sum(path.stat().st_size for path in (place.root / COMMITS_FOLDER).iterdir()))
    assert max(sizes) < 8192
    place.kill()
    place.start()
    assert place.totals() == {"k0": 4950, "k1": 4950}
    place.node.close()


def test_one_that_gets_no_more_batches_after_a_failed_write_keeps_no_segment_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asides = list[Callable[[], None]]()
    monkeypatch.setattr(Environment, "aside", lambda _self, work, _wait_s=0.0: asides.append(work))
    place = Place(tmp_path / "a", commit_log_bytes_max=4096)
    place.node.create(SPEC, [0, 1], 1)
    place.send(0)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr(RocksStore, "apply", full)
        assert isinstance(place.send(1, 0).outcomes[0], DiskFull)
    sizes = []
    for number in range(1, 100):
        assert len(place.send(number, 1).applied()) == 1
        while asides:
            asides.pop(0)()
        sizes.append(sum(path.stat().st_size for path in (place.root / COMMITS_FOLDER).iterdir()))
    assert max(sizes) < 8192
    assert place.totals() == {"k0": 1, "k1": 4950}
    place.node.close()


# -- sources that are opened in many partitions ---------------------------------------------------------------

OLD, NEW = layout.Session(4, "b"), layout.Session(5, "c")


def opened(place: Place, session: layout.Session, count: int) -> list[int]:
    """Opens a source in the first partitions. Returns the sequences of their last commits."""
    at = place.node.batches.open_source([PartitionId("Op", number) for number in range(count)], "t", session)
    return [outcome for outcome in at.values() if isinstance(outcome, int)]


def refusing(place: Place, session: layout.Session) -> list[int]:
    """Returns the partitions that refuse a client of the source, in order."""
    found = []
    for partition in place.node.owned("Op"):
        try:
            place.node.batches.open_source([partition], "t", session)
        except SourceTaken:
            found.append(partition.partition)
    return found


@pytest.fixture
def eight(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "a")
    made.node.create(SPEC, range(8), 1)
    made.send(0, *range(8))  # opens the operators
    yield made
    made.node.close()


def test_a_source_is_opened_in_many_partitions_with_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path / "a")
    place.node.create(SPEC, range(64), 1)
    place.send(0, *range(64))  # opens the operators
    with monkeypatch.context() as patch:
        synced = counted(patch)
        assert opened(place, NEW, 64) == [2] * 64
    assert synced == ["log"]
    assert refusing(place, OLD) == list(range(64))
    place.node.close()


def test_what_was_opened_at_once_survives_a_loss_of_power(eight: Place) -> None:
    had = eight.logs()
    opened(eight, NEW, 8)
    eight.lose_power(had)
    eight.start()
    assert refusing(eight, OLD) == list(range(8))
    assert opened(eight, NEW, 8) == [2] * 8, "it is open already"


@pytest.mark.parametrize("step", ["log", "databases"])
def test_a_kill_while_a_source_is_opened_leaves_what_the_next_one_opens(
    eight: Place, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A kill behind the write to the log leaves the source open in all partitions, and one before it in none."""
    real, done = RocksStore.apply, list[int]()

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    def apply(store: RocksStore, mutations: Any, *, sync: bool = False) -> None:
        done.append(1)
        if len(done) > 3:
            raise Killed
        real(store, mutations, sync=sync)

    with monkeypatch.context() as patch:
        if step == "log":
            patch.setattr(DirectorySegments, "append", killed)
        else:
            patch.setattr(RocksStore, "apply", apply)
        with pytest.raises(Killed):
            opened(eight, NEW, 8)
        eight.kill()
    eight.start()
    if step == "log":
        assert opened(eight, OLD, 8) == [2] * 8, "it was not opened"
    assert opened(eight, NEW, 8) == [3 if step == "log" else 2] * 8
    assert refusing(eight, OLD) == list(range(8))


def test_a_source_that_the_log_refuses_is_opened_nowhere(eight: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(DiskFull):
            opened(eight, NEW, 8)
    assert opened(eight, OLD, 8) == [2] * 8
    assert opened(eight, NEW, 8) == [3] * 8
    assert [each.sequence for each in eight.send(1, *range(8)).applied()] == [4] * 8


def test_a_partition_that_refuses_a_client_is_said_and_one_that_is_elsewhere_holds_up_no_other(eight: Place) -> None:
    eight.node.batches.open_source([Q], "t", NEW)
    with pytest.raises(SourceTaken):
        opened(eight, OLD, 8)
    at = eight.node.batches.open_source([P, PartitionId("Op", 9), Q, P], "t", NEW)
    assert (at[P], at[Q]) == (3, 2)
    assert isinstance(at[PartitionId("Op", 9)], NotOwner)
    assert [each.sequence for each in eight.send(1).applied()] == [4, 3]


# -- moves --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(
        "tests.unit.partition.test_replica.SETTINGS", SETTINGS.model_copy(update={"acknowledge": "fsync"})
    )
    made = Two(tmp_path)
    yield made
    made.close()


def test_a_partition_that_moves_takes_all_along_and_comes_back_with_more(two: Two) -> None:
    two.send(two.a, 1)
    two.send(two.a, 2)
    two.leave_a()
    assert two.states(two.b) == {"k1": 2, "k2": 4}
    two.move(two.b, two.a, "m2", 2)
    two.send(two.a, 3, epoch=3)
    for name in "ab":
        two.restart(name)
    assert two.a.lifecycle(P).state is State.OWNED
    assert two.b.lifecycle(P).state is State.SEALED
    assert two.states(two.a) == {"k0": 3, "k1": 2, "k2": 4}
    two.send(two.a, 4, epoch=3)
    assert two.states(two.a) == {"k0": 3, "k1": 6, "k2": 4}


def test_a_seal_is_never_undone_by_what_was_logged_before_it(two: Two) -> None:
    """Damage to the log before the seal counts as damage: the sealed database is not served again."""
    for value in range(9):
        two.send(two.a, value)
    base = two.warm(two.a, two.b, "m1")
    two.b.receiver.open_incoming(P, "m1", base)
    for value in range(9):
        two.send(two.a, value)
    assert two.a.sender.fence(P, "m1", 2, two.b.info)
    shutil.copytree(two.root / "a", two.root / "killed")
    two.nodes["a"].close()
    shutil.rmtree(two.root / "a")
    (two.root / "killed").rename(two.root / "a")
    (log,) = (two.root / "a" / "operators" / "Op" / "p00000").glob("*/*.log")
    tear(log)
    two.start("a")
    assert two.a.lifecycle(P).state is State.ABSENT


def test_a_follower_is_told_of_what_was_logged(two: Two) -> None:
    base = two.warm(two.a, two.b, "m1")
    two.b.receiver.open_incoming(P, "m1", base)
    two.send(two.a, 5)
    assert two.a.sender.fence(P, "m1", 2, two.b.info)
    seal = two.follow(two.a, two.b, "m1", base, base.sequence)
    assert seal is not None
    two.b.receiver.own(P, "m1", seal)
    assert two.states(two.b) == {"k2": 5}
