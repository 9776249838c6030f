"""Keeps a partition's cache of keys within its memory limits, by weighing the cached keys and dropping the oldest.

Everything here runs between batches, when no tracked object is dirty.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from decimal import Decimal
from itertools import chain, islice
from typing import Any, Final

from stateflow.state.cells import CellReader
from stateflow.state.collection import Collection
from stateflow.state.tracked import PACKED, StateSpec

#: one key's tracked objects, by attribute; or those of a key in a namespace, by tag
Bundle = dict[Any, Any]
#: cached keys by type. If keys of a type may be equal although their row keys differ, or the reverse, they are under a
#: marker class of ``keyed``
Caches = dict[type, dict[Any, Bundle]]

# Approximate bytes of a bundle with its key, of a tracked object with the two or three objects in it, and of an entry
# in the dicts of its collection.
_BUNDLE, _OBJECT, _ENTRY = 350, 200, 130
_OPAQUE, _SMALL = 200, 64
# Fractions of the limit: the estimate at which weighing begins (and by how much it differs between members), the weight
# above which keys are dropped, and the weight at which dropping ends.
_BEGIN, _BEGIN_APART, _ENOUGH, _LEFT = 7 / 8, 1 / 16, 3 / 4, 5 / 8
#: golden ratio, because its multiples, modulo 1, are far apart
_GOLDEN = 0.6180339887
_SIZED: Final = (bytes, str, int, float, type(None), bool, Decimal)
#: minimum of keys weighed after each batch
_STEPS_MIN = 32
#: more keys weighed after each batch while the cache is over its limit; takes about a millisecond
_STEPS_OVER = 500
#: keys freed at a time; takes about a millisecond
_FREED_AT_ONCE = 1_000


def evict_keys(caches: Caches, excess: int, recent: frozenset[int]) -> None:
    """Drops up to ``excess`` keys, oldest first. Keys of objects with an id in ``recent`` are dropped last."""
    for spared in (recent, frozenset[int]()):
        for cache in caches.values():
            victims: list[Any] = []
            again: list[Any] = []
            for key, bundle in cache.items():
                if len(victims) >= excess:
                    break
                if not spared.isdisjoint(map(id, bundle.values())):
                    again.append(key)
                elif not is_held(bundle):
                    victims.append(key)
            for key in victims:
                del cache[key]
            for key in again:
                cache[key] = cache.pop(key)
            excess -= len(victims)
        if excess <= 0:
            return


def evict_entries(caches: Caches, specs: Iterable[StateSpec], entries_max: int) -> None:
    """Drops the entries of the oldest keys' collections until at most ``entries_max`` are left."""
    collections = [tracked for tracked in _tracked(caches) if isinstance(tracked, Collection)]
    specs = list(specs)
    for spec in specs:
        spec.entries_cached = 0
    for tracked in collections:
        tracked._spec.entries_cached += len(tracked._items)
    surplus = sum(spec.entries_cached for spec in specs) - entries_max
    for tracked in collections:
        if surplus <= 0:
            break
        entries = len(tracked._items)
        if entries:
            tracked._spec.entries_cached -= entries
            surplus -= entries
            tracked._forget()


def weight_of(key: Any, bundle: Bundle) -> int:
    """Returns the approximate bytes of memory that a cached key uses.

    The weight is the sum of ``sys.getsizeof`` of keys, payloads and decoded values, and of fixed costs of each key,
    object and entry. Tuples are counted one level deep, and objects of users' classes as 200 bytes.
    """
    weight = _BUNDLE + _size_of(key)
    for tracked in bundle.values():
        weight += _OBJECT
        if isinstance(tracked, Collection):
            packed = tracked._packed
            for entry, value in tracked._items.items():
                weight += _ENTRY + _size_of(entry) + _size_of(packed[entry] if value is PACKED else value)
            for absent in tracked._absent or ():
                weight += _ENTRY // 2 + _size_of(absent)
        else:
            weight += _size_of(tracked._stored) + _size_of(getattr(tracked, "_now", None))
    return weight


def _size_of(value: Any) -> int:
    if value.__class__ in _SIZED:
        return sys.getsizeof(value)
    if isinstance(value, tuple):
        return sys.getsizeof(value) + sum(map(sys.getsizeof, value))
    return sys.getsizeof(value) if isinstance(value, _SIZED) else _OPAQUE


def _tracked(caches: Caches) -> Iterator[Any]:
    for cache in caches.values():
        for bundle in cache.values():
            yield from bundle.values()


def _references(bundle: Bundle) -> int:
    """Returns the highest reference count among the objects of the bundle.

    The references by the bundle and by this frame are included.
    """
    most = 0
    for tracked in bundle.values():
        count = sys.getrefcount(tracked)
        most = max(most, count)
    return most


_UNHELD: Final = _references({"only": StateSpec.__new__(StateSpec)})


def is_held(bundle: Bundle) -> bool:
    """Returns whether an operator or the user can still reach a tracked object of this key.

    Such a key must stay cached: a second object for the same cell would not see the first one's writes.
    """
    return _references(bundle) > _UNHELD


class Meter:
    """A reader that adds up the approximate size of the data read through it, which may then be cached."""

    def __init__(self, reader: CellReader) -> None:
        self._reader = reader
        self.bytes = 0

    def get(self, cell: bytes) -> bytes | None:
        data = self._reader.get(cell)
        self.bytes += _ENTRY + len(cell) + (0 if data is None else 2 * len(data))
        return data

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        for cell, data in self._reader.scan(prefix):
            self.bytes += _ENTRY + len(cell) + 2 * len(data)
            yield cell, data


class CachePool:
    """The memory that the caches of all partitions of a process share in equal parts. Its members are the partitions.

    ``objects`` is a lower bound of the number of cached objects that the cyclic garbage collector tracks. ``bytes`` is
    the size of all caches, as their members estimate it.

    >>> CachePool(bytes_max=64 << 20).share
    67108864
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._members = 0
        self._joined = 0
        #: caches of former members, each with the number that is subtracted from ``objects`` when it is empty
        self._left: deque[tuple[dict[Any, Bundle], int]] = deque()
        self.objects = self.bytes = 0

    def join(self) -> float:
        """Adds a member. Returns the fraction of its share at which this member begins to weigh its keys.

        Each member gets a different fraction. Rows arrive at all partitions alike, so members with the same fraction
        would all begin after the same batch.
        """
        self._members += 1
        self._joined += 1
        return _BEGIN - _BEGIN_APART * (self._joined * _GOLDEN % 1)

    def leave(self, caches: Caches, objects: int) -> None:
        """Removes a member. :meth:`free_some` frees its caches in portions, because freeing all at once would cause a
        pause.

        Args:
            objects: number of objects in ``caches``, as the member counted them.
        """
        self._members -= 1
        left = [(cache, 0) for cache in caches.values() if cache]
        if left:
            left[-1] = left[-1][0], objects
            self._left += left
        else:
            self.objects -= objects

    @property
    def has_left(self) -> bool:
        """Tells whether the caches of a partition that left the pool are still to be freed."""
        return bool(self._left)

    def free_some(self) -> None:
        """Frees a portion of the caches that former members left behind. Callers check ``has_left`` first."""
        cache, objects = self._left[0]
        for _ in range(min(_FREED_AT_ONCE, len(cache))):
            cache.popitem()
        if not cache:
            self._left.popleft()
            self.objects -= objects

    @property
    def share(self) -> int:
        return self._bytes_max // max(1, self._members)


class Budget:
    """Keeps a cache under its share of a pool.

    The budget adds up the sizes of all data that is read, written, inserted and bound, which rather overestimates the
    cache. Only when this estimate is near the limit does the budget weigh the cached keys and drop the oldest.

    Weighing all keys at once would cause a pause, so it is spread over batches. The more a batch added, the more keys
    are weighed after it, so that all are weighed before the limit would be reached. When a member joins the pool, the
    shares of the other members shrink at once; they drop the excess in portions, too.
    """

    def __init__(self, pool: CachePool, begin: float, states: int) -> None:
        self._pool = pool
        self._begin = begin
        self._key_bytes = _BUNDLE + states * _OBJECT + 100
        self._weighed = self._keys = self._entries = self._added = 0
        self._estimate = 0
        self._due = 0
        self._counted = 0
        self._recent = frozenset[int]()
        self._sweep: Generator[None] | None = None
        self._sweep_steps = 0

    def written(self, puts: Iterable[tuple[bytes, bytes]]) -> None:
        # small cells are included in the fixed costs of an object and an entry
        if 2 * max(map(len, chain.from_iterable(puts)), default=0) <= _SMALL:
            return
        self._added += 2 * sum([size for cell, data in puts if (size := len(cell) + len(data)) > _SMALL])

    def is_near(self, keys: int, entries: int, objects: int, meter: Meter) -> bool:
        """Updates the estimate. Returns whether ``cut`` must be called.

        Args:
            entries: number of entries loaded or inserted, as the specs count them.
            objects: lower bound of bundles and tracked objects.
        """
        grown = (keys - self._keys) * self._key_bytes + max(0, entries - self._entries) * _ENTRY
        self._pool.objects += objects - self._counted
        self._counted = objects
        before, self._estimate = self._estimate, self._weighed + self._added + meter.bytes + grown
        self._due = max(0, self._estimate - before)
        self._pool.bytes += self._estimate - before
        return self._sweep is not None or self._estimate > self._pool.share * self._begin

    def cut(self, caches: Caches, entries: int, meter: Meter, recent: frozenset[int]) -> None:
        """Weighs and drops a portion of the cached keys. Keys of objects with an id in ``recent`` are dropped last."""
        self._recent = recent
        if self._sweep is None:
            self._sweep_steps = 2 * sum(map(len, caches.values()))
            self._sweep = self._weigh_and_drop(caches, entries, meter)
        share = self._pool.share
        room = share * (1 - self._begin)
        steps: int | None = None  # all steps, after a batch that alone uses up the room
        if self._due < room:
            steps = _STEPS_MIN + int(self._sweep_steps * self._due / room)
            if self._estimate > share:  # another member has joined
                steps += _STEPS_OVER
        for _ in islice(self._sweep, steps):
            pass

    def close(self) -> int:
        """Abandons unfinished weighing, which would keep every key alive, and leaves the size of the pool's caches.
        Returns the last count of objects."""
        self._pool.bytes -= self._estimate
        self._estimate = 0
        if self._sweep is not None:
            self._sweep.close()
            self._sweep = None
        return self._counted

    def _weigh_and_drop(self, caches: Caches, entries: int, meter: Meter) -> Generator[None]:
        """Weighs all keys, then drops the oldest if they are too heavy. Yields after each key."""
        there = [(cache, list(cache)) for cache in caches.values()]
        added, read = self._added, meter.bytes
        weights = array("q")
        for cache, names in there:
            for key in names:
                bundle = cache.get(key)
                weights.append(0 if bundle is None else weight_of(key, bundle))
                del bundle  # a reference from this frame would make the key look held
                yield
        # entries added during the weighing were not weighed, so they still count
        self._weighed, self._keys, self._entries = sum(weights), len(weights), entries
        self._added -= added
        meter.bytes -= read
        if self._weighed > self._pool.share * _ENOUGH:
            yield from self._drop(there, weights)
        self._sweep = None

    def _drop(self, there: list[tuple[dict[Any, Bundle], list[Any]]], weights: array[int]) -> Generator[None]:
        for spares in (True, False):
            weight = iter(weights)
            for cache, names in there:
                for key in names:
                    if self._weighed <= self._pool.share * _LEFT:
                        return
                    size = next(weight)
                    spared = self._recent if spares else frozenset[int]()
                    bundle = cache.get(key)
                    if bundle is not None and spared.isdisjoint(map(id, bundle.values())) and not is_held(bundle):
                        self._weighed -= size
                        self._keys -= 1
                        del cache[key]
                    del bundle
                    yield
