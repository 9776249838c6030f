"""Carries out one takeover: turns the machine's instructions into calls, and their results into events."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime

from reconfig import failover as f
from reconfig.controller.runner import Runner
from reconfig.work import PlannedTakeover
from stateflow.errors import LeaseLost, Locked, StaleTerm, StateflowError, Unavailable
from stateflow.reports import MoveReport
from stateflow.runtime.control import TakenOver, TakeOver
from stateflow.types import How

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class TakeoverRunner(Runner):
    planned: PlannedTakeover
    machine: f.Takeover

    def __post_init__(self) -> None:
        self._begin_report(self.machine.phase)
        self._tell(note=f"by {self.planned.how.lower()}")

    @property
    def completed(self) -> bool:
        return self.machine.phase is f.Phase.COMPLETED

    def cancel(self) -> None:
        """Ignores the cancellation: a partition without an owner is taken over in any case."""

    def target_gone(self) -> None:
        self._events.put_nowait(f.TargetGone())

    async def run(self, first: list[f.Instruction] | None = None) -> MoveReport:
        with self._followed():
            return await self._run(first)

    async def _run(self, first: list[f.Instruction] | None) -> MoveReport:
        self._began = self.clock.monotonic()
        try:
            await self._carry_out(self.handle(f.Begin()) if first is None else first)
            while self.machine.phase not in f.TERMINAL:
                await self._carry_out(self.handle(await self._next_event()))
                self._say(self.machine.phase)
        finally:
            self._end()
        return self.report

    async def _carry_out(self, instructions: list[f.Instruction]) -> None:
        for instruction in instructions:
            await self._carry_out_one(instruction)

    async def _carry_out_one(self, instruction: f.Instruction) -> None:
        match instruction:
            case f.RecordGrant():
                try:
                    await self.hooks.record_grant()
                except Locked as error:
                    self._events.put_nowait(f.TargetRefused(error))
                else:
                    self._events.put_nowait(f.GrantRecorded())
            case f.TakeOver(epoch):
                self._start(self._take_over(epoch))
            case f.CancelTarget():
                self._start(self._cancel())
            case f.RecordOwned(epoch):
                await self._record_owned(epoch=epoch)
                self._events.put_nowait(f.OwnedRecorded())
            case f.RecordAborted(error):
                if self.planned.standby_move:  # no other runner is left that would cancel that copy
                    await self._cancel_at(self.target, self.planned.standby_move)
                await self._record_aborted(error)
            case f.Retry(f.TakeOver(epoch)):
                self._start(self._later(lambda: self._take_over(epoch)))
            case f.Retry(f.CancelTarget()):
                self._start(self._later(self._cancel))

    # -- calls --------------------------------------------------------------------------------------------

    async def _take_over(self, epoch: int) -> None:
        wanted = TakeOver(
            self.deployed.spec,
            self.planned.partition,
            self.planned.move_id,
            epoch,
            self.planned.how,
            standby_move=self.planned.standby_move,
            oldest_epoch=self.deployed.first_epoch,
        )
        try:
            taken = await self.replicas.take_over(self.target.name, wanted)
        except StateflowError as error:
            log.warning("takeover %s not confirmed: %s", self.planned.move_id, error)
            unknown = isinstance(error, Unavailable | LeaseLost | StaleTerm)
            self._events.put_nowait(f.TargetUnknown() if unknown else f.TargetRefused(error))
            return
        self._tell(note=self._note(taken) + self._outside())
        self._events.put_nowait(f.TargetOwned(taken.epoch))

    def _outside(self) -> str:
        if not self.deployed.sites or self.target.site in self.deployed.sites:
            return ""
        return (
            f"; {self.target.name} is at {self.target.site}, outside the operator's sites "
            f"({', '.join(self.deployed.sites)})"
        )

    def _note(self, taken: TakenOver) -> str:
        """Returns a note that tells what the new owner's state comes from, and what it lacks."""
        positions = [f"{source} up to {batch}" for source, batch in sorted(taken.positions.items())]
        contained = ", ".join(positions) or "nothing"
        match self.planned.how:
            case How.LOCAL:
                return f"the former owner's own copy, complete; it contains {contained}"
            case How.STANDBY:
                return (
                    f"the copy of {self.planned.standby_move} at sequence {taken.sequence}; it contains {contained}; "
                    "batches acknowledged later without the standby are lost and requested again with position_gap"
                )
            case How.CHECKPOINT:
                if (origin := taken.checkpoint) is None:  # the target owned already when it was asked again
                    which = "a checkpoint"
                else:
                    at = datetime.fromtimestamp(origin.created_us / 1e6, UTC).isoformat(timespec="seconds")
                    which = f"the checkpoint of {at}, epoch {origin.epoch}, sequence {origin.sequence}"
                lost = "later batches are lost and requested again with position_gap"
                return f"{which}; it contains {contained}; {lost}"

    async def _cancel(self) -> None:
        reply = await self._cancel_at(self.target, self.planned.move_id)
        if reply is None:
            self._events.put_nowait(f.TargetUnknown())
            return
        self._events.put_nowait(f.TargetOwned(reply.epoch) if reply.owned else f.TargetCancelled())
