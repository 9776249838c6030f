"""Talking to a cluster without Spark: control it, stream rows into it, read its state."""

from stateflow.client.cluster import Cluster
from stateflow.client.reports import (
    ClusterStatus,
    MoveReport,
    OperatorStatus,
    Reconfiguration,
    ReplicaStatus,
    StandbyReport,
)
from stateflow.client.sources import SourceReport
from stateflow.client.stream import StreamClient

__all__ = [
    "Cluster",
    "ClusterStatus",
    "MoveReport",
    "OperatorStatus",
    "Reconfiguration",
    "ReplicaStatus",
    "SourceReport",
    "StandbyReport",
    "StreamClient",
]
