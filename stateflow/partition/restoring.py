"""Restoring a partition from a checkpoint: the target fetches and proves it while the stream goes on, then owns the
partition at a newer epoch.

There are two steps, so that the present owner is asked to stop only once its successor is ready. The copy is unfinished
meanwhile (see :mod:`stateflow.partition.install`): a restart finds either the former copy or the whole restored
partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from stateflow.checkpoint import CheckpointStore, Manifest
from stateflow.errors import (
    CheckpointCorrupt,
    CheckpointMissing,
    MoveConflict,
    MoveUnknown,
    SchemaMismatch,
    StateflowError,
    Unavailable,
)
from stateflow.operator.operator import Operator
from stateflow.partition import layout
from stateflow.partition.commits import read_sequence
from stateflow.partition.control import NEWEST, NOBODY, Command, FencingGuard, Restored, Wanted
from stateflow.partition.install import Copy
from stateflow.partition.lifecycle import State
from stateflow.partition.local_partition import LocalPartition, Restoring
from stateflow.partition.registry import PartitionRegistry
from stateflow.state import DeployedStates, Evolution, declarations_of
from stateflow.types import OperatorSpec, PartitionId

log = logging.getLogger(__name__)
#: number of times a store is listed again if a listed checkpoint was garbage-collected before it was fetched
LISTED_AGAIN = 3


class Restorer:
    """Restores partitions from checkpoints. Called from several threads."""

    def __init__(self, registry: PartitionRegistry, authority: FencingGuard) -> None:
        self._registry, self._authority = registry, authority

    def prepare(
        self,
        spec: OperatorSpec,
        partition: PartitionId,
        restore_id: str,
        store: CheckpointStore,
        own: CheckpointStore | None,
        wanted: Wanted = NEWEST,
    ) -> Restored:
        """Fetches and proves the newest checkpoint that can be used. Nothing changes for the partition yet.

        Args:
            own: store in which this replica keeps its checkpoints; None: it has none. The restored checkpoint, from
                whichever store, is published there as the newest one before it is owned, so that nothing of it is lost
                if the disk fails right afterwards.

        Raises CheckpointMissing if there is none, CheckpointCorrupt if a savepoint is damaged, SchemaMismatch for a
        checkpoint of another operator, and the store's errors.
        """
        local = self._registry.local(partition)
        with self._registry.making(spec):
            if _is_owned_by(local, restore_id):
                return self._as_it_is(local)
            self.abandon(partition)
            self._registry.expect(1)
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
                    remedy="free space there",
                    path=local.home,
                ) from error
            if found is None:
                why = f": {passed_over[0]}" if passed_over else f" in {store.url}"
                raise CheckpointMissing(
                    f"the partition has no usable checkpoint{why}",
                    remedy="see `stateflow checkpoint list`, or name another store with --from",
                    partition=partition,
                )
            local.restoring = found  # also where the stores do not answer: the next request removes it
            manifest = found.manifest
            newest = [manifest.epoch, *_newest_epoch(store, partition)]
            if own is not None:
                newest += _newest_epoch(own, partition)
            local.restoring = replace(found, id=restore_id, epoch_min=max(newest) + 1)
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
            for manifest in store.savepoint(wanted.savepoint, spec.name):
                if manifest.partition == partition.partition:
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
            stop_sources: refuse the clients that have sent to the partition until now.

        Raises MoveUnknown if nothing was prepared, MoveConflict while the partition is moving, StaleCheckpoint if a
        later owner has published a checkpoint meanwhile, LeaseLost if the controller may have given this restore up.
        """
        local = self._registry.local(partition)
        restoring = local.restoring
        if _is_owned_by(local, restore_id):
            return self._as_it_is(local)
        if restoring is None or restoring.id != restore_id:
            raise _not_under_way(restore_id)
        with restoring.owning:  # a repeated request waits for a slow first one, and gets its answer
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
            if local.restoring is not restoring:  # it was fetched anew meanwhile, and this copy closed
                raise _not_under_way(restore_id)
            self._check_still(local)
            leftovers = self._registry.copies.install(local, copy)
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

    def abandon(self, partition: PartitionId) -> None:
        """Discards the prepared copy."""
        local = self._registry.local(partition)
        with local.mutex:
            restoring, local.restoring = local.restoring, None
        if restoring is not None:
            self._registry.copies.discard(restoring)
            restoring.release()

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
    """Fetches and proves the first candidate that can be used. None: there is none.

    The candidates are listed again when one was garbage-collected before it was fetched: a newer one was published.

    Args:
        own: store that adopts the checkpoint; None: no store does.
        passed_over: gets the errors of damaged candidates.
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


def _is_owned_by(local: LocalPartition, restore_id: str) -> bool:
    return local.lifecycle.state is State.OWNED and local.lifecycle.move_id == restore_id


def _not_under_way(restore_id: str) -> MoveUnknown:
    return MoveUnknown("this restore is not under way here", remedy="start it again", restore=restore_id)


def check_fits(manifest: Manifest, spec: OperatorSpec, cls: type[Operator]) -> None:
    """Checks that a checkpoint fits an operator. Raises SchemaMismatch if it has other partitions or another key than
    the operator, or states that cannot become the ones it declares.
    """
    if manifest.partitions and (manifest.partitions, manifest.key) != (spec.partitions, spec.key):
        raise SchemaMismatch(
            f"the checkpoint has {manifest.partitions} partitions keyed by {', '.join(manifest.key)}, "
            f"the operator has {spec.partitions} keyed by {', '.join(spec.key)}",
            remedy=f"deploy it with --partitions {manifest.partitions} and the same key",
            operator=spec.name,
        )
    if manifest.schema:
        migrates = cls.migrate_state is not Operator.migrate_state
        version = int(manifest.version or 1)
        deployed = DeployedStates.of(spec.state_schema, spec.dropped)
        Evolution(spec.name, manifest.schema, version, declarations_of(cls), cls.state_version, migrates, deployed)


def _newest_epoch(store: CheckpointStore, partition: PartitionId) -> list[int]:
    return [found.order[0] for found in store.catalog.checkpoints(partition)[:1]]
