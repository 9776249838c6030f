"""What carrying out a move and carrying out a take-over have in common: events in, calls out, a report beside."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from reconfig.work import Planned
from stateflow.clock import Clock
from stateflow.errors import StateflowError, StateMissing
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.settings import ControllerSettings
from stateflow.types import OperatorSpec, ReplicaInfo

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Hooks:
    """What an errand needs of its controller. The records are durable when the awaitable is done.

    ``lost`` is told why a target that owned has it no more.
    ``cutover`` is held from the fence until the target owns: two at once at one source lengthen each other's pause.
    """

    record_grant: Callable[[], Awaitable[None]]
    record_owned: Callable[[dict[str, object]], Awaitable[None]]
    record_aborted: Callable[[StateflowError, dict[str, object]], Awaitable[None]]
    changed: Callable[[], None]
    cutover: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost: Callable[[StateflowError], None] = lambda _: None


class Replicas(Protocol):
    """RPCs to replicas by their names, as :class:`reconfig.controller.context.ControllerContext` has them. Raise
    StateflowErrors only."""

    async def ask(
        self, name: str, method: Callable[[Any], Any], request: Any, timeout_s: float | None = None
    ) -> Any: ...

    def stream(self, name: str, method: Callable[[Any], Any], request: Any) -> AsyncIterator[Any]: ...


@dataclass(slots=True, kw_only=True)
class Runner:
    planned: Planned
    spec: OperatorSpec
    target: ReplicaInfo
    replicas: Replicas
    hooks: Hooks
    settings: ControllerSettings
    clock: Clock
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

    async def _later(self, work: Callable[[], Awaitable[None]], seconds: float | None = None) -> None:
        await asyncio.sleep(self.settings.retry_interval_s if seconds is None else seconds)
        await work()

    async def _cancel_at(self, replica: ReplicaInfo, move_id: str, owned_at: int = 0) -> rpb.FenceReply | None:
        """``owned_at``: it is asked as the source, which owned the partition at this epoch. None: no answer.

        Raises StateMissing of a source that has lost it."""
        request = rpb.CancelRequest(
            move_id=move_id,
            operator=self.planned.partition.operator,
            partition=self.planned.partition.partition,
            owned_at=owned_at,
        )
        try:
            reply: rpb.FenceReply = await self.replicas.ask(replica.name, lambda stub: stub.Cancel, request)
            return reply
        except StateMissing:
            raise
        except StateflowError as error:
            log.warning("%s %s: %s", self.planned.strategy, move_id, error)
            return None
