"""Conversion of values to messages and back, field by field where both have the same names; errors become faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from stateflow.errors import StateflowError
from stateflow.rpc.wire import error_of, fault_of

M = TypeVar("M", bound=Message)
T = TypeVar("T")
_Readers = dict[str, Callable[[Any], Any]]
_known: dict[tuple[type, str], _Readers] = {}  # by the value's type and the message's


def message_of(kind: type[M], value: Any, **given: Any) -> M:
    """Returns the message of a value.

    Args:
        given: fields of the message that have another name in the value, or that are messages themselves.
    """
    made = {name: getattr(value, name) for name in _readers(type(value), kind) if name not in given}
    for name, each in made.items():
        if isinstance(each, StateflowError):
            made[name] = fault_of(each)
    return kind(**made, **given)


def value_of(kind: type[T], message: Message, **given: Any) -> T:
    """Returns the value of a message.

    Args:
        given: fields of the value that have another name in the message, or that are values themselves.
    """
    readers = _readers(kind, type(message))
    return kind(**{name: read(message) for name, read in readers.items() if name not in given}, **given)


def _readers(kind: Any, message: type[Message]) -> _Readers:
    """Returns the readers of the fields that both have."""
    by_name: Any = message.DESCRIPTOR.fields_by_name
    key = kind, message.DESCRIPTOR.full_name
    if key not in _known:
        _known[key] = {each.name: _reader(by_name[each.name]) for each in fields(kind) if each.name in by_name}
    return _known[key]


def _reader(field: FieldDescriptor) -> Callable[[Any], Any]:
    name, inner = field.name, field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return lambda message: dict(getattr(message, name))
    if inner is not None and inner.name == "Fault":
        return lambda message: error_of(getattr(message, name)) if message.HasField(name) else None
    if field.is_repeated:
        return lambda message: tuple(getattr(message, name))
    if field.has_presence and inner is None:
        return lambda message: getattr(message, name) if message.HasField(name) else None
    return lambda message: getattr(message, name)
