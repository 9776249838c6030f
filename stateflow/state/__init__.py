"""Keyed state that looks like variables, dicts and sets.

``state.value``, ``map``, ``set``, ``list``, ``reducing`` and ``counter`` declare states. Operators use the states
through the Tracked classes, and a partition keeps them in ``KeyedState``.
"""

from stateflow.state.cache import CachePool
from stateflow.state.cells import CellReader, Namespace, decode_row_key, encode_row_key
from stateflow.state.coders import (
    UUID,
    Bool,
    Bytes,
    Coder,
    Date,
    Decimal,
    Float64,
    Int64,
    Msgpack,
    Struct,
    Timestamp,
    Tuple,
    Utf8,
)
from stateflow.state.columns import ColumnStates, ValueColumn
from stateflow.state.declare import Declaration, coder_for, counter, declarations_of, list, map, reducing, set, value
from stateflow.state.evolution import (
    DeployedStates,
    Evolution,
    StoredEntry,
    check_cell,
    check_schema,
    scan_entries,
    scan_state,
)
from stateflow.state.keyed import MAX_VALUE_BYTES, KeyedState, stored_tags
from stateflow.state.tracked import TrackedCounter, TrackedReducing, TrackedValue
from stateflow.state.tracked_list import TrackedList
from stateflow.state.tracked_map import TrackedMap, TrackedSet

__all__ = [
    "MAX_VALUE_BYTES",
    "UUID",
    "Bool",
    "Bytes",
    "CachePool",
    "CellReader",
    "Coder",
    "ColumnStates",
    "Date",
    "Decimal",
    "Declaration",
    "DeployedStates",
    "Evolution",
    "Float64",
    "Int64",
    "KeyedState",
    "Msgpack",
    "Namespace",
    "StoredEntry",
    "Struct",
    "Timestamp",
    "TrackedCounter",
    "TrackedList",
    "TrackedMap",
    "TrackedReducing",
    "TrackedSet",
    "TrackedValue",
    "Tuple",
    "Utf8",
    "ValueColumn",
    "check_cell",
    "check_schema",
    "coder_for",
    "counter",
    "declarations_of",
    "decode_row_key",
    "encode_row_key",
    "list",
    "map",
    "reducing",
    "scan_entries",
    "scan_state",
    "set",
    "stored_tags",
    "value",
]
