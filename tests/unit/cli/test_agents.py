"""Outcomes of commands to agents, and the status with which they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from stateflow.cli import agents
from stateflow.cli.app import app
from stateflow.client import Spawning, commands
from stateflow.errors import Unavailable
from stateflow.fleet import Spawned
from stateflow.reports import ChildReport, Rolling, RollingNode


class Roll:
    """A rolling restart that has failed at its first node."""

    id = "7"
    report = Rolling("7", "FAILED", "", 1, (RollingNode("edge-0", "FAILED", "it died"),))

    def progress(self) -> Iterator[Rolling]:
        yield self.report


def test_a_rolling_restart_that_failed_is_one_json_object_or_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error used to follow the report as a second object."""

    class Cluster:
        def __init__(self, _: str) -> None: ...
        def restart_all(self, *_: Any, **__: Any) -> Roll:
            return Roll()

    monkeypatch.setattr(agents, "Cluster", Cluster)
    done = CliRunner().invoke(app, ["restart", "--all", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout) == json.loads(json.dumps(Roll.report.to_dict()))
    assert done.stderr == ""
    done = CliRunner().invoke(app, ["restart", "--all"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "move_aborted: edge-0 was not restarted: it died: see `stateflow batch info roll/7`" in done.stderr


@pytest.mark.parametrize(("runs", "status"), [(1, 0), (2, 1)])
def test_only_deaths_of_the_commanded_run_fail_the_command(
    monkeypatch: pytest.MonkeyPatch, runs: int, status: int
) -> None:
    fault = Unavailable("its process exited with status 1", remedy="see its log")
    dies = ChildReport("a-0", "running", "WAITS", generation=2, runs=runs, deaths=5, fault=fault)
    reports = iter([dies, ChildReport("a-0", "running", "RUNNING", generation=2, runs=2, address="host:1")])
    client: Any = SimpleNamespace(
        agents=lambda: [SimpleNamespace(replicas=[next(reports)])],
        status=lambda: SimpleNamespace(replicas=[SimpleNamespace(name="a-0", alive=True, address="host:1")]),
    )
    begun = Spawning(client, [Spawned("a-0", "a", generation=2)])
    monkeypatch.setattr(commands, "sleep", lambda _: None)
    monkeypatch.setattr(agents, "Cluster", lambda _: SimpleNamespace(restart_replica=lambda _: begun))
    done = CliRunner().invoke(app, ["restart", "a-0"])
    assert done.exit_code == status, done.output
