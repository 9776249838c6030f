"""The controller's report of its replicas."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reconfig.controller import steps
from reconfig.controller.controller import StatusReporter
from reconfig.controller.folds import Home
from stateflow.clock import ManualClock
from stateflow.fleet import AgentInfo, Child, Spawned
from stateflow.ledger import Ledger
from stateflow.types import ReplicaInfo
from tests.writing import Written, write


@pytest.mark.parametrize(
    ("running", "state", "alive"), [(True, "RUNNING", True), (False, "STOPPING", True), (False, "STOPPED", False)]
)
def test_a_replica_has_ended_when_its_agent_says_so(tmp_path: Path, running: bool, state: str, alive: bool) -> None:
    """A replica has ended once its agent says so.

    It used to be "stopping" for as long as its last heartbeat counted.
    """
    with Ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        cluster = Written(ledger)
        agent = AgentInfo("agent", "edge", "a:1", {}, 1, 1, 1, "1", "3", "rlimit")
        write(cluster, steps.register_agent, agent, Home("d", "here"))
        write(cluster, steps.register, ReplicaInfo("r", "edge", "r:1"), Home())
        spawned = Spawned("r", "agent", running=running)
        write(cluster, steps.spawn, [spawned])
        members = SimpleNamespace(
            alive=lambda _: True, heard_s=lambda _: 0.5, is_opening=lambda _: False, version=lambda _: ""
        )
        names = SimpleNamespace(refused=list)
        context: Any = SimpleNamespace(cluster=cluster, members=members, clock=ManualClock(1), names=names)
        measuring: Any = SimpleNamespace(room_bytes=dict, links=tuple)
        runs: Any = SimpleNamespace(running={})
        standbys: Any = SimpleNamespace(views=list)
        nothing: Any = None
        deployments: Any = SimpleNamespace(created={}, trials={})
        children = {"r": Child(spawned, state, 0, None, "")}
        (said,) = (
            StatusReporter(context, runs, standbys, nothing, deployments, measuring, children.get).status().replicas
        )
        assert (said.alive, said.stopped) == (alive, not running)
