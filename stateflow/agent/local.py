"""Processes of this machine."""

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
    """What is alike for processes of this machine, however they were started."""

    def stop(self, handle: Started) -> None:
        self.send(handle, signal.SIGTERM)

    def kill(self, handle: Started) -> None:
        """Workers that it started see that, and end."""
        self.send(handle, signal.SIGKILL)

    def send(self, handle: Started, number: signal.Signals) -> None:
        """Nothing, to one that has ended."""
        if self.is_running(handle):
            with contextlib.suppress(ProcessLookupError):  # it has ended right now
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
    """See :class:`~stateflow.launching.Launcher`. What a process says on standard output is its starter's to read; it
    sees by its standard input that this one has ended, however that did.

    Args: rotates: its log begins anew when it is large, and is written through here; else it writes the file itself.
    """

    def __init__(self, *, rotates: bool = True) -> None:
        self._rotates = rotates

    def start(self, spec: Command) -> Started:
        """Raises OSError."""
        if not self._rotates:
            with spec.log.open("ab") as log:
                return Started(spec, self._start(spec, log.fileno(), ()))
        reads, writes = os.pipe()
        try:
            # it has the end that is read, too: where this process dies it waits when the pipe is full, and is no longer
            # there soon. A pipe that nobody reads would be an error of the operator that prints something just then
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
            start_new_session=True,  # what a terminal sends reaches it through here
        )
