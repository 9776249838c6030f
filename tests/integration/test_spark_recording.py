"""Pipelines record their stages by themselves, and after a crash go on from their last success."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stateflow.errors import Unavailable
from stateflow.ledger import Ledger, StateManager
from stateflow.spark import End, apply_operator, record_queries, run_stage
from stateflow.spark.stage_recorder import end_of
from stateflow.testing import LocalCluster
from tests.integration.spark_operators import Tally

pytestmark = pytest.mark.spark


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[StateManager]:
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        yield StateManager(ledger)


def heard(spark: SparkSession) -> None:
    """Waits until every event so far is delivered."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()


def run_query(spark: SparkSession, directory: Path, name: str, poison: int = -1) -> None:
    frame = spark.readStream.schema("n long").json(str(directory / "in")).where("n > 0")
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
    assert {(row["source_type"], row["source_entity"]) for row in done} == {("FileStreamSource", f"file:{source}")}
    assert {(row["sink_type"], row["sink_entity"]) for row in done} == {("FileSink", f"file:{tmp_path / 'out'}")}
    assert {row["source_filter"] for row in done} == {"(n > CAST(0 AS BIGINT))"}
    [failed] = manager.get_failures("numbers")
    assert failed["manifest_name"] is None
    assert "poison" in failed["error"]["message"]
    traced = [row["state_id"] for row in manager.trace(done[1]["correlation_id_out"])]
    assert traced == [each["state_id"] for each in (done[0], failed, done[1])]
    assert done[0]["sourcing_start_time"] <= done[0]["sinking_end_time"]
    assert "parquet" in done[0]["sink_name"].lower() or "FileSink" in done[0]["sink_name"]
    states = [record.state for record in manager.ledger.records() if record.state in ("PROCESSED", "FAILED")]
    assert states == ["PROCESSED", "FAILED", "PROCESSED"]
    assert spark.read.parquet(str(tmp_path / "out")).count() == 3
    assert manager.ledger.verify() == []


def test_what_a_killed_run_did_not_record_is_recorded_by_the_next(
    spark: SparkSession, manager: StateManager, tmp_path: Path
) -> None:
    """Batches that a killed run did not record are recorded by the next run.

    A run without a listener stands for one that was killed after each commit.
    """
    source = tmp_path / "in"
    source.mkdir()
    ends = {"source": End("gw", "json", "raw", "n > 0"), "sink": End("lake", "parquet", "clean")}

    def recorded(poison: int = -1) -> None:
        listener = record_queries(spark, manager, **ends, manifest="p.yml")
        try:
            run_query(spark, tmp_path, "numbers", poison)
            heard(spark)
        finally:
            spark.streams.removeListener(listener)

    (source / "a.json").write_text('{"n": 1}\n{"n": 2}\n')
    recorded()
    for name, rows in (("b", 3), ("c", 1)):
        (source / f"{name}.json").write_text('{"n": 3}\n' * rows)
        run_query(spark, tmp_path, "numbers")
        heard(spark)
    recorded()
    done = manager.get_processing_history("numbers")
    assert [row["row_count"] for row in done] == [2, 3, 1], "also where the next run finds no rows of its own"
    assert [row["correlation_id_in"] for row in done[1:]] == [row["correlation_id_out"] for row in done[:-1]]
    assert done[1]["last_record_pulled"] == done[2]["first_record_pulled"] == '{"logOffset":1}'
    columns = ("source_name", "source_type", "source_entity", "source_filter", "sink_name", "manifest_name")
    assert {tuple(row[name] for name in columns) for row in done} == {("gw", "json", "raw", "n > 0", "lake", "p.yml")}


def test_what_a_ledger_that_is_away_could_not_take_is_recorded_later(
    spark: SparkSession, manager: StateManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    away = pytest.MonkeyPatch()

    def refuse(*_: Any) -> None:
        raise Unavailable("it is away", remedy="wait")

    listener = record_queries(spark, manager)
    try:
        (tmp_path / "in" / "a.json").write_text('{"n": 1}\n')
        away.setattr(manager.ledger.database, "write", refuse)
        run_query(spark, tmp_path, "numbers")
        heard(spark)
        away.undo()
        assert manager.get_processing_history() == []
        (tmp_path / "in" / "b.json").write_text('{"n": 2}\n{"n": 3}\n')
        run_query(spark, tmp_path, "numbers")
        heard(spark)
    finally:
        away.undo()
        spark.streams.removeListener(listener)
    assert [row["row_count"] for row in manager.get_processing_history("numbers")] == [1, 2]


@pytest.mark.parametrize(
    ("description", "kind", "entity"),
    [
        ("FileStreamSource[file:/a[1]/b]", "FileStreamSource", "file:/a[1]/b"),
        ("org.apache.spark.sql.execution.streaming.ConsoleTable$@1f", "ConsoleTable", None),
        ("ForeachBatchSink", "ForeachBatchSink", None),
        ("KafkaV2[Subscribe[flights]]", "KafkaV2", "Subscribe[flights]"),
    ],
)
def test_what_spark_calls_its_ends(description: str, kind: str, entity: str | None) -> None:
    assert end_of(description) == End(description, kind, entity)


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


def test_a_batch_pipeline_runs_once_and_goes_on_after_a_crash(
    spark: SparkSession, manager: StateManager, tmp_path: Path
) -> None:
    pulled: list[Any] = []
    pushed: list[list[int]] = []

    def pull(last: dict[str, Any] | None) -> DataFrame:
        pulled.append(last and (last["record_count"], last["first_record_pulled"], last["last_record_pulled"]))
        return spark.range(len(pulled) * 2)

    def push(frame: DataFrame) -> int:
        pushed.append([row.id for row in frame.collect()])
        return len(pushed[-1])

    def crash(_: DataFrame) -> int:
        raise RuntimeError("the lights went out")

    def run(month: str, how: Any = push, by: StateManager = manager) -> dict[str, Any]:
        ends = {"source": End("gw", "parquet", "raw", month), "sink": End("lake", entity="clean")}
        return run_stage(by, "flights", **ends, pull=pull, push=how, record="id", manifest="flights.yml")

    assert run("2013-01")["record_count"] == 2
    assert run("2013-01")["record_count"] == 2
    assert (pulled, pushed) == ([None], [[0, 1]]), "what is done is not done again"
    with pytest.raises(RuntimeError, match="lights"):
        run("2013-02", crash)
    stopped = manager.get_state(manager.get_current_state("flights")["state_id"])  # type: ignore[index]
    assert stopped is not None
    assert (stopped["action"], stopped["status"]) == ("sinking post-push", "failure")
    [failed] = manager.get_failures()
    assert (failed["manifest_name"], failed["error"]["message"]) == ("flights.yml", "the lights went out")
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}", run_id="the next") as ledger:
        finished = run("2013-02", by=StateManager(ledger))
    assert (finished["record_count"], finished["run_id"]) == (6, "the next")
    assert pulled == [None, (2, "0", "1"), (2, "0", "1")], "from the last success on"
    assert manager.get_last_record("raw") == "5"
    assert len(manager.get_processing_history()) == 2
    assert manager.ledger.verify() == []


def test_the_newest_records_are_pushed_in_any_zone(
    spark: SparkSession, manager: StateManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest records are pushed although this process and the session are in other zones.

    Nor does the calendar matter: Java's times before 1582 are in another one.
    """
    times = {
        "a.`b": ("timestamp_ntz", "2024-06-01 11:30:00.25", "2024-06-01T11:30:00.250000"),
        "at": ("timestamp", "2024-06-01 11:30:00.25Z", "2024-06-01T11:30:00.250000+00:00"),
        "before": ("timestamp", "1500-01-01 00:00:00Z", "1500-01-01T00:00:00+00:00"),
        "then": ("timestamp_ntz", "1500-01-01 00:00:00", "1500-01-01T00:00:00"),
        "day": ("date", "1500-01-01", "1500-01-01"),
    }
    columns = [F.lit(text).cast(kind).alias(name) for name, (kind, text, _) in times.items()]
    counts: dict[str, int] = {}
    stages: dict[str, Any] = {}
    zone = spark.conf.get("spark.sql.session.timeZone")
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    try:
        for name in times:

            def push(frame: DataFrame, name: str = name) -> None:
                counts[name] = frame.count()

            stages[name] = run_stage(
                manager,
                "flights",
                source=End(name),
                sink=End("lake"),
                pull=lambda _: spark.range(2).select(*columns),
                push=push,
                record=name,
            )
    finally:
        monkeypatch.undo()
        time.tzset()
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert counts == dict.fromkeys(times, 2)
    pulled = {name: stage["last_record_pulled"] for name, stage in stages.items()}
    assert pulled == {name: text for name, (_, _, text) in times.items()}
