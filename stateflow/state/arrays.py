"""Converts stored values to Arrow columns and numpy arrays and back.

A :class:`Layout` puts the values of one coder into numpy arrays, so that many are encoded and compared at a time. int,
float and bool values use one array, a fixed tuple of ints and floats uses one for each item, and values without a fixed
width use one array of Python objects.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from operator import attrgetter
from typing import Any, Final
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateflow.errors import DeclarationError, EncodeError, StateflowError
from stateflow.state import coders
from stateflow.state.cells import HEADER
from stateflow.state.coders import Coder
from stateflow.state.declare import signature_of_coder
from stateflow.state.encoding import as_json, exact_float
from stateflow.state.shapes import Signature

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Typed:
    """The Arrow type of a declared type, with conversions.

    Attributes:
        give: converts a stored value to a value that Arrow accepts.
        take: converts a value that Arrow returns to a stored value, as plain data.
        one_way: some part is given as JSON text, which ``take`` returns as text.
    """

    type: pa.DataType
    give: Convert
    take: Convert
    one_way: bool = False

    def array(self, values: Iterable[Any]) -> pa.Array:
        """Returns values as an Arrow array. Raises EncodeError for values that do not fit (an int beyond 64 bits)."""
        try:
            return pa.array([None if value is None else self.give(value) for value in values], self.type)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise EncodeError(
                f"a stored value does not fit a column of {self.type}: {str(error).splitlines()[0]}",
                remedy="read it in the operator, or declare the state as Any, which is read as JSON",
            ) from error


def _same(value: Any) -> Any:
    return value


def _of_text(kind: type) -> Convert:
    def take(value: Any) -> Any:
        try:
            return kind(value) if isinstance(value, str) else value
        except (ValueError, ArithmeticError):
            return value  # its coder refuses the text

    return take


def _aware(value: Any) -> Any:
    if isinstance(value, datetime) and value.tzinfo is None:
        raise EncodeError(
            "a datetime without a time zone does not name an instant",
            remedy="attach one: value.replace(tzinfo=timezone.utc), or declare it as Any, which is read as JSON",
        )
    return value


_UTC = pa.timestamp("us", tz="UTC")
_TEXT = Typed(pa.string(), as_json, _same, one_way=True)
_SCALARS = {
    "int": Typed(pa.int64(), _same, _same),
    "float": Typed(pa.float64(), _same, _same),
    "bool": Typed(pa.bool_(), _same, _same),
    "str": Typed(pa.string(), _same, _same),
    "bytes": Typed(pa.binary(), _same, _same),
    "bytearray": Typed(pa.binary(), bytes, lambda given: bytearray(given) if isinstance(given, bytes) else given),
    "date": Typed(pa.date32(), _same, _same),
    "datetime": Typed(_UTC, _aware, _aware),
    "Decimal": Typed(pa.string(), str, _of_text(Decimal)),
    "UUID": Typed(pa.string(), str, _of_text(UUID)),
    "None": Typed(pa.null(), _same, _same),
}
_NO_LIST = (str, bytes, Mapping)
_SEQUENCES: dict[str, Convert] = {"list": list, "set": set, "frozenset": frozenset, "tuple...": tuple}


def typed(signature: Signature) -> Typed:
    """Returns the Arrow type and conversions for a signature, see :mod:`stateflow.state.shapes`."""
    if isinstance(signature, str):
        return _SCALARS.get(signature, _TEXT)
    kind, inner = signature[0], signature[1:]
    if kind == "union":
        others = [each for each in inner if each != "None"]
        return _nullable(typed(others[0])) if len(others) == 1 else _TEXT
    if kind in _SEQUENCES:
        item = _nullable(typed(inner[0]))
        make = _SEQUENCES[kind]
        return Typed(
            pa.list_(item.type),
            lambda values: [item.give(value) for value in values],
            lambda given: given if isinstance(given, _NO_LIST) else make(map(item.take, given)),
            item.one_way,
        )
    if kind == "dict" and (inner[0] == "None" or (inner[0][0] == "union" and "None" in inner[0])):
        return _TEXT  # Arrow has no null as key
    if kind == "dict":
        return _map(*map(typed, inner))
    if kind == "tuple":
        names = [f"_{number}" for number in range(len(inner))]
        return _struct(names, [typed(each) for each in inner], _same, _tuple, set(names))
    if kind == "record" and len(inner) == 2 and inner[1]:
        names, fields = list(inner[1]), [typed(each) for each, _ in inner[1].values()]
        required = {name for name, (_, has_default) in inner[1].items() if not has_default}
        return _struct(names, fields, _fields_of(names), dict, required)
    return _TEXT


def _nullable(inner: Typed) -> Typed:
    return Typed(
        inner.type,
        lambda value: None if value is None else inner.give(value),
        lambda value: None if value is None else inner.take(value),
        inner.one_way,
    )


def _map(keys: Typed, values: Typed) -> Typed:
    values = _nullable(values)

    def take(given: Any) -> dict[Any, Any]:
        pairs = given.items() if isinstance(given, Mapping) else given
        taken = {keys.take(key): values.take(value) for key, value in pairs}
        if len(taken) != len(pairs):
            raise ValueError("two entries of a map have equal keys")
        return taken

    return Typed(
        pa.map_(keys.type, values.type),
        lambda value: [(keys.give(key), values.give(item)) for key, item in value.items()],
        take,
        keys.one_way or values.one_way,
    )


def _struct(names: list[str], fields: list[Typed], split: Convert, join: Convert, required: set[str]) -> Typed:
    fields = [_nullable(field) for field in fields]

    def give(value: Any) -> dict[str, Any]:
        return {n: field.give(item) for n, field, item in zip(names, fields, split(value), strict=True)}

    def take(given: Any) -> Any:
        if not isinstance(given, Mapping | list | tuple):
            return given  # an instance of a record
        if not isinstance(given, Mapping):
            given = dict(zip(names, given, strict=True))
        elif given.keys() - names or required - given.keys():
            raise ValueError(f"a struct of the fields {', '.join(given)} instead of {', '.join(names)}")
        return join({n: field.take(given[n]) for n, field in zip(names, fields, strict=True) if n in given})

    type_ = pa.struct([pa.field(n, field.type) for n, field in zip(names, fields, strict=True)])
    return Typed(type_, give, take, any(field.one_way for field in fields))


def _tuple(fields: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(fields.values())


def _fields_of(names: list[str]) -> Convert:
    """Returns a function that returns the values of a record's fields, in the order of ``names``.

    The record may also be a dict, if its class is not known.
    """
    get = attrgetter(*names)

    def fields(value: Any) -> Iterable[Any]:
        if isinstance(value, dict):
            return [value.get(name) for name in names]
        return (get(value),) if len(names) == 1 else get(value)

    return fields


@functools.lru_cache(1024)
def typed_of(coder: Coder[Any]) -> Typed:
    return typed(signature_of_coder(coder))


def taken(coder: Coder[Any] | None, given: Any) -> Any:
    """Converts ``given``, an item of an Arrow column, to a value that the coder accepts.

    An item that cannot be converted is returned unchanged; storing it then raises an error. Raises EncodeError for a
    datetime without a time zone, which would be stored within a list or record.
    """
    if given is None or coder is None:
        return given
    try:
        return coder.lifted(typed_of(coder).take(given))
    except EncodeError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, StateflowError):
        return given


Array = npt.NDArray[Any]
_BIAS: Final = np.uint64(1 << 63)
_ARROW_TYPES: dict[type[Coder[Any]], pa.DataType] = {
    coders.Int64: pa.int64(),
    coders.Float64: pa.float64(),
    coders.Bool: pa.bool_(),
    coders.Utf8: pa.string(),
    coders.Bytes: pa.binary(),
    coders.Timestamp: pa.timestamp("us", tz="UTC"),
    coders.Date: pa.date32(),
    coders.UUID: pa.uuid(),
}
#: type of decimals in a column without a value; it becomes any other decimal type
_NO_DECIMAL: Final = pa.decimal128(1, 0)

# -- Layouts ---------------------------------------------------------------------------------------------------------


def _arrow_type(coder: Coder[Any], decimals: pa.DataType | None = None) -> pa.DataType | None:
    """Returns the Arrow type of a coder's values, with ``decimals`` for Decimals; None: Arrow infers it from them."""
    if not isinstance(coder, coders.Tuple):
        return decimals if isinstance(coder, coders.Decimal) else _ARROW_TYPES.get(type(coder))
    types = [_arrow_type(item, decimals) for item in coder.items]
    if None in types:
        return None
    return pa.list_(types[0]) if coder.arity is None else pa.struct([(f"_{n}", each) for n, each in enumerate(types)])


class Layout(ABC):
    """The layout of the values of one coder in arrays. ``dtypes`` has one item for each array."""

    dtypes: tuple[Any, ...]
    #: whether the digits of a value depend on the other values of its column
    rescales = False

    def rescaled(self, arrays: list[Array], stored: list[Array], null: Array) -> list[Array]:
        """Returns ``arrays`` with the stored value in place of each one that equals it, if the layout rescales."""
        return arrays

    @abstractmethod
    def of_arrow(self, values: pa.Array) -> list[Array]:
        """Returns the arrays of ``values``, with arbitrary items for null. Raises EncodeError or ArrowException for
        values that do not fit."""

    @abstractmethod
    def to_arrow(self, arrays: list[Array], null: Array) -> pa.Array: ...

    @abstractmethod
    def of_value(self, value: Any) -> tuple[Any, ...]:
        """Returns the items of one decoded value, one per array."""

    def single(self, value: Any) -> list[Array]:
        """Returns arrays of length 1, with one decoded value."""
        arrays = [np.empty(1, dtype) for dtype in self.dtypes]
        for array, item in zip(arrays, self.of_value(value), strict=True):
            array[0] = item
        return arrays

    @abstractmethod
    def cells(self, arrays: list[Array]) -> list[bytes]:
        """Returns stored values with headers. Raises EncodeError with the ``index`` of the value in its ``where``."""

    def differ(self, before: list[Array], now: list[Array]) -> Array:
        """Returns, as bool for each row, whether its stored bytes differ between ``before`` and ``now``."""
        found: Array = np.zeros(len(now[0]), np.bool_)
        for old, new in zip(before, now, strict=True):
            # compared bit by bit, so that NaN equals NaN, and 0.0 differs from -0.0
            found |= old.view(f"u{old.dtype.itemsize}") != new.view(f"u{new.dtype.itemsize}")
        return found


class _Numbers(Layout):
    """Numbers in one or more arrays. ``kinds`` has a letter of ``_DTYPES`` for each array."""

    def __init__(self, kinds: str) -> None:
        self._kinds = kinds
        self.dtypes = tuple(np.dtype(_DTYPES[kind]) for kind in kinds)

    def of_arrow(self, values: pa.Array) -> list[Array]:
        return [_numbers(values, self._kinds[0])]

    def to_arrow(self, arrays: list[Array], null: Array) -> pa.Array:
        return pa.array(arrays[0], mask=null)

    def of_value(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def cells(self, arrays: list[Array]) -> list[bytes]:
        width = len(HEADER) + sum(dtype.itemsize for dtype in self.dtypes)
        table = np.empty((len(arrays[0]), width), np.uint8)
        table[:, : len(HEADER)] = np.frombuffer(HEADER, np.uint8)
        start = len(HEADER)
        for kind, array in zip(self._kinds, arrays, strict=True):
            encoded = _FORMS[kind](array).view(np.uint8).reshape(len(array), -1)
            table[:, start : start + encoded.shape[1]] = encoded
            start += encoded.shape[1]
        cells: list[bytes] = table.view(f"V{width}").ravel().tolist()
        return cells


#: b: bool, i: int as Int64 encodes it, q and d: int and float as struct encodes them
_DTYPES = {"b": "bool", "i": "int64", "q": "int64", "d": "float64"}
_FORMS: dict[str, Callable[[Array], Array]] = {
    "b": lambda array: array,
    "i": lambda array: (array.view(np.uint64) ^ _BIAS).astype(">u8"),
    "q": lambda array: array.astype(">i8"),
    "d": lambda array: array.astype(">f8"),
}


def _numbers(values: pa.Array, kind: str) -> Array:
    """Converts an Arrow array to a numpy array of a kind from ``_DTYPES``, with arbitrary items for null.

    Raises EncodeError for an array of another kind, and ArrowException for numbers that do not fit.
    """
    type_ = values.type
    fits = {"b": pa.types.is_boolean, "i": pa.types.is_integer, "q": pa.types.is_integer}
    if kind == "d":
        if not (pa.types.is_integer(type_) or pa.types.is_floating(type_)):
            raise EncodeError(f"values of Arrow type {type_} do not fit coder float64")
    elif not fits[kind](type_):
        raise EncodeError(f"values of Arrow type {type_} do not fit coder {'bool' if kind == 'b' else 'int64'}")
    if kind == "d" and pa.types.is_integer(type_):
        return _exact_floats(values)
    whole = values.cast({"b": pa.bool_(), "d": pa.float64()}.get(kind, pa.int64()))
    if whole.null_count:
        whole = whole.fill_null(False if kind == "b" else 0)
    found: Array = whole.to_numpy(zero_copy_only=False)
    return found


def _exact_floats(values: pa.Array) -> Array:
    """Converts integers to floats like :func:`~stateflow.state.encoding.exact_float`. Raises EncodeError."""
    whole: Array = (values.fill_null(0) if values.null_count else values).to_numpy(zero_copy_only=False)
    found: Array = whole.astype(np.float64)
    over = found >= 2.0 ** (np.iinfo(whole.dtype).bits - (whole.dtype.kind == "i"))
    wrong = over | (np.where(over, 0, found).astype(whole.dtype) != whole)
    if wrong.any():
        exact_float(int(whole[wrong][0]))  # raises the error
    return found


class _Structs(_Numbers):
    """A fixed tuple as an Arrow struct with the fields ``_0``, ``_1``, …"""

    def of_arrow(self, values: pa.Array) -> list[Array]:
        if not pa.types.is_struct(values.type) or values.type.num_fields != len(self.dtypes):
            raise EncodeError(f"values of Arrow type {values.type} are not structs of {len(self.dtypes)} fields")
        names = [f"_{number}" for number in range(len(self.dtypes))]
        places = [values.type.get_field_index(name) for name in names]
        if min(places) < 0:
            raise EncodeError(f"values of Arrow type {values.type} are not structs of the fields {', '.join(names)}")
        found = values.flatten()
        fields = [found[place] for place in places]
        for field in fields:
            if field.null_count > values.null_count:
                raise EncodeError("a field is null where its struct is not")
        return [_numbers(field, kind) for field, kind in zip(fields, self._kinds, strict=True)]

    def to_arrow(self, arrays: list[Array], null: Array) -> pa.Array:
        names = [f"_{number}" for number in range(len(arrays))]
        return pa.StructArray.from_arrays([pa.array(array) for array in arrays], names=names, mask=pa.array(null))

    def of_value(self, value: Any) -> tuple[Any, ...]:
        return tuple(value)


def _from_arrow(coder: Coder[Any]) -> Callable[[Any], Any]:
    """Returns a function that converts an item of ``to_pylist`` to a value of the coder.

    The dict of a fixed tuple and the list of a tuple of any length become tuples, and the text of a Decimal or UUID
    becomes one; all other items stay unchanged.
    """
    if isinstance(coder, coders.Decimal | coders.UUID):
        return _of_text(Decimal if isinstance(coder, coders.Decimal) else UUID)
    if not isinstance(coder, coders.Tuple):
        return _same
    items = list(map(_from_arrow, coder.items))
    if coder.arity is None:
        return lambda value: tuple(map(items[0], value)) if isinstance(value, list) else value

    names = [f"_{number}" for number in range(len(items))]

    def of_struct(value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() != set(names):
            return value
        return tuple([item(value[name]) for item, name in zip(items, names, strict=True)])

    return of_struct


def _to_arrow(coder: Coder[Any]) -> Callable[[Any], Any]:
    if isinstance(coder, coders.UUID):
        return lambda value: None if value is None else value.bytes
    if not isinstance(coder, coders.Tuple):
        return _same
    items = list(map(_to_arrow, coder.items))
    if coder.arity is None:
        return lambda value: None if value is None else list(map(items[0], value))

    def as_struct(value: Any) -> Any:
        if value is None:
            return None
        return {f"_{place}": item(each) for place, (item, each) in enumerate(zip(items, value, strict=True))}

    return as_struct


class _Objects(Layout):
    dtypes = (np.dtype(object),)

    def __init__(self, coder: Coder[Any], bytes_max: int) -> None:
        self._coder = coder
        self._bytes_max = bytes_max
        self._type, self._empty = _arrow_type(coder), _arrow_type(coder, _NO_DECIMAL)
        self.rescales = self._type is None and self._empty is not None
        self._from_arrow, self._to_arrow = _from_arrow(coder), _to_arrow(coder)

    def of_arrow(self, values: pa.Array) -> list[Array]:
        array = np.empty(len(values), object)
        for index, value in enumerate(map(self._from_arrow, values.to_pylist())):
            array[index] = value  # one by one: numpy would turn tuples into a second dimension
        coder, infers = self._coder, self._type is None
        for index, value in enumerate(array):
            if value is not None and type(value) is not coder.exact:
                payload = coder.encode(value)
                if infers:  # the type of the column that get_many returns follows the values
                    array[index] = coder.decode(payload)
        return [array]

    def to_arrow(self, arrays: list[Array], null: Array) -> pa.Array:
        values = arrays[0].copy()
        values[null] = None
        try:
            return pa.array(map(self._to_arrow, values), self._empty if null.all() else self._type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise EncodeError(
                f"stored values do not fit one Arrow column: {str(error).splitlines()[0]}",
                remedy="store finite decimals of at most 76 digits, or give the state a ttl, which makes them text",
            ) from error

    def rescaled(self, arrays: list[Array], stored: list[Array], null: Array) -> list[Array]:
        for index in np.flatnonzero(~null):
            try:
                if stored[0][index] == arrays[0][index]:
                    arrays[0][index] = stored[0][index]
            except ArithmeticError:
                pass  # a signaling NaN equals nothing
        return arrays

    def of_value(self, value: Any) -> tuple[Any, ...]:
        return (value,)

    def cells(self, arrays: list[Array]) -> list[bytes]:
        found = []
        for index, value in enumerate(arrays[0]):
            try:
                payload = self._coder.encode(value)
            except EncodeError as error:
                error.where["index"] = index
                raise
            if len(payload) > self._bytes_max:
                raise EncodeError(
                    f"a value takes {len(payload)} bytes, at most {self._bytes_max} are allowed", index=index
                )
            found.append(HEADER + payload)
        return found

    def differ(self, before: list[Array], now: list[Array]) -> Array:
        encode = self._coder.encode

        def differs(old: Any, new: Any) -> bool:
            return old is not new and encode(old) != encode(new)

        return np.fromiter(map(differs, before[0], now[0]), np.bool_, len(now[0]))


def is_converted(coder: Coder[Any]) -> bool:
    """Returns whether Arrow makes no column of the values themselves, but of the values that :class:`Typed` gives."""
    if not isinstance(coder, coders.Tuple):
        return isinstance(coder, coders.Struct)
    return any(isinstance(item, coders.UUID) or is_converted(item) for item in coder.items)


def layout_of(coder: Coder[Any], bytes_max: int) -> Layout:
    """Returns the layout for a coder. Raises DeclarationError for a coder of values that can change in place."""
    kinds = {coders.Int64: "i", coders.Float64: "d", coders.Bool: "b"}
    if type(coder) in kinds:
        return _Numbers(kinds[type(coder)])
    if isinstance(coder, coders.Tuple) and coder.name.startswith("packed "):
        return _Structs("".join("q" if isinstance(item, coders.Int64) else "d" for item in coder.items))
    if coder.mutable:
        raise DeclarationError(f"values of coder {coder.name} can change in place")
    return _Objects(coder, bytes_max)


# -- Arrays of any kind ----------------------------------------------------------------------------------------------

#: number of indices that are scanned in the time in which one is sorted
SCANNED_PER_ROW = 64


def grown(array: Array, length: int) -> Array:
    """Returns a copy with room for at least ``length`` items, filled up with zeros."""
    bigger = np.zeros(max(length, 2 * len(array), 1024), array.dtype)
    bigger[: len(array)] = array
    return bigger


def distinct(indices: Array, length: int) -> Array:
    """Returns each index once, in ascending order. All of them are less than ``length``."""
    if len(indices) * SCANNED_PER_ROW > length:
        found = np.zeros(length, np.bool_)
        found[indices] = True
        return np.flatnonzero(found)
    ascending = np.sort(indices)
    first = np.ones(len(ascending), np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return ascending[first]  # np.unique, which hashes the indices first, takes four times as long
