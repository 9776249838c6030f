"""Change feed of a partition: content-addressed base files, and a change log that followers read.

The *base* consists of the files of a snapshot, each named by the xxh3_128 of its content, so that a target requests
only files that it lacks. The *log* contains every change set committed since that snapshot, in order, then a seal when
the partition is fenced.

A follower is the target of a move, or a standby. It reads the log after the last sequence that it has applied, applies
the change sets, and from time to time confirms a sequence (:class:`Confirming`); the source then drops the log up to
that sequence. A log that grows beyond its limit overflows and becomes useless. The follower then starts over with a new
snapshot, as it does when a snapshot is gone or arrived damaged. :class:`Persistence` limits how often it starts over,
and how long it retries a broken connection.

Source and follower each compute a chain, a digest of all change sets in order. The seal contains the
:func:`cutover_digest` of base and chain. After a seal, a follower may own the partition only if its copy ends at the
seal's sequence with the same digest.

A partition that moves back needs no files. Its former owner kept the sealed copy. The present owner began with exactly
that copy, and keeps the change sets since then, up to a limit. It sends only their net effect as the base.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from stateflow.changes import chain
from stateflow.errors import InvalidArgument, MoveUnknown
from stateflow.types import ReplicaInfo

# -- Following a source. Sans-io -------------------------------------------------------------------------------------

#: a copy confirms its changes after at most this many bytes, so that the source can drop them
CONFIRM_BYTES = 1 << 20
#: how often a move's copy may start over
RESTARTS_MAX = 3


class Persistence:
    """Decides how long a follower retries. A standby retries forever, the target of a move until ``resume_timeout_s``
    after the last received byte."""

    def __init__(self, standby: bool, resume_timeout_s: float) -> None:
        self._standby, self._resume_timeout_s = standby, resume_timeout_s
        self._restarts = 0

    def goes_on(self, silent_s: float) -> bool:
        """Tells whether to connect again after the connection broke, given the seconds since the last received byte."""
        return self._standby or silent_s <= self._resume_timeout_s

    def begins_anew(self) -> bool:
        """Tells whether to start over with a new snapshot after the former one was dropped at the source or arrived
        damaged. Counts the restarts."""
        self._restarts += 1
        return self._standby or self._restarts <= RESTARTS_MAX


class Confirming:
    """Decides when a follower confirms the change sets that it has applied. A standby confirms whenever it has caught
    up, because acknowledgements to senders may wait for that."""

    def __init__(self, standby: bool) -> None:
        self._standby = standby
        self._bytes, self._confirmed = 0, -1

    def is_due(self, size: int, reached: int, caught_up: bool) -> bool:
        """Tells whether to confirm now, after ``size`` more bytes were applied, up to change set ``reached``."""
        self._bytes += size
        if reached <= self._confirmed or not ((self._standby and caught_up) or self._bytes > CONFIRM_BYTES):
            return False
        self._bytes, self._confirmed = 0, reached
        return True


class Rate:
    """Bytes per second, averaged over about the last two seconds. ``now``: monotonic seconds."""

    HALF_LIFE_S = 1.0

    def __init__(self, now: float) -> None:
        self._at = now
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, size: int, now: float) -> float:
        elapsed, self._at = now - self._at, now
        keep = 0.5 ** (elapsed / self.HALF_LIFE_S)
        self._bytes = self._bytes * keep + size
        self._seconds = self._seconds * keep + elapsed
        return self._bytes / self._seconds if self._seconds > 0 else 0.0


# -- The base and the change log, at the source ----------------------------------------------------------------------

READ_BYTES = 4 << 20
#: number of digests that are remembered, at about 300 bytes each; every snapshot adds files that no other has
DIGESTS_KEPT = 100_000
#: chain before the first change set
NO_CHANGES = bytes(16)


@dataclass(frozen=True, slots=True)
class BaseFile:
    name: str
    size: int
    digest: str  # xxh3_128, hexadecimal


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    snapshot_id: str
    sequence: int
    epoch: int
    digest: str
    files: tuple[BaseFile, ...]
    kept: str = ""  # digest of the target's sealed copy; ``files`` has only the changes since; empty: the whole base


@dataclass(frozen=True, slots=True)
class Kept:
    """A copy that was sealed for the move ``move_id``. ``epoch`` was granted to the target; ``sequence`` is that of the
    copy's last commit."""

    move_id: str
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Seal:
    """The source's final message of a move, to the target and to every standby.

    Attributes:
        epoch: granted to ``owner``, the target.
        digest: covers all data sent to this follower, see :func:`cutover_digest`.
    """

    move_id: str
    epoch: int
    sequence: int
    digest: str
    sealed_at_us: int
    owner: ReplicaInfo | None = None


class FileDigests:
    """Digests of immutable files, remembered by inode: hard links of one file are hashed once. Thread-safe.

    The ``DIGESTS_KEPT`` digests that were used last are remembered.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, int, int], str] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> str:
        stat = path.stat()
        identity = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        with self._lock:
            if (digest := self._known.get(identity)) is not None:
                self._known.move_to_end(identity)
                return digest
        hasher = xxhash.xxh3_128()
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                hasher.update(block)
        digest = hasher.hexdigest()
        with self._lock:
            self._known[identity] = digest
            if len(self._known) > DIGESTS_KEPT:
                self._known.popitem(last=False)
        return digest

    def files(self, directory: Path) -> tuple[BaseFile, ...]:
        """Returns the files of a flat directory, sorted by name, except the database's lock and its text logs."""
        return tuple(
            BaseFile(path.name, path.stat().st_size, self.of(path))
            for path in sorted(directory.iterdir())
            if path.is_file() and path.name not in ("LOCK", "LOG") and not path.name.startswith("LOG.old")
        )


def base_digest(files: Iterable[BaseFile], sequence: int) -> str:
    """Returns the digest of a base: every file's name and content, and the sequence of the snapshot."""
    listing = "\n".join(f"{file.name} {file.size} {file.digest}" for file in files)
    return xxhash.xxh3_128_hexdigest(f"{sequence}\n{listing}".encode())


#: name of the base file that holds the changes since the target sealed its copy
CHANGES = "CHANGES"


def kept_digest(kept: str, files: Iterable[BaseFile], sequence: int) -> str:
    """Returns the digest of a base that consists of a sealed copy and the changes since then. ``kept``: digest of the
    copy's seal. ``files``: files with the changes."""
    return base_digest((BaseFile("", 0, kept), *files), sequence)


def cutover_digest(base: str, changes: bytes) -> str:
    """Returns the digest, in hexadecimal, of a base and of the chain of change sets since then. Both ends of a move
    must agree on it."""
    return xxhash.xxh3_128_hexdigest(base.encode() + changes)


class ChangeLog:
    """Change sets that one follower has not confirmed yet. Thread-safe.

    ``wake`` is called, from any thread, when there is more to read.

    ``bytes``: size of the change sets that are not confirmed, while the log has not overflowed.

    Invariant: entries are consecutive, from the first unconfirmed one on; ``changes`` is the chain of all change sets
    ever appended.

    Args:
        standby: the follower is a standby, which follows permanently and confirms change sets once they are durable
            there.
        follower: name of the replica that follows; empty: the source cannot tell callers apart.
    """

    def __init__(
        self,
        move_id: str,
        snapshot_id: str,
        base_sequence: int,
        bytes_max: int,
        *,
        standby: bool = False,
        follower: str = "",
    ) -> None:
        self.follower = follower
        self.move_id = move_id
        self.snapshot_id = snapshot_id
        self.changes = NO_CHANGES
        self.base: SnapshotInfo | None = None  # known once its files are hashed
        self.overflowed = False
        self.closed = False
        self.seal: Seal | None = None
        self.standby = standby
        self.confirmed = -1
        self.readers = 0  # number of calls that are reading from the log or its snapshot
        self.read_at = 0.0  # when the last such call ended, monotonic seconds
        self._bytes_max = bytes_max
        self._entries: deque[tuple[int, bytes]] = deque()
        self.bytes = 0
        self._forgotten = self._head = self._sent = base_sequence
        self._lock = threading.Lock()
        self.wake: Callable[[], None] = lambda: None

    def entries(self) -> list[bytes]:
        """Returns the change sets that are not confirmed yet."""
        with self._lock:
            return [change_set for _, change_set in self._entries]

    def append(self, sequence: int, change_set: bytes) -> None:
        with self._lock:
            if self.overflowed:
                return
            self._head = sequence
            self._entries.append((sequence, change_set))
            self.bytes += len(change_set)
            self.changes = chain(self.changes, change_set)
            if self.bytes > self._bytes_max:
                self.overflowed = True
                self._entries.clear()
        self.wake()

    def end(self, seal: Seal) -> None:
        with self._lock:
            self.seal = seal
        self.wake()

    def confirm(self, sequence: int) -> None:
        """Drops the change sets up to ``sequence``, which the follower has confirmed.

        That they were sent proves nothing, because the connection may break afterwards. Raises InvalidArgument for a
        sequence that was not sent yet: acknowledgements may depend on it.
        """
        with self._lock:
            if sequence > self._sent:
                raise InvalidArgument(
                    f"the follower confirms changes up to {sequence}, but was sent only those up to {self._sent}",
                    remedy="check what runs at the follower, and its version",
                    move=self.move_id,
                )
            self.confirmed = max(self.confirmed, sequence)
            while self._entries and self._entries[0][0] <= sequence:
                self._forgotten, forgotten = self._entries.popleft()
                self.bytes -= len(forgotten)

    def close(self) -> None:
        self.closed = True
        self.wake()

    def read(self, after: int, bytes_max: int) -> Reading:
        """Returns the change sets after sequence ``after``, at most about ``bytes_max`` bytes. They count as sent.

        Raises MoveUnknown if some of these change sets were already dropped.
        """
        with self._lock:
            if after < self._forgotten:
                raise MoveUnknown(
                    f"changes up to {self._forgotten} were already dropped, but those after {after} are requested",
                    remedy="the transfer restarts",
                    move=self.move_id,
                )
            taken: list[bytes] = []
            skipped = size = 0
            for sequence, change_set in self._entries:
                if sequence <= after:
                    skipped += len(change_set)
                elif taken and size + len(change_set) > bytes_max:
                    break
                else:
                    taken.append(change_set)
                    size += len(change_set)
                    self._sent = max(self._sent, sequence)
            lag = self.bytes - skipped - size
            return Reading(taken, self._head, lag, None if lag else self.seal, b"" if lag else self.changes)


@dataclass(frozen=True, slots=True)
class Reading:
    """Part of a change log.

    Attributes:
        lag_bytes: bytes in the log after ``change_sets``.
        seal: None unless ``lag_bytes`` is 0 and the partition is sealed.
        chain: chain of all change sets up to the last of ``change_sets``; empty unless ``lag_bytes`` is 0.
    """

    change_sets: list[bytes]
    head_sequence: int
    lag_bytes: int
    seal: Seal | None
    chain: bytes = b""
