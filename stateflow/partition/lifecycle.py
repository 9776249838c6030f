"""Lifecycle of one partition on one replica: a sans-io state machine.

``TABLE`` below alone decides who may commit; docs/state-machines.md shows it as a page and a diagram.

Rules that the table enforces:

* A commit is allowed exactly between ``begin`` returning SERVE and ``finish``, and ``begin`` serves only in OWNED.
* A move that was cancelled here can never seal or warm here afterwards, however late its fence or prepare arrives. A
  replica that has lost the data of a partition it owned refuses to cancel: it cannot tell whether it had sealed.
* Epochs rise: a fence that does not grant a newer epoch is refused. (A grant that was rolled back has used up its
  epoch, so the next epoch may be more than one ahead.) A step longer than ``EPOCH_STEP_MAX``, which never occurs in
  practice, is refused as well, since no epoch could be granted after it.

The shell makes every answer durable *before* it calls ``sealed`` or ``own``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, get_args

from stateflow.errors import (
    REPORT_LINE,
    InvalidArgument,
    InvalidTransition,
    InvariantBroken,
    MoveAborted,
    MoveConflict,
    NotOwner,
    StaleEpoch,
    StateMissing,
)
from stateflow.transitions import Guard, Ignored, Impossible, Refused, Row, Table, Transition
from stateflow.types import PartitionId, ReplicaInfo

#: far above any run of rolled-back grants, and small enough that epochs never run out
EPOCH_STEP_MAX = 1 << 32


class State(StrEnum):
    ABSENT = "ABSENT"
    WARMING = "WARMING"
    OWNED = "OWNED"
    FENCING = "FENCING"
    SEALED = "SEALED"


#: states in which this replica owns the partition; in the others its data is a former owner's, or a copy
SERVED = (State.OWNED, State.FENCING)


class Verdict(StrEnum):
    SERVE = "SERVE"  # commit, then call finish()
    HOLD = "HOLD"  # ask again after the next change of state
    MOVED = "MOVED"  # ``successor`` has the partition


class FenceAnswer(StrEnum):
    SEAL_NOW = "SEAL_NOW"  # write the seal, then call sealed()
    SEAL_AFTER_BATCH = "SEAL_AFTER_BATCH"  # finish() will tell when to write the seal
    SEALED_BEFORE = "SEALED_BEFORE"  # this move sealed here already


# -- events: requests to the partition ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Event:
    told: ClassVar[tuple[str, ...]] = ()  # fields that error messages show

    def __str__(self) -> str:
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(self).__name__)[1:]
        return f"{name}({', '.join(getattr(self, each) for each in self.told)})" if self.told else name


@dataclass(frozen=True, slots=True)
class Create(_Event):
    epoch: int


@dataclass(frozen=True, slots=True)
class Prepare(_Event):
    move_id: str
    source_epoch: int
    newest_epoch: int
    told = ("move_id",)


@dataclass(frozen=True, slots=True)
class Own(_Event):
    move_id: str
    epoch: int
    told = ("move_id",)


@dataclass(frozen=True, slots=True)
class SealAgain(_Event):
    before: Lifecycle


@dataclass(frozen=True, slots=True)
class Adopt(_Event):
    move_id: str
    by: str
    told = ("move_id", "by")


@dataclass(frozen=True, slots=True)
class Abandon(_Event):
    move_id: str


@dataclass(frozen=True, slots=True)
class Keep(_Event):
    move_id: str
    by: str
    epoch: int
    successor: ReplicaInfo
    told = ("move_id", "by")


@dataclass(frozen=True, slots=True)
class Restore(_Event):
    restore_id: str
    epoch: int
    told = ("restore_id",)


@dataclass(frozen=True, slots=True)
class BeginBatch(_Event):
    epoch: int


@dataclass(frozen=True, slots=True)
class FinishBatch(_Event):
    pass


_FINISH = FinishBatch()


@dataclass(frozen=True, slots=True)
class Fence(_Event):
    move_id: str
    epoch: int
    successor: ReplicaInfo
    told = ("move_id",)


@dataclass(frozen=True, slots=True)
class Sealed(_Event):
    pass


@dataclass(frozen=True, slots=True)
class Cancel(_Event):
    move_id: str
    owned_at: int


@dataclass(frozen=True, slots=True)
class Supersede(_Event):
    epoch: int
    successor: ReplicaInfo
    voided: int


@dataclass(frozen=True, slots=True)
class Lose(_Event):
    pass


@dataclass(frozen=True, slots=True)
class Drop(_Event):
    epoch: int


@dataclass(frozen=True, slots=True)
class Recover(_Event):
    state: State
    epoch: int
    move_id: str
    successor: ReplicaInfo | None
    told = ("state",)


Event = (
    Create
    | Prepare
    | Own
    | SealAgain
    | Adopt
    | Abandon
    | Keep
    | Restore
    | BeginBatch
    | FinishBatch
    | Fence
    | Sealed
    | Cancel
    | Supersede
    | Lose
    | Drop
    | Recover
)
Answer = Verdict | FenceAnswer | bool | None

# -- guards --------------------------------------------------------------------------------------------------

RUNNING: Guard[Lifecycle] = Guard("a batch is running", lambda here, _: here.running)
SAME_MOVE: Guard[Lifecycle] = Guard("the move is the same", lambda here, event: here.move_id == event.move_id)
SAME_MOVE_IN_HAND: Guard[Lifecycle] = Guard(
    "the move is the same, a batch is running", lambda here, event: here.move_id == event.move_id and here.running
)
OTHER_MOVE: Guard[Lifecycle] = Guard("the move is another one", lambda here, event: here.move_id != event.move_id)
NEITHER_MOVE: Guard[Lifecycle] = Guard(
    "the move is another one", lambda here, event: here.move_id not in (event.move_id, event.by)
)
CANCELLED: Guard[Lifecycle] = Guard("the move was cancelled here", lambda here, event: event.move_id in here.cancelled)
CANCELLED_BY: Guard[Lifecycle] = Guard(
    "the adopting move or takeover was cancelled here", lambda here, event: event.by in here.cancelled
)
NOT_NEWER: Guard[Lifecycle] = Guard("the epoch is not newer", lambda here, event: event.epoch <= here.epoch)
NEWER: Guard[Lifecycle] = Guard("the epoch is newer", lambda here, event: event.epoch > here.epoch)
OUT_OF_REACH: Guard[Lifecycle] = Guard(
    "the epoch is too far ahead", lambda here, event: event.epoch > here.epoch + EPOCH_STEP_MAX
)
SOURCE_STALE: Guard[Lifecycle] = Guard(
    "a newer epoch was seen here",
    lambda here, event: max(event.source_epoch, event.newest_epoch) < here.epoch,
)
STALE_WORD: Guard[Lifecycle] = Guard(
    "the epoch is not newer, and the local one is not void",
    lambda here, event: event.epoch <= here.epoch and here.epoch != event.voided,
)
NEWER_HERE: Guard[Lifecycle] = Guard("the local epoch is newer", lambda here, event: here.epoch > event.epoch)
NEVER_KNOWN: Guard[Lifecycle] = Guard(
    "the partition was owned at an epoch newer than the local one", lambda here, event: event.owned_at > here.epoch
)
WAS_SEALED: Guard[Lifecycle] = Guard(
    "the partition was sealed before", lambda _, event: event.before.state is State.SEALED
)
AS_OWNED: Guard[Lifecycle] = Guard("the state on disk is OWNED", lambda _, event: event.state is State.OWNED)
AS_SEALED: Guard[Lifecycle] = Guard("the state on disk is SEALED", lambda _, event: event.state is State.SEALED)

# -- effects: changes other than the state ------------------------------------------------------------------


def _at_epoch(here: Lifecycle, event: Create | Own) -> None:
    here.epoch = event.epoch


def _warm(here: Lifecycle, event: Prepare) -> None:
    here.move_id, here.successor, here.epoch = event.move_id, None, event.source_epoch


def _as_before(here: Lifecycle, event: SealAgain) -> None:
    before = event.before
    here.epoch, here.move_id, here.successor = before.epoch, before.move_id, before.successor


def _adopt(here: Lifecycle, event: Adopt) -> None:
    here.move_id = event.by


def _abandon(here: Lifecycle, _: Event) -> None:
    here.move_id = ""


def _keep(here: Lifecycle, event: Keep) -> None:
    here.epoch, here.move_id, here.successor = event.epoch, event.by, event.successor


def _restore(here: Lifecycle, event: Restore) -> None:
    here.epoch, here.move_id, here.successor = event.epoch, event.restore_id, None


def _take_in_hand(here: Lifecycle, _: Event) -> None:
    here.running = True


def _let_go(here: Lifecycle, _: Event) -> None:
    here.running = False


def _fence(here: Lifecycle, event: Fence) -> None:
    here.move_id, here.successor, here.granted = event.move_id, event.successor, event.epoch


def _seal(here: Lifecycle, _: Event) -> None:
    here.epoch = here.granted


def _remember(here: Lifecycle, event: Cancel) -> None:
    here.cancelled |= {event.move_id}


def _remember_and_forget(here: Lifecycle, event: Cancel) -> None:
    _remember(here, event)
    _forget(here, event)


def _supersede(here: Lifecycle, event: Supersede) -> None:
    here.epoch, here.move_id, here.successor = event.epoch, "", event.successor


def _forget(here: Lifecycle, _: Event) -> None:
    here.move_id, here.successor = "", None


def _lose_seal(here: Lifecycle, event: Event) -> None:
    here.epoch = 0  # the successor may own it by now: cancel() must promise nothing, see NEVER_KNOWN
    _forget(here, event)


def _recover(here: Lifecycle, event: Recover) -> None:
    here.epoch, here.move_id, here.successor = event.epoch, event.move_id, event.successor


# -- refusals ------------------------------------------------------------------------------------------------


def _stale(what: str, remedy: str) -> Callable[[Lifecycle, Any], StaleEpoch]:
    """Returns a function that creates a StaleEpoch; its text ``what`` is formatted with ``event`` and ``here``."""

    def error(here: Lifecycle, event: Event) -> StaleEpoch:
        return StaleEpoch(what.format(event=event, here=here), remedy=remedy, partition=here.partition)

    return error


def _other_warms(here: Lifecycle, _: Event) -> MoveConflict:
    return MoveConflict(
        "the partition is already warming for another move",
        remedy="wait for that move, or cancel it",
        partition=here.partition,
        move=here.move_id,
    )


def _was_cancelled(here: Lifecycle, event: Event) -> MoveAborted:
    what = "this takeover" if isinstance(event, Adopt) else "this move"
    return MoveAborted(f"{what} was cancelled here", remedy="start a new one", partition=here.partition)


def _not_owner(here: Lifecycle, _: Event) -> NotOwner:
    return NotOwner(
        "this replica does not own the partition", remedy="refresh the assignment", partition=here.partition
    )


def _data_is_gone(here: Lifecycle, event: Cancel) -> StateMissing:
    return StateMissing(
        f"the partition was owned here at epoch {event.owned_at}, but its data is gone",
        remedy="restore the partition by a takeover; whether it was sealed is unknown",
        partition=here.partition,
        epoch=here.epoch,
    )


def _out_of_reach(here: Lifecycle, event: Create | Own | Restore | Fence) -> InvalidArgument:
    """Returns the refusal of an epoch that is further ahead of the known one than any real grant."""
    return InvalidArgument(
        f"epoch {event.epoch} is too far ahead of {here.epoch}",
        remedy="grant the next epoch; nothing was changed",
        partition=here.partition,
    )


def _impossible(here: Lifecycle, event: Event) -> InvalidTransition:
    return InvalidTransition(
        f"{event} is not possible in {here.state}",
        remedy="check the status and plan again; nothing was changed",
        partition=here.partition,
        epoch=here.epoch,
        move=here.move_id or None,
    )


# -- the table -----------------------------------------------------------------------------------------------

_S = State
_ANY = tuple(State)
_HERE = (_S.OWNED, _S.FENCING, _S.SEALED)
_NOT_OWNED = (_S.ABSENT, _S.SEALED, _S.WARMING)
_RESTORABLE = (_S.ABSENT, _S.SEALED, _S.OWNED)
_NOT_WARMING = (_S.ABSENT, *_HERE)
_CAME_LATE = "the partition has come and gone since"

_ROWS: tuple[Row[State, Lifecycle], ...] = (
    # ownership
    Refused(
        _S.ABSENT, Create, _stale("the partition cannot be created at epoch {event.epoch}, epoch {here.epoch} was seen "
        "here", "refresh the assignment"), when=NOT_NEWER, note=_CAME_LATE,
    ),
    Refused(_S.ABSENT, Create, _out_of_reach, when=OUT_OF_REACH),
    Transition(_S.ABSENT, Create, _S.OWNED, None, effect=_at_epoch),
    Impossible((_S.WARMING, *_HERE), Create),
    Refused(_S.WARMING, Prepare, _other_warms, when=OTHER_MOVE),
    Refused(_NOT_OWNED, Prepare, _was_cancelled, when=CANCELLED, note="a late Prepare is refused, too"),
    Refused(
        _NOT_OWNED, Prepare, _stale("the source owns the partition at epoch {event.source_epoch}, epoch {here.epoch} "
        "was seen here", "plan the move again"), when=SOURCE_STALE,
    ),
    Transition(
        _NOT_OWNED, Prepare, _S.WARMING, None, effect=_warm,
        note="early requests are held; a copy sealed here is the warm base",
    ),
    Impossible((_S.OWNED, _S.FENCING), Prepare),
    Impossible(_S.WARMING, Own, when=OTHER_MOVE),
    Refused(
        _S.WARMING, Own, _stale("epoch {event.epoch} is not newer than {here.epoch}", REPORT_LINE),
        when=NOT_NEWER,
    ),
    Refused(_S.WARMING, Own, _out_of_reach, when=OUT_OF_REACH),
    Transition(
        _S.WARMING, Own, _S.OWNED, None, effect=_at_epoch, note="the ownership is durable already"
    ),
    Transition(
        _S.WARMING, SealAgain, _S.SEALED, None, when=WAS_SEALED, effect=_as_before,
        note="the ownership could not be written",
    ),
    Impossible(_S.WARMING, SealAgain),
    Impossible(_NOT_WARMING, (Own, SealAgain)),
    Impossible(_S.WARMING, Adopt, when=NEITHER_MOVE),
    Refused(_S.WARMING, Adopt, _was_cancelled, when=CANCELLED_BY),
    Transition(
        _S.WARMING, Adopt, None, None, effect=_adopt,
        note="a takeover or another move adopts a standby's copy",
    ),
    Transition(_S.WARMING, Abandon, _S.ABSENT, None, when=SAME_MOVE, effect=_abandon),
    Ignored(_S.WARMING, Abandon, None, note="the partition is warming for another move"),
    Ignored(_NOT_WARMING, Abandon, None, note="nothing is warming"),
    Impossible(_S.WARMING, Keep, when=OTHER_MOVE),
    Transition(
        _S.WARMING, Keep, _S.SEALED, None, effect=_keep,
        note="a standby keeps its copy, which ends at its source's seal for another replica",
    ),
    Impossible(_NOT_WARMING, (Adopt, Keep)),
    Impossible(_RESTORABLE, Restore, when=RUNNING),
    Refused(
        _RESTORABLE, Restore, _stale("the partition cannot be restored at epoch {event.epoch}, epoch {here.epoch} was "
        "seen here", "refresh the assignment"), when=NOT_NEWER,
    ),
    Refused(_RESTORABLE, Restore, _out_of_reach, when=OUT_OF_REACH),
    Transition(
        _RESTORABLE, Restore, _S.OWNED, None, effect=_restore,
        note="from a checkpoint; the old copy is no longer served",
    ),
    Impossible((_S.WARMING, _S.FENCING), Restore),
    # records
    Refused(
        _S.OWNED, BeginBatch, _stale("the sender knows epoch {event.epoch}, this replica owns the partition at "
        "epoch {here.epoch}", "refresh the assignment"), when=NEWER,
    ),
    Transition(_S.OWNED, BeginBatch, None, Verdict.HOLD, when=RUNNING, note="one batch at a time"),
    Transition(
        _S.OWNED, BeginBatch, None, Verdict.SERVE, effect=_take_in_hand,
        note="a sender's epoch may be older: batches are told apart by position",
    ),
    Transition(
        _S.WARMING, BeginBatch, None, Verdict.HOLD, when=NEWER,
        note="the source redirects senders before its seal arrives",
    ),
    Transition(
        (_S.FENCING, _S.SEALED), BeginBatch, None, Verdict.MOVED, note="senders are redirected to the successor"
    ),
    Refused((_S.ABSENT, _S.WARMING), BeginBatch, _not_owner),
    Transition(_S.FENCING, FinishBatch, None, True, effect=_let_go, note="the seal is written now"),
    Transition((_S.ABSENT, _S.WARMING, _S.OWNED, _S.SEALED), FinishBatch, None, False, effect=_let_go),
    # leaving
    Transition(_S.SEALED, Fence, None, FenceAnswer.SEALED_BEFORE, when=SAME_MOVE, note="a repeated request"),
    Transition(
        _S.FENCING, Fence, None, FenceAnswer.SEAL_AFTER_BATCH, when=SAME_MOVE_IN_HAND, note="a repeated request"
    ),
    Transition(_S.FENCING, Fence, None, FenceAnswer.SEAL_NOW, when=SAME_MOVE, note="a repeated request"),
    Refused(_ANY, Fence, _was_cancelled, when=CANCELLED, note="a late Fence is refused, too"),
    Impossible((_S.ABSENT, _S.WARMING, _S.FENCING, _S.SEALED), Fence),
    Refused(
        _S.OWNED, Fence, _stale("epoch {event.epoch} was granted, the partition is owned at epoch {here.epoch}",
        "plan the move again"), when=NOT_NEWER,
    ),
    Refused(_S.OWNED, Fence, _out_of_reach, when=OUT_OF_REACH),
    Transition(
        _S.OWNED, Fence, _S.FENCING, FenceAnswer.SEAL_AFTER_BATCH, when=RUNNING, effect=_fence,
        note="the running batch finishes first",
    ),
    Transition(_S.OWNED, Fence, _S.FENCING, FenceAnswer.SEAL_NOW, effect=_fence, note="the seal is written at once"),
    Impossible(_S.FENCING, Sealed, when=RUNNING),
    Transition(_S.FENCING, Sealed, _S.SEALED, None, effect=_seal, note="the seal is durable already"),
    Impossible((_S.ABSENT, _S.WARMING, _S.OWNED, _S.SEALED), Sealed),
    Refused(_ANY, Cancel, _data_is_gone, when=NEVER_KNOWN, note="whether the partition was sealed is unknown"),
    Transition(_S.SEALED, Cancel, None, False, when=SAME_MOVE, note="the move must go forward"),
    Transition(
        _S.FENCING, Cancel, _S.OWNED, True, when=SAME_MOVE, effect=_remember_and_forget,
        note="only the controller cancels, and only before the seal",
    ),
    Transition(_ANY, Cancel, None, True, effect=_remember, note="the move never seals or warms here"),
    Ignored((_S.ABSENT, _S.WARMING), Supersede, False, note="there is no owned or sealed copy here"),
    Ignored(_HERE, Supersede, False, when=STALE_WORD, note="the message is outdated"),
    Impossible(_HERE, Supersede, when=RUNNING),
    Transition(
        _HERE, Supersede, _S.SEALED, True, effect=_supersede,
        note="the replica's lease lapsed, and the controller reassigned the partition",
    ),
    Ignored((_S.ABSENT, _S.WARMING), Lose, False, note="there is no copy to lose"),
    Ignored(_HERE, Lose, False, when=RUNNING, note="the running batch finishes first"),
    Transition(
        _S.SEALED, Lose, _S.ABSENT, True, effect=_lose_seal,
        note="the files are damaged; no promise is made about the partition",
    ),
    Transition(
        (_S.OWNED, _S.FENCING), Lose, _S.ABSENT, True, effect=_forget,
        note="the files are damaged; no promise is made about the partition",
    ),
    Ignored(_ANY, Drop, False, when=NEWER_HERE, note="the partition belongs to a later deployment"),
    Impossible(_ANY, Drop, when=RUNNING),
    Transition(_ANY, Drop, _S.ABSENT, True, effect=_forget, note="the operator was undeployed"),
    # after a restart
    Transition(_S.ABSENT, Recover, _S.OWNED, None, when=AS_OWNED, effect=_recover),
    Transition(
        _S.ABSENT, Recover, _S.SEALED, None, when=AS_SEALED, effect=_recover,
        note="no timeout lifts the fence; only a later move brings the partition back, at a newer epoch",
    ),
    Impossible(_ANY, Recover),
)  # fmt: skip
_INVARIANTS: tuple[Guard[Lifecycle], ...] = (
    Guard(
        "a batch runs only while the partition is OWNED or FENCING",
        lambda here, _: not here.running or here.state in (_S.OWNED, _S.FENCING),
    ),
    Guard(
        "a fence has a newer epoch, a move that is not cancelled, and a successor",
        lambda here, _: (
            here.state is not _S.FENCING
            or (here.granted > here.epoch and here.move_id not in here.cancelled and here.successor is not None)
        ),
    ),
    Guard(
        "a sealed partition has a successor", lambda here, _: here.state is not _S.SEALED or here.successor is not None
    ),
    Guard("a warming partition belongs to a move", lambda here, _: here.state is not _S.WARMING or bool(here.move_id)),
)
TABLE: Table[State, Lifecycle, Answer] = Table(
    "A partition on a replica", State, get_args(Event), _ROWS, _impossible, _INVARIANTS
)


@dataclass(slots=True)
class Lifecycle:
    """State of one partition on this replica. A method does a whole transition, or raises and changes nothing."""

    partition: PartitionId
    state: State = State.ABSENT
    epoch: int = 0  # OWNED: owned at it; SEALED: granted to the successor; WARMING: the source's; ABSENT: newest known
    move_id: str = ""
    successor: ReplicaInfo | None = None
    granted: int = 0  # while FENCING: the successor's epoch
    running: bool = False
    cancelled: frozenset[str] = frozenset()
    table: ClassVar[Table[State, Lifecycle, Answer]] = TABLE

    def _handle(self, event: Event) -> Any:
        self.state, answer = self.table.handle(self, self.state, event)
        return answer

    def validate(self) -> None:
        """Checks the invariants. Raises InvariantBroken in a state that only a bug leads to."""
        for words in self.table.broken(self):
            raise InvariantBroken(
                f"an invariant is broken in {self.state}: {words}",
                remedy=REPORT_LINE,
                partition=self.partition,
                epoch=self.epoch,
                move=self.move_id or None,
            )

    # -- ownership ------------------------------------------------------------------------------------

    def create(self, epoch: int) -> None:
        """Makes this replica the first owner.

        Raises StaleEpoch if the partition was owned or warmed here before, at this epoch or a newer one.
        """
        self._handle(Create(epoch))

    def prepare(self, move_id: str, source_epoch: int, newest_epoch: int = 0) -> None:
        """Makes this replica the target of a move from an owner at ``source_epoch``.

        Raises MoveConflict while another move warms the partition, MoveAborted if this move was cancelled here,
        StaleEpoch if this replica knows a newer epoch.

        Args:
            newest_epoch: newest epoch granted to any replica when this move was planned. The controller has given up
                grants above the source's epoch.
        """
        self._handle(Prepare(move_id, source_epoch, newest_epoch))

    def own(self, move_id: str, epoch: int) -> None:
        """Starts serving. Callers have made the seal and this ownership durable here."""
        self._handle(Own(move_id, epoch))

    def seal_again(self, before: Lifecycle) -> None:
        """Returns to SEALED, with the fields of ``before``. A takeover was to own the copy sealed here, but its
        ownership could not be written."""
        self._handle(SealAgain(before))

    def adopt(self, move_id: str, by: str) -> None:
        """Hands the copy that warmed for ``move_id`` to ``by``, a takeover or another move.

        Raises MoveAborted if ``by`` was cancelled here.
        """
        self._handle(Adopt(move_id, by))

    def abandon(self, move_id: str) -> None:
        self._handle(Abandon(move_id))

    def keep(self, move_id: str, by: str, epoch: int, successor: ReplicaInfo) -> None:
        """Seals the copy that warmed for the standby ``move_id``, because its source has sealed for the move ``by``.

        ``successor`` owns the partition at ``epoch``. The copy is a warm base from now on, like a former owner's.
        """
        self._handle(Keep(move_id, by, epoch, successor))

    def restore(self, restore_id: str, epoch: int) -> None:
        """Serves a restored checkpoint instead of the former copy.

        Callers have made the checkpoint and this ownership durable here.
        Raises InvalidTransition while a move or a batch is under way, StaleEpoch unless the epoch rises.
        """
        self._handle(Restore(restore_id, epoch))

    # -- records --------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> Verdict:
        """Decides whether a batch sent with ``epoch`` may be applied now. Raises NotOwner or StaleEpoch."""
        verdict: Verdict = self._handle(BeginBatch(epoch))
        return verdict

    def finish(self) -> bool:
        """Ends the running batch, committed or rolled back. Returns True if the caller must write the seal now."""
        seals: bool = self._handle(_FINISH)
        return seals

    # -- leaving --------------------------------------------------------------------------------------

    def fence(self, move_id: str, epoch: int, successor: ReplicaInfo) -> FenceAnswer:
        """Stops serving, for a move to ``successor`` at ``epoch``.

        Raises StaleEpoch, MoveAborted, InvalidTransition, or InvalidArgument for an epoch out of reach; then nothing is
        fenced.
        """
        answer: FenceAnswer = self._handle(Fence(move_id, epoch, successor))
        return answer

    def sealed(self) -> None:
        self._handle(Sealed())

    def cancel(self, move_id: str, owned_at: int = 0) -> bool:
        """Forbids the move to seal here, permanently. Returns False if it has sealed already and must be completed.

        Args:
            owned_at: epoch at which this replica owned the partition, if it is the source of the move; 0: it is the
                target.

        Raises StateMissing if this replica knows of no ownership at that epoch: its data is lost, so it cannot tell
        whether it sealed.
        """
        possible: bool = self._handle(Cancel(move_id, owned_at))
        return possible

    def supersede(self, epoch: int, successor: ReplicaInfo, voided: int = 0) -> bool:
        """Records that the controller gave the partition to ``successor`` at ``epoch``.

        The controller did so after this replica's lease had lapsed. The copy here is a warm base from now on. Returns
        False if no copy is here, or if it is newer than ``epoch``.

        Args:
            voided: epoch of a takeover that the controller gave up, so that the partition is back at an older epoch. A
                copy owned here at ``voided`` is superseded although ``epoch`` is older. 0: there is no such takeover.
        """
        changed: bool = self._handle(Supersede(epoch, successor, voided))
        return changed

    def lose(self) -> bool:
        """Gives up an unreadable copy of the partition. Returns False if no copy is here or a batch is running."""
        changed: bool = self._handle(Lose())
        return changed

    def drop(self, epoch: int) -> bool:
        """Gives up a copy of ``epoch`` or older, because the operator was undeployed. Returns False if the copy is
        newer."""
        changed: bool = self._handle(Drop(epoch))
        return changed

    def recover(self, state: State, epoch: int, move_id: str = "", successor: ReplicaInfo | None = None) -> None:
        """Restores the state from the durable ownership, after a restart."""
        self._handle(Recover(state, epoch, move_id, successor))
