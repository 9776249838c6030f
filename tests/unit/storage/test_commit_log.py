"""The log of a replica's commits: one write for many, kept until databases have them, found again after a crash."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest

from stateflow.errors import InvalidArgument
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.storage.commit_log import (
    FRAME_BYTES_MAX,
    SECTOR,
    SEGMENT_HEADER,
    SEGMENTS,
    Commit,
    CommitLog,
    DirectorySegments,
    recover,
    segment_name,
)
from stateflow.types import PartitionId
from tests.unit.test_durable import out_of_files

P, Q = PartitionId("Op", 1), PartitionId("Op", 2)
SMALL = SEGMENTS * 1000


def commit(sequence: int, partition: PartitionId = P, epoch: int = 1, data: bytes = b"c" * 40) -> Commit:
    return Commit(partition, epoch, sequence, b"%d:" % sequence + data)


class Files:
    """Files on a disk that may refuse writes, loses what was not synced with its power, and counts.

    ``refuses``: what fails, one or more words. ``dropped``: offsets of bytes that a sync failed to write. Readers see
    them, and no later sync writes them.
    """

    def __init__(self) -> None:
        self.data: dict[int, bytearray] = {}
        self.synced: dict[int, int] = {}
        self.dropped: dict[int, set[int]] = {}
        self.refuses: str | None = None
        self.writes = self.syncs = 0
        self.active = 0

    def _refused(self, what: str) -> None:
        if what in (self.refuses or "").split():
            if what in ("sync", "create") and self.active in self.data:
                unsynced = range(self.synced[self.active], len(self.data[self.active]))
                self.dropped.setdefault(self.active, set()).update(unsynced)
            raise OSError(errno.ENOSPC, "no room")

    def read(self) -> Sequence[tuple[int, bytes]]:
        return [(number, bytes(self.data[number])) for number in sorted(self.data)]

    def create(self, number: int, data: bytes) -> None:
        self._refused("create")
        if self.active in self.data:
            self.synced[self.active] = len(self.data[self.active])
        self.data[number] = bytearray()
        self._refused("empty")
        self.data[number] += data
        self._refused("name")
        self.synced[number] = len(data)
        self.active = number

    def append(self, data: bytes, *, sync: bool = True) -> None:
        self.writes += 1
        self._refused("write")
        file = self.data[self.active]
        if "half" in (self.refuses or "").split():
            file += data[: len(data) // 2]
            raise OSError(errno.ENOSPC, "no room")
        file += data
        self._refused("sync")
        if sync:
            self.syncs += 1
            self.synced[self.active] = len(file)

    def truncate(self, size: int) -> None:
        self._refused("truncate")
        del self.data[self.active][size:]
        self.synced[self.active] = min(size, self.synced[self.active])
        self.dropped[self.active] = {at for at in self.dropped.get(self.active, ()) if at < size}

    def rewrite(self, offset: int, data: bytes) -> None:
        self._refused("rewrite")
        file = self.data[self.active]
        assert file[offset:] == data
        self.dropped.get(self.active, set()).difference_update(range(offset, len(file)))
        self.synced[self.active] = len(file)

    def remove(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self.data[number]
            self.synced.pop(number, None)
            self.dropped.pop(number, None)

    def close(self) -> None: ...

    def lose_power(self, random: Random) -> None:
        for number, file in self.data.items():
            for at in self.dropped.pop(number, ()):
                file[at] = 0
            del file[random.randint(self.synced.get(number, 0), len(file)) :]
            self.synced[number] = len(file)


class Databases:
    """Databases with the sequence that each has (``has``), and has durably (``durable``)."""

    def __init__(self) -> None:
        self.has: dict[PartitionId, int] = {}
        self.durable: dict[PartitionId, int] = {}
        self.refuses: set[PartitionId] = set()
        self.leaving: set[PartitionId] = set()
        self.syncs: list[PartitionId] = []

    def sync(self, partition: PartitionId) -> bool:
        self.syncs.append(partition)
        if partition in self.leaving:
            return False
        if partition in self.refuses:
            raise OSError(errno.EIO, "broken")
        self.durable[partition] = self.has.get(partition, 0)
        return True


def opened(
    files: Files | DirectorySegments,
    databases: Databases,
    bytes_max: int = SMALL,
    failed: Callable[[PartitionId, Exception], None] = lambda _partition, _error: None,
) -> CommitLog:
    return CommitLog(
        files,
        recover(files),
        bytes_max,
        mutex=threading.RLock,
        sync=databases.sync,
        aside=lambda work: work(),
        on_failed=failed,
    )


def do(log: CommitLog, databases: Databases, *commits: Commit) -> None:
    log.append(commits)
    for each in commits:
        databases.has[each.partition] = each.sequence
        log.written(each.partition, each.sequence)


def test_commits_of_many_partitions_are_one_write() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases, 1 << 20)
    do(log, databases, *(commit(1, PartitionId("Op", number)) for number in range(500)))
    assert (files.writes, files.syncs) == (1, 1)
    assert databases.syncs == []
    assert recover(files).logged.of(PartitionId("Op", 499)) == [commit(1)._replace(partition=PartitionId("Op", 499))]


def test_real_files(tmp_path: Path) -> None:
    files, databases = DirectorySegments(tmp_path / "commits"), Databases()
    log = opened(files, databases)
    for number in range(1, 140):
        do(log, databases, commit(number), commit(number, Q))
    assert log.size <= SMALL + 1000
    log.close()
    left = sorted(path.name for path in (tmp_path / "commits").iterdir())
    again = DirectorySegments(tmp_path / "commits")
    found = recover(again)
    assert left == [segment_name(number) for number in found.segments]
    assert found.logged.of(P)[-1] == commit(139)
    assert found.logged.lacking(P, 1, databases.durable[P])[-1].sequence == 139
    assert (tmp_path / "commits").stat().st_mode & 0o777 in (0o700, 0o755)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "commits").iterdir())
    log = opened(again, databases)
    assert [path.name for path in (tmp_path / "commits").iterdir()] == [segment_name(found.segments[-1] + 1)]
    do(log, databases, commit(140))
    assert recover(again).after == found.after + 1


def test_a_log_that_cannot_be_listed_is_not_empty(tmp_path: Path) -> None:
    files = DirectorySegments(tmp_path / "commits")
    assert files.read() == []
    files.create(1, b"x")
    files.close()
    with out_of_files(tmp_path), pytest.raises(OSError, match="Too many open files"):
        files.read()


def test_what_databases_have_durably_goes_and_no_more() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    for number in range(1, 200):
        do(log, databases, commit(number), commit(number, Q))
        for partition in (P, Q):
            first = log.logged(partition)[0].sequence
            assert first <= databases.durable.get(partition, 0) + 1
        assert log.size <= SMALL + 1000
    assert 20 < len(databases.syncs) < 150


def test_a_commit_that_its_database_does_not_have_yet_stays() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    log.append([commit(1, Q)])  # the database refuses this commit
    for number in range(1, 100):
        do(log, databases, commit(number))
    assert Q not in databases.syncs
    assert log.logged(Q) == [commit(1, Q)]
    assert log.lacking(Q, 1, 0) == [commit(1, Q)]
    assert log.lacking(Q, 1, 1) == log.lacking(Q, 2, 0) == log.lacking(P, 1, 99) == []
    log.written(Q, 1)  # the next replica to open the database has completed it
    databases.has[Q] = 1
    for number in range(100, 200):
        do(log, databases, commit(number))
    assert databases.durable[Q] == 1
    assert log.logged(Q) == []


def test_one_that_was_restored_to_a_smaller_sequence_keeps_no_segment_for_ever() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1000))
    for number in range(1, 100):
        do(log, databases, commit(number, epoch=2))
        assert log.size <= SMALL + 1000
    assert log.logged(P)[0].epoch == 2


def test_segments_that_cannot_be_removed_are_removed_later_and_in_order() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    real, asked = files.remove, list[int]()

    def refused(numbers: Sequence[int]) -> None:
        asked.extend(numbers)
        raise OSError(errno.EIO, "broken")

    files.remove = refused  # type: ignore[method-assign]
    number = 0
    while len(asked) < 3:
        number += 1
        with contextlib.suppress(OSError):  # at the limit a caller of append gets the error
            log.append([commit(number)])
            databases.has[P] = number
            log.written(P, number)
        assert recover(files).logged.of(P)[0].sequence == 1
    assert set(asked) == {1}
    files.remove = real  # type: ignore[method-assign]
    for later in range(number + 1, number + 100):
        do(log, databases, commit(later))
    assert log.size <= SMALL + 1000
    assert recover(files).logged.of(P)[-1].sequence == number + 99


def test_one_that_cannot_be_synced_is_named_and_holds_up_no_other() -> None:
    """A database that cannot be synced is named, and holds up no other.

    The log reports it without a lock: the listener may call this log, and wait for another thread that does.
    """
    files, databases, named = Files(), Databases(), list[tuple[PartitionId, Exception]]()

    def failed(partition: PartitionId, error: Exception) -> None:
        named.append((partition, error))
        kept = list[Commit]()
        other = threading.Thread(target=lambda: kept.extend(log.logged(partition)))
        other.start()
        other.join(10)
        assert kept == [commit(1, Q)]

    log = opened(files, databases, failed=failed)
    databases.refuses.add(Q)
    do(log, databases, commit(1, Q))
    number = 0
    while not named:
        number += 1
        do(log, databases, commit(number))
    assert named[0][0] == Q
    assert "broken" in str(named[0][1])
    assert databases.durable[P] > 0
    assert log.logged(Q) == [commit(1, Q)]
    log.forget([Q])
    for later in range(number + 1, number + 100):
        do(log, databases, commit(later))
    assert log.size <= SMALL + 1000
    assert {partition for partition, _ in named} == {Q}


def test_what_was_logged_of_one_that_is_put_aside_stays_until_that_is_done() -> None:
    """Commits of a partition that is being quarantined stay in the log until that is done, as they are read from it."""
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1, Q))
    databases.leaving.add(Q)
    for number in range(1, 100):
        do(log, databases, commit(number))
    assert log.logged(Q) == [commit(1, Q)]
    log.forget([Q])
    do(log, databases, *(commit(number) for number in range(100, 200)))
    do(log, databases, commit(200))
    assert log.logged(Q) == []
    assert log.size <= 2 * SMALL


def test_no_segment_is_removed_while_the_log_is_read() -> None:
    """Another thread removes no segment while commits are read, as the read would fail on a file that is gone."""
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1))
    real, removes = files.read, list[bool]()

    def read() -> Sequence[tuple[int, bytes]]:
        other = threading.Thread(target=lambda: removes.append(log._retiring.acquire(blocking=False)))  # type: ignore[attr-defined]
        other.start()
        other.join()
        return real()

    files.read = read  # type: ignore[method-assign]
    assert log.logged(P) == [commit(1)]
    assert removes == [False]


def test_what_was_forgotten_is_not_found_and_not_logged_again() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1), commit(1, Q))
    log.append([commit(2, Q)])
    log.forget([Q, PartitionId("Op", 9)])
    assert recover(files).logged.partitions == [P]
    assert (log.lacking(Q, 1, 0), log.logged(Q)) == ([], [])
    for number in range(2, 200):  # segments are retired after it
        do(log, databases, commit(number))
        assert recover(files).logged.of(Q) == []
    do(log, databases, commit(1, Q, epoch=2))
    assert recover(files).logged.of(Q) == [commit(1, Q, epoch=2)]


def test_a_segment_begins_when_the_one_before_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment begins once the one before is durable, including what was appended without a sync.

    Otherwise a power failure leaves a gap, and the log is taken for damaged.
    """
    done: list[str] = []
    fdatasync, fsync = os.fdatasync, os.fsync

    def named(what: str, sync: Callable[[int], None]) -> Callable[[int], None]:
        def of(file: int) -> None:
            done.append(f"{what} {Path(f'/proc/self/fd/{file}').readlink().name}")
            sync(file)

        return of

    monkeypatch.setattr(os, "fdatasync", named("data of", fdatasync))
    monkeypatch.setattr(os, "fsync", named("all of", fsync))
    files = DirectorySegments(tmp_path / "commits")
    files.create(1, b"one")
    files.append(b"more", sync=False)
    done.clear()
    files.create(2, b"two")
    assert done[:2] == [f"data of {segment_name(1)}", f"all of {segment_name(2)}"]
    files.close()


def test_a_start_whose_sync_fails_leaves_no_gap_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts fail, the second one after a loss of power, and the log is not taken for damaged.

    The disk dropped a frame when the first start synced it. To the second start it looks as if it were on disk.
    """
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1), commit(1, Q))
    log.forget([P], sync=False)
    databases.sync(Q)
    files.refuses = "create"
    with pytest.raises(OSError, match="no room"):
        opened(files, databases)
    files.refuses = None

    def ends(_: Sequence[int]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "remove", ends)
        opened(files, databases)
    files.lose_power(Random(0))
    assert recover(files).logged.lacking(Q, 1, databases.durable[Q]) == []
    do(opened(files, databases), databases, commit(2, Q))
    assert recover(files).logged.of(Q) == [commit(2, Q)]


def test_forgetting_what_is_not_there_writes_nothing() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1))
    log.forget([Q])
    assert files.writes == 1
    log.forget([P], sync=False)
    assert (files.writes, files.syncs) == (2, 1)


@pytest.mark.parametrize("ends", [None, "sync"])
def test_a_power_loss_leaves_no_gap_in_what_was_not_synced(ends: str | None) -> None:
    """A power loss may take any sector that was not synced. The log is not damaged by it.

    ``ends``: power fails while a commit is being synced; None: before it.
    """
    files, databases = Files(), Databases()
    log = opened(files, databases, 1 << 20)
    left = [PartitionId("Op", number) for number in range(10, 50)]
    do(log, databases, commit(1), *(commit(1, each) for each in left))
    for each in left:
        log.forget([each], sync=False)
        files.refuses = ends
        if ends is not None:
            with pytest.raises(OSError, match="no room"):
                log.append([commit(2, data=b"c" * 2 * SECTOR)])
        files.refuses = None
        synced, whole = files.synced[1], bytes(files.data[1])
        for start in range(synced // SECTOR * SECTOR, len(whole), SECTOR):
            start, end = max(start, synced), min(start + SECTOR, len(whole))
            files.data[1][start:end] = bytes(end - start)
            assert recover(files).logged.of(P)[0] == commit(1)
            files.data[1][:] = whole


@pytest.mark.parametrize("how", ["write", "half", "sync"])
def test_behind_an_append_that_failed_all_goes_on(how: str) -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1))
    files.refuses = how
    with pytest.raises(OSError, match="no room"):
        log.append([commit(2, data=b"failed"), commit(1, Q)])
    assert log.lacking(P, 1, 1) == []
    files.refuses = None
    do(log, databases, commit(2))
    assert recover(files).logged.of(P) == [commit(1), commit(2)]
    assert recover(files).logged.of(Q) == []


@pytest.mark.parametrize("more", [None, "rewrite"])
@pytest.mark.parametrize(("how", "others"), [("sync", 1), ("sync", 60), ("create", 1)])
def test_what_was_not_durable_when_a_sync_failed_is_written_again(how: str, others: int, more: str | None) -> None:
    """A frame that was written without a sync before a sync failed is not lost with the power.

    The kernel marks what it could not write as written, so that the next sync succeeds without it. The log then counted
    as damaged: a frame was missing before later ones.
    """
    files, databases = Files(), Databases()
    log = opened(files, databases, 1 << 16)
    gone = [PartitionId("Gone", number) for number in range(others)]
    databases.refuses.add(Q)  # so that the segment stays
    log.append([commit(1, each) for each in [Q, *gone]])
    log.forget(gone, sync=False)
    one = commit(1, data=b"c" * (1 << 14 if how == "create" else 40))  # in the same segment, or in a new one
    for files.refuses in (how, more):
        if files.refuses is not None:
            with pytest.raises(OSError, match="no room"):
                log.append([one])
    files.refuses = None
    do(log, databases, one)
    files.lose_power(Random(0))
    logged = recover(files).logged
    assert (logged.of(P), logged.of(Q)) == ([one], [commit(1, Q)])
    assert not {*logged.partitions} & {*gone}


def test_written_again_are_the_same_bytes_in_the_same_place(tmp_path: Path) -> None:
    files = DirectorySegments(tmp_path / "commits")
    files.create(1, b"one")
    files.append(b" two three", sync=False)
    files.rewrite(3, b" two three")
    files.append(b" four")
    assert files.read() == [(1, b"one two three four")]
    files.close()


def test_a_segment_that_cannot_be_closed_is_not_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appends go to a new segment although closing the former one fails, whose number may be another file's by then."""
    files = DirectorySegments(tmp_path / "commits")
    files.create(1, b"one")
    close, former = os.close, files._file

    def failing(file: int) -> None:
        close(file)
        if file == former:
            raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "close", failing)
    files.create(2, b"two")
    files.append(b" more")
    assert files.read() == [(1, b"one"), (2, b"two more")]
    former = files._file
    with pytest.raises(OSError, match="broken"):
        files.close()
    files.close()


def test_a_database_that_has_lost_commits_gets_them_but_none_of_a_failed_append() -> None:
    """A database gets the commits that it has lost, from the log. The commit of an append that failed may be made again
    with other content, so no database gets it."""
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1), commit(1, Q), commit(2), commit(3))
    log.append([commit(4), commit(2, Q)])
    files.refuses = "sync"
    with pytest.raises(OSError, match="no room"):
        log.append([commit(5, data=b"failed")])
    files.refuses = None
    assert log.lacking(P, 1, 3) == [commit(4)]
    assert log.lacking(P, 1, 1) == [commit(2), commit(3), commit(4)]
    assert log.lacking(Q, 1, 0) == [commit(1, Q), commit(2, Q)]
    log.forget([Q])
    assert log.lacking(Q, 1, 0) == []
    do(log, databases, commit(5))
    assert log.lacking(P, 1, 4) == [commit(5)]


def test_an_append_that_failed_may_be_there_and_is_forgotten_all_the_same() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    files.refuses = "sync truncate"
    with pytest.raises(OSError, match="no room"):
        log.append([commit(1, Q)])
    assert recover(files).logged.of(Q) == [commit(1, Q)]
    files.refuses = None
    log.forget([Q])
    assert recover(files).logged.of(Q) == []


@pytest.mark.parametrize("how", ["half", "sync"])
def test_a_failed_append_keeps_no_room_of_the_disk(how: str) -> None:
    """Other writers need the room, and the next append may be long in coming."""
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1))
    before = bytes(files.data[1])
    files.refuses = how
    with pytest.raises(OSError, match="no room"):
        log.append([commit(2, data=b"c" * SECTOR)])
    assert files.data[1] == before
    files.refuses = None
    do(log, databases, commit(2))
    assert recover(files).logged.of(P) == [commit(1), commit(2)]


class Huge(bytes):
    """A change set that says to have 4 GiB."""

    def __len__(self) -> int:
        return FRAME_BYTES_MAX


def test_a_commit_that_no_frame_can_hold_is_refused_with_its_size() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1))
    with pytest.raises(InvalidArgument, match=r"4294967\d+ bytes .*partition=Op/2.*smaller batches"):
        log.append([commit(2), Commit(Q, 1, 1, Huge())])
    do(log, databases, commit(2))
    assert recover(files).logged.of(P) == [commit(1), commit(2)]


def test_what_cannot_be_cut_off_takes_no_more() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1))
    files.refuses = "half truncate"
    with pytest.raises(OSError, match="no room"):
        log.append([commit(2)])
    files.refuses = "truncate"
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            log.append([commit(2)])
    assert recover(files).logged.of(P) == [commit(1)]


@pytest.mark.parametrize("how", ["create", "name"])
def test_a_segment_that_cannot_be_made(how: str) -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    number, refused = 0, 0
    files.refuses = how
    while refused < 2:
        try:
            do(log, databases, commit(number + 1))
        except OSError:
            refused += 1
        else:
            number += 1
        assert [each.sequence for each in recover(files).logged.of(P)] == list(range(1, number + 1))
    files.refuses = None
    do(log, databases, commit(number + 1))
    assert recover(files).logged.of(P)[-1] == commit(number + 1)


@pytest.mark.parametrize("how", ["empty", "name"])
def test_a_start_that_ends_behind_a_segment_that_could_not_be_made_is_repeated(how: str) -> None:
    """A log with a segment that could not be made is read again, although the process ended in the middle of a start.

    The process ended before the removal of the former log.
    """
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1))
    files.refuses = how
    with pytest.raises(OSError, match="no room"):
        log.append([commit(2, data=bytes(SMALL))])
    files.refuses = None
    do(log, databases, commit(2))
    logged = recover(files).logged.of(P)
    assert logged == [commit(1), commit(2)]
    real = files.remove

    def ends(_: Sequence[int]) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        files.remove = ends  # type: ignore[method-assign]
        with contextlib.suppress(KeyboardInterrupt):
            opened(files, databases)
        assert recover(files).logged.of(P) == logged
    files.remove = real  # type: ignore[method-assign]
    do(opened(files, databases), databases, commit(3))
    assert recover(files).logged.of(P) == [commit(3)]
    assert len(files.data) == 1


def test_at_the_limit_databases_are_synced_before_more_is_logged() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    asides: list[Callable[[], None]] = []
    log._aside = asides.append  # no thread comes to retire segments
    sizes, before = [], LIMIT_HITS.count("commit_log_bytes")
    for number in range(1, 300):
        do(log, databases, commit(number))
        sizes.append(log.size)
    assert max(sizes) <= SMALL + 1000
    assert databases.durable[P] > 0
    assert len(asides) > 1
    assert LIMIT_HITS.count("commit_log_bytes") > before


def test_a_frame_may_be_larger_than_a_segment() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    for number in range(1, 10):
        do(log, databases, commit(number, data=bytes([number]) * 5 * SMALL))
        assert recover(files).logged.of(P)[-1].sequence == number
    assert databases.durable[P] >= 8
    assert log.size <= 7 * SMALL


def test_behind_its_end_nothing_is_removed() -> None:
    files, databases = Files(), Databases()
    log = opened(files, databases)
    do(log, databases, commit(1))
    before = files.read()
    log.close()
    log._retire()
    assert files.read() == before
    assert len(before) == 1
    assert len(before[0][1]) > SEGMENT_HEADER


@pytest.mark.parametrize("seed", range(60))
def test_nothing_that_was_acknowledged_is_ever_lacking(seed: int) -> None:
    """Log and durable databases together have every acknowledged commit, with its own content.

    Appends fail in every way, databases refuse, partitions leave and come back, processes are killed, and power fails.
    """
    random = Random(seed)
    files, databases = Files(), Databases()
    log = opened(files, databases)
    partitions = [PartitionId("Op", number) for number in range(4)]
    epoch = dict.fromkeys(partitions, 1)
    said: dict[PartitionId, dict[int, Commit]] = {partition: {} for partition in partitions}
    for step in range(200):
        files.refuses = random.choice([None] * 12 + ["write", "half", "sync", "truncate", "create", "name"])
        what = random.random()
        try:
            if what < 0.8:
                chosen = random.sample(partitions, random.randint(1, 4))
                commits = [
                    commit(databases.has.get(each, 0) + 1, each, epoch[each], b"%d" % step * random.randint(0, 20))
                    for each in chosen
                ]
                log.append(commits)
                for each in commits:
                    said[each.partition][each.sequence] = each
                    if random.random() < 0.1:  # the database refuses the commit, and is opened again
                        lacking = log.lacking(each.partition, each.epoch, databases.has.get(each.partition, 0))
                        assert lacking == [each]
                    databases.has[each.partition] = each.sequence
                    log.written(each.partition, each.sequence)
            elif what < 0.85:
                gone = random.choice(partitions)
                log.forget([gone])
                databases.has.pop(gone, None)
                databases.durable.pop(gone, None)
                said[gone] = {}
        except OSError:
            pass
        if random.random() < 0.05:
            files.refuses = None
            if random.random() < 0.7:
                files.lose_power(random)
                databases.has = dict(databases.durable)
            logged = recover(files).logged
            for partition in partitions:
                has = databases.has.get(partition, 0)
                lacking = logged.lacking(partition, epoch[partition], has)
                for each in lacking:
                    assert said[partition].setdefault(each.sequence, each) == each
                databases.has[partition] = databases.durable[partition] = has + len(lacking)
                assert databases.has[partition] == len(said[partition])
            log = opened(files, databases)
