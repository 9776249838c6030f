"""``stateflow run`` as its users run it: to its end, stopped in the middle, and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from stateflow.ledger import Ledger, StateManager
from stateflow.spark.session import JETSTREAM
from stateflow.testing import LocalCluster
from tests.integration.nats_support import URL, Stream, needs_nats
from tests.integration.spark_operators import POISON, Peak, Tally
from tests.integration.support import ending
from tests.integration.test_spark_apply import FIRST_FILE_S, REPOSITORY, SCHEMA, Model, Row, rows, state_of
from tests.versions import needs

pytestmark = [pytest.mark.spark, pytest.mark.processes]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(Tally, Peak, sites={"cloud": 1}, partitions=4) as running:
        yield running


class Pipeline:
    def __init__(self, cluster: LocalCluster, directory: Path, **changes: Any) -> None:
        self.directory = directory
        (directory / "in").mkdir()
        self.file = directory / "pipeline.yml"
        source = {"format": "parquet", "path": "${param.input}", "schema": SCHEMA, "options": {"maxFilesPerTrigger": 1}}
        document = {
            "name": "tallies",
            "cluster": cluster.address,
            "parameters": {"input": None},
            "spark": {"master": "local[2]", "settings": {"spark.sql.shuffle.partitions": 2}},
            "source": source,
            "operators": [{"operator": "tests.integration.spark_operators:Tally", "order_by": "seq"}],
            "sink": {"format": "parquet", "path": str(directory / "out"), "checkpoint": str(directory / "checkpoint")},
            **changes,
        }
        self.document = document
        self.change()

    def change(self, **changes: Any) -> None:
        self.document |= changes
        self.file.write_text(yaml.safe_dump(self.document))

    def add(self, batch: list[Row], name: str) -> None:
        columns = {column: list(values) for column, values in zip(Row._fields, zip(*batch, strict=True), strict=True)}
        hidden = self.directory / "in" / f".{name}"
        pq.write_table(pa.table(columns), hidden)
        os.utime(hidden, (FIRST_FILE_S + batch[0].seq, FIRST_FILE_S + batch[0].seq))  # the file source goes by these
        hidden.rename(self.directory / "in" / f"{name}.parquet")

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "stateflow", "run", str(self.file), "--set", f"input={self.directory / 'in'}"]
        return subprocess.Popen(
            [*command, *options],
            cwd=REPOSITORY,
            env={**os.environ, "SECRET_OF_TEST": "hunter2"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: str) -> tuple[int, str, str]:
        process = self.start(*options)
        out, err = process.communicate(timeout=600)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def output(self) -> list[tuple[Any, ...]]:
        from pyspark.sql import SparkSession

        frame = SparkSession.getActiveSession().read.parquet(str(self.directory / "out"))
        return sorted(map(tuple, frame.collect()))


def test_a_pipeline_is_stopped_goes_on_fails_and_is_mended(spark: Any, cluster: LocalCluster, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    pipeline = Pipeline(
        cluster,
        tmp_path,
        operators=[
            {"operator": "tests.integration.spark_operators:Tally", "order_by": "seq", "where": "n > 0"},
            {"operator": "tests.integration.spark_operators:Peak", "order_by": "seq"},
        ],
        connections={"ledger": {"database": str(ledger)}},
        state_manager={"name": "s", "type": "SqLiteStateManager", "conf": {"connection": "ledger"}},
    )
    status, _, err = pipeline.run()
    assert (status, err.partition(" (")[0]) == (1, "invalid_argument: there is no ledger")
    Ledger(f"sqlite:///{ledger}").close()
    first, second = rows(0, 40), rows(40, 40)
    pipeline.add(first, "00001")
    with ending(pipeline.start("--json")) as running:  # continuous: it ends only when it is told to
        assert running.stdout is not None
        line = json.loads(running.stdout.readline())
        assert (line["batch"], line["rows"], line["rows_total"]) == (0, 40, 40)
        parts = [line[f"{part}_ms"] for part in ("spark", "routing", "rpc", "operator", "commit")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(line["duration_ms"], abs=0.01)
        assert [(each["operator"], each["rows"]) for each in line["operators"]] == [("Tally", 40), ("Peak", 40)]
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=600)
        assert running.returncode == 0, err
    end = json.loads(out)
    assert (end["state"], end["rows"], end["batches"]) == ("stopped", 40, 1)
    assert [(each["operator"], each["rows"]) for each in end["operators"]] == [("Tally", 40), ("Peak", 40)]

    pipeline.add(second, "00002")
    pipeline.add([*rows(80, 5), Row(85, "k1", "a", POISON)], "00003")
    status, out, err = pipeline.run("--once")
    assert status == 1
    assert err.splitlines()[-1].startswith("operator_failed: process() raised ValueError: poison in row 85"), err
    assert "batch 1: 40 rows in " in out
    assert "40 rows in total; ms in spark " in out

    model = Model([first, second])
    assert [row[:2] for row in pipeline.output()] == [row[:2] for row in model.outputs]
    total = {key: value for (key, _), value in state_of(cluster, "Tally", "total")["total"].items()}
    assert set(total) == set(model.total)
    with Ledger(f"sqlite:///{ledger}") as opened:
        stages = StateManager(opened).get_processing_history("tallies")
        assert [(row["row_count"], row["status"]) for row in stages] == [(40, "success"), (40, "success")]
        ends = {(row["source_entity"], row["sink_entity"], row["manifest_name"]) for row in stages}
        assert ends == {(str(tmp_path / "in"), str(tmp_path / "out"), "pipeline.yml")}
        [failed] = StateManager(opened).get_failures("tallies")
        assert "poison in row 85" in failed["error"]["stack"]


def test_it_starts_beside_what_a_spark_left_that_was_killed_in_its_first_batch(
    spark: Any, cluster: LocalCluster, tmp_path: Path
) -> None:
    pipeline = Pipeline(cluster, tmp_path, operators=[])
    pipeline.add(rows(0, 40), "00001")
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    left = checkpoint / "offsets" / f".0.{uuid.uuid4()}.tmp"
    left.write_text("v1\n")
    with pytest.raises(Exception, match="STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY"):
        read = spark.readStream.schema(SCHEMA).parquet(str(tmp_path / "in")).writeStream.trigger(availableNow=True)
        read.format("noop").option("checkpointLocation", str(checkpoint)).start().awaitTermination()
    status, _, err = pipeline.run("--once")
    assert status == 0, err
    assert "moved aside files left by a killed Spark: offsets/.0." in err
    assert len(pipeline.output()) == 40
    assert not left.exists()


def test_the_effective_configuration_has_no_secrets(cluster: LocalCluster, tmp_path: Path) -> None:
    pipeline = Pipeline(cluster, tmp_path, connections={"db": {"password": "${env.SECRET_OF_TEST}"}})
    status, out, err = pipeline.run("--print")
    assert (status, err) == (0, "")
    shown = yaml.safe_load(out)
    assert shown["connections"] == {"db": {"password": "***"}}
    assert shown["source"]["path"] == str(tmp_path / "in")
    assert json.loads(pipeline.run("--print", "--json")[1]) == shown
    status, out, err = pipeline.run("--set", "inptu=1")
    assert (status, out) == (1, "")
    assert err == "invalid_argument: there is no parameter 'inptu': did you mean 'input'?\n"


def test_a_batch_pipeline_and_what_spark_refuses(spark: Any, cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.cluster.deploy(Tally, 4, name="TallyOnce")
    step = {"operator": "tests.integration.spark_operators:Tally", "order_by": "seq", "name": "TallyOnce"}
    source = {"format": "parquet", "path": "${param.input}", "streaming": False, "where": "seq < 50"}
    pipeline = Pipeline(
        cluster,
        tmp_path,
        source=source,
        operators=[step],
        sink={"format": "parquet", "path": str(tmp_path / "out"), "mode": "errorifexists"},
    )
    recorded = {
        "connections": {"ledger": {"database": str(tmp_path / "ledger.db")}},
        "state_manager": {"name": "s", "type": "SqLiteStateManager", "conf": {"connection": "ledger"}},
    }
    pipeline.add(rows(0, 60), "a")
    status, out, err = pipeline.run("--json")
    assert status == 0, err
    end = json.loads(out)
    assert (end["state"], end["rows"], end["batches"]) == ("finished", None, None)
    assert [(each["operator"], each["rows"]) for each in end["operators"]] == [("TallyOnce", 50)]
    assert pipeline.output() == Model([rows(0, 50)]).outputs
    Ledger(f"sqlite:///{tmp_path / 'ledger.db'}").close()
    pipeline.change(source=source | {"record": "seq"}, **recorded)
    status, _, err = pipeline.run()
    assert status == 1
    assert err.splitlines()[-1].startswith("pipeline_failed: [PATH_ALREADY_EXISTS]"), err
    shutil.rmtree(tmp_path / "out")
    assert pipeline.run()[0] == 0
    status, out, err = pipeline.run("--json")
    assert (status, json.loads(out)["state"]) == (0, "done before"), err
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        manager = StateManager(opened)
        [stage] = manager.get_processing_history("tallies")
        assert (stage["row_count"], stage["first_record_pulled"], stage["last_record_pulled"]) == (50, "0", "49")
        assert (stage["source_filter"], stage["manifest_name"]) == ("seq < 50", "pipeline.yml")
        assert [record.state for record in opened.records()].count("FAILED") == 1


@needs_nats
@needs(JETSTREAM)
def test_a_pipeline_over_jetstream(spark: Any, cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.cluster.deploy(Tally, 4, name="TallyStream")
    stream = Stream(URL, f"test-{uuid.uuid4().hex}")
    try:
        stream.publish(row._asdict() for row in rows(0, 70))
        options = {"servers": URL, "stream": stream.name, "max_rows_per_batch": 30}
        step = {"operator": "tests.integration.spark_operators:Tally", "order_by": "seq", "name": "TallyStream"}
        source = {"format": "jetstream", "schema": SCHEMA, "options": options}
        pipeline = Pipeline(cluster, tmp_path, source=source, operators=[step])
        status, out, err = pipeline.run("--once", "--json")
        assert status == 0, err
        end = json.loads(out.splitlines()[-1])
        assert (end["state"], end["rows"], end["batches"]) == ("finished", 70, 3)
        assert [(each["operator"], each["rows"]) for each in end["operators"]] == [("TallyStream", 70)]
        assert pipeline.output() == Model([rows(0, 70)]).outputs
    finally:
        stream.delete()
    status, _, err = pipeline.run("--once")
    assert (status, err.splitlines()) == (1, [err.strip()]), "one line, before Spark is started"
    assert err.startswith("source_missing: there is no stream ")
