"""An operator in a declarative pipeline (``spark-pipelines run``): run, run again, and run while its state moves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateflow.testing import LocalCluster
from tests.integration.spark_operators import Tally

pytestmark = [pytest.mark.spark, pytest.mark.processes]
ROOT = Path(__file__).parents[2]
SPEC = """\
name: tallies
storage: file://{folder}/storage
libraries:
  - glob:
      include: transformations/**
"""
#: ``{flow}``: the flow's function and what precedes it
DEFINED = """\
from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from stateflow.spark import apply_operator
from tests.integration.spark_operators import Tally

spark = SparkSession.active()
rows = spark.readStream.schema("seq long, k string, kind string, v long").parquet("{folder}/in")
dp.create_sink("tallies", format="parquet", options={{"path": "{folder}/out"}})
{flow}
"""
OUTSIDE = """
applied = apply_operator(rows, Tally, cluster="{address}")

@dp.append_flow(target="tallies")
def counted():
    return applied
"""
WITHIN = """
@dp.append_flow(target="tallies")
def counted():
    return apply_operator(rows, Tally, cluster="{address}")
"""
PARTITIONS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(Tally, sites={"cloud": 1, "edge": 1}, partitions=PARTITIONS) as running:
        yield running


def define(folder: Path, cluster: LocalCluster, flow: str) -> None:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "transformations").mkdir(exist_ok=True)
    (folder / "spark-pipeline.yml").write_text(SPEC.format(folder=folder))
    flow = flow.format(address=cluster.address)
    (folder / "transformations" / "tallies.py").write_text(DEFINED.format(folder=folder, flow=flow))


def add(folder: Path, number: int) -> None:
    seq = list(range(number * 10, number * 10 + 10))
    columns = {"seq": seq, "k": [f"k{each % 3}" for each in seq], "kind": ["a"] * 10, "v": [1] * 10}
    pq.write_table(pa.table(columns), folder / "in" / f"{number}.parquet")


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).parent / "spark-pipelines"
    python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    environment = {**os.environ, **python, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PATH"] = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [command, "run"], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_pipeline_is_run_and_run_again(cluster: LocalCluster, tmp_path: Path) -> None:
    define(tmp_path, cluster, OUTSIDE)
    for number, site in enumerate(("edge", "cloud")):
        add(tmp_path, number)
        done = run(tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert cluster.cluster.migrate("Tally", range(PARTITIONS), site).wait().state == "COMPLETED"
    given = [row for file in (tmp_path / "out").glob("*.parquet") for row in pq.ParquetFile(file).read().to_pylist()]
    assert sorted(row["seq"] for row in given) == list(range(20))
    counts: dict[str, list[Any]] = {}
    for row in given:
        counts.setdefault(row["k"], []).append(row["n"])
    assert all(sorted(found) == list(range(1, len(found) + 1)) for found in counts.values())
    state = {row["key"]: row["value"] for row in cluster.cluster.read_state("Tally", "n").to_pylist()}
    assert state == {key: len(found) for key, found in counts.items()}


def test_within_a_query_function_it_says_where_to_apply_it(cluster: LocalCluster, tmp_path: Path) -> None:
    define(tmp_path, cluster, WITHIN)
    done = run(tmp_path)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "invalid_argument: Spark does not analyse DataFrames within a pipeline's query function" in said
