"""Stored states: their schemas and entries, and the register of states that are addressed at run time.

A state is addressed at run time by a namespace, and by a *tag*: a declaration that need not be an attribute of the
operator. The description of such a declaration is stored with the data (:class:`TagRegister`), so that a process that
does not know it can use a stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stateflow.changes import Mutations
from stateflow.errors import DeclarationError, DecodeError, SchemaMismatch
from stateflow.state import encoding
from stateflow.state.cells import (
    CELL,
    TAGS,
    Namespace,
    decode_row_key,
    pack_cell,
    split_address,
    unpack_cell,
    unpack_cell_with_expiry,
)
from stateflow.state.coders import Coder, Int64
from stateflow.state.collection import Collection
from stateflow.state.declare import NOTHING, Declaration, tracked_class
from stateflow.state.shapes import Verdict, spelled, verdict
from stateflow.state.spec import DECODE_FAILURES, CellReader, StateSpec, Ttl

# -- Schemas and entries ---------------------------------------------------------------------------------------------


def check_schema(stored: list[dict[str, Any]], declared: list[dict[str, Any]], operator: str) -> None:
    """Compares two :meth:`.KeyedState.schema`. Added and dropped states are fine.

    Raises SchemaMismatch if a state is stored with another kind, coder or type than declared.

    >>> check_schema([], [], "Count")
    """
    before = {each["name"]: each for each in stored}
    for now in declared:
        was = before.get(now["name"], now)
        if was["tag"] != now["tag"] or types_become(was, now) is not Verdict.KEPT:
            raise SchemaMismatch(
                f"state {now['name']!r} is stored as {_signature(was)} but declared as {_signature(now)}",
                remedy="declare it as it is stored, give the new state another name=, or write migrate_state and raise "
                "state_version",
                operator=operator,
                state=now["name"],
            )


def types_become(was: dict[str, Any], now: dict[str, Any]) -> Verdict:
    """Compares a state's stored types with those of another description with the same tag.

    Values that were stored without their types count as KEPT.
    """
    both = zip(was.get("types", ()), now.get("types", ()), strict=False)
    return max((verdict(*each) for each in both), default=Verdict.KEPT)


def _signature(described: dict[str, Any]) -> str:
    types = [spelled(each) for each in described.get("types", described["coders"])]
    return f"{described['kind']}({', '.join(types)})"


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One stored entry of a state.

    Attributes:
        entry: the map key, the set member or the index in a list; None for a single value.
        value: None for a set.
        expiry_us: when it expires, in the state's ttl domain; None: never.

    Example: ``[each.value for each in scan_entries(declaration, store) if each.key == "N14228"]``
    """

    key: Any
    namespace: Namespace
    entry: Any
    value: Any
    expiry_us: int | None


def scan_entries(
    declaration: Declaration,
    reader: CellReader,
    *,
    processing_us: int | None = None,
    event_us: int | None = None,
) -> Iterator[StoredEntry]:
    """Yields every stored entry of one state, in all namespaces, in address order.

    For a state with ttl, entries that have expired at the given time of its domain are left out; without that time they
    are included. Raises DecodeError, which names state, key and entry.

    Example: ``[(each.key, each.value) for each in scan_entries(declaration, store)]``
    """
    spec = StateSpec("", declaration.name, declaration.coder, key_coder=declaration.key_coder)
    now = _time_of(declaration, processing_us, event_us)
    row, index, start = b"", 0, len(CELL) + len(declaration.tag)
    for address, data in reader.scan(CELL + declaration.tag):
        key, namespace, entry = split_address(address)
        before, row = row, address[start : len(address) - len(entry)]
        if row != before:
            index = 0
        try:
            payload, expiry = unpack_cell_with_expiry(data)
            if now is not None and expiry is not None and expiry <= now:
                continue
            where: Any = None
            if declaration.kind == "list":
                where, index = index, index + 1
            elif declaration.key_coder is not None:
                where = declaration.key_coder.decode_key(entry)
            value = declaration.coder.decode(payload)
        except DECODE_FAILURES as error:
            raise spec.decode_error(error, row, entry=entry.hex()) from error
        yield StoredEntry(decode_row_key(key), Namespace(namespace), where, value, expiry)


def check_cell(declaration: Declaration, address: bytes, data: bytes) -> None:
    """Decodes one stored cell of a state, expired or not. Raises DecodeError, which names state, key and entry.

    Example: ``check_cell(declaration, address, data)``
    """
    key, _, entry = split_address(address)
    row = address[len(CELL) + len(declaration.tag) : len(address) - len(entry)]
    try:
        payload, _ = unpack_cell_with_expiry(data)
        if declaration.kind != "list" and declaration.key_coder is not None:
            declaration.key_coder.decode_key(entry)
        declaration.coder.decode(payload)
        decode_row_key(key)
    except DECODE_FAILURES as error:
        spec = StateSpec("", declaration.name, declaration.coder, key_coder=declaration.key_coder)
        raise spec.decode_error(error, row, entry=entry.hex()) from error


def scan_state(
    declaration: Declaration,
    reader: CellReader,
    *,
    namespace: bytes = b"",
    processing_us: int | None = None,
    event_us: int | None = None,
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields ``(key, entry, value)`` of :func:`scan_entries` for one namespace.

    Example: ``for key, entry, value in scan_state(declaration, store): ...``
    """
    for stored in scan_entries(declaration, reader, processing_us=processing_us, event_us=event_us):
        if stored.namespace == namespace:
            yield stored.key, stored.entry, stored.value


def _time_of(declaration: Declaration, processing_us: int | None, event_us: int | None) -> int | None:
    if declaration.ttl is None:
        return None
    return processing_us if declaration.ttl.domain == "processing" else event_us


def stored_tags(reader: CellReader) -> dict[bytes, dict[str, Any]]:
    """Returns the states that were made at run time: tag → :meth:`Declaration.describe`.

    Example: ``stored_tags(store).values()``
    """
    return {cell[len(TAGS) :]: encoding.loads(unpack_cell(data)) for cell, data in reader.scan(TAGS)}


def tag_cell(declaration: Declaration) -> tuple[bytes, bytes]:
    """Returns the (address, cell) that makes a run-time tag known to :func:`stored_tags`."""
    return TAGS + declaration.tag, pack_cell(encoding.dumps(declaration.describe()))


# -- States addressed at run time ------------------------------------------------------------------------------------


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

    A tag is stored together with the first cell under it, so that a process that does not know the declaration can also
    empty its namespaces and sweep it. It is stored again when it is declared with another ttl.
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
