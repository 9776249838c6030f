"""States addressed at run time: by a namespace, and by a declaration that need not be an attribute of the operator."""

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
        attribute: its name in the operator; None: the operator does not declare the state.
    """

    declaration: Declaration
    spec: StateSpec
    attribute: str | None

    def make(self, row: bytes) -> Any:
        """Returns a new tracked object for one key and namespace."""
        return tracked_class(self.declaration)._bound(self.spec, row)

    def check(self, declaration: Declaration, operator: str) -> None:
        """Checks that a declaration of the same cells has the same default and ttl. Raises DeclarationError."""
        mine = self.declaration
        if (mine.default_payload, mine.ttl) != (declaration.default_payload, declaration.ttl):
            raise DeclarationError(
                f"state {mine.name!r} is declared twice, with another default or ttl",
                remedy="make each tag once, at module or class level",
                operator=operator,
                state=mine.name,
            )


class Opaque(Coder[bytes]):
    """Bytes as they are stored, for a state whose declaration this process does not know yet."""

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
    """Returns a declaration for a state that another process made at run time and this one does not know yet.

    It suffices to empty the state and to sweep it.

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


def is_empty(tracked: Any) -> bool:
    """Returns whether an object that was written in this batch is empty now."""
    return tracked._count == 0 if isinstance(tracked, Collection) else tracked._now is None


class TagRegister:
    """Keeps track of the tags that were made at run time, and of those not in the store yet.

    A tag is stored together with the first cell under it, so that a process that does not know the declaration can
    empty its namespaces, and sweep it, too. It is stored again when it is declared with another ttl.
    """

    def __init__(self, reader: CellReader) -> None:
        self._reader = reader
        self._made: dict[bytes, Declaration] = {}
        #: tags to be stored → whether another description of the tag is stored
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
        """Compares all tags with the store again, because the store was changed underneath."""
        self._recording = []
        self._unrecorded = {}
        for declaration in self._made.values():
            self.add(declaration)
