"""Entries of a state, from any store, and as Arrow pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pyarrow as pa

from stateflow.errors import UnknownState
from stateflow.runtime.operator import Operator
from stateflow.state import CellReader, Declaration, declarations_of, scan_state
from stateflow.state.cells import CELL, row_part

SCAN_ROWS = 10_000
SCAN_BYTES = 3 << 20


def declaration_of(cls: type[Operator], state: str, operator: str) -> Declaration:
    """Of a state by its attribute. Raises UnknownState."""
    declarations = declarations_of(cls)
    if state not in declarations:
        raise UnknownState(
            f"there is no state {state!r}",
            remedy=f"it has {', '.join(declarations) or 'none'}",
            operator=operator,
        )
    return declarations[state]


def entries_of(
    declaration: Declaration, store: CellReader, keys: Iterable[bytes] = ()
) -> Iterator[tuple[object, object, object]]:
    """(key, entry key or None, value) of one state; of these stored keys, or of all when none is named."""
    only = [CELL + declaration.tag + row_part(key) for key in keys]
    if not only:
        yield from scan_state(declaration, store)
    for prefix in only:
        yield from scan_state(declaration, _Below(store, prefix))


class _Below:
    """A reader that sees nothing but one prefix."""

    def __init__(self, store: CellReader, prefix: bytes) -> None:
        self._store = store
        self._prefix = prefix

    def get(self, cell: bytes) -> bytes | None:
        return self._store.get(cell)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._store.scan(self._prefix)


def scan_pages(entries: Iterator[tuple[object, object, object]], partition: int) -> list[bytes]:
    """Up to SCAN_ROWS entries as Arrow IPC streams that fit messages; none at the end."""
    rows = list(itertools.islice(entries, SCAN_ROWS))
    return list(_fitting(rows, partition)) if rows else []


def _fitting(rows: list[tuple[object, object, object]], partition: int) -> Iterator[bytes]:
    page = _scan_page(rows, partition)
    if len(page) <= SCAN_BYTES or len(rows) == 1:
        yield page
        return
    half = len(rows) // 2
    yield from _fitting(rows[:half], partition)
    yield from _fitting(rows[half:], partition)


def _scan_page(rows: list[tuple[object, object, object]], partition: int) -> bytes:
    keys, entry_keys, values = (list(column) for column in zip(*rows, strict=True))
    table = pa.table(
        {
            "key": [list(key) if isinstance(key, tuple) else key for key in keys],
            "map_key": entry_keys,
            "value": values,
            "partition": pa.array([partition] * len(rows), pa.int32()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def joined(pages: list[pa.Table]) -> pa.Table:
    """One table of pages whose types were told from their values, each by itself."""
    if not pages:
        return pa.table({"key": [], "map_key": [], "value": [], "partition": pa.array([], pa.int32())})
    return pa.concat_tables(pages, promote_options="permissive")
