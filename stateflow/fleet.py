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

from stateflow.durable import MALFORMED
from stateflow.errors import StateflowError, from_wire

# -- Agents and replicas ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """An agent, and its resources for replicas.

    Attributes:
        address: address at which logs are requested from the agent.
        version: version of stateflow.
        python: version of Python.
        limits: mechanism that enforces a replica's memory limit, ``cgroup`` or ``rlimit``.
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
    """A replica that an agent should have.

    Attributes:
        running: the replica's process should run; if false, the agent keeps only its data directory.
        generation: number that rises with each command; processes of older generations are ended.
        memory_bytes: memory limit of all the replica's processes together; 0: no limit.
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

    Attributes:
        spawned: the desired replica by which the process was started, with its limits.
        deaths: number of consecutive failures.
        fault: reason for which the process last ended.
        address: address of the replica; empty: not known yet.
    """

    spawned: Spawned
    state: str
    deaths: int = 0
    fault: StateflowError | None = None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Directory:
    """The data directory of an agent or a replica.

    Attributes:
        place: path of the directory.
        ledger: id of the ledger to which the directory belongs; empty: it belongs to no ledger yet.
    """

    id: str
    place: str
    ledger: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """An agent's heartbeat, which lists all of its replicas. ``term`` is the greatest term that the agent knows."""

    agent: AgentInfo
    directory: Directory
    incarnation: str
    disk_free_bytes: int = 0
    children: Sequence[Child] = ()
    term: int = 0


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The reply to a heartbeat.

    Attributes:
        wanted: all replicas that the agent should have.
        ledger: id of the replying controller's ledger.
        term: term of the replying controller.
        adopted: id of the ledger that the agent named in its heartbeat, if the controller's ledger has adopted that
            ledger's contents; otherwise empty.
    """

    lease_s: float
    wanted: Sequence[Spawned]
    ledger: str
    term: int
    adopted: str = ""
    heartbeat_interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request for new replicas.

    Attributes:
        at: name of an agent, or of a site with agents.
        count: number of replicas.
        memory_bytes: memory limit of each replica; 0: no limit.
        labels: labels that an agent must have to be chosen.
    """

    at: str
    count: int = 1
    workers: int = 1
    weight: int = 1
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


# -- Processes -------------------------------------------------------------------------------------------------------


class Launcher(Protocol):
    """Starts and ends processes on this machine, either by running a new Python or by forking a prepared process."""

    def start(self, spec: Command) -> Started:
        """Starts a process, without waiting until it is ready."""
        ...

    def stop(self, handle: Started) -> None:
        """Asks a process to end, without waiting for it."""
        ...

    def kill(self, handle: Started) -> None:
        """Ends a process at once, so that the process cannot flush data."""
        ...

    def is_running(self, handle: Started) -> bool: ...

    def logs(self, handle: Started) -> Iterator[bytes]:
        """Yields the contents of the process's log, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a process ``python -m stateflow ARGUMENTS``.

    Attributes:
        log: file that receives the process's standard error.
        within: prefix of the command, such as ``ip netns exec NAME``.

    With the argument ``--stop-with-parent``, the process ends when its standard input is closed.
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
    """The line of JSON that a process writes to standard output when it is ready, and again when an address changes.

    ``metrics`` maps each replica that has a ``/metrics`` endpoint to the endpoint's host:port.
    """

    address: str
    metrics: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NotReady:
    """The line of JSON that a node writes while it is not ready, because its first worker dies at every start, or does
    not become ready in time. The node goes on starting that worker, and writes a :class:`Listening` when it is ready.

    ``deaths``: number of the worker's deaths in a row. ``fault``: error that says why.
    """

    deaths: int
    fault: StateflowError


def heard(line: str | bytes) -> Listening | NotReady | StateflowError | None:
    """Parses a line that a process wrote. Returns the address at which the process listens, why it does not listen yet,
    or the error for which it does not listen; None if the line contains none of these."""
    with contextlib.suppress(*MALFORMED):
        said = json.loads(line)
        if "failing" in said:
            return NotReady(int(said["deaths"]), from_wire(said["failing"]))
        if "error" in said:
            return from_wire(said["error"])
        metrics = {str(name): str(address) for name, address in said.get("metrics", {}).items()}
        return Listening(str(said["address"]), metrics)
    return None
