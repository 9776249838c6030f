"""Promises of the benchmark suite itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import suite
from benchmarks.record import Correctness, Record
from benchmarks.results import keep, read

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
    monkeypatch.setattr(suite, "RESULTS", tmp_path / "results.jsonl")
    began = time.monotonic()
    assert suite._run("spark", "T1", quick=True, seed=1) is False
    assert time.monotonic() - began < suite.GRACE_S, "it was not waited out"
    assert program.with_suffix(".begun").exists()
    assert program.with_suffix(".tidied").exists()
    assert "benchmark_too_slow: spark T1 took over 10 s" in capfd.readouterr().err
    assert read(suite.RESULTS)[0]["failures"] == ["took over 10 s"]


class Ended:
    """A process of an experiment. It runs ``work``, and then ends with ``status``; None: it does not end by itself."""

    def __init__(self, status: int | None, work: Callable[[], None]) -> None:
        self._status, self._work = status, work

    def __call__(self, command: Sequence[str], **_: Any) -> Ended:
        return self

    def send_signal(self, signal: int) -> None:
        self._status = 1

    def wait(self, timeout: float) -> int:
        self._work()
        if self._status is None:
            raise subprocess.TimeoutExpired("experiment", timeout)
        return self._status


@pytest.mark.parametrize(
    ("status", "keeps", "failures"),
    [
        (0, True, [[]]),
        (1, True, [[]]),  # its own record says what failed
        (1, False, [["ended with status 1 and without a record"]]),
        (-9, False, [["ended with status -9 and without a record"]]),
        (None, False, [["took over 600 s"]]),
    ],
)
def test_every_experiment_has_a_record(
    status: int | None, keeps: bool, failures: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.jsonl"
    record = Record("S1", {}, [], Correctness(0, 0, 0, True), {}, 1)
    monkeypatch.setattr(suite, "RESULTS", results)
    process = Ended(status, lambda: keep("plan", record, results) if keeps else None)
    stand_in = SimpleNamespace(Popen=process, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(suite, "subprocess", stand_in)
    assert suite._run("plan", "S1", quick=True, seed=7) is (status == 0)
    found = read(results)
    assert [each["failures"] for each in found] == failures
    assert [(each["benchmark"], each["experiment"]) for each in found] == [("plan", "S1")]
    if not keeps:
        assert (found[0]["seed"], found[0]["settings"]["quick"]) == (7, True)
