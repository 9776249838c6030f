"""Column-wise states, for operators that process whole record batches.

Values that neither change in place nor expire are in arrays (:class:`ValueColumn`), at the index of their key (see
:mod:`~stateflow.state.keys`). All other states, such as maps, sets, counters, records and states with a ttl, are
the tracked objects of a row operator, used for many keys with one call (:class:`TrackedColumn`). The tracked objects
decide what is stored, what expires and what is rolled back.

The cells are the same as those of a row operator, so that an operator can be changed from rows to batches, and back,
with the same stored state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from stateflow.changes import Mutations
from stateflow.errors import DeclarationError, EncodeError, InvalidArgument, StateflowError
from stateflow.state import coders
from stateflow.state.arrays import (
    Array,
    Layout,
    Typed,
    distinct,
    grown,
    is_converted,
    layout_of,
    taken,
    typed_of,
)
from stateflow.state.cache import CachePool
from stateflow.state.cells import CELL, CellReader, decode_row_key, split_address, unpack_cell
from stateflow.state.coders import Coder
from stateflow.state.declare import Declaration
from stateflow.state.keyed import MAX_VALUE_BYTES, KeyedState
from stateflow.state.keys import KeyColumns, KeyIndex

#: coders whose values Arrow returns as they are
_PLAIN: frozenset[type] = frozenset({coders.Int64, coders.Bool, coders.Utf8, coders.Bytes, coders.Date})
_UNKNOWN, _ABSENT, _PRESENT = 0, 1, 2
#: approximate bytes of a key (with its address and its entry in the dict) and of its item in each array
_KEY_BYTES, _ITEM_BYTES = 250, 10


def whole(array: Any) -> pa.Array:
    """Returns one array of plain values, without chunks and without a dictionary. Raises InvalidArgument for what is no
    Arrow array."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if not isinstance(array, pa.Array):
        raise InvalidArgument(
            f"{type(array).__name__} was passed instead of an Arrow array",
            remedy="pass pa.array(…) of it; for one key or value, an array of one item",
        )
    return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array


# -- Tracked objects for many keys -----------------------------------------------------------------------------------


class KeyObjects:
    """Looks up the tracked objects of keys.

    The keys of an array are looked up only once if the same array object is passed to several calls of a batch.
    """

    def __init__(self, state: KeyedState, keys: KeyColumns) -> None:
        self._state, self._keys = state, keys
        self._last: tuple[pa.Array, list[dict[str, Any]]] | None = None

    def of(self, keys: Any) -> list[dict[str, Any]]:
        """Returns the tracked objects of each key, by attribute. Raises NullKey, and EncodeError for NaN and keys that
        are not of the key columns and their types."""
        if self._last is not None and self._last[0] is keys:
            return self._last[1]
        plain = self._keys.plain(whole(keys))
        found, bundle_of = self._state.bundles(plain), self._state.bundle_of
        bundles = [bundle_of(key) if bundle is None else bundle for key, bundle in zip(plain, found, strict=True)]
        self._last, self._keys.belonging = (keys, bundles), keys
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
        """Returns the tracked object of each key, the one that ``process(row, ctx)`` would see. Raises NullKey.

        Equal keys get the same object.
        """
        attribute = self._attribute
        return [bundle[attribute] for bundle in self._objects.of(keys)]

    def _taken(self, coder: Coder[Any], array: Any, length: int, what: str) -> list[Any]:
        array = whole(array)
        if len(array) != length:
            raise self._misfit(f"{length} keys were passed with {len(array)} {what}", f"pass as many {what} as keys")
        try:
            values: list[Any] = array.to_pylist()
        except (OverflowError, ValueError) as error:  # a time that Python's lack
            what = f"{what} of Arrow type {array.type} do not fit: {error}"
            raise self._misfit(what, "cast the column, or filter out such rows") from error
        if type(coder) in _PLAIN:
            return values
        with self._located():
            return [taken(coder, value) for value in values]

    def _entries(self, array: Any, length: int) -> list[Any]:
        """Returns the keys of maps, or the members of sets, as Python values. Raises EncodeError for null."""
        assert self._entry_coder is not None
        entries = self._taken(self._entry_coder, array, length, "entries")
        if None in entries:
            raise self._misfit("an entry is null", "filter out such rows before the operator")
        return entries

    def _values(self, array: Any, length: int) -> list[Any]:
        self._check_is_column(self._value)
        return self._taken(self._coder, array, length, "values")

    def _check_is_column(self, typed: Typed) -> None:
        """Refuses a column of JSON text, because its text would be stored when it is put back."""
        if typed.one_way:
            raise DeclarationError(
                "the declared type has no Arrow type of its own, or has such items",
                remedy="use each(keys), the tracked object of each key, or declare one type for every item",
                operator=self._operator,
                state=self._name,
            )

    def _array(self, typed: Typed, values: Iterable[Any]) -> pa.Array:
        self._check_is_column(typed)
        with self._located():
            return typed.array(values)

    @contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except StateflowError as error:
            error.located(operator=self._operator, state=self._name)
            raise

    def _misfit(self, what: str, remedy: str) -> EncodeError:
        return EncodeError(what, remedy=remedy, operator=self._operator, state=self._name)


class ValueObjects(TrackedColumn):
    """A value state with a ttl, or of a record or another type that can change in place."""

    def get_many(self, keys: Any) -> pa.Array:
        """Returns values in the order of ``keys``; for a value that is not stored or has expired, the default or null.

        The values are copies, so a changed value must be put to be stored. Raises NullKey.
        """
        return self._array(self._value, [tracked.value for tracked in self.each(keys)])

    def put_many(self, keys: Any, values: Any) -> None:
        """Stores a value for each key. Null clears the key's state. The last value of a repeated key counts.

        Raises NullKey, and EncodeError for a value of another type than declared, perhaps only at the commit.
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

        For a key without additions, a counter gives 0 and a reducing state null.
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
        """Returns, as bool for each key, whether its map contains the entry, or its set the member. Raises NullKey."""
        objects = self.each(keys)
        pairs = zip(objects, self._entries(entries, len(objects)), strict=True)
        return pa.array([entry in tracked for tracked, entry in pairs], pa.bool_())

    def sizes(self, keys: Any) -> pa.Array:
        """Returns the number of entries or members of each key, as int64. Raises NullKey."""
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
        """Returns the value of each (key, entry), null for a missing entry. Raises NullKey."""
        objects = self.each(keys)
        pairs = zip(objects, self._entries(entries, len(objects)), strict=True)
        return self._array(self._value, [tracked.get(entry) for tracked, entry in pairs])

    def put_many(self, keys: Any, entries: Any, values: Any) -> None:
        """Stores a value for each (key, entry); null removes the entry. The last value of a repeated pair counts.

        Raises NullKey, and EncodeError for a value of another type than declared, perhaps only at the commit.
        """
        objects = self.each(keys)
        given = self._entries(entries, len(objects)), self._values(values, len(objects))
        for tracked, entry, value in zip(objects, *given, strict=True):
            if value is None:
                tracked.pop(entry, None)
            else:
                tracked[entry] = value

    def remove_many(self, keys: Any, entries: Any) -> None:
        """Removes each (key, entry); missing entries are ignored. Raises NullKey."""
        objects = self.each(keys)
        for tracked, entry in zip(objects, self._entries(entries, len(objects)), strict=True):
            tracked.pop(entry, None)

    def items(self, keys: Any) -> pa.RecordBatch:
        """Returns all entries of the keys, with the columns ``index`` (int64, into ``keys``), ``entry`` and ``value``.

        The entries of each key are in the order of its map. Raises NullKey.
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
        """Removes each (key, member); missing members are ignored. Raises NullKey."""
        objects = self.each(keys)
        for tracked, member in zip(objects, self._entries(members, len(objects)), strict=True):
            tracked.discard(member)

    def members(self, keys: Any) -> pa.RecordBatch:
        """Returns all members of the keys' sets, with the columns ``index`` (int64, into ``keys``) and ``member``.

        The members of each key are in the order of its set. Raises NullKey.
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
    """Returns the columns by attribute. Raises DeclarationError for a list state, which cannot be a column."""
    found: dict[str, TrackedColumn] = {}
    for attribute, declaration in declarations.items():
        made = _KINDS.get(declaration.kind)
        if made is None:
            raise DeclarationError(
                f"a batch operator cannot have {declaration.kind} states",
                remedy="use state.map with a position as entry, or state.value(list[…])",
                operator=operator,
                state=declaration.name,
            )
        found[attribute] = made(operator, attribute, declaration, objects)
    return found


# -- Values in arrays ------------------------------------------------------------------------------------------------


class ValueColumn:
    """One value state of all keys of a partition.

    ``keys`` is an Arrow array of the key column's values, or a struct array for several key columns. Its keys are
    looked up only once if the same array object is passed to several calls of a batch.

    Example: ``self.n.put_many(keys, pc.add(self.n.get_many(keys), 1))`` in ``process_batch``.
    """

    def __init__(
        self, operator: str, declaration: Declaration, reader: CellReader, index: KeyIndex, max_value_bytes: int
    ) -> None:
        self._operator = operator
        self._name = declaration.name
        self._coder = declaration.coder
        payload = declaration.default_payload
        self._layout: Layout = layout_of(declaration.coder, max_value_bytes)
        self._default = None if payload is None else self._layout.single(declaration.coder.decode(payload))
        self._head = CELL + declaration.tag
        self._reader = reader
        self._index = index
        self.invalidate()

    def invalidate(self) -> None:
        self._values = [np.zeros(0, dtype) for dtype in self._layout.dtypes]
        self._known = np.zeros(0, np.uint8)
        self._dirty = np.zeros(0, np.bool_)
        #: indices of keys changed in this batch, with ``_known`` and the values before the batch
        self._before: list[tuple[Array, Array, list[Array]]] = []

    def get_many(self, keys: pa.Array) -> pa.Array:
        """Returns values in the order of ``keys``; for a value that is not stored, the default or null. Raises NullKey.

        A tuple is returned as a struct with the fields ``_0``, ``_1``, …
        """
        try:
            return self._layout.to_arrow(*self._read(self._loaded(whole(keys))))
        except EncodeError as error:
            error.located(operator=self._operator, state=self._name)
            raise

    def _read(self, indices: Array) -> tuple[list[Array], Array]:
        """Returns the values of keys, or the default, and whether each is null."""
        values = [array[indices] for array in self._values]
        absent = self._known[indices] == _ABSENT
        if self._default is None:
            return values, absent
        for array, default in zip(values, self._default, strict=True):
            array[absent] = default
        return values, np.zeros(len(indices), np.bool_)

    def put_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Stores a value for each key. Null clears the key's state. The last value of a repeated key counts.

        Raises NullKey, and EncodeError for values of another type than declared; then nothing is stored.
        """
        keys, values = whole(keys), whole(values)
        if len(keys) != len(values):
            raise self._unencodable(
                f"{len(keys)} keys were passed with {len(values)} values", "pass as many values as keys"
            )
        indices = self._loaded(keys)
        null = np.zeros(len(values), np.bool_)
        if values.null_count:
            null = values.is_null().to_numpy(zero_copy_only=False)
        arrays = self._arrays(values, null)
        if self._layout.rescales:
            arrays = self._layout.rescaled(arrays, *self._read(indices))
        touched = distinct(indices, len(self._index.rows))
        fresh = touched[~self._dirty[touched]]
        self._before.append((fresh, self._known[fresh], [array[fresh] for array in self._values]))
        self._dirty[fresh] = True
        self._known[indices] = np.where(null, _ABSENT, _PRESENT)
        for array, given in zip(self._values, arrays, strict=True):
            array[indices] = given

    def _arrays(self, values: pa.Array, null: Array) -> list[Array]:
        if null.all():
            return [np.zeros(len(values), dtype) for dtype in self._layout.dtypes]
        try:
            return self._layout.of_arrow(values)
        except EncodeError as error:
            raise self._unencodable(error.what) from error
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise self._unencodable((str(error).splitlines() or [type(error).__name__])[0]) from error

    def _unencodable(
        self, what: str, remedy: str = "cast the column, or fill null fields", key: str | None = None
    ) -> EncodeError:
        return EncodeError(what, remedy=remedy, operator=self._operator, state=self._name, key=key)

    def _loaded(self, keys: pa.Array) -> Array:
        """Returns the indices of the keys, after loading the values that are not loaded yet."""
        indices = self._index.of(keys)
        if len(self._index.rows) > len(self._known):
            length = len(self._index.rows)
            self._values = [grown(array, length) for array in self._values]
            self._known, self._dirty = grown(self._known, length), grown(self._dirty, length)
        unknown = indices[self._known[indices] == _UNKNOWN]
        if len(unknown):
            self._load(distinct(unknown, len(self._index.rows)))
        return indices

    def _load(self, indices: Array) -> None:
        get, decode, rows, head = self._reader.get, self._coder.decode, self._index.rows, self._head
        of_value, arrays = self._layout.of_value, self._values
        known = np.full(len(indices), _ABSENT, np.uint8)
        for place, index in enumerate(indices.tolist()):
            cell = get(head + rows[index])
            if cell is not None:
                known[place] = _PRESENT
                for array, item in zip(arrays, of_value(decode(unpack_cell(cell))), strict=True):
                    array[index] = item
        # not sooner: after an error or an interruption, values that were not read must not count as absent
        self._known[indices] = known

    def collect(self, into: Mutations) -> None:
        if not self._before:
            return
        indices = np.concatenate([each[0] for each in self._before])
        known_before = np.concatenate([each[1] for each in self._before])
        before = [np.concatenate(arrays) for arrays in zip(*(each[2] for each in self._before), strict=True)]
        known = self._known[indices]
        now = [array[indices] for array in self._values]
        put = (known == _PRESENT) & (known_before == _ABSENT)
        both = (known == _PRESENT) & (known_before == _PRESENT)
        put[both] = self._layout.differ([array[both] for array in before], [array[both] for array in now])
        head, rows = self._head, self._index.rows
        addresses = [head + rows[index] for index in indices[put].tolist()]
        try:
            cells = self._layout.cells([array[put] for array in now]) if addresses else []
        except EncodeError as error:
            key = repr(decode_row_key(split_address(addresses[int(error.where["index"])])[0]))
            raise self._unencodable(
                error.what,
                error.remedy or "store values that fit the declared type and STATEFLOW_REPLICA_VALUE_BYTES_MAX",
                key,
            ) from error
        into.puts += zip(addresses, cells, strict=True)
        gone = indices[(known == _ABSENT) & (known_before == _PRESENT)]
        into.deletes += [head + rows[index] for index in gone.tolist()]

    def mark_clean(self) -> None:
        for indices, _, _ in self._before:
            self._dirty[indices] = False
        self._before.clear()

    def rollback(self) -> None:
        for indices, known, arrays in self._before:
            self._dirty[indices] = False
            self._known[indices] = known
            for array, old in zip(self._values, arrays, strict=True):
                array[indices] = old
        self._before.clear()

    def keep(self, kept: Array) -> None:
        """Keeps only the keys at the indices ``kept``, in this order. Callers make sure that no key is dirty."""
        missing = max(0, int(kept.max(initial=-1)) + 1 - len(self._known))
        if missing:
            self._values = [grown(array, len(array) + missing) for array in self._values]
            self._known = grown(self._known, len(self._known) + missing)
        self._values = [array[kept] for array in self._values]
        self._known = self._known[kept]
        self._dirty = np.zeros(len(kept), np.bool_)


# -- States of an operator -------------------------------------------------------------------------------------------


def is_plain(declaration: Declaration) -> bool:
    """Returns whether a state is kept in a :class:`ValueColumn`."""
    coder = declaration.coder
    return declaration.kind == "value" and declaration.ttl is None and not coder.mutable and not is_converted(coder)


class ColumnStates:
    """The states of a batch operator; the counterpart of KeyedState, which holds those of a row operator.

    Args:
        keys: key columns of the partition; None: keys are taken as they come.

    Example: ``states = ColumnStates("Total", declarations_of(Total), store)``
    """

    def __init__(
        self,
        operator: str,
        declarations: Mapping[str, Declaration],
        reader: CellReader,
        *,
        cached_keys: int = 262_144,
        cache: CachePool | None = None,
        max_value_bytes: int = MAX_VALUE_BYTES,
        keys: KeyColumns | None = None,
    ) -> None:
        self.max_value_bytes = max_value_bytes
        keys = KeyColumns(operator) if keys is None else keys
        self._index = KeyIndex(keys)
        plain = {name: each for name, each in declarations.items() if is_plain(each)}
        others = {name: each for name, each in declarations.items() if name not in plain}
        self.columns = {
            name: ValueColumn(operator, declaration, reader, self._index, max_value_bytes)
            for name, declaration in plain.items()
        }
        self._tracked = KeyedState(
            operator,
            others,
            reader,
            cached_keys=cached_keys,
            cache=cache if others else None,
            max_value_bytes=max_value_bytes,
            belongs=keys.belongs,
        )
        self._objects = KeyObjects(self._tracked, keys)
        self.tracked = tracked_columns(operator, others, self._objects)
        self._keyed = KeyedState(operator, declarations, reader, max_value_bytes=max_value_bytes)
        self._cached_keys = cached_keys
        self._key_bytes = _KEY_BYTES + sum(_ITEM_BYTES * len(column._values) for column in self.columns.values())
        self._pool = cache if plain or not others else None
        self._used = 0  # bytes of the pool
        if self._pool is not None:
            self._pool.join()

    def attach(self, target: object) -> None:
        """Sets ``target.<state name>`` to the columns."""
        target.__dict__.update(self.columns | self.tracked)

    def detach(self, target: object) -> None:
        """Undoes :meth:`attach`."""
        for name in self.columns | self.tracked:
            target.__dict__.pop(name, None)

    def set_time(self, processing_us: int, event_us: int | None = None) -> None:
        """See :meth:`KeyedState.set_time`."""
        self._tracked.set_time(processing_us, event_us)
        self._keyed.set_time(processing_us, event_us)

    @property
    def expires(self) -> bool:
        """See :attr:`KeyedState.expires`."""
        return self._tracked.expires

    @property
    def sweep_is_behind(self) -> bool:
        """See :attr:`KeyedState.sweep_is_behind`."""
        return self._tracked.sweep_is_behind

    def expired(self, limit: int) -> Mutations:
        """See :meth:`KeyedState.expired`."""
        return self._with_columns(self._tracked.expired(limit))

    def collect(self) -> Mutations:
        return self._with_columns(self._tracked.collect())

    def _with_columns(self, mutations: Mutations) -> Mutations:
        for column in self.columns.values():
            column.collect(mutations)
        return mutations

    def mark_clean(self) -> None:
        self._tracked.mark_clean()
        self._objects.end_batch()
        for column in self.columns.values():
            column.mark_clean()
        self._index.end_batch()
        most = self._cached_keys
        if self._pool is not None:
            most = min(most, self._pool.share // self._key_bytes)
        if len(self._index.rows) > most:
            kept = self._index.drop_oldest(most * 3 // 4)
            for column in self.columns.values():
                column.keep(kept)
        if self._pool is not None:
            self._uses(self._pool, len(self._index.rows) * self._key_bytes)

    def _uses(self, pool: CachePool, size: int) -> None:
        pool.bytes += size - self._used
        self._used = size

    def rollback(self) -> None:
        self._tracked.rollback()
        self._objects.end_batch()
        for column in self.columns.values():
            column.rollback()
        self._index.end_batch()

    def invalidate(self) -> None:
        self._keyed.invalidate()
        self._tracked.invalidate()
        self._objects.end_batch()
        self._index.clear()
        for column in self.columns.values():
            column.invalidate()

    def close(self) -> None:
        self.invalidate()
        self._tracked.close()
        if self._pool is not None:
            self._uses(self._pool, 0)
            self._pool.leave({}, 0)
            self._pool = None

    def peek(self, key: Hashable) -> SimpleNamespace:
        """Returns the states of one key as tracked objects, read from the store. For tests and the harness."""
        self._keyed.invalidate()
        return self._keyed.peek(key)

    def schema(self) -> list[dict[str, Any]]:
        return self._keyed.schema()
