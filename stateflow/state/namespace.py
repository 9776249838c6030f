"""Namespaces: several instances of one state under one key, such as one per window."""

from __future__ import annotations

from datetime import datetime

from stateflow.errors import DecodeError, InvalidArgument
from stateflow.state import key_order

_WINDOW, _NAMED = b"w", b"s"
_BOUNDS_END = 17


class Namespace(bytes):
    """Bytes that tell apart several instances of a state under one key; ``Namespace()`` is the global one.

    Windows sort by their end, then by their start.

    >>> Namespace.named("2013-01") == Namespace.named("2013-01")
    True
    >>> Namespace() == Namespace.named("2013-01")
    False
    """

    __slots__ = ()

    @classmethod
    def window(cls, start: int | datetime, end: int | datetime, of: str = "") -> Namespace:
        """A time window ``[start, end)``: microseconds since 1970, or datetimes (naive ones are UTC).

        ``of`` tells windows of the same time apart. Raises InvalidArgument for a window that ends before it starts.
        """
        first, last = _micros(start), _micros(end)
        if last < first:
            raise InvalidArgument(f"a window from {start} to {end} ends before it starts")
        return cls(_WINDOW + key_order.order_int(last) + key_order.order_int(first) + _encoded(of))

    @classmethod
    def named(cls, name: str) -> Namespace:
        """A namespace named by any text; it never equals a window. Raises InvalidArgument for text that is not valid
        Unicode."""
        return cls(_NAMED + _encoded(name))

    @property
    def bounds(self) -> tuple[int, int] | None:
        """(start, end) of a window in microseconds since 1970; None for other namespaces."""
        if self[:1] != _WINDOW or len(self) < _BOUNDS_END:
            return None
        return key_order.unorder_int(self[9:]), key_order.unorder_int(self[1:9])

    @property
    def name(self) -> str | None:
        """The text of a named namespace, or ``of`` of a window; None: the window has no ``of``, or the namespace is
        global."""
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
    micros = at if isinstance(at, int) else key_order.micros_of(at)
    if not -(1 << 63) <= micros < 1 << 63:
        raise InvalidArgument(f"{at} microseconds are beyond 64 bits", remedy="use microseconds since 1970")
    return micros
