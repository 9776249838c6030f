"""The log of a replica's commits: one durable write for those of many partitions; databases are written behind it.

A commit is durable when :meth:`CommitLog.append` returns. Then it is written to its database, without a sync, and
:meth:`~CommitLog.written` says so. Segments that are full are *retired* beside the stream: the databases of all
partitions in them are synced, and the segments removed. What a loss of power takes of a database is in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

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
)
from stateflow.storage.segments import SegmentFiles
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: segments that the limit is made of
SEGMENTS = 4


@dataclass(slots=True)
class _Segment:
    """``last``: of each partition that it is kept for the greatest sequence that was logged."""

    number: int
    size: int = SEGMENT_HEADER
    last: dict[PartitionId, int] = field(default_factory=dict)


class CommitLog:
    """Called from several threads. Nothing is in it at first: who opens it has seen to what :func:`recover` found.

    Args:
        found: what was there; its segments are removed.
        bytes_max: with so much in it an append syncs databases first.
        mutex: makes re-entrant locks.
        sync: what the database of a partition holds is durable behind it; False: it is on its way out, and is forgotten
            when that is done. Raises what the disk says. Called without a lock.
        aside: runs something in a thread of its own.
        on_failed: called, without a lock, with each partition whose database cannot be synced, and why. Its commits
            stay here until it is forgotten.
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
        self._torn = False  # the last append failed: behind the end of the segment there may be some of it
        self._closed = False
        self._unwritten: dict[PartitionId, list[Commit]] = {}
        self._segments = [_Segment(found.segments[-1] + 1 if found.segments else 1)]
        files.create(self._segments[0].number, segment_header(self._next))
        files.remove(found.segments)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(segment.size for segment in self._segments)

    def append(self, commits: Sequence[Commit]) -> None:
        """One write. They are durable when this returns. When it raises, which is what the disk says, they may be there
        at the next start, or not; in either case they may be logged again. Raises Unavailable behind the end."""
        if self.size > self._bytes_max:
            self._retire()
        with self._mutex:
            if self._closed:
                raise Unavailable("the replica stops", remedy="send the batch again; it was not applied")
            full = self._write(commits, sync=True)
            for commit in commits:
                self._unwritten.setdefault(commit.partition, []).append(commit)
        if full:
            self._aside(self._retire_aside)

    def written(self, partition: PartitionId, sequence: int) -> None:
        """Its database has everything up to there, though perhaps not durably. By whoever writes to it, and nobody else
        at the time: no lock is taken, which others may hold while a disk writes."""
        rest = [commit for commit in self._unwritten.get(partition, ()) if commit.sequence > sequence]
        if rest:
            self._unwritten[partition] = rest
        else:
            self._unwritten.pop(partition, None)

    def lacking(self, partition: PartitionId, epoch: int, sequence: int) -> list[Commit]:
        """What was logged by this process, and a database that ends at ``sequence`` does not have: what failed behind
        the log. By whoever opens it."""
        return Logged(self._unwritten.get(partition, ())).lacking(partition, epoch, sequence)

    def logged(self, partition: PartitionId) -> list[Commit]:
        """All of it that is still here, as :meth:`~stateflow.storage.commit_records.Logged.of` has it. Raises what the
        disk says, and CommitLogDamaged."""
        with self._mutex:
            return read(self._files.read()).logged.of(partition) if self._has(partition) else []

    def forget(self, partitions: Collection[PartitionId], *, sync: bool = True) -> None:
        """These are not here any more, or have a newer epoch, durably: whatever was logged of them counts no more.

        Args: sync: before this returns. Else a kill does not undo it, a loss of power may.
        """
        with self._mutex:
            # an append that failed may be there all the same
            gone = [Gone(each) for each in partitions if self._torn or self._has(each)]
            if not gone or self._closed:
                return
            self._write(gone, sync=sync)
            for each in partitions:
                self._unwritten.pop(each, None)
                for segment in self._segments:
                    segment.last.pop(each, None)

    def close(self) -> None:
        """What is in it stays, for the next start."""
        with self._retiring, self._mutex:
            self._closed = True
            self._files.close()

    def _has(self, partition: PartitionId) -> bool:
        return any(partition in segment.last for segment in self._segments)

    def _write(self, records: Sequence[Record], *, sync: bool) -> bool:
        """Called with the lock held. Returns whether a segment was full."""
        data = encode(self._next, records)
        if len(data) > FRAME_BYTES_MAX:
            raise ValueError(f"commits of {len(data)} bytes together")
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
        except OSError as error:  # the segments stay, and it is tried again with the next one that is full
            log.error("segments of the commit log cannot be removed: %s", error)

    def _retire(self) -> None:
        """Sync what full segments have logged, and remove them. Takes no lock of a partition: whoever holds one may
        wait for this. Raises OSError."""
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
        """Segments that are full, with what they are still kept for."""
        with self._mutex:
            full = [] if self._closed else self._segments[:-1]
            last: dict[PartitionId, int] = {}
            for partition, sequence in (each for segment in full for each in segment.last.items()):
                last[partition] = max(sequence, last.get(partition, 0))
        synced: set[PartitionId] = set()
        for partition, sequence in last.items():
            if any(commit.sequence <= sequence for commit in self._unwritten.get(partition, ())):
                continue  # whoever writes it is not done yet, or has failed
            try:
                if self._sync(partition):
                    synced.add(partition)
            except Exception as error:  # noqa: BLE001 - one that cannot be synced holds up no other
                log.error(
                    "%s cannot be synced, and what was logged of it stays in the commit log: %s", partition, error
                )
                failed.append((partition, error))
        with self._mutex:
            for segment in full:
                for partition in synced & segment.last.keys():
                    del segment.last[partition]
        return full


def recover(files: SegmentFiles) -> Found:
    """What was left. Raises CommitLogDamaged."""
    return read(files.read())
