"""One move of one partition: the controller's decisions, as a sans-io state machine.

The machine gets facts as events, and returns instructions. The shell carries out the instructions and hands in their
results as events. The machine has no clock, no socket and no randomness.

``TABLE`` below is the machine; docs/state-machines.md shows it as a page and a diagram.

The grant is in the ledger before the source hears of it. As long as the source cannot have sealed, every failure rolls
the move back; once it has sealed, the move only goes forward. Only the source can tell whether it has sealed. If the
source is gone for good, the target can still promise never to own the partition by this move; then the partition is
free for a takeover (:mod:`reconfig.decisions.failover`).

If an earlier term recorded the grant of a move, the move copies again, and uses that grant for its fence. The earlier
term may have fenced, too, so on any failure the machine asks the source whether it sealed, as it does after a fence.

A budget is met if expected pause and margin together do not exceed it. A move waits up to ``patience_s`` for that, from
the end of its base copy; a move without a budget waits at most ``settle_s`` for its lag to become small.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, get_args

from reconfig.decisions.budget import FIXED_MS_DEFAULT, FixedCost, Measured, lag_ms, predicted_pause_ms, unreachable
from reconfig.decisions.plan import Kind
from stateflow.errors import InvalidTransition, MoveAborted, MoveCancelled, StateflowError, Unavailable
from stateflow.transitions import Guard, Ignored, Impossible, Machine, Order, Refused, Row, Table, Transition

#: a move without a budget is cut over once its lag takes at most this many milliseconds to cross
LAG_MS_SMALL = 10.0


class Phase(StrEnum):
    WAITING = "WAITING"
    WARMING = "WARMING"
    CATCHING_UP = "CATCHING_UP"
    FENCED = "FENCED"
    OWNED = "OWNED"
    COMPLETED = "COMPLETED"
    ABORTED = "ABORTED"


TERMINAL = frozenset({Phase.COMPLETED, Phase.ABORTED})


# -- events: facts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    pass


@dataclass(frozen=True, slots=True)
class BaseReady:
    pass


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The target's report while it catches up, ``waited_s`` seconds after its base copy was complete."""

    measured: Measured
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GrantRecorded:
    pass


@dataclass(frozen=True, slots=True)
class SourceSealed:
    pass


@dataclass(frozen=True, slots=True)
class FenceRefused:
    error: StateflowError


@dataclass(frozen=True, slots=True)
class SourceCancelled:
    """The source promised never to seal the partition for this move."""


@dataclass(frozen=True, slots=True)
class SourceUnknown:
    """The source did not answer a fence or a cancellation."""


@dataclass(frozen=True, slots=True)
class TargetOwned:
    epoch: int
    digest: str


@dataclass(frozen=True, slots=True)
class TargetFailed:
    error: StateflowError


@dataclass(frozen=True, slots=True)
class SourceGone:
    """The source's lease has lapsed, margin included, or the source has lost the partition. The source no longer serves
    the partition, and may never tell whether it sealed it."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A command gave the move up: the target can never prove the copy that the source sealed."""


@dataclass(frozen=True, slots=True)
class TargetCancelled:
    """The target promised never to own the partition by this move, or by this takeover."""


@dataclass(frozen=True, slots=True)
class TargetUnknown:
    """The target did not answer a cancellation, or a takeover."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The source died, and a takeover serves the target's copy as it is."""


@dataclass(frozen=True, slots=True)
class OwnedRecorded:
    pass


@dataclass(frozen=True, slots=True)
class Cancel:
    pass


Event = (
    Begin
    | BaseReady
    | CaughtUp
    | GrantRecorded
    | SourceSealed
    | FenceRefused
    | SourceCancelled
    | SourceUnknown
    | TargetOwned
    | TargetFailed
    | SourceGone
    | GivenUp
    | TargetCancelled
    | TargetUnknown
    | TakenOver
    | OwnedRecorded
    | Cancel
)


# -- instructions: what the shell must do -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Tells the target to copy from the source → BaseReady, CaughtUp…, TargetOwned | TargetFailed."""


@dataclass(frozen=True, slots=True)
class RecordGrant:
    """Records in the ledger that ``epoch`` is granted to the target → GrantRecorded."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Tells the source to seal, so that the target owns at ``epoch`` → SourceSealed | FenceRefused | SourceUnknown.

    Args:
        cold: the target has no copy yet that follows the source. If False, the fence waits for its turn among the
            cutovers at the source.
        pause_ms: predicted pause; 0: there is no prediction.
        max_pause_ms: budget; 0: none.
    """

    epoch: int
    cold: bool
    pause_ms: float
    max_pause_ms: float


@dataclass(frozen=True, slots=True)
class CancelSource:
    """Asks the source to promise never to seal the partition for this move → SourceCancelled | SourceSealed |
    SourceUnknown.

    ``owned_at`` is the epoch at which the source owned the partition. ``tidies`` is True if the move has ended
    unfenced, so that nothing depends on the answer.
    """

    owned_at: int
    tidies: bool


@dataclass(frozen=True, slots=True)
class CancelTarget:
    """Asks the target never to own by this move or takeover → TargetCancelled | TargetOwned | TargetUnknown."""


@dataclass(frozen=True, slots=True)
class AbandonTarget:
    """Tells the target to drop its copy; nothing depends on the answer."""


@dataclass(frozen=True, slots=True)
class RecordOwned:
    """Records in the ledger that the target owns the partition → OwnedRecorded."""

    epoch: int
    digest: str


@dataclass(frozen=True, slots=True)
class RecordAborted:
    """Records in the ledger that the move was rolled back, or that the takeover ended without an owner."""

    error: StateflowError = field(compare=False)  # no error equals another one


@dataclass(frozen=True, slots=True)
class Release:
    """Tells the source that the target owns at ``epoch``; nothing depends on the answer."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Retry:
    """Carries out ``instruction`` again after a delay."""

    instruction: Prepare | Fence | CancelSource | CancelTarget


Instruction = (
    Prepare
    | RecordGrant
    | Fence
    | CancelSource
    | CancelTarget
    | AbandonTarget
    | RecordOwned
    | RecordAborted
    | Release
    | Retry
)
Says = tuple[Order["Move", Instruction], ...]


def _fence_of(move: Move) -> Fence:
    pause_ms = move.predicted_pause_ms if math.isfinite(move.predicted_pause_ms) else 0.0
    return Fence(move.granted_epoch, move.kind is Kind.COLD, pause_ms, move.max_pause_ms)


def _cancel_source_of(move: Move) -> CancelSource:
    return CancelSource(move.epoch, move.phase in TERMINAL)


def _record_aborted_of(move: Move) -> RecordAborted:
    assert move.error is not None
    return RecordAborted(move.error)


PREPARE: Order[Move, Instruction] = Order("Prepare", lambda _: Prepare())
RECORD_GRANT: Order[Move, Instruction] = Order("RecordGrant", lambda move: RecordGrant(move.granted_epoch))
FENCE: Order[Move, Instruction] = Order("Fence", _fence_of)
CANCEL_SOURCE: Order[Move, Instruction] = Order("CancelSource", _cancel_source_of)
CANCEL_TARGET: Order[Move, Instruction] = Order("CancelTarget", lambda _: CancelTarget())
ABANDON_TARGET: Order[Move, Instruction] = Order("AbandonTarget", lambda _: AbandonTarget())
RECORD_OWNED: Order[Move, Instruction] = Order("RecordOwned", lambda move: RecordOwned(move.granted_epoch, move.digest))
RECORD_ABORTED: Order[Move, Instruction] = Order("RecordAborted", _record_aborted_of)
RELEASE: Order[Move, Instruction] = Order("Release", lambda move: Release(move.granted_epoch))
RETRY_PREPARE: Order[Move, Instruction] = Order("Retry(Prepare)", lambda _: Retry(Prepare()))
RETRY_FENCE: Order[Move, Instruction] = Order("Retry(Fence)", lambda move: Retry(_fence_of(move)))
RETRY_CANCEL: Order[Move, Instruction] = Order("Retry(CancelSource)", lambda move: Retry(_cancel_source_of(move)))
RETRY_CANCEL_TARGET: Order[Move, Instruction] = Order("Retry(CancelTarget)", lambda _: Retry(CancelTarget()))

# -- guards -------------------------------------------------------------------------------------------------

COLD: Guard[Move] = Guard("the move is COLD", lambda move, _: move.kind is Kind.COLD)
STANDBY: Guard[Move] = Guard("the move is a STANDBY", lambda move, _: move.kind is Kind.STANDBY)
GRANTING: Guard[Move] = Guard("the grant is requested", lambda move, _: move.granting)
GRANTED: Guard[Move] = Guard("the grant is in the ledger", lambda move, _: move.granted)
GRANTED_COLD: Guard[Move] = Guard(
    "the move is COLD and the grant is in the ledger", lambda move, _: move.kind is Kind.COLD and move.granted
)
GRANTED_FITS: Guard[Move] = Guard(
    "the prediction fits and the grant is in the ledger", lambda move, event: move.granted and move.fits(event)
)
SEALED: Guard[Move] = Guard("the source has sealed", lambda move, _: move.sealed)
CANCELLING: Guard[Move] = Guard("the source is asked to cancel", lambda move, _: move.cancelling)
SOURCE_GONE: Guard[Move] = Guard("the source is given up", lambda move, _: move.source_gone)
TARGET_UP: Guard[Move] = Guard("a transfer is under way", lambda move, _: move.target_up)
GRANTED_EPOCH: Guard[Move] = Guard(
    "the epoch is the granted one", lambda move, event: event.epoch == move.granted_epoch
)
TARGET_PROMISED: Guard[Move] = Guard(
    "the source has sealed and the target promised never to own",
    lambda move, event: move.sealed and isinstance(event.error, MoveAborted),
)
FITS: Guard[Move] = Guard("the prediction fits", lambda move, event: move.fits(event))
OUT_OF_PATIENCE: Guard[Move] = Guard("patience has run out", lambda move, event: move.out_of_patience(event))
GRANTED_OUT_OF_PATIENCE: Guard[Move] = Guard(
    "patience has run out and the grant is in the ledger",
    lambda move, event: move.granted and move.out_of_patience(event),
)

# -- effects: changes other than the phase -----------------------------------------------------------------


def _ask_for_grant(move: Move, _: Event) -> None:
    move.granting = True


def _grant(move: Move, _: GrantRecorded) -> None:
    move.granting, move.granted = False, True


def _prepare(move: Move, _: Event) -> None:
    move.target_up = True


def _measure(move: Move, event: CaughtUp) -> None:
    move.rounds += 1
    move.measured = event.measured
    move.predicted_pause_ms, move.margin_now_ms = move.prediction(event)


def _measure_and_ask(move: Move, event: CaughtUp) -> None:
    _measure(move, event)
    move.granting = True


def _measure_and_refuse(move: Move, event: CaughtUp) -> None:
    _measure(move, event)
    cost = FixedCost(move.fixed_ms, move.margin_now_ms)
    move.error = unreachable(event.measured, cost, move.predicted_pause_ms, move.max_pause_ms, event.waited_s)


def _refuse_and_cancel(move: Move, event: CaughtUp) -> None:
    _measure_and_refuse(move, event)
    move.cancelling = True


def _fail(move: Move, event: TargetFailed) -> None:
    move.error = event.error


def _cancelled(move: Move, _: Event) -> None:
    move.error = MoveCancelled("the move was cancelled", remedy="start it again when convenient")


def _cancel_at_source(move: Move, event: Cancel) -> None:
    _cancelled(move, event)
    move.cancelling = True


def _taken_over(move: Move, _: Event) -> None:
    move.error = MoveAborted("the source died, and this standby took over", remedy="wait for a new standby")


def _source_died_early(move: Move, _: Event) -> None:
    move.error = Unavailable("the source died", remedy="wait until its partitions are taken over, then move them")


def _source_died(move: Move, _: Event) -> None:
    move.source_gone = True
    move.error = Unavailable(
        "the source died during the move", remedy="wait until its partition is taken over, then move it"
    )


def _give_up(move: Move, _: Event) -> None:
    move.source_gone = True
    move.error = MoveAborted("the move was given up by command", remedy="wait until its partition is taken over")


def _sealed(move: Move, _: Event) -> None:
    move.sealed, move.cancelling = True, False


def _sealed_without_target(move: Move, _: Event) -> None:
    move.sealed, move.cancelling, move.target_up = True, False, True


def _cancel_for(move: Move, event: FenceRefused) -> None:
    move.error, move.cancelling = event.error, True


def _rolled_back(move: Move, _: Event) -> None:
    move.error = move.error or MoveCancelled("the move was cancelled", remedy="start it again")


def _target_down(move: Move, _: Event) -> None:
    move.target_up = False


def _target_lost(move: Move, event: TargetFailed) -> None:
    move.target_up, move.error = False, event.error


def _target_lost_first(move: Move, event: TargetFailed) -> None:
    move.target_up, move.error, move.cancelling = False, event.error, True


def _copy_is_owner(move: Move, _: Event) -> None:
    move.error = MoveAborted("the standby's copy now owns the partition", remedy="wait for a new standby")


def _owned(move: Move, event: TargetOwned) -> None:
    move.sealed, move.digest = True, event.digest or move.digest


# -- the table ----------------------------------------------------------------------------------------------

BEFORE_FENCE = (Phase.WAITING, Phase.WARMING, Phase.CATCHING_UP)
COPYING = (Phase.WARMING, Phase.CATCHING_UP)


def _wrong_epoch(move: Move, event: TargetOwned) -> InvalidTransition:
    return move.fault(
        f"the target owns at epoch {event.epoch}, {move.granted_epoch} was granted, the move is {move.phase}"
    )


_ROWS: tuple[Row[Phase, Move], ...] = (
    # a target that owns has the partition, whatever was believed before
    Ignored((Phase.OWNED, Phase.COMPLETED), TargetOwned, (), note="a repeated report is recorded once"),
    Ignored(Phase.ABORTED, TargetOwned, (), when=STANDBY, note="a repeated report changes nothing"),
    Refused(Phase.ABORTED, TargetOwned, _wrong_epoch, note="the target of a rolled-back move never owns"),
    Transition(
        (*BEFORE_FENCE, Phase.FENCED), TargetOwned, Phase.ABORTED, (CANCEL_SOURCE, RECORD_ABORTED), when=STANDBY,
        effect=_copy_is_owner, note="a move to the standby's replica took over its copy",
    ),
    Transition(
        (*BEFORE_FENCE, Phase.FENCED), TargetOwned, Phase.OWNED, (RECORD_OWNED,), when=GRANTED_EPOCH, effect=_owned,
        note="the target owns, whatever was known before",
    ),
    Refused((*BEFORE_FENCE, Phase.FENCED), TargetOwned, _wrong_epoch, note="that epoch was never granted"),
    # the beginning
    Transition(
        Phase.WAITING, Begin, Phase.FENCED, (FENCE,), when=GRANTED_COLD, note="a source that has already sealed says so"
    ),
    Transition(
        Phase.WAITING, Begin, None, (RECORD_GRANT,), when=COLD, effect=_ask_for_grant,
        note="a cold move fences before it copies",
    ),
    Transition(Phase.WAITING, Begin, Phase.WARMING, (PREPARE,), effect=_prepare, note="other moves copy first"),
    Transition(
        Phase.WAITING, GrantRecorded, Phase.FENCED, (FENCE,), when=GRANTING, effect=_grant,
        note="the copy starts after the seal",
    ),
    # the copy
    Transition(Phase.WARMING, BaseReady, Phase.CATCHING_UP, (), note="the target follows the source from here on"),
    Ignored(Phase.WARMING, CaughtUp, (), note="nothing is measured before the base copy is complete"),
    Ignored(Phase.CATCHING_UP, BaseReady, (), note="the transfer has started again"),
    Ignored(Phase.CATCHING_UP, CaughtUp, (), when=GRANTING, note="the grant is requested only once"),
    Transition(
        Phase.CATCHING_UP, CaughtUp, None, (), when=STANDBY, effect=_measure,
        note="a standby follows until it is cancelled",
    ),
    Transition(
        Phase.CATCHING_UP, CaughtUp, Phase.FENCED, (FENCE,), when=GRANTED_FITS, effect=_measure,
        note="one grant is enough, whichever term recorded it",
    ),
    Transition(
        Phase.CATCHING_UP, CaughtUp, None, (RECORD_GRANT,), when=FITS, effect=_measure_and_ask,
        note="the grant is recorded before the source hears of it",
    ),
    Transition(
        Phase.CATCHING_UP, CaughtUp, Phase.FENCED, (CANCEL_SOURCE,), when=GRANTED_OUT_OF_PATIENCE,
        effect=_refuse_and_cancel, note="the budget is out of reach; the source tells whether it sealed",
    ),
    Transition(
        Phase.CATCHING_UP, CaughtUp, Phase.ABORTED, (CANCEL_SOURCE, ABANDON_TARGET, RECORD_ABORTED),
        when=OUT_OF_PATIENCE, effect=_measure_and_refuse, note="the budget is out of reach",
    ),
    Transition(Phase.CATCHING_UP, CaughtUp, None, (), effect=_measure, note="the prediction may fit later"),
    Transition(Phase.CATCHING_UP, GrantRecorded, Phase.FENCED, (FENCE,), when=GRANTING, effect=_grant),
    Impossible((Phase.WAITING, Phase.CATCHING_UP), GrantRecorded, note="the grant was not requested"),
    # granted already: an earlier term may have fenced the move
    Transition(
        BEFORE_FENCE, TargetFailed, Phase.FENCED, (CANCEL_SOURCE,), when=GRANTED, effect=_target_lost_first,
        note="the source tells whether it sealed",
    ),
    Transition(
        BEFORE_FENCE, Cancel, Phase.FENCED, (CANCEL_SOURCE,), when=GRANTED, effect=_cancel_at_source,
        note="the source tells whether it sealed",
    ),
    Transition(
        BEFORE_FENCE, SourceGone, Phase.FENCED, (CANCEL_TARGET,), when=GRANTED, effect=_source_died,
        note="the source's lease has lapsed, so it no longer serves",
    ),
    Transition(
        BEFORE_FENCE, GivenUp, Phase.FENCED, (CANCEL_TARGET,), when=GRANTED, effect=_give_up,
        note="a command declares that the seal cannot be proved",
    ),
    # rolled back before the fence
    Transition(
        BEFORE_FENCE, TargetFailed, Phase.ABORTED, (CANCEL_SOURCE, ABANDON_TARGET, RECORD_ABORTED),
        effect=_fail, note="a grant that is not fenced yet is void",
    ),
    Transition(
        BEFORE_FENCE, Cancel, Phase.ABORTED, (CANCEL_SOURCE, ABANDON_TARGET, RECORD_ABORTED),
        effect=_cancelled, note="a grant that is not fenced yet is void",
    ),
    Transition(
        BEFORE_FENCE, SourceGone, Phase.ABORTED, (ABANDON_TARGET, RECORD_ABORTED), effect=_source_died_early,
        note="the source's partitions are taken over",
    ),
    Transition(
        COPYING, TakenOver, Phase.ABORTED, (RECORD_ABORTED,), when=STANDBY, effect=_taken_over,
        note="the takeover uses the copy",
    ),
    Impossible(COPYING, TakenOver, note="only standbys receive this event"),
    # after the fence only the source can say on which side of the seal the move is
    Transition(
        Phase.FENCED, SourceSealed, None, (), when=SOURCE_GONE, effect=_sealed,
        note="the target has already been asked for its promise",
    ),
    Transition(
        Phase.FENCED, SourceSealed, None, (), when=TARGET_UP, effect=_sealed,
        note="the transfer brings the seal to the target",
    ),
    Transition(
        Phase.FENCED, SourceSealed, None, (PREPARE,), effect=_sealed_without_target,
        note="the move goes forward from here on",
    ),
    Transition(
        Phase.FENCED, FenceRefused, None, (CANCEL_SOURCE,), effect=_cancel_for,
        note="the source must promise never to seal",
    ),
    Ignored(Phase.FENCED, SourceCancelled, (), when=SEALED, note="the source cannot take its seal back"),
    Transition(
        Phase.FENCED, SourceCancelled, Phase.ABORTED, (ABANDON_TARGET, RECORD_ABORTED), effect=_rolled_back,
        note="the source promised never to seal",
    ),
    Ignored(Phase.FENCED, SourceUnknown, (), when=SOURCE_GONE, note="the source's answer no longer matters"),
    Transition(Phase.FENCED, SourceUnknown, None, (RETRY_CANCEL,), when=CANCELLING, note="silence decides nothing"),
    Transition(Phase.FENCED, SourceUnknown, None, (RETRY_FENCE,), note="silence decides nothing"),
    Transition(
        Phase.FENCED, TargetFailed, None, (), when=SOURCE_GONE, effect=_target_down,
        note="the target has already been asked for its promise",
    ),
    Transition(
        Phase.FENCED, TargetFailed, Phase.ABORTED, (RECORD_ABORTED,), when=TARGET_PROMISED, effect=_target_lost,
        note="a takeover serves the sealed copy",
    ),
    Transition(
        Phase.FENCED, TargetFailed, None, (RETRY_PREPARE,), when=SEALED, effect=_prepare,
        note="after the seal the move only goes forward",
    ),
    Transition(
        Phase.FENCED, TargetFailed, None, (), when=CANCELLING, effect=_target_lost,
        note="the source has already been asked",
    ),
    Transition(
        Phase.FENCED, TargetFailed, None, (CANCEL_SOURCE,), effect=_target_lost_first,
        note="the source tells whether it sealed",
    ),
    # a source that will never tell: the target's promise never to own is enough
    Ignored(Phase.FENCED, (SourceGone, GivenUp), (), when=SOURCE_GONE, note="a repeated report changes nothing"),
    Transition(
        Phase.FENCED, SourceGone, None, (CANCEL_TARGET,), effect=_source_died,
        note="the source's lease has lapsed, so it no longer serves",
    ),
    Transition(
        Phase.FENCED, GivenUp, None, (CANCEL_TARGET,), effect=_give_up,
        note="a command declares that the seal cannot be proved",
    ),
    Transition(
        Phase.FENCED, TargetCancelled, Phase.ABORTED, (RECORD_ABORTED,), when=SOURCE_GONE,
        note="neither side can own, so a takeover may begin",
    ),
    Transition(
        Phase.FENCED, TargetUnknown, None, (RETRY_CANCEL_TARGET,), when=SOURCE_GONE, note="silence decides nothing"
    ),
    Impossible(Phase.FENCED, (TargetCancelled, TargetUnknown), note="the target was not asked to cancel"),
    Ignored(
        Phase.FENCED, (Cancel, TakenOver), (), note="too late: a move past its fence completes"
    ),
    Ignored(Phase.FENCED, (BaseReady, CaughtUp, GrantRecorded), (), note="nothing depends on them after the fence"),
    # the end
    Transition(Phase.OWNED, OwnedRecorded, Phase.COMPLETED, (RELEASE,)),
    Ignored(
        Phase.OWNED,
        (
            BaseReady, CaughtUp, Cancel, SourceSealed, SourceUnknown, TargetFailed, FenceRefused, SourceCancelled,
            SourceGone, GivenUp, TargetUnknown,
        ),
        (), note="the target owns; other reports no longer matter",
    ),
    Ignored(
        (Phase.COMPLETED, Phase.ABORTED), tuple(event for event in get_args(Event) if event is not TargetOwned), (),
        note="late events of an ended move",
    ),
    # answers to instructions that were not given
    Impossible((*COPYING, Phase.FENCED, Phase.OWNED), Begin),
    Impossible(Phase.WAITING, (BaseReady, CaughtUp, TakenOver)),
    Impossible((Phase.WARMING, Phase.OWNED), GrantRecorded),
    Impossible(
        BEFORE_FENCE,
        (SourceSealed, FenceRefused, SourceCancelled, SourceUnknown, GivenUp, TargetCancelled, TargetUnknown),
    ),
    Impossible((*BEFORE_FENCE, Phase.FENCED), OwnedRecorded),
    Impossible(Phase.OWNED, (TargetCancelled, TakenOver)),
)  # fmt: skip
_INVARIANTS: tuple[Guard[Move], ...] = (
    Guard(
        "except for standbys, the granted epoch is newer than the owned one",
        lambda move, _: move.kind is Kind.STANDBY or move.granted_epoch > move.epoch,
    ),
    Guard("a rolled-back move has an error", lambda move, _: move.phase is not Phase.ABORTED or bool(move.error)),
    Guard(
        "a move whose target owns has sealed and is not a standby",
        lambda move, _: (
            move.phase not in (Phase.OWNED, Phase.COMPLETED) or (move.sealed and move.kind is not Kind.STANDBY)
        ),
    ),
    Guard("a fenced move has a recorded grant", lambda move, _: move.phase is not Phase.FENCED or move.granted),
    Guard("a recorded grant is no longer requested", lambda move, _: not (move.granting and move.granted)),
    Guard(
        "before the fence the source has not sealed, is not asked to cancel and is not given up",
        lambda move, _: move.phase not in BEFORE_FENCE or not (move.sealed or move.cancelling or move.source_gone),
    ),
)
TABLE: Table[Phase, Move, Says] = Table("A move", Phase, get_args(Event), _ROWS, Machine.impossible, _INVARIANTS)


@dataclass(slots=True)
class Move(Machine[Phase, Event, Instruction]):
    """The state machine of one move. Only ``handle`` changes it.

    Args:
        epoch: the epoch at which the source owns the partition.
        granted_epoch: the epoch at which the target will own it.
        max_pause_ms: budget; 0: none.
        fixed_ms: expected cost of a cutover apart from transferring the delta, in milliseconds.
        margin_ms: milliseconds beyond ``fixed_ms`` within which nearly every move stays.
        patience_s: seconds after which a budget that stays out of reach is refused.
        settle_s: seconds that the lag of a move without a budget may take to become small.
        granted: the grant is in the ledger. If True from the start, an earlier term recorded it, and may have fenced.
    """

    epoch: int
    granted_epoch: int
    max_pause_ms: float = 0.0
    fixed_ms: float = FIXED_MS_DEFAULT
    margin_ms: float = 0.0
    patience_s: float = 30.0
    settle_s: float = 5.0
    kind: Kind = Kind.WARM
    granted: bool = False
    phase: Phase = Phase.WAITING
    granting: bool = False  # the grant was asked for, and is not recorded yet
    sealed: bool = False
    cancelling: bool = False
    source_gone: bool = False
    target_up: bool = False  # a transfer is under way as far as we know
    measured: Measured | None = None  # the target's last report while it caught up
    predicted_pause_ms: float = 0.0
    margin_now_ms: float = 0.0  # at least the last report's stall_ms, because another stall may follow
    rounds: int = 0
    digest: str = ""
    error: StateflowError | None = None
    story: deque[str] = field(default_factory=Machine.empty_story)
    table: ClassVar[Table[Phase, Move, Says]] = TABLE
    untold: ClassVar[tuple[type, ...]] = (CaughtUp,)

    @property
    def fenced(self) -> bool:
        """Tells whether the source may have sealed the partition, while the target is not known to own it."""
        return self.granted and self.phase in (*BEFORE_FENCE, Phase.FENCED)

    def prediction(self, event: CaughtUp) -> tuple[float, float]:
        """Returns (predicted pause, margin), in milliseconds."""
        return predicted_pause_ms(event.measured, self.fixed_ms), max(self.margin_ms, event.measured.stall_ms)

    def fits(self, event: CaughtUp) -> bool:
        if self.max_pause_ms:
            return sum(self.prediction(event)) <= self.max_pause_ms
        return lag_ms(event.measured) <= LAG_MS_SMALL or event.waited_s >= self.settle_s

    def out_of_patience(self, event: CaughtUp) -> bool:
        return bool(self.max_pause_ms) and event.waited_s >= self.patience_s
