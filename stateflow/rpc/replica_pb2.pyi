from stateflow.rpc import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApplyHeader(_message.Message):
    __slots__ = ("operator", "source", "batch", "input_schema", "sparse", "watermark_us", "attempt", "event_us", "rewind", "session", "known", "site", "site_column", "traceparent")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    INPUT_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_US_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EVENT_US_FIELD_NUMBER: _ClassVar[int]
    REWIND_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    SITE_COLUMN_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    operator: str
    source: str
    batch: int
    input_schema: bytes
    sparse: bool
    watermark_us: int
    attempt: Attempt
    event_us: int
    rewind: bool
    session: SourceSession
    known: bytes
    site: str
    site_column: str
    traceparent: str
    def __init__(self, operator: _Optional[str] = ..., source: _Optional[str] = ..., batch: _Optional[int] = ..., input_schema: _Optional[bytes] = ..., sparse: _Optional[bool] = ..., watermark_us: _Optional[int] = ..., attempt: _Optional[_Union[Attempt, _Mapping]] = ..., event_us: _Optional[int] = ..., rewind: _Optional[bool] = ..., session: _Optional[_Union[SourceSession, _Mapping]] = ..., known: _Optional[bytes] = ..., site: _Optional[str] = ..., site_column: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class SourceSession(_message.Message):
    __slots__ = ("generation_us", "id")
    GENERATION_US_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    generation_us: int
    id: str
    def __init__(self, generation_us: _Optional[int] = ..., id: _Optional[str] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("run", "use", "task", "call")
    RUN_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    run: str
    use: str
    task: str
    call: str
    def __init__(self, run: _Optional[str] = ..., use: _Optional[str] = ..., task: _Optional[str] = ..., call: _Optional[str] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("call", "header", "last", "partitions", "epochs", "counts", "afters", "digests", "rows", "more")
    CALL_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    AFTERS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    call: int
    header: ApplyHeader
    last: bool
    partitions: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    afters: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    rows: bytes
    more: bool
    def __init__(self, call: _Optional[int] = ..., header: _Optional[_Union[ApplyHeader, _Mapping]] = ..., last: _Optional[bool] = ..., partitions: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., afters: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., rows: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...

class PartitionResult(_message.Message):
    __slots__ = ("partition", "output", "last", "replayed", "fault", "operator_us", "commit_us")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_US_FIELD_NUMBER: _ClassVar[int]
    COMMIT_US_FIELD_NUMBER: _ClassVar[int]
    partition: int
    output: bytes
    last: bool
    replayed: bool
    fault: _common_pb2.Fault
    operator_us: int
    commit_us: int
    def __init__(self, partition: _Optional[int] = ..., output: _Optional[bytes] = ..., last: _Optional[bool] = ..., replayed: _Optional[bool] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ..., operator_us: _Optional[int] = ..., commit_us: _Optional[int] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("call", "results", "last", "fault", "passed")
    CALL_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    call: int
    results: _containers.RepeatedCompositeFieldContainer[PartitionResult]
    last: bool
    fault: _common_pb2.Fault
    passed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, call: _Optional[int] = ..., results: _Optional[_Iterable[_Union[PartitionResult, _Mapping]]] = ..., last: _Optional[bool] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ..., passed: _Optional[_Iterable[int]] = ...) -> None: ...

class CreateRequest(_message.Message):
    __slots__ = ("spec", "partitions", "epoch", "total", "asked", "command")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.OperatorSpec
    partitions: _containers.RepeatedScalarFieldContainer[int]
    epoch: int
    total: int
    asked: bool
    command: _common_pb2.Command
    def __init__(self, spec: _Optional[_Union[_common_pb2.OperatorSpec, _Mapping]] = ..., partitions: _Optional[_Iterable[int]] = ..., epoch: _Optional[int] = ..., total: _Optional[int] = ..., asked: _Optional[bool] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class TryRequest(_message.Message):
    __slots__ = ("spec", "partitions", "command")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    spec: _common_pb2.OperatorSpec
    partitions: _containers.RepeatedScalarFieldContainer[int]
    command: _common_pb2.Command
    def __init__(self, spec: _Optional[_Union[_common_pb2.OperatorSpec, _Mapping]] = ..., partitions: _Optional[_Iterable[int]] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class TryPage(_message.Message):
    __slots__ = ("partition",)
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    partition: int
    def __init__(self, partition: _Optional[int] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("operator", "epoch", "command")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    operator: str
    epoch: int
    command: _common_pb2.Command
    def __init__(self, operator: _Optional[str] = ..., epoch: _Optional[int] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("move_id", "spec", "partition", "source", "source_epoch", "bandwidth_max", "standby", "on_demand", "newest_epoch", "standby_move", "command")
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_MAX_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    ON_DEMAND_FIELD_NUMBER: _ClassVar[int]
    NEWEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STANDBY_MOVE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    move_id: str
    spec: _common_pb2.OperatorSpec
    partition: int
    source: _common_pb2.Replica
    source_epoch: int
    bandwidth_max: float
    standby: bool
    on_demand: bool
    newest_epoch: int
    standby_move: str
    command: _common_pb2.Command
    def __init__(self, move_id: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.OperatorSpec, _Mapping]] = ..., partition: _Optional[int] = ..., source: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., source_epoch: _Optional[int] = ..., bandwidth_max: _Optional[float] = ..., standby: _Optional[bool] = ..., on_demand: _Optional[bool] = ..., newest_epoch: _Optional[int] = ..., standby_move: _Optional[str] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class MoveProgress(_message.Message):
    __slots__ = ("phase", "bytes_warm", "bytes_reused", "bytes_delta", "rounds", "lag_bytes", "change_rate", "bandwidth", "rtt_ms", "epoch", "digest", "fault", "bytes_stored", "base_bytes", "waited_s", "sequence", "sync_ms", "stall_ms")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WARMING: _ClassVar[MoveProgress.Phase]
        CATCHING_UP: _ClassVar[MoveProgress.Phase]
        OWNED: _ClassVar[MoveProgress.Phase]
        FAILED: _ClassVar[MoveProgress.Phase]
    WARMING: MoveProgress.Phase
    CATCHING_UP: MoveProgress.Phase
    OWNED: MoveProgress.Phase
    FAILED: MoveProgress.Phase
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BYTES_WARM_FIELD_NUMBER: _ClassVar[int]
    BYTES_REUSED_FIELD_NUMBER: _ClassVar[int]
    BYTES_DELTA_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGE_RATE_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    BYTES_STORED_FIELD_NUMBER: _ClassVar[int]
    BASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SYNC_MS_FIELD_NUMBER: _ClassVar[int]
    STALL_MS_FIELD_NUMBER: _ClassVar[int]
    phase: MoveProgress.Phase
    bytes_warm: int
    bytes_reused: int
    bytes_delta: int
    rounds: int
    lag_bytes: int
    change_rate: float
    bandwidth: float
    rtt_ms: float
    epoch: int
    digest: str
    fault: _common_pb2.Fault
    bytes_stored: int
    base_bytes: int
    waited_s: float
    sequence: int
    sync_ms: float
    stall_ms: float
    def __init__(self, phase: _Optional[_Union[MoveProgress.Phase, str]] = ..., bytes_warm: _Optional[int] = ..., bytes_reused: _Optional[int] = ..., bytes_delta: _Optional[int] = ..., rounds: _Optional[int] = ..., lag_bytes: _Optional[int] = ..., change_rate: _Optional[float] = ..., bandwidth: _Optional[float] = ..., rtt_ms: _Optional[float] = ..., epoch: _Optional[int] = ..., digest: _Optional[str] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ..., bytes_stored: _Optional[int] = ..., base_bytes: _Optional[int] = ..., waited_s: _Optional[float] = ..., sequence: _Optional[int] = ..., sync_ms: _Optional[float] = ..., stall_ms: _Optional[float] = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("move_id", "operator", "partition", "epoch", "target", "cold", "pause_ms", "max_pause_ms", "standby_move", "command")
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_PAUSE_MS_FIELD_NUMBER: _ClassVar[int]
    STANDBY_MOVE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    move_id: str
    operator: str
    partition: int
    epoch: int
    target: _common_pb2.Replica
    cold: bool
    pause_ms: float
    max_pause_ms: float
    standby_move: str
    command: _common_pb2.Command
    def __init__(self, move_id: _Optional[str] = ..., operator: _Optional[str] = ..., partition: _Optional[int] = ..., epoch: _Optional[int] = ..., target: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., cold: _Optional[bool] = ..., pause_ms: _Optional[float] = ..., max_pause_ms: _Optional[float] = ..., standby_move: _Optional[str] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class FenceReply(_message.Message):
    __slots__ = ("sealed", "sequence", "in_hand_ms", "fault", "owned", "owned_epoch")
    SEALED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    IN_HAND_MS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    OWNED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    sealed: bool
    sequence: int
    in_hand_ms: float
    fault: _common_pb2.Fault
    owned: bool
    owned_epoch: int
    def __init__(self, sealed: _Optional[bool] = ..., sequence: _Optional[int] = ..., in_hand_ms: _Optional[float] = ..., fault: _Optional[_Union[_common_pb2.Fault, _Mapping]] = ..., owned: _Optional[bool] = ..., owned_epoch: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("move_id", "operator", "partition", "owned_at", "command")
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OWNED_AT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    move_id: str
    operator: str
    partition: int
    owned_at: int
    command: _common_pb2.Command
    def __init__(self, move_id: _Optional[str] = ..., operator: _Optional[str] = ..., partition: _Optional[int] = ..., owned_at: _Optional[int] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("move_id", "operator", "partition", "epoch", "owner", "command")
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    move_id: str
    operator: str
    partition: int
    epoch: int
    owner: _common_pb2.Replica
    command: _common_pb2.Command
    def __init__(self, move_id: _Optional[str] = ..., operator: _Optional[str] = ..., partition: _Optional[int] = ..., epoch: _Optional[int] = ..., owner: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("move_id", "spec", "partition", "epoch", "how", "standby_move", "oldest_epoch", "command")
    class How(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STANDBY: _ClassVar[TakeOverRequest.How]
        LOCAL: _ClassVar[TakeOverRequest.How]
        CHECKPOINT: _ClassVar[TakeOverRequest.How]
    STANDBY: TakeOverRequest.How
    LOCAL: TakeOverRequest.How
    CHECKPOINT: TakeOverRequest.How
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    STANDBY_MOVE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    move_id: str
    spec: _common_pb2.OperatorSpec
    partition: int
    epoch: int
    how: TakeOverRequest.How
    standby_move: str
    oldest_epoch: int
    command: _common_pb2.Command
    def __init__(self, move_id: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.OperatorSpec, _Mapping]] = ..., partition: _Optional[int] = ..., epoch: _Optional[int] = ..., how: _Optional[_Union[TakeOverRequest.How, str]] = ..., standby_move: _Optional[str] = ..., oldest_epoch: _Optional[int] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class TakeOverReply(_message.Message):
    __slots__ = ("epoch", "sequence", "positions", "checkpoint_epoch", "checkpoint_sequence", "checkpoint_us")
    class PositionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_US_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    positions: _containers.ScalarMap[str, int]
    checkpoint_epoch: int
    checkpoint_sequence: int
    checkpoint_us: int
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., positions: _Optional[_Mapping[str, int]] = ..., checkpoint_epoch: _Optional[int] = ..., checkpoint_sequence: _Optional[int] = ..., checkpoint_us: _Optional[int] = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("operator", "seconds", "command")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    operator: str
    seconds: float
    command: _common_pb2.Command
    def __init__(self, operator: _Optional[str] = ..., seconds: _Optional[float] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("snapshot_id", "sequence")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    sequence: int
    def __init__(self, snapshot_id: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("operator", "partition")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ...) -> None: ...

class PartitionView(_message.Message):
    __slots__ = ("operator", "partition", "state", "epoch", "sequence", "move_id", "batch_rate", "bytes", "rows", "row_bytes", "origins", "entries")
    class OriginsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_RATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    state: str
    epoch: int
    sequence: int
    move_id: str
    batch_rate: float
    bytes: int
    rows: int
    row_bytes: int
    origins: _containers.ScalarMap[str, int]
    entries: int
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., move_id: _Optional[str] = ..., batch_rate: _Optional[float] = ..., bytes: _Optional[int] = ..., rows: _Optional[int] = ..., row_bytes: _Optional[int] = ..., origins: _Optional[_Mapping[str, int]] = ..., entries: _Optional[int] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("operator", "savepoint", "partitions", "command")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    operator: str
    savepoint: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    command: _common_pb2.Command
    def __init__(self, operator: _Optional[str] = ..., savepoint: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("partitions", "bytes_new", "bytes_total", "duration_s", "url", "numbers")
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_NEW_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    partitions: int
    bytes_new: int
    bytes_total: int
    duration_s: float
    url: str
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partitions: _Optional[int] = ..., bytes_new: _Optional[int] = ..., bytes_total: _Optional[int] = ..., duration_s: _Optional[float] = ..., url: _Optional[str] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("operator", "partition", "standby_of", "command")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    STANDBY_OF_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partition: int
    standby_of: int
    command: _common_pb2.Command
    def __init__(self, operator: _Optional[str] = ..., partition: _Optional[int] = ..., standby_of: _Optional[int] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class VerifyPage(_message.Message):
    __slots__ = ("epoch", "sequence", "done", "bytes_read", "cells", "digest", "faults")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    done: bool
    bytes_read: int
    cells: int
    digest: str
    faults: _containers.RepeatedCompositeFieldContainer[_common_pb2.Fault]
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., done: _Optional[bool] = ..., bytes_read: _Optional[int] = ..., cells: _Optional[int] = ..., digest: _Optional[str] = ..., faults: _Optional[_Iterable[_Union[_common_pb2.Fault, _Mapping]]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("restore_id", "spec", "partition", "epoch", "url", "savepoint", "source", "batch", "own", "stop_sources", "command")
    RESTORE_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    SAVEPOINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    STOP_SOURCES_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    restore_id: str
    spec: _common_pb2.OperatorSpec
    partition: int
    epoch: int
    url: str
    savepoint: str
    source: str
    batch: int
    own: bool
    stop_sources: bool
    command: _common_pb2.Command
    def __init__(self, restore_id: _Optional[str] = ..., spec: _Optional[_Union[_common_pb2.OperatorSpec, _Mapping]] = ..., partition: _Optional[int] = ..., epoch: _Optional[int] = ..., url: _Optional[str] = ..., savepoint: _Optional[str] = ..., source: _Optional[str] = ..., batch: _Optional[int] = ..., own: _Optional[bool] = ..., stop_sources: _Optional[bool] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("epoch", "sequence", "positions", "bytes", "passed_over")
    class PositionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    positions: _containers.ScalarMap[str, int]
    bytes: int
    passed_over: _containers.RepeatedCompositeFieldContainer[_common_pb2.Fault]
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., positions: _Optional[_Mapping[str, int]] = ..., bytes: _Optional[int] = ..., passed_over: _Optional[_Iterable[_Union[_common_pb2.Fault, _Mapping]]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("move_id", "operator", "partition", "standby", "kept")
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    move_id: str
    operator: str
    partition: int
    standby: bool
    kept: Kept
    def __init__(self, move_id: _Optional[str] = ..., operator: _Optional[str] = ..., partition: _Optional[int] = ..., standby: _Optional[bool] = ..., kept: _Optional[_Union[Kept, _Mapping]] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("move_id", "epoch", "sequence")
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    move_id: str
    epoch: int
    sequence: int
    def __init__(self, move_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class BaseFile(_message.Message):
    __slots__ = ("name", "size", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    digest: str
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("snapshot_id", "sequence", "epoch", "digest", "files", "kept")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    sequence: int
    epoch: int
    digest: str
    files: _containers.RepeatedCompositeFieldContainer[BaseFile]
    kept: str
    def __init__(self, snapshot_id: _Optional[str] = ..., sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., digest: _Optional[str] = ..., files: _Optional[_Iterable[_Union[BaseFile, _Mapping]]] = ..., kept: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("snapshot_id", "name", "offset")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    name: str
    offset: int
    def __init__(self, snapshot_id: _Optional[str] = ..., name: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("data", "checksum")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    checksum: int
    def __init__(self, data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("snapshot_id", "after_sequence")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    after_sequence: int
    def __init__(self, snapshot_id: _Optional[str] = ..., after_sequence: _Optional[int] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ("move_id", "epoch", "sequence", "digest", "sealed_at_us", "owner")
    MOVE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEALED_AT_US_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    move_id: str
    epoch: int
    sequence: int
    digest: str
    sealed_at_us: int
    owner: _common_pb2.Replica
    def __init__(self, move_id: _Optional[str] = ..., epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., digest: _Optional[str] = ..., sealed_at_us: _Optional[int] = ..., owner: _Optional[_Union[_common_pb2.Replica, _Mapping]] = ...) -> None: ...

class ChangeFrame(_message.Message):
    __slots__ = ("change_sets", "head_sequence", "lag_bytes", "seal", "continues", "chain")
    CHANGE_SETS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    change_sets: _containers.RepeatedScalarFieldContainer[bytes]
    head_sequence: int
    lag_bytes: int
    seal: Seal
    continues: bool
    chain: bytes
    def __init__(self, change_sets: _Optional[_Iterable[bytes]] = ..., head_sequence: _Optional[int] = ..., lag_bytes: _Optional[int] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., continues: _Optional[bool] = ..., chain: _Optional[bytes] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("operator", "state", "partitions", "keys")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    operator: str
    state: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, operator: _Optional[str] = ..., state: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ScanPage(_message.Message):
    __slots__ = ("records", "continues")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    records: bytes
    continues: bool
    def __init__(self, records: _Optional[bytes] = ..., continues: _Optional[bool] = ...) -> None: ...

class PositionsRequest(_message.Message):
    __slots__ = ("operator", "source", "partitions", "before")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    operator: str
    source: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    before: int
    def __init__(self, operator: _Optional[str] = ..., source: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., before: _Optional[int] = ...) -> None: ...

class PositionsReply(_message.Message):
    __slots__ = ("positions", "event_us", "event_before_us", "known", "whole", "newest_event_us", "clients")
    class PositionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class EventUsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class EventBeforeUsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class KnownEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    class ClientsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    EVENT_US_FIELD_NUMBER: _ClassVar[int]
    EVENT_BEFORE_US_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_EVENT_US_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.ScalarMap[int, int]
    event_us: _containers.ScalarMap[int, int]
    event_before_us: _containers.ScalarMap[int, int]
    known: _containers.ScalarMap[int, bytes]
    whole: bool
    newest_event_us: int
    clients: _containers.ScalarMap[int, str]
    def __init__(self, positions: _Optional[_Mapping[int, int]] = ..., event_us: _Optional[_Mapping[int, int]] = ..., event_before_us: _Optional[_Mapping[int, int]] = ..., known: _Optional[_Mapping[int, bytes]] = ..., whole: _Optional[bool] = ..., newest_event_us: _Optional[int] = ..., clients: _Optional[_Mapping[int, str]] = ...) -> None: ...

class SourcesRequest(_message.Message):
    __slots__ = ("operator", "partitions")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    operator: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, operator: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ...) -> None: ...

class SourceView(_message.Message):
    __slots__ = ("source", "partition", "batch", "at_us", "bytes", "watermark_us", "retired", "session_us")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    AT_US_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WATERMARK_US_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    SESSION_US_FIELD_NUMBER: _ClassVar[int]
    source: str
    partition: int
    batch: int
    at_us: int
    bytes: int
    watermark_us: int
    retired: bool
    session_us: int
    def __init__(self, source: _Optional[str] = ..., partition: _Optional[int] = ..., batch: _Optional[int] = ..., at_us: _Optional[int] = ..., bytes: _Optional[int] = ..., watermark_us: _Optional[int] = ..., retired: _Optional[bool] = ..., session_us: _Optional[int] = ...) -> None: ...

class SourcesReply(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[SourceView]
    def __init__(self, sources: _Optional[_Iterable[_Union[SourceView, _Mapping]]] = ...) -> None: ...

class RetireSourceReply(_message.Message):
    __slots__ = ("retired",)
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    retired: int
    def __init__(self, retired: _Optional[int] = ...) -> None: ...

class DropOutputRequest(_message.Message):
    __slots__ = ("operator", "source", "partitions", "batch", "apply")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    operator: str
    source: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    batch: int
    apply: bool
    def __init__(self, operator: _Optional[str] = ..., source: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., batch: _Optional[int] = ..., apply: _Optional[bool] = ...) -> None: ...

class DropOutputReply(_message.Message):
    __slots__ = ("sizes",)
    class SizesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    SIZES_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.ScalarMap[int, int]
    def __init__(self, sizes: _Optional[_Mapping[int, int]] = ...) -> None: ...

class OpenSourceRequest(_message.Message):
    __slots__ = ("asked", "session", "settled")
    ASKED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    asked: PositionsRequest
    session: SourceSession
    settled: int
    def __init__(self, asked: _Optional[_Union[PositionsRequest, _Mapping]] = ..., session: _Optional[_Union[SourceSession, _Mapping]] = ..., settled: _Optional[int] = ...) -> None: ...

class OutputsRequest(_message.Message):
    __slots__ = ("operator", "source", "partitions", "after")
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    operator: str
    source: str
    partitions: _containers.RepeatedScalarFieldContainer[int]
    after: int
    def __init__(self, operator: _Optional[str] = ..., source: _Optional[str] = ..., partitions: _Optional[_Iterable[int]] = ..., after: _Optional[int] = ...) -> None: ...

class OutputsReply(_message.Message):
    __slots__ = ("partition", "batch", "output", "more")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    partition: int
    batch: int
    output: bytes
    more: bool
    def __init__(self, partition: _Optional[int] = ..., batch: _Optional[int] = ..., output: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("after", "sizes", "newest")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    after: int
    sizes: bool
    newest: int
    def __init__(self, after: _Optional[int] = ..., sizes: _Optional[bool] = ..., newest: _Optional[int] = ...) -> None: ...

class RequestSample(_message.Message):
    __slots__ = ("number", "at_us", "operator", "rows", "total_ms", "held_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_US_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    HELD_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_us: int
    operator: str
    rows: int
    total_ms: float
    held_ms: float
    def __init__(self, number: _Optional[int] = ..., at_us: _Optional[int] = ..., operator: _Optional[str] = ..., rows: _Optional[int] = ..., total_ms: _Optional[float] = ..., held_ms: _Optional[float] = ...) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("samples", "partitions", "rows", "checkpoints", "disk_free_bytes", "disk", "room_bytes")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[RequestSample]
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionView]
    rows: int
    checkpoints: int
    disk_free_bytes: int
    disk: str
    room_bytes: int
    def __init__(self, samples: _Optional[_Iterable[_Union[RequestSample, _Mapping]]] = ..., partitions: _Optional[_Iterable[_Union[PartitionView, _Mapping]]] = ..., rows: _Optional[int] = ..., checkpoints: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ..., disk: _Optional[str] = ..., room_bytes: _Optional[int] = ...) -> None: ...

class RoundTripsRequest(_message.Message):
    __slots__ = ("addresses", "command")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    command: _common_pb2.Command
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., command: _Optional[_Union[_common_pb2.Command, _Mapping]] = ...) -> None: ...

class RoundTripsReply(_message.Message):
    __slots__ = ("milliseconds",)
    MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    milliseconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, milliseconds: _Optional[_Iterable[float]] = ...) -> None: ...
