"""A job for ``spark-submit``: ``standalone_driver.py WHAT ADDRESS OPERATOR WORK``.

In the end it prints what it found, as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from stateflow.errors import StateflowError
from stateflow.spark import apply_operator
from tests.integration.spark_drivers import SCHEMA, done, start, stream
from tests.integration.spark_operators import Tally


def refused(spark: SparkSession, address: str, operator: str, work: Path) -> dict[str, Any]:
    """Returns the error and its code for an operator that cannot be applied from here."""
    rows = spark.createDataFrame([(0, "k0", "a", 1, "")], SCHEMA)
    try:
        apply_operator(rows, Tally, cluster=address, name=operator)
    except StateflowError as error:
        return {"said": str(error), "code": error.code}
    return {"said": ""}


def flow(spark: SparkSession, address: str, operator: str, work: Path) -> dict[str, Any]:
    """Runs the query until ``work/enough`` is there and as many files as it says are processed."""
    query = start(applied(stream(spark, work), address, operator), work)
    while not done(work):
        if not query.isActive:
            query.awaitTermination()  # raises the query's error
        time.sleep(0.05)
    query.stop()
    return {"batches": len(query.recentProgress)}


def applied(rows: DataFrame, address: str, operator: str) -> DataFrame:
    return apply_operator(rows, Tally, cluster=address, name=operator, order_by="seq", tasks=2)


def both(spark: SparkSession, address: str, operator: str, work: Path) -> dict[str, Any]:
    """Runs an operator whose replicas are reachable, then applies one whose replicas are not."""
    return {**flow(spark, address, operator, work), **refused(spark, address, "Hidden", work)}


def sends(spark: SparkSession, address: str, operator: str, work: Path) -> dict[str, Any]:
    """Sends the package, as a client of Spark Connect, once an error says that executors lack it."""
    said = refused(spark, address, operator, work)
    spark.addArtifacts(str(work / "stateflow.zip"), pyfile=True)
    rows = spark.read.schema(SCHEMA).parquet(str(work / "input"))
    return {**said, "rows": sorted(map(list, applied(rows, address, operator).collect()))}


if __name__ == "__main__":
    what, address, operator, work = sys.argv[1:]
    session = SparkSession.builder.appName(operator).getOrCreate()
    do = {"refused": refused, "flow": flow, "both": both, "sends": sends}[what]
    found = do(session, address, operator, Path(work))
    session.stop()
    print(f"\n{json.dumps(found)}", flush=True)
