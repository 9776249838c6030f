"""Format of a replica's commit log: bytes of records, frames and segments. Pure.

A *segment* is a file: ``magic | version u32 | number of its first frame u64 | crc``, then frames. A *frame* is the data
of one write: ``magic | number u64 | length u32 | crc of the payload u32 | crc of this header``, and a payload of
records: ``kind u8 | partition u32 | epoch u64 | sequence u64 | bytes of the operator's name u16 | bytes of the change
set u32``, the name, the change set. All little endian, crc32.

Frames are numbered without a gap, over all segments. A write that was cut off leaves the beginning of the last frame,
or some of its sectors. Anything else that cannot be read is damage.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from stateflow.errors import CommitLogDamaged
from stateflow.types import PartitionId

VERSION = 1
SEGMENT_MAGIC, FRAME_MAGIC = b"SFcl", b"SFcf"
#: bytes that a disk writes whole, or not at all
SECTOR = 512
FRAME_BYTES_MAX = (1 << 32) - 1
_SEGMENT = struct.Struct("<4sIQ")
_FRAME = struct.Struct("<4sQII")
_RECORD = struct.Struct("<BIQQHI")
_CRC = struct.Struct("<I")
SEGMENT_HEADER, FRAME_HEADER = _SEGMENT.size + _CRC.size, _FRAME.size + _CRC.size
COMMITTED, GONE = 1, 2


class Commit(NamedTuple):
    """Commit of a batch to one partition. ``change_set``: bytes from :meth:`~stateflow.changes.ChangeSet.encode`."""

    partition: PartitionId
    epoch: int
    sequence: int
    change_set: bytes


class Gone(NamedTuple):
    """Voids everything that was logged of a partition before.

    The partition was deleted, or its database or its quarantined copy has it.
    """

    partition: PartitionId


Record = Commit | Gone


def segment_header(first: int) -> bytes:
    """Returns the header of a segment. ``first``: number of its first frame."""
    header = _SEGMENT.pack(SEGMENT_MAGIC, VERSION, first)
    return header + _CRC.pack(crc32(header))


def encode(number: int, records: Iterable[Record]) -> bytes:
    """Encodes records as one frame."""
    parts: list[bytes] = []
    for record in records:
        name = record.partition.operator.encode()
        if isinstance(record, Commit):
            numbers, data, kind = (record.epoch, record.sequence), record.change_set, COMMITTED
        else:
            numbers, data, kind = (0, 0), b"", GONE
        parts += [_RECORD.pack(kind, record.partition.partition, *numbers, len(name), len(data)), name, data]
    payload = b"".join(parts)
    header = _FRAME.pack(FRAME_MAGIC, number, len(payload), crc32(payload))
    return b"".join((header, _CRC.pack(crc32(header)), payload))


@dataclass(slots=True)
class Segment:
    """Content of a segment.

    ``end``: number of bytes that can be read; ``first``, ``after``: numbers of its first frame, and of the one after
    its last; ``torn``: after ``end`` there are remains of a write that was cut off.
    """

    first: int
    after: int
    end: int
    torn: bool
    records: list[Record] = field(default_factory=list)


def decode(name: str, data: bytes) -> Segment | None:
    """Reads a segment. None: its creation was cut off, so that it never held anything. Raises CommitLogDamaged.

    The very last frame is a special case. If all but a bit of it is intact, it is damaged; if one of its sectors is all
    zeros, its write counts as cut off.
    """
    header = data[:SEGMENT_HEADER]
    if not _is_sealed(header, SEGMENT_HEADER):
        if len(data) < SEGMENT_HEADER or not any(data):
            return None
        raise _damaged(name, 0, "corrupt segment header")
    magic, version, first = _SEGMENT.unpack_from(header)
    if magic != SEGMENT_MAGIC or version != VERSION:
        raise CommitLogDamaged(
            f"the log has version {version}, this program reads {VERSION}", remedy="run a newer stateflow", segment=name
        )
    found = Segment(first, first, SEGMENT_HEADER, False)
    while found.end < len(data):
        payload = _frame(data, found.end, found.after)
        if payload is None:
            _check_torn(name, data, found)
            found.torn = True
            break
        found.records += _records(name, payload, found.end)
        found.end += FRAME_HEADER + len(payload)
        found.after += 1
    return found


def _is_sealed(header: bytes, size: int) -> bool:
    return len(header) == size and crc32(header[: -_CRC.size]) == _CRC.unpack_from(header, size - _CRC.size)[0]


def _header(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Returns (number, length, crc) of the frame that begins there; None: no intact header does."""
    header = data[at : at + FRAME_HEADER]
    if not header.startswith(FRAME_MAGIC) or not _is_sealed(header, FRAME_HEADER):
        return None
    _, number, length, crc = _FRAME.unpack_from(header)
    return number, length, crc


def _frame(data: bytes, at: int, number: int) -> bytes | None:
    """Returns the payload of the frame that begins there; None: it is not intact, or has another number."""
    header = _header(data, at)
    if header is None or header[0] != number:
        return None
    payload = data[at + FRAME_HEADER : at + FRAME_HEADER + header[1]]
    return payload if len(payload) == header[1] and crc32(payload) == header[2] else None


def _check_torn(name: str, data: bytes, found: Segment) -> None:
    """Checks that unreadable bytes may be the end of a write that was cut off. Raises CommitLogDamaged."""
    end, header = found.end, _header(data, found.end)
    if header is not None and header[0] != found.after:
        raise _damaged(name, end, f"frame {header[0]} where {found.after} is expected")
    at = data.find(FRAME_MAGIC, end + 1)
    while at >= 0:
        behind = _header(data, at)
        if behind is not None and found.after < behind[0] and _frame(data, at, behind[0]) is not None:
            raise _damaged(name, end, f"frame {found.after} is corrupt, and {behind[0]} follows it")
        at = data.find(FRAME_MAGIC, at + 1)
    if len(data) - end < FRAME_HEADER:
        return
    if header is not None and end + FRAME_HEADER + header[1] > len(data):
        return
    if not _lacks_a_sector(data, end):
        raise _damaged(name, end, f"frame {found.after}, the last one, is corrupt")


def _lacks_a_sector(data: bytes, start: int) -> bool:
    """Returns whether some sector from ``start`` on was never written, that is, is all zeros."""
    while start < len(data):
        end = (start // SECTOR + 1) * SECTOR
        if not any(data[start:end]):
            return True
        start = end
    return False


def _records(name: str, payload: bytes, offset: int) -> list[Record]:
    """Decodes a payload whose checksum is right. Raises CommitLogDamaged for content that no replica writes."""
    records: list[Record] = []
    at = 0
    try:
        while at < len(payload):
            kind, number, epoch, sequence, named, size = _RECORD.unpack_from(payload, at)
            at += _RECORD.size
            if at + named + size > len(payload) or kind not in (COMMITTED, GONE):
                raise ValueError("unknown kind or wrong length")
            partition = PartitionId(payload[at : at + named].decode(), number)
            at += named
            records.append(
                Commit(partition, epoch, sequence, payload[at : at + size]) if kind == COMMITTED else Gone(partition)
            )
            at += size
    except (struct.error, ValueError) as error:
        raise _damaged(name, offset, f"invalid record in a frame: {error}") from error
    return records


class Logged:
    """Commits in a log, by partition: for each epoch and sequence the newest, since the partition's last ``Gone``."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._commits: dict[PartitionId, dict[tuple[int, int], Commit]] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        if isinstance(record, Gone):
            self._commits.pop(record.partition, None)
        else:
            self._commits.setdefault(record.partition, {})[record.epoch, record.sequence] = record

    @property
    def partitions(self) -> list[PartitionId]:
        return list(self._commits)

    def of(self, partition: PartitionId) -> list[Commit]:
        """Returns all commits of a partition, by epoch and sequence."""
        commits = self._commits.get(partition, {})
        return [commits[each] for each in sorted(commits)]

    def lacking(self, partition: PartitionId, epoch: int, sequence: int) -> list[Commit]:
        """Returns the commits that are missing in a database owned at ``epoch`` that ends at ``sequence``, in order.

        Raises CommitLogDamaged when the first of them, or one in between, is not in the log.
        """
        lacking = [each for each in self.of(partition) if each.epoch == epoch and each.sequence > sequence]
        for expected, commit in enumerate(lacking, sequence + 1):
            if commit.sequence != expected:
                raise CommitLogDamaged(
                    f"commit {expected} is in neither database nor log, but {commit.sequence} is in the log",
                    remedy="the copy is quarantined; the partition fails over to a standby or the newest checkpoint",
                    partition=partition,
                    epoch=epoch,
                )
        return lacking


@dataclass(slots=True)
class Found:
    """A log as a former process left it. ``after``: number of the next frame; ``segments``: their numbers, in order."""

    logged: Logged
    after: int
    segments: list[int]


def read(segments: Sequence[tuple[int, bytes]]) -> Found:
    """Reads a log from its segments. Raises CommitLogDamaged.

    It is damaged when something between its first frame and its last is missing, or is not what was written.

    Args:
        segments: (number, bytes), by number.
    """
    logged, after = Logged(), 1
    torn_in = ""
    for position, (number, data) in enumerate(segments):
        name = segment_name(number)
        segment = decode(name, data)
        if position and number != segments[position - 1][0] + 1:
            raise _damaged(name, 0, "the preceding segment is missing")
        if segment is None:
            if position + 1 < len(segments):
                raise _damaged(name, 0, "the segment is empty, and others follow")
            break
        if segment.first == segment.after < after and position + 1 == len(segments):
            break  # its creation failed, and the log continued in the segment before
        if position and segment.first != after:
            raise _damaged(
                torn_in or name, 0, f"the segment ends before frame {after}, the next one begins with {segment.first}"
            )
        for record in segment.records:
            logged.add(record)
        after, torn_in = segment.after, name
    return Found(logged, after, [number for number, _ in segments])


def segment_name(number: int) -> str:
    return f"{number:012d}.commits"


def _damaged(name: str, offset: int, why: str) -> CommitLogDamaged:
    return CommitLogDamaged(
        f"the commit log is damaged: {why}",
        remedy="restore the file and start the replica again; or move the directory `commits` away first, then "
        "partitions may lack commits acknowledged before a power loss",
        segment=name,
        offset=offset,
    )
