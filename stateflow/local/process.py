"""One process of a cluster on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stateflow.agent.local import LocalLauncher
from stateflow.errors import InvalidArgument, Unavailable
from stateflow.launching import Command, Launcher, Listening, Started, heard
from stateflow.launching import Process as Child
from stateflow.local.fork_server import ForkLauncher, readable

START_TIMEOUT_S = 60.0


def python_path(paths: Iterable[str]) -> str:
    """Returns the PYTHONPATH of a process that is to import from these directories.

    Raises InvalidArgument for a directory that PYTHONPATH cannot express: its modules would silently not be found.
    """
    found = list(dict.fromkeys(filter(None, paths)))
    for path in found:
        if os.pathsep in path and Path(path).exists():
            raise InvalidArgument(
                f"a process cannot import from a directory with {os.pathsep!r} in its name",
                remedy="rename it, or move the program elsewhere",
                path=path,
            )
    return os.pathsep.join(found)


class Process:
    """One stateflow process. Its log goes to a file; its first line of output says where it listens.

    Args:
        within: command that starts the process, such as ``ip netns exec NAME``.
        environment: variables beside those of this process.
    """

    def __init__(
        self,
        name: str,
        arguments: list[str],
        log: Path,
        python_path: list[str],
        within: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._within = within
        self._environment = dict(environment or {})
        self._arguments = arguments
        self._log = log
        self._python_path = python_path
        self.address = ""
        self._launcher: Launcher[Command, Started] = (
            ForkLauncher() if sys.platform == "linux" and not within else LocalLauncher(rotates=False)
        )
        self._started: Started | None = None

    @property
    def _child(self) -> Child | None:
        return None if self._started is None else self._started.process

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Starts the process without waiting; call :meth:`wait_ready` afterwards."""
        arguments = [*self._arguments, "--json", "--stop-with-parent"]
        paths = [*self._python_path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | self._environment | {"PYTHONPATH": python_path(paths)}
        self._started = self._launcher.start(Command(self.name, arguments, environment, self._log, self._within))

    def wait_ready(self) -> str:
        """Waits until the process listens. Returns its address. Raises the error with which the process ended."""
        assert self._child is not None
        assert self._child.stdout is not None
        out = self._child.stdout
        line = out.readline() if readable([out.fileno()], START_TIMEOUT_S) else ""
        said = heard(line)
        if isinstance(said, Listening):
            self.address = said.address
            return self.address
        self.stop()
        if said is not None:
            raise said
        raise Unavailable(f"{self.name} did not start: {self._tail()}", remedy="see its log", log=self._log)

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"

    def kill(self) -> None:
        """Kills the process with SIGKILL: it flushes nothing and tells no other process."""
        if self._started is not None:
            self._launcher.kill(self._started)
        self._wait_for_end(None)

    def ask_to_stop(self) -> None:
        """Asks the process to stop, without waiting; call :meth:`stop` afterwards."""
        if self._started is not None:
            self._launcher.stop(self._started)

    def stop(self) -> None:
        self.ask_to_stop()
        try:
            self._wait_for_end(15.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def _wait_for_end(self, timeout_s: float | None) -> None:
        if self._child is not None:
            self._child.wait(timeout_s)
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    pipe.close()

    @property
    def running(self) -> bool:
        return self._started is not None and self._launcher.is_running(self._started)
