"""A replica without its sockets: the partitions one process finds, creates, owns, reads, gives away and deletes.

:class:`ReplicaNode` joins the parts of a replica around one data directory.

* Start: :class:`Recovery` finds each partition's newest copy that this replica owned; it installs nothing. See
  :mod:`stateflow.partition.data_directory` for the states of a copy on disk.
* Deployment: :func:`create` makes an operator's empty partitions, :func:`drop` deletes those of an undeployed one; both
  can be repeated after a crash. A copy that was not created completely is marked as unfinished on disk.
* Reading: :class:`Reader` reads states and positions while batches go on. It takes the partition's lock ``work``, which
  batches hold, only to evolve states that no batch has evolved since a deployment. Positions include those of batches
  that skipped the partition.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from stateflow.checkpoint import CheckpointStore
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.code.bundles import BundleStore
from stateflow.durable import listed
from stateflow.errors import AlreadyDeployed, CommitLogDamaged, DecodeError, StateDamaged, StateflowError, StateMissing
from stateflow.metrics.limits import Limit
from stateflow.partition import layout
from stateflow.partition.batches import Batches
from stateflow.partition.change_feed import Kept
from stateflow.partition.checkpoints import Checkpointer
from stateflow.partition.control import NOBODY, Command, DiskView, FencingGuard, PartitionView
from stateflow.partition.data_directory import PART, RECEIVED, UNFINISHED, Copy, Identity, remember
from stateflow.partition.environment import Environment, disk_of
from stateflow.partition.layout import read_sequence
from stateflow.partition.lifecycle import SERVED, Lifecycle, State
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.processor import StoredStates
from stateflow.partition.reading import Reader
from stateflow.partition.registry import Lease, PartitionRegistry
from stateflow.partition.takeover import Restorer, Successor, abandon_restore
from stateflow.partition.transfer_in import Receiver
from stateflow.partition.transfer_out import Sender
from stateflow.partition.verification import Trials, Verifier
from stateflow.settings import ReplicaSettings
from stateflow.state import CachePool
from stateflow.storage.commit_log import Commit
from stateflow.storage.faults import damage
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: the batch rate of a partition is 0 when no batch has arrived for this long, seconds
RATE_FORGOTTEN_S = 60.0

# -- Start -----------------------------------------------------------------------------------------------------------


class Recovery:
    """Recovers a data directory. Runs once, before any other use."""

    def __init__(self, registry: PartitionRegistry) -> None:
        self._registry = registry
        self._given_up = False

    def give_up(self) -> None:
        """Ends the recovery early, because this process must end. Called from another thread."""
        self._given_up = True

    def run(self) -> None:
        """Finds the partitions. Quarantines and logs copies that cannot be used; removes nothing that may be state."""
        registry = self._registry
        registry.commits.find()
        registry.skipped_batches.find()
        registry.quarantine.say()
        for folder in (path for path in listed(registry.root / "operators") if path.is_dir()):
            # files seen here may not be durable yet: the last process may have been killed before it synced
            registry.environment.sync([folder, folder.parent, registry.root])
            registry.recover_operator(folder)
            for home in listed(folder, "p[0-9][0-9][0-9][0-9][0-9]"):
                if self._given_up:
                    return
                rests = listed(home, "*" + PART)
                if rests:  # synced, as a power loss might bring back a half removed copy under its former name
                    registry.environment.sync([home])
                for rest in rests:
                    registry.environment.remove_tree(rest)
                self._recover(PartitionId(folder.name, int(home.name[1:])), home)
        registry.expect(0)
        registry.bundles.keep_only({spec.bundle for spec in registry.operators()})
        registry.commits.begin()
        registry.skipped_batches.begin(registry.quarantine.partitions)

    def _recover(self, partition: PartitionId, home: Path) -> None:
        """Chooses the newest copy on disk that this replica owned, and completes it from the commit log.

        Copies are only read here, which takes a third of the time of opening them; they are opened when needed.
        """
        registry = self._registry
        found: list[_Copy] = []
        for directory in sorted(path for path in home.iterdir() if path.is_dir() and path.name != RECEIVED):
            if (directory / UNFINISHED).exists():
                registry.copies.remove(directory)
                continue
            try:
                copy = self._look_at(partition, directory)
            except (StateMissing, StateDamaged, DecodeError, CommitLogDamaged) as error:
                if _held_nothing(directory):
                    registry.copies.remove(directory)
                else:
                    registry.put_aside(partition, directory, str(error))
                continue
            if self._is_ours(copy.ownership):
                found.append(copy)
            elif copy.incoming:
                registry.copies.remove(directory)
            else:
                owner = "no replica" if copy.ownership is None else repr(copy.ownership.replica)
                registry.put_aside(partition, directory, f"its ownership record names {owner}")
        found.sort(key=lambda copy: (copy.epoch, not copy.incoming))  # a copy made from a sealed one ranks below it
        while found and not self._complete(partition, found[-1]):
            found.pop()
        if not found:
            return
        *older, newest = found
        for copy in older:  # as is done when a newer copy is owned
            registry.copies.remove(copy.directory)
        registry.copies.recovered(newest.directory)
        local, ownership = registry.local(partition), newest.ownership
        assert ownership is not None
        successor = ReplicaInfo(ownership.target, ownership.target_site, ownership.target_address)
        local.lifecycle.recover(
            State(ownership.state),
            ownership.epoch,
            ownership.move_id,
            successor if ownership.state == State.SEALED else None,
        )
        local.directory, local.states = newest.directory, newest.states
        if ownership.state == State.OWNED:
            sequence = newest.lacking[-1].sequence if newest.lacking else newest.sequence
            local.skipped = registry.skipped_batches.found(partition, ownership.epoch, sequence)
        if ownership.state == State.SEALED and ownership.move_id:
            local.kept = Kept(ownership.move_id, ownership.epoch, newest.sequence)

    def _is_ours(self, ownership: layout.Ownership | None) -> bool:
        return ownership is not None and ownership.replica == self._registry.info.name

    def _complete(self, partition: PartitionId, copy: _Copy) -> bool:
        """Completes a copy from the commit log. Returns False if the copy was quarantined."""
        registry = self._registry
        try:
            registry.commits.complete(partition, copy.directory, copy.lacking, up_to_damage=copy.up_to_damage)
            if copy.lacking:
                copy.states = self._read(copy.directory, up_to_damage=False).states
            return True
        except Exception as error:
            damaged = damage(error)
            if damaged is None:
                raise
            registry.put_aside(partition, copy.directory, str(damaged))
            return False

    def _look_at(self, partition: PartitionId, directory: Path) -> _Copy:
        """Reads a copy; a damaged copy is read up to the damage if the commit log has the rest.

        Raises StateMissing, StateDamaged, DecodeError, CommitLogDamaged.
        """
        commits = self._registry.commits
        damaged: StateDamaged | None = None
        try:
            copy = self._read(directory, up_to_damage=False)
        except StateDamaged as error:
            if not commits.knows(partition, directory):
                raise
            damaged = error  # perhaps only the end of its own log, torn by a loss of power
            try:
                copy = self._read(directory, up_to_damage=True)
            except (StateMissing, StateDamaged, DecodeError):
                raise damaged from None
        ownership = copy.ownership
        if ownership is not None and self._is_ours(ownership) and ownership.state == State.OWNED:
            copy.lacking = commits.lacking(partition, directory, ownership.epoch, copy.sequence)
        if damaged is not None and not copy.lacking:
            raise damaged
        return copy

    def _read(self, directory: Path, *, up_to_damage: bool) -> _Copy:
        """Reads a copy's ownership, sequence and states. Raises StateMissing, StateDamaged, DecodeError."""
        store = self._registry.environment.open_read_only(directory, up_to_damage=up_to_damage)
        try:
            record = store.get(layout.OWNERSHIP)
            ownership = layout.Ownership.decode(record) if record else None
            states, incoming = StoredStates.of(store), self._registry.copies.is_incoming(directory)
            return _Copy(directory, ownership, incoming, read_sequence(store), states, up_to_damage)
        except Exception as error:
            raise damage(error) or error from error
        finally:
            store.close()


@dataclass(slots=True)
class _Copy:
    """A copy of a partition. ``lacking``: logged commits that its database lacks; ``up_to_damage``: its write-ahead log
    is damaged, and can be read only up to the damage."""

    directory: Path
    ownership: layout.Ownership | None
    incoming: bool
    sequence: int
    states: StoredStates | None
    up_to_damage: bool
    lacking: list[Commit] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        return 0 if self.ownership is None else self.ownership.epoch


def _held_nothing(directory: Path) -> bool:
    """Tells whether a copy is empty because the process was killed before it wrote anything."""
    names = [path.name for path in directory.iterdir()]
    return not any(name.startswith("MANIFEST-") or name.endswith((".sst", ".log")) for name in names)


# -- Creating an operator's partitions -------------------------------------------------------------------------------


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
    have been undeployed since.
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
            "the partition already exists on this replica, or existed at the requested epoch or a later one",
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

    After a crash the call is repeated: the replica names the remaining partitions at its next registration, and the
    answer tells it to delete them. Quarantined copies stay, under another name.
    """
    registry.undeployed(operator, epoch)
    local_partitions = [local for local in registry.local_partitions() if local.id.operator == operator]
    _quarantine(registry, operator, epoch)
    dropped = [local.id for local in local_partitions if _drop_local(registry, local, epoch)]
    registry.skipped_batches.drop(operator, epoch)
    for local in local_partitions:
        _void_commits(registry, local, epoch)
    registry.unlearn(operator)
    if dropped:
        log.warning("operator %s undeployed: %d partitions deleted", operator, len(dropped))
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
    """Deletes one partition after its running batch, whose result is discarded. Returns whether anything was there."""
    with local.work, local.mutex:
        if local.lifecycle.epoch <= epoch:
            local.lost = local.unkept = None  # a later deployment has nothing to do with the lost copy
            abandon_restore(registry, local)
        if local.lifecycle.state is State.ABSENT or not local.lifecycle.drop(epoch):
            return False
        processor, local.processor = local.processor, None
        store, local.store = local.store, None
        incoming, local.incoming = local.incoming, None
        registry.skipped_batches.revoke(local)
        local.directory = local.kept = local.since = local.states = local.skipped = None
        if processor is not None:
            processor.let_go(registry.environment.aside)
        if store is not None:
            with contextlib.suppress(Exception):  # the database is deleted next, so a failed write does not matter
                store.close()
        if incoming is not None:
            registry.copies.discard(incoming)
        for move_id in list(local.logs):
            registry.drop_log(local, move_id)
        for copy in [path for path in listed(local.home) if path.is_dir()]:
            registry.copies.remove(copy)
        registry.environment.remove_tree(local.home)
    registry.on_change(local.id)
    return True


def _void_commits(registry: PartitionRegistry, local: LocalPartition, epoch: int) -> None:
    """Voids the logged commits of a deleted partition, also if an earlier call has deleted it and then failed. Raises
    OSError.

    A power loss may undo this, which is harmless: no partition is created at these epochs before the next start, which
    begins a new log.
    """
    with local.mutex:  # a later deployment could otherwise commit before its commits are voided, too
        if local.lifecycle.state is State.ABSENT and local.lifecycle.epoch <= epoch:
            registry.commits.forget([local.id], sync=False)


# -- The replica -----------------------------------------------------------------------------------------------------


class ReplicaNode:
    """A replica without its sockets: its parts, around one data directory. Called from several threads.

    ``batches`` applies batches, ``reader`` reads states; ``sender`` and ``receiver`` are the two sides of a move,
    ``checkpointer`` and ``restorer`` take and restore checkpoints, ``successor`` takes partitions over; ``verifier``
    looks for damage, ``trials`` try a new version.

    Args:
        lease: lease from the controller; None: the replica needs no controller to serve.
        recover: recover at once; False: the caller calls :meth:`recover`.

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
        try:
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
        except Exception:  # otherwise the directory would stay claimed by a replica that nobody can close
            with contextlib.suppress(Exception):
                self._registry.close()
            raise

    def recover(self) -> None:
        """Finds the partitions in the data directory. Call it once, before any other use of the replica."""
        self.batches.running.crashes.find()
        self._recovery.run()

    def limits_used(self) -> dict[Limit, float]:
        """Returns which part of each limit is in use. A limit that each partition has is as full as that of the fullest
        partition."""
        settings, log = self.settings, self._registry.commits.log
        followers, change_log = self.sender.limits_used()
        used: dict[Limit, float] = {"followers": followers, "change_log_bytes": change_log}
        if log is not None:
            used["commit_log_bytes"] = log.size / settings.commit_log_bytes_max
        if settings.cache_bytes:
            used["cache_bytes"] = self.cache.bytes / settings.cache_bytes
        return used

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
        """(number, operators) of the stored permission to serve operators while no controller answers."""
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
        """Learns the version of an operator that is deployed now, see
        :meth:`~stateflow.partition.registry.PartitionRegistry.follow`."""
        return self._registry.follow(spec)

    def check(self, spec: OperatorSpec, total: int) -> None:
        """Checks that this replica could hold ``total`` partitions of this version of an operator, and changes nothing.

        Raises OperatorNotImportable, OperatorOutdated, TooFewFiles, SchemaMismatch.
        """
        self._registry.check(spec)
        self._registry.expect(max(0, total - len(_here(self._registry, spec.name))))

    def create(
        self, spec: OperatorSpec, partitions: Iterable[int], epoch: int, total: int = 0, command: Command = NOBODY
    ) -> None:
        """Creates empty partitions of an operator here, see :func:`create`."""
        create(self._registry, spec, partitions, epoch, total, partial(self.authority.check, command))

    def drop(self, operator: str, epoch: int) -> int:
        """Deletes an undeployed operator's partitions here, see :func:`drop`. Returns their number."""
        return drop(self._registry, operator, epoch)

    def lifecycle(self, partition: PartitionId) -> Lifecycle:
        """Returns the lifecycle of a partition on this replica, to be read and not changed."""
        return self._registry.look(partition).lifecycle

    def begin_session(self, command: Command, adopted: str = "") -> None:
        """Accepts only commands of this command's controller and session from now on.

        When this returns, every request of an earlier session is done, or will be refused. Raises StaleTerm,
        ForeignLedger. ``adopted``: see :meth:`~stateflow.partition.control.FencingGuard.check_answer`.
        """
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
        """Returns ``views`` with the size of their files, and the view of the disk. Waits for the disk."""
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
        """Returns the batches per second, averaged over the time in which batches arrived."""
        timing = self._registry.look(partition).timing
        return timing.rate if self._clock.monotonic() - timing.began_at < RATE_FORGOTTEN_S else 0.0

    def bytes_on_disk(self, partition: PartitionId) -> int:
        local = self._registry.look(partition)
        incoming = local.incoming
        sizes: dict[int, int] = {}  # by inode: a file that two copies share counts once
        for directory in (local.directory, incoming.directory if incoming is not None else None):
            if directory is not None and directory.is_dir():
                with contextlib.suppress(FileNotFoundError):  # the copy may be removed by then
                    for stat in (path.stat() for path in directory.iterdir() if path.name.endswith(".sst")):
                        sizes[stat.st_ino] = stat.st_size
        return sum(sizes.values())

    def disk(self) -> DiskView:
        """Returns the disk space available for partitions."""
        environment, settings = self._registry.environment, self.settings
        free = environment.free_bytes(self._registry.root) - settings.disk_reserve_bytes
        return DiskView(disk_of(self.identity.place), max(0, free), settings.room_bytes)

    def sequence(self, partition: PartitionId) -> int:
        """Returns the sequence of the last commit; 0 if the partition is not being served here."""
        processor = self._registry.look(partition).processor
        return processor.sequence if processor else 0

    def owned(self, operator: str | None = None) -> list[PartitionId]:
        return sorted(
            local.id
            for local in self._registry.local_partitions()
            if local.lifecycle.state in SERVED and operator in (None, local.id.operator)
        )

    def cancel(self, partition: PartitionId, move_id: str, owned_at: int = 0) -> bool:
        """Cancels a move on this replica, whether the replica is its source or its target, or a restore that does not
        own the partition yet. Returns False if the partition was sealed for the move, which must then be completed.

        ``owned_at``: see :meth:`~stateflow.partition.lifecycle.Lifecycle.cancel`. Raises StateMissing.
        """
        # the sender first, so that a prepare that arrives later is refused, and one that arrived before is undone
        possible = self.sender.cancel(partition, move_id, owned_at)
        self.receiver.abandon(partition, move_id)
        self.restorer.abandon(partition, move_id)
        return possible

    def close(self) -> None:
        try:
            self.batches.running.crashes.close()
        finally:
            self._registry.close()
