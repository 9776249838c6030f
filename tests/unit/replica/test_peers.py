"""Answers that a replica hears from a partition's source: whole values, or the meaning of a failure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import xxhash

from stateflow.clock import SYSTEM_CLOCK
from stateflow.code.bundles import BundleStore
from stateflow.errors import BundleDamaged, MoveUnknown, TransferCorrupt, Unavailable
from stateflow.fleet import Directory
from stateflow.operator.operator import describe
from stateflow.partition.change_feed import BaseFile, Reading, Seal
from stateflow.partition.environment import RateLimit
from stateflow.replica.executor import Threads
from stateflow.replica.peers import Bundles, Controller, Heartbeat, Peer, SourceReplica
from stateflow.replica.service import frames_of
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.fields import NUMBER_MAX
from stateflow.rpc.wire import connect, message_of, streaming
from stateflow.types import PartitionId, ReplicaInfo
from tests.unit.operators import Count

PIECE = 4
SEAL = Seal("m", 3, 9, "d" * 32, 77, ReplicaInfo("b", "s", "b:1", 1))


class Source(replica_pb2_grpc.ReplicaServiceServicer):
    """A source that sends ``readings``, and then raises ``then``."""

    def __init__(self, readings: Sequence[Reading], then: Exception | None = None) -> None:
        self._readings, self._then = readings, then

    @streaming
    async def Follow(self, request: rpb.FollowRequest, context: Any) -> AsyncIterator[rpb.ChangeFrame]:
        for reading in self._readings:
            for frame in frames_of(reading, PIECE):
                yield frame
        if self._then is not None:
            raise self._then


def followed(source_of: Any, bytes_max: int = 1 << 20) -> list[Reading]:
    async def run() -> list[Reading]:
        server = grpc.aio.server()
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(source_of(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            async with connect(address) as channel, asyncio.timeout(30):
                source = SourceReplica(channel, address, 30.0)
                async with aclosing(source.follow("s", 0, bytes_max)) as readings:
                    return [reading async for reading in readings]
        finally:
            await server.stop(None)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "change_sets",
    [[], [b"a"], [b"ab", b"cd", b"ef"], [b"abcdefghij"], [b"ab", b"cdefghijk", b"l"], [b"abcd", b"efgh"]],
    ids=str,
)
def test_change_sets_are_whole_however_they_were_sent(change_sets: list[bytes]) -> None:
    sent = Reading(change_sets, 9, 0, SEAL, b"c" * 16)
    heard = followed(lambda: Source([sent]))
    assert [each for reading in heard for each in reading.change_sets] == change_sets
    assert (heard[-1].seal, heard[-1].chain, heard[-1].head_sequence) == (SEAL, b"c" * 16, 9)
    assert heard[-1].lag_bytes == 0
    assert [reading.seal for reading in heard[:-1]] == [None] * (len(heard) - 1)


def test_what_is_begun_of_a_change_set_counts_as_lag() -> None:
    heard = followed(lambda: Source([Reading([b"abcdefghij"], 1, 0, None), Reading([], 1, 0, SEAL)]))
    assert [(reading.change_sets, reading.lag_bytes) for reading in heard] == [
        ([], 4),
        ([], 8),
        ([b"abcdefghij"], 0),
        ([], 0),
    ]


def test_a_change_set_that_does_not_end_is_refused() -> None:
    with pytest.raises(TransferCorrupt, match="exceeds this replica's limit: 8 bytes have arrived"):
        followed(lambda: Source([Reading([b"abcdefghijklmno"], 1, 0, SEAL)]), bytes_max=7)


def test_a_log_that_ends_without_a_seal_is_asked_for_again() -> None:
    with pytest.raises(Unavailable, match="without a seal"):
        followed(lambda: Source([Reading([b"ab"], 1, 0, None)]))


def test_what_a_source_refuses_with_is_what_is_raised() -> None:
    with pytest.raises(MoveUnknown, match="it began anew"):
        followed(lambda: Source([Reading([b"ab"], 1, 0, None)], MoveUnknown("it began anew", remedy="-")))


class Claiming(replica_pb2_grpc.ReplicaServiceServicer):
    """A source whose log is as long as a number can say, and whose files have no content."""

    async def Follow(self, request: rpb.FollowRequest, context: Any) -> AsyncIterator[rpb.ChangeFrame]:
        yield rpb.ChangeFrame(change_sets=[b"ab"], continues=True, lag_bytes=NUMBER_MAX)
        yield rpb.ChangeFrame(seal=message_of(rpb.Seal, SEAL))

    async def Fetch(self, request: rpb.FetchRequest, context: Any) -> AsyncIterator[rpb.FileChunk]:
        while True:
            yield rpb.FileChunk(checksum=xxhash.xxh64_intdigest(b""))


def test_lag_is_a_number_that_a_report_can_hold() -> None:
    """The sum of lag and a begun change set used to be too large for the progress that a target reports."""
    assert followed(Claiming)[0].lag_bytes == NUMBER_MAX


def test_a_file_of_empty_pieces_has_an_end(tmp_path: Path) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(Claiming(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            async with connect(address) as channel, asyncio.timeout(30):
                source = SourceReplica(channel, address, 30.0)
                peer = Peer(source, "s", RateLimit(0), SYSTEM_CLOCK, 30.0, lambda _: None)
                await peer.fetch(BaseFile("000001.sst", 5, "0" * 32), tmp_path / "file")
        finally:
            await server.stop(None)

    with pytest.raises(TransferCorrupt, match="a piece of a base file arrived damaged"):
        asyncio.run(run())


class Unparsable(grpc.GenericRpcHandler):
    """A server whose answers are no messages."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def one(request: bytes, context: Any) -> bytes:
            return b"\xff"

        async def many(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield b"\xff"

        is_many = details.method.rpartition("/")[2] in ("Fetch", "Follow")
        return grpc.unary_stream_rpc_method_handler(many) if is_many else grpc.unary_unary_rpc_method_handler(one)


@pytest.mark.parametrize("ask", ["snapshot", "fetch", "follow", "heartbeat"])
def test_answers_that_are_no_messages_are_one_line(ask: str, caplog: pytest.LogCaptureFixture) -> None:
    """gRPC returns None for them, which used to end in an AttributeError."""
    caplog.set_level(logging.CRITICAL)  # gRPC logs them with a stack

    async def run() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Unparsable(),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            async with connect(address) as channel:
                source, controller = SourceReplica(channel, address, 30.0), Controller(channel, address)
                match ask:
                    case "snapshot":
                        await source.snapshot(PartitionId("Op", 0), "m")
                    case "fetch":
                        _ = [each async for each in source.fetch("s", "CURRENT", 0)]
                    case "follow":
                        _ = [each async for each in source.follow("s", 0, 1 << 20)]  # type: ignore[assignment]
                    case _:
                        await controller.heartbeat(Heartbeat(ReplicaInfo("r", "s", "r:1"), Directory("d", "/d")))
        finally:
            await server.stop(None)

    with pytest.raises(Unavailable, match=r"invalid answer from 127.* it cannot be parsed"):
        asyncio.run(run())


def test_a_bundle_of_empty_parts_is_refused(tmp_path: Path) -> None:
    """A controller that named many parts, all of them empty, used to be asked for each of them."""
    asked: list[int] = []

    async def part(digest: str, number: int) -> tuple[bytes, int]:
        asked.append(number)
        return b"", 1 << 31

    async def run() -> None:
        threads = Threads()
        bundles = Bundles(BundleStore(tmp_path), threads)
        controller: Any = SimpleNamespace(bundle_part=part)
        bundles.controller = controller
        try:
            await bundles.ensure(replace(describe(Count, 1), bundle="f" * 64))
        finally:
            threads.close()

    with pytest.raises(BundleDamaged, match="a part of the bundle is empty"):
        asyncio.run(run())
    assert asked == [0]
