"""Starting and ending processes: on this machine, forked from another process, or by an agent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol, TypeVar

from stateflow.errors import StateflowError, from_wire

Spec_contra = TypeVar("Spec_contra", contravariant=True)
Handle = TypeVar("Handle")


class Launcher(Protocol[Spec_contra, Handle]):
    """Starts and ends processes.

    Args:
        Spec_contra: description of the process to start.
        Handle: reference to a started process.
    """

    def start(self, spec: Spec_contra) -> Handle:
        """Starts a process, without waiting until it is ready."""
        ...

    def stop(self, handle: Handle) -> None:
        """Asks a process to end, without waiting for it."""
        ...

    def kill(self, handle: Handle) -> None:
        """Ends a process at once; it flushes nothing."""
        ...

    def is_running(self, handle: Handle) -> bool: ...

    def logs(self, handle: Handle) -> Iterator[bytes]:
        """Yields the contents of its log, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """A process ``python -m stateflow ARGUMENTS``.

    Its standard error goes to the file ``log``. If its arguments say so, it ends when its standard input closes.
    ``within``: a command that starts it, such as ``ip netns exec NAME``.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    within: Sequence[str] = ()


class Process(Protocol):
    """The part of :class:`subprocess.Popen` that is used."""

    pid: int
    stdin: IO[str] | None
    stdout: IO[str] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True, slots=True)
class Started:
    """A process of this machine, and the command that started it."""

    command: Command
    process: Process


@dataclass(frozen=True, slots=True)
class Listening:
    """The line of JSON that a process writes to standard output when it is ready, and again when ``metrics`` change.

    ``metrics``: replica → host:port of its ``/metrics``, where there is one.
    """

    address: str
    metrics: Mapping[str, str] = field(default_factory=dict)


def heard(line: str | bytes) -> Listening | StateflowError | None:
    """Parses a line of a process: where it listens, or why it does not; None: the line says neither."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        said = json.loads(line)
        if "error" in said:
            return from_wire(said["error"])
        metrics = {str(name): str(address) for name, address in said.get("metrics", {}).items()}
        return Listening(str(said["address"]), metrics)
    return None
