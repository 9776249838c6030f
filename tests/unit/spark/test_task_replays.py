"""Pieces of a batch DataFrame that a task applies at a replica: what an error leaves, and what another attempt does."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateflow import Context, Operator, state
from stateflow.clock import ManualClock
from stateflow.errors import BatchChanged, OperatorFailed
from stateflow.operator.operator import describe
from stateflow.partition.layout import Attempt
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.slices import BatchSlices, Part
from stateflow.partitioner import partition_of
from stateflow.router import Delivery
from stateflow.rpc.apply import BatchRows
from stateflow.settings import ReplicaSettings
from stateflow.spark import task as tasks
from stateflow.spark.task import HASH_COLUMN, PARTITION_COLUMN, OperatorTask, row_bytes
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import Told

PARTITIONS, ROWS, KEYS = 4, 100, 10
SETTINGS = ReplicaSettings(checkpoint_interval_s=0, block_cache_bytes=8 << 20, write_buffer_bytes=8 << 20)
POISON: set[int] = set()  # rows that the operator fails at


class Tally(Operator):
    """An operator that numbers the rows of each key."""

    key, output = "k", "k string, n long, v long"
    n = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[str, int, int]]:
        self.n.value += 1
        if row.v in POISON:
            raise ValueError("poison")
        yield row.k, self.n.value, row.v


SPEC = describe(Tally, PARTITIONS, "Op")
KEY_OF = [f"k{number * 7 % KEYS}" for number in range(ROWS)]
FRAME = pa.record_batch(
    {
        "k": pa.array(KEY_OF),
        "v": pa.array(range(ROWS), pa.int64()),
        PARTITION_COLUMN: pa.array([partition_of((key,), PARTITIONS) for key in KEY_OF], pa.int32()),
        HASH_COLUMN: pa.array(range(ROWS), pa.int64()),
    }
)
PIECE_ROWS = 8
PIECE_BYTES = PIECE_ROWS * int(row_bytes(FRAME)[0])
PIECES = -(-ROWS // PIECE_ROWS)


class Killed(Exception):
    """The end of a task's process."""


class Replica:
    """A replica in this process, in the place of the router.

    ``dies_at``: the piece and partition before which the task is killed; None: it lives.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.node = self._start()
        self.node.create(SPEC, range(PARTITIONS), 1)
        self.dies_at: tuple[int, int] | None = None
        self.attempts = 0

    def _start(self) -> ReplicaNode:
        return ReplicaNode(ReplicaInfo("a", "site", "a:1"), self._root / "a", SETTINGS)

    def restart(self) -> None:
        """Restarts the replica as after a kill, with its files as they were."""
        shutil.copytree(self._root / "a", self._root / "as-it-was")
        self.node.close()
        shutil.rmtree(self._root / "a")
        (self._root / "as-it-was").rename(self._root / "a")
        self.node = self._start()

    def deliver(self, batch: Batch, rows: BatchRows, after: Mapping[int, int] | None = None) -> Delivery:
        """Applies the rows partition after partition. Raises the first error, once every partition was tried."""
        outputs: dict[int, bytes] = {}
        errors: list[BaseException] = []
        for place, partition in enumerate(rows):
            if (batch.number, partition) == self.dies_at:
                raise Killed
            start = rows.ends[place - 1] if place else 0
            part = Part(partition, 1, start, rows.ends[place], None, rows.digests[place] if rows.digests else None)
            told = Told()
            self.node.batches.apply(BatchSlices("Op", batch, rows.schema, rows.rows, [part]), told)
            outcome = told.outcomes[0]
            if isinstance(outcome, BaseException):
                errors.append(outcome)
            else:
                assert isinstance(outcome, Applied)
                outputs[partition] = outcome.output
        if errors:
            raise errors[0]
        return Delivery(outputs, 0, 0, 0)

    def attempt(self, frame: pa.RecordBatch = FRAME, rows_at_a_time: int = ROWS) -> Iterator[tuple[str, int, int]]:
        """Yields the outputs of one attempt at the rows, as Spark gets them."""
        task = OperatorTask(
            *("c", "Op", SPEC.key, PARTITIONS, 1, SPEC.output_schema, (), None, "s", "run", 1.0),
            piece_bytes=PIECE_BYTES,
        )
        self.attempts += 1
        batch = Batch("batch:s", 0, attempt=Attempt("", task.run, str(self.attempts)))
        work = tasks.Work(task, None, batch, 0, ManualClock())
        handed = (frame.slice(start, rows_at_a_time) for start in range(0, ROWS, rows_at_a_time))
        for outputs in task._applied(batch, 0, handed, work, None):
            yield from (tuple(row.values()) for row in outputs.to_pylist())

    def states(self) -> dict[Any, Any]:
        """Returns the number of rows that each key has counted."""
        found = (self.node.reader.scan(PartitionId("Op", partition), "n") for partition in range(PARTITIONS))
        return {key: value for entries in found for key, _, value in entries}


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replica]:
    made = Replica(tmp_path)
    monkeypatch.setattr(OperatorTask, "router", lambda _: made)
    monkeypatch.setattr(tasks, "ended", lambda: True)
    yield made
    made.node.close()
    POISON.clear()


def expected() -> list[tuple[str, int, int]]:
    """Returns the outputs of a plain loop over the rows, in order of rows."""
    seen: Counter[str] = Counter()
    outputs = []
    for number, key in enumerate(KEY_OF):
        seen[key] += 1
        outputs.append((key, seen[key], number))
    return outputs


def in_order(outputs: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    return sorted(outputs, key=lambda each: each[2])


@pytest.mark.parametrize("restarts", [False, True], ids=["task", "task and replica"])
@pytest.mark.parametrize("dies_at", [(0, 2), (5, 0), (5, 2), (PIECES - 1, 3)])
def test_what_is_killed_between_two_pieces_or_within_one_is_applied_once(
    replica: Replica, dies_at: tuple[int, int], restarts: bool
) -> None:
    """The next attempt, with fewer rows at a time, gets the outputs of what was applied, and applies the rest."""
    replica.dies_at = dies_at
    given: list[tuple[str, int, int]] = []
    with pytest.raises(Killed):
        given.extend(replica.attempt())
    before = sum(replica.states().values())
    assert dies_at[0] * PIECE_ROWS <= before < ROWS
    if restarts:
        replica.restart()
    replica.dies_at = None
    outputs = list(replica.attempt(rows_at_a_time=3))
    assert in_order(outputs) == expected()
    assert replica.states() == Counter(KEY_OF)
    assert list(replica.attempt(rows_at_a_time=17)) == outputs, "another evaluation"
    assert replica.states() == Counter(KEY_OF)


def test_outputs_of_a_piece_are_given_before_the_next_one_is_applied(replica: Replica) -> None:
    applied = replica.attempt()
    for piece in range(3):
        given = list(islice(applied, PIECE_ROWS))
        assert {v // PIECE_ROWS for _, _, v in given} == {piece}
        assert sum(replica.states().values()) == (piece + 1) * PIECE_ROWS


@pytest.mark.parametrize("piece", [0, 1, 7, PIECES - 1])
def test_an_error_of_the_operator_leaves_the_pieces_before_and_the_next_run_goes_on(
    replica: Replica, piece: int
) -> None:
    """The pieces before the error stay applied. The failed piece counts nothing in the partition of the poison."""
    poison = piece * PIECE_ROWS + 2
    POISON.add(poison)
    given: list[tuple[str, int, int]] = []
    with pytest.raises(OperatorFailed, match=rf"poison.*piece={piece} pieces_applied={piece}"):
        given.extend(replica.attempt())
    assert in_order(given) == expected()[: piece * PIECE_ROWS]
    there, here = replica.states(), partition_of((KEY_OF[poison],), PARTITIONS)
    for key in KEY_OF:
        pieces = piece if partition_of((key,), PARTITIONS) == here else piece + 1
        assert there.get(key, 0) == KEY_OF[: pieces * PIECE_ROWS].count(key)
    POISON.clear()
    assert in_order(list(replica.attempt(rows_at_a_time=5))) == expected()
    assert replica.states() == Counter(KEY_OF)


def test_other_rows_under_a_number_that_is_applied_are_refused(replica: Replica) -> None:
    """Rows that differ from those applied are refused at their piece. Nothing of that piece is applied again."""
    replica.dies_at = 5, 0
    with pytest.raises(Killed):
        list(replica.attempt())
    before, replica.dies_at = replica.states(), None
    hashes = FRAME[HASH_COLUMN].to_pylist()
    hashes[3 * PIECE_ROWS] += 1_000
    other = FRAME.set_column(3, HASH_COLUMN, pa.array(hashes, pa.int64()))
    with pytest.raises(BatchChanged, match="piece=3 pieces_applied=3"):
        list(replica.attempt(other))
    assert replica.states() == before
    assert sum(before.values()) == 5 * PIECE_ROWS
