"""What a controller asks of a replica, and what it is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stateflow.errors import StateflowError
from stateflow.runtime.authority import NOBODY, Command
from stateflow.types import How, OperatorSpec, PartitionId, ReplicaInfo

# -- moves, at the target -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preparation:
    """A move as its target knows it. ``bandwidth_max``: bytes a second for the base; 0: no limit.

    ``standby``: it follows for good. ``on_demand``: copied when a batch asks for the partition, else one after another.
    ``newest_epoch``: granted to anybody by then, and perhaps given up since.
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
    """How far a move is at its target. Sizes in bytes, rates in bytes a second, ``_ms`` milliseconds, ``_s``
    seconds."""

    phase: Phase = Phase.WARMING
    bytes_warm: int = 0  # fetched of the base
    bytes_stored: int = 0  # of these, from the checkpoint store
    bytes_reused: int = 0  # of the base, here already
    base_bytes: int = 0  # of all base files
    bytes_delta: int = 0  # change sets received
    rounds: int = 0  # reports while catching up
    lag_bytes: int = 0  # written at the source, not applied here yet
    change_rate: float = 0.0  # of new change sets
    bandwidth: float = 0.0  # as seen while warming
    rtt_ms: float = 0.0
    stall_ms: float = 0.0  # by so much the longest of the last round trips exceeded rtt_ms
    sync_ms: float = 0.0  # what forcing the copy to disk took, the last time
    waited_s: float = 0.0  # since the base was there
    sequence: int = 0  # reached here
    epoch: int = 0  # when OWNED
    digest: str = ""  # when OWNED: chain digest, equal on both sides
    fault: StateflowError | None = None  # when FAILED; when OWNED: it was, and is lost


# -- moves, at the source -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fence:
    """``epoch``: granted to the target."""

    partition: PartitionId
    move_id: str
    epoch: int
    target: ReplicaInfo
    command: Command = NOBODY
    cold: bool = False  # the target copies behind the seal: it need not follow yet
    pause_ms: float = 0.0  # predicted: a quiet moment of that length may be waited for
    max_pause_ms: float = 0.0  # its budget; 0: none
    standby_move: str = ""  # the target follows for this standby, and owns by its copy


@dataclass(frozen=True, slots=True)
class Fenced:
    """``in_hand_ms``: how long it waited for a quiet moment and the batch in hand; rows were processed meanwhile.
    ``refused``: why it did not seal; None: it has."""

    in_hand_ms: float = 0.0
    refused: StateflowError | None = None


@dataclass(frozen=True, slots=True)
class Cancellation:
    """``owned_at``: asked as the source, which owned the partition at this epoch; 0: as the target."""

    partition: PartitionId
    move_id: str
    owned_at: int = 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """``sealed``: too late, the move goes forward. ``owned``: by this move, here, at ``epoch``."""

    sealed: bool = False
    owned: bool = False
    epoch: int = 0


# -- without an owner ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeOver:
    """``epoch``: granted. ``oldest_epoch``: checkpoints of older ones are a former deployment's."""

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
    """A checkpoint, and when it was taken."""

    epoch: int
    sequence: int
    created_us: int


@dataclass(frozen=True, slots=True)
class TakenOver:
    """What is served from now on. ``checkpoint``: what it was restored from, if it was."""

    epoch: int
    sequence: int
    positions: dict[str, int]
    checkpoint: Origin | None = None


# -- checkpoints --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which checkpoint: the newest, a savepoint's, or the newest that ends with exactly ``batch`` of ``source``."""

    savepoint: str = ""
    source: str = ""
    batch: int = -1


NEWEST = Wanted()


@dataclass(frozen=True, slots=True)
class Restore:
    """``epoch``: the least to own it at. ``url``: of a checkpoint store; empty: the replica's own. ``stop_sources``:
    clients that have sent so far are refused by who owns it."""

    restore_id: str
    spec: OperatorSpec
    partition: PartitionId
    epoch: int
    url: str = ""
    wanted: Wanted = NEWEST
    stop_sources: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """``passed_over``: newer checkpoints that could not be used, and why."""

    epoch: int
    sequence: int
    positions: dict[str, int]
    bytes: int
    passed_over: list[StateflowError] = field(default_factory=list)


# -- verification -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verification:
    """A copy of a partition that is being read, as of ``sequence``; when it is ``done``, what it was found to be.

    ``digest``: of its state, empty where not all of it could be read; ``cells``: that were decoded by their
    declaration; ``faults``: what is wrong.
    """

    epoch: int
    sequence: int
    done: bool = False
    bytes_read: int = 0
    cells: int = 0
    digest: str = ""
    faults: list[StateflowError] = field(default_factory=list)
