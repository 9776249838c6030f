"""Sources of the demonstration's flights: parquet files, or a JetStream stream. Each micro-batch is one slice."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stateflow.demo.flights import SCHEMA, write_replay
from stateflow.errors import ExtraMissing

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

Read = Callable[["SparkSession"], "DataFrame"]
DDL = (
    "seq long, time_hour timestamp, tailnum string, carrier string, origin string, dest string, "
    "arr_delay double"  # as flights.SCHEMA
)


@dataclass(frozen=True, slots=True)
class Replay:
    """The flights as a stream. ``read``: returns it, with a slice in each micro-batch. ``feed(n)``: lets the first n
    slices come; None: all of them have come."""

    read: Read
    feed: Callable[[int], None] | None = None


def replay(flights: pd.DataFrame, slices: int, work: Path, nats_url: str | None) -> AbstractContextManager[Replay]:
    """Provides the flights as a stream of ``slices`` micro-batches. Raises ExtraMissing, Unavailable, or
    InvalidArgument where PySpark is too old for a stream."""
    return _files(flights, slices, work) if nats_url is None else _stream(flights, slices, nats_url)


@contextmanager
def _files(flights: pd.DataFrame, slices: int, work: Path) -> Iterator[Replay]:
    directory, to_come = work / "flights", work / "flights-to-come"
    directory.mkdir()
    waiting = deque(write_replay(flights, to_come, slices))

    def feed(count: int) -> None:
        while waiting and slices - len(waiting) < count:
            path = waiting.popleft()
            path.rename(directory / path.name)  # whole, and as old as it was: Spark reads the oldest first

    yield Replay(
        lambda spark: spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).parquet(str(directory)), feed
    )


@contextmanager
def _stream(flights: pd.DataFrame, slices: int, url: str) -> Iterator[Replay]:
    """Provides a stream of the demonstration's own, which is deleted when it ends."""
    from stateflow.spark import register_jetstream
    from stateflow.spark.versions import JETSTREAM, require

    require(JETSTREAM)
    try:
        from stateflow.demo.publish import deleted, published
    except ImportError as error:
        raise ExtraMissing(
            "the demonstration over JetStream needs nats-py", remedy="pip install 'stateflow-streams[jetstream]'"
        ) from error
    name = f"stateflow-demo-{uuid.uuid4().hex[:12]}"
    rows = flights[SCHEMA.names].assign(time_hour=flights["time_hour"].dt.strftime("%Y-%m-%dT%H:%M:%SZ"))
    payloads = (line.encode() for line in rows.to_json(orient="records", lines=True).splitlines())

    def read(spark: SparkSession) -> DataFrame:
        register_jetstream(spark)
        source = spark.readStream.format("jetstream").option("servers", url).option("stream", name)
        return source.option("max_rows_per_batch", -(-len(flights) // slices)).option("value_schema", DDL).load()

    try:
        published(url, name, payloads)
        yield Replay(read)
    finally:
        deleted(url, name)
