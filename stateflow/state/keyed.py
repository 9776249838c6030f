"""The cached states of one partition of one operator, and their net change per batch.

The steps of a batch are ``set_time``, ``bind`` for each row, then either ``collect``, the durable write and
``mark_clean``, or ``rollback``. Between ``collect`` and ``mark_clean`` callers must not use the state. A sweep is a
batch without rows; its steps are ``expired``, the durable write and ``mark_clean``.

There is one tracked object for each state, key and namespace. It stays cached while an operator can reach it.
:class:`PendingWrites` encodes the objects that a batch wrote.

A state can also be addressed at run time, by a namespace and a *tag*: a declaration that need not be an attribute of
the operator. Its description is stored with the data (:class:`TagRegister`), so that a process that does not know the
declaration can use a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final, cast
from uuid import UUID

from stateflow.changes import Mutations
from stateflow.errors import DeclarationError, DecodeError, InvalidArgument, SchemaMismatch, UnsupportedKeyType
from stateflow.state import encoding
from stateflow.state.cache import Budget, Bundle, CachePool, Caches, Meter, evict_entries, evict_keys, is_held
from stateflow.state.cells import (
    TAGS,
    CellReader,
    decode_row_key,
    encode_row_key,
    pack_cell,
    row_part,
    split_address,
    unpack_cell,
    unpack_cell_with_expiry,
)
from stateflow.state.coders import encoder_of
from stateflow.state.collection import Collection
from stateflow.state.declare import Declaration, check_names, stand_in, tracked_class
from stateflow.state.expiring import Sweep
from stateflow.state.shapes import Verdict, spelled_state, types_become
from stateflow.state.tracked import UNREAD, StateSpec
from stateflow.types import shown

MAX_VALUE_BYTES: Final = 64 << 20

# Python finds 1, 1.0 and True equal though their row keys differ, hence one cache per type. Within these types keys are
# equal when their row keys are, but datetimes are not: one in an hour that a clock repeats equals none of another zone.
_SINGLE: Final = frozenset({str, int, bytes, bool, date, float, Decimal, UUID})
_IN_TUPLE: Final = frozenset({str, int})

#: kinds of states that have one cell per key
_SINGLE_VALUES: Final = frozenset({"value", "counter", "reducing"})

#: maximum number of keys that are evicted in addition to those over the limit
EVICTED_BEYOND: Final = 1024
#: for fewer values, encoding them together saves nothing
_MANY: Final = 4

# -- Encoding of a batch's writes ------------------------------------------------------------------------------------


class PendingWrites:
    """Writes of one ``collect``, until its ``mark_clean``. Encodes the values of a state together if possible.

    Encoding a value by itself costs a call, an exception handler and a check of its type. If all values of a state have
    exactly the types that its coder stores, they are encoded together, and stay unchanged once they are on disk. An
    object that needs more care (it was cleared, never read, or its value is of another type) is encoded by itself, in
    the order in which the objects were written. So errors are the same as without grouping.

    Args:
        written: tracked objects, in the order in which they were written; it must not change until ``saved``.
        into: receives the net change of these objects.

    Raises the error of the first object that cannot be encoded.
    """

    __slots__ = ("_alone", "_together")

    def __init__(self, written: Sequence[Any], into: Mutations) -> None:
        self._alone = written
        self._together: list[tuple[list[Any], Sequence[bytes]]] = []
        if len(written) >= _MANY:
            self._find_together(written)
        for tracked in self._alone:
            tracked._collect(into)
        for together, payloads in self._together:
            spec = together[0]._spec
            head, header = spec.cell_head, spec.header
            into.puts += [
                (head + tracked._row, header + payload)
                for tracked, payload in zip(together, payloads, strict=True)
                if tracked._stored != payload
            ]

    def _find_together(self, written: Sequence[Any]) -> None:
        found: dict[StateSpec, list[Any]] = {}
        several: list[Any] = []
        of: StateSpec | None = None
        for tracked in written:
            spec = tracked._spec
            if spec is not of:
                several = found.setdefault(spec, [])
                of = spec
            if spec.encode_many is None or tracked._implicit:
                continue
            if tracked._stored is not UNREAD and tracked._now is not None:
                several.append(tracked)
        for spec, several in found.items():
            if len(several) >= _MANY and spec.encode_many is not None:
                payloads = spec.encode_many([tracked._now for tracked in several])
                if payloads is not None:
                    self._together.append((several, payloads))
        if sum([len(payloads) for _, payloads in self._together]) == len(written):
            self._alone = ()
        elif self._together:
            specs = {several[0]._spec for several, _ in self._together}
            self._alone = [each for each in written if each._spec not in specs or not _is_plain(each)]

    def saved(self) -> None:
        """Marks all objects as clean after the store has applied their changes."""
        for tracked in self._alone:
            tracked._saved()
        for together, payloads in self._together:
            for tracked, payload in zip(together, payloads, strict=True):
                tracked._dirty = False
                tracked._stored = payload


def _is_plain(tracked: Any) -> bool:
    """Returns whether an object of a state with ``encode_many`` was read before it was written and is neither cleared
    nor None."""
    return not tracked._implicit and tracked._stored is not UNREAD and tracked._now is not None


# -- States addressed at run time ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tag:
    """One state of a partition.

    Attributes:
        attribute: the state's name in the operator; None: the operator does not declare the state.
    """

    declaration: Declaration
    spec: StateSpec
    attribute: str | None

    def make(self, row: bytes) -> Any:
        """Returns a new tracked object for one key and namespace."""
        return tracked_class(self.declaration)._bound(self.spec, row)

    def check(self, declaration: Declaration, operator: str) -> None:
        """Checks that a declaration of the same cells has the same types, default and ttl. Raises DeclarationError."""
        mine = self.declaration
        types = mine.describe().get("types") == declaration.describe().get("types")
        if not types or (mine.default_payload, mine.ttl) != (declaration.default_payload, declaration.ttl):
            raise DeclarationError(
                f"state {mine.name!r} is declared twice, with different types, defaults or ttls",
                remedy="make each tag once, at module or class level, and give each a name of its own",
                operator=operator,
                state=mine.name,
            )


def is_empty(tracked: Any) -> bool:
    """Returns whether an object that was written in this batch is empty now."""
    return tracked._count == 0 if isinstance(tracked, Collection) else tracked._now is None


def stored_tags(reader: CellReader) -> dict[bytes, dict[str, Any]]:
    """Returns the states made at run time: tag → description. Example: ``stored_tags(store).values()``"""
    return {cell[len(TAGS) :]: described(data) for cell, data in reader.scan(TAGS)}


def described(cell: bytes) -> dict[str, Any]:
    """Decodes the description of a state made at run time from the cell that :func:`tag_cell` returned."""
    return cast("dict[str, Any]", encoding.loads(unpack_cell(cell)))


def tag_cell(declaration: Declaration) -> tuple[bytes, bytes]:
    """Returns the (address, cell) that makes a run-time tag known to :func:`stored_tags`."""
    return TAGS + declaration.tag, pack_cell(encoding.dumps(declaration.describe()))


class TagRegister:
    """Keeps track of the tags that were made at run time, and of those not in the store yet.

    A tag is stored together with the first cell under it, so that a process that does not know the declaration can also
    empty its namespaces and sweep it. It is stored again when it is declared with another ttl.
    """

    def __init__(self, reader: CellReader) -> None:
        self._reader = reader
        self._made: dict[bytes, Declaration] = {}
        #: tags to be stored → whether another description of the tag is stored
        self._unrecorded: dict[bytes, bool] = {}
        self._recording: list[bytes] = []

    def add(self, declaration: Declaration) -> None:
        """Adds a tag. Raises SchemaMismatch if the tag is stored with other types, because its cells hold such
        values. Ints may be stored where floats or Decimals are declared; they are written as such."""
        address, cell = tag_cell(declaration)
        stored = self._reader.get(address)
        if stored is not None and stored != cell:
            was, now = described(stored), declaration.describe()
            if types_become(was, now) is Verdict.CHANGED:
                raise SchemaMismatch(
                    f"the tag {declaration.name!r} is stored as {spelled_state(was)} but declared as "
                    f"{spelled_state(now)}",
                    remedy="declare it as it is stored, or give the tag another name=",
                    state=declaration.name,
                )
        self._made[declaration.tag] = declaration
        if stored != cell:
            self._unrecorded[declaration.tag] = stored is not None

    def stored(self) -> dict[bytes, dict[str, Any]]:
        return stored_tags(self._reader)

    def collect(self, into: Mutations) -> None:
        if self._unrecorded:
            used = {address[1:9] for address, _ in into.puts}
            self._recording = [tag for tag, differs in self._unrecorded.items() if differs or tag in used]
            into.puts += [tag_cell(self._made[tag]) for tag in self._recording]

    def saved(self) -> None:
        for tag in self._recording:
            del self._unrecorded[tag]
        self._recording = []

    def forget(self) -> None:
        self._recording = []

    def invalidate(self) -> None:
        """Compares all tags with the store again. Call it when others have changed the store."""
        self._recording = []
        self._unrecorded = {}
        for declaration in self._made.values():
            self.add(declaration)


# -- States of a partition -------------------------------------------------------------------------------------------


class _ByRowKey:
    """Marks the cache, indexed by row key, of keys that may be equal although their row keys differ, or the reverse."""


class _ByPlace:
    """Marks the cache of run-time states, indexed by key and namespace as in an address, and then by tag."""


class KeyedState:
    """All states of one partition.

    Args:
        operator: name of the operator, for errors.
        declarations: declared states by the attribute to which they are bound.
        reader: reads the committed cells.
        cached_keys: maximum of keys kept decoded after a commit; a key counts once in each namespace.
        cached_entries: approximate maximum of entries of maps, sets and lists kept decoded after a commit.
        cache: pool of which the cached keys may use about one share after a commit; None: no such limit. Sizes are
            counted by :func:`stateflow.state.cache.weight_of`. ``close`` returns the share.
        max_value_bytes: maximum length of an encoded value, entry or element; a longer one is refused.
        belongs: called with each key that is new to the cache; raises for a key of another partition. None: not
            checked.

    Example: ``KeyedState("Count", declarations_of(Count), store)``
    """

    def __init__(
        self,
        operator: str,
        declarations: Mapping[str, Declaration],
        reader: CellReader,
        *,
        cached_keys: int = 262_144,
        cached_entries: int = 1_048_576,
        cache: CachePool | None = None,
        max_value_bytes: int = MAX_VALUE_BYTES,
        belongs: Callable[[Hashable], None] | None = None,
    ) -> None:
        check_names(dict(declarations), operator)
        self._operator = operator
        self._belongs = belongs
        self._declarations = dict(declarations)
        self._cached_keys = cached_keys
        self._cached_entries = cached_entries
        self.max_value_bytes = max_value_bytes
        self._meter = Meter(reader)
        self._pool = cache
        self._budget = None if cache is None else Budget(cache, cache.join(), len(self._declarations))
        self._reader: CellReader = reader if self._budget is None else self._meter
        #: tracked objects written, or read if their value is mutable, since the last commit
        self._written: list[Any] = []
        #: result of the last ``collect``, until it is durable
        self._pending: PendingWrites | None = None
        #: times of this batch in microseconds since 1970
        self._processing_us: int | None = None
        self._event_us: int | None = None
        #: by tag
        self._states: dict[bytes, Tag] = {}
        self._specs: list[StateSpec] = []
        self._expiring: list[StateSpec] = []
        self._sweep = Sweep(reader, ())
        #: the last sweep changed at least half of the cells that it was allowed to check, so more wait for the next one
        self.sweep_is_behind = False
        self._register = TagRegister(reader)
        #: tags of states made at run time whose declarations are not known yet; stand-ins are in their place
        self._unmet: set[bytes] = set()
        self._asked_for_unmet = False
        for attribute, declaration in self._declarations.items():
            self._add_state(declaration, attribute)
        self._makers = [
            (tag.attribute, tracked_class(tag.declaration)._bound, tag.spec) for tag in self._states.values()
        ]
        self._caches: Caches = {}
        self._hot_class: type = _ByRowKey
        self._hot_bundle = self._cache_of(_ByRowKey).get
        self._bound: Bundle | None = None
        self._target: object = None

    def _add_state(self, declaration: Declaration, attribute: str | None) -> Tag:
        spec = StateSpec(
            self._operator,
            declaration.name,
            declaration.coder,
            tag=declaration.tag,
            key_coder=declaration.key_coder,
            default_payload=declaration.default_payload,
            reader=self._reader,
            log=self._written,
            ttl=declaration.ttl,
            reduce=declaration.reduce,
            max_value_bytes=self.max_value_bytes,
        )
        if declaration.kind in _SINGLE_VALUES and declaration.ttl is None:
            spec.encode_many = encoder_of(declaration.coder, self.max_value_bytes)
        tag = self._states[declaration.tag] = Tag(declaration, spec, attribute)
        self._specs.append(spec)
        if declaration.ttl is not None:
            self._expiring.append(spec)
            self._sweep.add(spec.cell_head)
            self._hand_time(spec)
        return tag

    # --- time -------------------------------------------------------------------------------------------

    def set_time(self, processing_us: int, event_us: int | None = None) -> None:
        """Sets the time of the batch that begins, in microseconds since 1970.

        Entries that have expired by then are no longer visible. Call it before the first row, and not again before the
        commit or rollback. ``event_us`` is the watermark; None: there is none yet, and nothing with a ttl in event time
        expires. Time does not go back: an earlier time is ignored.
        """
        self._processing_us, self._event_us = processing_us, event_us
        self._find_unmet()
        for spec in self._expiring:
            self._hand_time(spec)

    @property
    def time_us(self) -> tuple[int | None, int | None]:
        """Processing and event time that were last set."""
        return self._processing_us, self._event_us

    @property
    def expires(self) -> bool:
        """Tells whether any state has a ttl, so that callers must use ``set_time`` and, now and then, ``expired``."""
        return bool(self._expiring)

    def _hand_time(self, spec: StateSpec) -> None:
        assert spec.ttl is not None
        now_us = self._processing_us if spec.ttl.domain == "processing" else self._event_us
        if now_us is not None:
            spec.set_now(now_us)

    def _check_time(self) -> None:
        """Checks that there is a time if a state with a ttl was written; otherwise its entries would never expire.

        Raises RuntimeError.
        """
        if self._expiring and self._processing_us is None:
            for tracked in self._written:
                if tracked._spec.ttl is not None:
                    raise RuntimeError(f"state {tracked._spec.name!r} has a ttl: call set_time() before the batch")

    def expired(self, limit: int = 1_000) -> Mutations:
        """Drops stored cells that have expired, among up to ``limit`` cells from where the last call stopped.

        The sweep looks only at states with a ttl. When it finds an expired entry of a map, set or list, all loaded
        entries of that collection that have expired are dropped with it.

        Call it between two batches: write the result and call ``mark_clean``, or call ``rollback``. It may also be
        called within a batch before ``collect``, which then includes these removals. Cells without an expiry, from
        before the ttl was declared or before the first watermark, get an expiry counted from now.
        """
        met = 0
        for address, data in self._sweep.next(limit):
            spec = self._states[address[1:9]].spec
            key, namespace, entry = split_address(address)
            try:
                _, expiry = unpack_cell_with_expiry(data)
            except DecodeError as error:
                raise spec.decode_error(error, row_part(key, namespace), entry=entry[:32].hex()) from error
            if spec.expiry_us is not None if expiry is None else expiry <= spec.now_us:
                self._stored_object(address[1:9], key, namespace)._meet(entry)
                met += 1
        self.sweep_is_behind = 2 * met >= limit
        return self.collect()

    def _stored_object(self, tag: bytes, row_key: bytes, namespace: bytes) -> Any:
        state = self._states[tag]
        if not namespace and state.attribute is not None:
            return self.bundle_of(decode_row_key(row_key))[state.attribute]
        return self._at_row(state, row_part(row_key, namespace))

    # --- one row ----------------------------------------------------------------------------------------

    def bind(self, target: object, key: Hashable) -> None:
        """Sets ``target.<attribute>`` to the tracked objects of ``key``.

        Raises NullKey, EncodeError (NaN, …) or UnsupportedKeyType; the target then stays as it was.
        """
        bundle = self._hot_bundle(key) if key.__class__ is self._hot_class else self._cached(key)
        if bundle is None:
            bundle = self._new_bundle(key)
        if bundle is not self._bound or target is not self._target:
            target.__dict__.update(bundle)
            self._bound = bundle
            self._target = target

    def unbind(self, target: object) -> None:
        """Removes the tracked objects from the target. Reading its states then raises an error, instead of returning
        another key's state."""
        for attribute in self._declarations:
            target.__dict__.pop(attribute, None)
        self._bound = self._target = None

    def bundles(self, keys: Sequence[Any]) -> list[Bundle | None]:
        """Returns, for each key, the objects that ``bind`` would set, if they are cached; otherwise None.

        For a key with None, call ``bundle_of`` when the key is processed; it raises an error for an invalid key. Call
        ``bundles`` at the beginning of a batch.
        """
        kinds = set(map(type, keys))
        cls = kinds.pop() if len(kinds) == 1 else None
        if cls in _SINGLE or (cls is tuple and _IN_TUPLE.issuperset(map(type, chain.from_iterable(keys)))):
            with suppress(TypeError):  # a signalling NaN, which has no hash
                return list(map(self._cache_of(cls).get, keys))
        return [None] * len(keys)

    def peek(self, key: Hashable) -> SimpleNamespace:
        """Returns the tracked objects of a key as attributes. They are not copies: do not write to them."""
        return SimpleNamespace(**self.bundle_of(key))

    def bundle_of(self, key: Hashable) -> Bundle:
        """Returns the objects that ``bind`` sets, by attribute. Raises the same errors."""
        bundle = self._cached(key)
        return self._new_bundle(key) if bundle is None else bundle

    def _cache_of(self, cls: type) -> dict[Any, Bundle]:
        cache = self._caches.get(cls)
        if cache is None:
            cache = self._caches[cls] = {}
        return cache

    def _place(self, key: Hashable) -> tuple[type, Any]:
        """Returns the type or marker class of the cache to which a key belongs, and the key's form in that cache."""
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
            # items of a tuple are hashable here, but a signalling NaN is not
            encode_row_key(key)
            raise

    def _new_bundle(self, key: Hashable) -> Bundle:
        row = self._row_of(key)
        if self._belongs is not None:
            self._belongs(key)
        bundle: Bundle = {attribute: make(spec, row) for attribute, make, spec in self._makers}
        cls, place = self._place(key)
        self._caches[cls][place] = bundle
        return bundle

    def _row_of(self, key: Hashable, namespace: bytes = b"") -> bytes:
        try:
            return row_part(encode_row_key(key), namespace)
        except TypeError as error:
            if not isinstance(namespace, bytes):
                remedy = f"make one: Namespace.named({str(namespace)!r})"  # type: ignore[unreachable]
                raise InvalidArgument(f"{shown(namespace)} is not a namespace", remedy=remedy) from None
            raise UnsupportedKeyType(f"a key cannot be stored: {error}", key=shown(key)) from error

    # --- states addressed at run time -------------------------------------------------------------------

    def at(self, key: Hashable, namespace: bytes, declaration: Any) -> Any:
        """Returns the tracked object of a state under a key and a namespace; ``b""`` is the global namespace.

        The declaration is one of the operator's, or a *tag*: a declaration with a name of its own. A state has one
        object per key and namespace, committed and rolled back with the rest. For the operator's states in the global
        namespace it is the object that ``bind`` sets. States with the same name and another kind or coder are separate.
        Raises DeclarationError for a tag without a name, and for a tag whose types, default or ttl differ from those of
        another declaration of the same cells; SchemaMismatch for a tag that is stored with other types.
        """
        if not isinstance(declaration, Declaration) or not declaration.name:
            raise DeclarationError(
                f"{declaration!r} is not a tag", remedy='make one with a name: state.value(int, name="n")'
            )
        state = self._states.get(declaration.tag)
        if state is None:
            self._register.add(declaration)
            state = self._add_state(declaration, None)
        elif state.declaration is not declaration:
            if declaration.tag in self._unmet:
                state = self._meet(declaration)
            state.check(declaration, self._operator)
        if not namespace and state.attribute is not None:
            return self.bundle_of(key)[state.attribute]
        return self._at_row(state, self._row_of(key, namespace))

    def _at_row(self, state: Tag, row: bytes) -> Any:
        cache, tag = self._cache_of(_ByPlace), state.declaration.tag
        bundle = cache.get(row)
        if bundle is None:
            bundle = cache[row] = {}
        tracked = bundle.get(tag)
        if tracked is None:
            tracked = bundle[tag] = state.make(row)
        return tracked

    def _find_unmet(self) -> None:
        """Adds stand-ins for stored run-time states whose declarations are not known yet."""
        if not self._asked_for_unmet:
            self._asked_for_unmet = True
            for tag, described in self._register.stored().items():
                if tag not in self._states:
                    self._add_state(stand_in(tag, described), None)
                    self._unmet.add(tag)

    def _meet(self, declaration: Declaration) -> Tag:
        """Replaces a stand-in by its declaration."""
        self._register.add(declaration)
        tag = declaration.tag
        self._unmet.remove(tag)
        before = self._states[tag].spec
        self._specs.remove(before)
        if before in self._expiring:
            self._expiring.remove(before)
        state = self._add_state(declaration, None)
        for row, bundle in list(self._cache_of(_ByPlace).items()):
            tracked = bundle.pop(tag, None)
            if tracked is not None and tracked._dirty:
                self._written[:] = [each for each in self._written if each is not tracked]
                if is_empty(tracked):
                    self._at_row(state, row).clear()
        return state

    def clear_namespace(
        self, key: Hashable, namespace: bytes, spared: Callable[[Declaration], bool] | None = None
    ) -> None:
        """Empties a key's states in a namespace, also those that earlier runs made, but no ``spared`` one."""
        row = self._row_of(key, namespace)
        self._find_unmet()
        for state in self._states.values():
            if not namespace and state.attribute is not None:
                self.bundle_of(key)[state.attribute].clear()
            elif spared is None or not spared(state.declaration):
                self._at_row(state, row).clear()

    # --- one batch --------------------------------------------------------------------------------------

    def collect(self) -> Mutations:
        """Returns the net effect of all changes since the last ``mark_clean`` or ``rollback``.

        Changes nothing: ``rollback`` may follow, or another ``collect``. Raises EncodeError, which names operator,
        state, key and map key, for a value that its coder refuses.
        """
        self._check_time()
        into = Mutations()
        self._pending = None
        self._pending = PendingWrites(self._written, into)
        self._register.collect(into)
        if self._budget is not None:
            self._budget.written(into.puts)
        return into

    def mark_clean(self) -> None:
        """Marks the state as clean. Call it when the mutations of the last ``collect`` are durable.

        Values that their coder changes (an int in a float state) are replaced by their stored form. The oldest keys
        beyond the limits are dropped from the cache.
        """
        if self._pending is None:
            self.collect()
        assert self._pending is not None
        self._pending.saved()
        written = self._written
        self._register.saved()
        keys = sum(map(len, self._caches.values()))
        entries = sum([spec.entries_cached for spec in self._specs])
        crowded = keys > self._cached_keys
        by_key = keys - len(self._caches.get(_ByPlace, ()))
        objects = keys + by_key * len(self._makers)
        heavy = self._budget is not None and self._budget.is_near(keys, entries, objects, self._meter)
        recent = frozenset(map(id, written)) if crowded or heavy else frozenset()
        self._end_batch()
        if crowded:
            # a few more than needed, so that not every small batch has to search for keys to evict
            evict_keys(self._caches, keys - self._cached_keys + min(self._cached_keys // 16, EVICTED_BEYOND), recent)
        if entries > self._cached_entries:
            evict_entries(self._caches, self._specs, self._cached_entries * 3 // 4)
        if heavy and self._budget is not None:
            self._budget.cut(self._caches, entries, self._meter, recent)

    def rollback(self) -> None:
        """Discards all changes since the last ``mark_clean``, in-place changes included."""
        for tracked in self._written:
            tracked._forget()
        self._register.forget()
        self._end_batch()

    def close(self) -> None:
        """Drops the cache and returns its share of the pool. The object cannot be used afterwards."""
        self._end_batch()
        caches, self._caches = self._caches, {}
        objects = 0 if self._budget is None else self._budget.close()
        if self._pool is not None:
            self._pool.leave(caches, objects)
            self._pool = None

    def invalidate(self) -> None:
        """Drops the cache and all changes that were not collected. Call it when others have changed the store."""
        self._end_batch()
        self._register.invalidate()
        self._asked_for_unmet = False
        for cache in self._caches.values():
            held = {}
            for key, bundle in cache.items():
                if is_held(bundle):
                    held[key] = bundle
            cache.clear()
            cache.update(held)
            for bundle in held.values():
                for tracked in bundle.values():
                    tracked._forget()

    def _end_batch(self) -> None:
        # in place, as every spec holds this list
        self._written.clear()
        self._pending = None

    # --- schema -----------------------------------------------------------------------------------------

    def schema(self) -> list[dict[str, Any]]:
        """Returns one JSON-able :meth:`Declaration.describe` per state, by name. It is stored with the data."""
        return sorted((each.describe() for each in self._declarations.values()), key=lambda each: str(each["name"]))


def _tells_itself_apart(key: Any) -> bool:
    """Returns whether keys of this type are equal exactly when their row keys are."""
    cls = key.__class__
    return cls in _SINGLE or (cls is tuple and _IN_TUPLE.issuperset(map(type, key)))
