"""Messages between agents and controllers arrive unchanged."""

from __future__ import annotations

import pytest

from stateflow.errors import InvalidArgument, Unavailable
from stateflow.fleet import AgentInfo, Beat, Child, DesiredState, Directory, Request, Spawned
from stateflow.reports import AgentReport
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc.fields import checked
from stateflow.rpc.wire import message_of, value_of

INFO = AgentInfo("gw", "edge", "gw:1", {"disk": "ssd"}, 4, 8 << 30, 1 << 40, "0.1.0", "3.11.7", "rlimit")
RUNS = Spawned("gw-0", "gw", True, 3, 2, 5, 1 << 30)
STOPPED = Spawned("gw-1", "gw", False, 2)
DIED = Child(RUNS, "WAITS", 2, Unavailable("it ended", remedy="see why"), "")


def test_beats_orders_and_requests() -> None:
    beat = Beat(INFO, Directory("d", "here/1", "ledger"), "i", 5, (DIED, Child(STOPPED, "STOPPED")), 7)
    back = value_of(Beat, checked(message_of(cpb.AgentBeatRequest, beat)))
    assert str(back.children[0].fault) == str(DIED.fault)
    assert back.children[0].spawned == RUNS
    assert (back.agent, back.directory, back.term, back.children[1]) == (INFO, beat.directory, 7, beat.children[1])
    orders = DesiredState(10.0, (RUNS, STOPPED), "ledger", 7, "lost", 0.5)
    assert value_of(DesiredState, checked(message_of(cpb.AgentBeatReply, orders))) == orders
    request = Request("edge", 3, 2, 5, 1 << 30, {"disk": "ssd"})
    assert value_of(Request, checked(message_of(cpb.SpawnRequest, request))) == request


def test_a_report_has_what_is_wanted_and_what_is_there() -> None:
    gone = Child(Spawned("gw-2", "gw"), "STOPPING")
    view = message_of(
        cpb.AgentView,
        agent=INFO,
        alive=True,
        last_heartbeat_s=0.5,
        disk_free_bytes=77,
        wanted=[RUNS, STOPPED],
        children=[DIED, gone],
    )
    report = value_of(AgentReport, checked(view))
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
