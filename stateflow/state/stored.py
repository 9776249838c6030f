"""Reads the contents of a store: state schemas, run-time tags, and the entries of a state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stateflow.errors import SchemaMismatch
from stateflow.state import msgpack_codec
from stateflow.state.cells import (
    CELL,
    TAGS,
    decode_row_key,
    pack_cell,
    split_address,
    unpack_cell,
    unpack_cell_with_expiry,
)
from stateflow.state.declare import Declaration
from stateflow.state.namespace import Namespace
from stateflow.state.signature import Verdict, spelled, verdict
from stateflow.state.spec import DECODE_FAILURES, CellReader, StateSpec


def check_schema(stored: list[dict[str, Any]], declared: list[dict[str, Any]], operator: str) -> None:
    """Compares two :meth:`KeyedState.schema`. Added and dropped states are fine.

    Raises SchemaMismatch when a state is stored with another kind, coder or type than declared.

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
    """Returns what the stored values of a state are under another description with the same tag.

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
    return {cell[len(TAGS) :]: msgpack_codec.loads(unpack_cell(data)) for cell, data in reader.scan(TAGS)}


def tag_cell(declaration: Declaration) -> tuple[bytes, bytes]:
    """Returns the (address, cell) that makes a run-time tag known to :func:`stored_tags`."""
    return TAGS + declaration.tag, pack_cell(msgpack_codec.dumps(declaration.describe()))
