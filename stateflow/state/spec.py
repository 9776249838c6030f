"""Data shared by all tracked objects of one declared state: coders, addresses, ttl, and the list of written objects."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any, Final, Literal, Protocol, get_args

from stateflow.errors import DeclarationError, DecodeError, EncodeError, NullKey, UnsupportedKeyType
from stateflow.state import encoding
from stateflow.state.cells import (
    CELL,
    COUNT,
    HEADER,
    LATEST_US,
    Namespace,
    decode_row_key,
    encode_row_key,
    header_until,
    split_address,
)
from stateflow.state.coders import Coder, Msgpack, Struct
from stateflow.state.encoding import is_record

Domain = Literal["processing", "event"]
Refresh = Literal["write", "read_write"]

#: fraction of the ttl that must have passed since an expiry was written before a read renews it
REFRESH_AFTER: Final = 0.1


@dataclass(frozen=True, slots=True)
class Ttl:
    """Time to live of a state's entries, declared by ``ttl=``, ``ttl_domain=`` and ``ttl_refresh=``.

    Attributes:
        us: microseconds after which an entry expires, from when it was last written.
        domain: the clock that counts: the machine's ("processing"), or the watermark ("event").
        refresh: whether reading an entry renews its expiry, too ("read_write"), or only writing it does ("write").
    """

    us: int
    domain: Domain
    refresh: Refresh

    @classmethod
    def of(cls, ttl: float | timedelta | None, domain: Domain, refresh: Refresh) -> Ttl | None:
        """Checks and converts the arguments of a declaration; None: no ttl.

        Raises DeclarationError for a ttl that is not a positive, finite time.
        """
        if domain not in get_args(Domain):
            raise DeclarationError(f"unknown ttl_domain {domain!r}", remedy="use 'processing' or 'event'")
        if refresh not in get_args(Refresh):
            raise DeclarationError(f"unknown ttl_refresh {refresh!r}", remedy="use 'write' or 'read_write'")
        if ttl is None:
            return None
        if isinstance(ttl, bool) or not isinstance(ttl, int | float | timedelta):
            raise DeclarationError(f"{ttl!r} is not a ttl", remedy="use seconds or a timedelta")
        try:
            us = (ttl if isinstance(ttl, timedelta) else timedelta(seconds=ttl)) // timedelta(microseconds=1)
        except (ValueError, OverflowError) as error:
            raise DeclarationError(f"{ttl!r} is not a ttl: {error}", remedy="use seconds or a timedelta") from error
        if us <= 0:
            raise DeclarationError(f"a ttl of {ttl!r} is not positive", remedy="use a positive time")
        return cls(us, domain, refresh)

    @classmethod
    def described(cls, described: Mapping[str, Any] | None) -> Ttl | None:
        """Returns the ttl in the output of :meth:`.Declaration.describe`; None: no ttl. Raises KeyError, TypeError."""
        return None if described is None else cls(described["us"], described["domain"], described["refresh"])

    @property
    def refresh_below_us(self) -> int:
        """Remaining life in microseconds below which a read renews the expiry."""
        return self.us - int(self.us * REFRESH_AFTER)


class CellReader(Protocol):
    """The committed cells of one partition.

    A reader may also have ``scan_from(start, end)``, which yields the cells of ``[start, end)`` in byte order. With it
    a sweep continues where it stopped, without walking over the cells it has seen.

    Example: ``for address, data in reader.scan(b""): ...``
    """

    def get(self, cell: bytes, /) -> bytes | None: ...

    def scan(self, prefix: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        """Yields cells whose address starts with ``prefix``, in byte order."""
        ...


class Marker:
    """A value no user can store."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


#: not in the collection
MISSING: Final = Marker("missing")
#: in the collection, but not decoded
PACKED: Final = Marker("packed")
#: not read from the store yet
UNREAD: Final = Marker("unread")
#: in the store, but expired
EXPIRED: Final = Marker("expired")

#: errors that a coder of the user's own may raise for a value that does not fit
ENCODE_FAILURES = (EncodeError, TypeError, ValueError, AttributeError, OverflowError)
#: the same for bytes that do not fit
DECODE_FAILURES = (DecodeError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError, struct.error)

#: stands for a time that is not known yet: nothing has expired
_NEVER_US: Final = -(1 << 63)


class StateSpec:
    """One state of one partition. ``reader`` None: objects are standalone and never use a store.

    Attributes:
        now_us: time of this batch in the domain of ``ttl``; while that is not known, a time before any expiry.
        expiry_us: expiry of everything this batch writes; None: never.
        header: bytes before the payload of everything this batch writes.
        encode_many: encodes many values, see :func:`.encoder_of`; None: they are encoded one by one.
    """

    __slots__ = (
        "cell_head",
        "coder",
        "count_head",
        "decode",
        "default",
        "default_payload",
        "encode",
        "encode_many",
        "entries_cached",
        "exact",
        "expiry_us",
        "get",
        "header",
        "key_coder",
        "log",
        "mutable",
        "name",
        "now_us",
        "operator",
        "reduce",
        "refresh_below_us",
        "scan",
        "standalone",
        "ttl",
    )

    def __init__(
        self,
        operator: str,
        name: str,
        coder: Coder[Any],
        *,
        tag: bytes = b"",
        key_coder: Coder[Any] | None = None,
        default_payload: bytes | None = None,
        reader: CellReader | None = None,
        log: list[Any] | None = None,
        ttl: Ttl | None = None,
        reduce: Callable[[Any, Any], Any] | None = None,
        max_value_bytes: int | None = None,
    ) -> None:
        self.operator = operator
        self.name = name
        self.coder = coder
        self.key_coder: Coder[Any] = key_coder or _KEYS
        self.encode: Callable[[Any], bytes] = coder.encode
        self.encode_many: Callable[[list[Any]], Sequence[bytes] | None] | None = None
        self.decode: Callable[[bytes], Any] = coder.decode
        if max_value_bytes is not None and not coder.fixed_width:
            self.encode = _bounded(coder.encode, max_value_bytes)
        self.mutable, self.exact = coder.mutable, coder.exact
        self.default_payload = default_payload
        #: for immutable coders only; a mutable default is decoded for each use
        self.default = None if default_payload is None else coder.decode(default_payload)
        self.cell_head, self.count_head = CELL + tag, COUNT + tag
        self.standalone = reader is None
        self.get = _no_cell if reader is None else reader.get
        self.scan = _no_cells if reader is None else reader.scan
        #: objects written, or handed out mutable, since the last commit
        self.log: list[Any] = [] if log is None else log
        #: map entries, set members and list elements loaded or inserted since they were last counted
        self.entries_cached = 0
        self.reduce = reduce
        self.ttl = ttl
        self.now_us = _NEVER_US
        self.expiry_us: int | None = None
        self.header = HEADER
        #: a read renews the expiry of an entry that has less than this left; None: reads never do
        self.refresh_below_us = ttl.refresh_below_us if ttl is not None and ttl.refresh == "read_write" else None

    def set_now(self, now_us: int) -> None:
        """Sets the time of the batch that begins. An earlier time is ignored: expired entries stay expired."""
        assert self.ttl is not None
        if now_us > self.now_us:
            self.now_us = now_us
            self.expiry_us = min(now_us + self.ttl.us, LATEST_US)
            self.header = header_until(self.expiry_us)

    def fresh_default(self) -> Any:
        if self.mutable and self.default_payload is not None:
            return self.decode(self.default_payload)
        return self.default

    def admit(self, key: Any) -> Any:
        """Returns the key as it comes back from the store. Raises EncodeError if it has no key form."""
        if self.standalone:
            return key
        code = self.key_coder.encode_key(key)
        return key if key.__class__ is self.key_coder.exact_key else self.key_coder.decode_key(code)

    def admit_present(self, key: Any) -> Any:
        """Acts as ``admit``, for a key that equals a stored one, perhaps of another numeric type."""
        if key.__class__ is self.key_coder.exact_key:
            return key
        try:
            return self.admit(key)
        except EncodeError:
            found = self.key_coder.find_key(key)
            if found is None:
                raise
            return found

    def canonical(self, key: Any) -> Any:
        """Returns the key as it comes back from the store, or unchanged if it has no key form."""
        try:
            return self.admit(key)
        except ENCODE_FAILURES:
            return key

    def key_bytes(self, key: Any) -> bytes | None:
        """Returns the key form of the stored key that would equal ``key``; None: no stored key can equal it."""
        try:
            return self.key_coder.encode_key(key)
        except ENCODE_FAILURES:
            found = self.key_coder.find_key(key)
            return None if found is None else self.key_coder.encode_key(found)

    def ordered(self, keys: Any) -> list[Any]:
        """Returns keys in the order of their key form."""
        return sorted(keys, key=None if self.key_coder.natural_order else self.key_coder.encode_key)

    def encode_error(self, error: Exception, row: bytes, **where: Any) -> EncodeError:
        """Returns ``error`` with the place where it happened; ``row`` is the key's part of the address."""
        place = self._place(row, where)
        if isinstance(error, EncodeError):
            return EncodeError(error.what, remedy=error.remedy, **{**error.where, **place})
        return EncodeError(f"coder {self.coder.name} failed: {error!r}", remedy="fix the coder", **place)

    def decode_error(self, error: Exception, row: bytes, **where: Any) -> DecodeError:
        """Returns the error for stored bytes that cannot be read, with its place, like ``encode_error``."""
        place = self._place(row, where)
        if isinstance(error, DecodeError):
            return DecodeError(error.what, remedy=error.remedy, **{**error.where, **place})
        return DecodeError(f"coder {self.coder.name} failed: {error!r}", remedy="fix the coder", **place)

    def _place(self, row: bytes, where: dict[str, Any]) -> dict[str, Any]:
        place = {"operator": self.operator or None, "state": self.name, "key": key_of(row)}
        namespace = split_address(CELL + bytes(8) + row)[1] if row else b""
        if namespace:
            place["namespace"] = Namespace(namespace)
        return {**place, **where}

    def refuses(self, key: Any) -> bool:
        """Returns whether a key that Python fails to hash is refused as NaN: it is a signalling NaN, or holds one."""
        if isinstance(key, tuple):
            return any(map(self.refuses, key))
        return not self.standalone and isinstance(key, Decimal) and key.is_snan()

    def count_differs(self, row: bytes, counted: int, stored: int) -> DecodeError:
        return DecodeError(
            f"a stored count says {stored} entries, but the store holds {counted}",
            remedy="the store is damaged; restore a checkpoint",
            **self._place(row, {}),
        )


def key_of(row: bytes) -> Any:
    """Returns the stream key inside the middle part of an address; None for an empty part."""
    return decode_row_key(split_address(CELL + bytes(8) + row)[0]) if row else None


def _bounded(encode: Callable[[Any], bytes], bytes_max: int) -> Callable[[Any], bytes]:
    def bounded(value: Any) -> bytes:
        payload = encode(value)
        if len(payload) > bytes_max:
            raise EncodeError(
                f"a value takes {len(payload)} bytes, at most {bytes_max} are allowed",
                remedy="use a map or a list, whose entries are stored one by one, or raise "
                "STATEFLOW_REPLICA_VALUE_BYTES_MAX",
            )
        return payload

    return bounded


def _no_cell(cell: bytes) -> bytes | None:
    return None


def _no_cells(prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    return iter(())


# -- Standalone objects: coders that take anything, because nothing is ever stored -----------------------------------


class _AnyKey(Coder[Any]):
    """Sorts like row keys; values that cannot be row keys come last, in order of insertion."""

    name = "any"
    deterministic = True

    def encode(self, value: Any) -> bytes:
        try:
            return encode_row_key(value)
        except (EncodeError, NullKey, UnsupportedKeyType):
            return b"\xff"

    def decode(self, data: bytes) -> Any:
        raise NotImplementedError


class _AnyValue(Coder[Any]):
    name = "any"
    mutable = False

    def encode(self, value: Any) -> bytes:
        raise NotImplementedError

    def decode(self, data: bytes) -> Any:
        raise NotImplementedError


class _Same:
    """Wraps an object. Two wrappers are equal if they hold the very same object."""

    __slots__ = ("_object",)

    def __init__(self, value: object) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._object is self._object

    __hash__ = None  # type: ignore[assignment]


def fingerprint(value: Any) -> Any:
    """Returns an object that compares unequal once ``value`` is replaced or changed in place.

    For values without a stored form only a replacement is noticed.
    """
    if type(value) in encoding.IMMUTABLE:
        return (type(value), value)
    try:
        if is_record(type(value)):
            return Struct(type(value)).encode(value)
        return _ANYTHING.encode(value)
    except (EncodeError, DeclarationError):
        return _Same(value)


_ANYTHING = Msgpack()
_KEYS = _AnyKey()
STANDALONE_VALUES: Final = _AnyValue()
STANDALONE: Final = StateSpec("", "", STANDALONE_VALUES)
