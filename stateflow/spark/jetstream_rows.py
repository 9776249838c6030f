"""Messages of a JetStream stream as Arrow record batches."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.json as pa_json

from stateflow.errors import DecodeError, InvalidArgument
from stateflow.spark.jetstream_client import Message

#: columns without ``value_schema``: the message as it is
MESSAGE = "seq long, time timestamp, subject string, headers map<string,string>, data binary"
_UTC = pa.timestamp("us", tz="UTC")

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
                f"the column {field.name!r} is {field.type}, but in messages {_FIELDS[name][0]}",
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
    """Converts messages to rows. Raises DecodeError, naming the first message that is not JSON of this schema."""
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
    """Returns the columns that come from the message's JSON: all except ``_seq``, ``_time``, …"""
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
    try:
        table = _decoded([message.data for message in messages], schema)
        if len(table) == len(messages):
            return [column.combine_chunks() for column in table.columns]
    except pa.ArrowException:
        pass
    for message in messages:  # find the message that does not fit
        try:
            said = "" if len(_decoded([message.data], schema)) == 1 else "not a JSON object"
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


def _decoded(payloads: Sequence[bytes], schema: pa.Schema) -> pa.Table:
    # In JSON a line break can only be white space; to Arrow it ends a row.
    lines = b"\n".join(payload.replace(b"\n", b" ") for payload in payloads)
    return pa_json.read_json(
        io.BytesIO(lines),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(lines) + 1),
        parse_options=pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
