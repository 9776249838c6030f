"""Chooses the coder for a declared type."""

from __future__ import annotations

import typing
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from stateflow.state import coders, records
from stateflow.state.coder import Coder

_SCALARS: dict[Any, type[Coder[Any]]] = {
    int: coders.Int64,
    float: coders.Float64,
    bool: coders.Bool,
    str: coders.Utf8,
    bytes: coders.Bytes,
    datetime: coders.Timestamp,
    date: coders.Date,
    Decimal: coders.Decimal,
    UUID: coders.UUID,
}


def coder_for(type_: Any) -> Coder[Any]:
    """Returns the coder of a declared type.

    ``int float bool str bytes datetime date Decimal UUID`` have a coder each. Dataclasses, msgspec structs and pydantic
    models get a Struct, ``tuple[…]`` with item types a Tuple, every other container, Optional and Any a Msgpack. Raises
    DeclarationError for any other type; the error names the supported types.

    >>> coder_for(tuple[str, int]).encode(("a", 1)) == coder_for(tuple[str, int]).encode(("a", 1))
    True
    """
    if isinstance(type_, Coder):
        return type_
    if isinstance(type_, type) and issubclass(type_, Coder):
        return type_()
    type_ = records.bare(type_)
    scalar = _SCALARS.get(type_) if isinstance(type_, type) else None
    if scalar is not None:
        return scalar()
    if records.is_record(type_):
        return coders.Struct(type_)
    if typing.get_origin(type_) is tuple:
        args = typing.get_args(type_)
        if args and args[-1] is Ellipsis:
            return coders.Tuple((coder_for(args[0]),), variadic=True)
        return coders.Tuple(tuple(coder_for(arg) for arg in args))
    return coders.Msgpack(type_)
