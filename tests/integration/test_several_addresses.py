"""Commands, clients, replicas and Spark with addresses of several controllers: the first may be dead, or not lead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stateflow.client import Cluster
from tests.integration.operators import Tally
from tests.integration.support import Model, command, eventually, outputs, rows_of
from tests.integration.test_controllers import Pair

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.processes
DEAD = "127.0.0.1:1"
PARTITIONS = 4


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S", "0.3")
        directory = tmp_path_factory.mktemp("several") / "c"
        with Pair(
            Tally, sites={"cloud": 1, "edge": 1}, partitions=PARTITIONS, data_dir=directory, controllers=2
        ) as running:
            yield running


@pytest.fixture(params=["the first is dead", "the first does not lead"])
def addresses(running: Pair, request: pytest.FixtureRequest) -> str:
    first = DEAD if request.param == "the first is dead" else running.second
    return f"{first},{running.first}"


def asked(addresses: str, *arguments: str) -> Any:
    """Returns what a command says as JSON, also when the controller refuses it; fails when no leader was asked."""
    result = command(*arguments, "--controller", addresses, "--json")
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer.get("error", {}).get("code") not in ("unavailable", "not_leading"), answer
    return answer


def _other_site(cluster: Cluster) -> str:
    """Returns the site where the first partition is not."""
    return "edge" if cluster.status().operators[0].owners[0].startswith("cloud") else "cloud"


def test_clients_and_routers(running: Pair, addresses: str) -> None:
    cluster, model = Cluster(addresses), Model()
    source = str(abs(hash(addresses)))
    assert cluster.status().follower is None, "the one that leads is preferred"
    with cluster.stream("Tally", source=source) as stream:
        for number in range(3):
            rows = rows_of(f"{source}-", number)
            assert outputs(stream.send(rows)) == model.apply(rows)
            # the stream has to ask for the new owners
            cluster.migrate("Tally", range(PARTITIONS), _other_site(cluster)).wait()
    model.check(cluster, keys=f"{source}-")
    assert source in {each.source for each in cluster.sources("Tally")}


def test_commands(running: Pair, addresses: str, tmp_path: Path) -> None:
    cluster, name = Cluster(addresses), f"v{abs(hash(addresses))}"
    with cluster.stream("Tally", source="commands") as stream:
        stream.send(rows_of("c", 0))
    assert asked(addresses, "status")["follower"] is None
    assert {each["name"] for each in asked(addresses, "nodes")["nodes"]} >= {"cloud-0", "edge-0"}
    assert asked(addresses, "partitions")
    moved = asked(addresses, "migrate", "Tally", "0", "--to", _other_site(cluster))
    assert moved["state"] == "COMPLETED"
    assert asked(addresses, "reconfig", "list")["reconfigurations"][0]["id"] == moved["id"]
    for shown in ("info", "details"):
        assert asked(addresses, "reconfig", shown, moved["id"])["id"] == moved["id"]
    assert asked(addresses, "reconfig", "slowest", "1")["moves"]
    for change in ("pause", "resume", "retry", "cancel"):
        asked(addresses, "reconfig", change, moved["id"])
    assert asked(addresses, "reconfig", "resolve", moved["id"], "--serve-source")["error"]["code"] == "move_conflict"
    asked(addresses, "drain", "cloud-0")
    asked(addresses, "rebalance")
    asked(addresses, "standby", "Tally", "0")
    assert asked(addresses, "checkpoint", "now", "Tally")["partitions"] == PARTITIONS
    assert asked(addresses, "savepoint", "create", name, "Tally")["partitions"] == PARTITIONS
    assert "error" not in asked(addresses, "checkpoint", "restore", "Tally", "--savepoint", name)
    assert "error" not in asked(addresses, "source", "list", "Tally")
    assert "error" not in asked(addresses, "source", "retire", "Tally", "commands")
    for arguments in (["scan"], ["export", "--out", str(tmp_path / "n.parquet")]):
        run = command("state", *arguments, "Tally", "n", "--controller", addresses)
        assert run.exit_code == 0, run.output
    deployed = asked(addresses, "deploy", "tests.integration.operators:Tally", "--partitions", "2", "--name", name)
    assert deployed["operator"] == name
    assert "error" not in asked(addresses, "undeploy", name, "--delete-state")
    for change in ("forget", "replace"):
        assert asked(addresses, change, "nobody")["error"]
    assert asked(addresses, "adopt", "--dry-run") == {"operators": []}


def test_replicas(running: Pair, addresses: str) -> None:
    name = "edge-1" if addresses.startswith(DEAD) else "edge-2"
    arguments = running._replica_arguments(name)
    arguments[arguments.index("--controller") + 1] = addresses
    process = running._process(name, arguments)
    process.start()
    process.wait_ready()
    cluster = running.cluster
    eventually(lambda: name in {each.name for each in cluster.status().replicas if each.alive}, f"{name} is there")
    process.stop()


@pytest.mark.spark
def test_spark(running: Pair, addresses: str, spark: SparkSession, tmp_path: Path) -> None:
    from stateflow.spark import apply_operator, read_state

    rows = [(f"s{len(addresses)}{n % 5}", 7) for n in range(50)]  # in any order
    spark.createDataFrame(rows, "k string, v long").write.parquet(str(tmp_path / "in"))
    given = spark.readStream.schema("k string, v long").parquet(str(tmp_path / "in"))
    seen: list[Any] = []
    written = apply_operator(given, Tally, cluster=addresses).writeStream.foreachBatch(
        lambda batch, _: seen.extend(batch.collect())
    )
    query = written.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        query.processAllAvailable()
    finally:
        query.stop()
    model = Model()
    assert sorted((r.k, r.n, r.total) for r in seen) == model.apply([{"k": k, "v": v} for k, v in rows])
    read = read_state(spark, cluster=addresses, operator="Tally", state="n").collect()
    assert {r.key: r.value for r in read if r.key.startswith(f"s{len(addresses)}")} == model.n
