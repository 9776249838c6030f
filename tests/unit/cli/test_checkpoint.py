"""What `stateflow checkpoint` says of several operators."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from stateflow.cli import checkpoint
from stateflow.client import RestoredPartition
from stateflow.errors import MoveConflict


def test_an_operator_that_is_refused_keeps_none_behind_it_from_being_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cluster:
        def __init__(self, _: str) -> None: ...
        def status(self) -> Any:
            return SimpleNamespace(operators=[SimpleNamespace(name=name) for name in ("A", "B", "C")])

        def restore(self, name: str, *_: Any, **__: Any) -> list[RestoredPartition]:
            if name == "B":
                raise MoveConflict("it moves", remedy="wait")
            return [RestoredPartition(0, "r", 2, 7, {"s": 3}, 10)]

    monkeypatch.setattr(checkpoint, "Cluster", Cluster)
    found = CliRunner().invoke(checkpoint.app, ["restore", "all"])
    assert found.exit_code == 1
    assert [line.split()[0] for line in found.stdout.splitlines() if "restored" in line] == ["A", "C", "B"]
    assert "B was not restored: move_conflict: it moves: wait" in found.stdout
    told = json.loads(CliRunner().invoke(checkpoint.app, ["restore", "all", "--json"]).stdout)
    assert [each["operator"] for each in told["partitions"]] == ["A", "C"]
    assert [(each["operator"], each["code"]) for each in told["refused"]] == [("B", "move_conflict")]
