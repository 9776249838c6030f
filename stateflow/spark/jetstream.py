"""NATS JetStream as a streaming source that can be replayed: ``spark.readStream.format("jetstream")``.

An offset is a sequence number of the stream, with all that defines the batch::

    {"seq": 5000, "after": 4000, "held": 998, "created": "2026-01-01T…"}

The batch consists of the messages with after < sequence ≤ seq, of which the stream held ``held`` when Spark wrote the
offset into its log. A replay that finds fewer of them, or another stream under the name, is not the same batch: the
source refuses it as ``source_gap``. With ``after``, the first batch of a query replays from where the query began then,
not from where it would begin today.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from stateflow.errors import InvalidArgument, SourceGap
from stateflow.spark.jetstream_client import Connection, Place, StreamFacts, patiently, read_range
from stateflow.spark.jetstream_rows import MESSAGE, check_schema, record_batch
from stateflow.spark.versions import arrow_schema

log = logging.getLogger(__name__)
#: fewer messages than this are not worth a task of their own
SLICE_MIN = 1_000


class JetStreamOptions(BaseModel):
    """Options of the source. They include no credentials: see the environment variables ``STATEFLOW_NATS_*``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    servers: tuple[str, ...] = Field(description="nats://host:port, several separated by commas")
    stream: str = Field(pattern=r"^[^\s.*>/\\]+$")
    subject: str | None = Field(default=None, description="subject of the messages to read, wildcards allowed")
    domain: str | None = Field(default=None, description="JetStream domain, for streams behind a leaf node")
    start: Literal["earliest", "latest"] | int = Field(
        default="earliest", description="where a new query starts: earliest, latest or a sequence"
    )
    max_rows_per_batch: int | None = Field(
        default=None, ge=1, description="maximum number of sequences in a micro-batch"
    )
    partitions: int = Field(default=4, ge=1, description="maximum number of tasks that read one micro-batch")
    value_schema: str | None = Field(default=None, description="Spark DDL of JSON payloads")
    on_gap: Literal["fail", "skip"] = "fail"
    unavailable_timeout: float = Field(default=60.0, ge=0, description="seconds to wait for an unavailable server")

    @classmethod
    def of(cls, options: Mapping[str, str]) -> JetStreamOptions:
        """Validates the options. Raises InvalidArgument, naming the option."""
        try:
            return cls.model_validate({key: options[key] for key in options})
        except ValidationError as error:
            first = error.errors()[0]
            option = str(first["loc"][0]) if first["loc"] else "options"
            what = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(first["type"])
            raise InvalidArgument(
                f"the option {option!r} {what or 'is invalid: ' + first['msg']}",
                remedy=f"options of the source jetstream: {', '.join(cls.model_fields)}",
            ) from None

    @field_validator("servers", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        servers = tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
        if not servers or any("://" not in server for server in servers):
            raise ValueError("write nats://host:port")
        if any("@" in server for server in servers):
            raise ValueError("credentials belong in the environment: STATEFLOW_NATS_USER and _PASSWORD, or _TOKEN")
        return servers

    @field_validator("start", mode="before")
    @classmethod
    def _sequence(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @property
    def place(self) -> Place:
        return Place(self.servers, self.stream, self.subject, self.domain)


class JetStreamSource(DataSource):
    """Spark's data source of JetStream.

    Register it by ``spark.dataSource.register(JetStreamSource)``, or :func:`stateflow.spark.register_jetstream`.
    """

    @classmethod
    def name(cls) -> str:
        return "jetstream"

    def schema(self) -> str:
        return JetStreamOptions.of(self.options).value_schema or MESSAGE

    def streamReader(self, schema: Any) -> JetStreamReader:  # noqa: N802 - Spark's name
        return JetStreamReader(JetStreamOptions.of(self.options), schema)


class Slice(InputPartition):
    """Messages with after < sequence ≤ last. ``held``: their number, whatever their subjects."""

    def __init__(self, after: int, last: int, held: int) -> None:
        super().__init__((after, last))
        self.after, self.last, self.held = after, last, held


class JetStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of the stream.

    Each of the driver's calls asks the server anew; ``read`` runs in tasks, on a pickled copy.
    """

    def __init__(self, options: JetStreamOptions, schema: Any) -> None:
        self._options = options
        self._schema: pa.Schema = arrow_schema(schema)
        self._reached = False
        self._target: int | None = None
        check_schema(self._schema)

    # -- the driver -----------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        facts, start = self._facts(), self._options.start
        if start == "earliest":
            seq = facts.first - 1
        elif start == "latest":
            seq = facts.last
        else:
            seq = int(start) - 1
            if not facts.first - 1 <= seq <= facts.last:
                raise SourceGap(
                    f"the stream holds {facts.first} to {facts.last}, but the option start is {start}",
                    remedy="use earliest, latest or a sequence that it holds",
                    stream=self._options.stream,
                )
        return {"seq": seq, "created": facts.created}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._options.max_rows_per_batch
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._facts().last

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        facts = self._facts()
        self._check_goes_on(start, facts)
        end = facts.last if self._target is None else min(facts.last, self._target)
        if isinstance(limit, ReadMaxRows):
            end = min(end, max(start["seq"], facts.first - 1) + limit.max_rows)
        if end <= start["seq"]:
            return start
        held = facts.held(start["seq"], end)
        return {"seq": end, "after": start["seq"], "held": held, "created": facts.created}

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Slice]:
        if start == end:
            return []
        facts = self._facts()
        self._check_same(end, facts)
        after, last = end["after"], end["seq"]
        held = facts.held(after, last)
        if held < end["held"]:
            self._gap(
                f"{end['held'] - held} messages between {after + 1} and {last} were deleted after the batch was planned"
            )
        after = min(max(after, facts.first - 1), last)
        count = max(1, min(self._options.partitions, -(-held // SLICE_MIN)))
        bounds = [after + (last - after) * number // count for number in range(count + 1)]
        return [Slice(a, b, facts.held(a, b)) for a, b in itertools.pairwise(bounds)]

    def _facts(self) -> StreamFacts:
        """Asks the server for facts of the stream.

        The first call requires the server to be there; later calls wait for it.
        """
        options = self._options
        wait_s = options.unavailable_timeout if self._reached else 0
        facts = patiently(options.place, self._ask, wait_s)
        self._reached = True
        return facts

    def _ask(self, connection: Connection) -> StreamFacts:
        facts = connection.facts()
        if not self._reached:
            if facts.retention != "limits":
                raise InvalidArgument(
                    f"the stream has retention {facts.retention!r}: messages cannot be read again",
                    remedy="create the stream with retention limits, or read a mirror of it that has such retention",
                    stream=self._options.stream,
                )
            connection.check_subject()
        return facts

    def _check_same(self, offset: dict[str, Any], facts: StreamFacts) -> None:
        if offset["created"] == facts.created and offset["seq"] <= facts.last:
            return
        what = (
            f"the stream ends at {facts.last}, but the query has read to {offset['seq']}"
            if offset["created"] == facts.created
            else "the stream was deleted and recreated since the query began"
        )
        raise SourceGap(
            what, remedy="restore it, or start afresh with a new checkpoint location", stream=self._options.stream
        )

    def _check_goes_on(self, start: dict[str, Any], facts: StreamFacts) -> None:
        self._check_same(start, facts)
        if facts.first > start["seq"] + 1:
            self._gap(f"messages {start['seq'] + 1} to {facts.first - 1} were deleted before they were read")

    def _gap(self, what: str) -> None:
        _gap(self._options, what)

    # -- tasks ----------------------------------------------------------------------------------------------------

    def read(self, partition: Slice) -> Iterator[pa.RecordBatch]:
        options, count = self._options, 0
        for messages in read_range(options.place, partition.after + 1, partition.last, options.unavailable_timeout):
            count += len(messages)
            yield record_batch(messages, self._schema)
        held = count
        if options.subject is not None:  # the messages that came do not show how many of other subjects are still there
            facts = patiently(options.place, Connection.facts, options.unavailable_timeout)
            held = facts.held(partition.after, partition.last)
        if held < partition.held:
            _gap(
                options,
                f"{partition.held - held} messages between {partition.after + 1} and {partition.last} "
                "were deleted while they were read",
            )


def _gap(options: JetStreamOptions, what: str) -> None:
    if options.on_gap == "fail":
        raise SourceGap(
            what,
            remedy="retain messages longer in the stream, or skip them with on_gap=skip",
            stream=options.stream,
        )
    log.warning("source_gap: %s (stream=%s): skipped because of on_gap=skip", what, options.stream)
