"""A partition's commits: each one atomic write under the next sequence, of which those who follow are told."""

from __future__ import annotations

from collections.abc import Callable

from stateflow.changes import ChangeSet, Mutations
from stateflow.errors import Unavailable
from stateflow.runtime import layout
from stateflow.storage import PartitionStore
from stateflow.storage.commit_log import CommitLog
from stateflow.storage.commit_records import Commit
from stateflow.types import PartitionId


class Committer:
    """Of one partition, at one epoch. Not thread-safe but for :meth:`end`.

    Args:
        log: each commit survives a power loss once it is done, by this. None: it does where it is asked for.
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

    def commit(self, source: str, number: int, mutations: Mutations, *, sync: bool = False) -> None:
        """Args: source, number: the batch it is of, as followers are told. Raises Unavailable behind :meth:`end`, and
        when it :attr:`is_unsure`.

        Whoever calls this says :meth:`known` when all of it is known in memory, too.
        """
        if self._ended:
            raise Unavailable(
                "the partition was closed here meanwhile",
                remedy="send the batch again; it was not applied",
                partition=self._partition,
            )
        if self.is_unsure:
            raise Unavailable(
                "whether the last commit is on disk is not known",
                remedy="open the partition again",
                partition=self._partition,
            )
        sequence = self.sequence + 1
        self.is_unsure = True
        mutations.puts += [*self.unsaved, (layout.SEQUENCE, sequence.to_bytes(8, "big"))]
        operator, partition = self._partition.operator, self._partition.partition
        change_set = ChangeSet(operator, partition, self._epoch, sequence, source, number, mutations)
        encode = change_set.encode
        if self._log is None:
            self._store.apply(mutations, sync=sync)
        else:
            encoded = encode()
            encode = lambda: encoded  # noqa: E731
            self._log.append([Commit(self._partition, self._epoch, sequence, encoded)])
            self._store.apply(mutations)
            self._log.written(self._partition, sequence)
        self.sequence = sequence
        self.unsaved = []
        if self._on_commit is not None:
            self._on_commit(sequence, encode)

    def known(self) -> None:
        """What was committed is what is known."""
        self.is_unsure = False

    def end(self) -> None:
        """Nothing is committed any more. From any thread."""
        self._ended = True


def read_sequence(store: PartitionStore) -> int:
    """Sequence of the last commit in ``store``, 0 when there is none."""
    return int.from_bytes(store.get(layout.SEQUENCE) or b"", "big")
