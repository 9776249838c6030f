"""State that is loaded before the first row, through the client and through Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.client import stream as stream_module
from stateflow.errors import BatchChanged, InvalidArgument, SchemaMismatch, StaleBatch
from stateflow.partition.positions import INITIAL
from stateflow.spark import apply_operator, read_state
from stateflow.testing import LocalCluster
from tests.integration.spark_operators import Tally, Typed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.processes]
FIRST = [{"k": f"k{i}", "n": i, "by_kind": {"a": i}, "kinds": ["a"]} for i in range(100)]


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    with LocalCluster(sites={"cloud": 1, "edge": 1}) as cluster:
        yield cluster


def contents(cluster: LocalCluster, operator: str, state: str = "n") -> dict[str, int]:
    return {row["key"]: row["value"] for row in cluster.cluster.read_state(operator, state).to_pylist()}


def test_loading_goes_on_where_it_stopped(running: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = running.cluster
    cluster.deploy(Tally, 8, name="Loaded")
    monkeypatch.setattr(stream_module, "LOADED_ROWS", 10)

    def interrupted() -> Iterator[dict[str, object]]:
        yield from FIRST[:45]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.load_state("Loaded", interrupted())
    assert 0 < len(contents(running, "Loaded")) < 100
    assert cluster.load_state("Loaded", FIRST) == 100
    assert contents(running, "Loaded") == {row["k"]: row["n"] for row in FIRST}
    for others in (FIRST[:40], FIRST[:45], [*FIRST[:-1], FIRST[-1] | {"n": 5}]):
        with pytest.raises(BatchChanged):
            cluster.load_state("Loaded", others)
    with pytest.raises(InvalidArgument, match="this is one row"):
        cluster.load_state("Loaded", FIRST[0])  # type: ignore[arg-type]
    stream = cluster.stream("Loaded", "s", schema="seq long, k string, kind string, v long")
    (out,) = stream.send([{"seq": 0, "k": "k5", "kind": "a", "v": 1}])
    assert out["n"] == 6
    assert cluster.load_state("Loaded", FIRST) == 100
    assert contents(running, "Loaded")["k5"] == 6
    with pytest.raises(StaleBatch, match="has already processed rows"):
        cluster.load_state("Loaded", [*FIRST, *({"k": "k5", "n": 0} for _ in range(20))])
    with pytest.raises(InvalidArgument, match="reserved"):
        cluster.stream("Loaded", INITIAL)


@pytest.mark.spark
def test_a_query_starts_from_a_dataframe(
    running: LocalCluster, spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running.cluster.deploy(Tally, 8, name="FromSpark")
    first = spark.createDataFrame(
        [(f"k{i}", i, {"a": i}) for i in range(100)], "k string, n long, by_kind map<string,long>"
    )
    (tmp_path / "in").mkdir()
    rows = spark.createDataFrame([(i, f"k{i}", "a", 1) for i in range(50)], "seq long, k string, kind string, v long")
    rows.coalesce(1).write.parquet(str(tmp_path / "in"), mode="append")
    for _ in range(2):  # the second start loads nothing again
        stream = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "in"))
        out = apply_operator(stream, Tally, cluster=running.cluster, name="FromSpark", initial_state=first)
        query = out.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "ckpt"))
        query.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
    got = {row.k: row.n for row in spark.read.parquet(str(tmp_path / "out")).collect()}
    assert got == {f"k{i}": i + 1 for i in range(50)}
    assert contents(running, "FromSpark") == {f"k{i}": i + (i < 50) for i in range(100)}
    others = first.selectExpr("cast(hash(k) as long) as k", "n")
    with pytest.raises(SchemaMismatch, match="the key column 'k' is bigint in initial_state, string in the input"):
        apply_operator(stream, Tally, cluster=running.cluster, name="FromSpark", initial_state=others)
    with caplog.at_level("WARNING", "stateflow"):
        apply_operator(stream, Tally, cluster=running.cluster, name="FromSpark", initial_state=first)
    assert "FromSpark already has its initial state, ignoring the rows of initial_state=" in caplog.text
    with pytest.raises(InvalidArgument, match="batch DataFrame"):
        apply_operator(stream, Tally, cluster=running.cluster, name="FromSpark", initial_state=stream)


@pytest.mark.spark
def test_what_is_read_is_typed_as_declared_and_taken_as_first_state(running: LocalCluster, spark: SparkSession) -> None:
    for name in ("First", "Second"):
        running.cluster.deploy(Typed, 4, name=name)
    rows = spark.createDataFrame([("a", 1), ("b", 2), ("c", 3)], "k string, n long")
    apply_operator(rows, Typed, cluster=running.cluster, name="First").collect()

    def read(name: str, of: str) -> DataFrame:
        return read_state(spark, cluster=running.cluster, operator=name, state=of).select("key.*", "map_key", "value")

    types = {of: read("First", of).schema["value"].dataType.simpleString() for of in ("stop", "pair", "names", "ids")}
    assert types == {
        "stop": "struct<name:string,at:timestamp>",
        "pair": "struct<_0:string,_1:bigint>",
        "names": "map<bigint,string>",
        "ids": "string",
    }
    assert {row.value for row in read("First", "anything").collect()} == {"1", '"b"', "3"}
    first = rows
    for of in ("stop", "pair", "names"):
        first = first.join(read("First", of).select("k", "n", F.col("value").alias(of)), ["k", "n"])
    entries = F.map_from_entries(F.collect_list(F.struct("map_key", "value")))
    first = first.join(read("First", "ids").groupBy("k", "n").agg(entries.alias("ids")), ["k", "n"])
    apply_operator(rows.limit(0), Typed, cluster=running.cluster, name="Second", initial_state=first).collect()
    for of in ("stop", "pair", "names", "ids"):
        one, other = (sorted(read(name, of).collect(), key=str) for name in ("First", "Second"))
        assert one == other
        assert len(one) == 3
    result = CliRunner().invoke(app, ["state", "scan", "First", "names", "--controller", running.address, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["entries"]
    assert {"k": "a", "n": 1} in [entry["key"] for entry in found]
