"""Input rows of operators, decoded from Arrow record batches.

:class:`RowDecoder` contains rows of several partitions that arrived in one record batch, which a :class:`RowReader`
decodes together. A value that Python cannot represent becomes :class:`Unreadable`, which raises an error only when it
is accessed.
"""

from __future__ import annotations

import functools
import gc
import unicodedata
from bisect import bisect_right
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from stateflow.errors import InvalidArgument, KeyColumnMissing, NullKey, SchemaMismatch
from stateflow.operator.arrow import holds_map, in_micros, in_python_zones, read_schema, time_of
from stateflow.state.cells import CELL, decode_row_key, split_address
from stateflow.state.keys import KeyColumns, kind_of, kinds_of
from stateflow.storage import PartitionStore

#: number of rows of neighbouring parts that are decoded to Python at a time; a larger part is decoded alone, as a whole
WINDOW_ROWS = 2048

# -- Types of keys ---------------------------------------------------------------------------------------------------


def check_keys(schema: pa.Schema, keys: KeyColumns, store: PartitionStore) -> None:
    """Checks that a stored key, if there is one, has the types of the key columns, and stores their kinds in ``keys``.
    Raises SchemaMismatch."""
    kinds = [kind_of(schema.field(column).type) for column in keys.names]
    address = next((address for address, _ in store.scan(CELL)), None)
    stored = () if address is None else kinds_of(decode_row_key(split_address(address)[0]))
    for column, was, now in zip(keys.names, stored, kinds, strict=False):
        if now and was != now:
            raise SchemaMismatch(
                f"the key column {column!r} is of type {now}, but stored keys are of type {was}",
                remedy="cast the column to the stored type; initial state, too, needs keys of the rows' type",
                operator=keys.operator,
                column=column,  # clients tell by it that the rows are at fault, not the stored states
            )
    keys.kinds = kinds


# -- Values that Python cannot represent -----------------------------------------------------------------------------


class Unreadable:
    """Stand-in for a value that Python cannot represent, such as a time in the year 12000.

    Every use except ``repr`` raises InvalidArgument with column and row.
    """

    __slots__ = ("_column", "_row", "_type", "_why")

    def __init__(self, column: str, row: int, type_: str, why: str) -> None:
        self._column, self._row, self._type, self._why = column, row, type_, why

    def refusal(self) -> InvalidArgument:
        return InvalidArgument(
            f"Python cannot represent a {self._type}: {self._why}",
            remedy="filter out such rows, or cast the column",
            column=self._column,
            row=self._row,
        )

    def __repr__(self) -> str:
        return f"<a {self._type} that Python cannot represent>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # a look-up of the value's methods
            raise AttributeError(name)
        raise self.refusal()

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.refusal()

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __floordiv__ = _refuse
    __neg__ = __abs__ = __int__ = __float__ = __index__ = __round__ = __bytes__ = __reduce__ = _refuse
    __getitem__ = __iter__ = __len__ = __contains__ = __reversed__ = __or__ = __ror__ = _refuse

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec) if not spec else self._refuse()


# -- Rows that operators are given -----------------------------------------------------------------------------------

_value_at = tuple.__getitem__


class Row(tuple[Any, ...]):
    """An input row of an operator: a tuple of its values, in the order of the input's columns.

    ``row.name`` is the value of the column of that name. The name may be any identifier, including ``_1``, ``count``
    and ``µs`` (although Python normalizes identifiers to NFKC). Names of the form ``__x__`` are reserved for Python.
    ``row["any name"]`` is the value of the column of exactly that name, ``row[0]`` the value of the first column.
    Reading a name that two columns share raises InvalidArgument. ``_fields``, ``_asdict()`` and
    ``_replace(name=value)`` are those of a named tuple, unless a column has that name.

    >>> row = row_class(("k", "_2", "a b"))(("x", 7, None))
    >>> row.k, row._2, row["a b"], row[1]
    ('x', 7, None, 7)
    """

    __slots__ = ()
    #: names of the columns in order; index of each name that only one column has
    __columns__: tuple[str, ...] = ()
    __places__: Mapping[str, int] = MappingProxyType({})

    def __getitem__(self, at: Any) -> Any:
        if at.__class__ is int or not isinstance(at, str):  # the first condition is only for speed
            return _value_at(self, at)
        return _value_at(self, _place(self, at))

    def __repr__(self) -> str:
        shown = [
            f"{name}={value!r}" if name.isidentifier() else f"{name!r}: {value!r}"
            for name, value in zip(self.__columns__, self, strict=True)
        ]
        return f"Row({', '.join(shown)})"

    @property
    def _fields(self) -> tuple[str, ...]:
        return self.__columns__

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self.__columns__, self, strict=True))

    def _replace(self, /, **values: Any) -> Row:
        changed = list(self)
        for name, value in values.items():
            changed[_place(self, name)] = value
        return type(self)(changed)


def _place(row: Row, name: str) -> int:
    place = row.__places__.get(name)
    if place is not None:
        return place
    if name in row.__columns__:
        raise _shared(name, row.__columns__)
    raise KeyError(f"the row has no column {name!r}, only {', '.join(row.__columns__)}")


def columns_of(row: Row) -> tuple[str, ...]:
    """Returns the names of a row's columns, even if a column is named like an attribute of a row."""
    return row.__columns__


@functools.lru_cache(maxsize=64)
def row_class(columns: tuple[str, ...]) -> type[Row]:
    """Makes the class of rows with these columns."""
    names = {"__slots__": (), "__columns__": columns, "__places__": _places(columns)}
    # the descriptors of a named tuple read an attribute fastest
    plain = namedtuple("plain", [f"c{number}" for number in range(len(columns))])  # type: ignore[misc]
    readers: dict[str, tuple[int, Any]] = {}
    for number, name in enumerate(columns):
        for attribute in {name, unicodedata.normalize("NFKC", name)}:
            if not attribute.isidentifier() or _is_pythons(attribute):
                continue
            taken = attribute in readers and readers[attribute][0] != number
            reader = _ambiguous(attribute, columns) if taken else vars(plain)[f"c{number}"]
            readers[attribute] = (number, reader)
    return type("Row", (Row,), {**names, **{name: reader for name, (_, reader) in readers.items()}})


def reader_of(columns: tuple[str, ...], number: int) -> Callable[[Any], Any]:
    """Returns the fastest function that reads the column of index ``number`` from rows with ``columns``."""
    name = columns[number]
    own = vars(row_class(columns)).get(name)
    if own is None or isinstance(own, property) or not name.isidentifier() or _is_pythons(name):
        return lambda row: _value_at(row, number)
    return attrgetter(name)


def _places(columns: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(columns) if columns.count(name) == 1}


def _is_pythons(name: str) -> bool:
    """Tells whether a name has the form ``__x__``, like the names that Python itself looks up, such as ``__len__``."""
    return name.startswith("__") and name.endswith("__")


def _ambiguous(name: str, columns: Sequence[str]) -> property:
    def refuse(_: Row) -> NoReturn:
        raise _shared(name, columns)

    return property(refuse)


def _shared(name: str, columns: Sequence[str]) -> InvalidArgument:
    same = [each for each in columns if unicodedata.normalize("NFKC", each) == unicodedata.normalize("NFKC", name)]
    numbers = [str(number) for number, each in enumerate(columns) if each in same]
    return InvalidArgument(
        f"{len(numbers)} columns are named {name!r}: the columns {', '.join(numbers)} of the row",
        remedy=f"rename one of them, or read row[{numbers[0]}] or row[{numbers[-1]}]",
    )


# -- Reading ---------------------------------------------------------------------------------------------------------


@functools.cache
def get_ready() -> None:
    """Loads modules for which the first batch would otherwise wait a quarter of a second.

    For the first array that it makes of Python objects, pyarrow imports pandas if that is installed. This function then
    freezes all imported objects, so that the garbage collector does not scan them between batches, for 50 ms each time.
    """
    pa.array([0])
    gc.freeze()


class RowReader:
    """Decodes record batches of one input schema to rows, see :class:`Row`. A map becomes a dict.

    A value that Python cannot represent raises an error when it is accessed; in a key, it raises one at once. Raises
    KeyColumnMissing if the schema lacks a key column.
    """

    def __init__(self, schema: pa.Schema, key: tuple[str, ...], operator: str) -> None:
        self.schema = schema
        self.operator = operator
        self.key = key
        self._key = [self._index(column, "", "; select the key column, or rename one to it") for column in key]
        #: columns of nanoseconds → their type in microseconds; Python cannot represent a value that would lose digits
        self._coarse = {
            index: coarse for index, field in enumerate(schema) if (coarse := in_micros(field.type)) != field.type
        }
        self._maps = {index for index, field in enumerate(schema) if holds_map(field.type)}
        self._make: Any = functools.partial(tuple.__new__, row_class(tuple(schema.names)))

    @classmethod
    def of(cls, schema: bytes, key: tuple[str, ...], operator: str) -> RowReader:
        """Returns the reader of an IPC schema message, from a cache, because making one takes as long as reading some
        thousand rows."""
        return _reader(schema, key, operator)

    def getter(self, column: str | None) -> Callable[[Any], Any] | None:
        """Returns a function that reads one column of a row; None if ``column`` is None.

        Raises KeyColumnMissing if the input lacks the column.
        """
        if column is None:
            return None
        index = self._index(column, ", which the operator declares as event_time", "; declare or select one of these")
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
        """Replaces keys of -0.0 by 0.0, their stored form, because otherwise -0.0 and 0.0 would be grouped as two
        keys."""
        for index in self._key:
            column = batch.column(index)
            if pa.types.is_float32(column.type) or pa.types.is_float64(column.type):
                batch = batch.set_column(index, batch.schema.field(index), pc.add(column, pa.scalar(0.0, column.type)))
        return batch

    def check_keys(self, batch: pa.RecordBatch) -> None:
        """Checks that no key is null. Raises NullKey."""
        for index in self._key:
            if count := batch.column(index).null_count:
                raise null_key(self.schema.names[index], count, self.operator)

    def read(self, batch: pa.RecordBatch) -> tuple[list[Any], Iterator[Any]]:
        """Returns (keys, rows), in order; the key of several columns is a tuple. Raises one of ``NOT_PYTHONS`` for a
        value that Python cannot represent."""
        return self._rows([self._plain(batch.column(index), index) for index in range(batch.num_columns)])

    def read_each(self, batch: pa.RecordBatch) -> tuple[list[Any], Iterator[Any]]:
        """Returns what :meth:`read` does, with an :class:`Unreadable` in place of each value that Python cannot
        represent. Raises InvalidArgument if a key has such a value.
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
        except NOT_PYTHONS:  # Python cannot represent some of the values, which the operator may never access
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


#: exceptions that pyarrow raises for a value that Python cannot represent
NOT_PYTHONS = (pa.ArrowException, ValueError, ArithmeticError, LookupError, TypeError)


def _part_by_part(scalar: pa.Scalar) -> Any:
    """Reads a value that contains a time near the limits of the times that Python can represent."""
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


#: functions that read a value, the first for most values, the second for a map with unhashable keys, the third for a
#: time near the limits of Python, with a year that is beyond them in some zone
_WAYS: tuple[Callable[[pa.Scalar], Any], ...] = (
    lambda scalar: scalar.as_py(maps_as_pydicts="strict"),
    lambda scalar: scalar.as_py(),
    _part_by_part,
)


def readable(scalar: pa.Scalar, column: str, row: int) -> Any:
    """Returns a value as a Python object, or an :class:`Unreadable` if Python cannot represent it."""
    why: Exception | None = None
    for read in _WAYS:
        try:
            return read(scalar)
        except NOT_PYTHONS as error:
            why = why or error
    assert why is not None
    return Unreadable(column, row, str(scalar.type), _first_line(why))


def null_key(column: str, count: int, operator: str) -> NullKey:
    return NullKey(
        f"the key column {column!r} is null in {count} row(s)",
        remedy="filter out such rows before the operator, or coalesce the column to a value",
        operator=operator,
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


# -- Rows that arrived together --------------------------------------------------------------------------------------


class RowDecoder:
    """Rows of several partitions in one record batch, which are read part by part, and decoded several parts at a time.

    Args:
        rows: validated rows of all parts.
        stops: for each part the index after its last row, ascending.
    """

    def __init__(self, reader: RowReader, rows: pa.RecordBatch, stops: Sequence[int]) -> None:
        self.reader = reader
        self._rows, self._stops = reader.keyed(rows), stops
        self._has_null_keys = any(rows.column(column).null_count for column in reader.key)
        self._first = 0
        self._keys: list[Any] = []
        self._window: list[Any] = []  # the rows of these keys
        # if Python cannot represent some value, parts are decoded one by one, so that it affects only its own part
        self._alone = False

    def columns(self, start: int, stop: int) -> pa.RecordBatch:
        """Returns the rows from ``start`` to ``stop``, ``stop`` excluded, as a record batch. Raises NullKey."""
        part = self._rows.slice(start, stop - start)
        if self._has_null_keys:
            self.reader.check_keys(part)
        return part

    def read(self, start: int, stop: int) -> tuple[list[Any], Iterable[Any]]:
        """Returns (keys, rows) from ``start`` to ``stop``, ``stop`` excluded. Raises NullKey, and InvalidArgument for a
        key that Python cannot represent."""
        if self._has_null_keys:
            self.columns(start, stop)
        if not self._first <= start <= stop <= self._first + len(self._keys):
            reach = 0 if self._alone else bisect_right(self._stops, start + WINDOW_ROWS)
            end = self._stops[reach - 1] if reach else stop
            if end <= stop:  # the window holds no other part's rows
                return self._part(start, stop)
            try:
                self._keys, rows = self.reader.read(self._rows.slice(start, end - start))
            except NOT_PYTHONS:
                self._alone = True
                return self._part(start, stop)
            self._first, self._window = start, list(rows)
        part = slice(start - self._first, stop - self._first)
        return self._keys[part], self._window[part]

    def _part(self, start: int, stop: int) -> tuple[list[Any], Iterable[Any]]:
        return self.reader.read_each(self._rows.slice(start, stop - start))


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """Rows of one partition among those that arrived together."""

    arriving: RowDecoder
    start: int
    stop: int

    @property
    def reader(self) -> RowReader:
        return self.arriving.reader

    def read(self) -> tuple[list[Any], Iterable[Any]]:
        return self.arriving.read(self.start, self.stop)

    def columns(self) -> pa.RecordBatch:
        return self.arriving.columns(self.start, self.stop)


def alone(reader: RowReader, rows: pa.RecordBatch) -> DecodedRows:
    """Wraps rows that all belong to one partition."""
    return DecodedRows(RowDecoder(reader, rows, [rows.num_rows]), 0, rows.num_rows)
