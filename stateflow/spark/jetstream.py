"""Streaming source ``spark.readStream.format("jetstream")``, which reads NATS JetStream and can replay batches.

An offset is a sequence number of the stream, with everything that defines the batch before that offset::

    {"seq": 5000, "after": 4000, "held": 998, "created": "2026-01-01T…"}

The batch consists of the messages with after < sequence ≤ seq. The stream held ``held`` of them when Spark wrote the
offset to its log. If a replay finds fewer messages, or another stream under the same name (by ``created``), the batch
would not be the same, and the source refuses it as ``source_gap``. Because of ``after``, a replay of the first batch
starts where the query originally began, not where a new query would begin.

The driver counts the messages when it divides a batch into slices, and each task counts again when it has read its
slice. With ``on_gap=skip`` the source skips messages that are missing, but never accepts another stream.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

import nats
import pyarrow as pa
import pyarrow.json as pa_json
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import DecodeError, InvalidArgument, SourceGap, SourceMissing, Unavailable
from stateflow.settings import NatsSettings
from stateflow.settings.base import FRACTION_MAX
from stateflow.spark.session import arrow_schema

log = logging.getLogger(__name__)
T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 10.0
RETRY_INTERVAL_S = 0.25
#: number of messages requested at once; a message has at most a few MB, mostly far less
CHUNK = 512
#: seconds after which the server removes a consumer without requests, for example after its reader has died
INACTIVE_S = 60
#: least number of messages for which an additional task is used
SLICE_MIN = 1_000
#: columns of an unchanged message, which are used without ``value_schema``
MESSAGE = "seq long, time timestamp, subject string, headers map<string,string>, data binary"
_UTC = pa.timestamp("us", tz="UTC")
_NO_STREAM = 10059


# -- Client of a NATS server -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Servers and name of a stream.

    Attributes:
        servers: URLs of servers, of which the first that answers is used.
        stream: name of the stream.
        subject: subject of the messages to read, possibly with wildcards; None reads all subjects.
        domain: JetStream domain; None if the server's own is used.
    """

    servers: tuple[str, ...]
    stream: str
    subject: str | None = None
    domain: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``time_us`` is the time at which the server stored it, in µs since 1970."""

    seq: int
    time_us: int
    subject: str
    headers: dict[str, str] | None
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """Facts about a stream.

    The stream holds messages with the sequence numbers from ``first`` to ``last`` except ``deleted``, which is sorted.
    In an empty stream ``last`` is less than ``first``. ``created`` distinguishes streams of the same name.
    """

    created: str
    first: int
    last: int
    deleted: Sequence[int] = ()
    retention: str = "limits"

    def held(self, after: int, last: int) -> int:
        """Returns the number of messages that the stream holds with after < sequence ≤ last."""
        after, last = max(after, self.first - 1), min(last, self.last)
        return max(0, last - after - (bisect_right(self.deleted, last) - bisect_right(self.deleted, after)))


class Connection:
    """Connection to the first server that answers. It returns facts about a stream, and a range of its messages.

    Its calls block, and each connection is used for one request only, because Spark reads from short-lived processes.
    It uses JetStream's JSON API directly, which for a few requests is clearer than the wrappers of a client library.

    Raises Unavailable if the server does not answer, SourceMissing if there is no such stream, and InvalidArgument if
    the server refuses a request.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._api_prefix = f"$JS.{place.domain}.API" if place.domain else "$JS.API"
        self._runner = asyncio.Runner()
        try:
            self._nc = self._run(connect(place.servers))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._runner.run(self._nc.close())
        except (OSError, NatsError):  # the connection was gone already
            pass
        finally:
            self._runner.close()

    def facts(self) -> StreamFacts:
        info = self._api(f"STREAM.INFO.{self._place.stream}")
        if info["state"].get("num_deleted"):
            info = self._api(f"STREAM.INFO.{self._place.stream}", {"deleted_details": True})
        state = info["state"]
        return StreamFacts(
            created=info["created"],
            first=max(1, state["first_seq"]),
            last=state["last_seq"],
            deleted=tuple(sorted(state.get("deleted") or ())),
            retention=info["config"]["retention"],
        )

    def check_subject(self) -> None:
        """Checks that the stream can contain messages of the wanted subject. Raises InvalidArgument."""
        self._delete_consumer(self._new_consumer(1)[0])

    def messages(self, first: int, last: int) -> Iterator[list[Message]]:
        """Yields the stored messages of the wanted subject with first ≤ sequence ≤ last, in order and in chunks."""
        name, pending = self._new_consumer(first)
        inbox = self._nc.new_inbox()
        arriving = self._run(self._nc.subscribe(inbox, pending_bytes_limit=-1))
        while pending and first <= last:
            count = min(CHUNK, pending, last - first + 1)
            got, whole = self._run(self._pull(name, inbox, arriving, count))
            found, pending = [], 0
            for message in got:
                read, pending = _message(message)
                if read.seq <= last:
                    found.append(read)
            if found:
                yield found
            if not whole:
                raise self._unavailable("it stopped sending messages")
            if len(found) < len(got):
                break
            first = found[-1].seq + 1 if found else first
        self._delete_consumer(name)

    async def _pull(self, name: str, inbox: str, arriving: Any, count: int) -> tuple[list[Msg], bool]:
        """Returns the next messages, at most ``count``, and whether the server answered to the end.

        The second value is False if the connection failed, or if the server reported an error.
        """
        request = json.dumps({"batch": count, "no_wait": True}).encode()
        await self._nc.publish(f"{self._api_prefix}.CONSUMER.MSG.NEXT.{self._place.stream}.{name}", request, inbox)
        got: list[Msg] = []
        try:
            while len(got) < count:
                message = await arriving.next_msg(timeout=REQUEST_TIMEOUT_S)
                if message.headers and "Status" in message.headers and not message.reply:
                    # no messages are left, because some that were counted as pending have been deleted since
                    return got, message.headers["Status"] in ("404", "408")
                got.append(message)
        except (OSError, TimeoutError, NatsError):
            return got, False
        return got, True

    def _new_consumer(self, first: int) -> tuple[str, int]:
        """Makes an ephemeral consumer in the server's memory. Returns (name, number of pending messages)."""
        place = self._place
        config: dict[str, Any] = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first,
            "ack_policy": "none",
            "replay_policy": "instant",
            "inactive_threshold": INACTIVE_S * 10**9,
            "mem_storage": True,
            "num_replicas": 1,
        }
        if place.subject is not None:
            config["filter_subject"] = place.subject
        made = self._api(f"CONSUMER.CREATE.{place.stream}", {"stream_name": place.stream, "config": config})
        return made["name"], made["num_pending"]

    def _delete_consumer(self, name: str) -> None:
        self._api(f"CONSUMER.DELETE.{self._place.stream}.{name}")

    def _api(self, what: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        payload = json.dumps(request).encode() if request else b""
        try:
            reply = self._run(self._nc.request(f"{self._api_prefix}.{what}", payload, timeout=REQUEST_TIMEOUT_S))
        except Unavailable as error:
            if isinstance(error.__cause__, NoRespondersError):
                error.remedy = "start the server with JetStream (-js), or correct the option domain"
            raise
        answer: dict[str, Any] = json.loads(reply.data)
        said = answer.get("error")
        if said is None:
            return answer
        if said.get("err_code") == _NO_STREAM:
            raise SourceMissing(
                f"there is no stream {self._place.stream!r}",
                remedy="create it, or correct the option stream",
                servers=",".join(self._place.servers),
            )
        if said.get("code", 500) >= 500:
            raise self._unavailable(said.get("description", "the request failed"))
        raise InvalidArgument(
            f"the server refuses the request: {said.get('description')}",
            remedy="correct the options stream and subject",
            stream=self._place.stream,
            subject=self._place.subject,
        )

    def _run(self, work: Any) -> Any:
        try:
            return self._runner.run(work)
        except (OSError, TimeoutError, NatsError) as error:
            raise self._unavailable(str(error) or type(error).__name__) from error

    def _unavailable(self, said: str) -> Unavailable:
        return Unavailable(
            f"the NATS server cannot serve the request: {said.removeprefix('nats: ')}",
            remedy="check that the server runs, or correct the option servers",
            servers=",".join(self._place.servers),
            stream=self._place.stream,
        )


async def connect(servers: Sequence[str]) -> Any:
    """Returns a client of the first server that answers.

    Raises InvalidArgument if a server refuses the credentials. If no server answers, raises the last OSError,
    TimeoutError or error of nats.
    """
    failed: Exception | None = None
    for server in servers:
        try:
            return await nats.connect(
                server,
                name="stateflow",
                allow_reconnect=False,  # a consumer is lost with its connection, and the reader starts a new one
                max_reconnect_attempts=1,  # by default nats tries an address without a listener for two minutes
                reconnect_time_wait=0,
                connect_timeout=int(CONNECT_TIMEOUT_S),
                error_cb=_quiet,
                **_credentials(),
            )
        except (OSError, TimeoutError, NatsError) as error:
            if "authorization" in str(error).lower():
                raise InvalidArgument(
                    "the server refuses the credentials",
                    remedy="set STATEFLOW_NATS_USER and _PASSWORD, _TOKEN or _CREDS in the environment",
                    server=server,
                ) from None
            failed = error
    assert failed is not None
    raise failed


def patiently(place: Place, ask: Callable[[Connection], T], timeout_s: float) -> T:
    """Returns the result of ``ask``, which is called with a new connection until the server answers.

    Raises Unavailable if the server does not answer for ``timeout_s``.
    """
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    while True:
        try:
            with Connection(place) as connection:
                return ask(connection)
        except Unavailable:
            if SYSTEM_CLOCK.monotonic() >= deadline:
                raise
            time.sleep(RETRY_INTERVAL_S)


def read_range(place: Place, first: int, last: int, timeout_s: float) -> Iterator[list[Message]]:
    """Yields messages as :meth:`Connection.messages` does. After an outage it resumes after the last message.

    Raises Unavailable if no message arrives for ``timeout_s``.
    """
    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
    while first <= last:
        try:
            with Connection(place) as connection:
                for chunk in connection.messages(first, last):
                    first = chunk[-1].seq + 1
                    yield chunk
                    deadline = SYSTEM_CLOCK.monotonic() + timeout_s
                return
        except Unavailable:
            if SYSTEM_CLOCK.monotonic() >= deadline:
                raise
            time.sleep(RETRY_INTERVAL_S)


def _message(message: Msg) -> tuple[Message, int]:
    """Returns a message, and the number of pending messages after it.

    The reply subject contains the sequence, the time and the number pending:
    ``$JS.ACK.[domain.account.]stream.consumer.delivered.sequence.number.time.pending[.token]``.
    """
    parts = message.reply.split(".")
    at = 5 if len(parts) == 9 else 7
    read = Message(
        seq=int(parts[at]),
        time_us=int(parts[at + 2]) // 1000,
        subject=message.subject,
        headers=dict(message.headers) if message.headers else None,
        data=message.data,
    )
    return read, int(parts[at + 3])


def _credentials() -> dict[str, Any]:
    """Returns the credentials from this process's settings. They are not options, because Spark displays options."""
    said = NatsSettings()
    values = {
        "user": said.user,
        "password": said.password.get_secret_value(),
        "token": said.token.get_secret_value(),
        "user_credentials": said.creds,
    }
    return {key: value for key, value in values.items() if value}


async def _quiet(_: Exception) -> None:
    """Ignores an error, because the call that waits for an answer raises it."""


# -- Messages as Arrow record batches --------------------------------------------------------------------------------

_FIELDS: dict[str, tuple[pa.DataType, Callable[[Message], object]]] = {
    "seq": (pa.int64(), lambda message: message.seq),
    "time": (_UTC, lambda message: message.time_us),
    "subject": (pa.string(), lambda message: message.subject),
    "headers": (pa.map_(pa.string(), pa.string()), lambda message: list((message.headers or {}).items())),
    "data": (pa.binary(), lambda message: message.data),
}
RAW = tuple(_FIELDS)


def check_schema(schema: pa.Schema) -> None:
    """Checks that a message can fill all columns. Raises InvalidArgument."""
    raw = tuple(schema.names) == RAW
    for field in schema:
        name = field.name if raw else field.name[1:]
        if (raw or (field.name.startswith("_") and name in _FIELDS)) and not _same(field.type, _FIELDS[name][0]):
            raise InvalidArgument(
                f"the column {field.name!r} is declared as {field.type}, but in messages it is {_FIELDS[name][0]}",
                remedy=f"declare it as in: {MESSAGE}",
            )
    payload = _payload(schema)
    if raw or not payload.names:
        return
    try:
        _decoded([b"{}"], payload)
    except pa.ArrowException as error:
        raise InvalidArgument(
            f"JSON cannot be read as {payload.to_string(show_schema_metadata=False)}: {error}",
            remedy="declare other types, or read the message's data without value_schema and use from_json",
        ) from error


def record_batch(messages: Sequence[Message], schema: pa.Schema) -> pa.RecordBatch:
    """Converts messages to rows. Raises DecodeError, which names the first message that does not fit ``schema``."""
    if tuple(schema.names) == RAW:
        columns = {name: _column(messages, name, schema.field(name).type) for name in RAW}
    else:
        payload = _payload(schema)
        columns = dict(zip(payload.names, _payload_columns(messages, payload), strict=True))
        for field in schema:
            if field.name not in columns:
                columns[field.name] = _column(messages, field.name[1:], field.type)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _payload(schema: pa.Schema) -> pa.Schema:
    """Returns the columns that are read from the message's JSON, which are all except ``_seq``, ``_time``, …"""
    return pa.schema([f for f in schema if not (f.name.startswith("_") and f.name[1:] in _FIELDS)])


def _column(messages: Sequence[Message], name: str, kind: pa.DataType) -> pa.Array:
    of = _FIELDS[name][1]
    return pa.array([of(message) for message in messages], kind)


def _same(one: pa.DataType, other: pa.DataType) -> bool:
    """Tells whether two types are equal, apart from Spark's names for the fields of a map."""
    if pa.types.is_map(one) and pa.types.is_map(other):
        return bool(one.key_type == other.key_type and one.item_type == other.item_type)
    return bool(one == other)


def _payload_columns(messages: Sequence[Message], schema: pa.Schema) -> list[pa.Array]:
    if not schema.names:
        return []
    payloads = [message.data for message in messages]
    # These payloads together have as many rows as messages only if each has one: none has no object, and none ends
    # within an object that the next continues, because } cannot precede { there. Arrow crashes on a first row of null.
    if all(map(_has_bounds, payloads)):
        try:
            table = _decoded(payloads, schema)
            if len(table) == len(messages):
                return [column.combine_chunks() for column in table.columns]
        except pa.ArrowException:
            pass
    for message in messages:  # find the message that does not fit
        try:
            one = _has_bounds(message.data) and len(_decoded([message.data], schema)) == 1
            said = "" if one else "not a JSON object"
        except pa.ArrowException as error:
            said = str(error).splitlines()[0]
        if said:
            raise DecodeError(
                f"a message does not fit value_schema: {said}",
                remedy="correct value_schema, or read the message's data without it and use from_json",
                subject=message.subject,
                seq=message.seq,
            )
    raise DecodeError("the messages fit value_schema one by one, but not together", remedy="correct value_schema")


def _has_bounds(payload: bytes) -> bool:
    text = payload.strip()
    if b"\n" in text:  # within a text it is not valid, but `_decoded` would make a space of it
        try:
            json.loads(text)
        except ValueError:
            return False
    return text.startswith(b"{") and text.endswith(b"}")


def _decoded(payloads: Sequence[bytes], schema: pa.Schema) -> pa.Table:
    # In JSON a line break can only be white space; to Arrow it ends a row.
    lines = b"\n".join(payload.replace(b"\n", b" ") for payload in payloads)
    return pa_json.read_json(
        io.BytesIO(lines),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )


# -- Spark's data source ---------------------------------------------------------------------------------------------


class JetStreamOptions(BaseModel):
    """Options of the source. Credentials are not among them, but are read from ``STATEFLOW_NATS_*``."""

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
    unavailable_timeout: float = Field(default=60.0, ge=0, le=FRACTION_MAX, description="seconds to wait for a server")

    @classmethod
    def of(cls, options: Mapping[str, str]) -> JetStreamOptions:
        """Validates the options. Raises InvalidArgument, which names the option, if one is not valid."""
        try:
            return cls.model_validate({key: options[key] for key in options})
        except ValidationError as error:
            first = error.errors()[0]
            option = str(first["loc"][0]) if first["loc"] else "options"
            what = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(first["type"])
            raise InvalidArgument(
                f"the option {option!r} {what or 'is invalid: ' + first['msg']}",
                remedy=f"use the options of the source jetstream: {', '.join(cls.model_fields)}",
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
    """Messages with after < sequence ≤ last. ``held`` is the number of messages of all subjects in that range."""

    def __init__(self, after: int, last: int, held: int) -> None:
        super().__init__((after, last))
        self.after, self.last, self.held = after, last, held


class JetStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of the stream.

    On the driver, each call asks the server anew. ``read`` runs in tasks, on a pickled copy of the reader.
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
                    remedy="use earliest, latest or a sequence that the stream holds",
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
        if start == end or "after" not in end:  # an end without "after" is an initial offset
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
        """Asks the server for facts about the stream.

        The first call fails at once if the server does not answer; later calls wait for the server.
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
                    remedy="create the stream with retention 'limits', or read a mirror of it that has this retention",
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
            what,
            remedy="restore the stream, or start the query from the beginning with a new checkpoint location",
            stream=self._options.stream,
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
        if options.subject is not None:  # messages of other subjects were not received, so ask how many are still held
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
    log.warning("source_gap: %s, skipping them because of on_gap=skip: stream=%s", what, options.stream)
