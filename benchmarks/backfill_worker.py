"""The driver process of T5: ``python -m benchmarks.backfill_worker ARGUMENTS-AS-JSON``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from benchmarks.backfill import KEYS, SOURCE, TASKS, TEXT_BYTES, WARM_UP, WARM_UP_ROWS
from benchmarks.operators import CountSum
from stateflow.client import Cluster
from stateflow.spark import apply_operator, local_session


def rows(spark: SparkSession, count: int) -> DataFrame:
    """Returns a DataFrame of ``count`` rows in 8 partitions.

    Files have many partitions as well, so the rows are shuffled on their way to the tasks, as they are for real input.
    """
    number = sf.col("id")
    return spark.range(0, count, 1, 8).select(
        (number % KEYS).alias("k"),
        ((number % 8) / 4).alias("v"),
        sf.lpad(number.cast("string"), TEXT_BYTES, "x").alias("text"),
    )


def backfill(spark: SparkSession, address: str, name: str, source: str, count: int) -> dict[str, Any]:
    applied = apply_operator(rows(spark, count), CountSum, cluster=address, name=name, source=source, tasks=TASKS)
    n = sf.col("n").cast("decimal(38,0)")
    began = time.monotonic()
    (told,) = applied.agg(sf.count("*"), sf.sum(n), sf.sum(n * n)).collect()
    seconds = time.monotonic() - began
    return {"seconds": seconds, "rows": int(told[0]), "n": int(told[1]), "n_squared": int(told[2])}


def main() -> None:
    given = json.loads(sys.argv[1])
    spark = local_session(
        "T5",
        master=f"local[{TASKS},4]",  # a task whose worker died is tried again
        spark__local__dir=str(Path(given["work"]) / "local"),
        spark__driver__memory="2g",
        spark__sql__shuffle__partitions=str(TASKS),
    )
    Cluster(given["address"]).deploy(CountSum, name=WARM_UP)
    backfill(spark, given["address"], WARM_UP, WARM_UP, WARM_UP_ROWS)
    found = backfill(spark, given["address"], CountSum.__name__, SOURCE, given["rows"])
    Path(given["result"]).write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
