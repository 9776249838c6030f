"""Round trips to other replicas: the median of a few pings, or nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from stateflow.clock import SYSTEM_CLOCK
from stateflow.replica import peers
from stateflow.replica.peers import ADDRESSES_MAX, PINGS, RoundTrips
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.wire import connect, unary


class Other(replica_pb2_grpc.ReplicaServiceServicer):
    """A replica that takes these times, in turn, for its answers."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.asked = list(seconds), 0

    @unary
    async def Inspect(self, request: rpb.InspectRequest, context: Any) -> rpb.PartitionView:
        self.asked += 1
        if self.seconds:
            await asyncio.sleep(self.seconds.pop(0))
        return rpb.PartitionView()


def measured(other: Other, *more: str) -> list[float]:
    async def run() -> list[float]:
        server = grpc.aio.server()
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(other, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            return await RoundTrips(connect, SYSTEM_CLOCK).measure([address, *more])
        finally:
            await server.stop(None)

    return asyncio.run(run())


def test_one_answer_that_is_slow_says_nothing() -> None:
    other = Other(0.3, 0.03, 0.03, 0.03, 0.03)
    (rtt_ms,) = measured(other)
    assert 30 <= rtt_ms < 300
    assert other.asked == PINGS


def test_who_does_not_answer_has_none_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WITHIN_S", 0.5)
    near, none = measured(Other(), "127.0.0.1:1")
    assert near > 0
    assert none == -1
    assert measured(Other(5.0)) == [-1]


def test_no_more_are_asked_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "WITHIN_S", 0.5)
    found = measured(Other(), *["127.0.0.1:1"] * ADDRESSES_MAX)
    assert len(found) == ADDRESSES_MAX + 1
    assert found[-1] == -1
