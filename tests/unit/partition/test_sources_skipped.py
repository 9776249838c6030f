"""Skipped batches: without rows for a partition, they do not visit it.

Covers what is known of them, which of them visit all the same, and what a move takes along.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from stateflow import BatchOperator, Context, Operator, state
from stateflow.changes import Mutations
from stateflow.checkpoint import CheckpointStore
from stateflow.errors import DiskFull, OperatorFailed, PositionGap, StaleBatch
from stateflow.operator.arrow import read_batch
from stateflow.operator.operator import describe, output_schema
from stateflow.partition import sources
from stateflow.partition.layout import Attempt, Position, Session
from stateflow.partition.positions import INITIAL, Batch
from stateflow.partition.processor import SWEPT_MIN, Applied
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.slices import Frame
from stateflow.partition.sources import FOLDER, SkippedBatches
from stateflow.partitioner import partition_of
from stateflow.settings import ReplicaSettings
from stateflow.state.cells import CELL
from stateflow.storage import RocksEngine
from stateflow.types import PartitionId, ReplicaInfo
from tests.applying import apply_to
from tests.unit.operators import Count
from tests.unit.partition.test_replica import SCHEMA, P, Two

NONE = pa.record_batch([[], []], schema=SCHEMA)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def frame(number: int, epoch: int = 1, **batch: Any) -> Frame:
    """Makes a frame for partition 0, without rows."""
    return Frame("Op", Batch("s", number, **batch), SCHEMA.serialize().to_pybytes(), [0], [epoch], [0], [], [], b"")


def skipped_batches(node: ReplicaNode, number: int, epoch: int = 1, **batch: Any) -> bool:
    """Tells whether partition 0 skips a batch, as a replica finds out before it sends the batch there."""
    return node.batches.skip(frame(number, epoch, **batch)) == [0]


def visit(node: ReplicaNode, number: int, epoch: int = 1, **batch: Any) -> Any:
    return apply_to(node, P, epoch, Batch("s", number, **batch), SCHEMA.serialize().to_pybytes(), b"")


def last(node: ReplicaNode) -> int | None:
    found = node.reader.position(P, "s")
    return None if found is None else found.batch


def passed(two: Two, count: int = 3) -> None:
    """Sends batch 0 with rows, and ``count`` skipped batches after it."""
    two.send(two.a, 1)
    for _ in range(count):
        assert skipped_batches(two.a, two.sent)
        two.sent += 1


# -- what a partition knows of skipped batches --------------------------------------------------------------


def test_batches_pass_without_a_commit_and_are_known(two: Two) -> None:
    passed(two)
    assert two.a.sequence(P) == 1
    assert last(two.a) == 3
    assert two.a.reader.whole_before("Op", [0], "s", 4) == Position(3)
    assert [(view.source, view.batch) for view in two.a.reader.sources(P)] == [("s", 3)]
    assert two.send(two.a, 5).rows == 1, "the next one fits"
    assert (two.a.sequence(P), last(two.a)) == (2, 4)
    assert two.states(two.a) == {"k1": 1, "k2": 5}


def test_a_partition_that_a_caller_asks_for_is_not_remembered(two: Two) -> None:
    known = list(two.a._registry.local_partitions())
    assert two.a.reader.whole_before("Other", [0], "s", 1) is None
    assert list(two.a._registry.local_partitions()) == known


def test_a_gap_is_noticed(two: Two) -> None:
    passed(two)
    assert not skipped_batches(two.a, 5)
    with pytest.raises(PositionGap, match="the state expects batch 4"):
        visit(two.a, 5)
    with pytest.raises(StaleBatch):
        visit(two.a, 1)


def test_a_batch_that_passed_and_comes_again_gives_nothing(two: Two) -> None:
    """A skipped batch that comes again gives no output, not even the stored one of the batch before."""
    output = two.send(two.a, 1).output
    assert output
    assert skipped_batches(two.a, 1)
    assert not skipped_batches(two.a, 1), "once"
    assert visit(two.a, 1) == Applied(b"", True, 0)
    assert skipped_batches(two.a, 2)
    assert visit(two.a, 2) == Applied(b"", True, 0)
    two.restart("a")
    assert visit(two.a, 2) == Applied(b"", True, 0)
    assert last(two.a) == 2


def test_rows_that_come_for_a_batch_that_passed_are_applied(two: Two) -> None:
    """Rows of a repeated attempt are applied, though the partition skipped the batch.

    The first attempt failed elsewhere.
    """
    passed(two, 1)
    assert two.send(two.a, 4, number=1).rows == 1
    assert two.states(two.a) == {"k1": 5}
    assert two.send(two.a, 4, number=1).replayed
    two.restart("a")
    assert two.send(two.a, 4, number=1).replayed
    assert two.states(two.a) == {"k1": 5}


def test_a_position_is_that_of_a_visit(two: Two) -> None:
    """A skipped batch leaves the position that a visit would leave, except for its time."""
    attempts = [Attempt("run", "use", str(task)) for task in range(3)]
    two.send(two.a, 1)
    visit(two.a, 1, watermark_us=1)
    said: dict[str, Any] = {"watermark_us": 5, "event_us": 9}
    assert skipped_batches(two.a, 2, attempt=attempts[0], **said)
    assert skipped_batches(two.a, 3, attempt=attempts[1], event_us=4)
    held = two.a.reader.position(P, "s")
    visit(two.a, 4, attempt=attempts[2])  # the skipped batches are committed with this visit
    assert held is not None
    assert held._replace(at_us=0) == Position(3, 5, 0, attempts[1], 9, 9)
    found = two.a.reader.position(P, "s")
    assert found is not None
    assert found._replace(at_us=0) == Position(4, 5, 0, attempts[2], 9, 9)


# -- kills --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2])
def test_it_outlives_a_kill(two: Two, times: int) -> None:
    passed(two)
    for _ in range(times):
        two.restart("a")
    assert last(two.a) == 3
    assert not skipped_batches(two.a, 4), "a visit says first what is due"
    assert not two.send(two.a, 5).replayed
    assert skipped_batches(two.a, 5)


def test_a_replica_that_stops_leaves_it_to_the_partition(two: Two) -> None:
    passed(two)
    two.a.close()
    (two.root / "a" / FOLDER).rename(two.root / "elsewhere")
    assert last(two.start("a")) == 3


def test_what_a_loss_of_power_took_the_commit_of_is_void(two: Two, tmp_path: Path) -> None:
    two.send(two.a, 1)
    found = SkippedBatches(two.root / "a", two.a._registry.environment, False)
    assert found.found(P, 1, 1) is None
    two.send(two.a, 2)
    assert skipped_batches(two.a, 2)
    two.a._registry.skipped_batches.close()
    found.find()
    assert found.found(P, 1, 2) is not None
    assert found.found(P, 1, 1) is None, "the partition has lost a commit"
    assert found.found(P, 2, 2) is None, "it was elsewhere meanwhile"
    found.close()


def test_what_is_void_at_a_start_stays_so(two: Two) -> None:
    """A void record stays void after a restart.

    After the loss another source commits under the number that was lost, and the process is killed.
    """
    two.send(two.a, 1)
    shutil.copytree(two.root / "a" / "operators", two.root / "before")
    two.send(two.a, 2)
    assert skipped_batches(two.a, 2)
    two.a._registry.skipped_batches.close()
    shutil.copytree(two.root / "a" / FOLDER, two.root / "held")
    two.a.close()
    for name, kept in (("operators", "before"), (FOLDER, "held")):
        shutil.rmtree(two.root / "a" / name)
        (two.root / kept).rename(two.root / "a" / name)
    assert last(two.start("a")) == 0
    rows = pa.record_batch([["k1"], [5]], schema=SCHEMA)
    apply_to(two.a, P, 1, Batch("other", 0), SCHEMA.serialize().to_pybytes(), rows.serialize().to_pybytes())
    assert two.a.sequence(P) == 2
    assert last(two.restart("a")) == 0
    with pytest.raises(PositionGap, match="the state expects batch 1"):
        visit(two.a, 3)


def damage_manifest(folder: Path) -> None:
    (folder / "CURRENT").write_text("MANIFEST-none\n")


def damage_current(folder: Path) -> None:
    (folder / "CURRENT").unlink()


def damage_block(folder: Path) -> None:
    for table in folder.glob("*.sst"):
        data = bytearray(table.read_bytes())
        data[8:16] = bytes(8)
        table.write_bytes(data)


def damage_name(folder: Path) -> None:
    store = RocksEngine(1 << 20, 1 << 20).open(folder)
    store.apply(Mutations(puts=[(b"Op\0\xff", b"-")]))
    store.close()


@pytest.mark.parametrize("damage", [damage_manifest, damage_current, damage_block, damage_name])
def test_what_cannot_be_read_is_put_aside_and_said(
    two: Two, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    passed(two)
    store = two.a._registry.skipped_batches._store
    assert store is not None
    store.flush()
    two.a._registry.skipped_batches.close()
    damage(two.root / "a" / FOLDER)
    with caplog.at_level(logging.ERROR):
        two.restart("a")
    assert "are quarantined as" in caplog.text
    assert list((two.root / "a").glob(f"{FOLDER}-damaged-*"))
    with pytest.raises(PositionGap, match="the state expects batch 1"):
        visit(two.a, 4)
    visit(two.a, 1)
    assert skipped_batches(two.a, 2), "it begins anew"


def test_where_it_cannot_be_written_every_partition_is_visited(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    passed(two, 1)

    def refuses(*_: object, **__: object) -> None:
        raise DiskFull("no space", remedy="-")

    monkeypatch.setattr(two.a._registry.skipped_batches._store, "apply", refuses)
    assert not skipped_batches(two.a, 2)
    assert last(two.a) == 1
    assert visit(two.a, 2) == Applied(b"", False, 0)
    monkeypatch.undo()
    assert skipped_batches(two.a, 3)


# -- what a move takes along --------------------------------------------------------------------------------


def test_a_move_takes_it_along(two: Two) -> None:
    passed(two)
    two.move(two.a, two.b, "m1", 1)
    assert last(two.b) == 3
    assert not visit(two.b, 4, 2).replayed
    assert skipped_batches(two.b, 5, 2)
    assert not skipped_batches(two.a, 4), "it is here no more"
    two.move(two.b, two.a, "m2", 2)
    assert last(two.a) == 5


def test_a_partition_that_is_followed_is_visited(two: Two) -> None:
    passed(two)
    base = two.warm(two.a, two.b, "m1")
    assert (base.sequence, two.a.sequence(P)) == (2, 2), "what passed is in it"
    assert not skipped_batches(two.a, 4)
    visit(two.a, 4)
    assert not skipped_batches(two.a, 5)


def test_a_cold_move_takes_it_along(two: Two) -> None:
    passed(two)
    assert two.a.sender.fence(P, "m1", 2, two.b.info, cold=True) is True
    assert two.a._registry.local(P).skipped is None
    base = two.warm(two.a, two.b, "m1")
    assert base.sequence == 2


def test_an_owner_that_is_superseded_keeps_it(two: Two) -> None:
    passed(two)
    assert two.a.successor.supersede(P, 2, two.b.info)
    two.a.successor.from_local(P, "t1", 3)
    assert last(two.a) == 3


def test_a_checkpoint_has_it(two: Two, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    passed(two)
    saved = two.a.checkpointer.take(P, store)
    assert saved is not None
    assert saved.manifest.positions == {"s": 3}
    visit(two.a, 4)
    assert two.a.checkpointer.take(P, store, on_demand=False) is not None
    assert two.a.checkpointer.take(P, store, on_demand=False) is None, "nothing has changed"
    visit(two.a, 5)
    assert two.a.checkpointer.take(P, store, on_demand=False) is not None
    visit(two.a, 6)
    two.a.checkpointer.take(P, store, on_demand=False)


def test_a_partition_that_was_only_passed_is_checkpointed_again(two: Two, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "checkpoints"))
    passed(two)
    two.a.checkpointer.take(P, store)
    visit(two.a, 4)
    two.a.checkpointer.take(P, store)
    assert not skipped_batches(two.a, 5), "a checkpoint has it visited"
    visit(two.a, 5)
    two.a.checkpointer.take(P, store)
    visit(two.a, 6)
    assert skipped_batches(two.a, 7)
    saved = two.a.checkpointer.take(P, store, on_demand=False)
    assert saved is not None
    assert saved.manifest.positions == {"s": 7}


# -- what is forgotten --------------------------------------------------------------------------------------


def stored(node: ReplicaNode) -> list[object]:
    """Returns everything that a replica keeps of skipped batches, in memory and on disk."""
    found = node._registry.skipped_batches
    return [*found._sources, *(key for key, _ in found._open().scan(b""))]


def test_a_source_that_is_retired_is_forgotten(two: Two) -> None:
    passed(two)
    assert stored(two.a)
    assert two.a.batches.retire_source(P, "s")
    assert stored(two.a) == []
    assert stored(two.restart("a")) == []


def test_an_operator_that_is_dropped_is_forgotten(two: Two) -> None:
    passed(two)
    assert two.a.drop("Op", 1) == 1
    assert stored(two.a) == []
    assert two.a._registry.skipped_batches._granted == {}
    assert stored(two.restart("a")) == []


def test_a_kill_before_the_last_step_of_a_drop(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    passed(two)
    monkeypatch.setattr(SkippedBatches, "drop", lambda *_: None)
    two.a.drop("Op", 1)
    assert stored(two.a)
    assert stored(two.restart("a")) == []


def test_a_partition_that_moves_away_is_forgotten(two: Two) -> None:
    passed(two)
    two.move(two.a, two.b, "m1", 1)
    assert last(two.b) == 3
    assert stored(two.a) == []
    assert stored(two.restart("a")) == []


def test_a_partition_in_quarantine_is_not_forgotten(two: Two) -> None:
    """The quarantined copy may be put back, and then has what it had before."""
    passed(two)
    current = next((two.root / "a" / "operators" / "Op" / "p00000").glob("*/CURRENT"))
    whole = current.read_text()
    current.write_text("MANIFEST-none\n")
    two.restart("a")
    (kept,) = (two.root / "a" / "evidence" / "Op" / "p00000").iterdir()
    assert stored(two.a)
    (kept / "CURRENT").write_text(whole)
    kept.rename(current.parent)
    assert last(two.restart("a")) == 3


# -- batches that may not skip ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        Batch("s", 1, sparse=True),
        Batch("s", 1, rewind=True),
        Batch("s", 1, session=Session(1, "me")),
        Batch(INITIAL, 1),
        Batch("batch:run", 1),
        Batch("another", 0),
    ],
    ids=["sparse", "rewind", "session", "initial", "batch DataFrame", "unknown"],
)
def test_only_dense_sources_that_are_known_pass(two: Two, batch: Batch) -> None:
    two.send(two.a, 1)
    visit(two.a, 1)
    assert two.a.batches.skip(frame(2)._replace(batch=batch)) == []


def test_none_passes_at_another_epoch_nor_without_a_lease(two: Two) -> None:
    passed(two)
    assert not skipped_batches(two.a, 4, epoch=2)
    two.a.lease.until = -math.inf
    assert not skipped_batches(two.a, 4)
    assert last(two.a) == 3


def test_none_passes_while_requests_are_held(two: Two) -> None:
    passed(two)
    two.a.batches.hold("Op", 5)
    assert not skipped_batches(two.a, 4)
    two.a.batches.hold("Op", 0)
    assert skipped_batches(two.a, 4)


def test_a_partition_is_visited_now_and_then(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "VISIT_S_MAX", 0.0)
    two.send(two.a, 1)
    assert not skipped_batches(two.a, 1)
    times = {sources.until(PartitionId("Op", number), 0.0) for number in range(100)}
    assert times == {0.0}
    monkeypatch.undo()
    times = {sources.until(PartitionId("Op", number), 0.0) for number in range(100)}
    assert len(times) == 100
    assert min(times) >= sources.VISIT_S_MAX / 2
    assert max(times) <= sources.VISIT_S_MAX


def test_a_client_that_takes_another_source_over_keeps_what_passed(two: Two) -> None:
    passed(two)
    two.a.batches.open_source([P], "other", Session(5, "me"))
    assert last(two.a) == 3
    two.restart("a")
    assert last(two.a) == 3


def test_a_source_that_is_retired_stays_so(two: Two) -> None:
    passed(two)
    assert two.a.batches.retire_source(P, "s")
    two.restart("a")
    (view,) = two.a.reader.sources(P)
    assert (view.retired, view.batch) == (True, 3)
    assert not skipped_batches(two.a, 4), "one that comes back is visited"
    assert not visit(two.a, 4).replayed
    assert skipped_batches(two.a, 5)


class Timed(Operator):
    """An operator with a timer in each domain."""

    key, output = "k", "k string, at long"
    seen = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> None:
        self.seen.value += 1
        if row.v > 0:
            ctx.set_timer(row.v, name="event")
        if row.v < 0:
            ctx.set_timer(-row.v, name="processing", domain="processing")

    def on_timer(self, timer: Any, ctx: Context) -> Iterator[tuple[str, int]]:
        yield timer.key, int(timer.at.timestamp() * 1e6)


class Hears(Count):
    """An operator that outputs the watermark."""

    def on_watermark(self, watermark: Any, ctx: Context) -> Iterator[tuple[str, int, int]]:
        yield "", int(watermark.timestamp() * 1e6), 0


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path, Timed)
    yield made
    made.close()


def test_a_timer_that_is_due_has_its_partition_visited(timed: Two) -> None:
    node = timed.a
    timed.send(node, 100, number=0)
    visit(node, 1, watermark_us=10)
    assert skipped_batches(node, 2, watermark_us=99)
    assert not skipped_batches(node, 3, watermark_us=100)
    assert visit(node, 3, watermark_us=100).output
    assert skipped_batches(node, 4, watermark_us=1000)


def test_a_timer_that_was_set_last_counts(timed: Two) -> None:
    node = timed.a
    timed.send(node, 500, number=0)
    visit(node, 1, watermark_us=10)
    timed.send(node, 50, number=2)
    assert skipped_batches(node, 3, watermark_us=49)
    assert not skipped_batches(node, 4, watermark_us=50)


def test_where_nobody_has_looked_for_timers_a_watermark_visits(timed: Two) -> None:
    node = timed.a
    timed.send(node, 100, number=0)
    assert skipped_batches(node, 1)
    assert not skipped_batches(node, 2, watermark_us=5)


def test_what_fired_in_a_batch_that_failed_is_still_due(timed: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    node = timed.a
    timed.send(node, 100, number=0)
    visit(node, 1, watermark_us=10)

    def fails(self: Timed, *_: object) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(Timed, "on_timer", fails)
    with pytest.raises(Exception, match="operator_failed"):
        visit(node, 2, watermark_us=100)
    assert not skipped_batches(node, 2, watermark_us=100)
    monkeypatch.undo()
    assert visit(node, 2, watermark_us=100).output


def test_timers_of_processing_time(timed: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    node, now_us = timed.a, [1_000]
    monkeypatch.setattr(node.batches, "_clock", SimpleNamespace(monotonic=lambda: 0.0, now_us=lambda: now_us[0]))
    timed.send(node, -2_000, number=0)
    now_us[0] = 1_999
    assert skipped_batches(node, 1)
    now_us[0] = 2_000
    assert not skipped_batches(node, 2)
    assert visit(node, 2).output
    assert skipped_batches(node, 3)


def test_an_operator_that_hears_watermarks_is_told_of_each(tmp_path: Path) -> None:
    two = Two(tmp_path, Hears)
    node = two.a
    two.send(node, 1, number=0)
    assert skipped_batches(node, 1), "there is none yet"
    assert not skipped_batches(node, 2, watermark_us=5)
    assert visit(node, 2, watermark_us=5).output
    assert skipped_batches(node, 3, watermark_us=5)
    assert skipped_batches(node, 4)
    assert not skipped_batches(node, 5, watermark_us=6)
    two.close()


def test_a_watermark_that_passed_is_the_partitions(timed: Two) -> None:
    node = timed.a
    timed.send(node, 100, number=0)
    visit(node, 1, watermark_us=10)
    assert skipped_batches(node, 2, watermark_us=70)
    processor = node._registry.local(P).processor
    assert processor is not None
    assert (
        processor.watermark_us(node._registry.skipped_batches.held(node._registry.local(P), 1, processor.sequence))
        == 70
    )
    timed.restart("a")
    assert timed.send(timed.a, 60, number=3).output, "a timer for a time that it has passed is due"


class Reads(Operator):
    """An operator whose rows see the watermark, and that does not hear of it."""

    key, output = "k", "k string, at long"
    seen = state.value(int, default=0)

    def process(self, row: Any, ctx: Context) -> Iterator[tuple[str, int | None]]:
        self.seen.value += 1
        yield row.k, None if ctx.watermark is None else round(ctx.watermark.timestamp() * 1e6)


def nothing(two: Two) -> None:
    pass


def kill(two: Two) -> None:
    two.restart("a")


def settle(two: Two) -> None:
    two.a._registry.settle(two.a._registry.local(P))


def stop(two: Two) -> None:
    two.a.close()  # the replica settles
    two.start("a")


def kill_and_settle(two: Two) -> None:
    two.restart("a")  # before the partition has a processor
    settle(two)


def retire_another(two: Two) -> None:
    assert two.a.batches.retire_source(P, "t")  # this commit takes the skipped batch along
    two.restart("a")


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("between", [nothing, kill, settle, stop, kill_and_settle, retire_another])
def test_rows_see_the_watermark_of_the_batches_that_were_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: Callable[[Two], None], failed: bool
) -> None:
    """A row sees the watermark of the batches before it, whether or not they visited the partition."""

    def shown(two: Two, number: int) -> Any:
        rows = pa.record_batch([["k1"], [1]], schema=SCHEMA).serialize().to_pybytes()
        batch = Batch("s", number, watermark_us=60)
        found = apply_to(two.a, P, 1, batch, SCHEMA.serialize().to_pybytes(), rows)
        return read_batch(found.output, output_schema(Reads)).to_pylist()[0]["at"]

    two = Two(tmp_path, Reads)
    two.send(two.a, 1, number=0)
    apply_to(two.a, P, 1, Batch("t", 0), SCHEMA.serialize().to_pybytes(), b"")
    visit(two.a, 1, watermark_us=10)
    assert skipped_batches(two.a, 2, watermark_us=50)
    between(two)
    if failed:
        monkeypatch.setattr(Reads, "process", lambda *_: 1 / 0)
        with pytest.raises(OperatorFailed):
            shown(two, 3)
        monkeypatch.undo()
    assert shown(two, 3) == 50
    assert shown(two, 4) == 60
    two.close()


def test_the_first_watermark_of_a_source_visits(tmp_path: Path) -> None:
    """The source holds the others back from that batch on, so the order of the batches counts."""
    two = Two(tmp_path, Reads)
    two.send(two.a, 1, number=0)
    assert skipped_batches(two.a, 1)
    assert not skipped_batches(two.a, 2, watermark_us=50)
    visit(two.a, 2, watermark_us=50)
    assert skipped_batches(two.a, 3, watermark_us=60)
    two.close()


# -- expired state ------------------------------------------------------------------------------------------

TTL_S = 10


class Expires(Operator):
    """A row operator with a state that expires."""

    key, output = "k", "k string"
    last = state.value(int, default=0, ttl=TTL_S)

    def process(self, row: Any, ctx: Context) -> None:
        self.last.value = row.v


class ExpiresByBatch(BatchOperator):
    """The same for a batch of rows."""

    key, output = "k", "k string"
    last: Any = state.value(int, default=0, ttl=TTL_S)

    def process_batch(self, batch: pa.RecordBatch, ctx: Context) -> None:
        self.last.put_many(batch["k"], batch["v"])


class Idle:
    """A partition that gets batches without rows. ``now_s``: processing time, which the test sets."""

    def __init__(self, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node, self.number, self.now_s, self._monotonic = two.a, 0, 0, 0.0
        clock = SimpleNamespace(monotonic=lambda: self._monotonic, now_us=lambda: self.now_s * 1_000_000)
        monkeypatch.setattr(self.node.batches, "_clock", clock)

    def send(self, keys: range) -> None:
        rows = pa.record_batch([[f"k{number:03}" for number in keys], list(keys)], schema=SCHEMA)
        batch = Batch("s", self.number)
        apply_to(self.node, P, 1, batch, SCHEMA.serialize().to_pybytes(), rows.serialize().to_pybytes())
        self.number += 1

    def on_disk(self) -> int:
        """Counts the stored cells."""
        return sum(1 for _ in self.node._registry.store(self.node._registry.local(P)).scan(CELL))

    def visits(self, batches: int) -> list[bool]:
        """Sends batches without rows. Returns for each whether it visits the partition."""
        found = []
        for _ in range(batches):
            skips = skipped_batches(self.node, self.number)
            if not skips:
                visit(self.node, self.number)
            self.number += 1
            found.append(not skips)
        return found

    def becomes_due(self) -> None:
        """Lets the time pass after which a batch visits the partition whatever happens."""
        self._monotonic += sources.VISIT_S_MAX


@pytest.mark.parametrize("cls", [Expires, ExpiresByBatch])
def test_what_has_expired_leaves_the_disk_though_no_rows_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[Operator]
) -> None:
    """A partition whose cells have expired is visited until they are gone, and skipped before and after that."""
    two = Two(tmp_path, cls)
    idle = Idle(two, monkeypatch)
    idle.send(range(3 * SWEPT_MIN + 4))
    assert idle.visits(3) == [False] * 3, "nothing has expired"
    idle.now_s = TTL_S
    idle.becomes_due()
    assert idle.visits(8) == [True] * 4 + [False] * 4
    assert idle.on_disk() == 0
    two.close()


@pytest.mark.parametrize(("expired", "visits"), [(0, 1), (SWEPT_MIN // 2 - 1, 1), (SWEPT_MIN // 2, 2)])
def test_a_few_expired_entries_are_no_reason_for_more_visits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expired: int, visits: int
) -> None:
    """After a due visit the partition is skipped again, unless half of what the visit could check had expired."""
    two = Two(tmp_path, Expires)
    idle, count = Idle(two, monkeypatch), 4 * SWEPT_MIN
    idle.send(range(expired))
    idle.now_s = TTL_S // 2
    idle.send(range(expired, count))
    idle.now_s = TTL_S
    idle.becomes_due()
    assert idle.visits(4) == [True] * visits + [False] * (4 - visits)
    assert idle.on_disk() == count - expired
    two.close()


def test_what_has_expired_behind_what_has_not_leaves_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Due visits pass over live cells; when they come to expired ones, the batches behind them visit, too."""
    two = Two(tmp_path, Expires)
    idle, live = Idle(two, monkeypatch), 4 * SWEPT_MIN
    idle.send(range(live, 2 * live))
    idle.now_s = TTL_S // 2
    idle.send(range(live))
    idle.now_s = TTL_S
    for _ in range(live // SWEPT_MIN + 1):
        assert idle.on_disk() == 2 * live
        idle.becomes_due()
        visits = idle.visits(8)
    assert visits == [True] * 5 + [False] * 3
    assert idle.on_disk() == live
    two.close()


# -- many partitions ----------------------------------------------------------------------------------------


def one_row_each(partitions: int) -> dict[int, bytes]:
    keys = {partition_of((key,), partitions): key for key in map(str, range(100 * partitions))}
    return {
        partition: pa.record_batch([[key], [1]], schema=SCHEMA).serialize().to_pybytes()
        for partition, key in keys.items()
    }


@pytest.mark.parametrize(("acknowledge", "expected"), [("wal", 39), ("fsync", 39), ("standby", 0)])
def test_many_partitions(tmp_path: Path, acknowledge: Any, expected: int) -> None:
    settings = ReplicaSettings(acknowledge=acknowledge, checkpoint_interval_s=0)

    def start() -> ReplicaNode:
        return ReplicaNode(ReplicaInfo("a", "site", "a:1"), tmp_path, settings)

    node, count = start(), 40
    node.create(describe(Count, count, "Op"), range(count), 1)
    schema, messages = SCHEMA.serialize().to_pybytes(), one_row_each(count)
    for number in range(100):
        counts = [int(partition == number % count) for partition in range(count)]
        message = messages[number % count]
        came = Frame("Op", Batch("s", number), schema, list(range(count)), [1] * count, counts, [], [], message)
        places = node.batches.skip(came)
        assert len(places) == (expected if number else 0)
        rest = came.without(places)
        assert rest.counts.count(1) == 1
        for partition, rows in zip(rest.partitions, rest.counts, strict=True):
            data = message if rows else b""
            apply_to(node, PartitionId("Op", partition), 1, Batch("s", number), schema, data)
        if number == 70:
            node._registry.skipped_batches.close()
            node.close()
            node = start()
            for partition in range(count):
                apply_to(node, PartitionId("Op", partition), 1, Batch("s", number), schema, b"")
    found = [node.reader.position(PartitionId("Op", partition), "s") for partition in range(count)]
    assert [None if position is None else position.batch for position in found] == [99] * count
    node.close()
