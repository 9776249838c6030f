"""Operators in Spark's real-time mode, on a source that gives the same rows again, while processes are killed."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from benchmarks.replay import Given, Log, has_compiler, make_jar
from benchmarks.replay.driver import Query
from benchmarks.replay.operators import Count, Seconds
from stateflow.errors import InvalidArgument, OperatorUsedTwice
from stateflow.spark import apply_operator
from stateflow.spark.session import REAL_TIME, real_time_settings
from stateflow.testing import LocalCluster
from tests.integration.support import check_owners, eventually
from tests.kills.harness import PATIENCE_S, SEED
from tests.kills.programs import Driver
from tests.kills.real_time import KEYS, SOURCES, check_counted, kill_workers
from tests.versions import needs

pytestmark = [pytest.mark.spark, pytest.mark.processes, needs(REAL_TIME)]
PARTITIONS = 8
ROOT = Path(__file__).parents[2]
EVERY_US = 20_000
#: a session takes about so long to start; rows that are due before come all at once
START_S = 15.0


@pytest.fixture(scope="module")
def jar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not has_compiler():
        pytest.skip("the source of rows is Java, and there is no javac")
    return make_jar(tmp_path_factory.mktemp("replay"))


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    if "cluster_of_three" in request.fixturenames:
        yield request.getfixturevalue("cluster_of_three")
        return
    sites = {"cloud": 1, "edge": 1}
    with LocalCluster(Count, Seconds, sites=sites, partitions=PARTITIONS, data_dir=tmp_path / "cluster") as running:
        yield running


@pytest.fixture
def cluster_of_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A cluster with short leases whose standbys have each batch before it is acknowledged; all is at ``cloud-0``."""
    monkeypatch.setenv("STATEFLOW_CONTROLLER_LEASE_S", "3")
    monkeypatch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")
    monkeypatch.setenv("STATEFLOW_REPLICA_ACKNOWLEDGE", "standby")
    sites, directory = {"cloud": 1, "edge": 2}, tmp_path / "cluster"
    with LocalCluster(Count, sites=sites, partitions=PARTITIONS, data_dir=directory, deploy_to=("cloud",)) as running:
        yield running


class Runs:
    """A query whose driver is a process that may be killed and started again."""

    def __init__(self, query: Query, log: Path) -> None:
        self.query, self._log = query, log
        self._rng = random.Random(SEED)
        self.driver = self._driver_of(query)

    def _driver_of(self, query: Query) -> Driver:
        return Driver(query.command, self._log)

    def start(self, query: Query | None = None) -> None:
        self.driver = self._driver_of(query or self.query)
        self.driver.start()

    def kill(self) -> None:
        self.driver.die(self._rng)

    def kill_worker(self) -> None:
        kill_workers(self.driver)

    def rows(self) -> list[Given]:
        return Log(Path(self.query.out)).rows()

    def taken(self) -> list[Given]:
        self.driver.check()
        return Log(Path(self.query.out)).taken()


@pytest.fixture
def run(jar: Path, cluster: LocalCluster, tmp_path: Path) -> Iterator[Callable[..., Runs]]:
    made: list[Runs] = []

    def make(rows: int, operator: type = Count, epoch: str = "5 seconds", **other: object) -> Runs:
        out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")
        t0_us = round((time.time() + START_S) * 1e6)
        query = Query(str(jar), cluster.address, checkpoint, out, t0_us, rows, EVERY_US)
        query = replace(query, partitions=SOURCES, keys=KEYS, epoch=epoch, operator=operator.__name__, **other)  # type: ignore[arg-type]
        made.append(Runs(query, tmp_path / "driver.log"))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.driver.end()


def owners(local: LocalCluster) -> set[str]:
    return {owner for each in local.cluster.status().operators for owner in each.owners}


def followed(local: LocalCluster) -> bool:
    ready = {view.partition for view in local.cluster.status().standbys if view.phase == "CATCHING_UP"}
    return ready == set(range(PARTITIONS))


def logged(log: Path) -> set[str]:
    """Returns the numbers of batches in one of Spark's logs."""
    return {each.name for each in log.iterdir() if each.name.isdigit()}


def test_rows_come_while_partitions_move(run: Callable[..., Runs], cluster: LocalCluster) -> None:
    rows = 2500
    query = run(rows)
    for site, share in (("edge", 0.2), ("cloud", 0.4), ("edge", 0.6)):
        eventually(lambda share=share: len(query.rows()) > share * rows * SOURCES, "rows come", PATIENCE_S)  # type: ignore[misc]
        report = cluster.cluster.migrate("Count", range(PARTITIONS), site).wait()
        assert report.state == "COMPLETED", report
    eventually(lambda: len(query.taken()) >= rows * SOURCES, "all are taken", PATIENCE_S)
    assert len({each.epoch for each in query.taken()}) > 1
    check_counted(query.taken(), cluster, rows)
    check_owners(cluster, "Count")


def test_whatever_is_killed_in_the_middle(run: Callable[..., Runs], cluster: LocalCluster) -> None:
    """Rows of an epoch that runs again come again with the outputs they had, and are never applied again."""
    rows = 1500
    query = run(rows)

    def wait(share: float) -> None:
        query.taken()  # fails where the driver has ended
        eventually(
            lambda: len({each.columns[:2] for each in query.rows()}) > share * rows * SOURCES, "rows come", PATIENCE_S
        )

    wait(0.1)
    query.kill()
    query.start()
    wait(0.35)
    cluster.kill("cloud-0")
    cluster.restart("cloud-0")
    wait(0.5)
    query.kill_worker()
    query.start()
    wait(0.65)
    cluster.kill("controller")
    cluster.restart("controller")
    wait(0.8)
    query.kill()
    query.start()
    eventually(lambda: len(query.taken()) >= rows * SOURCES, "all are taken", PATIENCE_S)
    assert len(query.rows()) > rows * SOURCES, "some were given more than once"
    check_counted(query.taken(), cluster, rows)


def test_a_standby_takes_over_within_an_epoch(cluster_of_three: LocalCluster, run: Callable[..., Runs]) -> None:
    """Partitions go to their standbys while rows come, and the replica that had them does not come back."""
    cluster, rows = cluster_of_three, 1500
    cluster.cluster.standby("Count", 1)
    eventually(lambda: followed(cluster), "every partition has a standby that follows", PATIENCE_S)
    query = run(rows)
    eventually(lambda: len(query.rows()) > 0.3 * rows * SOURCES, "rows come", PATIENCE_S)
    cluster.kill("cloud-0")
    eventually(lambda: "cloud-0" not in owners(cluster), "its partitions went elsewhere", PATIENCE_S)
    eventually(lambda: len(query.taken()) >= rows * SOURCES, "all are taken", PATIENCE_S)
    check_counted(query.taken(), cluster, rows)
    failovers = [each for each in cluster.cluster.reconfigurations() if each.kind == "failover"]
    assert failovers
    assert all("the copy of" in move.note for each in failovers for move in each.moves)


def test_rows_with_the_columns_of_kafka_come_in_an_epoch_that_is_repeated(
    run: Callable[..., Runs], cluster: LocalCluster
) -> None:
    """Rows with topic, partition and offset need no ``position=``.

    The first driver has one core for two source partitions, and is refused. What its first task applied is not applied
    again.
    """
    rows = 200
    query = run(rows, as_kafka=True, cores=1)
    assert query.driver.popen.wait(PATIENCE_S) != 0
    assert "the task had to wait for another task's slot, but in real-time mode" in query.driver.said()
    query.start(replace(query.query, cores=4))
    eventually(lambda: len(query.taken()) >= rows * SOURCES, "all are taken", PATIENCE_S)
    check_counted(query.taken(), cluster, rows)


def test_timers_of_event_time_fire_within_an_epoch(run: Callable[..., Runs], cluster: LocalCluster) -> None:
    rows = 1000
    query = run(rows, Seconds)  # the first epoch tells of event time at its end, and later ones as they go
    wanted = Counter(
        (f"k{(off * 31 + part * 7) % KEYS}", str((query.query.t0_us + off * EVERY_US) // 1_000_000))
        for part in range(SOURCES)
        for off in range(rows)
    )
    last = max(second for _, second in wanted)

    def counted() -> Counter[tuple[str, str]]:
        found: Counter[tuple[str, str]] = Counter()
        for each in query.rows():
            found[each.columns[0], each.columns[1]] += int(each.columns[2])
        return found

    past = Counter({each: count for each, count in wanted.items() if each[1] != last})
    eventually(lambda: sum(counted().values()) >= sum(past.values()), "seconds pass", PATIENCE_S)
    assert counted() == past


def test_a_query_that_ran_in_micro_batches_is_refused(run: Callable[..., Runs], cluster: LocalCluster) -> None:
    """A query that ran in micro-batches is refused in real-time mode, loses nothing, and goes on in micro-batches."""
    rows = 200
    query = run(rows, epoch="")
    eventually(lambda: len(query.taken()) >= rows * SOURCES, "all are taken", PATIENCE_S)
    offsets, commits = (Path(query.query.checkpoint, name) for name in ("offsets", "commits"))
    eventually(lambda: logged(offsets) == logged(commits), "Spark has noted it", PATIENCE_S)
    query.kill()
    query.start(replace(query.query, epoch="5 seconds"))
    assert query.driver.popen.wait(PATIENCE_S) != 0
    refused = "invalid_argument: this query has run in micro-batches and cannot switch to real-time mode (checkpoint="
    assert refused in query.driver.said()
    assert "STREAMING_REAL_TIME_MODE" not in query.driver.said(), "Spark was not asked"
    more = replace(query.query, rows=2 * rows)
    query.start(more)
    eventually(lambda: len(query.taken()) >= 2 * rows * SOURCES, "it goes on", PATIENCE_S)
    check_counted(query.taken(), cluster, 2 * rows)


def test_what_cannot_be_is_refused_before_the_first_row(spark: SparkSession, cluster: LocalCluster) -> None:
    rows = spark.readStream.format("rate").load().selectExpr("cast(value as string) k", "value off", "value % 2 part")
    applied = {"cluster": cluster, "real_time": True}

    def refused(match: str, frame: object = rows, **said: object) -> None:
        with pytest.raises(InvalidArgument, match=match):
            apply_operator(frame, Count, **{**applied, **said})  # type: ignore[arg-type]

    refused("identifies rows by source partition and offset, which this input lacks")
    refused("does not name the columns of source partition", position=("off",))
    refused("does not name the columns of source partition", position=("part", "other"))
    refused("'k' is string, which cannot be an offset", position=("part", "k"))
    refused("leave order_by= and tasks= out", position=("part", "off"), tasks=2)
    refused("a batch DataFrame cannot run in real-time mode", spark.range(1).selectExpr("cast(id as string) k"))
    refused("position= applies to real-time mode only", real_time=False, position=("part", "off"))
    settings = ", ".join(f"{key}={value}" for key, value in real_time_settings().items())
    refused(
        re.escape(f"the session lacks settings that real-time mode needs: {settings}: ")
        + r".*local_session\(…, real_time=True\)",
        position=("part", "off"),
    )
    micro = apply_operator(rows, Count, cluster=cluster)
    with pytest.raises(InvalidArgument, match=r"applied to micro-batches, .* apply_operator\(…, real_time=True\)"):
        micro.writeStream.trigger(realTime="5 seconds")
    twice = apply_operator(micro.select("k", "off", "part"), Count, cluster=cluster)
    with pytest.raises(OperatorUsedTwice, match="pass a different source= to each"):
        twice.writeStream.format("noop").start()
    with pytest.raises(AnalysisException, match=r"STREAMING_OUTPUT_MODE\.UNSUPPORTED_OPERATION") as mode:
        micro.writeStream.outputMode("complete").format("noop").start()
    assert len(str(mode.value).splitlines()) == 1, "Spark's own line, before the first row"


def test_a_pipeline_file_in_real_time(cluster: LocalCluster, jar: Path, tmp_path: Path) -> None:
    rows = 100
    options = {"partitions": SOURCES, "intervalUs": EVERY_US, "t0us": round(time.time() * 1e6), "keys": KEYS}
    pipeline = {
        "name": "live",
        "cluster": cluster.address,
        "spark": {"master": "local[4]", "settings": {"spark.jars": str(jar)}},
        "source": {"format": "replay.Source", "options": {**options, "total": rows}},
        "operators": [{"operator": "benchmarks.replay.operators:Count", "position": ["part", "off"]}],
        "sink": {"format": "console", "checkpoint": str(tmp_path / "checkpoint")},
        "real_time": "5 seconds",
    }
    file = tmp_path / "pipeline.yml"
    file.write_text(yaml.safe_dump(pipeline))
    command = [sys.executable, "-m", "stateflow", "run", str(file)]
    once = subprocess.run([*command, "--once"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert once.returncode != 0
    assert once.stderr.startswith("invalid_argument: a real-time pipeline has no end")
    with (tmp_path / "run.log").open("wb") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as runs:
        try:
            eventually(lambda: counted(cluster) == rows * SOURCES, "all rows are applied", PATIENCE_S)
        finally:
            runs.terminate()
            assert runs.wait(PATIENCE_S) == 0, (tmp_path / "run.log").read_text()[-3000:]


def counted(cluster: LocalCluster) -> int:
    return sum(row["value"] for row in cluster.cluster.read_state("Count", "n").to_pylist())
