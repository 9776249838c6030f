"""Every example as its user runs it, on one cluster and in one Spark session; the results were worked out by hand."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from stateflow.demo.flights import load_flights
from stateflow.ledger import Ledger
from stateflow.operator.operator import load
from stateflow.partitioner import partition_of
from stateflow.project.writing import EXAMPLES, example_named, write_project
from stateflow.spark.pipeline import Outcome, _run, load_pipeline
from stateflow.testing import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.processes, pytest.mark.spark]
ROOT = Path(__file__).parents[2]
PARTITIONS = 4


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster whose replicas can import the modules beside a program, as those that the program itself starts can."""
    sites = {"cloud": 1, "north": 1, "south": 1}
    with pytest.MonkeyPatch.context() as patched:
        for example in EXAMPLES:
            patched.syspath_prepend(str(example.folder))
        with LocalCluster(sites=sites, data_dir=tmp_path_factory.mktemp("examples")) as started:
            yield started


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The example that a test's parameter names, as ``stateflow init`` writes it; also the working directory."""
    write_project(tmp_path / "project", example_named(request.param))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def run(
    spark: SparkSession, local: LocalCluster, project: Path, settings: Mapping[str, str] | None = None
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Runs a pipeline as ``stateflow run pipeline.yml --once`` does; returns the outcome and the rows that it writes.

    The cluster and the sink are others, and paths are absolute, as the JVM of all tests has another working directory.
    """
    document = yaml.safe_load((project / "pipeline.yml").read_text())
    document["cluster"] = local.address
    document["source"]["path"] = f"{project}/{document['source']['path']}"
    sink = {"format": "json", "path": f"{project}/{document['sink'].get('path', 'out')}"}
    if document["source"].get("streaming", True):
        sink["checkpoint"] = f"{project}/checkpoint"
    document["sink"] = {**sink, "mode": document["sink"].get("mode", "append")}
    for step in document["operators"]:
        local.cluster.deploy(load(step["operator"]), PARTITIONS)
    (project / "here.yml").write_text(yaml.safe_dump(document))
    file = load_pipeline(project / "here.yml", settings or {}, {})
    manager = file.state_manager()
    try:
        outcome = _run(spark, file, manager, once=True, stop=threading.Event(), tell=lambda _: None)
    finally:
        if manager is not None:
            manager.ledger.close()
    return outcome, [row.asDict(recursive=True) for row in spark.read.json(file.config.sink.path).collect()]


@pytest.mark.parametrize("project", ["fraud"], indirect=True)
def test_fraud(spark: SparkSession, local: LocalCluster, project: Path) -> None:
    _, rows = run(spark, local, project)
    assert sorted((row["card"], row["at"], row["score"], row["why"]) for row in rows) == [
        ("C07", "2026-03-02T13:23:00.000Z", 60, ["3 countries in an hour"]),
        ("C07", "2026-03-02T13:41:00.000Z", 60, ["4 countries in an hour"]),
        ("C11", "2026-03-02T17:30:00.000Z", 40, ["an unusual amount"]),
    ]
    paid = local.cluster.read_state("FraudScore", "payments").to_pylist()
    assert sum(row["value"] for row in paid) == 124 - 3, "all but those"


@pytest.mark.parametrize("project", ["sessions"], indirect=True)
def test_sessions(spark: SparkSession, local: LocalCluster, project: Path) -> None:
    outcome, rows = run(spark, local, project)
    assert outcome.batches == 3
    visits = [row for row in rows if row.get("late") is None]
    assert sorted((row["user"], row["began"][11:16], row["minutes"], row["clicks"]) for row in visits) == [
        ("ann", "09:00", 33.5, 5),
        ("bob", "09:01", 8.5, 2),
        ("bob", "09:45", 0.0, 1),
        ("cid", "09:20", 55.0, 3),
    ], "the click of the second file joined two of cid's; those of the evening go on"
    assert [row["pages"] for row in visits if row["user"] == "cid"] == [["/", "/help"]]
    (late,) = (row["late"] for row in rows if row.get("late") is not None)
    assert (late["user"], late["page"]) == ("bob", "/basket")


@pytest.mark.parametrize("project", ["dedup"], indirect=True)
def test_dedup(spark: SparkSession, local: LocalCluster, project: Path) -> None:
    _, rows = run(spark, local, project)
    sent = Counter(line.split(",")[1] for line in (project / "events.csv").read_text().splitlines()[1:])
    assert Counter(row["event"] for row in rows) == Counter(set(sent)), "each once"
    repeated = local.cluster.read_state("Once", "repeated").to_pylist()
    assert sum(row["value"] for row in repeated) == sent.total() - len(sent) == 20


@pytest.mark.parametrize("project", ["stages"], indirect=True)
def test_stages(spark: SparkSession, local: LocalCluster, project: Path) -> None:
    Ledger("sqlite:///stages.db").close()
    _, rows = run(spark, local, project, {"day": "2026-03-01"})
    assert sorted((row["at"][11:16], row["leader"], row["total"]) for row in rows if row["region"] == "west") == [
        ("09:02", "Bonn", 26.8),
        ("09:46", "Aachen", 87.82),
        ("15:53", "Bonn", 236.54),
    ]
    outcome, rows = run(spark, local, project, {"day": "2026-03-02"})
    assert not outcome.done_before
    assert {row["at"][:10] for row in rows} == {"2026-03-02"}
    outcome, again = run(spark, local, project, {"day": "2026-03-02"})
    assert outcome.done_before
    assert again == rows
    sold = {row["key"]: row["value"] for row in local.cluster.read_state("Sold", "total").to_pylist()}
    wanted: Counter[str] = Counter()
    for file in project.glob("sales-*.csv"):
        for line in file.read_text().splitlines()[1:]:
            _, shop, _, amount = line.split(",")
            wanted[shop] += round(100 * float(amount))
    assert {shop: round(100 * total) for shop, total in sold.items()} == wanted, "both days, each once"


def test_enrichment(spark: SparkSession, local: LocalCluster, tmp_path: Path) -> None:
    from enrich import enrich
    from enrichment import Enriched

    local.cluster.deploy(Enriched, PARTITIONS)
    stream = (
        enrich(spark, example_named("enrichment").folder, local.address)
        .writeStream.format("memory")
        .queryName("enriched")
    )
    stream.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start().awaitTermination()
    assert sorted(map(tuple, spark.table("enriched").collect())) == [
        ("o1", "c1", 12.5, "Ann", "basic"),
        ("o2", "c2", 99.0, "Bob", "gold"),
        ("o4", "c1", 20.0, "Ann", "gold"),
        ("o5", "c2", 1.0, "Bob", "gold"),
    ]
    (waiting,) = local.cluster.read_state("Enriched", "waiting").to_pylist()
    assert waiting["key"] == "c3", "nobody has told of it"


def test_flights(spark: SparkSession, local: LocalCluster, tmp_path: Path) -> None:
    from flights import AircraftDelays
    from replay import replay

    local.cluster.deploy(AircraftDelays, PARTITIONS)
    rows = 1000
    out = replay(spark, rows, tmp_path, local.address).collect()
    flights = load_flights().head(rows).dropna(subset="tailnum")
    assert len(out) == len(flights)
    last = {row.tailnum: row for row in sorted(out, key=lambda row: row.flights)}
    wanted = flights.assign(arr_delay=flights.arr_delay.fillna(0)).groupby("tailnum").agg(
        flights=("seq", "size"), mean=("arr_delay", "mean"), carriers=("carrier", lambda each: sorted(set(each)))
    )  # fmt: skip
    assert {tailnum: row.flights for tailnum, row in last.items()} == wanted.flights.to_dict()
    assert {tailnum: row.mean_delay for tailnum, row in last.items()} == pytest.approx(
        wanted["mean"].to_dict(), abs=0.01
    )
    assert {tailnum: row.carriers for tailnum, row in last.items()} == wanted.carriers.to_dict()


def test_vehicles(local: LocalCluster) -> None:
    from drive import drive
    from vehicles import Trips

    for sites in (["cloud"], []):  # at the cloud first, and then at any site
        local.cluster.deploy(Trips, PARTITIONS, sites=sites)
    said = list(drive(local.cluster))
    assert [line.partition(", pause")[0] for line in said if "→" in line] == [
        "cloud-0 → north-0: COMPLETED",
        "north-0 → south-0: COMPLETED",
    ]
    sent = sum(int(line.split()[0]) for line in said if "readings" in line)
    assert said[-1].endswith(f"the state has {sent}, from north, south")


def test_gateway(local: LocalCluster, tmp_path: Path) -> None:
    from outage import outage
    from pumps import Pumps

    for sites in (["cloud"], []):
        local.cluster.deploy(Pumps, PARTITIONS, sites=sites, failover="manual")
    partitions = [partition_of((pump,), PARTITIONS) for pump in ("P0", "P1", "P2", "P3")]
    near = set(partitions[:2])
    assert local.migrate("Pumps", sorted(near), to="north").wait().state == "COMPLETED"
    away = [number for number in partitions if number not in near]
    assert away
    assert list(outage(local, str(tmp_path))) == [
        "all is well: 20 of 20",
        f"the cloud is gone: {20 - 5 * len(away)} of 20 come from the edge",
        f"kept in the outbox: {2 * len(set(away))} batches",
        f"the cloud is back: {5 * len(away)} outputs of the kept batches",
        "readings of each pump: 11, 11, 11, 11",
    ]


def executed(file: Path) -> dict[str, str]:
    """Executes a notebook and returns the outputs of its code cells, by cell id."""
    notebook = nbformat.read(file, as_version=4)
    place = {"metadata": {"path": str(file.parent)}}
    NotebookClient(notebook, timeout=200, startup_timeout=200, resources=place).execute()
    return {cell.id: "".join(map(str, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}


@pytest.mark.spark
@pytest.mark.parametrize("project", ["notebook"], indirect=True)
def test_notebook_on_spark_connect(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PYTHONPATH", str(ROOT)), ("PYSPARK_PYTHON", sys.executable), ("SPARK_LOCAL_IP", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    outputs = executed(project / "connect.ipynb")
    assert "['cloud-0']" in outputs["cluster"]
    assert outputs["move"].count("cloud-0 → edge-0, COMPLETED") == 8
    assert "Seconds(spark=" in outputs["metrics"]
    assert "50 sensors with" in outputs["state"]


@pytest.mark.parametrize("project", ["notebook"], indirect=True)
def test_notebook(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    outputs = executed(project / "move.ipynb")
    assert "'mean': 21.0" in outputs["harness"]
    assert "['cloud-0'" in outputs["cluster"]
    assert "edge-0" not in outputs["cluster"]
    assert "['edge-0'" in outputs["move"]
    assert "cloud-0" not in outputs["move"]
    assert outputs["report"].count("cloud-0 → edge-0, COMPLETED") == 8
    assert "image/png" in outputs["picture"]
    assert "50 sensors" in outputs["proof"]
