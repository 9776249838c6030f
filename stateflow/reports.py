"""Reports about actions in a cluster, as plain frozen data; ``to_dict`` makes each machine-readable.

Reports about the present state of a cluster are in :mod:`stateflow.status`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from stateflow.errors import StateflowError
from stateflow.schedule import Remaining, remaining

#: fields that hold errors → their names in a dictionary, which holds each error as one line
_LINES = {"fault": "error", "unusable": "passed_over"}


@dataclass(frozen=True, slots=True)
class Report:
    """The base of all reports.

    Names end with their units: ``_ms`` and ``_s`` are durations, ``_us`` microseconds since 1970 (UTC).
    """

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data. An error becomes text of one line; empty: there is no error."""
        return asdict(self, dict_factory=_plain)


def _plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {_LINES.get(name, name): _lines(value) if name in _LINES else value for name, value in fields}


def _lines(faults: StateflowError | tuple[StateflowError, ...] | None) -> str | tuple[str, ...]:
    return tuple(map(str, faults)) if isinstance(faults, tuple) else str(faults or "")


class Failing:
    """A report with a ``fault``, which is the error with its code and remedy."""

    __slots__ = ()
    fault: StateflowError | None

    @property
    def error(self) -> str:
        """The fault in one line; empty if nothing failed."""
        return str(self.fault or "")


#: state of a move or a copy in a follower's report: it is under way, and only the leader knows its progress
UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class FollowerReport(Report):
    """The follower that gave a report: a controller that does not lead, and knows only what the ledger records.

    Attributes:
        address: address of the follower.
        leader: address of the leader; empty: the follower knows no leader.
        age_s: seconds since the follower read the newest part of the report, by the follower's own clock.
    """

    address: str
    leader: str
    age_s: float


@dataclass(frozen=True, slots=True)
class MoveReport(Report, Failing):
    """The move of one partition.

    Attributes:
        state: state of the move; UNKNOWN if a follower reports a move that has not ended.
        bytes_warm: bytes that the target fetched as base files.
        bytes_reused: bytes of base files that the target already had.
        bytes_delta: bytes that the target received as change sets.
        duration_s: seconds until the end of the move was recorded; the source may not know of the end yet.
        pause_ms: time from the fence until the target served, less the time that the source still spent on its running
            batch. The controller measures it on its own clock and subtracts half of its round trips to source and
            target: the partition is served while the fence travels to the source, and again while the controller hears
            from the target.

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
    #: margin for a busy machine; the budget had to allow the predicted pause and this margin together
    margin_ms: float = 0.0
    #: measured when the partition was cut over: bytes a second written, bytes a second transferred, round trip
    change_rate: float = 0.0
    bandwidth: float = 0.0
    rtt_ms: float = 0.0
    #: the part of ``bytes_warm`` that came from the checkpoint store
    bytes_stored: int = 0
    base_bytes: int = 0
    #: for a takeover: the origin of the partition's state, and what was lost
    note: str = ""
    #: why a policy proposed the move; empty: a person requested it
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

    Attributes:
        state: RUNNING, PAUSED, COMPLETED (every move completed), FAILED (at least one did not complete) or CANCELLED (a
            command ended some of the moves).
        kind: migrate, rebalance, drain, failover or autopilot.
        follower: controller that gave this report, if it does not lead.
        limit: maximum number of concurrent moves; 0: only the controller's limit.
        per_node: the same, for moves with one node as source or target.
        per_link: the same, for moves between the same two sites.
        worked_s: seconds for which the reconfiguration has run, without pauses.
        by: identity of the caller that requested the reconfiguration, from the caller's certificate; ``stateflow`` if
            a controller decided or the request arrived in plain text.

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
        """True if no further moves will begin, unless the reconfiguration is retried."""
        return self.state not in ("RUNNING", "PAUSED")

    def counts(self) -> dict[str, int]:
        """Counts the moves by status: waiting, in_progress, completed, failed, cancelled."""
        found = dict.fromkeys(("waiting", "in_progress", "completed", "failed", "cancelled"), 0)
        for move in self.moves:
            found[move.stands] += 1
        return found

    def remaining(self) -> Remaining | None:
        """Estimates the seconds until all moves have ended, from the pace so far; None if too few have ended."""
        counts = self.counts()
        left = counts["waiting"] + counts["in_progress"]
        return remaining(len(self.moves), len(self.moves) - left, self.worked_s)


@dataclass(frozen=True, slots=True)
class ChildReport(Report, Failing):
    """A replica of an agent.

    Attributes:
        wanted: running or stopped; empty: the agent should not have the replica.
        state: STARTING, RUNNING, WAITS (for the next start), STOPPING or STOPPED; empty: the agent has not reported the
            replica yet.
        generation: number of commands that were given for the replica.
        runs: generation of the running process.
        deaths: number of consecutive failures.
        fault: the newest failure.
        address: address of the replica; empty: not known yet.
        memory_bytes: memory limit; 0: no limit.

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
    """An agent, its replicas, and its resources for replicas.

    Attributes:
        alive: the agent's last heartbeat was recent.
        last_heartbeat_s: seconds since that heartbeat; -1: the controller has received none since it started.
        version: version of stateflow.
        python: version of Python.
        limits: mechanism that enforces a replica's memory limit, cgroup or rlimit.

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
    """A move that a policy proposes. ``bytes`` is the size of the partition's state on disk.

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
    """A partition that a policy would like to move but leaves in place, for ``reason``.

    Example: ``[each.reason for each in cluster.propose("locality").left]``
    """

    operator: str
    partition: int
    reason: str


@dataclass(frozen=True, slots=True)
class LackOfRoom(Report):
    """A lack of room: one replica, or several that share a disk, would receive more bytes than they have room for.

    Example: ``cluster.would_drain("edge-1-gw7").lacking``
    """

    replicas: tuple[str, ...]
    free_bytes: int
    coming_bytes: int


@dataclass(frozen=True, slots=True)
class Placement(Report):
    """The moves that policies propose, and their effects.

    Attributes:
        uneven_rows: greatest load of a node relative to its weight's share, in rows a second, before the moves; 1.0:
            every node has exactly its share.
        uneven_rows_after: the same, after the moves.
        uneven_bytes: the same as ``uneven_rows``, in bytes of state.
        uneven_bytes_after: the same, after the moves.
        pause_ms: expected pause of each move, without the time for transferring bytes.
        pause_ms_at_most: the same, with a margin for a busy machine.
        silent: replicas that did not report their partitions; no partition moves to or from them.
        left: the first hundred partitions that policies would like to move but leave in place.
        lacking: replicas without room for the moves, which are then refused.

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
    """The autopilot's settings. ``policies`` are in order of priority; if there are none, the autopilot is off.

    Example: ``cluster.autopilot_orders().policies``
    """

    policies: tuple[str, ...]
    max_pause_ms: float | None
    cool_down_s: float
    moves_per_minute: float


@dataclass(frozen=True, slots=True)
class JobStage(Report):
    """The part of a job's run that concerns one operator.

    Attributes:
        reconfigurations: ids of the reconfigurations that this stage began.
        error: why nothing was done for the operator; empty: the work was done.
    """

    operator: str
    reconfigurations: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class JobRun(Report):
    """A run of a job.

    Attributes:
        at_us: due time of the run.
        ended_us: time at which the run ended; 0: it is under way.
        state: IN_PROCESS, PROCESSED or FAILED.
        note: result of the run, or what the run waits for.
        id: id for :meth:`.Cluster.job_run`.
        stages: stages that have begun, one for each operator.

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

    Attributes:
        next_us: next due time; 0: the job is paused, or never due again.
        runs: the newest hundred runs, oldest first.
        coordinator: controller that coordinates the runs; empty: any controller.
        workers: nodes that the runs use; empty: any nodes.
        error: why the job's record cannot be read, with the remedy; empty: the record is readable.

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
    """A node of a rolling restart.

    Attributes:
        status: status of the node's entity in the restart's batch.
        ms: milliseconds from the node's restart until it served.

    Example: ``[(each.node, each.ms) for each in cluster.restart_all().wait().nodes]``
    """

    node: str
    status: str
    error: str = ""
    ms: int = 0


@dataclass(frozen=True, slots=True)
class Rolling(Report):
    """A rolling restart of nodes.

    Attributes:
        state: state of the restart's batch.
        site: site of the nodes; empty: all sites.
        limit: maximum number of nodes that restart at the same time.

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
    """A fault of a partition on ``replica``. If ``undone``, ``error`` says why the partition was not processed there.

    Example: ``[(each.partition, each.error) for each in cluster.status().damaged]``
    """

    operator: str
    partition: int
    replica: str
    error: str
    undone: bool = False


@dataclass(frozen=True, slots=True)
class SweepNode(Report):
    """A node of a sweep.

    In a sweep of checkpoints or verifications, the last one is named ``(moved)``, and stands for partitions that moved
    during the sweep.

    Attributes:
        status: status of the node's entity in the sweep's batch.
        partitions: number of partitions that the node has processed.
        bytes_new: for checkpoints, bytes that were not in the store before.
        bytes_total: for checkpoints, bytes of all files of the checkpoints.
        bytes_read: for verifications, bytes read.
        cells: for verifications, number of decoded cells of state.
        compared: for verifications, number of partitions that were compared with a standby.

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
    """A sweep: long work, such as a verification, that many nodes do in turn.

    Attributes:
        chore: restart, checkpoint or verify.
        state: state of the sweep's batch.
        operator: operator to which the sweep is restricted; empty: all operators.
        site: site to which the sweep is restricted; empty: all sites.
        limit: maximum number of nodes that work at the same time.

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
    """A version of an operator.

    Attributes:
        number: number from 1; the version with the greatest number serves.
        bundle: SHA-256 of the bundle that holds the code, if a bundle does.
        source_digest: SHA-256 of the text that holds the code, if a text does. If both digests are empty, the code is
            installed at the replicas.
        recorded_us: when the version was deployed.

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

    Attributes:
        positions: source → last batch that the partition contains now; the source must continue with the next batch.
        unusable: why newer checkpoints could not be used, one error for each.
        fault: why the partition was not restored; None: it was restored.

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
        """The errors of ``unusable``, each in one line."""
        return tuple(map(str, self.unusable))


@dataclass(frozen=True, slots=True)
class CheckpointReport(Report):
    """The result of a checkpoint.

    Attributes:
        partitions: number of partitions that were checkpointed.
        bytes_new: bytes of files that the store at ``url`` did not have before.
        bytes_total: bytes of all files.

    Example: ``cluster.checkpoint().bytes_new``
    """

    partitions: int
    bytes_new: int
    bytes_total: int
    duration_s: float
    url: str


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of one request for checkpoints.

    Attributes:
        numbers: the partitions that were checkpointed; empty if the request named no operator.
    """

    report: CheckpointReport
    numbers: tuple[int, ...] = ()

    @classmethod
    def together(cls, taken: Iterable[Taken]) -> Taken:
        """Adds up several results. ``duration_s`` is a sum as well, because the checkpoints were taken one after
        another."""
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
    """A request that a replica served.

    Attributes:
        number: ordinal number of the request since the replica was started.
        total_ms: time from the first message of the request until its last output was returned.
        held_ms: part of that time for which the request waited for the end of a partition's move.
    """

    number: int
    at_us: int
    operator: str
    rows: int
    total_ms: float
    held_ms: float


@dataclass(frozen=True, slots=True)
class PartitionReport(Report):
    """A partition on its replica.

    Attributes:
        state: state of the partition's lifecycle.
        batch_rate: batches a second.
        rows: rows received since this process first served the partition.
        bytes: size of the partition's files; 0 if sizes were not requested.
        entries: estimated number of stored entries; None if sizes were not requested, the partition is not open, or it
            has no files yet. A key has one entry for each of its states, and one for each element of a map, set or
            list.
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
    """The contents of a replica, and its work since it was started.

    ``requests`` lists the requests that the caller selected, as far as the replica still keeps them.

    Example: ``cluster.replica_stats("edge-1:7071").rows``
    """

    requests: tuple[RequestReport, ...]
    partitions: tuple[PartitionReport, ...]
    rows: int
    checkpoints: int
