"""TrackedMap, a dict per key with one stored cell per entry, and TrackedSet, a set per key with one per member."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, MutableMapping, MutableSet, ValuesView
from collections.abc import Set as AbstractSet
from contextlib import suppress
from copy import deepcopy
from operator import and_, iand, ior, isub, ixor, or_, sub, xor
from reprlib import recursive_repr
from types import MappingProxyType
from typing import Any, TypeVar

from stateflow.state.collection import Collection, is_augmented
from stateflow.state.tracked import PACKED

K = TypeVar("K")
V = TypeVar("V")


class TrackedMap(Collection[K], MutableMapping[K, V]):
    """A dict that iterates in encoded-key order, which for ordinary keys is sorted order.

    In an operator, an object always belongs to the same key. Reading one entry reads one cell; iterating reads all.
    Mutable values may be changed in place in the batch that read them. A value kept from an earlier batch is a copy:
    changing it does not change the state. A new key without a stored form (the wrong type, NaN) raises EncodeError at
    once, a value without a stored form raises it when the batch is collected.

    ``|``, ``copy()`` and the view operations return plain dicts and sets. ``TrackedMap({"a": 1})``, with the arguments
    of dict, makes a map in memory that belongs to no operator.

    >>> delay_by_dest = TrackedMap({"ORD": 3.0})
    >>> delay_by_dest["IAH"] = delay_by_dest.get("IAH", 0.0) + 11.0
    >>> list(delay_by_dest.items())
    [('IAH', 11.0), ('ORD', 3.0)]
    """

    __slots__ = ()
    _what = "dictionary"

    def __init__(self, data: Any = (), /, **entries: V) -> None:
        self._start_standalone()
        self.update(data, **entries)
        self.mark_clean()

    @classmethod
    def fromkeys(cls, keys: Iterable[K], value: Any = None, /) -> TrackedMap[K, Any]:
        made = cls()
        for key in keys:
            made[key] = value
        if isinstance(made, TrackedMap):  # a subclass's __new__ may return any object
            made.mark_clean()
        return made

    def changes(self) -> dict[str, Any]:
        """Returns the net change since the last commit: ``{"put": {key: value}, "deleted": [key, …]}``."""
        put, removed = self._changed()
        return {"put": {key: self._items[key] for key in put}, "deleted": removed}

    # --- one entry --------------------------------------------------------------------------------------

    def __getitem__(self, key: K) -> V:
        try:
            value = self._items[key]
        except KeyError:
            if not self._present(key):
                raise KeyError(key) from None
            value = self._items[key]
        return self._value(key) if value is PACKED else value  # type: ignore[no-any-return]

    def __setitem__(self, key: K, value: V) -> None:
        items = self._items
        try:
            written = key in items and key in self._base
        except TypeError:
            written = False  # _put raises the right error
        if written:
            items[key] = value
        else:
            self._put(key, value)

    def __delitem__(self, key: K) -> None:
        if not self._present(key):
            raise KeyError(key)
        self._drop(key)

    def __contains__(self, key: object) -> bool:
        return key in self._items or self._present(key)

    def get(self, key: K, default: Any = None, /) -> Any:
        if key in self._items or self._present(key):
            value = self._items[key]
            return self._value(key) if value is PACKED else value
        return default

    def setdefault(self, key: K, default: Any = None, /) -> Any:
        if self._present_or_refused(key):
            return self._value(key)
        self._put(key, default)
        return default

    def pop(self, key: K, *default: Any) -> Any:
        if len(default) > 1:
            raise TypeError(f"pop expected at most 2 arguments, got {1 + len(default)}")
        if not self._present(key):
            if default:
                return default[0]
            raise KeyError(key)
        value = self._value(key)
        self._drop(key)
        return value

    def popitem(self) -> tuple[K, V]:
        """Removes and returns the last entry in encoded-key order."""
        order = self._live_order()
        if not order:
            raise KeyError("popitem(): dictionary is empty")
        key = order[-1]
        value = self._value(key)
        self._drop(key)
        # the remaining keys are still in order, so that popping a map empty does not sort it each time
        order.pop()
        self._order = order
        return key, value

    # --- all entries ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        count = self._count
        return self._open() if count < 0 else count

    def __iter__(self) -> Iterator[K]:
        order = self._ordered()
        return self._walk(order, order)

    def __reversed__(self) -> Iterator[K]:
        order = self._ordered()
        return self._walk(order, reversed(order))

    def keys(self) -> KeysView[K]:
        return _Keys(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def clear(self) -> None:
        """Removes all entries without reading them."""
        self._drop_all()

    def copy(self) -> dict[K, V]:
        return dict(self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[K, V]:
        return deepcopy(self.copy(), memo)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            return self.copy() == (other.copy() if isinstance(other, TrackedMap) else dict(other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: Any) -> dict[Any, Any]:
        if not isinstance(other, dict | TrackedMap):
            return NotImplemented
        return {**self.copy(), **other}

    def __ror__(self, other: Any) -> dict[Any, Any]:
        # as the left operand does it: a defaultdict, for example, makes one
        return other | self.copy() if isinstance(other, dict) else NotImplemented

    def __ior__(self, other: Any) -> TrackedMap[K, V]:
        self.update(other)
        return self

    @recursive_repr("{...}")
    def __repr__(self) -> str:
        return repr(self.copy())


class CanonicalTrackedMap(TrackedMap[K, V]):
    """A TrackedMap for types in which keys that are not equal in Python may have the same stored form.

    The map looks up keys in their stored form.
    """

    __slots__ = ()

    def __getitem__(self, key: K) -> V:
        return super().__getitem__(self._spec.canonical(key))

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(self._spec.canonical(key), value)

    def __delitem__(self, key: K) -> None:
        super().__delitem__(self._spec.canonical(key))

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._spec.canonical(key))

    def get(self, key: K, default: Any = None, /) -> Any:
        return super().get(self._spec.canonical(key), default)

    def setdefault(self, key: K, default: Any = None, /) -> Any:
        return super().setdefault(self._spec.canonical(key), default)

    def pop(self, key: K, *default: Any) -> Any:
        return super().pop(self._spec.canonical(key), *default)


# The views of collections.abc lack some features of dict's views: reversed(), .mapping, and their repr.


class _Keys(KeysView[K]):
    __slots__ = ()
    _mapping: TrackedMap[K, Any]

    @property
    def mapping(self) -> MappingProxyType[K, Any]:
        return MappingProxyType(self._mapping)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._mapping)

    def __repr__(self) -> str:
        return f"dict_keys({list(self)!r})"


class _Values(ValuesView[V]):
    __slots__ = ()
    _mapping: TrackedMap[Any, V]

    @property
    def mapping(self) -> MappingProxyType[Any, V]:
        return MappingProxyType(self._mapping)

    def __iter__(self) -> Iterator[V]:
        keys = iter(self._mapping)
        return map(self._mapping._getter(), keys)

    def __reversed__(self) -> Iterator[V]:
        keys = reversed(self._mapping)
        return map(self._mapping._getter(), keys)

    def __repr__(self) -> str:
        return f"dict_values({list(self)!r})"


class _Items(ItemsView[K, V]):
    __slots__ = ()
    _mapping: TrackedMap[K, V]

    @property
    def mapping(self) -> MappingProxyType[K, V]:
        return MappingProxyType(self._mapping)

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return _pairs(self._mapping, iter(self._mapping))

    def __reversed__(self) -> Iterator[tuple[K, V]]:
        return _pairs(self._mapping, reversed(self._mapping))

    def __repr__(self) -> str:
        return f"dict_items({list(self)!r})"


def _pairs(tracked: TrackedMap[K, V], keys: Iterator[K]) -> Iterator[tuple[K, V]]:
    getter = tracked._getter()
    for key in keys:
        yield key, getter(key)


T = TypeVar("T")


class TrackedSet(Collection[T], MutableSet[T]):
    """A set that iterates in encoded order, which for ordinary members is sorted order.

    In an operator, an object always belongs to the same key. Looking up one member reads one cell; iterating reads all.
    A member without a stored form raises EncodeError when it is added. Operators and methods that return a new set
    return a plain set. ``TrackedSet([1, 2])`` makes a set in memory that belongs to no operator.

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
        order = self._live_order()
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
        with suppress(KeyError):  # a member's __eq__ may have changed the set during the lookup
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

    # a builtin set on the left decides the type: a frozenset makes one; a set before |= is changed itself

    def __ror__(self, other: Any) -> Any:
        if isinstance(other, set | frozenset):
            return (ior if is_augmented() else or_)(other, self.copy())  # type: ignore[no-untyped-call]
        return self.__or__(other)

    def __and__(self, other: Any) -> set[T]:
        return self.intersection(other) if isinstance(other, AbstractSet) else NotImplemented

    def __rand__(self, other: Any) -> Any:
        if isinstance(other, set | frozenset):
            return (iand if is_augmented() else and_)(other, self.copy())  # type: ignore[no-untyped-call]
        return self.__and__(other)

    def __sub__(self, other: Any) -> set[T]:
        return self.difference(other) if isinstance(other, AbstractSet) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        if isinstance(other, set | frozenset):
            return (isub if is_augmented() else sub)(other, self.copy())  # type: ignore[no-untyped-call]
        return set(other).difference(self) if isinstance(other, AbstractSet) else NotImplemented

    def __xor__(self, other: Any) -> set[Any]:
        return self.symmetric_difference(other) if isinstance(other, AbstractSet) else NotImplemented

    def __rxor__(self, other: Any) -> Any:
        if isinstance(other, set | frozenset):
            return (ixor if is_augmented() else xor)(other, self.copy())  # type: ignore[no-untyped-call]
        return self.__xor__(other)

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
    """A TrackedSet for types in which members that are not equal in Python may have the same stored form.

    The set looks up members in their stored form.
    """

    __slots__ = ()

    def __contains__(self, member: object) -> bool:
        return super().__contains__(self._spec.canonical(member))

    def add(self, member: T) -> None:
        super().add(self._spec.canonical(member))

    def _drop(self, key: Any) -> None:
        super()._drop(self._spec.canonical(key))


def _frozen(member: object) -> Any:
    """Returns a set as a frozenset, as which Python's sets look it up. Raises TypeError for any other object."""
    if isinstance(member, set | TrackedSet):
        return frozenset(member)
    raise TypeError(f"unhashable type: {type(member).__name__!r}")
