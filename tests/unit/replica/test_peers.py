"""Answers that a replica hears from a partition's source: whole values, or the meaning of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio
import pytest

from stateflow.errors import MoveUnknown, TransferCorrupt, Unavailable
from stateflow.partition.change_feed import Reading, Seal
from stateflow.replica.peers import SourceReplica
from stateflow.replica.service import frames_of
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.rpc.wire import connect, streaming
from stateflow.types import ReplicaInfo

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
