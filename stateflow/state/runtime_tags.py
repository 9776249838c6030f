"""States addressed at run time: by a declaration that need not be an attribute of the operator, and a namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stateflow.changes import Mutations
from stateflow.errors import DeclarationError, DecodeError
from stateflow.state.classes import tracked_class
from stateflow.state.coder import Coder
from stateflow.state.coders import Int64
from stateflow.state.collection import Collection
from stateflow.state.declare import NOTHING, Declaration
from stateflow.state.spec import CellReader, StateSpec
from stateflow.state.stored import stored_tags, tag_cell
from stateflow.state.ttl import Ttl


@dataclass(frozen=True, slots=True)
class Tag:
    """One state of a partition.

    Attributes:
        attribute: of the operator; None for a state it does not declare.
    """

    declaration: Declaration
    spec: StateSpec
    attribute: str | None

    def make(self, row: bytes) -> Any:
        """The tracked object of one key and namespace."""
        return tracked_class(self.declaration)._bound(self.spec, row)

    def check(self, declaration: Declaration, operator: str) -> None:
        """Raises DeclarationError for a declaration of the same cells that means something else by them."""
        mine = self.declaration
        if (mine.default_payload, mine.ttl) != (declaration.default_payload, declaration.ttl):
            raise DeclarationError(
                f"state {mine.name!r} is declared twice, with another default or ttl",
                remedy="make each tag once, at module or class level",
                operator=operator,
                state=mine.name,
            )


class Opaque(Coder[bytes]):
    """Bytes as they are stored: of a state whose declaration this process has not met."""

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
    """For a state that some process made at run time and this one has not met: enough to empty it and to sweep it.

    Args:
        described: what :meth:`Declaration.describe` says of it.

    Raises DecodeError.
    """
    try:
        kind, lives = described["kind"], Ttl.described(described.get("ttl"))
        keys: dict[str, Coder[Any]] = {"map": Opaque(), "set": Opaque(), "list": Int64()}
        coder = NOTHING if kind == "set" else Opaque()
        declaration = Declaration(kind, coder, key_coder=keys.get(kind), name=described["name"], ttl=lives)
    except (KeyError, TypeError, AttributeError, DeclarationError) as error:
        raise DecodeError(
            "what is stored of a state made at run time cannot be read", remedy="restore a checkpoint", tag=tag.hex()
        ) from error
    declaration._tag = tag
    return declaration


def is_empty(tracked: Any) -> bool:
    """Of an object that was written in this batch."""
    return tracked._count == 0 if isinstance(tracked, Collection) else tracked._now is None


class TagRegister:
    """Which tags were made at run time, in the store and not there yet.

    A tag is put there together with the first cell under it, so that a process that has not met it can empty
    a namespace of it too, and sweep it; and again when it is declared with another ttl.
    """

    def __init__(self, reader: CellReader) -> None:
        self._reader = reader
        self._made: dict[bytes, Declaration] = {}
        #: tag → whether something else is stored of it
        self._unrecorded: dict[bytes, bool] = {}
        self._recording: list[bytes] = []

    def add(self, declaration: Declaration) -> None:
        self._made[declaration.tag] = declaration
        address, cell = tag_cell(declaration)
        stored = self._reader.get(address)
        if stored != cell:
            self._unrecorded[declaration.tag] = stored is not None

    def stored(self) -> dict[bytes, dict[str, Any]]:
        return stored_tags(self._reader)

    def collect(self, into: Mutations) -> None:
        if self._unrecorded:
            used = {address[1:9] for address, _ in into.puts}
            self._recording = [tag for tag, differs in self._unrecorded.items() if differs or tag in used]
            into.puts += [tag_cell(self._made[tag]) for tag in self._recording]

    def saved(self) -> None:
        for tag in self._recording:
            del self._unrecorded[tag]
        self._recording = []

    def forget(self) -> None:
        self._recording = []

    def invalidate(self) -> None:
        """The store was changed underneath."""
        self._recording = []
        self._unrecorded = {}
        for declaration in self._made.values():
            self.add(declaration)
