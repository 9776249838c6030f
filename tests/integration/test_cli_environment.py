"""Faults of a command's environment: any command says one line and ends with the right status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

PIPELINE = """\
name: flights
cluster: localhost:1
source: {format: rate}
operators: [{operator: "ops:Delay"}]
sink: {format: console, checkpoint: /tmp/checkpoint}
"""


def stateflow(*arguments: str, cwd: Path, out: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stateflow", *arguments],
        cwd=cwd,
        env={"STATEFLOW_CLIENT_CONNECT_TIMEOUT_S": "0", **os.environ},  # no controller is started meanwhile
        stdout=out,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        timeout=600,
        check=False,
    )


def one_line(done: subprocess.CompletedProcess[str], status: int = 1) -> str:
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "a bug in stateflow" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("run", "ok.yml", "--print"), ("run", "ok.yml", "--print", "--json"), ("ledger", "--help")],
)
def test_a_full_disk_behind_stdout(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "ok.yml").write_text(PIPELINE)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = stateflow(*arguments, cwd=tmp_path, out=full)
    finally:
        os.close(full)
    assert one_line(done).startswith("disk_full: the disk is full: No space left on device")


def test_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    (tmp_path / "ok.yml").write_text(PIPELINE)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = stateflow("run", "ok.yml", "--print", cwd=tmp_path, out=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("command", ["controller", "replica"])
def test_a_server_whose_stdout_is_full_serves(tmp_path: Path, command: str) -> None:
    options = {
        "controller": ["--ledger", f"sqlite:///{tmp_path}/ledger.db", "--listen", "127.0.0.1:0"],
        "replica": ["--site", "s", "--data-dir", str(tmp_path / "data"), "--controller", "127.0.0.1:1"],
    }[command]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "stateflow", command, *options], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert process.stderr is not None
    try:
        said = next(line for line in process.stderr if "cannot write that to stdout: No space left on device" in line)
        assert "listens on 127.0.0.1:" in said
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=600)[1]
        assert process.returncode == 0, rest
        assert "Traceback" not in rest
    finally:
        process.kill()
        process.wait()
