"""The JetStream source without a server: options, what a stream holds, and messages as rows."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from stateflow.spark.session import JETSTREAM
from tests.versions import lacks

if why := lacks(JETSTREAM):
    pytest.skip(why, allow_module_level=True)

from pyspark.sql.streaming.datasource import ReadAllAvailable

from stateflow.errors import DecodeError, InvalidArgument
from stateflow.spark.jetstream import (
    RAW,
    JetStreamOptions,
    JetStreamReader,
    JetStreamSource,
    Message,
    StreamFacts,
    check_schema,
    record_batch,
)

GOOD = {"servers": "nats://a:4222, nats://b:4222", "stream": "S"}
STRINGS = pa.map_(pa.string(), pa.string())
UTC_US = pa.timestamp("us", tz="UTC")
RAW_TYPES = (pa.int64(), UTC_US, pa.string(), STRINGS, pa.binary())
MESSAGE_SCHEMA = pa.schema(list(zip(RAW, RAW_TYPES, strict=True)))


def message(seq: int, data: bytes, **headers: str) -> Message:
    return Message(seq, 1_700_000_000_000_000 + seq, f"s.{seq}", headers or None, data)


def test_options_are_read_from_strings() -> None:
    options = JetStreamOptions.of(GOOD | {"max_rows_per_batch": "10", "start": "17"})
    assert options.servers == ("nats://a:4222", "nats://b:4222")
    assert (options.max_rows_per_batch, options.start, options.partitions) == (10, 17, 4)
    assert options.place.subject is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"stream": ""}, "the option 'stream' is invalid"),
        ({"stream": "a.b"}, "the option 'stream' is invalid"),
        ({"streem": "S"}, "the option 'streem' is unknown"),
        ({"start": "yesterday"}, "the option 'start' is invalid"),
        ({"max_rows_per_batch": "0"}, "the option 'max_rows_per_batch' is invalid"),
        ({"on_gap": "ignore"}, "the option 'on_gap' is invalid"),
        ({"unavailable_timeout": "inf"}, "the option 'unavailable_timeout' is invalid"),
        ({"unavailable_timeout": "nan"}, "the option 'unavailable_timeout' is invalid"),
        ({"servers": "localhost"}, "write nats://host:port"),
        ({"servers": "nats://me:secret@a:4222"}, "credentials belong in the environment"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        JetStreamOptions.of(GOOD | wrong)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "max_rows_per_batch" in caught.value.remedy


def test_a_missing_option_is_named_before_anything_is_read() -> None:
    with pytest.raises(InvalidArgument, match=r"^invalid_argument: the option 'servers' is missing: "):
        JetStreamSource({"stream": "S"}).schema()


def test_what_a_stream_holds() -> None:
    facts = StreamFacts("t", first=4, last=20, deleted=(7, 8, 15))
    held = [seq for seq in range(4, 21) if seq not in (7, 8, 15)]
    for after in range(0, 25):
        for last in range(after, 25):
            assert facts.held(after, last) == sum(after < seq <= last for seq in held), (after, last)
    assert StreamFacts("t", first=21, last=20).held(0, 100) == 0


def test_messages_as_they_are() -> None:
    check_schema(MESSAGE_SCHEMA)
    batch = record_batch([message(3, b"\x00", color="red"), message(4, b"")], MESSAGE_SCHEMA)
    at = datetime.fromtimestamp(1_700_000_000, UTC)
    assert batch.to_pylist() == [
        {"seq": 3, "time": at.replace(microsecond=3), "subject": "s.3", "headers": [("color", "red")], "data": b"\x00"},
        {"seq": 4, "time": at.replace(microsecond=4), "subject": "s.4", "headers": [], "data": b""},
    ]


def test_json_as_columns_with_the_messages_own_beside() -> None:
    schema = pa.schema(
        [
            ("k", pa.string()),
            ("_seq", pa.int64()),
            ("v", pa.float64()),
            ("at", UTC_US),
            ("tags", pa.list_(pa.string())),
            ("inner", pa.struct([("a", pa.int64())])),
            ("_subject", pa.string()),
        ]
    )
    check_schema(schema)
    pretty = json.dumps({"k": "x\ny", "v": 1.5, "tags": ["a", "b"], "inner": {"a": 1}, "more": {}}, indent=2)
    rows = [pretty, '{"v": 2, "at": "2024-05-01T10:00:00Z"}', "{}"]
    batch = record_batch([message(i, row.encode()) for i, row in enumerate(rows, 1)], schema)
    assert batch.schema == schema
    nothing = {"k": None, "v": None, "at": None, "tags": None, "inner": None}
    assert batch.to_pylist() == [
        nothing | {"k": "x\ny", "v": 1.5, "tags": ["a", "b"], "inner": {"a": 1}, "_seq": 1, "_subject": "s.1"},
        nothing | {"v": 2.0, "at": datetime(2024, 5, 1, 10, tzinfo=UTC), "_seq": 2, "_subject": "s.2"},
        nothing | {"_seq": 3, "_subject": "s.3"},
    ]


@pytest.mark.parametrize("bad", [b"", b"not json", b'{"v": "text"}', b'{"v": 1} {"v": 2}', b"[1]"])
def test_the_message_that_is_not_of_the_schema_is_named(bad: bytes) -> None:
    schema = pa.schema([("v", pa.int64())])
    messages = [message(1, b'{"v": 1}'), message(2, bad), message(3, b'{"v": 3}')]
    with pytest.raises(DecodeError, match=r"a message does not fit value_schema: .*\(subject=s\.2 seq=2\)"):
        record_batch(messages, schema)


@pytest.mark.parametrize(
    ("payloads", "named"),
    [
        ([b"null"], 1),  # crashed the process
        ([b'{"v": 1}', b" null "], 2),
        ([b"null", b'{"v": 1}'], 1),
        ([b'{"v": 1}{"v": 2}', b""], 1),
        ([b'{"v": 1}{"v": 2}', b'{"more": ', b"{}}"], 1),
        ([b"\xef\xbb\xbf{}"], 1),
        ([b'{"v": 1}', b'{"v":\n2, "t": "one\nline"}'], 2),
    ],
)
def test_each_message_is_exactly_one_object(payloads: list[bytes], named: int) -> None:
    """Each message is exactly one object, also where the messages together have as many objects as messages."""
    messages = [message(number, payload) for number, payload in enumerate(payloads, 1)]
    with pytest.raises(DecodeError, match=rf"not a JSON object \(subject=s\.{named} seq={named}\)"):
        record_batch(messages, pa.schema([("v", pa.int64())]))


def test_columns_that_no_message_can_fill_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="the column '_seq' is declared as string"):
        check_schema(pa.schema([("_seq", pa.string()), ("v", pa.int64())]))
    with pytest.raises(InvalidArgument, match="JSON cannot be read as"):
        check_schema(pa.schema([("v", pa.month_day_nano_interval())]))


def test_a_batch_that_ended_where_the_query_began_is_empty_later_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that ended where the query began is empty, also if a new query would now begin elsewhere.

    Such a batch has only rows of other sources. If the driver dies in it, Spark asks anew where a query begins.
    """
    options = JetStreamOptions.of(GOOD | {"start": "latest"})
    reader = JetStreamReader(options, StructType([StructField("v", LongType())]))
    streams = iter([StreamFacts("t", 1, 5), StreamFacts("t", 1, 5), *[StreamFacts("t", 1, 9)] * 3])
    monkeypatch.setattr(reader, "_facts", lambda: next(streams))
    ended = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert reader.partitions(reader.initialOffset(), ended) == []
    following = reader.latestOffset(ended, ReadAllAvailable())
    assert [(part.after, part.last) for part in reader.partitions(ended, following)] == [(5, 9)]
