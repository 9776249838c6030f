from stateflow.rpc import agent_pb2 as _agent_pb2
from stateflow.rpc import common_pb2 as _common_pb2
from stateflow.rpc import replica_pb2 as _replica_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Directory(_message.Message):
    __slots__ = ("id", "place", "ledger")
    ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    id: str
    place: str
    ledger: str
    def __init__(self, id: _Optional[str] = ..., place: _Optional[str] = ..., ledger: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("replica", "incarnation", "partitions", "ticket", "directory", "more")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.Replica
    incarnation: str
    partitions: _containers.RepeatedCompositeFieldContainer[_replica_pb2.PartitionView]
    ticket: str
    directory: Directory
    more: bool
    def __init__(self, replica: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., incarnation: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[_replica_pb2.PartitionView, _Mapping]]] = ..., ticket: _Optional[str] = ..., directory: _Optional[_Union[Directory, _Mapping]] = ..., more: _Optional[bool] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("operators", "heartbeat_interval_s", "superseded", "late", "ledger", "term", "dropped")
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    operators: _containers.RepeatedCompositeFieldContainer[_common_pb2.OperatorSpec]
    heartbeat_interval_s: float
    superseded: _containers.RepeatedCompositeFieldContainer[Superseded]
    late: bool
    ledger: str
    term: int
    dropped: _containers.RepeatedCompositeFieldContainer[Dropped]
    def __init__(self, operators: _Optional[_Iterable[_Union[_common_pb2.OperatorSpec, _Mapping]]] = ..., heartbeat_interval_s: _Optional[float] = ..., superseded: _Optional[_Iterable[_Union[Superseded, _Mapping]]] = ..., late: _Optional[bool] = ..., ledger: _Optional[str] = ..., term: _Optional[int] = ..., dropped: _Optional[_Iterable[_Union[Dropped, _Mapping]]] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("operator", "epoch")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    operator: str
    epoch: int
    def __init__(self, operator: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Superseded(_message.Message):
    __slots__ = ("operator", "partition", "epoch", "owner", "voided")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    VOIDED_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    epoch: int
    owner: _common_pb2.Replica
    voided: int
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ..., epoch: _Optional[int] = ..., owner: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., voided: _Optional[int] = ...) -> None: ...

class Incoming(_message.Message):
    __slots__ = ("operator", "partition", "move_id")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    move_id: str
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ..., move_id: _Optional[str] = ...) -> None: ...

class NamedFollower(_message.Message):
    __slots__ = ("operator", "partition", "move_id", "replica", "standby")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    move_id: str
    replica: str
    standby: bool
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ..., move_id: _Optional[str] = ..., replica: _Optional[str] = ..., standby: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("name", "incarnation", "incoming", "directory", "replica", "opening", "term", "alone", "alone_order", "version", "outgoing")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INCOMING_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    ALONE_ORDER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTGOING_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    incoming: _containers.RepeatedCompositeFieldContainer[Incoming]
    directory: Directory
    replica: _common_pb2.Replica
    opening: bool
    term: int
    alone: _containers.RepeatedScalarFieldContainer[str]
    alone_order: int
    version: str
    outgoing: _containers.RepeatedCompositeFieldContainer[Incoming]
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., incoming: _Optional[_Iterable[_Union[Incoming, _Mapping]]] = ..., directory: _Optional[_Union[Directory, _Mapping]] = ..., replica: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., opening: _Optional[bool] = ..., term: _Optional[int] = ..., alone: _Optional[_Iterable[str]] = ..., alone_order: _Optional[int] = ..., version: _Optional[str] = ..., outgoing: _Optional[_Iterable[_Union[Incoming, _Mapping]]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known", "lease_s", "ended", "ticket", "ledger", "term", "claimed", "adopted", "alone", "alone_order", "followers")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    ALONE_ORDER_FIELD_NUMBER: _ClassVar[int]
    FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    known: bool
    lease_s: float
    ended: _containers.RepeatedCompositeFieldContainer[Incoming]
    ticket: str
    ledger: str
    term: int
    claimed: bool
    adopted: str
    alone: _containers.RepeatedScalarFieldContainer[str]
    alone_order: int
    followers: _containers.RepeatedCompositeFieldContainer[NamedFollower]
    def __init__(self, known: _Optional[bool] = ..., lease_s: _Optional[float] = ..., ended: _Optional[_Iterable[_Union[Incoming, _Mapping]]] = ..., ticket: _Optional[str] = ..., ledger: _Optional[str] = ..., term: _Optional[int] = ..., claimed: _Optional[bool] = ..., adopted: _Optional[str] = ..., alone: _Optional[_Iterable[str]] = ..., alone_order: _Optional[int] = ..., followers: _Optional[_Iterable[_Union[NamedFollower, _Mapping]]] = ...) -> None: ...

class DeployRequest(_message.Message):
    __slots__ = ("spec", "sites", "anywhere", "failover")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    ANYWHERE_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.OperatorSpec
    sites: _containers.RepeatedScalarFieldContainer[str]
    anywhere: bool
    failover: str
    def __init__(self, spec: _Optional[_Union[_common_pb2.OperatorSpec, _Mapping]] = ..., sites: _Optional[_Iterable[str]] = ..., anywhere: _Optional[bool] = ..., failover: _Optional[str] = ...) -> None: ...

class Deployment(_message.Message):
    __slots__ = ("spec", "version", "replicas", "owners", "epochs", "unserved", "sites", "follower", "failover")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.OperatorSpec
    version: int
    replicas: _containers.RepeatedCompositeFieldContainer[_common_pb2.Replica]
    owners: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    unserved: _containers.RepeatedCompositeFieldContainer[Unserved]
    sites: _containers.RepeatedScalarFieldContainer[str]
    follower: Follower
    failover: str
    def __init__(self, spec: _Optional[_Union[_common_pb2.OperatorSpec, _Mapping]] = ..., version: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[_common_pb2.Replica, _Mapping]]] = ..., owners: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., unserved: _Optional[_Iterable[_Union[Unserved, _Mapping]]] = ..., sites: _Optional[_Iterable[str]] = ..., follower: _Optional[_Union[Follower, _Mapping]] = ..., failover: _Optional[str] = ...) -> None: ...

class Follower(_message.Message):
    __slots__ = ("address", "leader", "age_s")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    address: str
    leader: str
    age_s: float
    def __init__(self, address: _Optional[str] = ..., leader: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class Unserved(_message.Message):
    __slots__ = ("operator", "partitions", "owner", "fault")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    owner: str
    fault: _common_pb2.Fault
    def __init__(self, operator: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., owner: _Optional[str] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ...) -> None: ...

class GetDeploymentRequest(_message.Message):
    __slots__ = ("operator",)
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    operator: str
    def __init__(self, operator: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("measured",)
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    measured: bool
    def __init__(self, measured: _Optional[bool] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("replica", "alive", "last_heartbeat_s", "partitions", "opening", "stopped", "room_bytes", "version")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.Replica
    alive: bool
    last_heartbeat_s: float
    partitions: int
    opening: bool
    stopped: bool
    room_bytes: int
    version: str
    def __init__(self, replica: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., alive: _Optional[bool] = ..., last_heartbeat_s: _Optional[float] = ..., partitions: _Optional[int] = ..., opening: _Optional[bool] = ..., stopped: _Optional[bool] = ..., room_bytes: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("replicas", "deployments", "reconfigurations", "standbys", "refused", "deploying", "follower", "maintenance", "links", "damaged")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENTS_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURATIONS_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DEPLOYING_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    MAINTENANCE_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    deployments: _containers.RepeatedCompositeFieldContainer[Deployment]
    reconfigurations: _containers.RepeatedCompositeFieldContainer[Reconfiguration]
    standbys: _containers.RepeatedCompositeFieldContainer[StandbyView]
    refused: _containers.RepeatedCompositeFieldContainer[Refused]
    deploying: _containers.RepeatedCompositeFieldContainer[Deploying]
    follower: Follower
    maintenance: _containers.RepeatedCompositeFieldContainer[Maintenance]
    links: _containers.RepeatedCompositeFieldContainer[Link]
    damaged: _containers.RepeatedCompositeFieldContainer[PartitionFault]
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., deployments: _Optional[_Iterable[_Union[Deployment, _Mapping]]] = ..., reconfigurations: _Optional[_Iterable[_Union[Reconfiguration, _Mapping]]] = ..., standbys: _Optional[_Iterable[_Union[StandbyView, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[Refused, _Mapping]]] = ..., deploying: _Optional[_Iterable[_Union[Deploying, _Mapping]]] = ..., follower: _Optional[_Union[Follower, _Mapping]] = ..., maintenance: _Optional[_Iterable[_Union[Maintenance, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., damaged: _Optional[_Iterable[_Union[PartitionFault, _Mapping]]] = ...) -> None: ...

class Deploying(_message.Message):
    __slots__ = ("operator", "partitions", "created", "tried")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    TRIED_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partitions: int
    created: int
    tried: int
    def __init__(self, operator: _Optional[str] = ..., partitions: _Optional[int] = ..., created: _Optional[int] = ..., tried: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("replica", "directory", "fault", "asked_s")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    ASKED_S_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.Replica
    directory: Directory
    fault: _common_pb2.Fault
    asked_s: float
    def __init__(self, replica: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., directory: _Optional[_Union[Directory, _Mapping]] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ..., asked_s: _Optional[float] = ...) -> None: ...

class ReplaceRequest(_message.Message):
    __slots__ = ("replica", "directory")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    replica: str
    directory: str
    def __init__(self, replica: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class ReplaceReply(_message.Message):
    __slots__ = ("directory", "partitions")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    directory: str
    partitions: int
    def __init__(self, directory: _Optional[str] = ..., partitions: _Optional[int] = ...) -> None: ...

class TakeOverLostRequest(_message.Message):
    __slots__ = ("operator", "partitions", "accept_loss")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LOSS_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    accept_loss: bool
    def __init__(self, operator: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., accept_loss: _Optional[bool] = ...) -> None: ...

class BundlePart(_message.Message):
    __slots__ = ("bundle", "number", "count", "data")
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    bundle: str
    number: int
    count: int
    data: bytes
    def __init__(self, bundle: _Optional[str] = ..., number: _Optional[int] = ..., count: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class BundlePartRequest(_message.Message):
    __slots__ = ("bundle", "number")
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    bundle: str
    number: int
    def __init__(self, bundle: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class VersionsRequest(_message.Message):
    __slots__ = ("operator",)
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    operator: str
    def __init__(self, operator: _Optional[str] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("number", "target", "bundle", "source_digest", "recorded_us")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RECORDED_US_FIELD_NUMBER: _ClassVar[int]
    number: int
    target: str
    bundle: str
    source_digest: str
    recorded_us: int
    def __init__(self, number: _Optional[int] = ..., target: _Optional[str] = ..., bundle: _Optional[str] = ..., source_digest: _Optional[str] = ..., recorded_us: _Optional[int] = ...) -> None: ...

class VersionList(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[Version]
    def __init__(self, versions: _Optional[_Iterable[_Union[Version, _Mapping]]] = ...) -> None: ...

class UpgradeRequest(_message.Message):
    __slots__ = ("operator", "version")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    operator: str
    version: int
    def __init__(self, operator: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class UndeployRequest(_message.Message):
    __slots__ = ("operator", "delete_state")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    DELETE_STATE_FIELD_NUMBER: _ClassVar[int]
    operator: str
    delete_state: bool
    def __init__(self, operator: _Optional[str] = ..., delete_state: _Optional[bool] = ...) -> None: ...

class UndeployReply(_message.Message):
    __slots__ = ("partitions", "waiting")
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    partitions: int
    waiting: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, partitions: _Optional[int] = ..., waiting: _Optional[_Iterable[str]] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: str
    def __init__(self, replica: _Optional[str] = ...) -> None: ...

class StandbyView(_message.Message):
    __slots__ = ("operator", "partition", "replica", "phase", "lag_bytes")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    replica: str
    phase: str
    lag_bytes: int
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ..., replica: _Optional[str] = ..., phase: _Optional[str] = ..., lag_bytes: _Optional[int] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("operator", "partitions", "to", "options")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    to: str
    options: MoveOptions
    def __init__(self, operator: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., to: _Optional[str] = ..., options: _Optional[_Union[MoveOptions, _Mapping]] = ...) -> None: ...

class MoveOptions(_message.Message):
    __slots__ = ("max_pause_ms", "max_bandwidth", "patience_s", "strategy", "order", "limit", "per_node", "per_link")
    MAX_PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PER_NODE_FIELD_NUMBER: _ClassVar[int]
    PER_LINK_FIELD_NUMBER: _ClassVar[int]
    max_pause_ms: float
    max_bandwidth: float
    patience_s: float
    strategy: str
    order: str
    limit: int
    per_node: int
    per_link: int
    def __init__(self, max_pause_ms: _Optional[float] = ..., max_bandwidth: _Optional[float] = ..., patience_s: _Optional[float] = ..., strategy: _Optional[str] = ..., order: _Optional[str] = ..., limit: _Optional[int] = ..., per_node: _Optional[int] = ..., per_link: _Optional[int] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ("operator", "options")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    operator: str
    options: MoveOptions
    def __init__(self, operator: _Optional[str] = ..., options: _Optional[_Union[MoveOptions, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("replica", "options", "maintenance")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MAINTENANCE_FIELD_NUMBER: _ClassVar[int]
    replica: str
    options: MoveOptions
    maintenance: Maintenance
    def __init__(self, replica: _Optional[str] = ..., options: _Optional[_Union[MoveOptions, _Mapping]] = ..., maintenance: _Optional[_Union[Maintenance, _Mapping]] = ...) -> None: ...

class Maintenance(_message.Message):
    __slots__ = ("node", "for_s", "one_of", "since_us", "until_us")
    NODE_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    ONE_OF_FIELD_NUMBER: _ClassVar[int]
    SINCE_US_FIELD_NUMBER: _ClassVar[int]
    UNTIL_US_FIELD_NUMBER: _ClassVar[int]
    node: str
    for_s: float
    one_of: str
    since_us: int
    until_us: int
    def __init__(self, node: _Optional[str] = ..., for_s: _Optional[float] = ..., one_of: _Optional[str] = ..., since_us: _Optional[int] = ..., until_us: _Optional[int] = ...) -> None: ...

class EndMaintenanceRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("migrate", "drain", "rebalance", "take_over")
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    REBALANCE_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    migrate: MigrateRequest
    drain: DrainRequest
    rebalance: RebalanceRequest
    take_over: TakeOverLostRequest
    def __init__(self, migrate: _Optional[_Union[MigrateRequest, _Mapping]] = ..., drain: _Optional[_Union[DrainRequest, _Mapping]] = ..., rebalance: _Optional[_Union[RebalanceRequest, _Mapping]] = ..., take_over: _Optional[_Union[TakeOverLostRequest, _Mapping]] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("operator", "policies", "options", "dry_run")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    operator: str
    policies: _containers.RepeatedScalarFieldContainer[str]
    options: MoveOptions
    dry_run: bool
    def __init__(self, operator: _Optional[str] = ..., policies: _Optional[_Iterable[str]] = ..., options: _Optional[_Union[MoveOptions, _Mapping]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ProposedMove(_message.Message):
    __slots__ = ("operator", "partition", "source", "target", "reason", "bytes")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    source: str
    target: str
    reason: str
    bytes: int
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., reason: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class PlaceReply(_message.Message):
    __slots__ = ("moves", "uneven_rows", "uneven_rows_after", "uneven_bytes", "uneven_bytes_after", "pause_ms", "pause_ms_at_most", "reconfigurations", "silent", "left", "lacking")
    MOVES_FIELD_NUMBER: _ClassVar[int]
    UNEVEN_ROWS_FIELD_NUMBER: _ClassVar[int]
    UNEVEN_ROWS_AFTER_FIELD_NUMBER: _ClassVar[int]
    UNEVEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNEVEN_BYTES_AFTER_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_AT_MOST_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURATIONS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[ProposedMove]
    uneven_rows: float
    uneven_rows_after: float
    uneven_bytes: float
    uneven_bytes_after: float
    pause_ms: float
    pause_ms_at_most: float
    reconfigurations: _containers.RepeatedCompositeFieldContainer[Reconfiguration]
    silent: _containers.RepeatedScalarFieldContainer[str]
    left: _containers.RepeatedCompositeFieldContainer[Left]
    lacking: _containers.RepeatedCompositeFieldContainer[Lacking]
    def __init__(self, moves: _Optional[_Iterable[_Union[ProposedMove, _Mapping]]] = ..., uneven_rows: _Optional[float] = ..., uneven_rows_after: _Optional[float] = ..., uneven_bytes: _Optional[float] = ..., uneven_bytes_after: _Optional[float] = ..., pause_ms: _Optional[float] = ..., pause_ms_at_most: _Optional[float] = ..., reconfigurations: _Optional[_Iterable[_Union[Reconfiguration, _Mapping]]] = ..., silent: _Optional[_Iterable[str]] = ..., left: _Optional[_Iterable[_Union[Left, _Mapping]]] = ..., lacking: _Optional[_Iterable[_Union[Lacking, _Mapping]]] = ...) -> None: ...

class AutopilotRequest(_message.Message):
    __slots__ = ("orders",)
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    orders: AutopilotOrders
    def __init__(self, orders: _Optional[_Union[AutopilotOrders, _Mapping]] = ...) -> None: ...

class AutopilotOrders(_message.Message):
    __slots__ = ("policies", "max_pause_ms", "cool_down_s", "moves_per_minute")
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    MAX_PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    COOL_DOWN_S_FIELD_NUMBER: _ClassVar[int]
    MOVES_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    policies: _containers.RepeatedScalarFieldContainer[str]
    max_pause_ms: float
    cool_down_s: float
    moves_per_minute: float
    def __init__(self, policies: _Optional[_Iterable[str]] = ..., max_pause_ms: _Optional[float] = ..., cool_down_s: _Optional[float] = ..., moves_per_minute: _Optional[float] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("name", "schedule", "do", "operator", "policies", "partitions", "to", "options", "paused", "next_us", "runs", "coordinator", "workers", "follower", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    DO_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NEXT_US_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    schedule: str
    do: str
    operator: str
    policies: _containers.RepeatedScalarFieldContainer[str]
    partitions: _containers.RepeatedScalarFieldContainer[int]
    to: str
    options: MoveOptions
    paused: bool
    next_us: int
    runs: _containers.RepeatedCompositeFieldContainer[JobRun]
    coordinator: str
    workers: str
    follower: Follower
    error: str
    def __init__(self, name: _Optional[str] = ..., schedule: _Optional[str] = ..., do: _Optional[str] = ..., operator: _Optional[str] = ..., policies: _Optional[_Iterable[str]] = ..., partitions: _Optional[_Iterable[int]] = ..., to: _Optional[str] = ..., options: _Optional[_Union[MoveOptions, _Mapping]] = ..., paused: _Optional[bool] = ..., next_us: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[JobRun, _Mapping]]] = ..., coordinator: _Optional[str] = ..., workers: _Optional[str] = ..., follower: _Optional[_Union[Follower, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class JobRun(_message.Message):
    __slots__ = ("at_us", "began_us", "ended_us", "state", "reconfigurations", "note", "id", "stages", "follower")
    AT_US_FIELD_NUMBER: _ClassVar[int]
    BEGAN_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURATIONS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    at_us: int
    began_us: int
    ended_us: int
    state: str
    reconfigurations: _containers.RepeatedScalarFieldContainer[str]
    note: str
    id: str
    stages: _containers.RepeatedCompositeFieldContainer[JobStage]
    follower: Follower
    def __init__(self, at_us: _Optional[int] = ..., began_us: _Optional[int] = ..., ended_us: _Optional[int] = ..., state: _Optional[str] = ..., reconfigurations: _Optional[_Iterable[str]] = ..., note: _Optional[str] = ..., id: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[JobStage, _Mapping]]] = ..., follower: _Optional[_Union[Follower, _Mapping]] = ...) -> None: ...

class JobStage(_message.Message):
    __slots__ = ("operator", "reconfigurations", "error")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURATIONS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    operator: str
    reconfigurations: _containers.RepeatedScalarFieldContainer[str]
    error: str
    def __init__(self, operator: _Optional[str] = ..., reconfigurations: _Optional[_Iterable[str]] = ..., error: _Optional[str] = ...) -> None: ...

class JobRunRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ChangeJobRequest(_message.Message):
    __slots__ = ("name", "change")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    change: str
    def __init__(self, name: _Optional[str] = ..., change: _Optional[str] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class JobList(_message.Message):
    __slots__ = ("jobs", "follower")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    follower: Follower
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., follower: _Optional[_Union[Follower, _Mapping]] = ...) -> None: ...

class StandbyRequest(_message.Message):
    __slots__ = ("operator", "count")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    operator: str
    count: int
    def __init__(self, operator: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class StandbyReply(_message.Message):
    __slots__ = ("standbys",)
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    standbys: _containers.RepeatedCompositeFieldContainer[StandbyView]
    def __init__(self, standbys: _Optional[_Iterable[_Union[StandbyView, _Mapping]]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ReconfigurationList(_message.Message):
    __slots__ = ("reconfigurations", "follower")
    RECONFIGURATIONS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    reconfigurations: _containers.RepeatedCompositeFieldContainer[Reconfiguration]
    follower: Follower
    def __init__(self, reconfigurations: _Optional[_Iterable[_Union[Reconfiguration, _Mapping]]] = ..., follower: _Optional[_Union[Follower, _Mapping]] = ...) -> None: ...

class RestoreOperatorRequest(_message.Message):
    __slots__ = ("operator", "partitions", "to", "url", "savepoint", "source", "batch", "stop_sources")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    STOP_SOURCES_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    to: str
    url: str
    savepoint: str
    source: str
    batch: int
    stop_sources: bool
    def __init__(self, operator: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., to: _Optional[str] = ..., url: _Optional[str] = ..., savepoint: _Optional[str] = ..., source: _Optional[str] = ..., batch: _Optional[int] = ..., stop_sources: _Optional[bool] = ...) -> None: ...

class RestoredPartition(_message.Message):
    __slots__ = ("partition", "replica", "result", "fault")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    partition: int
    replica: str
    result: _replica_pb2.RestoreReply
    fault: _common_pb2.Fault
    def __init__(self, partition: _Optional[int] = ..., replica: _Optional[str] = ..., result: _Optional[_Union[_replica_pb2.RestoreReply, _Mapping]] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ...) -> None: ...

class CancelRestoreRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class RestoreReport(_message.Message):
    __slots__ = ("id", "partitions")
    ID_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    id: str
    partitions: _containers.RepeatedCompositeFieldContainer[RestoredPartition]
    def __init__(self, id: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[RestoredPartition, _Mapping]]] = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("id", "how")
    ID_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    id: str
    how: str
    def __init__(self, id: _Optional[str] = ..., how: _Optional[str] = ...) -> None: ...

class ReconfigurationRequest(_message.Message):
    __slots__ = ("id", "cancelled")
    ID_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    id: str
    cancelled: bool
    def __init__(self, id: _Optional[str] = ..., cancelled: _Optional[bool] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("id", "partition", "source", "target", "phase", "bytes_warm", "bytes_reused", "bytes_delta", "rounds", "predicted_pause_ms", "pause_ms", "duration_s", "digest", "strategy", "fault", "epoch", "started_us", "fenced_us", "lag_bytes", "change_rate", "bandwidth", "rtt_ms", "margin_ms", "bytes_stored", "base_bytes", "note", "reason")
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
    CHANGE_RATE_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    MARGIN_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_STORED_FIELD_NUMBER: _ClassVar[int]
    BASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
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
    change_rate: float
    bandwidth: float
    rtt_ms: float
    margin_ms: float
    bytes_stored: int
    base_bytes: int
    note: str
    reason: str
    def __init__(self, id: _Optional[str] = ..., partition: _Optional[int] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., phase: _Optional[str] = ..., bytes_warm: _Optional[int] = ..., bytes_reused: _Optional[int] = ..., bytes_delta: _Optional[int] = ..., rounds: _Optional[int] = ..., predicted_pause_ms: _Optional[float] = ..., pause_ms: _Optional[float] = ..., duration_s: _Optional[float] = ..., digest: _Optional[str] = ..., strategy: _Optional[str] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ..., epoch: _Optional[int] = ..., started_us: _Optional[int] = ..., fenced_us: _Optional[int] = ..., lag_bytes: _Optional[int] = ..., change_rate: _Optional[float] = ..., bandwidth: _Optional[float] = ..., rtt_ms: _Optional[float] = ..., margin_ms: _Optional[float] = ..., bytes_stored: _Optional[int] = ..., base_bytes: _Optional[int] = ..., note: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Reconfiguration(_message.Message):
    __slots__ = ("id", "operator", "state", "moves", "max_pause_ms", "created_us", "kind", "strategy", "follower", "limit", "per_node", "per_link", "worked_s", "by")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    MAX_PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    CREATED_US_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PER_NODE_FIELD_NUMBER: _ClassVar[int]
    PER_LINK_FIELD_NUMBER: _ClassVar[int]
    WORKED_S_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    id: str
    operator: str
    state: str
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    max_pause_ms: float
    created_us: int
    kind: str
    strategy: str
    follower: Follower
    limit: int
    per_node: int
    per_link: int
    worked_s: float
    by: str
    def __init__(self, id: _Optional[str] = ..., operator: _Optional[str] = ..., state: _Optional[str] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ..., max_pause_ms: _Optional[float] = ..., created_us: _Optional[int] = ..., kind: _Optional[str] = ..., strategy: _Optional[str] = ..., follower: _Optional[_Union[Follower, _Mapping]] = ..., limit: _Optional[int] = ..., per_node: _Optional[int] = ..., per_link: _Optional[int] = ..., worked_s: _Optional[float] = ..., by: _Optional[str] = ...) -> None: ...

class EditRequest(_message.Message):
    __slots__ = ("id", "limit", "per_node", "per_link")
    ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PER_NODE_FIELD_NUMBER: _ClassVar[int]
    PER_LINK_FIELD_NUMBER: _ClassVar[int]
    id: str
    limit: int
    per_node: int
    per_link: int
    def __init__(self, id: _Optional[str] = ..., limit: _Optional[int] = ..., per_node: _Optional[int] = ..., per_link: _Optional[int] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("replica", "directory", "operators", "partitions", "first", "last")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    replica: _common_pb2.Replica
    directory: Directory
    operators: _containers.RepeatedCompositeFieldContainer[_common_pb2.OperatorSpec]
    partitions: _containers.RepeatedCompositeFieldContainer[_replica_pb2.PartitionView]
    first: bool
    last: bool
    def __init__(self, replica: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., directory: _Optional[_Union[Directory, _Mapping]] = ..., operators: _Optional[_Iterable[_Union[_common_pb2.OperatorSpec, _Mapping]]] = ..., partitions: _Optional[_Iterable[_Union[_replica_pb2.PartitionView, _Mapping]]] = ..., first: _Optional[bool] = ..., last: _Optional[bool] = ...) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("dry_run", "partial")
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    partial: bool
    def __init__(self, dry_run: _Optional[bool] = ..., partial: _Optional[bool] = ...) -> None: ...

class AdoptReply(_message.Message):
    __slots__ = ("operators",)
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    operators: _containers.RepeatedCompositeFieldContainer[Adopted]
    def __init__(self, operators: _Optional[_Iterable[_Union[Adopted, _Mapping]]] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("operator", "count", "partitions", "sealed", "missing", "conflicts", "done")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    CONFLICTS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    operator: str
    count: int
    partitions: _containers.RepeatedScalarFieldContainer[int]
    sealed: _containers.RepeatedScalarFieldContainer[int]
    missing: _containers.RepeatedScalarFieldContainer[int]
    conflicts: _containers.RepeatedScalarFieldContainer[str]
    done: bool
    def __init__(self, operator: _Optional[str] = ..., count: _Optional[int] = ..., partitions: _Optional[_Iterable[int]] = ..., sealed: _Optional[_Iterable[int]] = ..., missing: _Optional[_Iterable[int]] = ..., conflicts: _Optional[_Iterable[str]] = ..., done: _Optional[bool] = ...) -> None: ...

class Agent(_message.Message):
    __slots__ = ("name", "site", "address", "labels", "cores", "memory_bytes", "disk_bytes", "version", "python", "limits")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    site: str
    address: str
    labels: _containers.ScalarMap[str, str]
    cores: int
    memory_bytes: int
    disk_bytes: int
    version: str
    python: str
    limits: str
    def __init__(self, name: _Optional[str] = ..., site: _Optional[str] = ..., address: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., cores: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., version: _Optional[str] = ..., python: _Optional[str] = ..., limits: _Optional[str] = ...) -> None: ...

class Spawned(_message.Message):
    __slots__ = ("replica", "agent", "running", "generation", "workers", "weight", "memory_bytes")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    replica: str
    agent: str
    running: bool
    generation: int
    workers: int
    weight: int
    memory_bytes: int
    def __init__(self, replica: _Optional[str] = ..., agent: _Optional[str] = ..., running: _Optional[bool] = ..., generation: _Optional[int] = ..., workers: _Optional[int] = ..., weight: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Child(_message.Message):
    __slots__ = ("spawned", "state", "deaths", "fault", "address")
    SPAWNED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    spawned: Spawned
    state: str
    deaths: int
    fault: _common_pb2.Fault
    address: str
    def __init__(self, spawned: _Optional[_Union[Spawned, _Mapping]] = ..., state: _Optional[str] = ..., deaths: _Optional[int] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class AgentBeatRequest(_message.Message):
    __slots__ = ("agent", "directory", "incarnation", "disk_free_bytes", "children", "term")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    directory: Directory
    incarnation: str
    disk_free_bytes: int
    children: _containers.RepeatedCompositeFieldContainer[Child]
    term: int
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ..., directory: _Optional[_Union[Directory, _Mapping]] = ..., incarnation: _Optional[str] = ..., disk_free_bytes: _Optional[int] = ..., children: _Optional[_Iterable[_Union[Child, _Mapping]]] = ..., term: _Optional[int] = ...) -> None: ...

class AgentBeatReply(_message.Message):
    __slots__ = ("lease_s", "wanted", "ledger", "term", "adopted", "heartbeat_interval_s")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    wanted: _containers.RepeatedCompositeFieldContainer[Spawned]
    ledger: str
    term: int
    adopted: str
    heartbeat_interval_s: float
    def __init__(self, lease_s: _Optional[float] = ..., wanted: _Optional[_Iterable[_Union[Spawned, _Mapping]]] = ..., ledger: _Optional[str] = ..., term: _Optional[int] = ..., adopted: _Optional[str] = ..., heartbeat_interval_s: _Optional[float] = ...) -> None: ...

class ListAgentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AgentView(_message.Message):
    __slots__ = ("agent", "alive", "last_heartbeat_s", "disk_free_bytes", "wanted", "children")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    agent: Agent
    alive: bool
    last_heartbeat_s: float
    disk_free_bytes: int
    wanted: _containers.RepeatedCompositeFieldContainer[Spawned]
    children: _containers.RepeatedCompositeFieldContainer[Child]
    def __init__(self, agent: _Optional[_Union[Agent, _Mapping]] = ..., alive: _Optional[bool] = ..., last_heartbeat_s: _Optional[float] = ..., disk_free_bytes: _Optional[int] = ..., wanted: _Optional[_Iterable[_Union[Spawned, _Mapping]]] = ..., children: _Optional[_Iterable[_Union[Child, _Mapping]]] = ...) -> None: ...

class AgentList(_message.Message):
    __slots__ = ("agents",)
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    agents: _containers.RepeatedCompositeFieldContainer[AgentView]
    def __init__(self, agents: _Optional[_Iterable[_Union[AgentView, _Mapping]]] = ...) -> None: ...

class SpawnRequest(_message.Message):
    __slots__ = ("at", "count", "workers", "weight", "memory_bytes", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    AT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    at: str
    count: int
    workers: int
    weight: int
    memory_bytes: int
    labels: _containers.ScalarMap[str, str]
    def __init__(self, at: _Optional[str] = ..., count: _Optional[int] = ..., workers: _Optional[int] = ..., weight: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SpawnReply(_message.Message):
    __slots__ = ("spawned",)
    SPAWNED_FIELD_NUMBER: _ClassVar[int]
    spawned: _containers.RepeatedCompositeFieldContainer[Spawned]
    def __init__(self, spawned: _Optional[_Iterable[_Union[Spawned, _Mapping]]] = ...) -> None: ...

class StopReplicaRequest(_message.Message):
    __slots__ = ("replica", "force")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    replica: str
    force: bool
    def __init__(self, replica: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class RestartAllRequest(_message.Message):
    __slots__ = ("site", "limit")
    SITE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    site: str
    limit: int
    def __init__(self, site: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class RollingRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class RollingNode(_message.Message):
    __slots__ = ("node", "status", "error", "ms")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    node: str
    status: str
    error: str
    ms: int
    def __init__(self, node: _Optional[str] = ..., status: _Optional[str] = ..., error: _Optional[str] = ..., ms: _Optional[int] = ...) -> None: ...

class Rolling(_message.Message):
    __slots__ = ("id", "state", "site", "limit", "nodes")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    id: str
    state: str
    site: str
    limit: int
    nodes: _containers.RepeatedCompositeFieldContainer[RollingNode]
    def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., site: _Optional[str] = ..., limit: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[RollingNode, _Mapping]]] = ...) -> None: ...

class BeginSweepRequest(_message.Message):
    __slots__ = ("chore", "site", "limit", "operator")
    CHORE_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    chore: str
    site: str
    limit: int
    operator: str
    def __init__(self, chore: _Optional[str] = ..., site: _Optional[str] = ..., limit: _Optional[int] = ..., operator: _Optional[str] = ...) -> None: ...

class SweepRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class PartitionFault(_message.Message):
    __slots__ = ("operator", "partition", "replica", "error", "undone")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    UNDONE_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    replica: str
    error: str
    undone: bool
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ..., replica: _Optional[str] = ..., error: _Optional[str] = ..., undone: _Optional[bool] = ...) -> None: ...

class SweepNode(_message.Message):
    __slots__ = ("node", "status", "error", "ms", "partitions", "bytes_new", "bytes_total", "bytes_read", "cells", "compared", "faults")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_NEW_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    COMPARED_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    node: str
    status: str
    error: str
    ms: int
    partitions: int
    bytes_new: int
    bytes_total: int
    bytes_read: int
    cells: int
    compared: int
    faults: _containers.RepeatedCompositeFieldContainer[PartitionFault]
    def __init__(self, node: _Optional[str] = ..., status: _Optional[str] = ..., error: _Optional[str] = ..., ms: _Optional[int] = ..., partitions: _Optional[int] = ..., bytes_new: _Optional[int] = ..., bytes_total: _Optional[int] = ..., bytes_read: _Optional[int] = ..., cells: _Optional[int] = ..., compared: _Optional[int] = ..., faults: _Optional[_Iterable[_Union[PartitionFault, _Mapping]]] = ...) -> None: ...

class Sweep(_message.Message):
    __slots__ = ("id", "chore", "state", "operator", "site", "limit", "nodes")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHORE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    id: str
    chore: str
    state: str
    operator: str
    site: str
    limit: int
    nodes: _containers.RepeatedCompositeFieldContainer[SweepNode]
    def __init__(self, id: _Optional[str] = ..., chore: _Optional[str] = ..., state: _Optional[str] = ..., operator: _Optional[str] = ..., site: _Optional[str] = ..., limit: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[SweepNode, _Mapping]]] = ...) -> None: ...

class RestartReplicaRequest(_message.Message):
    __slots__ = ("replica",)
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    replica: str
    def __init__(self, replica: _Optional[str] = ...) -> None: ...

class ForgetAgentRequest(_message.Message):
    __slots__ = ("agent",)
    AGENT_FIELD_NUMBER: _ClassVar[int]
    agent: str
    def __init__(self, agent: _Optional[str] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("source", "target", "rtt_ms", "bytes_per_s")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    source: str
    target: str
    rtt_ms: float
    bytes_per_s: float
    def __init__(self, source: _Optional[str] = ..., target: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Left(_message.Message):
    __slots__ = ("operator", "partition", "reason")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    reason: str
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Lacking(_message.Message):
    __slots__ = ("replicas", "free_bytes", "coming_bytes")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMING_BYTES_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedScalarFieldContainer[str]
    free_bytes: int
    coming_bytes: int
    def __init__(self, replicas: _Optional[_Iterable[str]] = ..., free_bytes: _Optional[int] = ..., coming_bytes: _Optional[int] = ...) -> None: ...
