"""KeyedState: the cached states of one partition of one operator, and their net change per batch.

Life of a batch: ``bind`` per row, then either ``collect``, the durable write and ``mark_clean``, or
``rollback``. Between ``collect`` and ``mark_clean`` the state must be left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from stateflow.changes import Mutations
from stateflow.errors import SchemaMismatch, UnsupportedKeyType
from stateflow.state.cells import CELL, decode_row_key, encode_row_key, row_part, split_address, unpack_cell
from stateflow.state.collection import Collection
from stateflow.state.declare import Declaration, check_names
from stateflow.state.spec import CellReader, StateSpec
from stateflow.state.tracked_map import CanonicalTrackedMap, TrackedMap
from stateflow.state.tracked_set import CanonicalTrackedSet, TrackedSet
from stateflow.state.tracked_value import MutableTrackedValue, TrackedValue

#: one key's tracked objects by attribute
Bundle = dict[str, Any]

# Python finds 1, 1.0 and True equal, their row keys differ: one cache per type. Within each of these
# types keys are equal when their row keys are. Not so datetimes: one in the hour that a clock change repeats
# equals none in another zone.
_SINGLE: Final = frozenset({str, int, bytes, bool, date, float, Decimal, UUID})
_IN_TUPLE: Final = frozenset({str, int})


class _ByRowKey:
    """Stands for the cache of keys whose own equality says too little; they are cached by row key."""


class KeyedState:
    """All states of one partition.

    Args:
        operator: its name, for errors.
        declarations: by the attribute they are bound to.
        reader: the committed cells.
        cached_keys: keys kept decoded after a commit, at most.
        cached_entries: map entries and set members kept decoded after a commit, about.
    """

    def __init__(
        self,
        operator: str,
        declarations: Mapping[str, Declaration],
        reader: CellReader,
        *,
        cached_keys: int = 262_144,
        cached_entries: int = 1_048_576,
    ) -> None:
        check_names(dict(declarations), operator)
        self._operator = operator
        self._declarations = dict(declarations)
        self._cached_keys = cached_keys
        self._cached_entries = cached_entries
        #: tracked objects written, or handed out mutable, since the last commit
        self._written: list[Any] = []
        self._collected = False
        self._specs = {
            attribute: StateSpec(
                operator,
                declaration.name,
                declaration.coder,
                tag=declaration.tag,
                key_coder=declaration.key_coder,
                default_payload=declaration.default_payload,
                reader=reader,
                log=self._written,
            )
            for attribute, declaration in self._declarations.items()
        }
        self._makers = [
            (attribute, _tracked_class(declaration)._bound, self._specs[attribute])
            for attribute, declaration in self._declarations.items()
        ]
        self._caches: dict[type, dict[Any, Bundle]] = {}
        self._hot_class: type = _ByRowKey
        self._hot_bundle = self._cache_of(_ByRowKey).get
        self._bound: Bundle | None = None
        self._target: object = None

    # --- one row ----------------------------------------------------------------------------------------

    def bind(self, target: object, key: Hashable) -> None:
        """Makes ``target.<attribute>`` the tracked objects of ``key``.

        Raises NullKey, EncodeError (NaN, …) or UnsupportedKeyType; the target then stays as it was.
        """
        bundle = self._hot_bundle(key) if key.__class__ is self._hot_class else self._cached(key)
        if bundle is None:
            bundle = self._new_bundle(key)
        if bundle is not self._bound or target is not self._target:
            target.__dict__.update(bundle)
            self._bound = bundle
            self._target = target

    def peek(self, key: Hashable) -> SimpleNamespace:
        """The tracked objects of a key as attributes. They are the real ones: do not write to them."""
        return SimpleNamespace(**(self._cached(key) or self._new_bundle(key)))

    def _cache_of(self, cls: type) -> dict[Any, Bundle]:
        cache = self._caches.get(cls)
        if cache is None:
            cache = self._caches[cls] = {}
        return cache

    def _place(self, key: Hashable) -> tuple[type, Any]:
        """Which cache a key belongs into, and under what."""
        if _tells_itself_apart(key):
            return key.__class__, key
        row_key = encode_row_key(key)
        # a subclass of a plain type, such as a named tuple, is stored as the plain one
        plain = decode_row_key(row_key)
        return (plain.__class__, plain) if _tells_itself_apart(plain) else (_ByRowKey, row_key)

    def _cached(self, key: Hashable) -> Bundle | None:
        cls, place = self._place(key)
        cache = self._cache_of(cls)
        if cls in _SINGLE:
            self._hot_class, self._hot_bundle = cls, cache.get
        try:
            return cache.get(place)
        except TypeError:
            # a tuple cannot get here with unhashable items, a signalling NaN can
            encode_row_key(key)
            raise

    def _new_bundle(self, key: Hashable) -> Bundle:
        try:
            row = row_part(encode_row_key(key))
        except TypeError as error:
            raise UnsupportedKeyType(f"a key cannot be stored: {error}", key=repr(key)[:80]) from error
        bundle: Bundle = {attribute: make(spec, row) for attribute, make, spec in self._makers}
        cls, place = self._place(key)
        self._caches[cls][place] = bundle
        return bundle

    # --- one batch --------------------------------------------------------------------------------------

    def collect(self) -> Mutations:
        """The net effect of everything since the last ``mark_clean`` or ``rollback``.

        Changes nothing: ``rollback`` may follow, or another ``collect``. Raises EncodeError that names
        operator, state, key and map key for a value its coder refuses.
        """
        into = Mutations()
        for tracked in self._written:
            tracked._collect(into)
        self._collected = True
        return into

    def mark_clean(self) -> None:
        """The mutations of the last ``collect`` are durable: what is now is the committed state.

        Values that their coder changes (an int in a float state) are replaced by what it makes of them;
        the oldest keys beyond ``cached_keys`` leave the cache.
        """
        if not self._collected:
            self.collect()
        written = self._written
        for tracked in written:
            tracked._settle()
        keys = sum(len(cache) for cache in self._caches.values())
        recent = frozenset(map(id, written)) if keys > self._cached_keys else frozenset()
        self._end_batch()
        if keys > self._cached_keys:
            # a little more than needed, so that not every small batch has to look for victims
            excess = keys - self._cached_keys + self._cached_keys // 16
            self._evict_keys(excess, recent)
        if sum(spec.entries_cached for spec in self._specs.values()) > self._cached_entries:
            self._evict_entries()

    def rollback(self) -> None:
        """Forgets everything since the last ``mark_clean``; in-place changes too."""
        for tracked in self._written:
            tracked._forget()
        self._end_batch()

    def invalidate(self) -> None:
        """Drops the cache, and with it everything not collected: the store was changed underneath."""
        self._end_batch()
        for cache in self._caches.values():
            held = {}
            for key, bundle in cache.items():
                if _is_held(bundle):
                    held[key] = bundle
            cache.clear()
            cache.update(held)
            for bundle in held.values():
                for tracked in bundle.values():
                    tracked._forget()

    def _end_batch(self) -> None:
        # in place: every spec has this list
        self._written.clear()
        self._collected = False

    # --- bounds of the cache ----------------------------------------------------------------------------

    def _evict_keys(self, excess: int, recent: frozenset[int]) -> None:
        """Drops up to ``excess`` keys, oldest first, those with an object in ``recent`` (by id) last."""
        for spared in (recent, frozenset[int]()):
            for cache in self._caches.values():
                victims: list[Any] = []
                again: list[Any] = []
                for key, bundle in cache.items():
                    if len(victims) >= excess:
                        break
                    if not spared.isdisjoint(map(id, bundle.values())):
                        again.append(key)
                    elif not _is_held(bundle):
                        victims.append(key)
                for key in victims:
                    del cache[key]
                for key in again:
                    cache[key] = cache.pop(key)
                excess -= len(victims)
            if excess <= 0:
                return

    def _evict_entries(self) -> None:
        """Drops the entries of the oldest keys' collections until three quarters of the bound are left."""
        collections = [
            tracked
            for cache in self._caches.values()
            for bundle in cache.values()
            for tracked in bundle.values()
            if isinstance(tracked, Collection)
        ]
        for spec in self._specs.values():
            spec.entries_cached = 0
        for tracked in collections:
            tracked._spec.entries_cached += len(tracked._items)
        surplus = sum(spec.entries_cached for spec in self._specs.values()) - self._cached_entries * 3 // 4
        for tracked in collections:
            if surplus <= 0:
                break
            entries = len(tracked._items)
            if entries:
                tracked._spec.entries_cached -= entries
                surplus -= entries
                tracked._forget()

    # --- schema -----------------------------------------------------------------------------------------

    def schema(self) -> list[dict[str, Any]]:
        """JSON-able, one :meth:`Declaration.describe` per state, by name: kept with the data."""
        return sorted((each.describe() for each in self._declarations.values()), key=lambda each: str(each["name"]))


def _tells_itself_apart(key: Any) -> bool:
    """Whether keys of this kind are equal exactly when their row keys are."""
    cls = key.__class__
    return cls in _SINGLE or (cls is tuple and _IN_TUPLE.issuperset(map(type, key)))


def _tracked_class(declaration: Declaration) -> Any:
    match declaration.kind:
        case "value":
            return MutableTrackedValue if declaration.coder.mutable else TrackedValue
        case "map":
            return CanonicalTrackedMap if _needs_canonical_keys(declaration) else TrackedMap
        case "set":
            return CanonicalTrackedSet if _needs_canonical_keys(declaration) else TrackedSet


def _needs_canonical_keys(declaration: Declaration) -> bool:
    return declaration.key_coder is not None and not declaration.key_coder.python_equality


def _references(bundle: Bundle) -> int:
    """The most references any object of the bundle has, that of the bundle and of this frame included."""
    most = 0
    for tracked in bundle.values():
        count = sys.getrefcount(tracked)
        most = max(most, count)
    return most


_UNHELD: Final = _references({"only": StateSpec.__new__(StateSpec)})


def _is_held(bundle: Bundle) -> bool:
    """Whether somebody else, an operator or the user, can still reach a tracked object of this key.

    Such a key must stay cached: a second object for the same cell would not see the first one's writes.
    """
    return _references(bundle) > _UNHELD


def check_schema(stored: list[dict[str, Any]], declared: list[dict[str, Any]], operator: str) -> None:
    """Compares two :meth:`KeyedState.schema`. Added and dropped states are fine.

    Raises SchemaMismatch when a name is stored with another kind or coder than declared.
    """
    before = {each["name"]: each for each in stored}
    for now in declared:
        was = before.get(now["name"], now)
        if (was["kind"], list(was["coders"])) != (now["kind"], list(now["coders"])):
            raise SchemaMismatch(
                f"state {now['name']!r} is stored as {_signature(was)} but declared as {_signature(now)}",
                remedy="declare it as it is stored, give the new state another name=, or write migrate_state",
                operator=operator,
                state=now["name"],
            )


def _signature(described: dict[str, Any]) -> str:
    return f"{described['kind']}({', '.join(described['coders'])})"


def scan_state(declaration: Declaration, reader: CellReader) -> Iterator[tuple[Any, Any, Any]]:
    """Everything stored of one state: ``(key, entry key, value)``, in address order.

    The entry key is None for a value state; for a set it is the member and the value is None.
    """
    key_coder, decode = declaration.key_coder, declaration.coder.decode
    for cell, data in reader.scan(CELL + declaration.tag):
        key, _, entry = split_address(cell)
        entry_key = None if key_coder is None else key_coder.decode_key(entry)
        yield decode_row_key(key), entry_key, decode(unpack_cell(data))
