"""Commits of a partition: with the next sequence number, reported to followers, and never of uncertain outcome."""

from __future__ import annotations

import pytest

from stateflow.changes import ChangeSet, Mutations
from stateflow.errors import Unavailable
from stateflow.partition import layout
from stateflow.partition.layout import Committer, read_sequence
from stateflow.storage import MemoryStore
from stateflow.types import PartitionId

P = PartitionId("Op", 3)


class Refusing(MemoryStore):
    refuses = False

    def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
        if self.refuses:
            raise OSError("no room")
        super().apply(mutations, sync=sync)


def put(value: bytes) -> Mutations:
    return Mutations(puts=[(b"key", value)])


def test_sequence_of_an_empty_store() -> None:
    assert read_sequence(MemoryStore()) == 0


def test_each_commit_is_one_write_under_the_next_sequence_and_told() -> None:
    store, told = MemoryStore(), list[ChangeSet]()
    committer = Committer(P, store, 7, None, lambda _, encode: told.append(ChangeSet.decode(encode())))
    for number in range(2):
        committer.commit("s", number, put(b"%d" % number))
        committer.known()
    assert (committer.sequence, read_sequence(store), store.get(b"key")) == (2, 2, b"1")
    assert [(each.operator, each.partition, each.epoch, each.sequence) for each in told] == [
        ("Op", 3, 7, 1),
        ("Op", 3, 7, 2),
    ]
    assert [(each.source, each.position) for each in told] == [("s", 0), ("s", 1)]
    follower = MemoryStore()
    for each in told:
        follower.apply(each.mutations)
    assert dict(follower.scan(b"")) == dict(store.scan(b""))
    assert Committer(P, store, 8, None, None).sequence == 2


def test_what_is_unsaved_goes_with_the_next_commit_and_with_no_other() -> None:
    store = MemoryStore()
    committer = Committer(P, store, 1, None, None)
    committer.unsaved = [(layout.SCHEMA, b"declared")]
    assert store.get(layout.SCHEMA) is None
    committer.commit("s", 0, put(b"0"))
    assert store.get(layout.SCHEMA) == b"declared"
    assert committer.unsaved == []


def test_behind_a_write_that_failed_nothing_is_committed() -> None:
    store = Refusing()
    committer = Committer(P, store, 1, None, None)
    store.refuses = True
    with pytest.raises(OSError, match="no room"):
        committer.commit("s", 0, put(b"0"))
    store.refuses = False
    assert committer.is_unsure
    with pytest.raises(Unavailable, match="unknown whether the last commit is on disk"):
        committer.commit("s", 0, put(b"0"))
    assert committer.sequence == 0


def test_behind_its_end_nothing_is_committed() -> None:
    store = MemoryStore()
    committer = Committer(P, store, 1, None, None)
    committer.end()
    with pytest.raises(Unavailable, match="closed on this replica"):
        committer.commit("s", 0, put(b"0"))
    assert dict(store.scan(b"")) == {}
