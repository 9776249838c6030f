"""Carries one move out: instructions of the machine become calls, their results events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio

from reconfig import migration as m
from reconfig import policies
from reconfig.budget import FixedCost, Measured
from reconfig.controller.book import PlannedMove
from reconfig.controller.errand import Errand
from stateflow.errors import LeaseLost, Locked, Unavailable
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.wire import connected, error_of, fault_of, remote_error, replica_to_pb, spec_to_pb
from stateflow.types import ReplicaInfo

log = logging.getLogger(__name__)
PATIENCE_S_DEFAULT = 30.0
NO_MOVE_YET = FixedCost()
#: a cutover waits for the one before it at its source
TURN_S_MAX = 0.5
#: what the source says of a fence may come behind what the target says, which had the seal from it
ANSWER_S_MAX = 0.5


@dataclass(slots=True, kw_only=True)
class MoveRunner(Errand):
    source: ReplicaInfo
    machine: m.Move
    newest_epoch: Callable[[], int]  # granted to anybody, of the partition
    _fenced_at: float | None = None
    _in_hand_ms: float = 0.0
    _source_answered: asyncio.Event = field(default_factory=asyncio.Event)  # or was not reached
    sequence: int = 0  # that the target has reached, as last reported
    _source_told: bool = False
    _has_turn: bool = False

    @classmethod
    def machine_for(cls, planned: PlannedMove, cost: FixedCost = NO_MOVE_YET, kind: m.Kind = m.Kind.WARM) -> m.Move:
        return m.Move(
            planned.epoch,
            planned.granted_epoch,
            planned.max_pause_ms,
            cost.expected_ms,
            cost.margin_ms,
            planned.patience_s or PATIENCE_S_DEFAULT,
            kind=kind,
        )

    def __post_init__(self) -> None:
        self._begin_report(self.machine.phase)
        self.report.margin_ms = self.machine.margin_ms

    def cancel(self) -> None:
        self._events.put_nowait(m.Cancel())

    def source_gone(self) -> None:
        """The source's lease has lapsed. Telling it once is enough."""
        if self._source_told:
            return
        self._source_told = True
        self._events.put_nowait(m.SourceGone())

    def taken_over(self) -> None:
        """The target's copy is to serve as it is."""
        self._events.put_nowait(m.TakenOver())

    async def run(self, first: list[m.Instruction] | None = None) -> cpb.Move:
        """Until the move has ended. ``first``: instructions of a machine that was resumed."""
        started = self.clock.monotonic()
        try:
            await self._carry_out(self.machine.handle(m.Begin()) if first is None else first)
            while self.machine.phase not in m.TERMINAL:
                event = await self._events.get()
                if isinstance(event, m.TargetOwned) and self._fenced_at is not None:
                    elapsed_ms = (self.clock.monotonic() - self._fenced_at) * 1e3
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._source_answered.wait(), ANSWER_S_MAX)
                    self.report.pause_ms = max(0.0, elapsed_ms - self._in_hand_ms)
                await self._carry_out(self.machine.handle(event))
                if self.machine.phase not in (m.Phase.CATCHING_UP, m.Phase.FENCED):
                    self._end_turn()
                self._say(self.machine.phase, started)
        finally:
            self._end_turn()
            self._end()
        return self.report

    async def _cutover_turn(self) -> None:
        """Not for ever: another move may be fenced while its source does not answer."""
        if self.machine.kind is m.Kind.WARM:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.hooks.cutover.acquire(), TURN_S_MAX)
                self._has_turn = True

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self.hooks.cutover.release()

    def _summary(self) -> dict[str, object]:
        r = self.report
        return {
            "bytes_warm": r.bytes_warm,
            "bytes_reused": r.bytes_reused,
            "bytes_delta": r.bytes_delta,
            "rounds": r.rounds,
            "predicted_pause_ms": round(r.predicted_pause_ms, 3) if math.isfinite(r.predicted_pause_ms) else None,
            "pause_ms": round(r.pause_ms, 3),
            "duration_s": round(r.duration_s, 3),
            "digest": self.machine.digest,
        }

    # -- instructions -------------------------------------------------------------------------------------

    async def _carry_out(self, instructions: list[m.Instruction]) -> None:
        for instruction in instructions:
            await self._carry_out_one(instruction)

    async def _carry_out_one(self, instruction: m.Instruction) -> None:
        machine = self.machine
        match instruction:
            case m.Instruction.PREPARE:
                self._start(self._prepare())
            case m.Instruction.RETRY_PREPARE:
                self._start(self._later(self._prepare))
            case m.Instruction.RECORD_GRANT:
                await self._cutover_turn()
                try:
                    await self.hooks.record_grant()
                except Locked as error:
                    self._events.put_nowait(m.TargetFailed(error))
                else:
                    self._events.put_nowait(m.GrantRecorded())
            case m.Instruction.FENCE:
                self.report.predicted_pause_ms, self.report.rounds = machine.predicted_pause_ms, machine.rounds
                self.report.fenced_us = self.clock.now_us()
                self._fenced_at = self.clock.monotonic()
                self._start(self._fence())
            case m.Instruction.RETRY_FENCE:
                self._start(self._later(self._fence))
            case m.Instruction.CANCEL_SOURCE if machine.phase in m.TERMINAL:
                await self._cancel_at_source()  # never fenced: it only tidies up
            case m.Instruction.CANCEL_SOURCE:
                self._start(self._cancel_source())
            case m.Instruction.RETRY_CANCEL:
                self._start(self._later(self._cancel_source))
            case m.Instruction.CANCEL_TARGET:
                self._start(self._cancel_target())
            case m.Instruction.RETRY_CANCEL_TARGET:
                self._start(self._later(self._cancel_target))
            case m.Instruction.ABANDON_TARGET:
                await self._cancel_at(self.target, self.planned.move_id)
            case m.Instruction.RECORD_OWNED:
                self.report.epoch, self.report.digest = machine.granted_epoch, machine.digest
                await self.hooks.record_owned(self._summary())
                self._events.put_nowait(m.OwnedRecorded())
            case m.Instruction.RECORD_ABORTED:
                assert machine.error is not None
                self.report.fault.CopyFrom(fault_of(machine.error))
                await self.hooks.record_aborted(machine.error, self._summary())
            case m.Instruction.PUBLISH:
                pass  # whoever asks for the assignment is given what the ledger says
            case m.Instruction.RELEASE:
                await self._release()

    # -- calls --------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        request = rpb.PrepareRequest(
            move_id=self.planned.move_id,
            spec=spec_to_pb(self.spec),
            partition=self.planned.partition.partition,
            source=replica_to_pb(self.source),
            source_epoch=self.planned.epoch,
            bandwidth_max=self.planned.bandwidth_max,
            standby=self.machine.kind is m.Kind.STANDBY,
            on_demand=(strategy := policies.STRATEGIES.get(self.planned.strategy)) is not None and strategy.on_demand,
            session=self.session(self.target.name),
            newest_epoch=self.newest_epoch(),
        )
        warm = False
        try:
            await connected(self.channel(self.target.address), self.target.address)
            async for progress in self._stub(self.target).Prepare(request):
                self._take_over(progress)
                match progress.phase:
                    case rpb.MoveProgress.CATCHING_UP:
                        if not warm:
                            warm = True
                            self._events.put_nowait(m.BaseReady())
                        measured = Measured(
                            progress.lag_bytes,
                            progress.change_rate,
                            progress.bandwidth,
                            progress.rtt_ms,
                            progress.sync_ms,
                        )
                        self._events.put_nowait(m.CaughtUp(measured, progress.waited_s))
                    case rpb.MoveProgress.OWNED:
                        self._events.put_nowait(m.TargetOwned(progress.epoch, progress.digest))
                        return
                    case rpb.MoveProgress.FAILED:
                        self._events.put_nowait(m.TargetFailed(error_of(progress.fault)))
                        return
                    case _:
                        self.hooks.changed()
            ended = Unavailable("the transfer ended without a word", remedy="see the target's log")
            self._events.put_nowait(m.TargetFailed(ended))
        except grpc.aio.AioRpcError as error:
            self._events.put_nowait(m.TargetFailed(remote_error(error, self.target.address)))
        except Unavailable as error:
            self._events.put_nowait(m.TargetFailed(error))

    def _take_over(self, progress: rpb.MoveProgress) -> None:
        r = self.report
        if progress.phase != rpb.MoveProgress.FAILED:
            r.bytes_warm, r.bytes_reused = progress.bytes_warm, progress.bytes_reused
            r.bytes_delta, r.lag_bytes = progress.bytes_delta, progress.lag_bytes
            r.bytes_stored, r.base_bytes = progress.bytes_stored, progress.base_bytes
            r.change_rate, r.bandwidth, r.rtt_ms = progress.change_rate, progress.bandwidth, progress.rtt_ms
            self.sequence = progress.sequence

    async def _fence(self) -> None:
        self._source_answered.clear()
        try:
            await self._ask_to_fence()
        finally:
            self._source_answered.set()

    async def _ask_to_fence(self) -> None:
        if self._source_told:  # it may be back, and serve: nothing is asked of it any more
            return
        request = rpb.FenceRequest(
            move_id=self.planned.move_id,
            operator=self.planned.partition.operator,
            partition=self.planned.partition.partition,
            epoch=self.planned.granted_epoch,
            target=replica_to_pb(self.target),
            cold=self.machine.kind is m.Kind.COLD,
            pause_ms=self.machine.predicted_pause_ms if math.isfinite(self.machine.predicted_pause_ms) else 0.0,
            max_pause_ms=self.machine.max_pause_ms,
            session=self.session(self.source.name),
        )
        try:
            reply = await self._stub(self.source).Fence(request, timeout=self.settings.rpc_timeout_s)
        except grpc.aio.AioRpcError as error:
            log.warning("move %s: %s", self.planned.move_id, remote_error(error, self.source.address))
            self._events.put_nowait(m.SourceUnknown())
            return
        if reply.sealed:
            self._in_hand_ms = reply.in_hand_ms
            self._events.put_nowait(m.SourceSealed())
            return
        why = error_of(reply.fault)
        self._events.put_nowait(m.SourceUnknown() if isinstance(why, LeaseLost) else m.FenceRefused(why))

    async def _cancel_source(self) -> None:
        reply = await self._cancel_at_source()
        if reply is None:
            self._events.put_nowait(m.SourceUnknown())
        else:
            self._events.put_nowait(m.SourceSealed() if reply.sealed else m.SourceCancelled())

    async def _cancel_target(self) -> None:
        reply = await self._cancel_at(self.target, self.planned.move_id)
        if reply is None:
            self._events.put_nowait(m.TargetUnknown())
        else:
            owned = m.TargetOwned(reply.owned_epoch, "")
            self._events.put_nowait(owned if reply.owned else m.TargetCancelled())

    async def _cancel_at_source(self) -> rpb.FenceReply | None:
        return await self._cancel_at(self.source, self.planned.move_id, self.planned.epoch)

    async def _release(self) -> None:
        request = rpb.ReleaseRequest(
            move_id=self.planned.move_id,
            operator=self.planned.partition.operator,
            partition=self.planned.partition.partition,
            epoch=self.planned.granted_epoch,
            owner=replica_to_pb(self.target),
        )
        try:
            await self._stub(self.source).Release(request, timeout=self.settings.rpc_timeout_s)
        except grpc.aio.AioRpcError as error:  # a source that is down releases when it starts again
            log.warning("move %s: %s", self.planned.move_id, remote_error(error, self.source.address))
