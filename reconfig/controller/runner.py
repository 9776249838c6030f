"""Base of the runners of a move and of a takeover: events in, calls out, and a report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from reconfig.controller.cluster_state import Deployed
from reconfig.controller.history import ended_as, planned_report
from reconfig.controller.replicas import Replicas
from reconfig.controller.spans import MoveSpan, moving
from reconfig.failover import Takeover
from reconfig.migration import Move
from reconfig.work import Planned
from stateflow.clock import Clock
from stateflow.errors import StateflowError, StateMissing
from stateflow.reports import MoveReport
from stateflow.runtime.control import Cancellation, Cancelled
from stateflow.settings import ControllerSettings
from stateflow.types import ReplicaInfo
from stateflow.validating import check

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Hooks:
    """Functions of the controller that a runner calls. A record is durable when its awaitable is done.

    ``record_aborted``: its last argument says whether what the source sealed is distrusted.
    ``changed``: called when the report has changed.
    ``cutover``: held from the fence until the target owns, as two cutovers at one source lengthen each other's pause.
    ``lost``: called with the reason why a target that owned the partition has lost it.
    """

    record_grant: Callable[[], Awaitable[None]]
    record_owned: Callable[[MoveReport], Awaitable[None]]
    record_aborted: Callable[[StateflowError, MoveReport, bool], Awaitable[None]]
    changed: Callable[[], None]
    cutover: asyncio.Lock = field(default_factory=asyncio.Lock)
    lost: Callable[[StateflowError], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class _Broken:
    """An error of a task that is no event of the machine."""

    error: BaseException


@dataclass(slots=True, kw_only=True)
class Runner:
    planned: Planned
    machine: Move | Takeover
    deployed: Deployed  # not its spec, so that the newest one is sent each time
    target: ReplicaInfo
    replicas: Replicas
    hooks: Hooks
    settings: ControllerSettings
    clock: Clock
    report: MoveReport = field(init=False)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _began: float = 0.0  # monotonic
    _recorded: bool = False
    _events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)  # events of the machine, and _Broken
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _span: MoveSpan | None = None

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """Adds the move's ids to log lines, and traces the move if tracing is on, while it is carried out."""
        with moving(self.planned) as span:
            self._span, error = span, None
            try:
                yield
            except BaseException as caught:
                error = caught
                raise
            finally:
                self._span = None
                if span is not None:
                    span.end(self.report, error)

    def handle(self, event: Any) -> list[Any]:
        """Feeds an event to the machine. Returns its instructions, which are still to be carried out.

        Raises what the machine raises.
        """
        instructions: list[Any] = self.machine.handle(event)
        if self._span is not None:
            self._span.phase(str(self.machine.phase))
        if self.settings.debug_validate:
            check(self.machine)
        return instructions

    def _begin_report(self, state: str) -> None:
        self._began = self.clock.monotonic()
        self.report = replace(planned_report(self.planned), state=state, started_us=self.clock.now_us())

    def _tell(self, **changes: Any) -> None:
        """Updates the report, unless the end of the move is recorded: then the report stays as recorded."""
        if not self._recorded:
            self.report = replace(self.report, duration_s=self._duration_s(), **changes)

    def _say(self, state: str) -> None:
        self._tell(state=state)
        self.hooks.changed()

    def _duration_s(self) -> float:
        return self.clock.monotonic() - self._began

    async def _record_owned(self, **changes: Any) -> None:
        final = self._final(True, **changes)
        await self.hooks.record_owned(final)
        self.report, self._recorded = final, True

    async def _record_aborted(self, error: StateflowError, distrusted: bool = False) -> None:
        final = self._final(False, fault=error)
        await self.hooks.record_aborted(error, final, distrusted)
        self.report, self._recorded = final, True

    def _final(self, owned: bool, **changes: Any) -> MoveReport:
        state = ended_as(self.planned, owned)
        return replace(self.report, state=state, duration_s=self._duration_s(), **changes)

    def _end(self) -> None:
        self.ended.set()
        for task in self._tasks:
            task.cancel()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """Passes on the error of a task that is no event of the machine: without it, the runner would wait for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.put_nowait(_Broken(error))

    async def _next_event(self) -> Any:
        """Returns the next event. Raises the error of a task that is no event of the machine."""
        event = await self._events.get()
        if isinstance(event, _Broken):
            raise event.error
        return event

    async def _later(self, work: Callable[[], Awaitable[None]], seconds: float | None = None) -> None:
        await asyncio.sleep(self.settings.retry_interval_s if seconds is None else seconds)
        await work()

    async def _cancel_at(self, replica: ReplicaInfo, move_id: str, owned_at: int = 0) -> Cancelled | None:
        """Cancels a move at a replica. Returns its answer; None: there was none.

        Args:
            owned_at: epoch at which the replica, as the source, owned the partition; 0: it is asked as the target.

        Raises StateMissing where a source has lost the partition.
        """
        cancellation = Cancellation(self.planned.partition, move_id, owned_at)
        try:
            return await self.replicas.cancel(replica.name, cancellation, at_once=True)
        except StateMissing:
            raise
        except StateflowError as error:
            log.warning("%s %s: cancellation not confirmed: %s", self.planned.strategy, move_id, error)
            return None
