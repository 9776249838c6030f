"""Agents and the replicas that they are to have, as controllers, agents and clients speak of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stateflow.errors import StateflowError


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """An agent, and what it has for replicas. ``address``: where logs are asked for. ``limits``: how it keeps a replica
    to its memory, ``cgroup`` or ``rlimit``. ``version`` is stateflow's, ``python`` the interpreter's."""

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
    """A replica that an agent is to have: ``running``, or its data directory only.

    ``generation`` rises with each command: a process of an older one is ended. ``memory_bytes``: of all its processes
    together; 0: not limited.
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
    """How it stands with a replica at its agent. ``spawned``: as its process was begun. ``deaths``: in a row, without
    having been well; ``fault``: why it ended last. ``address``: where the replica is reached; empty: it did not say."""

    spawned: Spawned
    state: str
    deaths: int = 0
    fault: StateflowError | None = None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Directory:
    """An agent's data directory: its id, where it is, and the ledger that it belongs to (empty: none)."""

    id: str
    place: str
    ledger: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """What an agent says of itself, all of it each time. ``term``: the greatest that it has heard of."""

    agent: AgentInfo
    directory: Directory
    incarnation: str
    disk_free_bytes: int = 0
    children: Sequence[Child] = ()
    term: int = 0


@dataclass(frozen=True, slots=True)
class Orders:
    """The answer: all that the agent is to have. ``ledger`` and ``term``: who says so. ``adopted``: the ledger that the
    agent belongs to, where this one has taken over what that knew."""

    lease_s: float
    wanted: Sequence[Spawned]
    ledger: str
    term: int
    adopted: str = ""
    heartbeat_interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """For ``count`` replicas ``at`` an agent, or at the agents of a site. ``labels``: of agents, all of which one must
    have. ``memory_bytes``: of each replica; 0: not limited."""

    at: str
    count: int = 1
    workers: int = 1
    weight: int = 1
    memory_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
