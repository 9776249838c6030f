"""Messages between controllers and replicas cross the wire whole."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from google.protobuf.message import Message

from stateflow.errors import InvalidArgument, MoveUnknown, StateflowError
from stateflow.partition.change_feed import BaseFile, Seal, SnapshotInfo
from stateflow.partition.control import (
    Cancellation,
    Cancelled,
    Command,
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
from stateflow.partition.layout import Session
from stateflow.partition.lifecycle import State
from stateflow.reports import CheckpointReport, Taken
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import message_of, value_of
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


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (INCOMING, rpb.PrepareRequest),
        *((replace(PROGRESS, phase=phase), rpb.MoveProgress) for phase in Phase),
        (Progress(), rpb.MoveProgress),
        (FENCE, rpb.FenceRequest),
        (Fenced(2.5), rpb.FenceReply),
        (Fenced(refused=WHY), rpb.FenceReply),
        (Cancellation(P, "m", 3), rpb.CancelRequest),
        (Cancelled(True, True, 4), rpb.FenceReply),
        *((replace(TAKE_OVER, how=how), rpb.TakeOverRequest) for how in How),
        (TakenOver(4, 5, {"s": 6}, Origin(1, 2, 3)), rpb.TakeOverReply),
        (TakenOver(4, 5, {"s": 6}), rpb.TakeOverReply),
        (Taken(CheckpointReport(2, 3, 4, 5.5, "file:///s"), (1, 2)), rpb.CheckpointReply),
        (RESTORE, rpb.RestoreRequest),
        (Restored(4, 5, {"s": 6}, 7, [WHY]), rpb.RestoreReply),
        (Verification(4, 5, True, 6, 7, "d", [WHY]), rpb.VerifyPage),
        (PartitionView(P, State.OWNED, 4, 5, "m", 1.5, 6, 7, 8, {"edge": 9}, 0), rpb.PartitionView),
        (PartitionView(P, State.SEALED, 4, 5), rpb.PartitionView),
        (SnapshotInfo("s", 5, 4, "d", (BaseFile("f", 1, "e"), BaseFile("g", 0, "e")), "k"), rpb.SnapshotReply),
        (Seal("m", 4, 5, "d", 6, B), rpb.Seal),
        (Seal("m", 4, 5, "d", 6), rpb.Seal),
        (Session(4, "s"), rpb.SourceSession),
        (SPEC, pb.OperatorSpec),
    ],
    ids=lambda value: type(value).__name__ if is_dataclass(value) else "",
)
def test_what_is_sent_is_what_is_understood(value: Any, kind: type[Message]) -> None:
    message: Any = message_of(kind, value)
    if hasattr(value, "command"):  # its sender adds it
        assert not message.HasField("command")
        message.command.CopyFrom(message_of(pb.Command, value.command))
    assert plain(value_of(type(value), kind.FromString(message.SerializeToString()))) == plain(value)


@pytest.mark.parametrize(
    "value", [INCOMING, PROGRESS, FENCE, TAKE_OVER, RESTORE, COMMAND], ids=lambda value: type(value).__name__
)
def test_no_field_is_left_out_of_that_test(value: Any) -> None:
    for each in fields(value):
        assert getattr(value, each.name) not in (each.default, None, 0, "", ()), each.name


def test_what_is_beside_a_value_in_its_request() -> None:
    request = message_of(rpb.PrepareRequest, INCOMING, standby_move="s", source=replace(B, name="c"))
    assert (request.standby_move, request.source.name, request.move_id) == ("s", "c", "m")
    assert [message_of(rpb.RestoreRequest, RESTORE, own=own).own for own in (False, True)] == [False, True]
    assert value_of(Preparation, request, standby=False) == replace(
        INCOMING, source=replace(B, name="c"), standby=False
    )
    assert message_of(pb.Command, COMMAND) == pb.Command(ledger="a-ledger", term=5, session="a-session")


def test_a_state_that_this_release_does_not_know_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'odd' is not a partition state"):
        value_of(PartitionView, rpb.PartitionView(operator="Op", state="odd"))


def test_a_base_that_has_a_file_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a base has a file twice"):
        value_of(SnapshotInfo, rpb.SnapshotReply(files=[rpb.BaseFile(name="f"), rpb.BaseFile(name="f")]))
