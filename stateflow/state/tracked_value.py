"""TrackedValue: one variable per key; TrackedReducing and TrackedCounter: values that accumulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from stateflow.changes import Mutations
from stateflow.errors import DecodeError
from stateflow.state.cells import unpack_cell
from stateflow.state.coders import Coder
from stateflow.state.spec import (
    DECODE_FAILURES,
    ENCODE_FAILURES,
    STANDALONE,
    STANDALONE_VALUES,
    UNREAD,
    StateSpec,
    fingerprint,
)

T = TypeVar("T")


class TrackedValue(Generic[T]):
    """A variable: read and assign ``.value``; ``clear()`` goes back to the declared default.

    On an operator an object belongs to one key for good, even when it is kept while other keys are processed. A mutable
    value (list, dict, …) may be changed in place in the batch that read it. An object kept from an earlier batch is a
    copy: changing it changes nothing in the state.
    ``TrackedValue(0)`` stands alone, in memory.

    >>> flights = TrackedValue(0)
    >>> flights.value += 1
    >>> flights.value
    1
    """

    __slots__ = ("_dirty", "_implicit", "_next", "_now", "_row", "_spec", "_stored")

    _dirty: bool
    #: ``_now`` is the default of an absent cell, not something assigned
    _implicit: bool
    #: payload as the last ``_collect`` encoded it; None: no cell
    _next: bytes | None
    #: unset until the value is read or assigned
    _now: T
    _row: bytes
    _spec: StateSpec
    #: payload in the store; None: no cell; UNREAD: not read yet; standalone: a fingerprint
    _stored: Any

    def __init__(self, value: T, /) -> None:
        self._spec = STANDALONE
        self._row = b""
        self._dirty = True  # never logged
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
        """Marks the object clean: the change from ``_collect`` is in the store now."""
        spec = self._spec
        self._dirty = self._implicit = False
        payload = self._stored = self._next
        if spec.mutable:
            # an operator that kept the object must not change the cache behind the store's back
            del self._now
        elif payload is None:
            self._now = cast(T, spec.default)
        elif self._now.__class__ is not spec.exact:
            self._now = spec.decode(payload)

    def _forget(self) -> None:
        """Discards changes and all loaded data: the next access reads the store."""
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
