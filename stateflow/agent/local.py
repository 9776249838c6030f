"""Processes of this machine, each with a log that begins anew when it is large."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from stateflow.agent.logs import Reader, pump
from stateflow.launching import Command


@dataclass(frozen=True, slots=True)
class LocalProcess:
    command: Command
    process: subprocess.Popen[str]


class LocalLauncher:
    """See :class:`~stateflow.launching.Launcher`. What a process says on standard output is its starter's to read; it
    may be told by its standard input that this one has ended, however that did."""

    def start(self, spec: Command) -> LocalProcess:
        """Raises OSError."""
        process = subprocess.Popen(
            [*spec.within, sys.executable, "-m", "stateflow", *spec.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(spec.environment),
            start_new_session=True,  # what a terminal sends reaches it through here
        )
        assert process.stderr is not None
        errors = os.fdopen(os.dup(process.stderr.fileno()), "rb", buffering=0)
        process.stderr.close()
        pump(errors, spec.log, spec.name)
        return LocalProcess(spec, process)

    def stop(self, handle: LocalProcess) -> None:
        self._signal(handle, signal.SIGTERM)

    def kill(self, handle: LocalProcess) -> None:
        """Workers that it started see that, and end."""
        self._signal(handle, signal.SIGKILL)

    def is_running(self, handle: LocalProcess) -> bool:
        return handle.process.poll() is None

    def logs(self, handle: LocalProcess) -> Iterator[bytes]:
        reader = Reader(handle.command.log)
        try:
            while data := reader.more():
                yield data
        finally:
            reader.close()

    def _signal(self, handle: LocalProcess, number: signal.Signals) -> None:
        if handle.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                handle.process.send_signal(number)
