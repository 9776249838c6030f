"""Agents and the replicas they are to run, as controllers, agents and clients describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stateflow.errors import StateflowError


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
    """A replica assigned to an agent: ``running``, or only its data directory.

    ``generation`` rises with each command, and ends processes of older generations. ``memory_bytes``: limit of all its
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

    ``spawned``: the order by which its process was started. ``deaths``: in a row, without being well in between;
    ``fault``: why it last ended. ``address``: where the replica is reached; empty: it has not said yet.
    """

    spawned: Spawned
    state: str
    deaths: int = 0
    fault: StateflowError | None = None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Directory:
    """An agent's data directory: its id, its path, and the ledger that it belongs to (empty: none)."""

    id: str
    place: str
    ledger: str = ""


@dataclass(frozen=True, slots=True)
class Beat:
    """An agent's heartbeat, always complete. ``term``: the greatest that the agent has heard of."""

    agent: AgentInfo
    directory: Directory
    incarnation: str
    disk_free_bytes: int = 0
    children: Sequence[Child] = ()
    term: int = 0


@dataclass(frozen=True, slots=True)
class Orders:
    """The reply to a heartbeat, with all replicas that the agent is to have.

    ``ledger`` and ``term``: those of the controller that replies. ``adopted``: the ledger that the agent belongs to, if
    the controller's ledger has taken over its contents.
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
