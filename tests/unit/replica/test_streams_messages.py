"""Messages between controllers and replicas cross the wire whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from stateflow.errors import MoveUnknown, StateflowError
from stateflow.partition.control import (
    Cancellation,
    Cancelled,
    Command,
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
    Wanted,
)
from stateflow.reports import CheckpointReport, Taken
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import reports as wire
from stateflow.types import How, OperatorSpec, PartitionId, ReplicaInfo

SPEC = OperatorSpec("Op", "m:Op", 3, ("k",), b"schema", "[]")
P, B = PartitionId("Op", 2), ReplicaInfo("b", "edge", "b:1", 2)
WHY = MoveUnknown("it is gone", remedy="start a new one", move="m")
COMMAND = Command("a-ledger", 5, "a-session")
INCOMING = Preparation("m", SPEC, P, B, 3, 4.5, True, True, 6)
NUMBERS = {field.name: number for number, field in enumerate(fields(Progress), 1)}
PROGRESS = Progress(**{**NUMBERS, "phase": Phase.OWNED, "digest": "d", "fault": WHY})  # type: ignore[arg-type]
FENCE = Fence(P, "m", 4, B, COMMAND, True, 1.5, 2.5, "s")
TAKE_OVER = TakeOver(SPEC, P, "t", 4, How.LOCAL, COMMAND, "s", 3)
RESTORE = Restore("r", SPEC, P, 4, "file:///s", Wanted("named", "source", 7), True)


def plain(value: Any) -> Any:
    """Makes a value comparable, as no error equals another one."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.to_wire() if isinstance(value, StateflowError) else value


def commanded(to_pb: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Adds the command to a message, as callers do."""

    def sent(value: Any) -> Any:
        message = to_pb(value)
        assert not message.HasField("command")
        message.command.CopyFrom(wire.command_to_pb(value.command))
        return message

    return sent


@pytest.mark.parametrize(
    ("value", "to_pb", "of"),
    [
        (INCOMING, lambda move: wire.preparation_to_pb(move, "s"), wire.preparation_of),
        *((replace(PROGRESS, phase=phase), wire.progress_to_pb, wire.progress_of) for phase in Phase),
        (Progress(), wire.progress_to_pb, wire.progress_of),
        (FENCE, commanded(wire.fence_to_pb), wire.fence_of),
        (Fenced(2.5), wire.fenced_to_pb, wire.fenced_of),
        (Fenced(refused=WHY), wire.fenced_to_pb, wire.fenced_of),
        (Cancellation(P, "m", 3), wire.cancellation_to_pb, wire.cancellation_of),
        (Cancelled(True, True, 4), wire.cancelled_to_pb, wire.cancelled_of),
        *((replace(TAKE_OVER, how=how), commanded(wire.takeover_to_pb), wire.takeover_of) for how in How),
        (TakenOver(4, 5, {"s": 6}, Origin(1, 2, 3)), wire.taken_over_to_pb, wire.taken_over_of),
        (TakenOver(4, 5, {"s": 6}), wire.taken_over_to_pb, wire.taken_over_of),
        (Taken(CheckpointReport(2, 3, 4, 5.5, "file:///s"), (1, 2)), wire.taken_to_pb, wire.taken_of),
        (RESTORE, lambda restore: wire.restore_to_pb(restore, own=True), wire.restore_of),
        (Restored(4, 5, {"s": 6}, 7, [WHY]), wire.reply_of_restore_to_pb, wire.reply_of_restore),
    ],
    ids=lambda value: type(value).__name__ if is_dataclass(value) else "",
)
def test_what_is_sent_is_what_is_understood(value: Any, to_pb: Callable[[Any], Any], of: Callable[[Any], Any]) -> None:
    message = to_pb(value)
    assert plain(of(type(message).FromString(message.SerializeToString()))) == plain(value)


@pytest.mark.parametrize(
    "value", [INCOMING, PROGRESS, FENCE, TAKE_OVER, RESTORE, COMMAND], ids=lambda value: type(value).__name__
)
def test_no_field_is_left_out_of_that_test(value: Any) -> None:
    for each in fields(value):
        assert getattr(value, each.name) not in (each.default, None, 0, "", ()), each.name


def test_what_is_beside_a_value_in_its_request() -> None:
    assert wire.preparation_to_pb(INCOMING, "s").standby_move == "s"
    assert [wire.restore_to_pb(RESTORE, own).own for own in (False, True)] == [False, True]
    assert wire.command_to_pb(COMMAND) == pb.Command(ledger="a-ledger", term=5, session="a-session")
