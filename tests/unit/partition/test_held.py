"""Held positions: what a batch changes of them, and what the database gives back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest

from stateflow.changes import Mutations
from stateflow.errors import DecodeError
from stateflow.partition import held, layout
from stateflow.partition.held import HeldPositions, name_of, read
from stateflow.partition.layout import Position
from stateflow.storage import MemoryStore

NAME = name_of("Op", "s")


def advance(
    found: HeldPositions, numbers: Sequence[int], batch: int, epoch: int = 1, sequence: int = 1
) -> tuple[list[int], list[int]]:
    """Makes partitions that are at one epoch and sequence hold the position of one batch. Returns what changes."""
    count = len(numbers)
    kinds, changed = found.advance(
        np.array(numbers),
        np.zeros(count, np.uint32),
        [Position(batch)],
        np.full(count, epoch, np.uint64),
        np.full(count, sequence, np.uint64),
    )
    return kinds, sorted(changed.tolist())


def batches(found: HeldPositions, partitions: int) -> list[int | None]:
    """Returns the batch that each partition has reached at epoch and sequence 1."""
    at = [found.at(number, 1, 1) for number in range(partitions)]
    return [None if position is None else position.batch for position in at]


def test_partitions_that_go_on_together_change_one_position() -> None:
    found = HeldPositions()
    assert advance(found, range(5), 1) == ([0], [0, 1, 2, 3, 4])
    assert advance(found, range(5), 2) == ([0], [])
    assert batches(found, 6) == [2] * 5 + [None]


def test_one_that_does_not_go_on_keeps_its_position() -> None:
    """A crash between the write and the visit must find the partition at the batch before."""
    found = HeldPositions()
    advance(found, range(5), 1)
    assert advance(found, [0, 1, 3, 4], 2) == ([0, 1], [2])
    assert batches(found, 5) == [2, 2, 1, 2, 2]
    found.discard([2])
    assert advance(found, [0, 1, 3], 3) == ([0, 1], [4]), "the index that partition 2 had is used again"
    assert batches(found, 5) == [3, 3, None, 3, 2]


def test_one_that_was_visited_shares_the_position_again() -> None:
    found = HeldPositions()
    advance(found, range(5), 1)
    advance(found, [0, 1, 3, 4], 2)
    found.discard([2])
    assert advance(found, range(5), 3, sequence=1)[1] == [2]
    assert batches(found, 5) == [3] * 5


def test_few_of_many_get_a_position_of_their_own() -> None:
    found = HeldPositions()
    advance(found, range(5), 1)
    assert advance(found, [3, 4], 2) == ([1], [3, 4])
    assert batches(found, 5) == [1, 1, 1, 2, 2]


def test_partitions_of_two_tasks_change_nothing_but_the_position_of_each() -> None:
    found = HeldPositions()
    for batch in (1, 2):
        advance(found, range(5), batch)
        advance(found, range(5, 10), batch)
    assert [advance(found, range(5), 3), advance(found, range(5, 10), 3)] == [([0], []), ([1], [])]
    assert batches(found, 10) == [3] * 10


def test_partitions_that_committed_meanwhile_change() -> None:
    found = HeldPositions()
    advance(found, range(3), 1)
    assert advance(found, range(3), 2, sequence=2) == ([1], [0, 1, 2])
    assert batches(found, 3) == [None] * 3
    assert found.at(0, 1, 2) == Position(2)


@pytest.mark.parametrize("changes_min", [0, 250, 1 << 10])
@pytest.mark.parametrize("seed", range(8))
def test_the_database_gives_back_what_is_held(monkeypatch: pytest.MonkeyPatch, seed: int, changes_min: int) -> None:
    """Each entry leaves the database with all that is held, in whichever order positions are held and discarded."""
    monkeypatch.setattr(held, "CHANGES_MIN", changes_min)
    chance, store, partitions = random.Random(seed), MemoryStore(), 12
    names = [("Op", "s"), ("Op", "s1"), ("Op1", "s")]
    found = {name: HeldPositions() for name in names}
    expected: dict[Any, dict[int, tuple[int, int, Position]]] = {name: {} for name in names}
    for batch in range(60):
        name = chance.choice(names)
        each, mine = found[name], expected[name]
        gone = [number for number in range(partitions) if chance.random() < 0.2]
        each.discard(gone)
        for number in gone:
            mine.pop(number, None)
        numbers = [number for number in range(partitions) if chance.random() < 0.7] or [0]
        positions = [Position(batch, watermark_us=kind) for kind in range(chance.randint(1, 3))]
        kinds = [chance.randrange(len(positions)) for _ in numbers]
        at = [mine[number][:2] if number in mine and chance.random() < 0.7 else (1, batch + 1) for number in numbers]
        changed = each.advance(
            np.array(numbers),
            np.array(kinds, np.uint32),
            positions,
            np.array([epoch for epoch, _ in at], np.uint64),
            np.array([sequence for _, sequence in at], np.uint64),
        )
        mine |= {number: (*here, positions[kind]) for number, kind, here in zip(numbers, kinds, at, strict=True)}
        mutations = Mutations()
        each.store(name_of(*name), *changed, mutations)
        store.apply(mutations)
        for other, stored in read(store.scan(b"")).items():
            assert stored.partitions() == sorted(expected[other])
            assert stored.count == found[other].count == len(expected[other])
            for number, (epoch, sequence, position) in expected[other].items():
                assert stored.at(number, epoch, sequence) == position


def test_what_earlier_builds_wrote_is_read() -> None:
    """Earlier builds wrote whole entries only."""
    arrays = np.array([0, 0, 1], np.uint32), np.array([1, 0, 2], np.uint64), np.array([5, 0, 6], np.uint64)
    positions = [Position(3), Position(4)]
    entry = msgpack.packb([layout.VERSION, [each.encode() for each in positions], *(each.tobytes() for each in arrays)])
    (found,) = read([(b"Op\0query:1\0more", entry)]).items()
    assert found[0] == ("Op", "query:1\0more")
    assert [found[1].at(0, 1, 5), found[1].at(1, 1, 5), found[1].at(2, 2, 6)] == [Position(3), None, Position(4)]
    assert found[1].partitions() == [0, 2]
    assert found[1].partitions(up_to_epoch=1) == [0]


def entries() -> dict[bytes, bytes]:
    """Returns the entries of a source with a change."""
    store, found = MemoryStore(), HeldPositions()
    for batch in range(2):
        mutations = Mutations()
        found.store(NAME, *found.advance(*_of(batch)), mutations)
        store.apply(mutations)
    return dict(store.scan(b""))


def _of(batch: int) -> Any:
    return (
        np.arange(3),
        np.zeros(3, np.uint32),
        [Position(batch)],
        np.ones(3, np.uint64),
        np.full(3, batch + 1, np.uint64),
    )


def test_entries_that_do_not_fit_are_refused() -> None:
    change = next(key for key in entries() if key != NAME)
    assert len(entries()) == 2
    for key, value in ((change, b"\x90"), (change, entries()[NAME]), (NAME, b"\x90"), (NAME, b"")):
        with pytest.raises(DecodeError):
            read(sorted((entries() | {key: value}).items()))
    with pytest.raises(DecodeError, match="lack the entry that they change"):
        read([(change, entries()[change])])
