"""Checks Arrow data from other processes before reading it, converts its times for Python, and parses schemas.

pyarrow trusts lengths and offsets: a wrong one makes it read foreign memory, or ends the process.
``validate(full=True)`` finds wrong ones by checking every offset and every character. That takes 8 µs for 1,000 rows of
four columns and 1.8 ms for 100,000, a twentieth of the time to decode them. (The cheap ``validate()`` checks only the
last offset.) Validation does not limit the decoded size, so compressed rows are refused, and so are types in which a
few bytes stand for many values.

Times are converted to zones with names that Python knows, and to microseconds.

Schemas are declared as Arrow schemas, or as Spark DDL such as ``"k string, n long, tags array<string>"``, which is
parsed without a JVM. The grammar is that of Spark SQL's ``StructType.fromDDL``, for the types that Arrow has: the
atomic types, decimal(p,s), array<…>, map<…,…> and struct<name:type,…>, with NOT NULL and COMMENT.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.types as t

from stateflow.errors import DeclarationError, InvalidArgument
from stateflow.types import shown

SCHEMA_BYTES_MAX = 1 << 20
#: maximum number of fields in a schema, nested ones included
FIELDS_MAX = 10_000
DEPTH_MAX = 32
#: a value has at least one bit, except for the type null, whose values have none
VALUES_PER_BYTE_MAX = 8
VALUES_FREE = 1 << 20
_REMEDY = "send Arrow IPC messages as written by pyarrow or Spark"
#: an encapsulated message begins with this mark (absent before Arrow 0.15), four bytes of length, and its metadata
_CONTINUED = b"\xff\xff\xff\xff"
_ENVELOPE = 8
_RECORD_BATCH = 3  # in the union of headers
#: exceptions that pyarrow raises for bytes that are not valid Arrow
ARROW_RAISES = (
    *(pa.ArrowException, ValueError, OSError, EOFError, LookupError, TypeError, MemoryError, OverflowError),
)

# -- Times -----------------------------------------------------------------------------------------------------------

#: java.time.ZoneId.SHORT_IDS
_SHORT = {
    "ACT": "Australia/Darwin",
    "AET": "Australia/Sydney",
    "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo",
    "AST": "America/Anchorage",
    "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka",
    "CAT": "Africa/Harare",
    "CNT": "America/St_Johns",
    "CST": "America/Chicago",
    "CTT": "Asia/Shanghai",
    "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris",
    "EST": "-05:00",
    "HST": "-10:00",
    "IET": "America/Indiana/Indianapolis",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia",
    "MST": "-07:00",
    "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles",
    "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh",
}
#: offsets as java.time.ZoneOffset reads them, and ``+h:mm`` and ``+hh:m``, which Spark reads, too
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{1,2})(?::?(\d\d))?)?", re.ASCII)
_HOURS_MAX = 18
_EPOCH, _MICROSECOND = datetime(1970, 1, 1), timedelta(microseconds=1)
_FIRST_US, _LAST_US = ((end - _EPOCH) // _MICROSECOND for end in (datetime.min, datetime.max))


@functools.lru_cache(maxsize=256)
def python_zone(name: str) -> str:
    """Returns Python's and Arrow's name for a zone of ``java.time.ZoneId`` or of the tz database.

    >>> python_zone("GMT+2"), python_zone("PST"), python_zone("Europe/Berlin")
    ('+02:00', 'America/Los_Angeles', 'Europe/Berlin')

    Raises InvalidArgument for a zone that Python lacks.
    """
    found = _SHORT.get(name, name)
    if found in ("Z", "UT"):
        found = "UTC"
    elif (offset := _OFFSET.fullmatch(found)) is not None:
        found = _offset(offset) or found
    try:
        pa.scalar(0, pa.timestamp("us", tz=found)).as_py()
    except Exception as error:  # a zone database may raise anything
        raise InvalidArgument(
            f"Python does not know the time zone {name!r}",
            remedy="use a tz database name such as Europe/Berlin, or an offset such as +02:00; in Spark: "
            'spark.conf.set("spark.sql.session.timeZone", …)',
        ) from error
    return found


def _offset(read: re.Match[str]) -> str | None:
    """Returns ``+hh:mm``; None for an invalid offset, and for one with seconds, which Arrow cannot represent."""
    sign, *said = read.groups()
    hours, minutes, seconds = (int(each or 0) for each in said)
    if (hours, minutes) > (_HOURS_MAX, 0) or minutes > 59 or seconds:
        return None
    return f"{sign}{hours:02}:{minutes:02}" if hours or minutes else "UTC"


def in_python_zones(schema: pa.Schema) -> pa.Schema:
    """Returns the schema with Python's names for the zones of its times, nested ones included. Raises InvalidArgument
    for a zone that Python lacks."""
    fields = []
    for field in schema:
        try:
            fields.append(field.with_type(_with_times(field.type, _zoned)))
        except InvalidArgument as error:
            error.located(column=field.name)
            raise
    return schema if fields == list(schema) else pa.schema(fields, schema.metadata)


def time_of(scalar: pa.Scalar) -> datetime:
    """Returns the time of an Arrow scalar as a datetime, in the scalar's zone or in UTC.

    The result is in UTC if the year in the scalar's zone is outside Python's range. Raises OverflowError if the year in
    UTC is outside, too.
    """
    try:
        plain: datetime = scalar.as_py()
        return plain
    except (ValueError, OverflowError):
        micros = scalar.cast(pa.timestamp("us", scalar.type.tz)).value
    zone = pa.scalar(0, pa.timestamp("us", scalar.type.tz)).as_py().tzinfo
    offset = zone.utcoffset(datetime.max if micros > 0 else datetime.min)
    for since_us, named in ((micros + offset // _MICROSECOND, zone), (micros, ZoneInfo("UTC"))):
        if _FIRST_US <= since_us <= _LAST_US:
            found: datetime = (_EPOCH + since_us * _MICROSECOND).replace(tzinfo=named)
            return found
    raise OverflowError("its year is outside 1 to 9999")


def in_micros(kind: pa.DataType) -> pa.DataType:
    """Returns the type with microseconds in place of nanoseconds in its times, nested ones included."""
    return _with_times(kind, _in_micros)


def holds_map(type_: pa.DataType) -> bool:
    """Tells whether the type is a map, or contains one at any depth."""
    return pa.types.is_map(type_) or any(holds_map(type_.field(n).type) for n in range(type_.num_fields))


def _zoned(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp(kind.unit, python_zone(kind.tz)) if t.is_timestamp(kind) and kind.tz is not None else kind


def _in_micros(kind: pa.DataType) -> pa.DataType:
    if t.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if t.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    return pa.time64("us") if t.is_time64(kind) and kind.unit == "ns" else kind


def _with_times(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Returns the type with ``change`` applied to its innermost types."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind
    if not kind.num_fields:
        return change(kind)
    fields = [kind.field(number) for number in range(kind.num_fields)]
    if t.is_map(kind):
        fields = [kind.key_field, kind.item_field]
    inner = [field.with_type(_with_times(field.type, change)) for field in fields]
    made: list[tuple[Callable[[pa.DataType], bool], Callable[[], pa.DataType]]] = [
        (t.is_struct, lambda: pa.struct(inner)),
        (t.is_map, lambda: pa.map_(*inner, kind.keys_sorted)),
        (t.is_large_list, lambda: pa.large_list(inner[0])),
        (t.is_fixed_size_list, lambda: pa.list_(inner[0], kind.list_size)),
        (t.is_list, lambda: pa.list_(inner[0])),
    ]
    return next((make() for told, make in made if told(kind)), kind)


# -- Validation ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def read_schema(data: bytes) -> pa.Schema:
    """Reads and checks an IPC schema message. Raises InvalidArgument."""
    if not 0 < len(data) <= SCHEMA_BYTES_MAX:
        raise InvalidArgument(f"an Arrow schema cannot have {len(data)} bytes", remedy=_REMEDY)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
        check_types(schema)
    except ARROW_RAISES as error:
        raise _unreadable("a schema", error) from error
    return schema


def check_types(schema: pa.Schema) -> None:
    """Checks that a schema is not too large and has accepted types only. Raises InvalidArgument."""
    left = [(field.name, _type_of(field, field.name), 1) for field in schema]
    seen = 0
    while left:
        name, kind, depth = left.pop()
        seen += 1
        if depth > DEPTH_MAX or seen > FIELDS_MAX:
            raise InvalidArgument(
                "a schema is too large", remedy=f"use at most {FIELDS_MAX} fields and {DEPTH_MAX} levels"
            )
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        # in these types a few bytes stand for many values: one entry or run may be repeated any number of times
        if any(told(kind) for told in _FOLDED):
            raise InvalidArgument(
                f"column {shown(name)} has the unsupported type {shown(str(kind))}",
                remedy="cast it to the plain type of its values",
            )
        left += [(name, _type_of(kind.field(number), name), depth + 1) for number in range(kind.num_fields)]


def _type_of(field: pa.Field, column: str) -> pa.DataType:
    try:
        return field.type
    except KeyError:
        raise InvalidArgument(
            f"column {shown(column)} has a type that Python cannot represent, such as an interval of months",
            remedy="cast it, for example to a number of months",
        ) from None


_FOLDED = (
    t.is_dictionary,
    t.is_run_end_encoded,
    t.is_union,
    t.is_list_view,
    t.is_large_list_view,
    t.is_string_view,
    t.is_binary_view,
)


class BatchReader:
    """Reads IPC record batch messages of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        check_types(schema)
        self.schema = schema
        self._nested = [number for number, field in enumerate(schema) if field.type.num_fields]

    @staticmethod
    def of(schema: bytes) -> BatchReader:
        """Returns the reader of an IPC schema message, cached by schema, with times in zones that Python knows. Raises
        InvalidArgument."""
        return _batch_reader(schema)

    def read(self, message: bytes) -> pa.RecordBatch:
        """Returns the rows of a message, an empty batch for ``b""``. Raises InvalidArgument."""
        if not message:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        try:
            _check_plain(message, _ENVELOPE if message.startswith(_CONTINUED) else 4)
            return self._proved(pa.ipc.read_record_batch(pa.py_buffer(message), self.schema), len(message))
        except ARROW_RAISES as error:
            raise _unreadable("rows", error) from error

    def _proved(self, batch: pa.RecordBatch, size: int) -> pa.RecordBatch:
        limit = VALUES_FREE + VALUES_PER_BYTE_MAX * size
        if batch.num_rows > limit:
            raise InvalidArgument(f"{size} bytes cannot hold {batch.num_rows} rows", remedy=_REMEDY)
        batch.validate(full=True)
        for number in self._nested:
            _check_values(batch.column(number), limit, size)
        return batch

    def read_message(self, message: pa.ipc.Message, size: int) -> pa.RecordBatch:
        """Returns the rows of a message that belongs to a stream of ``size`` bytes. Raises InvalidArgument, and
        pyarrow's errors."""
        _check_plain(message.metadata.to_pybytes(), 0)
        return self._proved(pa.ipc.read_record_batch(message, self.schema), size)


@functools.lru_cache(maxsize=64)
def _batch_reader(schema: bytes) -> BatchReader:
    return BatchReader(in_python_zones(read_schema(schema)))


def read_batch(message: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the rows of an IPC record batch message, an empty batch for ``b""``. Raises InvalidArgument."""
    return BatchReader(schema).read(message)


def read_table(stream: bytes) -> pa.Table:
    """Reads all rows of an IPC stream. Raises InvalidArgument."""
    try:
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(stream))
        first = messages.read_next_message()
        if first.type != "schema":  # pyarrow would read it as a schema
            raise ValueError(f"it begins with a {first.type}, not a schema")
        reader = BatchReader(pa.ipc.read_schema(first))
        batches = [reader.read_message(each, len(stream)) for each in _rest(messages)]
        return pa.Table.from_batches(batches, reader.schema)
    except (*ARROW_RAISES, StopIteration) as error:
        raise _unreadable("a stream of rows", error) from error


def _rest(messages: pa.ipc.MessageReader) -> Iterator[pa.ipc.Message]:
    try:
        while True:
            yield messages.read_next_message()
    except StopIteration:
        return


def _check_values(array: pa.Array, limit: int, size: int) -> None:
    """Checks the number of values, nested ones included, because a few bytes may be a list of a million nulls. Raises
    InvalidArgument."""
    if len(array) > limit:
        raise InvalidArgument(f"{size} bytes cannot hold {len(array)} values", remedy=_REMEDY)
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        _check_values(array.storage, limit, size)
    elif t.is_struct(kind):
        for number in range(kind.num_fields):
            _check_values(array.field(number), limit, size)
    elif t.is_map(kind):
        _check_values(array.keys, limit, size)
        _check_values(array.items, limit, size)
    elif kind.num_fields:
        _check_values(array.values, limit, size)


def _check_plain(data: bytes, start: int) -> None:
    """Checks that a message is not compressed, because pyarrow would inflate it to any size before a check is possible.

    The function reads the flatbuffer itself from index ``start`` (format/Message.fbs), because pyarrow does not expose
    the compression. Raises InvalidArgument for compressed rows, ValueError for anything but a record batch.
    """
    try:
        root = start + _u32(data, start)
        kind, header = _field(data, root, 1), _field(data, root, 2)
        if kind is None or data[kind] != _RECORD_BATCH or header is None:
            raise ValueError("it is not a record batch")
        if _field(data, header + _u32(data, header), 3) is not None:
            raise InvalidArgument("rows are compressed", remedy="send them uncompressed")
    except (struct.error, IndexError) as error:
        raise ValueError("its metadata is truncated") from error


def _field(data: bytes, table: int, number: int) -> int | None:
    """Returns the offset of a flatbuffer table's field; None: the field is not set."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise ValueError("its metadata is malformed")
    at = 4 + 2 * number
    if at + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + at)[0]
    return table + offset if offset else None


def _u32(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value


def _unreadable(what: str, error: BaseException) -> InvalidArgument:
    why = (str(error).splitlines() or [type(error).__name__])[0][:160]
    return InvalidArgument(f"{what} cannot be read as Arrow: {why}", remedy=_REMEDY)


_ATOMS: dict[str, pa.DataType] = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "bool": pa.bool_(),
    "byte": pa.int8(),
    "tinyint": pa.int8(),
    "short": pa.int16(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|'(?:[^'\\]|\\.)*'|[A-Za-z_0-9]+|[<>(),:])")


def schema_of(declared: str | pa.Schema) -> pa.Schema:
    """Returns the schema that a user has declared.

    Raises DeclarationError for a text that cannot be parsed and for a repeated name, which would be ambiguous, and
    InvalidArgument for types that are not accepted.
    """
    schema = parse_ddl(declared) if isinstance(declared, str) else declared
    check_types(schema)
    if what := _twice(schema, "a column"):
        raise DeclarationError(f"the schema is ambiguous: {what}", remedy="rename one of the two")
    return schema


def _twice(fields: Iterable[pa.Field], what: str) -> str:
    """Returns a description of the first two fields, at any level, with the same name; empty if all names differ."""
    seen: set[str] = set()
    for field in fields:
        if field.name in seen:
            return f"{what} is named twice: {shown(field.name)}"
        seen.add(field.name)
        kind, name = field.type, field.name
        inside = [kind.field(number) for number in range(kind.num_fields)]
        groups = [inside] if pa.types.is_struct(kind) else [[each.with_name(name)] for each in inside]
        if found := next((found for group in groups if (found := _twice(group, f"a field of {shown(name)}"))), ""):
            return found
    return ""


def parse_ddl(text: str) -> pa.Schema:
    """Parses Spark DDL. Raises DeclarationError, which quotes the part that was not understood."""
    tokens = _tokens(text)
    fields = []
    while tokens:
        fields.append(_parsed_field(tokens, text))
        if tokens and tokens.pop(0) != ",":
            raise _bad(text, "a comma is missing between two columns")
        if not tokens and text.rstrip().endswith(","):
            raise _bad(text, "it ends with a comma")
    if not fields:
        raise _bad(text, "it names no column")
    if what := _twice(fields, "a column"):
        raise _bad(text, what)
    return pa.schema(fields)


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if match is None:
            raise _bad(text, f"unexpected {stripped[at:].strip()[:20]!r}")
        tokens.append(match.group(1))
        at = match.end()
    return tokens


def _parsed_field(tokens: list[str], text: str, colon: bool = False) -> pa.Field:
    name = _name(tokens, text)
    if tokens and tokens[0] == ":":
        tokens.pop(0)
    elif colon and not tokens:
        raise _bad(text, f"{shown(name)} has no type")
    type_ = _type(tokens, text)
    nullable = True
    if [token.lower() for token in tokens[:2]] == ["not", "null"]:
        del tokens[:2]
        nullable = False
    if tokens and tokens[0].lower() == "comment":
        tokens.pop(0)
        comment = _take(tokens, text)
        if not comment.startswith("'"):
            raise _bad(text, f"expected a comment in quotes, found {shown(comment)}")
    return pa.field(name, type_, nullable)


def _name(tokens: list[str], text: str) -> str:
    token = _take(tokens, text)
    if token.startswith("`"):
        return token[1:-1].replace("``", "`")
    if token in "<>(),:" or token.startswith("'"):  # noqa: S105 - of a schema
        raise _bad(text, f"expected a column name, found {shown(token)}")
    return token


def _type(tokens: list[str], text: str) -> pa.DataType:
    word = _take(tokens, text).lower()
    if word in _ATOMS:
        return _ATOMS[word]
    if word in ("decimal", "dec", "numeric"):
        precision, scale = 10, 0
        if tokens and tokens[0] == "(":
            tokens.pop(0)
            precision = _number(tokens, text)
            if tokens and tokens[0] == ",":
                tokens.pop(0)
                scale = _number(tokens, text)
            _expect(tokens, ")", text)
        if not (1 <= precision <= 38 and scale <= precision):
            raise _bad(text, f"decimal({precision},{scale}) is not valid, the limit is 38 digits")
        return pa.decimal128(precision, scale)
    if word == "array":
        _expect(tokens, "<", text)
        inner = _type(tokens, text)
        _expect(tokens, ">", text)
        return pa.list_(inner)
    if word == "map":
        _expect(tokens, "<", text)
        key = _type(tokens, text)
        _expect(tokens, ",", text)
        value = _type(tokens, text)
        _expect(tokens, ">", text)
        return pa.map_(key, value)
    if word == "struct":
        _expect(tokens, "<", text)
        fields = [_parsed_field(tokens, text, colon=True)]
        while tokens and tokens[0] == ",":
            tokens.pop(0)
            fields.append(_parsed_field(tokens, text, colon=True))
        _expect(tokens, ">", text)
        return pa.struct(fields)
    raise _bad(text, f"{shown(word)} is not a known type")


def _number(tokens: list[str], text: str) -> int:
    token = _take(tokens, text)
    if not token.isdecimal():
        raise _bad(text, f"expected a number, found {shown(token)}")
    return int(token)


def _take(tokens: list[str], text: str) -> str:
    if not tokens:
        raise _bad(text, "it ends too early")
    return tokens.pop(0)


def _expect(tokens: list[str], wanted: str, text: str) -> None:
    found = _take(tokens, text)
    if found != wanted:
        raise _bad(text, f"expected {wanted!r}, found {shown(found)}")


def _bad(text: str, why: str) -> DeclarationError:
    return DeclarationError(
        f"the schema {shown(text)} cannot be read: {why}",
        remedy="write it like 'name string, n long, tags array<string>'",
    )
