"""Commit log of a replica: one durable write holds the commits of many partitions; their databases are written later.

A commit is durable when :meth:`CommitLog.append` returns. The committer then writes it to its database, without a sync,
and calls :meth:`~CommitLog.written`. Full segments are *retired* in the background: the databases of all partitions in
them are synced, and the segments removed. Everything that a power loss takes from a database is in the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from stateflow.durable import sync
from stateflow.errors import Unavailable
from stateflow.storage.commit_records import (
    FRAME_BYTES_MAX,
    SEGMENT_HEADER,
    Commit,
    Found,
    Gone,
    Logged,
    Record,
    encode,
    read,
    segment_header,
    segment_name,
)
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: number of segments that ``bytes_max`` is divided into
SEGMENTS = 4

# -- Segment files ---------------------------------------------------------------------------------------------------


class SegmentFiles(Protocol):
    """Segment files of one commit log. A change is durable when the call returns, except an append without ``sync``.

    Methods raise OSError; only :meth:`remove` is thread-safe.
    """

    def read(self) -> Sequence[tuple[int, bytes]]:
        """Returns (number, content) of each segment, by number."""
        ...

    def create(self, number: int, data: bytes) -> None:
        """Creates a segment, or starts it anew, and appends to it from now on, unless this raises.

        What was appended to earlier segments is durable by then, even what a former process appended: power loss leaves
        no gap before the new segment.
        """
        ...

    def append(self, data: bytes, *, sync: bool = True) -> None:
        """Appends with one write. ``sync``: the data is durable when this returns."""
        ...

    def truncate(self, size: int) -> None:
        """Cuts the segment that is appended to down to ``size`` bytes."""
        ...

    def remove(self, numbers: Sequence[int]) -> None:
        """Removes segments in the given order, even across power loss."""
        ...

    def close(self) -> None: ...


class DirectorySegments:
    """Segments in a directory of their own, which is made with the first segment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: int | None = None

    def read(self) -> Sequence[tuple[int, bytes]]:
        paths = sorted(self._directory.glob("*" + Path(segment_name(0)).suffix))
        return [(int(path.stem), path.read_bytes()) for path in paths]

    def create(self, number: int, data: bytes) -> None:
        self._directory.mkdir(exist_ok=True)
        if self._file is not None:
            os.fdatasync(self._file)
        else:
            for path in sorted(self._directory.glob("*" + Path(segment_name(0)).suffix)):
                sync(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self._directory / segment_name(number), flags, 0o600)
        try:
            _write(file, data)
            os.fsync(file)
            sync(self._directory)
            sync(self._directory.parent)
        except BaseException:
            os.close(file)
            raise
        self.close()
        self._file = file

    def append(self, data: bytes, *, sync: bool = True) -> None:
        assert self._file is not None
        _write(self._file, data)
        if sync:
            os.fdatasync(self._file)

    def truncate(self, size: int) -> None:
        assert self._file is not None
        os.ftruncate(self._file, size)
        os.fsync(self._file)

    def remove(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            (self._directory / segment_name(number)).unlink(missing_ok=True)
            sync(self._directory)  # one by one: power loss must not bring back an older segment without the next

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


# -- Commit log ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Segment:
    """A segment of the log. ``last``: by partition that it is kept for, the greatest sequence that was logged."""

    number: int
    size: int = SEGMENT_HEADER
    last: dict[PartitionId, int] = field(default_factory=dict)


class CommitLog:
    """The commit log of a replica. Several threads call it.

    It starts empty: callers have applied what :func:`recover` found.

    Args:
        found: what a former process left; its segments are removed.
        bytes_max: size above which an append syncs databases first.
        mutex: makes re-entrant locks.
        sync: makes durable what the database of a partition holds. False: the partition is leaving, and will be
            forgotten once it has left. Raises the disk's errors. Called without a lock.
        aside: runs a function in a thread of its own.
        on_failed: called, without a lock, with each partition whose database cannot be synced, and why. The partition's
            commits stay in the log until it is forgotten.
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
    ) -> None:
        self._files, self._bytes_max = files, bytes_max
        self._sync, self._aside, self._on_failed = sync, aside, on_failed
        self._mutex, self._retiring = mutex(), mutex()
        self._next = found.after
        self._torn = False  # the last append failed: after the end of the segment there may be some of its bytes
        self._closed = False
        self._unwritten: dict[PartitionId, list[Commit]] = {}
        self._segments = [_Segment(found.segments[-1] + 1 if found.segments else 1)]
        files.create(self._segments[0].number, segment_header(self._next))
        files.remove(found.segments)

    @property
    def size(self) -> int:
        """Size of all segments, in bytes."""
        return sum(segment.size for segment in self._segments)

    def append(self, commits: Sequence[Commit]) -> None:
        """Appends commits in one write. They are durable when this returns.

        When it raises the disk's error, the commits may or may not be there at the next start; in either case they may
        be logged again. Raises Unavailable after ``close``.
        """
        if self.size > self._bytes_max:
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
        """Notes that a partition's database has everything up to ``sequence``, though perhaps not durably.

        Only the thread that writes to the database calls this, and no other at that time. It takes no lock, as others
        may hold one while a disk writes.
        """
        rest = [commit for commit in self._unwritten.get(partition, ()) if commit.sequence > sequence]
        if rest:
            self._unwritten[partition] = rest
        else:
            self._unwritten.pop(partition, None)

    def lacking(self, partition: PartitionId, epoch: int, sequence: int) -> list[Commit]:
        """Returns the commits of this process that a database which ends at ``sequence`` lacks.

        Writing them to the database failed after they were logged. Only the thread that opens the database calls this.
        Raises CommitLogDamaged for a gap.
        """
        return Logged(self._unwritten.get(partition, ())).lacking(partition, epoch, sequence)

    def logged(self, partition: PartitionId) -> list[Commit]:
        """Returns the commits of a partition that are still in the log, by epoch and sequence.

        Raises the disk's errors and CommitLogDamaged.
        """
        with self._mutex:
            return read(self._files.read()).logged.of(partition) if self._has(partition) else []

    def forget(self, partitions: Collection[PartitionId], *, sync: bool = True) -> None:
        """Voids all that was logged of partitions that are gone from here, or have a newer epoch, durably.

        Args:
            sync: make it durable before this returns. Otherwise power loss may undo it, but a kill does not.
        """
        with self._mutex:
            # after a failed append its commits may be in the file all the same
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

    def _write(self, records: Sequence[Record], *, sync: bool) -> bool:
        """Writes one frame and returns whether a segment was full. Callers hold the lock."""
        data = encode(self._next, records)
        if len(data) > FRAME_BYTES_MAX:
            raise ValueError(f"commits of {len(data)} bytes exceed the frame limit")
        active = self._segments[-1]
        if self._torn:
            self._files.truncate(active.size)
            self._torn = False
        full = active.size > SEGMENT_HEADER and active.size + len(data) > self._bytes_max // SEGMENTS
        if full:
            self._files.create(active.number + 1, segment_header(self._next))
            active = _Segment(active.number + 1)
            self._segments.append(active)
        self._torn = True
        self._files.append(data, sync=sync)
        self._torn = False
        self._next += 1
        active.size += len(data)
        for each in records:
            if isinstance(each, Commit):
                active.last[each.partition] = max(each.sequence, active.last.get(each.partition, 0))
        return full

    def _retire_aside(self) -> None:
        try:
            self._retire()
        except OSError as error:  # the segments stay, and the next full one makes it try again
            log.error("segments of the commit log cannot be removed: %s", error)

    def _retire(self) -> None:
        """Syncs the databases of full segments and removes these. Raises OSError.

        It takes no lock of a partition: a thread that holds one may wait for this.
        """
        failed: list[tuple[PartitionId, Exception]] = []
        try:
            with self._retiring:
                full = self._synced(failed)
                for segment in full:
                    if segment.last:
                        break
                    self._files.remove([segment.number])
                    with self._mutex:
                        self._segments.remove(segment)
        finally:
            for partition, why in failed:
                self._on_failed(partition, why)

    def _synced(self, failed: list[tuple[PartitionId, Exception]]) -> list[_Segment]:
        """Syncs databases and returns the full segments; their ``last`` has the partitions they are still kept for."""
        with self._mutex:
            full = [] if self._closed else self._segments[:-1]
            last: dict[PartitionId, int] = {}
            for partition, sequence in (each for segment in full for each in segment.last.items()):
                last[partition] = max(sequence, last.get(partition, 0))
        synced: set[PartitionId] = set()
        for partition, sequence in last.items():
            if any(commit.sequence <= sequence for commit in self._unwritten.get(partition, ())):
                continue  # the writer of its database is not done yet, or has failed
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
