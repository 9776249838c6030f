"""Batch DataFrames that are larger than what a task may hold: cut into pieces, each applied exactly once."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stateflow.errors import InvalidArgument
from stateflow.spark import apply, apply_operator, query_metrics
from stateflow.spark.apply import comes_in_order, row_hash
from stateflow.testing import LocalCluster
from tests.integration.mounts import Mount
from tests.integration.spark_operators import GATED_AT, POISON, Gated, Tally
from tests.integration.spark_tasks import TellingTask
from tests.integration.support import eventually
from tests.integration.test_full_disk import fill

pytestmark = [pytest.mark.spark, pytest.mark.processes]

PARTITIONS = 4
ROWS = 60_000
KEYS = 500
PIECE_BYTES = 100_000
PATIENCE_S = 120.0
#: pieces of the test of a replica's memory, each of some 1 KiB a row
FEW_PIECES, ROWS_OF_A_PIECE = 10, 1_000
#: bytes by which the memory of a replica may grow between 10 pieces and 200
GROWTH_BYTES_MAX = 64 << 20
names = itertools.count()
T = TypeVar("T")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(Tally, sites={"cloud": 2}, partitions=PARTITIONS) as running:
        yield running


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def name(cluster: LocalCluster) -> str:
    name = f"Tally-{next(names)}"
    cluster.cluster.deploy(Tally, PARTITIONS, name=name)
    return name


def frame(spark: SparkSession, rows: int = ROWS, poison: int | None = None) -> DataFrame:
    """Rows of KEYS keys in turn, with values 0 to 6; ``poison``: ``seq`` of the row that makes the operator raise."""
    seq = F.col("id")
    value = F.when(seq == poison, POISON).otherwise(seq % 7) if poison is not None else seq % 7
    return spark.range(rows).select(
        seq.alias("seq"),
        F.concat(F.lit("k"), seq % KEYS).alias("k"),
        F.lit("a").alias("kind"),
        value.cast("long").alias("v"),
    )


def expected(rows: int = ROWS) -> dict[str, tuple[int, int]]:
    totals: dict[str, list[int]] = {}
    for seq in range(rows):
        found = totals.setdefault(f"k{seq % KEYS}", [0, 0])
        found[0] += 1
        found[1] += seq % 7
    return {key: (n, total) for key, (n, total) in totals.items()}


def state(cluster: LocalCluster, name: str) -> dict[str, tuple[int, int]]:
    n, total = (
        {row["key"]: row["value"] for row in cluster.cluster.read_state(name, each).to_pylist()}
        for each in ("n", "total")
    )
    return {key: (n[key], total[key]) for key in n}


def owner(cluster: LocalCluster, name: str, partition: int) -> str:
    (operator,) = [each for each in cluster.cluster.status().operators if each.name == name]
    return operator.owners[partition]


def collected(applied: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, applied.collect()))


def is_whole(outputs: list[tuple[Any, ...]], rows: int = ROWS) -> bool:
    """Tells whether each row has come out once, and each key with every count."""
    counts: dict[str, set[int]] = {}
    for _, key, n, _ in outputs:
        counts.setdefault(key, set()).add(n)
    each = len(outputs) == rows and [row[0] for row in outputs] == list(range(rows))
    return each and all(found == set(range(1, rows // KEYS + 1)) for found in counts.values())


@pytest.mark.parametrize("tasks", [1, 2])
def test_many_pieces_are_one_batch(spark: SparkSession, cluster: LocalCluster, name: str, tasks: int) -> None:
    applied = apply_operator(frame(spark), Tally, cluster=cluster, name=name, tasks=tasks, source=name)
    first = collected(applied)
    assert is_whole(first)
    assert state(cluster, name) == expected()
    assert collected(applied) == first, "what was applied is told again"
    metrics = query_metrics(applied)
    assert metrics.operators[0].rows == ROWS
    again = apply_operator(frame(spark), Tally, cluster=cluster, name=name, tasks=tasks, source=name)
    assert collected(again) == first
    assert state(cluster, name) == expected()
    (night,) = {(s.source, s.batch) for s in cluster.cluster.sources(name)}
    assert night[0] == f"batch:{name}"
    assert night[1] >= 4, "there were pieces"


@pytest.mark.parametrize("tasks", [1, 2])
def test_whoever_wants_five_rows_has_all_pieces_applied(
    spark: SparkSession, cluster: LocalCluster, name: str, tasks: int
) -> None:
    applied = apply_operator(frame(spark), Tally, cluster=cluster, name=name, tasks=tasks, source="s")
    assert len(applied.take(5)) == 5
    assert state(cluster, name) == expected()


def test_rows_come_in_the_order_that_was_asked_for(spark: SparkSession, cluster: LocalCluster, name: str) -> None:
    shuffled = frame(spark).repartition(7, F.rand())
    applied = apply_operator(shuffled, Tally, cluster=cluster, name=name, order_by="seq", tasks=2)
    outputs = collected(applied)
    assert is_whole(outputs)
    assert all(n == seq // KEYS + 1 for seq, _, n, _ in outputs)


def test_what_a_shuffle_brings_is_cut_alike_each_time(spark: SparkSession, cluster: LocalCluster, name: str) -> None:
    """The same rows from other files, in another order, are the same batch."""
    first = apply_operator(frame(spark).repartition(7), Tally, cluster=cluster, name=name, tasks=2, source="s")
    outputs = collected(first)
    assert is_whole(outputs)
    other = frame(spark).orderBy(F.desc("seq")).repartition(5)
    again = apply_operator(other, Tally, cluster=cluster, name=name, tasks=2, source="s")
    assert collected(again) == outputs
    assert state(cluster, name) == expected()


def test_other_rows_or_tasks_under_the_same_source_are_refused(
    spark: SparkSession, cluster: LocalCluster, name: str
) -> None:
    apply_operator(frame(spark), Tally, cluster=cluster, name=name, tasks=2, source="s").collect()
    for changed, tasks in ((frame(spark, ROWS - 1), 2), (frame(spark).withColumn("v", F.lit(3)), 2), (frame(spark), 1)):
        again = apply_operator(changed, Tally, cluster=cluster, name=name, tasks=tasks, source="s")
        with pytest.raises(Exception, match="batch_changed: batch"):
            again.collect()
    assert state(cluster, name) == expected()


def test_an_error_says_what_is_applied_and_a_later_run_goes_on_from_there(
    spark: SparkSession, cluster: LocalCluster, name: str
) -> None:
    """An error says how many pieces are applied, and a later run goes on from there.

    The rows come in order, so that the poisoned one comes late.
    """
    at = ROWS - ROWS // 10

    def run(poison: int | None) -> DataFrame:
        rows = frame(spark, poison=poison)
        return apply_operator(rows, Tally, cluster=cluster, name=name, tasks=1, source="s", order_by="seq")

    with pytest.raises(Exception, match=r"operator_failed: .*piece=(\d+) pieces_applied=\1") as caught:
        run(at).collect()
    assert f"poison in row {at}" in str(caught.value)
    before = state(cluster, name)
    applied = sum(n for n, _ in before.values())
    assert ROWS // 2 < applied < ROWS
    # the same rows but for the one that was wrong, whose piece is not applied in its partition
    mended = run(None)
    assert is_whole(collected(mended))
    assert state(cluster, name) == expected()


# -- in the middle of a run ----------------------------------------------------------------------------------


class Middle:
    """A run that goes no further than its middle until it is let: each of its tasks waits there."""

    def __init__(self, directory: Path, closed: Iterable[int] = range(PARTITIONS)) -> None:
        self._gate, self._told = directory / "gate", directory / "told"
        self._gate.mkdir()
        self._told.mkdir()
        self._closed = [self._gate / str(partition) for partition in closed]
        for each in self._closed:
            each.touch()
        self.task = partial(TellingTask, told=str(self._told))
        self._pool = ThreadPoolExecutor(4)
        self.begun: list[Future[list[tuple[Any, ...]]]] = []

    def frame(self, spark: SparkSession) -> DataFrame:
        return frame(spark).withColumn("gate", F.lit(str(self._gate)))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Calls ``work`` in a thread beside those of the runs."""
        return self._pool.submit(work)

    def begin(self, applied: DataFrame) -> Future[list[tuple[Any, ...]]]:
        began = self.submit(partial(collected, applied))
        self.begun.append(began)
        return began

    def wait(self, *partitions: int, tasks: int = 2) -> None:
        """Waits until these partitions, or any, have come to the middle, and so many tasks are at work."""

        def reached() -> bool:
            self.check()
            there = [(self._gate / f"{each}.reached").exists() for each in partitions or range(PARTITIONS)]
            return (all(there) if partitions else any(there)) and len(self.workers()) == tasks

        eventually(reached, "it is in the middle", PATIENCE_S)

    def check(self) -> None:
        """Checks that no run has ended."""
        for each in self.begun:
            assert not each.done() or each.result() is None, "it ended before it was let"

    def workers(self) -> list[int]:
        """Spark's Python processes that are at work on these runs."""
        return [int(each.name) for each in self._told.iterdir()]

    def kill_workers(self) -> None:
        for worker in self.workers():
            os.kill(worker, signal.SIGKILL)
            (self._told / str(worker)).unlink()

    def let(self) -> None:
        for each in self._closed:
            each.unlink(missing_ok=True)

    def close(self) -> None:
        self.let()
        self._pool.shutdown()


@pytest.fixture
def middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Middle]]:
    made: list[Middle] = []

    def make(*closed: int) -> Middle:
        made.append(Middle(tmp_path, closed or range(PARTITIONS)))
        monkeypatch.setattr(apply, "OperatorTask", made[-1].task)
        return made[-1]

    assert ROWS // PARTITIONS > 2 * GATED_AT
    yield make
    for each in made:
        each.close()


@pytest.fixture
def gated(cluster: LocalCluster) -> str:
    name = f"Gated-{next(names)}"
    cluster.cluster.deploy(Gated, PARTITIONS, name=name)
    return name


def test_a_worker_that_is_killed_in_the_middle(
    spark: SparkSession, cluster: LocalCluster, gated: str, middle: Callable[..., Middle]
) -> None:
    """A task whose worker is killed is tried again from the first piece, and applies each piece once.

    The test tries it again itself, as a local session does not, with the rows in another order.
    """
    here = middle()

    def applied(rows: DataFrame) -> DataFrame:
        return apply_operator(rows, Gated, cluster=cluster, name=gated, tasks=2, source="s")

    first = here.begin(applied(here.frame(spark)))
    here.wait()
    here.kill_workers()
    with pytest.raises(Exception, match="Python worker exited unexpectedly"):
        first.result(PATIENCE_S)
    before = sum(n for n, _ in state(cluster, gated).values())
    assert 0 < before < ROWS, "some pieces are applied"
    here.let()
    assert is_whole(collected(applied(here.frame(spark).orderBy(F.desc("seq")).repartition(5))))
    assert state(cluster, gated) == expected()


def test_a_replica_that_is_killed_in_the_middle(
    spark: SparkSession, cluster: LocalCluster, gated: str, middle: Callable[..., Middle]
) -> None:
    here = middle()
    run = here.begin(apply_operator(here.frame(spark), Gated, cluster=cluster, name=gated, tasks=2, source="s"))
    here.wait()
    cluster.kill("cloud-0")
    cluster.restart("cloud-0")
    here.check()
    here.let()
    assert is_whole(run.result(PATIENCE_S))
    assert state(cluster, gated) == expected()


def test_a_replica_that_is_stopped_in_the_middle_until_it_is_given_up(
    spark: SparkSession, cluster: LocalCluster, gated: str, middle: Callable[..., Middle]
) -> None:
    here = middle()

    def alive() -> set[str]:
        return {replica.name for replica in cluster.cluster.status().replicas if replica.alive}

    run = here.begin(apply_operator(here.frame(spark), Gated, cluster=cluster, name=gated, tasks=2, source="s"))
    here.wait()
    cluster.freeze("cloud-0")
    try:
        here.let()
        eventually(lambda: "cloud-0" not in alive(), "it is given up")
    finally:
        cluster.thaw("cloud-0")
    assert is_whole(run.result(PATIENCE_S))
    assert state(cluster, gated) == expected()


def test_a_partition_moves_in_the_middle(
    spark: SparkSession, cluster: LocalCluster, gated: str, middle: Callable[..., Middle]
) -> None:
    """A partition moves to the replica where another partition of the same task waits, and each piece applies once."""
    moves, waits = 0, 2
    here, there = owner(cluster, gated, moves), owner(cluster, gated, waits)
    if here == there:
        here = {"cloud-0": "cloud-1", "cloud-1": "cloud-0"}[there]
        cluster.cluster.migrate(gated, [moves], here).wait()
    held = middle(waits)
    run = held.begin(apply_operator(held.frame(spark), Gated, cluster=cluster, name=gated, tasks=2, source="s"))
    held.wait(waits)
    cluster.cluster.migrate(gated, [moves], there).wait()
    assert owner(cluster, gated, moves) == there
    held.check()
    held.let()
    assert is_whole(run.result(PATIENCE_S))
    assert state(cluster, gated) == expected()


def test_two_that_are_at_it_at_once_are_told_the_same(
    spark: SparkSession, cluster: LocalCluster, gated: str, middle: Callable[..., Middle]
) -> None:
    """Two runs of the same rows at once get the same outputs.

    Where Spark speculates, two attempts of a task are like this: each piece comes from both, from either first.
    """
    here = middle()
    runs = [
        here.begin(apply_operator(rows, Gated, cluster=cluster, name=gated, tasks=1, source="s"))
        for rows in (here.frame(spark).repartition(3), here.frame(spark).orderBy(F.desc("seq")).repartition(5))
    ]
    here.wait()
    here.let()
    first, second = (run.result(PATIENCE_S) for run in runs)
    assert is_whole(first)
    assert first == second
    assert state(cluster, gated) == expected()


def test_a_disk_that_is_full_in_the_middle(spark: SparkSession, mount: Mount, middle: Callable[..., Middle]) -> None:
    """A full disk fails the pieces that have to be written, and no other operator on the replica.

    The other operator is read, and answers a batch that it contains, while pieces are in hand and after the failure.
    """
    disk = mount("small", 48 << 20)
    here = middle()
    sent = [{"seq": 0, "k": "a", "kind": "a", "v": 1}]
    with LocalCluster(
        Gated, sites={"cloud": 1}, partitions=PARTITIONS, data_dir=disk / "cluster", checkpoint_interval_s=0
    ) as small:
        small.cluster.deploy(Tally, 1, name="Other")

        def applied() -> DataFrame:
            return apply_operator(here.frame(spark), Gated, cluster=small, tasks=2, source="s")

        with small.stream("Other", source="other") as other:
            told = other.send(sent)
            run = here.begin(applied())
            here.wait()
            ballast = fill(disk)
            beside = here.submit(lambda: other.send(sent, sequence=0))
            assert state(small, "Other") == {"a": (1, 1)}
            here.let()
            with pytest.raises(Exception, match="disk_full: the disk is full"):
                run.result(PATIENCE_S)
            assert beside.result(PATIENCE_S) == told
            assert other.send(sent, sequence=0) == told
            assert state(small, "Other") == {"a": (1, 1)}
            ballast.unlink()
            assert other.send(sent) == [{"seq": 0, "k": "a", "n": 2, "total": 2}]
        assert is_whole(collected(applied()))
        assert state(small, "Gated") == expected()


# -- more than there is room for ------------------------------------------------------------------------------


def test_a_micro_batch_that_is_too_large_is_refused_and_other_operators_go_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch larger than what may wait at a replica is refused; a batch DataFrame of its rows has no limit."""
    monkeypatch.setenv("STATEFLOW_REPLICA_WAITING_BYTES_MAX", str(8 << 20))
    rows = frame(spark, 8_000).withColumn("k", F.lit("k")).withColumn("pad", F.repeat(F.lit("x"), 1000))
    rows.repartition(4, "seq").write.parquet(str(tmp_path / "input"))

    def run(files: int, checkpoint: str) -> None:
        stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", files)
        applied = apply_operator(stream.parquet(str(tmp_path / "input")), Tally, cluster=tight, tasks=2)
        writer = applied.writeStream.format("noop").option("checkpointLocation", str(tmp_path / checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination(int(PATIENCE_S))

    with LocalCluster(Tally, sites={"cloud": 1}, partitions=PARTITIONS, checkpoint_interval_s=0) as tight:
        tight.cluster.deploy(Tally, PARTITIONS, name="Other")
        with tight.stream("Other", source="s") as other:
            sent = [{"seq": 0, "k": "a", "kind": "a", "v": 1}]
            assert other.send(sent) == [{"seq": 0, "k": "a", "n": 1, "total": 1}]
            with pytest.raises(Exception, match=f"invalid_argument: more than {4 << 20} bytes of one batch's rows"):
                run(4, "all")
            assert state(tight, "Tally") == {}, "nothing of it is applied"
            assert other.send(sent) == [{"seq": 0, "k": "a", "n": 2, "total": 2}]
        run(1, "each")
        assert {key: n for key, (n, _) in state(tight, "Tally").items()} == {"k": 8_000}
        applied = apply_operator(spark.read.parquet(str(tmp_path / "input")), Tally, cluster=tight, tasks=2)
        assert applied.count() == 8_000
        assert {key: n for key, (n, _) in state(tight, "Tally").items()} == {"k": 16_000}


def peak_bytes(pid: int) -> int:
    """Returns the most memory that a process has had so far, as the kernel counts it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kilobytes) << 10


@pytest.mark.thorough
def test_the_memory_of_a_replica_does_not_grow_with_the_number_of_pieces(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica needs about as much memory for many pieces as for few.

    The rows of all pieces have several times as many bytes as the replica may grow by: it cannot have kept them.
    """
    monkeypatch.setattr(apply, "PIECE_BYTES", ROWS_OF_A_PIECE << 10)
    monkeypatch.setenv("STATEFLOW_REPLICA_BLOCK_CACHE_BYTES", str(8 << 20))
    monkeypatch.setenv("STATEFLOW_REPLICA_WRITE_BUFFER_BYTES", str(8 << 20))
    with LocalCluster(Tally, sites={"cloud": 1}, partitions=PARTITIONS, checkpoint_interval_s=0) as one:

        def peak(pieces: int) -> int:
            """Applies at least so many pieces, and returns the replica's most memory so far, in bytes."""
            source, count = f"pieces-{pieces}", pieces * ROWS_OF_A_PIECE
            rows = frame(spark, count).withColumn("pad", F.repeat(F.lit("x"), 1 << 10))
            assert apply_operator(rows, Tally, cluster=one, tasks=1, source=source).count() == count
            (last,) = {each.batch for each in one.cluster.sources("Tally") if each.source == f"batch:{source}"}
            assert last + 1 >= pieces
            return peak_bytes(one.processes["cloud-0"].pid)

        assert 19 * FEW_PIECES * (ROWS_OF_A_PIECE << 10) >= 2 * GROWTH_BYTES_MAX
        few = peak(FEW_PIECES)
        assert peak(19 * FEW_PIECES) - few < GROWTH_BYTES_MAX


# -- what a piece is -----------------------------------------------------------------------------------------


def test_a_piece_does_not_depend_on_how_spark_hands_rows_over(
    spark: SparkSession, cluster: LocalCluster, name: str
) -> None:
    told: list[list[tuple[Any, ...]]] = []
    for settings in ({}, {"maxRecordsPerBatch": "777"}, {"maxBytesPerBatch": "30000"}):
        names = [f"spark.sql.execution.arrow.{each}" for each in settings]
        before = {each: spark.conf.get(each) for each in names}
        try:
            for each, value in zip(names, settings.values(), strict=True):
                spark.conf.set(each, value)
            rows = frame(spark).repartition(2 + len(told))
            told.append(collected(apply_operator(rows, Tally, cluster=cluster, name=name, tasks=2, source="s")))
        finally:
            for each, value in before.items():
                spark.conf.set(each, value)
    assert is_whole(told[0])
    assert told[0] == told[1] == told[2]
    assert state(cluster, name) == expected()


@pytest.mark.parametrize("bytes_each", [3 * PIECE_BYTES, 6 << 20])
def test_a_row_may_be_larger_than_a_piece_and_than_a_message(
    spark: SparkSession, cluster: LocalCluster, name: str, bytes_each: int
) -> None:
    rows = frame(spark, 12).withColumn("pad", F.repeat(F.lit("x"), bytes_each))
    applied = apply_operator(rows, Tally, cluster=cluster, name=name, tasks=2, source="s")
    first = collected(applied)
    assert [row[0] for row in first] == list(range(12))
    assert collected(applied) == first


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_frame_without_rows_comes_to_every_partition(
    spark: SparkSession, cluster: LocalCluster, name: str, tasks: int
) -> None:
    """A frame without rows comes to every partition, also where Spark learns from the shuffle that there are none.

    The watermark that fires all timers comes this way.
    """
    for number, rows in enumerate((frame(spark, 0), frame(spark).where(F.rand() > 2).repartition(3))):
        applied = apply_operator(rows, Tally, cluster=cluster, name=name, tasks=tasks, source=f"{name}-{number}")
        assert applied.collect() == []
        assert query_metrics(applied).operators[0].visits == PARTITIONS


def test_a_column_of_a_reserved_name_is_refused(spark: SparkSession, cluster: LocalCluster, name: str) -> None:
    """A column of a reserved name is refused: it would be taken for an added one, and not come to the operator."""
    with pytest.raises(InvalidArgument, match="the column name '__Stateflow_hash' is reserved"):
        apply_operator(frame(spark).withColumn("__Stateflow_hash", F.lit(1)), Tally, cluster=cluster, name=name)


ALIKE_BUT_NOT_THE_SAME = {
    "null": "(1, null), (null, 1), (null, null), (0, null), (null, 0)",
    "text": "('', null), (null, ''), ('', ''), ('a', ''), ('', 'a')",
    "zero": "(0.0D, 1), (-0.0D, 1), (null, 1)",
    "zero in a list": "(array(0.0F)), (array(-0.0F)), (array(cast('NaN' as float)))",
    "list": "(array(1, null)), (array(null, 1)), (array(1)), (array()), (null)",
    "lists": "(array(array(1), array(2))), (array(array(1, 2))), (array(array(1, 2), array()))",
    "neighbours": "(array(1), array(2)), (array(1, 2), array()), (array(), array(1, 2))",
    "struct": "(named_struct('x', 1, 'y', null)), (named_struct('x', null, 'y', 1)), (null)",
    "map": "(map('a', 0.0D)), (map('a', -0.0D)), (map('a', null)), (map()), (null)",
    "times": "(map('a', timestamp'2020-01-01 00:00:00.000001')), (map('a', timestamp'2020-01-01 00:00:00.000002'))",
    "collation": "('a' collate utf8_lcase), ('A' collate utf8_lcase)",
    "collation in a list": "(array('a' collate utf8_lcase)), (array('A' collate utf8_lcase))",
}


@pytest.mark.parametrize("rows", ALIKE_BUT_NOT_THE_SAME.values(), ids=ALIKE_BUT_NOT_THE_SAME)
def test_rows_that_differ_have_other_hashes(spark: SparkSession, rows: str) -> None:
    """Rows that differ have different hashes.

    Otherwise two of them around the end of a piece could change places when they are sent again: one would be applied
    twice, the other not at all, and no check would notice.
    """
    df = spark.sql(f"select * from values {rows}")
    hashes = [row[0] for row in df.select(row_hash(df)).collect()]
    assert len(set(hashes)) == len(hashes)


def test_rows_that_are_the_same_have_the_same_hash(spark: SparkSession) -> None:
    row = "map(cast('a' as binary), 1) a, array(null, named_struct('x', null)) b, cast('NaN' as double) c, null d"
    df = spark.sql(f"select {row} union all select {row}")
    assert len({each[0] for each in df.select(row_hash(df)).collect()}) == 1


def test_the_hash_does_not_depend_on_what_might_be_null(spark: SparkSession, tmp_path: Path) -> None:
    """The hash does not depend on which columns may be null: those that are read from files always may."""
    made = spark.range(3).selectExpr("id", "array(id) a", "map('k', id) m", "named_struct('x', 0.0D) s", "'a' t")
    made.write.parquet(str(tmp_path / "files"))
    read = spark.read.parquet(str(tmp_path / "files"))
    assert made.schema != read.schema
    hashes = [sorted(row[0] for row in df.select(row_hash(df)).collect()) for df in (made, read)]
    assert hashes[0] == hashes[1]


def test_only_rows_that_certainly_come_alike_keep_their_order(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(10)
    df.write.parquet(str(tmp_path / "files"))
    df.createOrReplaceTempView("ten")
    keep = {
        "range": df,
        "local": spark.createDataFrame([(1,)], "a int"),
        "chosen": df.where("id > 3").selectExpr("id", "explode(array(1, 2))"),
    }
    lose = {
        "files": spark.read.parquet(str(tmp_path / "files")),  # how they are split depends on the session
        "shuffled": df.repartition(2),
        "joined": spark.sql("select * from ten where id in (select id + 1 from ten)"),
        "looked up": spark.sql("select id, (select max(o.id) from ten o where o.id <= ten.id) from ten"),
    }
    assert {each: comes_in_order(found) for each, found in keep.items()} == dict.fromkeys(keep, True)
    assert {each: comes_in_order(found) for each, found in lose.items()} == dict.fromkeys(lose, False)


@pytest.mark.parametrize("kind", ["map<string,bigint>", "array<map<string,int>>", "struct<a:binary,b:decimal(10,2)>"])
def test_rows_of_any_type_have_an_order(spark: SparkSession, cluster: LocalCluster, name: str, kind: str) -> None:
    extra = {
        "map<string,bigint>": F.create_map(F.lit("x"), F.col("seq")),
        "array<map<string,int>>": F.array(F.create_map(F.lit("x"), F.col("seq").cast("int"))),
        "struct<a:binary,b:decimal(10,2)>": F.struct(
            F.col("k").cast("binary").alias("a"), F.col("seq").cast("decimal(10,2)").alias("b")
        ),
    }[kind]
    rows = frame(spark, 6_000).withColumn("extra", extra)
    assert rows.schema["extra"].dataType.simpleString() == kind
    applied = apply_operator(rows.repartition(3), Tally, cluster=cluster, name=name, tasks=2, source="s")
    first = collected(applied)
    assert is_whole(first, 6_000)
    assert collected(applied) == first
