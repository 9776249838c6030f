"""Batches as they come over the wire, and their answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from stateflow.errors import InvalidArgument, NotOwner
from stateflow.replica.messages import ShareReader, responses_of
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import error_of
from stateflow.runtime.host import Applied
from stateflow.runtime.layout import Attempt, Session
from stateflow.runtime.positions import Batch, Share
from stateflow.types import PartitionId

SCHEMA = pa.schema([("k", pa.string())]).serialize().to_pybytes()


def request(parts: list[rpb.PartitionRows], **header: Any) -> rpb.ApplyRequest:
    said = {"operator": "Op", "source": "s", "batch": 4, "input_schema": SCHEMA, "known": b"k", **header}
    return rpb.ApplyRequest(header=rpb.ApplyHeader(**said), parts=parts)


def test_the_header_of_the_first_request_counts_for_the_shares_of_all() -> None:
    reader = ShareReader()
    (one,) = reader.shares_of(request([rpb.PartitionRows(partition=2, epoch=3, rows=b"a", last=True, after=1)]))
    (two,) = reader.shares_of(rpb.ApplyRequest(parts=[rpb.PartitionRows(partition=5, epoch=1, rows=b"b", last=True)]))
    batch = Batch("s", 4)
    assert one == Share(PartitionId("Op", 2), 3, replace(batch, known=b"k"), SCHEMA, b"a", 1)
    assert two == Share(PartitionId("Op", 5), 1, batch, SCHEMA, b"b", None)


def test_what_a_client_knows_goes_with_the_first_share_that_is_whole() -> None:
    rows = [(0, False), (1, True), (0, True)]
    shares = ShareReader().shares_of(
        request([rpb.PartitionRows(partition=number, epoch=1, last=last) for number, last in rows])
    )
    assert [(share.is_whole, share.batch.known) for share in shares] == [(False, b""), (True, b"k"), (True, b"")]


def test_every_word_of_a_header_reaches_the_batch() -> None:
    said = {"sparse": True, "watermark_us": -5, "event_us": 0, "rewind": True}
    attempt = {"run": "r", "use": "u", "task": "t", "call": "c"}
    (share,) = ShareReader().shares_of(
        request(
            [rpb.PartitionRows(last=True)],
            **said,
            attempt=rpb.Attempt(**attempt),
            session=rpb.SourceSession(generation_us=9, id="me"),
        )
    )
    assert share.batch == Batch("s", 4, **said, attempt=Attempt(**attempt), session=Session(9, "me"), known=b"k")


def test_a_stream_without_a_header_and_a_reserved_source_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="begins with its header"):
        ShareReader().shares_of(rpb.ApplyRequest())
    with pytest.raises(InvalidArgument, match="reserved name"):
        ShareReader().shares_of(request([], source="stateflow:migration"))
    with pytest.raises(InvalidArgument, match="not a valid"):
        ShareReader().shares_of(request([], operator="../up"))


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
