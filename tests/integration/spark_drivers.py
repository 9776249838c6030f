"""Spark drivers that run as processes of their own: ``python -m tests.integration.spark_drivers WHAT ARGUMENT…``.

They end when their standard input does, and so with the test that started them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from stateflow.spark import apply_operator, local_session
from tests.integration.spark_operators import Laggard, Tally, dwell, wait_for

SCHEMA = "seq long, k string, kind string, v long, pad string"
LAGGING_BATCH = 1
HOSTS = ("127.0.0.2", "127.0.0.3")
STARTED = "the query is started"
#: small record batches: a task has dozens of them, so that kills also hit between two
TALLYING = {
    "spark__sql__shuffle__partitions": "2",
    "spark__sql__execution__arrow__maxRecordsPerBatch": "50",
    "spark__executorEnv__PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    "spark__executor__memory": "512m",
    "spark__executor__extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def start(frame: DataFrame, work: Path, **trigger: bool) -> Any:
    writer = frame.writeStream.format("parquet").option("checkpointLocation", str(work / "checkpoint"))
    return (writer.trigger(**trigger) if trigger else writer).start(str(work / "output"))


def stream(spark: SparkSession, work: Path) -> DataFrame:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(work / "input"))


def tally(address: str, work: Path, master: str = "local[2,4]") -> None:
    """Runs the query until ``work/enough`` is there and as many files as it says are processed."""
    spark = local_session("tally", master=master, **TALLYING)
    count(spark, address, work)
    spark.stop()


def connect_server(port: str) -> None:
    """Runs a Spark Connect server until it is killed."""
    local_session(
        "connect server",
        master="local[2,4]",
        spark__plugins="org.apache.spark.sql.connect.SparkConnectPlugin",
        spark__connect__grpc__binding__port=port,
        **TALLYING,
    )
    threading.Event().wait()


def connect_tally(address: str, work: Path, remote: str) -> None:
    """Runs ``tally`` over Spark Connect.

    The server ends another client's query that runs under the same checkpoint when this one starts.
    """
    count(SparkSession.builder.remote(remote).getOrCreate(), address, work)


def count(spark: SparkSession, address: str, work: Path) -> None:
    query = start(apply_operator(stream(spark, work), Tally, cluster=address, order_by="seq", tasks=2), work)
    print(STARTED, flush=True)
    # processAllAvailable() would take a listing that began before the last file came as proof that none is left
    while not done(work):
        if not query.isActive:
            query.awaitTermination()  # raises the query's error
        time.sleep(0.05)
    query.stop()


def done(work: Path) -> bool:
    try:
        files = int((work / "enough").read_text())
        numbers = [int(each.name) for each in (work / "checkpoint" / "commits").iterdir() if each.name.isdigit()]
    except FileNotFoundError:  # no batch was committed yet
        return False
    if not numbers:
        return False
    # the batch's own number does not tell: files of a batch that a kill prevented may be part of the next one
    planned = (work / "checkpoint" / "offsets" / str(max(numbers))).read_text()
    return bool(json.loads(planned.splitlines()[-1])["logOffset"] == files - 1)


def speculate(address: str, work: Path) -> None:
    """Runs the query with speculation on executors of two hosts, as Spark starts no second attempt on the first's host.

    The master and its workers run in this driver's JVM; the hosts are loopback addresses.
    """
    from pyspark import SparkConf, SparkContext

    (work / "events").mkdir()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    SparkContext._ensure_initialized()
    jvm = SparkContext._jvm
    gateway = SparkContext._gateway
    assert jvm is not None
    assert gateway is not None
    conf = SparkConf().set("spark.master.rest.enabled", "false").set("spark.ui.enabled", "false")._jconf
    deploy, nothing = jvm.org.apache.spark.deploy, jvm.scala.Option.empty()
    master = deploy.master.Master.startRpcEnvAndEndpoint("127.0.0.1", 0, 0, conf)._1()
    url = f"spark://{master.address().hostPort()}"
    urls = gateway.new_array(jvm.java.lang.String, 1)
    urls[0] = url
    for number, host in enumerate(HOSTS):
        deploy.worker.Worker.startRpcEnvAndEndpoint(
            host, 0, 0, 1, 1024, urls, str(work / "workers"), jvm.scala.Some(number), conf, nothing
        )
    spark = local_session(
        "speculate",
        master=url,
        spark__locality__wait="0s",
        spark__speculation="true",
        spark__speculation__interval="100ms",
        spark__speculation__task__duration__threshold="1s",
        spark__eventLog__enabled="true",
        spark__eventLog__compress="false",
        spark__eventLog__dir=(work / "events").as_uri(),
        spark__executor__memory="512m",
        spark__sql__shuffle__partitions="2",
    )
    lags_until = str(second(work, 0))

    def lag(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Holds up the first attempt at one task of a batch once it has its outputs, until the second has them, too."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        arrived = list(batches)
        batch = context.getLocalProperty("streaming.sql.batchId")
        if batch == str(LAGGING_BATCH) and context.partitionId() == 0:
            # the second may be the faster one: the first would then never be seen beside it
            (dwell if context.attemptNumber() == 0 else wait_for)(Path(lags_until))
        yield from arrived

    # one task: where all tasks of a stage fit into one executor, Spark speculates by the threshold alone
    counted = apply_operator(stream(spark, work), Laggard, cluster=address, order_by="seq", tasks=1)
    threading.Thread(target=_watch, args=(spark, work), daemon=True).start()
    query = start(counted.mapInArrow(lag, Laggard.output), work, availableNow=True)
    query.awaitTermination()
    spark.stop()


def second(work: Path, number: int) -> Path:
    """Returns the file that appears once a stage that waits for it runs a second attempt beside the first."""
    return work / f"second-{number}"


def _watch(spark: SparkSession, work: Path) -> None:
    tracker = spark.sparkContext.statusTracker()
    while True:
        infos = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        if any(info and info.numActiveTasks + info.numCompletedTasks > info.numTasks for info in infos):
            for lagging in work.glob("second-*.lagging"):
                lagging.with_suffix("").touch()
        time.sleep(0.1)


def _end_with_the_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    what, *arguments = sys.argv[1:]
    if what == "connect_server":
        connect_server(*arguments)
    else:
        address, directory, *rest = arguments
        {"tally": tally, "connect_tally": connect_tally, "speculate": speculate}[what](address, Path(directory), *rest)
    os._exit(0)  # the thread that reads stdin still runs
