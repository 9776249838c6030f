"""Database of skipped batches: what a batch writes there, what a kill leaves, and what is removed again."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.changes import Mutations
from stateflow.errors import DiskFull
from stateflow.partition import held
from stateflow.partition.held import read
from stateflow.partition.layout import Position
from stateflow.partition.lifecycle import State
from stateflow.partition.positions import Batch
from stateflow.partition.sources import SkipGrant, SkippedBatches
from stateflow.storage import MemoryStore
from stateflow.types import PartitionId
from tests.unit.operators import Count


class Serves:
    """A double of a partition's processor, with its own positions of sources."""

    def __init__(self) -> None:
        self.sequence = 0
        self.own: dict[str, Position] = {}

    def runs(self, operator: type) -> bool:
        return True

    def contains(self, source: str) -> Position | None:
        return self.own.get(source)

    def settle(self, held: dict[str, Position]) -> None:
        self.own |= held
        self.sequence += 1


class Machine:
    """A double of an environment: one database in memory, which outlives its processes.

    ``fails``: the next write raises; it is ``lost``, or ``kept`` nevertheless. ``wrote``: bytes of each write.
    """

    def __init__(self) -> None:
        self.stored, self.fails = MemoryStore(), ""
        self.wrote: list[int] = []
        self.mutex, self.scan = threading.RLock, self.stored.scan

    def open(self, directory: Path, *, create: bool) -> Machine:
        directory.mkdir(exist_ok=True)
        (directory / "CURRENT").touch()
        return self

    def apply(self, mutations: Mutations, *, sync: bool) -> None:
        fails, self.fails = self.fails, ""
        if fails != "lost":
            self.stored.apply(mutations)
        if fails:
            raise DiskFull("no space", remedy="-")
        self.wrote.append(sum(len(key) + len(value) for key, value in mutations.puts))

    def sync(self, paths: Any) -> None: ...

    def close(self) -> None: ...


class Replica:
    """Partitions of one operator at epoch 1, which batches visit or skip, without databases of their own."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.machine = root, Machine()
        self.partitions = [self._partition(number) for number in range(count)]
        self.skipped_batches = self._process()

    @staticmethod
    def _partition(number: int) -> Any:
        lifecycle = SimpleNamespace(epoch=1, state=State.OWNED)
        return SimpleNamespace(
            id=PartitionId("Op", number), skipped=None, logs={}, lifecycle=lifecycle, processor=Serves()
        )

    def _process(self) -> SkippedBatches:
        found = SkippedBatches(self.root, self.machine, False)  # type: ignore[arg-type]
        found.find()
        return found

    def send(self, batch: int, visited: Collection[int], source: str = "s", among: Sequence[int] = ()) -> None:
        """Sends a batch, with rows for the partitions ``visited``. ``among``: partitions of this task; none: all."""
        visits = self.skip(batch, visited, source, among)
        for number in visits:
            self.visit(number, batch, source)

    def skip(self, batch: int, visited: Collection[int], source: str = "s", among: Sequence[int] = ()) -> list[int]:
        """Returns the partitions that the batch must visit."""
        numbers = among or range(len(self.partitions))
        epochs = [self.partitions[number].lifecycle.epoch for number in numbers]
        counts = [int(number in visited) for number in numbers]
        skips = set(self.skipped_batches.skip("Op", Count, Batch(source, batch), numbers, epochs, counts, 0.0, 0))
        return [number for place, number in enumerate(numbers) if place not in skips]

    def visit(self, number: int, batch: int, source: str = "s") -> None:
        local = self.partitions[number]
        processor = local.processor
        self.skipped_batches.revoke(local)
        held = self.skipped_batches.held(local, local.lifecycle.epoch, processor.sequence)
        processor.settle({**held, source: Position(batch)})
        self.skipped_batches.grant(local, processor, SkipGrant(processor, math.inf, math.inf, math.inf))

    def held(self) -> list[dict[str, Position]]:
        """Returns what this process holds for each partition."""
        return [
            self.skipped_batches.held(each, each.lifecycle.epoch, each.processor.sequence) for each in self.partitions
        ]

    def left(self) -> list[dict[str, Position]]:
        """Returns what the next process would find for each partition, if this one were killed now."""
        process = self._process()
        found = [process.found(each.id, each.lifecycle.epoch, each.processor.sequence) for each in self.partitions]
        return [{} if each is None else each.held for each in found]

    def kill(self, owned: Collection[int], quarantined: Collection[int] = ()) -> None:
        """Kills the process, and starts the next one, which owns some of the partitions."""
        self.skipped_batches = self._process()
        for each in self.partitions:
            each.skipped = None
            if each.id.partition in owned:
                each.skipped = self.skipped_batches.found(each.id, each.lifecycle.epoch, each.processor.sequence)
        self.skipped_batches.begin(lambda _operator: quarantined)

    def in_memory(self) -> dict[str, list[int]]:
        """Returns the partitions for which memory has a position, by source."""
        return {source: each.partitions() for (_, source), each in self.skipped_batches._sources.items()}

    def on_disk(self) -> dict[str, list[int]]:
        """Returns the partitions for which the database has a position, by source."""
        return {source: each.partitions() for (_, source), each in read(self.machine.scan(b"")).items()}


def test_a_batch_writes_no_more_where_it_skips_more_partitions(tmp_path: Path) -> None:
    def wrote(partitions: int) -> list[int]:
        (root := tmp_path / str(partitions)).mkdir()
        replica = Replica(root, partitions)
        replica.send(0, range(partitions))
        for batch in range(1, 121):
            replica.send(batch, {batch % 16, (batch + 5) % 16, (batch + 10) % 16})
        for batch in (121, 122):
            replica.send(batch, ())
        assert replica.left() == replica.held()
        return replica.machine.wrote

    few, many = wrote(16), wrote(512)
    assert len(few) == len(many) == 122
    assert sum(many[1:]) < 2 * sum(few[1:])
    assert many[-1] < 200, "it has one position for all of them"


@pytest.mark.parametrize("seed", range(12))
def test_a_kill_at_any_moment_leaves_what_was_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Batches come by changing tasks, writes fail, processes are killed: the database has what memory holds.

    After a write that failed, it may have more until the partitions have been visited.
    """
    chance, count = random.Random(seed), 10
    monkeypatch.setattr(held, "CHANGES_MIN", chance.choice([0, 300, 1 << 10]))
    replica = Replica(tmp_path, count)
    for batch in range(30):
        for source in ("s", "s1"):
            numbers = chance.sample(range(count), count)
            cut = chance.choice([0, 0, chance.randrange(count)])
            for task in filter(None, (sorted(numbers[:cut]), sorted(numbers[cut:]))):
                visited = [number for number in task if not batch or chance.random() < 0.3]
                fails = chance.random() < 0.1
                if fails:
                    replica.machine.fails = chance.choice(["lost", "kept"])
                try:
                    visits = replica.skip(batch, visited, source, task)
                except DiskFull:
                    visits = task
                replica.machine.fails = ""
                for number in visits:
                    assert fails or replica.left() == replica.held()
                    replica.visit(number, batch, source)
                assert replica.left() == replica.held()
        if chance.random() < 0.2:
            replica.skipped_batches.settle(chance.choice(replica.partitions), None, None)  # type: ignore[arg-type]
            assert replica.left() == replica.held()
        if chance.random() < 0.1:
            replica.machine.fails = chance.choice(["lost", "kept", ""])
            replica.skipped_batches.tidy()
            replica.machine.fails = ""
            assert replica.left() == replica.held()
        if chance.random() < 0.2:
            replica.kill(range(count))
            assert replica.left() == replica.held()
            assert replica.on_disk() == replica.in_memory()
    replica.skipped_batches.close()
    assert replica.on_disk() == replica.in_memory()


def test_a_source_that_ended_is_forgotten(tmp_path: Path) -> None:
    """Each query is another source: neither memory nor disk grows with their number."""
    replica = Replica(tmp_path, 4)
    for query in range(5):
        replica.send(0, range(4), f"query {query}")
        replica.send(1, {0}, f"query {query}")
        assert replica.in_memory() == replica.on_disk() == {f"query {query}": [1, 2, 3]}


def test_a_source_is_held_as_long_as_one_partition_has_not_retired_it(tmp_path: Path) -> None:
    replica = Replica(tmp_path, 3)
    replica.send(0, range(3))
    replica.send(1, ())
    for number, rest in ((1, [0, 2]), (0, [2])):
        replica.partitions[number].processor.sequence += 1
        replica.skipped_batches.committed(replica.partitions[number], replica.partitions[number].processor.sequence)
        assert replica.in_memory() == {"s": rest}
        assert replica.left() == replica.held()
    replica.skipped_batches.committed(replica.partitions[2], replica.partitions[2].processor.sequence)
    assert replica.in_memory() == {"s": [2]}, "without a commit it stays"


def test_a_drop_spares_a_later_deployment(tmp_path: Path) -> None:
    """The partitions of a later deployment may be skipped before the drop of the earlier one ends."""
    replica = Replica(tmp_path, 2)
    replica.partitions[1].lifecycle.epoch = 3
    replica.send(0, range(2))
    replica.send(1, ())
    replica.skipped_batches.drop("Op", 2)
    replica.skipped_batches.drop("Other", 9)
    assert replica.in_memory() == replica.on_disk() == {"s": [1]}


@pytest.mark.parametrize("killed", [False, True])
def test_one_of_several_partitions_that_leaves_is_forgotten(tmp_path: Path, killed: bool) -> None:
    replica = Replica(tmp_path, 3)
    replica.send(0, range(3))
    replica.send(1, ())
    left = replica.partitions[0]
    replica.skipped_batches.settle(left, None, None)  # type: ignore[arg-type]
    left.lifecycle.state = State.SEALED
    assert replica.in_memory() == {"s": [1, 2]}
    assert replica.on_disk() == {"s": [0, 1, 2]}, "the pause of a move has no other write"
    if killed:
        replica.kill(owned=[1, 2])
    else:
        replica.skipped_batches.tidy()
    assert replica.in_memory() == replica.on_disk() == {"s": [1, 2]}
    assert replica.left() == replica.held()


def test_a_start_keeps_what_is_owned_and_what_may_be_put_back(tmp_path: Path) -> None:
    replica = Replica(tmp_path, 4)
    replica.send(0, range(4))
    replica.send(1, ())
    before = replica.held()
    replica.partitions[3].processor.sequence += 1  # a commit that the process did not survive
    replica.kill(owned=[0, 3], quarantined=[1])
    assert replica.in_memory() == replica.on_disk() == {"s": [0, 1]}
    replica.kill(owned=[0, 1, 3])
    assert replica.held()[:2] == before[:2]


def test_a_failed_write_that_is_on_disk_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write may leave a whole entry in which positions have other places than in memory."""
    monkeypatch.setattr(held, "CHANGES_MIN", 0)
    replica, batch, rest = Replica(tmp_path, 20), 2, range(4, 20)
    replica.send(0, range(20))
    for task in ([0], [1, 2, 3], rest):
        replica.send(1, (), among=task)
    source = replica.skipped_batches._sources["Op", "s"]
    while source.changes_bytes + 230 <= source.whole_bytes:
        replica.send(batch, (), among=rest)
        source, batch = replica.skipped_batches._sources["Op", "s"], batch + 1
    for number in range(4):
        replica.visit(number, batch)
    replica.send(batch, (), among=rest)
    replica.machine.fails = "kept"
    with pytest.raises(DiskFull):
        replica.skip(batch + 1, (), among=[1, 2, 3])
    for number in range(4):
        replica.visit(number, batch + 1)
    replica.send(batch + 1, (), among=rest)
    assert replica.left() == replica.held()


def test_a_clean_shutdown_leaves_what_the_former_release_reads(tmp_path: Path) -> None:
    """The former release reads an entry under the name of each source, and knows no changes."""
    replica = Replica(tmp_path, 64)
    replica.send(0, range(64))
    for batch in range(1, 9):
        replica.send(batch, {batch})
    before = replica.left()
    assert before == replica.held()
    assert len(list(replica.machine.scan(b""))) > 1, "there were changes"
    assert [key.decode().partition("\0")[0] for key, _ in replica.machine.scan(b"")], "each key is text to it"
    replica.skipped_batches.close()
    assert [key for key, _ in replica.machine.scan(b"")] == [b"Op\0s"]
    assert replica.left() == before
