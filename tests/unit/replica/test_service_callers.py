"""Callers of a replica: who shares the time for batches, and who changed a source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from stateflow.operator.operator import describe
from stateflow.partition.replica import ReplicaNode
from stateflow.replica.service import ReplicaService
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.types import ReplicaInfo
from tests.unit.operators import Count


def serving(tmp_path: Path, work: Callable[[ReplicaService, str], Awaitable[None]]) -> None:
    """Serves a replica with two partitions in plain text."""

    async def run() -> None:
        node = ReplicaNode(ReplicaInfo("a", "a", ""), tmp_path)
        node.create(describe(Count, 2), [0, 1], 1)
        service, server = ReplicaService(node, None), grpc.aio.server()
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            await work(service, f"127.0.0.1:{port}")
        finally:
            await server.stop(None)
            await service.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_host_with_many_connections_has_one_share(tmp_path: Path) -> None:
    async def work(service: ReplicaService, address: str) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]  # otherwise channels would share a connection
        channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(3)]
        streams: list[Any] = []
        for channel in channels:
            stream = channel.stream_stream("/stateflow.rpc.ReplicaService/Apply")()
            header = rpb.ApplyHeader(operator="Count", source="s", batch=1)
            await stream.write(rpb.ApplyRequest(call=1, header=header, last=True).SerializeToString())
            assert await stream.read()
            streams.append(stream)
        assert [stream.caller for stream in service.streams] == ["ipv4:127.0.0.1"] * 3
        for channel, stream in zip(channels, streams, strict=True):
            stream.cancel()
            await channel.close()

    serving(tmp_path, work)


def test_who_changes_a_source_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(_: ReplicaService, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = replica_pb2_grpc.ReplicaServiceStub(channel)
            await stub.RetireSource(rpb.PositionsRequest(operator="Count", source="gw 7", partitions=[0, 1]))
            for apply in (False, True):
                await stub.DropOutput(
                    rpb.DropOutputRequest(operator="Count", source="gw 7", batch=5, partitions=[1], apply=apply)
                )

    with caplog.at_level(logging.INFO, "stateflow.replica.service"):
        serving(tmp_path, work)
    assert [record.message for record in caplog.records if record.name == "stateflow.replica.service"] == [
        "ipv4:127.0.0.1 retires the source 'gw 7' of Count, partitions: 2",
        "ipv4:127.0.0.1 drops the kept output of batch 5 of the source 'gw 7' of Count, partitions: 1",
    ]
