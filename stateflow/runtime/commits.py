"""The replica's commit log as the rest of the replica uses it: commits that databases may not have durably yet.

At start the replica completes every database with the logged commits that it lacks, and begins a new log. A copy that
goes to quarantine takes its logged commits along in a file COMMITS. A copy that is being completed has that file, too:
completing may drop the end of the database's own write-ahead log, and with the file a start that was cut short can be
repeated, even when the commit log is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

from stateflow.changes import ChangeSet
from stateflow.errors import CommitLogDamaged, DiskFull, StateDamaged, TooFewFiles
from stateflow.runtime.committing import read_sequence
from stateflow.runtime.environment import Environment
from stateflow.settings import ReplicaSettings
from stateflow.storage import PartitionStore
from stateflow.storage.commit_log import CommitLog, recover
from stateflow.storage.commit_records import Commit, Found, Logged, decode, encode, segment_header
from stateflow.storage.faults import DAMAGED, meaning
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
#: folder of the log in the data directory
FOLDER = "commits"
#: file in the directory of a copy: commits that its database may lack
KEPT = "COMMITS"


class Commits:
    """Commit log of one data directory. Thread-safe.

    Args:
        directory: returns the directory of a partition's database; None: not here.
        lose: called for a partition whose database cannot be made durable.

    Attributes:
        log: log in which commits are durable before they are written to databases; None: the replica does not
            acknowledge commits as durable, or has not yet called :meth:`begin`.
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
        """Begins a new log. Every database or quarantined copy must have the commits that were found, durably."""
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
        """Returns the commits that were found and this copy lacks. Raises StateDamaged, and CommitLogDamaged for a gap
        in the log."""
        return self._known(partition, directory).lacking(partition, epoch, sequence)

    def complete(
        self, partition: PartitionId, directory: Path, lacking: Collection[Commit], *, up_to_damage: bool
    ) -> None:
        """Adds to a copy the commits that it lacks, durably. Idempotent, and repeated after a crash. Raises
        StateDamaged.

        Args:
            up_to_damage: drop the end of the database's own write-ahead log from the first damage on, as the database
                cannot be opened otherwise.
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
        """Makes the logged commits of a partition void, once another replica or another copy here durably owns it."""
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
        """Reads the commits in a copy's file COMMITS; empty where there is none. Raises StateDamaged."""
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
