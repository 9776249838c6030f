"""Takeover: a replica owns a partition without the old owner's consent, because that owner's lease has lapsed or its
data is lost.

Lease: without one from the controller a replica does not serve. The controller answers a heartbeat with a duration. The
replica counts it on its own monotonic clock from when it *sent* that heartbeat, the controller from when it received
the heartbeat, which is later. If the clocks drift apart by less than the controller's margin, a replica knows that its
lease has lapsed before the controller acts on it (Gray and Cheriton, "Leases", SOSP 1989). A process that was suspended
finds its lease lapsed when it continues, because the monotonic clock went on. An operator with manual failover needs no
lease while no controller answers: no other replica gets its partitions then.

Takeover: the controller chooses one of three ways: to serve the copy that a standby kept, to serve the copy sealed here
for a move that can never end, or to restore the newest checkpoint. Each takes effect once, however often the controller
asks: if the replica owns the partition at the granted epoch, that is the answer. The new owner makes its ownership
durable before it serves; right before that it checks again, with the partition locked, that the controller cannot have
given the takeover up.

The old owner, if it comes back, learns that it was superseded: its copy is only a warm base from then on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stateflow.checkpoint import CheckpointStore, Manifest
from stateflow.clock import Clock
from stateflow.errors import LeaseLost, MoveUnknown, StaleEpoch, StateDamaged, StateMissing
from stateflow.partition import layout
from stateflow.partition.commits import read_sequence
from stateflow.partition.control import NOBODY, Command, FencingGuard, Origin, TakenOver
from stateflow.partition.install import Copy
from stateflow.partition.lifecycle import SERVED, State
from stateflow.partition.local_partition import LocalPartition
from stateflow.partition.registry import PartitionRegistry
from stateflow.partition.restoring import fetch_first
from stateflow.storage import PartitionStore
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo


@dataclass(slots=True)
class Lease:
    """Lease up to ``until``, monotonic seconds. Sans-io. Default: never expires (replicas without a controller).

    ``alone``: operators that the replica serves without a lease while it is ``cut_off``: it has asked every controller
    since the last answer or since its start, and none answered."""

    until: float = math.inf
    alone: frozenset[str] = frozenset()
    cut_off: bool = False

    @classmethod
    def none(cls) -> Lease:
        """Returns a lease that is not valid before the controller grants it."""
        return cls(-math.inf)

    def granted(self, sent_at: float, duration_s: float) -> None:
        """Extends the lease by the answer to a heartbeat sent at ``sent_at``. Answers may arrive out of order."""
        self.until = max(self.until, sent_at + duration_s)
        self.cut_off = False

    def revoke(self) -> None:
        """Ends the lease, because the controller no longer knows this process."""
        self.until = -math.inf
        self.cut_off = False

    def unanswered(self) -> None:
        """Marks the replica as cut off: no controller has answered."""
        self.cut_off = True

    def holds(self, now: float, operator: str = "") -> bool:
        return now < self.until or (self.cut_off and operator in self.alone)

    def serves_some(self, now: float) -> bool:
        return now < self.until or (self.cut_off and bool(self.alone))

    def check(self, now: float, operator: str = "") -> None:
        """Checks that the operator may be served. Call it before a batch is applied, and again before the batch is
        acknowledged. Raises LeaseLost."""
        if not self.holds(now, operator):
            raise LeaseLost(
                "this replica's lease has lapsed: its partitions may have other owners",
                remedy="refresh the assignment; the replica serves again once it reaches the controller",
            )


class Successor:
    """Takes partitions over. Called from several threads."""

    def __init__(self, registry: PartitionRegistry, lease: Lease, authority: FencingGuard, clock: Clock) -> None:
        self._registry, self._lease, self._authority, self._clock = registry, lease, authority, clock

    def _check_asked(self, command: Command) -> None:
        """Checks that the controller cannot have given this takeover up. Raises LeaseLost, StaleTerm."""
        self._lease.check(self._clock.monotonic())
        self._authority.check(command)

    def from_standby(
        self, partition: PartitionId, move_id: str, epoch: int, standby_move: str, command: Command = NOBODY
    ) -> TakenOver:
        """Serves the standby's copy that ``standby_move`` made. Raises MoveUnknown, MoveAborted, StaleEpoch,
        LeaseLost."""
        local = self._registry.local(partition)
        with local.work:
            if not self._owns(local, epoch):
                incoming = local.incoming
                if incoming is None or incoming.move_id not in (standby_move, move_id) or incoming.store is None:
                    raise MoveUnknown(
                        "this replica has no copy of that standby", remedy="restore a checkpoint", move=standby_move
                    )
                self._own(
                    local, self._copy(incoming.directory, incoming.store, move_id, epoch), move_id, epoch, command
                )
            return self._view(local, epoch)

    def from_local(self, partition: PartitionId, move_id: str, epoch: int, command: Command = NOBODY) -> TakenOver:
        """Serves the copy sealed here again. Raises StateMissing, StaleEpoch, LeaseLost."""
        local = self._registry.local(partition)
        with local.work:
            if not self._owns(local, epoch):
                try:
                    store = self._registry.store(local)
                except StateDamaged as error:  # else the controller would ask for it again and again
                    self._registry.lose(local, error)
                    raise
                assert local.directory is not None
                self._check_asked(command)
                with local.mutex:
                    if epoch <= local.lifecycle.epoch:  # before anything changes: the sealed copy must stay sealed
                        raise StaleEpoch(
                            f"epoch {epoch} is not newer than {local.lifecycle.epoch}",
                            remedy="check the status and plan again",
                            partition=partition,
                        )
                    sealed = replace(local.lifecycle)
                    local.lifecycle.prepare(move_id, local.lifecycle.epoch)
                try:
                    self._own(local, self._copy(local.directory, store, move_id, epoch), move_id, epoch, command)
                except BaseException:  # such as a full disk: it is sealed as before, and may be asked for again
                    with local.mutex:
                        if local.lifecycle.state is State.WARMING:
                            local.lifecycle.seal_again(sealed)
                    self._registry.close_store(local)
                    raise
            return self._view(local, epoch)

    def from_checkpoint(
        self,
        spec: OperatorSpec,
        partition: PartitionId,
        move_id: str,
        epoch: int,
        checkpoints: CheckpointStore,
        command: Command = NOBODY,
        oldest_epoch: int = 1,
    ) -> TakenOver:
        """Restores the newest readable checkpoint, and publishes it under the new epoch before it is served: an old
        owner that comes back can then checkpoint no more.

        Args:
            oldest_epoch: checkpoints of older epochs belong to a former deployment of the same name.

        Raises StateMissing if there is none, CheckpointStoreMissing if there is no store, StaleEpoch if a newer
        owner has checkpointed already, LeaseLost.
        """
        local = self._registry.local(partition)
        with self._registry.making(spec), local.work:
            if self._owns(local, epoch):
                return self._view(local, epoch)
            self._check_asked(command)
            self._registry.expect(1)
            with local.mutex:
                local.lifecycle.prepare(move_id, local.lifecycle.epoch)
            found = None
            try:
                found = fetch_first(
                    self._registry,
                    local,
                    move_id,
                    checkpoints,
                    checkpoints,
                    lambda: _candidates(checkpoints, partition, oldest_epoch, epoch),
                    [],
                )
                if found is None:
                    raise StateMissing(
                        "the partition has no checkpoint to restore from",
                        remedy="restart its owner with its data directory",
                        partition=partition,
                    )
                self._check_asked(command)  # that may have taken minutes
                copy = self._copy(found.directory, found.store, move_id, epoch)
                self._registry.copies.publish(local, found, copy, epoch)
                self._own(local, copy, move_id, epoch, command)
                local.checkpointed = found.checkpointed(epoch)
            except BaseException:
                if found is not None and local.store is not found.store:
                    self._registry.copies.discard(found)
                with local.mutex:
                    local.lifecycle.abandon(move_id)
                raise
            finally:
                if found is not None:
                    found.release()
            return self._view(local, epoch, found.manifest)

    @staticmethod
    def _owns(local: LocalPartition, epoch: int) -> bool:
        return local.lifecycle.state in SERVED and local.lifecycle.epoch == epoch

    @staticmethod
    def _copy(directory: Path, store: PartitionStore, move_id: str, epoch: int) -> Copy:
        return Copy(directory, store, lambda here: here.own(move_id, epoch), layout.lapsing(store))

    def _own(self, local: LocalPartition, copy: Copy, move_id: str, epoch: int, command: Command) -> None:
        """Installs a copy.

        Checks the command again: since the last check this replica may have registered without the partition, and the
        controller may have given this takeover up.
        """
        with local.mutex:
            self._check_asked(command)
            self._registry.check_deployed(local.id, epoch)
            if local.incoming is not None and local.incoming.directory == copy.directory:
                self._registry.copies.adopt(local, move_id)
            leftovers = self._registry.copies.install(local, copy)
        self._registry.copies.tidy(local, leftovers)
        self._registry.on_change(local.id)

    def _view(self, local: LocalPartition, epoch: int, manifest: Manifest | None = None) -> TakenOver:
        store = self._registry.store(local)
        origin = None if manifest is None else Origin(manifest.epoch, manifest.sequence, manifest.created_us)
        return TakenOver(epoch, read_sequence(store), layout.positions(store), origin)

    # -- the old owner ------------------------------------------------------------------------------------

    def supersede(self, partition: PartitionId, epoch: int, owner: ReplicaInfo, voided: int = 0) -> bool:
        """Notes durably that ``owner`` owns the partition at ``epoch``: the copy here is now only a warm base.

        False: there is no copy here, or it is newer.
        """
        local = self._registry.local(partition)
        with self._registry.reopening(local), local.work, local.mutex:
            if not replace(local.lifecycle).supersede(epoch, owner, voided):
                return False
            self._registry.settle(local)
            store = self._registry.store(local)
            self._registry.copies.record(local.lifecycle, store, lambda here: here.supersede(epoch, owner, voided))
            local.lifecycle.supersede(epoch, owner, voided)
            if local.processor is not None:
                local.processor.let_go(self._registry.environment.aside)
            local.processor = local.kept = local.since = None
            for follower in list(local.logs):
                self._registry.drop_log(local, follower)
            self._registry.commits.left(partition)
        self._registry.on_change(partition)
        return True


def _candidates(checkpoints: CheckpointStore, partition: PartitionId, oldest: int, epoch: int) -> Iterator[Manifest]:
    for manifest in checkpoints.newest(partition):
        if manifest.epoch < oldest:
            return
        if manifest.epoch > epoch:
            raise StaleEpoch(
                f"a checkpoint has epoch {manifest.epoch}, but epoch {epoch} was granted",
                remedy="check the status and plan again",
                partition=partition,
            )
        yield manifest
