"""Launcher of replicas through agents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stateflow.client.cluster import Cluster
from stateflow.fleet import Request


@dataclass(frozen=True, slots=True)
class AgentLauncher:
    """Starts and stops replicas by their names, see :class:`~stateflow.fleet.Launcher`."""

    cluster: Cluster

    def start(self, spec: Request) -> list[str]:
        """Starts replicas, and returns their names. Raises what :meth:`Cluster.spawn` does."""
        begun = self.cluster.spawn(
            spec.at,
            count=spec.count,
            workers=spec.workers,
            weight=spec.weight,
            memory_bytes=spec.memory_bytes,
            labels=spec.labels,
        )
        return begun.names

    def stop(self, handle: list[str]) -> None:
        """Stops replicas. Raises PartitionsLive for a replica that owns partitions."""
        for replica in handle:
            self.cluster.stop_replica(replica)

    def kill(self, handle: list[str]) -> None:
        """Stops replicas, even if they own partitions."""
        for replica in handle:
            self.cluster.stop_replica(replica, force=True)

    def is_running(self, handle: list[str]) -> bool:
        """Tells whether all of the replicas run, as far as their agents have reported."""
        states = {child.replica: child.state for agent in self.cluster.agents() for child in agent.replicas}
        return all(states.get(replica) == "RUNNING" for replica in handle)

    def logs(self, handle: list[str]) -> Iterator[bytes]:
        for replica in handle:
            yield from self.cluster.logs(replica)
