"""States addressed at run time: by a declaration that need not be an attribute of the operator, and a namespace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stateflow.changes import Mutations
from stateflow.errors import DeclarationError
from stateflow.state.cells import CELL, COUNT, TAGS, range_end
from stateflow.state.classes import tracked_class
from stateflow.state.declare import Declaration
from stateflow.state.spec import CellReader, StateSpec
from stateflow.state.stored import stored_tags, tag_cell


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


class Erasure:
    """A tag that this process has no declaration of, emptied under one key and namespace.

    Stands among the written objects of a batch.
    """

    def __init__(self, tag: bytes, row: bytes, reader: CellReader) -> None:
        self._tag, self._row, self._reader = tag, row, reader

    def _collect(self, into: Mutations) -> None:
        cells, count = CELL + self._tag + self._row, COUNT + self._tag + self._row
        if self._reader.get(count) is not None:
            into.deletes.append(count)
            into.clears.append((cells, range_end(cells)))
        elif self._reader.get(cells) is not None:
            into.deletes.append(cells)

    def _settle(self) -> None:
        pass

    def _forget(self) -> None:
        pass


class TagRegister:
    """Which tags were made at run time, in the store and not there yet.

    A tag is put there together with the first cell under it, so that a process that has not met it can empty
    a namespace of it too.
    """

    def __init__(self, reader: CellReader) -> None:
        self._reader = reader
        self._made: dict[bytes, Declaration] = {}
        self._unrecorded: dict[bytes, Declaration] = {}
        self._recording: list[bytes] = []
        self._stored: dict[bytes, dict[str, Any]] | None = None

    def add(self, declaration: Declaration) -> None:
        self._made[declaration.tag] = declaration
        if self._reader.get(TAGS + declaration.tag) is None:
            self._unrecorded[declaration.tag] = declaration

    def stored(self) -> dict[bytes, dict[str, Any]]:
        if self._stored is None:
            self._stored = stored_tags(self._reader)
        return self._stored

    def collect(self, into: Mutations) -> None:
        if self._unrecorded:
            used = {address[1:9] for address, _ in into.puts}
            self._recording = [tag for tag in self._unrecorded if tag in used]
            into.puts += [tag_cell(self._unrecorded[tag]) for tag in self._recording]

    def settle(self) -> None:
        for tag in self._recording:
            del self._unrecorded[tag]
        self._recording = []

    def forget(self) -> None:
        self._recording = []

    def invalidate(self) -> None:
        """The store was changed underneath."""
        self._stored = None
        self._recording = []
        self._unrecorded = {tag: each for tag, each in self._made.items() if self._reader.get(TAGS + tag) is None}
