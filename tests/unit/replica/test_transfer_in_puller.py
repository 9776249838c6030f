"""Incoming transfers from a false source: the target writes what a copy has, and no more than was declared."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
import xxhash

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import StateflowError, StateMissing, Unavailable
from stateflow.operator.operator import describe
from stateflow.partition.change_feed import BaseFile, Reading, SnapshotInfo
from stateflow.partition.control import Preparation
from stateflow.partition.environment import RateLimit
from stateflow.partition.replica import ReplicaNode
from stateflow.replica import transfer_in
from stateflow.replica.peers import Peer, SourceReplica
from stateflow.replica.transfer_in import IncomingTransfer
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc import replica_pb2_grpc
from stateflow.settings import ReplicaSettings
from stateflow.types import PartitionId, ReplicaInfo
from tests.unit.operators import Count

EVIL = b"open('/tmp/ran', 'w')\n"
DIGEST = xxhash.xxh3_128_hexdigest(EVIL)


class Fake(replica_pb2_grpc.ReplicaServiceServicer):
    def __init__(self, files: list[dict[str, Any]], sent: bytes) -> None:
        self._files, self._sent = files, sent

    async def Inspect(self, request: rpb.InspectRequest, context: Any) -> rpb.PartitionView:
        return rpb.PartitionView(operator=request.operator, partition=request.partition)

    async def Snapshot(self, request: rpb.SnapshotRequest, context: Any) -> rpb.SnapshotReply:
        return rpb.SnapshotReply(snapshot_id="s", digest="0" * 32, files=[rpb.BaseFile(**file) for file in self._files])

    async def Fetch(self, request: rpb.FetchRequest, context: Any) -> AsyncIterator[rpb.FileChunk]:
        yield rpb.FileChunk(data=self._sent, checksum=xxhash.xxh64_intdigest(self._sent))


def file(name: str, size: int = len(EVIL), digest: str = DIGEST) -> dict[str, Any]:
    return {"name": name, "size": size, "digest": digest}


@pytest.mark.parametrize(
    ("files", "sent", "said"),
    [
        ([file("../../../evil.py")], EVIL, "is not a valid file name"),
        ([file("/tmp/stateflow-evil.py")], EVIL, "is not a valid file name"),
        ([file("evil.py")], EVIL, "is not a valid file name"),
        ([file("RESTORING")], EVIL, "is not a valid file name"),
        ([file("000001.sst", digest="../../evil")], EVIL, "is not a valid digest"),
        ([file("000001.sst"), file("000001.sst")], EVIL, "a base has a file twice"),
        ([file("000001.sst", size=5)], EVIL * 1000, "longer than its 5 bytes"),
        ([file("000001.sst", size=1 << 47)], EVIL, "are free"),
        ([file("000001.sst", size=1 << 60)], EVIL, "is not a valid size"),
    ],
    ids=str,
)
def test_it_writes_nothing_outside_the_copy(
    tmp_path: Path, files: list[dict[str, Any]], sent: bytes, said: str
) -> None:
    home = tmp_path / "a" / "b" / "data"
    settings = ReplicaSettings(resume_timeout_s=0.0, transfer_timeout_s=5.0)
    node = ReplicaNode(ReplicaInfo("target", "edge", "edge:1"), home, settings)
    spec = describe(Count, 4)

    async def transfer() -> str:
        server = grpc.aio.server()
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(Fake(files, sent), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        move = Preparation("m", spec, PartitionId(spec.name, 0), ReplicaInfo("fake", "x", address), 1)
        try:
            with ThreadPoolExecutor(1) as files_, ThreadPoolExecutor(1) as quick:
                async with grpc.aio.insecure_channel(address) as channel:
                    source = SourceReplica(channel, address, settings.transfer_timeout_s)
                    *_, last = [
                        report
                        async for report in IncomingTransfer(node, move, source, files_, quick, SYSTEM_CLOCK).run()
                    ]
            return str(last.fault.what)
        finally:
            await server.stop(None)

    before = {path for path in tmp_path.rglob("*") if home not in path.parents}
    assert said in asyncio.run(transfer())
    node.close()
    assert {path for path in tmp_path.rglob("*") if home not in path.parents} == before
    assert not Path("/tmp/stateflow-evil.py").exists()
    written = [path for path in home.rglob("*") if path.is_file() and path.read_bytes() == sent]
    assert written == []


class Message:
    pass


class Breaking:
    """A source whose streams break. ``messages``: what their frames held then."""

    address = "fake:1"

    def __init__(self) -> None:
        self.messages: list[weakref.ref[Message]] = []

    async def fetch(self, snapshot_id: str, name: str, offset: int) -> AsyncIterator[tuple[bytes, int]]:
        message = Message()
        self.messages.append(weakref.ref(message))
        yield EVIL, xxhash.xxh64_intdigest(EVIL)
        raise Unavailable("the link broke", remedy="none")

    async def follow(self) -> AsyncIterator[Reading]:
        message = Message()
        self.messages.append(weakref.ref(message))
        yield Reading([EVIL], 1, 0, None)
        raise Unavailable("the link broke", remedy="none")


async def a_broken_file(source: Any, path: Path) -> None:
    peer = Peer(source, "s", RateLimit(0), SYSTEM_CLOCK, 5.0, lambda _: None)
    await peer.fetch(BaseFile("000001.sst", 2 * len(EVIL), DIGEST), path)


async def a_broken_change_log(source: Any, path: Path) -> None:
    node: Any = SimpleNamespace(settings=ReplicaSettings())
    move = Preparation("m", describe(Count, 4), PartitionId("Count", 0), ReplicaInfo("fake", "x", "fake:1"), 1)
    none: Any = None
    transfer, readings = IncomingTransfer(node, move, source, none, none, SYSTEM_CLOCK), source.follow()
    while True:
        await transfer._next(readings)


@pytest.mark.parametrize("broken", [a_broken_file, a_broken_change_log])
def test_a_broken_stream_leaves_nothing_to_the_garbage_collection(tmp_path: Path, broken: Any) -> None:
    """The frames of a broken stream are freed with its error, and so is the last message in them.

    The collector examines them once, while they are in use, and then not before there are half a million more objects.
    """
    source = Breaking()

    async def run() -> None:
        try:
            await broken(source, tmp_path / "file")
        except Unavailable:
            pass
        else:
            raise AssertionError
        assert [each() for each in source.messages] == [None]

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


class Lost(Breaking):
    """A source whose files cannot be fetched, and which is gone at the second attempt."""

    async def connected(self) -> None:
        if self.messages:
            raise StateMissing("it is gone", remedy="none")

    async def ping(self, partition: PartitionId) -> None: ...

    async def snapshot(self, *_: Any, **__: Any) -> SnapshotInfo:
        return SnapshotInfo("s", 0, 1, "0" * 32, (BaseFile("000001.sst", 2 * len(EVIL), DIGEST),))


@pytest.mark.parametrize(("resume_timeout_s", "fault"), [(0.0, Unavailable), (60.0, StateMissing)])
def test_a_transfer_that_failed_leaves_nothing_to_the_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume_timeout_s: float, fault: type[StateflowError]
) -> None:
    """A failed transfer is freed with its last report, although the report has the error.

    The same holds for what an earlier attempt has received.
    """
    monkeypatch.setattr(transfer_in.log, "disabled", True)  # pytest keeps the lines, and the errors in them
    source: Any = Lost()
    settings = ReplicaSettings(resume_timeout_s=resume_timeout_s)
    node = ReplicaNode(ReplicaInfo("target", "edge", "edge:1"), tmp_path, settings)
    spec = describe(Count, 4)
    move = Preparation("m", spec, PartitionId(spec.name, 0), ReplicaInfo("fake", "x", "fake:1"), 1)

    async def run() -> weakref.ref[IncomingTransfer]:
        with ThreadPoolExecutor(1) as files, ThreadPoolExecutor(1) as quick:
            transfer = IncomingTransfer(node, move, source, files, quick, SYSTEM_CLOCK)
            *_, last = [report async for report in transfer.run()]
            assert isinstance(last.fault, fault)
            return weakref.ref(transfer)

    gc.disable()
    try:
        transfer = asyncio.run(run())
        assert transfer() is None
        assert [each() for each in source.messages] == [None]
    finally:
        gc.enable()
    node.close()
