"""Every block of Python and YAML in README and docs/ runs as it is printed.

README is one program, as its reader has it. The blocks of a page of docs/ run one after the other, with what the page
assumes: a cluster, and where the page uses them, a Spark session and flights. Only places differ: the cluster's
address, and the paths of files, as the JVM of all tests has another working directory. Blocks of other systems, whose
titles say so, are left out (tests/pages.py).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from stateflow.ledger.manager import ledger_url
from stateflow.spark.pipeline import load_pipeline
from stateflow.spark.session import JETSTREAM, Feature
from stateflow.testing import LocalCluster
from tests.integration.page_operators import DelayByAircraft, Delays, Hourly
from tests.pages import OF_EXAMPLES, PAGES, ROOT, blocks
from tests.versions import lacks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.processes, pytest.mark.spark]
COLUMNS = "time_hour timestamp, tailnum string, dest string, arr_delay double"
#: without what runs elsewhere: README below, docs/state.md in tests/unit/state/test_docs.py, examples in
#: test_examples.py
DOCS = [
    page
    for page in PAGES
    if page not in OF_EXAMPLES
    and page not in (ROOT / "README.md", ROOT / "docs" / "state.md")
    and {"python", "yaml"} & {block.kind for block in blocks(page)}
]
#: names that pages use without making them, and those of them that need a Spark session
GIVEN = {"cluster", "spark", "flights", "df", "query", "DelayByAircraft", "Delays", "work"}
OF_SPARK = {"spark", "flights", "df", "query"}
#: names in blocks that not every PySpark has
NEWER = {"register_jetstream": JETSTREAM, "TwsTester": Feature("Spark's tester of stateful processors", (4, 2))}
ADDRESSES = re.compile(r"ctl-a:7070,ctl-b:7070|ctl:7070|localhost:7070")
FOLDERS = re.compile(r'"(?=(?:flights|checkpoint|output|delays|late|raw|clean)/)')


def test_readme_is_a_program(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text("\n".join(block.text for block in blocks(ROOT / "README.md") if block.kind == "python"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, script.name],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600, check=False,
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
    with LocalCluster(DelayByAircraft, Delays, Hourly, sites=sites, partitions=16, data_dir=folder) as started:
        with started.stream("Hourly", source="gates") as gates:  # a state of windows is known from its first row on
            gates.send([{"gate": "B2", "at": datetime(2013, 1, 1, 12, tzinfo=UTC)}])
        yield started


@pytest.fixture
def given(local: LocalCluster) -> dict[str, Any]:
    """Values for the names that pages use without making them."""
    return {
        "cluster": local.cluster,
        "DelayByAircraft": DelayByAircraft,
        "Delays": Delays,
        "work": lambda item: {"done": item.item_id},
    }


@pytest.fixture
def given_spark(local: LocalCluster, spark: SparkSession, tmp_path: Path) -> dict[str, Any]:
    """Values for the names that pages about queries use without making them."""
    from stateflow.spark import apply_operator

    rows = spark.range(20).selectExpr(
        "timestamp_seconds(id) time_hour", "concat('N', id % 5) tailnum", "'IAH' dest", "double(id) arr_delay"
    )
    rows.write.parquet(f"{tmp_path}/flights/")
    rows.write.parquet(f"{tmp_path}/raw/2013-01")
    flights = spark.readStream.schema(COLUMNS).parquet(f"{tmp_path}/flights/")
    query = apply_operator(flights, DelayByAircraft, cluster=local).writeStream.format("noop").start()
    query.processAllAvailable()
    return {"spark": spark, "flights": flights, "df": flights, "query": query}


def taken_for_given(page: Path) -> set[str]:
    """Names of GIVEN that the page's blocks use and do not make."""
    tree = ast.parse("\n".join(block.text for block in blocks(page) if block.kind == "python"))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    made |= {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    return {node.id for node in names} & GIVEN - made


def lacking(text: str) -> str:
    """Returns why a block cannot run here; empty: it can."""
    return next((why for name, feature in NEWER.items() if name in text and (why := lacks(feature))), "")


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page(
    page: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local: LocalCluster = request.getfixturevalue("local")
    names: dict[str, Any] = dict(request.getfixturevalue("given"))
    streams, left_out = None, ""
    if taken_for_given(page) & OF_SPARK:
        names |= request.getfixturevalue("given_spark")
        streams = names["spark"].streams
    try:
        for block in blocks(page):
            if why := lacking(block.text):
                left_out = f"{block}: {why}"
            elif block.kind == "python":
                text = FOLDERS.sub(f'"{Path.cwd()}/', ADDRESSES.sub(local.address, block.text))
                exec(compile("\n" * block.line + text, str(page), "exec"), names)
                for query in streams.active if streams else ():
                    query.processAllAvailable()
            elif block.kind == "yaml":
                check_yaml(block.text)
    finally:
        for query in streams.active if streams else ():
            query.stop()
    if left_out:
        pytest.skip(f"its other blocks run; {left_out}")


def check_yaml(text: str) -> None:
    document = yaml.safe_load(text)
    if "state_manager" in document:
        environment = {"LEDGER_USER": "user", "LEDGER_PASSWORD": "secret"}
        assert ledger_url(document, environment).host == "db.example.org"
    elif "scrape_configs" in document:  # Prometheus reads it, and asks there
        asked = [each["url"] for job in document["scrape_configs"] for each in job["http_sd_configs"]]
        assert asked
        assert all(url.endswith(":9072/sd") for url in asked)
    else:
        file = Path("pipeline.yml")
        file.write_text(text)
        load_pipeline(file, {}, {"DB_USER": "user", "DB_PASSWORD": "secret"})
