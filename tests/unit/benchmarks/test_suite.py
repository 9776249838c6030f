"""Promises of the benchmark suite itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from benchmarks import suite

#: stands for an experiment that runs long, and tidies up when it is told to end
TIDY = """#!{python}
import sys, time
from pathlib import Path
begun, tidied = Path(__file__).with_suffix(".begun"), Path(__file__).with_suffix(".tidied")
try:
    begun.touch()
    time.sleep(600)
finally:
    tidied.touch()
"""


@pytest.mark.thorough
def test_an_experiment_that_takes_too_long_takes_its_processes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program"
    program.write_text(TIDY.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(suite, "LIMIT_QUICK_S", 10.0)
    began = time.monotonic()
    assert suite._run("spark", "T1", quick=True, seed=1) is False
    assert time.monotonic() - began < suite.GRACE_S, "it was not waited out"
    assert program.with_suffix(".begun").exists()
    assert program.with_suffix(".tidied").exists()
    assert "benchmark_too_slow: spark T1 took over 10 s" in capfd.readouterr().err
