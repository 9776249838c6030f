"""Records: dataclasses, msgspec structs and pydantic models, their fields, and how to rebuild one from them.

This module imports neither msgspec nor pydantic: a program that declares such a type has imported its package.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, Final

from stateflow.errors import DeclarationError
from stateflow.state.msgpack_codec import IMMUTABLE


class _Missing:
    """Marks a field without a default."""


REQUIRED: Final = _Missing()


def is_record(type_: Any) -> bool:
    return isinstance(type_, type) and (dataclasses.is_dataclass(type_) or _is_msgspec(type_) or _is_pydantic(type_))


def _is_msgspec(cls: type) -> bool:
    return hasattr(cls, "__struct_fields__") and hasattr(cls, "__struct_config__")


def _is_pydantic(cls: type) -> bool:
    return hasattr(cls, "__pydantic_fields__") and hasattr(cls, "model_construct")


def _is_frozen(cls: Any) -> bool:
    if dataclasses.is_dataclass(cls):
        return bool(cls.__dataclass_params__.frozen)  # type: ignore[union-attr]
    if _is_msgspec(cls):
        return bool(cls.__struct_config__.frozen)
    return bool(cls.model_config.get("frozen"))


def hints(cls: Any) -> dict[str, Any]:
    """Returns the declared types by field. Raises DeclarationError."""
    if _is_pydantic(cls):
        if not cls.__pydantic_complete__:
            cls.model_rebuild(raise_errors=False)
        if cls.model_config.get("extra") == "allow":
            raise DeclarationError(
                f"{cls.__name__} accepts undeclared fields, which would not be stored",
                remedy="set extra to 'ignore' or 'forbid', or store a dict",
            )
        return {name: field.annotation for name, field in cls.__pydantic_fields__.items()}
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise DeclarationError(
            f"a field type of {cls.__name__} cannot be resolved: {error}",
            remedy="define the named type at module level, before the operator",
        ) from error
    names = cls.__struct_fields__ if _is_msgspec(cls) else [field.name for field in dataclasses.fields(cls)]
    return {name: hints[name] for name in names}


def defaults(cls: Any) -> dict[str, Any]:
    """Returns by field the function that makes its default when it is not stored.

    REQUIRED: the field has no default. None: ``builder`` fills in the default.
    """
    if _is_pydantic(cls):
        fields = cls.__pydantic_fields__.items()
        return {name: REQUIRED if field.is_required() else None for name, field in fields}
    if _is_msgspec(cls):
        names, defaults = cls.__struct_fields__, cls.__struct_defaults__
        found: dict[str, Any] = dict.fromkeys(names, REQUIRED)
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            if type(default).__name__ != "NoDefaultType":
                found[name] = None
        return found
    found = dict.fromkeys((field.name for field in dataclasses.fields(cls)), REQUIRED)
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = lambda default=field.default: default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory
    return found


def builder(cls: Any) -> Callable[[dict[str, Any]], Any]:
    """Returns a function that makes an instance from field values.

    It does not run ``__init__`` or validation of dataclasses and models: their values were accepted once.
    """
    if _is_pydantic(cls):
        return lambda values: cls.model_construct(**values)
    if _is_msgspec(cls):
        return lambda values: cls(**values)

    def build(values: dict[str, Any]) -> Any:
        value = object.__new__(cls)
        for name, field in values.items():
            object.__setattr__(value, name, field)
        return value

    return build


def bare(type_: Any) -> Any:
    """Returns ``type_`` without NewType and Annotated around it."""
    while True:
        if hasattr(type_, "__supertype__"):
            type_ = type_.__supertype__
        elif typing.get_origin(type_) is typing.Annotated:
            type_ = typing.get_args(type_)[0]
        else:
            return type_


def is_union(type_: Any) -> bool:
    return typing.get_origin(type_) in (typing.Union, types.UnionType)


def is_immutable(type_: Any, _within: tuple[type, ...] = ()) -> bool:
    """Returns whether neither a value of ``type_`` nor anything in it can change in place."""
    type_ = bare(type_)
    origin, args = typing.get_origin(type_), typing.get_args(type_)
    if type_ in IMMUTABLE or type_ is None or type_ in _within:
        return True
    if is_union(type_) or origin in (tuple, frozenset):
        return all(arg is Ellipsis or is_immutable(arg, _within) for arg in args)
    if is_record(type_):
        return _is_frozen(type_) and all(is_immutable(hint, (*_within, type_)) for hint in hints(type_).values())
    return False
