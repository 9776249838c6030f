"""Restores partitions from checkpoints. The target fetches and proves a checkpoint before the owner is asked to stop.

For each partition, the controller records the restore with the epoch that is promised to the target; the target fetches
and proves the checkpoint; the present owner, if it is alive, stops for good; then the target owns the partition. Every
step can be repeated, so a controller that is restarted in between begins again with the first step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from reconfig.controller import steps
from reconfig.controller.context import ControllerContext
from reconfig.decisions.placement import Terms, best
from reconfig.decisions.plan import PlannedRestore
from stateflow.errors import (
    InvalidArgument,
    LeaseLost,
    MoveCancelled,
    MoveConflict,
    MoveUnknown,
    ReleaseMismatch,
    StaleCheckpoint,
    StateflowError,
    Unavailable,
)
from stateflow.partition.control import NEWEST, Cancellation, Fence, Restore, Restored, Wanted
from stateflow.private import is_masked, masked
from stateflow.release import FIRST
from stateflow.reports import RestoredPartition
from stateflow.rpc.faults import unexpected
from stateflow.types import PartitionId

log = logging.getLogger(__name__)
AT_ONCE = 4
#: errors that another fetch repairs: the target has restarted and forgotten the fetch, or a newer checkpoint exists
FETCHED_AGAIN = (MoveUnknown, StaleCheckpoint)


@dataclass(frozen=True, slots=True)
class Request:
    """A command to restore.

    Attributes:
        partitions: the partitions to restore; empty: all.
        to: a replica or a site; empty: the present owner, or any replica if the owner does not answer.
        url: URL of a checkpoint store; empty: the store of each replica.
        stop_sources: clients that have sent rows so far are refused afterwards.
    """

    operator: str
    partitions: tuple[int, ...] = ()
    to: str = ""
    url: str = ""
    wanted: Wanted = NEWEST
    stop_sources: bool = False


class Restores:
    """Plans restores, and carries them out.

    Args:
        end_standbys: ends the standbys of partitions; new ones begin by themselves when the restore is over.
    """

    def __init__(
        self, context: ControllerContext, end_standbys: Callable[[Collection[PartitionId]], Awaitable[None]]
    ) -> None:
        self._context, self._end_standbys = context, end_standbys
        self._cluster, self._alive = context.cluster, context.members.alive
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._urls: dict[str, str] = {}  # by restore id: URLs with their passwords, which are kept nowhere else

    async def restore(self, request: Request) -> tuple[str, list[RestoredPartition]]:
        """Restores partitions. Returns the restore's id, and the outcome of each partition.

        Raises errors only before anything is recorded.
        """
        await self._context.acquainted()
        async with self._context.planning:
            planned = await self.plan(request)
        return planned[0].restore_id, await self.run(planned)

    async def plan(self, request: Request) -> list[PlannedRestore]:
        """Plans and records a restore. Raises errors only before anything is recorded. Callers hold ``planning``."""
        deployed = self._cluster.operator(request.operator)
        numbers = sorted(set(request.partitions)) or list(range(deployed.spec.partitions))
        restore_id = self._context.new_id()
        url = masked(request.url)
        owned = Counter(self._cluster.owned_counts())
        planned = []
        for number in numbers:
            partition = PartitionId(deployed.spec.name, number)
            owner, _ = deployed.assignment.owner(number)
            self._context.check_not_restored(partition)
            for move in self._cluster.changes():
                if move.partition == partition:
                    raise MoveConflict(
                        "the partition is moving",
                        remedy="wait until the move ends, or cancel it",
                        partition=partition,
                        reconfiguration=move.reconfiguration,
                    )
            self._check_not_alone(partition, owner)
            target = self._target(request.operator, owner, request.to, owned)
            if request.stop_sources:
                self._check_stops_sources(target)
            owned[target] += 1
            epoch = self._cluster.next_epoch(partition)
            planned.append(
                PlannedRestore(
                    restore_id,
                    partition,
                    owner,
                    target,
                    epoch,
                    url,
                    request.wanted.savepoint,
                    request.wanted.source,
                    request.wanted.batch,
                    request.stop_sources,
                )
            )
        await self._context.record(steps.plan_restores, planned)
        if is_masked(url):
            self._urls[restore_id] = request.url
        return planned

    def _check_not_alone(self, partition: PartitionId, owner: str) -> None:
        """Checks that an owner that does not answer, and so cannot be asked to stop, is not serving a partition alone.

        Raises Unavailable if the owner may be serving it.
        """
        if not self._alive(owner) and self._context.may_be_alone(owner, partition.operator):
            raise Unavailable(
                f"owner {owner} does not answer, but may still serve the partition",
                remedy="check that it runs; if it is gone for good, run "
                "`stateflow takeover OPERATOR --accept-loss` first",
                partition=partition,
            )

    def _check_stops_sources(self, target: str) -> None:
        """Checks that a replica's version can stop sources. Raises ReleaseMismatch."""
        version = self._context.members.version(target)
        if version == FIRST.version:  # it would ignore the option, and restore the partition
            raise ReleaseMismatch(
                f"stateflow {version} of replica {target} cannot stop sources",
                remedy="upgrade the replica first, or restore without --stop-sources",
            )

    def _target(self, operator: str, owner: str, to: str, owned: Mapping[str, int]) -> str:
        """Returns the target of a partition.

        Args:
            to: a replica or a site. At a site, the target is the owner if it is there, else the least loaded replica.
                Empty: the owner, or if it does not answer, the least loaded replica, preferably at the operator's
                sites.
            owned: number of partitions by replica, including those that are to be restored there.
        """
        if (not to or to == owner) and self._alive(owner):
            return owner
        if to and to not in self._cluster.roster.replicas:
            self._context.check_site(to)
        replicas = (self._context.fit() or self._context.alive()).values()
        here = [info for info in replicas if to in ("", info.site, info.name)]
        if any(info.name == owner for info in here):
            return owner
        target = best(here, owned, Terms(sites=() if to else self._cluster.operator(operator).sites))
        if target is None:
            raise Unavailable(
                f"no replica of {to or 'the cluster'} that may receive partitions answers",
                remedy="start one, or end its maintenance",
            )
        return target.name

    async def cancel(self, restore_id: str) -> None:
        """Cancels a restore: partitions that have not begun stay as they are; the others are restored.

        Raises MoveUnknown.
        """
        if restore_id not in self._cluster.restores.batches:
            raise MoveUnknown(f"no restore {restore_id!r} is under way", remedy="see `stateflow batch list`")
        await self._context.record(steps.call_off_restore, restore_id)

    async def resume(self) -> None:
        """Resumes the restores that were under way, once the replicas have had time to send a heartbeat.

        A target may already own its partition although no controller has recorded it.
        """
        planned = self._cluster.restores.under_way
        if planned:
            settings = self._context.settings
            await asyncio.sleep(settings.heartbeat_interval_s * settings.heartbeats_missed_max)
            await self.run(planned)

    async def run(self, planned: Iterable[PlannedRestore]) -> list[RestoredPartition]:
        planned = list(planned)
        await self._end_standbys({each.partition for each in planned})
        done = await asyncio.gather(*(self._run_one(each) for each in planned))
        for each in planned:
            self._urls.pop(each.restore_id, None)
        return done

    async def _run_one(self, planned: PlannedRestore) -> RestoredPartition:
        number = planned.partition.partition
        granted = 0  # epoch for which the owner was asked to stop
        async with self._slots:
            try:
                if planned.restore_id in self._cluster.restores.cancelled:
                    raise MoveCancelled(
                        "the restore was cancelled", remedy="restore the partition again", partition=planned.partition
                    )
                order = self._order(planned)
                fetched = await self._context.replicas.fetch(planned.target, order)
                order = replace(order, epoch=max(planned.epoch, fetched.epoch))
                if planned.owner != planned.target:
                    granted = order.epoch
                    await self._stop(planned, granted)
                owned, fetched = await self._own(planned, order, fetched)
            except Exception as error:
                fault = error if isinstance(error, StateflowError) else unexpected(error)
                if fault is not error:
                    log.exception("restore of %s failed", planned.partition)
                await self._context.record(steps.restore_failed, planned, granted, fault.to_wire())
                await self._discard_fetched(planned)
                return RestoredPartition(number, planned.target, fault=fault)
            unusable = (*owned.passed_over, *fetched.passed_over)
            report = RestoredPartition(
                number, planned.target, owned.epoch, owned.sequence, owned.positions, fetched.bytes, unusable
            )
            for passed_over in report.passed_over:
                log.error("restore of %s passed over a newer checkpoint: %s", planned.partition, passed_over)
            await self._context.record(steps.restore_owned, planned, owned.epoch, report.to_dict())
            return report

    async def _discard_fetched(self, planned: PlannedRestore) -> None:
        """Lets the target discard what it fetched for a failed restore. If the target does not answer, the copy stays
        until it restarts, or restores the partition again."""
        if self._alive(planned.target):
            cancellation = Cancellation(planned.partition, planned.restore_id)
            try:
                await self._context.replicas.cancel(planned.target, cancellation, at_once=True)
            except StateflowError as error:
                log.warning("restore of %s: %s may keep what it fetched: %s", planned.partition, planned.target, error)

    def _order(self, planned: PlannedRestore) -> Restore:
        """Returns the order for the target. Raises InvalidArgument if the password of the URL is lost.

        A password is kept only in the controller process that received it.
        """
        url = self._urls.get(planned.restore_id, planned.url)
        if is_masked(url):
            raise InvalidArgument(
                "the URL's password is lost: only the controller that received the command kept it",
                remedy="restore again, and pass the URL with its password (--from)",
                url=url,
            )
        return Restore(
            planned.restore_id,
            self._cluster.operator(planned.partition.operator).spec,
            planned.partition,
            planned.epoch,
            url,
            Wanted(planned.savepoint, planned.source, planned.batch),
            planned.stop_sources,
        )

    async def _own(self, planned: PlannedRestore, order: Restore, fetched: Restored) -> tuple[Restored, Restored]:
        """Lets the target own the partition. Returns its report as the owner, and its report on the fetch.

        No other replica serves the partition from here on, so the controller waits for a target that does not answer,
        and the target fetches again what it has forgotten. The restore is given up only when the target's lease has
        lapsed, or when the target refuses and says that it does not own the partition. While the target may serve the
        partition, no other replica may.
        """
        settings, members, replicas = self._context.settings, self._context.members, self._context.replicas
        seen = self._cluster.epochs_seen
        give_up_at = self._context.clock.monotonic() + settings.restore_patience_s
        there, unheard = True, False
        while True:
            try:
                if not there:
                    fetched = await replicas.fetch(planned.target, order)
                    there, order = True, replace(order, epoch=max(order.epoch, fetched.epoch))
                # the target may publish a checkpoint at this epoch and then fail; the next owner needs a newer one
                seen[planned.partition] = max(seen.get(planned.partition, 0), order.epoch)
                return await replicas.own(planned.target, order), fetched
            except StateflowError as error:
                passing = isinstance(error, (Unavailable, LeaseLost, *FETCHED_AGAIN))
                if not passing and not (unheard and await self._may_own(planned)):
                    raise
                unheard |= there and isinstance(error, Unavailable)
                if self._context.clock.monotonic() > give_up_at and members.lapsed(planned.target):
                    raise Unavailable(
                        f"the restore's target {planned.target} is gone: {error}",
                        remedy=f"restore to another replica with --to; {planned.owner} serves its former state once "
                        "it answers",
                        partition=planned.partition,
                    ) from error
                log.warning("restore of %s retried: %s", planned.partition, error)
                there = there and not isinstance(error, FETCHED_AGAIN)
            await self._context.pause()

    async def _may_own(self, planned: PlannedRestore) -> bool:
        """Tells whether the target may own the partition: yes, unless it says that it does not. Raises HoldLost.

        A cancellation serves as the question, because an owner ignores it.
        """
        self._context.check_leads()
        cancellation = Cancellation(planned.partition, planned.restore_id)
        try:
            cancelled = await self._context.replicas.cancel(planned.target, cancellation)
        except StateflowError as error:
            log.warning("restore of %s: unknown whether %s owns it: %s", planned.partition, planned.target, error)
            return True
        return cancelled.owned

    async def _stop(self, planned: PlannedRestore, epoch: int) -> None:
        """Stops the owner, and waits until it confirms that it no longer serves the partition, or until its lease has
        lapsed.

        Missed heartbeats do not prove that the owner has stopped.
        """
        give_up_at = self._context.clock.monotonic() + self._context.settings.restore_patience_s
        while not self._serves_no_more(planned):
            if self._context.clock.monotonic() > give_up_at:
                self._check_not_alone(planned.partition, planned.owner)
            if self._alive(planned.owner):
                with contextlib.suppress(LeaseLost):  # the owner is registering again
                    await self.surrender(planned.owner, planned.partition, planned.restore_id, epoch, planned.target)
                    return
            await self._context.pause()

    def _serves_no_more(self, planned: PlannedRestore) -> bool:
        context = self._context
        lapsed = context.members.lapsed(planned.owner)
        return lapsed and not context.may_be_alone(planned.owner, planned.partition.operator)

    async def surrender(self, owner: str, partition: PartitionId, restore_id: str, epoch: int, target: str) -> None:
        fence = Fence(partition, restore_id, epoch, self._cluster.roster.replicas[target])
        await self._context.replicas.surrender(owner, fence)
