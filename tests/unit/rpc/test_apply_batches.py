"""A batch as messages of a call, and the meaning of its answers: each partition is reported once."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.errors import NotOwner, StateflowError, Unavailable
from stateflow.operator.arrow import read_batch
from stateflow.partition.positions import Batch
from stateflow.rpc import apply
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.apply import PASSED, Answer, Answers, Replies, requests_of
from stateflow.rpc.faults import fault_of
from tests.applying import WORD, words

FAULT = NotOwner("it went", remedy="refresh")


def told(*responses: rpb.ApplyResponse, partitions: tuple[int, ...] = (0, 1)) -> Answers:
    found: Answers = []
    replies = Replies("there:1", partitions, found.extend)
    for response in responses:
        replies.came(response)
    return found


def result(partition: int, output: bytes = b"", last: bool = True) -> rpb.PartitionResult:
    return rpb.PartitionResult(partition=partition, output=output, last=last, operator_us=3, commit_us=4)


def test_rows_cross_in_pieces_and_the_last_message_says_so() -> None:
    rows = words({0: bytes(10), 1: b"", 2: b"other", 3: b"not sent"})
    found = list(requests_of("Op", Batch("s", 3), rows, [(0, 1), (2, 4), (1, 2)], 60, {1: 2}))
    assert [request.last for request in found] == [False] * (len(found) - 1) + [True]
    assert [request.HasField("header") for request in found] == [True] + [False] * (len(found) - 1)
    assert [partition for request in found for partition in request.partitions] == [0, 1, 2]
    assert sum(bool(request.partitions) for request in found) > 1, "messages of rows of their own"
    assert [epoch for request in found for epoch in request.epochs] == [1, 2, 4]
    assert [after for request in found for after in request.afters] == [-1, 2, -1]
    assert all(len(request.rows) <= 60 for request in found)
    messages: list[bytes] = [b""]
    for request in found:
        messages[-1] += request.rows
        messages += [b""] * (not request.more and not request.last)
    read = [word for message in messages for word in read_batch(message, WORD)["word"].to_pylist()]
    assert read == [bytes(10), b"other"]


def test_a_small_batch_is_one_message() -> None:
    rows = words(dict.fromkeys(range(50), b"w"))
    (request,) = requests_of("Op", Batch("s", 3), rows, [(number, 1) for number in range(50)], 1 << 20)
    assert (request.last, request.more, list(request.counts), len(request.afters)) == (True, False, [1] * 50, 0)


def test_outputs_are_joined() -> None:
    came = [
        rpb.ApplyResponse(call=1, results=[result(1, b"x"), result(0, b"a", False)]),
        rpb.ApplyResponse(call=1, results=[result(0, b"b")], last=True),
    ]
    assert told(*came) == [(1, Answer(b"x", False, 3, 4)), (0, Answer(b"ab", False, 3, 4))]


def test_a_fault_of_a_partition_is_its_own_and_that_of_a_call_is_of_all_that_are_left() -> None:
    of_one = rpb.PartitionResult(partition=0, fault=fault_of(FAULT))
    ((partition, error), *others) = told(rpb.ApplyResponse(call=1, results=[of_one]))
    assert (partition, str(error), others) == (0, str(FAULT), [])
    found = told(rpb.ApplyResponse(call=1, results=[result(1)], fault=fault_of(FAULT), last=True))
    assert found[0] == (1, Answer(b"", False, 3, 4))
    assert [(number, str(error)) for number, error in found[1:]] == [(0, str(FAULT))]


def test_a_call_that_ends_without_an_answer_is_sent_again() -> None:
    found = told(rpb.ApplyResponse(call=1, results=[result(1)], last=True))
    assert isinstance(found[1][1], Unavailable)


def test_what_was_not_asked_for_is_not_told_of() -> None:
    assert told(rpb.ApplyResponse(call=1, results=[result(7), result(0), result(0, b"again")])) == [
        (0, Answer(b"", False, 3, 4))
    ]


def test_an_answer_that_cannot_be_ends_the_call() -> None:
    found = told(rpb.ApplyResponse(call=1, results=[result(1 << 31)]))
    errors = [error for _, error in found]
    assert all(isinstance(error, StateflowError) and "invalid answer from" in str(error) for error in errors)
    assert [number for number, _ in found] == [0, 1]


def test_partitions_that_the_batch_passed_give_nothing() -> None:
    came = rpb.ApplyResponse(call=1, passed=[1, 7, 1], results=[result(0)], last=True)
    assert told(came) == [(1, PASSED), (0, Answer(b"", False, 3, 4))]


@pytest.mark.parametrize("pieces", [[b""], [bytes(60), bytes(60)]], ids=["empty", "full"])
def test_an_output_without_end_ends_its_partition_alone(pieces: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "JOINED_BYTES_MAX", 100)
    endless = [rpb.ApplyResponse(call=1, results=[result(0, piece, False)]) for piece in pieces]
    found = told(*endless, rpb.ApplyResponse(call=1, results=[result(1, bytes(60), False), result(1, b"x")], last=True))
    (partition, error), other = found
    assert (partition, str(error)) == (0, str(Unavailable(error.what, remedy=error.remedy)))  # type: ignore[union-attr]
    assert "its output does not end" in str(error)
    assert other == (1, Answer(bytes(60) + b"x", False, 3, 4))


def test_answers_that_come_while_the_call_is_given_up_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread gave up a silent stream while an answer of it came: partitions of that answer were never reported.

    Their batch then waited as long as other batches kept the replica from being silent.
    """
    given_up = Unavailable("it has been silent", remedy="-")

    class Late:
        """The result of partition 1. The call is given up while it is read."""

        partition, last, replayed, operator_us, commit_us = 1, True, False, 3, 4

        def HasField(self, _: str) -> bool:
            return False

        @property
        def output(self) -> bytes:
            replies.broke(given_up)
            return b"y"

    monkeypatch.setattr(apply, "answered", lambda *_: None)
    found: Answers = []
    replies = Replies("there:1", (0, 1, 2), found.extend)
    came: Any = SimpleNamespace(results=[result(0, b"x"), Late()], passed=(), last=True, HasField=lambda _: False)
    with suppress(KeyError):  # the stream's thread reports what is raised here to those that are left
        replies.came(came)
    assert sorted(partition for partition, _ in found) == [0, 1, 2]
    assert dict(found)[0] == Answer(b"x", False, 3, 4)
