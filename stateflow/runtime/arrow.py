"""Validation of Arrow data from other processes: schemas, record batches and streams are checked before they are read.

pyarrow trusts lengths and offsets: a wrong one reads foreign memory, or ends the process.
``validate(full=True)`` finds these. It checks every offset and every character: 8 µs for 1,000 rows of four columns,
1.8 ms for 100,000, a twentieth of the time to decode them. (The cheap ``validate()`` checks the last offset only.) It
does not bound the decoded size, so compressed rows are refused, and types by which a few bytes stand for many values.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.types as t

from stateflow.errors import InvalidArgument
from stateflow.runtime.times import in_python_zones
from stateflow.types import shown

SCHEMA_BYTES_MAX = 1 << 20
#: fields in a schema, nested ones included
FIELDS_MAX = 10_000
DEPTH_MAX = 32
#: a value takes at least one bit, except for type null, whose values take nothing
VALUES_PER_BYTE_MAX = 8
VALUES_FREE = 1 << 20
_REMEDY = "send Arrow IPC messages as written by pyarrow or Spark"
#: an encapsulated message begins with this mark and four bytes of length, then its metadata; before Arrow 0.15 without
#: the mark
_CONTINUED = b"\xff\xff\xff\xff"
_ENVELOPE = 8
_RECORD_BATCH = 3  # in the union of headers
#: exceptions that pyarrow raises for bytes that are not valid Arrow
ARROW_RAISES = (
    *(pa.ArrowException, ValueError, OSError, EOFError, LookupError, TypeError, MemoryError, OverflowError),
)


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
        # a few bytes stand for many values: one entry or run may be repeated any number of times
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
        """Returns the reader of an IPC schema message, cached by schema. Its times are in zones that Python knows.
        Raises InvalidArgument."""
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
        """Returns the rows of a message that belongs to a stream of ``size`` bytes. Raises InvalidArgument, and what
        pyarrow raises."""
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
    """Checks the number of values, nested ones included: a list of a million nulls takes a few bytes. Raises
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
    """Refuses a message of compressed rows, which pyarrow would inflate to any size before a check is possible.

    Reads the flatbuffer itself, from ``start`` on (format/Message.fbs), as pyarrow does not expose the compression.
    Raises InvalidArgument for compressed rows, ValueError for anything but a record batch.
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
    """Returns the offset of a flatbuffer table's field. None: not set."""
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
