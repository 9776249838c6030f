"""The recovery cut: what was counted before a checkpoint is not counted again, what came after it is counted once.

A consumer reads timed records in batches, counts them per key in a partition on RocksDB, checkpoints now and then and
delivers the outputs. The tests crash it before and after every step, with or without its disk, and restart it until it
has read everything. With a commit log they also cut its power: what was not synced since its database was opened is
gone, and a write to the log in progress is torn.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow import Context, Operator, state
from stateflow.changes import Mutations
from stateflow.errors import StateDamaged
from stateflow.operator.output import OutputReader
from stateflow.partition.environment import Environment
from stateflow.partition.layout import COMMITS_FOLDER, Commits, read_sequence
from stateflow.partition.positions import Batch
from stateflow.partition.processor import PartitionProcessor
from stateflow.settings import ReplicaSettings
from stateflow.storage import PartitionStore, RocksEngine
from stateflow.storage.commit_log import DirectorySegments
from stateflow.types import PartitionId

ID = PartitionId("Counted", 0)


class Counted(Operator):
    key = "k"
    output = "k string, at long, n long"

    n = state.counter()
    seen = state.list(int)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        self.n.value += 1
        self.seen.append(row.at)
        ctx.set_timer(row.at + 15, name=str(row.at))
        yield row.k, row.at, self.n.value

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[Any, ...]]:
        yield ctx.key, -int(timer.name), self.n.value


class Crash(BaseException):
    """Ends the process: nothing after it happens."""


class Steps:
    """Counts the consumer's steps, and crashes at one of them."""

    def __init__(self, crash_at: int | None) -> None:
        self._crash_at = crash_at
        self.taken = 0

    def step(self) -> None:
        self.taken += 1
        if self.taken == self._crash_at:
            raise Crash


class Crashing:
    """A store whose process may crash right before and right after each write."""

    def __init__(self, store: PartitionStore, steps: Steps) -> None:
        self._store, self._steps = store, steps
        self.get, self.scan, self.scan_from = store.get, store.scan, store.scan_from

    def apply(self, mutations: Mutations, *, sync: bool = False) -> None:
        self._steps.step()
        self._store.apply(mutations, sync=sync)
        self._steps.step()

    def snapshot(self, directory: Path) -> None: ...
    def sync(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Segments(DirectorySegments):
    """Segments of a commit log whose process may crash before, within and after each write."""

    def __init__(self, directory: Path, steps: Steps) -> None:
        super().__init__(directory)
        self._steps = steps

    def append(self, data: bytes, *, sync: bool = True) -> None:
        self._steps.step()
        try:
            self._steps.step()
        except Crash:
            super().append(data[: len(data) // 2])
            raise
        super().append(data, sync=sync)
        self._steps.step()


class Machine(Environment):
    def __init__(self, steps: Steps) -> None:
        super().__init__(SETTINGS)
        self._steps = steps

    def segments(self, directory: Path) -> Segments:
        return Segments(directory, self._steps)


SETTINGS = ReplicaSettings(acknowledge="fsync", block_cache_bytes=8 << 20, write_buffer_bytes=8 << 20)


def no_loss(partition: PartitionId, why: StateDamaged) -> None:
    raise AssertionError(f"{partition}: {why}")


#: batches of (time, key), and where a checkpoint is taken
SCRIPT: list[Any] = [
    [(90, "a"), (95, "b")],
    "checkpoint",
    [(110, "a")],
    [(111, "a"), (112, "b")],
    "checkpoint",
    [(130, "a")],
]


class Consumer:
    """A consumer, and all that is durable.

    That is the source, the disk (``live``, and the commit log where there is one), the checkpoints, and what was
    delivered downstream.
    """

    def __init__(self, root: Path, logged: bool = False) -> None:
        self.root, self.logged = root, logged
        root.mkdir(exist_ok=True)
        self.delivered: dict[int, list[dict[str, Any]]] = {}

    def run(self, steps: Steps) -> None:
        """Runs from the partition's position to the end of the script. Raises Crash."""
        live = self.root / "live"
        checkpoints = sorted(self.root.glob("checkpoint-*"))
        if not live.exists() and checkpoints:
            shutil.copytree(checkpoints[-1], live)
        commits = self._completed(live, steps) if self.logged else None
        store = RocksEngine(8 << 20, 8 << 20).open(live, create=not live.exists())
        shutil.rmtree(self.root / "synced", ignore_errors=True)
        shutil.copytree(live, self.root / "synced")
        try:
            processor = PartitionProcessor(
                Counted, ID, Crashing(store, steps), 1, log=None if commits is None else commits.log
            )
            reached = processor.reached("s")
            done = None if reached is None else reached.batch
            batch = -1
            for entry in SCRIPT:
                if entry == "checkpoint":
                    if batch > (-1 if done is None else done) or not checkpoints:
                        self._checkpoint(store, batch, steps)
                    continue
                batch += 1
                if done is not None and batch < done:
                    continue  # the newest batch is sent again, as its delivery is uncertain
                rows = pa.RecordBatch.from_pylist([{"k": key, "at": at} for at, key in entry])
                sent = Batch("s", batch, watermark_us=entry[-1][0])
                applied = processor.apply(sent, rows.schema.serialize().to_pybytes(), rows.serialize().to_pybytes(), 0)
                steps.step()
                out, _ = OutputReader(pa.schema(rows_schema()), {}).rows([applied.output])
                self.delivered[batch] = out  # idempotent by batch number, as Spark's sinks are
                steps.step()
        finally:
            store.close()
            if commits is not None:
                commits.close()

    def _completed(self, live: Path, steps: Steps) -> Commits:
        """Completes the database from the commit log, as a replica does when it starts."""
        commits = Commits(self.root, SETTINGS, Machine(steps), lambda _: live, no_loss)
        commits.find()
        if live.exists():
            store = RocksEngine(8 << 20, 8 << 20).open_read_only(live)
            sequence = read_sequence(store)
            store.close()
            commits.complete(ID, live, commits.lacking(ID, live, 1, sequence), up_to_damage=False)
        commits.begin()
        return commits

    def _checkpoint(self, store: PartitionStore, batch: int, steps: Steps) -> None:
        steps.step()
        target = self.root / f"checkpoint-{batch}"
        if not target.exists():
            store.snapshot(target)
        steps.step()

    def lose_the_disk(self) -> None:
        shutil.rmtree(self.root / "live", ignore_errors=True)
        shutil.rmtree(self.root / COMMITS_FOLDER, ignore_errors=True)

    def lose_power(self) -> None:
        if (self.root / "synced").exists():
            shutil.rmtree(self.root / "live")
            shutil.copytree(self.root / "synced", self.root / "live")

    def result(self) -> tuple[dict[int, list[dict[str, Any]]], dict[str, tuple[int, list[int]]]]:
        store = RocksEngine(8 << 20, 8 << 20).open(self.root / "live")
        processor = PartitionProcessor(Counted, ID, store, 1)
        states = {key: processor.state.peek(key) for key in "ab"}
        found = {key: (each.n.value, list(each.seen)) for key, each in states.items()}
        store.close()
        return self.delivered, found


def rows_schema() -> list[tuple[str, pa.DataType]]:
    return [("k", pa.string()), ("at", pa.int64()), ("n", pa.int64())]


def uninterrupted(root: Path, logged: bool = False) -> tuple[Any, int]:
    consumer, steps = Consumer(root, logged), Steps(None)
    consumer.run(steps)
    return consumer.result(), steps.taken


def test_the_cut_itself(tmp_path: Path) -> None:
    """Records at 90 and 110, a checkpoint at 100, a crash, a replay from there: 110 counts once."""
    consumer = Consumer(tmp_path)
    with pytest.raises(Crash):
        consumer.run(Steps(10))  # the batch with 110 is committed and delivered
    assert [row["at"] for row in consumer.delivered[1]] == [110, -90, -95]
    consumer.lose_the_disk()
    consumer.run(Steps(None))
    _, found = consumer.result()
    assert found == {"a": (4, [90, 110, 111, 130]), "b": (2, [95, 112])}


@pytest.mark.parametrize(
    ("disk", "logged"), [("kept", False), ("lost", False), ("kept", True), ("lost", True), ("power", True)]
)
def test_a_crash_at_every_step(tmp_path: Path, disk: str, logged: bool) -> None:
    wanted, steps = uninterrupted(tmp_path / "reference", logged)
    assert steps >= 4 * (4 + 3 * logged) + 2 * 2
    fired = Counter(row["at"] for out in wanted[0].values() for row in out)
    assert set(fired.values()) == {1}
    for crash_at in range(1, steps + 1):
        consumer = Consumer(tmp_path / f"crash-{crash_at}", logged)
        with pytest.raises(Crash):
            consumer.run(Steps(crash_at))
        if disk == "lost":
            consumer.lose_the_disk()
        elif disk == "power":
            consumer.lose_power()
        consumer.run(Steps(None))
        assert consumer.result() == wanted, f"crashed at step {crash_at}"


@pytest.mark.parametrize("logged", [False, True])
@pytest.mark.thorough
def test_crashes_at_two_steps(tmp_path: Path, logged: bool) -> None:
    wanted, steps = uninterrupted(tmp_path / "reference", logged)
    for first, second in itertools.product(range(1, steps + 1, 3), range(1, steps + 1, 4)):
        consumer = Consumer(tmp_path / f"crash-{first}-{second}", logged)
        for crash_at in (first, second):
            try:
                consumer.run(Steps(crash_at))
            except Crash:
                if crash_at % 2:
                    consumer.lose_power() if logged else consumer.lose_the_disk()
        consumer.run(Steps(None))
        assert consumer.result() == wanted, f"crashed at steps {first} and {second}"
