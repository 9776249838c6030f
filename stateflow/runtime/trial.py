"""The trial of an operator's new version on all stored state, before that version serves.

A partition is tried on a snapshot: its batches go on, and nothing of it changes. Keys come in pieces, in the order in
which they are stored. For each piece ``migrate_state`` runs as it will run later, after ``open``; what it leaves in the
states is encoded, and what the new version reads as another type is decoded. The real migration is one commit of the
whole partition. Pieces keep the trial's memory small and let it stop between two of them.
"""

from __future__ import annotations

import inspect
import itertools
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from heapq import merge
from typing import Any

from stateflow.errors import DecodeError, EncodeError, OperatorFailed, SchemaMismatch
from stateflow.metrics.own import OwnFigures
from stateflow.runtime import layout
from stateflow.runtime.evolving import converted
from stateflow.runtime.instance import OperatorInstance
from stateflow.runtime.operator import BatchOperator, Operator
from stateflow.runtime.registry import PartitionRegistry
from stateflow.runtime.schema import evolution_of, read_schema
from stateflow.runtime.timers import Timers
from stateflow.runtime.verifying import Copy, Verifier
from stateflow.state import (
    CellReader,
    ColumnStates,
    Declaration,
    DeployedStates,
    KeyedState,
    declarations_of,
    scan_entries,
)
from stateflow.state.cells import CELL, COUNT, read_varint
from stateflow.state.evolution import Evolved
from stateflow.storage import PartitionStore
from stateflow.types import OperatorSpec, PartitionId

#: a piece ends with the key that reaches one of these limits
PIECE_KEYS = 1000
PIECE_BYTES = 4 << 20
#: the version's own faults
FAILURES = (OperatorFailed, SchemaMismatch, DecodeError, EncodeError)
_STATE = len(CELL) + 8
_Cell = tuple[bytes, bytes]


class Trials:
    """Trials of one replica. Called from several threads; changes nothing.

    Args:
        verifier: takes the snapshots that versions are tried on.
    """

    def __init__(self, registry: PartitionRegistry, verifier: Verifier) -> None:
        self._registry, self._verifier = registry, verifier

    def load(self, spec: OperatorSpec) -> type[Operator]:
        """Returns the version's class. Raises OperatorNotImportable, OperatorOutdated, SchemaMismatch."""
        return self._registry.check(spec)

    def begin(self, spec: OperatorSpec, cls: type[Operator], partition: PartitionId) -> Trial | None:
        """Returns a trial that :meth:`end` must end; None: the partition is not owned here. Raises Unavailable."""
        copy = self._verifier.begin(partition)
        return None if copy is None else Trial(self._registry, spec, cls, copy)

    def is_needed(self, spec: OperatorSpec, cls: type[Operator], partition: PartitionId) -> bool:
        """Tells whether the version changes what the partition stores, or reads it as other types. Opens no database.
        Raises SchemaMismatch.
        """
        stored = self._registry.stored_schema(self._registry.look(partition))
        if stored is None:
            return False
        needed = evolution_of(spec.name, cls, stored, _deployed(spec)).needed
        return needed or bool(_retyped(cls, read_schema(stored)["states"]))

    def end(self, trial: Trial) -> None:
        """Frees what the trial holds, in the thread that ran it."""
        trial.close()
        self._verifier.end(trial.copy)


class Trial:
    """Trial on one partition, for one thread. ``copy``: the snapshot."""

    def __init__(self, registry: PartitionRegistry, spec: OperatorSpec, cls: type[Operator], copy: Copy) -> None:
        self.copy = copy
        self._registry, self._cls, self._deployed = registry, cls, _deployed(spec)
        self._pieces = self._run()

    def step(self) -> bool:
        """Tries the next piece; False: there is none.

        Raises SchemaMismatch, OperatorFailed, and DecodeError or EncodeError for a value that cannot be read or kept.
        """
        try:
            return next(self._pieces, None) is not None
        except FAILURES as error:
            partition, replica = self.copy.partition, self._registry.info.name
            error.located(operator=partition.operator, partition=partition.partition, replica=replica)
            raise

    def close(self) -> None:
        left_behind = inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING
        if not left_behind:  # else its thread drops it, should it come back
            self._pieces.close()

    def _run(self) -> Generator[int]:
        store = self._registry.environment.open_apart(self.copy.directory)
        try:
            yield from try_out(self._cls, self.copy.partition, store, self._deployed, self._registry.clock.now_us())
        finally:
            store.close()


def try_out(
    cls: type[Operator], partition: PartitionId, store: PartitionStore, deployed: DeployedStates, now_us: int
) -> Iterator[int]:
    """Makes a partition's stored states those that ``cls`` declares, piece by piece, and reads them; nothing is
    written. Yields the number of keys in each piece.

    Raises what :meth:`Trial.step` does."""
    stored = store.get(layout.SCHEMA)
    if stored is None:
        return
    before, evolution = read_schema(stored), evolution_of(partition.operator, cls, stored, deployed)
    retyped, watermark = _retyped(cls, before["states"]), store.get(layout.WATERMARK)
    watermark_us = None if watermark is None else int.from_bytes(watermark, "big", signed=True)
    with _instance(cls, partition, store, watermark_us) as instance:
        for piece in pieces(store, [bytes.fromhex(each["tag"]) for each in before["states"]]):
            reader = evolution.evolved(piece)
            if evolution.migrate:
                times_us = now_us, watermark_us
                made = converted(partition.operator, evolution, reader, instance, before["version"], times_us)
                gone = [*(start for start, _ in made.clears), *made.deletes]
                reader = Evolved(reader, gone, dict(made.puts))  # as it would be read after the migration
            for declaration in retyped:
                for _ in scan_entries(declaration, reader):
                    pass
            yield piece.keys


@contextmanager
def _instance(
    cls: type[Operator], partition: PartitionId, store: PartitionStore, watermark_us: int | None
) -> Iterator[OperatorInstance]:
    kind = ColumnStates if issubclass(cls, BatchOperator) else KeyedState
    states = kind(partition.operator, declarations_of(cls), store)
    instance = OperatorInstance(cls, partition, states, Timers(store), watermark_us, OwnFigures())
    try:
        instance.open()
        yield instance
    finally:
        instance.let_go(lambda close: close())


class Piece:
    """The cells of some keys, of all states, in memory; everything else is read from the store.

    ``keys``: how many there are.
    """

    def __init__(self, store: CellReader, cells: Iterable[_Cell], keys: int) -> None:
        self._store, self.keys = store, keys
        self._cells = dict(sorted(cells))
        self._addresses = list(self._cells)

    def get(self, cell: bytes, /) -> bytes | None:
        found = self._cells.get(cell)
        return self._store.get(cell) if found is None else found

    def scan(self, prefix: bytes, /) -> Iterator[_Cell]:
        if not prefix.startswith((CELL, COUNT)) or len(prefix) < _STATE:
            return self._store.scan(prefix)
        first = bisect_left(self._addresses, prefix)
        some = itertools.takewhile(lambda each: each.startswith(prefix), itertools.islice(self._addresses, first, None))
        return ((each, self._cells[each]) for each in some)


def pieces(store: CellReader, tags: Iterable[bytes]) -> Iterator[Piece]:
    """Yields all keys of the states with these tags, some at a time; each key once, with the cells of all states."""
    scans = [store.scan(space + tag) for tag in tags for space in (CELL, COUNT)]
    cells: list[_Cell] = []
    keys = size = 0
    for _, of_key in itertools.groupby(merge(*scans, key=_row), key=_row):
        at = len(cells)
        cells += of_key
        keys, size = keys + 1, size + sum(len(address) + len(value) for address, value in cells[at:])
        if keys == PIECE_KEYS or size >= PIECE_BYTES:
            yield Piece(store, cells, keys)
            cells, keys, size = [], 0, 0
    if keys:
        yield Piece(store, cells, keys)


def _row(cell: _Cell) -> bytes:
    """Returns the part of a cell's address that orders the cells of a state by their keys."""
    address = cell[0]
    length, start = read_varint(address, _STATE)
    return address[_STATE : start + length]


def _retyped(cls: type[Operator], stored: Iterable[Mapping[str, Any]]) -> list[Declaration]:
    """States whose cells stay where they are and are read as other types, such as records with a wider field."""
    types = {(each["name"], each["tag"]): each.get("types") for each in stored}
    return [
        each
        for each in declarations_of(cls).values()
        if types.get((each.name, each.tag.hex()), now := each.describe().get("types")) != now
    ]


def _deployed(spec: OperatorSpec) -> DeployedStates:
    return DeployedStates.of(spec.state_schema, spec.dropped)
