"""Bytes of a commit log: what was written is read back, and an interrupted write is distinguished from damage."""

from __future__ import annotations

import random

import pytest

from stateflow.errors import CommitLogDamaged
from stateflow.storage.commit_log import (
    FRAME_HEADER,
    SECTOR,
    SEGMENT_HEADER,
    Commit,
    Gone,
    Logged,
    Record,
    decode,
    encode,
    read,
    segment_header,
)
from stateflow.types import PartitionId

P, Q = PartitionId("Öp", 3), PartitionId("Other", 70_000)


def commit(sequence: int, partition: PartitionId = P, epoch: int = 1, size: int = 40) -> Commit:
    return Commit(partition, epoch, sequence, random.Random(sequence).randbytes(size))


def segment(frames: list[list[Record]], first: int = 1) -> tuple[bytes, list[int]]:
    """Returns a segment, and where each of its frames ends."""
    data, ends = segment_header(first), []
    for number, records in enumerate(frames, first):
        data += encode(number, records)
        ends.append(len(data))
    return data, ends


FRAMES: list[list[Record]] = [
    [commit(1), commit(1, Q, 9, 0)],
    [Gone(Q), commit(2)],
    [commit(1, Q, 10, 3 * SECTOR), commit(3)],
]


def test_what_was_written_is_read() -> None:
    data, ends = segment(FRAMES, 7)
    found = decode("s", data)
    assert found is not None
    assert found.records == [record for frame in FRAMES for record in frame]
    assert (found.first, found.after, found.end, found.torn) == (7, 10, ends[-1], False)


def test_cut_at_every_byte_whole_frames_are_left() -> None:
    data, ends = segment(FRAMES)
    for length in range(len(data)):
        found = decode("s", data[:length])
        if length < SEGMENT_HEADER:
            assert found is None
            continue
        whole = sum(end <= length for end in ends)
        assert found is not None
        assert found.records == [record for frame in FRAMES[:whole] for record in frame], length
        assert found.torn == (length not in (SEGMENT_HEADER, *ends))
        assert found.after == 1 + whole


def test_a_write_of_which_sectors_are_missing_is_cut_off() -> None:
    data, ends = segment(FRAMES)
    missing = 0
    for start in range(ends[1] // SECTOR * SECTOR, len(data), SECTOR):
        at, to = max(start, ends[1]), min(start + SECTOR, len(data))
        found = decode("s", data[:at] + bytes(to - at) + data[to:])
        assert found is not None
        assert found.torn
        assert found.records == [record for frame in FRAMES[:2] for record in frame]
        missing += 1
    assert missing >= 4


def test_every_bit_that_is_not_what_was_written_is_noticed() -> None:
    data, _ = segment(FRAMES)
    for at in range(len(data)):
        for bit in (0x01, 0x80):
            with pytest.raises(CommitLogDamaged):
                decode("s", data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])


@pytest.mark.parametrize("kept", [(0, 2), (1, 2), (0, 0, 1), (1, 0)])
def test_frames_that_do_not_follow_on_each_other_are_damage(kept: tuple[int, ...]) -> None:
    data, ends = segment(FRAMES)
    starts = [SEGMENT_HEADER, *ends]
    with pytest.raises(CommitLogDamaged, match="where"):
        decode("s", data[:SEGMENT_HEADER] + b"".join(data[starts[n] : ends[n]] for n in kept))


def test_zeros_in_the_middle_are_damage() -> None:
    data, ends = segment(FRAMES)
    with pytest.raises(CommitLogDamaged, match="follows it"):
        decode("s", data[: ends[0]] + bytes(ends[1] - ends[0]) + data[ends[1] :])


def test_a_frame_that_is_proved_and_holds_no_records_is_refused() -> None:
    data = segment_header(1) + encode(1, [commit(1)])
    payload = b"\x09" + data[SEGMENT_HEADER + FRAME_HEADER + 1 :]
    from stateflow.storage import commit_log as module

    header = module._FRAME.pack(module.FRAME_MAGIC, 1, len(payload), module.crc32(payload))
    forged = segment_header(1) + header + module._CRC.pack(module.crc32(header)) + payload
    with pytest.raises(CommitLogDamaged, match="unknown kind or wrong length"):
        decode("s", forged)


def test_a_newer_version_is_refused_as_that() -> None:
    from stateflow.storage import commit_log as module

    header = module._SEGMENT.pack(module.SEGMENT_MAGIC, 2, 1)
    with pytest.raises(CommitLogDamaged, match="the log has version 2"):
        decode("s", header + module._CRC.pack(module.crc32(header)))


def test_another_file_with_a_sound_checksum_is_damage() -> None:
    from stateflow.storage import commit_log as module

    header = module._SEGMENT.pack(b"SFxx", module.VERSION, 1)
    with pytest.raises(CommitLogDamaged, match="not a segment of a commit log"):
        decode("s", header + module._CRC.pack(module.crc32(header)))


# -- several segments ---------------------------------------------------------------------------------------


def log(*parts: list[list[Record]]) -> list[tuple[int, bytes]]:
    segments, first = [], 5
    for number, frames in enumerate(parts, 8):
        segments.append((number, segment(frames, first)[0]))
        first += len(frames)
    return segments


def test_segments_are_read_as_one() -> None:
    found = read(log(FRAMES[:1], FRAMES[1:], []))
    assert found.logged.of(P) == [commit(1), commit(2), commit(3)]
    assert found.logged.of(Q) == [commit(1, Q, 10, 3 * SECTOR)]
    assert (found.after, found.segments) == (8, [8, 9, 10])
    assert (read([]).after, read([]).segments) == (1, [])


def test_a_segment_that_is_missing_in_the_middle_is_damage() -> None:
    segments = log(FRAMES[:1], FRAMES[1:2], FRAMES[2:])
    assert read(segments[1:]).logged.of(P) == [commit(2), commit(3)]  # the oldest segments are removed first
    with pytest.raises(CommitLogDamaged, match="the preceding segment is missing"):
        read([segments[0], segments[2]])


def test_a_segment_that_ends_too_early_is_damage_unless_the_next_one_goes_on_there() -> None:
    (one, data), (two, rest) = log(FRAMES[:2], FRAMES[2:])
    with pytest.raises(CommitLogDamaged, match="ends before frame 6, the next one begins with 7"):
        read([(one, data[:-1]), (two, rest)])
    at_the_cut = segment(FRAMES[2:], 6)[0]
    assert read([(one, data[:-1]), (two, at_the_cut)]).logged.of(P) == [commit(1), commit(3)]


def test_a_segment_whose_making_was_cut_off_is_none() -> None:
    (one, data), (two, _) = log(FRAMES, [])
    for rest in (b"", segment_header(8)[:9], bytes(SEGMENT_HEADER)):
        assert read([(one, data), (two, rest)]).after == 8
    with pytest.raises(CommitLogDamaged, match="and others follow"):
        read([(one, b""), (two, segment([], 5)[0])])


def test_a_segment_that_failed_to_be_made_is_none() -> None:
    (one, data), *_ = log(FRAMES)
    assert read([(one, data), (9, segment_header(6))]).after == 8
    with pytest.raises(CommitLogDamaged, match="ends before"):
        read([(one, data), (9, segment_header(9))])


# -- a partition's commits ----------------------------------------------------------------------------------


def test_the_newest_of_one_sequence_counts() -> None:
    again = Commit(P, 1, 2, b"another")
    assert Logged([commit(1), commit(2), again]).of(P) == [commit(1), again]


def test_behind_its_end_only_what_came_later_counts() -> None:
    logged = Logged([commit(1), commit(1, Q), Gone(P), commit(1, epoch=2)])
    assert logged.of(P) == [commit(1, epoch=2)]
    assert logged.of(Q) == [commit(1, Q)]
    assert Logged([commit(1), Gone(P)]).partitions == []


def test_a_database_is_completed_with_what_follows_at_its_epoch() -> None:
    logged = Logged([commit(4), commit(5), commit(6), commit(6, epoch=2)])
    assert logged.lacking(P, 1, 4) == [commit(5), commit(6)]
    assert logged.lacking(P, 1, 3) == [commit(4), commit(5), commit(6)]
    assert logged.lacking(P, 1, 6) == logged.lacking(P, 3, 0) == logged.lacking(Q, 1, 0) == []
    assert logged.lacking(P, 2, 5) == [commit(6, epoch=2)]


@pytest.mark.parametrize(("sequence", "epoch", "expected"), [(2, 1, 3), (4, 2, 5)])
def test_a_gap_is_refused(sequence: int, epoch: int, expected: int) -> None:
    logged = Logged([commit(4), commit(5), commit(6, epoch=2)])
    with pytest.raises(CommitLogDamaged, match=f"commit {expected} is in neither database nor log"):
        logged.lacking(P, epoch, sequence)
    with pytest.raises(CommitLogDamaged, match="commit 2 is in neither"):
        Logged([commit(1), commit(3)]).lacking(P, 1, 0)
