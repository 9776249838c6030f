"""Takes and restores a replica's checkpoints, verifies its partitions, and tries new versions of operators on them.

Checkpoints and restores run on separate threads, because a slow or silent store must not keep moves and batches
waiting.

Verifications and trials read whole partitions, one at a time. A trial calls code of the operator, which may not return.
So each trial has a separate thread, and is interrupted or left behind as a batch would be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from random import Random  # noqa: TID251 - the type; which one is handed in
from threading import Event

from stateflow.checkpoint import CheckpointStore, Codec
from stateflow.checkpoint.codec import configured_key
from stateflow.checkpoint.collecting import Retention, collect, whose_turn
from stateflow.checkpoint.store import Saved
from stateflow.clock import Clock
from stateflow.errors import InvalidArgument, OperatorStuck, StaleCheckpoint, StateflowError, UnknownPartition
from stateflow.operator.instance import failure
from stateflow.operator.operator import Operator
from stateflow.operator.watchdog import Interrupted, RunningBatch
from stateflow.partition.checkpoints import DIGEST_SHARE
from stateflow.partition.control import Command, Restore, Restored, Verification
from stateflow.partition.lifecycle import State
from stateflow.partition.replica import ReplicaNode
from stateflow.partition.verification import FAILURES, Copy, Trial
from stateflow.replica.executor import INTERRUPT_EVERY_S, INTERRUPTS, ErrorThrottle, Threads, WorkerThread
from stateflow.reports import CheckpointReport, Taken
from stateflow.storage.faults import meaning
from stateflow.types import OperatorSpec, PartitionId

log = logging.getLogger(__name__)
#: checkpoints that are fetched at once
RESTORES_AT_ONCE = 2
#: restored partitions that are owned at once, as many as the controller restores at once
OWNED_AT_ONCE = 4
#: largest random change of the checkpoint interval, as a fraction, so that replicas do not stay in step
JITTER = 0.1
#: remedy of a trial that failed
MEND = "fix the operator and deploy it again; the deployed version keeps serving"


# -- Checkpoints and restores ----------------------------------------------------------------------------------------


class CheckpointShell:
    """Takes, cleans up and restores the checkpoints of one replica.

    Args:
        store: store for checkpoints. With None, no checkpoints are taken, and only restores from a named store are
            possible.
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
        # separate, because no replica serves the partition while its last step waits for the fetches of others
        self._owning = ThreadPoolExecutor(OWNED_AT_ONCE, thread_name_prefix="owning")
        self._loop = asyncio.get_running_loop()
        self.taken = 0

    # -- taking -------------------------------------------------------------------------------------------

    async def on_demand(self, operator: str = "", numbers: Collection[int] = (), savepoint: str = "") -> Taken:
        """Takes checkpoints of owned partitions. Tries all of them, then raises the first error.

        Args:
            operator: limits the checkpoints to one operator; empty for all operators.
            numbers: limits the checkpoints to these partitions; empty for all partitions.
            savepoint: name of a savepoint that the checkpoints belong to.
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
        """Takes checkpoints regularly, until cancelled.

        The first round waits a random part of the interval, so that replicas do not upload in step.
        """
        interval_s, throttle = (
            self._node.settings.checkpoint_interval_s,
            ErrorThrottle(log, "checkpoints are not taken"),
        )
        await asyncio.sleep(interval_s * self._random.random())
        while True:
            with throttle.survived():
                async with self._one:
                    _, errors = await self._take(self._node.owned(), "", on_demand=False)
                for error in errors:
                    log.error("periodic checkpoint failed: %s", error)
            await asyncio.sleep(interval_s * self._random.uniform(1 - JITTER, 1 + JITTER))

    async def tidily(self) -> None:
        """Cleans up the store regularly, until cancelled: drops expired checkpoints, and finds checkpoints that are
        missing from the store, which are then taken again.

        The first round waits only a random part of the interval, so that replicas which restart often clean up, too.
        """
        interval_s, throttle = (
            self._node.settings.checkpoint_tidy_interval_s,
            ErrorThrottle(log, "checkpoint cleanup failed"),
        )
        await asyncio.sleep(interval_s * self._random.random())
        while True:
            with throttle.survived():
                await self._loop.run_in_executor(self._tidying, self._tidy, self._own_store())
            await asyncio.sleep(interval_s * self._random.uniform(1 - JITTER, 1 + JITTER))

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
                    break  # the store does not answer, so the other partitions would fail, too
            except Exception as error:
                log.exception("checkpoint of %s failed", partition)
                errors.append(
                    StateflowError(
                        f"the checkpoint failed: {type(error).__name__}: {error}", remedy="see the replica's log"
                    )
                )
        self.taken += not errors
        duration_s = self._clock.monotonic() - started
        report = CheckpointReport(len(done), bytes_new, bytes_total, duration_s, store.url)
        return Taken(report, tuple(partition.partition for partition in done)), errors

    async def _answers(self, store: CheckpointStore) -> bool:
        """Tells whether the store answers. If it does, the cause of a failure is the partition, for example a damaged
        database."""
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
        """Fetches a checkpoint from the store that ``restore`` names, by default the replica's own, and verifies it.

        Raises UnknownPartition, InvalidArgument if no store is named and the replica has none, and the errors of
        :class:`~stateflow.partition.takeover.Restorer`.
        """
        return await self._loop.run_in_executor(self._restores, self._prepare, restore)

    def _prepare(self, restore: Restore) -> Restored:
        spec, partition = restore.spec, restore.partition
        _check_number(spec, partition)
        store = self._named(restore.url) if restore.url else self._own_store()
        return self._node.restorer.prepare(spec, partition, restore.restore_id, store, self.store, restore.wanted)

    async def own(self, restore: Restore, command: Command) -> Restored:
        """Begins to serve the state that :meth:`prepare` verified, at the epoch of ``restore`` or a newer one.

        Raises the errors of :meth:`prepare`.
        """
        _check_number(restore.spec, restore.partition)
        own = partial(self._node.restorer.own, stop_sources=restore.stop_sources)
        return await self._loop.run_in_executor(
            self._owning, own, restore.partition, restore.restore_id, restore.epoch, command
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
        self._owning.shutdown(wait=False, cancel_futures=True)


def _begin(store: CheckpointStore) -> None:
    """Checks the store even if no partition has changed, so that a missing store is noticed."""
    store.check(first_use=True)


def _check_number(spec: OperatorSpec, partition: PartitionId) -> None:
    if not partition.partition < spec.partitions:
        raise UnknownPartition(
            f"there is no partition {partition.partition}",
            remedy=f"use a partition from 0 to {spec.partitions - 1}",
        )


# -- Readers of whole partitions -------------------------------------------------------------------------------------


class VerifyShell:
    def __init__(self, node: ReplicaNode, threads: Threads) -> None:
        self._node, self._threads = node, threads
        self._one = ThreadPoolExecutor(1, thread_name_prefix="verifying")
        self._loop = asyncio.get_running_loop()

    async def verify(self, partition: PartitionId, standby_of: int | None) -> AsyncIterator[Verification]:
        """Yields two reports: first the epoch and sequence that are verified, then the result. Yields nothing if the
        partition is not on this replica.

        If the caller stops iterating, the verification ends.
        """
        verifier = self._node.verifier
        beginning = self._threads.files.submit(verifier.begin, partition, standby_of)
        try:
            copy = await asyncio.wrap_future(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._unasked)  # the thread continues, and its copy has to be released
            raise
        if copy is None:
            return
        stop = Event()
        try:
            yield Verification(copy.epoch, copy.sequence)
            yield await self._loop.run_in_executor(self._one, verifier.read, copy, stop.is_set)
        finally:
            stop.set()
            self._one.submit(verifier.end, copy)  # runs after a read that is under way

    def _unasked(self, begun: Future[Copy | None]) -> None:
        if not begun.cancelled() and begun.exception() is None and (copy := begun.result()) is not None:
            self._one.submit(self._node.verifier.end, copy)

    def close(self) -> None:
        self._one.shutdown(wait=False, cancel_futures=True)


class TrialShell:
    """Tries new versions of operators on the state stored here, see :mod:`stateflow.partition.verification`."""

    def __init__(self, node: ReplicaNode, clock: Clock, threads: Threads) -> None:
        self._node, self._clock, self._threads = node, clock, threads
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self, spec: OperatorSpec, numbers: Iterable[int]) -> AsyncIterator[int]:
        """Tries the version ``spec`` on partitions, and yields each partition that passed.

        Partitions that are not owned here, or cannot be read, are left out. If the caller stops iterating, the trial
        ends. Raises OperatorNotImportable or OperatorOutdated if the version cannot be loaded, and the errors of its
        migration: SchemaMismatch, OperatorFailed, OperatorStuck, DecodeError or EncodeError.
        """
        trials, in_files = self._node.trials, self._threads.in_files
        cls = await in_files(trials.load, spec)
        for number in numbers:
            partition = PartitionId(spec.name, number)
            if self._node.lifecycle(partition).state is not State.OWNED:
                continue
            if not await in_files(trials.is_needed, spec, cls, partition) or await self._tried(spec, cls, partition):
                yield number

    async def _tried(self, spec: OperatorSpec, cls: type[Operator], partition: PartitionId) -> bool:
        trials = self._node.trials
        beginning = self._threads.files.submit(trials.begin, spec, cls, partition)
        try:
            trial = await asyncio.wrap_future(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._unasked)
            raise
        except Exception as error:  # noqa: BLE001 - the partition's fault, not the version's
            log.warning("trial of the new version on %s skipped: %s", partition, meaning(error) or error)
            return False
        if trial is None:
            return False
        pace = _Pace(self._node, self._clock, WorkerThread(f"trial of {partition}", self._clock))
        try:
            await pace.run(trial)
        except asyncio.CancelledError:
            leaving = asyncio.create_task(pace.leave())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            raise
        except FAILURES:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("trial of the new version on %s skipped: %s", partition, meaning(error) or error)
            return False
        finally:
            pace.worker.submit(trials.end, trial)  # runs after the piece that is under way
            pace.worker.shutdown(wait=False)
        return True

    def _unasked(self, begun: Future[Trial | None]) -> None:
        if not begun.cancelled() and begun.exception() is None and (trial := begun.result()) is not None:
            self._threads.files.submit(self._node.trials.end, trial)


class _Pace:
    """Runs a trial piece by piece, with pauses in which batches run.

    The migration will later be part of one batch, so all pieces together may take only as long as one batch.
    """

    def __init__(self, node: ReplicaNode, clock: Clock, worker: WorkerThread) -> None:
        self._node, self._clock, self.worker = node, clock, worker
        self._hand: RunningBatch | None = None
        self._step: asyncio.Future[bool] | None = None

    async def run(self, trial: Trial) -> None:
        """Runs the trial to its end. Raises OperatorStuck, and the errors of :meth:`Trial.step`."""
        limit_s, spent_s, loop = self._node.settings.batch_timeout_s, 0.0, asyncio.get_running_loop()
        more = True
        while more:
            began, self._hand = self._clock.monotonic(), None
            self._step = step = loop.run_in_executor(self.worker, self._take, trial)
            step.add_done_callback(lambda done: done.cancelled() or done.exception())  # also if nobody waits
            try:
                while not step.done():
                    await asyncio.wait((step,), timeout=max(limit_s - spent_s, 0.0) if limit_s else None)
                    if not step.done():
                        await self._give_up(step)
                more = step.result()
            except OperatorStuck as error:
                if spent_s > limit_s / 2:  # many keys together took too long, not a single one
                    raise self._too_slow(trial.copy.partition) from error
                error.located(replica=self._node.info.name)
                raise OperatorStuck(error.what, remedy=MEND, **error.where) from error  # no batch is involved
            now = self._clock.monotonic()
            spent_s += now - began
            if more and limit_s and spent_s >= limit_s:
                raise self._too_slow(trial.copy.partition)
            await asyncio.sleep(DIGEST_SHARE.wait_s(now, now - began, self._node.served_at))

    def _too_slow(self, partition: PartitionId) -> OperatorStuck:
        limit_s = self._node.settings.batch_timeout_s
        return OperatorStuck(
            f"the new version takes longer to migrate the partition's state than a batch may take, {limit_s:g} s",
            remedy="make migrate_state faster, or raise STATEFLOW_REPLICA_BATCH_TIMEOUT_S on all replicas; the "
            "deployed version keeps serving",
            operator=partition.operator,
            partition=partition.partition,
            replica=self._node.info.name,
        )

    async def leave(self) -> None:
        """Ends the running piece, because the caller has stopped iterating."""
        if self._step is not None:
            with contextlib.suppress(StateflowError):
                await self._give_up(self._step)

    def _take(self, trial: Trial) -> bool:
        self._hand = run = RunningBatch(trial.copy.partition, self._clock.monotonic())
        try:
            return trial.step()
        except Interrupted as error:  # between two calls of the operator
            run.shield()
            raise failure("the operator", error, "", operator=trial.copy.partition.operator) from error
        finally:
            run.end()

    async def _give_up(self, step: asyncio.Future[bool]) -> None:
        """Interrupts the operator. If that is impossible, leaves its thread behind and raises OperatorStuck."""
        for _ in range(INTERRUPTS):
            if step.done():
                return
            if (run := self._hand) is not None:
                run.interrupt()
            await asyncio.wait((step,), timeout=INTERRUPT_EVERY_S)
        since = self.worker.busy_since
        if (run := self._hand) is not None and run.take_away():
            self.worker.leave_behind(since)
            raise run.refusal()
