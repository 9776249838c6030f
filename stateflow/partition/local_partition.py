"""One partition on a replica, with its served copy, its incoming copy and its followers.

Locks: :class:`LocalPartition` has two. A thread holds ``work`` while it writes or copies the store (a batch, a
snapshot), and ``mutex`` for the instant of a lifecycle transition, so that a fence takes effect at once and never waits
for a running batch. Order: ``work`` before ``mutex``. The invariants of a partition hold whenever its ``mutex`` is
free, see :meth:`LocalPartition.validate`.

Fences: the best moment for a fence is between two batches, while the disk is quiet. A micro-batch source sends at
nearly equal intervals and is silent in between, so a partition fenced right after a commit pauses while no batch needs
it. A source that sends all the time has no such moment, and the fence does not wait. A disk that is writing back other
processes' data may take a second for a write that otherwise takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateflow.checkpoint import Adoption, Manifest
from stateflow.errors import (
    REPORT_LINE,
    BudgetUnreachable,
    InvariantBroken,
    Moved,
    NotOwner,
    StandbyMissing,
    StateDamaged,
    Unavailable,
)
from stateflow.operator.watchdog import RunningBatch
from stateflow.partition.change_feed import NO_CHANGES, ChangeLog, Kept, Seal
from stateflow.partition.environment import WorkLock
from stateflow.partition.lifecycle import SERVED, Event, Lifecycle, State
from stateflow.partition.processor import PartitionProcessor, StoredStates
from stateflow.partition.slices import Traffic
from stateflow.partition.sources import SkippedPositions
from stateflow.storage import PartitionStore
from stateflow.transitions import check
from stateflow.types import PartitionId, ReplicaInfo

# -- The moment for a fence. Sans-io ---------------------------------------------------------------------------------

#: weight of the newest interval in the averages
NEWEST = 0.3
#: a fence waits for its moment no longer than this many intervals …
INTERVALS_MAX = 1.5
#: … and no longer than this, in seconds
WAIT_S_MAX = 2.0
#: the next batch is predicted after this many batches, if their intervals deviate on average by at most this share
BATCHES_MIN = 4
JITTER_MAX = 0.5
#: a disk is quiet when a durable write takes no longer than this, or than the predicted pause
QUIET_SYNC_MS = 10.0
#: interval at which a waiting fence looks for the next commit, in seconds
LOOK_S = 0.002


def disk_is_quiet(sync_ms: float, pause_ms: float) -> bool:
    """Tells whether the disk is quiet enough for a fence with a predicted pause of ``pause_ms``, which includes a
    durable write of the seal. ``sync_ms``: duration of the last durable write."""
    return sync_ms <= max(pause_ms, QUIET_SYNC_MS)


@dataclass(frozen=True, slots=True)
class QuietDisk:
    """Waits for a quiet disk before fencing."""

    partition: PartitionId
    since: float  # monotonic seconds
    pause_ms: float  # predicted
    max_pause_ms: float = 0.0  # allowed; 0: any

    def has_come(self, sync_ms: float, now: float) -> bool:
        """Tells whether the wait is over at ``now``, because the disk is quiet or ``WAIT_S_MAX`` has passed.
        ``sync_ms``: duration of the last durable write. Raises BudgetUnreachable if ``WAIT_S_MAX`` has passed and a
        write alone takes longer than ``max_pause_ms``."""
        if disk_is_quiet(sync_ms, self.pause_ms):
            return True
        if now <= self.since + WAIT_S_MAX:
            return False
        if 0 < self.max_pause_ms < sync_ms:
            raise BudgetUnreachable(
                f"a durable write takes {sync_ms:.0f} ms at the source, the pause limit is {self.max_pause_ms:g} ms",
                remedy="raise max_pause_ms, or move the partition when the source's disk is less busy",
                partition=self.partition,
            )
        return True


@dataclass(frozen=True, slots=True)
class QuietMoment:
    """Waits for the commit after ``sequence`` before fencing, at most until ``until``, in monotonic seconds."""

    sequence: int
    until: float

    def wait_s(self, now: float, sequence: int) -> float:
        """Returns the seconds to wait before asking again, when the last commit is ``sequence``; 0: fence now."""
        if sequence != self.sequence:
            return 0.0
        return max(0.0, min(self.until - now, LOOK_S))


@dataclass(slots=True)
class BatchTiming:
    """Intervals and durations of a partition's batches, in seconds on one monotonic clock."""

    interval_s: float = 0.0  # between the begins of two batches, averaged
    jitter_s: float = 0.0  # mean deviation from it
    busy_s: float = 0.0  # from begin to commit, averaged
    batches: int = 0
    began_at: float = 0.0

    def began(self, now: float) -> None:
        if self.batches:
            interval = now - self.began_at
            weight = NEWEST if self.batches > 1 else 1.0
            self.jitter_s += weight * (abs(interval - self.interval_s) - self.jitter_s) if self.batches > 1 else 0.0
            self.interval_s += weight * (interval - self.interval_s)
        self.batches += 1
        self.began_at = now

    def ended(self, now: float) -> None:
        weight = NEWEST if self.batches > 1 else 1.0
        self.busy_s += weight * ((now - self.began_at) - self.busy_s)

    @property
    def rate(self) -> float:
        """Average number of batches per second; 0: unknown."""
        return 1.0 / self.interval_s if self.interval_s > 0 else 0.0

    def wait_s(self, now: float, pause_s: float) -> float:
        """Returns the seconds that a fence with a pause of ``pause_s`` should wait for the next commit; 0: fence now.

        Waiting pays only when batches arrive regularly, the gap between them is longer than the pause, and the next
        batch would otherwise arrive during the pause.
        """
        if self.batches < BATCHES_MIN or self.jitter_s > JITTER_MAX * self.interval_s:
            return 0.0
        if self.interval_s - self.busy_s < pause_s:
            return 0.0
        next_begin = self.began_at + self.interval_s
        if now + pause_s + self.jitter_s <= next_begin or now > next_begin + self.interval_s:
            return 0.0  # the pause ends before the next batch, or the source has stopped
        return min(WAIT_S_MAX, INTERVALS_MAX * self.interval_s)


# -- Answers to the sender of a batch, apart from the result of applying it. Sans-io ---------------------------------


def acknowledgement(sequence: int, confirmed: bool, lifecycle: Lifecycle) -> int | ReplicaInfo | NotOwner | None:
    """Returns the answer for a commit that a standby must confirm: the commit's ``sequence`` once it is confirmed, the
    new owner if the partition has moved, or NotOwner if it has left this replica otherwise. None: not known yet, ask
    again after the next change.

    A sender that sends the batch again, to whichever replica, finds it applied.

    Args:
        confirmed: tells whether a standby durably has everything up to ``sequence``.
        lifecycle: current lifecycle of the partition.
    """
    if confirmed:
        return sequence
    if lifecycle.state is State.SEALED and lifecycle.successor is not None:
        return lifecycle.successor  # the sender asks there again: the successor has the batch, and its own standbys
    if lifecycle.state not in SERVED:
        return left(lifecycle.partition)
    return None


def left(partition: PartitionId) -> NotOwner:
    return NotOwner("the partition has left this replica", remedy="refresh the assignment", partition=partition)


def unconfirmed(partition: PartitionId, sequence: int, waited_s: float) -> StandbyMissing:
    return StandbyMissing(
        f"no standby confirmed the batch within {waited_s:g} s",
        remedy="check that the operator's standbys run; the request is retried",
        partition=partition,
        sequence=sequence,
    )


def moved(owner: ReplicaInfo, epoch: int) -> Moved:
    return Moved(
        "the partition moved to another replica",
        remedy="resend to its owner",
        owner=owner.name,
        site=owner.site,
        address=owner.address,
        epoch=epoch,
    )


def late(partition: PartitionId) -> NotOwner:
    """Returns the answer for rows that arrived before their partition, if the partition did not arrive in time."""
    return NotOwner("the partition did not arrive in time", remedy="refresh the assignment", partition=partition)


def held_up(partition: PartitionId) -> Unavailable:
    return Unavailable(
        "the batch did not finish on this replica",
        remedy="check the replica's log and disk; a retry shows whether the batch was applied",
        partition=partition,
    )


# -- The partition itself --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LocalPartition:
    """A partition on this replica. ``directory``: directory of ``store``; ``incoming``: a copy that is being built."""

    id: PartitionId
    lifecycle: Lifecycle
    home: Path
    work: WorkLock
    mutex: AbstractContextManager[Any]
    directory: Path | None = None
    store: PartitionStore | None = None
    processor: PartitionProcessor | None = None
    incoming: Incoming | None = None
    logs: dict[str, ChangeLog] = field(default_factory=dict)  # by move
    snapshots: int = 0
    restoring: Restoring | None = None
    fetching: str = ""  # restore whose checkpoint is being fetched, unless it was given up meanwhile
    checkpointed: tuple[str, int, int] = ("", 0, 0)  # store, epoch and sequence of the last checkpoint
    timing: BatchTiming = field(default_factory=BatchTiming)
    kept: Kept | None = None  # describes the copy in ``directory`` once it was sealed for a move
    since: Since | None = None  # changes since it moved in, kept in case it moves back
    lost: StateDamaged | None = None  # the damage for which it was given up
    unkept: Path | None = None  # directory of the lost copy, while it or its commits could not be put aside
    stuck: RunningBatch | None = None  # a batch that the replica has given up, and that has not returned
    states: StoredStates | None = None  # what its store holds, while ``store`` is closed
    sealed_at: float = 0.0  # when its last seal began, monotonic seconds: rows were processed until then
    seal_unsure: bool = False  # its database may have the record of a seal that failed
    traffic: Traffic = field(default_factory=Traffic)
    skipped: SkippedPositions | None = None  # positions of batches that skipped it

    @property
    def is_unsure(self) -> bool:
        """Tells whether the last commit failed, and may be in the database nevertheless."""
        return self.processor is not None and self.processor.is_unsure

    def can_flush(self) -> bool:
        """Tells whether the database can write to its files, by a flush. A database that could not write does not try
        again before it is reopened. Callers hold ``work``. True if the store is closed."""
        try:
            if self.store is not None:
                self.store.flush()
        except Exception:  # noqa: BLE001 - the callers' error is reported
            return False
        return True

    def tell(self, sequence: int, encode: Callable[[], bytes]) -> None:
        """Reports a commit to the followers."""
        followers = list(self.logs.values())
        if self.since is not None:
            if self.since.changes.overflowed:
                self.since = None
            else:
                followers.append(self.since.changes)
        if followers:
            change_set = encode()
            for follower in followers:
                follower.append(sequence, change_set)

    def validate(self) -> None:
        """Checks the invariants. Callers hold ``mutex``. Raises InvariantBroken in a state that only a bug leads to."""
        self.lifecycle.validate()
        for words in self._broken():
            raise InvariantBroken(
                f"an invariant is broken in {self.lifecycle.state}: {words}",
                remedy=REPORT_LINE,
                partition=self.id,
                epoch=self.lifecycle.epoch,
                move=self.lifecycle.move_id or None,
            )

    def _broken(self) -> Iterator[str]:
        lifecycle, incoming = self.lifecycle, self.incoming
        serves = lifecycle.state in SERVED
        copies = [each.directory for each in (self, incoming, self.restoring) if each is not None and each.directory]
        if lifecycle.partition != self.id:
            yield "a local partition and its lifecycle are of the same partition"
        if incoming is not None and (lifecycle.state is not State.WARMING or lifecycle.move_id != incoming.move_id):
            yield "a copy comes in only while the partition warms, for the same move"
        if self.directory is None and (serves or lifecycle.state is State.SEALED):
            yield "an owned or sealed partition is on disk"
        if self.directory is None and self.store is not None:
            yield "an open database has a directory"
        if any(directory.parent != self.home for directory in copies) or len(set(copies)) < len(copies):
            yield "each copy has its own directory in the partition's"
        if self.processor is not None and not serves:
            yield "only an owned partition has a processor"
        if self.processor is not None and (self.processor.epoch != lifecycle.epoch or self.store is None):
            yield "the processor has the owned epoch and an open database"
        if self.lost is not None and serves:
            yield "a lost partition is not served"
        if self.stuck is not None and lifecycle.running:
            yield "no batch runs beside a stuck one"


@dataclass(frozen=True, slots=True)
class Since:
    """All change sets since a partition moved in. ``digest``: digest of the seal with which it moved in."""

    kept: Kept
    digest: str
    changes: ChangeLog


@dataclass(slots=True)
class Incoming:
    """An incoming copy of a partition. ``changes``: chain of the change sets applied to the base so far. ``seal``: seal
    at which a standby's copy ends, if its source sealed for another replica; otherwise None."""

    move_id: str
    directory: Path
    sequence: int = -1
    base: str = ""  # digest
    changes: bytes = NO_CHANGES
    store: PartitionStore | None = None
    seal: Seal | None = None


@dataclass(frozen=True, slots=True)
class Restoring:
    """A checkpoint that was fetched and proved.

    Attributes:
        epoch_min: least epoch at which the checkpoint may be owned.
        adoption: adoption by the replica's own store, in which the checkpoint is published before it is owned; None:
            the replica has no store.
        owning: re-entrant lock, held while the checkpoint becomes the partition.
    """

    id: str
    directory: Path
    store: PartitionStore
    manifest: Manifest
    epoch_min: int
    adoption: Adoption | None
    owning: AbstractContextManager[Any]

    def checkpointed(self, epoch: int) -> tuple[str, int, int]:
        """Returns the value of ``LocalPartition.checkpointed`` once this checkpoint is owned at ``epoch``."""
        return ("", 0, 0) if self.adoption is None else (self.adoption.url, epoch, self.manifest.sequence)

    def release(self) -> None:
        """Leaves the adopted blobs to the store's garbage collection, unless they are published."""
        if self.adoption is not None:
            self.adoption.release()


class CheckedLifecycle(Lifecycle):
    """A lifecycle that is validated after each event, see :mod:`stateflow.transitions`.

    It is a class of its own, so that validation costs :class:`Lifecycle` nothing.
    """

    __slots__ = ()

    def _handle(self, event: Event) -> Any:
        answer = super()._handle(event)
        check(self)
        return answer


class CheckedMutex:
    """A partition's ``mutex`` that validates the partition on release, when its holder has completed a change."""

    def __init__(self, mutex: AbstractContextManager[Any], local: LocalPartition) -> None:
        self._mutex, self._local, self._depth = mutex, local, 0

    def __enter__(self) -> None:
        self._mutex.__enter__()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._depth -= 1
        try:
            if not self._depth and kind is None:
                check(self._local)
        finally:
            self._mutex.__exit__(kind, *error)
