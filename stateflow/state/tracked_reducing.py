"""TrackedReducing and TrackedCounter: values that are added to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from stateflow.state.coder import Coder
from stateflow.state.spec import STANDALONE_VALUES, StateSpec
from stateflow.state.tracked_value import MutableTrackedValue, TrackedValue

T = TypeVar("T")


class TrackedReducing(TrackedValue[T]):
    """A value reduced by a function: ``add(x)`` sets ``value`` to ``fn(value, x)``; the first x is taken as it is.

    ``value`` is None before the first ``add`` and after ``clear()``. ``fn`` may change its first argument in place, if
    it returns it. ``TrackedReducing(fn)`` stands alone, in memory.

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
        value = property(lambda self: self._get(), doc="Everything added, reduced; None if nothing was.")

    def add(self, value: T) -> None:
        now = self._get()
        self._set(value if now is None else self._spec.reduce(now, value))  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"TrackedReducing({self.value!r})"


class MutableTrackedReducing(TrackedReducing[T], MutableTrackedValue[T]):
    """A TrackedReducing for values that can change in place."""

    __slots__ = ()


class TrackedCounter(TrackedValue[int]):
    """A whole number that starts at 0: ``counter.value += 1``, ``counter.add(n)``, ``clear()``.

    ``TrackedCounter()`` stands alone, in memory.

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
    """The default of a standalone counter."""

    name = "zero"
    mutable = False

    def encode(self, value: Any) -> bytes:
        raise NotImplementedError

    def decode(self, data: bytes) -> int:
        return 0


_STANDALONE_COUNTER = StateSpec("", "", _Zero(), default_payload=b"")
