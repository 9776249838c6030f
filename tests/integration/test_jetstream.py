"""JetStream as a source: exactly the messages of a range, again after kills, and gaps reported rather than skipped."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateflow.spark.session import JETSTREAM
from tests.versions import lacks

if why := lacks(JETSTREAM):
    pytest.skip(why, allow_module_level=True)

from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructField, StructType, TimestampType

from stateflow.errors import InvalidArgument, SourceGap, SourceMissing, Unavailable
from stateflow.spark import register_jetstream
from stateflow.spark.jetstream import JetStreamOptions, JetStreamReader
from stateflow.testing import LocalCluster
from tests.integration.nats_support import URL, Server, Stream, needs_nats
from tests.integration.spark_operators import Tally
from tests.integration.support import eventually
from tests.integration.test_spark_apply import REPOSITORY, SCHEMA, Model, Row, rows, said_by, state_of

pytestmark = [needs_nats, pytest.mark.processes]

RAW = StructType(
    [
        StructField("seq", LongType()),
        StructField("time", TimestampType()),
        StructField("subject", StringType()),
        StructField("headers", MapType(StringType(), StringType())),
        StructField("data", BinaryType()),
    ]
)
ALL = ReadAllAvailable()


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream(URL, f"test-{uuid.uuid4().hex}")
    yield made
    made.delete()


def reader(of: Stream, **options: Any) -> JetStreamReader:
    named = {"servers": of.url, "stream": of.name, **{key: str(value) for key, value in options.items()}}
    return JetStreamReader(JetStreamOptions.of(named), RAW)


class Query:
    """The calls that Spark makes on a source. A restart keeps the offset, as Spark's log does, with a new reader."""

    def __init__(self, stream: Stream, **options: Any) -> None:
        self.stream, self.options = stream, options
        self.reader = reader(stream, **options)
        self.offset = self.reader.initialOffset()

    def restart(self) -> None:
        self.offset = json.loads(json.dumps(self.offset))
        self.reader = reader(self.stream, **self.options)

    def next(self, limit: ReadLimit = ALL) -> dict[str, Any]:
        return self.reader.latestOffset(self.offset, limit)

    def read(self, end: dict[str, Any]) -> list[tuple[int, bytes]]:
        parts = self.reader.partitions(self.offset, end)
        return [
            (row["seq"], row["data"]) for part in parts for batch in self.reader.read(part) for row in batch.to_pylist()
        ]

    def batch(self, limit: ReadLimit = ALL) -> list[int]:
        end = self.next(limit)
        read = self.read(end)
        assert read == self.read(end), "a replay is the same"
        self.offset = end
        return [seq for seq, _ in read]


def test_batches_are_ranges_of_the_stream(stream: Stream) -> None:
    stream.publish(range(25))
    query = Query(stream)
    assert query.batch(ReadMaxRows(10)) == list(range(1, 11))
    query.restart()
    assert query.batch(ReadMaxRows(10)) == list(range(11, 21))
    assert query.batch() == list(range(21, 26))
    assert query.next() is query.offset, "nothing new"
    assert query.reader.partitions(query.offset, query.offset) == []
    stream.publish([b"last"], headers={"color": "red"})
    [part] = query.reader.partitions(query.offset, query.next())
    [batch] = query.reader.read(part)
    [row] = batch.to_pylist()
    assert (row["seq"], row["subject"], row["data"]) == (26, f"{stream.name}.a", b"last")
    assert row["headers"] == [("color", "red")]
    assert row["time"] is not None


def test_a_large_range_is_read_in_several_tasks(stream: Stream) -> None:
    stream.publish(b"x" for _ in range(4_321))
    query = Query(stream, partitions=3)
    end = query.next()
    parts = query.reader.partitions(query.offset, end)
    assert [(part.after, part.last) for part in parts] == [(0, 1440), (1440, 2880), (2880, 4321)]
    assert query.batch() == list(range(1, 4_322))


def test_only_the_subjects_that_are_wanted(stream: Stream) -> None:
    for number in range(30):
        stream.publish([number], subject="a.x" if number % 3 == 0 else "b.x")
    query = Query(stream, subject=f"{stream.name}.a.*")
    assert query.batch(ReadMaxRows(10)) == [1, 4, 7, 10]
    assert query.batch(ReadMaxRows(2)) == [], "the sequences 11 and 12 are of another subject"
    assert query.batch() == [13, 16, 19, 22, 25, 28]


def test_where_a_new_query_begins(stream: Stream) -> None:
    assert Query(stream).offset["seq"] == 0
    stream.publish(range(10))
    assert Query(stream, start=7).batch() == [7, 8, 9, 10]
    latest = Query(stream, start="latest")
    assert latest.next() is latest.offset
    stream.publish(range(2))
    end = latest.next()
    # killed in its first batch: Spark's log has only the batch's end, so that Spark asks again where the query begins
    latest.reader = reader(stream, start="latest")
    latest.offset = latest.reader.initialOffset()
    assert latest.offset["seq"] == 12
    assert [seq for seq, _ in latest.read(end)] == [11, 12]
    with pytest.raises(SourceGap, match="the stream holds 1 to 12, but the option start is 99"):
        Query(stream, start=99)


def test_an_available_now_query_ends(stream: Stream) -> None:
    stream.publish(range(5))
    query = Query(stream)
    query.reader.prepareForTriggerAvailableNow()
    stream.publish(range(5))
    assert query.batch() == [1, 2, 3, 4, 5]
    assert query.next() is query.offset


def test_messages_deleted_before_they_were_due_are_none(stream: Stream) -> None:
    stream.publish(range(10))
    stream.delete_message(3)
    stream.delete_message(10)
    assert Query(stream).batch() == [1, 2, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("subject", [None, "a"])
def test_messages_deleted_since_they_were_due_are_a_gap(stream: Stream, subject: str | None) -> None:
    stream.publish(range(10))
    options = {} if subject is None else {"subject": f"{stream.name}.{subject}"}
    query = Query(stream, **options)
    end = query.next()
    [part] = query.reader.partitions(query.offset, end)
    stream.delete_message(4)
    with pytest.raises(SourceGap, match=r"^source_gap: 1 messages between 1 and 10 were deleted while they were read"):
        list(query.reader.read(part))
    with pytest.raises(
        SourceGap, match=r"1 messages between 1 and 10 were deleted after the batch was planned .*on_gap=skip"
    ):
        query.read(end)


def test_messages_that_expired_before_the_query_came_to_them_are_a_gap(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    stream.publish(range(20))
    query, skipping = Query(stream), Query(stream, on_gap="skip")
    for each in (query, skipping):
        assert each.batch(ReadMaxRows(5)) == [1, 2, 3, 4, 5]
    stream.purge(below=11)
    with pytest.raises(SourceGap, match="messages 6 to 10 were deleted before they were read"):
        query.next()
    with caplog.at_level(logging.WARNING):
        assert skipping.batch(ReadMaxRows(5)) == [11, 12, 13, 14, 15]
    assert "source_gap: messages 6 to 10" in caplog.text
    assert skipping.batch() == [16, 17, 18, 19, 20]


def test_another_stream_under_the_name_is_a_gap(stream: Stream) -> None:
    stream.publish(range(10))
    query = Query(stream)
    query.batch()
    stream.delete()
    stream.make()
    stream.publish(range(20))
    with pytest.raises(SourceGap, match="deleted and recreated"):
        query.next()


def test_what_cannot_work_is_refused_at_once(stream: Stream) -> None:
    with pytest.raises(
        Unavailable, match=r"^unavailable: the NATS server cannot serve the request: .*servers=nats://127.0.0.1:1"
    ):
        reader(stream, servers="nats://127.0.0.1:1").initialOffset()
    with pytest.raises(SourceMissing, match=r"^source_missing: there is no stream 'nowhere'"):
        reader(stream, stream="nowhere").initialOffset()
    with pytest.raises(InvalidArgument, match="the server refuses"):
        reader(stream, subject="another.subject").initialOffset()
    queue = Stream(URL, f"test-{uuid.uuid4().hex}", retention="workqueue")
    try:
        with pytest.raises(InvalidArgument, match="retention 'workqueue'"):
            reader(queue).initialOffset()
    finally:
        queue.delete()


def test_a_server_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        stream = Stream(server.url, "S")
        stream.publish(range(2_000))
        query = Query(stream, partitions=1)
        end = query.next()
        [part] = query.reader.partitions(query.offset, end)
        reading = query.reader.read(part)
        got = next(reading).num_rows
        assert got < 2_000
        server.kill()
        server.start()
        assert got + sum(batch.num_rows for batch in reading) == 2_000
        server.kill()
        impatient = reader(stream, unavailable_timeout=0)
        with pytest.raises(Unavailable):
            list(impatient.read(part))
        server.start()
        assert query.next() == end
    finally:
        server.kill()


# -- with Spark -----------------------------------------------------------------------------------------------

DRIVER = """
import sys
from stateflow.spark import apply_operator, local_session, register_jetstream
from tests.integration.spark_operators import Tally

url, stream, cluster, work, once = sys.argv[1:]
spark = local_session("jetstream", spark__sql__shuffle__partitions="2")
register_jetstream(spark)
rows = (
    spark.readStream.format("jetstream")
    .option("servers", url).option("stream", stream).option("max_rows_per_batch", "50")
    .schema("seq long, k string, kind string, v long")
    .load()
)
out = apply_operator(rows, Tally, cluster=cluster, order_by="seq")
writer = out.writeStream.format("parquet").option("checkpointLocation", f"{work}/checkpoint")
if once == "yes":
    writer = writer.trigger(availableNow=True)
writer.start(f"{work}/output").awaitTermination()
"""


def driver(stream: Stream, cluster: LocalCluster, work: Path, *, once: bool) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, stream.url, stream.name, cluster.address, str(work), "yes" if once else "no"],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # killed with its JVM and its Python workers
    )


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_exactly_once_through_a_killed_driver(spark: SparkSession, stream: Stream, tmp_path: Path) -> None:
    batches: list[list[Row]] = []

    def publish(count: int) -> None:
        batches.append(rows(sum(map(len, batches)), count))
        stream.publish(row._asdict() for row in batches[-1])

    commits = tmp_path / "checkpoint" / "commits"

    def committed() -> int:
        return len([path for path in commits.glob("*") if path.name.isdigit()])

    with LocalCluster(Tally, sites={"cloud": 1, "edge": 1}, partitions=8) as cluster:
        publish(800)
        running = driver(stream, cluster, tmp_path, once=False)
        try:
            eventually(lambda: committed() >= 4 or running.poll() is not None, "4 batches")
            assert running.poll() is None, running.communicate()[1][-3000:]
        finally:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
        assert committed() < 16, "it was killed in the middle"
        publish(100)
        last = driver(stream, cluster, tmp_path, once=True)
        _, said = last.communicate(timeout=600)
        assert last.returncode == 0, said[-3000:]
        model = Model(batches)
        output = sorted(map(tuple, spark.read.parquet(str(tmp_path / "output")).collect()))
        assert output == model.outputs
        assert state_of(cluster, "Tally") == model.state()


@pytest.mark.spark
def test_the_source_in_a_session(spark: SparkSession, stream: Stream, tmp_path: Path) -> None:
    register_jetstream(spark)

    def load(**options: Any) -> Any:
        source = spark.readStream.format("jetstream").option("servers", stream.url).option("stream", stream.name)
        for key, value in options.items():
            source = source.option(key, value)
        return source.load()

    stream.publish(row._asdict() for row in rows(0, 10))
    assert load().columns == ["seq", "time", "subject", "headers", "data"]
    decoded = load(value_schema=SCHEMA + ", _seq long, _time timestamp")
    query = (
        decoded.writeStream.format("memory")
        .queryName("decoded")
        .trigger(availableNow=True)
        .option("checkpointLocation", str(tmp_path / "a"))
        .start()
    )
    assert query.awaitTermination(60)
    got = spark.table("decoded").orderBy("_seq").collect()
    assert [tuple(row)[:4] for row in got] == [tuple(row) for row in rows(0, 10)]
    assert [row["_seq"] for row in got] == list(range(1, 11))
    assert all(row["_time"] is not None for row in got)

    assert "invalid_argument: the option 'max_rows' is unknown" in said_by(lambda: load(max_rows=3))

    def run(**options: Any) -> None:
        started = load(**options).writeStream.format("noop").option("checkpointLocation", str(tmp_path / "b")).start()
        started.awaitTermination(60)

    assert "source_missing: there is no stream 'nowhere'" in said_by(lambda: run(stream="nowhere"))
    assert "unavailable: the NATS server cannot serve the request" in said_by(lambda: run(servers="nats://127.0.0.1:1"))
