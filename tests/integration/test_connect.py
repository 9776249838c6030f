"""Operators over Spark Connect: a server for these tests, and each client in a process of its own.

A process can have only one kind of session, and the sessions of the other tests are classic.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from stateflow.security.authority import write_private
from stateflow.security.roles import Identity
from stateflow.testing import LocalCluster
from tests.integration.operators import Sorting, Tally

pytestmark = [pytest.mark.spark, pytest.mark.processes]
REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
    "PYSPARK_PYTHON": sys.executable,
    "PYSPARK_DRIVER_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
}
SERVER = """
import sys
from stateflow.spark import local_session
local_session(
    "connect server",
    spark__plugins="org.apache.spark.sql.connect.SparkConnectPlugin",
    spark__connect__grpc__binding__port=sys.argv[1],
    spark__sql__shuffle__partitions="2",
)
print("ready", flush=True)
sys.stdin.read()
"""
#: precedes each of the programs below: ``spark``, ``cluster`` (its address), ``there`` (a directory), ``tell``
CLIENT = """
import json, sys
from pathlib import Path
from pyspark.sql import SparkSession
from stateflow.errors import StateflowError
from stateflow.spark import apply_operator, query_metrics, read_state
from tests.integration.operators import Tally
from tests.integration.support import eventually
spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
cluster, there = sys.argv[2], Path(sys.argv[3])
COLUMNS = "seq long, k string, kind string, v long"
def rows(batch, count=20):
    return [(batch * count + n, f"k{n % 5}", "x", n) for n in range(count)]
def refused(do):
    try:
        do()
    except StateflowError as error:
        return str(error)
def tell(**said):
    print(json.dumps(said))
"""
STREAM = """
def land(batch):
    spark.createDataFrame(rows(batch), COLUMNS).coalesce(1).write.mode("append").parquet(str(there / "in"))
def run():
    frame = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(there / "in"))
    out = apply_operator(frame, Tally, cluster=cluster, order_by="seq", name="Streamed", tasks=2)
    writer = out.writeStream.format("parquet").option("checkpointLocation", str(there / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(there / "out"))
    query.awaitTermination()
    return query
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(port)]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield f"sc://127.0.0.1:{port}"
        process.communicate()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(sites={"cloud": 1, "edge": 1}, checkpoint_interval_s=0) as started:
        for name in ("Tally", "Streamed"):
            started.cluster.deploy(Tally, 4, name=name)
        yield started


def client(program: str, server: str, cluster: LocalCluster, there: Path, **environment: str) -> dict[str, Any]:
    """Runs a program in a new client and returns what it tells."""
    there.mkdir(exist_ok=True)
    command = [sys.executable, "-c", CLIENT + program, server, cluster.address, str(there)]
    done = subprocess.run(
        command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


#: what ``Tally`` makes of ``rows(0)``
TOTALS = [[f"k{key}", number + 1, sum(range(key, key + 5 * number + 1, 5))] for key in range(5) for number in range(4)]


def test_a_batch_and_its_state(server: str, cluster: LocalCluster, tmp_path: Path) -> None:
    said = client(
        """
out = apply_operator(spark.createDataFrame(rows(0), COLUMNS), Tally, cluster=cluster, order_by="seq", tasks=2)
first = out.collect()
state = read_state(spark, cluster=cluster, operator="Tally", state="n")
tell(
    first=sorted(map(tuple, first)), given=out.columns,
    metrics=[(o.operator, o.rows, o.tasks, o.visits, o.repeated, o.replayed) for o in query_metrics(out).operators],
    state=sorted((row.key, row.value) for row in state.collect()),
)
""",
        server,
        cluster,
        tmp_path,
    )
    assert said["first"] == TOTALS
    assert said["given"] == ["k", "n", "total"], "without the reports"
    assert said["metrics"] == [["Tally", 20, 2, 4, 0, 0]]
    assert said["state"] == [[f"k{key}", 4] for key in range(5)]


def test_a_batch_is_evaluated_again_and_one_is_refused(server: str, cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.cluster.deploy(Tally, 4, name="Again")
    said = client(
        """
frame = spark.createDataFrame(rows(0), COLUMNS)
def stored():
    return read_state(spark, cluster=cluster, operator="Again", state="n")
state = stored()
empty = state.collect()
out = apply_operator(frame, Tally, cluster=cluster, order_by="seq", name="Again", tasks=2)
first, again = out.collect(), out.count()
bad = spark.createDataFrame([(0, "k9", "x", -1)], COLUMNS)
try:
    apply_operator(bad, Tally, cluster=cluster, name="Again").collect()
except Exception as error:
    failed = str(error)
tell(
    empty=empty, first=sorted(map(tuple, first)), again=again, failed=failed, types=state.dtypes,
    state=sorted((row.key, row.value) for row in stored().collect()), same=state.collect(),
    metrics=[(o.operator, o.rows, o.tasks, o.visits, o.repeated, o.replayed) for o in query_metrics(out).operators],
    nobody=query_metrics(apply_operator(frame, Tally, cluster=cluster, name="Again")).batches,
    spent=query_metrics(out).seconds.total,
)
""",
        server,
        cluster,
        tmp_path,
    )
    assert said["empty"] == said["same"] == [], "it was read before the batch"
    assert said["first"] == TOTALS
    assert said["again"] == 20, "evaluated twice, applied once"
    assert said["state"] == [[f"k{key}", 4] for key in range(5)]
    assert said["types"] == [["key", "string"], ["map_key", "string"], ["value", "bigint"], ["partition", "int"]]
    assert said["failed"].startswith("operator_failed: process() raised ValueError: minus one"), "told briefly"
    assert said["failed"].count("operator_failed") == 2, "first and last"
    assert said["metrics"] == [["Again", 20, 2, 4, 0, 4]], "of the newest evaluation, which was answered what is stored"
    assert said["nobody"] == [], "it was not evaluated"
    assert said["spent"] > 0


def test_a_query_goes_on_in_another_client_while_its_state_moves(
    server: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    there = tmp_path / "query"
    first = client(STREAM + "land(0)\nland(1)\nquery = run()\ntell(id=str(query.id))", server, cluster, there)
    assert cluster.migrate("Streamed", [0, 1, 2, 3], "edge").wait().state == "COMPLETED"
    second = client(
        STREAM
        + """
land(2)
query = run()
[batch] = query_metrics(query).batches
same = query_metrics(query) == query_metrics(str(query.id))
run()  # nothing new: nothing is applied again
out = spark.read.parquet(str(there / "out"))
state = read_state(spark, cluster=cluster, operator="Streamed", state="n")
tell(
    id=str(query.id), rows=out.count(), distinct=out.distinct().count(), same=same,
    batch=(batch.number, batch.input_rows, batch.rows, batch.tasks), took=(batch.trigger_s, batch.seconds.total),
    state=sorted((row.key, row.value) for row in state.collect()),
)
""",
        server,
        cluster,
        there,
    )
    assert second["id"] == first["id"]
    assert second["state"] == [[f"k{key}", 12] for key in range(5)]
    assert (second["rows"], second["distinct"]) == (60, 60), "every count of every key once"
    assert second["batch"] == [2, 20, 20, 2]
    assert second["took"][0] == pytest.approx(second["took"][1])
    assert second["same"]


def test_a_query_whose_server_was_killed_in_its_first_batch_starts(
    server: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    """A query starts beside a file that a killed server was about to rename; Spark alone refuses to."""
    there, left = tmp_path / "begun", ".0.3c2de6a1-6f6c-4ad1-8a3b-3f6f7a0b9c1d.tmp"
    (there / "checkpoint" / "offsets").mkdir(parents=True)
    (there / "checkpoint" / "offsets" / left).write_text("v1")
    query = "9d0c8f8e-7a55-4b7a-8f5f-0a7e35a3f0d1"
    (there / "checkpoint" / "metadata").write_text(json.dumps({"id": query}))
    cluster.cluster.deploy(Tally, 4, name="Begun")
    program = STREAM.replace('name="Streamed"', 'name="Begun"')
    said = client(
        program
        + """
land(0)
query = run()
tell(id=str(query.id), rows=spark.read.parquet(str(there / "out")).count())
""",
        server,
        cluster,
        there,
    )
    assert said == {"id": query, "rows": 20}
    (aside,) = (there / "checkpoint" / "_rewound").rglob("*.tmp")
    assert aside.name == left


def test_what_foreach_batch_would_lose_is_refused(server: str, cluster: LocalCluster, tmp_path: Path) -> None:
    said = client(
        STREAM
        + """
land(0)
frame = spark.readStream.schema(COLUMNS).parquet(str(there / "in"))
out = apply_operator(frame, Tally, cluster=cluster)
frame.writeStream.foreachBatch(lambda batch, number: None)  # without an operator it is Spark's own affair
tell(said=refused(lambda: out.writeStream.foreachBatch(lambda batch, number: None)))
""",
        server,
        cluster,
        tmp_path,
    )
    assert said["said"].startswith("invalid_argument: over Spark Connect an operator's outputs cannot go to foreach")


def test_an_operator_within_foreach_batch_is_told_which_batch_it_is(
    server: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    cluster.cluster.deploy(Tally, 4, name="Within")
    said = client(
        STREAM
        + """
land(0)
frame = spark.readStream.schema(COLUMNS).parquet(str(there / "in"))
def function(address, named):
    def each(batch, number):
        from stateflow.spark import apply_operator
        from tests.integration.operators import Tally
        source = f"within-{number}" if named else None
        out = apply_operator(batch, Tally, cluster=address, name="Within", source=source)
        out.write.format("noop").mode("append").save()
    return each
failed = None
for named, place in ((False, "a"), (True, "b"), (True, "c")):  # the last one has another checkpoint: batch 0 again
    writer = frame.writeStream.option("checkpointLocation", str(there / place)).trigger(availableNow=True)
    query = writer.foreachBatch(function(cluster, named)).start()
    try:
        query.awaitTermination()
    except Exception as error:
        failed = str(error)
state = read_state(spark, cluster=cluster, operator="Within", state="n")
tell(failed=failed, state=sorted((row.key, row.value) for row in state.collect()))
""",
        server,
        cluster,
        tmp_path,
    )
    assert "invalid_argument: over Spark Connect a batch in foreachBatch carries neither" in said["failed"]
    assert said["state"] == [[f"k{key}", 4] for key in range(5)], "applied once"


def test_a_first_state(server: str, cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.cluster.deploy(Tally, 4, name="First")
    said = client(
        """
frame = spark.createDataFrame(rows(0), COLUMNS)
begun = spark.createDataFrame([("k0", 100)], "k string, total long")
apply_operator(frame, Tally, cluster=cluster, name="First", initial_state=begun).count()
state = read_state(spark, cluster=cluster, operator="First", state="total")
tell(state=sorted((row.key, row.value) for row in state.collect()))
""",
        server,
        cluster,
        tmp_path,
    )
    totals = {key: sum(range(key, 20, 5)) for key in range(5)} | {0: 100 + sum(range(0, 20, 5))}
    assert said["state"] == [[f"k{key}", total] for key, total in totals.items()]


def test_state_is_read_by_executors_with_the_token_of_the_client(server: str, tmp_path: Path) -> None:
    """The server has no token, and Spark's defaults; the client has a token, and registers the source."""
    with LocalCluster(Tally, sites={"cloud": 1}, partitions=4, tls=True) as secured:
        with secured.cluster.stream("Tally", source="s") as stream:
            stream.send([{"seq": n, "k": f"k{n % 5}", "kind": "x", "v": n} for n in range(20)])
        assert secured.certificates is not None
        who = Identity.of("data", "client", ("Tally",))
        token, _ = secured.certificates.authority.token(who, timedelta(hours=1))
        write_private(tmp_path / "token", token.encode())
        said = client(
            """
from stateflow.spark import register_state
register_state(spark)
state = spark.read.format("stateflow").options(cluster=cluster, operator="Tally", state="n").load()
one = state.where("key = 'k3'")
tell(
    all=sorted((row.key, row.value) for row in state.collect()), one=[row.key for row in one.collect()],
    plan=one._explain_string(extended=True),
)
""",
            server,
            secured,
            tmp_path,
            STATEFLOW_TOKEN_FILE=str(tmp_path / "token"),
        )
    assert said["all"] == [[f"k{key}", 4] for key in range(5)]
    assert said["one"] == ["k3"]
    assert "stateflow" in said["plan"]
    assert not any(token[at : at + 32] in said["plan"] for at in range(0, len(token) - 32, 32))


def test_side_outputs_and_columns_that_are_never_null(server: str, cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.cluster.deploy(Sorting, 4)
    said = client(
        """
frame = spark.createDataFrame(rows(0), COLUMNS)
from tests.integration.operators import Sorting
out = apply_operator(frame, Sorting, cluster=cluster)
main, side = out.main(), out.side("odd")
tell(
    main=sorted(map(tuple, main.collect())), side=sorted(map(tuple, side.collect())),
    metrics=[(o.operator, o.rows, o.visits) for o in query_metrics(out).operators],
)
""",
        server,
        cluster,
        tmp_path,
    )
    assert said["main"] == sorted([f"k{n % 5}", n] for n in range(0, 20, 2))
    assert said["side"] == sorted([n] for n in range(1, 20, 2))
    assert said["metrics"] == [["Sorting", 20, 4]]


def test_stages_are_recorded_by_the_client(server: str, cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.cluster.deploy(Tally, 4, name="Recorded")
    said = client(
        STREAM
        + """
from stateflow.ledger import Ledger, StateManager
land(0)
land(1)
frame = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(there / "in"))
with Ledger(f"sqlite:///{there / 'ledger.db'}") as ledger:
    manager = StateManager(ledger)
    out = apply_operator(frame, Tally, cluster=cluster, name="Recorded", state_manager=manager)
    writer = out.writeStream.format("parquet").option("checkpointLocation", str(there / "checkpoint"))
    query = writer.queryName("tallies").trigger(availableNow=True).start(str(there / "out"))
    query.awaitTermination()
    eventually(lambda: len(manager.get_processing_history("tallies")) == 2, "both batches are told of")
    history = manager.get_processing_history("tallies")
tell(
    rows=[stage["row_count"] for stage in history], status=[stage["status"] for stage in history],
    linked=history[1]["correlation_id_in"] == history[0]["correlation_id_out"],
    ends=[(stage["source_type"], stage["sink_type"]) for stage in history],
)
""",
        server,
        cluster,
        tmp_path,
    )
    assert said["rows"] == [20, 20]
    assert said["status"] == ["success", "success"]
    assert said["linked"]
    assert said["ends"] == [["FileStreamSource", "FileSink"]] * 2
