"""States of a batch operator other than plain values: maps, sets, counters, reducing states and states with a ttl.

They are the tracked objects of an operator of rows, used for many keys with one call. The tracked objects decide what
is stored, what expires and what is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from stateflow.errors import DeclarationError, EncodeError, NullKey, StateflowError
from stateflow.state import coders
from stateflow.state.coder import Coder
from stateflow.state.declare import Declaration
from stateflow.state.keyed import KeyedState
from stateflow.state.typed import Typed, taken, typed_of

#: coders whose values Arrow returns as they are
_PLAIN: frozenset[type] = frozenset({coders.Int64, coders.Bool, coders.Utf8, coders.Bytes, coders.Date})


def whole(array: Any) -> pa.Array:
    """Returns one array of plain values, without chunks and without a dictionary."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array


class KeyObjects:
    """Looks up the tracked objects of keys.

    Pass the same array object to several calls of a batch: its keys are then looked up once.
    """

    def __init__(self, operator: str, state: KeyedState) -> None:
        self._operator, self._state = operator, state
        self._last: tuple[pa.Array, list[dict[str, Any]]] | None = None

    def of(self, keys: Any) -> list[dict[str, Any]]:
        """Returns the tracked objects of each key, by attribute. Raises NullKey, EncodeError (NaN)."""
        if self._last is not None and self._last[0] is keys:
            return self._last[1]
        array = whole(keys)
        if array.null_count:
            raise NullKey("a key is null", remedy="filter such rows before the operator", operator=self._operator)
        plain: list[Any] = array.to_pylist()
        if pa.types.is_struct(array.type):
            plain = [tuple(row.values()) for row in plain]
        found, bundle_of = self._state.bundles(plain), self._state.bundle_of
        bundles = [bundle_of(key) if bundle is None else bundle for key, bundle in zip(plain, found, strict=True)]
        self._last = keys, bundles
        return bundles

    def end_batch(self) -> None:
        self._last = None


class TrackedColumn:
    """One state for all keys of a partition.

    ``keys`` is an Arrow array of the key column's values, or a struct array for several key columns. Other arrays are
    as long as ``keys``. Calls process the keys in their order.
    """

    def __init__(self, operator: str, attribute: str, declaration: Declaration, objects: KeyObjects) -> None:
        self._operator, self._attribute, self._name = operator, attribute, declaration.name
        self._objects, self._coder = objects, declaration.coder
        self._value = typed_of(declaration.coder)
        self._entry_coder = declaration.key_coder

    def each(self, keys: Any) -> list[Any]:
        """Returns the tracked object of each key, as ``process(row, ctx)`` has it bound. Raises NullKey.

        Equal keys get the same object.
        """
        attribute = self._attribute
        return [bundle[attribute] for bundle in self._objects.of(keys)]

    def _taken(self, coder: Coder[Any], array: Any, length: int, what: str) -> list[Any]:
        array = whole(array)
        if len(array) != length:
            raise self._misfit(f"{length} keys came with {len(array)} {what}", f"give as many {what} as keys")
        values: list[Any] = array.to_pylist()
        return values if type(coder) in _PLAIN else [taken(coder, value) for value in values]

    def _entries(self, array: Any, length: int) -> list[Any]:
        """Returns the keys of maps or members of sets as values. Raises EncodeError for null."""
        assert self._entry_coder is not None
        entries = self._taken(self._entry_coder, array, length, "entries")
        if None in entries:
            raise self._misfit("an entry is null", "filter such rows before the operator")
        return entries

    def _values(self, array: Any, length: int) -> list[Any]:
        return self._taken(self._coder, array, length, "values")

    def _array(self, typed: Typed, values: Iterable[Any]) -> pa.Array:
        try:
            return typed.array(values)
        except StateflowError as error:
            error.located(operator=self._operator, state=self._name)
            raise

    def _misfit(self, what: str, remedy: str) -> EncodeError:
        return EncodeError(what, remedy=remedy, operator=self._operator, state=self._name)


class ValueObjects(TrackedColumn):
    """A value state with a ttl, or of a type that can change in place."""

    def get_many(self, keys: Any) -> pa.Array:
        """Returns values in the order of ``keys``; the default, or null, where none is stored or the value has expired.

        The values are copies: put a changed one to keep the change. Raises NullKey.
        """
        return self._array(self._value, [tracked.value for tracked in self.each(keys)])

    def put_many(self, keys: Any, values: Any) -> None:
        """Stores a value for each key; null clears. For a key that comes twice the last value counts.

        Raises NullKey, and EncodeError, which for a value of another type than declared may come with the commit.
        """
        objects = self.each(keys)
        for tracked, value in zip(objects, self._values(values, len(objects)), strict=True):
            if value is None:
                tracked.clear()
            else:
                tracked.value = value


class AddedColumn(TrackedColumn):
    """A counter, or a reducing state."""

    def get_many(self, keys: Any) -> pa.Array:
        """Returns the counts or reduced values in the order of ``keys``. Raises NullKey.

        Where nothing was added, a counter gives 0 and a reducing state null.
        """
        return self._array(self._value, [tracked.value for tracked in self.each(keys)])

    def add_many(self, keys: Any, values: Any) -> None:
        """Adds a value for each key, in order; null adds nothing. Raises NullKey, EncodeError."""
        objects = self.each(keys)
        for tracked, value in zip(objects, self._values(values, len(objects)), strict=True):
            if value is not None:
                tracked.add(value)

    def clear_many(self, keys: Any) -> None:
        """Clears the state of each key, as if nothing had been added. Raises NullKey."""
        for tracked in self.each(keys):
            tracked.clear()


class _Collected(TrackedColumn):
    """A map or a set for each key."""

    def __init__(self, operator: str, attribute: str, declaration: Declaration, objects: KeyObjects) -> None:
        super().__init__(operator, attribute, declaration, objects)
        assert self._entry_coder is not None
        self._entry = typed_of(self._entry_coder)

    def contains_many(self, keys: Any, entries: Any) -> pa.Array:
        """Returns bools: whether the entry (of a map) or member (of a set) is there. Raises NullKey."""
        objects = self.each(keys)
        pairs = zip(objects, self._entries(entries, len(objects)), strict=True)
        return pa.array([entry in tracked for tracked, entry in pairs], pa.bool_())

    def sizes(self, keys: Any) -> pa.Array:
        """Returns int64: the number of entries or members of each key. Raises NullKey."""
        return pa.array([len(tracked) for tracked in self.each(keys)], pa.int64())

    def clear_many(self, keys: Any) -> None:
        """Removes all entries or members of these keys. Raises NullKey."""
        for tracked in self.each(keys):
            tracked.clear()

    def _indices(self, counts: Sequence[int]) -> pa.Array:
        return pa.array([index for index, count in enumerate(counts) for _ in range(count)], pa.int64())


class MapColumn(_Collected):
    """A map for each key: ``self.totals.get_many(keys, entries)`` is ``self.totals.get(entry)`` for each pair."""

    def get_many(self, keys: Any, entries: Any) -> pa.Array:
        """Returns the value of each (key, entry); null where there is none. Raises NullKey."""
        objects = self.each(keys)
        pairs = zip(objects, self._entries(entries, len(objects)), strict=True)
        return self._array(self._value, [tracked.get(entry) for tracked, entry in pairs])

    def put_many(self, keys: Any, entries: Any, values: Any) -> None:
        """Stores a value for each (key, entry); null removes the entry. The last value of a repeated pair counts.

        Raises NullKey, and EncodeError, which for a value of another type than declared may come with the commit.
        """
        objects = self.each(keys)
        given = self._entries(entries, len(objects)), self._values(values, len(objects))
        for tracked, entry, value in zip(objects, *given, strict=True):
            if value is None:
                tracked.pop(entry, None)
            else:
                tracked[entry] = value

    def remove_many(self, keys: Any, entries: Any) -> None:
        """Removes each (key, entry); a missing entry is no error. Raises NullKey."""
        objects = self.each(keys)
        for tracked, entry in zip(objects, self._entries(entries, len(objects)), strict=True):
            tracked.pop(entry, None)

    def items(self, keys: Any) -> pa.RecordBatch:
        """Returns all entries of the keys: ``index`` into ``keys`` (int64), ``entry`` and ``value``.

        The entries of each key come in the map's order. Raises NullKey.
        """
        each = [list(tracked.items()) for tracked in self.each(keys)]
        entries = self._array(self._entry, [entry for found in each for entry, _ in found])
        values = self._array(self._value, [value for found in each for _, value in found])
        arrays = [self._indices([len(found) for found in each]), entries, values]
        return pa.RecordBatch.from_arrays(arrays, ["index", "entry", "value"])


class SetColumn(_Collected):
    """A set for each key: ``self.seen.contains_many(keys, members)`` is ``member in self.seen`` for each pair."""

    def add_many(self, keys: Any, members: Any) -> None:
        """Adds a member for each key. Raises NullKey, and EncodeError for a member of another type than declared."""
        objects = self.each(keys)
        for tracked, member in zip(objects, self._entries(members, len(objects)), strict=True):
            tracked.add(member)

    def discard_many(self, keys: Any, members: Any) -> None:
        """Removes each (key, member); a missing member is no error. Raises NullKey."""
        objects = self.each(keys)
        for tracked, member in zip(objects, self._entries(members, len(objects)), strict=True):
            tracked.discard(member)

    def members(self, keys: Any) -> pa.RecordBatch:
        """Returns all members of the keys' sets: ``index`` into ``keys`` (int64) and ``member``.

        The members of each key come in the set's order. Raises NullKey.
        """
        each = [list(tracked) for tracked in self.each(keys)]
        members = self._array(self._entry, [member for found in each for member in found])
        return pa.RecordBatch.from_arrays([self._indices([len(found) for found in each]), members], ["index", "member"])


_KINDS: dict[str, type[TrackedColumn]] = {
    "value": ValueObjects,
    "map": MapColumn,
    "set": SetColumn,
    "counter": AddedColumn,
    "reducing": AddedColumn,
}


def tracked_columns(
    operator: str, declarations: Mapping[str, Declaration], objects: KeyObjects
) -> dict[str, TrackedColumn]:
    """Returns the columns by attribute. Raises DeclarationError for a list, which has no columns."""
    found: dict[str, TrackedColumn] = {}
    for attribute, declaration in declarations.items():
        made = _KINDS.get(declaration.kind)
        if made is None:
            raise DeclarationError(
                f"a batch operator has no {declaration.kind} states",
                remedy="use state.map with a position as entry, or state.value(list[…])",
                operator=operator,
                state=declaration.name,
            )
        found[attribute] = made(operator, attribute, declaration, objects)
    return found
