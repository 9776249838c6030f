"""Data that leaves a replica: file digests, the digest both ends must agree on, and the change log."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateflow.changes import ChangeSet, Mutations, chain
from stateflow.errors import MoveUnknown
from stateflow.partition import change_feed
from stateflow.partition.change_feed import (
    NO_CHANGES,
    BaseFile,
    ChangeLog,
    FileDigests,
    Reading,
    Seal,
    base_digest,
    cutover_digest,
)
from stateflow.replica.service import frames_of
from stateflow.rpc.wire import value_of


def change_set(sequence: int, size: int = 10) -> bytes:
    return ChangeSet("Op", 0, 1, sequence, "s", sequence, Mutations(puts=[(b"k", bytes(size))])).encode()


def seal(sequence: int) -> Seal:
    return Seal("m1", 2, sequence, "digest", 0)


# -- files --------------------------------------------------------------------------------------------------


def test_files_of_a_directory_without_locks_and_logs(tmp_path: Path) -> None:
    for name in ("b.sst", "a.sst", "CURRENT", "LOCK", "LOG", "LOG.old.123"):
        (tmp_path / name).write_text(name)
    (tmp_path / "sub").mkdir()
    files = FileDigests().files(tmp_path)
    assert [file.name for file in files] == ["CURRENT", "a.sst", "b.sst"]
    assert [file.size for file in files] == [7, 5, 5]
    assert len({file.digest for file in files}) == 3
    assert all(len(file.digest) == 32 for file in files)


def test_equal_content_has_an_equal_digest(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x" * 100_000)
    (tmp_path / "two").write_bytes(b"x" * 100_000)
    (tmp_path / "three").write_bytes(b"x" * 99_999 + b"y")
    digests = FileDigests()
    one, two, three = (digests.of(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two != three


def test_a_file_that_was_written_again_is_hashed_again(tmp_path: Path) -> None:
    digests = FileDigests()
    file = tmp_path / "f"
    file.write_bytes(b"one")
    before = digests.of(file)
    file.write_bytes(b"other")
    assert digests.of(file) == FileDigests().of(file) != before


def test_hard_links_are_hashed_once(tmp_path: Path) -> None:
    digests = FileDigests()
    (tmp_path / "f").write_bytes(b"content")
    (tmp_path / "g").hardlink_to(tmp_path / "f")
    assert digests.of(tmp_path / "f") == digests.of(tmp_path / "g")
    assert len(digests._known) == 1


def test_the_digests_that_were_used_last_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of remembered digests has a limit: each snapshot has files that no other one has."""
    monkeypatch.setattr(change_feed, "DIGESTS_KEPT", 2)
    digests = FileDigests()
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name)
    a, b, c = paths
    for path in (a, b, a, c):
        digests.of(path)
    identities = {(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in (a.stat(), c.stat())}
    assert set(digests._known) == identities
    assert digests.of(b) == FileDigests().of(b)


FILES = (BaseFile("a", 1, "aa"), BaseFile("b", 2, "bb"))


def test_a_base_digest_covers_names_sizes_contents_and_sequence() -> None:
    variants = [
        base_digest(FILES, 5),
        base_digest(FILES, 6),
        base_digest(FILES[:1], 5),
        base_digest(FILES[::-1], 5),
        base_digest((), 5),
        base_digest((BaseFile("x", 1, "aa"), FILES[1]), 5),
        base_digest((BaseFile("a", 9, "aa"), FILES[1]), 5),
        base_digest((BaseFile("a", 1, "ab"), FILES[1]), 5),
    ]
    assert len(set(variants)) == len(variants)
    assert base_digest(FILES, 5) == base_digest(list(FILES), 5)


def test_a_cutover_digest_covers_base_and_changes() -> None:
    one, other = chain(NO_CHANGES, change_set(1)), chain(NO_CHANGES, change_set(2))
    digests = {cutover_digest(base, changes) for base in ("aa", "ab") for changes in (NO_CHANGES, one, other)}
    assert len(digests) == 6


# -- change log ---------------------------------------------------------------------------------------------


def test_what_was_read_is_forgotten_only_when_it_is_confirmed() -> None:
    log = ChangeLog("m1", "snap", base_sequence=4, bytes_max=10_000)
    for sequence in (5, 6, 7):
        log.append(sequence, change_set(sequence))
    everything = [change_set(5), change_set(6), change_set(7)]
    assert log.read(4, 10_000).change_sets == everything
    assert log.read(4, 10_000).change_sets == everything, "a follower whose stream broke may read again"
    assert log.read(6, 10_000).change_sets == everything[2:]
    assert log.read(4, 10_000).change_sets == everything, "what was asked for next is no proof of what came before"
    log.confirm(6)
    assert log.read(6, 10_000).change_sets == everything[2:]
    with pytest.raises(MoveUnknown, match=r"up to 6 were already dropped, but those after 4 are requested"):
        log.read(4, 10_000)


def test_a_reading_is_bounded_but_never_empty() -> None:
    log = ChangeLog("m1", "snap", 0, bytes_max=10_000)
    sets = [change_set(n, size=100) for n in range(1, 6)]
    for sequence, data in enumerate(sets, 1):
        log.append(sequence, data)
    size = len(sets[0])
    reading = log.read(0, 2 * size)
    assert reading.change_sets == sets[:2]
    assert reading.lag_bytes == sum(map(len, sets[2:]))
    assert reading.head_sequence == 5
    assert log.read(0, 1).change_sets == sets[:1]


def test_the_seal_comes_with_the_last_change_set() -> None:
    log = ChangeLog("m1", "snap", 0, bytes_max=10_000)
    log.append(1, change_set(1))
    log.append(2, change_set(2))
    assert log.read(0, 10_000).seal is None
    log.end(seal(2))
    assert log.read(0, 1).seal is None, "there is more before it"
    assert log.read(1, 1).seal == seal(2)
    assert log.read(2, 1).seal == seal(2)
    assert log.read(2, 1).change_sets == []


def test_the_chain_covers_everything_ever_appended() -> None:
    log = ChangeLog("m1", "snap", 0, bytes_max=10_000)
    expected = NO_CHANGES
    assert log.changes == expected
    for sequence in range(1, 5):
        log.append(sequence, change_set(sequence))
        log.read(sequence, 1)
        expected = chain(expected, change_set(sequence))
        assert log.changes == expected


def test_overflow_is_final() -> None:
    size = len(change_set(1))
    log = ChangeLog("m1", "snap", 0, bytes_max=2 * size)
    log.append(1, change_set(1))
    log.append(2, change_set(2))
    assert not log.overflowed, "the bound itself is allowed"
    log.append(3, change_set(3))
    assert log.overflowed
    log.append(4, change_set(4))
    assert log.read(0, 10_000).change_sets == []


def test_what_was_confirmed_makes_room() -> None:
    size = len(change_set(1))
    log = ChangeLog("m1", "snap", 0, bytes_max=2 * size)
    for sequence in range(1, 50):
        log.append(sequence, change_set(sequence))
        log.read(sequence - 1, 1)
        log.confirm(sequence - 1)
    assert not log.overflowed


def test_everything_wakes_the_follower() -> None:
    log = ChangeLog("m1", "snap", 0, bytes_max=10_000)
    woken: list[str] = []
    log.wake = lambda: woken.append("woken")
    log.append(1, change_set(1))
    log.end(seal(1))
    log.close()
    assert len(woken) == 3
    assert log.closed


def test_a_writer_and_a_reader_at_once() -> None:
    log = ChangeLog("m1", "snap", 0, bytes_max=1 << 30)
    count = 2000
    sets = [change_set(n) for n in range(1, count + 1)]

    def write() -> None:
        for sequence, data in enumerate(sets, 1):
            log.append(sequence, data)
        log.end(seal(count))

    writer = threading.Thread(target=write)
    writer.start()
    read: list[bytes] = []
    while True:
        reading = log.read(len(read), 500)
        read += reading.change_sets
        if reading.seal is not None:
            break
    writer.join()
    assert read == sets


@given(st.lists(st.integers(0, 60), max_size=15), st.lists(st.integers(1, 200), min_size=1, max_size=15))
def test_any_interleaving_reads_every_change_set_once_in_order(sizes: list[int], limits: list[int]) -> None:
    log = ChangeLog("m1", "snap", 10, bytes_max=1 << 30)
    sets = [change_set(11 + n, size) for n, size in enumerate(sizes)]
    read: list[bytes] = []
    pending = list(enumerate(sets, 11))
    at = 0
    sealed = False
    while True:
        if pending:
            log.append(*pending.pop(0))
        elif not sealed:
            log.end(seal(10 + len(sets)))
            sealed = True
        reading = log.read(10 + len(read), limits[at % len(limits)])
        at += 1
        read += reading.change_sets
        unread = sum(map(len, sets[: len(sets) - len(pending)])) - sum(map(len, read))
        assert reading.lag_bytes == unread
        assert (reading.seal is not None) == (sealed and len(read) == len(sets))
        if reading.seal is not None:
            break
    assert read == sets


def test_an_empty_log() -> None:
    log = ChangeLog("m1", "snap", 3, 100)
    with pytest.raises(MoveUnknown):
        log.read(0, 10)
    reading = log.read(3, 10)
    assert (reading.change_sets, reading.head_sequence, reading.lag_bytes, reading.seal) == ([], 3, 0, None)


# -- frames -------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=30), st.integers(1, 25))
def test_change_sets_cross_in_full_frames(change_sets: list[bytes], bytes_max: int) -> None:
    frames = list(frames_of(Reading(change_sets, len(change_sets), 7, None, b"chain"), bytes_max))
    assert [frame.chain for frame in frames] == [b""] * (len(frames) - 1) + [b"chain"]
    assert (frames[-1].head_sequence, frames[-1].lag_bytes) == (len(change_sets), 7)
    came: list[bytes] = []
    partial = b""
    for frame in frames:  # put together as the target does
        assert (0 if not change_sets else 1) <= sum(map(len, frame.change_sets)) <= bytes_max
        some = list(frame.change_sets)
        if some:
            some[0], partial = partial + some[0], b""
        if frame.continues:
            partial = some.pop()
        came += some
    assert (came, partial) == (change_sets, b"")
    for one, other in itertools.pairwise(frames):
        full = sum(map(len, one.change_sets)) + len(other.change_sets[0]) > bytes_max
        assert full or one.continues


def test_many_small_change_sets_are_one_frame() -> None:
    seal_ = seal(500)
    (frame,) = frames_of(Reading([b"x" * 100] * 500, 500, 0, seal_), 1 << 20)
    assert len(frame.change_sets) == 500
    assert value_of(Seal, frame.seal) == seal_
