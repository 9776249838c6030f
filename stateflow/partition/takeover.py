"""Takeover and restore: a replica owns a partition whose state comes from a standby, local files or a checkpoint, and
not from the present owner.

Takeover (:class:`Successor`): the owner's lease has lapsed, or its data is lost. The controller chooses one of three
ways: to serve a standby's copy, to serve the copy sealed here for a move that can never end, or to restore the newest
checkpoint. Each takes effect once, however often the controller asks: a replica that owns the partition at the granted
epoch only repeats its answer. The new owner makes its ownership durable before it serves; right before that it checks
again, with the partition locked, that the controller cannot have given the takeover up. If the old owner returns, it
learns that it was superseded, and keeps its copy only so that less must be sent if the partition moves back.

Restore (:class:`Restorer`): a user resets a partition to a checkpoint. There are two steps, so that the present owner
stops only once its successor is ready: the target downloads and verifies the checkpoint while the stream goes on, then
owns the partition at a newer epoch. Until then its copy is unfinished (see :mod:`stateflow.partition.data_directory`),
so that a restart finds either the former copy or the whole restored partition.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stateflow.checkpoint import CheckpointStore, Manifest
from stateflow.clock import Clock
from stateflow.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    MoveConflict,
    MoveUnknown,
    SchemaMismatch,
    StaleEpoch,
    StateDamaged,
    StateflowError,
    StateMissing,
    Unavailable,
)
from stateflow.operator.operator import Operator
from stateflow.partition import layout
from stateflow.partition.control import NEWEST, NOBODY, Command, FencingGuard, Origin, Restored, TakenOver, Wanted
from stateflow.partition.data_directory import Copy
from stateflow.partition.layout import read_sequence
from stateflow.partition.lifecycle import SERVED, State
from stateflow.partition.local_partition import LocalPartition, Restoring
from stateflow.partition.registry import Lease, PartitionRegistry
from stateflow.state import DeployedStates, Evolution, declarations_of
from stateflow.storage import PartitionStore
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo

log = logging.getLogger(__name__)
#: number of times a store is listed again if a listed checkpoint was garbage-collected before it was fetched
LISTED_AGAIN = 3

# -- Checkpoints -----------------------------------------------------------------------------------------------------


def fetch_first(
    registry: PartitionRegistry,
    local: LocalPartition,
    name: str,
    store: CheckpointStore,
    own: CheckpointStore | None,
    candidates: Callable[[], Iterable[Manifest]],
    passed_over: list[StateflowError],
    *,
    falls_back: bool = True,
) -> Restoring | None:
    """Downloads and verifies the first candidate that can be used. None: no candidate can be used.

    If a candidate was garbage-collected before it was fetched, a newer one was published, and the candidates are listed
    again.

    Args:
        own: store that adopts the checkpoint; None: no store does.
        passed_over: the errors of damaged candidates are appended to it.
        falls_back: try the next candidate after a damaged one; False: raise CheckpointCorrupt.
    """
    for _ in range(LISTED_AGAIN):
        passed_over.clear()
        for manifest in candidates():
            try:
                return registry.copies.fetch(local, name, manifest, store, own)
            except CheckpointCorrupt as error:
                if not falls_back:
                    raise
                if not store.has(manifest):
                    break
                log.error("restore skips checkpoint %s of %s: %s", manifest.order, local.id, error)
                passed_over.append(error)
        else:
            break
    return None


# -- Takeover --------------------------------------------------------------------------------------------------------


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
                        "this replica does not have the standby's copy of the partition",
                        remedy="restore a checkpoint",
                        move=standby_move,
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
                except StateDamaged as error:  # otherwise the controller would request this again and again
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
                except BaseException:  # such as a full disk: the copy stays sealed, for another attempt
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
        """Restores the newest readable checkpoint, and publishes it under the new epoch before it is served, so that an
        old owner that returns can publish no more checkpoints.

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
                        remedy="restart its former owner with its data directory",
                        partition=partition,
                    )
                self._check_asked(command)  # fetching may have taken minutes
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
        """Records durably that ``owner`` owns the partition at ``epoch``. The copy here is kept only so that less must
        be sent if the partition moves back.

        Returns False if there is no copy here, or it is newer.
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


# -- Restore ---------------------------------------------------------------------------------------------------------


class Restorer:
    """Restores partitions from checkpoints. Called from several threads."""

    def __init__(self, registry: PartitionRegistry, authority: FencingGuard) -> None:
        self._registry, self._authority = registry, authority
        self._preparing: dict[PartitionId, AbstractContextManager[Any]] = {}

    def prepare(
        self,
        spec: OperatorSpec,
        partition: PartitionId,
        restore_id: str,
        store: CheckpointStore,
        own: CheckpointStore | None,
        wanted: Wanted = NEWEST,
    ) -> Restored:
        """Downloads and verifies the newest checkpoint that can be used. The partition itself does not change yet.

        Calls for one partition run one after another; each discards the copy that the one before has prepared.

        Args:
            own: store in which this replica keeps its checkpoints; None: it has none. The restored checkpoint, from
                whichever store, is published in ``own`` as the newest one before it is owned, so that it is not lost if
                the disk fails right afterwards.

        Raises CheckpointMissing if there is none, CheckpointCorrupt if a savepoint is damaged, SchemaMismatch for a
        checkpoint of another operator, MoveUnknown if the restore was given up meanwhile, and the store's errors.
        """
        local = self._registry.local(partition)
        one_at_a_time = self._preparing.setdefault(partition, self._registry.environment.mutex())
        with self._registry.making(spec), one_at_a_time:
            if _is_owned_by(local, restore_id):
                return self._as_it_is(local)
            abandon_restore(self._registry, local)
            self._registry.expect(1)
            with local.mutex:
                local.fetching = restore_id
            passed_over: list[StateflowError] = []
            try:
                found = fetch_first(
                    self._registry,
                    local,
                    f"restored-{restore_id}",
                    store,
                    own,
                    lambda: self._candidates(store, spec, partition, wanted, passed_over),
                    passed_over,
                    falls_back=not wanted.savepoint,
                )
            except OSError as error:
                raise Unavailable(
                    f"the data directory cannot be written: {error.strerror}",
                    remedy="free space there, or make it writable",
                    path=local.home,
                ) from error
            if found is None:
                why = f": {passed_over[0]}" if passed_over else f" in {store.url}"
                raise CheckpointMissing(
                    f"the partition has no usable checkpoint{why}",
                    remedy="see `stateflow checkpoint list`, or name another store with --from",
                    partition=partition,
                )
            manifest = found.manifest
            with contextlib.ExitStack() as undo:
                undo.callback(_discard, self._registry, found)
                newest = [manifest.epoch, *_newest_epoch(store, partition)]
                if own is not None:
                    newest += _newest_epoch(own, partition)
                with local.mutex:
                    if local.fetching != restore_id:  # it was given up meanwhile
                        raise _not_under_way(restore_id)
                    local.restoring, local.fetching = replace(found, id=restore_id, epoch_min=max(newest) + 1), ""
                undo.pop_all()
        return Restored(max(newest) + 1, manifest.sequence, manifest.positions, manifest.size, passed_over)

    def _candidates(
        self,
        store: CheckpointStore,
        spec: OperatorSpec,
        partition: PartitionId,
        wanted: Wanted,
        passed_over: list[StateflowError],
    ) -> Iterator[Manifest]:
        if wanted.savepoint:
            for manifest in store.savepoint(wanted.savepoint, spec.name, [partition.partition]):
                check_fits(manifest, *self._registry.operator(spec.name))
                yield manifest
            return
        for manifest in store.newest(partition, passed_over):
            if not wanted.source or manifest.positions.get(wanted.source) == wanted.batch:
                check_fits(manifest, *self._registry.operator(spec.name))
                yield manifest

    def own(
        self,
        partition: PartitionId,
        restore_id: str,
        epoch: int,
        command: Command = NOBODY,
        *,
        stop_sources: bool = False,
    ) -> Restored:
        """Serves the prepared checkpoint, at ``epoch`` or a newer one. This is the commit point of a restore.

        Args:
            stop_sources: refuse the clients that have sent to the partition so far.

        Raises MoveUnknown if nothing was prepared, MoveConflict while the partition is moving, StaleCheckpoint if a
        later owner has already published a checkpoint, LeaseLost if the controller may have given this restore up.
        """
        local = self._registry.local(partition)
        restoring = local.restoring
        if _is_owned_by(local, restore_id):
            return self._as_it_is(local)
        if restoring is None or restoring.id != restore_id:
            raise _not_under_way(restore_id)
        with restoring.owning:  # a repeated request waits for a slow first one, and returns the same answer
            return self._own(local, restoring, epoch, command, stop_sources)

    def _own(
        self, local: LocalPartition, restoring: Restoring, epoch: int, command: Command, stop_sources: bool
    ) -> Restored:
        partition, restore_id = local.id, restoring.id
        if _is_owned_by(local, restore_id):
            return self._as_it_is(local)
        asked, epoch = epoch, max(epoch, restoring.epoch_min, local.lifecycle.epoch + 1)
        self._check_still(local)
        copy = Copy(restoring.directory, restoring.store, lambda here: here.restore(restore_id, epoch))
        copy.also += layout.lapsing(restoring.store)
        if stop_sources:
            copy.also += self._stopping(local, restoring)
        self._registry.copies.publish(local, restoring, copy, epoch)
        with local.work, local.mutex:
            if _is_owned_by(local, restore_id):
                return self._as_it_is(local)
            self._authority.check(command)
            self._registry.check_deployed(local.id, asked)
            if local.restoring is not restoring:  # it was fetched again, and this copy was closed
                raise _not_under_way(restore_id)
            self._check_still(local)
            leftovers = self._registry.copies.install(local, copy)
            if not stop_sources:  # else the adopted checkpoint lacks the refusal, and the next one is taken soon
                local.checkpointed = restoring.checkpointed(epoch)
        self._registry.on_change(partition)
        self._registry.copies.tidy(local, leftovers)
        restoring.release()
        manifest = restoring.manifest
        return Restored(epoch, manifest.sequence, manifest.positions, manifest.size)

    def _stopping(self, local: LocalPartition, restoring: Restoring) -> list[tuple[bytes, bytes]]:
        stores = [restoring.store]
        with local.work:
            if local.store is not None:
                stores.append(local.store)
            return layout.stopping(stores, self._registry.clock.now_us())

    def abandon(self, partition: PartitionId, restore_id: str) -> None:
        """Gives up a restore that does not own the partition yet. Does nothing for any other id."""
        abandon_restore(self._registry, self._registry.local(partition), restore_id)

    @staticmethod
    def _check_still(local: LocalPartition) -> None:
        if local.lifecycle.state in (State.WARMING, State.FENCING) or local.logs:
            raise MoveConflict(
                "the partition is moving",
                remedy="wait for the move, or cancel it",
                partition=local.id,
                move=local.lifecycle.move_id or None,
            )

    def _as_it_is(self, local: LocalPartition) -> Restored:
        """Returns the result of a restore that was already done, but whose answer did not arrive."""
        db = self._registry.store(local)
        return Restored(local.lifecycle.epoch, read_sequence(db), layout.positions(db), 0)


def abandon_restore(registry: PartitionRegistry, local: LocalPartition, restore_id: str = "") -> None:
    """Gives up a restore that does not own its partition yet. The prepared copy is discarded at once, a copy that is
    being fetched once it is fetched.

    Args:
        restore_id: the restore; empty: whichever is under way.
    """
    with local.mutex:
        if restore_id in ("", local.fetching):
            local.fetching = ""
        restoring = local.restoring
        if restoring is None or restore_id not in ("", restoring.id):
            return
        local.restoring = None
    _discard(registry, restoring)


def _discard(registry: PartitionRegistry, restoring: Restoring) -> None:
    try:
        registry.copies.discard(restoring)
    finally:
        registry.environment.aside(restoring.release)  # the store may be slow, and no caller needs the result


def _is_owned_by(local: LocalPartition, restore_id: str) -> bool:
    return local.lifecycle.state is State.OWNED and local.lifecycle.move_id == restore_id


def _not_under_way(restore_id: str) -> MoveUnknown:
    return MoveUnknown("this restore is not under way here", remedy="start the restore again", restore=restore_id)


def check_fits(manifest: Manifest, spec: OperatorSpec, cls: type[Operator]) -> None:
    """Checks that a checkpoint fits an operator. Raises SchemaMismatch if it has other partitions or another key than
    the operator, or states that cannot evolve to those that the operator declares."""
    if manifest.partitions and (manifest.partitions, manifest.key) != (spec.partitions, spec.key):
        raise SchemaMismatch(
            f"the checkpoint has {manifest.partitions} partitions keyed by {', '.join(manifest.key)}, "
            f"the operator has {spec.partitions} partitions keyed by {', '.join(spec.key)}",
            remedy=f"deploy the operator with --partitions {manifest.partitions} and the checkpoint's key",
            operator=spec.name,
        )
    if manifest.schema:
        migrates = cls.migrate_state is not Operator.migrate_state
        version = int(manifest.version or 1)
        deployed = DeployedStates.of(spec.state_schema, spec.dropped)
        declared, tags = declarations_of(cls), manifest.tags
        Evolution(spec.name, manifest.schema, version, declared, cls.state_version, migrates, deployed, tags)


def _newest_epoch(store: CheckpointStore, partition: PartitionId) -> list[int]:
    return [found.order[0] for found in store.catalog.checkpoints(partition)[:1]]
