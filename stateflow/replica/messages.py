"""Translation between protobuf and the types that only a replica uses: batches and change sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import lt
from typing import NamedTuple

from stateflow.errors import InvalidArgument, StateflowError
from stateflow.replica.applying import Answer
from stateflow.replica.samples import Sample
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.fields import checked
from stateflow.rpc.wire import fault_of, pieces, seal_to_pb, session_of
from stateflow.runtime.host import Applied
from stateflow.runtime.layout import Attempt
from stateflow.runtime.positions import Batch, check_source
from stateflow.runtime.shares import Frame
from stateflow.runtime.transfer import Reading

# -- batches ----------------------------------------------------------------------------------------------


def batch_of(header: rpb.ApplyHeader) -> Batch:
    """Returns the batch that a header announces. Raises InvalidArgument for a source name that its caller may not
    use."""
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
        header.known,
        header.site,
        header.site_column,
        header.traceparent,
    )


class Piece(NamedTuple):
    """The contents of one request.

    ``frame``: batch slices; None: ``rows`` continue the previous ones. ``is_whole``: the rows end here.
    """

    frame: Frame | None
    rows: bytes
    is_whole: bool


class FrameReader:
    """Turns the requests of one call into batch slices. The header of the first request counts for all."""

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._operator, self._schema = "", b""
        self._goes_on = False
        self._newest = -1  # partition number

    def read(self, request: rpb.ApplyRequest) -> Piece:
        """Returns the contents of the next request.

        Raises InvalidArgument where the first request has no header, for a field with a forbidden value, and for
        numbers that contradict each other. These checks come before anything is built from the request.
        """
        checked(request)
        if self._batch is None:
            self._begin(request)
        if self._goes_on:
            self._check(not request.partitions, "new partitions before the previous rows are complete")
            self._goes_on = request.more
            self._check(not (request.more and request.last), "a batch ends before its rows are complete")
            return Piece(None, request.rows, not request.more)
        frame = self._frame(request)
        self._goes_on = request.more
        self._check(not (request.more and request.last), "a batch ends before its rows are complete")
        return Piece(frame, request.rows, not request.more)

    def _frame(self, request: rpb.ApplyRequest) -> Frame:
        assert self._batch is not None
        partitions = list(request.partitions)
        several = request.epochs, request.counts, request.afters, request.digests
        epochs, counts, afters, digests = map(list, several)
        count = len(partitions)
        self._check(len(epochs) == len(counts) == count, "partitions, epochs and row counts differ in number")
        self._check(
            len(afters) in (0, count) and len(digests) in (0, count),
            "afters or digests are not given for all partitions",
        )
        if partitions:
            ascend = partitions[0] > self._newest and all(map(lt, partitions, partitions[1:]))
            self._check(ascend, "partition numbers are not strictly ascending")
            self._newest = partitions[-1]
        self._check(bool(request.rows) == any(counts), "rows and row counts contradict each other")
        return Frame(
            self._operator, self._batch, self._schema, partitions, epochs, counts, afters, digests, request.rows
        )

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvalidArgument(
                what, remedy="check which client sends them, and its version", operator=self._operator
            )

    def _begin(self, request: rpb.ApplyRequest) -> None:
        header = request.header
        if not request.HasField("header"):
            raise InvalidArgument("the first message of a batch has no header", remedy="send the header first")
        self._batch = batch_of(header)
        self._operator, self._schema = header.operator, header.input_schema


def responses_of(call: int, answers: Iterable[Answer], bytes_max: int) -> Iterator[rpb.ApplyResponse]:
    """Packs answers, in order, into as few messages as the limit allows."""
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
    """Packs a reading into as few messages as the limit allows.

    The target applies one message at a time, so changes that gathered while the base was copied are applied together,
    not one change set after another while the partition stands still. A change set that continues in the next frame
    ends its frame. The last frame says how far the source has come.
    """
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
