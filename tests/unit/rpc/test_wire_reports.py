"""Reports cross the wire whole."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from google.protobuf.message import Message

from stateflow.errors import StateflowError, Unavailable
from stateflow.reports import (
    AutopilotReport,
    FollowerReport,
    JobReport,
    JobRun,
    JobStage,
    LackOfRoom,
    LeftPartition,
    MoveReport,
    PartitionFault,
    Placement,
    ProposedMove,
    Reconfiguration,
    RestoredPartition,
    Rolling,
    RollingNode,
    Sweep,
    SweepNode,
)
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.wire import message_of, value_of
from stateflow.status import (
    AdoptedOperator,
    ClusterReport,
    DeployingOperator,
    Deployment,
    LinkReport,
    MaintenanceReport,
    RefusedReplica,
    ReplicaStatus,
    StandbyReport,
    UnservedPartitions,
)
from stateflow.types import OperatorSpec, ReplicaInfo

SPEC = OperatorSpec(
    "Op", "m:Op", 3, ("k",), b"schema", "[]", (("late", b"s"),), (("old", 2),), "class Op", "ab", "cd", 9, "ef"
)
WHY = Unavailable("no answer", remedy="see it", replica="a")
A, B = ReplicaInfo("a", "cloud", "a:1", 2), ReplicaInfo("b", "edge", "b:1", 1)
MOVE = MoveReport(
    "r-1", 1, "a", "b", "ABORTED", "warm-up", 1, 2, 3, 4, 5, 6.5, 7.5, 8.5, "d", 9, 10, 11, WHY, 12.5, 13.5, 14.5,
    15.5, 16, 17, "a note", "a reason",
)  # fmt: skip
FOLLOWER = FollowerReport("b:7070", "a:7070", 0.5)
RECONFIGURATION = Reconfiguration(
    "r", "Op", "FAILED", (MOVE,), 20.5, "drain", "warm-up", 21, FOLLOWER, 4, 2, 1, 7.5, "admin/a"
)
STANDBY = StandbyReport("Op", 1, "b", "CATCHING_UP", 5)
UNSERVED = UnservedPartitions("Op", (0, 2), "a", WHY)
DEPLOYMENT = Deployment(SPEC, 4, (B, A, B), (1, 2, 3), (UNSERVED,), ("cloud", "edge"), FOLLOWER, "manual")
CLUSTER = ClusterReport(
    (ReplicaStatus("a", "cloud", "a:1", 2, None, 0.5, 3, True, True, 7),),  # unknown to a follower
    (DEPLOYMENT,),
    (RECONFIGURATION,),
    (STANDBY,),
    (RefusedReplica("a", "c:1", "0f", WHY, 2.5),),
    (DeployingOperator("New", 8, 3),),
    FOLLOWER,
    (MaintenanceReport("c", "rack", 7, 8),),
    (LinkReport("a", "b", 5.5, None), LinkReport("b", "a", None, 1e6)),
    (PartitionFault("Op", 3, "b", "state_damaged: it is"),),
)
RESTORED = RestoredPartition(1, "b", 2, 3, {"s": 4}, 5, (WHY,))
NOT_RESTORED = RestoredPartition(1, "b", fault=WHY)
PLACEMENT = Placement(
    (ProposedMove("Op", 1, "a", "b", "a has too much", 5),),
    *(2.5, 1.5, 3.5, 1.25, 4.5, 6.5),
    ("b",),
    (LeftPartition("Op", 2, "c has no room for it"),),
    (LackOfRoom(("b", "c"), 5, 6),),
)
RUN = JobRun(1, 2, 3, "FAILED", ("r",), "why", "j/1", (JobStage("Op", ("r",), "no room"),), FOLLOWER)
JOB = JobReport(
    *("j", "every 5", "migrate", "Op", ("load",), (1, 2), "edge", True, 5, (RUN,)),
    *("soft:5 site cloud", "hard label disk=ssd:2-4", FOLLOWER, "it cannot be read"),
)
ROLLING = Rolling("r", "FAILED", "edge", 2, (RollingNode("gw-0", "FAILED", "it died", 5),))
_SWEPT = SweepNode("gw-0", "FAILED", "it died", 5, 1, 2, 3, 4, 6, 7, (PartitionFault("Op", 1, "gw-0", "away", True),))
SWEEP = Sweep("s", "verify", "FAILED", "Op", "edge", 2, (_SWEPT, SweepNode("(moved)", "WAITING")))
ORDERS = AutopilotReport(("locality", "load"), 50.5, 30.5, 12.5)
ADOPTED = AdoptedOperator("Op", 4, (0,), (1,), (2, 3), ("two of them",), True)


def plain(value: Any) -> Any:
    """Makes a value comparable, as no error equals another one."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.to_wire() if isinstance(value, StateflowError) else value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (MOVE, cpb.Move),
        (RECONFIGURATION, cpb.Reconfiguration),
        (STANDBY, cpb.StandbyView),
        (ADOPTED, cpb.Adopted),
        (DEPLOYMENT, cpb.Deployment),
        (CLUSTER, cpb.StatusReply),
        (RESTORED, cpb.RestoredPartition),
        (NOT_RESTORED, cpb.RestoredPartition),
        (PLACEMENT, cpb.PlaceReply),
        (ORDERS, cpb.AutopilotOrders),
        (JOB, cpb.Job),
        (ROLLING, cpb.Rolling),
        (SWEEP, cpb.Sweep),
        (replace(ORDERS, max_pause_ms=None), cpb.AutopilotOrders),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_sent_is_what_is_told(value: Any, kind: type[Message]) -> None:
    message = message_of(kind, value)
    assert plain(value_of(type(value), kind.FromString(message.SerializeToString()))) == plain(value)


@pytest.mark.parametrize(
    "value",
    [MOVE, RECONFIGURATION, STANDBY, ADOPTED, DEPLOYMENT, CLUSTER, PLACEMENT, ORDERS, JOB, ROLLING, SWEEP],
    ids=lambda value: type(value).__name__,
)
def test_no_field_is_left_out_of_that_test(value: Any) -> None:
    for each in fields(value):
        assert getattr(value, each.name) not in (each.default, None, 0, "", ()), each.name


def test_machines_are_told_an_error_by_its_line() -> None:
    line = "unavailable: no answer (replica=a): see it"
    assert RECONFIGURATION.to_dict()["moves"][0]["error"] == line == MOVE.error
    assert "fault" not in MOVE.to_dict()
    assert (RESTORED.to_dict()["passed_over"], RESTORED.to_dict()["error"]) == ((line,), "")
    assert RESTORED.passed_over == (line,)


def test_users_see_a_cluster_without_what_only_routers_need() -> None:
    status = CLUSTER.status()
    assert status.operators[0].owners == ("b", "a", "b")
    assert status.to_dict()["operators"][0] == {
        "name": "Op",
        "target": "m:Op",
        "partitions": 3,
        "version": 4,
        "owners": ("b", "a", "b"),
        "epochs": (1, 2, 3),
        "unserved": ({"operator": "Op", "partitions": (0, 2), "owner": "a", "error": str(WHY)},),
        "sites": ("cloud", "edge"),
        "failover": "manual",
    }
    assert DEPLOYMENT.why_unserved() == {0: WHY, 2: WHY}
