"""Entries of a state, from any store, and as Arrow pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from stateflow.errors import SchemaMismatch, UnknownState
from stateflow.operator.operator import Operator, key_columns
from stateflow.operator.rows import kinds_of
from stateflow.state import CellReader, Declaration, declarations_of, scan_state
from stateflow.state.arrays import signature_of_coder, typed, typed_of
from stateflow.state.cells import CELL, row_part

SCAN_ROWS = 10_000
SCAN_BYTES = 3 << 20


@dataclass(frozen=True, slots=True)
class At:
    """Time as of which a state is read, µs since 1970: entries that had expired by then are left out.

    ``event_us``: the partition's watermark; None before the first one, when nothing expires in event time.
    """

    processing_us: int
    event_us: int | None


def declaration_of(cls: type[Operator], state: str, operator: str) -> Declaration:
    """Returns the declaration of a state by its attribute. Raises UnknownState."""
    declarations = declarations_of(cls)
    if state not in declarations:
        raise UnknownState(
            f"there is no state {state!r}",
            remedy=f"name a declared one: {', '.join(declarations) or 'none'}",
            operator=operator,
        )
    return declarations[state]


def entries_of(
    declaration: Declaration, store: CellReader, at: At, keys: Iterable[bytes] = ()
) -> Iterator[tuple[object, object, object]]:
    """Yields (key, entry key or None, value) of one state, for ``keys`` in their stored encoding; no keys: for all."""
    only = [CELL + declaration.tag + row_part(key) for key in keys]
    readers: list[CellReader] = [_Below(store, prefix) for prefix in only] or [store]
    for reader in readers:
        yield from scan_state(declaration, reader, processing_us=at.processing_us, event_us=at.event_us)


class _Below:
    """A reader whose scans return only the entries under one prefix."""

    def __init__(self, store: CellReader, prefix: bytes) -> None:
        self._store = store
        self._prefix = prefix

    def get(self, cell: bytes) -> bytes | None:
        return self._store.get(cell)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._store.scan(self._prefix)


class StateColumns:
    """Entries of a state as columns: key, map_key, value, partition.

    Types come from the declaration, except those of keys, which are not declared and come from the stored keys. A
    single key column is a column of that type; several form a struct.
    """

    def __init__(self, cls: type[Operator], state: str, operator: str) -> None:
        self.declaration = declaration_of(cls, state, operator)
        self._names, self._operator = key_columns(cls), operator
        key_coder = self.declaration.key_coder
        self._entry = typed(_NONE if key_coder is None else signature_of_coder(key_coder))
        self._value = typed_of(self.declaration.coder)

    def pages(self, entries: Iterator[tuple[object, object, object]], partition: int) -> Iterator[list[bytes]]:
        """Yields up to SCAN_ROWS entries at a time as Arrow IPC streams that fit messages. Without entries it yields
        one empty stream, which carries the types.
        """
        rows = list(itertools.islice(entries, SCAN_ROWS))
        if not rows:
            yield [self._page([], partition)]
        while rows:
            yield list(self._fitting(rows, partition))
            rows = list(itertools.islice(entries, SCAN_ROWS))

    def _fitting(self, rows: list[tuple[object, object, object]], partition: int) -> Iterator[bytes]:
        page = self._page(rows, partition)
        if len(page) <= SCAN_BYTES or len(rows) == 1:
            yield page
            return
        half = len(rows) // 2
        yield from self._fitting(rows[:half], partition)
        yield from self._fitting(rows[half:], partition)

    def _page(self, rows: list[tuple[object, object, object]], partition: int) -> bytes:
        keys, entry_keys, values = ([row[column] for row in rows] for column in range(3))
        table = pa.table(
            {
                "key": self._keys(keys),
                "map_key": self._entry.array(entry_keys),
                "value": self._value.array(values),
                "partition": pa.array([partition] * len(rows), pa.int32()),
            }
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue().to_pybytes())

    def _keys(self, keys: list[object]) -> pa.Array:
        kinds = list(dict.fromkeys(map(kinds_of, keys)))
        if len(kinds) > 1:
            raise several_kinds(self._operator, *(", ".join(each) for each in kinds))
        if not kinds:
            return pa.nulls(0)
        columns = [typed(_KEYS.get(kind, kind)) for kind in kinds[0]]
        if len(columns) == 1 and len(self._names) == 1:
            return columns[0].array(keys)
        values = zip(*(key if isinstance(key, tuple) else (key,) for key in keys), strict=True)
        arrays = [column.array(each) for column, each in zip(columns, values, strict=True)]
        return pa.StructArray.from_arrays(arrays, names=list(self._names))


_NONE = "None"
#: types of keys whose kind has another name than its type
_KEYS = {"timestamp": "datetime", "timestamp without time zone": "datetime"}


def several_kinds(operator: str, *kinds: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"keys of several types are stored: {'; '.join(kinds)}",
        remedy="read them one by one, by key; a key of another type is another key",
        operator=operator,
    )


def joined(pages: list[pa.Table]) -> pa.Table:
    """Joins pages to one table. Raises SchemaMismatch if partitions have keys of several types."""
    if not pages:
        return pa.table({"key": [], "map_key": [], "value": [], "partition": pa.array([], pa.int32())})
    kinds = {str(page.schema.field("key").type): None for page in pages if page.num_rows}
    if len(kinds) > 1:
        raise several_kinds("", *kinds)
    pages = [page for page in pages if page.num_rows] or pages[:1]
    return pa.concat_tables(pages, promote_options="permissive")
