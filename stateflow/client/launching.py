"""Replicas that agents start, by the protocol of all that starts something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stateflow.client.cluster import Cluster
from stateflow.fleet import Request


@dataclass(frozen=True, slots=True)
class AgentLauncher:
    """See :class:`~stateflow.launching.Launcher`: what is started is replicas, and spoken of by their names."""

    cluster: Cluster

    def start(self, spec: Request) -> list[str]:
        """Raises what :meth:`Cluster.spawn` does."""
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
        """Raises PartitionsLive for one that owns some."""
        for replica in handle:
            self.cluster.stop_replica(replica)

    def kill(self, handle: list[str]) -> None:
        """Whatever they own."""
        for replica in handle:
            self.cluster.stop_replica(replica, force=True)

    def is_running(self, handle: list[str]) -> bool:
        """Are all of them, as far as their agents have said?"""
        states = {child.replica: child.state for agent in self.cluster.agents() for child in agent.replicas}
        return all(states.get(replica) == "RUNNING" for replica in handle)

    def logs(self, handle: list[str]) -> Iterator[bytes]:
        for replica in handle:
            yield from self.cluster.logs(replica)
