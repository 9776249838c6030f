"""What carrying out a move and carrying out a take-over have in common: events in, calls out, a report beside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from reconfig.controller.book import PlannedMove
from stateflow.clock import Clock
from stateflow.errors import StateflowError
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.wire import remote_error
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, ReplicaInfo

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Hooks:
    """What an errand needs of its controller. The records are durable when the awaitable is done.

    ``cutover`` is held from the grant until the target owns: two at once at one source lengthen each other's pause.
    """

    record_grant: Callable[[], Awaitable[None]]
    record_owned: Callable[[dict[str, object]], Awaitable[None]]
    record_aborted: Callable[[StateflowError, dict[str, object]], Awaitable[None]]
    changed: Callable[[], None]
    cutover: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True, kw_only=True)
class Errand:
    """``session``: of a replica, by its name, as it registered last: what it is asked to do that cannot be undone names
    it, so that the request is void once the controller gave the replica up."""

    planned: PlannedMove
    spec: OperatorSpec
    target: ReplicaInfo
    channel: Callable[[str], grpc.aio.Channel]
    hooks: Hooks
    settings: ControllerSettings
    clock: Clock
    session: Callable[[str], str]
    report: cpb.Move = field(default_factory=cpb.Move)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)  # of the machine's
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def _begin_report(self, phase: str) -> None:
        planned = self.planned
        self.report.id = planned.move_id
        self.report.partition = planned.partition.partition
        self.report.source, self.report.target = planned.source, planned.target
        self.report.strategy, self.report.phase = planned.strategy, phase
        self.report.started_us = self.clock.now_us()

    def _say(self, phase: str, started: float) -> None:
        self.report.phase = phase
        self.report.duration_s = self.clock.monotonic() - started
        self.hooks.changed()

    def _end(self) -> None:
        self.ended.set()
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _later(self, work: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(self.settings.retry_interval_s)
        await work()

    def _stub(self, replica: ReplicaInfo) -> replica_pb2_grpc.ReplicaServiceStub:
        return replica_pb2_grpc.ReplicaServiceStub(self.channel(replica.address))

    async def _cancel_at(self, replica: ReplicaInfo, move_id: str, owned_at: int = 0) -> rpb.FenceReply | None:
        """``owned_at``: it is asked as the source, which owned the partition at this epoch. None: no answer."""
        request = rpb.CancelRequest(
            move_id=move_id,
            operator=self.planned.partition.operator,
            partition=self.planned.partition.partition,
            owned_at=owned_at,
        )
        try:
            reply: rpb.FenceReply = await self._stub(replica).Cancel(request, timeout=self.settings.rpc_timeout_s)
            return reply
        except grpc.aio.AioRpcError as error:
            log.warning("%s %s: %s", self.planned.strategy, move_id, remote_error(error, replica.address))
            return None
