"""Batch DataFrames that are larger than what a task may hold: cut into pieces, each applied exactly once."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stateflow.spark import apply, apply_operator, query_metrics
from stateflow.testing import LocalCluster
from tests.integration.spark_operators import POISON, Tally
from tests.integration.support import eventually

pytestmark = [pytest.mark.spark, pytest.mark.processes]

PARTITIONS = 4
ROWS = 150_000
KEYS = 500
PIECE_BYTES = 200_000
names = itertools.count()


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
    """Each key's values are all the same but for the sign, so that its totals tell the number of its rows."""
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
    """Each row has come out once, and of each key every count."""
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
    assert all(n == seq // KEYS + 1 for seq, _, n, _ in applied.collect())


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
    """In the order of the rows, so that the poisoned one comes late."""
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
    # the same rows but for the one that was wrong: of its partition, its piece is not applied
    mended = run(None)
    assert is_whole(collected(mended))
    assert state(cluster, name) == expected()


def test_a_worker_that_is_killed_in_the_middle(cluster: LocalCluster, name: str, spark: SparkSession) -> None:
    """Its task is tried again, from the first piece: by hand, as a local session does not."""

    def some_pieces() -> bool:
        return any(source.batch >= 2 for source in cluster.cluster.sources(name))

    def kill() -> None:
        eventually(some_pieces, "some pieces are applied", 60)
        for worker in python_workers():
            os.kill(worker, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outputs: list[Any] | None = None
    failures = 0
    while outputs is None:
        applied = apply_operator(frame(spark), Tally, cluster=cluster, name=name, tasks=2, source="s")
        try:
            outputs = collected(applied)
        except Exception:  # also of a worker that was idle when it was killed, and is used again
            failures += 1
            if failures > 5:
                raise
    killer.join()
    assert failures
    assert is_whole(outputs)
    assert state(cluster, name) == expected()


def test_a_replica_that_is_killed_in_the_middle(cluster: LocalCluster, name: str, spark: SparkSession) -> None:
    applied = apply_operator(frame(spark), Tally, cluster=cluster, name=name, tasks=2, source="s")

    def kill() -> None:
        eventually(lambda: any(s.batch >= 2 for s in cluster.cluster.sources(name)), "some pieces are applied", 60)
        cluster.processes["cloud-0"].kill()
        cluster.restart("cloud-0")

    killer = threading.Thread(target=kill)
    killer.start()
    outputs = collected(applied)
    killer.join()
    assert is_whole(outputs)
    assert state(cluster, name) == expected()


def test_a_partition_moves_in_the_middle(cluster: LocalCluster, name: str, spark: SparkSession) -> None:
    applied = apply_operator(frame(spark), Tally, cluster=cluster, name=name, tasks=2, source="s")

    def move() -> None:
        eventually(lambda: any(s.batch >= 2 for s in cluster.cluster.sources(name)), "some pieces are applied", 60)
        here = owner(cluster, name, 0)
        there = {"cloud-0": "cloud-1", "cloud-1": "cloud-0"}[here]
        cluster.cluster.migrate(name, [0], there).wait()
        moved.append(owner(cluster, name, 0) == there)

    moved: list[bool] = []
    mover = threading.Thread(target=move)
    mover.start()
    outputs = collected(applied)
    mover.join()
    assert moved == [True]
    assert is_whole(outputs)
    assert state(cluster, name) == expected()


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


def python_workers() -> list[int]:
    """Of this process's Spark: what its daemon has forked."""
    found = []
    for child in psutil.Process().children(recursive=True):
        line = " ".join(child.cmdline())
        if "pyspark.daemon" in line and "pyspark.daemon" in " ".join(child.parent().cmdline()):  # type: ignore[union-attr]
            found.append(child.pid)
    return found
