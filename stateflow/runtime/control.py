"""Requests of a controller to a replica, and the replica's answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stateflow.errors import StateflowError
from stateflow.runtime.authority import NOBODY, Command
from stateflow.types import How, OperatorSpec, PartitionId, ReplicaInfo

# -- moves, at the target -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preparation:
    """A move as its target knows it. ``bandwidth_max``: bytes per second for the base copy; 0: no limit.

    ``standby``: the copy follows its source permanently. ``on_demand``: the partition is copied when a batch needs it;
    otherwise partitions are copied one after another. ``newest_epoch``: newest epoch granted to any replica by then; it
    may have been given up since.
    """

    move_id: str
    spec: OperatorSpec
    partition: PartitionId
    source: ReplicaInfo
    source_epoch: int
    bandwidth_max: float = 0.0
    standby: bool = False
    on_demand: bool = False
    newest_epoch: int = 0


class Phase(Enum):
    WARMING = "WARMING"
    CATCHING_UP = "CATCHING_UP"
    OWNED = "OWNED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a move at its target. Sizes are in bytes, rates in bytes per second, ``_ms`` in milliseconds, ``_s``
    in seconds."""

    phase: Phase = Phase.WARMING
    bytes_warm: int = 0  # fetched base files
    bytes_stored: int = 0  # part of bytes_warm that came from the checkpoint store
    bytes_reused: int = 0  # base files that were here already
    base_bytes: int = 0  # all base files
    bytes_delta: int = 0  # change sets received
    rounds: int = 0  # reports while catching up
    lag_bytes: int = 0  # written at the source, not applied here yet
    change_rate: float = 0.0  # incoming change sets
    bandwidth: float = 0.0  # measured while warming
    rtt_ms: float = 0.0
    stall_ms: float = 0.0  # how much the longest of the last round trips exceeded rtt_ms
    sync_ms: float = 0.0  # duration of the last sync of the copy to disk
    waited_s: float = 0.0  # time since the base was complete
    sequence: int = 0  # last sequence applied here
    epoch: int = 0  # when OWNED
    digest: str = ""  # when OWNED: chain digest, equal on both sides
    fault: StateflowError | None = None  # when FAILED; when OWNED: the partition was owned here, and is lost


# -- moves, at the source -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fence:
    """Request to seal a partition for a move. ``epoch``: granted to the target."""

    partition: PartitionId
    move_id: str
    epoch: int
    target: ReplicaInfo
    command: Command = NOBODY
    cold: bool = False  # the target copies after the seal, and need not follow yet
    pause_ms: float = 0.0  # predicted pause: the source may wait for a quiet moment of that length
    max_pause_ms: float = 0.0  # allowed pause; 0: no limit
    standby_move: str = ""  # move of the standby whose copy the target takes over; empty: none


@dataclass(frozen=True, slots=True)
class Fenced:
    """Answer to a fence. ``in_hand_ms``: time spent waiting for a quiet moment and the running batch, while rows were
    still processed. ``refused``: why the source did not seal; None: it has sealed."""

    in_hand_ms: float = 0.0
    refused: StateflowError | None = None


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Request to cancel a move. ``owned_at``: epoch at which the replica owned the partition, if it is asked as the
    source; 0: it is asked as the target."""

    partition: PartitionId
    move_id: str
    owned_at: int = 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Answer to a cancellation. ``sealed``: too late, the move goes forward. ``owned``: the replica owns the partition
    by this move, at ``epoch``."""

    sealed: bool = False
    owned: bool = False
    epoch: int = 0


# -- without an owner ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Request to take over a partition without an owner. ``epoch``: granted to this replica. ``oldest_epoch``:
    checkpoints of older epochs belong to a former deployment."""

    spec: OperatorSpec
    partition: PartitionId
    move_id: str
    epoch: int
    how: How
    command: Command = NOBODY
    standby_move: str = ""
    oldest_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Checkpoint from which a partition was restored. ``created_us``: when it was taken, µs."""

    epoch: int
    sequence: int
    created_us: int


@dataclass(frozen=True, slots=True)
class TakenOver:
    """State that the replica serves after a takeover. ``checkpoint``: the one it was restored from; None: it was taken
    from a copy on the replica."""

    epoch: int
    sequence: int
    positions: dict[str, int]
    checkpoint: Origin | None = None


# -- checkpoints --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """Choice of a checkpoint: the newest, a savepoint's, or the newest that ends with exactly ``batch`` of ``source``.
    Default: the newest."""

    savepoint: str = ""
    source: str = ""
    batch: int = -1


NEWEST = Wanted()


@dataclass(frozen=True, slots=True)
class Restore:
    """Request to restore a partition from a checkpoint. ``epoch``: least epoch to own it at. ``url``: checkpoint store;
    empty: the replica's own. ``stop_sources``: the owner refuses all clients that have sent so far."""

    restore_id: str
    spec: OperatorSpec
    partition: PartitionId
    epoch: int
    url: str = ""
    wanted: Wanted = NEWEST
    stop_sources: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """Answer to a restore. ``passed_over``: errors of newer checkpoints that could not be used."""

    epoch: int
    sequence: int
    positions: dict[str, int]
    bytes: int
    passed_over: list[StateflowError] = field(default_factory=list)


# -- verification -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verification:
    """Verification of a partition's copy as of ``sequence``: its progress, and its result once it is ``done``.

    ``digest``: state digest, empty where not all of the copy could be read; ``cells``: number of cells decoded by their
    declaration; ``faults``: errors found.
    """

    epoch: int
    sequence: int
    done: bool = False
    bytes_read: int = 0
    cells: int = 0
    digest: str = ""
    faults: list[StateflowError] = field(default_factory=list)
