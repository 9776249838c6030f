"""Metrics of an agent and of its replicas."""

from __future__ import annotations

from stateflow.agent.agent import Figures, targets_of
from stateflow.clock import ManualClock
from stateflow.fleet import AgentInfo, Child, Spawned
from stateflow.metrics.figures import AGENT, FIGURES, Target
from stateflow.release import VERSION

INFO = AgentInfo("gw", "edge", "gw:1", cores=4, memory_bytes=8 << 30)


def test_of_its_replicas() -> None:
    clock = ManualClock()
    figures = Figures(clock)
    clock.advance(90)
    assert figures.of(INFO, [], 1)["stateflow_agent_controller_seconds"] == {(): 90.0}, "none was ever heard"
    figures.obeyed_at = clock.monotonic()
    clock.advance(7)
    figures.ends = 3
    children = [
        Child(Spawned("a", "gw", workers=2, memory_bytes=1 << 30), "RUNNING"),
        Child(Spawned("b", "gw", memory_bytes=2 << 30), "WAITS"),
        Child(Spawned("c", "gw", running=False, workers=7, memory_bytes=4 << 30), "STOPPED"),
    ]
    found = figures.of(INFO, children, 5)
    assert found == {
        "stateflow_info": {("agent", "gw", "edge", VERSION): 1},
        "stateflow_agent_replicas": {("running",): 1, ("waits",): 1, ("stopped",): 1},
        "stateflow_agent_replica_ends_total": {(): 3},
        "stateflow_agent_controller_seconds": {(): 7.0},
        "stateflow_agent_disk_free_bytes": {(): 5},
        "stateflow_agent_memory_bytes": {("all",): 8 << 30, ("promised",): 3 << 30},
        "stateflow_agent_cores": {("all",): 4, ("workers",): 3},
    }
    assert found.keys() == {"stateflow_info", *(each.name for each in AGENT)}
    assert all(len(labels) == len(FIGURES[name].labels) for name, values in found.items() for labels in values)


def test_where_figures_are_is_of_itself_and_of_replicas() -> None:
    assert targets_of(INFO, lambda: {"gw-0": "gw:3", "gw-0~1": "gw:4"}, "gw:2") == [
        Target("gw:2", {"agent": "gw", "site": "edge"}),
        Target("gw:3", {"replica": "gw-0", "agent": "gw", "site": "edge"}),
        Target("gw:4", {"replica": "gw-0~1", "agent": "gw", "site": "edge"}),
    ]
