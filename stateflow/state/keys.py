"""Arrays of keys, compared with the key columns of their partition.

The *kind* of a key is its Python type, such as ``int``. Keys of two kinds are never equal, even if both are printed as
7, so that a batch operator must not read or write states by keys of another kind than that of its key columns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from datetime import date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.types as t

from stateflow.errors import EncodeError, NullKey

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
