"""Declared types as JSON, stored with the data, and the comparison of a stored type with a declared one.

A scalar is its name; others are lists: ``["list", item]``, ``["dict", key, value]``, ``["tuple", item, …]``,
``["tuple...", item]``, ``["union", type, …]``, ``["ndarray", item]``, ``["record", name, {field: [type, has a
default]}]``, and ``["record", name]`` for a record within itself.
"""

from __future__ import annotations

import typing
from enum import IntEnum
from typing import Any

from stateflow.state.msgpack_codec import CONTAINERS, array_item, is_array_type
from stateflow.state.records import REQUIRED, bare, defaults, hints, is_record, is_union

#: JSON
Signature = Any


class Verdict(IntEnum):
    """Relation of the stored values of one type to another type."""

    #: they are values of the other type
    KEPT = 0
    #: they become values of the other type once their numbers are widened
    WIDER = 1
    #: neither
    CHANGED = 2


def signature_of(type_: Any, _within: tuple[type, ...] = ()) -> Signature:
    """Returns the signature of a type that has a shape."""
    type_ = bare(type_)
    if type_ is None or type_ is type(None):
        return "None"
    if type_ in (Any, object):
        return "any"
    origin, args = typing.get_origin(type_) or type_, typing.get_args(type_)
    if is_union(type_):
        return ["union", *(signature_of(arg, _within) for arg in args)]
    if is_record(type_):
        if type_ in _within:
            return ["record", type_.__name__]
        missing = defaults(type_)
        fields = {
            name: [signature_of(hint, (*_within, type_)), missing[name] is not REQUIRED]
            for name, hint in hints(type_).items()
        }
        return ["record", type_.__name__, fields]
    if is_array_type(origin):
        item = array_item(args)
        return ["ndarray", "any" if item is None else item.__name__]
    if origin not in CONTAINERS:
        return str(getattr(type_, "__name__", type_))
    inner = [signature_of(arg, _within) for arg in args if arg is not Ellipsis]
    if origin is tuple and (not args or Ellipsis in args):
        return ["tuple...", *(inner or ["any"])]
    return [origin.__name__, *(inner or ["any"] * (2 if origin is dict else 1))]


def spelled(signature: Signature) -> str:
    """Returns a signature as a declaration spells it."""
    if isinstance(signature, str):
        return signature
    kind: str = signature[0]
    inner = signature[1:]
    if all(each == "any" for each in inner):
        return kind.removesuffix("...")
    match kind:
        case "union":
            return " | ".join(map(spelled, inner))
        case "tuple...":
            return f"tuple[{spelled(inner[0])}, ...]"
        case "record":
            fields = inner[1].items() if len(inner) > 1 else ()
            return f"{inner[0]}({', '.join(f'{name}: {spelled(type_)}' for name, (type_, _) in fields)})"
    return f"{kind}[{', '.join(map(spelled, inner))}]"


def verdict(was: Signature, now: Signature) -> Verdict:
    """Returns what stored values of ``was`` are under ``now``."""
    if now in (was, "any"):
        return Verdict.KEPT
    if _kind(was) == "union":
        return max(verdict(each, now) for each in was[1:])
    if _kind(now) == "union":
        return min(verdict(was, each) for each in now[1:])
    if was == "int" and now in ("float", "Decimal"):
        return Verdict.WIDER
    if _kind(was) != _kind(now) or isinstance(was, str) or isinstance(now, str):
        return Verdict.CHANGED
    if _kind(now) == "record":
        return _of_records(was, now)
    if _kind(now) == "ndarray":
        return Verdict.KEPT if now[1] in (was[1], "any") else Verdict.CHANGED
    if len(was) != len(now):
        return Verdict.CHANGED
    return max(map(verdict, was[1:], now[1:]), default=Verdict.KEPT)


def _kind(signature: Signature) -> str:
    return signature if isinstance(signature, str) else str(signature[0])


def _of_records(was: Signature, now: Signature) -> Verdict:
    """Compares two records. The answer is never WIDER, as records are widened field by field whenever they are read."""
    if len(was) < 3 or len(now) < 3:
        return Verdict.KEPT if was[1] == now[1] else Verdict.CHANGED
    before = was[2]
    for name, (type_, has_default) in now[2].items():
        if name not in before:
            if not has_default:
                return Verdict.CHANGED
        elif not _is_read(before[name][0], type_):
            return Verdict.CHANGED
    return Verdict.KEPT


def _is_read(was: Signature, now: Signature) -> bool:
    """Returns whether reading turns a stored field into the declared type: it widens a number, but none in a list."""
    found = verdict(was, now)
    parts = was[1:] if _kind(was) == "union" else [was]
    return found is Verdict.KEPT or (found is Verdict.WIDER and all(isinstance(part, str) for part in parts))
