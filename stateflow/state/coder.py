"""The contract of a coder, which turns one value, or one map key, into bytes and back. Never pickle.

Every coder has a *value form* (``encode``/``decode``) and, when ``deterministic``, a *key form*
(``encode_key``/``decode_key``) in which equal keys have equal bytes and byte order is value order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from stateflow.errors import DecodeError, EncodeError
from stateflow.state.signature import Signature, spelled
from stateflow.types import shown

T = TypeVar("T")


def wrong_type(coder: Coder[Any], value: object, why: str = "") -> EncodeError:
    kind = type(value).__name__
    return EncodeError(
        f"a value of type {kind} does not fit {coder.declared}{why and f': {why}'}",
        remedy="declare the state with the type you store, or convert the value before storing it",
        value=shown(value),
    )


class Coder(ABC, Generic[T]):
    """Encodes and decodes the values of one type. Subclass it for types of your own and pass it as ``coder=``.

    Attributes:
        name: stable identity. It is part of the address of every stored cell: change it, and the data stored under the
            old name is another state.
        deterministic: equal values have equal bytes, so that the coder may code map keys and set members.
        natural_order: the key form sorts exactly as Python's ``<`` sorts the decoded keys.
        fixed_width: every value form is a few bytes long, so that no value can be too long to store.
        python_equality: keys with equal bytes are equal in Python too (not so some datetimes in two zones).
        mutable: a decoded value can be changed in place.
        exact: the type whose own instances come back from a round trip unchanged; None: any value may come back
            different (another time zone, a list for a subclass of list).
        exact_key: the same for the key form.

    Example: ``class Point(Coder[complex]): ...``, and then ``state.value(complex, coder=Point())``.
    """

    name: str
    deterministic: bool = False
    natural_order: bool = False
    fixed_width: bool = False
    python_equality: bool = True
    mutable: bool = True
    exact: type | None = None
    exact_key: type | None = None
    #: signature of the declared type; None: the name tells all of it
    types: Signature | None = None

    @property
    def declared(self) -> str:
        """The declared type as error messages spell it."""
        return f"coder {self.name}" if self.types is None else spelled(self.types)

    @abstractmethod
    def encode(self, value: T) -> bytes:
        """Encodes a value. Raises EncodeError when the value does not fit."""

    @abstractmethod
    def decode(self, data: bytes) -> T:
        """Decodes the value form. Raises DecodeError when the bytes do not fit."""

    def encode_key(self, value: T) -> bytes:
        """Encodes a key. Raises EncodeError when the value does not fit or has no place in an order (NaN)."""
        if not self.deterministic:
            raise EncodeError(f"coder {self.name} cannot encode keys", remedy="choose a key type with an order")
        return self.encode(value)

    def decode_key(self, data: bytes) -> T:
        return self.decode(data)

    def find_key(self, value: object) -> T | None:
        """Returns the key of this coder that *equals* a value of another type (1 for 1.0); None: there is none."""
        return None

    def lifted(self, plain: Any) -> T:
        """Returns the value for plain data in which records are dicts of their fields."""
        value: T = plain
        return value

    def __repr__(self) -> str:
        return f"<coder {self.name}>"


def bad_bytes(coder: Coder[Any], data: bytes, error: Exception | None = None) -> DecodeError:
    return DecodeError(
        f"stored bytes do not fit coder {coder.name}",
        remedy="the data was written under another declaration or is damaged; restore a checkpoint",
        bytes=data[:32].hex(),
        reason=error,
    )
