"""What only a replica says, as protobuf has it."""

from __future__ import annotations

from collections.abc import Iterator

from stateflow.replica.checkpoints import Taken
from stateflow.replica.commands import command_of
from stateflow.replica.fencing import Cancellation, Cancelled, Fence
from stateflow.replica.progress import Progress
from stateflow.replica.puller import IncomingMove
from stateflow.replica.succession import How, TakeOver
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import fault_of, pieces, replica_of, seal_to_pb, spec_of
from stateflow.runtime.lifecycle import Lifecycle
from stateflow.runtime.replica import ReplicaNode
from stateflow.runtime.restoring import Restored
from stateflow.runtime.takeover import TakenOver
from stateflow.runtime.transfer import Reading
from stateflow.types import PartitionId

# -- moves ------------------------------------------------------------------------------------------------


def incoming_of(message: rpb.PrepareRequest) -> IncomingMove:
    spec = spec_of(message.spec)
    return IncomingMove(
        message.move_id,
        spec,
        PartitionId(spec.name, message.partition),
        replica_of(message.source),
        message.source_epoch,
        message.bandwidth_max,
        message.standby,
        message.on_demand,
        message.newest_epoch,
    )


def progress_to_pb(progress: Progress) -> rpb.MoveProgress:
    return rpb.MoveProgress(
        phase=progress.phase.value,
        bytes_warm=progress.bytes_warm,
        bytes_reused=progress.bytes_reused,
        bytes_delta=progress.bytes_delta,
        bytes_stored=progress.bytes_stored,
        base_bytes=progress.base_bytes,
        rounds=progress.rounds,
        lag_bytes=progress.lag_bytes,
        change_rate=progress.change_rate,
        bandwidth=progress.bandwidth,
        rtt_ms=progress.rtt_ms,
        stall_ms=progress.stall_ms,
        sync_ms=progress.sync_ms,
        waited_s=progress.waited_s,
        sequence=progress.sequence,
        epoch=progress.epoch,
        digest=progress.digest,
        fault=None if progress.fault is None else fault_of(progress.fault),
    )


def fence_of(message: rpb.FenceRequest) -> Fence:
    return Fence(
        PartitionId(message.operator, message.partition),
        message.move_id,
        message.epoch,
        replica_of(message.target),
        command_of(message),
        message.cold,
        message.pause_ms,
        message.max_pause_ms,
        message.standby_move,
    )


def cancellation_of(message: rpb.CancelRequest) -> Cancellation:
    return Cancellation(PartitionId(message.operator, message.partition), message.move_id, message.owned_at)


def cancelled_to_pb(cancelled: Cancelled) -> rpb.FenceReply:
    return rpb.FenceReply(sealed=cancelled.sealed, owned=cancelled.owned, owned_epoch=cancelled.epoch)


def frames_of(reading: Reading, bytes_max: int) -> Iterator[rpb.ChangeFrame]:
    """As few messages as the limit allows: what gathered while the base crossed is applied at once, and not one change
    set after another while the partition stands still. One that goes on in the next frame ends a frame. The last frame
    says how far it is."""
    frame, size = rpb.ChangeFrame(), 0
    for change_set in reading.change_sets:
        for piece, last in pieces(change_set, bytes_max):
            if size and size + len(piece) > bytes_max:
                yield frame
                frame, size = rpb.ChangeFrame(), 0
            frame.change_sets.append(piece)
            size += len(piece)
            if not last:
                frame.continues = True
                yield frame
                frame, size = rpb.ChangeFrame(), 0
    frame.head_sequence, frame.lag_bytes, frame.chain = reading.head_sequence, reading.lag_bytes, reading.chain
    if reading.seal is not None:
        frame.seal.CopyFrom(seal_to_pb(reading.seal))
    yield frame


def takeover_of(message: rpb.TakeOverRequest) -> TakeOver:
    spec = spec_of(message.spec)
    return TakeOver(
        spec,
        PartitionId(spec.name, message.partition),
        message.move_id,
        message.epoch,
        How[rpb.TakeOverRequest.How.Name(message.how)],
        command_of(message),
        message.standby_move,
        message.oldest_epoch,
    )


def taken_over_to_pb(taken: TakenOver) -> rpb.TakeOverReply:
    reply = rpb.TakeOverReply(epoch=taken.epoch, sequence=taken.sequence, positions=taken.positions)
    if taken.checkpoint is not None:
        reply.checkpoint_epoch, reply.checkpoint_sequence = taken.checkpoint.order
        reply.checkpoint_us = taken.checkpoint.created_us
    return reply


# -- checkpoints ------------------------------------------------------------------------------------------


def taken_to_pb(taken: Taken) -> rpb.CheckpointReply:
    return rpb.CheckpointReply(
        partitions=len(taken.partitions),
        bytes_new=taken.bytes_new,
        bytes_total=taken.bytes_total,
        duration_s=taken.duration_s,
        url=taken.url,
        numbers=[partition.partition for partition in taken.partitions],
    )


def restored_to_pb(restored: Restored) -> rpb.RestoreReply:
    return rpb.RestoreReply(
        epoch=restored.epoch,
        sequence=restored.sequence,
        positions=restored.positions,
        bytes=restored.bytes,
        passed_over=[fault_of(error) for error in restored.passed_over],
    )


# -- partitions -------------------------------------------------------------------------------------------


def view_of(node: ReplicaNode, lifecycle: Lifecycle, sequence: int, *, size: bool = False) -> rpb.PartitionView:
    return rpb.PartitionView(
        operator=lifecycle.partition.operator,
        partition=lifecycle.partition.partition,
        state=lifecycle.state,
        epoch=lifecycle.epoch,
        sequence=sequence,
        move_id=lifecycle.move_id,
        batch_rate=node.batch_rate(lifecycle.partition),
        bytes=node.bytes_on_disk(lifecycle.partition) if size else 0,
    )


def views_of(node: ReplicaNode, *, sizes: bool = False) -> list[rpb.PartitionView]:
    return [view_of(node, lifecycle, sequence, size=sizes) for lifecycle, sequence in node.inventory()]
