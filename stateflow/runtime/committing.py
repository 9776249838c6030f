"""A partition's commits: each one atomic write under the next sequence, of which those who follow are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from stateflow.changes import ChangeSet, Mutations
from stateflow.errors import Unavailable
from stateflow.runtime import layout
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId


class Staged(NamedTuple):
    """A commit to be written, under its sequence."""

    sequence: int
    source: str
    number: int
    mutations: Mutations


class Committer:
    """Of one partition, at one epoch. Not thread-safe but for :meth:`end`.

    Args:
        sync: each commit survives a power loss once it is done.
        on_commit: called after each with its sequence and a thunk that encodes its change set, so that encoding costs
            nothing when nobody follows.
    """

    def __init__(
        self,
        partition: PartitionId,
        store: PartitionStore,
        epoch: int,
        sync: bool,
        on_commit: Callable[[int, Callable[[], bytes]], None] | None,
    ) -> None:
        self._partition, self._store, self._epoch = partition, store, epoch
        self._sync, self._on_commit = sync, on_commit
        self._ended = False
        #: of the last commit
        self.sequence = read_sequence(store)
        #: a commit has begun, and whether all of it is on disk and known here is not known
        self.is_unsure = False
        #: entries that go with the next commit
        self.unsaved: list[tuple[bytes, bytes]] = []

    def commit(self, source: str, number: int, mutations: Mutations, *, sync: bool = False) -> None:
        """:meth:`stage` and :meth:`write`."""
        self.write(self.stage(source, number, mutations), sync=sync)

    def stage(self, source: str, number: int, mutations: Mutations) -> Staged:
        """What is to be written next. Nothing is, before :meth:`write`; it may be let be.

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
        mutations.puts += [*self.unsaved, (layout.SEQUENCE, sequence.to_bytes(8, "big"))]
        return Staged(sequence, source, number, mutations)

    def write(self, staged: Staged, *, sync: bool = False) -> None:
        """Whoever calls this says :meth:`known` when all of it is known in memory, too. Raises Unavailable behind
        :meth:`end`."""
        if self._ended:
            raise self._closed()
        sequence, source, number, mutations = staged
        self.is_unsure = True
        self._store.apply(mutations, sync=sync or self._sync)
        self.sequence = sequence
        self.unsaved = []
        if self._on_commit is not None:
            operator, partition = self._partition.operator, self._partition.partition
            self._on_commit(
                sequence,
                lambda: ChangeSet(operator, partition, self._epoch, sequence, source, number, mutations).encode(),
            )

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
