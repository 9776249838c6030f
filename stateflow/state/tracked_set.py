"""TrackedSet: a set per key, one stored cell per member."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from collections.abc import Set as AbstractSet
from contextlib import suppress
from copy import deepcopy
from reprlib import recursive_repr
from typing import Any, TypeVar

from stateflow.state.collection import Collection

T = TypeVar("T")


class TrackedSet(Collection[T], MutableSet[T]):
    """A set that iterates in encoded order, which for ordinary members is sorted order.

    On an operator an object belongs to one key for good. Looking up one member reads one cell; iterating reads all. A
    member without a stored form raises EncodeError when it is added. Operators and methods that return a new set return
    a plain set. ``TrackedSet([1, 2])`` stands alone, in memory.

    >>> carriers = TrackedSet(["UA"])
    >>> carriers.add("AA")
    >>> list(carriers)
    ['AA', 'UA']
    """

    __slots__ = ()
    _what = "Set"

    def __init__(self, members: Iterable[T] = (), /) -> None:
        self._start_standalone()
        for member in members:
            self._put(member, None)
        self.mark_clean()

    def changes(self) -> dict[str, set[T]]:
        """Returns the net change since the last commit: ``{"added": {…}, "removed": {…}}``."""
        added, removed = self._changed()
        return {"added": set(added), "removed": set(removed)}

    # --- one member -------------------------------------------------------------------------------------

    def __contains__(self, member: object) -> bool:
        try:
            return member in self._items or self._present(member)
        except TypeError:
            return self._present(_frozen(member))

    def add(self, member: T) -> None:
        if not self._present_or_refused(member):
            self._put(member, None)

    def discard(self, member: T) -> None:
        if member in self:
            self._drop(_frozen(member) if isinstance(member, set | TrackedSet) else member)

    def remove(self, member: T) -> None:
        if member not in self:
            raise KeyError(member)
        self.discard(member)

    def pop(self) -> T:
        """Removes and returns the last member in encoded order."""
        order = self._ordered()
        if not order:
            raise KeyError("pop from an empty set")
        member = order[-1]
        self._drop(member)
        # the remaining members are still in order, so that popping a set empty does not sort it each time
        order.pop()
        self._order = order
        return member

    # --- all members ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        count = self._count
        return self._open() if count < 0 else count

    def __iter__(self) -> Iterator[T]:
        order = self._ordered()
        return self._walk(order, order)

    def clear(self) -> None:
        """Removes all members without reading them."""
        self._drop_all()

    def copy(self) -> set[T]:
        return set(self._ordered())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> set[T]:
        return deepcopy(self.copy(), memo)

    def _drop(self, key: Any) -> None:
        with suppress(KeyError):  # a member's __eq__ may have changed the set meanwhile
            super()._drop(key)

    @recursive_repr("set(...)")
    def __repr__(self) -> str:
        members = self._ordered()
        return "{" + ", ".join(map(repr, members)) + "}" if members else "set()"

    # --- new sets ---------------------------------------------------------------------------------------

    def union(self, *others: Iterable[Any]) -> set[Any]:
        return self.copy().union(*others)

    def intersection(self, *others: Iterable[Any]) -> set[T]:
        return self.copy().intersection(*others)

    def difference(self, *others: Iterable[Any]) -> set[T]:
        return self.copy().difference(*others)

    def symmetric_difference(self, other: Iterable[Any], /) -> set[Any]:
        return self.copy().symmetric_difference(other)

    def __or__(self, other: Any) -> set[Any]:
        return self.union(other) if isinstance(other, AbstractSet) else NotImplemented

    __ror__ = __or__

    def __and__(self, other: Any) -> set[T]:
        return self.intersection(other) if isinstance(other, AbstractSet) else NotImplemented

    __rand__ = __and__

    def __sub__(self, other: Any) -> set[T]:
        return self.difference(other) if isinstance(other, AbstractSet) else NotImplemented

    def __rsub__(self, other: Any) -> set[Any]:
        return set(other).difference(self) if isinstance(other, AbstractSet) else NotImplemented

    def __xor__(self, other: Any) -> set[Any]:
        return self.symmetric_difference(other) if isinstance(other, AbstractSet) else NotImplemented

    __rxor__ = __xor__

    # --- changing this one ------------------------------------------------------------------------------

    def update(self, *others: Iterable[T]) -> None:
        for other in others:
            for member in list(other) if other is self else other:
                self.add(member)

    def intersection_update(self, *others: Iterable[Any]) -> None:
        self.difference_update(self.difference(self.intersection(*others)))

    def difference_update(self, *others: Iterable[Any]) -> None:
        for other in others:
            if other is self:
                self.clear()
            else:
                for member in other:
                    if member in self:
                        self._drop(member)

    def symmetric_difference_update(self, other: Iterable[Any], /) -> None:
        if other is self:
            self.clear()
        else:
            for member in set(other):
                if member in self:
                    self._drop(member)
                else:
                    self.add(member)

    def __ior__(self, other: Any) -> TrackedSet[T]:
        if not isinstance(other, AbstractSet):
            return NotImplemented
        self.update(other)
        return self

    def __iand__(self, other: Any) -> TrackedSet[T]:
        if not isinstance(other, AbstractSet):
            return NotImplemented
        self.intersection_update(other)
        return self

    def __isub__(self, other: Any) -> TrackedSet[T]:
        if not isinstance(other, AbstractSet):
            return NotImplemented
        self.difference_update(other)
        return self

    def __ixor__(self, other: Any) -> TrackedSet[T]:
        if not isinstance(other, AbstractSet):
            return NotImplemented
        self.symmetric_difference_update(other)
        return self

    # --- comparing --------------------------------------------------------------------------------------

    def isdisjoint(self, other: Iterable[Any], /) -> bool:
        return self.copy().isdisjoint(other)

    def issubset(self, other: Iterable[Any], /) -> bool:
        return self.copy().issubset(other)

    def issuperset(self, other: Iterable[Any], /) -> bool:
        return self.copy().issuperset(other)

    def __eq__(self, other: object) -> bool:
        return self.copy() == set(other) if isinstance(other, AbstractSet) else NotImplemented

    def __le__(self, other: Any) -> bool:
        return self.copy() <= set(other) if isinstance(other, AbstractSet) else NotImplemented

    def __lt__(self, other: Any) -> bool:
        return self.copy() < set(other) if isinstance(other, AbstractSet) else NotImplemented

    def __ge__(self, other: Any) -> bool:
        return self.copy() >= set(other) if isinstance(other, AbstractSet) else NotImplemented

    def __gt__(self, other: Any) -> bool:
        return self.copy() > set(other) if isinstance(other, AbstractSet) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class CanonicalTrackedSet(TrackedSet[T]):
    """A TrackedSet for members that Python does not find equal though they are stored as one.

    It looks members up in their stored form.
    """

    __slots__ = ()

    def __contains__(self, member: object) -> bool:
        return super().__contains__(self._spec.canonical(member))

    def add(self, member: T) -> None:
        super().add(self._spec.canonical(member))

    def _drop(self, key: Any) -> None:
        super()._drop(self._spec.canonical(key))


def _frozen(member: object) -> Any:
    """Returns a set as a frozenset, to look it up as the builtin does. Raises TypeError for other unhashables."""
    if isinstance(member, set | TrackedSet):
        return frozenset(member)
    raise TypeError(f"unhashable type: {type(member).__name__!r}")
