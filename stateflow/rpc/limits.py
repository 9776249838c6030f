"""Limits on the calls that a server has under way, of each caller and of all.

A caller that asks for more is refused as busy and tries again; other callers go on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.errors import Busy
from stateflow.metrics.figures import Values
from stateflow.rpc.admission import caller
from stateflow.rpc.layers import Both, Context, Layer, Many, Unary
from stateflow.rpc.wire import abort
from stateflow.settings import ServerSettings

log = logging.getLogger(__name__)
#: interval of log lines about one caller
SAY_EVERY_S = 60.0
#: answered while a server is busy, too: its supervisor would take it for dead
_FREE = "/grpc.health.v1.Health/"


class CallLimits(Layer):
    """Limits the calls under way of each caller. ``refused``: calls refused since the start.

    Belongs behind :class:`~stateflow.rpc.admission.Admission`, which knows the callers: they are told apart by their
    certificates, or in plain text by the host that they come from.
    """

    def __init__(self, settings: ServerSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self._settings, self._clock = settings, clock
        self._said_at: dict[str, float] = {}
        self._under_way: Counter[str] = Counter()
        self.refused = 0

    def leaves(self, method: str) -> bool:
        return method.startswith(_FREE)

    def unary(self, method: str, inner: Unary) -> Unary:
        async def call(request: Any, context: Context) -> Any:
            whose = await self._begin(context)
            try:
                return await inner(request, context)
            finally:
                self._end(whose)

        return call

    def many(self, method: str, inner: Many) -> Many:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            whose = await self._begin(context)
            try:
                async for message in inner(request, context):
                    yield message
            finally:
                self._end(whose)

        return call

    def both(self, method: str, inner: Both) -> Both:
        return self.unary(method, inner)

    async def _begin(self, context: Context) -> str:
        whose, most = str(caller() or _host_of(context.peer())), self._settings.calls_per_caller_max
        if self._under_way[whose] >= most:
            self.refused += 1
            self._say(whose, most)
            await abort(
                context,
                Busy(
                    f"{most} calls of {whose} are already in progress here",
                    remedy="wait for the retry, use fewer clients, or raise STATEFLOW_SERVER_CALLS_PER_CALLER_MAX",
                ),
            )
        self._under_way[whose] += 1
        return whose

    @property
    def running(self) -> int:
        return self._under_way.total()

    def figures(self) -> Values:
        return {
            "stateflow_calls_running": {(): self.running},
            "stateflow_calls_refused_total": {(): self.refused},
        }

    def _say(self, whose: str, most: int) -> None:
        now = self._clock.monotonic()
        self._said_at = {each: at for each, at in self._said_at.items() if now - at < SAY_EVERY_S}
        if whose not in self._said_at:
            self._said_at[whose] = now
            log.warning("%s has %d calls in progress, more are refused; %d refused so far", whose, most, self.refused)

    def _end(self, whose: str) -> None:
        self._under_way[whose] -= 1
        if not self._under_way[whose]:
            del self._under_way[whose]


def _host_of(peer: str) -> str:
    """Returns ``ipv4:10.0.0.7:51234`` without the port, which differs between connections."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer
