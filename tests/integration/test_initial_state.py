"""State that was there before the first row, through the client and through Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stateflow.client import cluster as client
from stateflow.errors import InvalidArgument, StaleBatch
from stateflow.runtime.positions import INITIAL
from stateflow.spark import apply_operator
from stateflow.testing import LocalCluster
from tests.integration.spark_operators import Tally

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    monkeypatch.setattr(client, "LOADED_ROWS", 7)

    def interrupted() -> Iterator[dict[str, object]]:
        yield from FIRST[:40]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.load_state("Loaded", interrupted())
    assert 0 < len(contents(running, "Loaded")) < 100
    assert cluster.load_state("Loaded", FIRST) == 100
    assert contents(running, "Loaded") == {row["k"]: row["n"] for row in FIRST}
    stream = cluster.stream("Loaded", "s", schema="seq long, k string, kind string, v long")
    (out,) = stream.send([{"seq": 0, "k": "k5", "kind": "a", "v": 1}])
    assert out["n"] == 6
    assert cluster.load_state("Loaded", FIRST) == 100
    assert contents(running, "Loaded")["k5"] == 6
    with pytest.raises(StaleBatch, match="has processed rows already"):
        cluster.load_state("Loaded", [*FIRST, *({"k": "k5", "n": 0} for _ in range(20))])
    with pytest.raises(InvalidArgument, match="reserved"):
        cluster.stream("Loaded", INITIAL)


@pytest.mark.spark
def test_a_query_starts_from_a_dataframe(running: LocalCluster, spark: SparkSession, tmp_path: Path) -> None:
    running.cluster.deploy(Tally, 8, name="FromSpark")
    first = spark.createDataFrame(
        [(f"k{i}", i, {"a": i}) for i in range(100)], "k string, n long, by_kind map<string,long>"
    )
    (tmp_path / "in").mkdir()
    rows = spark.createDataFrame([(i, f"k{i}", "a", 1) for i in range(50)], "seq long, k string, kind string, v long")
    rows.coalesce(1).write.parquet(str(tmp_path / "in"), mode="append")
    for _ in range(2):  # started again, nothing is loaded again
        stream = spark.readStream.schema(rows.schema).parquet(str(tmp_path / "in"))
        out = apply_operator(stream, Tally, cluster=running.cluster, name="FromSpark", initial_state=first)
        query = out.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "ckpt"))
        query.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
    got = {row.k: row.n for row in spark.read.parquet(str(tmp_path / "out")).collect()}
    assert got == {f"k{i}": i + 1 for i in range(50)}
    assert contents(running, "FromSpark") == {f"k{i}": i + (i < 50) for i in range(100)}
    with pytest.raises(InvalidArgument, match="batch DataFrame"):
        apply_operator(stream, Tally, cluster=running.cluster, name="FromSpark", initial_state=stream)
