"""Sinks and actions that evaluate a part of a DataFrame, or nothing: the operator gets all, or an error says so."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import InheritableThread
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

from stateflow.errors import StaleBatch
from stateflow.spark import apply_operator, rewind
from stateflow.testing import LocalCluster
from tests.integration.spark_operators import POISON, Tally
from tests.integration.test_spark_apply import (
    PARTITIONS,
    PATIENCE_S,
    Input,
    Model,
    collected,
    frame_of,
    positions,
    rows,
    said_by,
    state_of,
)

pytestmark = [pytest.mark.spark, pytest.mark.processes]

TASKS = 4
names = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(Tally, sites={"cloud": 1, "edge": 1}, partitions=PARTITIONS) as running:
        yield running


@pytest.fixture
def name(cluster: LocalCluster) -> str:
    name = f"Tally-{next(names)}"
    cluster.cluster.deploy(Tally, PARTITIONS, name=name)
    return name


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Input:
    return Input(spark, tmp_path / "input")


def swallowed(batch: DataFrame) -> None:
    try:
        batch.foreachPartition(lambda _: 1 / 0)
    except Exception:  # noqa: BLE001 - this is the mistake
        pass


def cached(batch: DataFrame) -> None:
    batch.persist()
    batch.take(1)
    batch.unpersist()


def in_threads(target: Callable[[DataFrame], Any]) -> Callable[[DataFrame], None]:
    def evaluate(batch: DataFrame) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                target(batch)
            except Exception as error:  # noqa: BLE001 - it is raised again
                failed.append(error)

        thread = InheritableThread(target=run, session=batch.sparkSession)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    return evaluate


#: what evaluates less than the whole of a frame
PARTS: dict[str, Callable[[DataFrame], Any]] = {
    "take": lambda batch: batch.take(5),
    "first": lambda batch: batch.first(),
    "head": lambda batch: batch.head(1),
    "show": lambda batch: batch.show(1),
    "isEmpty": lambda batch: batch.isEmpty(),
    "limit": lambda batch: batch.limit(2).collect(),
    "tail": lambda batch: batch.tail(1),
    "projected": lambda batch: batch.select("k").take(1),
    "filtered": lambda batch: batch.where("n > 0").select(F.lit(1)).first(),
    "rdd": lambda batch: batch.rdd.take(1),
    "iterator": lambda batch: next(iter(batch.toLocalIterator()), None),
    "cached": cached,
    "different limits": lambda batch: (batch.take(1), batch.take(9)),
    "a part, then all": lambda batch: (batch.take(1), batch.count()),
    "all, then a part": lambda batch: (batch.count(), batch.take(1)),
}
#: further ways for micro-batches
NOTHING: dict[str, Callable[[DataFrame], Any]] = {
    "nothing": lambda batch: None,
    "a part, in a thread": in_threads(lambda batch: batch.take(1)),
    "filtered away": lambda batch: batch.where("1 = 0").count(),
    "an error that is swallowed": swallowed,
}


def each_batch(
    frame: DataFrame,
    evaluate: Callable[[DataFrame, int], Any],
    checkpoint: Path,
    foreach: Callable[..., DataStreamWriter] | None = None,
) -> None:
    """Runs a query over the input that there is, with a function for each batch."""
    writer = frame.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query = (foreach or type(writer).foreachBatch)(writer, evaluate).start()
    try:
        assert query.awaitTermination(4 * int(PATIENCE_S)), "the query did not end"
    finally:
        query.stop()


def unaware(writer: DataStreamWriter, function: Callable[..., Any]) -> DataStreamWriter:
    """Sets a sink that stateflow knows nothing of, as if it were written in Scala."""
    original: Callable[..., DataStreamWriter] = DataStreamWriter.foreachBatch
    original = getattr(original, "__wrapped__", original)
    return original(writer, function)


@pytest.mark.parametrize("tasks", [TASKS, 1])
def test_a_micro_batch_is_applied_whole_whatever_its_sink_evaluates(
    spark: SparkSession, cluster: LocalCluster, name: str, source: Input, tmp_path: Path, tasks: int
) -> None:
    ways = [*PARTS.values(), *NOTHING.values(), PARTS["take"]] if tasks > 1 else [PARTS["take"], *NOTHING.values()]
    source.add_many(len(ways), 40)
    out = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=tasks)
    each_batch(out, lambda batch, number: ways[number](batch), tmp_path / "checkpoint")
    assert state_of(cluster, name) == source.model().state()


def test_the_last_micro_batch_of_a_query_that_is_stopped(
    spark: SparkSession, cluster: LocalCluster, name: str, source: Input, tmp_path: Path
) -> None:
    source.add_many(2, 40)
    out = apply_operator(source.stream().select("*"), Tally, cluster=cluster, order_by="seq", name=name, tasks=TASKS)
    seen = threading.Event()

    def look(batch: DataFrame, number: int) -> None:
        batch.take(1)
        if number == 1:
            seen.set()

    shaped = out.where("seq >= 0").withColumn("twice", F.col("n") * 2)
    query = shaped.writeStream.foreachBatch(look).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        assert seen.wait(PATIENCE_S)
        query.processAllAvailable()
    finally:
        query.stop()
    assert state_of(cluster, name) == source.model().state()


def test_two_operators_behind_one_another_of_which_a_part_is_evaluated(
    spark: SparkSession, cluster: LocalCluster, name: str, source: Input, tmp_path: Path
) -> None:
    other = f"{name}-behind"
    cluster.cluster.deploy(Tally, PARTITIONS, name=other)
    source.add_many(2, 40)
    counted = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=TASKS)
    again = counted.selectExpr("seq", "k", "'a' AS kind", "total AS v")
    out = apply_operator(again, Tally, cluster=cluster, order_by="seq", name=other, tasks=TASKS)
    each_batch(out, lambda batch, _: batch.take(1), tmp_path / "checkpoint")
    model = source.model()
    assert state_of(cluster, name) == model.state()
    assert state_of(cluster, other, "n")["n"] == model.state()["n"]


def test_an_error_of_the_operator_that_is_swallowed_ends_the_query(
    spark: SparkSession, cluster: LocalCluster, name: str, source: Input, tmp_path: Path
) -> None:
    source.add([row._replace(v=POISON) if row.seq == 7 else row for row in rows(0, 40)])
    source.add_many(1, 40)
    out = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=TASKS)

    def careless(batch: DataFrame, number: int) -> None:
        try:
            batch.collect()
        except Exception:  # noqa: BLE001 - this is the mistake
            pass

    with pytest.raises(
        StreamingQueryException, match=r"^operator_failed: process\(\) raised ValueError: poison in row 7"
    ) as caught:
        each_batch(out, careless, tmp_path / "checkpoint")
    first, *between, last = str(caught.value).splitlines()
    assert first == last
    assert len(between) <= 8, "the operator's own frames and nothing else"
    assert not list((tmp_path / "checkpoint" / "commits").glob("[0-9]*")), "it is not counted as done"


def test_an_operator_that_spark_leaves_out_of_its_plan_is_missed(
    spark: SparkSession, cluster: LocalCluster, name: str, source: Input, tmp_path: Path
) -> None:
    source.add_many(1, 40)
    out = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=TASKS)
    with pytest.raises(
        StreamingQueryException, match=r"batch_incomplete: batch 0 does not reach the operator: .*remove the step after"
    ):
        each_batch(out.limit(0), lambda batch, _: batch.collect(), tmp_path / "checkpoint")
    each_batch(out, lambda batch, _: batch.collect(), tmp_path / "checkpoint")
    assert state_of(cluster, name) == source.model().state()


def test_a_part_of_a_batch_is_noticed_before_the_next_and_mended_by_a_rewind(
    spark: SparkSession, cluster: LocalCluster, name: str, source: Input, tmp_path: Path
) -> None:
    """A partial batch of a sink unknown to the driver is noticed before the next batch, and a rewind mends it."""
    checkpoint = tmp_path / "checkpoint"
    source.add_many(2, 40)
    out = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=TASKS)
    with pytest.raises(StreamingQueryException) as caught:
        each_batch(out, lambda batch, _: batch.take(1), checkpoint, unaware)
    said = str(caught.value)
    assert "batch_incomplete: batch 1 was sent, but batch 0 is in only 2 of 8 partitions (operator=Tally" in said
    assert "then rewind: stateflow spark rewind CHECKPOINT --to-batch 0 --apply" in said
    applied = state_of(cluster, name, "n")["n"]
    assert sum(applied.values()) < 40, "nothing of the next batch"
    with pytest.raises(StreamingQueryException, match="batch_incomplete: batch 1 was sent"):
        each_batch(out, lambda batch, _: batch.collect(), checkpoint)
    assert state_of(cluster, name, "n")["n"] == applied
    rewind(checkpoint, 0, apply=True)
    each_batch(out, lambda batch, _: batch.collect(), checkpoint)
    assert state_of(cluster, name) == source.model().state()


def test_a_checkpoint_without_the_plan_of_a_batch_in_the_state_is_refused(
    spark: SparkSession, cluster: LocalCluster, name: str, source: Input, tmp_path: Path
) -> None:
    """An older copy of the checkpoint was put back. Spark would plan the batch anew."""
    checkpoint = tmp_path / "checkpoint"
    source.add_many(2, 40)
    out = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=TASKS)
    each_batch(out, lambda batch, _: batch.collect(), checkpoint)
    aside = [path for folder in ("offsets", "commits") for path in (checkpoint / folder).glob("*1*")]
    contents = {path: path.read_bytes() for path in aside}
    for path in aside:
        path.unlink()
    source.add_many(1, 20)
    with pytest.raises(StaleBatch, match="contains batch 1, but the query's checkpoint has planned no batch after 0"):
        each_batch(out, lambda batch, _: batch.collect(), checkpoint)
    for path, content in contents.items():
        path.write_bytes(content)
    each_batch(out, lambda batch, _: batch.collect(), checkpoint)
    assert state_of(cluster, name) == source.model().state()


@pytest.mark.parametrize("evaluate", [PARTS["take"], NOTHING["nothing"]], ids=["a part", "nothing"])
def test_a_last_batch_that_was_not_whole_is_noticed_by_the_next_start(
    spark: SparkSession,
    cluster: LocalCluster,
    name: str,
    source: Input,
    tmp_path: Path,
    evaluate: Callable[[DataFrame], Any],
) -> None:
    checkpoint = tmp_path / "checkpoint"
    source.add_many(2, 40)
    out = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=TASKS)
    each_batch(out, lambda batch, number: evaluate(batch) if number else batch.collect(), checkpoint, unaware)
    source.add_many(1, 40)
    with pytest.raises(StreamingQueryException, match=r"(batch_incomplete|position_gap): batch 2 was sent"):
        each_batch(out, lambda batch, _: batch.take(1), checkpoint, unaware)
    rewind(checkpoint, 1, apply=True)
    each_batch(out, lambda batch, _: batch.take(1), checkpoint)
    assert state_of(cluster, name) == source.model().state()


@pytest.mark.parametrize("tasks", [TASKS, 1])
def test_a_batch_frame_of_which_a_part_is_evaluated_is_applied_whole(
    spark: SparkSession, cluster: LocalCluster, name: str, tasks: int
) -> None:
    applied = []
    for number, (way, evaluate) in enumerate(PARTS.items()):
        batch = rows(40 * number, 40, keys=20)
        out = apply_operator(frame_of(spark, batch), Tally, cluster=cluster, order_by="seq", name=name, tasks=tasks)
        evaluate(out)
        applied.append(batch)
        assert state_of(cluster, name, "n")["n"] == Model(applied).state()["n"], way
    assert collected(out.select("*")) == Model(applied).outputs[-40:]
    assert state_of(cluster, name) == Model(applied).state()


def test_an_operator_within_foreach_batch_of_which_a_part_is_evaluated(
    spark: SparkSession, cluster: LocalCluster, name: str, source: Input, tmp_path: Path
) -> None:
    source.add_many(3, 40)

    def look(batch: DataFrame, number: int) -> None:
        apply_operator(batch, Tally, cluster=cluster, order_by="seq", name=name, tasks=TASKS).take(1)

    each_batch(source.stream(), look, tmp_path / "checkpoint")
    assert state_of(cluster, name) == source.model().state()


@pytest.mark.parametrize("within", [False, True])
def test_a_thread_that_does_not_say_of_which_query_it_is_is_refused(
    spark: SparkSession, cluster: LocalCluster, name: str, source: Input, tmp_path: Path, within: bool
) -> None:
    """A thread that does not tell its query is refused: its rows of all micro-batches would be taken for one batch."""
    source.add_many(2, 40)
    said: list[str] = []

    def applied(frame: DataFrame) -> DataFrame:
        return apply_operator(frame, Tally, cluster=cluster, order_by="seq", name=name, tasks=TASKS)

    def apart(batch: DataFrame, number: int) -> None:
        out = applied(batch) if within else batch
        thread = threading.Thread(target=lambda: said.append(said_by(out.collect)))
        thread.start()
        thread.join()
        out.count()

    each_batch(source.stream() if within else applied(source.stream()), apart, tmp_path / "checkpoint")
    assert len(said) == 2
    for each in said:
        assert "invalid_argument: the thread that evaluates a micro-batch lacks the query's" in each
        assert "start it as pyspark.InheritableThread" in each
    assert state_of(cluster, name) == source.model().state()
    assert positions(cluster, name, "batch:") == {}
