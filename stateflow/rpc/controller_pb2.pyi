from stateflow.rpc import common_pb2 as _common_pb2
from stateflow.rpc import replica_pb2 as _replica_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("replica", "incarnation", "partitions")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.Replica
    incarnation: str
    partitions: _containers.RepeatedCompositeFieldContainer[_replica_pb2.PartitionView]
    def __init__(self, replica: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., incarnation: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[_replica_pb2.PartitionView, _Mapping]]] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("operators", "heartbeat_interval_s")
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    operators: _containers.RepeatedCompositeFieldContainer[_common_pb2.OperatorSpec]
    heartbeat_interval_s: float
    def __init__(self, operators: _Optional[_Iterable[_Union[_common_pb2.OperatorSpec, _Mapping]]] = ..., heartbeat_interval_s: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("name", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class DeployRequest(_message.Message):
    __slots__ = ("spec", "sites")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.OperatorSpec
    sites: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, spec: _Optional[_Union[_common_pb2.OperatorSpec, _Mapping]] = ..., sites: _Optional[_Iterable[str]] = ...) -> None: ...

class Deployment(_message.Message):
    __slots__ = ("spec", "version", "replicas", "owners", "epochs")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.OperatorSpec
    version: int
    replicas: _containers.RepeatedCompositeFieldContainer[_common_pb2.Replica]
    owners: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spec: _Optional[_Union[_common_pb2.OperatorSpec, _Mapping]] = ..., version: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[_common_pb2.Replica, _Mapping]]] = ..., owners: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ...) -> None: ...

class GetDeploymentRequest(_message.Message):
    __slots__ = ("operator",)
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    operator: str
    def __init__(self, operator: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("replica", "alive", "last_heartbeat_s", "partitions")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.Replica
    alive: bool
    last_heartbeat_s: float
    partitions: int
    def __init__(self, replica: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., alive: _Optional[bool] = ..., last_heartbeat_s: _Optional[float] = ..., partitions: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("replicas", "deployments", "reconfigurations")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENTS_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURATIONS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    deployments: _containers.RepeatedCompositeFieldContainer[Deployment]
    reconfigurations: _containers.RepeatedCompositeFieldContainer[Reconfiguration]
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., deployments: _Optional[_Iterable[_Union[Deployment, _Mapping]]] = ..., reconfigurations: _Optional[_Iterable[_Union[Reconfiguration, _Mapping]]] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("operator", "partitions", "to", "max_pause_ms", "strategy")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    MAX_PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    to: str
    max_pause_ms: float
    strategy: str
    def __init__(self, operator: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., to: _Optional[str] = ..., max_pause_ms: _Optional[float] = ..., strategy: _Optional[str] = ...) -> None: ...

class ReconfigurationRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("id", "partition", "source", "target", "phase", "bytes_warm", "bytes_reused", "bytes_delta", "rounds", "predicted_pause_ms", "pause_ms", "duration_s", "digest", "strategy", "fault", "epoch", "started_us", "fenced_us", "lag_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_WARM_FIELD_NUMBER: _ClassVar[int]
    BYTES_REUSED_FIELD_NUMBER: _ClassVar[int]
    BYTES_DELTA_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STARTED_US_FIELD_NUMBER: _ClassVar[int]
    FENCED_US_FIELD_NUMBER: _ClassVar[int]
    LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: str
    partition: int
    source: str
    target: str
    phase: str
    bytes_warm: int
    bytes_reused: int
    bytes_delta: int
    rounds: int
    predicted_pause_ms: float
    pause_ms: float
    duration_s: float
    digest: str
    strategy: str
    fault: _common_pb2.Fault
    epoch: int
    started_us: int
    fenced_us: int
    lag_bytes: int
    def __init__(self, id: _Optional[str] = ..., partition: _Optional[int] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., phase: _Optional[str] = ..., bytes_warm: _Optional[int] = ..., bytes_reused: _Optional[int] = ..., bytes_delta: _Optional[int] = ..., rounds: _Optional[int] = ..., predicted_pause_ms: _Optional[float] = ..., pause_ms: _Optional[float] = ..., duration_s: _Optional[float] = ..., digest: _Optional[str] = ..., strategy: _Optional[str] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ..., epoch: _Optional[int] = ..., started_us: _Optional[int] = ..., fenced_us: _Optional[int] = ..., lag_bytes: _Optional[int] = ...) -> None: ...

class Reconfiguration(_message.Message):
    __slots__ = ("id", "operator", "state", "moves", "max_pause_ms", "created_us")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    MAX_PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_US_FIELD_NUMBER: _ClassVar[int]
    id: str
    operator: str
    state: str
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    max_pause_ms: float
    created_us: int
    def __init__(self, id: _Optional[str] = ..., operator: _Optional[str] = ..., state: _Optional[str] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ..., max_pause_ms: _Optional[float] = ..., created_us: _Optional[int] = ...) -> None: ...
