"""What a cluster says of itself, as plain frozen data; ``to_dict`` everywhere for machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from stateflow.errors import StateflowError
from stateflow.pace import Remaining, remaining
from stateflow.ring import newcomers
from stateflow.types import OperatorSpec, PartitionId, ReplicaInfo, node_of

#: what a dictionary calls errors that it has as lines
_LINES = {"fault": "error", "unusable": "passed_over"}


@dataclass(frozen=True, slots=True)
class Report:
    """Names end with their units: ``_ms`` and ``_s`` are durations, ``_us`` microseconds since 1970 (UTC)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data. An error is its one line, and empty where there is none."""
        return asdict(self, dict_factory=_plain)


def _plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {_LINES.get(name, name): _lines(value) if name in _LINES else value for name, value in fields}


def _lines(faults: StateflowError | tuple[StateflowError, ...] | None) -> str | tuple[str, ...]:
    return tuple(map(str, faults)) if isinstance(faults, tuple) else str(faults or "")


class _Failing:
    """A report with a ``fault``: what failed, with its code and what to do about it."""

    __slots__ = ()
    fault: StateflowError | None

    @property
    def error(self) -> str:
        """One line; empty: nothing failed."""
        return str(self.fault or "")


#: of a move or a copy, where a controller tells of it that does not lead: it is under way, and how it stands is unknown
UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class FollowerReport(Report):
    """Who answered, where that was a controller that does not lead: it knows what the ledger says, and nothing else.

    ``address``: its own; ``leader``: of the one that leads, as far as it knows, empty: nobody; ``age_s``: so long ago
    it began to read the newest of what it says, by its own clock: no time of day is compared between machines.
    """

    address: str
    leader: str
    age_s: float


@dataclass(frozen=True, slots=True)
class MoveReport(Report, _Failing):
    """One partition's move. ``state``: of its machine; UNKNOWN where a follower tells of one that has not ended.

    Bytes: ``warm`` were fetched as base files, ``reused`` found at the target, ``delta`` came as change sets;
    ``change_rate`` and ``bandwidth`` are bytes a second.

    ``duration_s``: until its end was recorded, and its source not yet told.

    ``pause_ms``: from the fence until the target served, less what the source still spent on the batch in hand;
    measured by the controller, so that it includes half a round trip to either side and needs no common clock.

    Example: ``[move.pause_ms for move in migration.wait().moves]``
    """

    id: str
    partition: int
    source: str
    target: str
    state: str
    strategy: str
    bytes_warm: int = 0
    bytes_reused: int = 0
    bytes_delta: int = 0
    lag_bytes: int = 0
    rounds: int = 0
    predicted_pause_ms: float = 0.0
    pause_ms: float = 0.0
    duration_s: float = 0.0
    digest: str = ""
    epoch: int = 0
    started_us: int = 0
    fenced_us: int = 0
    fault: StateflowError | None = None
    #: beyond the prediction, the budget had to leave so much for a busy machine
    margin_ms: float = 0.0
    #: when it was cut over: bytes a second written, bytes a second the link took, round trip
    change_rate: float = 0.0
    bandwidth: float = 0.0
    rtt_ms: float = 0.0
    #: of ``bytes_warm``, from the checkpoint store
    bytes_stored: int = 0
    base_bytes: int = 0
    #: of a take-over: what it rests on, and what is lost
    note: str = ""
    #: why a policy wanted it; empty: people did
    reason: str = ""

    @property
    def stands(self) -> str:
        """waiting, in_progress, completed, failed or cancelled."""
        if self.state in ("WAITING", "PLANNED"):
            return "waiting"
        if self.state in ("ABORTED", "ABANDONED"):
            return "cancelled" if self.fault is not None and self.fault.code == "move_cancelled" else "failed"
        return "completed" if self.state == "COMPLETED" else "in_progress"


@dataclass(frozen=True, slots=True)
class Reconfiguration(Report):
    """``state``: RUNNING, PAUSED, COMPLETED (every move did), FAILED (at least one did not) or CANCELLED (it was, and
    moves of it for that).

    ``kind``: migrate, rebalance, drain, failover or autopilot. ``follower``: who told of it, where that was not the
    leader. ``limit``, ``per_node``, ``per_link``: so many of its moves go on at a time; 0: no limit of its own.
    ``worked_s``: for how long it has gone on, without pauses. ``by``: whose certificate asked for it; stateflow: a
    controller decided, or was asked in plain text.

    Example: ``cluster.reconfigurations(limit=1)[0].state``
    """

    id: str
    operator: str
    state: str
    moves: tuple[MoveReport, ...]
    max_pause_ms: float
    kind: str = "migrate"
    strategy: str = ""
    created_us: int = 0
    follower: FollowerReport | None = None
    limit: int = 0
    per_node: int = 0
    per_link: int = 0
    worked_s: float = 0.0
    by: str = ""

    @property
    def over(self) -> bool:
        """None of its moves begins any more, unless it is retried."""
        return self.state not in ("RUNNING", "PAUSED")

    def counts(self) -> dict[str, int]:
        """Its moves by what is to be done with them: waiting, in_progress, completed, failed, cancelled."""
        found = dict.fromkeys(("waiting", "in_progress", "completed", "failed", "cancelled"), 0)
        for move in self.moves:
            found[move.stands] += 1
        return found

    def remaining(self) -> Remaining | None:
        """Seconds until all of its moves have ended, if it goes on as it did. None: too few have ended to say."""
        counts = self.counts()
        left = counts["waiting"] + counts["in_progress"]
        return remaining(len(self.moves), len(self.moves) - left, self.worked_s)


@dataclass(frozen=True, slots=True)
class ChildReport(Report, _Failing):
    """A replica of an agent.

    ``wanted``: running or stopped; empty: nothing of it. ``state``: STARTING, RUNNING, WAITS (until it is started
    again), STOPPING or STOPPED; empty: the agent has not heard of it yet. ``generation``: how often it was commanded;
    ``runs``: as of which of these it is. ``deaths``: in a row, without having been well, the last with ``fault``.
    ``address``: where it is reached; empty: it has not said so. ``memory_bytes``: 0: not limited.

    Example: ``[(child.replica, child.state) for agent in cluster.agents() for child in agent.replicas]``
    """

    replica: str
    wanted: str
    state: str
    generation: int
    runs: int
    workers: int = 1
    weight: int = 1
    memory_bytes: int = 0
    deaths: int = 0
    address: str = ""
    fault: StateflowError | None = None


@dataclass(frozen=True, slots=True)
class AgentReport(Report):
    """``alive``: it was heard lately, ``last_heartbeat_s`` ago (-1: not since the controller started).

    ``cores``, ``memory_bytes`` and ``disk_bytes``: that it has for replicas. ``limits``: how it keeps a replica to its
    memory, cgroup or rlimit. ``version`` is stateflow's, ``python`` the interpreter's.

    Example: ``[each.name for each in cluster.agents() if each.alive]``
    """

    name: str
    site: str
    address: str
    alive: bool
    last_heartbeat_s: float
    labels: dict[str, str]
    cores: int
    memory_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    version: str
    python: str
    limits: str
    replicas: tuple[ChildReport, ...] = ()


@dataclass(frozen=True, slots=True)
class ProposedMove(Report):
    """What a policy wishes. ``bytes``: of state, on disk.

    Example: ``[(each.partition, each.reason) for each in cluster.propose("load").moves]``
    """

    operator: str
    partition: int
    source: str
    target: str
    reason: str
    bytes: int


@dataclass(frozen=True, slots=True)
class LeftPartition(Report):
    """A policy would have it elsewhere: ``reason``: why it stays.

    Example: ``[each.reason for each in cluster.propose("locality").left]``
    """

    operator: str
    partition: int
    reason: str


@dataclass(frozen=True, slots=True)
class LackOfRoom(Report):
    """To these replicas more would come than there is room for; to several of one disk together.

    Example: ``cluster.would_drain("edge-1-gw7").lacking``
    """

    replicas: tuple[str, ...]
    free_bytes: int
    coming_bytes: int


@dataclass(frozen=True, slots=True)
class LinkReport(Report):
    """From one site to another: ``rtt_ms``: a round trip, measured by a replica; ``bytes_per_s``: as moves have shown.
    None: not known.

    Example: ``[each.rtt_ms for each in cluster.status(measured=True).links]``
    """

    source: str
    target: str
    rtt_ms: float | None
    bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Placement(Report):
    """What policies wish, and what would come of it. ``uneven``: the most that a node has over its weight's share, of
    rows a second and of bytes; 1.0: all have theirs. ``pause_ms``: expected of each move beside the bytes that have to
    cross meanwhile, and up to what is promised. ``silent``: replicas that did not say what they have: nothing goes
    there, or leaves them. ``left``: the first hundred of those that policies would have elsewhere; ``lacking``: where
    what would move has no room, so that it is refused.

    Example: ``cluster.propose("load", "locality").pause_ms``
    """

    moves: tuple[ProposedMove, ...]
    uneven_rows: float
    uneven_rows_after: float
    uneven_bytes: float
    uneven_bytes_after: float
    pause_ms: float
    pause_ms_at_most: float
    silent: tuple[str, ...] = ()
    left: tuple[LeftPartition, ...] = ()
    lacking: tuple[LackOfRoom, ...] = ()


@dataclass(frozen=True, slots=True)
class AutopilotReport(Report):
    """What the autopilot is told. ``policies``: in the order of their say; none: it does nothing.

    Example: ``cluster.autopilot_orders().policies``
    """

    policies: tuple[str, ...]
    max_pause_ms: float | None
    cool_down_s: float
    moves_per_minute: float


@dataclass(frozen=True, slots=True)
class JobStage(Report):
    """What a run did with one operator; ``error``: why it was not done."""

    operator: str
    reconfigurations: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True, slots=True)
class JobRun(Report):
    """A run of a job. ``at_us``: the time that it was for; ``ended_us``: 0: it is under way; ``state``: IN_PROCESS,
    PROCESSED or FAILED; ``note``: what came of it, or what it waits for; ``id``: to ask for it by; ``stages``: by
    operator, those that were begun.

    Example: ``cluster.run_job("evening").state``
    """

    at_us: int
    began_us: int
    ended_us: int
    state: str
    reconfigurations: tuple[str, ...]
    note: str
    id: str = ""
    stages: tuple[JobStage, ...] = ()
    follower: FollowerReport | None = None


@dataclass(frozen=True, slots=True)
class JobReport(Report):
    """What is done by itself. ``next_us``: when again; 0: never, or it is paused. ``runs``: the newest hundred, in
    their order. ``coordinator``, ``workers``: which controller, and which nodes; empty: any. ``error``: why its record
    cannot be read, and what to do about it.

    Example: ``[each.name for each in cluster.jobs() if not each.paused]``
    """

    name: str
    schedule: str
    do: str
    operator: str
    policies: tuple[str, ...]
    partitions: tuple[int, ...]
    to: str
    paused: bool
    next_us: int
    runs: tuple[JobRun, ...]
    coordinator: str = ""
    workers: str = ""
    follower: FollowerReport | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReplicaStatus(Report):
    """``last_heartbeat_s``: so long ago it was heard; ``partitions``: assigned to it; ``opening``: it is starting;
    ``stopped``: its agent is not to run it; ``room_bytes``: of state that may still come, None: not known;
    ``version``: of stateflow, empty: not known.

    ``alive`` is None where a follower tells of it: whom replicas answer to is the leader.

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
    """A node that is given nothing. ``one_of``: a set of which no two are in maintenance at a time; empty: none.
    Times: µs since 1970; ``until_us``: 0: until it is ended."""

    node: str
    one_of: str = ""
    since_us: int = 0
    until_us: int = 0


@dataclass(frozen=True, slots=True)
class OperatorStatus(Report):
    """``owners`` and ``epochs`` by partition. ``sites``: to which it is confined; none: to no sites. ``failover``:
    automatic or manual.

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
class RefusedReplica(Report, _Failing):
    """A process that asks for a name in vain. ``directory``: the id of its data directory; ``error``: why, one line."""

    name: str
    address: str
    directory: str
    fault: StateflowError
    asked_s: float


@dataclass(frozen=True, slots=True)
class UnservedPartitions(Report, _Failing):
    """Partitions that nobody serves now, for one reason: ``error``, one line with what to do about it.

    ``owner``: as assigned, which need not be dead.
    """

    operator: str
    partitions: tuple[int, ...]
    owner: str
    fault: StateflowError


@dataclass(frozen=True, slots=True)
class DeployingOperator(Report):
    """A deployment under way.

    ``created``: partitions, since it was begun or gone on with; ``tried``: partitions on whose stored state a new
    version has been tried so far, None when partitions are being created.
    """

    name: str
    partitions: int
    created: int
    tried: int | None = None


@dataclass(frozen=True, slots=True)
class AdoptedOperator(Report):
    """What replicas have of an operator of which the ledger knows nothing.

    ``count``: of its partitions, 0 where that is not known; ``partitions``: those that a replica owns; ``sealed``: only
    a copy that was sealed for a move is there; ``done``: it is in the ledger now.
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
    """The controller that leads. ``address``: at which it was reached. ``term``: of its hold on the ledger.

    Example: ``cluster.status().leader.address``
    """

    address: str
    term: int


@dataclass(frozen=True, slots=True)
class ClusterStatus(Report):
    """``reconfigurations``: those under way; ``refused``: processes that ask for a name in vain. ``follower``: who told
    of all this, where that was not the leader: then nobody knows who is alive, how moves stand, and who is refused.
    ``links``: between sites, as far as they were measured. ``damaged``: what the newest verification of each partition
    found. ``leader``: the controller that leads and told it, as it was reached, and its term; None where it was not the
    leader's answer.

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
        """Replicas that answer and own nothing, though a rebalance would give them something, and none is under way."""
        here = [each for each in self.replicas if each.alive and not each.stopped]
        empty = {each.name for each in here if each.weight > 0 and not each.partitions}
        if not empty or not all(each.over for each in self.reconfigurations):
            return []
        alive = [ReplicaInfo(each.name, each.site, each.address, each.weight) for each in here]
        owners = {PartitionId(each.name, n): owner for each in self.operators for n, owner in enumerate(each.owners)}
        if not {info.name for info in alive}.issuperset(owners.values()):
            return []  # a failover comes first
        resting = {each.node for each in self.maintenance}
        answering = [info for info in alive if node_of(info.name) not in resting]
        return sorted(newcomers(owners, answering, {each.name: each.sites for each in self.operators}))


@dataclass(frozen=True, slots=True)
class RollingNode(Report):
    """A node of a rolling restart. ``status``: as of an entity of a batch. ``ms``: from its restart until it served.

    Example: ``[(each.node, each.ms) for each in cluster.restart_all().wait().nodes]``
    """

    node: str
    status: str
    error: str = ""
    ms: int = 0


@dataclass(frozen=True, slots=True)
class Rolling(Report):
    """Restarts of nodes, one after another. ``state``: as of a batch. ``site``: whose; empty: all. ``limit``: of nodes
    at a time.

    Example: ``cluster.restart_all(site="edge-1").wait().state``
    """

    id: str
    state: str
    site: str
    limit: int
    nodes: tuple[RollingNode, ...]

    @property
    def over(self) -> bool:
        return self.state in ("DONE", "FAILED", "CANCELLED")


@dataclass(frozen=True, slots=True)
class PartitionFault(Report):
    """What is wrong with a partition; or, ``undone``, why nothing was done with it. ``replica``: where.

    Example: ``[(each.partition, each.error) for each in cluster.status().damaged]``
    """

    operator: str
    partition: int
    replica: str
    error: str
    undone: bool = False


@dataclass(frozen=True, slots=True)
class SweepNode(Report):
    """A node of a sweep; ``(moved)``: what moved between nodes meanwhile, which comes last. ``status``: as of an entity
    of a batch. ``partitions``: that were done. Of checkpoints: ``bytes_new`` were not in the store, of ``bytes_total``.
    Of a verification: ``bytes_read``, ``cells`` of state that were decoded, partitions ``compared`` with a standby.

    Example: ``[(each.node, each.cells) for each in cluster.verify_all().wait().nodes]``
    """

    node: str
    status: str
    error: str = ""
    ms: int = 0
    partitions: int = 0
    bytes_new: int = 0
    bytes_total: int = 0
    bytes_read: int = 0
    cells: int = 0
    compared: int = 0
    faults: tuple[PartitionFault, ...] = ()


@dataclass(frozen=True, slots=True)
class Sweep(Report):
    """Long work at many nodes, ``limit`` at a time. ``chore``: restart, checkpoint or verify. ``state``: as of a batch.
    ``operator``, ``site``: of which, and where; empty: all.

    Example: ``cluster.verify_all(limit=2).wait().faults()``
    """

    id: str
    chore: str
    state: str
    operator: str
    site: str
    limit: int
    nodes: tuple[SweepNode, ...]

    @property
    def over(self) -> bool:
        return self.state in ("DONE", "FAILED", "CANCELLED")

    @property
    def batch(self) -> str:
        """What ``stateflow batch`` calls it."""
        return f"{'roll' if self.chore == 'restart' else 'sweep'}/{self.id}"

    def faults(self) -> list[PartitionFault]:
        """Of all nodes."""
        return [fault for node in self.nodes for fault in node.faults]


@dataclass(frozen=True, slots=True)
class OperatorVersion(Report):
    """``number``: from 1, the greatest serves. ``bundle``, ``source_digest``: of what its code came in, SHA-256;
    neither: it is where replicas run. ``recorded_us``: when it was deployed.

    Example: ``cluster.upgrade("Count", cluster.versions("Count")[-2].number)``
    """

    number: int
    target: str
    bundle: str
    source_digest: str
    recorded_us: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """An operator as whoever routes to it is told. ``version``: of the assignment; ``owners`` and ``epochs`` by
    partition. ``sites``: to which it is confined; none: to no sites. ``failover``: automatic or manual. ``follower``:
    who told it, where that was not the leader: then nothing is known of what is unserved."""

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
        """By partition, of those that nobody serves."""
        return {number: each.fault for each in self.unserved for number in each.partitions}


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """All that a controller says of its cluster, ``follower``: where that does not lead."""

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


@dataclass(frozen=True, slots=True)
class RestoredPartition(Report, _Failing):
    """``positions``: source → last batch it contains now, so that a source is rewound to the one behind.

    ``passed_over``: newer checkpoints that could not be used, one line each. ``error``: empty when it was restored.

    Example: ``[each.partition for each in cluster.restore("Count") if each.fault]``
    """

    partition: int
    replica: str
    epoch: int = 0
    sequence: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    unusable: tuple[StateflowError, ...] = ()
    fault: StateflowError | None = None

    @property
    def passed_over(self) -> tuple[str, ...]:
        return tuple(map(str, self.unusable))


@dataclass(frozen=True, slots=True)
class CheckpointReport(Report):
    """So many partitions have a checkpoint now. ``bytes_total``: of all their files; ``bytes_new``: of those that the
    store at ``url`` did not have.

    Example: ``cluster.checkpoint().bytes_new``
    """

    partitions: int
    bytes_new: int
    bytes_total: int
    duration_s: float
    url: str


@dataclass(frozen=True, slots=True)
class Taken:
    """Checkpoints that were taken together. ``numbers``: of the partitions, where an operator was named."""

    report: CheckpointReport
    numbers: tuple[int, ...] = ()

    @classmethod
    def together(cls, taken: Iterable[Taken]) -> Taken:
        """``duration_s``: one after another."""
        parts = list(taken)
        reports = [each.report for each in parts]
        report = CheckpointReport(
            sum(each.partitions for each in reports),
            sum(each.bytes_new for each in reports),
            sum(each.bytes_total for each in reports),
            sum(each.duration_s for each in reports),
            reports[-1].url if reports else "",
        )
        return cls(report, tuple(number for each in parts for number in each.numbers))


@dataclass(frozen=True, slots=True)
class RequestReport(Report):
    """A request that a replica served, its ``number``-th since it was started.

    ``total_ms``: from its first message until its last output was handed back; ``held_ms``: of that, waiting for a move
    to end there.
    """

    number: int
    at_us: int
    operator: str
    rows: int
    total_ms: float
    held_ms: float


@dataclass(frozen=True, slots=True)
class PartitionReport(Report):
    """A partition as its replica has it. ``state``: of its lifecycle; ``batch_rate``: batches a second; ``rows``: that
    came since this process first served it; ``bytes``: of its files, 0 where nobody asked for it.

    ``entries``: that are stored, estimated; None where nobody asked for it, it is not open, or it has nothing in files
    yet. A key has one for each of its states, and one for each element of a map, set or list.
    """

    operator: str
    partition: int
    state: str
    epoch: int
    sequence: int
    move_id: str
    batch_rate: float
    rows: int = 0
    bytes: int = 0
    entries: int | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatistics(Report):
    """What a replica has, and did since it was started. ``requests``: those that were asked for, as far as kept.

    Example: ``cluster.replica_stats("edge-1:7071").rows``
    """

    requests: tuple[RequestReport, ...]
    partitions: tuple[PartitionReport, ...]
    rows: int
    checkpoints: int
