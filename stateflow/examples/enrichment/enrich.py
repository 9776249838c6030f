"""Sends orders and customers, two streams of files, to one operator: `python enrich.py`."""

from __future__ import annotations

from pathlib import Path

from enrichment import Enriched
from pyspark.sql import DataFrame, SparkSession

from stateflow.spark import apply_operator, local_session

ORDERS = "at timestamp, customer string, order string, amount double"
CUSTOMERS = "at timestamp, customer string, name string, tier string"


def enrich(spark: SparkSession, folder: Path, cluster: str | None = None) -> DataFrame:
    """Returns the stream of enriched orders. Without the address of a cluster, the program starts its own cluster."""
    files = spark.readStream.option("header", True)
    orders = files.schema(ORDERS).csv(str(folder / "orders*.csv"))
    customers = files.schema(CUSTOMERS).csv(str(folder / "customers*.csv"))
    both = orders.unionByName(customers, allowMissingColumns=True)  # columns that a stream lacks are null
    return apply_operator(both, Enriched, cluster=cluster, order_by="at")


if __name__ == "__main__":
    enriched = enrich(local_session("enrichment"), Path.cwd())
    query = enriched.writeStream.format("console").option("checkpointLocation", "stateflow-data-query")
    query.trigger(availableNow=True).start().awaitTermination()
