"""Operators over Spark Connect: a server for these tests, and each client in a process of its own.

A process can have only one kind of session, and the sessions of the other tests are classic.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest

from benchmarks.replay import has_compiler, make_jar
from benchmarks.replay.operators import Count
from stateflow.security.authority import write_private
from stateflow.security.roles import Identity
from stateflow.spark.session import REAL_TIME
from stateflow.testing import LocalCluster
from tests.integration.operators import Sorting, Tally
from tests.versions import needs

pytestmark = [pytest.mark.spark, pytest.mark.processes]
REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
    "PYSPARK_PYTHON": sys.executable,
    "PYSPARK_DRIVER_PYTHON": sys.executable,
    "SPARK_LOCAL_IP": "127.0.0.1",
}
SERVER = """
import json, sys
from stateflow.spark import local_session
local_session(
    "connect server",
    spark__plugins="org.apache.spark.sql.connect.SparkConnectPlugin",
    spark__connect__grpc__binding__port=sys.argv[1],
    spark__sql__shuffle__partitions="2",
    **json.loads(sys.argv[2]),
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
#: precedes programs with queries in real-time mode
LIVE = """
import os, time
from benchmarks.replay.operators import Count
said = {"cluster": cluster, "real_time": True, "position": ("part", "off")}
class Keep:
    def open(self, part, epoch):
        self.rows, self.file = [], there / "out" / f"{epoch}-{part}"
        return True
    def process(self, row):
        self.rows.append([row.part, row.off, row.k, row.n])
    def close(self, error):
        if error is None:  # the outputs of a repeated epoch replace those it had
            written = self.file.with_suffix(".new")
            written.write_text(json.dumps(self.rows))
            written.rename(self.file)
def begin(frame, checkpoint="checkpoint", **trigger):
    writer = frame.writeStream.outputMode("update").option("checkpointLocation", str(there / checkpoint))
    return writer.trigger(**trigger or {"realTime": "5 seconds"}).foreach(Keep()).start()
"""


@contextmanager
def serving(log: IO[bytes] | None = None, **settings: Any) -> Iterator[str]:
    """Starts a server with these arguments of its session, and yields its URL. ``log`` gets what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(port), json.dumps(settings)]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield f"sc://127.0.0.1:{port}"
        process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for queries in real-time mode, with the replay source if there is a compiler."""
    jar = {"spark__jars": str(make_jar(tmp_path_factory.mktemp("replay")))} if has_compiler() else {}
    with serving(master="local[6]", real_time=True, **jar) as url:
        yield url


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
    assert "invalid_argument: over Spark Connect a batch in foreachBatch does not say which query" in said["failed"]
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


@needs(REAL_TIME)
def test_what_would_lose_rows_in_real_time_is_refused(live: str, cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.cluster.deploy(Count, 4)
    said = client(
        LIVE
        + """
rate = spark.readStream.format("rate").load().selectExpr(
    "cast(value % 3 as string) k", "value off", "cast(value % 2 as int) part", "timestamp due")
micro = apply_operator(rate, Count, cluster=cluster)
micro.createOrReplaceTempView("behind")
real = apply_operator(rate, Count, **said)
twice = apply_operator(real, Count, **said)
apart = apply_operator(real, Count, source="other", **said)
tell(
    micro=refused(lambda: begin(micro)),
    behind=refused(lambda: begin(spark.table("behind"))),
    each=refused(lambda: spark.table("behind").writeStream.foreachBatch(lambda batch, number: None)),
    trigger=refused(lambda: begin(real, processingTime="0 seconds")),
    table=refused(lambda: real.writeStream.toTable("never")),
    twice=refused(lambda: begin(twice)),
    shuffle=refused(lambda: apply_operator(rate.repartition(2), Count, **said)),
    allowed=refused(lambda: apply_operator(rate.where("off > 0").select("*"), Count, **said)),
    state=read_state(spark, cluster=cluster, operator="Count", state="n").count(),
    checkpoint=(there / "checkpoint").exists(),
)
""",
        live,
        cluster,
        tmp_path,
    )
    micro = "invalid_argument: the operator is applied to micro-batches, but this query runs in real-time mode: "
    assert said["micro"] == said["behind"] == f"{micro}use apply_operator(…, real_time=True)"
    assert said["each"].startswith("invalid_argument: over Spark Connect an operator's outputs cannot go to foreach")
    other = "invalid_argument: the operator is applied in real-time mode, but this query runs in micro-batches: "
    assert said["trigger"] == said["table"] == f"{other}use trigger(realTime=…), or omit real_time="
    assert said["twice"].startswith("operator_used_twice: the operator is applied twice in one query")
    assert said["shuffle"].startswith("invalid_argument: a Repartition precedes the operator")
    assert said["allowed"] is None
    assert not said["checkpoint"]
    assert said["state"] == 0


@needs(REAL_TIME)
@pytest.mark.skipif(not has_compiler(), reason="the source of rows is Java, and there is no javac")
def test_a_real_time_query_that_is_stopped_within_an_epoch_goes_on(
    live: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    rows = 600
    cluster.cluster.deploy(Count, 4, name="Live")
    said = client(
        LIVE
        + f"ROWS = {rows}\n"
        + """
(there / "out").mkdir()
options = {"partitions": 2, "intervalUs": 20_000, "t0us": round(time.time() * 1e6), "keys": 5, "total": ROWS}
frame = apply_operator(spark.readStream.format("replay.Source").options(**options).load(), Count, name="Live", **said)
def counted():
    return sum(row.value for row in read_state(spark, cluster=cluster, operator="Live", state="n").collect())
def given():
    files = [file for file in (there / "out").iterdir() if not file.suffix]
    return [row for file in files for row in json.loads(file.read_text())]
try:
    frame.writeStream.trigger(realTime="5 seconds").foreach(Keep()).start()
except Exception as error:
    mode = str(error).splitlines()
query = begin(frame)
eventually(lambda: counted() > 0, "rows come", 300)
query.stop()
before = counted()
query = begin(frame)
eventually(lambda: len(given()) >= 2 * ROWS, "all are given", 300)
query.stop()
tell(mode=mode, before=before, given=given(), state=counted())
""",
        live,
        cluster,
        tmp_path,
    )
    assert "STREAMING_REAL_TIME_MODE.OUTPUT_MODE_NOT_SUPPORTED" in said["mode"][0]
    assert "set the output mode to Update" in said["mode"][0], "Spark's own line, before the first row"
    assert said["before"] > 0
    assert said["state"] == 2 * rows, "each is applied once"
    assert Counter((part, off) for part, off, *_ in said["given"]) == Counter(
        (part, off) for part in range(2) for off in range(rows)
    )
    places: dict[str, list[int]] = {}
    for _, _, key, place in said["given"]:
        places.setdefault(key, []).append(place)
    assert all(sorted(found) == list(range(1, len(found) + 1)) for found in places.values())
