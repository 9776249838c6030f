"""Key → slot: the place of a key's cached data in the arrays of a partition's column states."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import date
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stateflow.errors import EncodeError, NullKey
from stateflow.state.cells import encode_row_key, row_part
from stateflow.state.lanes import Array

#: types whose keys are equal when their stored forms are; keys of other types are looked up by that form
_PLAIN: Final = frozenset({str, bytes, bool, date, float, Decimal})


class _IntSlots:
    """int → slot by binary search: a third of the cost of a dict for many keys at once."""

    def __init__(self) -> None:
        self.keys = np.zeros(0, np.int64)  # ascending
        self.slots = np.zeros(0, np.int64)

    def find(self, keys: Array) -> Array:
        """Returns the slot of each key, -1 for unknown ones."""
        if not len(self.keys):
            return np.full(len(keys), -1, np.int64)
        order = np.argsort(keys)  # sorted keys search where the processor's cache has been: a third of the time
        ascending = keys[order]
        place = np.searchsorted(self.keys, ascending)
        place[place == len(self.keys)] = 0
        found = np.empty(len(keys), np.int64)
        found[order] = np.where(self.keys[place] == ascending, self.slots[place], -1)
        return found

    def add(self, keys: Array, slots: Array) -> None:
        """Adds keys that are not known yet, in ascending order."""
        where = np.searchsorted(self.keys, keys)
        self.keys, self.slots = np.insert(self.keys, where, keys), np.insert(self.slots, where, slots)

    def moved(self, places: Array) -> None:
        """Renumbers: slot n becomes ``places[n]``, or is dropped when that is -1."""
        slots = places[self.slots]
        self.keys, self.slots = self.keys[slots >= 0], slots[slots >= 0]


class KeySlots:
    """Map of keys to slots, shared by the columns of one partition."""

    def __init__(self, operator: str, belongs: Callable[[Hashable], None] | None = None) -> None:
        self._operator = operator
        self._belongs = belongs
        self._slots: dict[type, dict[Any, int]] = {}
        self._ints = _IntSlots()
        self._last: tuple[pa.Array, Array] | None = None
        self._batch = 0
        self._touched = np.zeros(0, np.int64)
        #: by slot: the middle of the addresses of its key
        self.rows: list[bytes] = []

    def of(self, keys: pa.Array) -> Array:
        """Returns the slot of each key, a new one for keys not seen before. Raises NullKey, EncodeError (NaN)."""
        if self._last is not None and self._last[0] is keys:
            return self._last[1]
        if keys.null_count:
            raise NullKey("a key is null", remedy="filter such rows before the operator", operator=self._operator)
        slots = self._of_ints(_as_int64(keys)) if pa.types.is_integer(keys.type) else self._of_objects(keys)
        if len(self.rows) > len(self._touched):
            self._touched = grown(self._touched, len(self.rows))
        self._touched[slots] = self._batch
        self._last = keys, slots
        return slots

    def _of_ints(self, keys: Array) -> Array:
        slots = self._ints.find(keys)
        if len(slots) and slots.min() < 0:
            new = np.unique(keys[slots < 0])
            first = len(self.rows)
            added: list[int] = new.tolist()
            if self._belongs is not None:
                for key in added:
                    self._belongs(key)
            self.rows += [row_part(encode_row_key(key)) for key in added]
            self._ints.add(new, np.arange(first, len(self.rows)))
            slots = self._ints.find(keys)
        return slots

    def _of_objects(self, keys: pa.Array) -> Array:
        plain: list[Any] = keys.to_pylist()
        if pa.types.is_struct(keys.type):
            plain = [tuple(row.values()) for row in plain]
        kind = type(plain[0]) if plain else object
        places = plain if kind in _PLAIN else [encode_row_key(key) for key in plain]
        known = self._slots.setdefault(kind if kind in _PLAIN else object, {})
        found = list(map(known.get, places))
        if None in found:
            for index, slot in enumerate(found):
                if slot is None:
                    found[index] = self._add(known, places[index], plain[index])
        return np.array(found, np.int64)

    def _add(self, known: dict[Any, int], place: Any, key: Hashable) -> int:
        slot = known.get(place)
        if slot is None:
            row = row_part(encode_row_key(key))
            if self._belongs is not None:
                self._belongs(key)
            self.rows.append(row)
            slot = known[place] = len(self.rows) - 1
        return slot

    def end_batch(self) -> None:
        self._batch += 1
        self._last = None

    def oldest_out(self, keep: int) -> Array:
        """Drops all slots but the ``keep`` most recently used. Returns those kept; they are numbered 0, 1, … from now
        on."""
        count = len(self.rows)
        kept = np.sort(np.argsort(-self._touched[:count], kind="stable")[:keep])
        place = np.full(count, -1, np.int64)
        place[kept] = np.arange(len(kept))
        self._ints.moved(place)
        moved = place.tolist()
        for kind, known in self._slots.items():
            self._slots[kind] = {key: moved[slot] for key, slot in known.items() if moved[slot] >= 0}
        self.rows = [self.rows[slot] for slot in kept.tolist()]
        self._touched = self._touched[kept]
        self._last = None
        return kept

    def clear(self) -> None:
        self._slots.clear()
        self._ints = _IntSlots()
        self.rows = []
        self._last = None


def _as_int64(keys: pa.Array) -> Array:
    try:
        found: Array = keys.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise EncodeError("an integer key is beyond 64 bits", remedy="convert it to text") from error
    return found


def grown(array: Array, length: int) -> Array:
    """Returns a copy with room for at least ``length`` items, filled up with zeros."""
    bigger = np.zeros(max(length, 2 * len(array), 1024), array.dtype)
    bigger[: len(array)] = array
    return bigger
