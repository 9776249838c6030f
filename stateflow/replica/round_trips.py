"""Round trips to other replicas, measured from here at the controller's request."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence

import grpc.aio

from stateflow.clock import Clock
from stateflow.errors import StateflowError
from stateflow.replica.peers import SourceReplica
from stateflow.types import PartitionId

#: pings to each address, of which the median counts: the first may meet a program that has just started
PINGS = 5
#: a replica that is asked about more addresses measures only this many
ADDRESSES_MAX = 64
#: time limit of all pings to one address, connecting included
WITHIN_S = 2.0
#: a partition of no operator: inspecting it is answered at once, and costs nothing
_NOTHING = PartitionId("ping", 0)


class RoundTrips:
    def __init__(self, connect: Callable[[str], grpc.aio.Channel], clock: Clock) -> None:
        self._connect, self._clock = connect, clock

    async def measure(self, addresses: Sequence[str]) -> list[float]:
        """Returns the round trip to each address, in milliseconds; -1: no answer in time."""
        found = await asyncio.gather(*map(self._to, addresses[:ADDRESSES_MAX]))
        return [*found, *(-1.0 for _ in addresses[ADDRESSES_MAX:])]

    async def _to(self, address: str) -> float:
        try:
            async with asyncio.timeout(WITHIN_S):
                return await self._pinged(address)
        except (StateflowError, TimeoutError):
            return -1.0

    async def _pinged(self, address: str) -> float:
        took: list[float] = []
        async with self._connect(address) as channel:
            other = SourceReplica(channel, address, WITHIN_S)
            await other.connected()
            for _ in range(PINGS):
                began = self._clock.monotonic()
                await other.ping(_NOTHING)
                took.append((self._clock.monotonic() - began) * 1e3)
        return statistics.median(took)
