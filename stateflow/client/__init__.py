"""Talking to a cluster without Spark: control it, stream rows into it, read its state."""

from stateflow.client.cluster import Cluster
from stateflow.client.commands import Migration, Spawning
from stateflow.client.sources import SourceReport
from stateflow.client.stream import StreamClient
from stateflow.moves import MoveOptions
from stateflow.reports import (
    AgentReport,
    AutopilotReport,
    CheckpointReport,
    ChildReport,
    ClusterStatus,
    JobReport,
    JobRun,
    MoveReport,
    OperatorStatus,
    Placement,
    ProposedMove,
    Reconfiguration,
    ReplicaStatistics,
    ReplicaStatus,
    RestoredPartition,
    StandbyReport,
)

__all__ = [
    "AgentReport",
    "AutopilotReport",
    "CheckpointReport",
    "ChildReport",
    "Cluster",
    "ClusterStatus",
    "JobReport",
    "JobRun",
    "Migration",
    "MoveOptions",
    "MoveReport",
    "OperatorStatus",
    "Placement",
    "ProposedMove",
    "Reconfiguration",
    "ReplicaStatistics",
    "ReplicaStatus",
    "RestoredPartition",
    "SourceReport",
    "Spawning",
    "StandbyReport",
    "StreamClient",
]
