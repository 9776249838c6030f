"""A replica's checkpoints, periodic and on demand, and restores.

They run on threads of their own: a slow or silent store must not keep moves and batches waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random  # noqa: TID251 - the type; which one is handed in

from stateflow.checkpoint import CheckpointStore, Codec
from stateflow.checkpoint.codec import configured_key
from stateflow.checkpoint.collecting import Retention, collect, whose_turn
from stateflow.checkpoint.store import Saved
from stateflow.clock import Clock
from stateflow.errors import InvalidArgument, StaleCheckpoint, StateflowError, UnknownPartition
from stateflow.replica.troubles import Troubles
from stateflow.reports import CheckpointReport, Taken
from stateflow.runtime.authority import Command
from stateflow.runtime.control import Restore, Restored
from stateflow.runtime.replica import ReplicaNode
from stateflow.types import OperatorSpec, PartitionId

log = logging.getLogger(__name__)
RESTORES_AT_ONCE = 2
#: replicas that started together drift apart by this fraction of the checkpoint interval
JITTER = 0.1


class CheckpointShell:
    """Takes, tidies and restores the checkpoints of one replica.

    Args:
        store: where checkpoints go; None: none are taken, and only restores that name a store are possible.
    """

    def __init__(self, node: ReplicaNode, store: CheckpointStore | None, clock: Clock, random: Random) -> None:
        self._node = node
        self.store = store
        if store is not None:
            node.remember(store)
        self._clock = clock
        self._random = random
        self._one = asyncio.Lock()
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._tidying = ThreadPoolExecutor(1, thread_name_prefix="tidying")
        self._restores = ThreadPoolExecutor(RESTORES_AT_ONCE, thread_name_prefix="restores")
        self._loop = asyncio.get_running_loop()
        self.taken = 0

    # -- taking -------------------------------------------------------------------------------------------

    async def on_demand(self, operator: str = "", numbers: Collection[int] = (), savepoint: str = "") -> Taken:
        """Checkpoints all owned partitions, those of one operator, or the given ones of it.

        Tries all of them, then raises the first error.
        """
        partitions = [
            partition
            for partition in self._node.owned(operator or None)
            if not numbers or partition.partition in numbers
        ]
        async with self._one:
            taken, errors = await self._take(partitions, savepoint, on_demand=True)
        if errors:
            raise errors[0]
        return taken

    async def periodically(self) -> None:
        """Takes checkpoints until cancelled.

        The first round waits a random part of the interval, so that replicas do not upload in step.
        """
        interval_s, troubles = self._node.settings.checkpoint_interval_s, Troubles(log, "checkpoints are not taken")
        await asyncio.sleep(interval_s * self._random.random())
        while True:
            with troubles.survived():
                async with self._one:
                    _, errors = await self._take(self._node.owned(), "", on_demand=False)
                for error in errors:
                    log.error("checkpoint failed: %s", error)
            await asyncio.sleep(interval_s * self._random.uniform(1 - JITTER, 1 + JITTER))

    async def tidily(self) -> None:
        """Drops expired checkpoints, and marks those missing from the store to be taken again, until cancelled."""
        settings, troubles = self._node.settings, Troubles(log, "checkpoint cleanup failed")
        while True:
            await asyncio.sleep(settings.checkpoint_tidy_interval_s * self._random.uniform(1 - JITTER, 1 + JITTER))
            with troubles.survived():
                await self._loop.run_in_executor(self._tidying, self._tidy, self._own_store())

    def _tidy(self, store: CheckpointStore) -> None:
        settings = self._node.settings
        store.check()
        published = self._node.checkpointer.published(store)
        found = store.catalog.checkpoints()
        gone = published - {(each.partition, each.order) for each in found}
        if gone:
            log.error("%d checkpoints are missing from %s and will be taken again", len(gone), store.url)
            self._node.checkpointer.forget(gone)
        if not settings.checkpoint_keep or whose_turn(found) not in self._node.owned():
            return
        done = collect(store, Retention(settings.checkpoint_keep, settings.checkpoint_keep_s))
        if done.checkpoints_dropped or done.blobs_deleted:
            log.info(
                "checkpoint cleanup: %d checkpoints and %d blobs dropped, %d and %d kept",
                done.checkpoints_dropped,
                done.blobs_deleted,
                done.checkpoints_kept,
                done.blobs_kept,
            )
        if done.held_up:
            log.error("no blob dropped from %s: %s", store.url, done.held_up)

    async def _take(
        self, partitions: list[PartitionId], savepoint: str, *, on_demand: bool
    ) -> tuple[Taken, list[StateflowError]]:
        store = self._own_store()
        started = self._clock.monotonic()
        done: list[PartitionId] = []
        bytes_new = bytes_total = 0
        errors: list[StateflowError] = []

        def take(partition: PartitionId) -> Saved | None:
            return self._node.checkpointer.take(partition, store, savepoint=savepoint, on_demand=on_demand)

        try:
            await self._loop.run_in_executor(self._uploads, _begin, store)
        except StateflowError as error:
            return Taken(CheckpointReport(0, 0, 0, 0.0, store.url)), [error]
        for partition in partitions:
            try:
                saved = await self._loop.run_in_executor(self._uploads, take, partition)
                if saved is not None:
                    done.append(partition)
                    bytes_new, bytes_total = bytes_new + saved.bytes_new, bytes_total + saved.bytes_total
            except StaleCheckpoint as error:
                errors.append(error)
            except StateflowError as error:
                errors.append(error)
                if not on_demand and not await self._answers(store):
                    break  # the store is at fault: the other partitions would only wait for it too
            except Exception as error:
                log.exception("checkpoint of %s failed", partition)
                errors.append(StateflowError(f"{type(error).__name__}: {error}", remedy="see the replica's log"))
        self.taken += not errors
        duration_s = self._clock.monotonic() - started
        report = CheckpointReport(len(done), bytes_new, bytes_total, duration_s, store.url)
        return Taken(report, tuple(partition.partition for partition in done)), errors

    async def _answers(self, store: CheckpointStore) -> bool:
        """Tells whether the store answers. If it does, a failure concerns one partition, such as a damaged database."""
        try:
            await self._loop.run_in_executor(self._uploads, _begin, store)
        except StateflowError:
            return False
        return True

    def _own_store(self) -> CheckpointStore:
        if self.store is None:
            raise InvalidArgument(
                "this replica has no checkpoint store",
                remedy="start it with --checkpoints URL",
                replica=self._node.info.name,
            )
        return self.store

    # -- restoring ----------------------------------------------------------------------------------------

    async def prepare(self, restore: Restore) -> Restored:
        """Fetches and verifies a checkpoint from the named store, or else from the replica's own.

        Raises UnknownPartition, InvalidArgument, and what :class:`~stateflow.runtime.restoring.Restorer` raises.
        """
        return await self._loop.run_in_executor(self._restores, self._prepare, restore)

    def _prepare(self, restore: Restore) -> Restored:
        spec, partition = restore.spec, restore.partition
        _check_number(spec, partition)
        store = self._named(restore.url) if restore.url else self._own_store()
        return self._node.restorer.prepare(spec, partition, restore.restore_id, store, self.store, restore.wanted)

    async def own(self, restore: Restore, command: Command) -> Restored:
        """Serves the verified state, at its epoch or a newer one. Raises as :meth:`prepare` does."""
        _check_number(restore.spec, restore.partition)
        own = partial(self._node.restorer.own, stop_sources=restore.stop_sources)
        return await self._loop.run_in_executor(
            self._restores, own, restore.partition, restore.restore_id, restore.epoch, command
        )

    def _named(self, url: str) -> CheckpointStore:
        settings = self._node.settings
        codec = Codec(settings.checkpoint_compression, configured_key())
        cache = self.store.cache if self.store is not None else None
        return CheckpointStore(url, codec=codec, cache=cache, create=False, timeout_s=settings.checkpoint_timeout_s)

    def close(self) -> None:
        self._uploads.shutdown(wait=False, cancel_futures=True)
        self._tidying.shutdown(wait=False, cancel_futures=True)
        self._restores.shutdown(wait=False, cancel_futures=True)


def _begin(store: CheckpointStore) -> None:
    """Checks the store, also when no partition has changed, so that a missing store is noticed."""
    store.check(first_use=True)


def _check_number(spec: OperatorSpec, partition: PartitionId) -> None:
    if not partition.partition < spec.partitions:
        raise UnknownPartition(f"there is no partition {partition.partition}", remedy="see `stateflow status`")
