"""Values of declared types as Arrow columns, and back.

The declaration decides the type of a column, not what happens to be stored:

======================================  ===================================================================
int, float, bool, str, bytes, date      int64, double, bool, string, binary, date32
datetime                                timestamp[us, UTC]
Decimal, UUID                           string, which loses no digit
list, set, frozenset, tuple[T, ...]     list
dict[K, V]                              map; JSON where a key may be None
tuple[A, B]                             struct of ``_0``, ``_1``, …
a record                                struct of its fields
Optional[T]                             as T, null for None
Any, other unions, numpy.ndarray, …     string: JSON
======================================  ===================================================================
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from operator import attrgetter
from typing import Any
from uuid import UUID

import pyarrow as pa

from stateflow.errors import EncodeError, StateflowError
from stateflow.state import coders
from stateflow.state.coders import Coder
from stateflow.state.declare import Nothing
from stateflow.state.encoding import hints, is_record
from stateflow.state.shapes import Signature

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Typed:
    """Arrow type of a declared type, with conversions.

    ``give``: converts a value to what Arrow takes; ``take``: converts what Arrow returns to the value, as plain data.
    """

    type: pa.DataType
    give: Convert
    take: Convert

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
    return lambda value: kind(value) if isinstance(value, str) else value


def _json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes() | bytearray():
            return value.hex()
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        case dict():
            return [[_plain(key), _plain(item)] for key, item in value.items()]
        case list() | tuple() | set() | frozenset():
            return [_plain(item) for item in value]
    if is_record(type(value)):
        return {name: _plain(getattr(value, name)) for name in hints(type(value))}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_UTC = pa.timestamp("us", tz="UTC")
_TEXT = Typed(pa.string(), _json, _same)
_SCALARS = {
    "int": Typed(pa.int64(), _same, _same),
    "float": Typed(pa.float64(), _same, _same),
    "bool": Typed(pa.bool_(), _same, _same),
    "str": Typed(pa.string(), _same, _same),
    "bytes": Typed(pa.binary(), _same, _same),
    "bytearray": Typed(pa.binary(), bytes, bytearray),
    "date": Typed(pa.date32(), _same, _same),
    "datetime": Typed(_UTC, _same, _same),
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
        )
    if kind == "dict" and (inner[0] == "None" or (inner[0][0] == "union" and "None" in inner[0])):
        return _TEXT  # Arrow has no null as key
    if kind == "dict":
        return _map(*map(typed, inner))
    if kind == "tuple":
        return _struct([f"_{number}" for number in range(len(inner))], [typed(each) for each in inner], _same, _tuple)
    if kind == "record" and len(inner) == 2 and inner[1]:
        names = list(inner[1])
        return _struct(names, [typed(each) for each, _ in inner[1].values()], _fields_of(names), dict)
    return _TEXT


def _nullable(inner: Typed) -> Typed:
    return Typed(
        inner.type,
        lambda value: None if value is None else inner.give(value),
        lambda value: None if value is None else inner.take(value),
    )


def _map(keys: Typed, values: Typed) -> Typed:
    values = _nullable(values)

    def take(given: Any) -> dict[Any, Any]:
        pairs = given.items() if isinstance(given, Mapping) else given
        return {keys.take(key): values.take(value) for key, value in pairs}

    return Typed(
        pa.map_(keys.type, values.type),
        lambda value: [(keys.give(key), values.give(item)) for key, item in value.items()],
        take,
    )


def _struct(names: list[str], fields: list[Typed], split: Convert, join: Convert) -> Typed:
    fields = [_nullable(field) for field in fields]

    def give(value: Any) -> dict[str, Any]:
        return {n: field.give(item) for n, field, item in zip(names, fields, split(value), strict=True)}

    def take(given: Any) -> Any:
        if not isinstance(given, Mapping | list | tuple):
            return given  # an instance of a record
        items = [given.get(n) for n in names] if isinstance(given, Mapping) else given
        return join({n: field.take(item) for n, field, item in zip(names, fields, items, strict=True)})

    return Typed(pa.struct([pa.field(n, field.type) for n, field in zip(names, fields, strict=True)]), give, take)


def _tuple(fields: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(fields.values())


def _fields_of(names: list[str]) -> Convert:
    get = attrgetter(*names)
    return (lambda value: (get(value),)) if len(names) == 1 else get


_SIGNATURES: dict[type[Coder[Any]], Signature] = {
    coders.Int64: "int",
    coders.Float64: "float",
    coders.Bool: "bool",
    coders.Utf8: "str",
    coders.Bytes: "bytes",
    coders.Timestamp: "datetime",
    coders.Date: "date",
    coders.Decimal: "Decimal",
    coders.UUID: "UUID",
    Nothing: "None",
}


def signature_of_coder(coder: Coder[Any]) -> Signature:
    """Returns the signature of the type that a coder codes; "any" for a coder that does not tell."""
    if isinstance(coder, coders.Tuple):
        return ["tuple" if coder.arity is not None else "tuple...", *map(signature_of_coder, coder.items)]
    return _SIGNATURES.get(type(coder), coder.types if coder.types is not None else "any")


@functools.lru_cache(1024)
def typed_of(coder: Coder[Any]) -> Typed:
    return typed(signature_of_coder(coder))


def taken(coder: Coder[Any] | None, given: Any) -> Any:
    """Returns the value of ``coder`` for ``given``, which a reader of its column received.

    Input that cannot be converted is returned as it is; storing it then raises.
    """
    if given is None or coder is None:
        return given
    try:
        return coder.lifted(typed_of(coder).take(given))
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, StateflowError):
        return given
