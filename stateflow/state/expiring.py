"""Tracked objects of states with a ttl, and the sweep that finds their expired cells in the store.

Time is fixed within a batch. An expired value, entry or element is *dropped by the first access that meets it*, and
counts as removed in that batch. So all other code (net change, count, rollback, putting it again) can ignore time.
Expired entries that were not accessed stay in the store and in the stored count, but are invisible, until the
:class:`Sweep` finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from stateflow.changes import Mutations
from stateflow.state.cells import CellReader, range_end, unpack_cell_with_expiry
from stateflow.state.collection import Collection
from stateflow.state.tracked import (
    DECODE_FAILURES,
    EXPIRED,
    PACKED,
    UNREAD,
    StateSpec,
    TrackedCounter,
    TrackedReducing,
    TrackedValue,
)
from stateflow.state.tracked_list import TrackedList
from stateflow.state.tracked_map import CanonicalTrackedMap, CanonicalTrackedSet, TrackedMap, TrackedSet, _frozen

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Lifetimes(Generic[K]):
    """Expiries of the loaded entries of one collection."""

    __slots__ = ("_groups", "_heap", "_queued", "cleared", "expiry", "rewritten", "touched")

    def __init__(self) -> None:
        #: expiry of every loaded stored entry that has one
        self.expiry: dict[K, int] = {}
        #: expiries of all stored entries of a cleared collection, loaded or not, as the last ``_collect`` found them
        self.cleared: dict[K, int | None] = {}
        #: entries that were assigned in this batch, or read late enough to be renewed. They get a new expiry even if
        #: their value is unchanged
        self.touched: set[K] = set()
        #: entries that the last ``_collect`` put
        self.rewritten: list[K] = []
        #: expiry → entries that had it; some may have another expiry by now
        self._groups: dict[int, list[K]] = {}
        #: the keys of ``_groups``
        self._heap: list[int] = []
        #: number of entries in ``_groups``
        self._queued = 0

    def is_due(self, now_us: int) -> bool:
        """Returns whether an entry may have expired."""
        return bool(self._heap) and self._heap[0] <= now_us

    def due(self, now_us: int) -> Iterator[K]:
        """Yields entries that have expired and were not touched, each of them once."""
        while self.is_due(now_us):
            at_us = heappop(self._heap)
            group = self._groups.pop(at_us)
            self._queued -= len(group)
            for key in group:
                if self.expiry.get(key) == at_us and key not in self.touched:
                    yield key

    def set(self, key: K, at_us: int | None) -> None:
        if at_us is None:
            self.expiry.pop(key, None)
            return
        self.expiry[key] = at_us
        group = self._groups.get(at_us)
        if group is None:
            self._groups[at_us] = [key]
            heappush(self._heap, at_us)
        else:
            group.append(key)
        self._queued += 1
        if self._queued > 2 * len(self.expiry) + 64:
            self._regroup()

    def _regroup(self) -> None:
        """Drops outdated expiries from the groups."""
        groups: dict[int, list[K]] = {}
        for key, at_us in self.expiry.items():
            groups.setdefault(at_us, []).append(key)
        self._groups, self._heap, self._queued = groups, list(groups), len(self.expiry)
        heapify(self._heap)


class Expiring(Collection[K]):
    """Mixin of collections with a ttl."""

    __slots__ = ()

    _times: Lifetimes[K]

    def _reset(self) -> None:
        super()._reset()
        self._times = Lifetimes()

    # --- time -------------------------------------------------------------------------------------------

    def _age(self) -> None:
        """Drops the loaded entries that have expired."""
        times, now_us, items = self._times, self._spec.now_us, self._items
        if times.is_due(now_us):
            for key in times.due(now_us):
                if key in items:
                    del items[key]
                    self._bury(key)

    def _bury(self, key: K) -> None:
        """Counts an expired entry as removed in this batch."""
        if not self._dirty:
            self._log()
        self._base[key] = EXPIRED
        self._count -= 1
        self._order = None

    def _touch(self, key: K) -> None:
        self._times.touched.add(key)
        if not self._dirty:
            self._log()

    def _read_now(self, key: K) -> None:
        """Notes that a live entry was read, which may extend its life."""
        spec, times = self._spec, self._times
        if spec.refresh_below_us is None or key in times.touched or spec.expiry_us is None:
            return
        expiry = times.expiry.get(key)
        if expiry is None:
            if key not in self._base:
                self._touch(key)
        elif expiry - spec.now_us < spec.refresh_below_us:
            self._touch(key)

    def _meet(self, entry: bytes) -> None:
        """Drops a stored entry that has expired, or gives an expiry to one that has none. The sweep calls it."""
        key = self._spec.key_coder.decode_key(entry)
        self._age()
        live = Collection._present(self, key)
        if live and not (key in self._times.expiry or key in self._base or self._spec.expiry_us is None):
            self._touch(key)

    # --- reading ----------------------------------------------------------------------------------------

    def _present(self, key: Any) -> bool:
        self._age()
        if not super()._present(key):
            return False
        self._read_now(key)
        return True

    def _take_in(self, key: K, data: bytes) -> None:
        try:
            _, expiry = unpack_cell_with_expiry(data)
        except DECODE_FAILURES as error:
            raise self._unreadable(error, key) from error
        if expiry is not None and expiry <= self._spec.now_us:
            self._bury(key)
            return
        super()._take_in(key, data)
        if expiry is not None:
            self._times.set(key, expiry)

    def _live_order(self) -> list[K]:
        self._age()
        return super()._live_order()

    def _ordered(self) -> list[K]:
        order = self._live_order()
        if self._spec.refresh_below_us is not None:
            for key in order:
                self._read_now(key)
        return order

    def __len__(self) -> int:
        """Counts the live entries by reading all entries, because the stored count includes expired ones."""
        self._age()
        self._load_all()
        return self._count

    # --- writing ----------------------------------------------------------------------------------------

    def _put(self, key: K, value: Any) -> None:
        super()._put(key, value)
        self._times.touched.add(key)

    # --- net change -------------------------------------------------------------------------------------

    def _net(self) -> dict[K, bytes | None]:
        net = super()._net()
        items, times, expiry = self._items, self._times, self._spec.expiry_us
        stored: Mapping[K, int | None] = times.cleared if self._cleared else times.expiry
        for key in times.touched:
            if key in items and key not in net and stored.get(key) != expiry:
                value = items[key]
                # a reader may have named the entry by an equal key of another type
                entry = self._spec.admit_present(key)
                net[entry] = self._packed[key] if value is PACKED else self._encoded(key, value)
        times.rewritten = [key for key, payload in net.items() if payload is not None]
        return net

    def _cleared_payloads(self) -> dict[K, Any]:
        stored = {key: unpack_cell_with_expiry(data) for key, data in self._stored_entries()}
        self._times.cleared = {key: expiry for key, (_, expiry) in stored.items()}
        return {key: payload for key, (payload, _) in stored.items()}

    def _everything(self) -> dict[K, bytes | None]:
        self._times.rewritten = list(self._items)
        return super()._everything()

    def _saved(self) -> None:
        items, times, expiry = self._items, self._times, self._spec.expiry_us
        for key in times.expiry.keys() - items.keys() if self._cleared else self._base:
            if key not in items:
                times.set(key, None)
        super()._saved()
        for key, at_us in times.cleared.items():
            if key in items:
                times.set(key, at_us)
        times.touched, times.cleared = set(), {}
        for key in times.rewritten:
            times.set(key, expiry)
        times.rewritten = []


class ExpiringMap(Expiring[K], TrackedMap[K, V]):
    """A TrackedMap whose entries expire one by one."""

    __slots__ = ()

    def __getitem__(self, key: K) -> V:
        if not self._present(key):
            raise KeyError(key)
        return self._value(key)  # type: ignore[no-any-return]

    def __setitem__(self, key: K, value: V) -> None:
        self._put(key, value)

    def __contains__(self, key: object) -> bool:
        return self._present(key)

    def get(self, key: K, default: Any = None, /) -> Any:
        return self._value(key) if self._present(key) else default


class CanonicalExpiringMap(CanonicalTrackedMap[K, V], ExpiringMap[K, V]):
    """An ExpiringMap for types in which keys that are not equal in Python may have the same stored form."""

    __slots__ = ()


class ExpiringSet(Expiring[T], TrackedSet[T]):
    """A TrackedSet whose members expire one by one; adding a member again renews its expiry."""

    __slots__ = ()

    def __contains__(self, member: object) -> bool:
        try:
            return self._present(member)
        except TypeError:
            return self._present(_frozen(member))

    def add(self, member: T) -> None:
        self._put(member, None)


class CanonicalExpiringSet(CanonicalTrackedSet[T], ExpiringSet[T]):
    """An ExpiringSet for types in which members that are not equal in Python may have the same stored form."""

    __slots__ = ()


class ExpiringList(Expiring[int], TrackedList[T]):
    """A TrackedList whose elements expire one by one; the elements after an expired one move up.

    All operations except ``append`` and ``clear`` read the whole list, because every index depends on which elements
    have expired. An element that moves because another one is inserted counts as written.
    """

    __slots__ = ()

    def _unpack_count(self, payload: bytes) -> int:
        count = super()._unpack_count(payload)
        self._holes = True
        return count

    def _reset(self) -> None:
        super()._reset()
        self._holes = True

    def _drop_all(self) -> None:
        super()._drop_all()
        self._holes = True

    def _ordered(self) -> list[int]:
        return self._live_order()

    def _size(self) -> int:
        return Expiring.__len__(self)

    def _at(self, place: int) -> T:
        self._read_now(place)
        return super()._at(place)

    def _values(self, low: int, high: int) -> list[T]:
        for place in self._places(low, high):
            self._read_now(place)
        return super()._values(low, high)

    def _assign(self, place: int, value: T) -> None:
        super()._assign(place, value)
        self._times.touched.add(place)

    def _add(self, place: int, value: T) -> None:
        super()._add(place, value)
        self._times.touched.add(place)


# --- one value -----------------------------------------------------------------------------------------


class ExpiringValue(TrackedValue[T]):
    """A TrackedValue, mutable or not, that has its default again after it has expired."""

    __slots__ = ("_expiry", "_rewritten", "_touched")

    #: expiry of the stored cell; None: there is no cell, or it never expires
    _expiry: int | None
    #: whether the last ``_collect`` put the cell
    _rewritten: bool
    #: whether the value was assigned in this batch, or read late enough to be renewed. It then gets a new expiry even
    #: if it is unchanged
    _touched: bool

    if not TYPE_CHECKING:

        def _get(self):
            spec = self._spec
            try:
                now = self._now
            except AttributeError:
                now = self._load()
            else:
                if self._expiry is not None and self._expiry <= spec.now_us and not self._touched:
                    now = self._expire()
            if spec.refresh_below_us is not None and not self._touched:
                self._read_now()
            if spec.mutable and not self._dirty:
                self._log()
            return now

        def _set(self, value):
            self._now = value
            self._implicit = False
            self._touched = True
            if not self._dirty:
                self._log()

        value = property(_get, _set, doc="The current value; changing it in place is tracked.")

    @classmethod
    def _bound(cls, spec: StateSpec, row: bytes) -> Any:
        self: Any = super()._bound(spec, row)
        self._expiry = None
        self._touched = self._rewritten = False
        return self

    def _unpack(self, data: bytes) -> bytes:
        payload, self._expiry = unpack_cell_with_expiry(data)
        return payload

    def _load(self) -> T:
        if self._stored is UNREAD:
            self._read()
        if self._expiry is not None and self._expiry <= self._spec.now_us:
            return self._expire()
        now = super()._load()
        self._implicit = self._stored is None
        return now

    def _expire(self) -> T:
        """Counts the stored cell as cleared in this batch, and returns the default."""
        now: T = self._spec.fresh_default()
        self._now = now
        self._implicit = True
        self._stored, self._expiry = EXPIRED, None
        if not self._dirty:
            self._log()
        return now

    def _read_now(self) -> None:
        """Notes that the value was read, which may extend its life."""
        spec, expiry = self._spec, self._expiry
        if expiry is None:
            late = self._stored.__class__ is bytes and spec.expiry_us is not None
        else:
            late = expiry - spec.now_us < spec.refresh_below_us  # type: ignore[operator]
        if late:
            self._touch()

    def _touch(self) -> None:
        self._touched = True
        if not self._dirty:
            self._log()

    def _meet(self, entry: bytes) -> None:
        """Clears a value that has expired, or gives an expiry to one that has none. The sweep calls it."""
        if not self._dirty:
            self._load()
            unlimited = self._stored is not None and self._expiry is None
            if unlimited and not self._dirty and self._spec.expiry_us is not None:
                self._touch()

    def _collect(self, into: Mutations) -> None:
        super()._collect(into)
        spec, payload = self._spec, self._next
        self._rewritten = payload is not None and payload != self._stored
        if self._touched and payload is not None and not self._rewritten and self._expiry != spec.expiry_us:
            into.puts.append((spec.cell_head + self._row, spec.header + payload))
            self._rewritten = True

    def _saved(self) -> None:
        super()._saved()
        if self._rewritten:
            self._expiry = self._spec.expiry_us
        elif self._stored is None:
            self._expiry = None
        self._touched = self._rewritten = False

    def _forget(self) -> None:
        super()._forget()
        self._expiry = None
        self._touched = self._rewritten = False


class ExpiringReducing(TrackedReducing[T], ExpiringValue[T]):
    __slots__ = ()


class ExpiringCounter(TrackedCounter, ExpiringValue[int]):
    __slots__ = ()


# -- Sweep -----------------------------------------------------------------------------------------------------------


class Sweep:
    """Reads the stored cells of states with a ttl, a portion at a time.

    It remembers only the address where it stopped, so that cells may be added and removed between two calls.

    Args:
        heads: address prefixes of the cells to read.
    """

    def __init__(self, reader: CellReader, heads: Iterable[bytes]) -> None:
        self._reader = reader
        self._heads = sorted(heads)
        self._seen = b""

    def add(self, head: bytes) -> None:
        self._heads = sorted({*self._heads, head})

    def next(self, limit: int) -> list[tuple[bytes, bytes]]:
        """Returns up to ``limit`` cells after those of the last call. Fewer cells mean that the end is reached; the
        next call starts over."""
        found: list[tuple[bytes, bytes]] = []
        for head in self._heads:
            if self._seen >= range_end(head):
                continue
            for cell in self._behind(head):
                if len(found) >= limit:
                    self._seen = found[-1][0] if found else self._seen
                    return found
                found.append(cell)
        self._seen = b""
        return found

    def _behind(self, head: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yields the cells under ``head`` that were not seen in this round."""
        seen = self._seen
        if not seen.startswith(head):
            yield from self._reader.scan(head)
            return
        scan_from = getattr(self._reader, "scan_from", None)
        if scan_from is not None:
            yield from scan_from(seen + b"\x00", range_end(head))
            return
        for cell in self._reader.scan(head):
            if cell[0] > seen:
                yield cell
