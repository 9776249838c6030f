"""Talking to a cluster without Spark: control it, stream rows into it, read its state."""

from stateflow.client.cluster import Cluster, Migration, Spawning
from stateflow.client.sources import SourceReport
from stateflow.client.stream import StreamClient
from stateflow.moves import MoveOptions
from stateflow.reports import (
    AgentReport,
    CheckpointReport,
    ChildReport,
    ClusterStatus,
    MoveReport,
    OperatorStatus,
    Reconfiguration,
    ReplicaStatistics,
    ReplicaStatus,
    RestoredPartition,
    StandbyReport,
)

__all__ = [
    "AgentReport",
    "CheckpointReport",
    "ChildReport",
    "Cluster",
    "ClusterStatus",
    "Migration",
    "MoveOptions",
    "MoveReport",
    "OperatorStatus",
    "Reconfiguration",
    "ReplicaStatistics",
    "ReplicaStatus",
    "RestoredPartition",
    "SourceReport",
    "Spawning",
    "StandbyReport",
    "StreamClient",
]
