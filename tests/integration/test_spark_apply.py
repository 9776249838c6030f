"""Operators in Spark queries: exactly once, however evaluated, retried, replayed, moved, killed or refused."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from stateflow import Operator
from stateflow.errors import (
    InvalidArgument,
    KeyColumnMissing,
    NoMetrics,
    OperatorNotDeployed,
    SchemaMismatch,
    Unavailable,
    UnknownState,
    UnsupportedKeyType,
)
from stateflow.ledger import Ledger, StateManager
from stateflow.partitioner import partition_of
from stateflow.reports import ProposedMove
from stateflow.spark import Seconds, apply, apply_operator, query_metrics, read_state, rewind
from stateflow.spark.session import PLAN_ONCE
from stateflow.testing import LocalCluster
from tests.integration.spark_operators import MISFIT, POISON, SILENT, ByKey, ByPair, Large, Peak, Tally, fails

pytestmark = [pytest.mark.spark, pytest.mark.processes]

PARTITIONS = 8
SCHEMA = "seq long, k string, kind string, v long"
REPOSITORY = Path(__file__).resolve().parents[2]
FIRST_FILE_S = 1_388_534_400
PATIENCE_S = 60.0
names = itertools.count()


class Row(NamedTuple):
    seq: int
    k: str
    kind: str
    v: int


def rows(first: int, count: int, keys: int = 11) -> list[Row]:
    """``count`` rows from ``seq`` = first on; keys and values repeat with different periods."""
    return [Row(seq, f"k{seq * 7 % keys}", "abc"[seq % 3], seq * seq % 101 - 40) for seq in range(first, first + count)]


# -- the model: what one thread with dictionaries makes of the rows -------------------------------------------


class Model:
    def __init__(self, batches: Iterable[Iterable[Row]] = ()) -> None:
        self.n: dict[str, int] = defaultdict(int)
        self.total: dict[str, int] = defaultdict(int)
        self.by_kind: dict[tuple[str, str], int] = defaultdict(int)
        self.outputs: list[tuple[Any, ...]] = []
        for row in itertools.chain.from_iterable(batches):
            self.n[row.k] += 1
            self.total[row.k] += row.v
            self.by_kind[row.k, row.kind] += row.v
            if row.v != SILENT:
                self.outputs.append((row.seq, row.k, self.n[row.k], self.total[row.k]))

    def state(self) -> dict[str, dict[Any, Any]]:
        kinds = dict.fromkeys(self.by_kind, None)
        return {"n": {(k, None): n for k, n in self.n.items()}, "by_kind": dict(self.by_kind), "kinds": kinds} | {
            "total": {(k, None): total for k, total in self.total.items()}
        }


def state_of(cluster: LocalCluster, operator: str, *states: str) -> dict[str, dict[Any, Any]]:
    return {
        state: {
            (row["key"], row["map_key"]): row["value"]
            for row in cluster.cluster.read_state(operator, state).to_pylist()
        }
        for state in states or ("n", "by_kind", "kinds", "total")
    }


def collected(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, frame.collect()))


# -- fixtures -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(Tally, sites={"cloud": 1, "edge": 1}, partitions=PARTITIONS) as running:
        yield running


@pytest.fixture
def everyone_up(cluster: LocalCluster) -> Iterator[None]:
    """Restarts what a test has killed, so that the next test finds every process running."""
    yield
    for name, process in cluster.processes.items():
        if not process.running:
            cluster.restart(name)


class Deploy:
    """Deploys a class for one test, under a name of its own."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster

    def __call__(self, operator: type[Operator], partitions: int = PARTITIONS) -> str:
        name = f"{operator.__name__}-{next(names)}"
        self.cluster.cluster.deploy(operator, partitions, name=name)
        return name


@pytest.fixture
def deploy(cluster: LocalCluster) -> Deploy:
    return Deploy(cluster)


class Input:
    """A directory that a streaming query reads file by file."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.spark = spark
        self.directory = directory
        directory.mkdir()
        self.batches: list[list[Row]] = []

    def add(self, batch: Sequence[Row]) -> None:
        number = len(self.batches)
        self.batches.append(list(batch))
        columns = list(zip(*batch, strict=True)) or [[], [], [], []]
        types = (pa.int64(), pa.string(), pa.string(), pa.int64())
        arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
        hidden = self.directory / f".{number:05d}.parquet"
        pq.write_table(pa.table(dict(zip(Row._fields, arrays, strict=True))), hidden)
        os.utime(hidden, (FIRST_FILE_S + number, FIRST_FILE_S + number))  # the file source goes by these
        hidden.rename(self.directory / f"{number:05d}.parquet")

    def add_many(self, files: int, each: int = 30) -> None:
        first = sum(map(len, self.batches))
        for number in range(files):
            self.add(rows(first + number * each, each))

    def stream(self) -> DataFrame:
        return self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self.directory))

    def model(self) -> Model:
        return Model(self.batches)


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Input:
    return Input(spark, tmp_path / "input")


class Sink:
    """A parquet directory and a checkpoint: what a query leaves behind and starts again from."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.spark = spark
        self.output = directory / "output"
        self.checkpoint = directory / "checkpoint"

    def start(self, frame: DataFrame, *, forever: bool = False) -> StreamingQuery:
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(self.checkpoint))
        return (writer if forever else writer.trigger(availableNow=True)).start(str(self.output))

    def run(self, frame: DataFrame) -> None:
        """Processes what there is, one file per micro-batch, and ends."""
        query = self.start(frame)
        try:
            assert query.awaitTermination(int(PATIENCE_S)), "the query did not end"
            self.plan: str = query._jsq.explainInternal(False)
        finally:
            query.stop()

    def rows(self) -> list[tuple[Any, ...]]:
        return collected(self.spark.read.parquet(str(self.output)))

    def batches(self) -> int:
        return len([path for path in (self.checkpoint / "commits").iterdir() if path.name.isdigit()])


@pytest.fixture
def sink(spark: SparkSession, tmp_path: Path) -> Sink:
    return Sink(spark, tmp_path / "sink")


class Collected:
    """A foreachBatch sink that keeps every delivery of every batch, repeated ones too."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.deliveries: list[tuple[int, list[tuple[Any, ...]]]] = []

    def run(self, frame: DataFrame) -> None:
        def keep(batch: DataFrame, number: int) -> None:
            self.deliveries.append((number, collected(batch)))

        query = (
            frame.writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(int(PATIENCE_S)), "the query did not end"
        finally:
            query.stop()


def frame_of(spark: SparkSession, batch: Sequence[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(list(batch), SCHEMA)


def said_by(attempt: Callable[[], Any]) -> str:
    """Returns the message of the error that Spark raises for an attempt."""
    with pytest.raises(Exception) as caught:  # Spark has many classes for a failed task
        attempt()
    assert not isinstance(caught.value, AssertionError)
    return str(caught.value)


# -- batch DataFrames -----------------------------------------------------------------------------------------


def test_a_batch_frame_equals_the_model_however_often_it_is_evaluated(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy
) -> None:
    name = deploy(Tally)
    batch = rows(0, 400)
    out = apply_operator(frame_of(spark, batch), Tally, cluster=cluster, order_by="seq", name=name)
    assert out.columns == ["seq", "k", "n", "total"]
    assert out.take(1), "an action that reads some partitions only"
    model = Model([batch])
    assert collected(out) == model.outputs
    assert collected(out.select("*")) == model.outputs, "evaluated anew: Spark may keep what the same frame gave"
    assert out.count() == len(model.outputs)
    assert out.where("n = 1").count() == len(model.n)
    assert state_of(cluster, name) == model.state()


def test_applying_again_applies_again_unless_the_source_has_the_same_name(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy
) -> None:
    name = deploy(Tally)
    batch = rows(0, 60)

    def outputs(source: str | None) -> list[tuple[Any, ...]]:
        applied = apply_operator(
            frame_of(spark, batch), Tally, cluster=cluster.address, order_by="seq", name=name, source=source
        )
        return collected(applied)

    first = outputs("nightly")
    assert outputs("nightly") == first
    assert state_of(cluster, name) == Model([batch]).state()
    for other in (rows(0, 45), rows(0, 75)):
        again = apply_operator(
            frame_of(spark, other), Tally, cluster=cluster, order_by="seq", name=name, source="nightly"
        )
        said = said_by(again.collect)
        assert re.search(
            r"batch_changed: batch 0 (had \d+ row\(s\)|was applied with other rows) "
            ".*: make .* for other rows use another so",
            said,
        )
    assert state_of(cluster, name) == Model([batch]).state()
    outputs(None)
    outputs(None)
    assert state_of(cluster, name) == Model([batch, batch, batch]).state()


@pytest.mark.parametrize("how", ["no rows", "filtered away", "provably filtered away"])
def test_a_batch_frame_without_rows(spark: SparkSession, cluster: LocalCluster, deploy: Deploy, how: str) -> None:
    name = deploy(Tally)
    frame = frame_of(spark, rows(0, 10))
    empty = {
        "no rows": frame_of(spark, []),
        "filtered away": frame.where("v > 1000"),
        "provably filtered away": frame.where("1 = 0"),
    }[how]
    assert collected(apply_operator(empty, Tally, cluster=cluster, name=name)) == []
    assert state_of(cluster, name, "n") == {"n": {}}


def test_one_task_or_more_tasks_than_partitions(spark: SparkSession, cluster: LocalCluster, deploy: Deploy) -> None:
    name = deploy(Tally)
    batches = [rows(0, 50), rows(50, 50), rows(100, 50)]
    outputs = []
    for batch, tasks in zip(batches, (1, 3, 1000), strict=True):
        out = apply_operator(frame_of(spark, batch), Tally, cluster=cluster, order_by="seq", name=name, tasks=tasks)
        assert out.rdd.getNumPartitions() == min(tasks, PARTITIONS)
        shuffles = out._jdf.queryExecution().optimizedPlan().toString().count("RepartitionByExpression")
        assert shuffles == 1 + (tasks > 1), "one task shuffles nothing but its outputs"
        outputs += collected(out)
    assert sorted(outputs) == Model(batches).outputs
    with pytest.raises(InvalidArgument, match="tasks cannot be 0"):
        apply_operator(frame_of(spark, []), Tally, cluster=cluster, name=name, tasks=0)


def test_order_by_decides_the_order_within_a_key(spark: SparkSession, cluster: LocalCluster, deploy: Deploy) -> None:
    name = deploy(Tally)
    batch = rows(0, 300, keys=5)
    shuffled = sorted(batch, key=lambda row: row.seq * 7919 % 307)
    assert shuffled != batch
    frame = frame_of(spark, shuffled).repartition(4)
    out = apply_operator(frame, Tally, cluster=cluster, order_by="seq", name=name)
    assert collected(out) == Model([batch]).outputs
    down = apply_operator(
        frame.withColumn("down", -F.col("seq")), Tally, cluster=cluster, order_by="down", name=deploy(Tally)
    )
    assert collected(down) == sorted(Model([batch[::-1]]).outputs)


def test_rows_that_say_their_site_draw_their_state_there(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy
) -> None:
    """Rows of one batch name two sites; state is drawn to the site of most of them."""
    name, batch = deploy(Tally), rows(0, 300, keys=40)
    site = F.when(F.col("seq") < 40, "cloud").otherwise("edge")  # one row of each key, most of its others from edge
    frame = frame_of(spark, batch).withColumn("site", site)
    (deployed,) = (each for each in cluster.cluster.status().operators if each.name == name)
    wanted = {p for row in batch if deployed.owners[p := partition_of(row.k, PARTITIONS)] == "cloud-0"}
    assert wanted
    moves: tuple[ProposedMove, ...] = ()
    until = time.monotonic() + PATIENCE_S
    with ThreadPoolExecutor(1) as aside:
        # a job of Spark may take as long as the measurement, and its rows come to one partition after another
        while {move.partition for move in moves} != wanted and time.monotonic() < until:
            proposed = aside.submit(cluster.cluster.propose, "locality", operator=name)
            while not proposed.done():
                apply_operator(frame, Tally, cluster=cluster, name=name, site="site").collect()
            moves = proposed.result().moves
    assert {move.partition for move in moves} == wanted
    assert all(move.target == "edge-0" and "come from edge" in move.reason for move in moves)


KEYS_BY_TYPE: dict[str, list[Any]] = {
    "string": ["", "a", "Zürich ✈ 😀", "nul\0l"],
    "bigint": [-(1 << 63), -1, 0, (1 << 63) - 1],
    "int": [-(1 << 31), 0, (1 << 31) - 1],
    "smallint": [-32768, 0, 32767],
    "binary": [b"", b"\0\xff"],
    "boolean": [True, False],
    "double": [-1.5, 0.0, 5e-324, 1e300],
    "float": [-1.5, 0.0, 2.0**100],
    "date": ["0001-01-01", "1969-12-31", "2013-06-30"],
    "timestamp": ["1969-12-31 23:59:59.999999", "2013-06-30 05:17:00.000001"],
}


@pytest.mark.parametrize("kind", KEYS_BY_TYPE)
def test_spark_and_a_stream_client_meet_in_one_state(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, kind: str
) -> None:
    """A key's hash in the JVM, its hash in Python and its encoding in the state agree, or a count would restart."""
    name = deploy(ByKey)
    texts = kind in ("date", "timestamp")
    frame = spark.createDataFrame([(key,) for key in KEYS_BY_TYPE[kind]], f"k {'string' if texts else kind}")
    frame = frame.withColumn("k", F.col("k").cast(kind))
    first = collected(apply_operator(frame, ByKey, cluster=cluster, name=name))
    assert first == [(1,)] * frame.count()
    keys = frame.toArrow()["k"].to_pylist()
    stream = cluster.stream(name, source="beside-spark")
    assert stream.send([{"k": key} for key in keys]) == [{"n": 2}] * len(keys)
    assert set(state_of(cluster, name, "n")["n"].values()) == {2}
    if kind in ("double", "float"):
        assert stream.send([{"k": -0.0}]) == [{"n": 3}], "there is one zero"
        zero = apply_operator(frame.where("k = 0").selectExpr("-k AS k"), ByKey, cluster=cluster, name=name)
        assert collected(zero) == [(4,)]


def test_a_key_of_two_columns(spark: SparkSession, cluster: LocalCluster, deploy: Deploy) -> None:
    name = deploy(ByPair)
    pairs = [(a, b) for a in ("", "a", "ab") for b in (-1, 0, 1)]
    frame = spark.createDataFrame([*pairs, *pairs, ("a", 0)], "a string, b int")
    counted = Counter(dict.fromkeys(pairs, 2)) + Counter([("a", 0)])
    out = apply_operator(frame, ByPair, cluster=cluster, name=name)
    assert collected(out) == sorted((a, b, n + 1) for (a, b), count in counted.items() for n in range(count))
    sent = cluster.stream(name, source="beside-spark").send([{"a": a, "b": b} for a, b in pairs])
    assert {(row["a"], row["b"]): row["n"] for row in sent} == {pair: count + 1 for pair, count in counted.items()}


# -- streaming queries ----------------------------------------------------------------------------------------


def test_micro_batches_a_stop_a_restart_with_other_tasks(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink
) -> None:
    name = deploy(Tally)
    for files, tasks in ((3, None), (2, None), (2, 1), (2, 5)):
        source.add_many(files)
        sink.run(apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=tasks))
        model = source.model()
        assert sink.rows() == model.outputs
        assert state_of(cluster, name) == model.state()
    assert sink.batches() == 9, "one per file"


@pytest.mark.parametrize("tasks", [None, 1])
def test_batches_without_rows_advance_every_partition(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink, tasks: int | None
) -> None:
    name = deploy(Tally)
    wanted = []
    for first, value in ((0, 1), (10, -1), (20, -1), (30, 1), (40, -1), (50, 1)):
        source.add([Row(seq, "few" if seq < 30 else f"k{seq}", "a", value) for seq in range(first, first + 10)])
        wanted.append([row for row in source.batches[-1] if row.v > 0])
    some = source.stream().where("v > 0")
    sink.run(apply_operator(some, Tally, cluster=cluster, order_by="seq", name=name, tasks=tasks))
    model = Model(wanted)
    assert sink.rows() == model.outputs
    assert state_of(cluster, name) == model.state()
    query = json.loads((sink.checkpoint / "metadata").read_text())["id"]
    assert positions(cluster, name, f"query:{query}") == dict.fromkeys(range(PARTITIONS), 5)


def positions(cluster: LocalCluster, operator: str, source: str) -> dict[int, int]:
    """Returns the newest batch of the source in each partition, by partition."""
    from stateflow.rpc import replica_pb2 as rpb
    from stateflow.rpc.clients import ControllerClient, ReplicaClient

    found: dict[int, int] = {}
    owners = ControllerClient(cluster.address).deployment(operator).owners
    for partition, owner in enumerate(owners):
        request = rpb.PositionsRequest(operator=operator, source=source, partitions=[partition])
        found.update(ReplicaClient(owner.address).call("Positions", request).positions)
    return found


@pytest.fixture(params=[False, True], ids=["planned-once", "planned-adaptively"])
def adaptive(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[bool]:
    """Runs a test with plans made once, as stateflow sets it, and with adaptive plans, as Spark makes by itself."""
    (setting,) = PLAN_ONCE
    ours = spark.conf.get(setting)
    assert ours == "false"
    spark.conf.set(setting, str(request.param).lower())
    yield request.param
    spark.conf.set(setting, ours)


@pytest.mark.parametrize("tasks", [None, 1])
def test_a_branch_of_a_query_whose_source_is_silent_for_a_batch(
    spark: SparkSession,
    cluster: LocalCluster,
    deploy: Deploy,
    source: Input,
    sink: Sink,
    tmp_path: Path,
    adaptive: bool,
    tasks: int | None,
) -> None:
    """A branch without rows for a batch loses nothing, though Spark's optimizer may leave out what is behind it."""
    name = deploy(Tally)
    other = Input(spark, tmp_path / "other")

    def run() -> None:
        counted = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=tasks)
        plain = other.stream().select("seq", "k", F.lit(-1).cast("long").alias("n"), F.col("v").alias("total"))
        sink.run(counted.union(plain))

    for to in (source, other, source, other, other, source):
        to.add(rows(1000 * (to is other) + sum(map(len, to.batches)), 10))
        run()
    passed = [(row.seq, row.k, -1, row.v) for row in itertools.chain.from_iterable(other.batches)]
    assert sink.batches() == 6
    assert sink.rows() == sorted(source.model().outputs + passed)
    assert state_of(cluster, name) == source.model().state()
    assert ("AdaptiveSparkPlan" in sink.plan) is (adaptive and tasks != 1)


@pytest.mark.parametrize("called", [None, "the-same"])
def test_two_queries_into_one_operator(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, tmp_path: Path, called: str | None
) -> None:
    """Two queries feed one operator, also under one ``source=``, which counts within its query."""
    name = deploy(Tally)
    inputs = [Input(spark, tmp_path / f"input-{i}") for i in range(2)]
    sinks = [Sink(spark, tmp_path / f"sink-{i}") for i in range(2)]
    for number, each in enumerate(inputs):
        for file in range(3):
            each.add(rows(1000 * number + 30 * file, 30))
    queries = [
        to.start(apply_operator(each.stream(), Tally, cluster=cluster, order_by="seq", name=name, source=called))
        for each, to in zip(inputs, sinks, strict=True)
    ]
    for query in queries:
        assert query.awaitTermination(int(PATIENCE_S))
    model = Model(itertools.chain.from_iterable(each.batches for each in inputs))
    assert state_of(cluster, name) == model.state()
    outputs = [to.rows() for to in sinks]
    for each, came in zip(inputs, outputs, strict=True):
        assert [(seq, k) for seq, k, _, _ in came] == [(seq, k) for seq, k, _, _ in each.model().outputs]
    counted = Counter((k, n) for came in outputs for _, k, n, _ in came)
    assert counted == Counter((k, n) for k, last in model.n.items() for n in range(1, last + 1)), "each count once"
    values = {row.seq: row.v for each in inputs for batch in each.batches for row in batch}
    in_order = sorted((row for came in outputs for row in came), key=lambda row: (row[1], row[2]))
    for _, of_key in itertools.groupby(in_order, key=lambda row: row[1]):
        own = list(of_key)
        assert [total for *_, total in own] == list(itertools.accumulate(values[row[0]] for row in own))


@pytest.mark.parametrize("tasks", [None, 1])
def test_two_operators_and_stages_before_between_and_behind_them(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink, tasks: int | None
) -> None:
    tally, peak = deploy(Tally), deploy(Peak, 3)
    source.add_many(4)
    factors = {"a": 2, "b": -3}
    known = spark.createDataFrame(list(factors.items()), "kind string, factor long")
    before = source.stream().join(F.broadcast(known), "kind").withColumn("v", F.col("v") * F.col("factor"))
    counted = apply_operator(
        before.where("seq % 5 <> 0"), Tally, cluster=cluster, order_by="seq", name=tally, tasks=tasks
    )
    between = counted.where("n % 2 = 1").withColumn("total", F.abs("total"))
    peaks = apply_operator(between, Peak, cluster=cluster, order_by="seq", name=peak, tasks=tasks)
    sink.run(peaks.where("peaks > 1").select("seq", F.upper("k").alias("k"), "peaks", "highest"))

    fed = [
        [row._replace(v=row.v * factors[row.kind]) for row in batch if row.kind in factors and row.seq % 5]
        for batch in source.batches
    ]
    model = Model(fed)
    assert state_of(cluster, tally) == model.state()
    best: dict[str, list[int]] = {}
    wanted = []
    for seq, k, n, total in model.outputs:
        if n % 2 == 1:
            record = best.setdefault(k, [])
            if not record or abs(total) > record[-1]:
                record.append(abs(total))
            if len(record) > 1:
                wanted.append((seq, k.upper(), len(record), record[-1]))
    assert wanted
    assert sink.rows() == wanted
    highest = {(k, None): record[-1] for k, record in best.items()}
    assert state_of(cluster, peak, "highest") == {"highest": highest}


def test_one_task_behind_an_operator_with_two_gets_a_shuffle(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink
) -> None:
    """One task behind an operator with two gets a shuffle; otherwise the first operator's tasks would run as one."""
    first, second = deploy(Tally), deploy(Tally)
    source.add_many(2)
    out = apply_operator(source.stream(), Tally, cluster=cluster, name=first, tasks=2)
    again = out.selectExpr("seq", "k", "'x' AS kind", "1L AS v")
    sink.run(apply_operator(again, Tally, cluster=cluster, name=second, tasks=1))
    assert state_of(cluster, first) == source.model().state()
    assert state_of(cluster, second, "n") == {"n": source.model().state()["n"]}


def test_columns_that_no_operator_reads(spark: SparkSession, cluster: LocalCluster, deploy: Deploy) -> None:
    name = deploy(ByKey)
    ends = spark.sql("SELECT 'a' AS k, timestamp'0001-01-01 00:00:00' AS at, map('x', 1) AS m").union(
        spark.sql("SELECT 'b', timestamp'9999-12-31 23:59:59.999', map()")
    )
    assert apply_operator(ends, ByKey, cluster=cluster, name=name).count() == 2
    assert state_of(cluster, name, "n") == {"n": {("a", None): 1, ("b", None): 1}}
    months = spark.sql("SELECT 'a' AS k, interval '1' year AS every")
    with pytest.raises(InvalidArgument, match=r"the column 'every' is interval year, which cannot be passed to Python"):
        apply_operator(months, ByKey, cluster=cluster, name=name)


def test_one_operator_twice_in_one_query_under_two_source_names(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink
) -> None:
    name = deploy(Tally)
    source.add_many(2)
    halves = [
        apply_operator(source.stream().where(f"v % 2 {sign} 0"), Tally, cluster=cluster, name=name, source=half)
        for half, sign in (("even", "="), ("odd", "<>"))
    ]
    with pytest.raises(StreamingQueryException, match="tasks_merged"):
        sink.run(halves[0].union(halves[1]))
    sink.run(halves[0].repartition(2).union(halves[1].repartition(2)))
    model = source.model()
    assert state_of(cluster, name) == model.state()
    assert sorted((k, n) for _, k, n, _ in sink.rows()) == sorted((k, n) for _, k, n, _ in model.outputs)


@pytest.mark.parametrize("keys", [1, 11])
def test_outputs_coalesced_to_one_file(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink, keys: int
) -> None:
    """A coalesce in the operator's own stage is refused; nothing is applied twice and nothing lost.

    The coalesce hides from a task which one it is. In a stage of its own a coalesce is welcome, in the same query from
    the same checkpoint.
    """
    name = deploy(Tally)
    for file in range(3):
        source.add(rows(file * 30, 30, keys))
    out = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name)
    with pytest.raises(StreamingQueryException, match="tasks_merged"):
        sink.run(out.coalesce(1))
    sink.run(out.repartition(2).coalesce(1))
    assert sink.rows() == source.model().outputs
    assert state_of(cluster, name) == source.model().state()


def test_inside_foreach_batch_with_two_actions(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, tmp_path: Path
) -> None:
    name = deploy(Tally)
    source.add_many(3)
    outputs: list[tuple[Any, ...]] = []

    def write(batch: DataFrame, number: int) -> None:
        out = apply_operator(batch, Tally, cluster=cluster, order_by="seq", name=name)
        assert out.count() == batch.count()
        outputs.extend(collected(out))

    query = source.stream().writeStream.foreachBatch(write).trigger(availableNow=True)
    running = query.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    assert running.awaitTermination(int(PATIENCE_S))
    assert sorted(outputs) == source.model().outputs
    assert state_of(cluster, name) == source.model().state()


def test_two_uses_without_source_names_are_not_taken_for_each_other(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, tmp_path: Path
) -> None:
    name = deploy(Tally)
    source.add_many(1)

    def write(batch: DataFrame, number: int) -> None:
        for half in ("v % 2 = 0", "v % 2 <> 0"):
            apply_operator(batch.where(half), Tally, cluster=cluster, name=name).count()

    query = source.stream().writeStream.foreachBatch(write).trigger(availableNow=True)
    running = query.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(StreamingQueryException, match=r"operator_used_twice.*source="):
        running.awaitTermination(int(PATIENCE_S))


def test_a_replayed_batch_changes_nothing_and_gives_the_same_outputs(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, tmp_path: Path
) -> None:
    name = deploy(Tally)
    to = Collected(tmp_path / "checkpoint")
    source.add_many(3)
    to.run(apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name))
    model = source.model()
    assert [number for number, _ in to.deliveries] == [0, 1, 2]
    assert state_of(cluster, name) == model.state()

    for tasks in (2, 3):
        for file in (to.checkpoint / "commits").glob("*2*"):
            file.unlink()
        to.run(apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name, tasks=tasks))
        assert to.deliveries[-1] == to.deliveries[2]
        assert state_of(cluster, name) == model.state()
    assert [number for number, _ in to.deliveries] == [0, 1, 2, 2, 2]

    source.add_many(1)
    to.run(apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name))
    assert [row for _, batch in (*to.deliveries[:3], to.deliveries[-1]) for row in batch] == source.model().outputs
    assert state_of(cluster, name) == source.model().state()


def test_a_query_that_lost_its_checkpoint_positions_is_refused(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, tmp_path: Path
) -> None:
    """A query that lost two commits and the newest batch's offsets would plan other rows under its number."""
    name = deploy(Tally)
    to = Collected(tmp_path / "checkpoint")
    source.add_many(3)
    frame = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name)
    to.run(frame)
    for folder, number in (("commits", 1), ("commits", 2), ("offsets", 2)):
        for file in (to.checkpoint / folder).glob(f"*{number}*"):
            file.unlink()
    said = said_by(lambda: to.run(frame))
    assert "stale_batch: the state contains batch 2, but the query's checkpoint has planned no batch after 1" in said
    assert state_of(cluster, name) == source.model().state()


# -- while partitions move and replicas die -------------------------------------------------------------------


def test_partitions_move_back_and_forth_while_a_query_runs(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink
) -> None:
    name = deploy(Tally)
    owners: list[str] = []
    failed: list[str] = []
    enough, stop = threading.Event(), threading.Event()

    def move() -> None:
        for to in itertools.cycle(("edge", "cloud")):
            if stop.is_set():
                return
            report = cluster.migrate(name, list(range(PARTITIONS)), to).wait()
            failed.extend(f"{each.state} {each.error}" for each in report.moves if each.state != "COMPLETED")
            if report.state != "COMPLETED":
                failed.append(f"{report.id} {report.state}: wait() gave no final report")
            owners.append(to)
            if len(owners) >= 4:
                enough.set()

    source.add_many(1)
    query = sink.start(apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name), forever=True)
    mover = threading.Thread(target=move)
    mover.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(source.batches) < 6 or not enough.is_set():
            assert time.monotonic() < deadline
            source.add_many(1)
            query.processAllAvailable()
    finally:
        stop.set()
        mover.join()
        query.stop()
    assert not failed
    assert sink.rows() == source.model().outputs
    assert state_of(cluster, name) == source.model().state()


@pytest.mark.usefixtures("everyone_up")
def test_a_replica_is_killed_and_started_again_during_a_query(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink
) -> None:
    name = deploy(Tally)
    source.add_many(2)
    query = sink.start(apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name), forever=True)
    try:
        query.processAllAvailable()
        for victim in ("edge-0", "cloud-0"):
            source.add_many(2)  # a batch is under way or about to begin when the process goes
            cluster.kill(victim)
            source.add_many(1)
            done = len(source.batches) - 2
            cluster.restart(victim)
            query.processAllAvailable()
            assert sink.batches() > done
        source.add_many(1)
        query.processAllAvailable()
    finally:
        query.stop()
    assert sink.rows() == source.model().outputs
    assert state_of(cluster, name) == source.model().state()


@pytest.mark.usefixtures("everyone_up")
def test_a_replica_that_stays_away_fails_the_task_and_its_return_mends_it(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy
) -> None:
    name = deploy(Tally)
    batch = rows(0, 100)
    out = apply_operator(
        frame_of(spark, batch), Tally, cluster=cluster, order_by="seq", name=name, unavailable_timeout=3.0
    )
    cluster.kill("edge-0")
    started = time.monotonic()
    said = said_by(out.collect)
    # the reason is known where the controller was asked after a heartbeat that did not come
    assert "unavailable: no owner answered for 3 s" in said or "unavailable: edge-0 does not answer" in said
    assert "start the replica that owns the partition" in said or "check that it runs" in said
    assert "edge-0" in said
    assert time.monotonic() - started < 30
    cluster.restart("edge-0")
    model = Model([batch])
    again = out.select("*")  # Spark keeps the failure of a frame that was collected; this is another frame, one plan
    assert collected(again) == model.outputs, "what the replica that was up had applied was not applied again"
    assert state_of(cluster, name) == model.state()


RETRY_SEED = 7
RETRY_SCRIPT = '''
import json, os, sys
from pathlib import Path
from pyspark.sql import functions as F
from stateflow.spark import apply_operator, local_session, query_metrics
from tests.integration.spark_operators import Flaky

address, work = sys.argv[1], Path(sys.argv[2])
spark = local_session("retries", master="local[2,4]", spark__sql__shuffle__partitions="2")
marks = work / "marks"
schema = "seq long, k string, kind string, v long"
stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(work / "input"))
stream = stream.withColumn("marks", F.lit(str(marks))).withColumn("batch", F.expr("seq div 40"))
stream = stream.withColumn("seed", F.lit(int(sys.argv[3])))

def stumble(batches):
    """Behind the operator: its outputs were delivered, then the task dies and is tried again."""
    from pyspark import TaskContext
    context = TaskContext.get()
    yield from batches
    batch, task = int(context.getLocalProperty("streaming.sql.batchId")), context.partitionId()
    mark = work / "stumbled" / f"{batch}-{task}"
    if (batch + task) % 2 == 0 and not mark.exists():
        mark.touch()
        os._exit(1) if batch else sys.exit("stumbled")

counted = apply_operator(stream, Flaky, cluster=address, order_by="seq", tasks=2).mapInArrow(stumble, Flaky.output)
writer = counted.writeStream.format("parquet").option("checkpointLocation", str(work / "checkpoint"))
query = writer.trigger(availableNow=True).start(str(work / "output"))
query.awaitTermination()
rows = sorted(map(tuple, spark.read.parquet(str(work / "output")).collect()))
(work / "result.json").write_text(json.dumps(rows))
counted = [[batch.number, batch.input_rows, batch.rows, batch.tasks] for batch in query_metrics(query).batches]
(work / "metrics.json").write_text(json.dumps(counted))
spark.stop()
'''


def test_tasks_that_are_retried_apply_once(spark: SparkSession, cluster: LocalCluster, tmp_path: Path) -> None:
    """Tasks that fail in the operator, or die after it has answered them, are tried again and apply once.

    The driver has a session of its own, as only ``local[n,attempts]`` retries.
    """
    from tests.integration.spark_operators import Flaky

    cluster.cluster.deploy(Flaky, PARTITIONS)
    (tmp_path / "marks").mkdir()
    (tmp_path / "stumbled").mkdir()
    source = Input(spark, tmp_path / "input")
    source.add_many(3, each=40)
    done = subprocess.run(
        [sys.executable, "-c", RETRY_SCRIPT, cluster.address, str(tmp_path), str(RETRY_SEED)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failing = {row.seq for row in itertools.chain.from_iterable(source.batches) if fails(RETRY_SEED, row.seq)}
    assert len(failing) >= 5
    assert len(list((tmp_path / "marks").iterdir())) >= 5, "tasks that failed in the operator"
    assert len(list((tmp_path / "stumbled").iterdir())) == 3, "tasks that died behind the operator"
    model = source.model()
    assert [tuple(row) for row in json.loads((tmp_path / "result.json").read_text())] == model.outputs
    wanted = {state: cells for state, cells in model.state().items() if state in ("n", "total")}
    assert state_of(cluster, "Flaky", "n", "total") == wanted
    counted = json.loads((tmp_path / "metrics.json").read_text())
    assert counted == [[number, 40, 40, 2] for number in range(3)], "a task that is tried again counts once"


# -- metrics --------------------------------------------------------------------------------------------------


def spent_everywhere(seconds: Seconds) -> bool:
    return min(seconds.spark, seconds.routing, seconds.rpc, seconds.operator, seconds.commit) > 0


def test_metrics_of_a_query_with_two_operators(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    tally, peak = deploy(Tally), deploy(Peak, 3)
    source.add_many(3)
    source.add(rows(90, 7))

    def start() -> StreamingQuery:
        counted = apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=tally, tasks=3)
        odd = counted.where("n % 2 = 1")
        peaks = apply_operator(odd, Peak, cluster=cluster, order_by="seq", name=peak, tasks=2, source="odd")
        writer = peaks.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(int(PATIENCE_S)), "the query did not end"
        return query

    query = start()
    odd = [0] * 4
    for seq, _, n, _ in source.model().outputs:
        odd[min(seq // 30, 3)] += n % 2
    given = [30, 30, 30, 7]
    found = query_metrics(query)
    assert (found.id, found.name, found.batches_total) == (str(query.id), None, 4)
    assert [batch.number for batch in found.batches] == [0, 1, 2, 3]
    assert [batch.input_rows for batch in found.batches] == given
    assert [batch.rows for batch in found.batches] == [all_ + some for all_, some in zip(given, odd, strict=True)]
    by_batch = [
        [(each.operator, each.source, each.rows, each.tasks, each.visits) for each in batch.operators]
        for batch in found.batches
    ]
    assert by_batch == [
        [(tally, None, all_, 3, PARTITIONS), (peak, "odd", some, 2, 3)] for all_, some in zip(given, odd, strict=True)
    ]
    in_all = [(o.batches, o.rows, o.tasks, o.visits, o.repeated, o.replayed) for o in found.operators]
    assert in_all == [(4, 97, 12, 4 * PARTITIONS, 0, 0), (4, sum(odd), 8, 12, 0, 0)]
    triggers = [p["durationMs"]["triggerExecution"] / 1e3 for p in query.recentProgress if p["numInputRows"]]
    for batch, trigger_s in zip(found.batches, triggers, strict=True):
        assert batch.trigger_s == trigger_s
        assert batch.seconds.total == pytest.approx(trigger_s)
        assert all(spent_everywhere(each) for each in (batch.seconds, *(o.seconds for o in batch.operators)))
    assert found.seconds.total == pytest.approx(sum(triggers))
    for number, total in enumerate(found.operators):
        spent = [batch.operators[number].seconds.total for batch in found.batches]
        assert total.seconds.total == pytest.approx(sum(spent))
    assert query_metrics(found.id) == found

    for file in (checkpoint / "commits").glob("*3*"):  # as if the driver had died: Spark does batch 3 again
        file.unlink()
    again = query_metrics(start())
    assert again.batches[:3] == found.batches[:3]
    in_all = [(o.batches, o.rows, o.tasks, o.visits, o.repeated, o.replayed) for o in again.operators]
    assert in_all == [(4, 97, 12, 4 * PARTITIONS, 3, PARTITIONS), (4, sum(odd), 8, 12, 2, 3)]
    last = again.batches[3]
    assert (last.rows, last.tasks) == (7 + odd[3], 5)
    assert last.trigger_s is not None
    assert last.seconds.total == pytest.approx(last.trigger_s)
    assert (last.seconds.operator, last.seconds.commit) == (0.0, 0.0), "the stored output was the answer"


def test_metrics_of_a_batch_frame(spark: SparkSession, cluster: LocalCluster, deploy: Deploy) -> None:
    name = deploy(Tally)
    applied = [
        apply_operator(frame_of(spark, rows(0, 50)), Tally, cluster=cluster, name=name, tasks=2, source=source)
        for source in (None, f"nightly of {name}")
    ]
    for out in applied:
        assert query_metrics(out).batches == ()
        out.collect()
        (batch,) = query_metrics(out).batches
        (total,) = query_metrics(out).operators
        assert (batch.number, batch.input_rows, batch.trigger_s, batch.rows, batch.tasks) == (0, None, None, 50, 2)
        assert (total.visits, total.repeated, total.replayed) == (PARTITIONS, 0, 0)
        assert spent_everywhere(total.seconds)
        assert 0 < batch.seconds.total <= total.seconds.total + 1e-6
        out.select("*").collect()
        (total,) = query_metrics(out).operators
        assert (total.rows, total.tasks, total.repeated, total.replayed) == (50, 2, 2, PARTITIONS)
    assert query_metrics(f"nightly of {name}") == query_metrics(applied[1])


def test_metrics_of_a_query_without_an_operator(spark: SparkSession, source: Input, sink: Sink) -> None:
    source.add_many(1)
    query = sink.start(source.stream())
    assert query.awaitTermination(int(PATIENCE_S))
    with pytest.raises(NoMetrics, match=r"^no_metrics: .*: apply an operator in it"):
        query_metrics(query)
    with pytest.raises(InvalidArgument, match="streaming DataFrame"):
        query_metrics(source.stream())


@pytest.mark.parametrize("keys", [1, 11])
def test_a_task_whose_input_breaks_off_applies_none_of_it(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, monkeypatch: pytest.MonkeyPatch, keys: int
) -> None:
    """A task whose input breaks off applies none of it.

    A worker sees such an input (a killed task, a shuffle that cannot be read) as one that ended. What it had until then
    must not be taken for the batch, as the next attempt would be given its outputs.
    """
    name = deploy(Tally)
    batch = rows(0, 200, keys)
    routed = apply._routed
    torn = F.expr("if(seq < 150, true, raise_error('the shuffle breaks off'))")

    def run() -> list[tuple[Any, ...]]:
        frame = frame_of(spark, batch).coalesce(1).withColumn("pad", F.expr("repeat('x', 4000)"))  # Spark sends 64 KiB
        return collected(apply_operator(frame, Tally, cluster=cluster, order_by="seq", name=name, source="torn"))

    monkeypatch.setattr(apply, "_routed", lambda df, task: routed(df, task).withColumn("torn", torn))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10")
    try:
        assert "the shuffle breaks off" in said_by(run)
        assert state_of(cluster, name, "n") == {"n": {}}
        monkeypatch.setattr(apply, "_routed", routed)
        assert run() == Model([batch]).outputs
        assert state_of(cluster, name) == Model([batch]).state()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


# -- what is refused ------------------------------------------------------------------------------------------


def test_inputs_that_are_refused_before_anything_runs(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy
) -> None:
    name = deploy(Tally)
    frame = frame_of(spark, rows(0, 3))

    def attempt(df: DataFrame, operator: type[Operator] = Tally, deployment: str = name, **options: Any) -> DataFrame:
        return apply_operator(df, operator, cluster=cluster, name=deployment, **options)

    with pytest.raises(KeyColumnMissing, match=r"^key_column_missing: there is no column 'k' .*the input has seq, K2,"):
        attempt(frame.withColumnRenamed("k", "K2"))
    for kind in ("decimal(10,2)", "array<string>", "struct<a:int>", "timestamp_ntz"):
        odd = spark.createDataFrame([], f"k {kind}, seq long, kind string, v long")
        with pytest.raises(UnsupportedKeyType, match=r"^unsupported_key_type: the key column 'k' is "):
            attempt(odd)
    with pytest.raises(OperatorNotDeployed, match=r"^operator_not_deployed: .*deploy\(Tally\)"):
        attempt(frame, deployment="Nowhere")
    streaming = spark.readStream.format("rate").load().selectExpr("'a' AS k", "value AS seq")
    with pytest.raises(InvalidArgument, match=r"^invalid_argument: initial_state is a streaming .*: pass a batch"):
        attempt(frame, initial_state=streaming)
    with Ledger("sqlite://") as ledger:
        manager = StateManager(ledger)
        with pytest.raises(InvalidArgument, match=r"^invalid_argument: state_manager records .*operator=.*: use re"):
            attempt(frame, state_manager=manager)
    with pytest.raises(InvalidArgument, match=r"^invalid_argument: allowed_lateness needs .*: name its column"):
        attempt(frame, allowed_lateness=timedelta(minutes=1))
    with pytest.raises(InvalidArgument, match=r"^invalid_argument: there is no column 'when' to order by"):
        attempt(frame, order_by="when")
    with pytest.raises(
        InvalidArgument, match=r"^invalid_argument: 'seq' cannot be the site column: it is bigint: name"
    ):
        attempt(frame, site="seq")
    with pytest.raises(SchemaMismatch, match=r"^schema_mismatch: .*another key or output"):
        attempt(frame, operator=Peak)
    with pytest.raises(SchemaMismatch, match=r"^schema_mismatch: .*another key or output"):
        attempt(frame, operator=type("Tally", (Tally,), {"key": "kind"}))
    assert state_of(cluster, name, "n") == {"n": {}}


def test_a_key_column_of_another_type_than_the_stored_keys_is_refused(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy
) -> None:
    name = deploy(ByKey)
    numbers = spark.createDataFrame([(number,) for number in range(20)], "k int")
    apply_operator(numbers, ByKey, cluster=cluster, name=name).collect()
    with pytest.raises(SchemaMismatch, match=r"the key column 'k' is string, but stored keys are int64 .*cast"):
        apply_operator(numbers.selectExpr("string(k) AS k"), ByKey, cluster=cluster, name=name)
    wider = numbers.selectExpr("bigint(k) AS k")
    assert apply_operator(wider, ByKey, cluster=cluster, name=name).collect() == [(2,)] * 20
    with pytest.raises(Unavailable, match=r"^unavailable: "):
        apply_operator(numbers, ByKey, cluster="127.0.0.1:1", name=name)


@pytest.mark.usefixtures("everyone_up")
def test_a_query_whose_input_has_another_schema_than_before(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink
) -> None:
    """Another type of the key, or no key, is reported before the query starts, even while a replica is away.

    Other columns that the operator cannot use are reported by the first batch, which is not applied.
    """
    name = deploy(Tally)
    source.add_many(2)

    def applied(*columns: str) -> DataFrame:
        drifted = source.stream().selectExpr(*columns)
        return apply_operator(drifted, Tally, cluster=cluster, order_by="seq", name=name)

    sink.run(applied("*"))
    source.add_many(1)
    cluster.kill("edge-0")
    with pytest.raises(
        SchemaMismatch,
        match=r"^schema_mismatch: the key column 'k' is int, but stored keys are string .*operator=.*: cast",
    ):
        applied("seq", "int(substr(k, 2)) AS k", "kind", "v")
    cluster.restart("edge-0")
    with pytest.raises(KeyColumnMissing, match=r"^key_column_missing: there is no column .k..*; the input has seq"):
        applied("seq", "kind", "v")
    before = state_of(cluster, name)
    assert "operator_failed: process() raised AttributeError" in said_by(lambda: sink.run(applied("seq", "k", "v")))
    text = said_by(lambda: sink.run(applied("seq", "k", "kind", "string(v) AS v")))
    assert "operator_failed: process() raised TypeError" in text
    assert state_of(cluster, name) == before
    sink.run(applied("*"))
    assert sink.rows() == source.model().outputs
    assert state_of(cluster, name) == source.model().state()


def test_what_fails_while_it_runs_leaves_the_state_as_it_was(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy
) -> None:
    name = deploy(Tally)
    good = rows(0, 50)
    collected(apply_operator(frame_of(spark, good), Tally, cluster=cluster, order_by="seq", name=name))
    before = state_of(cluster, name)
    assert before == Model([good]).state()

    def said(batch: list[tuple[Any, ...]]) -> str:
        frame = frame_of(spark, batch)
        # one task, so that the partition of the null key and that of k1 share its fate
        message = said_by(apply_operator(frame, Tally, cluster=cluster, order_by="seq", name=name, tasks=1).collect)
        assert state_of(cluster, name) == before
        return message

    fine = [(100 + i, "k1", "new", 1) for i in range(5)]  # of the same key, so that they share its fate
    nulls = said([*fine, (105, None, "a", 1)])
    assert "null_key: the key column 'k' is null in 1 row(s)" in nulls
    raised = said([*fine, (105, "k1", "a", POISON)])
    assert "operator_failed: process() raised ValueError: poison in row 105" in raised
    assert f"operator={name}" in raised
    assert "key='k1'" in raised
    misfit = said([*fine, (105, "k1", "a", MISFIT)])
    assert "output_mismatch: field 'n' is declared int64 but got 'not a number'" in misfit
    no_value = said([*fine, (105, "k1", "a", None)])
    assert "operator_failed: process() raised TypeError" in no_value

    after = apply_operator(frame_of(spark, fine), Tally, cluster=cluster, order_by="seq", name=name)
    model = Model([good, [Row(*row) for row in fine]])
    assert collected(after) == model.outputs[len(good) :]
    assert state_of(cluster, name) == model.state()


@pytest.mark.parametrize("key", ["nan", "inf"])
def test_a_double_key_that_is_no_finite_number_is_refused(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, key: str
) -> None:
    name = deploy(ByKey)
    frame = spark.createDataFrame([(float(key),), (1.0,)], "k double")
    said = said_by(apply_operator(frame, ByKey, cluster=cluster, name=name).collect)
    assert re.search(rf"unencodable_value: {key} cannot be a key \(.*operator={name}.*\): drop or", said, re.IGNORECASE)
    assert all(row["key"] == 1.0 for row in cluster.cluster.read_state(name, "n").to_pylist())


def test_a_query_that_met_a_bad_row_goes_on_once_it_is_mended(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink
) -> None:
    name = deploy(Tally)
    source.add_many(2)
    bad = [*rows(60, 10), Row(70, "k3", "a", POISON), *rows(71, 10)]
    source.add(bad)
    source.add_many(1)

    def run(frame: DataFrame) -> None:
        sink.run(apply_operator(frame, Tally, cluster=cluster, order_by="seq", name=name))

    assert "operator_failed: " in said_by(lambda: run(source.stream()))
    run(source.stream().withColumn("v", F.expr(f"if(v = {POISON}, 0, v)")))
    source.batches[2][10] = Row(70, "k3", "a", 0)
    assert sink.rows() == source.model().outputs
    assert state_of(cluster, name) == source.model().state()


# -- state as a DataFrame -------------------------------------------------------------------------------------


def test_state_as_a_frame_with_many_entries_in_one_partition(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy
) -> None:
    name = deploy(Large, 2)
    many = 12_000
    sizes = {"big": many, "small": 3, "none": 0}
    frame = spark.createDataFrame(list(sizes.items()), "k string, size int")
    assert apply_operator(frame, Large, cluster=cluster, name=name).count() == 0

    def state(of: str) -> DataFrame:
        read = read_state(spark, cluster=cluster, operator=name, state=of)
        assert read.columns == ["key", "map_key", "value", "partition"]
        return read

    entries = state("entries")
    assert entries.count() == many + 3
    wrong = entries.where("value <> concat(key, '-', map_key)").count()
    assert wrong == 0
    assert entries.groupBy("key").agg(F.countDistinct("map_key")).orderBy("key").collect() == [
        ("big", many),
        ("small", 3),
    ]
    assert entries.where(f"map_key >= {many} or map_key < 0").count() == 0
    members = state("members")
    assert members.groupBy("key").count().orderBy("key").collect() == [("big", many), ("small", 3)]
    assert state("last").where("map_key IS NULL AND value = key").count() == 3
    assert entries.select("key", "partition").distinct().groupBy("key").count().where("count > 1").count() == 0

    few = spark.createDataFrame([(f"key {number}",) for number in range(many * 2 + 3_000)], "k string")
    count = deploy(ByKey, 2)
    apply_operator(few, ByKey, cluster=cluster, name=count).count()
    values = read_state(spark, cluster=cluster.address, operator=count, state="n")
    by_partition = {row["partition"]: row["count"] for row in values.groupBy("partition").count().collect()}
    assert min(by_partition.values()) > 10_000
    assert sum(by_partition.values()) == values.where("value = 1 AND map_key IS NULL").count() == many * 2 + 3_000


def test_state_as_a_frame_that_is_empty_or_unknown(spark: SparkSession, cluster: LocalCluster, deploy: Deploy) -> None:
    name = deploy(Tally)
    assert read_state(spark, cluster=cluster, operator=name, state="by_kind").collect() == []
    with pytest.raises(UnknownState, match=r"^unknown_state: "):
        read_state(spark, cluster=cluster, operator=name, state="nothing")
    with pytest.raises(OperatorNotDeployed, match=r"^operator_not_deployed: "):
        read_state(spark, cluster=cluster, operator="Nowhere", state="n")


# -- back to a checkpoint -------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 12])
def test_a_query_is_put_back_to_the_batch_behind_a_restored_checkpoint(
    spark: SparkSession, cluster: LocalCluster, deploy: Deploy, source: Input, sink: Sink, more: int
) -> None:
    """A query is put back to the batch behind a restored checkpoint, and goes on from there.

    Args:
        more: further batches; 12 are enough for the sink's log to be compacted behind the checkpoint.
    """
    name = deploy(Tally)

    def run() -> None:
        sink.run(apply_operator(source.stream(), Tally, cluster=cluster, order_by="seq", name=name))

    source.add_many(3)
    run()
    cluster.cluster.savepoint(f"before-{name}", name)  # not the newest checkpoint: periodic ones come when they like
    source.add_many(2 + more)
    run()
    reports = cluster.cluster.restore(name, savepoint=f"before-{name}")
    assert {batch for each in reports for batch in each.positions.values()} == {2}
    source.add_many(1)
    refused = said_by(run)
    assert "position_gap: " in refused
    assert "rewind the source to batch 3" in refused
    before = sorted(path for path in sink.checkpoint.rglob("*"))
    plan = rewind(sink.checkpoint, 3, sink=sink.output)
    assert sorted(path for path in sink.checkpoint.rglob("*")) == before, "a dry run changes nothing"
    assert rewind(sink.checkpoint, 3, sink=sink.output, apply=True) == plan
    assert {path.name for path in sink.checkpoint.glob("_rewound/*/commits/*")} >= {"3", "4"}
    assert rewind(sink.checkpoint, 3, sink=sink.output).moved == (), "what was done is not done again"
    run()
    assert sink.rows() == source.model().outputs
    assert state_of(cluster, name) == source.model().state()
    store = str(cluster.data_dir / "checkpoints")
    read = read_state(spark, checkpoint=store, savepoint=f"before-{name}", operator=name, state="n")
    assert read.count() == len(source.model().state()["n"])
    with pytest.raises(InvalidArgument, match="more than one place"):
        read_state(spark, cluster=cluster, checkpoint=store, operator=name, state="n")
    with pytest.raises(InvalidArgument, match="needs a checkpoint store"):
        read_state(spark, cluster=cluster, savepoint=f"before-{name}", operator=name, state="n")
    nowhere = cluster.data_dir / "nowhere"
    with pytest.raises(InvalidArgument, match="has run in this directory"):
        read_state(spark, directory=nowhere, operator=name, state="n")
    assert not nowhere.exists(), "whoever looks makes nothing"
