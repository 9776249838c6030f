"""Functions that declare states in the body of an operator class, as in ``flights = state.value(int, default=0)``.

``value``, ``map``, ``set``, ``list``, ``reducing`` and ``counter`` make a :class:`Declaration`. All raise
DeclarationError for a type without a coder, and have these arguments:

- ``name``: the stored name; by default, the name of the attribute;
- ``ttl``: seconds, or a timedelta, after which stored data expires (entries of maps, sets and lists expire one by one);
- ``ttl_domain``: the time that counts, "processing" or "event";
- ``ttl_refresh``: whether the ttl counts from the last write ("write"), or from the last write or read ("read_write").

The declared type decides the coder (:func:`coder_for`). Kind, coder and ttl decide the class of the tracked objects
(:func:`tracked_class`).
"""

from __future__ import annotations

import builtins
import inspect
import typing
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, Literal, TypeVar, cast
from uuid import UUID

from stateflow.errors import DeclarationError, DecodeError, EncodeError, UnknownState
from stateflow.state import coders, encoding
from stateflow.state.cells import tag_of
from stateflow.state.coders import Coder, Int64
from stateflow.state.expiring import (
    CanonicalExpiringMap,
    CanonicalExpiringSet,
    ExpiringCounter,
    ExpiringList,
    ExpiringMap,
    ExpiringReducing,
    ExpiringSet,
    ExpiringValue,
)
from stateflow.state.shapes import Signature
from stateflow.state.tracked import (
    Domain,
    MutableTrackedReducing,
    MutableTrackedValue,
    Refresh,
    TrackedCounter,
    TrackedReducing,
    TrackedValue,
    Ttl,
)
from stateflow.state.tracked_list import TrackedList
from stateflow.state.tracked_map import CanonicalTrackedMap, CanonicalTrackedSet, TrackedMap, TrackedSet

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

Kind = Literal["value", "map", "set", "list", "reducing", "counter"]

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

# -- Coders of declared types ----------------------------------------------------------------------------------------


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
    type_ = encoding.bare(type_)
    scalar = _SCALARS.get(type_) if isinstance(type_, type) else None
    if scalar is not None:
        return scalar()
    if encoding.is_record(type_):
        return coders.Struct(type_)
    if typing.get_origin(type_) is tuple:
        args = typing.get_args(type_)
        if args and args[-1] is Ellipsis:
            return coders.Tuple((coder_for(args[0]),), variadic=True)
        return coders.Tuple(tuple(coder_for(arg) for arg in args))
    return coders.Msgpack(type_)


# -- Declarations ----------------------------------------------------------------------------------------------------


class Nothing(Coder[None]):
    """The coder for the values of a set's cells, which have no bytes."""

    name = "nothing"
    mutable = False
    exact = builtins.type(None)

    def encode(self, value: None) -> bytes:
        return b""

    def decode(self, data: bytes) -> None:
        return None


NOTHING: Final = Nothing()
_PLACES: Final = Int64()
_SIGNATURES: dict[type[Coder[Any]], Signature] = {
    coders.Int64: "int",
    coders.Float64: "float",
    coders.Bool: "bool",
    coders.Utf8: "str",
    coders.Bytes: "bytes",
    coders.Timestamp: "datetime",
    coders.Date: "date",
    coders.Decimal: "Decimal",
    coders.UUID: "UUID",
    Nothing: "None",
}


def signature_of_coder(coder: Coder[Any]) -> Signature:
    """Returns the signature of the type that a coder encodes; "any" if that type is unknown."""
    if isinstance(coder, coders.Tuple):
        return ["tuple" if coder.arity is not None else "tuple...", *(signature_of_coder(item) for item in coder.items)]
    return _SIGNATURES.get(type(coder), coder.types if coder.types is not None else "any")


def _is_name(text: str) -> bool:
    try:
        return b"\0" not in text.encode() and text != ""
    except UnicodeEncodeError:
        return False


class Declaration:
    """One declared state.

    A declaration is a non-data descriptor. While a key is bound, a tracked object in the instance's ``__dict__`` hides
    the declaration; otherwise reading the attribute raises UnknownState.

    Attributes:
        name: the stored name, by default that of the attribute. A declaration with a name of its own can be used at run
            time, as a *tag*, without being an attribute of an operator.
        kind: name of the function that made it, such as ``value`` or ``map``.
        coder: coder of the value, the map's values or the list's elements.
        key_coder: coder of map keys, set members and positions in a list; None for a value.
        default_payload: the encoded default of a value; None: no default.
        ttl: time to live of stored data; None: nothing expires.
        reduce: the function of a reducing state.

    >>> Declaration("value", coder_for(int), default=0, name="n").name
    'n'
    """

    __slots__ = ("_tag", "attribute", "coder", "default_payload", "key_coder", "kind", "name", "reduce", "ttl")

    def __init__(
        self,
        kind: Kind,
        coder: Coder[Any],
        *,
        key_coder: Coder[Any] | None = None,
        default: Any = None,
        name: str | None = None,
        ttl: Ttl | None = None,
        reduce: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        if name is not None and not (isinstance(name, str) and _is_name(name)):
            raise DeclarationError(
                f"{ascii(name)[:80]} cannot name a state", remedy="use non-empty Unicode text without NUL"
            )
        if key_coder is not None and not key_coder.deterministic:
            raise DeclarationError(
                f"coder {key_coder.name} cannot encode {'map keys' if kind == 'map' else 'set members'}: "
                "equal keys may have different bytes",
                remedy="use str, int, float, bool, bytes, date, datetime, Decimal, UUID or tuple[…] of them",
            )
        self.kind: Kind = kind
        self.coder = coder
        self.key_coder = key_coder
        self.name = name or ""
        self.ttl = ttl
        self.reduce = reduce
        self.attribute = ""
        self._tag = b""
        try:
            self.default_payload = None if default is None else coder.encode(default)
        except EncodeError as error:
            raise DeclarationError(
                f"the default {default!r} does not fit {coder.declared}",
                remedy="declare the state with the type of its default",
            ) from error

    def __set_name__(self, owner: builtins.type, attribute: str) -> None:
        if not self.attribute:
            self.attribute = attribute
            self.name = self.name or attribute
            self._tag = b""

    def __get__(self, instance: object | None, owner: builtins.type | None = None) -> Any:
        if instance is None:
            return self
        raise UnknownState(
            f"state {self.name!r} was read while no key is bound",
            remedy="use it in process(), process_batch() or on_timer(); on_watermark(), open() and close() have no key",
            operator=builtins.type(instance).__name__,
        )

    @property
    def coders(self) -> tuple[Coder[Any], ...]:
        """Coders of the stored cells; the key coder, if the kind has one, is the first."""
        if self.key_coder is None or self.kind == "list":
            return (self.coder,)
        return (self.key_coder,) if self.kind == "set" else (self.key_coder, self.coder)

    @property
    def tag(self) -> bytes:
        """8-byte hash, part of the address of each cell of this state."""
        if not self._tag:
            self._tag = tag_of(self.name, self.kind, tuple(coder.name for coder in self.coders))
        return self._tag

    def describe(self) -> dict[str, Any]:
        """Returns a JSON-able description: ``{"name", "kind", "coders": [names], "tag": hex}``.

        If the coder names do not determine all types, ``"types"`` contains a signature for each coder, see
        :mod:`stateflow.state.shapes`. If there is a ttl, ``"ttl"`` is ``{"us", "domain", "refresh"}``.
        """
        coders = [coder.name for coder in self.coders]
        described: dict[str, Any] = {"name": self.name, "kind": self.kind, "coders": coders, "tag": self.tag.hex()}
        if any(coder.types is not None for coder in self.coders):
            described["types"] = [coder.name if coder.types is None else coder.types for coder in self.coders]
        if self.ttl is not None:
            described["ttl"] = {"us": self.ttl.us, "domain": self.ttl.domain, "refresh": self.ttl.refresh}
        return described

    def __repr__(self) -> str:
        return f"<state {self.name or '?'}: {self.kind}({', '.join(coder.name for coder in self.coders)})>"


# -- Stand-ins -------------------------------------------------------------------------------------------------------


class Opaque(Coder[bytes]):
    """A coder that returns stored bytes unchanged, for a state whose declaration this process does not know yet."""

    name = "opaque"
    deterministic = True
    natural_order = True
    mutable = False
    exact = exact_key = bytes

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, data: bytes) -> bytes:
        return data


def stand_in(tag: bytes, described: dict[str, Any]) -> Declaration:
    """Returns a declaration that suffices to empty and to sweep a state that another process made at run time.

    Args:
        described: the state's :meth:`Declaration.describe`.

    Raises DecodeError.
    """
    try:
        kind, lives = described["kind"], Ttl.described(described.get("ttl"))
        keys: dict[str, Coder[Any]] = {"map": Opaque(), "set": Opaque(), "list": Int64()}
        coder = NOTHING if kind == "set" else Opaque()
        declaration = Declaration(kind, coder, key_coder=keys.get(kind), name=described["name"], ttl=lives)
    except (KeyError, TypeError, AttributeError, DeclarationError) as error:
        raise DecodeError(
            "the stored declaration of a state made at run time cannot be read",
            remedy="restore a checkpoint",
            tag=tag.hex(),
        ) from error
    declaration._tag = tag
    return declaration


# -- Functions that declare states -----------------------------------------------------------------------------------


def value(
    type_: type[T],
    default: T | None = None,
    *,
    coder: Coder[T] | None = None,
    name: str | None = None,
    ttl: float | timedelta | None = None,
    ttl_domain: Domain = "processing",
    ttl_refresh: Refresh = "write",
) -> TrackedValue[T]:
    """Declares one variable for each key. Each key gets its own copy of a mutable default.

    Raises DeclarationError for a type without a coder and for a default that the coder cannot encode.

    Example: ``flights = state.value(int, default=0)``, then ``self.flights.value += 1``.
    """
    lives = Ttl.of(ttl, ttl_domain, ttl_refresh)
    return cast(TrackedValue[T], Declaration("value", coder or coder_for(type_), default=default, name=name, ttl=lives))


def map(
    key_type: type[K],
    value_type: type[V],
    *,
    key_coder: Coder[K] | None = None,
    coder: Coder[V] | None = None,
    name: str | None = None,
    ttl: float | timedelta | None = None,
    ttl_domain: Domain = "processing",
    ttl_refresh: Refresh = "write",
) -> TrackedMap[K, V]:
    """Declares a dict for each key. ``coder`` is for the values.

    Raises DeclarationError for a type without a coder, and for a key type without a deterministic coder.

    Example: ``delay_by_dest = state.map(str, float)``, then ``self.delay_by_dest["IAH"] = 11.0``.
    """
    keys, lives = key_coder or coder_for(key_type), Ttl.of(ttl, ttl_domain, ttl_refresh)
    declaration = Declaration("map", coder or coder_for(value_type), key_coder=keys, name=name, ttl=lives)
    return cast(TrackedMap[K, V], declaration)


def set(
    type_: type[T],
    *,
    coder: Coder[T] | None = None,
    name: str | None = None,
    ttl: float | timedelta | None = None,
    ttl_domain: Domain = "processing",
    ttl_refresh: Refresh = "write",
) -> TrackedSet[T]:
    """Declares a set for each key. Raises DeclarationError for a member type without a deterministic coder.

    Example: ``carriers = state.set(str)``, then ``self.carriers.add("UA")``.
    """
    members, lives = coder or coder_for(type_), Ttl.of(ttl, ttl_domain, ttl_refresh)
    return cast(TrackedSet[T], Declaration("set", NOTHING, key_coder=members, name=name, ttl=lives))


def list(
    type_: type[T],
    *,
    coder: Coder[T] | None = None,
    name: str | None = None,
    ttl: float | timedelta | None = None,
    ttl_domain: Domain = "processing",
    ttl_refresh: Refresh = "write",
) -> TrackedList[T]:
    """Declares a list for each key, of elements of ``type_``.

    Example: ``recent = state.list(float)``, then ``self.recent.append(21.5)``.
    """
    elements, lives = coder or coder_for(type_), Ttl.of(ttl, ttl_domain, ttl_refresh)
    return cast(TrackedList[T], Declaration("list", elements, key_coder=_PLACES, name=name, ttl=lives))


def reducing(
    type_: type[T],
    fn: Callable[[T, T], T],
    *,
    coder: Coder[T] | None = None,
    name: str | None = None,
    ttl: float | timedelta | None = None,
    ttl_domain: Domain = "processing",
    ttl_refresh: Refresh = "write",
) -> TrackedReducing[T]:
    """Declares one value for each key: all added values, reduced by ``fn(so far, new)``, such as ``max``.

    Example: ``highest = state.reducing(float, max)``, then ``self.highest.add(21.5)``.
    """
    if not callable(fn):
        raise DeclarationError(f"{fn!r} is not callable", remedy="pass a function of two values")
    lives = Ttl.of(ttl, ttl_domain, ttl_refresh)
    declaration = Declaration("reducing", coder or coder_for(type_), name=name, ttl=lives, reduce=fn)
    return cast(TrackedReducing[T], declaration)


def counter(
    *,
    name: str | None = None,
    ttl: float | timedelta | None = None,
    ttl_domain: Domain = "processing",
    ttl_refresh: Refresh = "write",
) -> TrackedCounter:
    """Declares a 64-bit whole number for each key, which is 0 at first.

    Example: ``readings = state.counter()``, then ``self.readings.add(1)``.
    """
    lives = Ttl.of(ttl, ttl_domain, ttl_refresh)
    return cast(TrackedCounter, Declaration("counter", Int64(), default=0, name=name, ttl=lives))


def declarations_of(cls: builtins.type) -> dict[str, Declaration]:
    """Returns the states of an operator class by attribute, base classes first. An overridden attribute counts once.

    Raises DeclarationError if two attributes share a stored name.

    >>> class Count:
    ...     n = value(int, default=0)
    >>> declarations_of(Count)["n"].kind
    'value'
    """
    found: dict[str, Declaration] = {}
    for base in reversed(inspect.getmro(cls)):
        for attribute, member in vars(base).items():
            if isinstance(member, Declaration):
                found[attribute] = member
            else:
                found.pop(attribute, None)
    check_names(found, cls.__name__)
    return found


def check_names(declarations: dict[str, Declaration], operator: str) -> None:
    """Checks that every declaration has a stored name of its own. Raises DeclarationError."""
    seen: dict[str, str] = {}
    for attribute, declaration in declarations.items():
        if not declaration.name:
            raise DeclarationError(
                f"the state at {attribute!r} has no name",
                remedy="declare it in the class body, or pass name=",
            )
        other = seen.setdefault(declaration.name, attribute)
        if other != attribute:
            raise DeclarationError(
                f"attributes {other!r} and {attribute!r} are both stored as {declaration.name!r}",
                remedy="declare each state separately, with its own name=",
                operator=operator,
            )


# -- Classes of tracked objects --------------------------------------------------------------------------------------


def tracked_class(declaration: Declaration) -> Any:
    expires, mutable = declaration.ttl is not None, declaration.coder.mutable
    canonical = declaration.key_coder is not None and not declaration.key_coder.python_equality
    match declaration.kind:
        case "value":
            return ExpiringValue if expires else MutableTrackedValue if mutable else TrackedValue
        case "reducing":
            return ExpiringReducing if expires else MutableTrackedReducing if mutable else TrackedReducing
        case "counter":
            return ExpiringCounter if expires else TrackedCounter
        case "list":
            return ExpiringList if expires else TrackedList
        case "map":
            if canonical:
                return CanonicalExpiringMap if expires else CanonicalTrackedMap
            return ExpiringMap if expires else TrackedMap
        case "set":
            if canonical:
                return CanonicalExpiringSet if expires else CanonicalTrackedSet
            return ExpiringSet if expires else TrackedSet
