"""Outcomes of commands on operators and nodes: what they print, and the status with which they end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from stateflow.cli import cluster
from stateflow.cli.app import app
from stateflow.errors import Unavailable
from stateflow.reports import MoveReport, Reconfiguration


class Begun:
    """A takeover of one partition that has ended."""

    def __init__(self, state: str, **said: Any) -> None:
        move = MoveReport("m1", 3, "edge-0", "cloud-0", state, "takeover", **said)
        self.report = Reconfiguration(
            "r1", "Pumps", "COMPLETED" if state == "COMPLETED" else "FAILED", (move,), 0.0, kind="failover"
        )

    def wait(self) -> Reconfiguration:
        return self.report


@pytest.mark.parametrize(
    ("begun", "status", "said"),
    [
        ([Begun("COMPLETED", note="from its standby copy")], 0, ["COMPLETED: from its standby copy"]),
        (
            [
                Begun("COMPLETED"),
                Begun("ABORTED", note="a note", fault=Unavailable("nobody is left", remedy="start one")),
            ],
            1,
            ["COMPLETED", "ABORTED: unavailable: nobody is left: start one"],
        ),
    ],
)
def test_a_takeover_that_failed_says_why_and_is_status_1(
    begun: list[Begun], status: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed takeover used to end with status 0, without its error."""

    class Cluster:
        def __init__(self, _: str) -> None: ...
        def take_over(self, *_: Any, **__: Any) -> list[Begun]:
            return begun

    monkeypatch.setattr(cluster, "Cluster", Cluster)
    done = CliRunner().invoke(app, ["takeover", "Pumps", "--accept-loss"])
    assert done.exit_code == status
    assert done.stdout.splitlines() == [f"partition 3: edge-0 to cloud-0, {each}" for each in said]
    done = CliRunner().invoke(app, ["takeover", "Pumps", "--accept-loss", "--json"])
    assert done.exit_code == status
    assert len(json.loads(done.stdout)["reconfigurations"]) == len(begun)
