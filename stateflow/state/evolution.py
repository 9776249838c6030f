"""From the states a partition has stored to those its operator declares now.

Added states need nothing, dropped ones are removed, numbers are widened (int to float or Decimal, also as map values,
list elements and tuple items). Everything else is for the operator's ``migrate_state``. All of it becomes one set of
mutations, so that a crash leaves either the old states or the new ones.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from stateflow.changes import Mutations
from stateflow.errors import DeclarationError, SchemaMismatch
from stateflow.state import coders
from stateflow.state.cells import CELL, COUNT, range_end, unpack_cell
from stateflow.state.coders import Coder
from stateflow.state.declare import NOTHING, Declaration
from stateflow.state.keyed import KeyedState
from stateflow.state.spec import CellReader
from stateflow.state.stored import check_schema, scan_entries

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
_WIDER: dict[tuple[type[Any], type[Any]], Callable[[Any], Any]] = {
    (coders.Int64, coders.Float64): float,
    (coders.Int64, coders.Decimal): decimal.Decimal,
}

#: called with a key and the plain values of its stored states by name
Migrate = Callable[[Any, SimpleNamespace], None]


class Evolution:
    """What is to be done, decided from descriptions alone.

    Args:
        stored: :meth:`KeyedState.schema` of what is stored, ``stored_version`` the operator's ``state_version`` then.
        migrates: the operator has a ``migrate_state``; it runs when the version has risen.

    Raises SchemaMismatch when the stored states are newer, or differ in a way that nobody takes care of.
    """

    def __init__(
        self,
        operator: str,
        stored: list[dict[str, Any]],
        stored_version: int,
        declared: Mapping[str, Declaration],
        version: int,
        migrates: bool,
    ) -> None:
        if stored_version > version:
            raise SchemaMismatch(
                f"the state is of version {stored_version}, this operator's is {version}",
                remedy="run the newer operator, or restore a checkpoint from before it",
                operator=operator,
            )
        self.migrate = migrates and stored_version < version
        self._operator = operator
        self._stored = stored
        self._custom = {coder.name: coder for each in declared.values() for coder in each.coders}
        now = {each.name: each for each in declared.values()}
        tags = {each.tag for each in declared.values()}
        self._replaced = [each for each in stored if bytes.fromhex(each["tag"]) not in tags]
        self._widened = {
            each["name"]: now[each["name"]]
            for each in self._replaced
            if each["name"] in now and self._widening(each, now[each["name"]]) is not None
        }
        self._changed = {each["name"] for each in self._replaced if each["name"] in now}
        if not self.migrate:
            same = [each.describe() for each in now.values() if each.name not in self._widened]
            check_schema(stored, same, operator)

    @property
    def needed(self) -> bool:
        return bool(self._replaced) or self.migrate

    def _widening(self, was: dict[str, Any], now: Declaration) -> Callable[[Any], Any] | None:
        """What makes a new payload's value of an old one's; None when that is not just a wider number."""
        names = [coder.name for coder in now.coders]
        if was["kind"] != now.kind or was["coders"][:-1] != names[:-1] or now.kind == "set":
            return None
        old = self._coder(was["coders"][-1])
        return None if old is None else _wider(old, now.coder)

    def convert(self, reader: CellReader, keyed: KeyedState, migrate: Migrate) -> Mutations:
        """Reads everything that changes and says what to write.

        Args:
            keyed: of the new declarations, over the same store; the caller marks it clean when this is written.
        """
        if self.migrate:
            for key, old in self._old_states(reader):
                migrate(key, old)
        into = keyed.collect()
        for was in self._replaced:
            tag = bytes.fromhex(was["tag"])
            if was["name"] in self._widened and not self.migrate:
                self._widen(was, self._widened[was["name"]], reader, into)
            for head in (CELL + tag, COUNT + tag):
                into.clears.append((head, range_end(head)))
        return into

    def _widen(self, was: dict[str, Any], now: Declaration, reader: CellReader, into: Mutations) -> None:
        tag, old = bytes.fromhex(was["tag"]), self._coder(was["coders"][-1])
        widen = self._widening(was, now)
        assert old is not None
        assert widen is not None
        for address, data in reader.scan(CELL + tag):
            value = old.decode(unpack_cell(data))
            wider = widen(value)
            if wider != value:
                raise SchemaMismatch(
                    f"state {now.name!r} holds {value!r}, which is no {now.coder.name}",
                    remedy="write migrate_state and raise state_version",
                    operator=self._operator,
                    state=now.name,
                )
            head = data[: len(data) - len(unpack_cell(data))]  # with its expiry
            into.puts.append((CELL + now.tag + address[len(CELL + tag) :], head + now.coder.encode(wider)))
        for address, data in reader.scan(COUNT + tag):
            into.puts.append((COUNT + now.tag + address[len(COUNT + tag) :], data))

    def _old_states(self, reader: CellReader) -> Iterator[tuple[Any, SimpleNamespace]]:
        """Each stored key with the plain values of its stored states by name."""
        old = {each["name"]: self._as_declared(each) for each in self._stored}
        keys: dict[Any, None] = {}
        for declaration in old.values():
            for entry in scan_entries(declaration, reader):
                if not entry.namespace:
                    keys[entry.key] = None
                elif declaration.name in self._changed:
                    raise SchemaMismatch(
                        f"state {declaration.name!r} changes and is used in namespaces; migrate_state sees none",
                        remedy="give the new state another name=, and drop the old one when its windows have ended",
                        operator=self._operator,
                        state=declaration.name,
                    )
        for key in keys:
            tracked = vars(KeyedState(self._operator, old, reader).peek(key))
            yield key, SimpleNamespace(**{name: _plain(old[name].kind, each) for name, each in tracked.items()})

    def _as_declared(self, was: dict[str, Any]) -> Declaration:
        found = [self._coder(name) for name in was["coders"]]
        if None in found:
            raise SchemaMismatch(
                f"state {was['name']!r} was stored with a coder of its own, {', '.join(was['coders'])}, "
                "which the operator has no more",
                remedy="keep a state that uses it declared until the migration is done",
                operator=self._operator,
                state=was["name"],
            )
        kind, coder, keys = was["kind"], found[-1], found[0]
        match kind:
            case "map":
                return Declaration(kind, coder, key_coder=keys, name=was["name"])  # type: ignore[arg-type]
            case "set":
                return Declaration(kind, NOTHING, key_coder=keys, name=was["name"])
            case "list":
                return Declaration(kind, coder, key_coder=coders.Int64(), name=was["name"])  # type: ignore[arg-type]
        default = 0 if kind == "counter" else None
        return Declaration(kind, coder, default=default, name=was["name"])  # type: ignore[arg-type]

    def _coder(self, name: str) -> Coder[Any] | None:
        return self._custom.get(name) or coder_named(name)


def coder_named(name: str) -> Coder[Any] | None:
    """The coder a stored schema names; records come back as dicts. None for one of a user's own."""
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
    """At the commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part]


def _wider(old: Coder[Any], new: Coder[Any]) -> Callable[[Any], Any] | None:
    if isinstance(old, coders.Tuple) and isinstance(new, coders.Tuple) and old.arity == new.arity:
        pairs = list(zip(old.items, new.items, strict=True))
        items = [(lambda v: v) if a.name == b.name else _wider(a, b) for a, b in pairs]
        if None in items:
            return None
        if old.arity is None:
            return lambda value: tuple(items[0](item) for item in value)  # type: ignore[misc]
        return lambda value: tuple(f(item) for f, item in zip(items, value, strict=True))  # type: ignore[misc]
    return _WIDER.get((type(old), type(new)))


def _plain(kind: str, tracked: Any) -> Any:
    match kind:
        case "map":
            return dict(tracked)
        case "set":
            return set(tracked)
        case "list":
            return list(tracked)
    return tracked.value
