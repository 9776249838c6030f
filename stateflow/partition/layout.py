"""Layout of the entries in a partition's store that are not state cells, and the commits that change them.

All these keys begin with the byte ``m``:

========  =============================================================================
key       value
========  =============================================================================
``ms``    sequence of the last commit, 8 bytes big endian
``mp``+s  position of source *s*: msgpack ``[version, batch, watermark in µs or nil, rows, newest event time, newest
          event time before that batch, attempt…, time of the commit in µs, digest of the rows or nil, the client's
          entry for its successor, id of the client]``; version 1 has no event times, version 2 ends with the attempt
``mo``+s  output of that batch, see :mod:`stateflow.operator.output`
``mq``+s  in place of ``mo`` where *s* is a run of a batch DataFrame, or of a query in real-time mode: the output of
          each of its batches, see :class:`Piece`
``mf``+s  the newest client of source *s*: msgpack ``[version, generation, id]``
``ml``+s  this copy may lack commits that clients know: the client of *s* must open the source again
``mr``+s  tombstone of a retired source: msgpack ``[version, batch, when it arrived in µs, [generation, id] of its
          client or nil, newest event time]``; the source then has none of the entries above
``mz``    present once tombstones were dropped: time of the last batch of the newest dropped one, µs, 8 bytes big
          endian
``mn``    clients that began at this time or before are refused: µs, 8 bytes big endian
``mk``    watermark of the partition: µs, 8 bytes big endian, signed
``mw``    ownership: msgpack ``[version, replica, state, epoch, move id, target…]``
``mx``    declared state schema, JSON
========  =============================================================================

All entries except ``mw`` belong to the partition and move with it. ``mw`` describes *this copy*: a copy whose ``mw``
names another replica is an unfinished transfer.

Each commit is one atomic write under the next sequence. :class:`Committer` makes it in four steps:

1. ``stage`` prepares it. It may still be dropped.
2. ``log`` appends it to the commit log, if the replica has one. It is now committed: the database must get it, whatever
   happens.
3. ``write`` writes it to the database and reports it to followers. Without a commit log, this step commits it.
4. ``known`` marks the commit as complete in memory, too. From the beginning of step 3 until this call the commit is
   unsure: after a failure the database must be reopened before another commit.

:class:`Commits` is the commit log as the rest of the replica uses it. At start the replica completes every database
with the logged commits that it lacks, and begins a new log. A quarantined copy keeps its logged commits in a file
COMMITS. A copy that is being completed has that file, too, because completing may drop the end of the database's own
write-ahead log. With the file, an interrupted start can be repeated even if the commit log is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgpack

from stateflow.changes import ChangeSet, Mutations
from stateflow.errors import CommitLogDamaged, DecodeError, DiskFull, StateDamaged, TooFewFiles, Unavailable
from stateflow.partition.environment import Environment
from stateflow.settings import ReplicaSettings
from stateflow.state.cells import LATEST_US
from stateflow.storage import PartitionStore
from stateflow.storage.commit_log import Commit, CommitLog, Found, Logged, decode, encode, recover, segment_header
from stateflow.storage.faults import DAMAGED, meaning
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
VERSION = 1
POSITION_VERSION = 3
SEQUENCE = b"ms"
POSITION = b"mp"
OUTPUT = b"mo"
PIECE = b"mq"
SESSION = b"mf"
LAPSED = b"ml"
RETIRED = b"mr"
FORGOTTEN = b"mz"
STOPPED = b"mn"
OWNERSHIP = b"mw"
SCHEMA = b"mx"
WATERMARK = b"mk"

#: prefix of the source of one run of a batch DataFrame
BATCH_RUN = "batch:"
#: prefix of the sources of a query in real-time mode, whose clients say up to which batch outputs can be dropped
REAL_TIME = "real-time:"
#: sources with these prefixes keep the output of every batch
KEPT = (BATCH_RUN, REAL_TIME)
#: folder of the commit log in the data directory
COMMITS_FOLDER = "commits"
#: file in the directory of a copy: commits that its database may lack
COMMITS_FILE = "COMMITS"
T = TypeVar("T")


# -- Entries ---------------------------------------------------------------------------------------------------------


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turns errors of decoding an entry into DecodeError. Entries may be invalid, because a copy may come from another
    process."""
    try:
        yield
    except (ValueError, TypeError) as error:
        why = str(error)[:120]
        raise DecodeError(
            f"{what} of a partition cannot be read: {why}", remedy="restore the partition from a checkpoint"
        ) from error


def typed(found: T, *kinds: type) -> T:
    for each, kind in zip(fields(found), kinds, strict=True):  # type: ignore[arg-type]
        if type(getattr(found, each.name)) is not kind:
            raise ValueError(f"{each.name} is not of type {kind.__name__}")
    return found


@dataclass(frozen=True, slots=True)
class Attempt:
    """Sender of a batch; it distinguishes a retry from another sender under the same source name.

    Attributes:
        run: one run of the query.
        use: one application of the operator in the query.
        task: one attempt of one Spark task.
        call: one pass of that task over its rows.
    """

    run: str = ""
    use: str = ""
    task: str = ""
    call: str = ""


UNKNOWN_ATTEMPT = Attempt()


@dataclass(frozen=True, slots=True, order=True)
class Session:
    """One client of a source. The largest session is the newest, and partitions refuse the others.

    Attributes:
        generation_us: start time of the client, µs, increased if necessary to be later than that of every client before
            it.
        id: distinguishes two clients that began at the same time.
    """

    generation_us: int
    id: str

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb([VERSION, self.generation_us, self.id])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Session:
        with decoding("a session"):
            version, *values = msgpack.unpackb(data)
            check_version(version)
            return typed(cls(*values), int, str)


class Position(NamedTuple):
    """The last batch of a source that a partition contains.

    Attributes:
        batch: number of the batch; -1: the partition contains none.
        watermark_us: the source's watermark at this batch, µs; None: none.
        rows: number of the batch's rows for this partition.
        attempt: sender of the batch.
        event_us: newest event time that the source has reported up to this batch, µs.
        event_before_us: newest event time up to the batch before. The watermark for this batch is computed from both
            event times, with the same result each time the batch is sent.
        at_us: when the batch was committed.
        digest: digest of the rows, if the same batch must bring the same rows; None: unknown.
        known: the client's entry for its successor, see :mod:`stateflow.client.history`.
        client: id of the client.
    """

    batch: int
    watermark_us: int | None = None
    rows: int = 0
    attempt: Attempt = UNKNOWN_ATTEMPT
    event_us: int | None = None
    event_before_us: int | None = None
    at_us: int = 0
    digest: int | None = None
    known: bytes = b""
    client: str = ""

    def encode(self) -> bytes:
        batch, watermark_us, rows, a, event_us, event_before_us, *end = self
        packed: bytes = msgpack.packb(
            [POSITION_VERSION, batch, watermark_us, rows, event_us, event_before_us, a.run, a.use, a.task, a.call, *end]
        )
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Position:
        with decoding("a position"):
            version, batch, watermark_us, rows, *rest = msgpack.unpackb(data)
            if type(batch) is not int:
                raise ValueError("its batch is not a number")
            if version in (POSITION_VERSION, POSITION_VERSION - 1):
                event_us, event_before_us, run, use, task, call, *newer = rest
                attempt = Attempt(run, use, task, call)
                return cls(batch, watermark_us, rows, attempt, event_us, event_before_us, *newer)
            check_version(version)
            return cls(batch, watermark_us, rows, Attempt(*rest))


@dataclass(frozen=True, slots=True)
class Piece:
    """Output of one batch, for a source that keeps the outputs of several batches. ``bytes_up_to``: bytes of all
    outputs up to this one, in a run of a batch DataFrame.

    The key is ``mq``, the length of the source's name (2 bytes), the name, the batch number (8 bytes), both numbers big
    endian. The value is msgpack ``[version, rows, digest or nil, bytes up to here, output]``.
    """

    rows: int
    digest: int | None
    bytes_up_to: int
    output: bytes

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb([VERSION, self.rows, self.digest, self.bytes_up_to, self.output])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Piece:
        with decoding("an output"):
            version, *values = msgpack.unpackb(data)
            check_version(version)
            return cls(*values)


def piece_key(source: str, number: int) -> bytes:
    return _pieces_of(source) + number.to_bytes(8, "big")


def piece_keys(source: str) -> tuple[bytes, bytes]:
    """Returns the key range of a source's outputs, as (first key, key after the last)."""
    prefix = _pieces_of(source)
    return prefix, prefix + b"\xff" * 9


def pieces(store: PartitionStore, source: str, after: int) -> Iterator[tuple[int, Piece]]:
    """Yields (batch number, kept output) of a source's batches later than ``after``, in order."""
    prefix = _pieces_of(source)
    for key, value in store.scan_from(piece_key(source, max(0, after + 1)), piece_keys(source)[1]):
        yield int.from_bytes(key[len(prefix) :], "big"), Piece.decode(value)


def _pieces_of(source: str) -> bytes:
    name = source.encode()
    return PIECE + len(name).to_bytes(2, "big") + name


def positions(store: PartitionStore) -> dict[str, int]:
    """Returns the last batch of each source that a partition contains, by source."""
    return {key[len(POSITION) :].decode(): Position.decode(value).batch for key, value in store.scan(POSITION)}


def lapsing(store: PartitionStore) -> list[tuple[bytes, bytes]]:
    """Returns the entries to write to a copy that is served in place of a newer copy, which may be lost.

    The newer copy may have known a newer client of a source; without that knowledge, the former client would be
    accepted. So the copy accepts no client of a source until that client has opened the source on all partitions again:
    other partitions know the newer client, and refuse the former one.
    """
    return [(LAPSED + key[len(SESSION) :], b"") for key, _ in store.scan(SESSION)]


def stopping(stores: Iterable[PartitionStore], now_us: int) -> list[tuple[bytes, bytes]]:
    """Returns the entries that make a copy refuse every client that began at ``now_us`` or earlier.

    The copy also refuses each client that one of the partition's ``stores`` has recorded, even if the clock of that
    client is ahead. An earlier limit is never lowered.
    """
    known_us = [now_us]
    for store in stores:
        known_us += [Session.decode(value).generation_us for _, value in store.scan(SESSION)]
        known_us.append(int.from_bytes(store.get(STOPPED) or b"", "big"))
    return [(STOPPED, max(known_us).to_bytes(8, "big"))]


@dataclass(frozen=True, slots=True)
class Ownership:
    """Durable part of a partition's lifecycle on one replica. ``state`` is OWNED or SEALED.

    ``epoch`` is the epoch at which the partition is owned, or for SEALED the epoch granted to the target.
    """

    replica: str
    state: str
    epoch: int
    move_id: str = ""
    target: str = ""
    target_site: str = ""
    target_address: str = ""
    digest: str = ""

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb(
            [
                VERSION,
                self.replica,
                self.state,
                self.epoch,
                self.move_id,
                self.target,
                self.target_site,
                self.target_address,
                self.digest,
            ]
        )
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Ownership:
        with decoding("the ownership record"):
            version, *values = msgpack.unpackb(data)
            check_version(version)
            return typed(cls(*values), str, str, int, *[str] * 5)


def check_version(version: int) -> None:
    if version != VERSION:
        raise DecodeError(
            f"partition data has layout {version}, this program reads {VERSION}",
            remedy=f"run the stateflow that wrote it{', or a newer one' if version > VERSION else ''}",
        )


# -- Commits of one partition ----------------------------------------------------------------------------------------


class Staged(NamedTuple):
    """A commit that is ready to be written. ``logged``: its record for the commit log; None: there is no log."""

    changes: ChangeSet
    logged: Commit | None


class Committer:
    """Commits to one partition at one epoch. Not thread-safe, except for :meth:`end`.

    Args:
        log: commit log that makes each commit survive a power loss before :meth:`write`. None: only commits with
            ``sync`` survive a power loss.
        on_commit: called after each commit with its sequence and a function that encodes its change set, so that
            nothing is encoded if no copy follows.
    """

    def __init__(
        self,
        partition: PartitionId,
        store: PartitionStore,
        epoch: int,
        log: CommitLog | None,
        on_commit: Callable[[int, Callable[[], bytes]], None] | None,
    ) -> None:
        self._partition, self._store, self._epoch = partition, store, epoch
        self._log, self._on_commit = log, on_commit
        self._ended = False
        #: sequence of the last commit
        self.sequence = read_sequence(store)
        #: a commit has begun, and it is not certain that all of it is on disk and in memory
        self.is_unsure = False
        #: entries to be written with the next commit
        self.unsaved: list[tuple[bytes, bytes]] = []
        #: entries that skipped batches have changed, written with the next commit unless it has its own
        self.adopted: dict[bytes, bytes] = {}

    def commit(self, source: str, number: int, mutations: Mutations, *, sync: bool = False) -> None:
        """Calls :meth:`stage`, :meth:`log` and :meth:`write`. With ``sync``, the commit survives a power loss."""
        staged = self.stage(source, number, mutations)
        self.log(staged)
        self.write(staged, sync=sync)

    def stage(self, source: str, number: int, mutations: Mutations) -> Staged:
        """Prepares the next commit, without writing anything. A staged commit may be dropped until it is logged.

        Args:
            source, number: the batch that followers see with the commit.

        Raises Unavailable after :meth:`end`, and if the last commit :attr:`is_unsure`.
        """
        if self._ended:
            raise self._closed()
        if self.is_unsure:
            raise Unavailable(
                "it is unknown whether the last commit is on disk",
                remedy="send the batch again; the partition is reopened by itself",
                partition=self._partition,
            )
        sequence = self.sequence + 1
        if self.adopted:
            said = {key for key, _ in mutations.puts}.union(mutations.deletes)
            mutations.puts += [entry for entry in self.adopted.items() if entry[0] not in said]
        mutations.puts += [*self.unsaved, (SEQUENCE, sequence.to_bytes(8, "big"))]
        operator, partition = self._partition.operator, self._partition.partition
        changes = ChangeSet(operator, partition, self._epoch, sequence, source, number, mutations)
        if self._log is None:
            return Staged(changes, None)
        return Staged(changes, Commit(self._partition, self._epoch, sequence, changes.encode()))

    def log(self, staged: Staged) -> None:
        """Appends a staged commit to the commit log, if there is one. For a group of commits, the caller appends all of
        them together instead."""
        if self._log is not None and staged.logged is not None:
            self._log.append([staged.logged])

    def write(self, staged: Staged, *, sync: bool = False) -> None:
        """Writes a staged commit to the database. Callers call :meth:`known` once memory has the whole commit, too.

        Raises Unavailable after :meth:`end`, unless the commit is logged: then it is committed already, and the
        database must get it.

        Args:
            sync: make the commit survive a power loss; a logged commit survives it anyway.
        """
        changes, logged = staged
        if self._ended and logged is None:
            raise self._closed()
        self.is_unsure = True
        if self._log is None or logged is None:
            self._store.apply(changes.mutations, sync=sync)
        else:
            self._store.apply(changes.mutations)
            self._log.written(self._partition, changes.sequence)
        self.sequence = changes.sequence
        self.unsaved, self.adopted = [], {}
        if self._on_commit is not None:
            self._on_commit(self.sequence, changes.encode if logged is None else lambda: logged.change_set)

    def _closed(self) -> Unavailable:
        remedy = "resend the batch; it was not applied"
        return Unavailable("the partition was closed on this replica", remedy=remedy, partition=self._partition)

    def known(self) -> None:
        """Marks the last commit as complete, on disk and in memory."""
        self.is_unsure = False

    def end(self) -> None:
        """Refuses all commits from now on. Thread-safe."""
        self._ended = True


def read_sequence(store: PartitionStore) -> int:
    """Returns the sequence of the last commit in ``store``, 0 when there is none."""
    return int.from_bytes(store.get(SEQUENCE) or b"", "big")


def read_watermark(store: PartitionStore) -> int | None:
    """Returns the watermark of the partition in ``store``, µs; None before the first."""
    stored = store.get(WATERMARK)
    watermark_us = None if stored is None else int.from_bytes(stored, "big", signed=True)
    return None if watermark_us == LATEST_US else watermark_us  # earlier builds stored the end of a run


# -- Commit log of the replica ---------------------------------------------------------------------------------------


class Commits:
    """Commit log of one data directory. Thread-safe.

    Args:
        directory: returns the directory of a partition's database; None: the database is not here.
        lose: called for a partition whose database cannot be made durable.
        reopen: opens the database of a partition that is served here, if it is closed, and puts a lost one aside that
            could not be put aside before. Raises the errors of the store.
        rewrite: writes the whole content of that database to files that are durable. Raises the errors of the store.

    Attributes:
        log: commit log, in which commits are durable before they are written to databases; None: the replica does not
            acknowledge commits as durable, or :meth:`begin` was not called yet.
    """

    def __init__(
        self,
        root: Path,
        settings: ReplicaSettings,
        environment: Environment,
        directory: Callable[[PartitionId], Path | None],
        lose: Callable[[PartitionId, StateDamaged], None],
        reopen: Callable[[PartitionId], None] = lambda _: None,
        rewrite: Callable[[PartitionId], None] = lambda _: None,
    ) -> None:
        self._settings, self._environment = settings, environment
        self._directory, self._lose, self._reopen, self._rewrite = directory, lose, reopen, rewrite
        self._worked_on: set[PartitionId] = set()
        self._unsure: set[PartitionId] = set()  # a sync of their databases failed
        self._files = environment.segments(root / COMMITS_FOLDER)
        self._found = Found(Logged(), 1, [])
        self.log: CommitLog | None = None

    # -- at start -----------------------------------------------------------------------------------------

    def find(self) -> None:
        """Reads the log that the last process left. Raises CommitLogDamaged."""
        self._found = recover(self._files)

    def begin(self) -> None:
        """Begins a new log in place of the one that :meth:`find` read. The commits in the old log must be durable by
        then, in the databases or in the quarantined copies. With ``acknowledge="wal"`` there is no new log: the old one
        is only deleted."""
        if self._settings.acknowledge != "wal":
            self.log = CommitLog(
                self._files,
                self._found,
                self._settings.commit_log_bytes_max,
                mutex=self._environment.mutex,
                sync=self._sync,
                aside=self._environment.aside,
                on_failed=self._failed,
                on_behind=self._complete_later,
            )
        elif self._found.segments:
            self._files.remove(self._found.segments)
        self._found = Found(Logged(), 1, [])

    def knows(self, partition: PartitionId, directory: Path) -> bool:
        """Tells whether commits of a partition were found in the log, or beside this copy, so that the copy may lack
        some."""
        return bool(self._found.logged.of(partition)) or (directory / COMMITS_FILE).exists()

    def lacking(self, partition: PartitionId, directory: Path, epoch: int, sequence: int) -> list[Commit]:
        """Returns the commits that were found but that this copy lacks, in order. Raises StateDamaged, and
        CommitLogDamaged for a gap in the log."""
        return self._known(partition, directory).lacking(partition, epoch, sequence)

    def complete(
        self, partition: PartitionId, directory: Path, lacking: Collection[Commit], *, up_to_damage: bool
    ) -> None:
        """Adds to a copy the commits that it lacks, durably. Idempotent, and repeated after a crash. Raises the store's
        errors.

        Args:
            up_to_damage: drop the end of the database's own write-ahead log from the first damage on, because the
                database cannot be opened otherwise.
        """
        if not self.knows(partition, directory):
            return
        kept = directory / COMMITS_FILE
        if lacking:
            self._keep(directory, self._known(partition, directory).of(partition))
            store = self._environment.open(directory, up_to_damage=up_to_damage)
            try:
                _apply(store, lacking)
                store.sync()
            finally:
                store.close()
            log.info("%s: %d commits recovered from the commit log", partition, len(lacking))
        else:
            self._settle(partition, directory)
        if kept.exists():
            kept.unlink()
            self._environment.sync([directory])

    def _settle(self, partition: PartitionId, directory: Path) -> None:
        """Makes a copy durable whose commits can all be read, but may not be on disk yet. Raises the store's errors."""
        try:
            self._environment.sync_database(directory)
        except OSError as error:  # the kernel may have dropped what it could not write, and the next sync would succeed
            log.warning("%s is rewritten, because it cannot be synced: %s", partition, error)
            with closing(self._environment.open(directory)) as store:
                store.flush()

    # -- while it serves ----------------------------------------------------------------------------------

    def open(self, partition: PartitionId, epoch: int, directory: Path) -> PartitionStore:
        """Opens a partition's database, with all logged commits applied. Raises the errors of the store, and
        StateDamaged if it lacks commits that the log lacks, too."""
        store = self._environment.open(directory)
        if self.log is None:
            return store
        try:
            lacking = self.log.lacking(partition, epoch, read_sequence(store))
            _apply(store, lacking)
            if lacking:
                self.log.written(partition, lacking[-1].sequence)
        except CommitLogDamaged as error:
            store.close()
            raise StateDamaged(str(error.what), remedy=DAMAGED, path=directory) from error
        except BaseException:
            store.close()
            raise
        return store

    def put_aside(self, partition: PartitionId, directory: Path) -> None:
        """Stores the partition's logged commits in a copy that goes to quarantine. Raises OSError, CommitLogDamaged."""
        commits = self._found.logged.of(partition) if self.log is None else self.log.logged(partition)
        if not commits:
            return
        try:
            kept = self._kept(directory)
        except StateDamaged:
            (directory / COMMITS_FILE).rename(directory / f"{COMMITS_FILE}-damaged")
            kept = []
        self._keep(directory, Logged([*kept, *commits]).of(partition))

    def forget(self, partitions: Collection[PartitionId], *, sync: bool = True) -> None:
        """Drops the logged commits of partitions that are no longer here. Raises OSError. ``sync``: see
        :meth:`.CommitLog.forget`."""
        if self.log is not None:
            self.log.forget(partitions, sync=sync)

    def left(self, partition: PartitionId) -> None:
        """Voids the logged commits of a partition, once another replica or another copy here durably owns it."""
        if self.log is not None:
            try:
                self.log.forget([partition], sync=False)
            except OSError as error:  # harmless: these commits are of an older epoch
                log.warning("commit log keeps outdated commits of %s, which it cannot discard: %s", partition, error)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def _sync(self, partition: PartitionId) -> bool:
        if partition in self._unsure:
            self._later(partition, self._rewrite_unsure)
            return False
        directory = self._directory(partition)
        if directory is None:
            self._later(partition, self._reopen)
            return False
        try:
            self._environment.sync_database(directory)
        except FileNotFoundError:
            if self._directory(partition) == directory:
                raise
            return False
        return True

    def _failed(self, partition: PartitionId, error: Exception) -> None:
        meant = meaning(error)
        if isinstance(meant, TooFewFiles):
            return  # the log tries again
        if isinstance(meant, DiskFull):
            # the kernel may have dropped what it could not write, and then the next sync succeeds all the same
            self._unsure.add(partition)
            self._later(partition, self._rewrite_unsure)
            return
        why = StateDamaged(f"the database cannot be synced: {error}", remedy=DAMAGED, partition=partition)
        self._environment.aside(lambda: self._lose(partition, why))

    def _rewrite_unsure(self, partition: PartitionId) -> None:
        self._rewrite(partition)
        self._unsure.discard(partition)

    def _complete_later(self, partition: PartitionId) -> None:
        """Opens a database that was closed because a commit could not be written. Without a further batch for the
        partition, nothing else would open it, and the commit log would grow without end."""
        self._later(partition, self._reopen)

    def _later(self, partition: PartitionId, work: Callable[[PartitionId], None]) -> None:
        """Calls ``work`` in a thread of its own, unless such a call for the partition is under way."""
        if partition not in self._worked_on:
            self._worked_on.add(partition)
            self._environment.aside(lambda: self._work(partition, work))

    def _work(self, partition: PartitionId, work: Callable[[PartitionId], None]) -> None:
        try:
            work(partition)
        except StateDamaged as error:
            self._lose(partition, error)
        except Exception as error:  # noqa: BLE001 - the next full segment leads to another attempt
            log.warning("commits of %s stay in the commit log, as its database fails: %s", partition, error)
        finally:
            self._worked_on.discard(partition)

    def _known(self, partition: PartitionId, directory: Path) -> Logged:
        return Logged([*self._kept(directory), *self._found.logged.of(partition)])

    @staticmethod
    def _kept(directory: Path) -> list[Commit]:
        """Reads the commits in a copy's file COMMITS; empty if there is none. Raises StateDamaged."""
        kept = directory / COMMITS_FILE
        if not kept.exists():
            return []
        try:
            found = decode(COMMITS_FILE, kept.read_bytes())
        except CommitLogDamaged as error:
            raise StateDamaged(str(error.what), remedy=DAMAGED, path=kept) from error
        if found is None or found.torn:
            raise StateDamaged("the file of commits that the database lacks is truncated", remedy=DAMAGED, path=kept)
        return [record for record in found.records if isinstance(record, Commit)]

    def _keep(self, directory: Path, commits: Collection[Commit]) -> None:
        frames = (encode(number, [commit]) for number, commit in enumerate(commits, 1))
        self._environment.write_durably(directory / COMMITS_FILE, b"".join((segment_header(1), *frames)))


def _apply(store: PartitionStore, commits: Collection[Commit]) -> None:
    for commit in commits:
        store.apply(ChangeSet.decode(commit.change_set).mutations)
