"""One move of one partition: the controller's decisions as a sans-io state machine.

Facts come in as events, what is to be done goes out as instructions; the shell carries them out and feeds the
results back. The machine has no clock, no socket and no randomness.

======================  =================================================================================
phase                   on event → phase: instructions
======================  =================================================================================
WAITING                 Begin → WARMING: Prepare
                        Begin, kind COLD → WAITING: RecordGrant                  (fence first, copy then)
                        GrantRecorded, kind COLD → FENCED: Fence                 (its seal asks for Prepare)
WARMING                 BaseReady → CATCHING_UP
                        TargetFailed | Cancel → ABORTED: CancelSource, AbandonTarget, Record
                        TakenOver → ABORTED: Record                              (also while CATCHING_UP)
CATCHING_UP             CaughtUp, prediction fits → CATCHING_UP: RecordGrant     (asked once)
                        CaughtUp, it does not fit → CATCHING_UP                  (patience runs out → ABORTED)
                        CaughtUp, kind STANDBY → CATCHING_UP                     (it stays until it is cancelled)
                        GrantRecorded → FENCED: Fence
                        TargetFailed | Cancel → ABORTED, as above                (a grant not yet fenced is void)
FENCED                  FenceRefused → FENCED: CancelSource                      (is it certain that it never seals?)
                        SourceCancelled → ABORTED: AbandonTarget, Record
                        SourceSealed → FENCED (sealed): Prepare if the target had failed
                        TargetFailed → FENCED: CancelSource, or Prepare once sealed
                       TargetFailed, cancelled there, sealed → ABORTED: Record  (what is sealed is for a take-over)
                        SourceUnknown → FENCED: Fence again, after a while       (no answer decides nothing)
                        SourceGone → FENCED: CancelTarget                        (its lease lapsed: it serves no more)
                        GivenUp → FENCED: CancelTarget                           (by command: its seal proves nothing)
                        TargetCancelled → ABORTED: Record                        (after either: neither can own)
                        TargetUnknown → FENCED: CancelTarget again, after a while
                        TargetOwned → OWNED: RecordOwned
OWNED                   OwnedRecorded → COMPLETED: Publish, Release
any                     TargetOwned wins: whatever was believed before, the target has it
======================  =================================================================================

Rules: the grant is in the ledger before the source hears of it. Before the source may have sealed, every failure
rolls back; after it, every failure goes forward. Only the source can say which side of the seal it is on; when it is
gone for good, the target can still promise that it never owns for this move, and then the partition is free for a
take-over (:mod:`reconfig.failover`).

A budget is met when expected pause and margin fit it. That is waited for
``patience_s``, counted from when the base was there; a move without a budget waits ``settle_s`` at most for its lag to
become small.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from reconfig.budget import FIXED_MS_DEFAULT, Measured, lag_ms, predicted_pause_ms
from stateflow.errors import BudgetUnreachable, InvalidTransition, MoveAborted, StateflowError, Unavailable

#: a move without a budget is cut over once its lag takes no longer than this to cross
LAG_MS_SMALL = 10.0
#: steps that a machine remembers, for its errors
STORY_KEPT = 40


class Phase(StrEnum):
    WAITING = "WAITING"
    WARMING = "WARMING"
    CATCHING_UP = "CATCHING_UP"
    FENCED = "FENCED"
    OWNED = "OWNED"
    COMPLETED = "COMPLETED"
    ABORTED = "ABORTED"


TERMINAL = frozenset({Phase.COMPLETED, Phase.ABORTED})


class Kind(StrEnum):
    WARM = "WARM"  # copy while the source serves, fence when little is left
    COLD = "COLD"  # fence, then copy
    STANDBY = "STANDBY"  # copy, follow, and stay


# -- events: facts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    pass


@dataclass(frozen=True, slots=True)
class BaseReady:
    pass


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A report while catching up. ``waited_s``: since the base was there."""

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
    """The source promised that this move never seals there."""


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
    """The source's lease has lapsed, by the controller's clock and with its margin, or it has lost the partition: it
    cannot serve it any more, and may never say whether it sealed."""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """By command: what the source sealed cannot be proved at the target, and never will be."""


@dataclass(frozen=True, slots=True)
class TargetCancelled:
    """The target promised that it never owns for this move."""


@dataclass(frozen=True, slots=True)
class TargetUnknown:
    """The target did not answer a cancellation."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The target's copy is to serve as it is, since the source died: a take-over goes on from here."""


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


class Instruction(StrEnum):
    PREPARE = "PREPARE"  # target: pull from the source → BaseReady, CaughtUp…, TargetOwned | TargetFailed
    RECORD_GRANT = "RECORD_GRANT"  # ledger → GrantRecorded
    FENCE = "FENCE"  # source → SourceSealed | FenceRefused | SourceUnknown
    CANCEL_SOURCE = "CANCEL_SOURCE"  # source → SourceCancelled | SourceSealed | SourceUnknown
    CANCEL_TARGET = "CANCEL_TARGET"  # target → TargetCancelled | TargetOwned | TargetUnknown
    ABANDON_TARGET = "ABANDON_TARGET"  # target, best effort
    RECORD_OWNED = "RECORD_OWNED"  # ledger → OwnedRecorded
    RECORD_ABORTED = "RECORD_ABORTED"  # ledger
    PUBLISH = "PUBLISH"  # the new assignment, to whoever asks
    RELEASE = "RELEASE"  # source, best effort
    RETRY_FENCE = "RETRY_FENCE"  # FENCE, after a while
    RETRY_CANCEL = "RETRY_CANCEL"  # CANCEL_SOURCE, after a while
    RETRY_PREPARE = "RETRY_PREPARE"  # PREPARE, after a while
    RETRY_CANCEL_TARGET = "RETRY_CANCEL_TARGET"  # CANCEL_TARGET, after a while


@dataclass(slots=True)
class Move:
    """The machine. ``handle`` is the only thing that changes it.

    Args:
        epoch: the source owns the partition at this epoch.
        granted_epoch: the one the target is to own it at.
        max_pause_ms: budget; 0 means none.
        fixed_ms, margin_ms: expected cost that no delta explains, and what to add so that nearly every move keeps
            within the sum.
        patience_s: a budget that is not in reach for so long is refused.
        settle_s: without a budget the lag may take so long to become small.
    """

    epoch: int
    granted_epoch: int
    max_pause_ms: float = 0.0
    fixed_ms: float = FIXED_MS_DEFAULT
    margin_ms: float = 0.0
    patience_s: float = 30.0
    settle_s: float = 5.0
    kind: Kind = Kind.WARM
    phase: Phase = Phase.WAITING
    granting: bool = False
    sealed: bool = False
    cancelling: bool = False
    source_gone: bool = False
    target_up: bool = False  # a transfer is under way as far as we know
    predicted_pause_ms: float = 0.0
    margin_now_ms: float = 0.0  # at least what the machine just showed: it may do so again
    rounds: int = 0
    digest: str = ""
    error: StateflowError | None = None
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_KEPT))

    def handle(self, event: Event) -> list[Instruction]:
        """Raises InvalidTransition, with the story so far, for an event that cannot happen in this phase."""
        before = self.phase
        instructions = self._handle(event)
        if not isinstance(event, CaughtUp):
            self.story.append(f"{type(event).__name__}: {before} → {self.phase} {[i.value for i in instructions]}")
        return instructions

    def _handle(self, event: Event) -> list[Instruction]:
        if isinstance(event, TargetOwned):
            return self._owned(event)
        if self.phase in TERMINAL:
            return []  # echoes of what was under way
        match self.phase, event:
            case Phase.WAITING, Begin() if self.kind is Kind.COLD:
                self.granting = True
                return [Instruction.RECORD_GRANT]
            case Phase.WAITING, GrantRecorded() if self.granting:
                self.phase = Phase.FENCED
                return [Instruction.FENCE]
            case Phase.WAITING, Begin():
                self.phase, self.target_up = Phase.WARMING, True
                return [Instruction.PREPARE]
            case Phase.WARMING, BaseReady():
                self.phase = Phase.CATCHING_UP
                return []
            case Phase.CATCHING_UP, CaughtUp(measured, waited_s):
                return self._caught_up(measured, waited_s)
            case Phase.CATCHING_UP, GrantRecorded():
                self.phase = Phase.FENCED
                return [Instruction.FENCE]
            case Phase.WAITING | Phase.WARMING | Phase.CATCHING_UP, TargetFailed(error):
                return self._abort(error)
            case Phase.WAITING | Phase.WARMING | Phase.CATCHING_UP, Cancel():
                return self._abort(MoveAborted("the move was cancelled", remedy="start it again when it suits"))
            case Phase.WARMING | Phase.CATCHING_UP, TakenOver():
                self.phase = Phase.ABORTED
                self.error = MoveAborted("its source died, and its copy took over", remedy="none")
                return [Instruction.RECORD_ABORTED]
            case Phase.WAITING | Phase.WARMING | Phase.CATCHING_UP, SourceGone():
                error = Unavailable("the source died", remedy="its partitions are taken over; move them then")
                return self._abort(error, source_knows=True)
            case Phase.FENCED, _:
                return self._fenced(event)
            case Phase.OWNED, OwnedRecorded():
                self.phase = Phase.COMPLETED
                return [Instruction.PUBLISH, Instruction.RELEASE]
            case (Phase.WARMING | Phase.CATCHING_UP | Phase.OWNED, BaseReady() | CaughtUp() | Cancel()) | (
                Phase.OWNED,
                SourceSealed()
                | SourceUnknown()
                | TargetFailed()
                | FenceRefused()
                | SourceCancelled()
                | SourceGone()
                | GivenUp()
                | TargetUnknown(),
            ):
                return []
            case _:
                raise InvalidTransition(
                    f"{event} cannot happen in {self.phase}",
                    remedy="this is a fault",
                    story=" | ".join(self.story),
                )

    def _caught_up(self, measured: Measured, waited_s: float) -> list[Instruction]:
        if self.granting:
            return []
        self.rounds += 1
        self.predicted_pause_ms = predicted_pause_ms(measured, self.fixed_ms)
        self.margin_now_ms = max(self.margin_ms, measured.stall_ms)
        if self.kind is Kind.STANDBY:
            return []
        if self._fits(measured, waited_s):
            self.granting = True
            return [Instruction.RECORD_GRANT]
        if self.max_pause_ms and waited_s >= self.patience_s:
            remedy = "raise max_pause_ms, or move when fewer changes come"
            if self.predicted_pause_ms <= self.max_pause_ms:
                remedy = "raise max_pause_ms, or move without it a few times: what is possible is learnt from moves"
            return self._abort(
                BudgetUnreachable(
                    f"a pause of {self.predicted_pause_ms:.1f} ms is predicted, {self.margin_now_ms:.1f} ms more are "
                    f"possible, {self.max_pause_ms:g} ms are allowed",
                    remedy=remedy,
                    lag_bytes=measured.lag_bytes,
                    change_rate=round(measured.change_rate),
                    bandwidth=round(measured.bandwidth),
                    rtt_ms=round(measured.rtt_ms, 3),
                    sync_ms=round(measured.sync_ms, 3),
                    fixed_ms=round(self.fixed_ms, 3),
                    waited_s=round(waited_s, 1),
                )
            )
        return []

    def _fits(self, measured: Measured, waited_s: float) -> bool:
        if self.max_pause_ms:
            return self.predicted_pause_ms + self.margin_now_ms <= self.max_pause_ms
        return lag_ms(measured) <= LAG_MS_SMALL or waited_s >= self.settle_s

    def _fenced(self, event: Event) -> list[Instruction]:
        match event:
            case SourceSealed():
                self.sealed, self.cancelling = True, False
                if self.target_up:
                    return []
                self.target_up = True
                return [Instruction.PREPARE]
            case FenceRefused(error):
                self.error, self.cancelling = error, True
                return [Instruction.CANCEL_SOURCE]
            case SourceCancelled() if self.sealed:
                return []  # it cannot take its seal back
            case SourceCancelled():
                return self._abort(self.error or MoveAborted("the move was cancelled", remedy="start it again"), True)
            case SourceGone() if not self.source_gone:
                self.source_gone = True
                self.error = Unavailable(
                    "the source died during the move", remedy="its partition is taken over; move it then"
                )
                return [Instruction.CANCEL_TARGET]
            case GivenUp() if not self.source_gone:
                self.source_gone = True
                self.error = MoveAborted("the move was given up by command", remedy="its partition is taken over")
                return [Instruction.CANCEL_TARGET]
            case TargetCancelled() if self.source_gone:
                self.phase = Phase.ABORTED
                return [Instruction.RECORD_ABORTED]
            case TargetUnknown() if self.source_gone:
                return [Instruction.RETRY_CANCEL_TARGET]
            case SourceUnknown() if self.source_gone:
                return []  # nobody waits for its word any more
            case SourceUnknown():
                return [Instruction.RETRY_CANCEL if self.cancelling else Instruction.RETRY_FENCE]
            case TargetFailed(error):
                self.target_up = False
                if self.source_gone:
                    return []
                if self.sealed and isinstance(error, MoveAborted):  # its promise never to own for this move
                    self.phase, self.error = Phase.ABORTED, error
                    return [Instruction.RECORD_ABORTED]
                if self.sealed:
                    self.target_up = True
                    return [Instruction.RETRY_PREPARE]
                self.error = error
                if self.cancelling:
                    return []
                self.cancelling = True
                return [Instruction.CANCEL_SOURCE]
            case Cancel() | BaseReady() | CaughtUp() | GrantRecorded() | SourceGone() | GivenUp() | TakenOver():
                return []  # too late to cancel: a move past its fence completes
            case _:
                raise InvalidTransition(
                    f"{event} cannot happen in {self.phase}",
                    remedy="this is a fault",
                    story=" | ".join(self.story),
                )

    def _owned(self, event: TargetOwned) -> list[Instruction]:
        if self.phase in (Phase.OWNED, Phase.COMPLETED):
            return []
        if self.kind is Kind.STANDBY:  # by a move to where it is
            if self.phase is Phase.ABORTED:
                return []
            self.phase, self.error = Phase.ABORTED, MoveAborted("its copy is the partition now", remedy="none")
            return [Instruction.CANCEL_SOURCE, Instruction.RECORD_ABORTED]
        if event.epoch != self.granted_epoch or self.phase is Phase.ABORTED:
            raise InvalidTransition(
                f"the target owns at {event.epoch}, {self.granted_epoch} was granted, the move is {self.phase}",
                remedy="this is a fault",
                story=" | ".join(self.story),
            )
        self.phase, self.sealed, self.digest = Phase.OWNED, True, event.digest or self.digest
        return [Instruction.RECORD_OWNED]

    def _abort(self, error: StateflowError, source_knows: bool = False) -> list[Instruction]:
        self.phase, self.error = Phase.ABORTED, error
        first = [] if source_knows else [Instruction.CANCEL_SOURCE]
        return [*first, Instruction.ABANDON_TARGET, Instruction.RECORD_ABORTED]

    @classmethod
    def resumed(cls, epoch: int, granted_epoch: int, max_pause_ms: float = 0.0) -> tuple[Move, list[Instruction]]:
        """A move whose grant is in the ledger, after the controller was restarted: whether the source sealed
        is for the source to say. Asking it to promise never to seal either rolls back or shows the seal."""
        move = cls(epoch, granted_epoch, max_pause_ms, phase=Phase.FENCED, granting=True, cancelling=True)
        move.error = MoveAborted("the controller was restarted during the move", remedy="start it again")
        move.story.append("resumed: FENCED")
        return move, [Instruction.CANCEL_SOURCE]
