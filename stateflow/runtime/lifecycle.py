"""Lifecycle of one partition on one replica: a sans-io state machine.

State map (the only place where it is decided who may commit)::

    ABSENT   --create-->             OWNED(e)
    ABSENT   --prepare(move)-->      WARMING(move)      requests that arrive early are held
    SEALED   --prepare(move)-->      WARMING(move)      (the partition comes back; its old files are the warm base)
    WARMING  --own(e)-->             OWNED(e)           after a durable write of the ownership
    WARMING  --abandon(move)-->      ABSENT
    WARMING  --adopt(move, by)-->    WARMING(by)        a standby's copy, to be owned by a take-over or a move
    WARMING  --keep(move, by, e)-->  SEALED             a standby's copy, which ends where its source sealed for another
    OWNED    --fence(move, e')-->   FENCING            a batch is in hand: it finishes first
    OWNED    --fence(move, e')-->   SEALED             none is: the shell seals at once
    FENCING  --finish-->             SEALED
    FENCING  --cancel(move)-->       OWNED              only the controller cancels, and only before the seal
    ABSENT, SEALED, OWNED --restore(e)--> OWNED(e)     from a checkpoint; nothing of the old copy is served any more
    OWNED | FENCING | SEALED  --lose-->  ABSENT        its files are damaged: whoever asks is promised nothing
    any      --drop(e)-->            ABSENT            its operator was undeployed; what is newer than e stays
    OWNED | FENCING | SEALED  --supersede(e')-->  SEALED    its lease lapsed and the controller gave the partition away
    SEALED   stays sealed. No timeout un-fences it; a later move must bring the partition back with a newer epoch.

Rules the table keeps:

* A commit is allowed exactly between ``begin`` returning SERVE and ``finish``, and ``begin`` serves only in OWNED.
* A move that was cancelled here can never seal here afterwards, however late its fence arrives, nor warm here,
  however late its prepare. A replica that knows nothing of a partition it owned (its data is lost) promises nothing.
* Epochs rise: a fence that does not grant a newer epoch is refused. (A grant whose move was rolled back burns its
  epoch, so the next one may be more than one ahead.) They rise by steps that no history makes longer than
  ``EPOCH_STEP_MAX``: an absurd one is refused, or nothing could be granted after it.

The shell makes every answer durable *before* it calls ``sealed`` or ``own``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stateflow.errors import (
    InvalidArgument,
    InvalidTransition,
    MoveAborted,
    MoveConflict,
    NotOwner,
    StaleEpoch,
    StateMissing,
)
from stateflow.types import PartitionId, ReplicaInfo

#: far beyond every grant that was ever rolled back, and so small that epochs last for ever
EPOCH_STEP_MAX = 1 << 32


class State(StrEnum):
    ABSENT = "ABSENT"
    WARMING = "WARMING"
    OWNED = "OWNED"
    FENCING = "FENCING"
    SEALED = "SEALED"


class Verdict(StrEnum):
    SERVE = "SERVE"  # commit, then call finish()
    HOLD = "HOLD"  # ask again after the next change of state
    MOVED = "MOVED"  # ``successor`` has it


class FenceAnswer(StrEnum):
    SEAL_NOW = "SEAL_NOW"  # write the seal, then call sealed()
    SEAL_AFTER_BATCH = "SEAL_AFTER_BATCH"  # finish() will ask for it
    SEALED_BEFORE = "SEALED_BEFORE"  # this move sealed here already


@dataclass(slots=True)
class Lifecycle:
    """State of one partition here. Every method either does a whole transition or raises and changes nothing."""

    partition: PartitionId
    state: State = State.ABSENT
    epoch: int = 0  # owned at; when SEALED: granted to the successor; when ABSENT: the newest known
    move_id: str = ""
    successor: ReplicaInfo | None = None
    granted: int = 0  # while FENCING: the successor's epoch
    in_hand: bool = False
    cancelled: frozenset[str] = frozenset()

    # -- ownership ------------------------------------------------------------------------------------

    def create(self, epoch: int) -> None:
        """Raises StaleEpoch when the partition was here, or coming here, at this epoch or a newer one before."""
        if self.state is not State.ABSENT:
            raise self._illegal("create")
        if epoch <= self.epoch:
            raise StaleEpoch(
                f"it cannot be created at {epoch}, epoch {self.epoch} was seen here",
                remedy="refresh the assignment",
                partition=self.partition,
            )
        self._check_step(epoch)
        self.state, self.epoch = State.OWNED, epoch

    def prepare(self, move_id: str, source_epoch: int, newest_epoch: int = 0) -> None:
        """This replica becomes the target of a move from an owner at ``source_epoch``.

        Raises MoveConflict while another move warms it, MoveAborted when this one was cancelled here, StaleEpoch
        when this replica knows a newer epoch.

        Args:
            newest_epoch: granted to anybody when this was asked for. Those above the source's were given up.
        """
        if self.state is State.WARMING and self.move_id != move_id:
            raise MoveConflict(
                "the partition is already warming for another move",
                remedy="wait for it, or cancel it",
                partition=self.partition,
                move=self.move_id,
            )
        if self.state not in (State.ABSENT, State.SEALED, State.WARMING):
            raise self._illegal(f"prepare({move_id})")
        if move_id in self.cancelled:
            raise MoveAborted("this move was cancelled here", remedy="start a new one", partition=self.partition)
        if max(source_epoch, newest_epoch) < self.epoch:
            raise StaleEpoch(
                f"the source owns it at {source_epoch}, epoch {self.epoch} was seen here",
                remedy="plan the move again",
                partition=self.partition,
            )
        self.state, self.move_id, self.successor, self.epoch = State.WARMING, move_id, None, source_epoch

    def own(self, move_id: str, epoch: int) -> None:
        """The seal and this ownership are durable here: serve from now on."""
        self.check_own(move_id, epoch)
        self.state, self.epoch = State.OWNED, epoch

    def check_own(self, move_id: str, epoch: int) -> None:
        """Raises what ``own`` would: to be asked before the ownership is written."""
        if self.state is not State.WARMING or self.move_id != move_id:
            raise self._illegal(f"own({move_id})")
        if epoch <= self.epoch:
            raise StaleEpoch(
                f"epoch {epoch} is not newer than {self.epoch}",
                remedy="this is a fault",
                partition=self.partition,
            )
        self._check_step(epoch)

    def seal_again(self, before: Lifecycle) -> None:
        """What was sealed here was to be owned, and that could not be written: it is as it was ``before``."""
        if self.state is not State.WARMING or before.state is not State.SEALED:
            raise self._illegal("seal_again")
        self.state, self.epoch = before.state, before.epoch
        self.move_id, self.successor = before.move_id, before.successor

    def adopt(self, move_id: str, by: str) -> None:
        """What warmed for ``move_id`` is to be owned by ``by``. Raises MoveAborted when that was cancelled here."""
        if self.state is not State.WARMING or self.move_id not in (move_id, by):
            raise self._illegal(f"adopt({move_id}, {by})")
        if by in self.cancelled:
            raise MoveAborted("this take-over was cancelled here", remedy="start a new one", partition=self.partition)
        self.move_id = by

    def abandon(self, move_id: str) -> None:
        if self.state is State.WARMING and self.move_id == move_id:
            self.state, self.move_id = State.ABSENT, ""

    def keep(self, move_id: str, by: str, epoch: int, successor: ReplicaInfo) -> None:
        """What warmed for the standby ``move_id`` ends with the seal of ``by``, and ``successor`` has it at ``epoch``:
        a warm base from now on, like a former owner's."""
        if self.state is not State.WARMING or self.move_id != move_id:
            raise self._illegal(f"keep({move_id}, {by})")
        self.state, self.epoch, self.move_id, self.successor = State.SEALED, epoch, by, successor

    def restore(self, restore_id: str, epoch: int) -> None:
        """A checkpoint and this ownership are durable here: serve that, instead of whatever was here before.

        Raises InvalidTransition while a move or a batch is under way, StaleEpoch unless the epoch rises.
        """
        if self.state not in (State.ABSENT, State.SEALED, State.OWNED) or self.in_hand:
            raise self._illegal(f"restore({restore_id})")
        if epoch <= self.epoch:
            raise StaleEpoch(
                f"it cannot be restored at {epoch}, epoch {self.epoch} was seen here",
                remedy="refresh the assignment",
                partition=self.partition,
            )
        self._check_step(epoch)
        self.state, self.epoch, self.move_id, self.successor = State.OWNED, epoch, restore_id, None

    # -- records --------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> Verdict:
        """May a batch sent with ``epoch`` be applied now? Raises NotOwner or StaleEpoch.

        A sender's older epoch is served when the partition is here: batches are told apart by position.
        """
        match self.state:
            case State.OWNED:
                if epoch > self.epoch:
                    raise StaleEpoch(
                        f"the sender knows epoch {epoch}, this replica owns the partition at {self.epoch}",
                        remedy="refresh the assignment",
                        partition=self.partition,
                    )
                if self.in_hand:
                    return Verdict.HOLD
                self.in_hand = True
                return Verdict.SERVE
            case State.WARMING if epoch > self.epoch:  # sent here by the source's redirect, ahead of the seal
                return Verdict.HOLD
            case State.FENCING | State.SEALED:
                return Verdict.MOVED
            case _:
                raise NotOwner(
                    "this replica does not own the partition",
                    remedy="refresh the assignment",
                    partition=self.partition,
                )

    def finish(self) -> bool:
        """The batch in hand is committed or rolled back. True: write the seal now, then call sealed()."""
        self.in_hand = False
        return self.state is State.FENCING

    # -- leaving --------------------------------------------------------------------------------------

    def fence(self, move_id: str, epoch: int, successor: ReplicaInfo) -> FenceAnswer:
        """Raises StaleEpoch, MoveConflict, MoveAborted or InvalidTransition; then nothing is fenced."""
        if self.state in (State.SEALED, State.FENCING) and self.move_id == move_id:
            if self.state is State.SEALED:
                return FenceAnswer.SEALED_BEFORE
            return FenceAnswer.SEAL_AFTER_BATCH if self.in_hand else FenceAnswer.SEAL_NOW
        if move_id in self.cancelled:
            raise MoveAborted("this move was cancelled here", remedy="start a new one", partition=self.partition)
        if self.state is not State.OWNED:
            raise self._illegal(f"fence({move_id})")
        if epoch <= self.epoch:
            raise StaleEpoch(
                f"epoch {epoch} was granted, the partition is owned at {self.epoch}",
                remedy="plan the move again",
                partition=self.partition,
            )
        self._check_step(epoch)
        self.state, self.move_id, self.successor, self.granted = State.FENCING, move_id, successor, epoch
        return FenceAnswer.SEAL_AFTER_BATCH if self.in_hand else FenceAnswer.SEAL_NOW

    def sealed(self) -> None:
        if self.state is not State.FENCING or self.in_hand:
            raise self._illegal("sealed")
        self.state, self.epoch = State.SEALED, self.granted

    def cancel(self, move_id: str, owned_at: int = 0) -> bool:
        """Never let this move seal here. False: it has sealed already and must go forward.

        Args:
            owned_at: this replica is asked as the source, which owned the partition at this epoch; 0: as the target.

        Raises StateMissing when it never did, as far as is known here: its data is lost, and with it whether it sealed.
        """
        if owned_at > self.epoch:
            raise StateMissing(
                f"the partition was owned here at epoch {owned_at}, but its data is gone",
                remedy="whether it had sealed nobody can tell any more; a take-over restores the partition",
                partition=self.partition,
                epoch=self.epoch,
            )
        if self.state is State.SEALED and self.move_id == move_id:
            return False
        self.cancelled |= {move_id}
        if self.state is State.FENCING and self.move_id == move_id:
            self.state, self.move_id, self.successor = State.OWNED, "", None
        return True

    def supersede(self, epoch: int, successor: ReplicaInfo, burnt: int = 0) -> bool:
        """The controller gave the partition to ``successor`` at ``epoch``, after this replica's lease had lapsed.

        What is here is a warm base from now on. False: nothing of it is here, or it is newer than that.

        Args:
            burnt: it is owned here by a take-over that the controller gave up, at this epoch, which is nobody's. The
                partition is back at an older one.
        """
        if self.state in (State.ABSENT, State.WARMING) or (epoch <= self.epoch and self.epoch != burnt):
            return False
        if self.in_hand:
            raise self._illegal("supersede")
        self.state, self.epoch, self.move_id, self.successor = State.SEALED, epoch, "", successor
        return True

    def lose(self) -> bool:
        """What was here cannot be read. False: nothing is, or a batch is in hand."""
        if self.state in (State.ABSENT, State.WARMING) or self.in_hand:
            return False
        if self.state is State.SEALED:
            self.epoch = 0  # it may be another's by now: see cancel()
        self.state, self.move_id, self.successor = State.ABSENT, "", None
        return True

    def drop(self, epoch: int) -> bool:
        """The operator is no more, and nothing of it at this epoch or an older one. False: this is newer."""
        if self.epoch > epoch:
            return False
        if self.in_hand:
            raise self._illegal("drop")
        self.state, self.move_id, self.successor = State.ABSENT, "", None
        return True

    def recover(self, state: State, epoch: int, move_id: str = "", successor: ReplicaInfo | None = None) -> None:
        """After a restart: what the durable ownership says."""
        if self.state is not State.ABSENT or state not in (State.OWNED, State.SEALED):
            raise self._illegal(f"recover({state})")
        self.state, self.epoch, self.move_id, self.successor = state, epoch, move_id, successor

    def _check_step(self, epoch: int) -> None:
        """Raises InvalidArgument: nothing that was granted in earnest is so far ahead of what is known here."""
        if epoch > self.epoch + EPOCH_STEP_MAX:
            raise InvalidArgument(
                f"epoch {epoch} is out of reach of {self.epoch}",
                remedy="nothing was changed; grant the next one",
                partition=self.partition,
            )

    def _illegal(self, event: str) -> InvalidTransition:
        return InvalidTransition(
            f"{event} is not possible in {self.state}",
            remedy="nothing was changed; ask for the status and plan again",
            partition=self.partition,
            epoch=self.epoch,
            move=self.move_id or None,
        )
