"""Outcomes of commands to agents, and the status with which they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from stateflow.cli import agents
from stateflow.cli.app import app
from stateflow.reports import Rolling, RollingNode


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
