"""A replica without its sockets: the partitions one process owns, warms and gives away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from stateflow.changes import Mutations
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import AlreadyDeployed, NotOwner
from stateflow.runtime import layout
from stateflow.runtime.checkpointing import Checkpointer
from stateflow.runtime.host import Applied, PartitionHost
from stateflow.runtime.lease import Lease
from stateflow.runtime.lifecycle import Lifecycle, State, Verdict
from stateflow.runtime.machine import Machine
from stateflow.runtime.positions import Batch
from stateflow.runtime.reading import declaration_of, entries_of
from stateflow.runtime.receiving import Receiver
from stateflow.runtime.restoring import Restorer
from stateflow.runtime.sending import Sender
from stateflow.runtime.shelf import Shelf, Slot
from stateflow.runtime.takeover import Successor
from stateflow.settings import ReplicaSettings
from stateflow.state import CachePool
from stateflow.storage import PartitionStore
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

#: a rate says nothing any more when no batch came for so long
RATE_FORGOTTEN_S = 60.0


class ReplicaNode:
    """Serves batches; ``sender`` and ``receiver`` are its two sides of a move, ``checkpointer`` and ``restorer`` those
    of a checkpoint, ``successor`` its part in a take-over. Called from several threads.

    Args:
        lease: without one it needs no controller to serve.

    Raises what :class:`~stateflow.runtime.shelf.Shelf` raises for its data directory.
    """

    def __init__(
        self,
        info: ReplicaInfo,
        data_dir: Path,
        settings: ReplicaSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        machine: Machine | None = None,
        lease: Lease | None = None,
    ) -> None:
        self.info = info
        self.lease = lease or Lease()
        self.settings = settings or ReplicaSettings()
        self._clock = clock
        self.cache = CachePool(self.settings.cache_bytes)
        self._shelf = Shelf(info, data_dir, self.settings, clock, machine)
        self.sender = Sender(self._shelf, self.lease)
        self.receiver = Receiver(self._shelf)
        self.checkpointer = Checkpointer(self._shelf)
        self.restorer = Restorer(self._shelf)
        self.successor = Successor(self._shelf, self.lease, clock)
        self._held: dict[str, float] = {}  # operator → until, monotonic

    @property
    def served_at(self) -> float:
        """When a batch was last in hand, monotonic seconds; minus infinity: never."""
        return self._shelf.served_at

    def on_change(self, listener: Callable[[PartitionId], None]) -> None:
        """Have ``listener`` called, from any thread, after each change of a partition's lifecycle."""
        self._shelf.on_change = listener

    # -- operators and partitions -----------------------------------------------------------------------

    def learn(self, spec: OperatorSpec) -> None:
        """Know an operator: load its code and keep its description. Raises OperatorNotImportable."""
        self._shelf.learn(spec)

    def create(self, spec: OperatorSpec, partitions: Iterable[int], epoch: int) -> None:
        """Empty partitions owned from ``epoch`` on. Those that are there already at this epoch stay as they are."""
        self.learn(spec)
        for number in partitions:
            slot = self._shelf.slot(PartitionId(spec.name, number))
            with slot.work, slot.mutex:
                if slot.lifecycle.state is State.OWNED and slot.lifecycle.epoch == epoch:
                    continue
                if slot.lifecycle.state is not State.ABSENT or slot.lifecycle.epoch >= epoch:
                    raise AlreadyDeployed(
                        "the partition is here already",
                        remedy="use another operator name or data directory",
                        partition=slot.id,
                        epoch=slot.lifecycle.epoch,
                    )
                slot.directory = slot.home / f"created-{epoch}"
                slot.store = self._shelf.machine.open(slot.directory, create=True)
                self._shelf.machine.sync([slot.home, slot.home.parent])
                ownership = layout.Ownership(self.info.name, State.OWNED, epoch)
                slot.store.apply(Mutations(puts=[(layout.OWNERSHIP, ownership.encode())]), sync=True)
                slot.lifecycle.create(epoch)
            self._shelf.on_change(slot.id)

    def lifecycle(self, partition: PartitionId) -> Lifecycle:
        """What this replica holds of a partition. To be read, not changed."""
        return self._shelf.slot(partition).lifecycle

    def begin_session(self, session: str) -> None:
        """What was asked for in an earlier one is refused from now on, or done when this returns."""
        self.lease.begin(session)
        for slot in self._shelf.slots():
            with slot.mutex:
                pass

    def inventory(self) -> Iterator[tuple[Lifecycle, int]]:
        """(lifecycle, sequence) of every partition that is here in some form."""
        for slot in self._shelf.slots():
            if slot.lifecycle.state is not State.ABSENT:
                yield slot.lifecycle, slot.host.sequence if slot.host else 0

    def quiet_in(self, partition: PartitionId, pause_s: float) -> float:
        """How long a fence that costs ``pause_s`` should wait for the next commit, seconds; 0: fence now."""
        return self._shelf.slot(partition).rhythm.wait_s(self._clock.monotonic(), pause_s)

    def batch_rate(self, partition: PartitionId) -> float:
        """Batches a second, as averaged while they came."""
        rhythm = self._shelf.slot(partition).rhythm
        return rhythm.rate if self._clock.monotonic() - rhythm.began_at < RATE_FORGOTTEN_S else 0.0

    def bytes_on_disk(self, partition: PartitionId) -> int:
        directory = self._shelf.slot(partition).directory
        if directory is None or not directory.is_dir():
            return 0
        return sum(path.stat().st_size for path in directory.iterdir() if path.name.endswith(".sst"))

    def sequence(self, partition: PartitionId) -> int:
        """Of the last commit, as far as the partition is at work here; else 0."""
        host = self._shelf.slot(partition).host
        return host.sequence if host else 0

    def owned(self, operator: str | None = None) -> list[PartitionId]:
        return sorted(
            (
                slot.id
                for slot in self._shelf.slots()
                if slot.lifecycle.state in (State.OWNED, State.FENCING) and operator in (None, slot.id.operator)
            ),
            key=lambda partition: (partition.operator, partition.partition),
        )

    def hold(self, operator: str, seconds: float) -> None:
        """Let requests of an operator wait, for so long at most; 0: go on."""
        self._held[operator] = self._clock.monotonic() + seconds
        if not seconds:
            for slot in self._shelf.slots():
                if slot.id.operator == operator:
                    self._shelf.on_change(slot.id)

    def _is_held(self, operator: str) -> bool:
        return self._held.get(operator, 0.0) > self._clock.monotonic() if self._held else False

    def cancel(self, partition: PartitionId, move_id: str, owned_at: int = 0) -> bool:
        """Neither send nor receive this move any more. False: it has sealed here and goes forward.

        ``owned_at``: see :meth:`~stateflow.runtime.lifecycle.Lifecycle.cancel`. Raises StateMissing.
        """
        possible = self.sender.cancel(
            partition, move_id, owned_at
        )  # first, so that a prepare that comes late is refused …
        self.receiver.abandon(partition, move_id)  # … and one that came before is undone
        return possible

    # -- records ------------------------------------------------------------------------------------------

    def apply(
        self,
        partition: PartitionId,
        epoch: int,
        batch: Batch,
        input_schema: bytes,
        rows: bytes,
        after: int | None = None,
    ) -> Applied | ReplicaInfo | None:
        """Apply a batch to one partition.

        Returns what was applied; or the replica the partition went to; or None: it is on its way here, ask
        again after the next ``on_change``. Raises LeaseLost, and what is wrong with sender, rows or operator.
        ``after``: see :meth:`~stateflow.runtime.host.PartitionHost.apply`.
        """
        slot = self._shelf.slot(partition)
        self.lease.check(self._clock.monotonic())
        if self._is_held(partition.operator):
            return None
        with slot.work:
            with slot.mutex:
                verdict = slot.lifecycle.begin(epoch)
            if verdict is not Verdict.SERVE:
                return slot.lifecycle.successor if verdict is Verdict.MOVED else None
            self._shelf.served_at = began = self._clock.monotonic()
            slot.rhythm.began(began)
            try:
                applied = self._host(slot).apply(batch, input_schema, rows, self._clock.now_us(), after)
                now = self._clock.monotonic()
                slot.rhythm.ended(now)
                self._shelf.served_at = now
                # the process may have been stopped meanwhile: what was committed after the lease is not said
                self.lease.check(now)
                return applied
            finally:
                with slot.mutex:
                    if slot.lifecycle.finish():
                        self.sender.seal(slot)

    def _host(self, slot: Slot) -> PartitionHost:
        if slot.host is None:
            _, cls = self._shelf.operator(slot.id.operator)
            assert slot.store is not None
            slot.host = PartitionHost(
                cls,
                slot.id,
                slot.store,
                slot.lifecycle.epoch,
                cached_keys=self.settings.cached_keys,
                cache=self.cache,
                max_value_bytes=self.settings.value_bytes_max,
                sync=self.settings.acknowledge != "wal",
                on_commit=partial(self._committed, slot),
                clock=self._clock,
            )
        return slot.host

    @staticmethod
    def _committed(slot: Slot, sequence: int, encode: Callable[[], bytes]) -> None:
        followers = list(slot.logs.values())
        if slot.since is not None:
            if slot.since.changes.overflowed:
                slot.since = None
            else:
                followers.append(slot.since.changes)
        if followers:
            change_set = encode()
            for follower in followers:
                follower.append(sequence, change_set)

    # -- reading ------------------------------------------------------------------------------------------

    def scan(
        self, partition: PartitionId, state: str, keys: Iterable[bytes] = ()
    ) -> Iterator[tuple[object, object, object]]:
        """(key, entry key or None, value) of one state, as of one moment. Raises UnknownState, NotOwner.

        Args:
            keys: as they are stored; none: all.
        """
        store = self._owned_store(partition)  # first: one that has lost its data knows no operator either
        _, cls = self._shelf.operator(partition.operator)
        declaration = declaration_of(cls, state, partition.operator)
        try:
            yield from entries_of(declaration, store, keys)
        except Exception:
            self._owned_store(partition)  # it left in the middle: NotOwner says it better
            raise

    def position(self, partition: PartitionId, source: str) -> layout.Position | None:
        """How far ``source`` has come in the partition. Raises NotOwner."""
        stored = self._owned_store(partition).get(layout.POSITION + source.encode())
        return None if stored is None else layout.Position.decode(stored)

    def _owned_store(self, partition: PartitionId) -> PartitionStore:
        slot = self._shelf.slot(partition)
        if slot.lifecycle.state is not State.OWNED:
            raise NotOwner("the partition is not owned here", remedy="refresh the assignment", partition=partition)
        return self._shelf.store(slot)

    def close(self) -> None:
        self._shelf.close()
