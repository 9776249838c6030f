"""Records (dataclasses, msgspec structs, pydantic models) as plain data, and types that contain them.

Nothing here imports msgspec or pydantic: who declares such a type has imported it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

from stateflow.errors import DeclarationError, DecodeError, EncodeError
from stateflow.state.plain import CONTAINERS, IMMUTABLE, is_array_type


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How values of one type that contain records are lowered to plain data and lifted back."""

    name: str
    lower: Callable[[Any], Any]
    lift: Callable[[Any], Any]


# --- the three kinds of record -------------------------------------------------------------------------


class _Missing:
    """No default."""


_REQUIRED: Final = _Missing()


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


def _hints(cls: Any) -> dict[str, Any]:
    """Declared type by field."""
    if _is_pydantic(cls):
        if not cls.__pydantic_complete__:
            cls.model_rebuild(raise_errors=False)
        if cls.model_config.get("extra") == "allow":
            raise DeclarationError(
                f"{cls.__name__} takes fields it does not declare, which would not be stored",
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


def _defaults(cls: Any) -> dict[str, Any]:
    """What makes the default of a field that is not stored: a function, _REQUIRED, or None where ``_builder``
    fills it in."""
    if _is_pydantic(cls):
        fields = cls.__pydantic_fields__.items()
        return {name: _REQUIRED if field.is_required() else None for name, field in fields}
    if _is_msgspec(cls):
        names, defaults = cls.__struct_fields__, cls.__struct_defaults__
        found: dict[str, Any] = dict.fromkeys(names, _REQUIRED)
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            if type(default).__name__ != "NoDefaultType":
                found[name] = None
        return found
    found = dict.fromkeys((field.name for field in dataclasses.fields(cls)), _REQUIRED)
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            found[field.name] = lambda default=field.default: default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory
    return found


def _builder(cls: Any) -> Callable[[dict[str, Any]], Any]:
    """Makes an instance of field values. Dataclasses and models are not initialised anew: their values were once
    accepted."""
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


# --- one field -----------------------------------------------------------------------------------------


class Field:
    """One field of a record: what it may hold, and how that becomes plain data.

    Only the field's own type is looked at, not the items of a list in it. An int where a float or a
    Decimal is declared is widened.
    """

    __slots__ = ("_classes", "_hint", "_widen", "default", "name", "owner", "shape")

    def __init__(self, owner: str, name: str, hint: Any, default: Any) -> None:
        self.owner, self.name, self.default = owner, name, default
        self.shape = shape_of(hint)
        self._hint = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint)
        #: classes of the plain values that fit, None for any
        self._classes = _classes(hint)
        self._widen: Callable[[Any], Any] | None = None
        if self._classes is not None and int not in self._classes:
            self._widen = next((cls for cls in (float, Decimal) if cls in self._classes), None)

    def lower(self, value: Any) -> Any:
        try:
            return self._admit(value) if self.shape is None else self.shape.lower(value)
        except EncodeError as error:
            error.where["field"] = self._path(error)
            raise
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise EncodeError(
                f"{self.owner} declares field {self.name!r} as {self._hint}, it holds a {type(value).__name__}",
                remedy="declare the field with the type it holds",
                value=repr(value)[:80],
                field=self.name,
            ) from error

    def lift(self, plain: Any) -> Any:
        try:
            return self._admit(plain) if self.shape is None else self.shape.lift(plain)
        except DecodeError as error:
            error.where["field"] = self._path(error)
            raise
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DecodeError(
                f"stored {self.owner} has a {type(plain).__name__} in field {self.name!r}, declared as {self._hint}",
                remedy="give the field its old type, or write migrate_state",
                field=self.name,
            ) from error

    def _admit(self, value: Any) -> Any:
        """``value``, perhaps widened. Raises TypeError for one that does not fit."""
        classes = self._classes
        cls = value.__class__
        if classes is None or cls in classes:
            return value
        if self._widen is not None and isinstance(value, int) and cls is not bool:
            return self._widen(value)
        # a bool is no number here, a datetime no date, as in the coders of these types
        if cls in (bool, datetime) or not isinstance(value, tuple(classes)):
            raise TypeError(f"{cls.__name__} does not fit")
        return value

    def _path(self, error: EncodeError | DecodeError) -> str:
        inner = error.where.get("field")
        return self.name if inner is None else f"{self.name}.{inner}"


def _classes(hint: Any) -> frozenset[type] | None:
    hint = bare(hint)
    if hint is None:
        return frozenset({type(None)})
    if is_union(hint):
        each = [_classes(arg) for arg in typing.get_args(hint)]
        return None if None in each else frozenset[type]().union(*(classes for classes in each if classes))
    cls = typing.get_origin(hint) or hint
    return None if cls in (object, Any) or not isinstance(cls, type) else frozenset({cls})


class RecordShape:
    """Lowers a record to ``{field: plain value}``, the stored form; fields are known by name.

    ``immutable`` says that neither the instance nor anything in it can change in place.
    Raises DeclarationError for a field whose type has no plain form.
    """

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = f"struct:{cls.__name__}"
        self.immutable = is_immutable(cls)
        self._build = _builder(cls)
        self._fields: list[Field] = []

    @classmethod
    def of(cls, record: type) -> RecordShape:
        """One shape per class; a class may hold itself, so it is known before its fields are looked at."""
        if not is_record(record):
            raise DeclarationError(
                f"{record!r} is no record", remedy="use a dataclass, a msgspec.Struct or a pydantic model"
            )
        known = _records.get(record)
        if known is None:
            known = _records[record] = cls(record)
            try:
                defaults = _defaults(record)
                hints = _hints(record).items()
                known._fields = [Field(record.__name__, name, hint, defaults[name]) for name, hint in hints]
            except DeclarationError:
                del _records[record]
                raise
        return known

    def lower(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, self.cls):
            raise EncodeError(f"a value of type {type(value).__name__} stands where {self.cls.__name__} is declared")
        return {field.name: field.lower(getattr(value, field.name)) for field in self._fields}

    def lift(self, plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise DecodeError(f"stored data is no {self.cls.__name__}", found=type(plain).__name__)
        values = {}
        for field in self._fields:
            if field.name in plain:
                values[field.name] = field.lift(plain[field.name])
            elif field.default is _REQUIRED:
                raise DecodeError(
                    f"stored {self.cls.__name__} has no field {field.name!r} and the field has no default",
                    remedy="give the new field a default, or write migrate_state",
                    field=field.name,
                )
            elif field.default is not None:
                values[field.name] = field.default()
        return self._build(values)


_records: dict[type, RecordShape] = {}


def bare(type_: Any) -> Any:
    """``type_`` without NewType and Annotated around it."""
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
    """Whether a value of ``type_`` and everything in it is fixed for good."""
    type_ = bare(type_)
    origin, args = typing.get_origin(type_), typing.get_args(type_)
    if type_ in IMMUTABLE or type_ is None or type_ in _within:
        return True
    if is_union(type_) or origin in (tuple, frozenset):
        return all(arg is Ellipsis or is_immutable(arg, _within) for arg in args)
    if is_record(type_):
        return _is_frozen(type_) and all(is_immutable(hint, (*_within, type_)) for hint in _hints(type_).values())
    return False


def shape_of(type_: Any) -> Shape | None:
    """None when values of ``type_`` are plain already. Raises DeclarationError for unsupported types."""
    type_ = bare(type_)
    if type_ in IMMUTABLE or type_ in CONTAINERS or type_ in (None, Any, object, bytearray):
        return None
    if is_record(type_):
        record = RecordShape.of(type_)
        return Shape(record.name, record.lower, record.lift)
    origin, args = typing.get_origin(type_), typing.get_args(type_)
    if is_array_type(origin or type_):
        return None
    if is_union(type_):
        return _union_shape(type_, args)
    if origin in CONTAINERS:
        return _container_shape(origin, args)
    raise DeclarationError(
        f"there is no coder for {getattr(type_, '__name__', type_)}",
        remedy="use int, float, bool, str, bytes, datetime, date, Decimal, UUID, list, dict, set, tuple, numpy.ndarray "
        "or a dataclass, msgspec.Struct or pydantic model, or pass coder=",
    )


def _union_shape(type_: Any, args: tuple[Any, ...]) -> Shape | None:
    shapes = [shape for shape in map(shape_of, args) if shape is not None]
    if not shapes:
        return None
    if len(shapes) > 1 or len(args) != 2 or type(None) not in args:
        raise DeclarationError(
            f"a union with a record in it cannot be told apart when read: {type_}",
            remedy="use Optional[…] of one record",
        )
    inner = shapes[0]
    return Shape(
        f"{inner.name}?",
        lambda value: None if value is None else inner.lower(value),
        lambda value: None if value is None else inner.lift(value),
    )


def _container_shape(origin: Any, args: tuple[Any, ...]) -> Shape | None:
    shapes = [None if arg is Ellipsis else shape_of(arg) for arg in args]
    if all(shape is None for shape in shapes):
        return None
    name = f"{origin.__name__}[{','.join('_' if shape is None else shape.name for shape in shapes)}]"
    lowers = [_same if shape is None else shape.lower for shape in shapes]
    lifts = [_same if shape is None else shape.lift for shape in shapes]
    if origin is dict:
        if shapes[0] is not None:
            raise DeclarationError("a record cannot be the key of a stored dict", remedy="use a tuple as key")
        lower, lift = lowers[1], lifts[1]
        return Shape(
            name,
            lambda value: {key: lower(item) for key, item in value.items()},
            lambda value: {key: lift(item) for key, item in value.items()},
        )
    if origin in (set, frozenset):
        raise DeclarationError("a record cannot be the member of a stored set", remedy="use a list or a dict")
    if origin is tuple and Ellipsis not in args:
        return Shape(
            name,
            lambda value: tuple([lower(item) for lower, item in zip(lowers, value, strict=True)]),
            lambda value: tuple([lift(item) for lift, item in zip(lifts, value, strict=True)]),
        )
    return Shape(
        name,
        lambda value: origin([lowers[0](item) for item in value]),
        lambda value: origin([lifts[0](item) for item in value]),
    )


def _same(value: Any) -> Any:
    return value
