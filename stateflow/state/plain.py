"""Plain data as msgpack, and dataclasses as plain data.

msgpack knows neither tuple, set, date, datetime, Decimal, UUID nor ints beyond 64 bits: they travel as
extension types, whose numbers are a stored format and never change meaning.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgpack

from stateflow.errors import DeclarationError, DecodeError, EncodeError
from stateflow.state import ordered

_TUPLE, _SET, _FROZENSET, _INT, _DATE, _AWARE, _NAIVE, _DECIMAL, _UUID = range(1, 10)

#: types msgpack (with the extensions here) stores and returns unchanged, and whose values never change
IMMUTABLE = (type(None), bool, int, float, str, bytes, date, datetime, Decimal, UUID)
#: subclasses of these are stored as these
_SUBCLASSED: tuple[Any, ...] = (float, str, bytes, list, dict)
_CONTAINERS = (list, dict, tuple, set, frozenset)


def dumps(value: Any) -> bytes:
    """Raises EncodeError for a type that has no plain form, and for cycles."""
    try:
        data: bytes = msgpack.packb(value, default=_extend, strict_types=True)
    except EncodeError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EncodeError(
            f"a value has no stored form: {error}",
            remedy="store lists, dicts, sets, tuples, numbers, text, bytes, dates or dataclasses",
            type=type(value).__name__,
        ) from error
    return data


def loads(data: bytes) -> Any:
    """Inverse of :func:`dumps`; raises DecodeError."""
    try:
        return msgpack.unpackb(data, ext_hook=_shorten, strict_map_key=False, use_list=True)
    except DecodeError:
        raise
    except (ValueError, TypeError, ArithmeticError, msgpack.UnpackException) as error:
        raise DecodeError(
            f"stored bytes are not msgpack: {error}",
            remedy="the data was written under another declaration or is damaged; restore a checkpoint",
            bytes=data[:32].hex(),
        ) from error


def _extend(value: Any) -> Any:
    """What msgpack asks for every object whose exact type it does not know."""
    match value:
        case tuple():
            return msgpack.ExtType(_TUPLE, dumps(list(value)))
        case set() | frozenset():
            # sorted, so that equal sets have equal bytes whatever their history
            members = sorted(dumps(member) for member in value)
            body = dumps(len(members)) + b"".join(members)
            return msgpack.ExtType(_SET if isinstance(value, set) else _FROZENSET, body)
        case int():
            if value.__class__ is not int and -(1 << 63) <= value < 1 << 64:
                return int(value)
            return msgpack.ExtType(_INT, str(int(value)).encode())
        case datetime():
            aware = value.utcoffset() is not None
            body = ordered.order_int(ordered.micros_of(value if aware else value.replace(tzinfo=None)))
            return msgpack.ExtType(_AWARE if aware else _NAIVE, body)
        case date():
            return msgpack.ExtType(_DATE, value.toordinal().to_bytes(4, "big"))
        case Decimal():
            return msgpack.ExtType(_DECIMAL, str(value).encode())
        case UUID():
            return msgpack.ExtType(_UUID, value.bytes)
    for plain_type in _SUBCLASSED:
        if isinstance(value, plain_type):
            return plain_type(value)
    raise EncodeError(
        f"a value of type {type(value).__name__} has no stored form",
        remedy="store lists, dicts, sets, tuples, numbers, text, bytes, dates or dataclasses",
        value=repr(value)[:80],
    )


def _shorten(code: int, body: bytes) -> Any:
    match code:
        case 1:
            return tuple(loads(body))
        case 2 | 3:
            unpacker = msgpack.Unpacker(None, ext_hook=_shorten, strict_map_key=False, max_buffer_size=len(body) or 1)
            unpacker.feed(body)
            members = [unpacker.unpack() for _ in range(unpacker.unpack())]
            return set(members) if code == _SET else frozenset(members)
        case 4:
            return int(body)
        case 5:
            return date.fromordinal(int.from_bytes(body, "big"))
        case 6 | 7:
            return ordered.datetime_of(ordered.unorder_int(body), aware=code == _AWARE)
        case 8:
            return Decimal(body.decode("ascii"))
        case 9:
            return UUID(bytes=body)
    raise DecodeError(
        f"stored msgpack has extension type {code}, which this version does not know",
        remedy="run the newer stateflow version that wrote it",
    )


# --- shapes: dataclasses inside plain data -------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """How values of one type that contain dataclasses are lowered to plain data and lifted back."""

    name: str
    lower: Callable[[Any], Any]
    lift: Callable[[Any], Any]


class RecordShape:
    """Lowers a dataclass instance to ``{field: plain value}``.

    ``immutable`` says that neither the instance nor anything in it can change in place.
    Raises DeclarationError for a field whose type has no plain form.
    """

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = f"struct:{cls.__name__}"
        self.immutable = is_immutable(cls)
        self._fields: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(cls)}
        self._shapes: dict[str, Shape | None] = {}

    @classmethod
    def of(cls, record: type) -> RecordShape:
        """One shape per class; a class may hold itself, so it is known before its fields are looked at."""
        if not (isinstance(record, type) and dataclasses.is_dataclass(record)):
            raise DeclarationError(f"{record!r} is not a dataclass", remedy="decorate it with @dataclasses.dataclass")
        known = _records.get(record)
        if known is None:
            known = _records[record] = cls(record)
            try:
                hints = field_types(record)
                known._shapes = {name: shape_of(hints[name]) for name in known._fields}
            except DeclarationError:
                del _records[record]
                raise
        return known

    def lower(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, self.cls):
            raise EncodeError(f"a value of type {type(value).__name__} stands where {self.cls.__name__} is declared")
        plain = {}
        for name, shape in self._shapes.items():
            field = getattr(value, name)
            plain[name] = field if shape is None else shape.lower(field)
        return plain

    def lift(self, plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise DecodeError(f"stored data is no {self.cls.__name__}", found=type(plain).__name__)
        value: Any = object.__new__(self.cls)
        for name, shape in self._shapes.items():
            if name in plain:
                field = plain[name] if shape is None else shape.lift(plain[name])
            else:
                field = self._default(name)
            object.__setattr__(value, name, field)
        return value

    def _default(self, name: str) -> Any:
        field = self._fields[name]
        if field.default is not dataclasses.MISSING:
            return field.default
        if field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
        raise DecodeError(
            f"stored {self.cls.__name__} has no field {name!r} and the field has no default",
            remedy="give the new field a default, or write migrate_state",
        )


_records: dict[type, RecordShape] = {}


def field_types(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise DeclarationError(
            f"a field type of {cls.__name__} cannot be resolved: {error}",
            remedy="define the named type at module level, before the operator",
        ) from error


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
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        frozen = type_.__dataclass_params__.frozen  # type: ignore[attr-defined]
        return bool(frozen) and all(is_immutable(hint, (*_within, type_)) for hint in field_types(type_).values())
    return False


def shape_of(type_: Any) -> Shape | None:
    """None when values of ``type_`` are plain already. Raises DeclarationError for unsupported types."""
    type_ = bare(type_)
    if type_ in IMMUTABLE or type_ in _CONTAINERS or type_ in (None, Any, object):
        return None
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        record = RecordShape.of(type_)
        return Shape(record.name, record.lower, record.lift)
    origin, args = typing.get_origin(type_), typing.get_args(type_)
    if is_union(type_):
        return _union_shape(type_, args)
    if origin in _CONTAINERS:
        return _container_shape(origin, args)
    raise DeclarationError(
        f"there is no coder for {getattr(type_, '__name__', type_)}",
        remedy="use int, float, bool, str, bytes, datetime, date, Decimal, UUID, list, dict, set, tuple or a "
        "dataclass, or pass coder=",
    )


def _union_shape(type_: Any, args: tuple[Any, ...]) -> Shape | None:
    shapes = [shape for shape in map(shape_of, args) if shape is not None]
    if not shapes:
        return None
    if len(shapes) > 1 or len(args) != 2 or type(None) not in args:
        raise DeclarationError(
            f"a union with a dataclass in it cannot be told apart when read: {type_}",
            remedy="use Optional[…] of one dataclass",
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
            raise DeclarationError("a dataclass cannot be the key of a stored dict", remedy="use a tuple as key")
        lower, lift = lowers[1], lifts[1]
        return Shape(
            name,
            lambda value: {key: lower(item) for key, item in value.items()},
            lambda value: {key: lift(item) for key, item in value.items()},
        )
    if origin in (set, frozenset):
        raise DeclarationError("a dataclass cannot be the member of a stored set", remedy="use a list or a dict")
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
