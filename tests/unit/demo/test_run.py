"""Start of a demo: it leaves alone the folder that another demo runs on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stateflow.demo.run import DemoOptions, run_demo
from stateflow.errors import DataDirLocked
from stateflow.node import workers
from stateflow.node.workers import claim_node


def test_a_demo_leaves_alone_what_another_one_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "KILL_AFTER_S", 0.0)
    monkeypatch.setenv("STATEFLOW_REPLICA_STOP_TIMEOUT_S", "0.1")
    there = tmp_path / "work" / "cluster" / "LGA-0"
    with claim_node(there), pytest.raises(DataDirLocked) as caught:
        run_demo(DemoOptions(tmp_path), tell_stderr=True)
    assert caught.value.where == {"path": there, "pid": str(os.getpid())}
    assert (there / "NODE").exists()
