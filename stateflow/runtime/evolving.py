"""A partition's stored states become those that are declared, once for each deployment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from stateflow.changes import Mutations
from stateflow.metrics.own import OwnFigures
from stateflow.runtime import layout
from stateflow.runtime.committing import Committer
from stateflow.runtime.instance import OperatorInstance
from stateflow.runtime.operator import BatchOperator, Operator
from stateflow.runtime.positions import MIGRATION
from stateflow.runtime.schema import evolution_of, read_schema, schema_after
from stateflow.runtime.timers import Timers
from stateflow.runtime.watchdog import Guard
from stateflow.state import (
    CellReader,
    ColumnStates,
    Declaration,
    DeployedStates,
    Evolution,
    KeyedState,
    declarations_of,
    scan_entries,
)
from stateflow.state.cells import CELL, COUNT, read_varint
from stateflow.state.evolution import Evolved
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId

#: of a partition, whose states are tried before another version serves
TRIED_KEYS = 100


class Evolver:
    """Args: deployed: what is decided of the states now; another object when that has changed."""

    def __init__(
        self,
        partition: PartitionId,
        store: PartitionStore,
        instance: OperatorInstance,
        committer: Committer,
        deployed: Callable[[], DeployedStates],
    ) -> None:
        self._partition, self._store = partition, store
        self._instance, self._committer, self._deployed = instance, committer, deployed
        #: what the states were made for
        self._evolved: DeployedStates | None = None

    def evolve(self, now_us: int, watermark_us: int | None, guard: Guard) -> None:
        """Raises SchemaMismatch, OperatorFailed."""
        deployed = self._deployed()
        if deployed is self._evolved:
            return
        self._committer.unsaved = []
        try:
            self._evolve(now_us, watermark_us, guard, deployed)
        except BaseException:
            self._committer.unsaved = []  # what commits next, and does not evolve, would record it as done
            raise
        self._evolved = deployed

    def _evolve(self, now_us: int, watermark_us: int | None, guard: Guard, deployed: DeployedStates) -> None:
        instance = self._instance
        operator, state = instance.operator, instance.state
        stored = self._store.get(layout.SCHEMA)
        declared = schema_after(stored, operator.state_version, state.schema(), deployed)
        if stored == declared:
            return
        self._committer.unsaved = [(layout.SCHEMA, declared)]
        if stored is None:
            return
        evolution = evolution_of(self._partition.operator, type(operator), stored, deployed)
        if not evolution.needed:
            return
        reader = evolution.evolved(self._store)
        times_us, before = (now_us, watermark_us), read_schema(stored)["version"]
        try:
            converted = _converted(self._partition.operator, evolution, reader, instance, before, times_us)
            guard.begin_commit()
            self._committer.commit(MIGRATION, operator.state_version, converted)
            guard.end_commit()
            state.invalidate()
            self._committer.known()
        finally:
            instance.attach()


def _converted(
    operator: str,
    evolution: Evolution,
    reader: Evolved,
    instance: OperatorInstance,
    before: int,
    times_us: tuple[int, int | None],
) -> Mutations:
    """Makes the mutations that turn the stored states into the declared ones. Args: before: the version that they
    have; times_us: processing time and watermark."""
    keyed = KeyedState(operator, declarations_of(type(instance.operator)), reader)

    def migrate(key: Any, old: SimpleNamespace) -> None:
        keyed.bind(instance.operator, key)
        instance.migrate_state(before, key, old)

    keyed.set_time(*times_us)
    try:
        return evolution.convert(reader, keyed, migrate)
    finally:
        keyed.unbind(instance.operator)


# -- tried before it serves -------------------------------------------------------------------------------


class Sample:
    """A partition's cells, of which a scan of a whole state finds those of its first keys alone: of every state those
    of the same keys."""

    def __init__(self, store: CellReader, tags: Iterable[bytes], keys_max: int) -> None:
        self._store = store
        firsts = (self._first(CELL + tag, keys_max) for tag in tags)
        self._last = min((keys[-1] for keys in firsts if len(keys) == keys_max), default=None)

    def _first(self, state: bytes, keys_max: int) -> list[bytes]:
        keys = (key for key, _ in itertools.groupby(_row(address) for address, _ in self._store.scan(state)))
        return list(itertools.islice(keys, keys_max))

    def get(self, cell: bytes, /) -> bytes | None:
        return self._store.get(cell)

    def scan(self, prefix: bytes, /) -> Iterator[tuple[bytes, bytes]]:
        found, last = self._store.scan(prefix), self._last
        if last is None or len(prefix) != _STATE or not prefix.startswith((CELL, COUNT)):
            return found
        return itertools.takewhile(lambda each: _row(each[0]) <= last, found)


_STATE = len(CELL) + 8


def _row(address: bytes) -> bytes:
    """Returns the part of a cell's address that orders the cells of a state by their keys."""
    length, start = read_varint(address, _STATE)
    return address[_STATE : start + length]


def try_out(
    cls: type[Operator], partition: PartitionId, store: PartitionStore, deployed: DeployedStates, now_us: int
) -> None:
    """Makes the states of a partition's first keys those that ``cls`` declares, and reads them; nothing is written.

    Raises SchemaMismatch, OperatorFailed, and DecodeError or EncodeError for a value that cannot be had or kept."""
    stored = store.get(layout.SCHEMA)
    if stored is None:
        return
    before, evolution = read_schema(stored), evolution_of(partition.operator, cls, stored, deployed)
    tags = [bytes.fromhex(each["tag"]) for each in before["states"]]
    reader = evolution.evolved(Sample(store, tags, TRIED_KEYS))
    if evolution.migrate:
        watermark = store.get(layout.WATERMARK)
        watermark_us = None if watermark is None else int.from_bytes(watermark, "big", signed=True)
        states = (ColumnStates if issubclass(cls, BatchOperator) else KeyedState)(
            partition.operator, declarations_of(cls), store
        )
        instance = OperatorInstance(cls, partition, states, Timers(store), watermark_us, OwnFigures())
        try:
            instance.open()
            times_us = now_us, watermark_us
            made = _converted(partition.operator, evolution, reader, instance, before["version"], times_us)
        finally:
            instance.let_go(lambda close: close())
        gone = [*(start for start, _ in made.clears), *made.deletes]
        reader = Evolved(reader, gone, dict(made.puts))  # as it would be read then
    for declaration in _retyped(cls, before["states"]):
        for _ in scan_entries(declaration, reader):
            pass


def is_to_be_tried(operator: str, cls: type[Operator], stored: bytes, deployed: DeployedStates) -> bool:
    """Says whether a version changes the stored states, or reads them as other types. Raises SchemaMismatch."""
    needed = evolution_of(operator, cls, stored, deployed).needed
    return needed or bool(_retyped(cls, read_schema(stored)["states"]))


def _retyped(cls: type[Operator], stored: Iterable[Mapping[str, Any]]) -> list[Declaration]:
    """States whose cells stay where they are and are read as other types, such as records with a wider field."""
    types = {(each["name"], each["tag"]): each.get("types") for each in stored}
    return [
        each
        for each in declarations_of(cls).values()
        if types.get((each.name, each.tag.hex()), now := each.describe().get("types")) != now
    ]
