"""Converts values to Arrow columns of declared types, each value exactly, or with an error that names its place.

pyarrow converts silently: it truncates 1.5 to 1 inside a list, takes a naive datetime for UTC and a text for the list
of its characters, and drops fields that a struct does not name. So the types of a column's values are checked first,
all values of one level at once; for plain values that costs little compared with making the array.

Only the type ``float`` rounds, because it has only 32 bits. A value that would become infinite or zero is refused.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import accumulate, chain
from operator import attrgetter
from types import NoneType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from stateflow.errors import StateflowError
from stateflow.state.encoding import exact_decimal, exact_float
from stateflow.types import shown

#: exceptions that pyarrow, and values themselves, raise if a value cannot be converted
RAISED = (pa.ArrowException, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


class Misfit(Exception):
    """A value that does not fit its column.

    Attributes:
        what: what is wrong with the value, worded to follow the column's name.
        how: remedy for this kind of value; empty: there is none.
        row: index of the value; None: the index is not known.
        path: place inside that row's value, such as ``[2].x``.
    """

    def __init__(self, what: str, how: str = "", row: int | None = None, path: str = "") -> None:
        super().__init__(what)
        self.what, self.how, self.row, self.path = what, how, row, path

    def within(self, path: str, row: int | None) -> Misfit:
        """Returns the misfit of a value that contains the wrong value.

        Args:
            path: place of the wrong value inside the containing value.
            row: index of the containing value; None: the index is not known.
        """
        return Misfit(self.what, self.how, row, path + self.path)


class Column:
    """Converts the values of one field.

    >>> column_of(pa.field("tags", pa.list_(pa.int64()))).array([[1, 2], None]).to_pylist()
    [[1, 2], None]
    """

    #: types of values that pyarrow converts exactly, or refuses
    plain: frozenset[type] = frozenset()

    def __init__(self, field: pa.Field) -> None:
        self.type: pa.DataType = field.type
        self._nullable: bool = field.nullable
        self._safe = self.plain | {NoneType}

    def array(self, values: list[Any]) -> pa.Array:
        """Converts values to an array. Raises Misfit for a value that does not fit, which need not be the first one."""
        kinds = set(map(type, values))
        has_nulls = NoneType in kinds
        if has_nulls and not self._nullable:
            row = next(row for row, value in enumerate(values) if value is None)
            raise Misfit("is declared NOT NULL but got None", row=row)
        if kinds <= self._safe:
            try:
                return self._array(values, has_nulls)
            except RAISED:
                pass  # values are now tried one by one, to find the wrong one, or an int that equals a float after all
        values = self._settled(values)
        try:
            return self._array(values, has_nulls)
        except RAISED as error:
            raise self._culprit(values, error) from error

    def _settled(self, values: list[Any]) -> list[Any]:
        settled = []
        for row, value in enumerate(values):
            try:
                settled.append(None if value is None else self._one(_python(value)))
            except Misfit as misfit:
                raise misfit.within("", row) from None
            except (StateflowError, *RAISED) as error:
                raise self._misfit(value, line_of(error)).within("", row) from error
        return settled

    def _culprit(self, values: list[Any], error: Exception) -> Misfit:
        for row, value in enumerate(values):
            try:
                self._array([value], value is None)
            except RAISED as alone:
                return self._misfit(value, line_of(alone)).within("", row)
        return Misfit(f"is declared {self.type} but not all of its values can be converted: {line_of(error)}")

    def _misfit(self, value: Any, why: str = "", how: str = "") -> Misfit:
        return Misfit(f"is declared {self.type} but got {shown(value)}{': ' if why else ''}{why}", how)

    def _one(self, value: Any) -> Any:
        """Converts a value of any type to one of a plain type. Raises Misfit, and the errors in RAISED."""
        if type(value) in self.plain:
            return value
        raise self._misfit(value)

    def _array(self, values: list[Any], has_nulls: bool) -> pa.Array:
        """Makes the array from ``values``, which are of plain types or None."""
        return pa.array(values, self.type)


class _Bool(Column):
    plain = frozenset({bool})

    def _one(self, value: Any) -> Any:
        return bool(value) if isinstance(value, np.bool_) else super()._one(value)


class _Int(Column):
    plain = frozenset({int})

    def _one(self, value: Any) -> Any:
        if isinstance(value, bool | np.bool_):
            raise self._misfit(value)
        if hasattr(value, "__index__"):
            return value.__index__()
        if isinstance(value, float | Decimal | np.floating) and value == int(value):
            return int(value)
        raise self._misfit(value, "it is not a whole number", "round it, or declare a type that can hold it")


class _Float64(Column):
    plain = frozenset({float, int})  # pyarrow accepts ints up to 2**53

    def _one(self, value: Any) -> Any:
        return exact_float(value)


class _Float32(Column):
    """Column of 32-bit floats.

    Args:
        key: True if the values are keys of a map. Keys must not be rounded, because two of them might become equal.
    """

    plain = frozenset({float})

    def __init__(self, field: pa.Field, key: bool = False) -> None:
        super().__init__(field)
        self._key = key

    def _one(self, value: Any) -> Any:
        if isinstance(value, float | np.floating):
            return float(value)
        found = exact_float(value)
        if float(np.float32(found)) != found:
            raise self._misfit(value, "it has too many digits", "declare a double")
        return found

    def _array(self, values: list[Any], has_nulls: bool) -> pa.Array:
        array = pa.array(values, self.type)
        after = array.to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(~np.isfinite(after) | (after == 0)).tolist():
            value = values[row]
            if value is not None and (math.isinf(value) != math.isinf(after[row]) or (after[row] == 0) != (value == 0)):
                raise self._misfit(value, "a 32-bit float cannot hold it", "declare a double").within("", row)
        if self._key:
            self._check_key(values, after)
        return array

    def _check_key(self, values: list[Any], after: Any) -> None:
        for row, value in enumerate(values):
            if value != float(after[row]) and not math.isnan(value):
                raise self._misfit(value, "it would be rounded, which a key must not be", "declare a double").within(
                    "", row
                )


class _Decimal(Column):
    plain = frozenset({Decimal})

    def _one(self, value: Any) -> Any:
        return exact_decimal(value)


class _Text(Column):
    plain = frozenset({str})

    def _one(self, value: Any) -> Any:
        return value if isinstance(value, str) else super()._one(value)


class _Bytes(Column):
    plain = frozenset({bytes, bytearray})

    def _one(self, value: Any) -> Any:
        return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else super()._one(value)


class _Date(Column):
    plain = frozenset({date})

    def _one(self, value: Any) -> Any:
        if isinstance(value, datetime):
            raise self._misfit(value, "it has a time of day", "take its date: value.date()")
        if isinstance(value, np.datetime64) and np.datetime_data(value.dtype)[0] == "D":
            value = value.item()
        return value if isinstance(value, date) else super()._one(value)


_US = np.dtype("datetime64[us]")
_FIRST_US, _LAST_US = (int(np.datetime64(end, "us").astype(np.int64)) for end in (datetime.min, datetime.max))


class _Timestamp(Column):
    """Column of timestamps, which are instants if the type has a time zone, and otherwise local times."""

    plain = frozenset({datetime})

    def __init__(self, field: pa.Field) -> None:
        super().__init__(field)
        self._instants = field.type.tz is not None
        self._micros = pa.timestamp("us", field.type.tz)

    def _one(self, value: Any) -> Any:
        if isinstance(value, np.datetime64):
            exact = value.astype(_US)
            value = exact.item() if exact == value else value
        if not isinstance(value, datetime) or value != value:  # noqa: PLR0124 - pandas' NaT
            raise self._misfit(value)
        if getattr(value, "nanosecond", 0):
            raise self._misfit(value, "it has nanoseconds", 'round it to microseconds: value.round("us")')
        if hasattr(value, "to_pydatetime"):
            value = value.to_pydatetime()
        has_zone = value.utcoffset() is not None
        if has_zone and not self._instants:
            raise self._misfit(value, "it has a time zone", "declare timestamp, or use value.replace(tzinfo=None)")
        if not has_zone and self._instants:
            raise self._misfit(
                value,
                "a datetime without a time zone does not name an instant",
                "attach one: value.replace(tzinfo=timezone.utc), or declare timestamp_ntz",
            )
        return value.astimezone(UTC) if has_zone else value.replace(tzinfo=None)

    def _array(self, values: list[Any], has_nulls: bool) -> pa.Array:
        zones = set(map(attrgetter("tzinfo"), filter(None, values) if has_nulls else values))
        if not (all(map(_is_whole, zones)) if self._instants else zones <= {None}):
            raise TypeError("time zones do not fit the type")
        array = pa.array(values, self._micros)
        if self._instants and zones - {None, UTC}:  # the year in UTC may be outside the range of datetime
            ends = pc.min_max(array.cast(pa.int64()))
            if ends["min"].is_valid and not _FIRST_US <= ends["min"].as_py() <= ends["max"].as_py() <= _LAST_US:
                raise OverflowError("its year in UTC is outside 1 to 9999")
        return array if self.type == self._micros else array.cast(self.type)


def _is_whole(zone: Any) -> bool:
    """Tells whether a zone's offsets are whole seconds, because pyarrow cannot read fractions."""
    return (
        zone is UTC or isinstance(zone, ZoneInfo) or (type(zone) is timezone and not zone.utcoffset(None).microseconds)
    )


class _Time(Column):
    plain = frozenset({time})

    def _array(self, values: list[Any], has_nulls: bool) -> pa.Array:
        if any(value is not None and value.tzinfo is not None for value in values):
            raise TypeError("a time of day cannot have a time zone")
        return pa.array(values, pa.time64("us")).cast(self.type)


class _Duration(Column):
    plain = frozenset({timedelta})

    def _array(self, values: list[Any], has_nulls: bool) -> pa.Array:
        return pa.array(values, pa.duration("us")).cast(self.type)


class _Other(Column):
    """A column of any type without a class of its own here. A value is accepted only if Arrow returns it unchanged."""

    def _one(self, value: Any) -> Any:
        (found,) = pa.array([value], self.type).to_pylist()
        if type(found) is not type(value) or found != value:
            raise self._misfit(value)
        return value


# -- nested ------------------------------------------------------------------------------------------------


class _List(Column):
    plain = frozenset({list, tuple})

    def __init__(self, field: pa.Field) -> None:
        super().__init__(field)
        self._item = column_of(field.type.value_field)
        made = pa.large_list if t.is_large_list(field.type) else pa.list_
        self._made = pa.LargeListArray if t.is_large_list(field.type) else pa.ListArray
        self._list = made(field.type.value_field)

    def _one(self, value: Any) -> Any:
        return items_of(value) if type(value) not in self.plain else value

    def _array(self, values: list[Any], has_nulls: bool) -> pa.Array:
        try:
            items = self._item.array(list(chain.from_iterable(filter(_is_there, values) if has_nulls else values)))
        except Misfit as misfit:
            raise _in_one_of(values, misfit, lambda value, at: f"[{at}]") from None
        array = self._made.from_arrays(_offsets(values, has_nulls, self._list), items, type=self._list)
        return array if self.type == self._list else array.cast(self.type)


class _Map(Column):
    plain = frozenset({dict})

    def __init__(self, field: pa.Field) -> None:
        super().__init__(field)
        self._key = column_of(field.type.key_field.with_nullable(False), key=True)
        self._item = column_of(field.type.item_field)

    def _one(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return value if type(value) is dict else dict(value)
        if not isinstance(value, list | tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
            raise self._misfit(value)
        if _has_twice([key for key, _ in value]):
            raise self._misfit(value, "it has a duplicate key")
        return _Pairs(value)

    def _array(self, values: list[Any], has_nulls: bool) -> pa.Array:
        present = list(filter(_is_there, values)) if has_nulls else values
        try:
            keys = self._key.array(list(chain.from_iterable(present)))
        except Misfit as misfit:
            raise _in_one_of(values, misfit, lambda value, at: ".key") from None
        try:
            items = self._item.array(list(chain.from_iterable(map(_values, present))))
        except Misfit as misfit:
            raise _in_one_of(values, misfit, lambda value, at: f"[{shown(list(value)[at])}]") from None
        return pa.MapArray.from_arrays(_offsets(values, has_nulls, self.type), keys, items, self.type)


class _Pairs:
    """Entries of a map, given as pairs, because its keys may be unhashable."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._pairs)

    def values(self) -> Iterator[Any]:
        return (value for _, value in self._pairs)

    def __repr__(self) -> str:
        return repr(self._pairs)


def _values(entries: Any) -> Iterable[Any]:
    found: Iterable[Any] = entries.values()
    return found


def _has_twice(keys: list[Any]) -> bool:
    try:
        return len(set(keys)) < len(keys)
    except TypeError:  # they are lists or dicts
        return any(key in keys[:at] for at, key in enumerate(keys))


class _Struct(Column):
    plain = frozenset({dict})

    def __init__(self, field: pa.Field) -> None:
        super().__init__(field)
        self._fields = [field.type.field(number) for number in range(field.type.num_fields)]
        self._names = [each.name for each in self._fields]
        self._columns = [column_of(each) for each in self._fields]

    def _one(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = dict(value)
        elif isinstance(value, tuple):
            names = getattr(value, "_fields", self._names)
            if len(value) != len(self._names):
                raise self._misfit(value, f"it has {len(value)} fields, {len(self._names)} are declared")
            value = dict(zip(names, value, strict=True))
        else:
            raise self._misfit(value)
        if value.keys() != set(self._names):
            odd = sorted(value.keys() ^ set(self._names), key=str)
            raise self._misfit(value, f"its fields differ from the declared ones: {', '.join(map(str, odd))}")
        return value

    def _array(self, values: list[Any], has_nulls: bool) -> pa.Array:
        present = list(filter(_is_there, values)) if has_nulls else values
        if present and set(map(len, present)) != {len(self._names)}:
            raise KeyError("fields differ from the declared ones")
        if not self._fields:
            return pa.array(values, self.type)
        arrays = []
        for name, column in zip(self._names, self._columns, strict=True):
            try:
                arrays.append(column.array([value[name] for value in present]))
            except Misfit as misfit:
                row = misfit.row
                if has_nulls and row is not None:
                    row = [row for row, value in enumerate(values) if value is not None][row]
                raise misfit.within(f".{name}", row) from None
        if not has_nulls:
            return pa.StructArray.from_arrays(arrays, fields=self._fields)
        there = np.fromiter((value is not None for value in values), bool, len(values))
        places = pa.array(np.cumsum(there) - 1, mask=~there)
        arrays = [array.take(places) for array in arrays]
        return pa.StructArray.from_arrays(arrays, fields=self._fields, mask=pa.array(~there))


def _is_there(value: Any) -> bool:
    return value is not None


def _offsets(values: list[Any], has_nulls: bool, kind: pa.DataType) -> pa.Array:
    """Returns for each value the index of its first item among the items of all values; null for a null value."""
    ends = np.zeros(len(values) + 1, np.int64)
    lengths = (0 if value is None else len(value) for value in values) if has_nulls else map(len, values)
    np.cumsum(np.fromiter(lengths, np.int64, len(values)), out=ends[1:])
    if not t.is_large_list(kind):
        if ends[-1] >= 1 << 31:
            raise OverflowError("more than 2^31 items in a column")
        ends = ends.astype(np.int32)
    null = np.fromiter((value is None for value in chain(values, [()])), bool, len(ends)) if has_nulls else None
    return pa.array(ends, mask=null)


def _in_one_of(values: list[Any], misfit: Misfit, path: Callable[[Any, int], str]) -> Misfit:
    """Converts the misfit of an item to a misfit of the value that contains the item.

    Args:
        misfit: the item's misfit; its row is an index into the items of all values.
        path: returns the item's path from the value and the item's index in it.
    """
    if misfit.row is None:
        return misfit
    ends = list(accumulate(0 if value is None else len(value) for value in values))
    row = bisect_right(ends, misfit.row)
    at = misfit.row - (ends[row - 1] if row else 0)
    return misfit.within(path(values[row], at), row)


def items_of(value: Any) -> list[Any]:
    """Returns the items of a list, or of a sequence, set or array in place of a list. Raises TypeError for others."""
    if isinstance(value, pa.Array | pa.ChunkedArray):
        found: list[Any] = value.to_pylist()
        return found
    if isinstance(value, np.ndarray) or (hasattr(value, "__array__") and not isinstance(value, np.generic)):
        array = np.asarray(value)
        if array.ndim != 1:
            return list(array)
        return array.tolist() if array.dtype.kind in "biufU" else list(array)
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Sequence | Set):
        raise TypeError("it is not a list")
    return list(value)


# -- types of values that declare none ---------------------------------------------------------------------


def type_of(values: list[Any], key: bool = False) -> pa.DataType:
    """Returns an Arrow type for values without a declared type. Raises Misfit if the values have no common type.

    Each value is read back from an array of this type with the type that it would have alone. The exceptions are ints
    among floats or Decimals: they become floats or Decimals of equal value.

    Args:
        key: True if the values are keys. Then ints are not converted, because a value of another type is another key.
    """
    kinds = {kind: _family(kind) for kind in set(map(type, values))}
    families = frozenset(kinds.values()) - {"null"}
    if "arrow" in families:
        return type_of(list(map(_python, values)), key)
    if len(families) > 1 and (key or families not in _WIDER):
        raise _unlike(values, lambda value: kinds[type(value)])
    family = _WIDER.get(families) or next(iter(families), "null")
    match family:
        case "list":
            return _type_of_lists(values)
        case "dict":
            return _type_of_dicts(values)
        case "datetime" | "numpy":
            return _type_of_times(values)
        case "Decimal":
            return _type_of_decimals(values)
        case "":
            row, value = next((row, value) for row, value in enumerate(values) if value is not None)
            raise Misfit(f"got {shown(value)}, which has no supported type", "send plain values: text, numbers, …", row)
    return _PLAIN_TYPES[family]


_FAMILIES: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("null", NoneType),
    ("arrow", pa.Scalar),
    ("bool", (bool, np.bool_)),
    ("numpy", np.datetime64),
    ("int", (int, np.integer)),
    ("float", (float, np.floating)),
    ("str", str),
    ("bytes", (bytes, bytearray, memoryview)),
    ("datetime", datetime),
    ("date", date),
    ("time", time),
    ("timedelta", timedelta),
    ("Decimal", Decimal),
    ("UUID", UUID),
    ("dict", Mapping),
    ("list", (list, tuple, Sequence, Set, np.ndarray, pa.Array, pa.ChunkedArray)),
)
_WIDER = {frozenset({"int", "float"}): "float", frozenset({"int", "Decimal"}): "Decimal"}
_PLAIN_TYPES: dict[str, pa.DataType] = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "float": pa.float64(),
    "str": pa.string(),
    "bytes": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timedelta": pa.duration("us"),
    "UUID": pa.uuid() if hasattr(pa, "uuid") else pa.null(),  # Arrow before 19 refuses them
}


@functools.lru_cache(maxsize=1024)
def _family(kind: type) -> str:
    found = next((name for name, kinds in _FAMILIES if issubclass(kind, kinds)), "")
    return "list" if not found and hasattr(kind, "__array__") and not issubclass(kind, np.generic) else found


def _unlike(values: list[Any], of: Callable[[Any], Any]) -> Misfit:
    """Returns the misfit for the first value of another kind than the first value."""
    there = [(row, value) for row, value in enumerate(values) if value is not None]
    first = there[0][1]
    row, value = next((row, value) for row, value in there if of(value) != of(first))
    return Misfit(f"got {shown(value)}, but an earlier value is {shown(first)}", "", row)


def _type_of_lists(values: list[Any]) -> pa.DataType:
    settled = []
    for row, value in enumerate(values):
        try:
            settled.append(None if value is None else items_of(value))
        except TypeError:
            raise Misfit(f"got {shown(value)}, which has no supported type", "", row) from None
    try:
        return pa.list_(type_of(list(chain.from_iterable(filter(None, settled)))))
    except Misfit as misfit:
        raise _in_one_of(settled, misfit, lambda value, at: f"[{at}]") from None


def _type_of_dicts(values: list[Any]) -> pa.DataType:
    """Returns a struct type if all dicts have the same keys, otherwise a map type, because a struct would add the other
    dicts' keys to each dict."""
    rows, there = zip(*((row, value) for row, value in enumerate(values) if value is not None), strict=True)
    names = there[0].keys()
    if not all(isinstance(name, str) for name in names) or any(value.keys() != names for value in there):
        return _type_of_maps(values)
    fields = []
    for name in names:
        try:
            fields.append(pa.field(name, type_of([value[name] for value in there])))
        except Misfit as misfit:
            raise misfit.within(f".{name}", None if misfit.row is None else rows[misfit.row]) from None
    return pa.struct(fields)


def _type_of_maps(values: list[Any]) -> pa.DataType:
    there = [value for value in values if value is not None]
    try:
        keys = type_of(list(chain.from_iterable(there)), key=True)
    except Misfit as misfit:
        raise _in_one_of(values, misfit, lambda value, at: ".key") from None
    if t.is_null(keys):
        row = next(row for row, value in enumerate(values) if value)
        raise Misfit("is None, which cannot be a map key", "", row, ".key")
    try:
        return pa.map_(keys, type_of(list(chain.from_iterable(value.values() for value in there))))
    except Misfit as misfit:
        raise _in_one_of(values, misfit, lambda value, at: f"[{shown(list(value)[at])}]") from None


def _type_of_times(values: list[Any]) -> pa.DataType:
    """Returns the date type, or the timestamp type in the zone that all values share. In another zone, a value would
    have another hour and perhaps another date."""
    zones: dict[Any, Any] = {}

    def zone_of(value: Any) -> Any:
        if isinstance(value, np.datetime64):
            return "date" if np.datetime_data(value.dtype)[0] == "D" else None
        if value.tzinfo not in zones:
            zones[value.tzinfo] = _zone_name(value)
        return zones[value.tzinfo]

    found = set()
    for row, value in enumerate(values):
        try:
            found |= set() if value is None else {zone_of(value)}
        except RAISED as error:
            how = "convert it: value.astimezone(timezone.utc)"
            raise Misfit(f"got {shown(value)}, whose time zone is not supported: {line_of(error)}", how, row) from error
    if len(found) > 1:
        misfit = _unlike(values, zone_of)
        misfit.how = "convert all to one zone: value.astimezone(timezone.utc)"
        raise misfit
    (zone,) = found
    return pa.date32() if zone == "date" else pa.timestamp("us", zone)


def _zone_name(value: Any) -> str | None:
    """Returns Arrow's name of a datetime's zone, None without a zone. Raises ValueError for a zone that Arrow would
    change."""
    offset = value.utcoffset()
    if offset is None:
        return None
    name: str = pa.array([value]).type.tz
    if name[0] in "+-" and offset % timedelta(minutes=1):
        raise ValueError(f"no time zone has the UTC offset of {shown(value)}")
    return name


def _type_of_decimals(values: list[Any]) -> pa.DataType:
    for row, value in enumerate(values):
        if isinstance(value, Decimal) and not value.is_finite():
            raise Misfit(f"got {shown(value)}, which a decimal column cannot hold", "send null instead", row)
    try:
        return pa.infer_type([None if value is None else exact_decimal(value) for value in values])
    except RAISED as error:
        raise Misfit(f"has Decimals without a common type: {line_of(error)}", "send at most 38 digits") from error


# -- kinds -------------------------------------------------------------------------------------------------

_KINDS: tuple[tuple[Callable[[pa.DataType], bool], type[Column]], ...] = (
    (t.is_boolean, _Bool),
    (t.is_integer, _Int),
    (t.is_float32, _Float32),
    (t.is_float64, _Float64),
    (t.is_decimal, _Decimal),
    (t.is_string, _Text),
    (t.is_large_string, _Text),
    (t.is_binary, _Bytes),
    (t.is_large_binary, _Bytes),
    (t.is_fixed_size_binary, _Bytes),
    (t.is_date, _Date),
    (t.is_timestamp, _Timestamp),
    (t.is_time, _Time),
    (t.is_duration, _Duration),
    (t.is_map, _Map),
    (t.is_struct, _Struct),
    (t.is_list, _List),
    (t.is_large_list, _List),
    (t.is_fixed_size_list, _List),
)


def column_of(field: pa.Field, key: bool = False) -> Column:
    """Returns the column that converts values of a field, or keys of a map if ``key`` is true."""
    if key and t.is_float32(field.type):
        return _Float32(field, key)
    return next((kind for told, kind in _KINDS if told(field.type)), _Other)(field)


def _python(value: Any) -> Any:
    return value.as_py() if isinstance(value, pa.Scalar) else value


def line_of(error: Exception) -> str:
    if isinstance(error, StateflowError):
        return error.what
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
