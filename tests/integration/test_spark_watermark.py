"""The watermark of a Spark query reaches the operator's windows, as Spark itself would have it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateflow.errors import InvalidArgument
from stateflow.spark import apply_operator, main_output, side_output
from stateflow.spark.apply import marked
from stateflow.testing import LocalCluster
from tests.integration.operators import Minutes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.processes, pytest.mark.spark]
T0 = datetime(2013, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SCHEMA = "k string, at timestamp"
#: minutes of the rows of each micro-batch, one key per row
BATCHES = [[0.5, 0.7, 1.2], [3.5], [0.9, 3.6, 1.5], [], [9.0], [9.5], [2.0]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(sites={"cloud": 1, "edge": 1}) as running:
        yield running


def write(directory: Path, number: int) -> None:
    rows = BATCHES[number]
    times = pa.array([T0 + minute * MINUTE for minute in rows], pa.timestamp("us", "UTC"))
    hidden = directory / f".{number}.parquet"
    pq.write_table(pa.table({"k": pa.array([f"k{i}" for i in range(len(rows))], pa.string()), "at": times}), hidden)
    os.utime(hidden, (1_400_000_000 + number,) * 2)
    hidden.rename(directory / f"{number}.parquet")


def model(lateness: float, *, final: bool = False) -> tuple[set[Any], set[Any]]:
    """Returns the windows that end and the keys of late rows, by Spark's rules.

    The watermark of a batch is what came before it. The rows of the next batch see it, and windows end with the batch.
    """
    counts: dict[tuple[str, float], int] = {}
    ended, late = set(), set()
    newest, shown = None, float("-inf")
    for rows in BATCHES:
        for key, minute in enumerate(rows):
            if minute // 1 + 1 <= shown:
                late.add(f"k{key}")
            else:
                counts[f"k{key}", minute // 1] = counts.get((f"k{key}", minute // 1), 0) + 1
        shown = float("-inf") if newest is None else newest - lateness
        newest = max([*rows, *([] if newest is None else [newest])], default=None)
        for window in [window for window in counts if window[1] + 1 <= shown]:
            ended.add((*window, counts.pop(window)))
    if final:
        ended |= {(*window, count) for window, count in counts.items()}
    return ended, late


def windows(out: DataFrame) -> set[Any]:
    rows = out.where("late is null").collect()
    found = {(row.k, (row.minute.replace(tzinfo=UTC) - T0) / MINUTE, row.n) for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("lateness", [0, 3])
def test_windows_end_as_spark_would_end_them(
    cluster: LocalCluster, spark: SparkSession, tmp_path: Path, lateness: int
) -> None:
    name = f"Streamed{lateness}"
    cluster.cluster.deploy(Minutes, 8, name=name)
    (tmp_path / "in").mkdir()
    stops = (3, 5, len(BATCHES))
    for start, stop in zip((0, *stops), stops, strict=False):  # a query that is stopped and started again
        for number in range(start, stop):
            write(tmp_path / "in", number)
        rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
        out = apply_operator(
            rows,
            Minutes,
            cluster=cluster.cluster,
            name=name,
            watermark="at",
            allowed_lateness=lateness * MINUTE,
            tasks=2 + start % 2,
        )
        query = out.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "ckpt"))
        query.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
    out = spark.read.parquet(str(tmp_path / "out"))
    ended, late = model(lateness)
    assert windows(out) == ended
    assert {row.k for row in out.where("late is not null").select("late.k").collect()} == late
    assert ended
    assert late


def test_a_batch_query_ends_every_window(cluster: LocalCluster, spark: SparkSession) -> None:
    cluster.cluster.deploy(Minutes, 8, name="Batch")
    rows = [(f"k{key}", T0 + minute * MINUTE) for batch in BATCHES for key, minute in enumerate(batch)]
    out = apply_operator(
        spark.createDataFrame(rows, SCHEMA), Minutes, cluster=cluster.cluster, name="Batch", watermark="at"
    )
    assert {(k, m): n for k, m, n in windows(out)} == {
        (k, m): sum(1 for key, at in rows if key == k and (at - T0) // MINUTE == m) for k, m, _ in windows(out)
    }
    assert sum(n for _, _, n in windows(out)) == len(rows)


def test_a_batch_query_leaves_event_time_at_its_newest_row(
    cluster: LocalCluster, spark: SparkSession, tmp_path: Path
) -> None:
    """A second batch query, and the stream behind it, go on from there: only rows older than that are late."""
    cluster.cluster.deploy(Minutes, 8, name="Nightly")
    arguments: dict[str, Any] = {
        "cluster": cluster.cluster,
        "name": "Nightly",
        "watermark": "at",
        "allowed_lateness": MINUTE,
        "tasks": 1,
    }

    def run(*minutes: float) -> DataFrame:
        rows = [("k0", T0 + minute * MINUTE) for minute in minutes]
        return apply_operator(spark.createDataFrame(rows, SCHEMA), Minutes, **arguments)

    assert windows(run(0.5, 3.5)) == {("k0", 0, 1), ("k0", 3, 1)}
    second = run(1.2, 3.7, 6.5)  # the watermark is at 2.5
    assert windows(second) == {("k0", 3, 1), ("k0", 6, 1)}
    assert second.where("late is not null").count() == 1
    (tmp_path / "in").mkdir()
    for number, minute in enumerate([4.2, 5.8, 9.0, 9.1]):  # the watermark is at 5.5
        times = pa.array([T0 + minute * MINUTE], pa.timestamp("us", "UTC"))
        pq.write_table(pa.table({"k": ["k0"], "at": times}), tmp_path / "in" / f"{number}.parquet")
        os.utime(tmp_path / "in" / f"{number}.parquet", (1_400_000_000 + number,) * 2)
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    query = apply_operator(stream, Minutes, **arguments).writeStream.format("parquet")
    query = query.option("checkpointLocation", str(tmp_path / "ckpt")).trigger(availableNow=True)
    query.start(str(tmp_path / "out")).awaitTermination()
    out = spark.read.parquet(str(tmp_path / "out"))
    assert windows(out) == {("k0", 5, 1)}, "the watermark of the last micro-batch is 8.0"
    assert out.where("late is not null").count() == 1


def test_odd_watermarks_are_refused(cluster: LocalCluster, spark: SparkSession) -> None:
    cluster.cluster.deploy(Minutes, 8, name="Odd")
    rows = spark.createDataFrame([("a", T0)], SCHEMA)
    for arguments, what in [
        ({"watermark": "k"}, "'k' cannot be the watermark column: it is string"),
        ({"watermark": "nope"}, "there is no such column"),
        ({"watermark": "at", "allowed_lateness": -MINUTE}, "allowed_lateness cannot be"),
        ({"watermark": "at", "allowed_lateness": 5}, "allowed_lateness cannot be 5: use a timedelta"),
    ]:
        with pytest.raises(InvalidArgument, match=what):
            apply_operator(rows, Minutes, cluster=cluster.cluster, name="Odd", **arguments)


def test_main_rows_and_side_outputs_as_frames_of_their_own(
    cluster: LocalCluster, spark: SparkSession, tmp_path: Path
) -> None:
    """Main rows and side outputs are frames of their own in ``foreachBatch`` and of a batch.

    For a stream they are refused, so that it is not sent twice by mistake.
    """
    name = "Apart"
    cluster.cluster.deploy(Minutes, 8, name=name)
    (tmp_path / "in").mkdir()
    for number in range(len(BATCHES)):
        write(tmp_path / "in", number)
    stream = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    out = apply_operator(stream, Minutes, cluster=cluster, name=name, watermark="at")
    for take in (out.main, lambda: out.side("late")):
        with pytest.raises(
            InvalidArgument, match=r"^invalid_argument: a streaming DataFrame cannot be split.*foreachBatch"
        ):
            take()
    ended: list[Any] = []
    late: list[Any] = []

    def split(batch: DataFrame, _: int) -> None:
        assert (main_output(batch).columns, side_output(batch, "late").columns) == (["k", "minute", "n"], ["k"])
        ended.extend(main_output(batch).collect())
        late.extend(row.k for row in side_output(batch, "late").collect())

    writer = out.writeStream.foreachBatch(split).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    wanted, wanted_late = model(0)
    assert {(row.k, (row.minute.replace(tzinfo=UTC) - T0) / MINUTE, row.n) for row in ended} == wanted
    assert set(late) == wanted_late
    rows = spark.read.schema(SCHEMA).parquet(str(tmp_path / "in"))
    batch = apply_operator(rows, Minutes, cluster=cluster, name=name, watermark="at", source="batch")
    assert batch.main().count() + batch.side("late").count() == batch.count() > 0
    assert batch.main().where("k is null or minute is null").count() == 0
    with pytest.raises(InvalidArgument, match=r"no side output 'early': use a declared one: late"):
        batch.side("early")


@pytest.mark.parametrize("tag", ["late.rows", "late`rows", "`late`.`rows`", "late rows.*"])
def test_any_tag_names_a_side_output(tag: str, spark: SparkSession) -> None:
    """Spark reads a dot in a name as access to a field, and a backtick as a quote."""
    from pyspark.sql.types import StringType, StructType

    schema = (
        StructType().add("late.k", StringType()).add(tag, StructType().add("k.k", StringType())).add("late", "string")
    )
    frame = spark.createDataFrame([("a", None, None), (None, ("b",), None)], marked(schema, (tag,)))
    assert main_output(frame).columns == ["late.k", "late"]
    assert [tuple(row) for row in main_output(frame).collect()] == [("a", None)]
    assert side_output(frame, tag).columns == ["k.k"]
    assert [tuple(row) for row in side_output(frame, tag).collect()] == [("b",)]
