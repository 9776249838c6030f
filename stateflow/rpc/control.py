"""A controller's commands to a replica, and the replies, on the wire."""

from __future__ import annotations

from typing import Any

from stateflow.errors import InvalidArgument
from stateflow.reports import CheckpointReport, Taken
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.matching import message_of, value_of
from stateflow.rpc.wire import error_of, fault_of, replica_of, replica_to_pb, spec_of, spec_to_pb
from stateflow.runtime.authority import Command
from stateflow.runtime.control import (
    Cancellation,
    Cancelled,
    Fence,
    Fenced,
    Origin,
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
from stateflow.runtime.lifecycle import State
from stateflow.runtime.view import DiskView, PartitionView
from stateflow.types import How, PartitionId, shown


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


def restored_to_pb(restored: Restored) -> rpb.RestoreReply:
    return message_of(rpb.RestoreReply, restored, passed_over=map(fault_of, restored.passed_over))


def restored_of(message: rpb.RestoreReply) -> Restored:
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
