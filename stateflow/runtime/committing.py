"""A partition's commits: each one atomic write under the next sequence, of which those who follow are told."""

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
    """A commit to be written, under its sequence. ``logged``: as it goes into the commit log, where there is one."""

    changes: ChangeSet
    logged: Commit | None


class Committer:
    """Of one partition, at one epoch. Not thread-safe but for :meth:`end`.

    Args:
        log: each commit survives a power loss once it is in there, which is before :meth:`write`. None: where that is
            asked for.
        on_commit: called after each with its sequence and a thunk that encodes its change set, so that encoding costs
            nothing when nobody follows.
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
        #: of the last commit
        self.sequence = read_sequence(store)
        #: a commit has begun, and whether all of it is on disk and known here is not known
        self.is_unsure = False
        #: entries that go with the next commit
        self.unsaved: list[tuple[bytes, bytes]] = []
        #: positions and outputs that do, where it does not say more of their sources
        self._adopted: dict[bytes, bytes] = {}

    def commit(self, source: str, number: int, mutations: Mutations, *, sync: bool = False) -> None:
        """:meth:`stage`, :meth:`log` and :meth:`write`. Args: sync: it survives a power loss."""
        staged = self.stage(source, number, mutations)
        self.log(staged)
        self.write(staged, sync=sync)

    def stage(self, source: str, number: int, mutations: Mutations) -> Staged:
        """What is to be logged and written next. Nothing is, before :meth:`write`; it may be let be until it is logged.

        Args: source, number: the batch it is of, as followers are told. Raises Unavailable behind :meth:`end`, and
        when it :attr:`is_unsure`.
        """
        if self._ended:
            raise self._closed()
        if self.is_unsure:
            raise Unavailable(
                "whether the last commit is on disk is not known",
                remedy="open the partition again",
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
        """Into the log, where there is one; or with others, by whoever has them."""
        if self._log is not None and staged.logged is not None:
            self._log.append([staged.logged])

    def write(self, staged: Staged, *, sync: bool = False) -> None:
        """Whoever calls this says :meth:`known` when all of it is known in memory, too. Raises Unavailable behind
        :meth:`end`, unless it is logged: then it is committed, and its database is to have it.

        Args: sync: it survives a power loss, which what is logged does anyway.
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
        """What was held of sources for the partition becomes its own with the next commit."""
        for source, position in held.items():
            name = source.encode()
            self._adopted |= {layout.POSITION + name: position.encode(), layout.OUTPUT + name: b""}

    def _closed(self) -> Unavailable:
        return Unavailable(
            "the partition was closed here meanwhile",
            remedy="send the batch again; it was not applied",
            partition=self._partition,
        )

    def known(self) -> None:
        """What was committed is what is known."""
        self.is_unsure = False

    def end(self) -> None:
        """Nothing is committed any more. From any thread."""
        self._ended = True


def read_sequence(store: PartitionStore) -> int:
    """Sequence of the last commit in ``store``, 0 when there is none."""
    return int.from_bytes(store.get(layout.SEQUENCE) or b"", "big")
