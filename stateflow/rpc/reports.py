"""Conversion of reports, and of a controller's commands to a replica and the replies, to messages and back.

``…_to_pb`` returns the message of a value, and ``…_of`` the value of a message.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError as NoMessage

from stateflow.errors import DecodeError, InvalidArgument
from stateflow.partition.control import (
    Cancellation,
    Cancelled,
    Command,
    DiskView,
    Fence,
    Fenced,
    Origin,
    PartitionView,
    Phase,
    Preparation,
    Progress,
    Restore,
    Restored,
    TakenOver,
    TakeOver,
    Verification,
    Wanted,
)
from stateflow.partition.lifecycle import State
from stateflow.reports import (
    AdoptedOperator,
    AutopilotReport,
    CheckpointReport,
    ClusterReport,
    DeployingOperator,
    Deployment,
    FollowerReport,
    JobReport,
    JobRun,
    JobStage,
    LackOfRoom,
    LeftPartition,
    LinkReport,
    MaintenanceReport,
    MoveReport,
    OperatorVersion,
    PartitionFault,
    PartitionReport,
    Placement,
    ProposedMove,
    Reconfiguration,
    RefusedReplica,
    ReplicaStatistics,
    ReplicaStatus,
    RequestReport,
    RestoredPartition,
    Rolling,
    RollingNode,
    StandbyReport,
    Sweep,
    SweepNode,
    Taken,
    UnservedPartitions,
)
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import error_of, fault_of, message_of, replica_of, replica_to_pb, spec_of, spec_to_pb, value_of
from stateflow.types import How, OperatorSpec, PartitionId, ReplicaInfo, shown

# -- Reports ---------------------------------------------------------------------------------------------------------

# -- followers --------------------------------------------------------------------------------------------


def follower_to_pb(follower: FollowerReport | None) -> cpb.Follower | None:
    return None if follower is None else message_of(cpb.Follower, follower)


def follower_of(message: Any) -> FollowerReport | None:
    """Returns the follower that gave an answer; None: the leader gave it. For answers with a follower field."""
    return value_of(FollowerReport, message.follower) if message.HasField("follower") else None


# -- reconfigurations -------------------------------------------------------------------------------------


def move_to_pb(move: MoveReport) -> cpb.Move:
    return message_of(cpb.Move, move, phase=move.state)


def move_of(message: cpb.Move) -> MoveReport:
    return value_of(MoveReport, message, state=message.phase)


def reconfiguration_to_pb(reconfiguration: Reconfiguration) -> cpb.Reconfiguration:
    return message_of(
        cpb.Reconfiguration,
        reconfiguration,
        moves=map(move_to_pb, reconfiguration.moves),
        follower=follower_to_pb(reconfiguration.follower),
    )


def reconfiguration_of(message: cpb.Reconfiguration) -> Reconfiguration:
    return value_of(Reconfiguration, message, moves=tuple(map(move_of, message.moves)), follower=follower_of(message))


def placement_to_pb(placement: Placement) -> cpb.PlaceReply:
    return message_of(
        cpb.PlaceReply,
        placement,
        moves=[message_of(cpb.ProposedMove, move) for move in placement.moves],
        left=[message_of(cpb.Left, each) for each in placement.left],
        lacking=[message_of(cpb.Lacking, each) for each in placement.lacking],
    )


def placement_of(message: cpb.PlaceReply) -> Placement:
    return value_of(
        Placement,
        message,
        moves=tuple(value_of(ProposedMove, move) for move in message.moves),
        left=tuple(value_of(LeftPartition, each) for each in message.left),
        lacking=tuple(value_of(LackOfRoom, each) for each in message.lacking),
    )


def autopilot_to_pb(report: AutopilotReport) -> cpb.AutopilotOrders:
    return message_of(cpb.AutopilotOrders, report)


def autopilot_of(message: cpb.AutopilotOrders) -> AutopilotReport:
    most = message.max_pause_ms if message.HasField("max_pause_ms") else None
    return value_of(AutopilotReport, message, policies=tuple(message.policies), max_pause_ms=most)


def job_to_pb(report: JobReport) -> cpb.Job:
    return message_of(cpb.Job, report, runs=map(run_to_pb, report.runs), follower=follower_to_pb(report.follower))


def job_of(message: cpb.Job) -> JobReport:
    return value_of(JobReport, message, runs=tuple(map(run_of, message.runs)), follower=follower_of(message))


def run_to_pb(run: JobRun) -> cpb.JobRun:
    stages = [message_of(cpb.JobStage, stage) for stage in run.stages]
    return message_of(cpb.JobRun, run, stages=stages, follower=follower_to_pb(run.follower))


def run_of(message: cpb.JobRun) -> JobRun:
    stages = tuple(value_of(JobStage, stage) for stage in message.stages)
    return value_of(JobRun, message, stages=stages, follower=follower_of(message))


# -- a cluster --------------------------------------------------------------------------------------------


def standby_to_pb(standby: StandbyReport) -> cpb.StandbyView:
    return message_of(cpb.StandbyView, standby)


def standby_of(message: cpb.StandbyView) -> StandbyReport:
    return value_of(StandbyReport, message)


def adopted_to_pb(adopted: AdoptedOperator) -> cpb.Adopted:
    return message_of(cpb.Adopted, adopted, operator=adopted.name)


def adopted_of(message: cpb.Adopted) -> AdoptedOperator:
    return value_of(AdoptedOperator, message, name=message.operator)


def deployment_to_pb(deployment: Deployment) -> cpb.Deployment:
    """Returns the message of a deployment, with each owner once, however many partitions it has."""
    known = sorted(set(deployment.owners), key=lambda owner: owner.name)
    numbers = {owner: number for number, owner in enumerate(known)}
    return message_of(
        cpb.Deployment,
        deployment,
        spec=spec_to_pb(deployment.spec),
        replicas=map(replica_to_pb, known),
        owners=[numbers[owner] for owner in deployment.owners],
        unserved=[message_of(cpb.Unserved, each) for each in deployment.unserved],
        follower=follower_to_pb(deployment.follower),
    )


def packed_deployment(deployment: Deployment) -> bytes:
    """Returns a deployment as bytes to be kept; :func:`unpacked_deployment` reads them."""
    return deployment_to_pb(deployment).SerializeToString()


def unpacked_deployment(data: bytes) -> Deployment:
    """Reads the bytes of :func:`packed_deployment`. Raises DecodeError."""
    try:
        return deployment_of(cpb.Deployment.FromString(data))
    except (NoMessage, IndexError) as error:
        raise DecodeError("a stored deployment cannot be read", remedy="fetch it from the controller") from error


def deployment_of(message: cpb.Deployment) -> Deployment:
    infos = [replica_of(each) for each in message.replicas]
    return value_of(
        Deployment,
        message,
        spec=spec_of(message.spec),
        owners=tuple(infos[number] for number in message.owners),
        unserved=tuple(value_of(UnservedPartitions, each) for each in message.unserved),
        sites=tuple(message.sites),
        follower=follower_of(message),
    )


def rolling_to_pb(rolling: Rolling) -> cpb.Rolling:
    return message_of(cpb.Rolling, rolling, nodes=[message_of(cpb.RollingNode, each) for each in rolling.nodes])


def sweep_to_pb(sweep: Sweep) -> cpb.Sweep:
    nodes = [
        message_of(cpb.SweepNode, each, faults=[message_of(cpb.PartitionFault, fault) for fault in each.faults])
        for each in sweep.nodes
    ]
    return message_of(cpb.Sweep, sweep, nodes=nodes)


def sweep_of(message: cpb.Sweep) -> Sweep:
    nodes = tuple(
        value_of(SweepNode, each, faults=tuple(value_of(PartitionFault, fault) for fault in each.faults))
        for each in message.nodes
    )
    return value_of(Sweep, message, nodes=nodes)


def rolling_of(message: cpb.Rolling) -> Rolling:
    return value_of(Rolling, message, nodes=tuple(value_of(RollingNode, each) for each in message.nodes))


def version_to_pb(number: int, spec: OperatorSpec) -> cpb.Version:
    return cpb.Version(
        number=number,
        target=spec.target,
        bundle=spec.bundle,
        source_digest=spec.source_digest,
        recorded_us=spec.recorded_us,
    )


def version_of(message: cpb.Version) -> OperatorVersion:
    return value_of(OperatorVersion, message)


def _status_to_pb(status: ReplicaStatus) -> cpb.ReplicaStatus:
    info = ReplicaInfo(status.name, status.site, status.address, status.weight)
    return message_of(cpb.ReplicaStatus, status, replica=replica_to_pb(info))


def _status_of(message: cpb.ReplicaStatus, follower: FollowerReport | None) -> ReplicaStatus:
    info = replica_of(message.replica)
    named = {"name": info.name, "site": info.site, "address": info.address, "weight": info.weight}
    room = message.room_bytes if message.HasField("room_bytes") else None
    return value_of(ReplicaStatus, message, **named, alive=None if follower else message.alive, room_bytes=room)


def _link_of(message: cpb.Link) -> LinkReport:
    rtt_ms = message.rtt_ms if message.HasField("rtt_ms") else None
    bytes_per_s = message.bytes_per_s if message.HasField("bytes_per_s") else None
    return LinkReport(message.source, message.target, rtt_ms, bytes_per_s)


def _refused_to_pb(refused: RefusedReplica) -> cpb.Refused:
    return message_of(
        cpb.Refused,
        refused,
        replica=pb.Replica(name=refused.name, address=refused.address),
        directory=cpb.Directory(id=refused.directory),
    )


def _refused_of(message: cpb.Refused) -> RefusedReplica:
    info, directory = message.replica, message.directory.id
    return value_of(RefusedReplica, message, name=info.name, address=info.address, directory=directory)


def cluster_to_pb(report: ClusterReport) -> cpb.StatusReply:
    return cpb.StatusReply(
        replicas=map(_status_to_pb, report.replicas),
        deployments=map(deployment_to_pb, report.deployments),
        reconfigurations=map(reconfiguration_to_pb, report.reconfigurations),
        standbys=map(standby_to_pb, report.standbys),
        refused=map(_refused_to_pb, report.refused),
        deploying=[message_of(cpb.Deploying, each, operator=each.name) for each in report.deploying],
        follower=follower_to_pb(report.follower),
        maintenance=[message_of(cpb.Maintenance, each) for each in report.maintenance],
        links=[message_of(cpb.Link, each) for each in report.links],
        damaged=[message_of(cpb.PartitionFault, each) for each in report.damaged],
    )


def cluster_of(message: cpb.StatusReply) -> ClusterReport:
    follower = follower_of(message)
    return ClusterReport(
        replicas=tuple(_status_of(each, follower) for each in message.replicas),
        deployments=tuple(map(deployment_of, message.deployments)),
        reconfigurations=tuple(map(reconfiguration_of, message.reconfigurations)),
        standbys=tuple(map(standby_of, message.standbys)),
        refused=tuple(map(_refused_of, message.refused)),
        deploying=tuple(value_of(DeployingOperator, each, name=each.operator) for each in message.deploying),
        follower=follower,
        maintenance=tuple(value_of(MaintenanceReport, each) for each in message.maintenance),
        links=tuple(map(_link_of, message.links)),
        damaged=tuple(value_of(PartitionFault, each) for each in message.damaged),
    )


# -- restores ---------------------------------------------------------------------------------------------


def restored_to_pb(restored: RestoredPartition) -> cpb.RestoredPartition:
    result = message_of(rpb.RestoreReply, restored, passed_over=map(fault_of, restored.unusable))
    return message_of(cpb.RestoredPartition, restored, result=None if restored.fault else result)


def restored_of(message: cpb.RestoredPartition) -> RestoredPartition:
    result = message.result
    return value_of(
        RestoredPartition,
        message,
        epoch=result.epoch,
        sequence=result.sequence,
        positions=dict(result.positions),
        bytes=result.bytes,
        unusable=tuple(map(error_of, result.passed_over)),
    )


# -- one replica ------------------------------------------------------------------------------------------


def statistics_of(message: rpb.StatsReply) -> ReplicaStatistics:
    return value_of(
        ReplicaStatistics,
        message,
        requests=tuple(value_of(RequestReport, sample) for sample in message.samples),
        partitions=tuple(
            value_of(PartitionReport, view, entries=view.entries if view.HasField("entries") else None)
            for view in message.partitions
        ),
    )


# -- A controller's commands to a replica, and the replies -----------------------------------------------------------


def command_to_pb(command: Command) -> pb.Command:
    return message_of(pb.Command, command)


def command_of(request: Any) -> Command:
    """Returns the authority of a request that only a controller may make."""
    return value_of(Command, request.command)


def _place(partition: PartitionId) -> dict[str, Any]:
    return {"operator": partition.operator, "partition": partition.partition}


# -- moves ------------------------------------------------------------------------------------------------


def preparation_to_pb(move: Preparation, standby_move: str) -> rpb.PrepareRequest:
    """Returns the request of a transfer.

    Args:
        standby_move: a standby copy that follows there already; while it does, the move uses it.
    """
    return message_of(
        rpb.PrepareRequest,
        move,
        spec=spec_to_pb(move.spec),
        partition=move.partition.partition,
        source=replica_to_pb(move.source),
        standby_move=standby_move,
    )


def preparation_of(message: rpb.PrepareRequest) -> Preparation:
    spec = spec_of(message.spec)
    partition, source = PartitionId(spec.name, message.partition), replica_of(message.source)
    return value_of(Preparation, message, spec=spec, partition=partition, source=source)


def progress_to_pb(progress: Progress) -> rpb.MoveProgress:
    return message_of(rpb.MoveProgress, progress, phase=progress.phase.value)


def progress_of(message: rpb.MoveProgress) -> Progress:
    return value_of(Progress, message, phase=Phase[rpb.MoveProgress.Phase.Name(message.phase)])


def fence_to_pb(fence: Fence) -> rpb.FenceRequest:
    """Returns the request without its command."""
    return message_of(
        rpb.FenceRequest, fence, **_place(fence.partition), target=replica_to_pb(fence.target), command=None
    )


def fence_of(message: rpb.FenceRequest) -> Fence:
    partition = PartitionId(message.operator, message.partition)
    return value_of(Fence, message, partition=partition, target=replica_of(message.target), command=command_of(message))


def fenced_to_pb(fenced: Fenced) -> rpb.FenceReply:
    sealed, fault = fenced.refused is None, None if fenced.refused is None else fault_of(fenced.refused)
    return rpb.FenceReply(sealed=sealed, in_hand_ms=fenced.in_hand_ms, fault=fault)


def fenced_of(message: rpb.FenceReply) -> Fenced:
    return Fenced(message.in_hand_ms, None if message.sealed else error_of(message.fault))


def cancellation_to_pb(cancellation: Cancellation) -> rpb.CancelRequest:
    return message_of(rpb.CancelRequest, cancellation, **_place(cancellation.partition))


def cancellation_of(message: rpb.CancelRequest) -> Cancellation:
    return value_of(Cancellation, message, partition=PartitionId(message.operator, message.partition))


def cancelled_to_pb(cancelled: Cancelled) -> rpb.FenceReply:
    return message_of(rpb.FenceReply, cancelled, owned_epoch=cancelled.epoch)


def cancelled_of(message: rpb.FenceReply) -> Cancelled:
    return value_of(Cancelled, message, epoch=message.owned_epoch)


# -- takeovers --------------------------------------------------------------------------------------------


def takeover_to_pb(takeover: TakeOver) -> rpb.TakeOverRequest:
    """Returns the request without its command."""
    return message_of(
        rpb.TakeOverRequest,
        takeover,
        spec=spec_to_pb(takeover.spec),
        partition=takeover.partition.partition,
        how=takeover.how.value,
        command=None,
    )


def takeover_of(message: rpb.TakeOverRequest) -> TakeOver:
    spec = spec_of(message.spec)
    return value_of(
        TakeOver,
        message,
        spec=spec,
        partition=PartitionId(spec.name, message.partition),
        how=How[rpb.TakeOverRequest.How.Name(message.how)],
        command=command_of(message),
    )


def taken_over_to_pb(taken: TakenOver) -> rpb.TakeOverReply:
    reply = message_of(rpb.TakeOverReply, taken)
    if (origin := taken.checkpoint) is not None:
        reply.checkpoint_epoch, reply.checkpoint_sequence = origin.epoch, origin.sequence
        reply.checkpoint_us = origin.created_us
    return reply


def taken_over_of(message: rpb.TakeOverReply) -> TakenOver:
    origin = Origin(message.checkpoint_epoch, message.checkpoint_sequence, message.checkpoint_us)
    return value_of(TakenOver, message, checkpoint=origin if message.checkpoint_epoch else None)


# -- checkpoints ------------------------------------------------------------------------------------------


def taken_to_pb(taken: Taken) -> rpb.CheckpointReply:
    return message_of(rpb.CheckpointReply, taken.report, numbers=taken.numbers)


def taken_of(message: rpb.CheckpointReply) -> Taken:
    return Taken(value_of(CheckpointReport, message), tuple(message.numbers))


def restore_to_pb(restore: Restore, own: bool) -> rpb.RestoreRequest:
    """Returns the request of a restore.

    Args:
        own: True: serve what was fetched and verified; False: fetch and verify.
    """
    return message_of(
        rpb.RestoreRequest,
        restore,
        spec=spec_to_pb(restore.spec),
        partition=restore.partition.partition,
        savepoint=restore.wanted.savepoint,
        source=restore.wanted.source,
        batch=restore.wanted.batch,
        own=own,
    )


def restore_of(message: rpb.RestoreRequest) -> Restore:
    spec = spec_of(message.spec)
    partition = PartitionId(spec.name, message.partition)
    return value_of(Restore, message, spec=spec, partition=partition, wanted=value_of(Wanted, message))


def reply_of_restore_to_pb(restored: Restored) -> rpb.RestoreReply:
    return message_of(rpb.RestoreReply, restored, passed_over=map(fault_of, restored.passed_over))


def reply_of_restore(message: rpb.RestoreReply) -> Restored:
    return value_of(Restored, message, passed_over=list(map(error_of, message.passed_over)))


def verification_to_pb(found: Verification) -> rpb.VerifyPage:
    return message_of(rpb.VerifyPage, found, faults=map(fault_of, found.faults))


def verification_of(message: rpb.VerifyPage) -> Verification:
    return value_of(Verification, message, faults=list(map(error_of, message.faults)))


# -- partitions -------------------------------------------------------------------------------------------


def disk_of(message: rpb.StatsReply) -> DiskView:
    return value_of(DiskView, message)


def view_of(message: rpb.PartitionView) -> PartitionView:
    """Returns the view of a partition. Raises InvalidArgument for an unknown state."""
    try:
        state = State(message.state)
    except ValueError:
        raise InvalidArgument(
            f"{shown(message.state)} is not a partition state", remedy="check which version runs there"
        ) from None
    partition = PartitionId(message.operator, message.partition)
    entries = message.entries if message.HasField("entries") else None
    origins = dict(message.origins)
    return value_of(PartitionView, message, partition=partition, state=state, origins=origins, entries=entries)
