"""What a cluster says of itself, as plain frozen data; ``to_dict`` everywhere for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stateflow.ring import newcomers
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import error_of
from stateflow.types import PartitionId, ReplicaInfo


@dataclass(frozen=True, slots=True)
class Report:
    """Names end with their units: ``_ms`` and ``_s`` are durations, ``_us`` microseconds since 1970 (UTC)."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MoveReport(Report):
    """One partition's move.

    Bytes: ``warm`` were fetched as base files, ``reused`` found at the target, ``delta`` came as change sets;
    ``change_rate`` and ``bandwidth`` are bytes a second.

    ``pause_ms``: from the fence until the target served, less what the source still spent on the batch in hand;
    measured by the controller, so that it includes half a round trip to either side and needs no common clock.
    """

    id: str
    partition: int
    source: str
    target: str
    state: str
    strategy: str
    bytes_warm: int
    bytes_reused: int
    bytes_delta: int
    lag_bytes: int
    rounds: int
    predicted_pause_ms: float
    pause_ms: float
    duration_s: float
    digest: str
    epoch: int
    started_us: int
    fenced_us: int
    error: str
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

    @classmethod
    def of(cls, m: cpb.Move) -> MoveReport:
        return cls(
            id=m.id,
            partition=m.partition,
            source=m.source,
            target=m.target,
            state=m.phase,
            strategy=m.strategy,
            bytes_warm=m.bytes_warm,
            bytes_reused=m.bytes_reused,
            bytes_delta=m.bytes_delta,
            lag_bytes=m.lag_bytes,
            rounds=m.rounds,
            predicted_pause_ms=m.predicted_pause_ms,
            pause_ms=m.pause_ms,
            duration_s=m.duration_s,
            digest=m.digest,
            epoch=m.epoch,
            started_us=m.started_us,
            fenced_us=m.fenced_us,
            error=str(error_of(m.fault)) if m.HasField("fault") else "",
            margin_ms=m.margin_ms,
            change_rate=m.change_rate,
            bandwidth=m.bandwidth,
            rtt_ms=m.rtt_ms,
            bytes_stored=m.bytes_stored,
            base_bytes=m.base_bytes,
            note=m.note,
        )


@dataclass(frozen=True, slots=True)
class Reconfiguration(Report):
    """``state``: RUNNING, PAUSED, COMPLETED (every move did) or FAILED (at least one did not).

    ``kind``: migrate, rebalance, drain or failover.
    """

    id: str
    operator: str
    state: str
    moves: tuple[MoveReport, ...]
    max_pause_ms: float
    kind: str = "migrate"
    strategy: str = ""
    created_us: int = 0

    @classmethod
    def of(cls, message: cpb.Reconfiguration) -> Reconfiguration:
        moves = tuple(MoveReport.of(move) for move in message.moves)
        return cls(
            message.id,
            message.operator,
            message.state,
            moves,
            message.max_pause_ms,
            message.kind,
            message.strategy,
            message.created_us,
        )


@dataclass(frozen=True, slots=True)
class ReplicaStatus(Report):
    """``last_heartbeat_s``: so long ago it was heard; ``partitions``: assigned to it; ``opening``: it is starting."""

    name: str
    site: str
    address: str
    weight: int
    alive: bool
    last_heartbeat_s: float
    partitions: int
    opening: bool = False


@dataclass(frozen=True, slots=True)
class OperatorStatus(Report):
    """``owners`` and ``epochs`` by partition."""

    name: str
    target: str
    partitions: int
    version: int
    owners: tuple[str, ...]
    epochs: tuple[int, ...]
    unserved: tuple[UnservedPartitions, ...] = ()


@dataclass(frozen=True, slots=True)
class StandbyReport(Report):
    """A copy of one partition that follows its owner; ``phase`` is CATCHING_UP when it can take over."""

    operator: str
    partition: int
    replica: str
    phase: str
    lag_bytes: int

    @classmethod
    def of(cls, view: cpb.StandbyView) -> StandbyReport:
        return cls(view.operator, view.partition, view.replica, view.phase, view.lag_bytes)


@dataclass(frozen=True, slots=True)
class RefusedReplica(Report):
    """A process that asks for a name in vain. ``directory``: the id of its data directory; ``error``: why, one line."""

    name: str
    address: str
    directory: str
    error: str
    asked_s: float

    @classmethod
    def of(cls, m: cpb.Refused) -> RefusedReplica:
        return cls(m.replica.name, m.replica.address, m.directory.id, str(error_of(m.fault)), m.asked_s)


@dataclass(frozen=True, slots=True)
class UnservedPartitions(Report):
    """Partitions that nobody serves now, for one reason: ``error``, one line with what to do about it.

    ``owner``: as assigned, which need not be dead.
    """

    operator: str
    partitions: tuple[int, ...]
    owner: str
    error: str

    @classmethod
    def of(cls, m: cpb.Unserved) -> UnservedPartitions:
        return cls(m.operator, tuple(m.partitions), m.owner, str(error_of(m.fault)))


@dataclass(frozen=True, slots=True)
class DeployingOperator(Report):
    """A deployment under way: so many of its partitions were created since it was begun or gone on with."""

    name: str
    partitions: int
    created: int


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

    @classmethod
    def of(cls, m: cpb.Adopted) -> AdoptedOperator:
        return cls(
            m.operator, m.count, tuple(m.partitions), tuple(m.sealed), tuple(m.missing), tuple(m.conflicts), m.done
        )


@dataclass(frozen=True, slots=True)
class ClusterStatus(Report):
    """``reconfigurations``: those under way; ``refused``: processes that ask for a name in vain."""

    replicas: tuple[ReplicaStatus, ...]
    operators: tuple[OperatorStatus, ...]
    reconfigurations: tuple[Reconfiguration, ...]
    standbys: tuple[StandbyReport, ...] = ()
    refused: tuple[RefusedReplica, ...] = ()
    deploying: tuple[DeployingOperator, ...] = ()

    def without_share(self) -> list[str]:
        """Replicas that answer and own nothing, though a rebalance would give them something, and none is under way."""
        empty = {each.name for each in self.replicas if each.alive and each.weight > 0 and not each.partitions}
        if not empty or any(each.state in ("RUNNING", "PAUSED") for each in self.reconfigurations):
            return []
        answering = [ReplicaInfo(e.name, e.site, e.address, e.weight) for e in self.replicas if e.alive]
        owners = {PartitionId(each.name, n): owner for each in self.operators for n, owner in enumerate(each.owners)}
        if not {info.name for info in answering}.issuperset(owners.values()):
            return []  # a failover comes first
        return sorted(newcomers(owners, answering))

    @classmethod
    def of(cls, reply: cpb.StatusReply) -> ClusterStatus:
        replicas = tuple(
            ReplicaStatus(
                r.replica.name,
                r.replica.site,
                r.replica.address,
                r.replica.weight,
                r.alive,
                r.last_heartbeat_s,
                r.partitions,
                r.opening,
            )
            for r in reply.replicas
        )
        operators = tuple(
            OperatorStatus(
                d.spec.name,
                d.spec.target,
                d.spec.partitions,
                d.version,
                tuple(d.replicas[i].name for i in d.owners),
                tuple(d.epochs),
                tuple(UnservedPartitions.of(each) for each in d.unserved),
            )
            for d in reply.deployments
        )
        return cls(
            replicas,
            operators,
            tuple(Reconfiguration.of(r) for r in reply.reconfigurations),
            tuple(StandbyReport.of(view) for view in reply.standbys),
            tuple(RefusedReplica.of(refused) for refused in reply.refused),
            tuple(DeployingOperator(d.operator, d.partitions, d.created) for d in reply.deploying),
        )


@dataclass(frozen=True, slots=True)
class RestoredPartition(Report):
    """``positions``: source → last batch it contains now, so that a source is rewound to the one behind.

    ``passed_over``: newer checkpoints that could not be used, one line each. ``error``: empty when it was restored.
    """

    partition: int
    replica: str
    epoch: int
    sequence: int
    positions: dict[str, int]
    bytes: int
    passed_over: tuple[str, ...]
    error: str

    @classmethod
    def of(cls, m: cpb.RestoredPartition) -> RestoredPartition:
        return cls(
            m.partition,
            m.replica,
            m.result.epoch,
            m.result.sequence,
            dict(m.result.positions),
            m.result.bytes,
            tuple(str(error_of(fault)) for fault in m.result.passed_over),
            str(error_of(m.fault)) if m.HasField("fault") else "",
        )


@dataclass(frozen=True, slots=True)
class CheckpointReport(Report):
    """So many partitions have a checkpoint now. ``bytes_total``: of all their files; ``bytes_new``: of those that the
    store at ``url`` did not have."""

    partitions: int
    bytes_new: int
    bytes_total: int
    duration_s: float
    url: str

    @classmethod
    def of(cls, m: rpb.CheckpointReply) -> CheckpointReport:
        return cls(m.partitions, m.bytes_new, m.bytes_total, m.duration_s, m.url)


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

    @classmethod
    def of(cls, m: rpb.RequestSample) -> RequestReport:
        return cls(m.number, m.at_us, m.operator, m.rows, m.total_ms, m.held_ms)


@dataclass(frozen=True, slots=True)
class PartitionReport(Report):
    """A partition as its replica has it. ``state``: of its lifecycle; ``batch_rate``: batches a second."""

    operator: str
    partition: int
    state: str
    epoch: int
    sequence: int
    move_id: str
    batch_rate: float

    @classmethod
    def of(cls, m: rpb.PartitionView) -> PartitionReport:
        return cls(m.operator, m.partition, m.state, m.epoch, m.sequence, m.move_id, m.batch_rate)


@dataclass(frozen=True, slots=True)
class ReplicaStatistics(Report):
    """What a replica has, and did since it was started. ``requests``: those that were asked for, as far as kept."""

    requests: tuple[RequestReport, ...]
    partitions: tuple[PartitionReport, ...]
    rows: int
    checkpoints: int

    @classmethod
    def of(cls, m: rpb.StatsReply) -> ReplicaStatistics:
        requests = tuple(RequestReport.of(sample) for sample in m.samples)
        return cls(requests, tuple(PartitionReport.of(view) for view in m.partitions), m.rows, m.checkpoints)
