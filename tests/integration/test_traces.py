"""Traces of real processes, as a collector gets them: a batch from its client to its commit, a move by its phases."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stateflow.errors import OperatorFailed
from stateflow.testing import LocalCluster
from stateflow.tracing import end_tracing
from tests.collector import Collected, Collector, collecting
from tests.integration.operators import Alarmed, Tally
from tests.integration.support import eventually, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", started.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("STATEFLOW_LOG_FORMAT", "json")
        yield started
        end_tracing()


@pytest.fixture(scope="module")
def local(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("traces")
    with LocalCluster(Tally, sites={"cloud": 1, "edge": 1}, partitions=4, data_dir=folder) as started:
        yield started


def one(found: list[Collected], where: str) -> Collected:
    assert len(found) == 1, (where, found)
    return found[0]


def below_with(collector: Collector, move: Collected) -> list[Collected] | None:
    """Returns the spans below a move; None until both of its replicas have reported theirs."""
    found = collector.children(move)
    return found if {"stateflow.prepare", "stateflow.fence"} <= {span.name for span in found} else None


def within(child: Collected, parent: Collected) -> bool:
    """Tells whether a span is within another by the clock of one machine; spans are reported in µs."""
    return parent.began_ns - 2_000 <= child.began_ns <= child.ended_ns <= parent.ended_ns + 2_000


def test_a_batch_from_its_client_to_its_commit(local: LocalCluster, collector: Collector) -> None:
    with local.stream("Tally", source="gateway") as stream:
        stream.send(rows_of("k", 0))
        stream.send(rows_of("k", 0), sequence=0)
    eventually(lambda: len(collector.named("stateflow.send", source="gateway")) == 2, "it was sent twice")
    first, again = sorted(collector.named("stateflow.send", source="gateway"), key=lambda each: each.began_ns)
    assert first.parent == "", "nothing led to it"
    assert first.trace != again.trace
    assert first.resource["service.name"] == "stateflow-client"
    delivered = one(collector.children(first), "of the router")
    assert (delivered.name, delivered.attributes["batch"], delivered.attributes["partitions"]) == (
        *("stateflow.deliver", 0),
        4,
    )
    applied = eventually(
        lambda: found if len(found := collector.children(delivered)) == 2 else None, "one of each replica"
    )
    assert {span.name for span in applied} == {"stateflow.apply"}
    assert {span.resource["service.instance.id"] for span in applied} == {"cloud-0", "edge-0"}
    assert {span.resource["site"] for span in applied} == {"cloud", "edge"}
    assert sum(span.attributes["rows"] for span in applied) == 40
    assert delivered.events.count("sent") == 2
    for span in applied:
        commit = one(collector.children(span), "of its commit")
        assert commit.name == "stateflow.commit"
        assert within(commit, span)
        assert span.began_ns >= delivered.began_ns - 2_000, "it ends when its answer is handed over, perhaps after that"
        assert span.attributes["replayed"] == span.attributes["refused"] == 0
        assert span.attributes["partitions"] == 2
    assert within(delivered, first)
    redelivered = one(collector.children(again), "of the router")
    replayed = eventually(lambda: collector.children(redelivered), "of a replica")
    assert sum(span.attributes["replayed"] for span in replayed) == sum(
        span.attributes["partitions"] for span in replayed
    )
    assert [child for span in replayed for child in collector.children(span)] == [], "nothing was committed"


def test_a_batch_of_a_forwarding_client(local: LocalCluster, collector: Collector, tmp_path: Path) -> None:
    """A forwarding client's batch is of one trace, though several threads send its partitions one by one at first."""
    with local.cluster.forwarding("Tally", "forwarded", tmp_path / "outbox") as stream:
        stream.send(rows_of("f", 0))
    (sent,) = eventually(lambda: collector.named("stateflow.send", source="forwarded"), "it was sent")
    deliveries = collector.children(sent)
    assert {span.name for span in deliveries} == {"stateflow.deliver"}
    assert sum(span.attributes["partitions"] for span in deliveries) == 4
    assert len(deliveries) > 1


@pytest.mark.spark
def test_a_batch_from_its_spark_task(
    local: LocalCluster, collector: Collector, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stateflow.spark import apply_operator

    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_BSP_SCHEDULE_DELAY"):
        monkeypatch.setitem(spark.sparkContext.environment, name, os.environ[name])  # as spark.executorEnv does
    spark.createDataFrame([(str(n), n) for n in range(20)], "k string, v long").write.parquet(f"{tmp_path}/rows/")
    rows = spark.readStream.schema("k string, v long").parquet(f"{tmp_path}/rows/")
    query = apply_operator(rows, Tally, cluster=local).writeStream.format("noop").start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    everything = eventually(partial(tasks_with, collector, query.id, 20), "every task, with what replicas did for it")
    for task, deliveries, applied in everything:
        assert (task.parent, task.attributes["batch"], task.attributes["operator"]) == ("", 0, "Tally")
        assert {(span.name, span.attributes["source"]) for span in deliveries} == {
            ("stateflow.deliver", f"query:{query.id}")
        }
        assert {span.name for span in applied} == {"stateflow.apply"}


def tasks_with(
    collector: Collector, query: str, rows: int
) -> list[tuple[Collected, list[Collected], list[Collected]]] | None:
    """Returns each task with its router's and its replicas' spans; None until the replicas have applied ``rows``."""
    found = []
    for task in collector.named("stateflow.task", query=query):
        deliveries = collector.children(task)
        found.append((task, deliveries, [span for each in deliveries for span in collector.children(each)]))
    applied = sum(span.attributes["rows"] for _, _, each in found for span in each)
    return found if applied == rows else None


def test_one_that_fails_says_why_and_no_row(local: LocalCluster, collector: Collector) -> None:
    with local.stream("Tally", source="failing") as stream, pytest.raises(OperatorFailed):
        stream.send([{"k": "secret", "v": -1}])
    sent = eventually(lambda: collector.named("stateflow.send", source="failing"), "it was sent")[0]
    assert sent.failed.startswith("operator_failed: ")
    assert "secret" not in sent.failed
    delivered = one(collector.children(sent), "of the router")
    assert "refused" in delivered.events
    applied = eventually(lambda: collector.children(delivered), "of the replica")[0]
    assert applied.attributes["code"] == "operator_failed"


def test_a_move_by_its_phases(local: LocalCluster, collector: Collector) -> None:
    with local.stream("Tally", source="moved") as stream:
        stream.send(rows_of("k", 1))
        done = local.migrate("Tally", [0, 1, 2, 3], "edge").wait()
        stream.send(rows_of("k", 2))
    whole = eventually(lambda: collector.named("stateflow.reconfiguration", reconfiguration=done.id), "it is over")[0]
    moves = collector.children(whole)
    assert {span.attributes["move"] for span in moves} == {move.id for move in done.moves}
    assert {span.name for span in moves} == {"stateflow.move"}
    for move in moves:
        assert (move.attributes["from_replica"], move.attributes["to_replica"]) == ("cloud-0", "edge-0")
        assert move.attributes["state"] == "COMPLETED"
        below = eventually(partial(below_with, collector, move), "what the replicas did")
        phases = [span.name for span in sorted(below, key=lambda each: each.began_ns) if ".move." in span.name]
        assert phases[0] == "stateflow.move.warming"
        assert phases[-2:] == ["stateflow.move.fenced", "stateflow.move.owned"]
        by_name = {span.name: span for span in below}
        assert by_name["stateflow.prepare"].resource["service.instance.id"] == "edge-0"
        assert by_name["stateflow.fence"].resource["service.instance.id"] == "cloud-0"
        assert by_name["stateflow.prepare"].attributes["move"] == move.attributes["move"]
        assert all(within(span, move) for span in below if ".move." in span.name)
    assert {span.trace for span in (*moves, whole)} == {whole.trace}


def test_lines_join_traces(local: LocalCluster, collector: Collector) -> None:
    """Each line that an operator logs has the ids of its batch, its partition and its trace."""
    local.cluster.deploy(Alarmed, partitions=2, sites=["edge"])
    with local.stream("Alarmed", source="alarms") as stream, pytest.raises(OperatorFailed):
        stream.send([{"k": "a", "v": -1}])
    sent = eventually(lambda: collector.named("stateflow.send", source="alarms"), "it was sent")[0]
    applied = eventually(lambda: collector.named("stateflow.apply", source="alarms"), "it was tried")[0]
    lines = map(json.loads, (local.data_dir / "edge-0.log").read_text().splitlines())
    (line,) = [line for line in lines if line["message"] == "it is below 0"]
    assert line["logger"] == "stateflow.operator.Alarmed"
    assert line["partition"] in (0, 1)
    assert (line["operator"], line["source"], line["batch"]) == ("Alarmed", "alarms", 0)
    assert (line["trace_id"], line["span_id"]) == (sent.trace, applied.id)


def test_who_is_not_recorded_leaves_no_trace(
    local: LocalCluster, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_tracing()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with local.stream("Tally", source="quiet") as stream:
        stream.send(rows_of("k", 0))
    end_tracing()
    monkeypatch.delenv("OTEL_TRACES_SAMPLER")
    with local.stream("Tally", source="loud") as stream:
        stream.send(rows_of("k", 0))
    eventually(
        lambda: collector.named("stateflow.commit") and collector.named("stateflow.apply", source="loud"), "loud"
    )
    assert [span for span in collector.spans if span.attributes.get("source") == "quiet"] == []
