"""Pipelines record their stages by themselves, and after a crash go on from their last success."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stateflow.ledger import Ledger, StateManager
from stateflow.spark import End, apply_operator, record_queries, run_stage
from stateflow.testing import LocalCluster
from tests.integration.spark_operators import Tally

pytestmark = pytest.mark.spark


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[StateManager]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        yield StateManager(ledger)


def heard(spark: SparkSession) -> None:
    """Every event so far was delivered."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()


def run_query(spark: SparkSession, directory: Path, name: str, poison: int = -1) -> None:
    frame = spark.readStream.schema("n long").json(str(directory / "in"))
    checked = frame.withColumn("m", F.when(F.col("n") == poison, F.raise_error(F.lit("poison"))).otherwise(F.col("n")))
    query = (
        checked.writeStream.format("parquet")
        .queryName(name)
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(directory / "out"))
    )
    query.awaitTermination()


def test_each_micro_batch_is_a_stage(spark: SparkSession, manager: StateManager, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    listener = record_queries(spark, manager)
    try:
        (source / "a.json").write_text('{"n": 1}\n{"n": 2}\n')
        run_query(spark, tmp_path, "numbers")
        (source / "b.json").write_text('{"n": 3}\n')
        with pytest.raises(StreamingQueryException):
            run_query(spark, tmp_path, "numbers", poison=3)
        run_query(spark, tmp_path, "numbers")
        heard(spark)
    finally:
        spark.streams.removeListener(listener)
    done = manager.get_processing_history("numbers")
    assert [(row["row_count"], row["action"], row["status"]) for row in done] == [
        (2, "sinking post-push", "success"),
        (1, "sinking post-push", "success"),
    ]
    assert done[1]["correlation_id_in"] == done[0]["correlation_id_out"]
    assert [row["state_id"] for row in manager.trace(done[1]["correlation_id_out"])] == [r["state_id"] for r in done]
    assert done[0]["sourcing_start_time"] <= done[0]["sinking_end_time"]
    assert "parquet" in done[0]["sink_name"].lower() or "FileSink" in done[0]["sink_name"]
    states = [record.state for record in manager.ledger.records() if record.state in ("PROCESSED", "FAILED")]
    assert states == ["PROCESSED", "FAILED", "PROCESSED"]
    assert spark.read.parquet(str(tmp_path / "out")).count() == 3
    assert manager.ledger.verify() == []


@pytest.mark.processes
def test_an_operator_in_a_query_has_its_batches_recorded(
    spark: SparkSession, manager: StateManager, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.json").write_text(
        '{"seq": 1, "k": "a", "kind": "a", "v": 1}\n{"seq": 2, "k": "b", "kind": "a", "v": 2}\n'
    )
    with LocalCluster(Tally, sites={"cloud": 1}, partitions=2) as cluster:
        frame = spark.readStream.schema("seq long, k string, kind string, v long").json(str(source))
        out = apply_operator(frame, Tally, cluster=cluster, state_manager=manager)
        query = (
            out.writeStream.format("parquet")
            .queryName("tally")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        query.awaitTermination()
    heard(spark)
    assert [(row["row_count"], row["status"]) for row in manager.get_processing_history("tally")] == [(2, "success")]


def test_a_batch_pipeline_runs_once_and_goes_on_after_a_crash(spark: SparkSession, manager: StateManager) -> None:
    pulled: list[Any] = []
    pushed: list[list[int]] = []

    def pull(last: dict[str, Any] | None) -> DataFrame:
        pulled.append(last and last["record_count"])
        return spark.range(len(pulled) * 2)

    def push(frame: DataFrame) -> int:
        pushed.append([row.id for row in frame.collect()])
        return len(pushed[-1])

    def crash(_: DataFrame) -> int:
        raise RuntimeError("the lights went out")

    def run(month: str, how: Any = push) -> dict[str, Any]:
        source = End("gw", "parquet", "raw", month)
        return run_stage(manager, "flights", source=source, sink=End("lake", entity="clean"), pull=pull, push=how)

    assert run("2013-01")["record_count"] == 2
    assert run("2013-01")["record_count"] == 2
    assert (pulled, pushed) == ([None], [[0, 1]]), "what is done is not done again"
    with pytest.raises(RuntimeError, match="lights"):
        run("2013-02", crash)
    stopped = manager.get_state(manager.get_current_state("flights")["state_id"])  # type: ignore[index]
    assert stopped is not None
    assert (stopped["action"], stopped["status"]) == ("sinking post-push", "failure")
    assert run("2013-02")["record_count"] == 6
    assert pulled == [None, 2, 2], "from the last success on"
    assert len(manager.get_processing_history()) == 2
    assert manager.ledger.verify() == []
