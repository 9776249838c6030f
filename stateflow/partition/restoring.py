"""Restoring a partition from a checkpoint: fetched and proved beside everything else, then owned at a newer epoch.

There are two steps, so that the present owner is asked to stop only once there is something to go on with. A copy under
way holds a file RESTORING, and a restart discards it. Removing that file, once the ownership is durable, is the commit
point: a restart finds either what was there before or the whole restored partition.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stateflow.changes import Mutations
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
from stateflow.partition.lifecycle import State
from stateflow.partition.local_partition import LocalPartition, Restoring
from stateflow.partition.registry import UNFINISHED, PartitionRegistry
from stateflow.state import DeployedStates, Evolution, declarations_of
from stateflow.storage import PartitionStore
from stateflow.types import OperatorSpec, PartitionId

log = logging.getLogger(__name__)
#: how many times a store is listed when what it listed was garbage-collected before it was fetched
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
            own: store in which this replica keeps its checkpoints; None: it has none. What is restored, from any store,
                is published there as the newest checkpoint before it is owned, so that losing the disk right after that
                loses nothing of it.

        Raises CheckpointMissing when there is none, CheckpointCorrupt when a savepoint is damaged, SchemaMismatch for
        one of another operator, and what the store raises.
        """
        local = self._registry.local(partition)
        with self._registry.making(spec):
            if _is_owned_by(local, restore_id):
                return self._as_it_is(local)
            self.abandon(partition)
            self._registry.expect(1)
            for _ in range(LISTED_AGAIN):
                collected, restored = self._prepare(spec, local, restore_id, store, own, wanted)
                if restored is not None:
                    return restored
                if not collected:
                    break
        raise CheckpointMissing(
            f"the partition has no usable checkpoint in {store.url}",
            remedy="see `stateflow checkpoint list`, or name another store with --from",
            partition=partition,
        )

    def _prepare(
        self,
        spec: OperatorSpec,
        local: LocalPartition,
        restore_id: str,
        store: CheckpointStore,
        own: CheckpointStore | None,
        wanted: Wanted,
    ) -> tuple[bool, Restored | None]:
        """Returns (whether some checkpoints were garbage-collected while they were fetched, what was fetched)."""
        partition = local.id
        collected = False
        passed_over: list[StateflowError] = []
        for manifest in self._candidates(store, spec, partition, wanted, passed_over):
            check_fits(manifest, *self._registry.operator(spec.name))
            local.snapshots += 1
            directory = local.home / f"restored-{restore_id}-{local.snapshots}"
            try:
                directory.mkdir(parents=True)
                (directory / UNFINISHED).touch()
                self._registry.environment.sync([directory, local.home, local.home.parent])
                store.restore(manifest, directory, durable=True)
                self._registry.environment.sync([directory])
                # before it is opened, which changes files
                adoption = None if own is None else own.adopt(manifest, directory)
                try:
                    db = self._open(manifest, directory)
                except BaseException:
                    if adoption is not None:
                        adoption.release()
                    raise
            except CheckpointCorrupt as error:
                self._registry.remove(directory)
                if not wanted.savepoint and not store.has(manifest):
                    collected = True
                    continue
                if wanted.savepoint:
                    raise
                log.error("restore skips checkpoint %s of %s: %s", manifest.order, partition, error)
                passed_over.append(error)
                continue
            except OSError as error:
                self._registry.remove(directory)
                raise Unavailable(
                    f"the data directory cannot be written: {error.strerror}", remedy="free space there", path=directory
                ) from error
            except BaseException:
                self._registry.remove(directory)
                raise
            newest = [manifest.epoch, *_newest_epoch(store, partition)]
            if own is not None:
                newest += _newest_epoch(own, partition)
            owning = self._registry.environment.mutex()
            local.restoring = Restoring(restore_id, directory, db, manifest, max(newest) + 1, adoption, owning)
            return collected, Restored(
                max(newest) + 1, manifest.sequence, manifest.positions, manifest.size, passed_over
            )
        if passed_over and not collected:
            raise CheckpointMissing(
                f"the partition has no usable checkpoint: {passed_over[0]}",
                remedy="see `stateflow checkpoint list`, or name another store with --from",
                partition=partition,
            )
        return collected, None

    @staticmethod
    def _candidates(
        store: CheckpointStore,
        spec: OperatorSpec,
        partition: PartitionId,
        wanted: Wanted,
        passed_over: list[StateflowError],
    ) -> Iterator[Manifest]:
        if wanted.savepoint:
            for manifest in store.savepoint(wanted.savepoint, spec.name):
                if manifest.partition == partition.partition:
                    yield manifest
            return
        for manifest in store.newest(partition, passed_over):
            if not wanted.source or manifest.positions.get(wanted.source) == wanted.batch:
                yield manifest

    def _open(self, manifest: Manifest, directory: Path) -> PartitionStore:
        """Opens a copy, and checks that it is at its manifest's sequence. Raises CheckpointCorrupt."""
        try:
            db = self._registry.environment.open(directory)
        except Exception as error:
            raise CheckpointCorrupt(
                f"the files are not a database: {error}", remedy="an older checkpoint is used", partition=manifest.id
            ) from error
        sequence = read_sequence(db)
        if sequence != manifest.sequence:
            db.close()
            raise CheckpointCorrupt(
                f"the database is at sequence {sequence}, the manifest says {manifest.sequence}",
                remedy="an older checkpoint is used",
                partition=manifest.id,
            )
        return db

    def own(
        self,
        partition: PartitionId,
        restore_id: str,
        epoch: int,
        command: Command = NOBODY,
        *,
        stop_sources: bool = False,
    ) -> Restored:
        """Serves what was prepared, at ``epoch`` or a newer one. The commit point of a restore.

        Args:
            stop_sources: refuse the clients that have sent to the partition until now.

        Raises MoveUnknown when nothing was prepared, MoveConflict while the partition is moving, StaleCheckpoint when a
        later owner published meanwhile, LeaseLost when the controller may have given this restore up.
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
        # durable before it is published, and without effect while the copy is unfinished: if the disk is full, the
        # present owner goes on at its epoch; had the newer epoch been published by then, it could never publish a
        # checkpoint again
        ownership = layout.Ownership(self._registry.info.name, State.OWNED, epoch, restore_id)
        puts = [(layout.OWNERSHIP, ownership.encode()), *layout.lapsing(restoring.store)]
        if stop_sources:
            puts += self._stopping(local, restoring)
        restoring.store.apply(Mutations(puts=puts), sync=True)
        if restoring.adoption is not None:  # from here on no checkpoint of an earlier epoch can become the newest
            restoring.adoption.publish(epoch, self._registry.info.name)
        with local.work, local.mutex:
            if _is_owned_by(local, restore_id):
                return self._as_it_is(local)
            self._authority.check(command)
            self._registry.check_deployed(local.id, asked)
            if local.restoring is not restoring:  # it was fetched anew meanwhile, and this copy closed
                raise _not_under_way(restore_id)
            self._check_still(local)
            replace(local.lifecycle).restore(restore_id, epoch)  # raises before anything is done
            (restoring.directory / UNFINISHED).unlink()
            self._registry.environment.sync([restoring.directory])
            local.lifecycle.restore(restore_id, epoch)
            processor, store = local.processor, local.store
            old = local.replace(restoring.directory, restoring.store)
            local.processor = local.restoring = None
            self._registry.commits.left(partition)
            local.checkpointed = (
                ("", 0, 0)
                if restoring.adoption is None
                else (restoring.adoption.url, epoch, restoring.manifest.sequence)
            )
            if processor is not None:
                processor.let_go(self._registry.environment.aside)
            if store is not None:
                store.close()
        self._registry.on_change(partition)
        if old is not None:
            self._registry.remove(old)
        if restoring.adoption is not None:
            restoring.adoption.release()
        manifest = restoring.manifest
        return Restored(epoch, manifest.sequence, manifest.positions, manifest.size)

    def _stopping(self, local: LocalPartition, restoring: Restoring) -> list[tuple[bytes, bytes]]:
        stores = [restoring.store]
        with local.work:
            if local.store is not None:
                stores.append(local.store)
            return layout.stopping(stores, self._registry.clock.now_us())

    def abandon(self, partition: PartitionId) -> None:
        """Discards what was prepared."""
        local = self._registry.local(partition)
        with local.mutex:
            restoring, local.restoring = local.restoring, None
        if restoring is not None:
            restoring.store.close()
            self._registry.remove(restoring.directory)
            if restoring.adoption is not None:
                restoring.adoption.release()

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
        """Returns the result of a restore that was done before, whose answer did not arrive."""
        db = self._registry.store(local)
        positions = {
            key[len(layout.POSITION) :].decode(): layout.Position.decode(value).batch
            for key, value in db.scan(layout.POSITION)
        }
        return Restored(local.lifecycle.epoch, read_sequence(db), positions, 0)


def _is_owned_by(local: LocalPartition, restore_id: str) -> bool:
    return local.lifecycle.state is State.OWNED and local.lifecycle.move_id == restore_id


def _not_under_way(restore_id: str) -> MoveUnknown:
    return MoveUnknown("this restore is not under way here", remedy="start it again", restore=restore_id)


def check_fits(manifest: Manifest, spec: OperatorSpec, cls: type[Operator]) -> None:
    """Checks that a checkpoint fits an operator. Raises SchemaMismatch when it has other partitions or another key than
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
