"""The common base of TrackedMap, TrackedSet and TrackedList, which loads entries lazily and computes their net change.

Invariants of a bound collection:

- ``_count`` is the number of live entries, -1 before the count cell is read;
- ``_items`` holds live entries only, so ``len(_items) == _count`` means that all of them are loaded;
- ``_base`` contains every entry that was written in this batch, or read if its value is mutable, with the state that
  the entry had before the batch;
- in a collection of mutable values, a value is decoded (not PACKED) only while its key is in ``_base``.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from stateflow.changes import Mutations
from stateflow.errors import EncodeError
from stateflow.state.cells import HEADER, range_end, unpack_cell
from stateflow.state.encoding import order_int, unorder_int
from stateflow.state.tracked import (
    DECODE_FAILURES,
    ENCODE_FAILURES,
    MISSING,
    PACKED,
    STANDALONE,
    Marker,
    StateSpec,
    Unpicklable,
    fingerprint,
)
from stateflow.types import shown

K = TypeVar("K")

_ABSENT_MAX = 10_000

#: instructions (code, argument) of the augmented operators that sets and lists have
_AUGMENTED = frozenset(
    (each.opcode, each.arg)
    for sign in "|&-^+"
    for each in dis.get_instructions(compile(f"a {sign}= b", "augmented", "exec"))
    if each.opname == "BINARY_OP"
)


def is_augmented() -> bool:
    """Returns whether the operator that calls the caller, a reflected method, is an augmented one, such as ``|=``.

    With a builtin set or list on the left, Python calls the same ``__ror__`` for ``a | b`` and ``a |= b``, and would
    rebind ``a``. If ``a`` came from a state, that state would stay as it was. Only the calling instruction tells them
    apart; a call from C, such as ``operator.ior``, returns its result anyway.
    """
    frame = sys._getframe(1).f_back
    if frame is None:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    return (code[at], code[at + 1]) in _AUGMENTED


class Collection(Unpicklable, Generic[K]):
    __slots__ = (
        "_absent",
        "_base",
        "_cleared",
        "_count",
        "_dirty",
        "_items",
        "_next",
        "_order",
        "_packed",
        "_row",
        "_spec",
        "_stored_count",
        "_times",
    )

    _what: ClassVar[str] = "collection"
    #: name of an entry's place in errors
    _entry_word: ClassVar[str] = "map_key"

    #: keys that were looked up and are not in the store
    _absent: set[Any] | None
    #: key → its state before this batch: MISSING, EXPIRED, the payload (mutable values), or the value
    _base: dict[K, Any]
    #: whether all stored entries count as removed; then ``_items`` contains all live ones
    _cleared: bool
    _dirty: bool
    _items: dict[K, Any]
    #: key → payload, as the last ``_collect`` encoded it
    _next: dict[K, bytes]
    #: loaded keys in encoded order; None after a key was added or removed, which iterators notice
    _order: list[K] | None
    #: mutable values: key → stored payload; standalone: key → fingerprint of the clean value
    _packed: dict[K, Any]
    _row: bytes
    _spec: StateSpec
    _stored_count: int
    #: expiries; only in collections with a ttl
    _times: Any

    def _start_standalone(self) -> None:
        self._reset()
        self._spec = STANDALONE
        self._row = b""
        self._dirty = True  # so that it is never logged
        self._count = 0

    @classmethod
    def _bound(cls, spec: StateSpec, row: bytes) -> Any:
        self = cls.__new__(cls)
        self._spec = spec
        self._row = row
        self._dirty = False
        self._reset()
        return self

    def _reset(self) -> None:
        self._items = {}
        self._base = {}
        self._packed = {}
        self._next = {}
        self._absent = None
        self._order = None
        self._cleared = False
        self._count = self._stored_count = -1

    # --- reading ----------------------------------------------------------------------------------------

    def _open(self) -> int:
        """Reads the count from the store and returns it."""
        spec = self._spec
        data = spec.get(spec.count_head + self._row)
        try:
            self._count = self._stored_count = 0 if data is None else self._unpack_count(unpack_cell(data))
        except DECODE_FAILURES as error:
            raise spec.decode_error(error, self._row) from error
        return self._count

    def _unpack_count(self, payload: bytes) -> int:
        return unorder_int(payload)

    def _present(self, key: Any) -> bool:
        """Returns whether the key is live; if so, ``_items`` contains the key afterwards.

        Raises TypeError for an unhashable key.
        """
        items = self._items
        if key in items:
            return True
        count = self._count
        if count < 0:
            count = self._open()
        if len(items) == count or key in self._base:
            return False
        return self._fetch(key)

    def _fetch(self, key: Any) -> bool:
        absent = self._absent
        if absent is not None and key in absent:
            return False
        spec = self._spec
        code = spec.key_bytes(key)
        data = None if code is None else spec.get(spec.cell_head + self._row + code)
        if data is not None and code is not None:
            keys = spec.key_coder
            stored_key: Any = key if key.__class__ is keys.exact_key else keys.decode_key(code)
            if stored_key not in self._base:
                self._take_in(stored_key, data)
            return key in self._items
        if absent is None or len(absent) >= _ABSENT_MAX:
            absent = self._absent = set()
        absent.add(key)
        return False

    def _take_in(self, key: K, data: bytes) -> None:
        """Loads a stored entry that was neither loaded nor written before."""
        spec = self._spec
        try:
            payload = unpack_cell(data)
            if spec.mutable:
                self._packed[key] = payload
                self._items[key] = PACKED
            else:
                self._items[key] = spec.decode(payload)
        except DECODE_FAILURES as error:
            raise self._unreadable(error, key) from error
        self._order = None
        spec.entries_cached += 1

    def _unreadable(self, error: Exception, key: K) -> Exception:
        return self._spec.decode_error(error, self._row, **{self._entry_word: self._entry_name(key)})

    def _entry_name(self, key: Any) -> str:
        return shown(key)

    def _stored_entries(self) -> Iterator[tuple[K, bytes]]:
        """Yields (key, cell) of the committed entries, in encoded order."""
        spec = self._spec
        prefix = spec.cell_head + self._row
        start, decode_key = len(prefix), spec.key_coder.decode_key
        for address, data in spec.scan(prefix):
            try:
                key = decode_key(address[start:])
            except DECODE_FAILURES as error:
                raise spec.decode_error(error, self._row) from error
            yield key, data

    def _load_all(self) -> None:
        count = self._count
        if count < 0:
            count = self._open()
        items, base = self._items, self._base
        if len(items) == count:
            return
        for key, data in self._stored_entries():
            if key not in items and key not in base:
                self._take_in(key, data)
        if len(items) != self._count:
            raise self._spec.count_differs(self._row, len(items), self._count)

    def _ordered(self) -> list[K]:
        """Returns all live keys in encoded order. Callers must not change the list."""
        order = self._order
        if order is None or len(order) != self._count:
            self._load_all()
            order = self._order = self._spec.ordered(self._items)
        return order

    #: acts as ``_ordered``, for callers that read no entry
    _live_order = _ordered

    def _walk(self, order: list[K], keys: Iterable[K]) -> Iterator[K]:
        """Yields ``keys`` while ``order`` is still the order of this collection. Raises RuntimeError if it has
        changed."""
        size = len(order)
        for key in keys:
            if self._order is not order or len(order) != size:
                break
            yield key
        if self._order is not order or len(order) != size:
            raise RuntimeError(f"{self._what} changed size during iteration")

    def _value(self, key: K) -> Any:
        """Returns the value of a live key for the user. From now on a mutable value is tracked for changes."""
        value = self._items[key]
        if value is PACKED:
            self._remember(key)
            try:
                value = self._items[key] = self._spec.decode(self._packed[key])
            except DECODE_FAILURES as error:
                raise self._unreadable(error, key) from error
        return value

    def _getter(self) -> Callable[[K], Any]:
        """Returns ``_value``, or a faster equivalent if values are immutable and need no tracking."""
        return self._value if self._spec.mutable else self._items.__getitem__

    # --- writing ----------------------------------------------------------------------------------------

    def _remember(self, key: K) -> None:
        """Notes the state of a live or new key before this batch. Call it before changing the key."""
        if not self._dirty:
            self._log()
        base = self._base
        if key not in base and not self._spec.standalone:
            now = self._items.get(key, MISSING)
            if now is not MISSING:
                key = self._spec.admit_present(key)
                base[key] = self._packed.get(key, MISSING) if self._spec.mutable else now
            else:
                base[key] = MISSING

    def _log(self) -> None:
        self._dirty = True
        self._spec.log.append(self)

    def _put(self, key: K, value: Any) -> None:
        if not self._present_or_refused(key):
            key = self._admit(key)
            if not self._present(key):
                self._remember(key)
                self._items[key] = value
                self._count += 1
                self._order = None
                self._spec.entries_cached += 1
                return
        self._remember(key)
        self._items[key] = value

    def _present_or_refused(self, key: Any) -> bool:
        """Acts as ``_present``, for a key about to be put. A key that cannot be stored counts as absent here;
        ``_admit`` refuses it."""
        try:
            return self._present(key)
        except TypeError:
            if not self._spec.refuses(key):
                raise
            return False

    def _admit(self, key: K) -> K:
        try:
            admitted: K = self._spec.admit(key)
        except ENCODE_FAILURES as error:
            raise self._unstorable(error, key) from error
        return admitted

    def _unstorable(self, error: Exception, key: Any) -> EncodeError:
        return self._spec.encode_error(error, self._row, **{self._entry_word: self._entry_name(key)})

    def _drop(self, key: Any) -> None:
        """Removes a live key."""
        self._remember(key)
        del self._items[key]
        self._count -= 1
        self._order = None

    def _drop_all(self) -> None:
        count = self._count
        if count < 0:
            count = self._open()
        if count == 0:
            return
        if not self._dirty:
            self._log()
        # without stored entries, forgetting those of this batch is enough
        self._cleared = self._stored_count > 0
        self._items = {}
        self._base = {}
        self._absent = None
        self._order = None
        self._count = 0

    # --- net change -------------------------------------------------------------------------------------

    def _net(self) -> dict[K, bytes | None]:
        """Returns the entries that differ from the store, as key → new payload, which is None for a removed entry."""
        spec, items = self._spec, self._items
        base: dict[K, Any] = self._base
        as_bytes = spec.mutable
        if self._cleared:
            as_bytes = True
            base = self._cleared_payloads()
            base.update(dict.fromkeys(items.keys() - base.keys(), MISSING))
        net: dict[K, bytes | None] = {}
        self._next = {}
        for key, was in base.items():
            now = items.get(key, MISSING)
            if now is MISSING:
                if was is not MISSING:
                    net[key] = None
                continue
            if now is was and not as_bytes:  # a stored b"A" may be the very object that is the payload of 65
                continue
            payload = self._next[key] = self._encoded(key, now)
            if was.__class__ is Marker or payload != (was if as_bytes else spec.encode(was)):
                net[key] = payload
        return net

    def _cleared_payloads(self) -> dict[K, Any]:
        return {key: unpack_cell(data) for key, data in self._stored_entries()}

    def _encoded(self, key: K, value: Any) -> bytes:
        try:
            return self._spec.encode(value)
        except ENCODE_FAILURES as error:
            raise self._unstorable(error, key) from error

    def _collect(self, into: Mutations) -> None:
        """Adds the net change to ``into`` and remembers the payloads for ``_saved``. May be called repeatedly."""
        spec = self._spec
        prefix, header = spec.cell_head + self._row, spec.header
        encode_key = spec.key_coder.encode_key
        # comparing entry by entry reads the cleared entries, which does not pay if few were put back
        if self._cleared and self._stored_count > 4 * self._count + (16 if self._count else 0):
            into.clears.append((prefix, range_end(prefix)))
            net = self._everything()
        else:
            net = self._net()
        for key, payload in net.items():
            if payload is None:
                into.deletes.append(prefix + encode_key(key))
            else:
                into.puts.append((prefix + encode_key(key), header + payload))
        self._collect_count(into)

    def _everything(self) -> dict[K, bytes | None]:
        """Returns all live entries as puts, for a store in which the entries are cleared first."""
        self._next = {key: self._encoded(key, value) for key, value in self._items.items()}
        return dict(self._next)

    def _collect_count(self, into: Mutations) -> None:
        if self._count != self._stored_count:
            self._put_count(into, order_int(self._count))

    def _put_count(self, into: Mutations, payload: bytes) -> None:
        address = self._spec.count_head + self._row
        if self._count:
            into.puts.append((address, HEADER + payload))
        else:
            into.deletes.append(address)

    def _saved(self) -> None:
        """Marks the collection as clean after the store has applied the change from ``_collect``."""
        spec, items = self._spec, self._items
        if spec.mutable:
            packed = self._packed
            if self._cleared:
                packed.clear()
            for key in self._base:
                if key in items:
                    packed[key] = self._next[key]
                    # an operator that kept the object must not change the cached value without the store
                    items[key] = PACKED
                else:
                    packed.pop(key, None)
        else:
            for key, payload in self._next.items():
                if items[key].__class__ is not spec.exact:
                    items[key] = spec.decode(payload)
        self._dirty = self._cleared = False
        self._base = {}
        self._next = {}
        self._stored_count = self._count

    def _forget(self) -> None:
        """Discards changes and all loaded data, so that the next access reads the store."""
        self._dirty = False
        self._reset()

    # --- standalone -------------------------------------------------------------------------------------

    def mark_clean(self) -> None:
        """Makes the present content the baseline of ``changes()``. For standalone objects only.

        Raises RuntimeError for state of an operator.
        """
        if not self._spec.standalone:
            raise RuntimeError("state of an operator is marked clean when its batch is committed")
        self._packed = {key: fingerprint(value) for key, value in self._items.items()}

    def _changed(self) -> tuple[list[K], list[K]]:
        """Returns the keys (put, removed) since the last commit, in encoded order."""
        if self._spec.standalone:
            items, clean = self._items, self._packed
            put = [key for key, value in items.items() if clean.get(key, MISSING) != fingerprint(value)]
            removed = [key for key in clean if key not in items]
        elif not self._dirty:
            return [], []
        else:
            net = self._net()
            put = [key for key, payload in net.items() if payload is not None]
            removed = [key for key, payload in net.items() if payload is None]
        return self._spec.ordered(put), self._spec.ordered(removed)
