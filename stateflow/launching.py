"""How processes are started and ended, wherever that is: on this machine, forked from another, by an agent."""

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
    """Args: Spec_contra: what is started. Handle: by which it is spoken of from then on."""

    def start(self, spec: Spec_contra) -> Handle:
        """Without waiting until it is ready."""
        ...

    def stop(self, handle: Handle) -> None:
        """It is asked to end, and not waited for."""
        ...

    def kill(self, handle: Handle) -> None:
        """It ends now, and nothing of it is flushed."""
        ...

    def is_running(self, handle: Handle) -> bool: ...

    def logs(self, handle: Handle) -> Iterator[bytes]:
        """What its log holds, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """``python -m stateflow ARGUMENTS``. Its standard error goes to the file ``log``; it ends when its standard input
    closes, where it was told to. ``within``: a command that starts it, such as ``ip netns exec NAME``."""

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    within: Sequence[str] = ()


class Process(Protocol):
    """What :class:`subprocess.Popen` has."""

    pid: int
    stdin: IO[str] | None
    stdout: IO[str] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True, slots=True)
class Started:
    """A process of this machine, and what it was started as."""

    command: Command
    process: Process


@dataclass(frozen=True, slots=True)
class Listening:
    """What a process says on standard output when it is ready, as an object of JSON on a line; with other ``metrics``
    also later. ``metrics``: replica → host:port of its ``/metrics``, where there is one."""

    address: str
    metrics: Mapping[str, str] = field(default_factory=dict)


def heard(line: str | bytes) -> Listening | StateflowError | None:
    """What a process said: where it listens, or why it does not; None: it said neither."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        said = json.loads(line)
        if "error" in said:
            return from_wire(said["error"])
        metrics = {str(name): str(address) for name, address in said.get("metrics", {}).items()}
        return Listening(str(said["address"]), metrics)
    return None
