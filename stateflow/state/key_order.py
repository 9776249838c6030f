"""Byte forms that compare, byte by byte, in the order of the values they stand for.

All functions are total on their stated input and reversible; coders and row keys build on them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from stateflow.errors import DecodeError, EncodeError

_U64 = struct.Struct(">Q")
_F64 = struct.Struct(">d")
_BIAS = 1 << 63
_ALL = (1 << 64) - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NAIVE = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_INVERT = bytes(255 - byte for byte in range(256))


def order_int(value: int) -> bytes:
    """8 bytes, sign bit flipped. Raises struct.error outside the 64-bit range."""
    return _U64.pack(value + _BIAS)


def unorder_int(data: bytes) -> int:
    number: int = _U64.unpack(data)[0]
    return number - _BIAS


def order_float(value: float) -> bytes:
    """8 bytes; -0.0 becomes 0.0. Raises EncodeError for NaN, which has no place in an order."""
    if math.isnan(value):
        raise EncodeError("NaN cannot be a key", remedy="drop or replace NaN keys before they reach the operator")
    bits: int = _U64.unpack(_F64.pack(value + 0.0))[0]
    return _U64.pack(bits ^ (_ALL if bits & _BIAS else _BIAS))


def unorder_float(data: bytes) -> float:
    bits: int = _U64.unpack(data)[0]
    number: float = _F64.unpack(_U64.pack(bits ^ (_BIAS if bits & _BIAS else _ALL)))[0]
    return number


def micros_of(value: datetime) -> int:
    """Microseconds since 1970-01-01, in UTC for an aware datetime and in wall time for a naive one.

    Raises EncodeError for a pandas time that has nanoseconds.
    """
    nanoseconds: int = 0 if value.__class__ is datetime else getattr(value, "nanosecond", 0)
    if nanoseconds:
        raise EncodeError(
            "a time has nanoseconds, which would be lost", remedy='round it: value.floor("us")', value=str(value)
        )
    return (value - (_EPOCH_NAIVE if value.tzinfo is None else _EPOCH)) // _MICROSECOND


def datetime_of(micros: int, *, aware: bool) -> datetime:
    """Inverse of :func:`micros_of`; aware datetimes come back in UTC."""
    try:
        return (_EPOCH if aware else _EPOCH_NAIVE) + timedelta(microseconds=micros)
    except OverflowError as error:
        raise DecodeError(f"{micros} microseconds since 1970 is beyond Python's dates") from error


def order_decimal(value: Decimal) -> bytes:
    """Sign byte, exponent, digits. Equal decimals (1.0 and 1.00) have one form. Raises EncodeError if not finite."""
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
    """Inverse of :func:`order_decimal`, in canonical form: no trailing zeros after the point, exponents up to 20 as
    zeros."""
    if data == b"\x01":
        return Decimal(0)
    body = data[1:] if data[0] == 2 else data[1:-1].translate(_INVERT)
    text = body[8:].decode("ascii")
    exponent = unorder_int(body[:8]) - len(text)
    if 0 < exponent <= 20:
        text, exponent = text + "0" * exponent, 0
    return Decimal((0 if data[0] == 2 else 1, tuple(map(int, text)), exponent))


def join_ordered(parts: Iterable[bytes]) -> bytes:
    """Self-delimiting concatenation whose byte order is the order of the sequence of parts.

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
