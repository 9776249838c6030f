"""Processes that a test starts, kills and starts again."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.integration.processes import gone, spark_jvm, spark_workers
from tests.integration.support import eventually

REPOSITORY = Path(__file__).resolve().parents[2]


def spark_driver(what: str, *arguments: object) -> list[str]:
    """Returns the command of a program of ``spark_drivers``."""
    return [sys.executable, "-m", "tests.integration.spark_drivers", what, *map(str, arguments)]


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


def listening(host: str, port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex((host, port)) == 0


class Program:
    """A command that may be started again when it has ended. ``log``: gets the output of all its processes."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self._command, self._log = command, log
        self._environment = {"PYTHONPATH": str(REPOSITORY), **environment}  # Spark starts processes elsewhere
        self._popen: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=os.environ | self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    @property
    def popen(self) -> subprocess.Popen[bytes]:
        assert self._popen is not None
        return self._popen

    @property
    def runs(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def check(self) -> None:
        assert self.runs, f"{self._log.stem} ended by itself, with {self.popen.returncode}: {self.said()[-6000:]}"

    def check_ends(self, patience_s: float) -> None:
        """Waits for the program to end by itself. Raises AssertionError if its exit status is not 0."""
        assert self.popen.wait(patience_s) == 0, self.said()[-6000:]

    def said(self) -> str:
        """Returns the output of all its processes so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def end(self) -> None:
        if self.runs:
            self.kill()


class Driver(Program):
    """A program that is the parent of a Spark JVM, which in turn has Python workers."""

    def jvm(self) -> int | None:
        return spark_jvm(self.popen.pid)

    def workers(self) -> list[int]:
        return spark_workers(self.popen.pid)

    def die(self, rng: random.Random) -> None:
        """Kills the JVM, once there is one, and the Python process, in random order.

        Both are dead when this returns, before any successor starts. Workers are left to notice by themselves.
        """
        jvm = eventually(self.jvm, "the driver has its JVM")
        assert jvm is not None
        first, second = rng.sample([jvm, self.popen.pid], 2)
        os.kill(first, signal.SIGKILL)
        time.sleep(rng.choice([0.0, 0.1]))
        if not (gone(second) and second != self.popen.pid):
            os.kill(second, signal.SIGKILL)
        self.popen.wait()
        eventually(lambda: gone(jvm), "the JVM is gone")

    def end(self) -> None:
        if self.runs:
            jvm = self.jvm()
            super().end()
            if jvm is not None:
                eventually(lambda: gone(jvm), "the JVM goes with its driver")  # the JVM's standard input has ended


def kill_one(what: str, found: Callable[[], list[int]], rng: random.Random) -> None:
    """Kills a random process of those that ``found`` returns, any of which may end by itself meanwhile."""

    def struck() -> int | None:
        pids = found()
        if not pids:
            return None
        victim = rng.choice(pids)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return None
        return victim

    victim = eventually(struck, what)
    assert victim is not None
    eventually(lambda: gone(victim), f"{what} is gone")
