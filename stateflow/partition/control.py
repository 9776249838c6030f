"""Messages between a controller and a replica, and the check that a command comes from the leading controller.

A replica obeys one controller at a time. The leading controller holds the leader lease of its ledger, and each lease
has a term, greater than all terms before. Before a replica acts on a greater term than it has seen before, it stores
that term durably. A command or an answer with a smaller term comes from a controller that was suspended and does not
know that another one leads now; the replica refuses it.

A command also names the session: the ticket with which this process registered. Only the controller and the replica
know it, so no other process can command the replica. Commands from before the last registration are void, because the
controller has given them up. A session belongs to one term, so a command of a greater term cannot arrive before the
replica has registered with that term's controller.

:class:`FencingGuard` decides all of this; ledger and term are the fencing token. A replica asks it when a command
arrives, and again, with the partition locked, before it carries out a command that cannot be undone.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from stateflow.errors import ForeignLedger, LeaseLost, StaleTerm, StateflowError
from stateflow.partition.lifecycle import State
from stateflow.types import How, OperatorSpec, PartitionId, ReplicaInfo

# -- A partition as its replica reports it ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskView:
    """Disk space that a replica has for its partitions.

    Attributes:
        disk: name of the disk; replicas that report the same name share a disk; empty: unknown.
        disk_free_bytes: free bytes beyond the reserve.
        room_bytes: the replica's own limit for its partitions; 0: no limit.
    """

    disk: str = ""
    disk_free_bytes: int = 0
    room_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A partition on one replica.

    Attributes:
        move_id: the move for which the partition is warming, fencing or sealed; empty: none.
        batch_rate: batches per second.
        bytes: size of its files, incoming copies included; 0: not measured.
        rows, row_bytes, origins: see :class:`~stateflow.partition.slices.Traffic`.
        entries: see :meth:`~stateflow.storage.store.PartitionStore.entries`; None also if the store is not open, or the
            number was not requested.
    """

    partition: PartitionId
    state: State
    epoch: int
    sequence: int
    move_id: str = ""
    batch_rate: float = 0.0
    bytes: int = 0
    rows: int = 0
    row_bytes: int = 0
    origins: Mapping[str, int] = field(default_factory=dict)
    entries: int | None = None


# -- Fencing of a replica's commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """Credentials of a command: the controller's ledger, its term, and the replica's session with it."""

    ledger: str = ""
    term: int = 0
    session: str = ""

    def __repr__(self) -> str:  # a session is a secret, and must not get into logs
        return f"Command(ledger={self.ledger!r}, term={self.term})"


#: credentials of commands to a replica without a controller: all code that has the replica object may command it
NOBODY = Command()


class FencingGuard:
    """Decides which commands and answers a replica accepts.

    Args:
        seen: ledger and greatest term seen so far.
        keep: makes (ledger, term) durable.
        alone: there is no controller, so commands need no credentials.
    """

    def __init__(
        self,
        seen: tuple[str, int] = ("", 0),
        keep: Callable[[str, int], None] = lambda _ledger, _term: None,
        *,
        alone: bool = True,
    ) -> None:
        self._seen, self._keep = seen, keep
        self._obeyed: Command | None = NOBODY if alone else None

    @property
    def seen(self) -> tuple[str, int]:
        return self._seen

    def check_answer(self, ledger: str, term: int, adopted: str = "") -> None:
        """Checks that an answer comes from this replica's ledger, in a term not smaller than the greatest one seen.
        Raises StaleTerm, ForeignLedger.

        Args:
            adopted: a former ledger from which replicas may change to ``ledger``: a lost ledger after `stateflow
                adopt`, or the replica's own ledger if the replica holds nothing. Empty: there is none. Each ledger
                counts its own terms, so the term is not checked if the replica belongs to the former ledger.
        """
        known, newest = self._seen
        if known and ledger != known:
            if adopted == known:
                return
            raise ForeignLedger(
                "this replica does not belong to the controller's ledger",
                remedy="start the controller with its previous ledger, or point the replica at its own controller; "
                "if the replica's ledger is lost, see `stateflow adopt --dry-run`",
                ledger=ledger or None,
                belongs_to=known,
            )
        if term < newest:
            raise StaleTerm(
                "another controller leads now",
                remedy="send the request to the leading controller",
                term=term,
                newest=newest,
            )

    def obey(self, command: Command, adopted: str = "") -> None:
        """Accepts, from now on, only commands with the controller and session of ``command``. Makes the controller's
        term durable first. Raises the errors of :meth:`check_answer`."""
        self.check_answer(command.ledger, command.term, adopted)
        if (command.ledger, command.term) != self._seen:
            self._keep(command.ledger, command.term)
            self._seen = command.ledger, command.term
        self._obeyed = command

    def check(self, command: Command) -> None:
        """Checks that a command comes from the controller that this replica registered with last.

        Raises StaleTerm, ForeignLedger, and LeaseLost for a command from before the last registration or from a
        controller that the replica did not register with.
        """
        obeyed = self._obeyed
        if obeyed is None:
            raise LeaseLost("this replica has not registered yet", remedy="retry after its registration")
        self.check_answer(command.ledger, command.term)
        if command != obeyed and not _same(command, obeyed):
            raise LeaseLost(
                "the command is not from the controller session that this replica registered with last",
                remedy="retry the command through the leading controller",
            )


def _same(one: Command, other: Command) -> bool:
    return one.term == other.term and hmac.compare_digest(one.session.encode(), other.session.encode())


# -- Moves, at the target --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Preparation:
    """A move, as requested from its target.

    Attributes:
        bandwidth_max: bytes per second for the base copy; 0: no limit.
        standby: the copy follows its source permanently.
        on_demand: the partition is copied when a batch needs it; otherwise partitions are copied one after another.
        newest_epoch: newest epoch granted to any replica when the move was planned; the controller may have given up
            that grant.
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
    digest: str = ""  # when OWNED: the cutover digest, equal on both sides
    fault: StateflowError | None = None  # why it FAILED; when OWNED: why the partition was lost after it was owned here


# -- Moves, at the source --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NamedFollower:
    """Answer of the controller to the question which replica may follow a partition for a move.

    Attributes:
        replica: name of the replica; empty: the controller has no such move of this partition from this source.
        standby: the replica is to be a standby, so acknowledgements may depend on what it confirms.
    """

    partition: PartitionId
    move_id: str
    replica: str = ""
    standby: bool = False


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
    """Answer to a fence.

    Attributes:
        in_hand_ms: time spent waiting for a quiet moment and for the running batch; rows were still processed.
        refused: why the source did not seal; None: it has sealed.
    """

    in_hand_ms: float = 0.0
    refused: StateflowError | None = None


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Request to cancel a move. ``owned_at`` is the epoch at which the replica owned the partition, if it is the source
    of the move; 0: it is the target."""

    partition: PartitionId
    move_id: str
    owned_at: int = 0


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Answer to a cancellation.

    Attributes:
        sealed: the source has sealed already, so that the move must be completed.
        owned: the replica already owns the partition through this move, at ``epoch``.
    """

    sealed: bool = False
    owned: bool = False
    epoch: int = 0


# -- Takeovers of partitions without an owner ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Request to take over a partition without an owner.

    Attributes:
        epoch: the epoch that is granted to this replica.
        oldest_epoch: checkpoints of older epochs belong to a former deployment, and are not used.
    """

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
    """Answer to a takeover, which describes the state that is served now. ``checkpoint`` is the checkpoint from which
    this state was restored; None: the state comes from a copy on the replica."""

    epoch: int
    sequence: int
    positions: dict[str, int]
    checkpoint: Origin | None = None


@dataclass(frozen=True, slots=True)
class Superseded:
    """A partition that a registering replica must seal, because ``owner`` owns it at ``epoch``, or will own it.

    ``voided`` is the epoch at which the replica holds the partition, if the controller gave that epoch up, so that no
    replica owns the partition at that epoch; 0: the replica holds an older epoch.
    """

    partition: PartitionId
    epoch: int
    owner: ReplicaInfo
    voided: int = 0


# -- Checkpoints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """Choice of a checkpoint: the newest one (default), the one of a savepoint, or the newest one whose last batch of
    ``source`` is ``batch``."""

    savepoint: str = ""
    source: str = ""
    batch: int = -1


NEWEST = Wanted()


@dataclass(frozen=True, slots=True)
class Restore:
    """Request to restore a partition from a checkpoint.

    Attributes:
        epoch: least epoch at which to own the partition.
        url: checkpoint store; empty: the replica's own.
        stop_sources: refuse all clients that began before the restore.
    """

    restore_id: str
    spec: OperatorSpec
    partition: PartitionId
    epoch: int
    url: str = ""
    wanted: Wanted = NEWEST
    stop_sources: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """Answer to a restore. ``passed_over`` are the errors of newer checkpoints that could not be used."""

    epoch: int
    sequence: int
    positions: dict[str, int]
    bytes: int
    passed_over: list[StateflowError] = field(default_factory=list)


# -- Verification ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verification:
    """Verification of a partition's copy as of ``sequence``: its progress, and its result once it is ``done``.

    Attributes:
        cells: number of cells decoded by their declaration.
        digest: state digest; empty: not all of the copy could be read.
        faults: errors found.
    """

    epoch: int
    sequence: int
    done: bool = False
    bytes_read: int = 0
    cells: int = 0
    digest: str = ""
    faults: list[StateflowError] = field(default_factory=list)
