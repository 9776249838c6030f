"""Commits of a partition, and the replica's commit log, which holds commits that databases may not have durably yet.

Each commit is one atomic write under the next sequence. :class:`Committer` makes it in four steps:

1. ``stage`` prepares it. It may still be dropped.
2. ``log`` appends it to the commit log, if the replica has one. It is now committed: the database must get it, whatever
   happens.
3. ``write`` writes it to the database and reports it to followers. Without a commit log, this step commits it.
4. ``known`` says that memory has all of it, too. From the beginning of step 3 until then the commit is unsure: if it
   fails, the database must be opened again before another commit.

:class:`Commits` is the commit log as the rest of the replica uses it. At start the replica completes every database
with the logged commits that it lacks, and begins a new log. A copy that goes to quarantine takes its logged commits
along in a file COMMITS. A copy that is being completed has that file, too: completing may drop the end of the
database's own write-ahead log, and with the file an interrupted start can be repeated even if the commit log is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from stateflow.changes import ChangeSet, Mutations
from stateflow.errors import CommitLogDamaged, DiskFull, StateDamaged, TooFewFiles, Unavailable
from stateflow.partition import layout
from stateflow.partition.environment import Environment
from stateflow.settings import ReplicaSettings
from stateflow.storage import PartitionStore
from stateflow.storage.commit_log import Commit, CommitLog, Found, Logged, decode, encode, recover, segment_header
from stateflow.storage.faults import DAMAGED, meaning
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: folder of the log in the data directory
FOLDER = "commits"
#: file in the directory of a copy: commits that its database may lack
KEPT = "COMMITS"


class Staged(NamedTuple):
    """A commit that is ready to be written. ``logged``: its record for the commit log; None: there is no log."""

    changes: ChangeSet
    logged: Commit | None


class Committer:
    """Commits to one partition at one epoch. Not thread-safe, except for :meth:`end`.

    Args:
        log: commit log that makes each commit survive a power loss before :meth:`write`. None: a commit survives a
            power loss only if ``sync`` asks for it.
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
        #: positions and outputs of skipped batches, written with the next commit unless it has its own for the source
        self._adopted: dict[bytes, bytes] = {}

    def commit(self, source: str, number: int, mutations: Mutations, *, sync: bool = False) -> None:
        """Calls :meth:`stage`, :meth:`log` and :meth:`write`. Args: sync: make it survive a power loss."""
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
                remedy="reopen the partition",
                partition=self._partition,
            )
        sequence = self.sequence + 1
        if self._adopted:
            said = {key for key, _ in mutations.puts}.union(mutations.deletes)
            mutations.puts += [entry for entry in self._adopted.items() if entry[0] not in said]
        mutations.puts += [*self.unsaved, (layout.SEQUENCE, sequence.to_bytes(8, "big"))]
        operator, partition = self._partition.operator, self._partition.partition
        changes = ChangeSet(operator, partition, self._epoch, sequence, source, number, mutations)
        if self._log is None:
            return Staged(changes, None)
        return Staged(changes, Commit(self._partition, self._epoch, sequence, changes.encode()))

    def log(self, staged: Staged) -> None:
        """Appends a staged commit to the commit log, if there is one. A group's commits are appended together by
        their caller instead."""
        if self._log is not None and staged.logged is not None:
            self._log.append([staged.logged])

    def write(self, staged: Staged, *, sync: bool = False) -> None:
        """Writes a staged commit to the database. Callers call :meth:`known` once memory has all of it, too.

        Raises Unavailable after :meth:`end`, unless the commit is logged: then it is committed already, and the
        database must get it.

        Args: sync: make it survive a power loss; a logged commit does so anyway.
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
        self.unsaved, self._adopted = [], {}
        if self._on_commit is not None:
            self._on_commit(self.sequence, changes.encode if logged is None else lambda: logged.change_set)

    def adopt(self, held: Mapping[str, layout.Position]) -> None:
        """Accepts positions held for the partition while batches skipped it; the next commit writes them."""
        for source, position in held.items():
            name = source.encode()
            self._adopted |= {layout.POSITION + name: position.encode(), layout.OUTPUT + name: b""}

    def _closed(self) -> Unavailable:
        return Unavailable(
            "the partition was closed on this replica",
            remedy="resend the batch; it was not applied",
            partition=self._partition,
        )

    def known(self) -> None:
        """Marks the last commit as complete, on disk and in memory."""
        self.is_unsure = False

    def end(self) -> None:
        """Refuses all commits from now on. Thread-safe."""
        self._ended = True


def read_sequence(store: PartitionStore) -> int:
    """Returns the sequence of the last commit in ``store``, 0 when there is none."""
    return int.from_bytes(store.get(layout.SEQUENCE) or b"", "big")


class Commits:
    """Commit log of one data directory. Thread-safe.

    Args:
        directory: returns the directory of a partition's database; None: not here.
        lose: called for a partition whose database cannot be made durable.

    Attributes:
        log: log in which commits are durable before they are written to databases; None: the replica does not
        acknowledge commits as durable, or :meth:`begin` was not called yet.
    """

    def __init__(
        self,
        root: Path,
        settings: ReplicaSettings,
        environment: Environment,
        directory: Callable[[PartitionId], Path | None],
        lose: Callable[[PartitionId, StateDamaged], None],
    ) -> None:
        self._settings, self._environment = settings, environment
        self._directory, self._lose = directory, lose
        self._files = environment.segments(root / FOLDER)
        self._found = Found(Logged(), 1, [])
        self.log: CommitLog | None = None

    # -- at start -----------------------------------------------------------------------------------------

    def find(self) -> None:
        """Reads the log that the last process left. Raises CommitLogDamaged."""
        self._found = recover(self._files)

    def begin(self) -> None:
        """Begins a new log. Before that, every database or quarantined copy must durably have the commits that were
        found."""
        if self._settings.acknowledge != "wal":
            self.log = CommitLog(
                self._files,
                self._found,
                self._settings.commit_log_bytes_max,
                mutex=self._environment.mutex,
                sync=self._sync,
                aside=self._environment.aside,
                on_failed=self._failed,
            )
        elif self._found.segments:
            self._files.remove(self._found.segments)
        self._found = Found(Logged(), 1, [])

    def knows(self, partition: PartitionId, directory: Path) -> bool:
        """Tells whether this copy of a partition may lack a commit that was found."""
        return bool(self._found.logged.of(partition)) or (directory / KEPT).exists()

    def lacking(self, partition: PartitionId, directory: Path, epoch: int, sequence: int) -> list[Commit]:
        """Returns the found commits that this copy lacks. Raises StateDamaged, and CommitLogDamaged for a gap
        in the log."""
        return self._known(partition, directory).lacking(partition, epoch, sequence)

    def complete(
        self, partition: PartitionId, directory: Path, lacking: Collection[Commit], *, up_to_damage: bool
    ) -> None:
        """Adds to a copy the commits that it lacks, durably. Idempotent, and repeated after a crash. Raises
        StateDamaged.

        Args:
            up_to_damage: drop the end of the database's own write-ahead log from the first damage on, because the
                database cannot be opened otherwise.
        """
        if not self.knows(partition, directory):
            return
        kept = directory / KEPT
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
            self._environment.sync_database(directory)  # readable commits may not be durable yet
        if kept.exists():
            kept.unlink()
            self._environment.sync([directory])

    # -- while it serves ----------------------------------------------------------------------------------

    def open(self, partition: PartitionId, epoch: int, directory: Path) -> PartitionStore:
        """Opens a partition's database, with all logged commits applied."""
        store = self._environment.open(directory)
        if self.log is None:
            return store
        try:
            lacking = self.log.lacking(partition, epoch, read_sequence(store))
            _apply(store, lacking)
            if lacking:
                self.log.written(partition, lacking[-1].sequence)
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
            (directory / KEPT).rename(directory / f"{KEPT}-damaged")
            kept = []
        self._keep(directory, Logged([*kept, *commits]).of(partition))

    def forget(self, partitions: Collection[PartitionId]) -> None:
        """Drops the logged commits of partitions that are no longer here. Raises OSError."""
        if self.log is not None:
            self.log.forget(partitions)

    def left(self, partition: PartitionId) -> None:
        """Voids the logged commits of a partition, once another replica or another copy here durably owns it."""
        if self.log is not None:
            try:
                self.log.forget([partition], sync=False)
            except OSError as error:  # harmless: these commits are of an older epoch
                log.warning("commit log cannot discard the commits of %s, which has left: %s", partition, error)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def _sync(self, partition: PartitionId) -> bool:
        directory = self._directory(partition)
        if directory is None:
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
        if isinstance(meant, DiskFull | TooFewFiles):
            return  # the log tries again
        why = StateDamaged(f"the database cannot be synced: {error}", remedy=DAMAGED, partition=partition)
        self._environment.aside(lambda: self._lose(partition, why))

    def _known(self, partition: PartitionId, directory: Path) -> Logged:
        return Logged([*self._kept(directory), *self._found.logged.of(partition)])

    @staticmethod
    def _kept(directory: Path) -> list[Commit]:
        """Reads the commits in a copy's file COMMITS; empty if there is none. Raises StateDamaged."""
        kept = directory / KEPT
        if not kept.exists():
            return []
        try:
            found = decode(KEPT, kept.read_bytes())
        except CommitLogDamaged as error:
            raise StateDamaged(str(error.what), remedy=DAMAGED, path=kept) from error
        if found is None or found.torn:
            raise StateDamaged("the kept commits that the database lacks are incomplete", remedy=DAMAGED, path=kept)
        return [record for record in found.records if isinstance(record, Commit)]

    def _keep(self, directory: Path, commits: Collection[Commit]) -> None:
        frames = (encode(number, [commit]) for number, commit in enumerate(commits, 1))
        self._environment.write_durably(directory / KEPT, b"".join((segment_header(1), *frames)))


def _apply(store: PartitionStore, commits: Collection[Commit]) -> None:
    for commit in commits:
        store.apply(ChangeSet.decode(commit.change_set).mutations)
