"""An agent's metrics, computed from what it knows anyway, and the addresses of its replicas' metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from stateflow.clock import Clock
from stateflow.fleet import AgentInfo, Child
from stateflow.metrics.discovery import Target
from stateflow.metrics.figures import Values
from stateflow.release import VERSION


class Figures:
    """An agent's metrics.

    ``ends``: number of processes that ended by themselves. ``obeyed_at``: when the agent last obeyed a controller, in
    monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ends = 0
        self.obeyed_at = -math.inf

    def of(self, info: AgentInfo, children: Sequence[Child], disk_free_bytes: int) -> Values:
        running = [child.spawned for child in children if child.spawned.running]
        since = self._clock.monotonic() - self.obeyed_at
        return {
            "stateflow_info": {("agent", info.name, info.site, VERSION): 1},
            "stateflow_agent_replicas": Counter((child.state.lower(),) for child in children),
            "stateflow_agent_replica_ends_total": {(): self.ends},
            "stateflow_agent_controller_seconds": {(): since} if math.isfinite(since) else {},
            "stateflow_agent_disk_free_bytes": {(): disk_free_bytes},
            "stateflow_agent_memory_bytes": {
                ("all",): info.memory_bytes,
                ("promised",): sum(each.memory_bytes for each in running),
            },
            "stateflow_agent_cores": {("all",): info.cores, ("workers",): sum(each.workers for each in running)},
        }


def targets_of(info: AgentInfo, pages: Callable[[], Mapping[str, str]], own: str) -> list[Target]:
    """Returns the targets of ``/sd``.

    Args:
        pages: returns where the replicas' metrics are served: replica → host:port.
        own: host:port of the agent's metrics.
    """
    labels = {"agent": info.name, "site": info.site}
    replicas = [Target(page, {"replica": replica, **labels}) for replica, page in pages().items()]
    return [Target(own, labels), *replicas]
