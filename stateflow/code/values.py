"""Writes values as Python text: plain data, containers of it, and what can be imported by name. No I/O."""

from __future__ import annotations

import base64
import datetime as dt
import math
import sys
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import PosixPath, PurePosixPath
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo


def text_of(value: object, values: Mapping[str, Any]) -> tuple[str | None, set[str]]:
    """Returns (source text of a value, names of the program that the text reads). The text is None for a value that
    cannot be written."""
    writer = Writer(values)
    try:
        return writer.write(value), writer.uses
    except Unwritten:
        return None, set()


def refilled(name: str, value: object, text: str) -> str:
    """Returns the statement that gives a name the value again that ``text`` has.

    A container remains the same object, which may have other names, and is filled again.
    """
    match value:
        case dict() | set():
            return f"{name}.clear(); {name}.update({text})"
        case deque():
            return f"{name}.clear(); {name}.extend({text})"
        case list() | bytearray() | array():
            return f"{name}[:] = {text}"
        case Namespace() | SimpleNamespace():
            return f"{name}.__dict__.clear(); {name}.__dict__.update({text}.__dict__)"
    return f"{name}[...] = {text}" if type(value).__name__ == "ndarray" else f"{name} = {text}"


def home_of(value: object, module: str, name: str) -> str:
    """Returns the module from which the excerpt imports an object.

    For a public name of stateflow, that is ``stateflow``, because another release may define the name in another
    module.
    """
    is_public = module.startswith("stateflow.") and getattr(sys.modules["stateflow"], name, None) is value
    return "stateflow" if is_public else module


class Unwritten(Exception):
    """Raised for a value that cannot be written as Python text."""


class Writer:
    """Writes values as Python text that recreates them exactly: plain data, containers of it, and NumPy arrays.

    ``uses``: names of the program's functions and classes that the texts refer to.

    Args:
        names: the program's names, with their values.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self.uses: set[str] = set()

    def write(self, value: object) -> str:
        """Returns the text of a value.

        Raises Unwritten, also for a function or class itself, because the excerpt contains its definition instead.
        """
        if callable(value):
            raise Unwritten
        try:
            return self._write(value)
        except (ValueError, RecursionError) as error:
            raise Unwritten from error

    def _write(self, value: Any) -> str:
        kind = type(value)
        if value is None or kind in (bool, int, str, bytes):
            return repr(value)
        if (write := _KINDS.get(kind, _KINDS.get((kind.__module__, kind.__qualname__)))) is not None:
            return write(self, value)
        if kind.__module__ == "numpy" and hasattr(value, "dtype"):
            return self._numpy(value)
        if callable(value):
            return self._reference(value)
        raise Unwritten

    def each(self, values: Iterable[Any]) -> str:
        return ", ".join(self._write(each) for each in values)

    def pairs(self, mapping: Mapping[Any, Any]) -> str:
        return "{" + ", ".join(f"{self._write(key)}: {self._write(each)}" for key, each in mapping.items()) + "}"

    def sorted(self, values: Iterable[Any]) -> str:
        """Returns the elements' texts in sorted order, so that equal sets give equal text."""
        return ", ".join(sorted(self._write(each) for each in values))

    def call(self, made_by: str, *arguments: Any, **named: Any) -> str:
        module, _, name = made_by.partition(":")
        said = [self._write(each) for each in arguments]
        said += [f"{name}={self._write(each)}" for name, each in named.items()]
        return f"{_imported(module)}.{name}({', '.join(said)})"

    def _reference(self, value: Any) -> str:
        """Returns the text that refers to a function or class by its name, in the program or in another module."""
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if not isinstance(module, str) or not name.isidentifier():
            raise Unwritten
        if self._names.get(name) is value and module == self._names.get("__name__"):
            self.uses.add(name)
            return name
        if getattr(sys.modules.get(module), name, None) is not value or module == "__main__":
            raise Unwritten
        return f"{_imported(home_of(value, module, name))}.{name}"

    def _numpy(self, value: Any) -> str:
        """Returns the text of a NumPy array or scalar, exact to the bit."""
        import numpy as np  # already imported if there is an array

        exact = type(value) is np.ndarray or isinstance(value, np.generic)
        dtype = value.dtype.descr if value.dtype.names else value.dtype.str
        if not exact or value.dtype.hasobject or np.dtype(dtype) != value.dtype:  # such as a record with gaps
            raise Unwritten
        numpy, data = _imported("numpy"), value.tobytes()
        said, encoded = repr(data), f"{_imported('base64')}.b64decode({base64.b64encode(data)!r})"
        array = f"{numpy}.frombuffer({min(said, encoded, key=len)}, {numpy}.dtype({dtype!r}))"
        if not value.size:
            array = f"{numpy}.empty(0, {numpy}.dtype({dtype!r}))"
        if isinstance(value, np.generic):
            return f"{array}[0]"
        return f"{array}.reshape({value.shape!r}).copy()"


def _imported(module: str) -> str:
    """Returns an expression that imports a module, and needs no name of the program."""
    return f"__import__({module!r}, fromlist=['*'])" if "." in module else f"__import__({module!r})"


def _float(_: Writer, value: float) -> str:
    return repr(value) if math.isfinite(value) else f"float({str(value)!r})"


def _datetime(writer: Writer, value: dt.datetime) -> str:
    parts = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
    return writer.call("datetime:datetime", *parts, value.tzinfo, fold=value.fold)


def _time(writer: Writer, value: dt.time) -> str:
    parts = (value.hour, value.minute, value.second, value.microsecond)
    return writer.call("datetime:time", *parts, value.tzinfo, fold=value.fold)


def _timezone(writer: Writer, value: dt.timezone) -> str:
    return writer.call("datetime:timezone", *value.__getinitargs__())  # type: ignore[attr-defined]


def _zone(writer: Writer, value: ZoneInfo) -> str:
    if value.key is None or ZoneInfo(value.key) is not value:
        raise Unwritten
    return writer.call("zoneinfo:ZoneInfo", value.key)


def _named(made_by: str) -> Callable[[Writer, Any], str]:
    def write(writer: Writer, value: Any) -> str:
        if not all(name.isidentifier() for name in vars(value)):
            raise Unwritten
        module, _, name = made_by.partition(":")
        return f"{_imported(module)}.{name}(**{writer.pairs(vars(value))})"

    return write


def _tuple(writer: Writer, value: tuple[Any, ...]) -> str:
    return f"({writer.each(value)},)" if value else "()"


_Write = Callable[[Writer, Any], str]
#: a class whose module has other names in other versions of Python is a key itself, others are keys by their names
_KINDS: dict[type | tuple[str, str], _Write] = {
    ("builtins", "float"): _float,
    ("builtins", "complex"): lambda w, v: f"complex({_float(w, v.real)}, {_float(w, v.imag)})",
    ("builtins", "bytearray"): lambda _, v: repr(v),
    ("builtins", "range"): lambda _, v: repr(v),
    ("builtins", "tuple"): _tuple,
    ("builtins", "list"): lambda w, v: f"[{w.each(v)}]",
    ("builtins", "dict"): lambda w, v: w.pairs(v),
    ("builtins", "mappingproxy"): lambda w, v: f"{_imported('types')}.MappingProxyType({w.pairs(v)})",
    ("builtins", "set"): lambda w, v: f"set([{w.sorted(v)}])",
    ("builtins", "frozenset"): lambda w, v: f"frozenset([{w.sorted(v)}])",
    ("collections", "Counter"): lambda w, v: w.call("collections:Counter", dict(v)),
    ("collections", "OrderedDict"): lambda w, v: w.call("collections:OrderedDict", dict(v)),
    ("collections", "defaultdict"): lambda w, v: w.call("collections:defaultdict", v.default_factory, dict(v)),
    ("collections", "deque"): lambda w, v: w.call("collections:deque", list(v), v.maxlen),
    ("array", "array"): lambda w, v: w.call("array:array", v.typecode, v.tolist()),
    ("decimal", "Decimal"): lambda w, v: w.call("decimal:Decimal", str(v)),
    ("fractions", "Fraction"): lambda w, v: w.call("fractions:Fraction", v.numerator, v.denominator),
    ("datetime", "date"): lambda w, v: w.call("datetime:date", v.year, v.month, v.day),
    ("datetime", "datetime"): _datetime,
    ("datetime", "time"): _time,
    ("datetime", "timedelta"): lambda w, v: w.call("datetime:timedelta", v.days, v.seconds, v.microseconds),
    ("datetime", "timezone"): _timezone,
    ("zoneinfo", "ZoneInfo"): _zone,
    ("uuid", "UUID"): lambda w, v: w.call("uuid:UUID", str(v)),
    PosixPath: lambda w, v: w.call("pathlib:Path", str(v)),
    PurePosixPath: lambda w, v: w.call("pathlib:PurePosixPath", str(v)),
    ("argparse", "Namespace"): _named("argparse:Namespace"),
    ("types", "SimpleNamespace"): _named("types:SimpleNamespace"),
}
