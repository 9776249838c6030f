"""End of a process whose parent is gone, even though its output is no longer read."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stateflow.cli.app import app

#: fills the pipe that it logs to, in the thread that holds a lock of logging, and is then told to end
SCRIPT = """
import asyncio, logging, os, sys, threading
from stateflow.cli import processes

processes.SAY_S = 0.1
logging.basicConfig(stream=sys.stderr)

async def run():
    stop = processes.stop_on_signal(True, LIMIT_S)
    threading.Thread(target=lambda: logging.error("x" * (1 << 22)), daemon=True).start()
    print("begun", flush=True)
    await stop.wait()
    logging.error("this waits for the other one")

asyncio.run(run())
"""


def is_full(pipe: int) -> bool:
    there = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(there, sys.byteorder) >= fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


@pytest.mark.parametrize(("reads_on", "status"), [(True, 0), (False, 1)])
def test_it_ends_though_the_pipe_that_it_logs_to_is_full(reads_on: bool, status: int) -> None:
    limit_s = 60 if reads_on else 0.1  # the process ends by itself, or after this long
    script = SCRIPT if reads_on else SCRIPT.replace("logging.basic", "processes._read_on = os.close\nlogging.basic")
    reads, writes = os.pipe()
    script = script.replace("LIMIT_S", str(limit_s))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writes, pass_fds=(reads,)
    )
    os.close(writes)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    while not is_full(reads):  # otherwise its writes would fail at once instead of blocking
        assert process.poll() is None
        time.sleep(0.01)
    os.close(reads)  # the only reading end in this process
    process.stdin.close()
    assert process.wait(60) == status
    process.stdout.close()


@pytest.mark.thorough
def test_a_controller_whose_page_cannot_be_served_ends_without_more(tmp_path: Path) -> None:
    words = ["--ledger", f"sqlite:///{tmp_path}/ledger.db", "--listen", "127.0.0.1:0", "--dashboard", "nowhere"]
    done = CliRunner().invoke(app, ["controller", *words])
    gc.collect()  # reports a coroutine that was never awaited, which is an error here
    assert done.exit_code == 1
    assert "'nowhere' is not an address" in done.stderr
