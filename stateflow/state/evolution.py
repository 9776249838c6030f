"""Reads the schemas and entries of stored states, and changes stored states into the declared ones.

:func:`scan_entries` reads the entries of a state without a KeyedState.

:class:`Evolution` changes the stored states into those that the operator declares now. Added states need no change,
dropped ones are removed, and numbers are widened (int to float or Decimal, also as map values, list elements and tuple
items). All other changes are left to the operator's ``migrate_state``, which reads widened states in their new form,
and may overwrite them. All changes become one set of mutations, so that after a crash there are either the old states
or the new ones.
"""

from __future__ import annotations

import heapq
import itertools
import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

from stateflow.changes import Mutations, net
from stateflow.errors import DeclarationError, EncodeError, SchemaMismatch
from stateflow.state import coders
from stateflow.state.cells import (
    CELL,
    COUNT,
    TAGS,
    CellReader,
    Namespace,
    decode_row_key,
    range_end,
    split_address,
    unpack_cell,
    unpack_cell_with_expiry,
)
from stateflow.state.coders import Coder
from stateflow.state.declare import NOTHING, Declaration
from stateflow.state.keyed import KeyedState
from stateflow.state.shapes import Verdict, spelled, spelled_state, types_become
from stateflow.state.tracked import DECODE_FAILURES, StateSpec, Ttl
from stateflow.types import shown

# -- Stored schemas and entries --------------------------------------------------------------------------------------


def check_schema(stored: list[dict[str, Any]], declared: list[dict[str, Any]], operator: str) -> None:
    """Compares two results of :meth:`.KeyedState.schema`. States may have been added or dropped.

    Raises SchemaMismatch if a state is stored with another kind, coder or type than declared.

    >>> check_schema([], [], "Count")
    """
    before = {each["name"]: each for each in stored}
    for now in declared:
        was = before.get(now["name"], now)
        if was["tag"] != now["tag"] or types_become(was, now) is not Verdict.KEPT:
            raise SchemaMismatch(
                f"state {now['name']!r} is stored as {spelled_state(was)} but declared as {spelled_state(now)}",
                remedy="declare it as it is stored, give the new state another name=, or write migrate_state and raise "
                "state_version",
                operator=operator,
                state=now["name"],
            )


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

    For a state with a ttl, entries that have expired at the given time of its domain are omitted; without that time
    they are included. Raises DecodeError, which names state, key and entry.

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
            raise spec.decode_error(error, row, entry=entry[:32].hex()) from error
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
        raise spec.decode_error(error, row, entry=entry[:32].hex()) from error


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


# -- Evolution -------------------------------------------------------------------------------------------------------

_SIMPLE: dict[str, type[Coder[Any]]] = {
    cls.name: cls
    for cls in (
        coders.Int64,
        coders.Float64,
        coders.Bool,
        coders.Utf8,
        coders.Bytes,
        coders.Timestamp,
        coders.Date,
        coders.Decimal,
        coders.UUID,
    )
}
#: (coder, wider coder): a number of the first becomes a number of the second if the result is equal
_WIDER: Final = frozenset({(coders.Int64, coders.Float64), (coders.Int64, coders.Decimal)})

#: maximum number of keys that are read through one KeyedState, which caches them
KEYS_AT_ONCE = 1000

#: the operator's ``migrate_state``; called with a key and the plain values of its stored states by name
Migrate = Callable[[Any, SimpleNamespace], None]


@dataclass(frozen=True, slots=True)
class DeployedStates:
    """Decisions about an operator's states that hold for all of its partitions.

    Attributes:
        states: names of the deployed states. Code that lacks one of them does not drop it: only a deployment drops a
            state.
        dropped: name of a state → how often it was dropped. Data that was stored before the last drop is gone, even if
            the state is declared again.

    >>> DeployedStates(frozenset({"n"})).states
    frozenset({'n'})
    """

    states: frozenset[str] = frozenset()
    dropped: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: str, dropped: Iterable[tuple[str, int]]) -> DeployedStates:
        """Returns the decisions contained in an :class:`~stateflow.types.OperatorSpec`."""
        return cls(frozenset(each["name"] for each in json.loads(schema)), dict(dropped))

    def is_stale(self, stored: Mapping[str, Any]) -> bool:
        """Returns whether a state was dropped since this description of it was stored."""
        return self.dropped.get(stored["name"], 0) > int(stored.get("dropped", 0))

    def schema(self, stored: Iterable[dict[str, Any]], declared: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the schema of a partition, sorted by name, after its evolution to the declared states."""
        states = {each["name"]: self._counted(each) for each in declared}
        kept = {each["name"]: each for each in stored if each["name"] in self.states and not self.is_stale(each)}
        return [each for _, each in sorted({**kept, **states}.items())]

    def adopted(
        self, tags: Iterable[dict[str, Any]], stored: Iterable[dict[str, Any]], declared: Iterable[Declaration]
    ) -> list[dict[str, Any]]:
        """Returns the descriptions of the states made at run time whose cells a newly declared state has from now on.

        Args:
            tags: descriptions of all states made at run time.
            stored: the states that the operator declared so far.
        """
        known, heirs = {each["tag"] for each in stored}, {each.tag.hex() for each in declared}
        return [self._counted(each) for each in tags if each["tag"] in heirs - known]

    def _counted(self, declared: dict[str, Any]) -> dict[str, Any]:
        times = self.dropped.get(declared["name"], 0)
        return {**declared, "dropped": times} if times else declared


class Evolution:
    """A plan for changing stored states into declared ones, made from their descriptions alone.

    Args:
        stored: :meth:`KeyedState.schema` of the stored states.
        stored_version: the operator's ``state_version`` when the states were stored.
        migrates: whether the operator has a ``migrate_state``, which is called if ``version`` exceeds
            ``stored_version``.
        tags: the stored states made at run time. Those that the operator declares now, by the same name and kind, are
            changed like its own.

    Raises SchemaMismatch if the stored states are newer, or differ in a way that neither widening nor ``migrate_state``
    handles.

    Example: ``Evolution("Count", stored, 1, declarations_of(Count), 2, migrates=True)``
    """

    def __init__(
        self,
        operator: str,
        stored: list[dict[str, Any]],
        stored_version: int,
        declared: Mapping[str, Declaration],
        version: int,
        migrates: bool,
        deployed: DeployedStates = DeployedStates(),
        tags: Iterable[dict[str, Any]] = (),
    ) -> None:
        if stored_version > version:
            raise SchemaMismatch(
                f"the stored state has version {stored_version}, which is newer than this operator's version {version}",
                remedy="run the newer operator, or restore a checkpoint of the older version",
                operator=operator,
            )
        self.migrate = migrates and stored_version < version
        self._operator = operator
        #: descriptions of the stored states that are compared with the declared ones
        self.stored = stored = [*stored, *deployed.adopted(tags, stored, declared.values())]
        self._custom = {coder.name: coder for each in declared.values() for coder in each.coders}
        now = {each.name: each for each in declared.values()}
        #: stored states whose cells are removed or rewritten
        self._replaced: list[dict[str, Any]] = []
        self._widened: dict[str, Declaration] = {}
        self._changed: set[str] = set()
        for was in stored:
            name = was["name"]
            if deployed.is_stale(was) or (name not in now and name not in deployed.states):
                self._replaced.append(was)
            elif name in now and (found := self._verdict(was, now[name])) is not Verdict.KEPT:
                self._replaced.append(was)
                if found is Verdict.WIDER:
                    self._widened[name] = now[name]
                else:
                    self._changed.add(name)
        if not self.migrate:
            check_schema(stored, [now[name].describe() for name in sorted(self._changed)], operator)

    @property
    def needed(self) -> bool:
        return bool(self._replaced) or self.migrate

    def _verdict(self, was: dict[str, Any], now: Declaration) -> Verdict:
        if was["tag"] == now.tag.hex():
            return types_become(was, now.describe())
        names = [coder.name for coder in now.coders]
        if was["kind"] != now.kind or was["coders"][:-1] != names[:-1] or now.kind == "set":
            return Verdict.CHANGED
        old = self._coder(was["coders"][-1])
        return Verdict.WIDER if old is not None and _is_wider(old, now.coder) else Verdict.CHANGED

    def evolved(self, reader: CellReader) -> Evolved:
        """Returns a reader of the cells as they are after the evolution, without the changes by ``migrate_state``.

        Cells of replaced states are left out, and cells of widened states have their new form.
        """
        puts: dict[bytes, bytes] = {}
        for was in self._replaced:
            if was["name"] in self._widened:
                puts |= self._widen(was, self._widened[was["name"]], reader)
        return Evolved(reader, [head for was in self._replaced for head in _heads(was)], puts)

    def convert(self, reader: Evolved, keyed: KeyedState, migrate: Migrate) -> Mutations:
        """Reads everything that changes and returns the mutations to write.

        Args:
            keyed: states of the new declarations, which read from ``reader``; it cannot be used afterwards.
        """
        if self.migrate:
            for key, old in self._old_states(reader.stored, *keyed.time_us):
                migrate(key, old)
        into = net([Mutations(puts=list(reader.puts.items())), keyed.collect()])
        into.clears += [(head, range_end(head)) for head in reader.gone]
        return into

    def _widen(self, was: dict[str, Any], now: Declaration, reader: CellReader) -> dict[bytes, bytes]:
        puts: dict[bytes, bytes] = {}
        tag = bytes.fromhex(was["tag"])
        old = now.coder if tag == now.tag else self._coder(was["coders"][-1])
        assert old is not None
        for address, data in reader.scan(CELL + tag):
            value = old.decode(unpack_cell(data))
            try:
                wider = now.coder.encode(value)
            except EncodeError as error:
                raise SchemaMismatch(
                    f"state {now.name!r} holds {shown(value)}, which does not fit {_declared(now)}",
                    remedy="write migrate_state and raise state_version",
                    operator=self._operator,
                    state=now.name,
                ) from error
            head = data[: len(data) - len(unpack_cell(data))]  # with its expiry
            puts[CELL + now.tag + address[len(CELL + tag) :]] = head + wider
        for address, data in reader.scan(COUNT + tag):
            puts[COUNT + now.tag + address[len(COUNT + tag) :]] = data
        return puts

    def _old_states(
        self, reader: CellReader, processing_us: int | None, event_us: int | None
    ) -> Iterator[tuple[Any, SimpleNamespace]]:
        """Yields each stored key with the plain values of its stored states by name, without expired entries."""
        old = {each["name"]: self._as_declared(each) for each in self.stored}
        keys: dict[Any, None] = {}
        for declaration in old.values():
            for entry in scan_entries(declaration, reader, processing_us=processing_us, event_us=event_us):
                if not entry.namespace:
                    keys[entry.key] = None
                elif declaration.name in self._changed:
                    raise SchemaMismatch(
                        f"state {declaration.name!r} changes, but migrate_state cannot read its data in namespaces",
                        remedy="give the new state another name=, and drop the old one when its windows have ended",
                        operator=self._operator,
                        state=declaration.name,
                    )
        for number, key in enumerate(keys):
            if number % KEYS_AT_ONCE == 0:  # a new one, because it caches all of its keys
                states = KeyedState(self._operator, old, reader)
                if processing_us is not None:
                    states.set_time(processing_us, event_us)
            tracked = vars(states.peek(key))
            yield key, SimpleNamespace(**{name: _plain(old[name].kind, each) for name, each in tracked.items()})

    def _as_declared(self, was: dict[str, Any]) -> Declaration:
        declared = declared_as(was, self._custom)
        if declared is None:
            raise SchemaMismatch(
                f"state {was['name']!r} was stored with a custom coder, {', '.join(was['coders'])}, "
                "which the operator no longer has",
                remedy="keep that coder in a declared state until this version has converted every partition",
                operator=self._operator,
                state=was["name"],
            )
        return declared

    def _coder(self, name: str) -> Coder[Any] | None:
        return coder_named(name) or self._custom.get(name)


class Evolved:
    """A reader of a partition's cells, without those under the prefixes ``gone``. ``puts`` take precedence."""

    def __init__(self, stored: CellReader, gone: Iterable[bytes], puts: dict[bytes, bytes]) -> None:
        self.stored = stored
        self.gone = tuple(gone)
        self.puts = puts
        self._addresses = sorted(puts)

    def get(self, cell: bytes, /) -> bytes | None:
        found = self.puts.get(cell)
        return self.stored.get(cell) if found is None and not cell.startswith(self.gone) else found

    def scan(self, prefix: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        mine = self._addresses[bisect_left(self._addresses, prefix) :]
        above = ((each, self.puts[each]) for each in itertools.takewhile(lambda each: each.startswith(prefix), mine))
        below = (
            (cell, data)
            for cell, data in self.stored.scan(prefix)
            if cell not in self.puts and not cell.startswith(self.gone)
        )
        return heapq.merge(above, below)


def _declared(state: Declaration) -> str:
    return state.coder.name if state.coder.types is None else spelled(state.coder.types)


def _heads(described: dict[str, Any]) -> tuple[bytes, ...]:
    """Returns the prefixes of the addresses of a state's cells, counts and, if it was made at run time, description."""
    tag = bytes.fromhex(described["tag"])
    return CELL + tag, COUNT + tag, TAGS + tag


def declared_as(described: dict[str, Any], custom: Mapping[str, Coder[Any]]) -> Declaration | None:
    """Returns a declaration that reads the cells of a stored state; its records come back as dicts.

    Args:
        described: the state's :meth:`Declaration.describe`.
        custom: coders of the user's own, by name.

    Returns None if ``custom`` lacks a coder of the state.
    """
    found: list[Coder[Any] | None] = []
    for coder_name, types in itertools.zip_longest(described["coders"], described.get("types", ())):
        made = coder_named(coder_name)
        _set_types(made, types)
        found.append(made or custom.get(coder_name))
    if None in found:
        return None
    kind, coder, keys = described["kind"], found[-1], found[0]
    name, lives = described["name"], Ttl.described(described.get("ttl"))
    match kind:
        case "map":
            return Declaration(kind, coder, key_coder=keys, name=name, ttl=lives)  # type: ignore[arg-type]
        case "set":
            return Declaration(kind, NOTHING, key_coder=keys, name=name, ttl=lives)
        case "list":
            return Declaration(kind, coder, key_coder=coders.Int64(), name=name, ttl=lives)  # type: ignore[arg-type]
    default = 0 if kind == "counter" else None
    return Declaration(kind, coder, default=default, name=name, ttl=lives)  # type: ignore[arg-type]


def _set_types(coder: Coder[Any] | None, types: Any) -> None:
    """Gives a coder made by :func:`coder_named` the types that its name does not determine."""
    if isinstance(coder, coders.Msgpack):
        coder.types = types
    elif isinstance(coder, coders.Tuple) and isinstance(types, list):
        for item, each in zip(coder.items, types[1:], strict=False):
            _set_types(item, each)


def coder_named(name: str) -> Coder[Any] | None:
    """Returns the coder that a stored schema names, which decodes records as dicts; None for a user's own coder."""
    if name in _SIMPLE:
        return _SIMPLE[name]()
    if name == "msgpack" or name.startswith(("msgpack[", "struct:")):
        record = coders.Msgpack()
        record.name = name  # part of the address
        return record
    bare = name.removeprefix("packed ")
    if not (bare.startswith("tuple[") and bare.endswith("]")):
        return None
    parts = _split(bare[len("tuple[") : -1])
    variadic = parts[-1:] == ["..."]
    items = [coder_named(part) for part in (parts[:-1] if variadic else parts)]
    if None in items:
        return None
    try:
        return coders.Tuple(tuple(items), variadic=variadic)  # type: ignore[arg-type]
    except DeclarationError:
        return None


def _split(text: str) -> list[str]:
    """Splits a text at the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def _is_wider(old: Coder[Any], new: Coder[Any]) -> bool:
    if isinstance(old, coders.Tuple) and isinstance(new, coders.Tuple) and old.arity == new.arity:
        return all(a.name == b.name or _is_wider(a, b) for a, b in zip(old.items, new.items, strict=True))
    return (type(old), type(new)) in _WIDER


def _plain(kind: str, tracked: Any) -> Any:
    match kind:
        case "map":
            return dict(tracked)
        case "set":
            return set(tracked)
        case "list":
            return list(tracked)
    return tracked.value
