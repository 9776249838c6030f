"""Client of a cluster, without Spark. It controls the cluster, streams rows into it, and reads its state."""

from stateflow.client.cluster import Cluster
from stateflow.client.commands import Migration, RollingRestart, Spawning, Sweeping
from stateflow.client.forwarding import ForwardingClient, Waiting
from stateflow.client.outbox import Refused
from stateflow.client.packing import Bundle, pack
from stateflow.client.stream import OutputDropReport, SourceReport, StreamClient
from stateflow.reports import (
    AgentReport,
    AutopilotReport,
    CheckpointReport,
    ChildReport,
    JobReport,
    JobRun,
    LackOfRoom,
    LeftPartition,
    MoveReport,
    OperatorVersion,
    PartitionFault,
    Placement,
    ProposedMove,
    Reconfiguration,
    ReplicaStatistics,
    RestoredPartition,
    Rolling,
    RollingNode,
    Sweep,
    SweepNode,
)
from stateflow.status import ClusterStatus, LinkReport, OperatorStatus, ReplicaStatus, StandbyReport
from stateflow.types import MoveOptions

__all__ = [
    "AgentReport",
    "AutopilotReport",
    "Bundle",
    "CheckpointReport",
    "ChildReport",
    "Cluster",
    "ClusterStatus",
    "ForwardingClient",
    "JobReport",
    "JobRun",
    "LackOfRoom",
    "LeftPartition",
    "LinkReport",
    "Migration",
    "MoveOptions",
    "MoveReport",
    "OperatorStatus",
    "OperatorVersion",
    "OutputDropReport",
    "PartitionFault",
    "Placement",
    "ProposedMove",
    "Reconfiguration",
    "Refused",
    "ReplicaStatistics",
    "ReplicaStatus",
    "RestoredPartition",
    "Rolling",
    "RollingNode",
    "RollingRestart",
    "SourceReport",
    "Spawning",
    "StandbyReport",
    "StreamClient",
    "Sweep",
    "SweepNode",
    "Sweeping",
    "Waiting",
    "pack",
]
