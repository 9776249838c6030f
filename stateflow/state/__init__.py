"""Keyed state that looks like variables, dicts and sets.

``state.value``, ``state.map`` and ``state.set`` declare it, the Tracked classes are what an operator sees,
``KeyedState`` is what a partition runs it with.
"""

from stateflow.state.cells import decode_row_key, encode_row_key
from stateflow.state.choose import coder_for
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
from stateflow.state.declare import Declaration, declarations_of, map, set, value
from stateflow.state.keyed import KeyedState, check_schema, scan_state
from stateflow.state.spec import CellReader
from stateflow.state.tracked_map import TrackedMap
from stateflow.state.tracked_set import TrackedSet
from stateflow.state.tracked_value import TrackedValue

__all__ = [
    "UUID",
    "Bool",
    "Bytes",
    "CellReader",
    "Coder",
    "ColumnStates",
    "Date",
    "Decimal",
    "Declaration",
    "Float64",
    "Int64",
    "KeyedState",
    "Msgpack",
    "Struct",
    "Timestamp",
    "TrackedMap",
    "TrackedSet",
    "TrackedValue",
    "Tuple",
    "Utf8",
    "ValueColumn",
    "check_schema",
    "coder_for",
    "declarations_of",
    "decode_row_key",
    "encode_row_key",
    "map",
    "scan_state",
    "set",
    "value",
]
