"""Readers of whole partitions: verifications, and trials of an operator's new version.

They read one partition at a time, however many verifications are asked for. A trial calls the operator's own code,
which may not come back: each has a thread of its own, and is given up as a batch would be.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from stateflow.clock import Clock
from stateflow.errors import OperatorStuck, StateflowError
from stateflow.replica.lane import Lane
from stateflow.replica.threads import Threads
from stateflow.replica.watching import INTERRUPT_EVERY_S, INTERRUPTS
from stateflow.runtime.checkpointing import DIGEST_SHARE
from stateflow.runtime.control import Verification
from stateflow.runtime.failures import failure
from stateflow.runtime.lifecycle import State
from stateflow.runtime.operator import Operator
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.trial import FAILURES, Trial
from stateflow.runtime.verifying import Copy
from stateflow.runtime.watchdog import InHand, Interrupted
from stateflow.storage.faults import meaning
from stateflow.types import OperatorSpec, PartitionId

log = logging.getLogger(__name__)
MEND = "fix the operator and deploy it again; the deployed version keeps serving"


class VerifyShell:
    def __init__(self, node: ReplicaNode, threads: Threads) -> None:
        self._node, self._threads = node, threads
        self._one = ThreadPoolExecutor(1, thread_name_prefix="verifying")
        self._loop = asyncio.get_running_loop()

    async def verify(self, partition: PartitionId, standby_of: int | None) -> AsyncIterator[Verification]:
        """Yields two reports: which moment is read, and what was found. Yields nothing if the partition is not here.

        A caller that stops iterating ends the verification.
        """
        verifier = self._node.verifier
        beginning = self._threads.files.submit(verifier.begin, partition, standby_of)
        try:
            copy = await asyncio.wrap_future(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._unasked)  # its thread goes on, and no other code knows what it made
            raise
        if copy is None:
            return
        stop = Event()
        try:
            yield Verification(copy.epoch, copy.sequence)
            yield await self._loop.run_in_executor(self._one, verifier.read, copy, stop.is_set)
        finally:
            stop.set()
            self._one.submit(verifier.end, copy)  # after the read that may be under way

    def _unasked(self, begun: Future[Copy | None]) -> None:
        if not begun.cancelled() and begun.exception() is None and (copy := begun.result()) is not None:
            self._one.submit(self._node.verifier.end, copy)

    def close(self) -> None:
        self._one.shutdown(wait=False, cancel_futures=True)


class TrialShell:
    """Tries versions on the state stored here; see :mod:`stateflow.runtime.trial`."""

    def __init__(self, node: ReplicaNode, clock: Clock, threads: Threads) -> None:
        self._node, self._clock, self._threads = node, clock, threads
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self, spec: OperatorSpec, numbers: Iterable[int]) -> AsyncIterator[int]:
        """Yields each partition that has been tried; partitions not owned here, or unreadable, are left out.

        A caller that stops iterating ends the trial. Raises OperatorNotImportable, OperatorOutdated, and the errors of
        the version: SchemaMismatch, OperatorFailed, OperatorStuck, DecodeError or EncodeError.
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
            log.warning("trial on %s skipped: %s", partition, meaning(error) or error)
            return False
        if trial is None:
            return False
        pace = _Pace(self._node, self._clock, Lane(f"trial of {partition}", self._clock))
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
            log.warning("trial on %s skipped: %s", partition, meaning(error) or error)
            return False
        finally:
            pace.lane.submit(trials.end, trial)  # after the piece that is under way
            pace.lane.shutdown(wait=False)
        return True

    def _unasked(self, begun: Future[Trial | None]) -> None:
        if not begun.cancelled() and begun.exception() is None and (trial := begun.result()) is not None:
            self._threads.files.submit(self._node.trials.end, trial)


class _Pace:
    """Runs a trial piece by piece, and makes way for batches between two pieces.

    The migration will be part of one batch later, so all pieces together may take as long as a batch may.
    """

    def __init__(self, node: ReplicaNode, clock: Clock, lane: Lane) -> None:
        self._node, self._clock, self.lane = node, clock, lane
        self._hand: InHand | None = None
        self._step: asyncio.Future[bool] | None = None

    async def run(self, trial: Trial) -> None:
        """Runs the trial to its end. Raises OperatorStuck, and what :meth:`Trial.step` raises."""
        limit_s, spent_s, loop = self._node.settings.batch_timeout_s, 0.0, asyncio.get_running_loop()
        more = True
        while more:
            began, self._hand = self._clock.monotonic(), None
            self._step = step = loop.run_in_executor(self.lane, self._take, trial)
            step.add_done_callback(lambda done: done.cancelled() or done.exception())  # also if nobody waits
            try:
                while not step.done():
                    await asyncio.wait((step,), timeout=max(limit_s - spent_s, 0.0) if limit_s else None)
                    if not step.done():
                        await self._give_up(step)
                more = step.result()
            except OperatorStuck as error:
                if spent_s > limit_s / 2:  # not one key alone
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
        """Ends the piece that is under way, as the caller has stopped iterating."""
        if self._step is not None:
            with contextlib.suppress(StateflowError):
                await self._give_up(self._step)

    def _take(self, trial: Trial) -> bool:
        self._hand = hand = InHand(trial.copy.partition, self._clock.monotonic())
        try:
            return trial.step()
        except Interrupted as error:  # between two calls of the operator
            hand.shield()
            raise failure("the operator", error, "", operator=trial.copy.partition.operator) from error
        finally:
            hand.end()

    async def _give_up(self, step: asyncio.Future[bool]) -> None:
        """Interrupts the operator. Raises OperatorStuck where that is not possible; its thread is left behind then."""
        for _ in range(INTERRUPTS):
            if step.done():
                return
            if (hand := self._hand) is not None:
                hand.interrupt()
            await asyncio.wait((step,), timeout=INTERRUPT_EVERY_S)
        if (hand := self._hand) is not None and hand.take_away():
            self.lane.leave_behind()
            raise hand.refusal()
