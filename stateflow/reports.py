"""Reports of what was done in a cluster, as plain frozen data; each has ``to_dict`` for machines.

Reports of what there is are in :mod:`stateflow.status`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from stateflow.errors import StateflowError
from stateflow.schedule import Remaining, remaining

#: fields of errors → their names in a dictionary, which has the errors as lines
_LINES = {"fault": "error", "unusable": "passed_over"}


@dataclass(frozen=True, slots=True)
class Report:
    """The base of all reports.

    Names end with their units: ``_ms`` and ``_s`` are durations, ``_us`` microseconds since 1970 (UTC).
    """

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data. An error becomes its one line; no error becomes empty text."""
        return asdict(self, dict_factory=_plain)


def _plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {_LINES.get(name, name): _lines(value) if name in _LINES else value for name, value in fields}


def _lines(faults: StateflowError | tuple[StateflowError, ...] | None) -> str | tuple[str, ...]:
    return tuple(map(str, faults)) if isinstance(faults, tuple) else str(faults or "")


class Failing:
    """A report with a ``fault``: the error, with its code and remedy."""

    __slots__ = ()
    fault: StateflowError | None

    @property
    def error(self) -> str:
        """The fault in one line; empty: nothing failed."""
        return str(self.fault or "")


#: state of a move or a copy in a follower's report: it is under way, and only the leader knows its progress
UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class FollowerReport(Report):
    """The controller that gave a report, if it does not lead: it knows only what the ledger says.

    ``address``: its own. ``leader``: address of the leader, if the follower knows one; otherwise empty. ``age_s``:
    seconds since it read the newest part of the report, by its own clock; clocks of different machines are not
    compared.
    """

    address: str
    leader: str
    age_s: float


@dataclass(frozen=True, slots=True)
class MoveReport(Report, Failing):
    """One partition's move. ``state``: state of the move; UNKNOWN if a follower reports a move that has not ended.

    Bytes: ``warm`` were fetched as base files, ``reused`` found at the target, ``delta`` came as change sets;
    ``change_rate`` and ``bandwidth`` are bytes a second.

    ``duration_s``: until its end was recorded; its source may not know yet.

    ``pause_ms``: from the fence until the target served, less the time the source still spent on the running batch;
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
    #: how much more than the prediction the budget had to allow, for a busy machine
    margin_ms: float = 0.0
    #: measured when it was cut over: bytes a second written, bytes a second the link took, round trip
    change_rate: float = 0.0
    bandwidth: float = 0.0
    rtt_ms: float = 0.0
    #: the part of ``bytes_warm`` that came from the checkpoint store
    bytes_stored: int = 0
    base_bytes: int = 0
    #: for a takeover: the origin of its state, and the losses
    note: str = ""
    #: why a policy proposed it; empty: a person asked for it
    reason: str = ""

    @property
    def stands(self) -> str:
        """Status of the move: waiting, in_progress, completed, failed or cancelled."""
        if self.state in ("WAITING", "PLANNED"):
            return "waiting"
        if self.state in ("ABORTED", "ABANDONED"):
            return "cancelled" if self.fault is not None and self.fault.code == "move_cancelled" else "failed"
        return "completed" if self.state == "COMPLETED" else "in_progress"


@dataclass(frozen=True, slots=True)
class Reconfiguration(Report):
    """Moves of one operator's partitions that were begun together.

    ``state``: RUNNING, PAUSED, COMPLETED (every move did), FAILED (at least one did not) or CANCELLED (a command ended
    some of its moves).

    ``kind``: migrate, rebalance, drain, failover or autopilot. ``follower``: the controller that gave this report, if
    it does not lead. ``limit``, ``per_node``, ``per_link``: maximum numbers of its concurrent moves; 0: no limit of its
    own. ``worked_s``: seconds for which it has run, without pauses. ``by``: identity of the caller that requested it,
    from the certificate; stateflow: a controller decided, or the request came in plain text.

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
        """True if no more of its moves begin, unless it is retried."""
        return self.state not in ("RUNNING", "PAUSED")

    def counts(self) -> dict[str, int]:
        """Counts its moves by status: waiting, in_progress, completed, failed, cancelled."""
        found = dict.fromkeys(("waiting", "in_progress", "completed", "failed", "cancelled"), 0)
        for move in self.moves:
            found[move.stands] += 1
        return found

    def remaining(self) -> Remaining | None:
        """Estimates the seconds until all of its moves have ended, at its present pace; None: too few have ended."""
        counts = self.counts()
        left = counts["waiting"] + counts["in_progress"]
        return remaining(len(self.moves), len(self.moves) - left, self.worked_s)


@dataclass(frozen=True, slots=True)
class ChildReport(Report, Failing):
    """A replica of an agent.

    ``wanted``: running or stopped; empty: the agent should not have it. ``state``: STARTING, RUNNING, WAITS (for the
    next start), STOPPING or STOPPED; empty: the agent has not reported it yet. ``generation``: number of commands given
    for it; ``runs``: the generation that is running. ``deaths``: number of failures in a row, the last with ``fault``.
    ``address``: its address; empty: not known yet. ``memory_bytes``: memory limit; 0: none.

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
    """An agent and its replicas. ``alive``: its last heartbeat, ``last_heartbeat_s`` ago, was recent (-1: none since
    the controller started).

    ``cores``, ``memory_bytes`` and ``disk_bytes``: its resources for replicas. ``limits``: how it enforces a replica's
    memory limit, cgroup or rlimit. ``version`` is stateflow's, ``python`` the interpreter's.

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
    """A move that a policy proposes. ``bytes``: size of the state on disk.

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
    """A partition that a policy would like to move but leaves in place. ``reason``: why it stays.

    Example: ``[each.reason for each in cluster.propose("locality").left]``
    """

    operator: str
    partition: int
    reason: str


@dataclass(frozen=True, slots=True)
class LackOfRoom(Report):
    """Replicas that would receive more than they have room for; several if they share one disk.

    Example: ``cluster.would_drain("edge-1-gw7").lacking``
    """

    replicas: tuple[str, ...]
    free_bytes: int
    coming_bytes: int


@dataclass(frozen=True, slots=True)
class Placement(Report):
    """The moves that policies propose, and their effects.

    ``uneven_rows``, ``uneven_bytes``: the greatest load of a node relative to its weight's share, in rows a second and
    in bytes, before and after the moves; 1.0: all have their share. ``pause_ms``: expected pause of each move, without
    the time for transferring bytes; ``pause_ms_at_most``: the same, with a margin for a busy machine. ``silent``:
    replicas that did not report their partitions; no partition moves to or from them. ``left``: the first hundred
    partitions that policies would like to move but leave in place. ``lacking``: replicas without room for the moves;
    such moves are refused.

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
    """The autopilot's settings. ``policies``: in order of priority; empty: the autopilot is off.

    Example: ``cluster.autopilot_orders().policies``
    """

    policies: tuple[str, ...]
    max_pause_ms: float | None
    cool_down_s: float
    moves_per_minute: float


@dataclass(frozen=True, slots=True)
class JobStage(Report):
    """The part of a run that concerns one operator. ``reconfigurations``: ids of the reconfigurations that it began.
    ``error``: why nothing was done; empty: it was done."""

    operator: str
    reconfigurations: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class JobRun(Report):
    """A run of a job.

    ``at_us``: its due time. ``ended_us``: 0: it is under way. ``state``: IN_PROCESS, PROCESSED or FAILED. ``note``: its
    result, or what it waits for. ``id``: the id for :meth:`.Cluster.job_run`. ``stages``: those that have begun, by
    operator.

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
    """A job that the cluster runs on a schedule.

    ``next_us``: its next due time; 0: none, or it is paused. ``runs``: the newest hundred, in their order.
    ``coordinator``, ``workers``: the controller that coordinates its runs, and the nodes they use; empty: any.
    ``error``: why its record cannot be read, and the remedy; empty: it can.

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
class RollingNode(Report):
    """A node of a rolling restart. ``status``: as of an entity of a batch. ``ms``: milliseconds from its restart until
    it served.

    Example: ``[(each.node, each.ms) for each in cluster.restart_all().wait().nodes]``
    """

    node: str
    status: str
    error: str = ""
    ms: int = 0


@dataclass(frozen=True, slots=True)
class Rolling(Report):
    """A rolling restart of nodes. ``state``: as of a batch. ``site``: the nodes' site; empty: all. ``limit``: maximum
    number of nodes at a time.

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
    """A fault of a partition; or, if ``undone``, the reason why the partition was not processed. ``replica``: the
    replica concerned.

    Example: ``[(each.partition, each.error) for each in cluster.status().damaged]``
    """

    operator: str
    partition: int
    replica: str
    error: str
    undone: bool = False


@dataclass(frozen=True, slots=True)
class SweepNode(Report):
    """A node of a sweep. The last one, ``(moved)``, stands for partitions that moved between nodes meanwhile.

    ``status``: as of an entity of a batch. ``partitions``: number of partitions done. For checkpoints: ``bytes_new`` of
    ``bytes_total`` were not in the store before. For verifications: ``bytes_read``, ``cells`` of state that were
    decoded, partitions ``compared`` with a standby.

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
    ``operator``, ``site``: its limits; empty: all.

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
        """The name of this sweep in ``stateflow batch``."""
        return f"{'roll' if self.chore == 'restart' else 'sweep'}/{self.id}"

    def faults(self) -> list[PartitionFault]:
        """Returns the faults of all nodes."""
        return [fault for node in self.nodes for fault in node.faults]


@dataclass(frozen=True, slots=True)
class OperatorVersion(Report):
    """A version of an operator. ``number``: from 1; the greatest serves. ``bundle``, ``source_digest``: SHA-256 of the
    bundle or the text that holds its code; both empty: the code is installed at the replicas. ``recorded_us``: when it
    was deployed.

    Example: ``cluster.upgrade("Count", cluster.versions("Count")[-2].number)``
    """

    number: int
    target: str
    bundle: str
    source_digest: str
    recorded_us: int


@dataclass(frozen=True, slots=True)
class RestoredPartition(Report, Failing):
    """The result of restoring one partition.

    ``positions``: source → last batch that the partition contains now, so a source is rewound to the next one.
    ``passed_over``: newer checkpoints that could not be used, one line each. ``error``: empty if it was restored.

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
    """The result of a checkpoint. ``partitions``: number of partitions that have one now. ``bytes_total``: size of all
    their files; ``bytes_new``: size of those that the store at ``url`` did not have.

    Example: ``cluster.checkpoint().bytes_new``
    """

    partitions: int
    bytes_new: int
    bytes_total: int
    duration_s: float
    url: str


@dataclass(frozen=True, slots=True)
class Taken:
    """Checkpoints that were taken together. ``numbers``: the partitions' numbers, if an operator was named."""

    report: CheckpointReport
    numbers: tuple[int, ...] = ()

    @classmethod
    def together(cls, taken: Iterable[Taken]) -> Taken:
        """Adds up several results. ``duration_s`` is the sum: they were taken one after another."""
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

    ``total_ms``: from its first message until its last output was returned; ``held_ms``: the part of that time spent
    waiting for a move to end there.
    """

    number: int
    at_us: int
    operator: str
    rows: int
    total_ms: float
    held_ms: float


@dataclass(frozen=True, slots=True)
class PartitionReport(Report):
    """A partition on its replica. ``state``: state of its lifecycle. ``batch_rate``: batches a second. ``rows``: rows
    received since this process first served it. ``bytes``: size of its files; 0 if sizes were not requested.

    ``entries``: estimated number of stored entries; None if sizes were not requested, the partition is not open, or it
    has no files yet. A key has one entry for each of its states, and one for each element of a map, set or list.
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
    """The contents of a replica, and its work since it was started. ``requests``: the selected requests that are still
    kept.

    Example: ``cluster.replica_stats("edge-1:7071").rows``
    """

    requests: tuple[RequestReport, ...]
    partitions: tuple[PartitionReport, ...]
    rows: int
    checkpoints: int
