"""Commits of a partition: each is one atomic write under the next sequence, and is reported to followers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from stateflow.changes import ChangeSet, Mutations
from stateflow.errors import Unavailable
from stateflow.runtime import layout
from stateflow.storage import PartitionStore
from stateflow.storage.commit_log import CommitLog
from stateflow.storage.commit_records import Commit
from stateflow.types import PartitionId


class Staged(NamedTuple):
    """A commit that is ready to be written. ``logged``: its record for the commit log; None: there is no log."""

    changes: ChangeSet
    logged: Commit | None


class Committer:
    """Commits to one partition at one epoch. Not thread-safe, except for :meth:`end`.

    Args:
        log: commit log that makes each commit survive a power loss before :meth:`write`. None: a commit survives a
            power loss only where ``sync`` asks for it.
        on_commit: called after each commit with its sequence and a thunk that encodes its change set, so that nothing
            is encoded when no copy follows.
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

        Args: source, number: the batch that followers see with it. Raises Unavailable after :meth:`end`, and when the
        last commit :attr:`is_unsure`.
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
        """Takes over positions held for the partition while batches skipped it, to be written with the next commit."""
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
