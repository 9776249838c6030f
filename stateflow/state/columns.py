"""Value states a column at a time, for operators that process whole record batches.

The cells are those of :class:`~stateflow.state.tracked_value.TrackedValue`: an operator can go from rows to batches,
and back, over the same stored state.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from stateflow.changes import Mutations
from stateflow.errors import DeclarationError, EncodeError, NullKey
from stateflow.state.cells import CELL, encode_row_key, pack_cell, row_part, unpack_cell
from stateflow.state.declare import Declaration
from stateflow.state.keyed import KeyedState
from stateflow.state.spec import CellReader

_MISSING = object()


class ValueColumn:
    """One value state of all keys of a partition.

    ``keys`` is an Arrow array of the key column's values, or a struct array for several key columns.
    """

    def __init__(self, operator: str, declaration: Declaration, reader: CellReader) -> None:
        if declaration.kind != "value" or declaration.coder.mutable:
            raise DeclarationError(
                "a batch operator has value states of immutable types only",
                remedy="use state.value with int, float, bool, str, bytes, date, datetime, Decimal or UUID",
                operator=operator,
                state=declaration.name,
            )
        self._operator = operator
        self._name = declaration.name
        self._coder = declaration.coder
        payload = declaration.default_payload
        self._default = None if payload is None else declaration.coder.decode(payload)
        self._head = CELL + declaration.tag
        self._reader = reader
        self._known: dict[Hashable, Any] = {}  # what the store has, or will have after the batch
        self._before: dict[Hashable, Any] = {}  # values changed in this batch, as they were

    def get_many(self, keys: pa.Array) -> pa.Array:
        """Values in the order of ``keys``; the default, or null, where none is stored. Raises NullKey."""
        known, default = self._known, self._default
        found = [known.get(key, _MISSING) for key in self._keys(keys)]
        if _MISSING in found:
            found = [self._load(key) if v is _MISSING else v for key, v in zip(self._keys(keys), found, strict=True)]
        return pa.array([default if value is None else value for value in found])

    def put_many(self, keys: pa.Array, values: pa.Array) -> None:
        """Store a value for each key; null clears. Of a key that comes twice the last value counts.

        Raises NullKey, and EncodeError for values of another type than declared; then nothing was stored.
        """
        if len(keys) != len(values):
            raise EncodeError(
                f"{len(keys)} keys came with {len(values)} values",
                remedy="give as many values as keys",
                operator=self._operator,
                state=self._name,
            )
        new = dict(zip(self._keys(keys), values.to_pylist(), strict=True))
        self._check(new)
        known, before = self._known, self._before
        for key in new.keys() - before.keys():
            value = known.get(key, _MISSING)
            before[key] = self._load(key) if value is _MISSING else value
        known.update(new)

    def _check(self, new: Mapping[Hashable, Any]) -> None:
        exact = self._coder.exact
        for key, value in new.items():
            if value is not None and type(value) is not exact:
                try:
                    self._coder.encode(value)
                except (EncodeError, TypeError, ValueError, OverflowError) as error:
                    raise self._unencodable(error, key) from error

    def _unencodable(self, error: Exception, key: Hashable) -> EncodeError:
        what = error.what if isinstance(error, EncodeError) else f"{type(error).__name__}: {error}"
        return EncodeError(what, remedy="cast the column", operator=self._operator, state=self._name, key=repr(key))

    def _keys(self, keys: pa.Array) -> list[Hashable]:
        if keys.null_count:
            raise NullKey("a key is null", remedy="filter such rows before the operator", operator=self._operator)
        plain: list[Any] = keys.to_pylist()
        if pa.types.is_struct(keys.type):
            return [tuple(row.values()) for row in plain]
        return plain

    def _load(self, key: Hashable) -> Any:
        cell = self._reader.get(self._head + row_part(encode_row_key(key)))
        value = self._known[key] = None if cell is None else self._coder.decode(unpack_cell(cell))
        return value

    def collect(self, into: Mutations) -> None:
        encode, head, known = self._coder.encode, self._head, self._known
        for key, old in self._before.items():
            new = known[key]
            if new is old:
                continue
            address = head + row_part(encode_row_key(key))
            if new is None:
                into.deletes.append(address)
                continue
            try:
                payload = encode(new)
            except (EncodeError, TypeError, ValueError, OverflowError) as error:
                raise self._unencodable(error, key) from error
            if old is None or payload != encode(old):
                into.puts.append((address, pack_cell(payload)))

    def mark_clean(self, cached_keys: int) -> None:
        self._before.clear()
        excess = len(self._known) - cached_keys
        if excess > 0:
            for key in [key for key, _ in zip(self._known, range(excess), strict=False)]:
                del self._known[key]

    def rollback(self) -> None:
        self._known.update(self._before)
        self._before.clear()

    def invalidate(self) -> None:
        self._known.clear()
        self._before.clear()


class ColumnStates:
    """The states of a batch operator: what KeyedState is for one that processes rows."""

    def __init__(
        self, operator: str, declarations: Mapping[str, Declaration], reader: CellReader, *, cached_keys: int = 262_144
    ) -> None:
        self.columns = {name: ValueColumn(operator, d, reader) for name, d in declarations.items()}
        self._keyed = KeyedState(operator, declarations, reader)
        self._cached_keys = cached_keys

    def attach(self, target: object) -> None:
        """Makes ``target.<state name>`` the columns."""
        target.__dict__.update(self.columns)

    def collect(self) -> Mutations:
        mutations = Mutations()
        for column in self.columns.values():
            column.collect(mutations)
        return mutations

    def mark_clean(self) -> None:
        for column in self.columns.values():
            column.mark_clean(self._cached_keys)

    def rollback(self) -> None:
        for column in self.columns.values():
            column.rollback()

    def invalidate(self) -> None:
        self._keyed.invalidate()
        for column in self.columns.values():
            column.invalidate()

    def peek(self, key: Hashable) -> SimpleNamespace:
        """The states of one key as tracked objects, from the store; for tests and the harness."""
        self._keyed.invalidate()
        return self._keyed.peek(key)

    def schema(self) -> list[dict[str, Any]]:
        return self._keyed.schema()
