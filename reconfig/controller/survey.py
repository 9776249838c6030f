"""What the controller says of itself: which operators, replicas and reconfigurations there are, and what is amiss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from reconfig.controller.cluster_state import Deployed
from reconfig.controller.context import ControllerContext
from reconfig.controller.run_registry import RunRegistry
from reconfig.controller.standbys import Standbys
from reconfig.controller.takeovers import Takeovers
from reconfig.failover import Lack, Why, unserved
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import fault_of, replica_to_pb, spec_to_pb
from stateflow.types import PartitionId


class Survey:
    """Args: created: partitions so far, of deployments under way."""

    def __init__(
        self,
        context: ControllerContext,
        runs: RunRegistry,
        standbys: Standbys,
        takeovers: Takeovers,
        created: Mapping[str, int],
    ) -> None:
        self._context, self._runs, self._standbys, self._takeovers = context, runs, standbys, takeovers
        self._created = created

    def deployment(self, deployed: Deployed) -> cpb.Deployment:
        names = sorted(set(deployed.assignment.owners))
        index = {name: number for number, name in enumerate(names)}
        return cpb.Deployment(
            spec=spec_to_pb(replace(deployed.spec, source="")),  # routers have no use for it
            version=deployed.assignment.version,
            replicas=[replica_to_pb(self._context.cluster.replicas[name]) for name in names],
            owners=[index[name] for name in deployed.assignment.owners],
            epochs=deployed.assignment.epochs,
            unserved=self._unserved([deployed]),
        )

    def _unserved(self, operators: Iterable[Deployed]) -> list[cpb.Unserved]:
        lacks: dict[PartitionId, Lack] = {}
        for deployed in operators:
            silent = {name for name in set(deployed.assignment.owners) if not self._context.members.alive(name)}
            for number, owner in enumerate(deployed.assignment.owners):
                partition = PartitionId(deployed.spec.name, number)
                lack = self._takeovers.lack(partition)
                if lack is None and owner in silent:
                    opening = self._context.members.is_opening(owner)
                    lack = Lack(owner, Why.OPENING if opening else Why.SILENT)
                if lack is not None:
                    lacks[partition] = lack
        return [
            cpb.Unserved(operator=operator, partitions=partitions, owner=lack.owner, fault=fault_of(error))
            for operator, partitions, lack, error in unserved(lacks)
        ]

    def status(self) -> cpb.StatusReply:
        context, cluster, members = self._context, self._context.cluster, self._context.members
        owned = context.owned_counts()
        deployed = [each for _, each in sorted(cluster.deployed.items())]
        return cpb.StatusReply(
            replicas=[
                cpb.ReplicaStatus(
                    replica=replica_to_pb(info),
                    alive=members.alive(info.name),
                    last_heartbeat_s=members.heard_s(info.name),
                    partitions=owned.get(info.name, 0),
                    opening=members.is_opening(info.name),
                )
                for info in sorted(cluster.replicas.values(), key=lambda info: info.name)
            ],
            deployments=[self.deployment(each) for each in deployed],
            reconfigurations=[running.message for running in self._runs.running.values() if not running.over],
            standbys=self._standbys.views(),
            refused=[
                cpb.Refused(
                    replica=replica_to_pb(refused.info),
                    directory=cpb.Directory(id=refused.home.directory, place=refused.home.place),
                    fault=fault_of(refused.error),
                    asked_s=context.clock.monotonic() - refused.at,
                )
                for refused in context.names.refused()
            ],
            deploying=[
                cpb.Deploying(operator=name, partitions=planned.spec.partitions, created=self._created.get(name, 0))
                for name, (planned, _) in sorted(cluster.planned.items())
            ],
        )
