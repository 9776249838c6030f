"""TrackedList, a list per key with one stored cell per element."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from copy import deepcopy
from operator import add, iadd, is_not
from operator import index as as_index
from reprlib import recursive_repr
from typing import Any, SupportsIndex, TypeVar

from stateflow.changes import Mutations
from stateflow.state.collection import Collection, is_augmented
from stateflow.state.encoding import order_int, unorder_int
from stateflow.state.tracked import MISSING, PACKED

T = TypeVar("T")

_EXTENT = struct.Struct(">QQQ")
_BIAS = 1 << 63
#: maximum number of elements that are always looked up one by one; for more, a scan may be cheaper
_LOOKUPS_MAX = 16


class TrackedList(Collection[int], MutableSequence[T]):
    """A list with one stored cell per element.

    In an operator, an object always belongs to the same key. ``append``, ``pop()``, ``pop(0)``, and reading or
    assigning one element access one element, however long the list is; inserting or deleting elsewhere moves the
    elements on the shorter side. Slices, ``+``, ``*`` and ``copy()`` return plain lists.

    Mutable elements may be changed in place in the batch that read them. An element kept from an earlier batch is a
    copy: changing it does not change the state. ``TrackedList([1])`` makes a list in memory, which belongs to no
    operator.

    >>> recent = TrackedList([1.5, 2.5])
    >>> recent.append(3.5)
    >>> recent[-1], len(recent)
    (3.5, 3)
    """

    # Elements are entries of the collection, with ascending *places* as keys. Element i has the place _start + i; if
    # there are holes, which only expired elements leave, it has the i-th of the live places.
    __slots__ = ("_end", "_holes", "_start", "_stored_extent")
    _what = "list"
    _entry_word = "index"

    _end: int
    _holes: bool
    _start: int
    #: stored values of (_start, _end)
    _stored_extent: tuple[int, int]

    def __init__(self, elements: Iterable[T] = (), /) -> None:
        self._start_standalone()
        self.extend(elements)
        self.mark_clean()

    def changes(self) -> dict[str, Any]:
        """Returns the net change since the last commit: ``{"put": {index: value}, "deleted": [index, …]}``.

        ``put`` contains elements by their present index, ``deleted`` the former indexes of removed elements.
        """
        put, removed = self._changed()
        if self._holes:
            now: Any = {place: index for index, place in enumerate(self._ordered())}
            before: Any = {place: index for index, (place, _) in enumerate(self._stored_entries())}
            return {
                "put": {now[place]: self._items[place] for place in put},
                "deleted": [before[place] for place in removed],
            }
        first = self._stored_extent[0]
        return {
            "put": {place - self._start: self._items[place] for place in put},
            "deleted": [place - first for place in removed],
        }

    # --- places -----------------------------------------------------------------------------------------

    def _reset(self) -> None:
        super()._reset()
        self._start = self._end = 0
        self._stored_extent = (0, 0)
        self._holes = False

    def _unpack_count(self, payload: bytes) -> int:
        if len(payload) == 8:
            count, start = unorder_int(payload), 0
            end = count
        else:
            count, start, end = [number - _BIAS for number in _EXTENT.unpack(payload)]
        self._start, self._end = self._stored_extent = start, end
        self._holes = end - start != count
        return count

    def _entry_name(self, key: int) -> str:
        return str(key - self._start)

    def _size(self) -> int:
        """Returns the number of live elements."""
        count = self._count
        return self._open() if count < 0 else count

    def _places(self, low: int, high: int) -> Sequence[int]:
        """Returns the places of the elements from ``low`` to ``high``, ``high`` excluded; 0 <= low <= high <= size."""
        if self._holes:
            return self._ordered()[low:high]
        return range(self._start + low, self._start + high)

    def _place(self, index: int, size: int, error: str) -> int:
        """Returns the place of one element. Raises IndexError(error) for an index out of range."""
        if index < 0:
            index += size
        if not 0 <= index < size:
            raise IndexError(error)
        return self._ordered()[index] if self._holes else self._start + index

    def _bring(self, places: Sequence[int]) -> None:
        """Loads the live elements at ``places``."""
        items = self._items
        missing = [place for place in places if place not in items]
        if len(missing) > _LOOKUPS_MAX and len(missing) * 4 > self._count - len(items):
            self._load_all()
            return
        for place in missing:
            if not self._fetch(place):
                raise self._spec.count_differs(self._row, self._count - 1, self._count)

    def _at(self, place: int) -> T:
        """Returns a live element for the user. From now on a mutable element is tracked for changes."""
        items = self._items
        if place not in items:
            self._bring((place,))
        value = items[place]
        return self._value(place) if value is PACKED else value  # type: ignore[no-any-return]

    def _values(self, low: int, high: int) -> list[T]:
        places = self._places(low, high)
        self._bring(places)
        if self._spec.mutable:
            return [self._value(place) for place in places]
        return list(map(self._items.__getitem__, places))

    def _all(self) -> list[T]:
        return self._values(0, self._size())

    # --- changing elements ------------------------------------------------------------------------------

    def _assign(self, place: int, value: T) -> None:
        """Replaces a live element, which is loaded."""
        self._remember(place)
        self._items[place] = value

    def _add(self, place: int, value: T) -> None:
        """Adds an element at an empty place."""
        if not self._dirty:
            self._log()
        if not self._spec.standalone:
            self._base.setdefault(place, MISSING)
        self._items[place] = value
        self._count += 1
        self._spec.entries_cached += 1

    def _take_out(self, place: int) -> None:
        """Removes a live element, which is loaded."""
        self._remember(place)
        del self._items[place]
        self._count -= 1

    def _replace(self, old: Sequence[int], new: Sequence[int], values: Iterable[T]) -> None:
        """Empties the live places ``old``, and puts ``values`` at the places ``new``, which are empty or in ``old``."""
        self._bring(old)
        for place, value in zip(new, values, strict=True):
            if place in self._items:
                self._assign(place, value)
            else:
                self._add(place, value)
        kept = new if isinstance(new, range) else set(new)
        for place in old:
            if place not in kept:
                self._take_out(place)

    def _splice(self, low: int, high: int, new: list[T]) -> None:
        """Replaces the elements from ``low`` to ``high``, ``high`` excluded, by ``new``; 0 <= low <= high <= size."""
        if self._holes:
            self._splice_with_holes(low, high, new)
            return
        count, start, end = self._count, self._start, self._end
        grown = len(new) - (high - low)
        if grown == 0:
            places = range(start + low, start + high)
            self._replace(places, places, new)
        elif count - high <= low:  # the elements after them move, because they are fewer than those before
            new += self._values(high, count)
            self._replace(range(start + low, end), range(start + low, end + grown), new)
            self._end = end + grown
        else:
            new = self._values(0, low) + new
            self._replace(range(start, start + high), range(start - grown, start + high), new)
            self._start = start - grown

    def _splice_with_holes(self, low: int, high: int, new: list[T]) -> None:
        order = self._ordered()
        kept = low + min(len(new), high - low)
        self._replace(order[low:high], order[low:kept], new[: kept - low])
        del order[kept:high]
        more = new[kept - low :]
        if more and kept == 0 and order:
            fresh = range(self._start - len(more), self._start)
            self._replace((), fresh, more)
            self._start = fresh.start
            order[:0] = fresh
        elif more:
            fresh = range(self._end, self._end + len(more))
            more += self._values(kept, len(order))
            tail = order[kept:]
            self._replace(tail, [*tail, *fresh], more)
            self._end = fresh.stop
            order += fresh
        self._order = order

    def _drop_all(self) -> None:
        super()._drop_all()
        self._start = self._end = 0
        self._holes = False

    # --- one element ------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            size = self._size()
            low, high, step = index.indices(size)
            if step == 1:
                return self._values(low, max(low, high))
            places = [self._place(each, size, "") for each in range(low, high, step)]
            self._bring(places)
            return [self._at(place) for place in places]
        return self._at(self._place(_index(index), self._size(), "list index out of range"))

    def __setitem__(self, index: Any, value: Any) -> None:
        size = self._size()
        if not isinstance(index, slice):
            place = self._place(_index(index), size, "list assignment index out of range")
            if place not in self._items:
                self._bring((place,))
            self._assign(place, value)
            return
        low, high, step = index.indices(size)
        # making the values may change this list
        if step == 1:
            values = _list_of(value, "can only assign an iterable")
            size = self._size()
            self._splice(min(low, size), min(max(low, high), size), values)
            return
        values = _list_of(value, "must assign iterable to extended slice")
        size = self._size()
        indexes = range(*index.indices(size))
        if len(values) != len(indexes):
            raise ValueError(
                f"attempt to assign sequence of size {len(values)} to extended slice of size {len(indexes)}"
            )
        places = [self._place(each, size, "") for each in indexes]
        self._replace(places, places, values)

    def __delitem__(self, index: Any) -> None:
        size = self._size()
        if not isinstance(index, slice):
            index = _index(index)
            self._place(index, size, "list assignment index out of range")
            index %= size
            self._splice(index, index + 1, [])
            return
        low, high, step = index.indices(size)
        if step == 1:
            self._splice(low, max(low, high), [])
            return
        gone = range(low, high, step)
        if gone:
            first = min(gone)
            rest = self._values(first, size)
            self._splice(first, size, [value for each, value in enumerate(rest, first) if each not in gone])

    def append(self, value: T) -> None:
        if self._count < 0:
            self._open()
        place = self._end
        self._add(place, value)
        self._end = place + 1
        if self._order is not None:
            self._order.append(place)

    def insert(self, index: SupportsIndex, value: T) -> None:
        size = self._size()
        low, _, _ = slice(as_index(index), None).indices(size)
        self._splice(low, low, [value])

    def pop(self, index: SupportsIndex = -1, /) -> T:
        at, size = as_index(index), self._size()
        if not size:
            raise IndexError("pop from empty list")
        value = self._at(self._place(at, size, "pop index out of range"))
        at %= size
        self._splice(at, at + 1, [])
        return value

    def remove(self, value: T, /) -> None:
        try:
            at = self._all().index(value)
        except ValueError:
            raise ValueError("list.remove(x): x not in list") from None
        self._splice(at, at + 1, [])

    # --- all elements -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._size()

    def __iter__(self) -> Iterator[T]:
        """Iterates like a list, including elements that are appended during the iteration."""
        self._size()
        self._load_all()
        return self._walk_from(0)

    def _walk_from(self, index: int) -> Iterator[T]:
        while index < self._size():
            yield self._at(self._place(index, self._count, ""))
            index += 1

    def __reversed__(self) -> Iterator[T]:
        size = self._size()
        self._load_all()
        return self._walk_back(size - 1)

    def _walk_back(self, index: int) -> Iterator[T]:
        while 0 <= index < self._size():
            yield self._at(self._place(index, self._count, ""))
            index -= 1

    def __contains__(self, value: object) -> bool:
        return value in self._all()

    def index(self, value: T, start: SupportsIndex = 0, stop: SupportsIndex = sys.maxsize, /) -> int:
        return self._all().index(value, start, stop)

    def count(self, value: T) -> int:
        return self._all().count(value)

    def extend(self, values: Iterable[T]) -> None:
        for value in list(self) if values is self else values:
            self.append(value)

    def clear(self) -> None:
        """Removes all elements without reading them."""
        self._drop_all()

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        before: list[Any] = self._all()
        values = sorted(before, key=key, reverse=reverse)
        now = self._all()
        self._splice(0, len(now), values)
        if len(now) != len(before) or any(map(is_not, now, before)):
            raise ValueError("list modified during sort")

    def reverse(self) -> None:
        values = self._all()
        self._splice(0, len(values), values[::-1])

    def copy(self) -> list[T]:
        return self._all()

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> list[T]:
        return deepcopy(self.copy(), memo)

    @recursive_repr("[...]")
    def __repr__(self) -> str:
        return repr(self.copy())

    # --- operators --------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> list[Any]:
        plain = _plain(other)
        return NotImplemented if plain is None else self._all() + plain

    def __radd__(self, other: Any) -> list[Any]:
        if not isinstance(other, list):
            return NotImplemented
        return (iadd if is_augmented() else add)(other, self._all())  # type: ignore[no-any-return, no-untyped-call]

    def __iadd__(self, values: Iterable[T]) -> TrackedList[T]:  # type: ignore[misc]
        self.extend(values)
        return self

    def __mul__(self, times: SupportsIndex) -> list[T]:
        return self._all() * times if hasattr(times, "__index__") else NotImplemented

    __rmul__ = __mul__

    def __imul__(self, times: SupportsIndex) -> TrackedList[T]:
        if not hasattr(times, "__index__"):
            return NotImplemented
        count = as_index(times)
        if count <= 0:
            self.clear()
        elif count > 1:
            self.extend(self._all() * (count - 1))
        return self

    def __eq__(self, other: object) -> bool:
        plain = _plain(other)
        return NotImplemented if plain is None else self._all() == plain

    def __lt__(self, other: Any) -> bool:
        plain = _plain(other)
        return NotImplemented if plain is None else self._all() < plain

    def __le__(self, other: Any) -> bool:
        plain = _plain(other)
        return NotImplemented if plain is None else self._all() <= plain

    def __gt__(self, other: Any) -> bool:
        plain = _plain(other)
        return NotImplemented if plain is None else self._all() > plain

    def __ge__(self, other: Any) -> bool:
        plain = _plain(other)
        return NotImplemented if plain is None else self._all() >= plain

    __hash__ = None  # type: ignore[assignment]

    # --- net change -------------------------------------------------------------------------------------

    def _collect_count(self, into: Mutations) -> None:
        extent = (self._start, self._end)
        if self._count != self._stored_count or (self._count and extent != self._stored_extent):
            payload = order_int(self._count)
            if extent != (0, self._count):
                payload += order_int(self._start) + order_int(self._end)
            self._put_count(into, payload)

    def _saved(self) -> None:
        super()._saved()
        if not self._count:
            self._start = self._end = 0
        self._stored_extent = (self._start, self._end)

    def mark_clean(self) -> None:
        super().mark_clean()
        self._stored_extent = (self._start, self._end)


def _index(index: Any) -> int:
    if index.__class__ is int:
        return index
    if not hasattr(index, "__index__"):
        raise TypeError(f"list indices must be integers or slices, not {type(index).__name__}")
    return as_index(index)


def _list_of(values: Any, error: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        if hasattr(type(values), "__iter__"):
            raise
        raise TypeError(error) from None


def _plain(other: object) -> list[Any] | None:
    """Returns the elements of a list or TrackedList; None if ``other`` is neither."""
    if isinstance(other, TrackedList):
        return other._all()
    return other if isinstance(other, list) else None
