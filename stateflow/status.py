"""Reports about the present state of a cluster and its faults, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from stateflow.errors import StateflowError
from stateflow.reports import Failing, FollowerReport, PartitionFault, Reconfiguration, Report
from stateflow.ring import newcomers
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo, node_of


@dataclass(frozen=True, slots=True)
class LinkReport(Report):
    """The link from one site to another.

    Attributes:
        rtt_ms: round trip that a replica measured; None: not measured.
        bytes_per_s: speed of the fastest recent move over the link; None: not known.

    Example: ``[each.rtt_ms for each in cluster.status(measured=True).links]``
    """

    source: str
    target: str
    rtt_ms: float | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaStatus(Report):
    """The status of a replica.

    Attributes:
        alive: the replica's last heartbeat was recent; None in a follower's report, because replicas send heartbeats
            to the leader only.
        last_heartbeat_s: seconds since that heartbeat.
        partitions: number of partitions assigned to the replica.
        opening: the replica is starting.
        stopped: the replica's agent was commanded to stop the replica.
        room_bytes: bytes of state for which the replica has room; None: not known.
        version: version of stateflow; empty: not known.

    Example: ``{each.name: each.partitions for each in cluster.status().replicas}``
    """

    name: str
    site: str
    address: str
    weight: int
    alive: bool | None
    last_heartbeat_s: float
    partitions: int
    opening: bool = False
    stopped: bool = False
    room_bytes: int | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class MaintenanceReport(Report):
    """A node in maintenance, which receives no partitions.

    Attributes:
        one_of: name of a set of nodes of which only one may be in maintenance at a time; empty: no set.
        since_us: when the maintenance began.
        until_us: when the maintenance ends; 0: it lasts until a command ends it.
    """

    node: str
    one_of: str = ""
    since_us: int = 0
    until_us: int = 0


@dataclass(frozen=True, slots=True)
class OperatorStatus(Report):
    """The status of an operator.

    Attributes:
        version: version of the assignment.
        owners: replica that owns each partition, by partition number.
        epochs: epoch of each partition, by partition number.
        sites: sites at which the operator is allowed; empty: all sites.
        failover: automatic or manual.

    Example: ``dict(enumerate(cluster.status().operators[0].owners))``
    """

    name: str
    target: str
    partitions: int
    version: int
    owners: tuple[str, ...]
    epochs: tuple[int, ...]
    unserved: tuple[UnservedPartitions, ...] = ()
    sites: tuple[str, ...] = ()
    failover: str = "automatic"


@dataclass(frozen=True, slots=True)
class StandbyReport(Report):
    """A standby's copy of one partition, which follows the partition's owner. It can take over when ``phase`` is
    CATCHING_UP.

    Example: ``[each.lag_bytes for each in cluster.status().standbys]``
    """

    operator: str
    partition: int
    replica: str
    phase: str
    lag_bytes: int


@dataclass(frozen=True, slots=True)
class RefusedReplica(Report, Failing):
    """A process that was refused the name under which it registered as a replica.

    Attributes:
        directory: id of the process's data directory.
        fault: why the process was refused.
        asked_s: seconds since the process last tried to register.
    """

    name: str
    address: str
    directory: str
    fault: StateflowError
    asked_s: float


@dataclass(frozen=True, slots=True)
class UnservedPartitions(Report, Failing):
    """Partitions that no replica serves now, for one and the same reason.

    Attributes:
        owner: replica to which the partitions are assigned, and which may still be running.
        fault: why the replica does not serve them.
    """

    operator: str
    partitions: tuple[int, ...]
    owner: str
    fault: StateflowError


@dataclass(frozen=True, slots=True)
class DeployingOperator(Report):
    """A deployment under way.

    Attributes:
        created: number of partitions created since the deployment was begun or resumed.
        tried: number of partitions on which the new version was tried with stored state; None: partitions are being
            created.
    """

    name: str
    partitions: int
    created: int
    tried: int | None = None


@dataclass(frozen=True, slots=True)
class AdoptedOperator(Report):
    """The partitions of an operator that replicas hold but the ledger does not know.

    Attributes:
        count: number of partitions of the operator; 0: not known.
        partitions: partitions that a replica owns.
        sealed: partitions that exist only as a copy that was sealed for a move.
        missing: partitions that no replica holds.
        conflicts: reasons why the partitions cannot be adopted as they are.
        done: the operator is in the ledger now.
    """

    name: str
    count: int
    partitions: tuple[int, ...]
    sealed: tuple[int, ...]
    missing: tuple[int, ...]
    conflicts: tuple[str, ...]
    done: bool


@dataclass(frozen=True, slots=True)
class LeaderReport(Report):
    """The controller that leads. ``address`` is where the client reached it, ``term`` the term of its leader lease.

    Example: ``cluster.status().leader.address``
    """

    address: str
    term: int


@dataclass(frozen=True, slots=True)
class ClusterStatus(Report):
    """The status of a cluster.

    Attributes:
        reconfigurations: reconfigurations under way.
        refused: processes that were refused their replica's name.
        follower: controller that gave this report, if it does not lead; then live replicas, the progress of moves and
            refused processes are unknown.
        links: measured links between sites.
        damaged: faults that the newest verification of each partition found.
        leader: controller that leads and gave this report; None: a follower gave it.

    Example: ``[each.name for each in cluster.status().replicas if each.alive]``
    """

    replicas: tuple[ReplicaStatus, ...]
    operators: tuple[OperatorStatus, ...]
    reconfigurations: tuple[Reconfiguration, ...]
    standbys: tuple[StandbyReport, ...] = ()
    refused: tuple[RefusedReplica, ...] = ()
    deploying: tuple[DeployingOperator, ...] = ()
    follower: FollowerReport | None = None
    maintenance: tuple[MaintenanceReport, ...] = ()
    links: tuple[LinkReport, ...] = ()
    damaged: tuple[PartitionFault, ...] = ()
    leader: LeaderReport | None = None

    def without_share(self) -> list[str]:
        """Returns live replicas that own nothing although a rebalance would give them partitions.

        The list is empty while a reconfiguration is under way or an owner is gone.
        """
        here = [each for each in self.replicas if each.alive and not each.stopped]
        empty = {each.name for each in here if each.weight > 0 and not each.partitions}
        if not empty or not all(each.over for each in self.reconfigurations):
            return []
        alive = [ReplicaInfo(each.name, each.site, each.address, each.weight) for each in here]
        owners = {PartitionId(each.name, n): owner for each in self.operators for n, owner in enumerate(each.owners)}
        if not {info.name for info in alive}.issuperset(owners.values()):
            return []  # a failover comes first
        cordoned = {each.node for each in self.maintenance}
        answering = [info for info in alive if node_of(info.name) not in cordoned]
        return sorted(newcomers(owners, answering, {each.name: each.sites for each in self.operators}))


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployed operator and its assignment, which clients need for routing.

    Attributes:
        version: version of the assignment.
        owners: replica that owns each partition, by partition number.
        epochs: epoch of each partition, by partition number.
        sites: sites at which the operator is allowed; empty: all sites.
        follower: controller that gave this report, if it does not lead; then unserved partitions are unknown.
        failover: automatic or manual.
    """

    spec: OperatorSpec
    version: int
    owners: tuple[ReplicaInfo, ...]
    epochs: tuple[int, ...]
    unserved: tuple[UnservedPartitions, ...] = ()
    sites: tuple[str, ...] = ()
    follower: FollowerReport | None = None
    failover: str = "automatic"

    def status(self) -> OperatorStatus:
        spec, owners = self.spec, tuple(owner.name for owner in self.owners)
        said = self.version, owners, self.epochs, self.unserved, self.sites, self.failover
        return OperatorStatus(spec.name, spec.target, spec.partitions, *said)

    def why_unserved(self) -> dict[int, StateflowError]:
        """Returns partition → why it is not served."""
        return {number: each.fault for each in self.unserved for number in each.partitions}


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The complete report of a controller. ``follower`` describes that controller if it does not lead."""

    replicas: tuple[ReplicaStatus, ...]
    deployments: tuple[Deployment, ...]
    reconfigurations: tuple[Reconfiguration, ...]
    standbys: tuple[StandbyReport, ...] = ()
    refused: tuple[RefusedReplica, ...] = ()
    deploying: tuple[DeployingOperator, ...] = ()
    follower: FollowerReport | None = None
    maintenance: tuple[MaintenanceReport, ...] = ()
    links: tuple[LinkReport, ...] = ()
    damaged: tuple[PartitionFault, ...] = ()

    def status(self) -> ClusterStatus:
        return ClusterStatus(
            self.replicas,
            tuple(deployment.status() for deployment in self.deployments),
            self.reconfigurations,
            self.standbys,
            self.refused,
            self.deploying,
            self.follower,
            self.maintenance,
            self.links,
            self.damaged,
        )
