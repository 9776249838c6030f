"""Verification: reading a whole partition beside the stream, to find what is wrong with it before it is needed."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stateflow.checkpoint.proof import state_digest
from stateflow.errors import StateDamaged, StateflowError, Unavailable
from stateflow.runtime.checkpointing import DIGEST_SHARE, NOT_STATE
from stateflow.runtime.committing import read_sequence
from stateflow.runtime.control import Verification
from stateflow.runtime.lifecycle import State
from stateflow.runtime.rate_limit import RateLimit
from stateflow.runtime.registry import PartitionRegistry
from stateflow.runtime.schema import is_evolved
from stateflow.runtime.slot import Slot
from stateflow.state import Declaration, check_cell, declarations_of
from stateflow.state.cells import CELL, EXPIRES, FORMAT_VERSION
from stateflow.storage import PartitionStore
from stateflow.storage.faults import meaning
from stateflow.types import PartitionId

#: faults of one partition that are reported one by one
FAULTS_MAX = 5
#: how often a standby is checked for having reached its owner's sequence, seconds
LOOK_S = 0.002
#: how often a wait checks whether the verification is still wanted, seconds
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
    """The verification was stopped: no caller wants it any more."""


class Verifier:
    """Verifies partitions. Called from several threads; changes nothing.

    Args:
        sleep: waits for a number of seconds, to make way for other work.
    """

    def __init__(self, registry: PartitionRegistry, sleep: Callable[[float], None] = time.sleep) -> None:
        self._registry, self._sleep = registry, sleep

    def begin(self, partition: PartitionId, standby_of: int | None = None, wait_s: float = 1.0) -> Copy | None:
        """Takes a snapshot, between two batches, of what is owned here; None: it is not.

        Args:
            standby_of: the owner's sequence. The copy that follows here is taken instead, when it has reached this
                sequence, or as it is after ``wait_s``. None: what is owned is taken.
        """
        slot = self._registry.look(partition)
        if standby_of is not None:
            return self._standby(slot, standby_of, wait_s)
        with contextlib.suppress(Exception):  # outside the lock, so that little is left to flush inside
            self._registry.store(slot).flush()
        with slot.work:
            with slot.mutex:
                if slot.lifecycle.state is not State.OWNED:
                    return None
                epoch = slot.lifecycle.epoch
            db = self._registry.store(slot)
            self._registry.settle(slot)
            return self._snapshot(partition, db, epoch)

    def _standby(self, slot: Slot, sequence: int, wait_s: float) -> Copy | None:
        until = self._registry.clock.monotonic() + wait_s
        while True:
            with slot.work:
                incoming = slot.incoming
                if incoming is None or incoming.store is None:
                    return None
                if incoming.sequence >= sequence or self._registry.clock.monotonic() >= until:
                    return self._snapshot(slot.id, incoming.store, slot.lifecycle.epoch)
            self._sleep(LOOK_S)

    def _snapshot(self, partition: PartitionId, db: PartitionStore, epoch: int) -> Copy:
        directory = self._registry.snapshots / f"verify-{uuid.uuid4().hex}"
        try:
            db.snapshot(directory)
        except Exception as error:
            raise Unavailable(
                f"cannot take a snapshot: {error}", remedy="free space in the data directory", partition=partition
            ) from error
        return Copy(partition, directory, epoch, read_sequence(db))

    def read(self, copy: Copy, stopped: Callable[[], bool] = lambda: False) -> Verification:
        """Reads all of a copy, at most at ``verify_bytes_per_s``, and slower while batches come: every block by its
        checksum, and every cell by its declaration. Raises Stopped.
        """
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
        except Exception as error:  # noqa: BLE001 - files may be anything
            faults.append(_unreadable(copy.partition, error))
        if reading.wrong > len(faults):
            faults.append(_cells_wrong(copy.partition, reading.wrong))
        return Verification(copy.epoch, copy.sequence, True, reading.size, reading.cells, digest, faults)

    def end(self, copy: Copy) -> None:
        self._registry.environment.remove_tree(copy.directory)

    def _declared(self, partition: PartitionId, db: PartitionStore) -> dict[bytes, Declaration]:
        """Returns the declarations of states by tag. Empty where the operator cannot be loaded here, or another version
        of it stored what is there: the first batch makes that what is declared now.
        """
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
                raise StateDamaged("a state cell has an unknown format", remedy="check which version wrote it")
        except StateflowError as error:
            self.wrong += 1
            if self.wrong <= FAULTS_MAX:
                self.faults.append(error)


def _unreadable(partition: PartitionId, error: Exception) -> StateflowError:
    meant = meaning(error)
    what = str(error) if meant is None else meant.what
    return StateDamaged(
        f"the partition cannot be read completely: {what}",
        remedy=f"restore it with `stateflow checkpoint restore {partition.operator} {partition.partition}`",
        partition=partition,
    )


def _cells_wrong(partition: PartitionId, count: int) -> StateflowError:
    return StateDamaged(
        f"{count} state cells cannot be decoded",
        remedy=f"restore it with `stateflow checkpoint restore {partition.operator} {partition.partition}`",
        partition=partition,
    )
