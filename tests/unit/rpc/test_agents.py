"""Messages between agents and controllers arrive unchanged."""

from __future__ import annotations

import pytest

from stateflow.errors import InvalidArgument, Unavailable
from stateflow.fleet import AgentInfo, Beat, Child, DesiredState, Directory, Request, Spawned
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.agents import (
    beat_of,
    beat_to_pb,
    desired_state_of,
    desired_state_to_pb,
    report_of,
    request_of,
    request_to_pb,
    view_to_pb,
)
from stateflow.rpc.fields import checked

INFO = AgentInfo("gw", "edge", "gw:1", {"disk": "ssd"}, 4, 8 << 30, 1 << 40, "0.1.0", "3.11.7", "rlimit")
RUNS = Spawned("gw-0", "gw", True, 3, 2, 5, 1 << 30)
STOPPED = Spawned("gw-1", "gw", False, 2)
DIED = Child(RUNS, "WAITS", 2, Unavailable("it ended", remedy="see why"), "")


def test_beats_orders_and_requests() -> None:
    beat = Beat(INFO, Directory("d", "here/1", "ledger"), "i", 5, (DIED, Child(STOPPED, "STOPPED")), 7)
    back = beat_of(checked(beat_to_pb(beat)))
    assert str(back.children[0].fault) == str(DIED.fault)
    assert back.children[0].spawned == RUNS
    assert (back.agent, back.directory, back.term, back.children[1]) == (INFO, beat.directory, 7, beat.children[1])
    orders = DesiredState(10.0, (RUNS, STOPPED), "ledger", 7, "lost", 0.5)
    assert desired_state_of(checked(desired_state_to_pb(orders))) == orders
    request = Request("edge", 3, 2, 5, 1 << 30, {"disk": "ssd"})
    assert request_of(checked(request_to_pb(request))) == request


def test_a_report_has_what_is_wanted_and_what_is_there() -> None:
    gone = Child(Spawned("gw-2", "gw"), "STOPPING")
    report = report_of(checked(view_to_pb(INFO, True, 0.5, 77, [RUNS, STOPPED], [DIED, gone])))
    assert (report.name, report.labels, report.disk_free_bytes, report.limits) == ("gw", {"disk": "ssd"}, 77, "rlimit")
    assert [(each.replica, each.wanted, each.state, each.runs) for each in report.replicas] == [
        ("gw-0", "running", "WAITS", 3),
        ("gw-1", "stopped", "", 0),
        ("gw-2", "", "STOPPING", 1),
    ]
    assert report.replicas[0].error.startswith("unavailable: it ended")


@pytest.mark.parametrize("field", [{"at": "../x"}, {"at": "edge", "count": 0}, {"at": "edge", "labels": {"a\nb": "c"}}])
def test_what_cannot_be_is_refused_at_the_door(field: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        checked(cpb.SpawnRequest(**{"count": 1, "workers": 1, "weight": 1, **field}))
