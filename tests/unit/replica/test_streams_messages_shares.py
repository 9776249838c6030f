"""Batches as they come over the wire, and their answers."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import InvalidArgument, NotOwner
from stateflow.partition.layout import Attempt, Session
from stateflow.partition.positions import Batch
from stateflow.partition.processor import Applied
from stateflow.partition.slices import Frame
from stateflow.replica.streams import FrameReader, Piece, batch_of, responses_of
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.apply import header_of
from stateflow.rpc.faults import error_of
from stateflow.types import PartitionId

SCHEMA = pa.schema([("k", pa.string())]).serialize().to_pybytes()


def request(partitions: list[int], counts: list[int] | None = None, **more: Any) -> rpb.ApplyRequest:
    said = {
        "operator": "Op",
        "source": "s",
        "batch": 4,
        "input_schema": SCHEMA,
        "known": b"k",
        **more.pop("header", {}),
    }
    return rpb.ApplyRequest(header=rpb.ApplyHeader(**said), **part(partitions, counts, **more))


def part(partitions: list[int], counts: list[int] | None = None, **more: Any) -> dict[str, Any]:
    none = [0] * len(partitions)
    return {"partitions": partitions, "epochs": [1] * len(partitions), "counts": counts or none, **more}


def test_the_header_of_the_first_request_counts_for_all() -> None:
    reader = FrameReader()
    one = reader.read(request([2, 3], [1, 0], rows=b"a", afters=[1, -1], digests=[7, 8]))
    two = reader.read(rpb.ApplyRequest(**part([5], [2], rows=b"b")))
    batch = Batch("s", 4, known=b"k")
    assert one == Piece(Frame("Op", batch, SCHEMA, [2, 3], [1, 1], [1, 0], [1, -1], [7, 8], b"a"), b"a", True)
    assert two == Piece(Frame("Op", batch, SCHEMA, [5], [1], [2], [], [], b"b"), b"b", True)


def test_rows_in_pieces_belong_to_the_partitions_before() -> None:
    reader = FrameReader()
    assert not reader.read(request([2], [1], rows=b"a", more=True)).is_whole
    assert reader.read(rpb.ApplyRequest(rows=b"b", more=True)) == Piece(None, b"b", False)
    assert reader.read(rpb.ApplyRequest(rows=b"c")) == Piece(None, b"c", True)
    assert reader.read(rpb.ApplyRequest(**part([3]), last=True)).is_whole


HOSTILE = {
    "twice": [request([1, 1])],
    "not ascending": [request([2, 1])],
    "again in a later message": [request([2]), rpb.ApplyRequest(**part([2]))],
    "no epochs": [request([1], epochs=[])],
    "more epochs": [request([1], epochs=[1, 2])],
    "fewer counts": [request([1, 2], [1], rows=b"a")],
    "fewer afters": [request([1, 2], afters=[1])],
    "more digests": [request([1], digests=[1, 2])],
    "rows of nobody": [request([1], rows=b"a")],
    "rows without partitions": [request([], rows=b"a")],
    "partitions without rows": [request([1], [5])],
    "no such partition": [request([1 << 20])],
    "no such epoch": [request([1], epochs=[(1 << 64) - 1])],
    "no such batch": [request([1], afters=[-2])],
    "others amid rows": [request([1], [1], rows=b"a", more=True), rpb.ApplyRequest(**part([2]))],
    "a piece of no rows": [request([1], [1], rows=b"a", more=True), rpb.ApplyRequest(more=True)],
    "the end amid rows": [request([1], [1], rows=b"a", more=True, last=True)],
    "the end amid later rows": [
        request([1], [1], rows=b"a", more=True),
        rpb.ApplyRequest(rows=b"a", more=True, last=True),
    ],
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_numbers_that_cannot_be_are_refused(hostile: list[rpb.ApplyRequest]) -> None:
    reader = FrameReader()
    for each in hostile[:-1]:
        reader.read(each)
    with pytest.raises(InvalidArgument):
        reader.read(hostile[-1])


def test_every_word_of_a_header_reaches_the_batch() -> None:
    said = {"sparse": True, "watermark_us": -5, "event_us": 0, "rewind": True}
    attempt = {"run": "r", "use": "u", "task": "t", "call": "c"}
    more = {"attempt": rpb.Attempt(**attempt), "session": rpb.SourceSession(generation_us=9, id="me")}
    frame = FrameReader().read(request([0], header={**said, **more})).frame
    assert frame is not None
    assert frame.batch == Batch("s", 4, **said, attempt=Attempt(**attempt), session=Session(9, "me"), known=b"k")


def test_a_stream_without_a_header_and_a_reserved_source_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="has no header"):
        FrameReader().read(rpb.ApplyRequest())
    with pytest.raises(InvalidArgument, match="reserved name"):
        FrameReader().read(request([], header={"source": "stateflow:migration"}))
    with pytest.raises(InvalidArgument, match="not a valid"):
        FrameReader().read(request([], header={"operator": "../up"}))


def test_answers_cross_in_pieces_and_in_order() -> None:
    fault = NotOwner("it went", remedy="refresh")
    output = bytes(range(10))
    answers = [
        (PartitionId("Op", 3), Applied(output, True, 1, operator_us=5, commit_us=6)),
        (PartitionId("Op", 1), fault),
        (PartitionId("Op", 2), Applied(b"", False, 0)),
    ]
    responses = list(responses_of(7, answers, 4))
    assert {(response.call, response.last) for response in responses} == {(7, False)}
    assert all(sum(len(result.output) for result in response.results) <= 4 for response in responses)
    found = [result for response in responses for result in response.results]
    assert [(result.partition, result.last) for result in found] == [
        *((3, False), (3, False), (3, True)),
        *((1, True), (2, True)),
    ]
    assert b"".join(result.output for result in found) == output
    assert (found[2].replayed, found[2].operator_us, found[2].commit_us) == (True, 5, 6)
    assert str(error_of(found[3].fault)) == str(fault)


def test_all_of_a_batch_crosses() -> None:
    attempt, session = Attempt("r", "u", "t", "c"), Session(1, "0" * 16)
    batch = Batch("s", 4, True, 5, attempt, 6, True, session, b"k", "edge-1", "site", f"00-{'a' * 32}-{'b' * 16}-01")
    plain = Batch(batch.source, batch.number)
    assert sum(one == other for one, other in zip(astuple(batch), astuple(plain), strict=True)) == 2, "all are said"
    crossed = batch_of(header_of("Op", batch, SCHEMA))
    assert astuple(crossed) == astuple(batch)
    assert crossed == replace(batch, traceparent=""), "a batch that is sent again is the same in another trace"
