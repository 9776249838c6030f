"""Addresses of cells with their namespaces, the layout of stored values, and the bytes of a stream key.

Address of a cell::

    space (1)  tag (8)  varint(len(key)) key  varint(len(ns)) ns  entry

    space  b"c" for cells that hold values, b"n" for the entry counts of maps, sets and lists
    tag    xxh64 of "name\\0kind\\0coder names", big-endian: one state under one declaration
    key    encode_row_key(stream key)
    ns     namespace, empty for the global one
    entry  empty for a value, the encoded map key, set member or list position otherwise

Stored value: header (1 byte), expiry (8 bytes, only with EXPIRES), payload. The low seven bits of the
header are the format version; the expiry is microseconds since 1970, big-endian.

The namespace of a window is ``b"w" end start name``, with the times in microseconds as Int64. A named namespace is
``b"s" name``. Names are UTF-8.

A count's payload is an Int64, the number of cells stored under its address, expired ones included. A list's elements
are stored at ascending Int64 positions. If the payload of the list's count is 8 bytes long, the positions are
0…count-1; otherwise two more Int64 follow the count, the first position and the one after the last.

A third space, b"r", contains one entry for each tag that was made at run time. Its address is ``b"r" tag``; its payload
is a msgpack map, the output of :meth:`.Declaration.describe`.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, Protocol
from uuid import UUID

import xxhash

from stateflow.errors import DecodeError, EncodeError, InvalidArgument, NullKey, UnsupportedKeyType
from stateflow.state import encoding
from stateflow.types import shown

CELL: Final = b"c"
COUNT: Final = b"n"
TAGS: Final = b"r"

FORMAT_VERSION: Final = 1
EXPIRES: Final = 0x80
HEADER: Final = bytes([FORMAT_VERSION])
_EXPIRING: Final = bytes([FORMAT_VERSION | EXPIRES])
#: latest possible expiry, in microseconds since 1970
LATEST_US: Final = (1 << 63) - 1

_I64 = struct.Struct(">q")
_ADDRESS_HEAD = len(CELL) + 8
#: all varints of one byte, by number
_SHORT = [bytes([number]) for number in range(128)]

_WINDOW, _NAMED = b"w", b"s"
_BOUNDS_END = 17

# -- Namespaces ------------------------------------------------------------------------------------------------------


class Namespace(bytes):
    """Bytes that distinguish several instances of a state under one key, such as one per window.

    ``Namespace()`` is the global namespace. Windows sort by their end, then by their start.

    >>> Namespace.named("2013-01") == Namespace.named("2013-01")
    True
    >>> Namespace() == Namespace.named("2013-01")
    False
    """

    __slots__ = ()

    @classmethod
    def window(cls, start: int | datetime, end: int | datetime, of: str = "") -> Namespace:
        """Returns the namespace of a time window ``[start, end)``.

        Times are microseconds since 1970, or datetimes (naive ones are UTC). ``of`` distinguishes windows of the same
        time. Raises InvalidArgument for a window that ends before it starts.
        """
        first, last = _micros(start), _micros(end)
        if last < first:
            raise InvalidArgument(f"a window from {start} to {end} ends before it starts")
        return cls(_WINDOW + encoding.order_int(last) + encoding.order_int(first) + _encoded(of))

    @classmethod
    def named(cls, name: str) -> Namespace:
        """Returns the namespace of that name, which never equals a window. Raises InvalidArgument for text that is not
        valid Unicode."""
        return cls(_NAMED + _encoded(name))

    @property
    def bounds(self) -> tuple[int, int] | None:
        """Start and end of a window, in microseconds since 1970; None for other namespaces."""
        if self[:1] != _WINDOW or len(self) < _BOUNDS_END:
            return None
        return encoding.unorder_int(self[9:_BOUNDS_END]), encoding.unorder_int(self[1:9])

    @property
    def name(self) -> str | None:
        """The text of a named namespace, or the ``of`` text of a window; None: a window without ``of``, or the global
        namespace."""
        if self[:1] != _NAMED and len(self) <= _BOUNDS_END:
            return None
        try:
            return self[1 if self[:1] == _NAMED else _BOUNDS_END :].decode()
        except UnicodeDecodeError as error:
            raise DecodeError("a stored namespace is damaged", remedy="restore a checkpoint") from error

    def __repr__(self) -> str:
        if not self:
            return "Namespace()"
        if self.bounds is not None:
            start, end = self.bounds
            return f"Namespace.window({start}, {end}{f', {self.name!r}' if self.name else ''})"
        return f"Namespace.named({self.name!r})" if self[:1] == _NAMED else f"Namespace({bytes(self)!r})"

    __str__ = __repr__


def _encoded(name: str) -> bytes:
    try:
        return name.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgument(f"{ascii(name)[:80]} cannot name a namespace", remedy="use valid Unicode text") from None


def _micros(at: int | datetime) -> int:
    micros = at if isinstance(at, int) else encoding.micros_of(at)
    if not -(1 << 63) <= micros < 1 << 63:
        raise InvalidArgument(f"{at} microseconds are beyond 64 bits", remedy="use microseconds since 1970")
    return micros


# -- Addresses and stored values -------------------------------------------------------------------------------------


def tag_of(name: str, kind: str, coder_names: tuple[str, ...]) -> bytes:
    """Returns the 8-byte hash that identifies one state under one declaration."""
    digest: bytes = xxhash.xxh64_digest("\0".join([name, kind, ",".join(coder_names)]).encode())
    return digest


def varint(number: int) -> bytes:
    """Encodes a non-negative number as LEB128, least significant seven bits first."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Returns (number, index after it). Raises IndexError if the data ends early."""
    number = shift = 0
    while True:
        byte = data[start]
        start += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, start
        shift += 7


def row_part(key: bytes, namespace: bytes = b"") -> bytes:
    """Returns the middle part of an address, which is the same for all states of one key and namespace."""
    if len(key) < 128 and not namespace:
        return _SHORT[len(key)] + key + b"\x00"
    return b"".join([varint(len(key)), key, varint(len(namespace)), namespace])


def split_address(address: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns (key, namespace, entry) of the address of a cell or count. Raises DecodeError if it ends early."""
    try:
        length, start = read_varint(address, _ADDRESS_HEAD)
        key, start = address[start : start + length], start + length
        length, start = read_varint(address, start)
    except IndexError as error:
        raise DecodeError("the address of a stored cell is truncated", address=address[:32].hex()) from error
    return key, address[start : start + length], address[start + length :]


def range_end(prefix: bytes) -> bytes:
    """Returns the smallest address after all that start with ``prefix``, which must contain a byte below 0xff."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1])


def pack_cell(payload: bytes) -> bytes:
    return HEADER + payload


def header_until(expiry_us: int) -> bytes:
    """Returns header and expiry of a cell that expires at ``expiry_us``."""
    return _EXPIRING + _I64.pack(expiry_us)


def unpack_cell(data: bytes) -> bytes:
    """Returns the payload of a stored value. Raises DecodeError for an unknown or cut-off format."""
    if data[:1] == HEADER:
        return data[1:]
    return unpack_cell_with_expiry(data)[0]


def unpack_cell_with_expiry(data: bytes) -> tuple[bytes, int | None]:
    """Returns (payload, expiry in µs since 1970 or None). Raises DecodeError for an unknown or cut-off format."""
    if not data:
        raise DecodeError("a stored cell is empty", remedy="the store is damaged; restore a checkpoint")
    version = data[0] & ~EXPIRES
    if version != FORMAT_VERSION:
        raise DecodeError(
            f"a stored cell has format {version}, this program reads {FORMAT_VERSION}",
            remedy="run the stateflow version that wrote it, or a newer one",
        )
    if not data[0] & EXPIRES:
        return data[1:], None
    if len(data) < 9:
        raise DecodeError(
            "a stored cell is truncated in its expiry", remedy="the store is damaged; restore a checkpoint"
        )
    return data[9:], _I64.unpack_from(data, 1)[0]


class CellReader(Protocol):
    """The committed cells of one partition.

    A reader may also have a method ``scan_from(start, end)``, which yields the cells of ``[start, end)`` in byte order,
    so that a sweep need not read again the cells before the place where it stopped.

    Example: ``for address, data in reader.scan(b""): ...``
    """

    def get(self, cell: bytes, /) -> bytes | None: ...

    def scan(self, prefix: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        """Yields cells whose address starts with ``prefix``, in byte order."""
        ...


# -- Stream keys -----------------------------------------------------------------------------------------------------

#: type bytes of row keys. They are part of every stored address: never renumber.
_BOOL, _BYTES, _DATE, _DECIMAL, _FLOAT, _INT, _STR, _AWARE, _NAIVE, _UUID, _TUPLE = (
    b"b",
    b"y",
    b"d",
    b"m",
    b"f",
    b"i",
    b"s",
    b"t",
    b"n",
    b"u",
    b"(",
)
_FINITE_REMEDY = "drop or replace such keys before they reach the operator"


def encode_row_key(key: Hashable) -> bytes:
    """Encodes a stream key as a type byte and an order-preserving form of the value.

    Accepts str, int (64 bits), bytes, bool, date, datetime, finite float and Decimal, UUID, and tuples of them. Keys of
    different types have different bytes. Raises NullKey for None, EncodeError for NaN, infinity and an int beyond 64
    bits, and UnsupportedKeyType for any other type.

    >>> encode_row_key("N1") < encode_row_key("N2")
    True
    """
    cls = key.__class__
    if cls is str:
        return _encode_text(key)  # type: ignore[arg-type]
    if cls is int:
        return _encode_int(key)  # type: ignore[arg-type]
    if key is None:
        raise NullKey("the key of a row is null", remedy="filter null keys out before the operator")
    return _encode_other(key)


def _encode_text(key: str) -> bytes:
    try:
        return _STR + key.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f"a key is not valid Unicode: {error.reason}", key=ascii(key)[:80]) from None


def _encode_int(key: int) -> bytes:
    try:
        return _INT + encoding.order_int(int(key))
    except struct.error:
        raise EncodeError("an integer key is beyond 64 bits", remedy="convert it to text", key=shown(key)) from None


def _encode_other(key: Any) -> bytes:
    match key:
        case bool():
            return _BOOL + (b"\x01" if key else b"\x00")
        case str():
            return _encode_text(key)
        case int():
            return _encode_int(key)
        case bytes():
            return _BYTES + key
        case datetime():
            if key.utcoffset() is None:
                return _NAIVE + encoding.order_moment(key.replace(tzinfo=None))
            return _AWARE + encoding.order_moment(key)
        case date():
            return _DATE + key.toordinal().to_bytes(4, "big")
        case float():
            if key in (float("inf"), float("-inf")):
                raise EncodeError(f"{key} cannot be a key", remedy=_FINITE_REMEDY)
            return _FLOAT + encoding.order_float(key)
        case Decimal():
            return _DECIMAL + encoding.order_decimal(key)
        case UUID():
            return _UUID + key.bytes
        case tuple():
            return _TUPLE + encoding.join_ordered([encode_row_key(item) for item in key])
    raise UnsupportedKeyType(
        f"a key of type {type(key).__name__} has no stored form",
        remedy="use str, int, bytes, bool, date, datetime, float, Decimal, UUID, or a tuple of them",
        key=shown(key),
    )


def decode_row_key(data: bytes) -> Any:
    """Inverse of :func:`encode_row_key`. The result equals the key and has its plain type; datetimes are in UTC.

    >>> decode_row_key(encode_row_key("N1"))
    'N1'
    """
    kind, body = data[:1], data[1:]
    try:
        match kind:
            case b"s":
                return body.decode()
            case b"i":
                return encoding.unorder_int(body)
            case b"(":
                return tuple([decode_row_key(part) for part in encoding.split_ordered(body)])
            case b"b":
                return body == b"\x01"
            case b"y":
                return body
            case b"t" | b"n":
                return encoding.datetime_of(encoding.unorder_int(body), aware=kind == _AWARE)
            case b"d":
                return date.fromordinal(int.from_bytes(body, "big"))
            case b"f":
                return encoding.unorder_float(body)
            case b"m":
                return encoding.unorder_decimal(body)
            case b"u":
                return UUID(bytes=body)
    except (struct.error, ValueError, ArithmeticError, IndexError) as error:
        raise DecodeError("a stored key is damaged", remedy="restore a checkpoint", key=data[:32].hex()) from error
    raise DecodeError(
        f"a stored key has type byte {kind!r}, which this version does not know",
        remedy="run the newer stateflow version that wrote it",
    )


def key_of(row: bytes) -> Any:
    """Returns the stream key inside the middle part of an address; None for an empty part."""
    return decode_row_key(split_address(CELL + bytes(8) + row)[0]) if row else None
