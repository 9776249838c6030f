"""Local partition: one partition as it is on a replica, with what is served, what is incoming, and who follows it.

A slot has two locks: ``work`` is held while the store is written or copied (a batch, a snapshot), ``mutex`` for the
instant of a lifecycle transition, so that a fence never waits for a batch in order to be *heard*. Order: ``work``
before ``mutex``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateflow.checkpoint import Adoption, Manifest
from stateflow.errors import REPORT_LINE, InvariantBroken, StateDamaged
from stateflow.runtime.cadence import Cadence
from stateflow.runtime.environment import WorkLock
from stateflow.runtime.host import PartitionHost
from stateflow.runtime.lifecycle import SERVED, Lifecycle, State
from stateflow.runtime.passing import Passing
from stateflow.runtime.traffic import Traffic
from stateflow.runtime.transfer import NO_CHANGES, ChangeLog, Kept, Seal
from stateflow.runtime.watchdog import InHand
from stateflow.storage import PartitionStore
from stateflow.types import PartitionId
from stateflow.validating import check


@dataclass(slots=True)
class Slot:
    """A partition on this replica. ``directory``: where ``store`` is; ``incoming``: a copy that is being built."""

    id: PartitionId
    lifecycle: Lifecycle
    home: Path
    work: WorkLock
    mutex: AbstractContextManager[Any]
    directory: Path | None = None
    store: PartitionStore | None = None
    host: PartitionHost | None = None
    incoming: Incoming | None = None
    logs: dict[str, ChangeLog] = field(default_factory=dict)  # by move
    snapshots: int = 0
    restoring: Restoring | None = None
    checkpointed: tuple[str, int, int] = ("", 0, 0)  # store, epoch and sequence of the last checkpoint
    cadence: Cadence = field(default_factory=Cadence)
    kept: Kept | None = None  # what the copy in ``directory`` is, once it was sealed for a move
    since: Since | None = None  # changes since it moved in, as it might move back
    lost: StateDamaged | None = None  # the damage for which it was given up
    stuck: InHand | None = None  # a batch that was taken away, and has not returned
    schema: bytes | None = None  # its stored schema, while ``store`` is closed
    sealed_at: float = 0.0  # when its last seal began, monotonic seconds: rows were processed until then
    traffic: Traffic = field(default_factory=Traffic)
    passing: Passing | None = None  # positions of batches that skipped it

    def replace(self, directory: Path, store: PartitionStore) -> Path | None:
        """Makes another copy the partition. Callers hold ``mutex``.

        Returns the directory of the former copy; None: there is none to remove.
        """
        former, self.directory, self.store = self.directory, directory, store
        self.kept = self.since = self.lost = None
        return former if former != directory else None

    def tell(self, sequence: int, encode: Callable[[], bytes]) -> None:
        """Tells followers of a commit."""
        followers = list(self.logs.values())
        if self.since is not None:
            if self.since.changes.overflowed:
                self.since = None
            else:
                followers.append(self.since.changes)
        if followers:
            change_set = encode()
            for follower in followers:
                follower.append(sequence, change_set)

    def validate(self) -> None:
        """Checks the invariants. Callers hold ``mutex``. Raises InvariantBroken in a state that only a bug leads to."""
        self.lifecycle.validate()
        for words in self._broken():
            raise InvariantBroken(
                f"an invariant is broken in {self.lifecycle.state}: {words}",
                remedy=REPORT_LINE,
                partition=self.id,
                epoch=self.lifecycle.epoch,
                move=self.lifecycle.move_id or None,
            )

    def _broken(self) -> Iterator[str]:
        lifecycle, incoming = self.lifecycle, self.incoming
        serves = lifecycle.state in SERVED
        copies = [each.directory for each in (self, incoming, self.restoring) if each is not None and each.directory]
        if lifecycle.partition != self.id:
            yield "a slot and its lifecycle are of the same partition"
        if incoming is not None and (lifecycle.state is not State.WARMING or lifecycle.move_id != incoming.move_id):
            yield "a copy comes in only while the partition warms, for the same move"
        if self.directory is None and (serves or lifecycle.state is State.SEALED):
            yield "an owned or sealed partition is on disk"
        if self.directory is None and self.store is not None:
            yield "an open database has a directory"
        if any(directory.parent != self.home for directory in copies) or len(set(copies)) < len(copies):
            yield "each copy has its own directory in the partition's"
        if self.host is not None and not serves:
            yield "only an owned partition has a host"
        if self.host is not None and (self.host.epoch != lifecycle.epoch or self.store is None):
            yield "the host has the owned epoch and an open database"
        if self.lost is not None and serves:
            yield "a lost partition is not served"
        if self.stuck is not None and lifecycle.in_hand:
            yield "no batch runs beside a stuck one"


@dataclass(frozen=True, slots=True)
class Since:
    """Every change set since a partition moved in. ``digest``: of the seal it moved in with."""

    kept: Kept
    digest: str
    changes: ChangeLog


@dataclass(slots=True)
class Incoming:
    """An incoming copy of a partition. ``changes``: chain of the change sets applied to the base so far; ``seal``: seal
    with which a standby's copy ends, when its source sealed for another replica.
    """

    move_id: str
    directory: Path
    sequence: int = -1
    base: str = ""  # digest
    changes: bytes = NO_CHANGES
    store: PartitionStore | None = None
    seal: Seal | None = None


@dataclass(frozen=True, slots=True)
class Restoring:
    """A checkpoint that was fetched and proved. ``adoption``: by the replica's own store, where the ownership is
    published first; None: it has no store. ``owning``: re-entrant lock, held while the checkpoint becomes the
    partition.
    """

    id: str
    directory: Path
    store: PartitionStore
    manifest: Manifest
    epoch_min: int
    adoption: Adoption | None
    owning: AbstractContextManager[Any]


class CheckedMutex:
    """A slot's ``mutex`` that validates the slot when it is released: its holder has then made a whole change."""

    def __init__(self, mutex: AbstractContextManager[Any], slot: Slot) -> None:
        self._mutex, self._slot, self._depth = mutex, slot, 0

    def __enter__(self) -> None:
        self._mutex.__enter__()
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._depth -= 1
        try:
            if not self._depth and kind is None:
                check(self._slot)
        finally:
            self._mutex.__exit__(kind, *error)
