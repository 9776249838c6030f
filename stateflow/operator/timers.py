"""Timers of one partition, kept in its store: they fire once, also after a restart and after a move.

A timer is identified by (domain, key, name); setting it again replaces it (as in Apache Beam's state and timers
model). Two entries each::

    t  domain (1)  at (8, ordered)  varint(len(key)) key  name      → b"\\x01"       in the order of firing
    u  domain (1)  varint(len(key)) key  name                       → at (8, ordered)

``key`` is the encoded stream key. Timers that a batch sets, deletes and fires are pending until the batch commits.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import pyarrow as pa

from stateflow.changes import Mutations
from stateflow.errors import InvalidArgument, NullKey
from stateflow.state.cells import decode_row_key, encode_row_key, read_varint, varint
from stateflow.state.encoding import micros_of
from stateflow.storage import PartitionStore

BY_TIME = b"t"
BY_NAME = b"u"
#: prefix of timer names that belong to window helpers
WINDOW = "window "
_PRESENT = b"\x01"
_ORDERED = struct.Struct(">Q")
_SIGN = 1 << 63
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Domain(StrEnum):
    """``event`` timers fire when the watermark passes them, ``processing`` timers with the first batch after them."""

    EVENT = "event"
    PROCESSING = "processing"


_LETTER = {Domain.EVENT: b"e", Domain.PROCESSING: b"p"}


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that is due, as ``on_timer`` gets it. ``at`` is when it was set for, not when it fired.

    Example: ``def on_timer(self, timer: Timer, ctx: Context) -> None: del self.seen[timer.name]``
    """

    at: datetime
    name: str
    domain: Domain
    key: Hashable


@dataclass(frozen=True, slots=True)
class TimerColumns:
    """Timers that are due, as ``on_timers`` gets them, in order of time: ``keys`` as state columns take them, ``at``
    (timestamp[us, UTC]) as they were set for, ``name`` (string).

    Example: ``def on_timers(self, timers: TimerColumns, ctx: Context): return pa.table({"k": timers.keys})``
    """

    keys: pa.Array
    at: pa.Array
    name: pa.Array
    domain: Domain

    @classmethod
    def of(cls, timers: Sequence[Timer], key: Sequence[str]) -> TimerColumns:
        """Makes columns of timers.

        Args:
            timers: of one domain, at least one.
            key: names of the key columns.
        """
        keys: pa.Array
        if len(key) == 1:
            keys = pa.array([timer.key for timer in timers])
        else:
            columns = zip(*(timer.key for timer in timers), strict=True)
            keys = pa.StructArray.from_arrays([pa.array(column) for column in columns], names=list(key))
        return cls(
            keys,
            pa.array([timer.at for timer in timers], pa.timestamp("us", "UTC")),
            pa.array([timer.name for timer in timers], pa.string()),
            timers[0].domain,
        )


def to_us(moment: datetime | int) -> int:
    """Returns microseconds since 1970 UTC, of an aware datetime or of an integer that is that already. Raises
    InvalidArgument, and EncodeError for a time that has nanoseconds.
    """
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise InvalidArgument("a time needs a time zone", remedy="use datetimes with tzinfo, e.g. UTC")
        return micros_of(moment)
    if isinstance(moment, int) and not isinstance(moment, bool) and -_SIGN <= moment < _SIGN:
        return moment
    raise InvalidArgument(
        f"{moment!r} is not a time", remedy="use an aware datetime, or microseconds since 1970 as int"
    )


def to_datetime(us: int) -> datetime:
    """Returns a datetime. A time outside the years 1 to 9999 becomes the nearest representable one, because a watermark
    may mean "for ever"."""
    try:
        return _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC) if us > 0 else datetime.min.replace(tzinfo=UTC)


def check_timer_name(name: object) -> str:
    """Checks the name of an operator's own timer. Raises InvalidArgument."""
    try:
        name.encode()  # type: ignore[attr-defined]
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgument(
            f"{ascii(name)[:80]} is not a valid timer name", remedy="use valid Unicode text"
        ) from None
    assert isinstance(name, str)
    if name.startswith(WINDOW):
        raise InvalidArgument(
            f"{name[:80]!r} is reserved for window timers", remedy=f"use a name that does not begin with {WINDOW!r}"
        )
    return name


#: (domain, encoded key, name)
_Identity = tuple[Domain, bytes, str]


class Timers:
    """Pending changes over the stored timers. Not thread-safe."""

    def __init__(self, store: PartitionStore) -> None:
        self._store = store
        self._pending: dict[_Identity, int | None] = {}  # µs, or None: deleted or fired
        self._soon: list[tuple[int, bytes, str]] = []  # heap, while due() runs
        self._until: tuple[Domain, int] | None = None
        #: False: the partition never had a timer, and its store is not asked for one
        self._any = next(store.scan(BY_TIME), None) is not None
        #: no stored timer of the domain is set for an earlier time; missing: not looked up yet
        self._next_us: dict[Domain, float] = {}

    def set(self, key: Hashable, name: str, at: datetime | int, domain: str) -> None:
        """Sets a timer, in place of the key's timer of that name.

        Raises InvalidArgument for an unknown domain or an invalid time.
        """
        identity = (_domain(domain), encode_row_key(key), name)
        at_us = to_us(at)
        self._pending[identity] = at_us
        self._any = True
        if self._until is not None and self._until[0] is identity[0] and at_us <= self._until[1]:
            heapq.heappush(self._soon, (at_us, identity[1], name))

    def set_many(self, keys: pa.Array, name: str, at: Any, domain: str) -> None:
        """Sets a timer for each key, see :meth:`set`.

        Args:
            at: one time for all keys; or an Arrow array with one for each, of timestamps with a time zone or of
                microseconds since 1970.

        Raises InvalidArgument.
        """
        plain = keys_of(keys)
        times = _times(at, len(plain)) if isinstance(at, pa.Array | pa.ChunkedArray) else [at] * len(plain)
        for key, moment in zip(plain, times, strict=True):
            self.set(key, name, moment, domain)

    def delete_many(self, keys: pa.Array, name: str, domain: str) -> None:
        """Deletes the timer of each key, see :meth:`delete`."""
        for key in keys_of(keys):
            self.delete(key, name, domain)

    def delete(self, key: Hashable, name: str, domain: str) -> None:
        """Deletes the key's timer of that name; no error when there is none."""
        if self._any:
            self._pending[_domain(domain), encode_row_key(key), name] = None

    def due(self, domain: Domain, until_us: int) -> Iterator[Timer]:
        """Fires every timer at or before ``until_us``, also those set meanwhile, in order of time, key and name."""
        if not self._any:
            return
        self._soon = [
            (at_us, key, name)
            for (kind, key, name), at_us in self._pending.items()
            if kind is domain and at_us is not None and at_us <= until_us
        ]
        for at_us, key, name in self._stored(domain, until_us):
            if (domain, key, name) not in self._pending:
                self._soon.append((at_us, key, name))
        heapq.heapify(self._soon)
        self._until = domain, until_us
        try:
            while self._soon:
                at_us, key, name = heapq.heappop(self._soon)
                identity = (domain, key, name)
                if identity in self._pending and self._pending[identity] != at_us:
                    continue  # replaced or deleted by a timer that fired before
                self._pending[identity] = None
                yield Timer(to_datetime(at_us), name, domain, decode_row_key(key))
        finally:
            self._until = None

    def _stored(self, domain: Domain, until_us: int) -> Iterator[tuple[int, bytes, str]]:
        prefix = BY_TIME + _LETTER[domain]
        for entry, _ in self._store.scan(prefix):
            at_us = _ORDERED.unpack_from(entry, len(prefix))[0] - _SIGN
            if at_us > until_us:
                self._next_us[domain] = at_us
                return
            length, start = read_varint(entry, len(prefix) + 8)
            yield at_us, entry[start : start + length], entry[start + length :].decode()
        self._next_us[domain] = math.inf

    def next_us(self, domain: Domain) -> float:
        """Returns a time before which no timer is due, in µs. Call it between batches."""
        return self._next_us.get(domain, -math.inf) if self._any else math.inf

    def pending(self, key: Hashable) -> list[Timer]:
        """Returns the timers of one key, by time, with the running batch's changes."""
        wanted = encode_row_key(key)
        found: dict[_Identity, int] = {}
        for domain in Domain:
            prefix = BY_NAME + _LETTER[domain] + varint(len(wanted)) + wanted
            for entry, at in self._store.scan(prefix):
                found[domain, wanted, entry[len(prefix) :].decode()] = _ORDERED.unpack(at)[0] - _SIGN
        for identity, at_us in self._pending.items():
            if identity[1] == wanted:
                found.pop(identity, None)
                if at_us is not None:
                    found[identity] = at_us
        timers = [Timer(to_datetime(at_us), name, domain, key) for (domain, _, name), at_us in found.items()]
        return sorted(timers, key=lambda timer: (timer.at, timer.name))

    def collect(self, into: Mutations) -> None:
        """Adds the net effect of the batch. May be followed by ``rollback``."""
        for (domain, key, name), at_us in self._pending.items():
            encoded = name.encode()
            by_name = BY_NAME + _LETTER[domain] + varint(len(key)) + key + encoded
            stored = self._store.get(by_name)
            wanted = None if at_us is None else _ORDERED.pack(at_us + _SIGN)
            if stored == wanted:
                continue
            if stored is not None:
                into.deletes.append(_by_time(domain, stored, key, encoded))
            if wanted is None:
                into.deletes.append(by_name)
            else:
                into.puts += [(by_name, wanted), (_by_time(domain, wanted, key, encoded), _PRESENT)]
                if at_us is not None and at_us < self._next_us.get(domain, -math.inf):
                    self._next_us[domain] = at_us

    def end_batch(self) -> None:
        """Drops pending changes, which are committed."""
        self._pending.clear()

    def rollback(self) -> None:
        """Drops pending changes: timers that fired in the batch fire again in the next one."""
        self._pending.clear()
        self._next_us.clear()


def keys_of(keys: pa.Array) -> list[Any]:
    """Returns keys in the form in which a row operator sees them. Raises NullKey."""
    if keys.null_count:
        raise NullKey("a key is null", remedy="filter out such rows before the operator")
    plain: list[Any] = keys.to_pylist()
    return [tuple(row.values()) for row in plain] if pa.types.is_struct(keys.type) else plain


def _times(at: pa.Array, length: int) -> list[int]:
    if len(at) != length:
        raise InvalidArgument(f"{length} keys came with {len(at)} times", remedy="pass one time per key")
    if at.null_count:
        raise InvalidArgument("a time is null", remedy="filter out such rows first")
    if pa.types.is_timestamp(at.type):
        if at.type.tz is None:
            raise InvalidArgument("a time needs a time zone", remedy="use timestamps with a time zone, e.g. UTC")
        at = at.cast(pa.timestamp("us", at.type.tz)).cast(pa.int64())
    if not pa.types.is_integer(at.type):
        raise InvalidArgument(
            f"{at.type} is not a time type", remedy="use timestamps, or microseconds since 1970 as int64"
        )
    times: list[int] = at.to_pylist()
    return times


def _by_time(domain: Domain, at: bytes, key: bytes, name: bytes) -> bytes:
    return BY_TIME + _LETTER[domain] + at + varint(len(key)) + key + name


def _domain(text: str) -> Domain:
    try:
        return Domain(text)
    except ValueError:
        raise InvalidArgument(f"{text!r} is not a time domain", remedy="use 'event' or 'processing'") from None
