"""The driver process of INSIDE: ``python -m benchmarks.inside_worker pace|kill FOLDER OPTIONS``, with options as JSON.

The driver writes ``result.json`` into the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from benchmarks.inside import BESIDE, INSIDE, KEYS, KILL_REPLICAS, PARTITIONS, REPLICAS, SIDES, TASKS
from benchmarks.operators import Ballast, CountSum
from benchmarks.record import Correctness
from benchmarks.rolling import OPERATOR, Input, Query, query_of
from benchmarks.spark import say, write_input
from stateflow.client import Cluster
from stateflow.spark import SparkCluster, apply_operator, local_session, start_cluster
from stateflow.testing import LocalCluster

#: slots of the session, for replicas and for the tasks of queries
SLOTS = REPLICAS + TASKS
#: number of rounds that are not counted, because the JVM compiles its code in them
WARM_ROUNDS = 1
BEFORE_S, AFTER_S, WAIT_S, LOOK_S = 10.0, 10.0, 300.0, 0.1


# -- pace -----------------------------------------------------------------------------------------------------


def pace(folder: Path, *, seed: int, rounds: int, rows: int, files: int, warm_up: int) -> dict[str, Any]:
    given = write_input(folder / "in", seed, KEYS, rows, files)
    # a task has up to ten attempts, because tasks that run replicas may fail
    spark = local_session("inside", f"local[{SLOTS},10]", spark__sql__streaming__numRecentProgressUpdates="1000")
    with (
        LocalCluster(
            CountSum,
            sites={"spark": REPLICAS},
            partitions=PARTITIONS,
            checkpoint_interval_s=0,
            data_dir=folder / BESIDE,
        ) as beside,
        start_cluster(spark, REPLICAS) as inside,
    ):
        inside.deploy(CountSum, PARTITIONS, installed=True)
        clusters: dict[str, SparkCluster | LocalCluster] = {INSIDE: inside, BESIDE: beside}
        found: dict[str, list[float]] = {side: [] for side in SIDES}
        of_rounds = []
        for number in range(WARM_ROUNDS + rounds):
            medians = {}
            for side in SIDES if number % 2 else reversed(SIDES):
                rates = _query_rates(spark, clusters[side], given, folder / f"{side}-{number}", rows)[warm_up:]
                medians[side] = statistics.median(rates)
                say(f"  {side}: {medians[side]:,.0f} rows/s{'' if number >= WARM_ROUNDS else ', to warm up'}")
                found[side] += rates if number >= WARM_ROUNDS else []
            of_rounds.append(medians[INSIDE] / medians[BESIDE])
        wanted = _counted(given, WARM_ROUNDS + rounds)
        parts = [_held_against(wanted, each.cluster) for each in clusters.values()]
    return {
        "rows_per_s": found,
        "of_rounds": of_rounds[WARM_ROUNDS:],
        "correctness": Correctness.of_all(parts).to_json(),
    }


def _query_rates(
    spark: SparkSession, cluster: SparkCluster | LocalCluster, given: Path, checkpoint: Path, rows: int
) -> list[float]:
    """Runs one query. Returns the rows per second of each of its micro-batches."""
    stream = spark.readStream.schema("k long, v double").option("maxFilesPerTrigger", 1).parquet(str(given))
    applied = apply_operator(stream, CountSum, cluster=cluster, tasks=TASKS)
    written = applied.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query = written.trigger(availableNow=True).start()
    query.awaitTermination()
    took = [each["durationMs"]["triggerExecution"] for each in query.recentProgress if each["numInputRows"]]
    return [rows / ms * 1e3 for ms in took]


def _counted(given: Path, times: int) -> dict[int, tuple[int, float]]:
    """Returns key → (count, sum) of the values of all files, if the files are read ``times`` times.

    Values are multiples of a quarter, so the sums are exact.
    """
    counts: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    for file in given.glob("*.parquet"):
        table = pq.read_table(file).to_pydict()
        for key, value in zip(table["k"], table["v"], strict=True):
            counts[key] += 1
            sums[key] += round(value * 4)
    return {key: (counts[key] * times, sums[key] * times / 4) for key in counts}


def _held_against(wanted: dict[int, tuple[int, float]], cluster: Cluster) -> Correctness:
    """Compares the state of a cluster with the expected state. The count of each key shows lost and duplicated
    rows."""
    rows = cluster.read_state("CountSum", "figures").to_pylist()
    state = {row["key"]: tuple(row["value"].values()) for row in rows}
    counted = {key: int(figures[0]) for key, figures in state.items()}
    return Correctness(
        lost=sum(max(0, n - counted.get(key, 0)) for key, (n, _) in wanted.items()),
        duplicated=sum(max(0, n - wanted.get(key, (0, 0.0))[0]) for key, n in counted.items()),
        late=0,
        state_equal=state == wanted,
    )


# -- kill -----------------------------------------------------------------------------------------------------


def kill(folder: Path) -> dict[str, Any]:
    (folder / "input").mkdir()
    settings = {
        "spark__executor__memory": "700m",
        "spark__sql__streaming__numRecentProgressUpdates": "1000",
        "spark__executorEnv__STATEFLOW_REPLICA_ACKNOWLEDGE": "standby",
    }
    spark = local_session("inside", f"local-cluster[{KILL_REPLICAS + 1},1,1024]", **settings)
    writing = Input(folder / "input")
    with start_cluster(spark, KILL_REPLICAS, standbys=1) as cluster:
        cluster.deploy(Ballast, PARTITIONS, installed=True)
        client = cluster.cluster
        _until(
            lambda: {each.phase for each in client.status().standbys} == {"CATCHING_UP"}, "every standby is catching up"
        )
        with query_of(spark, folder, cluster) as query:
            writing.start()
            query.read_all(1)
            time.sleep(BEFORE_S)
            owned = {each.name: each.partitions for each in client.status().replicas}
            lost = max(owned, key=lambda name: owned[name])
            executor = _executor_of(lost)
            os.kill(executor, signal.SIGKILL)
            killed = time.time()
            since = _until(lambda: _first_after(query, killed), "outputs flow again") - killed
            say(f"  outputs flow again {since:.2f} s after an executor was killed")
            time.sleep(AFTER_S)
            writing.stop()
            query.read_all(writing.files)
            state = {row["key"]: row["value"] for row in client.read_state(OPERATOR, "figures").to_pylist()}
            counted = Counter({key: int(next(iter(value.values()))) for key, value in state.items()})
            correct = query.correctness(writing.counts, counted)
        left = {each.name: each.partitions for each in client.status().replicas}
    return {"until_outputs_s": since, "took_over": owned[lost] - left[lost], "correctness": correct.to_json()}


def _first_after(query: Query, killed: float) -> float:
    """Returns the time at which the outputs of the first micro-batch after the kill were taken; 0: not taken yet.

    Micro-batches that began before the kill do not count.
    """
    began = {
        number: datetime.fromisoformat(each["timestamp"].replace("Z", "+00:00")).timestamp()
        for number, each in query.progress().items()
        if each["numInputRows"]
    }
    ended = query.ended()
    return min((ended[number] for number, at in began.items() if at > killed and number in ended), default=0.0)


def _executor_of(replica: str) -> int:
    """Returns the process id of the executor in which a replica runs.

    The replica's parent is a Python worker of Spark, whose parent is the Python daemon, whose parent is the executor.
    Raises LookupError if the replica is not in an executor.
    """
    found = next(pid for pid in _processes() if f" replica --name {replica} " in _command(pid))
    for _ in range(3):
        found = int(Path(f"/proc/{found}/stat").read_text().rpartition(")")[2].split()[1])
    if "CoarseGrainedExecutorBackend" not in _command(found):
        raise LookupError(f"{replica} is not in an executor: {_command(found)[:200]}")
    return found


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def _until(ask: Any, what: str) -> Any:
    """Returns the first true answer of ``ask``. Raises TimeoutError."""
    until = time.monotonic() + WAIT_S
    while not (answer := ask()):
        if time.monotonic() > until:
            raise TimeoutError(f"not within {WAIT_S:.0f} s: {what}")
        time.sleep(LOOK_S)
    return answer


if __name__ == "__main__":
    do, place, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    result = {"pace": pace, "kill": kill}[do](place, **options)
    (place / "result.json").write_text(json.dumps(result))
    os._exit(0)  # ends what is left of Spark
