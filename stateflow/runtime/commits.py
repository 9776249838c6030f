"""What a replica has committed, and its partitions' databases may not have durably: its commit log, as the rest of it
sees that.

At start every database is completed with what the log has and it lacks, and the log begins anew. A copy that is put
aside takes what was logged of it along, in a file COMMITS. One that is being completed has that file, too: the end of
its own log may be dropped by that, and a start that was cut short is gone on with, whatever becomes of the log.
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
#: of the log, in the data directory
FOLDER = "commits"
#: in the directory of a copy: commits that its database may lack
KEPT = "COMMITS"


class Commits:
    """Of one data directory. Called from several threads.

    Args:
        directory: where a partition's database is; None: not here.
        lose: a partition whose database cannot be made durable.

    Attributes:
        log: where commits are durable before they are written to databases; None: they are not acknowledged as durable,
            or what the data directory holds is still being looked at.
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
        """Read what was left. Raises CommitLogDamaged."""
        self._found = recover(self._files)

    def begin(self) -> None:
        """Every database has what was found, durably, or what is put aside of it has."""
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
        """May this copy of a partition lack something that was found?"""
        return bool(self._found.logged.of(partition)) or (directory / KEPT).exists()

    def lacking(self, partition: PartitionId, directory: Path, epoch: int, sequence: int) -> list[Commit]:
        """What was found of a partition, and this copy of it does not have. Raises StateDamaged, and CommitLogDamaged
        for a gap."""
        return self._known(partition, directory).lacking(partition, epoch, sequence)

    def complete(
        self, partition: PartitionId, directory: Path, lacking: Collection[Commit], *, up_to_damage: bool
    ) -> None:
        """A copy has what it lacks, durably, when this returns. Cut short, it is done again. Raises StateDamaged.

        Args: up_to_damage: it cannot be opened otherwise.
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
            log.info("%s has %d commits from the commit log", partition, len(lacking))
        else:
            self._environment.sync_database(directory)  # what can be read there may not be durable
        if kept.exists():
            kept.unlink()
            self._environment.sync([directory])

    # -- while it serves ----------------------------------------------------------------------------------

    def open(self, partition: PartitionId, epoch: int, directory: Path) -> PartitionStore:
        """Its database, with all that was logged."""
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
        """A copy takes along what was logged of its partition. Raises OSError, CommitLogDamaged."""
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
        """These are here no more. Raises OSError."""
        if self.log is not None:
            self.log.forget(partitions)

    def left(self, partition: PartitionId) -> None:
        """It is another replica's, or another copy here, durably: what was logged of it counts no more."""
        if self.log is not None:
            try:
                self.log.forget([partition], sync=False)
            except OSError as error:  # its epoch says the same
                log.warning("the commit log does not take that %s has left: %s", partition, error)

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
            return  # it is tried again
        why = StateDamaged(f"its database cannot be made durable: {error}", remedy=DAMAGED, partition=partition)
        self._environment.aside(lambda: self._lose(partition, why))

    def _known(self, partition: PartitionId, directory: Path) -> Logged:
        return Logged([*self._kept(directory), *self._found.logged.of(partition)])

    @staticmethod
    def _kept(directory: Path) -> list[Commit]:
        """Raises StateDamaged."""
        kept = directory / KEPT
        if not kept.exists():
            return []
        try:
            found = decode(KEPT, kept.read_bytes())
        except CommitLogDamaged as error:
            raise StateDamaged(str(error.what), remedy=DAMAGED, path=kept) from error
        if found is None or found.torn:
            raise StateDamaged("what its database lacks is not all that was kept", remedy=DAMAGED, path=kept)
        return [record for record in found.records if isinstance(record, Commit)]

    def _keep(self, directory: Path, commits: Collection[Commit]) -> None:
        frames = (encode(number, [commit]) for number, commit in enumerate(commits, 1))
        self._environment.write_durably(directory / KEPT, b"".join((segment_header(1), *frames)))


def _apply(store: PartitionStore, commits: Collection[Commit]) -> None:
    for commit in commits:
        store.apply(ChangeSet.decode(commit.change_set).mutations)
