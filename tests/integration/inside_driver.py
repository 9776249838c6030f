"""A query over replicas inside its own application: ``python -m tests.integration.inside_driver WHAT MASTER FOLDER``.

``killed``: the processes that the replicas run in are killed while rows flow. ``decommissioned``: Spark decommissions
an executor whose state has no copy anywhere. ``secured``: with certificates. ``crowded``: replicas would take all
slots. ``kept``, then ``restored``: the application ends with a savepoint, and another one goes on. In the end the
driver prints what it found, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from stateflow.errors import InvalidArgument
from stateflow.security.certificates import certificate_of
from stateflow.security.roles import Identity
from stateflow.spark import SparkCluster, apply_operator, local_session, register_state, start_cluster
from tests.integration.processes import children, command, gone, parent
from tests.integration.spark_operators import Tally
from tests.integration.support import eventually

SCHEMA = "seq long, k string, kind string, v long"
PARTITIONS, PATIENCE_S = 4, 300.0


def replica(name: str) -> int:
    """Returns the process id of a replica. Raises LookupError."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and f" replica --name {name} " in command(int(entry.name)):
            return int(entry.name)
    raise LookupError(name)


def killed(master: str, folder: Path) -> dict[str, Any]:
    spark = session(master)
    with start_cluster(spark, 2, standbys=1, checkpoints=str(folder / "store")) as cluster:
        cluster.deploy(Tally, PARTITIONS)
        wait_for_copies(cluster)
        flow = Flow(spark, cluster, folder)
        names = flow.names()
        flow.wait(flow.files // 4)
        worker = parent(replica(names[0]))  # Spark's Python process
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: gone(worker), "it is killed", PATIENCE_S)
        flow.wait(flow.files // 2)
        if not master.startswith("local["):
            os.kill(executor_of(names[1]), signal.SIGKILL)
        return flow.end() | {"before": names}


def decommissioned(master: str, folder: Path) -> dict[str, Any]:
    """Decommissions an executor whose state is nowhere else: no standby, no checkpoint."""
    spark = session(master, spark__decommission__enabled="true")
    with start_cluster(spark, 2) as cluster:
        cluster.deploy(Tally, PARTITIONS)
        flow = Flow(spark, cluster, folder)
        names = flow.names()
        flow.wait(flow.files // 4)
        owned = {each.name: each.partitions for each in cluster.cluster.status().replicas}
        executor = executor_of(names[1])
        os.kill(executor, signal.SIGPWR)  # as Spark's own script for pods does
        eventually(lambda: gone(executor), "it ends by itself, as it runs no task any more", PATIENCE_S)
        eventually(
            lambda: any(name.startswith(f"{names[1]}-") for name in flow.names()), "another one comes", PATIENCE_S
        )
        eventually(lambda: names[1] not in flow.names(), "its replica counts as silent", PATIENCE_S)
        moved = [move for each in cluster.cluster.reconfigurations() for move in each.moves]
        return flow.end() | {
            "before": names,
            "owned": owned,
            "moves": [{"source": each.source, "state": each.state} for each in moved],
        }


def secured(master: str, folder: Path) -> dict[str, Any]:
    """Runs the query with certificates; a replica that is killed on the way gets another certificate for its name."""
    (folder / "events").mkdir()
    spark = session(
        master,
        spark__eventLog__enabled="true",
        spark__eventLog__dir=f"file://{folder}/events",
        spark__eventLog__compress="false",
    )
    given = sorted(name for name in os.environ if name.startswith("STATEFLOW_"))
    options = {"standbys": 1, "checkpoints": str(folder / "store"), "directory": folder / "cluster"}
    with start_cluster(spark, 2, tls=True, **options) as cluster:
        cluster.deploy(Tally, PARTITIONS)
        wait_for_copies(cluster)
        flow = Flow(spark, cluster, folder)
        flow.applied.explain("extended")
        names = flow.names()
        flow.wait(flow.files // 4)
        address = next(each.address for each in cluster.cluster.status().replicas if each.name == names[1])
        files = [folder_of(replica(name)) / "tls" for name in names]
        worker = parent(replica(names[0]))
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: gone(worker), "it is killed", PATIENCE_S)
        found = flow.end() | {
            "before": names,
            "read": read_by_executors(spark, cluster),
            "modes": sorted(
                {f"{path.name} {path.stat().st_mode & 0o777:o}" for each in files for path in each.iterdir()}
            ),
            "keys": [(each / "key.pem").read_text() for each in files],
            "identities": [str(identity_of(each / "cert.pem")) for each in files],
            "secrets": {
                "enrolment": cluster._task.enrolment.secret if cluster._task.enrolment else "",
                "token": str(cluster.token_file and cluster.token_file.read_text()),
                "token of reads": (folder / "cluster" / "certificates" / "query-Tally.token").read_text(),
            },
            "arguments": [text_of(pid, "cmdline") for pid in family(os.getpid())],
            "environments": [text_of(pid, "environ") for pid in family(os.getpid())],
            "refused": stateflow("status", "--controller", cluster.address, plain=True),
            "health": [stateflow("health", address, plain=plain)[0] for plain in (False, True)],
        }
    return found | {"left": sorted(name for name in os.environ if name.startswith("STATEFLOW_")) == given}


def read_by_executors(spark: SparkSession, cluster: SparkCluster) -> dict[str, Any]:
    """Returns what executors read with the tokens that the worker which plans their reads has made for them."""
    register_state(spark)
    source = spark.read.format("stateflow").options(cluster=cluster.address, operator="Tally")
    state = source.option("state", "n").load()
    state.explain("extended")
    described = spark.read.format("stateflow").options(cluster=cluster.address, operator="Tally", describe="states")
    return {
        "n": {row.key: row.value for row in state.collect()},
        "one": [row.value for row in state.where("key = 'k1'").collect()],
        "states": sorted(row.state for row in described.load().collect()),
    }


def kept(master: str, folder: Path) -> dict[str, Any]:
    """Stops in the midst of the rows: the query, and then the cluster with a savepoint."""
    spark = session(master)
    cluster = start_cluster(spark, 2, checkpoints=str(folder / "store"), directory=ledger_of(folder))
    cluster.deploy(Tally, PARTITIONS)
    flow = Flow(spark, cluster, folder)
    flow.wait(flow.files // 2)
    batches = flow.stop()
    cluster.stop(savepoint="tonight")
    return {"batches": batches}


def restored(master: str, folder: Path) -> dict[str, Any]:
    """Continues in another application, with what :func:`kept` has left.

    With the former ledger the replicas take over from the newest checkpoints, which are those of the savepoint.
    """
    spark = session(master)
    with start_cluster(spark, 2, checkpoints=str(folder / "store"), directory=ledger_of(folder)) as cluster:
        cluster.deploy(Tally, PARTITIONS)
        if ledger_of(folder) is None:
            reports = cluster.cluster.restore("Tally", savepoint="tonight")
            assert [each.error for each in reports] == [""] * PARTITIONS
        else:
            eventually(lambda: served(cluster) == PARTITIONS, "the replicas take over", PATIENCE_S)
        rows = sum(row["value"] for row in cluster.cluster.read_state("Tally", "n").to_pylist())
        flow = Flow(spark, cluster, folder)
        return flow.end() | {"rows": rows, "first": flow.first()}


def served(cluster: SparkCluster) -> int:
    """Returns the number of partitions that live replicas own."""
    return sum(each.partitions for each in cluster.cluster.status().replicas if each.alive)


def ledger_of(folder: Path) -> Path | None:
    """Directory that keeps the controller's ledger, if the test has made one. None: the ledger ends with the driver."""
    place = folder / "ledger"
    return place if place.exists() else None


def crowded(master: str, folder: Path) -> dict[str, Any]:
    """Asks for as many replicas as there are slots, whatever ``spark.default.parallelism`` is."""
    spark = session(master, spark__task__cpus="2", spark__default__parallelism="200")
    try:
        start_cluster(spark, 2)
    except InvalidArgument as error:
        running = [command(each) for each in family(os.getpid())]
        return {"said": str(error), "started": [each for each in running if "stateflow.local.process" in each]}
    raise AssertionError("more replicas than slots are refused")


def session(master: str, **settings: str) -> SparkSession:
    return local_session("inside", master, spark__executor__memory="700m", spark__task__maxFailures="10", **settings)


def wait_for_copies(cluster: SparkCluster) -> None:
    eventually(lambda: {s.phase for s in cluster.cluster.status().standbys} == {"CATCHING_UP"}, "copies", PATIENCE_S)


def executor_of(name: str) -> int:
    executor = parent(parent(parent(replica(name))))  # replica → forked worker → daemon → executor
    assert "CoarseGrainedExecutorBackend" in command(executor), command(executor)
    return executor


def folder_of(process: int) -> Path:
    """Directory of the Spark task that started a replica's process."""
    words = command(process).split()
    return Path(words[words.index("--data-dir") + 1]).parent


def identity_of(file: Path) -> Identity | None:
    return certificate_of(file.read_bytes()).identity


def family(process: int) -> list[int]:
    """Returns a process and all its descendants."""
    return [process, *(each for child in children(process) for each in family(child))]


def text_of(process: int, file: str) -> str:
    try:
        return Path(f"/proc/{process}/{file}").read_bytes().decode("latin-1")
    except OSError:
        return ""


def stateflow(*words: str, plain: bool) -> tuple[int, str]:
    """Returns exit status and stderr of a command.

    Args:
        plain: without the token in the environment, and so without a certificate.
    """
    had = {name: value for name, value in os.environ.items() if not (plain and name.startswith("STATEFLOW_TOKEN"))}
    arguments = [sys.executable, "-m", "stateflow", *words]
    done = subprocess.run(arguments, env=had, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done.returncode, done.stderr.strip()


class Flow:
    """A query over the files of a folder, one of them at a time."""

    def __init__(self, spark: SparkSession, cluster: SparkCluster, folder: Path) -> None:
        self.files = len(list((folder / "in").glob("*.parquet")))
        self._cluster = cluster.cluster
        rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
        self.applied = apply_operator(rows, Tally, cluster=cluster, tasks=1, unavailable_timeout=PATIENCE_S)
        written = self.applied.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
        self._query = written.start(str(folder / "out"))

    def _batches(self) -> int:
        if (error := self._query.exception()) is not None:
            raise AssertionError(str(error)[:2000])
        return 0 if self._query.lastProgress is None else int(self._query.lastProgress["batchId"]) + 1

    def wait(self, batches: int) -> None:
        eventually(lambda: self._batches() > batches, "rows flow", PATIENCE_S)

    def stop(self) -> int:
        """Stops the query wherever it is, and returns the number of batches that it has committed."""
        self._query.stop()
        return self._batches()

    def first(self) -> int:
        """Returns the number of the first batch since the query was started."""
        return int(self._query.recentProgress[0]["batchId"])

    def names(self) -> list[str]:
        return sorted(each.name for each in self._cluster.status().replicas if each.alive)

    def end(self) -> dict[str, Any]:
        """Waits for all rows, stops the query, and returns the state and the live replicas."""
        self.wait(self.files - 1)
        self._query.stop()
        return {"state": self._cluster.read_state("Tally", "n").to_pylist(), "alive": self.names()}


if __name__ == "__main__":
    drivers = (killed, decommissioned, secured, crowded, kept, restored)
    do = next(each for each in drivers if each.__name__ == sys.argv[1])
    print(json.dumps(do(sys.argv[2], Path(sys.argv[3]))), flush=True)
    os._exit(0)  # what is left of Spark ends with it
