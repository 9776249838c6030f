"""Launches processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator

from stateflow.agent.logs import Reader, pump
from stateflow.launching import Command, Started


class Processes:
    """The parts of a launcher that are the same for all processes of this machine, however they were started."""

    def stop(self, handle: Started) -> None:
        self.send(handle, signal.SIGTERM)

    def kill(self, handle: Started) -> None:
        """Kills a process. Workers that it started notice its end, and end as well."""
        self.send(handle, signal.SIGKILL)

    def send(self, handle: Started, number: signal.Signals) -> None:
        """Sends a signal to a process, unless it has ended."""
        if self.is_running(handle):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(handle.process.pid, number)

    def is_running(self, handle: Started) -> bool:
        return handle.process.poll() is None

    def logs(self, handle: Started) -> Iterator[bytes]:
        reader = Reader(handle.command.log)
        try:
            while data := reader.more():
                yield data
        finally:
            reader.close()


class LocalLauncher(Processes):
    """A launcher of child processes, see :class:`~stateflow.launching.Launcher`.

    The caller reads a process's standard output. A process notices by its standard input that this one has ended, in
    whatever way.

    Args:
        rotates: this process writes a process's log, and begins a new file when it is large; False: the process writes
            its log itself.
    """

    def __init__(self, *, rotates: bool = True) -> None:
        self._rotates = rotates

    def start(self, spec: Command) -> Started:
        """Starts a process. Raises OSError."""
        if not self._rotates:
            with spec.log.open("ab") as log:
                return Started(spec, self._start(spec, log.fileno(), ()))
        reads, writes = os.pipe()
        try:
            # The process holds the reading end, too. If this process dies, the other one waits when the pipe is full,
            # and soon ends. A pipe without a reader would fail in the operator that prints something just then.
            process = self._start(spec, writes, (reads,))
        except BaseException:
            os.close(reads)
            raise
        finally:
            os.close(writes)
        pump(os.fdopen(reads, "rb", buffering=0), spec.log, spec.name)
        return Started(spec, process)

    def _start(self, spec: Command, errors: int, kept: Collection[int]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*spec.within, sys.executable, "-m", "stateflow", *spec.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=kept,
            text=True,
            env=dict(spec.environment),
            start_new_session=True,  # signals of a terminal reach it only through this process
        )
