"""A replica without its sockets: the partitions one process owns, warms and gives away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import StateflowError
from stateflow.runtime.authority import NOBODY, Authority, Command
from stateflow.runtime.batches import Batches
from stateflow.runtime.bundles import BundleStore
from stateflow.runtime.checkpointing import Checkpointer
from stateflow.runtime.creating import check, create
from stateflow.runtime.dropping import drop
from stateflow.runtime.environment import Environment, disk_of
from stateflow.runtime.identity import Identity
from stateflow.runtime.known_store import remember
from stateflow.runtime.lease import Lease
from stateflow.runtime.lifecycle import SERVED, Lifecycle, State
from stateflow.runtime.reader import Reader
from stateflow.runtime.receiving import Receiver
from stateflow.runtime.recovering import Recovery
from stateflow.runtime.registry import PartitionRegistry
from stateflow.runtime.restoring import Restorer
from stateflow.runtime.sending import Sender
from stateflow.runtime.takeover import Successor
from stateflow.runtime.trial import Trials
from stateflow.runtime.verifying import Verifier
from stateflow.runtime.view import DiskView, PartitionView
from stateflow.settings import ReplicaSettings
from stateflow.state import CachePool
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

#: the batch rate of a partition is 0 when no batch came for this long, seconds
RATE_FORGOTTEN_S = 60.0


class ReplicaNode:
    """A replica's parts around one data directory. Called from several threads.

    ``batches`` serves, ``reader`` reads what is there; ``sender`` and ``receiver`` are its two sides of a move,
    ``checkpointer`` and ``restorer`` those of a checkpoint, ``successor`` its part in a takeover; ``verifier`` looks
    for damage, ``trials`` try a new version.

    Args:
        lease: None: the replica needs no controller to serve.
        recover: recovers at once; False: the caller calls :meth:`recover`.

    Raises what :class:`~stateflow.runtime.registry.PartitionRegistry` raises for its data directory.
    """

    def __init__(
        self,
        info: ReplicaInfo,
        data_dir: Path,
        settings: ReplicaSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        environment: Environment | None = None,
        lease: Lease | None = None,
        *,
        recover: bool = True,
    ) -> None:
        self.info = info
        self.lease = lease or Lease()
        self.settings = settings or ReplicaSettings()
        self._clock = clock
        self.cache = CachePool(self.settings.cache_bytes)
        self._registry = PartitionRegistry(info, data_dir, self.settings, clock, environment)
        self._recovery = Recovery(self._registry)
        self.lost_some = False
        self._registry.on_lost = self._note_loss
        self._alone_order, self.lease.alone = self._registry.read_alone()
        self.authority = Authority(self._registry.read_term(), self._registry.keep_term, alone=lease is None)
        self.sender = Sender(self._registry, self.authority)
        self.receiver = Receiver(self._registry)
        self.checkpointer = Checkpointer(self._registry)
        self.verifier = Verifier(self._registry)
        self.trials = Trials(self._registry, self.verifier)
        self.restorer = Restorer(self._registry, self.authority)
        self.successor = Successor(self._registry, self.lease, self.authority, clock)
        self.batches = Batches(self._registry, self.lease, self.sender, self.cache)
        self.reader = Reader(self._registry, self.batches)
        if recover:
            self.recover()

    def recover(self) -> None:
        """Finds what the data directory holds. Called once, before anything else is asked of the replica."""
        self._recovery.run()

    def give_up_recovery(self) -> None:
        """Ends the recovery early, because this process is to end."""
        self._recovery.give_up()

    def _note_loss(self) -> None:
        """Notes that a partition was lost. The controller hears of it by a registration without that partition."""
        self.lost_some = True

    @property
    def served_at(self) -> float:
        """Time when a batch last ran, monotonic seconds; minus infinity: never."""
        return self._registry.served_at

    @property
    def alone(self) -> tuple[int, frozenset[str]]:
        """(order, operators) that may be served while no controller answers, as kept on disk."""
        return self._alone_order, self.lease.alone

    def serve_alone(self, order: int, operators: frozenset[str]) -> None:
        """Allows these operators, and no others, to be served while no controller answers. What is newly allowed is
        kept on disk before it takes effect; what is no longer allowed takes effect before that is kept.
        """
        if (order, operators) == self.alone:
            return
        self.lease.alone &= operators
        self._registry.keep_alone(order, operators)
        self._alone_order, self.lease.alone = order, operators

    @property
    def bundles(self) -> BundleStore:
        return self._registry.bundles

    def operators(self) -> list[OperatorSpec]:
        """Returns the operators that this replica knows."""
        return self._registry.operators()

    @property
    def identity(self) -> Identity:
        """Identity of the data directory."""
        return self._registry.identity

    def on_change(self, listener: Callable[[PartitionId], None]) -> None:
        """Calls ``listener``, from any thread, after each change of a partition's lifecycle."""
        self._registry.on_change = listener

    def remember(self, store: CheckpointStore) -> None:
        """Keeps checkpoints in this store from now on, and in no other store that is found in its place."""
        remember(self._registry.environment, self._registry.root, store)

    # -- operators and partitions -----------------------------------------------------------------------

    def learn(self, spec: OperatorSpec) -> None:
        """Learns an operator: loads its code and keeps its description. Raises OperatorNotImportable."""
        self._registry.learn(spec)

    def follow(self, spec: OperatorSpec) -> StateflowError | None:
        """See :meth:`~stateflow.runtime.registry.PartitionRegistry.follow`."""
        return self._registry.follow(spec)

    def check(self, spec: OperatorSpec, total: int) -> None:
        """See :func:`~stateflow.runtime.creating.check`."""
        check(self._registry, spec, total)

    def create(
        self, spec: OperatorSpec, partitions: Iterable[int], epoch: int, total: int = 0, command: Command = NOBODY
    ) -> None:
        """See :func:`~stateflow.runtime.creating.create`."""
        create(self._registry, spec, partitions, epoch, total, partial(self.authority.check, command))

    def drop(self, operator: str, epoch: int) -> int:
        """See :func:`~stateflow.runtime.dropping.drop`."""
        return drop(self._registry, operator, epoch)

    def lifecycle(self, partition: PartitionId) -> Lifecycle:
        """Returns the lifecycle of a partition on this replica, to be read and not changed."""
        return self._registry.look(partition).lifecycle

    def begin_session(self, command: Command, adopted: str = "") -> None:
        """Obeys this controller, in this session. What was asked for in an earlier session is refused from now on, or
        done when this returns. Raises StaleTerm, ForeignLedger.
        """
        self.authority.obey(command, adopted)
        self._registry.barrier()

    def inventory(self) -> Iterator[tuple[Lifecycle, int]]:
        """Yields (lifecycle, sequence) of every partition that is here in some form."""
        for slot in self._registry.slots():
            if slot.lifecycle.state is not State.ABSENT:
                yield slot.lifecycle, slot.host.sequence if slot.host else 0

    def view(self, partition: PartitionId) -> PartitionView:
        """Returns what this replica reports of a partition."""
        slot = self._registry.look(partition)
        lifecycle, traffic = slot.lifecycle, slot.traffic
        return PartitionView(
            partition,
            lifecycle.state,
            lifecycle.epoch,
            self.sequence(partition),
            lifecycle.move_id,
            self.batch_rate(partition),
            rows=traffic.rows,
            row_bytes=round(traffic.bytes),
            origins=dict(traffic.origins),
        )

    def views(self) -> list[PartitionView]:
        """Returns a view of every partition that is here in some form."""
        return [self.view(lifecycle.partition) for lifecycle, _ in self.inventory()]

    def sized(self, views: Iterable[PartitionView]) -> tuple[list[PartitionView], DiskView]:
        """Returns these views with the size of their files, and the disk's view. Waits for the disk."""
        return [self._sized(view) for view in views], self.disk()

    def _sized(self, view: PartitionView) -> PartitionView:
        store = self._registry.look(view.partition).store
        entries = None if store is None else store.entries()
        return replace(view, bytes=self.bytes_on_disk(view.partition), entries=entries)

    @property
    def is_empty(self) -> bool:
        """Tells whether nothing of any partition is here, served or quarantined."""
        return next(self.inventory(), None) is None and not self._registry.evidence.any

    def quiet_in(self, partition: PartitionId, pause_s: float) -> float:
        """Returns how long a fence that costs ``pause_s`` should wait for the next commit, seconds; 0: fence now."""
        return self._registry.look(partition).cadence.wait_s(self._clock.monotonic(), pause_s)

    def sealed_at(self, partition: PartitionId) -> float:
        """Returns when the partition's last seal began, monotonic seconds; 0: never in this process."""
        return self._registry.look(partition).sealed_at

    def batch_rate(self, partition: PartitionId) -> float:
        """Returns the batches per second, averaged over the time in which they came."""
        cadence = self._registry.look(partition).cadence
        return cadence.rate if self._clock.monotonic() - cadence.began_at < RATE_FORGOTTEN_S else 0.0

    def bytes_on_disk(self, partition: PartitionId) -> int:
        slot = self._registry.look(partition)
        incoming = slot.incoming
        sizes: dict[int, int] = {}  # by inode: a file that two copies share counts once
        for directory in (slot.directory, incoming.directory if incoming is not None else None):
            if directory is not None and directory.is_dir():
                with contextlib.suppress(FileNotFoundError):  # the copy may go meanwhile
                    for stat in (path.stat() for path in directory.iterdir() if path.name.endswith(".sst")):
                        sizes[stat.st_ino] = stat.st_size
        return sum(sizes.values())

    def disk(self) -> DiskView:
        """Returns the space on disk that there is for partitions."""
        environment, settings = self._registry.environment, self.settings
        free = environment.free_bytes(self._registry.root) - settings.disk_reserve_bytes
        return DiskView(disk_of(self.identity.place), max(0, free), settings.room_bytes)

    def sequence(self, partition: PartitionId) -> int:
        """Returns the sequence of the last commit; 0 where the partition is not being served here."""
        host = self._registry.look(partition).host
        return host.sequence if host else 0

    def owned(self, operator: str | None = None) -> list[PartitionId]:
        return sorted(
            (
                slot.id
                for slot in self._registry.slots()
                if slot.lifecycle.state in SERVED and operator in (None, slot.id.operator)
            ),
            key=lambda partition: (partition.operator, partition.partition),
        )

    def cancel(self, partition: PartitionId, move_id: str, owned_at: int = 0) -> bool:
        """Stops sending and receiving this move. False: it has sealed here and goes forward.

        ``owned_at``: see :meth:`~stateflow.runtime.lifecycle.Lifecycle.cancel`. Raises StateMissing.
        """
        possible = self.sender.cancel(
            partition, move_id, owned_at
        )  # first, so that a prepare that comes late is refused …
        self.receiver.abandon(partition, move_id)  # … and one that came before is undone
        return possible

    def close(self) -> None:
        self._registry.close()
