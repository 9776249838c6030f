"""``stateflow init``, and the steps that the new project's README goes on with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ROOT = str(Path(__file__).parents[2])


def test_it_runs_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": ROOT, "STATEFLOW_EMBEDDED_REPLICAS": "2"}

    def call(*words: str, cwd: Path = tmp_path) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    assert "cd alarms" in call("stateflow", "init", "alarms")
    project = tmp_path / "alarms"
    assert "2 passed" in call("pytest", "-p", "no:cacheprovider", cwd=project)
    call("mypy", "--ignore-missing-imports", "ops.py", cwd=project)
    shown = call("stateflow", "run", "pipeline.yml", "--once", cwd=project)
    alarms = [line for line in shown.splitlines() if line.endswith("true|") or "| true|" in line]
    assert ["boiler" in alarms[0], "office" in alarms[1]] == [True, True]
    assert len(alarms) == 2
    (project / "readings-2.csv").write_text("sensor,celsius\nboiler,80.5\nnew,80.5\n")
    shown = call("stateflow", "run", "pipeline.yml", "--once", cwd=project)
    (alarm,) = [line for line in shown.splitlines() if "true|" in line]
    assert "boiler" in alarm, "what is usual for it is still known"
    doctor = call("stateflow", "doctor", cwd=project)
    assert "Java" in doctor
