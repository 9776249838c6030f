"""Signatures of declared types, which are stored with the data, and checks of values against declared types.

A *signature* is a declared type as JSON. :func:`verdict` compares a stored signature with a declared one. The signature
of a scalar is its name. Others are lists: ``["list", item]``, ``["dict", key, value]``, ``["tuple", item, …]``,
``["tuple...", item]``, ``["union", type, …]``, ``["ndarray", item]``,
``["record", name, {field: [type, has a default]}]``, and ``["record", name]`` for a record within itself.

A *shape* contains the checks, which are compiled once per declaration and called for each value written. A value that
fits is lowered to plain data, which :mod:`stateflow.state.encoding` stores; most values are plain already. Records
become dicts of their fields; an int becomes the declared float or Decimal if the result is equal.
"""

from __future__ import annotations

import typing
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import IntEnum
from typing import Any, Final

from stateflow.errors import DeclarationError, DecodeError, EncodeError
from stateflow.state.encoding import (
    CONTAINERS,
    REQUIRED,
    array_item,
    bare,
    builder,
    defaults,
    exact_decimal,
    exact_float,
    field_names,
    has_items,
    hints,
    is_array_type,
    is_immutable,
    is_numpy_bool,
    is_record,
    is_union,
)
from stateflow.types import shown

#: JSON
Signature = Any

# -- Signatures ------------------------------------------------------------------------------------------------------


class Verdict(IntEnum):
    """Result of comparing the type of stored values with another type."""

    #: the values are values of the other type
    KEPT = 0
    #: the values become values of the other type when their numbers are widened
    WIDER = 1
    #: the values are not, and do not become, values of the other type
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
    """Returns a signature in the form of a declaration, such as ``dict[str, int]``."""
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
    """Compares a stored type ``was`` with a declared type ``now``."""
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
    """Compares two records. The answer is never WIDER, because records are widened field by field whenever they are
    read."""
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
    """Returns whether reading a stored field makes a value of the declared type. Reading widens a number, but not the
    numbers in a list."""
    found = verdict(was, now)
    parts = was[1:] if _kind(was) == "union" else [was]
    return found is Verdict.KEPT or (found is Verdict.WIDER and all(isinstance(part, str) for part in parts))


def types_become(was: dict[str, Any], now: dict[str, Any]) -> Verdict:
    """Compares a state's stored types with those of another description with the same tag.

    Values that were stored without their types count as KEPT.
    """
    both = zip(was.get("types", ()), now.get("types", ()), strict=False)
    return max((verdict(*each) for each in both), default=Verdict.KEPT)


def spelled_state(described: dict[str, Any]) -> str:
    """Returns a state's kind and types in the form of a declaration, such as ``value(list[int])``."""
    types = [spelled(each) for each in described.get("types", described["coders"])]
    return f"{described['kind']}({', '.join(types)})"


# -- Shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """Checks and conversions for the values of one declared type.

    Attributes:
        name: name of the types that must be lowered, as a part of the coder's name; empty: values are plain data.
        lower: returns plain data for a value. Raises EncodeError or TypeError for a value that does not fit.
        lift: returns the value for plain data; None: the value is the plain data.
        classes: classes of values that fit, are plain and need no check, subclasses excluded; None: all classes.
    """

    name: str
    lower: Callable[[Any], Any]
    lift: Callable[[Any], Any] | None = None
    classes: frozenset[type] | None = frozenset()


def misfit(value: Any, declared: str) -> TypeError:
    name = type(value).__name__
    return TypeError(f"{f'{type(value).__module__}.{name}' if name == declared else name} instead of {declared}")


def shape_of(type_: Any) -> Shape:
    """Returns the shape of a declared type. Raises DeclarationError for unsupported types."""
    type_ = bare(type_)
    if type_ in _LEAVES:
        return _LEAVES[type_]
    if type_ in (Any, object):
        return _ANYTHING
    if is_record(type_):
        record = RecordShape.of(type_)
        return Shape(record.name, record.lower, record.lift)
    origin, args = typing.get_origin(type_) or type_, typing.get_args(type_)
    if is_array_type(origin):
        return _array_shape(args)
    if is_union(type_):
        return _union_shape(type_, args)
    if origin is dict:
        return _dict_shape(args)
    if origin is tuple and args and Ellipsis not in args:
        return _tuple_shape(args)
    if origin in CONTAINERS:
        return _sequence_shape(origin, args)
    raise DeclarationError(
        f"there is no coder for {getattr(type_, '__name__', type_)}",
        remedy="use int, float, bool, str, bytes, datetime, date, Decimal, UUID, list, dict, set, tuple, numpy.ndarray "
        "or a dataclass, msgspec.Struct or pydantic model, or pass coder=",
    )


# -- One value of a simple type --------------------------------------------------------------------------------------


def _int(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise misfit(value, "int")
    return int(value.__index__())


def _bool(value: Any) -> bool:
    if not isinstance(value, bool) and not is_numpy_bool(value):
        raise misfit(value, "bool")
    return bool(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise misfit(value, "str")
    return str.__str__(value)  # the value of an enumeration's member, not its name


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise misfit(value, "bytes")
    return bytes(value)


def _date(value: Any) -> date:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise misfit(value, "date")
    return value


def _moment(value: Any) -> datetime:
    if not isinstance(value, datetime):
        raise misfit(value, "datetime")
    try:
        naive = value.utcoffset() is None
    except ValueError:  # pandas' NaT is an instance of datetime
        raise misfit(value, "datetime") from None
    if naive:
        raise EncodeError(
            "a datetime without a time zone does not name an instant",
            remedy="attach one: value.replace(tzinfo=timezone.utc)",
            value=shown(value),
        )
    return value


def _number(exact: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    def admit(value: Any) -> Any:
        try:
            return exact(value)
        except TypeError:
            raise misfit(value, name) from None

    return admit


def _instance(cls: type) -> Callable[[Any], Any]:
    def admit(value: Any) -> Any:
        if not isinstance(value, cls):
            raise misfit(value, cls.__name__)
        return value

    return admit


def _leaf(cls: type, admit: Callable[[Any], Any]) -> Shape:
    def lower(value: Any) -> Any:
        return value if value.__class__ is cls else admit(value)

    return Shape("", lower, None, frozenset({cls}))


def _same(value: Any) -> Any:
    return value


_ANYTHING: Final = Shape("", _same, None, None)
_NOTHING: Final = _leaf(type(None), _instance(type(None)))
_LEAVES: Final[dict[Any, Shape]] = {
    None: _NOTHING,
    type(None): _NOTHING,
    int: _leaf(int, _int),
    float: _leaf(float, _number(exact_float, "float")),
    Decimal: _leaf(Decimal, _number(exact_decimal, "Decimal")),
    str: _leaf(str, _str),
    bytes: _leaf(bytes, _bytes),
    date: _leaf(date, _date),
    bool: _leaf(bool, _bool),
    datetime: Shape("", _moment),  # its class alone does not tell whether one fits
    **{cls: _leaf(cls, _instance(cls)) for cls in (uuid.UUID, bytearray)},
}


# -- Containers ------------------------------------------------------------------------------------------------------


def _fit(shape: Shape, values: Any) -> bool:
    """Returns whether all values are plain and fit, judging by their classes."""
    return shape.classes is None or shape.classes.issuperset(map(type, values))


def _named(origin: type, *inner: Shape) -> str:
    """Returns the name of a container's shape, empty if everything in the container is plain."""
    if not any(shape.name for shape in inner):
        return ""
    return f"{origin.__name__}[{','.join(shape.name or '_' for shape in inner)}]"


def _sequence_shape(origin: Any, args: tuple[Any, ...]) -> Shape:
    item = shape_of(args[0]) if args else _ANYTHING
    if item.name and origin in (set, frozenset):
        raise DeclarationError("a record cannot be the member of a stored set", remedy="use a list or a dict")

    def lower(value: Any) -> Any:
        if not isinstance(value, origin):
            raise misfit(value, origin.__name__)
        return value if _fit(item, value) else origin(map(item.lower, value))

    lifted = item.lift
    lift = None if lifted is None else lambda value: origin(map(lifted, value))
    return Shape(_named(origin, item, *[_ANYTHING] * (len(args) - 1)), lower, lift)


def _tuple_shape(args: tuple[Any, ...]) -> Shape:
    shapes = [shape_of(arg) for arg in args]
    lifts = [shape.lift or _same for shape in shapes]

    def lower(value: Any) -> Any:
        if not isinstance(value, tuple):
            raise misfit(value, "tuple")
        if len(value) != len(shapes):
            raise TypeError(f"a tuple of {len(value)} instead of one of {len(shapes)}")
        return tuple([shape.lower(item) for shape, item in zip(shapes, value, strict=True)])

    def lift(value: Any) -> Any:
        return tuple([lift(item) for lift, item in zip(lifts, value, strict=True)])

    return Shape(_named(tuple, *shapes), lower, lift if any(shape.lift for shape in shapes) else None)


def _dict_shape(args: tuple[Any, ...]) -> Shape:
    keys, values = map(shape_of, args) if args else (_ANYTHING, _ANYTHING)
    if keys.name:
        raise DeclarationError("a record cannot be the key of a stored dict", remedy="use a tuple as key")

    def lower(value: Any) -> Any:
        if not isinstance(value, dict):
            raise misfit(value, "dict")
        if _fit(keys, value) and _fit(values, value.values()):
            return value
        return {keys.lower(key): values.lower(item) for key, item in value.items()}

    lifted = values.lift
    lift = None if lifted is None else lambda value: {key: lifted(item) for key, item in value.items()}
    return Shape(_named(dict, keys, values), lower, lift)


def _array_shape(args: tuple[Any, ...]) -> Shape:
    """Returns the shape of ``numpy.ndarray``, or of ``numpy.typing.NDArray[…]`` with the type of its items."""
    item = array_item(args)

    def lower(value: Any) -> Any:
        if not is_array_type(value.__class__):
            raise misfit(value, "numpy.ndarray")
        if item is not None and not has_items(value, item):
            raise TypeError(f"an array of {value.dtype} instead of one of {item.__name__}")
        return value

    return Shape("", lower)


def _union_shape(type_: Any, args: tuple[Any, ...]) -> Shape:
    shapes = [shape_of(arg) for arg in args]
    records = [shape for shape in shapes if shape.name]
    if records and (len(args) != 2 or type(None) not in args):
        raise DeclarationError(
            f"members of a union with a record cannot be told apart when read: {type_}",
            remedy="use Optional[…] of one record",
        )
    if any(shape.classes is None for shape in shapes):
        return _ANYTHING
    classes = frozenset[type]().union(*[shape.classes for shape in shapes if shape.classes])
    others = [shape for shape in shapes if shape is not _NOTHING]
    # an IntEnum and numpy's ints fit float and Decimal, too, but stay whole numbers where int is declared
    shapes.sort(key=lambda shape: shape in (_LEAVES[float], _LEAVES[Decimal]))

    def lower(value: Any) -> Any:
        if value.__class__ in classes:
            return value
        if len(others) == 1 and value is not None:
            return others[0].lower(value)  # its error describes the fault best
        for shape in shapes:
            try:
                return shape.lower(value)
            except (TypeError, EncodeError):
                continue
        raise misfit(value, str(type_).replace("typing.", ""))

    if not records:
        return Shape("", lower, None, classes)
    lift: Any = records[0].lift
    return Shape(f"{records[0].name}?", lower, lambda value: None if value is None else lift(value), classes)


# -- Records ---------------------------------------------------------------------------------------------------------


class Field:
    """One field of a record, with its declared type and conversions to and from plain data.

    Reading checks only the type of the field's value, not the types of items in that value.
    """

    __slots__ = ("_classes", "_hint", "_widen", "default", "name", "owner", "shape")

    def __init__(self, owner: str, name: str, hint: Any, default: Any) -> None:
        self.owner, self.name, self.default = owner, name, default
        self.shape = shape_of(hint)
        self._hint = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint)
        #: classes of the stored values that fit; None: any class
        self._classes = _classes(hint)
        self._widen: Callable[[Any], Any] | None = None
        if self._classes is not None and int not in self._classes:
            exact = {float: exact_float, Decimal: exact_decimal}
            self._widen = next((exact[cls] for cls in exact if cls in self._classes), None)

    def lower(self, value: Any) -> Any:
        try:
            return self.shape.lower(value)
        except EncodeError as error:
            error.where["field"] = self._path(error)
            raise
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise EncodeError(
                f"{self.owner} declares field {self.name!r} as {self._hint}, but it holds a {type(value).__name__}"
                + (f": {error}" if isinstance(value, CONTAINERS) else ""),
                remedy="declare the field with the type it holds",
                value=shown(value),
                field=self.name,
            ) from error

    def lift(self, plain: Any) -> Any:
        try:
            return self._admit(plain) if self.shape.lift is None else self.shape.lift(plain)
        except DecodeError as error:
            error.where["field"] = self._path(error)
            raise
        except (EncodeError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DecodeError(
                f"stored {self.owner} has a {type(plain).__name__} in field {self.name!r}, declared as {self._hint}"
                + (f": {error.what}" if isinstance(error, EncodeError) else ""),
                remedy=_read_both(plain, str(self._hint)),
                field=self.name,
            ) from error

    def _admit(self, value: Any) -> Any:
        """Returns ``value``, perhaps widened.

        Raises TypeError for a value that does not fit, and EncodeError for an int that no value of the wider type
        equals.
        """
        classes = self._classes
        cls = value.__class__
        if classes is None or cls in classes:
            return value
        if self._widen is not None and isinstance(value, int) and cls is not bool:
            return self._widen(value)
        # as in the coders of these types, a bool is not a number and a datetime is not a date
        if cls in (bool, datetime) or not isinstance(value, tuple(classes)):
            raise TypeError(f"{cls.__name__} does not fit")
        return value

    def _path(self, error: EncodeError | DecodeError) -> str:
        inner = error.where.get("field")
        return self.name if inner is None else f"{self.name}.{inner}"


def _read_both(plain: Any, hint: str) -> str:
    """Returns a remedy for a stored value that is not of the declared type.

    Declaring only the old type does not help, because values of the new type may have been stored since.
    """
    migrate = "write migrate_state and raise state_version"
    if not isinstance(plain, bool | int | float | str | bytes):
        return migrate
    return f"declare it as {type(plain).__name__} | {hint}, which reads both, or {migrate}; then deploy"


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
    """Lowers a record to its stored form ``{field: plain value}``, and lifts that form to a record.

    ``immutable`` is true if neither the instance nor anything in it can change in place.
    """

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.name = f"struct:{cls.__name__}"
        self.immutable = is_immutable(cls)
        self._build = builder(cls)
        self._fields: list[Field] = []

    @classmethod
    def of(cls, record: type) -> RecordShape:
        """Returns the shape of a class, the same one at each call.

        Raises DeclarationError if the class is not a record, or a field has no coder.

        The class may contain itself, so it is registered before its fields are read.
        """
        if not is_record(record):
            raise DeclarationError(
                f"{record!r} is not a record", remedy="use a dataclass, a msgspec.Struct or a pydantic model"
            )
        known = _records.get(record)
        if known is None:
            known = _records[record] = cls(record)
            try:
                missing = defaults(record)
                fields = hints(record).items()
                known._fields = [Field(record.__name__, name, hint, missing[name]) for name, hint in fields]
            except DeclarationError:
                del _records[record]
                raise
        return known

    def lower(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, self.cls):
            raise EncodeError(
                f"a value has type {type(value).__name__}, but {self.cls.__name__} is declared",
                remedy=f"store a {self.cls.__name__}, or declare the type of the value",
            )
        if value.__class__ is not self.cls:
            self._check_subclass(value.__class__)
        return {field.name: field.lower(getattr(value, field.name)) for field in self._fields}

    def _check_subclass(self, cls: type) -> None:
        """Checks that a subclass has no fields of its own, which would be lost. Raises EncodeError."""
        more = [name for name in field_names(cls) if all(name != field.name for field in self._fields)]
        if more:
            raise EncodeError(
                f"a {cls.__name__} has fields that {self.cls.__name__}, the declared class, lacks: {', '.join(more)}",
                remedy=f"declare the type of the value, or store a {self.cls.__name__}",
            )

    def lift(self, plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise DecodeError(
                f"stored data is not a {self.cls.__name__}",
                remedy="if it was written under another declaration, write migrate_state and raise state_version",
                found=type(plain).__name__,
            )
        values = {}
        for field in self._fields:
            if field.name in plain:
                values[field.name] = field.lift(plain[field.name])
            elif field.default is REQUIRED:
                raise DecodeError(
                    f"stored {self.cls.__name__} has no field {field.name!r} and the field has no default",
                    remedy="give the new field a default, or write migrate_state and raise state_version",
                    field=field.name,
                )
            elif field.default is not None:
                values[field.name] = field.default()
        return self._build(values)


_records: dict[type, RecordShape] = {}
