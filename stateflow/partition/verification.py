"""Verifies the stored data of a partition, and tries its evolution to a new version, while batches go on.

Both read a snapshot, with a cache of their own, and change nothing.

:class:`Verifier` finds damage in a partition before the partition is needed: it reads every block and every cell. Its
state digest can be compared with that of another copy at the same sequence.

:class:`Trials` try an operator's new version on all stored state, before that version serves. Keys are processed in
pieces, in their stored order. For each piece, ``migrate_state`` runs as in the later migration, after ``open``; the
resulting states are encoded, and cells that the new version reads as another type are decoded. The real migration is
one commit of the whole partition. A trial works in pieces to limit its memory, and to be able to stop between two of
them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from pathlib import Path
from typing import Any

from stateflow.checkpoint.catalog import state_digest
from stateflow.errors import (
    DecodeError,
    EncodeError,
    OperatorFailed,
    SchemaMismatch,
    StateDamaged,
    StateflowError,
    Unavailable,
)
from stateflow.metrics.own import OwnFigures
from stateflow.operator.instance import OperatorInstance
from stateflow.operator.operator import BatchOperator, Operator, key_columns, timer_method_lacked, windows_of
from stateflow.operator.timers import Timers
from stateflow.partition.checkpoints import DIGEST_SHARE, NOT_STATE
from stateflow.partition.control import Verification
from stateflow.partition.environment import RateLimit
from stateflow.partition.layout import read_sequence, read_watermark
from stateflow.partition.lifecycle import State
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.processor import StoredStates, converted, evolution_of, is_evolved
from stateflow.partition.registry import PartitionRegistry
from stateflow.state import (
    CellReader,
    ColumnStates,
    Declaration,
    DeployedStates,
    KeyedState,
    check_cell,
    declarations_of,
    scan_entries,
)
from stateflow.state.cells import CELL, COUNT, EXPIRES, FORMAT_VERSION, read_varint
from stateflow.state.evolution import Evolved
from stateflow.state.keys import KeyColumns
from stateflow.storage import PartitionStore
from stateflow.storage.faults import meaning
from stateflow.types import OperatorSpec, PartitionId

#: number of faults of one partition that are reported one by one
FAULTS_MAX = 5
#: interval at which a standby is checked for having reached its owner's sequence, seconds
LOOK_S = 0.002
#: interval at which a wait checks whether the verification is still wanted, seconds
STOP_S = 0.2
TAG = slice(len(CELL), len(CELL) + 8)


@dataclass(frozen=True, slots=True)
class Copy:
    """A snapshot that is to be read."""

    partition: PartitionId
    directory: Path
    epoch: int
    sequence: int


class Stopped(Exception):
    """The verification was stopped because no caller needs its result any more."""


class Verifier:
    """Verifies partitions. Called from several threads; changes nothing.

    Args:
        sleep: waits for the given seconds, to leave time for other work.
    """

    def __init__(self, registry: PartitionRegistry, sleep: Callable[[float], None] = time.sleep) -> None:
        self._registry, self._sleep = registry, sleep

    def begin(self, partition: PartitionId, standby_of: int | None = None, wait_s: float = 1.0) -> Copy | None:
        """Takes a snapshot of a partition between two batches. Returns None if this replica has no such copy.

        Args:
            standby_of: None: take the snapshot of the partition owned here. Otherwise, take it of the standby's copy
                here, once this copy has reached the owner's sequence ``standby_of``, or as it is after ``wait_s``
                seconds.
        """
        local = self._registry.look(partition)
        if standby_of is not None:
            return self._standby(local, standby_of, wait_s)
        with contextlib.suppress(Exception):  # outside the lock, so that little is left to flush inside
            self._registry.store(local).flush()
        with self._registry.reopening(local, only_unsure=True), local.work:
            with local.mutex:
                if local.lifecycle.state is not State.OWNED:
                    return None
                epoch = local.lifecycle.epoch
            db = self._registry.store(local)
            self._registry.settle(local)
            return self._snapshot(partition, db, epoch)

    def _standby(self, local: LocalPartition, sequence: int, wait_s: float) -> Copy | None:
        until = self._registry.clock.monotonic() + wait_s
        while True:
            with local.work:
                incoming = local.incoming
                if incoming is None or incoming.store is None:
                    return None
                if incoming.sequence >= sequence or self._registry.clock.monotonic() >= until:
                    return self._snapshot(local.id, incoming.store, local.lifecycle.epoch)
            self._sleep(LOOK_S)

    def _snapshot(self, partition: PartitionId, db: PartitionStore, epoch: int) -> Copy:
        directory = self._registry.snapshots / f"verify-{uuid.uuid4().hex}"
        try:
            db.snapshot(directory)
        except Exception as error:
            raise Unavailable(
                f"cannot take a snapshot: {error}",
                remedy="check the data directory's disk, and free space there",
                partition=partition,
            ) from error
        return Copy(partition, directory, epoch, read_sequence(db))

    def read(self, copy: Copy, stopped: Callable[[], bool] = lambda: False) -> Verification:
        """Reads all of a copy, at most at ``verify_bytes_per_s``, and more slowly while batches arrive. Checks the
        checksum of every block, and decodes every cell by its declaration. Raises Stopped once ``stopped`` returns
        True."""
        reading = _Reading()
        limit = RateLimit(self._registry.settings.verify_bytes_per_s)
        clock = self._registry.clock
        began, told = clock.monotonic(), 0

        def rest() -> None:
            nonlocal began, told
            if stopped():
                raise Stopped
            now = clock.monotonic()
            waits = DIGEST_SHARE.wait_s(now, now - began, self._registry.served_at)
            until = now + max(waits, limit.wait_s(now, reading.size - told))
            while (left := until - clock.monotonic()) > 0 and not stopped():
                self._sleep(min(left, STOP_S))
            began, told = clock.monotonic(), reading.size

        digest, faults = "", reading.faults
        try:
            db = self._registry.environment.open_apart(copy.directory)
            try:
                reading.declared = self._declared(copy.partition, db)
                digest = state_digest(reading.checked(db.scan(b"")), NOT_STATE, rest)
            finally:
                db.close()
        except Stopped:
            raise
        except Exception as error:  # noqa: BLE001 - damaged files may raise any error
            faults.append(_unreadable(copy.partition, error))
        if reading.wrong > len(faults):
            faults.append(_cells_wrong(copy.partition, reading.wrong))
        return Verification(copy.epoch, copy.sequence, True, reading.size, reading.cells, digest, faults)

    def end(self, copy: Copy) -> None:
        self._registry.remove_snapshot(copy.directory)

    def _declared(self, partition: PartitionId, db: PartitionStore) -> dict[bytes, Declaration]:
        """Returns the declarations of states by tag. Empty if the operator cannot be loaded here, or if another version
        of it stored the cells and the next batch will evolve them."""
        with contextlib.suppress(StateflowError):
            _, cls = self._registry.operator(partition.operator)
            if is_evolved(cls, db, self._registry.deployed(partition.operator)):
                return {each.tag: each for each in declarations_of(cls).values()}
        return {}


@dataclass(slots=True)
class _Reading:
    """Findings so far. States that are not declared, such as dropped ones, are only checked for their format."""

    declared: dict[bytes, Declaration] = field(default_factory=dict)
    size: int = 0
    cells: int = 0
    wrong: int = 0
    faults: list[StateflowError] = field(default_factory=list)

    def checked(self, entries: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
        for key, value in entries:
            self.size += len(key) + len(value)
            if key[:1] == CELL:
                self._check(key, value)
            yield key, value

    def _check(self, key: bytes, value: bytes) -> None:
        declaration = self.declared.get(key[TAG])
        try:
            if declaration is not None:
                check_cell(declaration, key, value)
                self.cells += 1
            elif not value or value[0] & ~EXPIRES != FORMAT_VERSION:
                raise StateDamaged("a state cell has an unknown format", remedy="run the version that wrote it")
        except StateflowError as error:
            self.wrong += 1
            if self.wrong <= FAULTS_MAX:
                self.faults.append(error)


def _unreadable(partition: PartitionId, error: Exception) -> StateflowError:
    meant = meaning(error)
    what = str(error) if meant is None else meant.what
    return StateDamaged(
        f"the partition cannot be read completely: {what}",
        remedy=f"restore the partition with `stateflow checkpoint restore {partition.operator} {partition.partition}`; "
        "if only a standby's copy is damaged, begin a new standby instead",
        partition=partition,
    )


def _cells_wrong(partition: PartitionId, count: int) -> StateflowError:
    return StateDamaged(
        f"{count} state cells cannot be decoded",
        remedy=f"restore the partition with `stateflow checkpoint restore {partition.operator} {partition.partition}`; "
        "if only a standby's copy is damaged, begin a new standby instead",
        partition=partition,
    )


# -- Trials of an operator's new version -----------------------------------------------------------------------------

#: a piece ends with the key that reaches one of these limits
PIECE_KEYS = 1000
PIECE_BYTES = 4 << 20
#: errors that are faults of the new version itself
FAILURES = (OperatorFailed, SchemaMismatch, DecodeError, EncodeError)
_STATE = len(CELL) + 8
_Cell = tuple[bytes, bytes]


class Trials:
    """Tries new versions of operators on one replica's partitions. Called from several threads; changes nothing.

    Args:
        verifier: takes the snapshots on which versions are tried.
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
        """Tells whether the version converts the partition's stored cells, reads them as other types, or may be unable
        to handle its timers. Opens no database. Raises SchemaMismatch."""
        stored = self._registry.stored_states(self._registry.look(partition))
        if stored is None:
            return False
        evolution = evolution_of(spec.name, cls, stored, _deployed(spec))
        return evolution.needed or bool(_retyped(cls, evolution.stored)) or (stored.timers and _may_miss_timers(cls))

    def end(self, trial: Trial) -> None:
        """Closes a trial and removes its snapshot. Call it in the thread that ran the trial."""
        trial.close()
        self._verifier.end(trial.copy)


class Trial:
    """Trial of a version on the snapshot ``copy`` of one partition. Use it in one thread."""

    def __init__(self, registry: PartitionRegistry, spec: OperatorSpec, cls: type[Operator], copy: Copy) -> None:
        self.copy = copy
        self._registry, self._cls, self._deployed = registry, cls, _deployed(spec)
        self._pieces = self._run()

    def step(self) -> bool:
        """Tries the next piece. Returns False if there is none.

        Raises SchemaMismatch, OperatorFailed, and DecodeError or EncodeError for a value that cannot be read or stored.
        """
        try:
            return next(self._pieces, None) is not None
        except FAILURES as error:
            partition, replica = self.copy.partition, self._registry.info.name
            error.located(operator=partition.operator, partition=partition.partition, replica=replica)
            raise

    def close(self) -> None:
        left_behind = inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING
        if not left_behind:  # otherwise the running thread frees it, if it ever returns
            self._pieces.close()

    def _run(self) -> Generator[int]:
        store = self._registry.environment.open_apart(self.copy.directory)
        try:
            now_us, bytes_max = self._registry.clock.now_us(), self._registry.settings.value_bytes_max
            yield from try_out(self._cls, self.copy.partition, store, self._deployed, now_us, bytes_max)
        finally:
            store.close()


def try_out(
    cls: type[Operator],
    partition: PartitionId,
    store: PartitionStore,
    deployed: DeployedStates,
    now_us: int,
    max_value_bytes: int,
) -> Iterator[int]:
    """Converts a partition's stored states to those that ``cls`` declares, piece by piece in memory, and reads them;
    writes nothing. Before that, checks that ``cls`` handles the stored timers. Yields the number of keys or timers in
    each piece.

    Args:
        max_value_bytes: see :class:`~stateflow.state.KeyedState`.

    Raises the errors of :meth:`Trial.step`.
    """
    stored = StoredStates.of(store)
    if stored is None:
        return
    evolution = evolution_of(partition.operator, cls, stored, deployed)
    retyped, watermark_us = _retyped(cls, evolution.stored), read_watermark(store)
    with _instance(cls, partition, store, watermark_us, max_value_bytes) as instance:
        for timers, _ in enumerate(instance.check_timers(), 1):
            if timers % PIECE_KEYS == 0:
                yield PIECE_KEYS
        if not (evolution.needed or retyped):
            return
        for piece in pieces(store, [bytes.fromhex(each["tag"]) for each in evolution.stored]):
            reader = evolution.evolved(piece)
            if evolution.migrate:
                times_us = now_us, watermark_us
                made = converted(partition.operator, evolution, reader, instance, stored.version, times_us)
                gone = [*(start for start, _ in made.clears), *made.deletes]
                reader = Evolved(reader, gone, dict(made.puts))  # reads the states as after the migration
            for declaration in retyped:
                for _ in scan_entries(declaration, reader):
                    pass
            yield piece.keys


@contextmanager
def _instance(
    cls: type[Operator], partition: PartitionId, store: PartitionStore, watermark_us: int | None, max_value_bytes: int
) -> Iterator[OperatorInstance]:
    keys = KeyColumns(partition.operator, key_columns(cls))
    kind = partial(ColumnStates, keys=keys) if issubclass(cls, BatchOperator) else KeyedState
    states = kind(partition.operator, declarations_of(cls), store, max_value_bytes=max_value_bytes)
    instance = OperatorInstance(cls, partition, states, Timers(store, keys), watermark_us, OwnFigures())
    try:
        instance.open()
        yield instance
    finally:
        instance.let_go(lambda close: close())


class Piece:
    """Reader that has all cells of some keys in memory, and reads everything else from the store.

    ``keys``: number of keys in memory.
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
    """Yields all keys of the states with ``tags``, in pieces. Each key occurs once, with the cells of all its
    states."""
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
    """Returns the states with cells that stay unchanged but are read as other types, such as records with a wider
    field."""
    types = {(each["name"], each["tag"]): each.get("types") for each in stored}
    return [
        each
        for each in declarations_of(cls).values()
        if types.get((each.name, each.tag.hex()), now := each.describe().get("types")) != now
    ]


def _may_miss_timers(cls: type[Operator]) -> bool:
    """Tells whether an operator may not handle all timers, see :meth:`.OperatorInstance.check_timers`."""
    return bool(timer_method_lacked(cls) or windows_of(cls))


def _deployed(spec: OperatorSpec) -> DeployedStates:
    return DeployedStates.of(spec.state_schema, spec.dropped)
