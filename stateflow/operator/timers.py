"""The timers of one partition, kept in its store, and event-time windows, which use timers.

A timer fires once, even after a restart or a move. It is identified by (domain, key, name); setting it again replaces
it (as in Apache Beam's state and timers model). A stored timer has two entries::

    t  domain (1)  at (8, ordered)  varint(len(key)) key  name      → b"\\x01"       in the order of firing
    u  domain (1)  varint(len(key)) key  name                       → at (8, ordered)

``key`` is the encoded stream key. Timers that a batch sets, deletes and fires are pending until the batch commits.

A window is ``[start, end)``. Its states have a namespace of their own, and a timer ends it exactly once, when the
watermark has passed its end plus the allowed lateness. Session windows merge as in Akidau et al., "The Dataflow Model"
(VLDB 2015).

::

    class Hourly(Operator):
        key, event_time, output = "k", "at", "k string, hour timestamp, n long"
        hourly = TumblingWindows(timedelta(hours=1))

        def process(self, row, ctx):
            for window in self.hourly.of(ctx):
                window.state(COUNT).value += 1

        def on_timer(self, timer, ctx):
            for window in self.hourly.ended(timer, ctx):
                yield ctx.key, window.start, window.state(COUNT).value
"""

from __future__ import annotations

import heapq
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa

from stateflow.changes import Mutations
from stateflow.errors import DeclarationError, InvalidArgument, SchemaMismatch
from stateflow.state import Declaration, Namespace
from stateflow.state import map as state_map
from stateflow.state.cells import decode_row_key, encode_row_key, read_varint, varint
from stateflow.state.encoding import micros_of
from stateflow.state.keys import KeyColumns
from stateflow.storage import PartitionStore

if TYPE_CHECKING:
    from stateflow.operator.operator import Context

T = TypeVar("T")
BY_TIME = b"t"
BY_NAME = b"u"
#: prefix of timer names that belong to window helpers
WINDOW = "window "
#: prefix of the name of the state that holds a session helper's open sessions: session's id → (start, end), in µs
SESSIONS = "sessions of "
#: types of that state's keys and values
_SESSIONS_OF = (int, tuple[int, int])
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
    """A timer that is due, the argument of ``on_timer``. ``at`` is the time that was set, not the time of firing.

    Example: ``def on_timer(self, timer: Timer, ctx: Context) -> None: del self.seen[timer.name]``
    """

    at: datetime
    name: str
    domain: Domain
    key: Hashable


@dataclass(frozen=True, slots=True)
class TimerColumns:
    """Timers that are due, in order of time; the argument of ``on_timers``.

    Attributes:
        keys: keys of the timers, in the form for state columns.
        at: times that were set (timestamp[us, UTC]).
        name: names of the timers (string).

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
            timers: one or more timers of one domain.
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
    """Converts an aware datetime to microseconds since 1970 UTC; an integer is returned unchanged.

    Raises InvalidArgument for anything else and an integer beyond 64 bits, and EncodeError for a time with nanoseconds.
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
    """Returns a datetime. A time outside the years 1 to 9999 becomes the nearest one inside, because a watermark may
    stand for the end of all time."""
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
    """The timers of a partition, as they are stored, with the pending changes of a batch. Not thread-safe.

    Args:
        keys: key columns of the partition; None: keys are taken as they come.
    """

    def __init__(self, store: PartitionStore, keys: KeyColumns | None = None) -> None:
        self._store, self.keys = store, KeyColumns() if keys is None else keys
        self._pending: dict[_Identity, int | None] = {}  # µs, or None: deleted or fired
        self._soon: list[tuple[int, bytes, str]] = []  # heap of timers still to fire while due() runs
        self._until: tuple[Domain, int] | None = None
        #: whether there may be timers; while there were none, the store is not read
        self._any = next(store.scan(BY_TIME), None) is not None
        #: domain → time before which no stored timer is set; a missing domain was not looked up yet
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
            at: one time for all keys, or an Arrow array with a time for each key, of timestamps with a time zone or of
                microseconds since 1970.

        Raises InvalidArgument for an unknown domain, an invalid time or a key of another partition, NullKey, and
        EncodeError for keys that are not of the key columns and their types.
        """
        plain = self.keys.plain_here(keys)
        times = _times(at, len(plain)) if isinstance(at, pa.Array | pa.ChunkedArray) else [at] * len(plain)
        for key, moment in zip(plain, times, strict=True):
            self.set(key, name, moment, domain)

    def delete_many(self, keys: pa.Array, name: str, domain: str) -> None:
        """Deletes the timer of that name of each key, see :meth:`delete`."""
        for key in self.keys.plain(keys):
            self.delete(key, name, domain)

    def delete(self, key: Hashable, name: str, domain: str) -> None:
        """Deletes the key's timer of that name, if there is one."""
        if self._any:
            self._pending[_domain(domain), encode_row_key(key), name] = None

    def due(self, domain: Domain, until_us: int) -> Iterator[Timer]:
        """Yields the timers that are set for ``until_us`` or earlier, and marks them as fired.

        The timers are in order of time, key and name. Timers that the caller sets while it handles others are included.
        """
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
        until = self._until = domain, until_us
        try:
            while self._soon:
                at_us, key, name = heapq.heappop(self._soon)
                identity = (domain, key, name)
                if identity in self._pending and self._pending[identity] != at_us:
                    continue  # replaced or deleted by a timer that fired before
                self._pending[identity] = None
                yield Timer(to_datetime(at_us), name, domain, decode_row_key(key))
        finally:
            if self._until is until:  # not if this call is an earlier one, whose batch failed
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

    def stored_names(self) -> Iterator[str]:
        """Yields the name of each stored timer. Call it between batches."""
        for domain in Domain:
            for _, _, name in self._stored(domain, _SIGN):
                yield name

    def next_us(self, domain: Domain) -> float:
        """Returns a time before which no timer is due, in µs. Call it between batches."""
        return self._next_us.get(domain, -math.inf) if self._any else math.inf

    def pending(self, key: Hashable) -> list[Timer]:
        """Returns the timers of one key, sorted by time, with the running batch's changes."""
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
        """Adds the net changes of the batch to ``into``. They stay pending until ``end_batch`` or ``rollback``."""
        for (domain, key, name), at_us in self._pending.items():
            encoded = name.encode()
            by_name = BY_NAME + _LETTER[domain] + varint(len(key)) + key + encoded
            stored = self._store.get(by_name)
            wanted = None if at_us is None else _ORDERED.pack(at_us + _SIGN)
            # also for a timer that fired and was set again to the same time, so that nothing of it is to be written
            if at_us is not None and at_us < self._next_us.get(domain, -math.inf):
                self._next_us[domain] = at_us
            if stored == wanted:
                continue
            if stored is not None:
                into.deletes.append(_by_time(domain, stored, key, encoded))
            if wanted is None:
                into.deletes.append(by_name)
            else:
                into.puts += [(by_name, wanted), (_by_time(domain, wanted, key, encoded), _PRESENT)]

    def end_batch(self) -> None:
        """Drops the pending changes after they were committed."""
        self._pending.clear()

    def rollback(self) -> None:
        """Drops the pending changes, so that timers that fired in the batch fire again in the next batch."""
        self._pending.clear()
        self._next_us.clear()


def _times(at: pa.Array, length: int) -> list[int]:
    if len(at) != length:
        raise InvalidArgument(f"{length} keys were passed with {len(at)} times", remedy="pass one time per key")
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


# -- Windows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """The window ``[start_us, end_us)`` of one key, in µs since 1970, usable until the current row or timer is done.

    Example: ``for window in self.hourly.of(ctx): window.state(COUNT).value += 1``
    """

    start_us: int
    end_us: int
    namespace: Namespace
    _ctx: Context
    _key: Any

    @property
    def start(self) -> datetime:
        return to_datetime(self.start_us)

    @property
    def end(self) -> datetime:
        return to_datetime(self.end_us)

    def state(self, tag: T) -> T:
        """Returns this window's own instance of a state, see :meth:`Context.state`. Raises InvalidArgument in a row or
        timer of another key."""
        if self._ctx.key is not self._key and self._ctx.key != self._key:
            raise _over()
        return self._ctx.state(tag, self.namespace)


def _over() -> InvalidArgument:
    return InvalidArgument(
        "a window is used whose row or timer is done",
        remedy="call `of` or `ended` for each row or timer, and keep neither their windows nor the loop over them",
    )


class Windows(ABC):
    """Base of window helpers, each assigned to a class attribute of an operator with ``event_time``.

    Args:
        allowed_lateness: time for which a window still accepts rows after its end; the window's timer fires that much
            later.
        name: name of the helper, which is a part of stored entries and must differ from that of the operator's other
            helpers; by default the attribute's name.
    """

    #: number of arguments of :meth:`_timer`, which distinguishes timers of sessions from those of other windows
    _timer_numbers = 2

    def __init__(self, allowed_lateness: timedelta = timedelta(), *, name: str | None = None) -> None:
        self._lateness_us = _micros(allowed_lateness, "allowed_lateness", least=0)
        self.name = name or ""
        Namespace.named(self.name)  # raises an error if the name is not valid text

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.name = self.name or attribute

    def check_timer(self, name: str) -> None:
        """Checks a stored timer's name. Raises SchemaMismatch for a timer that another kind of window helper set under
        this helper's name, in an earlier version of the operator."""
        self._numbers(name)

    def _timer(self, *numbers: int) -> str:
        """Returns the name of a window's timer. Spaces in the helper's name are encoded, so that it is one word."""
        word = self.name.replace("%", "%25").replace(" ", "%20")
        return " ".join([f"{WINDOW}{word}", *map(str, numbers)])

    def _numbers(self, name: str) -> list[int] | None:
        """Returns the arguments of :meth:`_timer` for a timer's name; None: the timer is not one of this helper. Raises
        SchemaMismatch, see :meth:`check_timer`."""
        word, *numbers = name.removeprefix(WINDOW).split(" ")
        if not name.startswith(WINDOW) or self._timer() != WINDOW + word:
            return None
        if len(numbers) != self._timer_numbers:
            raise SchemaMismatch(
                f"the windows {self.name!r} are {type(self).__name__}, but another kind of windows was open under that "
                "name when the operator was upgraded",
                remedy="deploy a version that gives the new windows another name, and keeps those that were there",
            )
        return [int(number) for number in numbers]

    @abstractmethod
    def of(self, ctx: Context) -> list[Window]:
        """Returns the windows of the current row that have not ended; an empty list if the row is too late."""

    @abstractmethod
    def is_late(self, ctx: Context) -> bool:
        """Tells whether the current row is too late, because every window of its time has ended. Then ``of`` returns
        no window."""

    def ended(self, timer: Timer, ctx: Context) -> Iterator[Window]:
        """Yields the window that a timer ends, or nothing if the timer is not one of this helper.

        The window's states are cleared when the caller's loop continues or, if it does not or there is no loop, when
        ``on_timer`` is done. Raises InvalidArgument if the loop continues later.
        """
        return self._ended(self._numbers(timer.name), ctx, ctx._ended)

    def _ended(self, numbers: list[int] | None, ctx: Context, ended: dict[Namespace, bool]) -> Iterator[Window]:
        """See :meth:`ended`. ``ended``: the context's record of the current timer, as each timer has its own."""
        if numbers is None:
            return
        if ctx._ended is not ended:
            raise _over()
        window = self._end(numbers, ctx)
        ended[window.namespace] = True
        yield window
        if ctx._ended is not ended:
            raise _over()
        ctx.clear_state(window.namespace)
        ended[window.namespace] = False

    @abstractmethod
    def _end(self, numbers: list[int], ctx: Context) -> Window:
        """Returns the window that ends. ``numbers``: arguments of :meth:`_timer`."""

    def _open(self, end_us: int, ctx: Context) -> bool:
        return ctx.watermark is None or end_us + self._lateness_us > to_us(ctx.watermark)

    def _row_time(self, ctx: Context) -> int:
        if ctx.timestamp is None:
            raise InvalidArgument(
                "the row has no event time",
                remedy="set event_time to a timestamp column, and filter out rows without one",
            )
        try:
            return to_us(ctx.timestamp)
        except InvalidArgument as error:
            raise InvalidArgument(f"the event time is invalid: {error.what}", remedy=error.remedy) from None


class _Aligned(Windows):
    """Windows with bounds that do not depend on the rows."""

    def __init__(self, size: timedelta, every: timedelta, offset: timedelta, lateness: timedelta, name: str | None):
        super().__init__(lateness, name=name)
        self._size_us = _micros(size, "size", least=1)
        self._every_us = _micros(every, "every", least=1)
        self._offset_us = offset // timedelta(microseconds=1)
        if self._every_us > self._size_us:
            raise DeclarationError(
                "the windows leave gaps: every is longer than size", remedy="make `every` at most `size`"
            )

    def of(self, ctx: Context) -> list[Window]:
        at_us = self._row_time(ctx)
        last = at_us - (at_us - self._offset_us) % self._every_us
        windows = []
        for start_us in range(last, at_us - self._size_us, -self._every_us):
            end_us = start_us + self._size_us
            if self._open(end_us, ctx):
                ctx._set_timer(end_us + self._lateness_us, self._timer(start_us, end_us))
                windows.append(self._window(start_us, end_us, ctx))
        return windows[::-1]

    def is_late(self, ctx: Context) -> bool:
        at_us = self._row_time(ctx)
        return not self._open(at_us - (at_us - self._offset_us) % self._every_us + self._size_us, ctx)

    def _end(self, numbers: list[int], ctx: Context) -> Window:
        start_us, end_us = numbers
        return self._window(start_us, end_us, ctx)

    def _window(self, start_us: int, end_us: int, ctx: Context) -> Window:
        return Window(start_us, end_us, Namespace.window(start_us, end_us, self.name), ctx, ctx.key)


class TumblingWindows(_Aligned):
    """Windows of ``size`` that do not overlap, so that each time is in exactly one of them.

    One window begins at 1970-01-01T00:00Z plus ``offset``.

    Example: ``hourly = TumblingWindows(timedelta(hours=1))``, and ``self.hourly.of(ctx)`` in ``process``.
    """

    def __init__(
        self,
        size: timedelta,
        *,
        offset: timedelta = timedelta(),
        allowed_lateness: timedelta = timedelta(),
        name: str | None = None,
    ) -> None:
        super().__init__(size, size, offset, allowed_lateness, name)


class SlidingWindows(_Aligned):
    """Windows of ``size``, one starting every ``every``, so that a time is in about ``size / every`` of them.

    ``of`` returns the oldest window first. One window begins at 1970-01-01T00:00Z plus ``offset``.

    Example: ``recent = SlidingWindows(timedelta(hours=1), every=timedelta(minutes=5))``
    """

    def __init__(
        self,
        size: timedelta,
        every: timedelta,
        *,
        offset: timedelta = timedelta(),
        allowed_lateness: timedelta = timedelta(),
        name: str | None = None,
    ) -> None:
        super().__init__(size, every, offset, allowed_lateness, name)


class SessionWindows(Windows):
    """Windows that last until ``gap`` passes without a row of their key.

    Args:
        merge: called with (remaining window, window merged into it) when a row joins two windows; it must add the
            states of the second window to those of the first.

    Example: ``visits = SessionWindows(timedelta(minutes=30), merge=add_up)``
    """

    _timer_numbers = 1

    def __init__(
        self,
        gap: timedelta,
        merge: Callable[[Window, Window], Any],
        *,
        allowed_lateness: timedelta = timedelta(),
        name: str | None = None,
    ) -> None:
        super().__init__(allowed_lateness, name=name)
        self._gap_us = _micros(gap, "gap", least=1)
        self._merge = merge

    @cached_property
    def _tag(self) -> Any:
        """The tag of the state that maps the event time of each open session's first row to its (start, end)."""
        return state_map(*_SESSIONS_OF, name=SESSIONS + self.name)

    def of(self, ctx: Context) -> list[Window]:
        at_us = self._row_time(ctx)
        sessions = ctx.state(self._tag)
        start_us, end_us = at_us, at_us + self._gap_us
        met = [id_ for id_, (first, last) in sessions.items() if first <= end_us and start_us <= last]
        if not met and not self._open(end_us, ctx):
            return []
        for id_ in met:
            start_us, end_us = min(start_us, sessions[id_][0]), max(end_us, sessions[id_][1])
        first_id = met[0] if met else at_us
        window = self._session(first_id, (start_us, end_us), ctx)
        for id_ in met[1:]:
            other = self._session(id_, sessions.pop(id_), ctx)
            self._merge(window, other)
            ctx.clear_state(other.namespace)
            ctx._delete_timer(self._timer(id_))
        sessions[first_id] = start_us, end_us
        ctx._set_timer(end_us + self._lateness_us, self._timer(first_id))
        return [window]

    def is_late(self, ctx: Context) -> bool:
        at_us = self._row_time(ctx)
        end_us = at_us + self._gap_us
        sessions = ctx.state(self._tag).values()
        return not self._open(end_us, ctx) and not any(first <= end_us and at_us <= last for first, last in sessions)

    def _end(self, numbers: list[int], ctx: Context) -> Window:
        (id_,) = numbers
        bounds = ctx.state(self._tag).pop(id_, None)
        if bounds is None:
            raise InvalidArgument(
                "the session of this timer has ended already", remedy="loop over `ended` once for each timer"
            )
        return self._session(id_, bounds, ctx)

    def _session(self, id_: int, bounds: tuple[int, int], ctx: Context) -> Window:
        # the namespace does not contain the bounds, because they change
        return Window(*bounds, Namespace.window(id_, id_, self.name), ctx, ctx.key)


def is_of_sessions(declaration: Declaration) -> bool:
    """Returns whether a state holds the open sessions of a session helper, whose timers need them."""
    name = declaration.name
    return name.startswith(SESSIONS) and declaration.tag == cast(Declaration, state_map(*_SESSIONS_OF, name=name)).tag


def _micros(span: timedelta, what: str, least: int) -> int:
    micros = span // timedelta(microseconds=1) if isinstance(span, timedelta) else -1
    if micros < least:
        raise DeclarationError(
            f"{what} cannot be {span!r}",
            remedy="use a timedelta" + (" above 0" if least else " of zero or more") + ", e.g. hours=1",
        )
    return micros
