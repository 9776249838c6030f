"""The contract of coders, and the coders for simple types, plain data, records and tuples.

A coder converts one value, or one map key, to bytes and back, and never uses pickle. Every coder has a *value form*
(``encode``/``decode``) and, when ``deterministic``, a *key form* (``encode_key``/``decode_key``) in which equal keys
have equal bytes and byte order is value order. Coders of simple types can encode many values in one call
(:func:`encoder_of`).
"""

from __future__ import annotations

import decimal
import struct
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import date, datetime
from itertools import starmap
from numbers import Number
from operator import index as as_index
from typing import Any, Final, Generic, TypeVar

from stateflow.errors import DecodeError, EncodeError
from stateflow.state import encoding, shapes
from stateflow.state.encoding import exact_decimal, exact_float, is_numpy_bool
from stateflow.state.shapes import Signature, signature_of, spelled
from stateflow.types import shown

T = TypeVar("T")
_INT64 = struct.Struct(">Q")
_FLOAT64 = struct.Struct(">d")
_ORDINAL = struct.Struct(">I")
_pack_int, _pack_float = _INT64.pack, _FLOAT64.pack
_BIAS = 1 << 63

# -- Contract --------------------------------------------------------------------------------------------------------


def wrong_type(coder: Coder[Any], value: object, why: str = "") -> EncodeError:
    kind = type(value).__name__
    return EncodeError(
        f"a value of type {kind} does not fit {coder.declared}{why and f': {why}'}",
        remedy="declare the state with the type you store, or convert the value before storing it",
        value=shown(value),
    )


class Coder(ABC, Generic[T]):
    """Encodes and decodes the values of one type. Subclass it for types of your own and pass it as ``coder=``.

    Attributes:
        name: stable identity. It is part of the address of every stored cell, so data that was stored under another
            name belongs to another state.
        deterministic: True if equal values have equal bytes, so that the coder may encode map keys and set members.
        natural_order: True if the key form sorts exactly as Python's ``<`` sorts the decoded keys.
        fixed_width: True if every value form is a few bytes long, so that no value can be too long to store.
        python_equality: True if keys with equal bytes are equal in Python, too (some datetimes of two zones are not).
        mutable: True if a decoded value can be changed in place.
        exact: type of values that are unchanged after encoding and decoding, subclasses excluded; None: a decoded value
            may differ (another time zone, a list for a subclass of list).
        exact_key: the same for the key form.

    Example: ``class Point(Coder[complex]): ...``, and then ``state.value(complex, coder=Point())``.
    """

    name: str
    deterministic: bool = False
    natural_order: bool = False
    fixed_width: bool = False
    python_equality: bool = True
    mutable: bool = True
    exact: type | None = None
    exact_key: type | None = None
    #: signature of the declared type; None: ``name`` determines the type
    types: Signature | None = None

    @property
    def declared(self) -> str:
        """The declared type in the form for error messages."""
        return f"coder {self.name}" if self.types is None else spelled(self.types)

    @abstractmethod
    def encode(self, value: T) -> bytes:
        """Encodes a value. Raises EncodeError if the value does not fit."""

    @abstractmethod
    def decode(self, data: bytes) -> T:
        """Decodes the value form. Raises DecodeError if the bytes do not fit."""

    def encode_key(self, value: T) -> bytes:
        """Encodes a key. Raises EncodeError if the value does not fit or cannot be ordered (NaN)."""
        if not self.deterministic:
            raise EncodeError(f"coder {self.name} cannot encode keys", remedy="choose a key type with an order")
        return self.encode(value)

    def decode_key(self, data: bytes) -> T:
        return self.decode(data)

    def find_key(self, value: object) -> T | None:
        """Returns the key of this coder that *equals* a value of another type (1 for 1.0); None: there is none."""
        return None

    def lifted(self, plain: Any) -> T:
        """Converts plain data, in which records are dicts of their fields, to a value."""
        value: T = plain
        return value

    def __repr__(self) -> str:
        return f"<coder {self.name}>"


def bad_bytes(coder: Coder[Any], data: bytes, error: Exception | None = None) -> DecodeError:
    return DecodeError(
        f"stored bytes do not fit coder {coder.name}",
        remedy="the data was written under another declaration or is damaged; restore a checkpoint",
        bytes=data[:32].hex(),
        reason=error,
    )


# -- Simple types ----------------------------------------------------------------------------------------------------


class _Scalar(Coder[T]):
    deterministic = True
    natural_order = True
    mutable = False


def _equal_number(convert: Callable[[Any], T], value: object) -> T | None:
    if not isinstance(value, Number):
        return None
    try:
        converted = convert(value)
    except (TypeError, ValueError, OverflowError, decimal.InvalidOperation):
        return None
    return converted if converted == value else None


class Int64(_Scalar[int]):
    """Coder for int: 8 bytes, big-endian, with the sign bit flipped.

    Raises EncodeError for ints beyond 64 bits, bool and float.

    >>> Int64().encode(1).hex()
    '8000000000000001'
    """

    name = "int64"
    fixed_width = True
    exact = exact_key = int

    def encode(self, value: int) -> bytes:
        if value.__class__ is not int:
            if isinstance(value, bool):
                raise wrong_type(self, value)
            try:
                value = as_index(value)
            except TypeError:
                raise wrong_type(self, value) from None
        try:
            return _pack_int(value + _BIAS)
        except struct.error:
            raise EncodeError(
                "an int is beyond 64 bits",
                remedy="declare the state with type decimal.Decimal",
                value=shown(value),
            ) from None

    def decode(self, data: bytes) -> int:
        try:
            number: int = _INT64.unpack(data)[0]
        except struct.error as error:
            raise bad_bytes(self, data, error) from error
        return number - _BIAS

    def find_key(self, value: object) -> int | None:
        return _equal_number(int, value)


class Float64(_Scalar[float]):
    """Coder for float: 8 bytes, IEEE 754. An int becomes a float if that is exact.

    In a key, NaN is refused, and -0.0 becomes 0.0.

    >>> Float64().decode(Float64().encode(3))
    3.0
    """

    name = "float64"
    fixed_width = True
    exact = float

    def encode(self, value: float) -> bytes:
        if value.__class__ is float:
            return _pack_float(value)
        return _pack_float(self._float(value))

    def decode(self, data: bytes) -> float:
        try:
            number: float = _FLOAT64.unpack(data)[0]
        except struct.error as error:
            raise bad_bytes(self, data, error) from error
        return number

    def encode_key(self, value: float) -> bytes:
        return encoding.order_float(self._float(value))

    def decode_key(self, data: bytes) -> float:
        try:
            return encoding.unorder_float(data)
        except struct.error as error:
            raise bad_bytes(self, data, error) from error

    def find_key(self, value: object) -> float | None:
        return _equal_number(float, value)

    def _float(self, value: object) -> float:
        try:
            return exact_float(value)
        except TypeError:
            raise wrong_type(self, value) from None


class Bool(_Scalar[bool]):
    """Coder for bool: 1 byte.

    >>> Bool().decode(Bool().encode(True))
    True
    """

    name = "bool"
    fixed_width = True
    exact = exact_key = bool

    def encode(self, value: Any) -> bytes:
        if value is True:
            return b"\x01"
        if value is False:
            return b"\x00"
        if is_numpy_bool(value):
            return b"\x01" if value else b"\x00"
        raise wrong_type(self, value)

    def decode(self, data: bytes) -> bool:
        if data not in (b"\x00", b"\x01"):
            raise bad_bytes(self, data)
        return data == b"\x01"

    def find_key(self, value: object) -> bool | None:
        return bool(value) if is_numpy_bool(value) else _equal_number(bool, value)


class Utf8(_Scalar[str]):
    """Coder for str: UTF-8, without a length.

    >>> Utf8().encode("ü").hex()
    'c3bc'
    """

    name = "utf8"
    exact = exact_key = str

    def encode(self, value: str) -> bytes:
        if not isinstance(value, str):
            raise wrong_type(self, value)
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(f"a str is not valid Unicode: {error.reason}", value=ascii(value)[:80]) from None

    def decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise bad_bytes(self, data, error) from error


class Bytes(_Scalar[bytes]):
    """Coder for bytes, which are stored unchanged; a bytearray or memoryview is decoded as bytes.

    >>> Bytes().decode(Bytes().encode(bytearray(b"ab")))
    b'ab'
    """

    name = "bytes"
    exact = exact_key = bytes

    def encode(self, value: bytes) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise wrong_type(self, value)
        return bytes(value)

    def decode(self, data: bytes) -> bytes:
        return data


class Timestamp(_Scalar[datetime]):
    """Coder for aware datetimes: microseconds since 1970 (8 bytes, ordered). Datetimes are decoded in UTC.

    >>> Timestamp().decode(Timestamp().encode(datetime.fromisoformat("2013-01-01T00:00Z"))).year
    2013
    """

    name = "timestamp"
    fixed_width = True
    python_equality = False

    def encode(self, value: datetime) -> bytes:
        if not isinstance(value, datetime):
            raise wrong_type(self, value)
        try:
            offset = value.utcoffset()
        except ValueError:  # pandas' NaT is an instance of datetime
            raise wrong_type(self, value) from None
        if offset is None:
            raise EncodeError(
                "a datetime without a time zone does not name an instant",
                remedy="attach one: value.replace(tzinfo=timezone.utc)",
                value=value.isoformat(),
            )
        return encoding.order_moment(value)

    def decode(self, data: bytes) -> datetime:
        try:
            return encoding.datetime_of(encoding.unorder_int(data), aware=True)
        except struct.error as error:
            raise bad_bytes(self, data, error) from error


class Date(_Scalar[date]):
    """Coder for date: 4 bytes, the proleptic ordinal. A datetime is refused rather than truncated.

    >>> Date().decode(Date().encode(date(2013, 1, 1)))
    datetime.date(2013, 1, 1)
    """

    name = "date"
    fixed_width = True
    exact = exact_key = date

    def encode(self, value: date) -> bytes:
        if not isinstance(value, date) or isinstance(value, datetime):
            raise wrong_type(self, value)
        return _ORDINAL.pack(value.toordinal())

    def decode(self, data: bytes) -> date:
        try:
            return date.fromordinal(_ORDINAL.unpack(data)[0])
        except (struct.error, ValueError, OverflowError) as error:
            raise bad_bytes(self, data, error) from error


class Decimal(_Scalar[decimal.Decimal]):
    """Coder for Decimal: its text. The value form keeps trailing zeros and NaN; the key form is canonical and finite.

    >>> Decimal().decode(Decimal().encode(decimal.Decimal("1.50")))
    Decimal('1.50')
    """

    name = "decimal"
    exact = decimal.Decimal

    def encode(self, value: decimal.Decimal) -> bytes:
        return str(self._decimal(value)).encode()

    def decode(self, data: bytes) -> decimal.Decimal:
        try:
            return decimal.Decimal(data.decode("ascii"))
        except (UnicodeDecodeError, decimal.InvalidOperation) as error:
            raise bad_bytes(self, data, error) from error

    def encode_key(self, value: decimal.Decimal) -> bytes:
        return encoding.order_decimal(self._decimal(value))

    def decode_key(self, data: bytes) -> decimal.Decimal:
        try:
            return encoding.unorder_decimal(data)
        except (struct.error, ValueError, IndexError) as error:
            raise bad_bytes(self, data, error) from error

    def find_key(self, value: object) -> decimal.Decimal | None:
        return _equal_number(decimal.Decimal, value)

    def _decimal(self, value: object) -> decimal.Decimal:
        try:
            return exact_decimal(value)
        except TypeError:
            raise wrong_type(self, value) from None


class UUID(_Scalar[uuid.UUID]):
    """Coder for UUID: 16 bytes.

    >>> len(UUID().encode(uuid.UUID(int=7)))
    16
    """

    name = "uuid"
    fixed_width = True
    exact = exact_key = uuid.UUID

    def encode(self, value: uuid.UUID) -> bytes:
        if not isinstance(value, uuid.UUID):
            raise wrong_type(self, value)
        return value.bytes

    def decode(self, data: bytes) -> uuid.UUID:
        try:
            return uuid.UUID(bytes=data)
        except ValueError as error:
            raise bad_bytes(self, data, error) from error


# -- Plain data, records and tuples ----------------------------------------------------------------------------------


def _misfit(coder: Coder[Any], value: Any, error: Exception) -> EncodeError:
    why = str(error)
    return wrong_type(coder, value, "" if why.startswith(f"{type(value).__name__} instead") else why)


def _lift(coder: Coder[Any], lift: Callable[[Any], Any], value: Any, data: bytes) -> Any:
    try:
        return lift(value)
    except (TypeError, ValueError, AttributeError) as error:
        raise bad_bytes(coder, data, error) from error


class Msgpack(Coder[Any]):
    """Coder for plain data as msgpack.

    Plain data is any nesting of None, bool, int, float, str, bytes, list, dict, tuple, set, frozenset, date, datetime,
    Decimal, UUID and bytearray. Subclasses of these types are decoded as the plain type, a memoryview as bytes.

    Args:
        type_: declared type of the values. Encoding a value of another type raises EncodeError; an int becomes the
            declared float or Decimal if that is exact. Decoding does not check the type again.

    >>> Msgpack().decode(Msgpack().encode({"a": [1, None]}))
    {'a': [1, None]}
    """

    name = "msgpack"

    def __init__(self, type_: Any = Any) -> None:
        self._shape = shapes.shape_of(type_)
        self._lower = self._shape.lower
        self.types = signature_of(type_)
        if self._shape.name:
            self.name = f"msgpack[{self._shape.name}]"

    def encode(self, value: Any) -> bytes:
        try:
            return encoding.dumps(self._lower(value))
        except RecursionError:
            raise encoding.too_deep(value) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise _misfit(self, value, error) from None

    def decode(self, data: bytes) -> Any:
        value, lift = encoding.loads(data), self._shape.lift
        return value if lift is None else _lift(self, lift, value, data)

    def lifted(self, plain: Any) -> Any:
        return plain if self._shape.lift is None else self._shape.lift(plain)


class Struct(Coder[T]):
    """Coder for a dataclass, msgspec.Struct or pydantic model: a msgpack map of its fields by name.

    Encoding raises EncodeError for a field that does not hold its declared type; an int becomes the declared float or
    Decimal if that is exact. Decoding ignores stored fields that the class no longer has, gives defaults to fields that
    are not stored and widens stored ints. For any other difference (no default, another type) it raises a DecodeError
    that names the field. The coder's identity is the *name* of the class, so that fields may be added.

    Dataclasses are rebuilt field by field, models by ``model_construct``, without their ``__init__`` and validation.
    Private attributes of a model are not stored.

    Example: ``state.value(Reading, coder=Struct(Reading))``; for a dataclass ``state.value(Reading)`` is the same.
    """

    def __init__(self, cls: type[T]) -> None:
        self._shape = shapes.RecordShape.of(cls)
        self.cls = cls
        self.name = self._shape.name
        self.mutable = not self._shape.immutable
        self.types = signature_of(cls)

    @property
    def declared(self) -> str:
        return f"coder {self.name}"

    def encode(self, value: T) -> bytes:
        if not isinstance(value, self.cls):
            raise wrong_type(self, value)
        try:
            return encoding.dumps(self._shape.lower(value))
        except RecursionError:
            raise encoding.too_deep(value) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise _misfit(self, value, error) from None

    def decode(self, data: bytes) -> T:
        value: T = _lift(self, self._shape.lift, encoding.loads(data), data)
        return value

    def lifted(self, plain: Any) -> T:
        value: T = self._shape.lift(plain) if isinstance(plain, dict) else plain
        return value


#: struct letters of items with a fixed width
_PACKED = {Int64: "q", Float64: "d"}


class Tuple(Coder[tuple[Any, ...]]):
    """Coder for tuples of declared item types: ``tuple[str, int]``, or ``tuple[str, ...]`` for any length.

    The value form of a fixed tuple of int and float is packed, eight bytes an item. Any other value form is the
    sequence of the items' value forms. The key form is the sequence of the items' key forms. Both sequences are
    self-delimiting.

    >>> Tuple((Utf8(), Int64())).decode(Tuple((Utf8(), Int64())).encode(("a", 1)))
    ('a', 1)
    """

    def __init__(self, items: tuple[Coder[Any], ...], *, variadic: bool = False) -> None:
        self._items = self.items = items
        self._variadic = variadic
        #: number of items; None: any number
        self.arity = None if variadic else len(items)
        self.name = f"tuple[{','.join(item.name for item in items)}{',...' if variadic else ''}]"
        self.deterministic = all(item.deterministic for item in items)
        self.python_equality = all(item.python_equality for item in items)
        self.natural_order = all(item.natural_order for item in items)
        self.mutable = any(item.mutable for item in items)
        letters = "" if variadic else "".join(_PACKED.get(type(item), "?") for item in items)
        self._exact = tuple(item.exact for item in items)
        if any(item.types is not None for item in items):
            kind = "tuple..." if variadic else "tuple"
            self.types = [kind, *(item.name if item.types is None else item.types for item in items)]
        #: packs all items at eight bytes each; None: not a fixed tuple of int and float
        self.packed = struct.Struct(">" + letters) if letters and "?" not in letters else None
        if self.packed is not None:
            self.name = f"packed {self.name}"
            self.fixed_width = True

    def encode(self, value: tuple[Any, ...]) -> bytes:
        if self.packed is not None:
            if value.__class__ is not tuple or tuple(map(type, value)) != self._exact:
                value = tuple([coder.decode(coder.encode(item)) for coder, item in self._pairs(value)])
            try:
                return self.packed.pack(*value)
            except struct.error:
                for coder, item in self._pairs(value):
                    coder.encode(item)  # raises an error that names the item that does not fit
                raise
        return encoding.join_ordered([coder.encode(item) for coder, item in self._pairs(value)])

    def decode(self, data: bytes) -> tuple[Any, ...]:
        if self.packed is not None:
            try:
                return self.packed.unpack(data)
            except struct.error:
                raise bad_bytes(self, data) from None
        return tuple([coder.decode(part) for coder, part in self._parts(data)])

    def lifted(self, plain: Any) -> tuple[Any, ...]:
        return tuple([coder.lifted(item) for coder, item in self._pairs(plain)])

    def encode_key(self, value: tuple[Any, ...]) -> bytes:
        return encoding.join_ordered([coder.encode_key(item) for coder, item in self._pairs(value)])

    def decode_key(self, data: bytes) -> tuple[Any, ...]:
        return tuple([coder.decode_key(part) for coder, part in self._parts(data)])

    def find_key(self, value: object) -> tuple[Any, ...] | None:
        if not isinstance(value, tuple) or not (self._variadic or len(value) == len(self._items)):
            return None
        found = []
        for coder, item in self._pairs(value):
            try:
                coder.encode_key(item)
            except EncodeError:
                item = coder.find_key(item)
                if item is None:
                    return None
            found.append(item)
        return tuple(found)

    def _pairs(self, value: object) -> list[tuple[Coder[Any], Any]]:
        if not isinstance(value, tuple) or not (self._variadic or len(value) == len(self._items)):
            raise wrong_type(self, value)
        return list(zip(self._coders(len(value)), value, strict=True))

    def _parts(self, data: bytes) -> list[tuple[Coder[Any], bytes]]:
        parts = encoding.split_ordered(data)
        if not self._variadic and len(parts) != len(self._items):
            raise bad_bytes(self, data)
        return list(zip(self._coders(len(parts)), parts, strict=True))

    def _coders(self, length: int) -> tuple[Coder[Any], ...]:
        return self._items * length if self._variadic else self._items


# -- Many values at once ---------------------------------------------------------------------------------------------

#: returns the payloads of values; None: encode them one by one
EncodeMany = Callable[[list[Any]], Sequence[bytes] | None]


def _all(values: list[Any], kind: type) -> bool:
    return set(map(type, values)) == {kind}


def _ints(values: list[Any]) -> list[bytes] | None:
    try:
        return list(map(_pack_int, map(_BIAS.__add__, values))) if _all(values, int) else None
    except struct.error:
        return None


def _floats(values: list[Any]) -> list[bytes] | None:
    return list(map(_pack_float, values)) if _all(values, float) else None


def _texts(values: list[Any]) -> list[bytes] | None:
    try:
        return list(map(str.encode, values)) if _all(values, str) else None
    except UnicodeEncodeError:
        return None


def _blobs(values: list[Any]) -> list[bytes] | None:
    return values if _all(values, bytes) else None


def _tuples(pack: Callable[..., bytes], kinds: list[type | None]) -> EncodeMany:
    def encode(values: list[Any]) -> list[bytes] | None:
        if not _all(values, tuple):
            return None
        try:
            columns = zip(*values, strict=True)
            alike = all(set(map(type, items)) == {kind} for items, kind in zip(columns, kinds, strict=True))
            return list(starmap(pack, values)) if alike else None
        except (struct.error, ValueError):
            return None

    return encode


_MANY_AT_ONCE: Final[dict[type[Coder[Any]], EncodeMany]] = {
    Int64: _ints,
    Float64: _floats,
    Utf8: _texts,
    Bytes: _blobs,
}


def encoder_of(coder: Coder[Any], max_bytes: int) -> EncodeMany | None:
    """Returns a function that encodes many values of a coder in one call; None: the coder has no such function.

    The function returns None if an encoded value is longer than ``max_bytes``. A subclass of a coder has no such
    function, because it may encode in its own way.
    """
    if type(coder) is Tuple:
        return None if coder.packed is None else _tuples(coder.packed.pack, [item.exact for item in coder.items])
    encode = _MANY_AT_ONCE.get(type(coder))
    if encode is None or coder.fixed_width:
        return encode

    def bounded(values: list[Any]) -> Sequence[bytes] | None:
        payloads = encode(values)
        return None if payloads is None or max(map(len, payloads)) > max_bytes else payloads

    return bounded
