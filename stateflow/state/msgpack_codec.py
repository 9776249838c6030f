"""Plain data as msgpack.

msgpack lacks tuple, set, date, datetime, Decimal, UUID, bytearray, numpy arrays and ints beyond 64 bits. They are
stored
as extension types, whose numbers are a stored format and never change meaning. An array comes back in C order,
writable; numpy's scalars come back as Python's.
"""

from __future__ import annotations

import typing
from datetime import date, datetime
from decimal import Decimal
from numbers import Number
from typing import Any
from uuid import UUID

import msgpack

from stateflow.errors import DecodeError, EncodeError
from stateflow.state import key_order
from stateflow.state.numeric import is_numpy_bool, is_timedelta
from stateflow.types import shown

_TUPLE, _SET, _FROZENSET, _INT, _DATE, _AWARE, _NAIVE, _DECIMAL, _UUID, _BYTEARRAY, _ARRAY = range(1, 12)
#: kinds of numpy arrays whose bytes hold all of the data: numbers, bool, fixed text and bytes, times
_ARRAY_KINDS = "biufcSUmM"

#: types msgpack (with the extensions here) stores and returns unchanged, and whose values never change
IMMUTABLE = (type(None), bool, int, float, str, bytes, date, datetime, Decimal, UUID)
#: types as which their subclasses are stored
_SUBCLASSED: tuple[Any, ...] = (float, bytes, list, dict)
CONTAINERS = (list, dict, tuple, set, frozenset)
#: first bytes of msgpack's bytes types, with which it also writes a bytearray
_BIN = (b"\xc4", b"\xc5", b"\xc6")


def dumps(value: Any) -> bytes:
    """Encodes plain data. Raises EncodeError for a type that has no plain form, and for cycles."""
    try:
        data: bytes = msgpack.packb(value, default=_extend, strict_types=True)
        if any(mark in data for mark in _BIN) and _has_bytearray(value):
            data = msgpack.packb(_marked(value), default=_extend, strict_types=True)
    except EncodeError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EncodeError(
            f"a value has no stored form: {error}",
            remedy="store lists, dicts, sets, tuples, numbers, text, bytes, dates or dataclasses",
            type=type(value).__name__,
        ) from error
    return data


def loads(data: bytes) -> Any:
    """Inverse of :func:`dumps`. Raises DecodeError."""
    try:
        return msgpack.unpackb(data, ext_hook=_shorten, strict_map_key=False, use_list=True)
    except DecodeError:
        raise
    except (ValueError, TypeError, ArithmeticError, msgpack.UnpackException) as error:
        raise DecodeError(
            f"stored bytes are not msgpack: {error}",
            remedy="the data was written under another declaration or is damaged; restore a checkpoint",
            bytes=data[:32].hex(),
        ) from error


def _has_bytearray(value: Any) -> bool:
    """Returns whether there is a bytearray where msgpack does not call ``_extend``: the value itself, or in lists and
    dicts."""
    cls = value.__class__
    if cls is list:
        return any(map(_has_bytearray, value))
    if cls is dict:
        return any(map(_has_bytearray, value.values()))
    return cls is bytearray


def _marked(value: Any) -> Any:
    """Returns ``value`` with each bytearray as an extension type."""
    cls = value.__class__
    if cls is list:
        return [_marked(item) for item in value]
    if cls is dict:
        return {key: _marked(item) for key, item in value.items()}
    return msgpack.ExtType(_BYTEARRAY, bytes(value)) if cls is bytearray else value


def _extend(value: Any) -> Any:
    """Encodes an object whose exact type msgpack does not know; msgpack calls it for each."""
    match value:
        case tuple():
            return msgpack.ExtType(_TUPLE, dumps(list(value)))
        case set() | frozenset():
            # sorted, so that equal sets have equal bytes, in whichever order members were added
            members = sorted(dumps(member) for member in value)
            body = dumps(len(members)) + b"".join(members)
            return msgpack.ExtType(_SET if isinstance(value, set) else _FROZENSET, body)
        case int():
            if value.__class__ is not int and -(1 << 63) <= value < 1 << 64:
                return int(value)
            return msgpack.ExtType(_INT, str(int(value)).encode())
        case datetime():
            aware = value.utcoffset() is not None
            body = key_order.order_int(key_order.micros_of(value if aware else value.replace(tzinfo=None)))
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
    """Returns the declared item class of ``numpy.ndarray[args]``, a class of numpy's; None for any, and for several."""
    inner = typing.get_args(args[1]) if len(args) == 2 else ()
    item = (typing.get_origin(inner[0]) or inner[0]) if inner else None
    return item if isinstance(item, type) and any(map(_is_generic, item.__mro__)) else None


def _is_generic(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == ("numpy", "generic")


def has_items(array: Any, item: type) -> bool:
    """Returns whether the items of ``array`` are of ``item``, a class of numpy's.

    Two integer types that differ in name only, as C's ``long long`` and ``long`` may, count as one: the stored form of
    one comes back as the other.
    """
    import numpy as np  # loaded already, as there is an array

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
    import numpy as np  # here, as only programs with arrays need it

    unpacker = msgpack.Unpacker(None, max_buffer_size=len(body))
    unpacker.feed(body)
    dtype, shape = unpacker.unpack()
    # a copy, since bytes cannot be written to
    return np.frombuffer(body, np.dtype(dtype), offset=unpacker.tell()).reshape(shape).copy()


def _shorten(code: int, body: bytes) -> Any:
    match code:
        case 1:
            return tuple(loads(body))
        case 2 | 3:
            unpacker = msgpack.Unpacker(None, ext_hook=_shorten, strict_map_key=False, max_buffer_size=len(body) or 1)
            unpacker.feed(body)
            members = [unpacker.unpack() for _ in range(unpacker.unpack())]
            return set(members) if code == _SET else frozenset(members)
        case 4:
            return int(body)
        case 5:
            return date.fromordinal(int.from_bytes(body, "big"))
        case 6 | 7:
            return key_order.datetime_of(key_order.unorder_int(body), aware=code == _AWARE)
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
