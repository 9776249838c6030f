"""Encodings on which coders and row keys are built.

*Exact conversions* convert a number to another type of number, or raise an error if the result would not be equal.

*Ordered byte forms* compare, byte by byte, in the order of their values. Their functions accept every value of their
stated input, and can be reversed.

*Plain data* is stored as msgpack. msgpack lacks tuple, set, date, datetime, Decimal, UUID, bytearray, numpy arrays and
ints beyond 64 bits. They are stored as extension types, with numbers that never change their meaning. A decoded array
is writable and in C order; numpy's scalars are decoded as Python's.

*Records* are dataclasses, msgspec structs and pydantic models. The functions here return their fields and rebuild a
record from fields. This module imports neither msgspec nor pydantic, because a program that declares such a type has
imported its package.

*JSON* shows a value to readers that have no type for it. It is never read back.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import types
import typing
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from numbers import Number, Real
from typing import Any, Final
from uuid import UUID

import msgpack

from stateflow.errors import DeclarationError, DecodeError, EncodeError
from stateflow.types import shown

_U64 = struct.Struct(">Q")
_F64 = struct.Struct(">d")
_BIAS = 1 << 63
_ALL = (1 << 64) - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NAIVE = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_INVERT = bytes(255 - byte for byte in range(256))

_TUPLE, _SET, _FROZENSET, _INT, _DATE, _AWARE, _NAIVE, _DECIMAL, _UUID, _BYTEARRAY, _ARRAY = range(1, 12)
#: most tuples and sets around a stored value; reading each takes about 40 KiB of a thread's stack
NESTED_MAX: Final = 64
#: kinds of numpy arrays with all of their data in their bytes, which are numbers, bool, fixed text and bytes, and times
_ARRAY_KINDS = "biufcSUmM"

#: immutable types that msgpack, with the extensions here, stores and returns unchanged
IMMUTABLE = (type(None), bool, int, float, str, bytes, date, datetime, Decimal, UUID)
#: types as which instances of their subclasses are stored
_SUBCLASSED: tuple[Any, ...] = (float, bytes, list, dict)
CONTAINERS = (list, dict, tuple, set, frozenset)
#: first bytes of msgpack's bytes types, with which it also writes a bytearray
_BIN = (b"\xc4", b"\xc5", b"\xc6")

# -- Exact conversions of numbers ------------------------------------------------------------------------------------


def is_numpy_bool(value: object) -> bool:
    """Returns whether a value is numpy's bool, which is not Python's bool, without importing numpy."""
    cls = value.__class__
    return cls.__module__ == "numpy" and cls.__name__ in ("bool", "bool_")


def is_timedelta(value: object) -> bool:
    """Returns whether a value is numpy's timedelta64, which numpy counts among the integers."""
    return value.__class__.__module__ == "numpy" and value.__class__.__name__ == "timedelta64"


def exact_float(value: Any) -> float:
    """Returns the float that equals a real number; NaN stays NaN.

    Raises TypeError for a value that is not a real number (a bool is not one), and EncodeError for a number that no
    float equals.
    """
    if value.__class__ is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real) or is_timedelta(value):
        raise TypeError(f"a {type(value).__name__} is not a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.nan
    if found == value or value != value:  # noqa: PLR0124 - NaN
        return found
    raise EncodeError(
        f"no float equals {shown(value)}",
        remedy="declare int or decimal.Decimal, or round the number before storing it",
    )


def exact_decimal(value: Any) -> Decimal:
    """Returns a Decimal as it is and an int as a Decimal. Raises TypeError for anything else."""
    if isinstance(value, Decimal):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(int(value))
    raise TypeError(f"a {type(value).__name__} is neither int nor Decimal")


# -- Ordered byte forms ----------------------------------------------------------------------------------------------


def order_int(value: int) -> bytes:
    """Encodes an int as 8 bytes with the sign bit flipped. Raises struct.error outside the 64-bit range."""
    return _U64.pack(value + _BIAS)


def unorder_int(data: bytes) -> int:
    number: int = _U64.unpack(data)[0]
    return number - _BIAS


def order_float(value: float) -> bytes:
    """Encodes a float as 8 bytes; -0.0 becomes 0.0. Raises EncodeError for NaN, which has no place in an order."""
    if math.isnan(value):
        raise EncodeError("NaN cannot be a key", remedy="drop or replace NaN keys before they reach the operator")
    bits: int = _U64.unpack(_F64.pack(value + 0.0))[0]
    return _U64.pack(bits ^ (_ALL if bits & _BIAS else _BIAS))


def unorder_float(data: bytes) -> float:
    bits: int = _U64.unpack(data)[0]
    number: float = _F64.unpack(_U64.pack(bits ^ (_BIAS if bits & _BIAS else _ALL)))[0]
    return number


def micros_of(value: datetime) -> int:
    """Returns microseconds since 1970-01-01, in UTC for an aware datetime and in wall time for a naive one.

    Raises EncodeError for a pandas time that has nanoseconds.
    """
    nanoseconds: int = 0 if value.__class__ is datetime else getattr(value, "nanosecond", 0)
    if nanoseconds:
        raise EncodeError(
            "a time has nanoseconds, which would be lost", remedy='round it: value.floor("us")', value=str(value)
        )
    return (value - (_EPOCH_NAIVE if value.tzinfo is None else _EPOCH)) // _MICROSECOND


def order_moment(value: datetime) -> bytes:
    """Encodes the microseconds of a datetime, see :func:`micros_of`.

    Raises EncodeError for nanoseconds, and for a moment before the year 1 or after the year 9999 in UTC, in which
    datetimes are decoded.
    """
    micros = micros_of(value)
    if not _FIRST_US <= micros <= _LAST_US:
        raise EncodeError(
            "a time is outside the years 1 to 9999 in UTC, as which it would be read",
            remedy="use a time within these years",
            value=value.isoformat(),
        )
    return order_int(micros)


def datetime_of(micros: int, *, aware: bool) -> datetime:
    """Inverse of :func:`micros_of`; aware datetimes are in UTC."""
    try:
        return (_EPOCH if aware else _EPOCH_NAIVE) + timedelta(microseconds=micros)
    except OverflowError as error:
        raise DecodeError(f"{micros} microseconds since 1970 is beyond Python's dates") from error


def order_decimal(value: Decimal) -> bytes:
    """Encodes a Decimal as sign byte, exponent and digits, which are the same for equal decimals such as 1.0 and 1.00.

    Raises EncodeError for NaN and infinity.
    """
    if not value.is_finite():
        raise EncodeError(
            f"{value} cannot be a key", remedy="use finite decimals: only these have a place in the key order"
        )
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return b"\x01"
    body = order_int(int(exponent) + len(text)) + text.rstrip("0").encode()
    return b"\x00" + body.translate(_INVERT) + b"\xff" if sign else b"\x02" + body


def unorder_decimal(data: bytes) -> Decimal:
    """Inverse of :func:`order_decimal`. The result is in a canonical form.

    In this form there are no trailing zeros after the point, and an exponent from 1 to 20 is written as zeros.
    """
    if data == b"\x01":
        return Decimal(0)
    body = data[1:] if data[0] == 2 else data[1:-1].translate(_INVERT)
    text = body[8:].decode("ascii")
    exponent = unorder_int(body[:8]) - len(text)
    if 0 < exponent <= 20:
        text, exponent = text + "0" * exponent, 0
    return Decimal((0 if data[0] == 2 else 1, tuple(map(int, text)), exponent))


_FIRST_US, _LAST_US = micros_of(datetime.min), micros_of(datetime.max)


def join_ordered(parts: Iterable[bytes]) -> bytes:
    """Concatenates parts in a form that can be split again, and that sorts byte by byte as the sequences of parts do.

    A zero byte inside a part is written ``00 FF``; ``00 00`` ends a part.
    """
    return b"".join([part.replace(b"\x00", b"\x00\xff") + b"\x00\x00" for part in parts])


def split_ordered(data: bytes) -> list[bytes]:
    parts = []
    start = 0
    while start < len(data):
        end = data.find(b"\x00\x00", start)
        if end < 0:
            raise DecodeError("a stored tuple key is truncated", bytes=len(data))
        parts.append(data[start:end].replace(b"\x00\xff", b"\x00"))
        start = end + 2
    return parts


# -- Plain data as msgpack -------------------------------------------------------------------------------------------


def too_deep(value: object) -> EncodeError:
    return EncodeError(
        "a value is nested too deeply to be stored",
        remedy="store its parts as entries of a map or elements of a list",
        type=type(value).__name__,
    )


def dumps(value: Any, within: int = 0) -> bytes:
    """Encodes plain data. Raises EncodeError for a type that has no plain form, for cycles, and for tuples and sets
    nested in more than ``NESTED_MAX`` others.

    Args:
        within: number of tuples and sets around the value.
    """
    extend = _EXTEND[within]
    try:
        data: bytes = msgpack.packb(value, default=extend, strict_types=True)
        if any(mark in data for mark in _BIN) and _has_bytearray(value):
            data = msgpack.packb(_marked(value), default=extend, strict_types=True)
    except EncodeError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EncodeError(
            f"a value has no stored form: {error}",
            remedy="store lists, dicts, sets, tuples, numbers, text, bytes, dates or dataclasses",
            type=type(value).__name__,
        ) from error
    return data


def loads(data: bytes, within: int = 0) -> Any:
    """Inverse of :func:`dumps`. Raises DecodeError."""
    try:
        return msgpack.unpackb(data, ext_hook=_SHORTEN[within], strict_map_key=False, use_list=True)
    except DecodeError:
        raise
    except (ValueError, TypeError, ArithmeticError, msgpack.UnpackException) as error:
        raise DecodeError(
            f"stored bytes are not msgpack: {error}",
            remedy="the data was written under another declaration or is damaged; restore a checkpoint",
            bytes=data[:32].hex(),
        ) from error


def _has_bytearray(value: Any) -> bool:
    """Returns whether the value is a bytearray, or contains one in lists and dicts.

    msgpack does not call ``_extend`` for a bytearray.
    """
    if isinstance(value, list):
        return any(map(_has_bytearray, value))
    if isinstance(value, dict):
        return any(map(_has_bytearray, value.values()))
    return value.__class__ is bytearray


def _marked(value: Any) -> Any:
    """Returns ``value`` with each bytearray as an extension type."""
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    return msgpack.ExtType(_BYTEARRAY, bytes(value)) if value.__class__ is bytearray else value


def _extend(within: int, value: Any) -> Any:
    """Encodes an object of a type that msgpack does not know. msgpack calls this function for each such object."""
    match value:
        case tuple() | set() | frozenset() if within >= NESTED_MAX:
            raise too_deep(value)
        case tuple():
            return msgpack.ExtType(_TUPLE, dumps(list(value), within + 1))
        case set() | frozenset():
            # sorted, so that equal sets have equal bytes, in whichever order members were added
            members = sorted(dumps(member, within + 1) for member in value)
            body = dumps(len(members)) + b"".join(members)
            return msgpack.ExtType(_SET if isinstance(value, set) else _FROZENSET, body)
        case int():
            if value.__class__ is not int and -(1 << 63) <= value < 1 << 64:
                return int(value)
            return msgpack.ExtType(_INT, str(int(value)).encode())
        case datetime():
            aware = value.utcoffset() is not None
            body = order_moment(value if aware else value.replace(tzinfo=None))
            return msgpack.ExtType(_AWARE if aware else _NAIVE, body)
        case date():
            return msgpack.ExtType(_DATE, value.toordinal().to_bytes(4, "big"))
        case Decimal():
            return msgpack.ExtType(_DECIMAL, str(value).encode())
        case UUID():
            return msgpack.ExtType(_UUID, value.bytes)
        case str():
            return str.__str__(value)  # the value of an enumeration's member, not its name
    if is_array_type(value.__class__):
        return _extend_array(value)
    if is_numpy_bool(value):
        return bool(value)
    if isinstance(value, Number) and hasattr(value, "item") and not is_timedelta(value):  # numpy.int64, numpy.float32
        return value.item()
    for plain_type in _SUBCLASSED:
        if isinstance(value, plain_type):
            return plain_type(value)
    raise EncodeError(
        f"a value of type {type(value).__name__} has no stored form",
        remedy="store lists, dicts, sets, tuples, numbers, text, bytes, dates or dataclasses",
        value=shown(value),
    )


def is_array_type(type_: Any) -> bool:
    """Returns whether a type is numpy.ndarray, without importing numpy."""
    return getattr(type_, "__module__", "") == "numpy" and getattr(type_, "__name__", "") == "ndarray"


def array_item(args: tuple[Any, ...]) -> type | None:
    """Returns numpy's item class that ``numpy.ndarray[args]`` declares; None if it allows any or several classes."""
    inner = typing.get_args(args[1]) if len(args) == 2 else ()
    item = (typing.get_origin(inner[0]) or inner[0]) if inner else None
    return item if isinstance(item, type) and any(map(_is_generic, item.__mro__)) else None


def _is_generic(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == ("numpy", "generic")


def has_items(array: Any, item: type) -> bool:
    """Returns whether the items of ``array`` are of the numpy class ``item``.

    Two integer types that differ in name only, as C's ``long long`` and ``long`` may, count as one, because the stored
    form of one may be decoded as the other.
    """
    import numpy as np  # already loaded, because there is an array

    if issubclass(array.dtype.type, item):
        return True
    abstract = item in (np.integer, np.signedinteger, np.unsignedinteger)
    return issubclass(item, np.integer) and not abstract and bool(np.dtype(item) == array.dtype.newbyteorder("="))


def _extend_array(array: Any) -> msgpack.ExtType:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise EncodeError(
            f"an array of dtype {array.dtype} has no stored form",
            remedy="store numbers, bool, fixed text or times, or a list",
        )
    return msgpack.ExtType(_ARRAY, dumps([array.dtype.str, list(array.shape)]) + array.tobytes())


def _shorten_array(body: bytes) -> Any:
    import numpy as np  # imported here, because only programs with arrays need it

    unpacker = msgpack.Unpacker(None, max_buffer_size=len(body))
    unpacker.feed(body)
    dtype, shape = unpacker.unpack()
    # a copy, since bytes cannot be written to
    return np.frombuffer(body, np.dtype(dtype), offset=unpacker.tell()).reshape(shape).copy()


def _shorten(within: int, code: int, body: bytes) -> Any:
    match code:
        case 1 | 2 | 3 if within >= NESTED_MAX:
            raise DecodeError("stored tuples or sets are nested too deeply", remedy="restore a checkpoint")
        case 1:
            return tuple(loads(body, within + 1))
        case 2 | 3:
            hook = _SHORTEN[within + 1]
            unpacker = msgpack.Unpacker(None, ext_hook=hook, strict_map_key=False, max_buffer_size=len(body) or 1)
            unpacker.feed(body)
            members = [unpacker.unpack() for _ in range(unpacker.unpack())]
            return set(members) if code == _SET else frozenset(members)
        case 4:
            return int(body)
        case 5:
            return date.fromordinal(int.from_bytes(body, "big"))
        case 6 | 7:
            return datetime_of(unorder_int(body), aware=code == _AWARE)
        case 8:
            return Decimal(body.decode("ascii"))
        case 9:
            return UUID(bytes=body)
        case 10:
            return bytearray(body)
        case 11:
            return _shorten_array(body)
    raise DecodeError(
        f"stored msgpack has extension type {code}, which this version does not know",
        remedy="run the newer stateflow version that wrote it",
    )


#: functions for values within 0, 1, … tuples and sets
_EXTEND = [partial(_extend, within) for within in range(NESTED_MAX + 1)]
_SHORTEN = [partial(_shorten, within) for within in range(NESTED_MAX + 1)]

# -- Records ---------------------------------------------------------------------------------------------------------


class _Missing:
    """Marks a field without a default."""


REQUIRED: Final = _Missing()


def is_record(type_: Any) -> bool:
    return isinstance(type_, type) and (dataclasses.is_dataclass(type_) or _is_msgspec(type_) or _is_pydantic(type_))


def _is_msgspec(cls: type) -> bool:
    return hasattr(cls, "__struct_fields__") and hasattr(cls, "__struct_config__")


def _is_pydantic(cls: type) -> bool:
    return hasattr(cls, "__pydantic_fields__") and hasattr(cls, "model_construct")


def _is_frozen(cls: Any) -> bool:
    if dataclasses.is_dataclass(cls):
        return bool(cls.__dataclass_params__.frozen)  # type: ignore[union-attr]
    if _is_msgspec(cls):
        return bool(cls.__struct_config__.frozen)
    return bool(cls.model_config.get("frozen"))


def hints(cls: Any) -> dict[str, Any]:
    """Returns the declared types by field. Raises DeclarationError."""
    if _is_pydantic(cls):
        if not cls.__pydantic_complete__:
            cls.model_rebuild(raise_errors=False)
        if cls.model_config.get("extra") == "allow":
            raise DeclarationError(
                f"{cls.__name__} accepts undeclared fields, which would not be stored",
                remedy="set extra to 'ignore' or 'forbid', or store a dict",
            )
        return {name: field.annotation for name, field in cls.__pydantic_fields__.items()}
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise DeclarationError(
            f"a field type of {cls.__name__} cannot be resolved: {error}",
            remedy="define the named type at module level, before the operator",
        ) from error
    return {name: hints[name] for name in field_names(cls)}


def field_names(cls: Any) -> list[str]:
    if _is_pydantic(cls):
        return list(cls.__pydantic_fields__)
    return list(cls.__struct_fields__) if _is_msgspec(cls) else [field.name for field in dataclasses.fields(cls)]


def defaults(cls: Any) -> dict[str, Any]:
    """Returns field → function that makes the default of the field if it is not stored.

    In place of a function, REQUIRED means that the field has no default, and None that ``builder`` adds the default.
    """
    if _is_pydantic(cls):
        fields = cls.__pydantic_fields__.items()
        return {name: REQUIRED if field.is_required() else None for name, field in fields}
    if _is_msgspec(cls):
        names, defaults = cls.__struct_fields__, cls.__struct_defaults__
        found: dict[str, Any] = dict.fromkeys(names, REQUIRED)
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            if type(default).__name__ != "NoDefaultType":
                found[name] = None
        return found
    found = dict.fromkeys((field.name for field in dataclasses.fields(cls)), REQUIRED)
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = lambda default=field.default: default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory
    return found


def builder(cls: Any) -> Callable[[dict[str, Any]], Any]:
    """Returns a function that makes an instance from field values.

    The function does not run ``__init__`` or validation of dataclasses and models, because stored values were accepted
    before.
    """
    if _is_pydantic(cls):
        return partial(_built_model, cls)
    if _is_msgspec(cls):
        return lambda values: cls(**values)

    def build(values: dict[str, Any]) -> Any:
        value = object.__new__(cls)
        for name, field in values.items():
            object.__setattr__(value, name, field)
        return value

    return build


def _built_model(cls: Any, values: dict[str, Any]) -> Any:
    # not by model_construct, which looks values up by alias and runs model_post_init, so that a read would be a change
    value = cls.__new__(cls)
    fields: dict[str, Any] = {}
    for name, field in cls.__pydantic_fields__.items():
        missing = name not in values
        fields[name] = field.get_default(call_default_factory=True, validated_data=fields) if missing else values[name]
    object.__setattr__(value, "__dict__", fields)
    object.__setattr__(value, "__pydantic_fields_set__", set(values))
    if not cls.__pydantic_root_model__:
        object.__setattr__(value, "__pydantic_extra__", None)
        object.__setattr__(value, "__pydantic_private__", None)
        if cls.__private_attributes__:
            # the public ModelPrivateAttr.get_default takes other arguments in each version of pydantic
            from pydantic._internal._model_construction import init_private_attributes

            init_private_attributes(value, None)
    return value


def bare(type_: Any) -> Any:
    """Returns ``type_`` without NewType and Annotated around it."""
    while True:
        if hasattr(type_, "__supertype__"):
            type_ = type_.__supertype__
        elif typing.get_origin(type_) is typing.Annotated:
            type_ = typing.get_args(type_)[0]
        else:
            return type_


def is_union(type_: Any) -> bool:
    return typing.get_origin(type_) in (typing.Union, types.UnionType)


def is_immutable(type_: Any, _within: tuple[type, ...] = ()) -> bool:
    """Returns whether neither a value of ``type_`` nor anything in it can change in place."""
    type_ = bare(type_)
    origin, args = typing.get_origin(type_), typing.get_args(type_)
    if type_ in IMMUTABLE or type_ is None or type_ in _within:
        return True
    if is_union(type_) or origin in (tuple, frozenset):
        return all(arg is Ellipsis or is_immutable(arg, _within) for arg in args)
    if is_record(type_):
        return _is_frozen(type_) and all(is_immutable(hint, (*_within, type_)) for hint in hints(type_).values())
    return False


# -- Values as JSON --------------------------------------------------------------------------------------------------


def as_json(value: Any) -> str:
    """Returns a stored value as JSON text, for readers that have no type for it."""
    return json.dumps(_for_json(value), ensure_ascii=False)


def _for_json(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes() | bytearray():
            return value.hex()
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _for_json(item) for key, item in value.items()}
        case dict():
            return [[_for_json(key), _for_json(item)] for key, item in value.items()]
        case list() | tuple() | set() | frozenset():
            return [_for_json(item) for item in value]
    if is_record(type(value)):
        return {name: _for_json(getattr(value, name)) for name in hints(type(value))}
    if hasattr(value, "tolist"):
        return _for_json(value.tolist())
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
