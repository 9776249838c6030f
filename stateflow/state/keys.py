"""Arrays of keys: compares them with the key columns of their partition, and gives each key its index.

The *kind* of a key is its Python type, such as ``int``. Keys of two kinds are never equal, even if both are printed as
7, so that a batch operator must not read or write states by keys of another kind than that of its key columns.

A :class:`KeyIndex` gives each key an index into the arrays of a partition's column states. Indices are 0, 1, …; they
are renumbered when the least recently used keys are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.types as t

from stateflow.errors import EncodeError, NullKey
from stateflow.state.arrays import Array, grown
from stateflow.state.cells import encode_row_key, row_part

# -- Key columns -----------------------------------------------------------------------------------------------------

_KINDS: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (t.is_integer, "int"),
    (t.is_floating, "float"),
    (t.is_boolean, "bool"),
    (t.is_string, "str"),
    (t.is_large_string, "str"),
    (t.is_binary, "bytes"),
    (t.is_large_binary, "bytes"),
    (t.is_fixed_size_binary, "bytes"),
    (t.is_date, "date"),
    (lambda type_: t.is_timestamp(type_) and type_.tz is not None, "timestamp"),
    (t.is_timestamp, "timestamp without time zone"),
)


def kind_of(type_: pa.DataType) -> str:
    """Returns the kind of the keys in a column of this type; empty if the kind depends on the values."""
    return next((kind for told, kind in _KINDS if told(type_)), "")


def kinds_of(key: Any) -> tuple[str, ...]:
    """Returns the kind of each column of a stored key."""
    return tuple(map(_kind, key if isinstance(key, tuple) else (key,)))


def _kind(value: Any) -> str:
    match value:
        case datetime():
            return "timestamp" if value.tzinfo is not None else "timestamp without time zone"
        case date():
            return "date"
    return type(value).__name__


class KeyColumns:
    """The key columns of one partition, by which arrays of keys are checked.

    Args:
        names: names of the key columns. Keys of several columns are structs with these fields, in any order; empty: the
            columns are the fields of the keys that come, in their order.
        belongs: raises InvalidArgument for a key of another partition; None: keys are not checked.

    Example: ``KeyColumns("Total", ("k",)).plain(pa.array(["a"]))`` is ``["a"]``.
    """

    def __init__(
        self, operator: str = "", names: Sequence[str] = (), belongs: Callable[[Hashable], None] | None = None
    ) -> None:
        self.operator, self.names, self.belongs = operator, names, belongs
        #: kind of each key column; empty: not known yet
        self.kinds: Sequence[str] = ()
        #: an array whose keys are known to belong to the partition, so that they need not be hashed again
        self.belonging: pa.Array | None = None

    def check(self, keys: pa.Array) -> None:
        """Checks that keys are of the key columns and their types. Raises NullKey, EncodeError."""
        if keys.null_count:
            raise NullKey("a key is null", remedy="filter out such rows before the operator", operator=self.operator)
        fields = list(keys.type) if t.is_struct(keys.type) else []
        names, types = self.names, {field.name: field.type for field in fields}
        if names and sorted(field.name for field in fields) != (sorted(names) if len(names) > 1 else []):
            several = len(names) > 1
            wanted = f"a struct of the key columns {', '.join(names)}" if several else f"the key column {names[0]}"
            raise EncodeError(
                f"keys of Arrow type {keys.type} are not {wanted}",
                remedy="pass a struct array whose fields have these names" if several else "pass the column",
                operator=self.operator,
            )
        for name, wanted in zip(names, self.kinds, strict=False):
            given = kind_of(types.get(name, keys.type))
            if given and wanted and given != wanted:
                raise EncodeError(
                    f"keys of type {given} were passed, but the key column {name!r} is of type {wanted}",
                    remedy="pass the column, or cast the keys to its type",
                    operator=self.operator,
                )

    def plain(self, keys: pa.Array) -> list[Any]:
        """Returns keys in the form that a row operator uses, which for several key columns is a tuple.

        Raises the errors of :meth:`check`.
        """
        self.check(keys)
        if not t.is_struct(keys.type):
            plain: list[Any] = keys.to_pylist()
            return plain
        columns, fields = keys.flatten(), [field.name for field in keys.type]
        return list(zip(*(columns[fields.index(name)].to_pylist() for name in self.names or fields), strict=True))

    def plain_here(self, keys: pa.Array) -> list[Any]:
        """Returns what :meth:`plain` does, after checking that the keys belong to the partition. Raises the errors of
        :meth:`check`, and InvalidArgument."""
        plain = self.plain(keys)
        if self.belongs is not None and keys is not self.belonging:
            for key in dict.fromkeys(plain):
                self.belongs(key)
        return plain


# -- Indices of keys -------------------------------------------------------------------------------------------------

#: number of sorted keys for each key that waits to be sorted in. With fewer, all keys are copied more often; with more,
#: each batch with new keys copies more waiting ones.
SORTED_PER_WAITING = 64
#: types of keys that are equal exactly when their stored forms are; keys of other types are looked up by that form
_PLAIN: Final = frozenset({str, bytes, bool, date, float, Decimal})


class _Sorted:
    """Ascending int keys, with their indices. Immutable."""

    __slots__ = ("_indices", "_keys")

    def __init__(self, keys: Array, indices: Array) -> None:
        self._keys, self._indices = keys, indices

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, ascending: Array) -> Array:
        """Returns the index of each key, -1 for an unknown key. Call it only if this object has keys."""
        place = np.searchsorted(self._keys, ascending)
        place[place == len(self._keys)] = 0
        return np.where(self._keys[place] == ascending, self._indices[place], -1)

    def joined(self, other: _Sorted) -> _Sorted:
        """Returns these keys together with those of ``other``. No key may be in both."""
        if not len(self):
            return other
        where = np.searchsorted(self._keys, other._keys)
        return _Sorted(np.insert(self._keys, where, other._keys), np.insert(self._indices, where, other._indices))

    def moved(self, places: Array) -> _Sorted:
        """Returns these keys, with the index ``places[n]`` in place of n. Keys with the new index -1 are left out."""
        indices = places[self._indices]
        return _Sorted(self._keys[indices >= 0], indices[indices >= 0])


_NO_KEYS = _Sorted(np.zeros(0, np.int64), np.zeros(0, np.int64))


class _IntIndex:
    """Finds the indices of int keys by binary search, at a third of the cost of a dict for many keys at once.

    Adding keys to the sorted keys copies all of them. So new keys wait in a sorted array of their own until they are
    many.
    """

    def __init__(self) -> None:
        self._sorted = self._waiting = _NO_KEYS

    def find(self, keys: Array) -> Array:
        """Returns the index of each key, -1 for an unknown key."""
        if not len(self._sorted):  # then none waits either
            return np.full(len(keys), -1, np.int64)
        order = np.argsort(keys)  # sorted keys take a third of the time, because they hit the processor's cache
        ascending = keys[order]
        indices = self._sorted.find(ascending)
        if len(self._waiting):
            rest = np.flatnonzero(indices < 0)
            indices[rest] = self._waiting.find(ascending[rest])
        found = np.empty(len(keys), np.int64)
        found[order] = indices
        return found

    def add(self, keys: Array, indices: Array) -> None:
        """Adds keys that are not known yet, in ascending order."""
        waiting = self._waiting.joined(_Sorted(keys, indices))
        if len(waiting) * SORTED_PER_WAITING > len(self._sorted):
            self._sorted, self._waiting = self._sorted.joined(waiting), _NO_KEYS
        else:
            self._waiting = waiting

    def moved(self, places: Array) -> None:
        """Changes the index n of each key to ``places[n]``, and drops keys with the new index -1."""
        self._sorted, self._waiting = self._sorted.joined(self._waiting).moved(places), _NO_KEYS


class KeyIndex:
    """The index of each key, which the columns of one partition share."""

    def __init__(self, keys: KeyColumns) -> None:
        self._keys = keys
        self._known: dict[type, dict[Any, int]] = {}
        self._ints = _IntIndex()
        self._last: tuple[pa.Array, Array] | None = None
        self._batch = 0
        self._touched = np.zeros(0, np.int64)
        #: index of a key → middle part of the addresses of the key's cells
        self.rows: list[bytes] = []

    def of(self, keys: pa.Array) -> Array:
        """Returns the index of each key; an unknown key gets a new one. Raises NullKey, and EncodeError for NaN and
        keys that are not of the key columns and their types."""
        if self._last is not None and self._last[0] is keys:
            return self._last[1]
        if pa.types.is_integer(keys.type):
            self._keys.check(keys)
            indices = self._of_ints(_as_int64(keys))
        else:
            indices = self._of_objects(self._keys.plain(keys))
        if len(self.rows) > len(self._touched):
            self._touched = grown(self._touched, len(self.rows))
        self._touched[indices] = self._batch
        self._last, self._keys.belonging = (keys, indices), keys
        return indices

    def _of_ints(self, keys: Array) -> Array:
        indices = self._ints.find(keys)
        if len(indices) and indices.min() < 0:
            rest = np.flatnonzero(indices < 0)
            new, numbers = np.unique(keys[rest], return_inverse=True)
            first = len(self.rows)
            added: list[int] = new.tolist()
            if (belongs := self._keys.belongs) is not None:
                for key in added:
                    belongs(key)
            self.rows += [row_part(encode_row_key(key)) for key in added]
            self._ints.add(new, np.arange(first, len(self.rows)))
            indices[rest] = first + numbers
        return indices

    def _of_objects(self, plain: list[Any]) -> Array:
        kind = type(plain[0]) if plain else object
        places = plain if kind in _PLAIN else [encode_row_key(key) for key in plain]
        known = self._known.setdefault(kind if kind in _PLAIN else object, {})
        found = list(map(known.get, places))
        if None in found:
            for number, index in enumerate(found):
                if index is None:
                    found[number] = self._add(known, places[number], plain[number])
        return np.array(found, np.int64)

    def _add(self, known: dict[Any, int], place: Any, key: Hashable) -> int:
        index = known.get(place)
        if index is None:
            row = row_part(encode_row_key(key))
            if self._keys.belongs is not None:
                self._keys.belongs(key)
            self.rows.append(row)
            index = known[place] = len(self.rows) - 1
        return index

    def end_batch(self) -> None:
        self._batch += 1
        self._last = self._keys.belonging = None

    def drop_oldest(self, keep: int) -> Array:
        """Drops all keys except the ``keep`` most recently used ones. Returns the old indices of the kept keys; their
        new indices are 0, 1, …"""
        count = len(self.rows)
        kept = np.sort(np.argsort(-self._touched[:count], kind="stable")[:keep])
        place = np.full(count, -1, np.int64)
        place[kept] = np.arange(len(kept))
        self._ints.moved(place)
        moved = place.tolist()
        for kind, known in self._known.items():
            self._known[kind] = {key: moved[index] for key, index in known.items() if moved[index] >= 0}
        self.rows = [self.rows[index] for index in kept.tolist()]
        self._touched = self._touched[kept]
        self._last = None
        return kept

    def clear(self) -> None:
        self._known.clear()
        self._ints = _IntIndex()
        self.rows = []
        self._last = self._keys.belonging = None


def _as_int64(keys: pa.Array) -> Array:
    try:
        found: Array = keys.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise EncodeError("an integer key is beyond 64 bits", remedy="convert it to text") from error
    return found
