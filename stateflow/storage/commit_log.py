"""Commit log of a replica: one durable write holds the commits of many partitions; their databases are written later.

A commit is durable when :meth:`CommitLog.append` returns. The committer then writes it to its database, without a sync,
and calls :meth:`~CommitLog.written`. Full segments are *retired* in the background: the log syncs the databases of all
partitions that have commits in them, and then removes the segments. Every commit that a power loss removes from a
database is in the log.

The format of the log is encoded and decoded without I/O. A *segment* is a file: ``magic | version u32 | number of its
first frame u64 | crc``, then frames. A *frame* is the data of one write: ``magic | number u64 | length u32 | crc of the
payload u32 | crc of this header``, and a payload of records: ``kind u8 | partition u32 | epoch u64 | sequence u64 |
bytes of the operator's name u16 | bytes of the change set u32``, the name, the change set. All numbers are little
endian; each crc is a CRC-32.

Frames are numbered without a gap, over all segments. A write that was cut off leaves the beginning of the last frame,
or some of its sectors. Anything else that cannot be read is damage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from stateflow.durable import listed, sync
from stateflow.errors import CommitLogDamaged, Unavailable
from stateflow.metrics.limits import LIMIT_HITS
from stateflow.storage.faults import too_large
from stateflow.types import PartitionId

VERSION = 1
SEGMENT_MAGIC, FRAME_MAGIC = b"SFcl", b"SFcf"
#: number of bytes that a disk writes together, or not at all
SECTOR = 512
#: size from which a frame cannot hold a payload, in bytes
FRAME_BYTES_MAX = 1 << 32
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
    """Record that voids all earlier commits of a partition in the log. It is written when the partition was deleted,
    left the replica or got a newer epoch, and when a quarantined copy keeps the commits."""

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

    Attributes:
        first: number of its first frame.
        after: number of the frame after its last one.
        end: number of bytes that can be read.
        torn: whether the remains of a write that was cut off follow ``end``.
    """

    first: int
    after: int
    end: int
    torn: bool
    records: list[Record] = field(default_factory=list)


def decode(name: str, data: bytes) -> Segment | None:
    """Decodes a segment. Returns None if its creation was cut off, so that it never contained a frame. Raises
    CommitLogDamaged.

    The write of an unreadable last frame counts as cut off if the end of the frame is missing or one of its sectors is
    all zeros. Otherwise the frame is damaged, even if only one bit of it is wrong.
    """
    header = data[:SEGMENT_HEADER]
    if not _is_sealed(header, SEGMENT_HEADER):
        if len(data) < SEGMENT_HEADER or not any(data):
            return None
        raise _damaged(name, 0, "corrupt segment header")
    magic, version, first = _SEGMENT.unpack_from(header)
    if magic != SEGMENT_MAGIC:
        raise _damaged(name, 0, "not a segment of a commit log")
    if version != VERSION:
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
    """Returns (number, length, crc) of the frame that begins at ``at``; None: there is no intact header."""
    header = data[at : at + FRAME_HEADER]
    if not header.startswith(FRAME_MAGIC) or not _is_sealed(header, FRAME_HEADER):
        return None
    _, number, length, crc = _FRAME.unpack_from(header)
    return number, length, crc


def _frame(data: bytes, at: int, number: int) -> bytes | None:
    """Returns the payload of the frame that begins at ``at``; None: it is not intact, or has another number."""
    header = _header(data, at)
    if header is None or header[0] != number:
        return None
    payload = data[at + FRAME_HEADER : at + FRAME_HEADER + header[1]]
    return payload if len(payload) == header[1] and crc32(payload) == header[2] else None


def _check_torn(name: str, data: bytes, found: Segment) -> None:
    """Checks that the unreadable bytes at the end of a segment can be the remains of a write that was cut off. Raises
    CommitLogDamaged if they cannot."""
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
    """Decodes a payload that has the right checksum. Raises CommitLogDamaged for content that no replica writes."""
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
    """Commits in a log, by partition: the newest for each epoch and sequence, since the partition's last ``Gone``."""

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
        """Returns all commits of a partition, in the order of epoch and sequence."""
        commits = self._commits.get(partition, {})
        return [commits[each] for each in sorted(commits)]

    def lacking(self, partition: PartitionId, epoch: int, sequence: int) -> list[Commit]:
        """Returns the commits that a database lacks, in order. The database ends at commit ``sequence``, and is owned
        at ``epoch``.

        Raises CommitLogDamaged if the log lacks one of them, but has a later one.
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
    """A log as a former process left it. ``after``: number of the next frame. ``segments``: numbers of the segments, in
    order."""

    logged: Logged
    after: int
    segments: list[int]


def read(segments: Sequence[tuple[int, bytes]]) -> Found:
    """Reads a log from its segments. Raises CommitLogDamaged.

    The log is damaged if anything between its first and its last frame is missing, or differs from what was written.

    Args:
        segments: (number, content) of each segment, in the order of their numbers.
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
            break  # its creation was cut off
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
        remedy="restore the file and restart the replica; or move the directory `commits` away and restart it, but "
        "then partitions may lack commits acknowledged before a power loss",
        segment=name,
        offset=offset,
    )


log = logging.getLogger(__name__)
#: number of segments that ``bytes_max`` is divided into
SEGMENTS = 4

# -- Segment files ---------------------------------------------------------------------------------------------------


class SegmentFiles(Protocol):
    """Segment files of one commit log. A change is durable when the call returns, except an append without ``sync``.

    Methods raise OSError; only :meth:`remove` is thread-safe.
    """

    def read(self) -> Sequence[tuple[int, bytes]]:
        """Returns (number, content) of each segment, in the order of their numbers."""
        ...

    def create(self, number: int, data: bytes) -> None:
        """Creates a segment, or empties an existing one. Later appends go to this segment, unless the call raises an
        error.

        All data appended to earlier segments is made durable first: a power loss leaves no gap before the new segment.
        """
        ...

    def append(self, data: bytes, *, sync: bool = True) -> None:
        """Appends data to the current segment, in one write. ``sync``: the data is durable when this returns, and so is
        everything appended to the segment before; with no data, nothing is written."""
        ...

    def truncate(self, size: int) -> None:
        """Truncates the current segment to ``size`` bytes."""
        ...

    def rewrite(self, offset: int, data: bytes) -> None:
        """Writes data again that the current segment has at ``offset``: after an error, the system may keep data in
        memory that it will never write to the disk."""
        ...

    def remove(self, numbers: Sequence[int]) -> None:
        """Removes segments in the given order, each durably before the next."""
        ...

    def close(self) -> None: ...


class DirectorySegments:
    """Segments in a directory of their own, which is created with the first segment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: int | None = None
        self._path = directory

    def read(self) -> Sequence[tuple[int, bytes]]:
        paths = listed(self._directory, "*" + Path(segment_name(0)).suffix)
        return [(int(path.stem), path.read_bytes()) for path in paths]

    def create(self, number: int, data: bytes) -> None:
        self._directory.mkdir(exist_ok=True)
        if self._file is not None:
            os.fdatasync(self._file)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        path = self._directory / segment_name(number)
        file = os.open(path, flags, 0o600)
        try:
            _write(file, data)
            os.fsync(file)
            sync(self._directory)
            sync(self._directory.parent)
        except BaseException:
            os.close(file)
            raise
        former, self._file, self._path = self._file, file, path
        if former is not None:
            with contextlib.suppress(OSError):  # all of it is durable
                os.close(former)

    def append(self, data: bytes, *, sync: bool = True) -> None:
        assert self._file is not None
        _write(self._file, data)
        if sync:
            os.fdatasync(self._file)

    def truncate(self, size: int) -> None:
        assert self._file is not None
        os.ftruncate(self._file, size)
        os.fsync(self._file)

    def rewrite(self, offset: int, data: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)  # not the open file, which only appends
        try:
            os.lseek(file, offset, os.SEEK_SET)
            _write(file, data)
            os.fdatasync(file)
        finally:
            os.close(file)

    def remove(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            (self._directory / segment_name(number)).unlink(missing_ok=True)
            sync(self._directory)  # one by one: power loss must not bring back an older segment without the next

    def close(self) -> None:
        file, self._file = self._file, None  # if this fails, the number may be another file's by the next try
        if file is not None:
            os.close(file)


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


# -- Commit log ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Segment:
    """A segment of the log.

    Attributes:
        durable: size up to which it is durable.
        unsynced: its content after ``durable``.
        last: for each partition that still needs the segment, the greatest sequence of its commits there.
    """

    number: int
    size: int = SEGMENT_HEADER
    durable: int = SEGMENT_HEADER
    unsynced: bytes = b""
    last: dict[PartitionId, int] = field(default_factory=dict)


class CommitLog:
    """The commit log of a replica. Several threads call it.

    The log starts empty, because callers have applied the commits that :func:`recover` found.

    Args:
        found: the log of a former process; its segments are removed.
        bytes_max: size of the log, in bytes, above which an append retires full segments first.
        mutex: creates re-entrant locks.
        sync: makes the database of a partition durable. It is called without a lock. Returns False if that is not
            possible now: the database must be rewritten first, or the partition is moving away, or its database is
            being replaced; in the latter cases, :meth:`forget` is called for the partition after that. Raises the
            disk's errors.
        aside: runs a function in a thread of its own.
        on_failed: called, without a lock, with each partition whose database cannot be synced, and the error. The
            partition's commits stay in the log until it is forgotten.
        on_behind: called, without a lock and once for each full segment, with each partition whose database lacks
            commits of full segments, because their write is under way or has failed. After a failure the database must
            be opened, which completes it.
    """

    def __init__(
        self,
        files: SegmentFiles,
        found: Found,
        bytes_max: int,
        *,
        mutex: Callable[[], AbstractContextManager[Any]],
        sync: Callable[[PartitionId], bool],
        aside: Callable[[Callable[[], None]], None],
        on_failed: Callable[[PartitionId, Exception], None],
        on_behind: Callable[[PartitionId], None] = lambda _: None,
    ) -> None:
        self._files, self._bytes_max = files, bytes_max
        self._sync, self._aside, self._on_failed, self._on_behind = sync, aside, on_failed, on_behind
        self._mutex, self._retiring = mutex(), mutex()
        self._next = found.after
        self._torn = False  # the last append failed: after the end of the segment there may be some of its bytes
        self._unsure = False  # a write or sync failed: a later sync says nothing about what was not durable by then
        self._closed = False
        self._unwritten: dict[PartitionId, list[Commit]] = {}
        # first: the former process may have left writes that no sync makes durable any more, and behind them a new
        # segment would count as damage after a power loss
        files.remove(found.segments)
        first = _Segment(found.segments[-1] + 1 if found.segments else 1)
        self._segments = [first]
        files.create(first.number, segment_header(self._next))

    @property
    def size(self) -> int:
        """Size of all segments, in bytes."""
        return sum(segment.size for segment in self._segments)

    def append(self, commits: Sequence[Commit]) -> None:
        """Appends commits in one write. They are durable when this returns.

        After an error of the disk, the commits may or may not be in the log at the next start; in either case they may
        be logged again. Raises Unavailable after ``close``.
        """
        if self.size > self._bytes_max:
            LIMIT_HITS.note("commit_log_bytes")
            self._retire()
        with self._mutex:
            if self._closed:
                raise Unavailable("the replica is stopping", remedy="send the batch again; it was not applied")
            full = self._write(commits, sync=True)
            for commit in commits:
                self._unwritten.setdefault(commit.partition, []).append(commit)
        if full:
            self._aside(self._retire_aside)

    def written(self, partition: PartitionId, sequence: int) -> None:
        """Notes that a partition's database contains everything up to ``sequence``, though perhaps not durably.

        Only the thread that writes to the database calls this. The method takes no lock, because other threads may hold
        the lock while a disk writes.
        """
        rest = [commit for commit in self._unwritten.get(partition, ()) if commit.sequence > sequence]
        if rest:
            self._unwritten[partition] = rest
        else:
            self._unwritten.pop(partition, None)

    def lacking(self, partition: PartitionId, epoch: int, sequence: int) -> list[Commit]:
        """Returns the commits that this process logged and that the database lacks, whose last commit is ``sequence``.
        They could not be written to the database, or its disk dropped them after an error.

        Only the thread that opens the database calls this. Raises CommitLogDamaged for a gap, and the disk's errors.
        """
        newest = max((segment.last.get(partition, 0) for segment in list(self._segments)), default=0)
        if sequence >= newest:
            return []
        unwritten = Logged(self._unwritten.get(partition, ())).of(partition)
        lacking = [each for each in unwritten if each.epoch == epoch and each.sequence > sequence]
        if [each.sequence for each in lacking] == list(range(sequence + 1, newest + 1)):
            return lacking
        with self._retiring, self._mutex:
            self._mend()  # the next write removes the commits of a failed append, so no database may get them
            return Logged(self.logged(partition)).lacking(partition, epoch, sequence)

    def logged(self, partition: PartitionId) -> list[Commit]:
        """Returns the commits of a partition that are still in the log, in the order of epoch and sequence.

        Raises the disk's errors and CommitLogDamaged.
        """
        with self._retiring, self._mutex:  # no segment may be removed between its listing and its reading
            return read(self._files.read()).logged.of(partition) if self._has(partition) else []

    def forget(self, partitions: Collection[PartitionId], *, sync: bool = True) -> None:
        """Durably voids all logged commits of partitions that are no longer here, or have a newer epoch.

        Args:
            sync: make the change durable before this returns; otherwise a power loss may undo it, but a kill does not.
        """
        with self._mutex:
            # the commits of a failed append may be in the file
            gone = [Gone(each) for each in partitions if self._torn or self._has(each)]
            if not gone or self._closed:
                return
            self._write(gone, sync=sync)
            for each in partitions:
                self._unwritten.pop(each, None)
                for segment in self._segments:
                    segment.last.pop(each, None)

    def close(self) -> None:
        """Closes the files. The log stays for the next start."""
        with self._retiring, self._mutex:
            self._closed = True
            self._files.close()

    def _has(self, partition: PartitionId) -> bool:
        return any(partition in segment.last for segment in self._segments)

    def _mend(self) -> None:
        """Removes what a failed append left behind the end of the log, and writes again what a failed sync may have
        lost. Callers hold the lock."""
        if self._closed:
            return
        active = self._segments[-1]
        if self._torn:
            self._files.truncate(active.size)
            self._torn = False
        if self._unsure:
            if active.unsynced:
                self._files.rewrite(active.durable, active.unsynced)
            active.durable, active.unsynced = active.size, b""
            self._unsure = False

    def _write(self, records: Sequence[Record], *, sync: bool) -> bool:
        """Writes one frame. Returns whether it begins a new segment, because the one before was full. Callers hold the
        lock."""
        try:
            data = encode(self._next, records)
        except struct.error as error:
            raise too_large(
                {each.partition: len(each.change_set) for each in records if isinstance(each, Commit)}
            ) from error
        self._mend()
        self._unsure = True
        active = self._segments[-1]
        full = active.size > SEGMENT_HEADER and active.size + len(data) > self._bytes_max // SEGMENTS
        if full:
            self._files.create(active.number + 1, segment_header(self._next))
            active = _Segment(active.number + 1)
            self._segments.append(active)
        elif active.durable < active.size and active.durable // SECTOR != active.size // SECTOR:
            # otherwise a power loss could take an earlier frame and leave this one, which counts as damage
            self._files.append(b"", sync=True)
            active.durable, active.unsynced = active.size, b""
        self._torn = True
        try:
            self._files.append(data, sync=sync)
        except OSError:
            with contextlib.suppress(OSError):  # at once, so that a full disk has room for others; else later
                self._files.truncate(active.size)
                self._torn = False
            raise
        self._torn = self._unsure = False
        self._next += 1
        active.size += len(data)
        if sync:
            active.durable, active.unsynced = active.size, b""
        else:
            active.unsynced += data
        for each in records:
            if isinstance(each, Commit):
                active.last[each.partition] = max(each.sequence, active.last.get(each.partition, 0))
        return full

    def _retire_aside(self) -> None:
        try:
            behind = self._retire()
        except OSError as error:  # the segments stay, and the next full segment leads to another attempt
            log.error("segments of the commit log cannot be removed: %s", error)
            return
        for partition in behind:
            self._on_behind(partition)

    def _retire(self) -> list[PartitionId]:
        """Syncs the databases with commits in full segments, and removes these segments. Returns the partitions whose
        database lacks commits of these segments. Raises OSError.

        The method takes no partition's lock, because a thread that holds such a lock may be waiting for this method.
        """
        failed: list[tuple[PartitionId, Exception]] = []
        behind: list[PartitionId] = []
        try:
            with self._retiring:
                full = self._synced(failed, behind)
                for segment in full:
                    if segment.last:
                        break
                    self._files.remove([segment.number])
                    with self._mutex:
                        self._segments.remove(segment)
        finally:
            for partition, why in failed:
                self._on_failed(partition, why)
        return behind

    def _synced(self, failed: list[tuple[PartitionId, Exception]], behind: list[PartitionId]) -> list[_Segment]:
        """Syncs the databases of the partitions that have commits in full segments, and returns these segments.

        Afterwards ``last`` of each segment contains only the partitions that still need the segment, because their
        databases are not synced.
        """
        with self._mutex:
            full = [] if self._closed else self._segments[:-1]
            last: dict[PartitionId, int] = {}
            for partition, sequence in (each for segment in full for each in segment.last.items()):
                last[partition] = max(sequence, last.get(partition, 0))
        synced: set[PartitionId] = set()
        for partition, sequence in last.items():
            if any(commit.sequence <= sequence for commit in self._unwritten.get(partition, ())):
                behind.append(partition)
                continue
            try:
                if self._sync(partition):
                    synced.add(partition)
            except Exception as error:  # noqa: BLE001 - a partition that cannot be synced holds up no other
                log.error("%s cannot be synced, its commits stay in the commit log: %s", partition, error)
                failed.append((partition, error))
        with self._mutex:
            for segment in full:
                for partition in synced & segment.last.keys():
                    del segment.last[partition]
        return full


def recover(files: SegmentFiles) -> Found:
    """Reads the log that a former process left. Raises CommitLogDamaged."""
    return read(files.read())
