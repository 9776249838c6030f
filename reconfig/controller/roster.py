"""Members of the cluster: replicas, agents with the replicas they are to run, and nodes in maintenance.

Part of :mod:`reconfig.controller.cluster_state`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from reconfig.controller.batch_book import entry
from reconfig.decisions.jobs import Node
from reconfig.decisions.sweeps import Maintenance
from stateflow.fleet import AgentInfo, Spawned
from stateflow.ledger import Entry, Record, RecordState
from stateflow.types import ReplicaInfo, node_of


@dataclass(frozen=True, slots=True)
class Home:
    """A data directory: its id, and the place where it is (empty: it was not seen yet)."""

    directory: str = ""
    place: str = ""


@dataclass(slots=True)
class Roster:
    """Replicas, agents and nodes of the cluster.

    Methods named after an event, such as ``registered``, return the entries that record it; ``fold_…`` methods take in
    their records.
    """

    replicas: dict[str, ReplicaInfo] = field(default_factory=dict)
    homes: dict[str, Home] = field(default_factory=dict)  # by replica; absent where only an earlier version knew it
    registrations: dict[str, int] = field(default_factory=dict)  # number of records, by replica
    agents: dict[str, AgentInfo] = field(default_factory=dict)
    agent_homes: dict[str, Home] = field(default_factory=dict)
    agent_orders: dict[str, int] = field(default_factory=dict)  # number of records, by agent
    spawned: dict[str, Spawned] = field(default_factory=dict)  # what its agent is to run, by replica
    spawn_orders: dict[str, int] = field(default_factory=dict)  # number of records, by replica
    maintenance: dict[str, Maintenance] = field(default_factory=dict)  # by node, also when its time is over
    maintenance_orders: int = 0

    # -- replicas -----------------------------------------------------------------------------------------

    def registered(self, info: ReplicaInfo, home: Home) -> list[Entry]:
        if self.replicas.get(info.name) == info and self.homes.get(info.name) == home:
            return []
        payload = {"site": info.site, "address": info.address, "weight": info.weight, **asdict(home)}
        return [self._of_replica("replica", info.name, payload)]

    def replaced(self, name: str, directory: str) -> Entry:
        return self._of_replica("directory", name, {"directory": directory})

    def forgotten(self, name: str) -> Entry:
        return self._of_replica("forget", name, {})

    def _of_replica(self, kind: str, name: str, payload: dict[str, Any]) -> Entry:
        return entry(f"{kind}/{name}/{self.registrations.get(name, 0) + 1}", RecordState.NEW, None, payload)

    def _counted(self, rest: str) -> str:
        """Counts a record of a replica. Returns the replica's name."""
        name = rest.rpartition("/")[0]
        self.registrations[name] = self.registrations.get(name, 0) + 1
        return name

    def fold_replica(self, rest: str, record: Record) -> None:
        name = self._counted(rest)
        fields = dict(record.payload)
        home = Home(fields.pop("directory", ""), fields.pop("place", ""))
        self.replicas[name] = ReplicaInfo(name, **fields)
        if home.directory:
            self.homes[name] = home

    def fold_directory(self, rest: str, record: Record) -> None:
        self.homes[self._counted(rest)] = Home(record.payload["directory"])

    def fold_forget(self, rest: str, record: Record) -> None:
        name = self._counted(rest)
        self.replicas.pop(name, None)
        self.homes.pop(name, None)
        self.spawned.pop(name, None)

    # -- agents -------------------------------------------------------------------------------------------

    def agent_registered(self, info: AgentInfo, home: Home) -> list[Entry]:
        if self.agents.get(info.name) == info and self.agent_homes.get(info.name) == home:
            return []
        payload = {**asdict(info), "labels": dict(info.labels), **asdict(home)}
        del payload["name"]  # the item has it
        return [self._of_agent("agent", info.name, payload)]

    def dismissed(self, name: str) -> Entry:
        return self._of_agent("dismiss", name, {})

    def _of_agent(self, kind: str, name: str, payload: dict[str, Any]) -> Entry:
        return entry(f"{kind}/{name}/{self.agent_orders.get(name, 0) + 1}", RecordState.NEW, None, payload)

    def fold_agent(self, rest: str, record: Record) -> None:
        name, _, number = rest.rpartition("/")
        fields = dict(record.payload)
        self.agent_homes[name] = Home(fields.pop("directory"), fields.pop("place"))
        self.agents[name] = AgentInfo(name, **fields)
        self.agent_orders[name] = int(number)

    def fold_dismiss(self, rest: str, record: Record) -> None:
        name, _, number = rest.rpartition("/")
        self.agent_orders[name] = int(number)
        self.agents.pop(name, None)
        self.agent_homes.pop(name, None)
        self.spawned = {replica: each for replica, each in self.spawned.items() if each.agent != name}

    def spawning(self, wanted: Spawned) -> Entry:
        payload = asdict(wanted)
        del payload["replica"]  # the item has it
        item = f"spawn/{wanted.replica}/{self.spawn_orders.get(wanted.replica, 0) + 1}"
        return entry(item, RecordState.NEW, None, payload)

    def fold_spawn(self, rest: str, record: Record) -> None:
        replica, _, number = rest.rpartition("/")
        self.spawn_orders[replica] = int(number)
        self.spawned[replica] = Spawned(replica, **record.payload)

    def wanted_at(self, agent: str) -> list[Spawned]:
        """Returns what an agent is to run, sorted by the replicas' names."""
        return [each for _, each in sorted(self.spawned.items()) if each.agent == agent]

    def is_stopping(self, replica: str) -> bool:
        """Tells whether an agent was told to stop a replica, or the node whose worker the replica is."""
        spawned = self.spawned.get(node_of(replica))
        return spawned is not None and not spawned.running

    # -- nodes --------------------------------------------------------------------------------------------

    def nodes(self) -> dict[str, Node]:
        """Returns the nodes that have replicas, by name, with what their agents say of them."""
        found: dict[str, Node] = {}
        for info in self.replicas.values():
            name = node_of(info.name)
            spawned = self.spawned.get(name)
            agent = None if spawned is None else self.agents.get(spawned.agent)
            labels = {} if agent is None else dict(agent.labels)
            found[name] = Node(name, info.site, labels, "" if agent is None else agent.name)
        return found

    def maintaining(self, node: str, maintenance: Maintenance | None) -> Entry:
        """Returns the entry that puts a node into maintenance. ``maintenance``: None: it has ended."""
        item = f"maintenance/{node}/{self.maintenance_orders + 1}"
        return entry(item, RecordState.NEW, None, {} if maintenance is None else maintenance.to_payload())

    def fold_maintenance(self, rest: str, record: Record) -> None:
        node, _, number = rest.rpartition("/")
        self.maintenance_orders = max(self.maintenance_orders, int(number))
        if record.payload:
            self.maintenance[node] = Maintenance(**record.payload)
        else:
            self.maintenance.pop(node, None)
