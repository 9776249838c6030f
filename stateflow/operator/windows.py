"""Event-time windows: helpers built on namespaces, which hold a window's states, and on timers, which end it.

A window is ``[start, end)``. It ends exactly once, when the watermark has passed its end plus the allowed lateness.
Session windows merge as in Akidau et al., "The Dataflow Model" (VLDB 2015).

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, TypeVar

from stateflow.errors import DeclarationError, InvalidArgument
from stateflow.operator.operator import Context, Helper
from stateflow.operator.timers import WINDOW, Timer, to_datetime, to_us
from stateflow.state import Namespace
from stateflow.state import map as state_map

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Window:
    """Window ``[start_us, end_us)`` of one key, µs since 1970, usable until the current row or timer is done.

    Example: ``for window in self.hourly.of(ctx): window.state(COUNT).value += 1``
    """

    start_us: int
    end_us: int
    namespace: Namespace
    _ctx: Context

    @property
    def start(self) -> datetime:
        return to_datetime(self.start_us)

    @property
    def end(self) -> datetime:
        return to_datetime(self.end_us)

    def state(self, tag: T) -> T:
        """Returns this window's own instance of a state, see :meth:`Context.state`."""
        return self._ctx.state(tag, self.namespace)


class Windows(Helper, ABC):
    """Base of window helpers, each assigned to a class attribute of an operator with ``event_time``.

    Args:
        allowed_lateness: how long after its end a window still takes rows; it ends that much later.
        name: part of the stored entries, by default the attribute's name; any text, different for each helper of an
            operator.
    """

    def __init__(self, allowed_lateness: timedelta = timedelta(), *, name: str | None = None) -> None:
        self._lateness_us = _micros(allowed_lateness, "allowed_lateness", least=0)
        self.name = name or ""
        Namespace.named(self.name)  # raises where it is not text

    def __set_name__(self, owner: type, attribute: str) -> None:
        self.name = self.name or attribute

    def _timer(self, *numbers: int) -> str:
        """Returns the name of a window's timer. The helper's name counts as one word of it, even with spaces."""
        word = self.name.replace("%", "%25").replace(" ", "%20")
        return " ".join([f"{WINDOW}{word}", *map(str, numbers)])

    def _numbers(self, timer: Timer) -> list[int] | None:
        """Returns the arguments of :meth:`_timer` for a timer's name; None: the timer is not a window's."""
        word, *numbers = timer.name.removeprefix(WINDOW).split(" ")
        mine = timer.name.startswith(WINDOW) and self._timer() == WINDOW + word
        return [int(number) for number in numbers] if mine else None

    @abstractmethod
    def of(self, ctx: Context) -> list[Window]:
        """Returns the windows of the current row that have not ended; empty: the row is too late."""

    @abstractmethod
    def is_late(self, ctx: Context) -> bool:
        """Tells whether the current row is too late: every window of its time has ended, and ``of`` returns none."""

    @abstractmethod
    def ended(self, timer: Timer, ctx: Context) -> Iterator[Window]:
        """Yields the window that a timer ends; nothing if the timer is not a window's.

        The window's states are cleared when the loop continues.
        """

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
    """Windows whose bounds do not depend on the rows."""

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

    def ended(self, timer: Timer, ctx: Context) -> Iterator[Window]:
        bounds = self._numbers(timer)
        if bounds is not None:
            start_us, end_us = bounds
            window = self._window(start_us, end_us, ctx)
            yield window
            ctx.clear_state(window.namespace)

    def _window(self, start_us: int, end_us: int, ctx: Context) -> Window:
        return Window(start_us, end_us, Namespace.window(start_us, end_us, self.name), ctx)


class TumblingWindows(_Aligned):
    """Each time lies in exactly one window of ``size``; ``offset`` moves their bounds from 1970-01-01T00:00Z.

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
    """Windows of ``size``, one starting every ``every``: a time lies in about ``size / every`` of them, oldest first.

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
        merge: called with (the remaining window, the window merged into it) when a row joins two; it adds the states of
            the second to the first.

    Example: ``visits = SessionWindows(timedelta(minutes=30), merge=add_up)``
    """

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
        """Returns the tag of the state with a key's open sessions: event time of the first row → (start, end)."""
        return state_map(int, tuple[int, int], name=f"sessions of {self.name}")

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

    def ended(self, timer: Timer, ctx: Context) -> Iterator[Window]:
        numbers = self._numbers(timer)
        if numbers is not None:
            (id_,) = numbers
            window = self._session(id_, ctx.state(self._tag).pop(id_), ctx)
            yield window
            ctx.clear_state(window.namespace)

    def _session(self, id_: int, bounds: tuple[int, int], ctx: Context) -> Window:
        # not named by its bounds, which change
        return Window(*bounds, Namespace.window(id_, id_, self.name), ctx)


def _micros(span: timedelta, what: str, least: int) -> int:
    micros = span // timedelta(microseconds=1) if isinstance(span, timedelta) else -1
    if micros < least:
        raise DeclarationError(
            f"{what} cannot be {span!r}", remedy="use a timedelta" + (" above 0" if least else "") + ", e.g. hours=1"
        )
    return micros
