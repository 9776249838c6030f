"""The driver process of a query over the source of rows: ``python -m benchmarks.replay.driver JSON``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from pyspark.sql import DataFrame

from benchmarks.replay.operators import Count, Seconds
from stateflow.spark import apply_operator, local_session

#: name of the operator that counts like Count, with Spark's own state in the JVM
IN_JVM = "transformWithState"
OWN_STATE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.shuffle.partitions": "2",
}


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its source.

    Attributes:
        t0_us: time at which the first row is due, in µs since 1970.
        rows: number of rows of each partition.
        interval_us: time between two rows of a partition.
        epoch: length of an epoch, as Spark's trigger takes it; empty: micro-batches.
        cores: cores of the session.
        operator: name of one of this package's operators, or :data:`IN_JVM`.
        as_kafka: the rows get Kafka's columns topic, partition and offset, which identify them.
    """

    jar: str
    address: str
    checkpoint: str
    out: str
    t0_us: int
    rows: int
    interval_us: int
    partitions: int = 2
    keys: int = 64
    epoch: str = "5 seconds"
    cores: int = 4
    operator: str = "Count"
    as_kafka: bool = False

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "benchmarks.replay.driver", json.dumps(asdict(self))]


def run(query: Query) -> None:
    spark = local_session("replay", f"local[{query.cores}]", real_time=bool(query.epoch), spark__jars=query.jar)
    source = spark.readStream.format("replay.Source")
    options = {"partitions": query.partitions, "intervalUs": query.interval_us, "t0us": query.t0_us}
    rows = source.options(**options, keys=query.keys, total=query.rows).load()
    if query.operator == IN_JVM:
        applied = in_jvm(rows)
    else:
        real_time = {"real_time": True, "position": ("part", "off")} if query.epoch else {}
        if query.as_kafka:
            rows = rows.selectExpr("*", "'rows' topic", "part partition", "off offset")
            real_time.pop("position")
        operator = {each.__name__: each for each in (Count, Seconds)}[query.operator]
        watermark = "due" if operator is Seconds else None
        applied = apply_operator(rows, operator, cluster=query.address, watermark=watermark, **real_time)
    trigger = {"realTime": query.epoch} if query.epoch else {"processingTime": "0 seconds"}
    writer = applied.writeStream.outputMode("update").trigger(**trigger)
    writer._jwrite = writer._jwrite.foreach(spark._jvm.replay.Sink(query.out))
    started = writer.option("checkpointLocation", query.checkpoint).start()
    print("started", flush=True)
    started.awaitTermination()


def in_jvm(rows: DataFrame) -> DataFrame:
    spark = rows.sparkSession
    for key, value in OWN_STATE.items():
        spark.conf.set(key, value)
    return DataFrame(spark._jvm.replay.Counting.apply(rows._jdf), spark)


if __name__ == "__main__":
    run(Query(**json.loads(sys.argv[1])))
