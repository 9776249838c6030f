"""What only a replica says, as protobuf has it: batches and change sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from stateflow.errors import InvalidArgument, StateflowError
from stateflow.replica.applying import Answer
from stateflow.replica.samples import Sample
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.fields import checked
from stateflow.rpc.wire import fault_of, pieces, seal_to_pb, session_of
from stateflow.runtime.host import Applied
from stateflow.runtime.layout import Attempt
from stateflow.runtime.positions import Batch, Share, check_source
from stateflow.runtime.transfer import Reading
from stateflow.types import PartitionId

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
    """Turns one call's requests into shares. The header of the first one counts for all."""

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


def responses_of(call: int, answers: Iterable[Answer], bytes_max: int) -> Iterator[rpb.ApplyResponse]:
    """As few messages as the limit allows; order kept."""
    response, size = rpb.ApplyResponse(call=call), 0
    for partition, answer in answers:
        for result in _results_of(partition.partition, answer, bytes_max):
            if size and size + len(result.output) > bytes_max:
                yield response
                response, size = rpb.ApplyResponse(call=call), 0
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


# -- change sets ------------------------------------------------------------------------------------------


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
