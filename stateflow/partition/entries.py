"""Reads the entries of a state from any store, as rows or as Arrow pages.

A state that the operator declares is read by the name of its attribute. A state addressed at run time is read with its
entries in all namespaces, by its *exact name*: name, kind and coders, such as ``count: counter(int64)``, which identify
its cells. A partition knows only the tags that were used in it, so a plain name is looked up among the tags of all
partitions (:class:`ReadableStates`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from stateflow.errors import InvalidArgument, SchemaMismatch, UnknownState
from stateflow.operator.operator import Operator, key_columns
from stateflow.operator.timers import SESSIONS
from stateflow.partition.layout import read_sequence
from stateflow.state import (
    CellReader,
    Declaration,
    Namespace,
    StoredEntry,
    declarations_of,
    encode_row_key,
    scan_entries,
    scan_state,
    stored_tags,
)
from stateflow.state.arrays import typed
from stateflow.state.cells import CELL, row_part
from stateflow.state.declare import signature_of_coder
from stateflow.state.evolution import declared_as
from stateflow.state.keys import kinds_of
from stateflow.storage import PartitionStore

SCAN_ROWS = 10_000
SCAN_BYTES = 3 << 20
#: a row of a page, without its partition
Row = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class At:
    """Time as of which a state is read, µs since 1970: entries that had expired by then are left out.

    ``event_us``: the partition's watermark; None before the first one, when nothing expires in event time.
    """

    processing_us: int
    event_us: int | None


# -- Names -----------------------------------------------------------------------------------------------------------

_EXACT = re.compile(r".+: (value|map|set|list|reducing|counter)\(.*\)", re.DOTALL)


def exact_name(described: Mapping[str, Any]) -> str:
    """Returns the name that identifies the cells of a state, from its :meth:`.Declaration.describe`.

    >>> exact_name({"name": "count", "kind": "counter", "coders": ["int64"]})
    'count: counter(int64)'
    """
    return f"{described['name']}: {described['kind']}({', '.join(described['coders'])})"


def is_exact(state: str) -> bool:
    return _EXACT.fullmatch(state) is not None


def described(text: str) -> dict[str, Any]:
    """Parses the JSON form of :meth:`.Declaration.describe`. Raises one of MALFORMED."""
    found: dict[str, Any] = json.loads(text)
    if not all(isinstance(each, str) for each in (found["name"], found["kind"], found["tag"], *found["coders"])):
        raise ValueError("not the description of a state")
    return found


@dataclass(frozen=True, slots=True)
class ReadableStates:
    """States of an operator that can be read, as :meth:`.Declaration.describe` describes them.

    Attributes:
        attributes: the declared states, by attribute.
        tags: the states addressed at run time, by exact name.

    >>> count = {"name": "count", "kind": "counter", "coders": ["int64"], "tag": "1f"}
    >>> ReadableStates.of({}, [count]).exact("count", "Hourly")
    'count: counter(int64)'
    """

    attributes: dict[str, dict[str, Any]]
    tags: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, attributes: dict[str, dict[str, Any]], tags: Iterable[dict[str, Any]]) -> ReadableStates:
        """Returns the states, given the descriptions of tags in any partitions. If partitions describe a tag
        differently, the longest description counts: its record may have got another field."""
        declared = {each["tag"] for each in attributes.values()}
        others = [each for each in tags if each["tag"] not in declared]
        return cls(attributes, {exact_name(each): each for each in sorted(others, key=lambda each: len(str(each)))})

    def by_name(self) -> dict[str, dict[str, Any]]:
        """Returns the states by the name under which each is read. If an attribute or another tag has the same name as
        a tag, the tag is read under its exact name."""
        times = Counter([*self.attributes, *(each["name"] for each in self.tags.values())])
        named = {each["name"] if times[each["name"]] == 1 else exact: each for exact, each in self.tags.items()}
        return {**self.attributes, **dict(sorted(named.items()))}

    def exact(self, state: str, operator: str) -> str:
        """Returns the name by which each partition reads a state: its attribute, or its exact name.

        Args:
            state: the name of an attribute, else that of a tag, else an exact name.

        Raises UnknownState; InvalidArgument if several tags have the name.
        """
        if state in self.attributes or state in map(exact_name, self.attributes.values()):
            return state
        meant = sorted(exact for exact, each in self.tags.items() if state in (exact, each["name"]))
        if not meant:
            raise unknown(state, self.by_name(), operator)
        if len(meant) > 1:
            raise InvalidArgument(
                f"several states are called {state!r}", remedy=f"name one: {'; '.join(meant)}", operator=operator
            )
        return meant[0]


def unknown(state: str, names: Iterable[str], operator: str) -> UnknownState:
    return UnknownState(
        f"there is no state {state!r}", remedy=f"name one of these: {', '.join(names) or 'none'}", operator=operator
    )


def declaration_of(cls: type[Operator], state: str, operator: str) -> Declaration:
    """Returns the declaration of a state by its attribute. Raises UnknownState."""
    declarations = declarations_of(cls)
    if state not in declarations:
        raise unknown(state, declarations, operator)
    return declarations[state]


def listed(cls: type[Operator], store: CellReader) -> bytes:
    """Returns the states of a partition as an Arrow IPC stream: columns attribute (null for a tag) and declared (the
    description, JSON)."""
    attributes = [(name, each.describe()) for name, each in declarations_of(cls).items()]
    states = [*attributes, *((None, each) for each in stored_tags(store).values())]
    declared = [json.dumps(each, sort_keys=True) for _, each in states]
    return _stream(pa.table({"attribute": pa.array([name for name, _ in states], pa.string()), "declared": declared}))


# -- Entries ---------------------------------------------------------------------------------------------------------


def entries_of(declaration: Declaration, store: CellReader, at: At, keys: Iterable[bytes] = ()) -> Iterator[Row]:
    """Yields (key, entry key or None, value) of one state, for these stored keys; empty: for all keys."""
    only = [CELL + declaration.tag + row_part(key) for key in keys] or [CELL + declaration.tag]
    for prefix in only:
        cells = _Cells(store, prefix)
        yield from scan_state(declaration, cells, processing_us=at.processing_us, event_us=at.event_us)


class _Cells:
    """A reader of the cells with one prefix, as of the moment in which it was made."""

    def __init__(self, store: CellReader, prefix: bytes) -> None:
        self._store = store
        self._cells = store.scan(prefix)

    def get(self, cell: bytes) -> bytes | None:
        return self._store.get(cell)

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._cells


class _Sessions:
    """Bounds of the open sessions of one session helper. Callers ask for them in the order of the cells' addresses.

    A session's bounds change, so its namespace has the event time of the session's first row in their place.
    """

    def __init__(self, entries: Iterator[StoredEntry]) -> None:
        self._by_key = itertools.groupby(entries, lambda entry: row_part(encode_row_key(entry.key)))
        self._row: bytes | None = b""
        self._bounds: dict[Any, tuple[int, int]] = {}

    def bounds(self, key: object, id_: int) -> tuple[int, int] | None:
        """Returns start and end of a session, µs since 1970; None: no open session of ``key`` has this id."""
        row = row_part(encode_row_key(key))
        while self._row is not None and self._row < row:
            self._row, entries = next(self._by_key, (None, ()))
            self._bounds = {entry.entry: entry.value for entry in entries}
        return self._bounds.get(id_) if self._row == row else None


def _entries_at_run_time(
    declaration: Declaration, sessions: Mapping[str, Declaration], store: PartitionStore, at: At, keys: Iterable[bytes]
) -> Iterator[Row]:
    """Yields (key, start and end of the window in µs, name of the namespace, entry key, value) of a state in all
    namespaces.

    Args:
        sessions: name of a session helper → the state that contains its sessions.
    """

    def opened(row: bytes) -> tuple[Iterator[StoredEntry], dict[str, _Sessions]]:
        while True:  # again if a commit was made meanwhile: all cells must be of one moment
            sequence = read_sequence(store)
            cells = {each.tag: _Cells(store, CELL + each.tag + row) for each in (declaration, *sessions.values())}
            if read_sequence(store) == sequence:
                break
        times = {"processing_us": at.processing_us, "event_us": at.event_us}
        entries = scan_entries(declaration, cells[declaration.tag], **times)
        return entries, {name: _Sessions(scan_entries(each, cells[each.tag])) for name, each in sessions.items()}

    for row in [row_part(key)[:-1] for key in keys] or [b""]:  # without the length of a namespace
        entries, helpers = opened(row)
        for each in entries:
            start_us, end_us = each.namespace.bounds or (None, None)
            name = _name_of(each.namespace)
            if start_us is not None and start_us == end_us and (helper := helpers.get(name or "")) is not None:
                start_us, end_us = helper.bounds(each.key, start_us) or (start_us, end_us)
            yield each.key, start_us, end_us, name, each.entry, each.value


def _name_of(namespace: Namespace) -> str | None:
    """Returns the name of a named namespace, or the helper's name for a window. None: the namespace has no name. Other
    namespaces are described by their ``repr``."""
    is_plain = not namespace or namespace.bounds is not None or namespace == Namespace.named(namespace.name or "")
    return namespace.name if is_plain else repr(namespace)


# -- Columns ---------------------------------------------------------------------------------------------------------


class StateColumns:
    """Entries of a state as columns: key, map_key, value, partition.

    For a state addressed at run time, window_start, window_end and namespace follow the key. A window has its times,
    and the name of its helper as namespace; a named namespace has its name, and the global one has null in all three.

    Types come from the declaration, except those of keys, which are not declared and come from the stored keys. A
    single key column is a column of that type; several form a struct.

    Args:
        state: an attribute, or the exact name of a state addressed at run time.
        store: the partition's store.

    Raises UnknownState for any other name, SchemaMismatch for a tag with a coder that no declared state has.
    """

    def __init__(self, cls: type[Operator], state: str, operator: str, store: PartitionStore) -> None:
        declarations = declarations_of(cls)
        self._names, self._operator = key_columns(cls), operator
        self._sessions: dict[str, Declaration] = {}
        self._at_run_time = state not in declarations and is_exact(state)
        #: None: the tag was not used in this partition
        self._declaration: Declaration | None
        if self._at_run_time:
            self._declaration = self._tag(state, declarations, stored_tags(store).values())
        else:
            self._declaration = declaration_of(cls, state, operator)
        self._types = [typed(_NONE), typed(_NONE)]
        if self._declaration is not None:
            coders = (self._declaration.key_coder, self._declaration.coder)
            self._types = [typed(_NONE if coder is None else signature_of_coder(coder)) for coder in coders]

    def _tag(
        self, state: str, declared: Mapping[str, Declaration], tags: Iterable[dict[str, Any]]
    ) -> Declaration | None:
        custom = {coder.name: coder for each in declared.values() for coder in each.coders}
        found = {exact_name(each.describe()): each for each in declared.values()}
        for each in tags:
            described, name = declared_as(each, custom), exact_name(each)
            if described is not None:
                found.setdefault(name, described)
                if name.startswith(SESSIONS) and name.endswith(_OF_SESSIONS) and name != state:
                    self._sessions[name[len(SESSIONS) : -len(_OF_SESSIONS)]] = described
            elif name == state:
                raise SchemaMismatch(
                    f"the state {state!r} has a custom coder that no attribute of the operator declares",
                    remedy="make the state's tag an attribute of the operator class, too",
                    operator=self._operator,
                )
        return found.get(state)

    @property
    def is_known(self) -> bool:
        """Tells whether the partition has the state; False: its tag was not used there."""
        return self._declaration is not None

    def entries(self, store: PartitionStore, at: At, keys: Iterable[bytes] = ()) -> Iterator[Row]:
        """Yields the state's entries as rows, for these stored keys; empty: for all keys."""
        if self._declaration is None:
            return iter(())
        if self._at_run_time:
            return _entries_at_run_time(self._declaration, self._sessions, store, at, keys)
        return entries_of(self._declaration, store, at, keys)

    def pages(self, entries: Iterator[Row], partition: int) -> Iterator[list[bytes]]:
        """Yields up to SCAN_ROWS entries at a time as Arrow IPC streams that fit messages. Without entries it yields
        one empty stream, which carries the types.
        """
        rows = list(itertools.islice(entries, SCAN_ROWS))
        if not rows:
            yield [self._page([], partition)]
        while rows:
            yield list(self._fitting(rows, partition))
            rows = list(itertools.islice(entries, SCAN_ROWS))

    def _fitting(self, rows: list[Row], partition: int) -> Iterator[bytes]:
        page = self._page(rows, partition)
        if len(page) <= SCAN_BYTES or len(rows) == 1:
            yield page
            return
        half = len(rows) // 2
        yield from self._fitting(rows[:half], partition)
        yield from self._fitting(rows[half:], partition)

    def _page(self, rows: list[Row], partition: int) -> bytes:
        names = ["key", *(_NAMESPACE if self._at_run_time else ()), "map_key", "value"]
        columns: dict[str, Any] = {name: [row[column] for row in rows] for column, name in enumerate(names)}
        columns["key"] = self._keys(columns["key"])
        for name, type_ in _NAMESPACE.items() if self._at_run_time else ():
            columns[name] = pa.array(columns[name], type_)
        for name, each in zip(("map_key", "value"), self._types, strict=True):
            columns[name] = each.array(columns[name])
        return _stream(pa.table({**columns, "partition": pa.array([partition] * len(rows), pa.int32())}))

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


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


#: end of the exact names of session helpers' states
_OF_SESSIONS = ": map(int64, packed tuple[int64,int64])"
#: columns of states addressed at run time
_NAMESPACE = {
    "window_start": pa.timestamp("us", tz="UTC"),
    "window_end": pa.timestamp("us", tz="UTC"),
    "namespace": pa.string(),
}
_NONE = "None"
#: types of keys whose kind has another name than its type
_KEYS = {"timestamp": "datetime", "timestamp without time zone": "datetime"}


def several_kinds(operator: str, *kinds: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"keys of several types are stored: {'; '.join(kinds)}",
        remedy="read the state key by key; keys of different types, such as 1 and '1', are different keys",
        operator=operator,
    )


def joined(pages: list[pa.Table]) -> pa.Table:
    """Joins pages to one table. Raises SchemaMismatch if partitions have keys of several types, or pages do not fit
    together."""
    if not pages:
        return pa.table({name: pa.array([], type_) for name, type_ in _COLUMNS.items()})
    if any(page.column_names.count(name) != 1 for page in pages for name in _COLUMNS):
        raise _unreadable(f"a page needs one column each: {', '.join(_COLUMNS)}")
    kinds = {str(page.schema.field("key").type): None for page in pages if page.num_rows}
    if len(kinds) > 1:
        raise several_kinds("", *kinds)
    # a partition in which a tag was not used knows no types
    pages = [page for page in pages if page.num_rows] or sorted(pages, key=_unknown_types)[:1]
    try:
        return pa.concat_tables(pages, promote_options="permissive")
    except pa.ArrowException as error:
        raise _unreadable("pages of several types") from error


#: columns of every page; a state addressed at run time has more
_COLUMNS = {"key": pa.null(), "map_key": pa.null(), "value": pa.null(), "partition": pa.int32()}


def _unreadable(why: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"the entries of a state cannot be joined: {why}",
        remedy="check what runs at the replicas' addresses, and its version",
    )


def _unknown_types(page: pa.Table) -> int:
    return sum(map(pa.types.is_null, page.schema.types))
