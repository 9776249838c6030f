"""Types of keys, as stored and as in rows: keys of two types are never equal, even where both look like 7."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.types as t

from stateflow.errors import SchemaMismatch
from stateflow.state.cells import CELL, decode_row_key, split_address
from stateflow.storage import PartitionStore

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
    """Returns the kind of keys that a column's values make; empty: it depends on the values."""
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


def check_keys(schema: pa.Schema, columns: tuple[str, ...], store: PartitionStore, operator: str) -> None:
    """Checks that the stored keys, of which it reads one, have the types of the key columns. Raises SchemaMismatch."""
    address = next((address for address, _ in store.scan(CELL)), None)
    if address is None:
        return
    stored = kinds_of(decode_row_key(split_address(address)[0]))
    come = tuple(kind_of(schema.field(column).type) for column in columns)
    for column, was, now in zip(columns, stored, come, strict=False):
        if now and was != now:
            raise SchemaMismatch(
                f"the key column {column!r} is of type {now}, but stored keys are of type {was}",
                remedy="cast the column to the stored type; initial state, too, needs keys of the rows' type",
                operator=operator,
            )
