"""Tracked objects that hold a single value, and the data that all objects of one declared state share.

:class:`StateSpec` contains the state's coders, addresses and ttl, the reader of the store, and the list of objects
written since the last commit. Objects without a store, such as ``TrackedValue(0)``, are *standalone*.

:class:`TrackedValue` is one variable per key; :class:`TrackedReducing` and :class:`TrackedCounter` are values that
accumulate. Maps, sets and lists are collections (:mod:`stateflow.state.collection`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, TypeVar, cast, get_args

from stateflow.changes import Mutations
from stateflow.errors import DeclarationError, DecodeError, EncodeError, NullKey, UnsupportedKeyType
from stateflow.state import encoding
from stateflow.state.cells import (
    CELL,
    COUNT,
    HEADER,
    LATEST_US,
    CellReader,
    Namespace,
    encode_row_key,
    header_until,
    key_of,
    split_address,
    unpack_cell,
)
from stateflow.state.coders import Coder, Msgpack, Struct
from stateflow.state.encoding import is_record

T = TypeVar("T")

# -- What the objects of a state share -------------------------------------------------------------------------------

Domain = Literal["processing", "event"]
Refresh = Literal["write", "read_write"]

#: fraction of the ttl that must have passed since an expiry was written before a read renews it
REFRESH_AFTER: Final = 0.1


@dataclass(frozen=True, slots=True)
class Ttl:
    """Time to live of a state's entries, declared by ``ttl=``, ``ttl_domain=`` and ``ttl_refresh=``.

    Attributes:
        us: microseconds from the last write of an entry until it expires.
        domain: the clock that counts, which is the machine's ("processing") or the watermark ("event").
        refresh: whether reads and writes of an entry renew its expiry ("read_write"), or only writes ("write").
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
        """Returns the ttl in the output of :meth:`.Declaration.describe`; None: no ttl. Raises KeyError or TypeError
        for any other data."""
        return None if described is None else cls(described["us"], described["domain"], described["refresh"])

    @property
    def refresh_below_us(self) -> int:
        """Remaining life in microseconds below which a read renews the expiry."""
        return self.us - int(self.us * REFRESH_AFTER)


class Marker:
    """A value that no user can store."""

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

#: errors that a user's own coder may raise for a value that does not fit
ENCODE_FAILURES = (EncodeError, TypeError, ValueError, AttributeError, OverflowError)
#: errors that a user's own coder may raise for bytes that do not fit
DECODE_FAILURES = (DecodeError, TypeError, ValueError, AttributeError, ArithmeticError, LookupError, struct.error)

#: placeholder for a time that is not known yet, at which nothing has expired
_NEVER_US: Final = -(1 << 63)


class Unpicklable:
    """Base of tracked objects. They are not copied, because a copy would not notice what the original writes."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied: use its value, or a collection's copy()")


class StateSpec:
    """One state of one partition. Without a ``reader``, its objects are standalone and never use a store.

    Attributes:
        now_us: time of this batch in the domain of ``ttl``; while that is not known, a time before any expiry.
        expiry_us: expiry of all cells that this batch writes; None: they never expire.
        header: bytes before the payload of all cells that this batch writes.
        encode_many: encodes many values, see :func:`.encoder_of`; None: values are encoded one by one.
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
        #: the default; only for immutable coders, because a mutable default is decoded for each use
        self.default = None if default_payload is None else coder.decode(default_payload)
        self.cell_head, self.count_head = CELL + tag, COUNT + tag
        self.standalone = reader is None
        self.get = _no_cell if reader is None else reader.get
        self.scan = _no_cells if reader is None else reader.scan
        #: objects written, or read if their value is mutable, since the last commit
        self.log: list[Any] = [] if log is None else log
        #: number of map entries, set members and list elements loaded or inserted since they were last counted
        self.entries_cached = 0
        self.reduce = reduce
        self.ttl = ttl
        self.now_us = _NEVER_US
        self.expiry_us: int | None = None
        self.header = HEADER
        #: a read renews the expiry of an entry that expires in less than this time; None: reads never renew it
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
        """Returns the key in the form in which the store returns it. Raises EncodeError if the key has no key form."""
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
        """Returns the key in the form in which the store returns it, or unchanged if it has no key form."""
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
        """Returns ``error`` with operator, state and key. ``row`` is the key's part of the address."""
        place = self._place(row, where)
        if isinstance(error, EncodeError):
            return EncodeError(error.what, remedy=error.remedy, **{**error.where, **place})
        return EncodeError(f"coder {self.coder.name} failed: {error!r}", remedy="fix the coder", **place)

    def decode_error(self, error: Exception, row: bytes, **where: Any) -> DecodeError:
        """Returns ``error``, for stored bytes that cannot be read, with operator, state and key."""
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
        """Returns whether a key that Python fails to hash is refused because it is, or contains, a signalling NaN."""
        if isinstance(key, tuple):
            return any(map(self.refuses, key))
        return not self.standalone and isinstance(key, Decimal) and key.is_snan()

    def count_differs(self, row: bytes, counted: int, stored: int) -> DecodeError:
        return DecodeError(
            f"a stored count says {stored} entries, but the store holds {counted}",
            remedy="the store is damaged; restore a checkpoint",
            **self._place(row, {}),
        )


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


# -- Standalone objects: coders that accept any value, because nothing is ever stored --------------------------------


class _AnyKey(Coder[Any]):
    """A coder with the order of row keys; values that cannot be row keys are last, in order of insertion."""

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
    """Wraps an object. Two wrappers are equal if they hold the same object."""

    __slots__ = ("_object",)

    def __init__(self, value: object) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._object is self._object

    __hash__ = None  # type: ignore[assignment]


def fingerprint(value: Any) -> Any:
    """Returns an object that tells whether ``value`` is later replaced or changed in place.

    The fingerprint of the replaced or changed value differs from this fingerprint. For a value without a stored form,
    only a replacement is noticed.
    """
    if type(value) in encoding.IMMUTABLE:
        # 0.0 equals -0.0, and 1.0 equals 1.00, but each is stored as it is
        return (type(value), repr(value) if isinstance(value, float | Decimal) else value)
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


def _a(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


# -- TrackedValue ----------------------------------------------------------------------------------------------------


class TrackedValue(Unpicklable, Generic[T]):
    """A variable, which is read and assigned as ``.value``. ``clear()`` restores the declared default.

    In an operator, an object always belongs to the same key, even if it is kept while other keys are processed. A
    mutable value (list, dict, …) may be changed in place in the batch that read it. A value kept from an earlier batch
    is a copy: changing it does not change the state. ``TrackedValue(0)`` is a variable in memory without an operator.

    >>> flights = TrackedValue(0)
    >>> flights.value += 1
    >>> flights.value
    1
    """

    __slots__ = ("_dirty", "_implicit", "_next", "_now", "_row", "_spec", "_stored")

    _dirty: bool
    #: whether ``_now`` is the default of an absent cell, and was not assigned
    _implicit: bool
    #: payload as the last ``_collect`` encoded it; None: there will be no cell
    _next: bytes | None
    #: the value; unset until it is read or assigned
    _now: T
    _row: bytes
    _spec: StateSpec
    #: payload in the store, None without a cell, or UNREAD; for standalone objects a fingerprint
    _stored: Any

    def __init__(self, value: T, /) -> None:
        self._spec = STANDALONE
        self._row = b""
        self._dirty = True  # so that it is never logged
        self._implicit = False
        self._now = value
        self._stored = fingerprint(value)

    if TYPE_CHECKING:

        @property
        def value(self) -> T: ...

        @value.setter
        def value(self, value: T) -> None: ...

        def _get(self) -> T: ...

        def _set(self, value: T) -> None: ...

    else:

        def _get(self):
            try:
                return self._now
            except AttributeError:
                pass
            return self._load()

        def _set(self, value):
            self._implicit = False
            self._now = value
            if not self._dirty:
                self._dirty = True
                self._spec.log.append(self)

        value = property(_get, _set, doc="The current value.")

    def clear(self) -> None:
        """Resets to the declared default (None for a standalone value) and removes the stored cell."""
        self._set(self._spec.fresh_default())
        self._implicit = True

    def changes(self) -> dict[str, Any]:
        """Returns the net change since the last commit: ``{}``, ``{"put": value}`` or ``{"deleted": True}``."""
        if self._spec.standalone:
            if fingerprint(self._now) == self._stored:
                return {}
            return {"deleted": True} if self._implicit and self._now is None else {"put": self._now}
        if not self._dirty:
            return {}
        mutations = Mutations()
        self._collect(mutations)
        if mutations.puts:
            return {"put": self._now}
        return {"deleted": True} if mutations.deletes else {}

    def mark_clean(self) -> None:
        """Makes the present value the baseline of ``changes()``. For standalone objects only.

        Raises RuntimeError for state of an operator.
        """
        if not self._spec.standalone:
            raise RuntimeError("state of an operator is marked clean when its batch is committed")
        self._stored = fingerprint(self._now)
        self._implicit = False

    def __bool__(self) -> NoReturn:
        """Refuses with TypeError what would be true for every object, whatever its value."""
        raise TypeError(f"{self._called()} is neither true nor false: test its .value")

    def __eq__(self, other: object) -> bool:
        """Returns whether both are the same object. Raises TypeError if ``other`` is no tracked value or counter."""
        if isinstance(other, TrackedValue):
            return self is other
        raise TypeError(f"{self._called()} is compared with {_a(other)}: compare its .value")

    __hash__ = object.__hash__

    def _called(self) -> str:
        return f"the state {self._spec.name!r}" if self._spec.name else f"a {type(self).__name__}"

    def __repr__(self) -> str:
        return f"TrackedValue({self.value!r})"

    # --- for KeyedState ---------------------------------------------------------------------------------

    @classmethod
    def _bound(cls, spec: StateSpec, row: bytes) -> TrackedValue[T]:
        self = cls.__new__(cls)
        self._spec = spec
        self._row = row
        self._dirty = self._implicit = False
        self._stored = UNREAD
        return self

    def _log(self) -> None:
        self._dirty = True
        self._spec.log.append(self)

    def _read(self) -> bytes | None:
        data = self._spec.get(self._spec.cell_head + self._row)
        try:
            payload = None if data is None else self._unpack(data)
        except DecodeError as error:
            raise self._spec.decode_error(error, self._row) from error
        self._stored = payload
        return payload

    def _unpack(self, data: bytes) -> bytes:
        return unpack_cell(data)

    def _load(self) -> T:
        spec = self._spec
        payload = self._read() if self._stored is UNREAD else self._stored
        now: T = spec.fresh_default() if payload is None else self._decoded(payload)
        self._now = now
        return now

    def _decoded(self, payload: bytes) -> T:
        try:
            now: T = self._spec.decode(payload)
        except DECODE_FAILURES as error:
            raise self._spec.decode_error(error, self._row) from error
        return now

    def _collect(self, into: Mutations) -> None:
        """Adds the net change to ``into`` and remembers the payload for ``_saved``. May be called repeatedly."""
        spec = self._spec
        stored = self._stored
        if stored is UNREAD:
            stored = self._read()
        now = self._now
        if now is None and spec.default is None:
            payload = None
        else:
            try:
                payload = spec.encode(now)
            except ENCODE_FAILURES as error:
                raise spec.encode_error(error, self._row) from error
            if self._implicit and payload == spec.default_payload:
                payload = None
        self._next = payload
        if payload != stored:
            if payload is None:
                into.deletes.append(spec.cell_head + self._row)
            else:
                into.puts.append((spec.cell_head + self._row, spec.header + payload))

    def _saved(self) -> None:
        """Marks the object as clean after the store has applied the change from ``_collect``."""
        spec = self._spec
        self._dirty = self._implicit = False
        payload = self._stored = self._next
        if spec.mutable:
            # an operator that kept the value must not change the cached one without the store
            del self._now
        elif payload is None:
            self._now = cast(T, spec.default)
        elif self._now.__class__ is not spec.exact:
            self._now = spec.decode(payload)

    def _forget(self) -> None:
        """Discards changes and all loaded data, so that the next access reads the store."""
        self._dirty = self._implicit = False
        self._stored = UNREAD
        if hasattr(self, "_now"):
            del self._now


class MutableTrackedValue(TrackedValue[T]):
    """A TrackedValue whose coder decodes to objects that can change in place, so that a read counts as a write."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def _get(self):
            try:
                now = self._now
            except AttributeError:
                now = self._load()
                self._implicit = self._stored is None
            if not self._dirty:
                self._dirty = True
                self._spec.log.append(self)
            return now

        value = property(_get, TrackedValue._set, doc="The current value; changing it in place is tracked.")


# -- Values that are added to ----------------------------------------------------------------------------------------


class TrackedReducing(TrackedValue[T]):
    """A value reduced by a function. ``add(x)`` sets ``value`` to ``fn(value, x)``, the first time to ``x`` itself.

    ``value`` is None before the first ``add`` and after ``clear()``. ``fn`` may change its first argument in place if
    it also returns it. ``TrackedReducing(fn)`` makes a value in memory that belongs to no operator.

    >>> highest = TrackedReducing(max)
    >>> for celsius in (20.5, 80.0, 21.0):
    ...     highest.add(celsius)
    >>> highest.value
    80.0
    """

    __slots__ = ()

    def __init__(self, fn: Callable[[T, T], T], value: T | None = None, /) -> None:
        super().__init__(value)  # type: ignore[arg-type]
        self._spec = StateSpec("", "", STANDALONE_VALUES, reduce=fn)

    if not TYPE_CHECKING:
        value = property(lambda self: self._get(), doc="The reduction of all added values; None if there are none.")

    def add(self, value: T) -> None:
        now = self._get()
        reduced = value if now is None else self._spec.reduce(now, value)  # type: ignore[misc]
        if reduced is None and not self._spec.standalone:
            try:
                self._spec.encode(None)  # raises unless the declared type includes None, which clears the state
            except ENCODE_FAILURES as error:
                raise self._spec.encode_error(error, self._row) from error
        self._set(reduced)

    def __repr__(self) -> str:
        return f"TrackedReducing({self.value!r})"


class MutableTrackedReducing(TrackedReducing[T], MutableTrackedValue[T]):
    """A TrackedReducing for values that can change in place."""

    __slots__ = ()


class TrackedCounter(TrackedValue[int]):
    """A whole number that starts at 0 and is changed by ``counter.value += 1``, ``counter.add(n)`` and ``clear()``.

    ``TrackedCounter()`` makes a counter in memory that belongs to no operator.

    >>> seen = TrackedCounter()
    >>> seen.add(2)
    >>> seen.value
    2
    """

    __slots__ = ()

    def __init__(self, value: int = 0, /) -> None:
        super().__init__(value)
        self._spec = _STANDALONE_COUNTER

    def add(self, n: int = 1) -> None:
        self._set(self._get() + n)

    def __repr__(self) -> str:
        return f"TrackedCounter({self.value!r})"


class _Zero(Coder[Any]):
    """Coder that decodes 0, the default of a standalone counter."""

    name = "zero"
    mutable = False

    def encode(self, value: Any) -> bytes:
        raise NotImplementedError

    def decode(self, data: bytes) -> int:
        return 0


_STANDALONE_COUNTER = StateSpec("", "", _Zero(), default_payload=b"")
