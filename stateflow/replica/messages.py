"""What only a replica says, as protobuf has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from stateflow.errors import InvalidArgument, StateflowError
from stateflow.replica.applying import Answer
from stateflow.replica.checkpoints import Taken
from stateflow.replica.fencing import Cancellation, Cancelled, Fence
from stateflow.replica.progress import Progress
from stateflow.replica.puller import Preparation
from stateflow.replica.samples import Sample
from stateflow.replica.succession import How, TakeOver
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.fields import checked
from stateflow.rpc.wire import fault_of, pieces, replica_of, seal_to_pb, session_of, spec_of
from stateflow.runtime.authority import Command
from stateflow.runtime.host import Applied
from stateflow.runtime.layout import Attempt
from stateflow.runtime.positions import Batch, Share, check_source
from stateflow.runtime.restoring import Restored
from stateflow.runtime.takeover import TakenOver
from stateflow.runtime.transfer import Reading
from stateflow.types import PartitionId


def command_of(request: Any) -> Command:
    """Who asks for what only a controller may."""
    sent: pb.Command = request.command
    return Command(sent.ledger, sent.term, sent.session)


# -- batches ----------------------------------------------------------------------------------------------


def batch_of(header: rpb.ApplyHeader) -> Batch:
    """Without what its client tells a successor. Raises InvalidArgument for a source that is not its caller's."""
    check_source(header.source)
    sent = header.attempt
    return Batch(
        header.source,
        header.batch,
        header.sparse,
        header.watermark_us if header.HasField("watermark_us") else None,
        Attempt(sent.run, sent.use, sent.task, sent.call),
        header.event_us if header.HasField("event_us") else None,
        header.rewind,
        session_of(header.session) if header.HasField("session") else None,
    )


class ShareReader:
    """Turns one stream's requests into shares. The header of the first one counts for all."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._operator, self._schema, self._known = "", b"", b""

    def shares_of(self, request: rpb.ApplyRequest) -> list[Share]:
        """Raises InvalidArgument where the first one has no header, and for a field that holds what it may not."""
        checked(request)
        if self._batch is None:
            self._begin(request)
        batch = self._batch
        assert batch is not None
        operator, schema = self._operator, self._schema
        shares = [
            Share(
                PartitionId(operator, part.partition),
                part.epoch,
                batch,
                schema,
                part.rows,
                part.after if part.HasField("after") else None,
                part.last,
            )
            for part in request.parts
        ]
        if self._known:
            first = next((number for number, share in enumerate(shares) if share.is_whole), None)
            if first is not None:  # which keeps it for a successor
                shares[first] = shares[first]._replace(batch=replace(batch, known=self._known))
                self._known = b""
        return shares

    def _begin(self, request: rpb.ApplyRequest) -> None:
        header = request.header
        if not request.HasField("header"):
            raise InvalidArgument("a batch begins with its header", remedy="send it in the first message")
        self._batch = batch_of(header)
        self._operator, self._schema, self._known = header.operator, header.input_schema, header.known


def responses_of(answers: Iterable[Answer], bytes_max: int) -> Iterator[rpb.ApplyResponse]:
    """As few messages as the limit allows; order kept."""
    response, size = rpb.ApplyResponse(), 0
    for partition, answer in answers:
        for result in _results_of(partition.partition, answer, bytes_max):
            if size and size + len(result.output) > bytes_max:
                yield response
                response, size = rpb.ApplyResponse(), 0
            response.results.append(result)
            size += len(result.output) + 64
    if response.results:
        yield response


def _results_of(number: int, answer: Applied | StateflowError, bytes_max: int) -> list[rpb.PartitionResult]:
    if isinstance(answer, StateflowError):
        return [rpb.PartitionResult(partition=number, last=True, fault=fault_of(answer))]
    results = [
        rpb.PartitionResult(partition=number, output=piece, last=last, replayed=answer.replayed)
        for piece, last in pieces(answer.output, bytes_max)
    ]
    results[-1].operator_us, results[-1].commit_us = answer.operator_us, answer.commit_us
    return results


def sample_to_pb(sample: Sample) -> rpb.RequestSample:
    return rpb.RequestSample(
        number=sample.number,
        at_us=sample.at_us,
        operator=sample.operator,
        rows=sample.rows,
        total_ms=sample.total_ms,
        held_ms=sample.held_ms,
    )


# -- moves ------------------------------------------------------------------------------------------------


def preparation_of(message: rpb.PrepareRequest) -> Preparation:
    spec = spec_of(message.spec)
    return Preparation(
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
