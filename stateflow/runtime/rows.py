"""Converts Arrow record batches to the rows operators see, and operators' rows back to Arrow."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from operator import itemgetter
from types import NoneType
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from stateflow.errors import InvalidArgument, KeyColumnMissing, NullKey, OutputMismatch
from stateflow.runtime.arrow import read_schema
from stateflow.runtime.exact import Misfit, column_of, taken
from stateflow.runtime.row import reader_of, row_class
from stateflow.runtime.times import in_micros, in_python_zones, time_of
from stateflow.runtime.unreadable import Unreadable
from stateflow.types import shown


@functools.cache
def get_ready() -> None:
    """Loads what the first batch would otherwise wait for, a quarter of a second: pyarrow imports pandas, where there
    is one, for the first array that it makes of Python objects. Freezes all that was imported, so that the garbage
    collector need not scan it between batches, 50 ms.
    """
    pa.array([0])
    gc.freeze()


class RowReader:
    """Decodes record batches of one input schema to rows, see :class:`~stateflow.runtime.row.Row`. A map becomes a
    dict. A value that Python cannot represent is refused when it is looked at, and as a key at once.

    Raises KeyColumnMissing when the schema lacks a key column.
    """

    def __init__(self, schema: pa.Schema, key: tuple[str, ...], operator: str) -> None:
        self.schema = schema
        self.operator = operator
        self.key = key
        self._key = [self._index(column, "", "; select the key column, or rename one to it") for column in key]
        #: columns of nanoseconds → their type in microseconds; a value that would lose digits is one that Python cannot
        #: represent
        self._coarse = {
            index: coarse for index, field in enumerate(schema) if (coarse := in_micros(field.type)) != field.type
        }
        self._maps = {index for index, field in enumerate(schema) if holds_map(field.type)}
        self._make: Any = functools.partial(tuple.__new__, row_class(tuple(schema.names)))

    @classmethod
    def of(cls, schema: bytes, key: tuple[str, ...], operator: str) -> RowReader:
        """Returns the reader of an IPC schema message, the same one as before: making one takes as long as some
        thousand rows.
        """
        return _reader(schema, key, operator)

    def getter(self, column: str | None) -> Callable[[Any], Any] | None:
        """Returns a function that reads one field of a row; None: no column.

        Raises KeyColumnMissing when the input lacks it.
        """
        if column is None:
            return None
        index = self._index(column, ", which the operator declares as event_time", "")
        return reader_of(tuple(self.schema.names), index)

    def _index(self, column: str, used: str, remedy: str) -> int:
        index: int = self.schema.get_field_index(column)
        if index >= 0:
            return index
        if column in self.schema.names:
            raise KeyColumnMissing(
                f"there are several columns {column!r} in the input{used}",
                remedy="rename or drop all but one of them",
                operator=self.operator,
            )
        raise KeyColumnMissing(
            f"there is no column {column!r} in the input{used}",
            remedy=f"the input has {', '.join(self.schema.names)}{remedy}",
            operator=self.operator,
        )

    def keyed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Replaces keys of -0.0 by 0.0, as they are stored: grouping by them would part the two."""
        for index in self._key:
            column = batch.column(index)
            if pa.types.is_float32(column.type) or pa.types.is_float64(column.type):
                batch = batch.set_column(index, batch.schema.field(index), pc.add(column, pa.scalar(0.0, column.type)))
        return batch

    def check_keys(self, batch: pa.RecordBatch) -> None:
        """Refuses null keys. Raises NullKey."""
        for index in self._key:
            if count := batch.column(index).null_count:
                raise null_key(self.schema.names[index], count, self.operator)

    def read(self, batch: pa.RecordBatch) -> tuple[list[Any], Iterator[Any]]:
        """Returns (keys, rows), in order; the key of several columns is a tuple. Raises one of ``NOT_PYTHONS`` where
        Python cannot represent a value.
        """
        return self._rows([self._plain(batch.column(index), index) for index in range(batch.num_columns)])

    def read_each(self, batch: pa.RecordBatch) -> tuple[list[Any], Iterator[Any]]:
        """Returns what :meth:`read` does, with an :class:`Unreadable` in place of each value that Python cannot
        represent. Raises InvalidArgument where a key has such a value.
        """
        columns = [self._values(batch.column(index), index) for index in range(batch.num_columns)]
        for index in self._key:
            if (wrong := next((value for value in columns[index] if type(value) is Unreadable), None)) is not None:
                raise wrong.refusal()
        return self._rows(columns)

    def _rows(self, columns: list[list[Any]]) -> tuple[list[Any], Iterator[Any]]:
        keys = [columns[index] for index in self._key]
        rows = map(self._make, zip(*columns, strict=True))
        return (keys[0] if len(keys) == 1 else list(zip(*keys, strict=True))), rows

    def _plain(self, column: pa.Array, index: int) -> list[Any]:
        if (coarse := self._coarse.get(index)) is not None:
            column = column.cast(coarse)
        values: list[Any] = column.to_pylist(maps_as_pydicts="strict" if index in self._maps else None)
        return values

    def _values(self, column: pa.Array, index: int) -> list[Any]:
        try:
            return self._plain(column, index)
        except NOT_PYTHONS:  # Python lacks some of them; the operator may never look at those
            return [self._value(column.slice(row, 1), index, row) for row in range(len(column))]

    def _value(self, column: pa.Array, index: int, row: int) -> Any:
        if (coarse := self._coarse.get(index)) is not None:
            try:
                column = column.cast(coarse)
            except NOT_PYTHONS as error:
                return Unreadable(self.schema.names[index], row, str(column.type), _first_line(error))
        return readable(column[0], self.schema.names[index], row)


@functools.lru_cache(maxsize=64)
def _reader(schema: bytes, key: tuple[str, ...], operator: str) -> RowReader:
    try:
        zoned = in_python_zones(read_schema(schema))
    except InvalidArgument as error:
        error.located(operator=operator)
        raise
    return RowReader(zoned, key, operator)


#: what pyarrow raises for a value that Python cannot represent
NOT_PYTHONS = (pa.ArrowException, ValueError, ArithmeticError, LookupError, TypeError)


def _part_by_part(scalar: pa.Scalar) -> Any:
    """Reads a value of which some part is a time near the ends of what Python can represent."""
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return time_of(scalar)
    if pa.types.is_map(kind):
        pairs = [(_part_by_part(entry[0]), _part_by_part(entry[1])) for entry in scalar.values]
        try:
            read = dict(pairs)
        except TypeError:  # unhashable keys
            return pairs
        return read if len(read) == len(pairs) else pairs
    if pa.types.is_struct(kind):
        names = [kind.field(number).name for number in range(kind.num_fields)]
        if len(set(names)) < len(names):
            raise ValueError("duplicate field names")
        return {name: _part_by_part(scalar[number]) for number, name in enumerate(names)}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return [_part_by_part(each) for each in scalar.values]
    return scalar.as_py()


#: ways to read a value: as it is; a map with unhashable keys; a time near the ends of what Python can represent, where
#: another zone's year is beyond them
_WAYS: tuple[Callable[[pa.Scalar], Any], ...] = (
    lambda scalar: scalar.as_py(maps_as_pydicts="strict"),
    lambda scalar: scalar.as_py(),
    _part_by_part,
)


def readable(scalar: pa.Scalar, column: str, row: int) -> Any:
    """Returns a value as Python has it, or an :class:`Unreadable` where Python cannot represent it."""
    why: Exception | None = None
    for read in _WAYS:
        try:
            return read(scalar)
        except NOT_PYTHONS as error:
            why = why or error
    assert why is not None
    return Unreadable(column, row, str(scalar.type), _first_line(why))


def holds_map(type_: pa.DataType) -> bool:
    """Tells whether the type has a map in it, at any depth."""
    return pa.types.is_map(type_) or any(holds_map(type_.field(n).type) for n in range(type_.num_fields))


def null_key(column: str, count: int, operator: str) -> NullKey:
    return NullKey(
        f"the key column {column!r} is null in {count} row(s)",
        remedy="filter out such rows before the operator, or coalesce the column to a value",
        operator=operator,
    )


class OutputWriter:
    """Encodes output rows as one record batch message in the operator's declared schema.

    Args:
        tag: of the side output; None: the main output.
    """

    def __init__(self, schema: pa.Schema, operator: str, tag: str | None = None) -> None:
        self.schema = schema
        self._operator, self._tag = operator, tag
        self._names = schema.names
        self._columns = [column_of(field) for field in schema]
        self._changeable = frozenset(i for i, field in enumerate(schema) if _may_change(field.type))

    @property
    def freeze(self) -> Callable[[Any], Any] | None:
        """Function that copies a row, so that the copy stays as it is when the state it was made from changes.

        None: values of the declared types never change.
        """
        return self._freeze if self._changeable else None

    def _freeze(self, row: Any) -> Any:
        if isinstance(row, tuple):
            frozen = [_frozen(value) if i in self._changeable else value for i, value in enumerate(row)]
            made: Any = getattr(row, "_make", type(row))(frozen)  # with its names, which are checked later
            return made
        return {name: _frozen(value) for name, value in row.items()} if isinstance(row, dict) else row

    def write(self, rows: list[Any], columns: Sequence[pa.RecordBatch] = ()) -> bytes:
        """Encodes ``columns``, then ``rows``; ``b""`` for nothing. Raises OutputMismatch with the row and the field."""
        batches = [
            batch for batch in (*columns, self._encode(self.settled(rows))) if batch is not None and batch.num_rows
        ]
        if not batches:
            return b""
        whole = batches[0] if len(batches) == 1 else self._joined(pa.Table.from_batches(batches).combine_chunks())
        message: bytes = whole.serialize().to_pybytes()
        return message

    def write_each(self, several: Sequence[list[Any]]) -> list[bytes]:
        """Encodes several lists of rows at once, each to a message that is byte for byte as if it had been encoded
        alone.

        Args:
            several: rows that are settled, see :meth:`settled`.

        Raises OutputMismatch, and what pyarrow may raise of so many rows.
        """
        whole = self._encode([row for rows in several for row in rows] if len(several) > 1 else several[0])
        messages, start = [], 0
        for rows in several:
            messages.append(_message(whole.slice(start, len(rows))) if whole is not None and rows else b"")
            start += len(rows)
        return messages

    def settled(self, rows: list[Any]) -> list[Any]:
        """Returns rows that stay as they are when the operator goes on. Raises OutputMismatch."""
        if rows and set(map(type, rows)) != {tuple}:
            return [self._as_tuple(row, number) for number, row in enumerate(rows)]
        return rows

    def _encode(self, rows: list[Any]) -> pa.RecordBatch | None:
        """Encodes settled rows; None: there are none. Raises OutputMismatch."""
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
        """Returns what ``method`` returned, with the declared columns in order. Raises OutputMismatch."""
        if not isinstance(produced, (pa.RecordBatch, pa.Table)):
            raise self._mismatch(f"{method} must return a RecordBatch or Table, not {type(produced).__name__}")
        if set(produced.schema.names) != set(self._names) or produced.num_columns != len(self._names):
            raise self._mismatch(f"the columns are {', '.join(produced.schema.names)}")
        table = pa.Table.from_batches([produced]) if isinstance(produced, pa.RecordBatch) else produced
        arrays = []
        for field in self.schema:
            try:
                arrays.append(taken(table[field.name], field))
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
    """Serializes a slice. Copies it first: pyarrow also sends what lies behind a slice, up to 64 bytes a buffer, which
    belongs to another partition.
    """
    message: bytes = pa.concat_batches([part]).serialize().to_pybytes()
    return message


def _may_change(type_: pa.DataType) -> bool:
    return bool(pa.types.is_nested(type_) or pa.types.is_binary(type_) or pa.types.is_large_binary(type_))


_NEVER_CHANGE = frozenset({NoneType, bool, int, float, str, bytes, date, datetime, time, timedelta, Decimal, UUID})


def _frozen(value: Any) -> Any:
    """Copies a value, as deep as necessary."""
    if value.__class__ in _NEVER_CHANGE:
        return value
    if value.__class__ is list:
        return [_frozen(each) for each in value]
    return copy.deepcopy(value)  # a tracked container becomes a plain one


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
