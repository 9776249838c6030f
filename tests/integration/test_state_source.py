"""State as a data source of Spark: of a cluster whose partitions move, of checkpoints, of changes between two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from typer.testing import CliRunner

from stateflow.cli.app import app
from stateflow.spark import read_state, register_state
from stateflow.spark.session import PUSH_DOWN
from stateflow.testing import LocalCluster
from tests.integration.operators import Minutes, Tally

pytestmark = [pytest.mark.spark, pytest.mark.processes]
PARTITIONS, KEYS = 8, 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("state")
    with LocalCluster(Tally, sites={"cloud": 1, "edge": 1}, partitions=PARTITIONS, data_dir=folder) as running:
        send(running, range(KEYS))
        yield running


def send(cluster: LocalCluster, numbers: range) -> None:
    with cluster.cluster.stream("Tally", source="s") as stream:
        stream.send([{"k": f"k{number}", "v": 1} for number in numbers])


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    """The session with the source, otherwise with Spark's defaults, also for the next test."""
    register_state(spark)
    yield spark
    spark.conf.unset(PUSH_DOWN)


def read(session: SparkSession, **options: str) -> DataFrame:
    return load(session, operator="Tally", **options)


def load(session: SparkSession, **options: str) -> DataFrame:
    return session.read.format("stateflow").options(**options).load()


def checkpoints(cluster: LocalCluster) -> str:
    return str(cluster.data_dir / "checkpoints")


def test_executors_read_what_owners_have_and_only_what_is_asked_for(
    session: SparkSession, cluster: LocalCluster
) -> None:
    frame = read(session, cluster=cluster.address, state="n")
    assert frame.schema.simpleString() == "struct<key:string,map_key:string,value:bigint,partition:int>"
    assert {row.key: row.value for row in frame.collect()} == {f"k{number}": 1 for number in range(KEYS)}
    assert frame.rdd.getNumPartitions() == 2, "one for each owner"
    one = frame.where(F.col("key") == "k7")
    assert [(row.key, row.value) for row in one.collect()] == [("k7", 1)]
    assert one.rdd.getNumPartitions() == 1
    assert one.where("partition = 99").count() == 0
    two = frame.where(F.col("key").isin("k1", "k2"))
    assert sorted(row.key for row in two.collect()) == ["k1", "k2"]
    here = frame.where("partition in (0, 3)")
    assert {row.partition for row in here.collect()} == {0, 3}
    assert frame.where("value > 1").count() == 0, "what is not pushed down is looked at by Spark"
    (moved,) = {row.partition for row in one.collect()}
    for site in ("edge", "cloud"):
        cluster.cluster.migrate("Tally", [moved], site).wait()
        assert one.count() == 1


def test_checkpoints_and_what_changed_between_two(session: SparkSession, cluster: LocalCluster) -> None:
    store = checkpoints(cluster)
    cluster.cluster.savepoint("first")
    send(cluster, range(KEYS, KEYS + 2))
    send(cluster, range(3))
    cluster.cluster.savepoint("second")
    first = read(session, checkpoint=store, savepoint="first", state="n")
    assert first.rdd.getNumPartitions() == PARTITIONS
    assert first.count() == KEYS
    assert read(session, checkpoint=store, state="n").count() == KEYS + 2
    changes = read(session, checkpoint=store, since="first", savepoint="second", state="n")
    assert changes.columns == ["key", "map_key", "change", "before", "value", "partition"]
    found = {row.key: (row.change, row.before, row.value) for row in changes.collect()}
    new = {f"k{number}": ("insert", None, 1) for number in range(KEYS, KEYS + 2)}
    assert found == new | {f"k{number}": ("update", 1, 2) for number in range(3)}
    back = read(session, checkpoint=store, since="second", savepoint="first", state="n")
    assert {row.change for row in back.collect()} == {"delete", "update"}
    assert [(row.key, row.change) for row in changes.where("key = 'k0'").collect()] == [("k0", "update")]


def test_what_there_is_to_read(session: SparkSession, cluster: LocalCluster) -> None:
    states = read(session, cluster=cluster.address, describe="states").collect()
    assert {row.state for row in states} >= {"n"}
    assert all(row.key_columns == ["k"] for row in states)
    partitions = read(session, cluster=cluster.address, describe="partitions").collect()
    assert [row.partition for row in partitions] == list(range(PARTITIONS))
    assert {row.owner for row in partitions} <= {"cloud-0", "edge-0"}
    cluster.cluster.savepoint("described")
    taken = read(session, checkpoint=checkpoints(cluster), savepoint="described", describe="partitions").collect()
    assert all(row.bytes > 0 and row.taken is not None for row in taken)


NOON = datetime(2013, 1, 1, 12, tzinfo=UTC)
WINDOWED = (
    "struct<key:string,window_start:timestamp,window_end:timestamp,namespace:string,map_key:string,value:bigint,"
    "partition:int>"
)


def at(minute: int) -> datetime:
    return NOON + timedelta(minutes=minute)


def of_windows(frame: DataFrame) -> dict[tuple[str, int], int]:
    """Returns counts by key and minute. Spark gives times as naive ones in the zone of this process."""
    rows = frame.collect()
    assert {(row.namespace, row.window_end - row.window_start) for row in rows} <= {("minutes", timedelta(minutes=1))}
    return {(row.key, (row.window_start.astimezone(UTC) - NOON) // timedelta(minutes=1)): row.value for row in rows}


def test_windows_of_a_cluster_and_of_checkpoints(session: SparkSession, cluster: LocalCluster) -> None:
    """Windows that have not ended are a table, by replicas, checkpoints, the command line and Spark."""
    cluster.cluster.deploy(Minutes, partitions=4)
    live = {"operator": "Minutes", "cluster": cluster.address}
    stored = {"operator": "Minutes", "checkpoint": checkpoints(cluster)}
    with cluster.cluster.stream("Minutes", source="m") as stream:
        stream.send([{"k": f"k{number}", "at": at(minute)} for number in range(3) for minute in (0, 1, 1, 5)])
        cluster.cluster.savepoint("windows")
        expected = {(f"k{number}", minute): (2 if minute == 1 else 1) for number in range(3) for minute in (0, 1, 5)}
        frame = load(session, **live, state="count")
        assert frame.schema.simpleString() == WINDOWED
        assert of_windows(frame) == expected
        early = frame.where(F.col("window_end") <= F.lit(at(2))).where("key = 'k1'")
        assert of_windows(early) == {("k1", 0): 1, ("k1", 1): 2}
        assert of_windows(load(session, **stored, state="count")) == expected
        assert of_windows(read_state(session, cluster=cluster, operator="Minutes", state="count")) == expected
        there = read_state(session, checkpoint=checkpoints(cluster), operator="Minutes", state="count")
        assert of_windows(there) == expected
        for where in (live, stored):
            described = load(session, **where, describe="states").collect()
            assert [(row.state, row.kind, row.key_columns) for row in described] == [("count", "counter", ["k"])]
        words = ["state", "get", "Minutes", "count", "k1", "--json"]
        for more in (["--controller", cluster.address], ["--from", checkpoints(cluster)]):
            entries = json.loads(CliRunner().invoke(app, [*words, *more]).stdout)["entries"]
            assert [(each["window_start"], each["namespace"]) for each in entries] == [
                (str(at(minute)), "minutes") for minute in (0, 1, 5)
            ]
        stream.advance_watermark(at(3))
        left = cluster.cluster.read_state("Minutes", "count")
        assert set(left["window_start"].to_pylist()) == {at(5)}
        cluster.cluster.savepoint("later")
        changes = load(session, **stored, state="count", since="windows", savepoint="later")
        gone = {(row.key, row.window_start, row.change) for row in changes.collect()}
        assert len(gone) == 6
        assert {change for _, _, change in gone} == {"delete"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"state": "n", "nonsense": "1"}, "the option 'nonsense' is unknown"),
        ({}, "pass either state or describe"),
        ({"state": "n", "describe": "states"}, "pass either state or describe"),
        ({"state": "n", "cluster": "a:1", "checkpoint": "x"}, "pass only one of cluster"),
        ({"state": "n", "savepoint": "x"}, "savepoint= and since= need a checkpoint store"),
        ({"state": "none", "cluster": ""}, "there is no state 'none'"),
        ({"state": "n", "checkpoint": "/no/such"}, "checkpoint_store_missing"),
    ],
)
def test_what_cannot_be_read(
    session: SparkSession, cluster: LocalCluster, options: dict[str, str], said: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {name: value or cluster.address for name, value in options.items()}
    with pytest.raises(Exception, match=said) as caught:
        read(session, **given)
    assert str(caught.value).count("\n") < 3, "its line, and no trace"
