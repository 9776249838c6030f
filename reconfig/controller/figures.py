"""Metrics of a controller: whether it leads and, if it does, figures of its cluster."""

from __future__ import annotations

from collections import Counter

from reconfig.controller.controller import Controller
from reconfig.controller.leading import Leading
from stateflow.metrics.figures import Values
from stateflow.release import VERSION
from stateflow.reports import ReplicaStatus
from stateflow.rpc.limits import CallLimits


class Figures:
    def __init__(self, leading: Leading, address: str, site: str, limits: CallLimits) -> None:
        self._leading, self._address, self._site, self._limits = leading, address, site, limits

    async def __call__(self) -> Values:
        controller = self._leading.serving if self._leading.leads else None
        common: Values = {
            "stateflow_info": {("controller", self._address, self._site, VERSION): 1},
            "stateflow_leads": {(): int(controller is not None)},
            **self._limits.figures(),
        }
        return common if controller is None else common | _of_cluster(controller)


def _of_cluster(controller: Controller) -> Values:
    status = controller.survey.status()
    unserved = {
        (each.name,): sum(len(reason.partitions) for reason in each.unserved) for each in status.status().operators
    }
    return {
        "stateflow_replicas": Counter((_state(each),) for each in status.replicas),
        "stateflow_replica_partitions": {(each.name,): each.partitions for each in status.replicas},
        "stateflow_replica_heartbeat_seconds": {
            (each.name,): each.last_heartbeat_s for each in status.replicas if each.last_heartbeat_s >= 0
        },
        "stateflow_partitions_unserved": unserved,
        "stateflow_partitions_damaged": {(): len(status.damaged)},
        "stateflow_moves_running": {(): len(controller.cluster.open_moves)},
        "stateflow_moves_total": controller.runs.ended,
        "stateflow_move_pause_seconds": {(kind,): pauses for kind, pauses in controller.runs.pauses.items()},
        "stateflow_standbys": Counter((each.operator, str(each.phase)) for each in status.standbys),
    }


def _state(replica: ReplicaStatus) -> str:
    if replica.alive:
        return "alive"
    return "stopped" if replica.stopped else "opening" if replica.opening else "silent"
