"""Keeps the wanted number of standbys, copies of a partition that follow its owner.

A control loop compares the standbys that exist with those that are wanted. It ends standbys that follow a former owner,
are at a replica that stops, or exceed the count, and begins missing ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Iterable

from reconfig.controller import steps
from reconfig.controller.context import ControllerContext
from reconfig.controller.executor import Executor, Running
from reconfig.controller.runners import MoveRunner
from reconfig.decisions import migration as m
from reconfig.decisions.failover import Standby
from reconfig.decisions.placement import spread_standbys
from reconfig.decisions.plan import Copy, PlannedStandby, PlannedTakeover, ReconfigurationState
from stateflow.errors import InvalidArgument, MoveAborted, Unavailable
from stateflow.reports import Reconfiguration
from stateflow.status import StandbyReport
from stateflow.types import PartitionId, node_of

log = logging.getLogger(__name__)
#: seconds from the first failure of a partition's standby to the begin of its next one; doubled by each further failure
AGAIN_S = 2.0
MOST_DOUBLINGS = 5
NEAR_KEPT = 4


def check_copies(context: ControllerContext, node: str, otherwise: str = "") -> None:
    """Checks that operators can still have standbys without a node. ``otherwise``: a further remedy.

    Raises Unavailable if an operator that wants standbys could have no standby any more. A batch is acknowledged when
    one standby has confirmed it; without a standby there is no second copy.
    """
    cluster, fit = context.cluster, context.fit().values()
    for operator, count in sorted(cluster.standbys.items()):
        deployed = cluster.operator(operator)
        able = {node_of(info.name) for info in fit if deployed.may_be_at(info)}
        if not count or node not in able:
            continue
        if len(able) == 2:
            raise Unavailable(
                f"{operator} would have no standby: besides {node}, only one replica that answers may hold copies",
                remedy=f"start one more, or turn standbys off: `stateflow standby {operator} 0`{otherwise}",
                replica=node,
            )
        if (copies := max(0, len(able) - 2)) < count:
            log.warning("operator %s has at most %d of %d standbys without node %s", operator, copies, count, node)


class Standbys:
    def __init__(self, context: ControllerContext, executor: Executor) -> None:
        self._context, self._executor = context, executor
        self._runners: dict[str, MoveRunner] = {}  # by item
        self._not_before: dict[PartitionId, float] = {}
        self._tried: dict[PartitionId, Counter[str]] = {}  # standbys that failed, by target, since one followed
        self._near: dict[PartitionId, tuple[str, ...]] = {}  # replicas that had a copy, the latest first
        executor.standby_move = self.move_at
        executor.on_owned = self._owned

    async def want(self, operator: str, count: int) -> list[StandbyReport]:
        """Sets how many standbys each partition of an operator has, and returns the operator's standbys.

        Raises OperatorNotDeployed, and InvalidArgument if there are too few replicas.
        """
        await self._context.acquainted()
        async with self._context.planning:
            await self._order(operator, count)
        await self.reconcile()
        return [view for view in self.views() if view.operator == operator]

    async def _order(self, operator: str, count: int) -> None:
        deployed = self._context.cluster.operator(operator)
        replicas = len({node_of(info.name) for info in self._context.fit().values() if deployed.may_be_at(info)})
        if count >= max(replicas, 1):
            at = f" at {', '.join(deployed.sites)}, the operator's allowed sites" if deployed.sites else ""
            raise InvalidArgument(
                f"{count} standbys need {count + 1} replicas, {replicas} can hold copies{at}",
                remedy="start more replicas or end maintenance, or ask for fewer standbys",
                operator=operator,
            )
        await self._context.record(steps.want_standbys, operator, count)

    def undeployed(self, operator: str) -> None:
        """Forgets the former standbys of an undeployed operator."""
        for kept in (self._not_before, self._tried, self._near):
            for partition in [each for each in kept if each.operator == operator]:
                del kept[partition]

    def views(self) -> list[StandbyReport]:
        return [
            StandbyReport(
                runner.planned.partition.operator,
                runner.planned.partition.partition,
                runner.planned.target,
                runner.report.state,
                runner.report.lag_bytes,
            )
            for runner in sorted(self._runners.values(), key=lambda r: r.planned.partition)
        ]

    def of(self, partition: PartitionId) -> list[MoveRunner]:
        return [runner for runner in self._runners.values() if runner.planned.partition == partition]

    def move_at(self, partition: PartitionId, replica: str) -> str:
        """Returns the move id of a partition's standby at a replica; empty: there is none."""
        return next((r.planned.move_id for r in self.of(partition) if r.planned.target == replica), "")

    def copies(self, partition: PartitionId) -> list[Standby]:
        """Returns the standbys of a partition, in the form in which a takeover chooses among them."""
        return [
            Standby(
                runner.planned.target,
                runner.planned.move_id,
                runner.machine.phase is m.Phase.CATCHING_UP,
                runner.sequence,
            )
            for runner in self.of(partition)
        ]

    # -- existing and wanted standbys ----------------------------------------------------------------------

    async def reconcile(self) -> None:
        """Ends standbys that are not wanted any more, and begins missing ones.

        The missing ones are recorded in one transaction, because takeovers wait for the same lock.
        """
        async with self._context.planning:
            self._end_outdated()
            cluster = self._context.cluster
            wanted = [(name, count) for name, count in cluster.standbys.items() if count and name in cluster.deployed]
            missing = [planned for operator, count in wanted for planned in self._missing(operator, count)]
            if missing:
                await self._context.record(steps.plan_moves, missing)
            for planned in missing:
                self._begin(planned)

    def _end_outdated(self) -> None:
        kept: Counter[PartitionId] = Counter()
        for runner in list(self._runners.values()):
            planned = runner.planned
            wanted = self._context.cluster.standbys.get(planned.partition.operator, 0)
            if self._is_outdated(planned) or kept[planned.partition] >= wanted:
                runner.cancel()
            else:
                kept[planned.partition] += 1
                runner.follow_source()

    def _is_outdated(self, planned: Copy) -> bool:
        """Tells whether a standby follows a former owner, or a partition of an undeployed operator, or is at a replica
        that an agent was told to stop."""
        cluster, owned = self._context.cluster, (planned.source, planned.epoch)
        deployed = cluster.deployed.get(planned.partition.operator)
        if cluster.roster.is_stopping(planned.target):
            return True
        return deployed is None or deployed.assignment.owner(planned.partition.partition) != owned

    def _owned(self, partition: PartitionId) -> None:
        if self._context.cluster.standbys.get(partition.operator):
            self._context.spawn(self._renew(partition))

    async def _renew(self, partition: PartitionId) -> None:
        """Replaces a partition's standbys at once, because the new owner may have to wait for a standby before it
        acknowledges batches.
        """
        await self._end([runner for runner in self.of(partition) if self._is_outdated(runner.planned)])
        await self.reconcile()

    async def end(self, partitions: Collection[PartitionId]) -> None:
        """Ends all standbys of partitions.

        New standbys begin by themselves once no move, takeover or restore of the partition is open in the ledger.
        """
        await self._end([runner for runner in self._runners.values() if runner.planned.partition in partitions])

    @staticmethod
    async def _end(runners: Iterable[MoveRunner]) -> None:
        ending = list(runners)
        for runner in ending:
            runner.cancel()
        await asyncio.gather(*(runner.ended.wait() for runner in ending))

    def _missing(self, operator: str, count: int) -> list[PlannedStandby]:
        """Returns the missing standbys of an operator, for partitions that may have one now."""
        cluster, now = self._context.cluster, self._context.clock.monotonic()
        deployed, alive = cluster.operator(operator), self._context.alive()
        assignment = deployed.assignment
        changing = {change.partition for change in cluster.changes()}
        changing |= {restore.partition for restore in cluster.restores.under_way}
        lacking: dict[PartitionId, str] = {}
        existing: dict[PartitionId, list[str]] = {}
        for runner in self._runners.values():
            existing.setdefault(runner.planned.partition, []).append(runner.planned.target)
        for number, owner in enumerate(assignment.owners):
            partition = PartitionId(operator, number)
            have = existing.setdefault(partition, [])
            ready = partition not in changing and self._not_before.get(partition, 0.0) <= now
            if len(have) < count and ready and owner in alive:
                lacking[partition] = owner
        able = [info for info in self._context.fit().values() if deployed.may_be_at(info)]
        sites = {name: info.site for name, info in cluster.roster.replicas.items()}
        missing = spread_standbys(lacking, existing, count, able, self._near, sites, self._tried)
        found = []
        for partition, replica in missing:
            owner, epoch = assignment.owner(partition.partition)
            found.append(PlannedStandby(self._context.new_id(), partition, owner, replica, epoch))
        return found

    def _begin(self, planned: PlannedStandby) -> None:
        operator, running_now = planned.partition.operator, ReconfigurationState.RUNNING
        running = Running(Reconfiguration(planned.reconfiguration, operator, running_now, (), 0.0))
        machine = MoveRunner.machine_for(planned)
        runner = self._executor.runner(running, planned, machine)
        self._runners[planned.item_id] = runner
        self._context.spawn(self._follow(running, runner))

    async def _follow(self, running: Running, runner: MoveRunner) -> None:
        try:
            runner = await self._to_its_end(running, runner)
        finally:
            planned, error = runner.planned, runner.machine.error
            self._runners.pop(planned.item_id, None)
            near = dict.fromkeys((planned.target, planned.source, *self._near.get(planned.partition, ())))
            self._near[planned.partition] = tuple(near)[:NEAR_KEPT]
            followed = runner.machine.rounds > 0
            if followed:
                self._tried.pop(planned.partition, None)
            if not isinstance(error, MoveAborted):
                tried = self._tried.setdefault(planned.partition, Counter())
                # one that followed and lost its connection has most of the state: it is tried there again first
                if not (followed and isinstance(error, Unavailable)):
                    tried[planned.target] += 1
                again_s = AGAIN_S * 2 ** min(max(tried.total() - 1, 0), MOST_DOUBLINGS)
                self._not_before[planned.partition] = self._context.clock.monotonic() + again_s
        if error is not None and not isinstance(error, MoveAborted):
            log.warning("standby of %s at %s ended: %s", planned.partition, planned.target, error)

    async def _to_its_end(self, running: Running, runner: MoveRunner) -> MoveRunner:
        """Runs a standby to its end, and returns the runner that completed it.

        After an unexpected error the standby begins again with a new runner, as after a restart, if it is still open in
        the ledger.
        """
        planned = runner.planned
        while True:
            try:
                await runner.run()
                return runner
            except Exception:
                if self._context.over.done():
                    return runner
                log.exception(
                    "standby of %s at %s starts again after an unexpected error", planned.partition, planned.target
                )
            await asyncio.sleep(self._context.settings.takeover_retry_s)
            if planned.item_id not in self._context.cluster.open_moves:
                return runner
            again = self._executor.runner(running, planned, MoveRunner.machine_for(planned))
            again.carry_over(runner)
            runner = self._runners[planned.item_id] = again

    async def hand_over(self, partition: PartitionId, successor: str) -> None:
        """Ends a partition's standbys because its owner is gone, but leaves the copy of the successor as it is.

        Args:
            successor: move id of the standby that takes over; empty: none does.
        """
        self._tell_gone(partition, successor)
        await asyncio.gather(*(runner.ended.wait() for runner in self.of(partition)))
        for kept in (self._not_before, self._tried):  # no standby has failed: the new owner may wait for one
            kept.pop(partition, None)

    def _tell_gone(self, partition: PartitionId, successor: str) -> None:
        for runner in self.of(partition):
            if runner.planned.move_id == successor:
                runner.taken_over()
            else:
                runner.source_gone()

    def resume_all(self) -> None:
        """Resumes standbys after a restart, and joins the transfers that still run at their targets.

        A standby that a takeover was about to end is notified of the takeover before it asks its target, because the
        target's copy may already serve.
        """
        open_moves = [open_move.planned for open_move in self._context.cluster.open_moves.values()]
        for planned in open_moves:
            if isinstance(planned, PlannedStandby):
                self._begin(planned)
        for planned in open_moves:
            if isinstance(planned, PlannedTakeover):
                self._tell_gone(planned.partition, planned.standby_move)
