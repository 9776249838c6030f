"""Encodes and decodes the output of one batch on one partition: the main output, and side outputs by tag.

:class:`OutputWriter` encodes the rows or columns that an operator returns in the declared schema. It keeps each value
exactly, or raises an error that names the value's place. :class:`OutputReader` reads outputs as rows.

The stored and sent form of an output without side outputs is the Arrow record batch message itself (which begins with
0xff), or nothing. An output with side outputs is the byte 0x00, then msgpack ``[version, main, {tag: message}]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import groupby
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple
from uuid import UUID

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from stateflow.errors import DecodeError, OutputMismatch
from stateflow.operator.arrow import BatchReader, holds_map, read_schema
from stateflow.operator.exact import RAISED, Misfit, column_of, line_of
from stateflow.operator.rows import NOT_PYTHONS, readable
from stateflow.types import shown

_MARK = b"\x00"
VERSION = 1

# -- Encoding of output rows -----------------------------------------------------------------------------------------


class OutputWriter:
    """Encodes output rows as one record batch message in the operator's declared schema.

    Args:
        tag: tag of the side output; None: the writer is for the main output.
    """

    def __init__(self, schema: pa.Schema, operator: str, tag: str | None = None) -> None:
        self.schema = schema
        self._operator, self._tag = operator, tag
        self._names = schema.names
        self._columns = [column_of(field) for field in schema]
        self._changeable = frozenset(i for i, field in enumerate(schema) if _may_change(field.type))

    @property
    def freeze(self) -> Callable[[Any], Any]:
        """Function that copies what may change in a row, so that the row keeps the values of this moment: a dict, and
        values of types that may change. It is :func:`copied` if values of the declared types never change."""
        return self._freeze if self._changeable else copied

    def _freeze(self, row: Any) -> Any:
        try:
            if isinstance(row, tuple):
                frozen = [_frozen(value) if i in self._changeable else value for i, value in enumerate(row)]
                made: Any = getattr(row, "_make", type(row))(frozen)  # with its names, which are checked later
                return made
            return {name: _frozen(value) for name, value in row.items()} if isinstance(row, dict) else row
        except TypeError:
            self._check_copies(row)
            raise

    def _check_copies(self, row: Any) -> None:
        """Checks that the values of the declared fields can be copied. Raises OutputMismatch."""
        values = dict(zip(self._names, row, strict=False)) if isinstance(row, tuple) else row
        for i, field in enumerate(self.schema):
            if i in self._changeable and field.name in values:
                value = values[field.name]
                try:
                    _frozen(value)
                except TypeError as error:
                    what = f"is declared {field.type} but got {shown(value)}, which cannot be copied: {line_of(error)}"
                    raise self._misfit(field, Misfit(what)) from error

    def write(self, rows: list[Any], columns: Sequence[pa.RecordBatch] = ()) -> bytes:
        """Encodes ``columns``, then ``rows``; no rows become ``b""``. Raises OutputMismatch with the row and field."""
        batches = [
            batch for batch in (*columns, self._encode(self.settled(rows))) if batch is not None and batch.num_rows
        ]
        if not batches:
            return b""
        whole = batches[0] if len(batches) == 1 else self._joined(pa.Table.from_batches(batches).combine_chunks())
        message: bytes = whole.serialize().to_pybytes()
        return message

    def write_each(self, several: Sequence[list[Any]]) -> list[bytes]:
        """Encodes several lists of rows at once, each to the same bytes as if it had been encoded alone.

        Args:
            several: rows as plain tuples, see :meth:`settled`.

        Raises OutputMismatch, and pyarrow's error for too many rows.
        """
        whole = self._encode([row for rows in several for row in rows] if len(several) > 1 else several[0])
        messages, start = [], 0
        for rows in several:
            messages.append(_message(whole.slice(start, len(rows))) if whole is not None and rows else b"")
            start += len(rows)
        return messages

    def settled(self, rows: list[Any]) -> list[Any]:
        """Returns rows as plain tuples, with the fields in the declared order. Raises OutputMismatch.

        Args:
            rows: rows that were frozen when they were produced.
        """
        if rows and set(map(type, rows)) != {tuple}:
            return [self._as_tuple(row, number) for number, row in enumerate(rows)]
        return rows

    def _encode(self, rows: list[Any]) -> pa.RecordBatch | None:
        """Encodes rows that are plain tuples; None: there are none. Raises OutputMismatch."""
        if not rows:
            return None
        width = len(self._names)
        if set(map(len, rows)) != {width}:
            number, bad = next((number, row) for number, row in enumerate(rows) if len(row) != width)
            raise self._mismatch(f"a row has {len(bad)} fields, {width} are declared: {shown(bad)}", row=number)
        arrays = []
        for index, field in enumerate(self.schema):
            try:
                array = self._columns[index].array(list(map(itemgetter(index), rows)))
            except Misfit as misfit:
                raise self._misfit(field, misfit) from misfit
            if isinstance(array, pa.ChunkedArray):
                raise self._mismatch(
                    "the rows of one batch have more than 2 GiB of text in the column", column=field.name
                )
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def columns(self, produced: Any, method: str) -> pa.RecordBatch:
        """Returns the columns that the operator's method ``method`` produced, in the declared order and types.

        Raises OutputMismatch.
        """
        if not isinstance(produced, (pa.RecordBatch, pa.Table)):
            raise self._mismatch(f"{method} must return a RecordBatch or Table, not {type(produced).__name__}")
        if set(produced.schema.names) != set(self._names) or produced.num_columns != len(self._names):
            raise self._mismatch(f"the columns are {', '.join(produced.schema.names)}")
        table = pa.Table.from_batches([produced]) if isinstance(produced, pa.RecordBatch) else produced
        arrays = []
        for field in self.schema:
            try:
                arrays.append(cast_column(table[field.name], field))
            except Misfit as misfit:
                raise self._misfit(field, misfit) from misfit
            except pa.ArrowException as error:  # too much for one column
                raise self._mismatch(str(error).splitlines()[0], column=field.name) from error
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _joined(self, table: pa.Table) -> pa.RecordBatch:
        batches = table.to_batches()
        if len(batches) != 1:
            raise self._mismatch("the rows of one batch have more than 2 GiB of text in a column")
        return batches[0]

    def _as_tuple(self, row: Any, number: int) -> tuple[Any, ...]:
        if isinstance(row, tuple):
            fields = getattr(row, "_fields", None)
            if fields and list(fields) != self._names and sorted(fields) == sorted(self._names):
                raise self._mismatch(
                    f"a named tuple has the declared fields in another order: {', '.join(fields)}", row=number
                )
            return tuple(row)
        if isinstance(row, dict):
            if set(row) != set(self._names):
                odd = sorted(set(row) ^ set(self._names), key=str)
                what = f"the fields of a row differ from the declared ones: {', '.join(map(str, odd))}"
                raise self._mismatch(what, row=number)
            return tuple(row[name] for name in self._names)
        what = f"a row must be a tuple or a dict, not {type(row).__name__}: {shown(row)}"
        raise self._mismatch(what, row=number)

    def _misfit(self, field: pa.Field, misfit: Misfit) -> OutputMismatch:
        what = f"field {field.name!r}{misfit.path} {misfit.what}"
        return self._mismatch(what, misfit.how, column=f"{field.name}{misfit.path}", row=misfit.row)

    def _mismatch(self, what: str, how: str = "", **where: Any) -> OutputMismatch:
        remedy = "make process() produce what `output` declares, in that order"
        if self._tag is not None:
            remedy = f"emit what `side_outputs` declares for {self._tag!r}, in that order"
        remedy = f"{how}; {remedy}" if how else remedy
        return OutputMismatch(what, remedy=remedy, operator=self._operator, side_output=self._tag, **where)


def _message(part: pa.RecordBatch) -> bytes:
    """Serializes a slice. Copies it first, because pyarrow also sends up to 64 bytes per buffer that follow the slice
    and belong to another partition."""
    message: bytes = pa.concat_batches([part]).serialize().to_pybytes()
    return message


def copied(row: Any) -> Any:
    """Copies a row that is a dict, because the operator may fill it again for its next row."""
    return dict(row) if isinstance(row, dict) else row


def _may_change(type_: pa.DataType) -> bool:
    return bool(pa.types.is_nested(type_) or pa.types.is_binary(type_) or pa.types.is_large_binary(type_))


_NEVER_CHANGE = frozenset({NoneType, bool, int, float, str, bytes, date, datetime, time, timedelta, Decimal, UUID})


def _frozen(value: Any) -> Any:
    """Copies a value so deeply that later changes of the value do not reach the copy."""
    if value.__class__ in _NEVER_CHANGE:
        return value
    if value.__class__ is list:
        return [_frozen(each) for each in value]
    if value.__class__ is tuple:
        return tuple(map(_frozen, value))
    if value.__class__ is dict:
        return {_frozen(key): _frozen(each) for key, each in value.items()}
    if value.__class__ is memoryview:
        return bytes(value)
    if isinstance(value, KeysView | ValuesView | ItemsView):
        return [_frozen(each) for each in value]
    return copy.deepcopy(value)  # a tracked container becomes a plain one


# -- Encoding of the rows of several partitions ----------------------------------------------------------------------


class Outputs(NamedTuple):
    """Output ``rows`` of one partition, frozen by its ``writer``."""

    writer: OutputWriter
    rows: list[Any]


def encode(several: Sequence[Outputs]) -> list[bytes | Exception]:
    """Encodes output rows of several partitions at once, because for few rows, making an array costs more than filling
    it.

    Returns a record batch message for each item, ``b""`` for no rows, or the error of an item with wrong rows, which
    does not affect other items.
    """
    encoded: list[bytes | Exception] = []
    for _, alike in groupby(several, key=lambda outputs: outputs.writer.schema):
        encoded += _encode(list(alike))
    return encoded


def _encode(alike: list[Outputs]) -> Sequence[bytes | Exception]:
    if len(alike) > 1:
        try:
            return alike[0].writer.write_each([outputs.rows for outputs in alike])
        except Exception:  # noqa: BLE001, S110 - some rows are wrong, or all of them are too many for one message
            pass
    return [_alone(outputs) for outputs in alike]


def _alone(outputs: Outputs) -> bytes | Exception:
    try:
        return outputs.writer.write_each([outputs.rows])[0]
    except Exception as error:  # noqa: BLE001 - it is the result of this batch alone
        return error


# -- Stored and sent outputs -----------------------------------------------------------------------------------------


def join_output(main: bytes, side: dict[str, bytes]) -> bytes:
    if not side:
        return main
    packed: bytes = msgpack.packb([VERSION, main, side])
    return _MARK + packed


def split_output(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Splits an output into (main, tag → record batch message). Raises DecodeError."""
    if not data.startswith(_MARK):
        return data, {}
    try:
        version, main, side = msgpack.unpackb(data[1:])
    except (ValueError, TypeError) as error:
        raise DecodeError("an output cannot be read", remedy="check what runs at the replica's address") from error
    if version != VERSION:
        raise DecodeError(
            f"an output has format {version}, this program reads {VERSION}", remedy="run a newer stateflow"
        )
    if not (type(main) is bytes and type(side) is dict and all(type(each) is bytes for each in side.values())):
        raise DecodeError("an output is malformed", remedy="check what runs at the replica's address")
    return main, side


class OutputReader:
    """Reads outputs as rows, which are dictionaries. A map becomes a dictionary, too, as in an operator's input rows.

    A value that Python cannot represent, such as a time in the year 12000 from a batch operator, raises InvalidArgument
    only when it is accessed, because the value is committed, and other rows must be readable.

    Args:
        side: schema of each side output by its tag.
    """

    def __init__(self, schema: pa.Schema, side: Mapping[str, pa.Schema]) -> None:
        self._main = BatchReader(schema)
        self._side = {tag: BatchReader(each) for tag, each in side.items()}

    @classmethod
    def of(cls, schema: bytes, side: Iterable[tuple[str, bytes]]) -> OutputReader:
        return cls(read_schema(schema), {tag: read_schema(encoded) for tag, encoded in side})

    def join(self, earlier: bytes, later: bytes) -> bytes:
        """Joins two outputs into one, in this order."""
        if not earlier or not later:
            return earlier or later
        (main, side), (more, more_side) = split_output(earlier), split_output(later)
        joined = {
            tag: _append(side.get(tag, b""), more_side.get(tag, b""), reader)
            for tag, reader in self._side.items()
            if tag in side or tag in more_side
        }
        return join_output(_append(main, more, self._main), joined)

    def rows(self, outputs: Iterable[bytes]) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
        """Returns (main rows, tag → rows), in the order of ``outputs``."""
        split = [split_output(output) for output in outputs]
        side = {
            tag: _rows(reader, [messages[tag] for _, messages in split if tag in messages])
            for tag, reader in self._side.items()
        }
        return _rows(self._main, [message for message, _ in split]), side


def _rows(reader: BatchReader, messages: Iterable[bytes]) -> list[dict[str, Any]]:
    batches = [reader.read(message) for message in messages if message]
    if not batches:
        return []
    return rows_in(pa.Table.from_batches(batches, reader.schema))


def rows_in(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows as dictionaries, with an Unreadable in place of a value that Python cannot represent."""
    with_maps = any(holds_map(field.type) for field in table.schema)
    try:
        rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict" if with_maps else None)
        return rows
    except NOT_PYTHONS:  # raised for some value, which a batch operator may produce; the others must be readable
        columns = [_values(table.column(number), field) for number, field in enumerate(table.schema)]
        return [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict" if holds_map(field.type) else None)
        return values
    except NOT_PYTHONS:
        return [readable(scalar, field.name, row) for row, scalar in enumerate(column)]


def _append(one: bytes, two: bytes, reader: BatchReader) -> bytes:
    if not one or not two:
        return one or two
    table = pa.Table.from_batches([reader.read(one), reader.read(two)])
    whole, *more = table.combine_chunks().to_batches()
    if more:
        raise OutputMismatch(
            "the output of timers and rows has more than 2 GiB of text in a column", remedy="send smaller batches"
        )
    message: bytes = whole.serialize().to_pybytes()
    return message


# -- Columns of declared types ---------------------------------------------------------------------------------------


def cast_column(given: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    """Converts an Arrow column to the type of ``field``. Raises Misfit for the first row that does not fit, and
    pyarrow's error if there are too many values for one array."""
    _check_kinds(given.type, field.type, "")
    chunks, before = [], 0
    for chunk in given.chunks:
        try:
            chunks.append(_cast_chunk(chunk, field))
        except RAISED as error:
            raise _first_misfit(chunk, field, error, before) from error
        before += len(chunk)
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [pa.array([], field.type)])


def _check_kinds(source: pa.DataType, target: pa.DataType, path: str) -> None:
    """Checks that values of type ``source`` can be values of type ``target`` without changing their meaning. Raises
    Misfit."""
    if t.is_dictionary(source):
        source = source.value_type
    if source == target or t.is_null(source):
        return
    ours = next((into for is_kind, into in _CONVERTS_TO if is_kind(source)), None)
    if ours is None or not any(is_kind(target) for is_kind in ours):
        raise Misfit(f"is declared {target} but is a column of {source}", path=path)
    if t.is_timestamp(source) and (source.tz is None) != (target.tz is None):
        how = "attach a time zone: pyarrow.compute.assume_timezone" if source.tz is None else "declare timestamp"
        raise Misfit(f"is declared {target} but is a column of {source}", how, path=path)
    if t.is_struct(target):
        names, declared = ([kind.field(n).name for n in range(kind.num_fields)] for kind in (source, target))
        if sorted(names) != sorted(declared):
            odd = ", ".join(sorted(set(names) ^ set(declared)) or sorted(names))
            raise Misfit(f"has other fields than declared: {odd}", path=path)
        for number in range(target.num_fields):
            field = target.field(number)
            _check_kinds(source.field(field.name).type, field.type, f"{path}.{field.name}")
    elif t.is_map(target):
        _check_kinds(source.key_type, target.key_type, f"{path}.key")
        _check_kinds(source.item_type, target.item_type, f"{path}[]")
    elif t.is_nested(target):
        _check_kinds(source.value_type, target.value_type, f"{path}[]")


def _cast_chunk(array: pa.Array, field: pa.Field) -> pa.Array:
    array = _cast(array, field.type)
    if _lacks_value(array, field):
        raise ValueError("a value declared NOT NULL is null")
    return array


def _first_misfit(array: pa.Array, field: pa.Field, error: Exception, before: int) -> Misfit:
    """Finds the first row that does not fit. ``before`` is the number of rows in earlier chunks."""
    begin, end = 0, len(array)
    while end - begin > 1:
        middle = (begin + end) // 2
        try:
            _cast_chunk(array.slice(begin, middle - begin), field)
            begin = middle
        except RAISED:
            end = middle
    try:
        column_of(field).array([array[begin].as_py()])
    except Misfit as misfit:  # it also names the place inside the value
        return misfit.within("", before + begin)
    except RAISED:
        pass
    return Misfit(f"is declared {field.type}: {line_of(error)}", row=before + begin)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Casts an array level by level, because each level has its own rule.

    Args:
        kind: a type that ``_check_kinds`` allows.
    """
    if array.type == kind:
        return array
    if t.is_dictionary(array.type):
        return _cast(array.dictionary_decode(), kind)
    if t.is_null(array.type):
        return pa.nulls(len(array), kind)
    if t.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        given = dict(
            zip([array.type.field(n).name for n in range(array.type.num_fields)], array.flatten(), strict=True)
        )
        arrays = [_cast(given[field.name], field.type) for field in fields]
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=array.is_null())
    if t.is_map(kind):
        array = _compact(array)
        keys, items = _cast(array.keys, kind.key_type), _cast(array.items, kind.item_type)
        return pa.MapArray.from_arrays(_ends(array, pa.int32()), keys, items, kind)
    if t.is_nested(kind):
        return _cast_list(array, kind)
    if t.is_decimal(kind) and t.is_integer(array.type):
        return array.cast(pa.decimal128(20, 0)).cast(kind)  # otherwise pyarrow requires digits for any int
    if t.is_float32(kind) and t.is_floating(array.type):
        wide = array.cast(pa.float64())
        narrow, zero = wide.cast(kind), pa.scalar(0.0)
        lost = pc.or_(
            pc.xor(pc.is_inf(wide), pc.is_inf(narrow)),
            pc.xor(pc.equal(wide, zero), pc.equal(narrow, pa.scalar(0.0, kind))),
        )
        if pc.any(lost).as_py():
            raise ValueError("a 32-bit float cannot hold it")
        return narrow
    return array.cast(kind)


def _cast_list(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if t.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_field))
    array = _compact(array)
    large = t.is_large_list(kind)
    plain = (pa.large_list if large else pa.list_)(kind.value_field)
    made = pa.LargeListArray if large else pa.ListArray
    ends = _ends(array, pa.int64() if large else pa.int32())
    found = made.from_arrays(ends, _cast(array.values, kind.value_type), type=plain)
    return found if kind == plain else found.cast(kind)


def _compact(array: pa.Array) -> pa.Array:
    """Copies an array without child values that belong to no element.

    Such values may be before, after or between the values of elements.
    """
    return array.take(pa.array(np.arange(len(array))))


def _ends(array: pa.Array, width: pa.DataType) -> pa.Array:
    """Returns the offsets of lists, null for null lists."""
    there = pa.concat_arrays([array.is_valid(), pa.array([True])])
    return pc.if_else(there, array.offsets.cast(width), pa.scalar(None, width))


def _lacks_value(array: pa.Array, field: pa.Field) -> bool:
    """Tells whether there is a null in a field that is declared NOT NULL, or in such a field inside it."""
    if array.null_count and not field.nullable:
        return True
    kind = field.type
    if not _is_strict(kind):
        return False
    if array.null_count:
        array = array.filter(array.is_valid())
    if t.is_struct(kind):
        inside = zip(array.flatten(), (kind.field(number) for number in range(kind.num_fields)), strict=True)
        return any(_lacks_value(each, of) for each, of in inside)
    if t.is_map(kind):
        array = _compact(array)
        return _lacks_value(array.keys, kind.key_field) or _lacks_value(array.items, kind.item_field)
    return _lacks_value(array.flatten(), kind.value_field)


def _is_strict(kind: pa.DataType) -> bool:
    inside = [kind.field(number) for number in range(kind.num_fields)] if t.is_nested(kind) else []
    return any(not field.nullable or _is_strict(field.type) for field in inside)


_IsKind = Callable[[pa.DataType], bool]
_TEXTS = (t.is_string, t.is_large_string, t.is_string_view)
_BYTES = (t.is_binary, t.is_large_binary, t.is_fixed_size_binary, t.is_binary_view)
_LISTS = (t.is_list, t.is_large_list, t.is_fixed_size_list)
#: kind of type → kinds of types to which its values can be converted if the value itself loses nothing
_CONVERTS_TO: tuple[tuple[_IsKind, tuple[_IsKind, ...]], ...] = (
    (t.is_integer, (t.is_integer, t.is_floating, t.is_decimal)),
    (t.is_floating, (t.is_floating, t.is_integer)),
    (t.is_decimal, (t.is_decimal, t.is_integer)),
    *((is_kind, _TEXTS) for is_kind in _TEXTS),
    *((is_kind, _BYTES) for is_kind in _BYTES),
    *((is_kind, _LISTS) for is_kind in _LISTS),
    *(
        (is_kind, (is_kind,))
        for is_kind in (t.is_date, t.is_timestamp, t.is_time, t.is_duration, t.is_map, t.is_struct)
    ),
)
