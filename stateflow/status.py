"""The status of a cluster: replicas, operators, standbys, and what is wrong with them, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from stateflow.errors import StateflowError
from stateflow.reports import Failing, FollowerReport, PartitionFault, Reconfiguration, Report
from stateflow.ring import newcomers
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo, node_of


@dataclass(frozen=True, slots=True)
class LinkReport(Report):
    """The link from one site to another. ``rtt_ms``: a round trip, measured by a replica. ``bytes_per_s``: speed of the
    fastest recent move. None: not known.

    Example: ``[each.rtt_ms for each in cluster.status(measured=True).links]``
    """

    source: str
    target: str
    rtt_ms: float | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaStatus(Report):
    """The status of a replica.

    ``last_heartbeat_s``: seconds since its last heartbeat. ``partitions``: number of partitions assigned to it.
    ``opening``: it is starting. ``stopped``: its agent was told to stop it. ``room_bytes``: bytes of state that it has
    room for; None: not known. ``version``: of stateflow; empty: not known.

    ``alive`` is None in a follower's report: replicas answer to the leader only.

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
    """A node in maintenance, which receives no partitions. ``one_of``: a set of nodes of which only one may be in
    maintenance at a time; empty: none. Times: µs since 1970; ``until_us``: 0: until it is ended by command."""

    node: str
    one_of: str = ""
    since_us: int = 0
    until_us: int = 0


@dataclass(frozen=True, slots=True)
class OperatorStatus(Report):
    """The status of an operator. ``owners`` and ``epochs`` by partition. ``sites``: its allowed sites; empty: all.
    ``failover``: automatic or manual.

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
    """A copy of one partition that follows its owner; ``phase`` is CATCHING_UP when it can take over.

    Example: ``[each.lag_bytes for each in cluster.status().standbys]``
    """

    operator: str
    partition: int
    replica: str
    phase: str
    lag_bytes: int


@dataclass(frozen=True, slots=True)
class RefusedReplica(Report, Failing):
    """A process that was refused its replica's name. ``directory``: id of its data directory; ``error``: the reason, in
    one line."""

    name: str
    address: str
    directory: str
    fault: StateflowError
    asked_s: float


@dataclass(frozen=True, slots=True)
class UnservedPartitions(Report, Failing):
    """Partitions that no replica serves now, for one reason: ``error``, one line with the remedy.

    ``owner``: the assigned replica, which may still be running.
    """

    operator: str
    partitions: tuple[int, ...]
    owner: str
    fault: StateflowError


@dataclass(frozen=True, slots=True)
class DeployingOperator(Report):
    """A deployment under way.

    ``created``: partitions created since it was begun or resumed. ``tried``: partitions on whose stored state a new
    version has been tried so far; None: partitions are being created.
    """

    name: str
    partitions: int
    created: int
    tried: int | None = None


@dataclass(frozen=True, slots=True)
class AdoptedOperator(Report):
    """Partitions on replicas, of an operator that the ledger does not know.

    ``count``: number of its partitions; 0: not known. ``partitions``: those that a replica owns. ``sealed``: those that
    exist only as a copy sealed for a move. ``done``: the operator is in the ledger now.
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
    """The controller that leads. ``address``: address at which the client reached it. ``term``: the term of its leader
    lease.

    Example: ``cluster.status().leader.address``
    """

    address: str
    term: int


@dataclass(frozen=True, slots=True)
class ClusterStatus(Report):
    """The status of a cluster.

    ``reconfigurations``: those under way. ``refused``: processes that were refused their replica's name. ``follower``:
    the controller that gave this report, if it does not lead; then live replicas, the progress of moves and refused
    processes are unknown. ``links``: measured links between sites. ``damaged``: faults that the newest verification of
    each partition found. ``leader``: the controller that leads and gave this report; None: a follower gave it.

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
        """Returns live replicas that own nothing although a rebalance would give them partitions, if no rebalance is
        under way."""
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
    """The data about an operator that clients need for routing.

    ``version``: version of the assignment. ``owners`` and ``epochs`` by partition. ``sites``: its allowed sites;
    empty: all. ``failover``: automatic or manual. ``follower``: the controller that gave this report, if it does
    not lead; then the unserved partitions are unknown.
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
    """The complete report of a controller. ``follower``: that controller, if it does not lead."""

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
