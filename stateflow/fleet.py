"""Descriptions of agents, of the replicas they should run, and of processes, shared by controllers, agents and clients.

An agent sends a :class:`Beat` with the state of all its replicas. The controller replies with the
:class:`DesiredState`, which names all replicas that the agent should run. A process that a :class:`Launcher` started
writes a line of JSON when it is ready, see :class:`Listening`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from stateflow.errors import StateflowError, from_wire

# -- Agents and replicas ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """An agent, and its resources for replicas.

    ``address``: where its logs are requested. ``limits``: how it enforces a replica's memory limit, ``cgroup`` or
    ``rlimit``. ``version`` is stateflow's, ``python`` the interpreter's.
    """

    name: str
    site: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    cores: int = 1
    memory_bytes: int = 0
    disk_bytes: int = 0
    version: str = ""
    python: str = ""
    limits: str = ""


@dataclass(frozen=True, slots=True)
class Spawned:
    """A replica that an agent should have. ``running``: with its process, not only its data directory.

    ``generation`` rises with each command; processes of older generations are ended. ``memory_bytes``: limit of all its
    processes together; 0: none.
    """

    replica: str
    agent: str
    running: bool = True
    generation: int = 1
    workers: int = 1
    weight: int = 1
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Child:
    """The state of a replica at its agent.

    ``spawned``: the order by which its process was started. ``deaths``: number of failures in a row; ``fault``: why it
    last ended. ``address``: address of the replica; empty: not known yet.
    """

    spawned: Spawned
    state: str
    deaths: int = 0
    fault: StateflowError | None = None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Directory:
    """A data directory, of an agent or a replica: its id, its path, and the ledger that it belongs to (empty: none)."""

    id: str
    place: str
    ledger: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """An agent's heartbeat, always complete. ``term``: the greatest term that the agent has heard of."""

    agent: AgentInfo
    directory: Directory
    incarnation: str
    disk_free_bytes: int = 0
    children: Sequence[Child] = ()
    term: int = 0


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The reply to a heartbeat, with all replicas that the agent should run.

    ``ledger`` and ``term``: those of the replying controller. ``adopted``: the ledger that the agent belongs to, if the
    controller's ledger has taken over its contents.
    """

    lease_s: float
    wanted: Sequence[Spawned]
    ledger: str
    term: int
    adopted: str = ""
    heartbeat_interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request for ``count`` replicas ``at`` an agent, or at the agents of a site.

    ``labels``: an agent must have all of them. ``memory_bytes``: limit of each replica; 0: none.
    """

    at: str
    count: int = 1
    workers: int = 1
    weight: int = 1
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


# -- Processes -------------------------------------------------------------------------------------------------------


class Launcher(Protocol):
    """Starts and ends processes: on this machine, or forked from another process."""

    def start(self, spec: Command) -> Started:
        """Starts a process, without waiting until it is ready."""
        ...

    def stop(self, handle: Started) -> None:
        """Asks a process to end, without waiting for it."""
        ...

    def kill(self, handle: Started) -> None:
        """Ends a process at once; it flushes nothing."""
        ...

    def is_running(self, handle: Started) -> bool: ...

    def logs(self, handle: Started) -> Iterator[bytes]:
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
    """The part of :class:`subprocess.Popen` that stateflow uses."""

    pid: int
    stdin: IO[str] | None
    stdout: IO[str] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True, slots=True)
class Started:
    """A process on this machine, and the command that started it."""

    command: Command
    process: Process


@dataclass(frozen=True, slots=True)
class Listening:
    """The line of JSON that a process writes to standard output when it is ready, and again when ``metrics`` change.

    ``metrics``: replica → host:port of its ``/metrics``, if it has one.
    """

    address: str
    metrics: Mapping[str, str] = field(default_factory=dict)


def heard(line: str | bytes) -> Listening | StateflowError | None:
    """Parses a line of a process: the address at which it listens, or the error for which it does not; None:
    neither."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        said = json.loads(line)
        if "error" in said:
            return from_wire(said["error"])
        metrics = {str(name): str(address) for name, address in said.get("metrics", {}).items()}
        return Listening(str(said["address"]), metrics)
    return None
