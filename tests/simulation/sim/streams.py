"""A double of the client in :mod:`stateflow.rpc.apply`, without threads: it has one Apply stream per address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc.aio

from stateflow.errors import StateflowError, Unavailable
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.apply import Calls, Replies
from stateflow.rpc.faults import remote_error
from tests.simulation.sim.world import World


class Streams:
    """Apply streams of one process. A stream that has ended is opened again at the next call."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._by_address: dict[str, _Stream] = {}

    def call(self, address: str, requests: Iterator[Any], replies: Replies) -> None:
        stream = self._by_address.get(address)
        if stream is None or stream.over:
            stream = self._by_address[address] = _Stream(self._world, address)
        stream.send(requests, replies)


class _Stream:
    def __init__(self, world: World, address: str) -> None:
        self.over = False
        self._world, self._address = world, address
        self._calls: Calls[Replies] = Calls()
        self._rpc = replica_pb2_grpc.ReplicaServiceStub(world.net.connect(address)).Apply()
        world.loop.create_task(world.guarded(self._read()))

    def send(self, requests: Iterator[Any], replies: Replies) -> None:
        number = self._calls.begin(replies, self._world.loop.time())
        for request in requests:
            request.call = number
            self._rpc.write(request)

    async def _read(self) -> None:
        error: StateflowError = Unavailable("the stream ended", remedy="-")
        try:
            async for response in self._rpc:
                replies = self._calls.came(response.call, response.last, self._world.loop.time())
                if replies is not None:
                    replies.came(response)
        except grpc.aio.AioRpcError as broken:
            error = remote_error(broken, self._address)
        self.over = True
        for replies in self._calls.end_all():
            replies.broke(error)
