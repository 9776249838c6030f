"""How processes are started and ended, wherever that is: on this machine, forked from another, by an agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeVar

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
