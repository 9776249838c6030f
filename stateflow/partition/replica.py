"""A replica without its sockets: the partitions one process creates, owns, warms, gives away and deletes.

:class:`ReplicaNode` joins the parts of a replica around one data directory. :func:`create` makes the first, empty
copies of an operator's partitions, :func:`drop` deletes those of an undeployed operator; both can be repeated after a
crash. A copy that was not created completely is marked as unfinished on disk.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.code.bundles import BundleStore
from stateflow.errors import AlreadyDeployed, StateflowError, StateMissing
from stateflow.partition.batches import Batches
from stateflow.partition.checkpoints import Checkpointer
from stateflow.partition.control import NOBODY, Command, DiskView, FencingGuard, PartitionView
from stateflow.partition.data_directory import Identity, remember
from stateflow.partition.environment import Environment, disk_of
from stateflow.partition.install import Copy
from stateflow.partition.lifecycle import SERVED, Lifecycle, State
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.reader import Reader
from stateflow.partition.recovering import Recovery
from stateflow.partition.registry import Lease, PartitionRegistry
from stateflow.partition.takeover import Restorer, Successor
from stateflow.partition.transfer_in import Receiver
from stateflow.partition.transfer_out import Sender
from stateflow.partition.verification import Trials, Verifier
from stateflow.settings import ReplicaSettings
from stateflow.state import CachePool
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: the batch rate of a partition is 0 when no batch came for this long, seconds
RATE_FORGOTTEN_S = 60.0

# -- Creating an operator's partitions -------------------------------------------------------------------------------


def check(registry: PartitionRegistry, spec: OperatorSpec, total: int) -> None:
    """Checks that this replica could hold ``total`` partitions of this version of an operator, and changes nothing.

    Raises OperatorNotImportable, OperatorOutdated, TooFewFiles, SchemaMismatch.
    """
    registry.check(spec)
    registry.expect(max(0, total - len(_here(registry, spec.name))))


def _here(registry: PartitionRegistry, operator: str) -> set[int]:
    """Returns the operator's partitions that have a database here."""
    return {
        local.id.partition for local in registry.local_partitions() if local.id.operator == operator and local.directory
    }


def create(
    registry: PartitionRegistry,
    spec: OperatorSpec,
    partitions: Iterable[int],
    epoch: int,
    total: int = 0,
    check_asked: Callable[[], None] = lambda: None,
) -> None:
    """Creates empty partitions owned from ``epoch`` on. Partitions that are owned here at this epoch stay as they are.

    Args:
        total: number of the operator's partitions that will be here in the end.
        check_asked: raises if the command to create them is void by now.

    Raises TooFewFiles, before anything is created; StaleEpoch, and the error of ``check_asked``, if the operator may
    have been undeployed meanwhile.
    """
    with registry.making(spec, check_asked):
        partitions = list(partitions)
        here = _here(registry, spec.name)
        registry.expect(max(len(set(partitions) - here), total - len(here)))
        for number in partitions:
            local = registry.local(PartitionId(spec.name, number))
            with local.work, local.mutex:
                check_asked()
                if local.lifecycle.state is State.OWNED and local.lifecycle.epoch == epoch:
                    continue
                _create(registry, local, epoch)
            registry.on_change(local.id)


def _create(registry: PartitionRegistry, local: LocalPartition, epoch: int) -> None:
    """Creates one partition. Callers hold ``work`` and ``mutex``."""
    registry.check_deployed(local.id, epoch)
    if local.lifecycle.state is State.ABSENT and registry.quarantine.has(local.id.operator, local.home.name):
        raise StateMissing(
            "the partition was here before, and its copy is quarantined",
            remedy="restore it from a checkpoint; to start empty, remove the quarantined copy first",
            partition=local.id,
            replica=registry.info.name,
        )
    if local.lifecycle.state is not State.ABSENT or local.lifecycle.epoch >= epoch:
        raise AlreadyDeployed(
            "the partition already exists on this replica",
            remedy="use another operator name or data directory",
            partition=local.id,
            epoch=local.lifecycle.epoch,
        )
    with registry.copies.unfinished(local, f"created-{epoch}") as directory:
        store = registry.environment.open(directory, create=True)
        try:
            leftovers = registry.copies.install(local, Copy(directory, store, lambda here: here.create(epoch)))
        except BaseException:
            if local.store is not store:
                store.close()  # otherwise it could not be opened when the creation is repeated
            raise
    registry.copies.tidy(local, leftovers)


# -- Deleting an undeployed operator's partitions --------------------------------------------------------------------


def drop(registry: PartitionRegistry, operator: str, epoch: int) -> int:
    """Deletes the operator's partitions here at ``epoch`` and older epochs, in any state, and the operator's
    description when no partition is left. Returns the number of deleted partitions.

    After a crash it is repeated: the replica names the remaining partitions at its next registration, and deletes them
    then. Quarantined copies stay, under another name.
    """
    registry.undeployed(operator, epoch)
    local_partitions = [local for local in registry.local_partitions() if local.id.operator == operator]
    _quarantine(registry, operator, epoch)
    dropped = [local.id for local in local_partitions if _drop_local(registry, local, epoch)]
    # no partition is created at these epochs before the next start, which begins a new log
    registry.commits.forget(dropped)
    registry.unlearn(operator)
    if dropped:
        log.warning("%s undeployed: %d partitions deleted", operator, len(dropped))
    return len(dropped)


def _quarantine(registry: PartitionRegistry, operator: str, epoch: int) -> None:
    """Renames the quarantined copies of the dropped deployment. Copies of a later deployment keep their name, and still
    prevent their partition from being created empty."""
    for number in registry.quarantine.partitions(operator):
        local = registry.local(PartitionId(operator, number))
        with local.mutex:
            if local.lifecycle.epoch <= epoch:
                registry.quarantine.undeployed(epoch, operator, local.home.name)


def _drop_local(registry: PartitionRegistry, local: LocalPartition, epoch: int) -> bool:
    """Deletes one partition, after its running batch, whose result is discarded. Returns whether there was anything to
    delete."""
    with local.work, local.mutex:
        if local.lifecycle.epoch <= epoch:
            local.lost = None  # a later deployment has nothing to do with the lost copy
        if local.lifecycle.state is State.ABSENT or not local.lifecycle.drop(epoch):
            return False
        processor, local.processor = local.processor, None
        store, local.store = local.store, None
        incoming, local.incoming = local.incoming, None
        local.directory = local.kept = local.since = local.schema = None
        if processor is not None:
            processor.let_go(registry.environment.aside)
        if store is not None:
            with contextlib.suppress(Exception):  # the database is deleted next, so a failed write does not matter
                store.close()
        if incoming is not None:
            registry.copies.discard(incoming)
        for move_id in list(local.logs):
            registry.drop_log(local, move_id)
        for copy in [path for path in local.home.glob("*") if path.is_dir()]:
            registry.copies.remove(copy)
        registry.environment.remove_tree(local.home)
    registry.on_change(local.id)
    return True


# -- The replica -----------------------------------------------------------------------------------------------------


class ReplicaNode:
    """A replica's parts around one data directory. Called from several threads.

    ``batches`` applies batches, ``reader`` reads states; ``sender`` and ``receiver`` are the two sides of a move,
    ``checkpointer`` and ``restorer`` take and restore checkpoints, ``successor`` takes partitions over; ``verifier``
    looks for damage, ``trials`` try a new version.

    Args:
        lease: None: the replica needs no controller to serve.
        recover: recovers at once; False: the caller calls :meth:`recover`.

    Raises the errors of :class:`~stateflow.partition.registry.PartitionRegistry` for its data directory.
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
        self.authority = FencingGuard(self._registry.read_term(), self._registry.keep_term, alone=lease is None)
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
        """Finds the partitions in the data directory. Call it once, before any other use of the replica."""
        self._recovery.run()

    def give_up_recovery(self) -> None:
        """Ends the recovery early, because this process must end."""
        self._recovery.give_up()

    def _note_loss(self) -> None:
        """Notes that a partition was lost. The controller learns of it from a registration without that partition."""
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
        """Allows these operators, and no others, to be served while no controller answers. A new permission is stored
        on disk before it takes effect; a withdrawal takes effect before it is stored."""
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
        """Binds the replica's checkpoints to this store: another store found at the same URL is refused from now on."""
        remember(self._registry.environment, self._registry.root, store)

    # -- operators and partitions -----------------------------------------------------------------------

    def follow(self, spec: OperatorSpec) -> StateflowError | None:
        """See :meth:`~stateflow.partition.registry.PartitionRegistry.follow`."""
        return self._registry.follow(spec)

    def check(self, spec: OperatorSpec, total: int) -> None:
        """See :func:`check`."""
        check(self._registry, spec, total)

    def create(
        self, spec: OperatorSpec, partitions: Iterable[int], epoch: int, total: int = 0, command: Command = NOBODY
    ) -> None:
        """See :func:`create`."""
        create(self._registry, spec, partitions, epoch, total, partial(self.authority.check, command))

    def drop(self, operator: str, epoch: int) -> int:
        """See :func:`drop`."""
        return drop(self._registry, operator, epoch)

    def lifecycle(self, partition: PartitionId) -> Lifecycle:
        """Returns the lifecycle of a partition on this replica, to be read and not changed."""
        return self._registry.look(partition).lifecycle

    def begin_session(self, command: Command, adopted: str = "") -> None:
        """Obeys this controller, in this session. When this returns, every request of an earlier session is either
        done, or will be refused. Raises StaleTerm, ForeignLedger."""
        self.authority.obey(command, adopted)
        self._registry.barrier()

    def inventory(self) -> Iterator[tuple[Lifecycle, int]]:
        """Yields (lifecycle, sequence) of every partition that has a copy here in any form."""
        for local in self._registry.local_partitions():
            if local.lifecycle.state is not State.ABSENT:
                yield local.lifecycle, local.processor.sequence if local.processor else 0

    def view(self, partition: PartitionId) -> PartitionView:
        """Returns this replica's report on a partition."""
        local = self._registry.look(partition)
        lifecycle, traffic = local.lifecycle, local.traffic
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
        """Returns a view of every partition that has a copy here in any form."""
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
        """Tells whether the data directory has no copy of any partition, served or quarantined."""
        return next(self.inventory(), None) is None and not self._registry.quarantine.any

    def quiet_in(self, partition: PartitionId, pause_s: float) -> float:
        """Returns the seconds that a fence with a pause of ``pause_s`` should wait for the next commit; 0: fence
        now."""
        return self._registry.look(partition).timing.wait_s(self._clock.monotonic(), pause_s)

    def sealed_at(self, partition: PartitionId) -> float:
        """Returns the time at which the partition's last seal began, monotonic seconds; 0: never in this process."""
        return self._registry.look(partition).sealed_at

    def batch_rate(self, partition: PartitionId) -> float:
        """Returns the batches per second, averaged over the time in which they came."""
        timing = self._registry.look(partition).timing
        return timing.rate if self._clock.monotonic() - timing.began_at < RATE_FORGOTTEN_S else 0.0

    def bytes_on_disk(self, partition: PartitionId) -> int:
        local = self._registry.look(partition)
        incoming = local.incoming
        sizes: dict[int, int] = {}  # by inode: a file that two copies share counts once
        for directory in (local.directory, incoming.directory if incoming is not None else None):
            if directory is not None and directory.is_dir():
                with contextlib.suppress(FileNotFoundError):  # the copy may go meanwhile
                    for stat in (path.stat() for path in directory.iterdir() if path.name.endswith(".sst")):
                        sizes[stat.st_ino] = stat.st_size
        return sum(sizes.values())

    def disk(self) -> DiskView:
        """Returns the disk space available for partitions."""
        environment, settings = self._registry.environment, self.settings
        free = environment.free_bytes(self._registry.root) - settings.disk_reserve_bytes
        return DiskView(disk_of(self.identity.place), max(0, free), settings.room_bytes)

    def sequence(self, partition: PartitionId) -> int:
        """Returns the sequence of the last commit; 0 where the partition is not being served here."""
        processor = self._registry.look(partition).processor
        return processor.sequence if processor else 0

    def owned(self, operator: str | None = None) -> list[PartitionId]:
        return sorted(
            local.id
            for local in self._registry.local_partitions()
            if local.lifecycle.state in SERVED and operator in (None, local.id.operator)
        )

    def cancel(self, partition: PartitionId, move_id: str, owned_at: int = 0) -> bool:
        """Stops sending and receiving this move. False: it has sealed here and goes forward.

        ``owned_at``: see :meth:`~stateflow.partition.lifecycle.Lifecycle.cancel`. Raises StateMissing.
        """
        possible = self.sender.cancel(
            partition, move_id, owned_at
        )  # first, so that a prepare that comes late is refused …
        self.receiver.abandon(partition, move_id)  # … and one that came before is undone
        return possible

    def close(self) -> None:
        self._registry.close()
