"""Launchers of processes all follow one protocol."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stateflow.agent.processes import LocalLauncher
from stateflow.fleet import Command, Launcher, heard
from stateflow.local.process import ForkLauncher

LAUNCHERS = [LocalLauncher(), LocalLauncher(rotates=False), *([ForkLauncher()] if sys.platform == "linux" else [])]


@pytest.mark.processes
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["rotating", "local", "forked"][: len(LAUNCHERS)])
@pytest.mark.thorough
def test_processes_are_started_and_ended_alike(launcher: Launcher, tmp_path: Path) -> None:
    arguments = ["controller", "--listen", "127.0.0.1:0", "--ledger", f"sqlite:///{tmp_path / 'ledger.db'}", "--json"]
    command = Command("c", [*arguments, "--stop-with-parent"], dict(os.environ), tmp_path / "c.log")
    for end in (launcher.stop, launcher.kill):
        started = launcher.start(command)
        assert started.process.stdout is not None
        assert "address" in started.process.stdout.readline()
        assert launcher.is_running(started)
        while b"ledger " not in b"".join(launcher.logs(started)):  # the line is still in a pipe
            assert launcher.is_running(started)
        end(started)
        started.process.wait(30)
        assert not launcher.is_running(started)
        end(started)  # ending an ended process does nothing
        for pipe in (started.process.stdin, started.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.mark.processes
def test_a_process_that_prints_what_is_no_text_says_nothing(tmp_path: Path) -> None:
    within = [sys.executable, "-c", r"import sys; sys.stdout.buffer.write(b'caf\xe9\n')"]
    started = LocalLauncher().start(Command("r", [], dict(os.environ), tmp_path / "r.log", within))
    assert started.process.stdout is not None
    assert heard(started.process.stdout.readline()) is None
    assert started.process.wait(30) == 0
    for pipe in (started.process.stdin, started.process.stdout):
        assert pipe is not None
        pipe.close()
