"""Removes operators and replicas from the cluster for good: undeploys the former, forgets the latter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from reconfig.controller.cluster_state import ClusterState, Deployed
from reconfig.controller.context import ControllerContext
from reconfig.controller.standbys import Standbys
from reconfig.controller.takeovers import Takeovers
from stateflow.errors import InvalidArgument, MoveConflict, NameTaken, PartitionsLive, StateflowError
from stateflow.runtime.view import PartitionView
from stateflow.types import PartitionId, node_of

log = logging.getLogger(__name__)


class Leaving:
    def __init__(self, context: ControllerContext, standbys: Standbys, takeovers: Takeovers) -> None:
        self._context, self._standbys, self._takeovers = context, standbys, takeovers

    # -- operators ----------------------------------------------------------------------------------------

    async def undeploy(self, operator: str, delete_state: bool) -> tuple[int, list[str]]:
        """Undeploys an operator and deletes its state.

        The undeployment is recorded first: a replica that does not answer deletes what it has before it is let in
        again.

        Returns the number of the operator's partitions, and the replicas that did not answer. Raises
        OperatorNotDeployed, MoveConflict, PartitionsLive, also without ``delete_state``; nothing is changed then.
        """
        async with self._context.deploying:
            return await self._undeploy(operator, delete_state)

    async def _undeploy(self, operator: str, delete_state: bool) -> tuple[int, list[str]]:
        cluster = self._context.cluster
        async with self._context.planning:
            deployed = cluster.operator(operator)
            self._check_still(operator)
            if not delete_state:
                raise PartitionsLive(
                    f"its {deployed.spec.partitions} partitions are live, and their state would be deleted",
                    remedy="take a savepoint if it may be needed again, and pass --delete-state (delete_state=True)",
                    operator=operator,
                    replicas=" ".join(sorted(set(deployed.assignment.owners))),
                )
            self._check_nobody_alone(deployed)
            partitions = {PartitionId(operator, number) for number in range(deployed.spec.partitions)}
            await self._standbys.end(partitions)
            await self._context.record(ClusterState.undeploy, operator, cluster.newest_epoch(operator))
            self._takeovers.undeployed(operator)
        waiting = await self.drop(operator)
        log.warning("operator %s undeployed, state of its %d partitions deleted", operator, len(partitions))
        return len(partitions), waiting

    def _check_nobody_alone(self, deployed: Deployed) -> None:
        """Checks that no owner that does not answer may go on serving what would be deleted. Raises PartitionsLive."""
        context, operator = self._context, deployed.spec.name
        owners = sorted(set(deployed.assignment.owners))
        alone = [name for name in owners if not context.members.alive(name) and context.may_be_alone(name, operator)]
        if alone:
            raise PartitionsLive(
                f"{', '.join(alone)} does not answer, and may be serving partitions alone",
                remedy="check that it runs; if it is gone for good, run "
                f"`stateflow takeover {operator} --accept-loss` first",
                operator=operator,
            )

    def _check_still(self, operator: str) -> None:
        """Checks that no partition of the operator is moving or being restored. Raises MoveConflict."""
        for planned in self._context.cluster.changes():
            if planned.partition.operator == operator:
                raise MoveConflict(
                    "one of its partitions is moving",
                    remedy="wait until the move ends, or cancel it: `stateflow reconfig cancel "
                    f"{planned.reconfiguration}`",
                    partition=planned.partition,
                    reconfiguration=planned.reconfiguration,
                )
        for restore in self._context.cluster.restores.under_way:
            if restore.partition.operator == operator:
                self._context.check_not_restored(restore.partition)

    async def drop(self, operator: str) -> list[str]:
        """Tells replicas to delete what they have of an undeployed operator. Returns the replicas that did not answer.

        Those have to register again, and are told then. A replica that has been silent for a while has to register,
        too: its lease may still run, and its next heartbeat would renew the lease without telling it to delete.
        """
        alive = self._context.alive()
        for silent in self._context.cluster.roster.replicas.keys() - alive.keys():
            self._context.members.expel(silent)
        epoch, names = self._context.cluster.undeployed[operator], sorted(alive)
        calls = (self._context.replicas.drop(name, operator, epoch) for name in names)
        results = dict(zip(names, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for name, result in results.items():
            if isinstance(result, StateflowError):
                log.warning(
                    "replica %s will delete its state of %s when it registers again: %s", name, operator, result
                )
                self._context.members.expel(name)
            elif isinstance(result, BaseException):
                raise result
        return [
            name
            for name in sorted(self._context.cluster.roster.replicas)
            if isinstance(results.get(name, ""), Exception | str)
        ]

    def dropped(self, views: Iterable[PartitionView]) -> dict[str, int]:
        """Returns which undeployed operators a registering replica still has: operator → newest epoch to delete.

        Args:
            views: what the replica has.
        """
        undeployed, held = self._context.cluster.undeployed, [(view.partition.operator, view.epoch) for view in views]
        gone = {operator for operator, epoch in held if epoch <= undeployed.get(operator, 0)}
        return {operator: undeployed[operator] for operator in sorted(gone)}

    # -- replicas -----------------------------------------------------------------------------------------

    async def forget(self, replica: str) -> None:
        """Forgets a replica, or all workers of a node.

        Raises InvalidArgument, NameTaken while one may serve, PartitionsLive, MoveConflict; nothing is changed then.
        """
        cluster, members = self._context.cluster, self._context.members
        async with self._context.planning:
            self._check_not_started_again(replica)
            if replica not in cluster.roster.replicas and replica not in cluster.roster.spawned:
                known = ", ".join(sorted(set(map(node_of, cluster.roster.replicas)))) or "none"
                raise InvalidArgument(f"there is no replica {replica!r}", remedy=f"use one of {known}")
            names = [replica, *(each for each in sorted(cluster.roster.replicas) if each != replica == node_of(each))]
            for name in names:
                self._check_ended(name)
            for name in names:
                await self._context.record(ClusterState.forget, name)
                members.forget(name)
                self._context.names.replaced(name)
        log.warning("replica %s forgotten; a replica of that name is a new one from now on", " ".join(names))

    def _check_not_started_again(self, replica: str) -> None:
        """Checks that no agent is to run the replica, as it would start it again. Raises NameTaken."""
        spawned = self._context.cluster.roster.spawned.get(replica)
        if spawned is not None and spawned.running:
            raise NameTaken(
                "its agent keeps the replica running",
                remedy=f"stop it first: `stateflow stop {replica}`",
                replica=replica,
                agent=spawned.agent,
            )

    def _check_ended(self, replica: str) -> None:
        cluster, members = self._context.cluster, self._context.members
        if members.may_serve(replica):
            raise NameTaken(
                "the replica may still be serving",
                remedy="drain it if it has partitions, stop it, and run the command again when its lease has lapsed",
                replica=replica,
                address=cluster.roster.replicas[replica].address,
                lease_s=f"{members.lease_left_s(replica):.1f}",
            )
        owned = cluster.assigned(replica)
        if owned:
            raise PartitionsLive(
                f"the replica owns {len(owned)} partitions",
                remedy="start it with its data directory and drain it, or wait until they are taken over; if the "
                f"directory is lost, `stateflow replace {replica}` gives the name to another",
                replica=replica,
            )
        if not cluster.is_free(replica):
            raise MoveConflict(
                "partitions are moving to or from the replica", remedy="wait until their moves end", replica=replica
            )
