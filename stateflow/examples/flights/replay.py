"""Streams the first flights that left New York in 2013: `python replay.py`, or `python replay.py 20000`."""

from __future__ import annotations

import sys
from pathlib import Path

from flights import AircraftDelays
from pyspark.sql import DataFrame, SparkSession

from stateflow.demo.flights import load_flights, write_replay
from stateflow.spark import apply_operator, local_session, read_state

COLUMNS = "seq long, time_hour timestamp, tailnum string, carrier string, origin string, dest string, arr_delay double"


def replay(spark: SparkSession, rows: int, folder: Path, cluster: str | None = None) -> DataFrame:
    """Returns a DataFrame of the output, one row for each flight. Without the address of a cluster, the program starts
    its own cluster."""
    files = folder / "replay"
    if not files.exists():  # an interrupted run continues with the same files
        write_replay(load_flights().head(rows), files, files=4)
    flights = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).parquet(str(files))
    known = flights.where("tailnum is not null")  # a row without its key is refused
    out = apply_operator(known, AircraftDelays, cluster=cluster, order_by="seq")
    query = out.writeStream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    query.start(str(folder / "delays")).awaitTermination()
    return spark.read.parquet(str(folder / "delays"))


if __name__ == "__main__":
    spark = local_session("flights")
    delays = replay(spark, int(sys.argv[1]) if sys.argv[1:] else 1000, Path("flights-run"))
    delays.orderBy("flights", "mean_delay", ascending=False).show(5, truncate=False)
    read_state(spark, operator="AircraftDelays", state="delay_by_dest").orderBy("value", ascending=False).show(5)
