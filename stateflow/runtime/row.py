"""The row that an operator is given: a tuple of its values whose columns are read by name or position."""

from __future__ import annotations

import functools
import unicodedata
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NoReturn

from stateflow.errors import InvalidArgument

_value_at = tuple.__getitem__


class Row(tuple[Any, ...]):
    """A tuple of the values of one row, in the order of the input's columns.

    ``row.name`` is the column of that name, for every name that is an identifier: also ``_1``, ``count`` and ``µs``,
    which Python reads in its NFKC form. Names of the form ``__x__`` are Python's own. ``row["any name"]`` is the column
    of exactly that name, ``row[0]`` the first one. Reading a name that two columns share raises InvalidArgument.
    ``_fields``, ``_asdict()`` and ``_replace(name=value)`` are those of a named tuple, unless a column is called so.

    >>> row = row_class(("k", "_2", "a b"))(("x", 7, None))
    >>> row.k, row._2, row["a b"], row[1]
    ('x', 7, None, 7)
    """

    __slots__ = ()
    #: names of the columns in order; place of each name that only one column has
    __columns__: tuple[str, ...] = ()
    __places__: Mapping[str, int] = MappingProxyType({})

    def __getitem__(self, at: Any) -> Any:
        if at.__class__ is int or not isinstance(at, str):  # the first half is for speed
            return _value_at(self, at)
        return _value_at(self, _place(self, at))

    def __repr__(self) -> str:
        shown = [
            f"{name}={value!r}" if name.isidentifier() else f"{name!r}: {value!r}"
            for name, value in zip(self.__columns__, self, strict=True)
        ]
        return f"Row({', '.join(shown)})"

    @property
    def _fields(self) -> tuple[str, ...]:
        return self.__columns__

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self.__columns__, self, strict=True))

    def _replace(self, /, **values: Any) -> Row:
        changed = list(self)
        for name, value in values.items():
            changed[_place(self, name)] = value
        return type(self)(changed)


def _place(row: Row, name: str) -> int:
    place = row.__places__.get(name)
    if place is not None:
        return place
    if name in row.__columns__:
        raise _shared(name, row.__columns__)
    raise KeyError(f"the row has no column {name!r}, only {', '.join(row.__columns__)}")


def columns_of(row: Row) -> tuple[str, ...]:
    """Returns the names of a row's columns, also where a column is named like an attribute of a row."""
    return row.__columns__


@functools.lru_cache(maxsize=64)
def row_class(columns: tuple[str, ...]) -> type[Row]:
    """Makes the class of rows with these columns."""
    names = {"__slots__": (), "__columns__": columns, "__places__": _places(columns)}
    # a named tuple's own descriptors: nothing reads an attribute faster
    plain = namedtuple("plain", [f"c{number}" for number in range(len(columns))])  # type: ignore[misc]
    readers: dict[str, tuple[int, Any]] = {}
    for number, name in enumerate(columns):
        for attribute in {name, unicodedata.normalize("NFKC", name)}:
            if not attribute.isidentifier() or _is_pythons(attribute):
                continue
            taken = attribute in readers and readers[attribute][0] != number
            reader = _ambiguous(attribute, columns) if taken else vars(plain)[f"c{number}"]
            readers[attribute] = (number, reader)
    return type("Row", (Row,), {**names, **{name: reader for name, (_, reader) in readers.items()}})


def reader_of(columns: tuple[str, ...], number: int) -> Callable[[Any], Any]:
    """Returns the fastest function that reads one column of such rows."""
    name = columns[number]
    own = vars(row_class(columns)).get(name)
    if own is None or isinstance(own, property) or not name.isidentifier() or _is_pythons(name):
        return lambda row: _value_at(row, number)
    return attrgetter(name)


def _places(columns: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(columns) if columns.count(name) == 1}


def _is_pythons(name: str) -> bool:
    """Tells whether Python itself looks up the name, on objects of any kind: ``__class__``, ``__len__``."""
    return name.startswith("__") and name.endswith("__")


def _ambiguous(name: str, columns: Sequence[str]) -> property:
    def refuse(_: Row) -> NoReturn:
        raise _shared(name, columns)

    return property(refuse)


def _shared(name: str, columns: Sequence[str]) -> InvalidArgument:
    same = [each for each in columns if unicodedata.normalize("NFKC", each) == unicodedata.normalize("NFKC", name)]
    numbers = [str(number) for number, each in enumerate(columns) if each in same]
    return InvalidArgument(
        f"{len(numbers)} columns are named {name!r}: the columns {', '.join(numbers)} of the row",
        remedy=f"rename one of them, or read row[{numbers[0]}] or row[{numbers[-1]}]",
    )
