"""Reports what the leader knows of its cluster: operators, replicas, reconfigurations, and what is amiss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from reconfig.controller.cluster_state import Deployed
from reconfig.controller.context import ControllerContext
from reconfig.controller.deployments import Deployments
from reconfig.controller.history import maintained
from reconfig.controller.measuring import Measuring
from reconfig.controller.run_registry import RunRegistry
from reconfig.controller.standbys import Standbys
from reconfig.controller.takeovers import Takeovers
from reconfig.failover import Lack, Why, unserved
from stateflow.fleet import Child
from stateflow.reports import (
    ClusterReport,
    DeployingOperator,
    Deployment,
    RefusedReplica,
    ReplicaStatus,
    UnservedPartitions,
)
from stateflow.types import PartitionId, node_of


class Survey:
    """Makes the leader's reports.

    Args:
        deployments: names the deployments and trials under way.
        child: returns what its agent said of a replica; None: nothing, or the replica has no agent.
    """

    def __init__(
        self,
        context: ControllerContext,
        runs: RunRegistry,
        standbys: Standbys,
        takeovers: Takeovers,
        deployments: Deployments,
        measuring: Measuring,
        child: Callable[[str], Child | None] = lambda _: None,
    ) -> None:
        self._context, self._runs, self._standbys, self._takeovers = context, runs, standbys, takeovers
        self._deployments, self._measuring, self._child = deployments, measuring, child

    def deployment(self, deployed: Deployed) -> Deployment:
        assignment, replicas = deployed.assignment, self._context.cluster.roster.replicas
        return Deployment(
            replace(deployed.spec, source=""),  # routers have no use for it
            assignment.version,
            tuple(replicas[name] for name in assignment.owners),
            assignment.epochs,
            self._unserved([deployed]),
            deployed.sites,
            failover="manual" if self._context.cluster.failovers.is_manual(deployed.spec.name) else "automatic",
        )

    def _unserved(self, operators: Iterable[Deployed]) -> tuple[UnservedPartitions, ...]:
        lacks: dict[PartitionId, Lack] = {}
        for deployed in operators:
            silent = {name for name in set(deployed.assignment.owners) if not self._context.members.alive(name)}
            for number, owner in enumerate(deployed.assignment.owners):
                partition = PartitionId(deployed.spec.name, number)
                lack = self._takeovers.lack(partition)
                if lack is None and owner in silent:
                    opening = self._context.members.is_opening(owner)
                    alone = self._context.may_be_alone(owner, deployed.spec.name)
                    lack = Lack(owner, Why.OPENING if opening else Why.ALONE if alone else Why.SILENT)
                if lack is not None:
                    lacks[partition] = lack
        return tuple(
            UnservedPartitions(operator, tuple(partitions), lack.owner, error)
            for operator, partitions, lack, error in unserved(lacks)
        )

    def _has_ended(self, name: str) -> bool:
        """Tells whether an agent has ended a replica by command, though it may have been heard a moment ago."""
        child = self._child(node_of(name))
        return child is not None and child.state == "STOPPED" and self._context.cluster.roster.is_stopping(name)

    def status(self) -> ClusterReport:
        context, cluster, members = self._context, self._context.cluster, self._context.members
        owned = context.cluster.owned_counts()
        now, room = context.clock.monotonic(), self._measuring.room_bytes()
        return ClusterReport(
            maintenance=maintained(cluster),
            replicas=tuple(
                ReplicaStatus(
                    info.name,
                    info.site,
                    info.address,
                    info.weight,
                    members.alive(info.name) and not self._has_ended(info.name),
                    members.heard_s(info.name),
                    owned.get(info.name, 0),
                    members.is_opening(info.name),
                    cluster.roster.is_stopping(info.name),
                    room.get(info.name),
                    members.version(info.name),
                )
                for info in sorted(cluster.roster.replicas.values(), key=lambda info: info.name)
            ),
            deployments=tuple(self.deployment(each) for _, each in sorted(cluster.deployed.items())),
            reconfigurations=tuple(running.report() for running in self._runs.running.values() if not running.over),
            standbys=tuple(self._standbys.views()),
            refused=tuple(
                RefusedReplica(
                    refused.info.name, refused.info.address, refused.home.directory, refused.error, now - refused.at
                )
                for refused in context.names.refused()
            ),
            deploying=(
                *(
                    DeployingOperator(name, planned.spec.partitions, self._deployments.created.get(name, 0))
                    for name, (planned, _) in sorted(cluster.planned.items())
                ),
                *(
                    DeployingOperator(name, trial.partitions, 0, trial.partitions - len(trial.left))
                    for name, trial in sorted(self._deployments.trials.items())
                ),
            ),
            links=self._measuring.links(),
            damaged=tuple(cluster.sweeps.damaged()),
        )
