"""Every block of Python and YAML in README and docs/ runs as it is printed.

README is one program, as its reader has it. The blocks of a page of docs/ are run one after the other, with what the
page takes for given: a cluster, a Spark session, flights. Only places are others: the cluster's address, and where
files are, as the JVM of all tests has another working directory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from stateflow.ledger.config import ledger_url
from stateflow.spark.pipeline_file import load_pipeline
from stateflow.testing import LocalCluster
from tests.integration.page_operators import DelayByAircraft, Delays
from tests.pages import PAGES, ROOT, blocks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.processes, pytest.mark.spark]
COLUMNS = "time_hour timestamp, tailnum string, dest string, arr_delay double"
#: run elsewhere: README below, docs/state.md by tests/unit/state/test_docs.py
DOCS = [
    page
    for page in PAGES
    if page.name not in ("README.md", "state.md") and {"python", "yaml"} & {block.kind for block in blocks(page)}
]
ADDRESSES = re.compile(r"ctl:7070|localhost:7070")
FOLDERS = re.compile(r'"(?=(?:flights|checkpoint|output|delays|late|raw|clean)/)')


def test_readme_is_a_program(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text("\n".join(block.text for block in blocks(ROOT / "README.md") if block.kind == "python"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, script.name],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert "state='COMPLETED'" in done.stdout
    shown = {tuple(line.replace(" ", "").split("|")[1:4]) for line in done.stdout.splitlines() if "|" in line}
    assert {("N14228", "IAH", "11.0"), ("N14228", "ORD", "-4.0"), ("N24211", "IAH", "20.0")} <= shown, "the state"
    assert {("N14228", "1", "11.0"), ("N14228", "2", "3.5"), ("N24211", "1", "20.0")} <= shown, "the output"
    assert "[{'tailnum': 'N14228', 'flights': 1, 'mean_delay': 11.0}]" in done.stdout


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    sites = {"cloud": 1, "edge": 1, "edge-1": 1}
    folder = tmp_path_factory.mktemp("pages")
    with LocalCluster(DelayByAircraft, Delays, sites=sites, partitions=16, data_dir=folder) as started:
        yield started


@pytest.fixture
def given(local: LocalCluster, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the pages speak of without making it."""
    from stateflow.spark import apply_operator

    monkeypatch.chdir(tmp_path)
    rows = spark.range(20).selectExpr(
        "timestamp_seconds(id) time_hour", "concat('N', id % 5) tailnum", "'IAH' dest", "double(id) arr_delay"
    )
    rows.write.parquet(f"{tmp_path}/flights/")
    rows.write.parquet(f"{tmp_path}/raw/2013-01")
    flights = spark.readStream.schema(COLUMNS).parquet(f"{tmp_path}/flights/")
    query = apply_operator(flights, DelayByAircraft, cluster=local).writeStream.format("noop").start()
    query.processAllAvailable()
    return {
        "cluster": local.cluster,
        "spark": spark,
        "flights": flights,
        "df": flights,
        "query": query,
        "DelayByAircraft": DelayByAircraft,
        "Delays": Delays,
        "work": lambda item: {"done": item.item_id},
    }


@pytest.fixture(autouse=True)
def no_query_is_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_the_blocks_of_a_page(page: Path, given: dict[str, Any], local: LocalCluster) -> None:
    for block in blocks(page):
        if block.kind == "python":
            text = FOLDERS.sub(f'"{Path.cwd()}/', ADDRESSES.sub(local.address, block.text))
            exec(compile("\n" * block.line + text, str(page), "exec"), given)
            for query in given["spark"].streams.active:
                query.processAllAvailable()
        elif block.kind == "yaml":
            check_yaml(block.text)


def check_yaml(text: str) -> None:
    document = yaml.safe_load(text)
    if "state_manager" in document:
        environment = {"LEDGER_USER": "user", "LEDGER_PASSWORD": "secret"}
        assert ledger_url(document, environment).host == "db.example.org"
    else:
        file = Path("pipeline.yml")
        file.write_text(text)
        load_pipeline(file, {}, {"DB_USER": "user", "DB_PASSWORD": "secret"})
