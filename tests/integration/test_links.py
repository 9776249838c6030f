"""Slow, silent and broken links between real servers and clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import xxhash

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import Unavailable
from stateflow.partition.change_feed import BaseFile
from stateflow.partition.environment import RateLimit
from stateflow.replica.peers import Peer, SourceReplica
from stateflow.rpc import clients, controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import common_pb2 as pb
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.clients import ControllerClient
from stateflow.rpc.secure import CHANNEL_OPTIONS, OPTIONS
from stateflow.rpc.wire import connect
from stateflow.testing import LocalCluster
from tests.crash_matrix.proxy import Proxy
from tests.integration.operators import Blob
from tests.integration.slow_link import SlowLink
from tests.integration.support import eventually, read
from tests.sizes import THOROUGH

pytestmark = [pytest.mark.processes, pytest.mark.alone]

#: the shortest keepalive interval that gRPC takes; a server that does not permit it cuts the link at the fifth ping
OFTEN = ("grpc.keepalive_time_ms", 1_000)


class _Slow(replica_pb2_grpc.ReplicaServiceServicer):
    """A replica that is silent for longer than a server tolerates pings."""

    async def Release(self, request: rpb.ReleaseRequest, context: Any) -> pb.Empty:
        await asyncio.sleep(6.5)
        return pb.Empty()

    async def Follow(self, request: rpb.FollowRequest, context: Any) -> AsyncIterator[rpb.ChangeFrame]:
        yield rpb.ChangeFrame(head_sequence=1)
        await asyncio.sleep(6.5)
        yield rpb.ChangeFrame(head_sequence=2)

    async def Fetch(self, request: rpb.FetchRequest, context: Any) -> AsyncIterator[rpb.FileChunk]:
        if not request.offset:
            yield rpb.FileChunk(data=b"abc", checksum=xxhash.xxh64_intdigest(b"abc"))
        await asyncio.sleep(60)

    async def Scan(self, request: rpb.ScanRequest, context: Any) -> AsyncIterator[rpb.ScanPage]:
        while True:
            yield rpb.ScanPage(records=bytes(1 << 18))

    async def Inspect(self, request: rpb.InspectRequest, context: Any) -> rpb.PartitionView:
        return rpb.PartitionView(sequence=1)


def test_a_stream_that_nobody_reads_holds_up_nothing_else_on_its_channel() -> None:
    """A throttled copy does not stop what shares its channel: HTTP/2 gives each stream a window of its own."""
    asyncio.run(_ask_beside_a_full_stream())


async def _ask_beside_a_full_stream() -> None:
    server = grpc.aio.server(options=OPTIONS)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(_Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            stub = replica_pb2_grpc.ReplicaServiceStub(channel)
            full = [stub.Scan(rpb.ScanRequest()) for _ in range(4)]
            for call in full:
                await call.read()
            for _ in range(20):
                await stub.Inspect(rpb.InspectRequest(), timeout=10)
            for call in full:
                call.cancel()
    finally:
        await server.stop(0)


def test_what_is_silent_for_long_is_not_cut() -> None:
    """Calls that are silent for long are not cut.

    Earlier, a checkpoint of 54 s ended with `unavailable: …, too many pings`.
    """
    asyncio.run(_silent_calls())


async def _silent_calls() -> None:
    server = grpc.aio.server(options=OPTIONS)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(_Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [*(option for option in OPTIONS if option[0] != OFTEN[0]), OFTEN]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            stub = replica_pb2_grpc.ReplicaServiceStub(channel)
            await asyncio.sleep(0.5)  # idle, too
            unary = asyncio.ensure_future(stub.Release(rpb.ReleaseRequest(), timeout=30))
            frames = [frame.head_sequence async for frame in stub.Follow(rpb.FollowRequest(), timeout=30)]
            assert frames == [1, 2]
            await unary
    finally:
        await server.stop(0)


# -- half-open connections ------------------------------------------------------------------------------------

#: the shortest keepalive that gRPC takes: a connection is noticed to be half open after two seconds and a half
SHORT = {"grpc.keepalive_time_ms": 1_000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 1_500}


def shortened(options: Any) -> list[tuple[str, Any]]:
    assert dict(options).keys() >= SHORT.keys(), "keepalive is on"
    return [*(dict(options) | SHORT).items()]


def test_a_caller_notices_that_its_connection_is_half_open() -> None:
    """A caller whose link holds what both ends send gets its error by keepalive, long before its deadline."""
    asyncio.run(_call_over_a_link_that_holds())


async def _call_over_a_link_that_holds() -> None:
    server = grpc.aio.server(options=OPTIONS)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(_Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    proxy = Proxy(lambda: f"127.0.0.1:{port}")
    try:
        async with grpc.aio.insecure_channel(proxy.address, options=shortened(CHANNEL_OPTIONS)) as channel:
            stub = replica_pb2_grpc.ReplicaServiceStub(channel)
            stream = stub.Follow(rpb.FollowRequest(), timeout=10)  # less than keepalive takes if it is not shortened
            assert (await stream.read()).head_sequence == 1
            proxy.hold()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value.details()
    finally:
        proxy.close()
        await server.stop(0)


def test_a_stream_goes_on_after_its_connection_was_half_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moving(controller_pb2_grpc.ControllerServiceServicer):
        calls = 0

        def WatchReconfiguration(self, request: Any, context: Any) -> Iterator[cpb.Reconfiguration]:
            self.calls += 1
            if self.calls > 1:
                yield cpb.Reconfiguration(id="later", operator="Op")
                return
            yield cpb.Reconfiguration(id="first", operator="Op")
            ended.wait(60)

    def upstream() -> str:
        connections.append(1)
        return f"127.0.0.1:{port}"

    monkeypatch.setattr(clients, "_OPTIONS", shortened(clients._OPTIONS))
    ended, connections = threading.Event(), list[int]()
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(Moving(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    proxy = Proxy(upstream)
    try:
        stream = ControllerClient(proxy.address, connect_timeout_s=30).watch(cpb.ReconfigurationRequest(id="one"))
        assert next(stream).id == "first"
        proxy.hold()
        with ThreadPoolExecutor(1) as aside:
            rest = aside.submit(lambda: [each.id for each in stream])
            eventually(lambda: len(connections) > 1, "the client noticed it, and connects again", timeout_s=10)
            proxy.heal()
            assert rest.result(60) == ["later"]
    finally:
        ended.set()
        proxy.close()
        server.stop(0)


# -- transfers ------------------------------------------------------------------------------------------------


class LinkedCluster(LocalCluster):
    """A cluster whose ``cloud-0`` is reached, and sends, over a slow link."""

    def __init__(self) -> None:
        super().__init__(Blob, sites={"cloud": 1, "edge": 1}, partitions=1, deploy_to=("cloud",))
        self.link = SlowLink(lambda: self.processes["cloud-0"].address)

    def _replica_arguments(self, name: str) -> list[str]:
        arguments = list(super()._replica_arguments(name))
        at = arguments.index("--checkpoints")
        del arguments[at : at + 4]  # otherwise files would come from the store and not over the link
        return [*arguments, "--advertise", self.link.address] if name == "cloud-0" else arguments

    def stop(self) -> None:
        super().stop()
        self.link.close()


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[LinkedCluster]:
    if not THOROUGH:
        monkeypatch.setenv("STATEFLOW_REPLICA_RESUME_TIMEOUT_S", "2")
    with LinkedCluster() as cluster:
        yield cluster


def fill(cluster: LocalCluster, size: int) -> None:
    """Writes one value that does not compress, in one file."""
    cluster.stream("Blob", "filling").send([{"k": "large", "size": -size}])


#: in make test-all, the file takes longer than any timeout of a call
FILE_BYTES, BYTES_PER_S = (2_400_000, 60_000) if THOROUGH else (600_000, 150_000)


def test_a_large_file_arrives_over_a_slow_link_that_is_cut_twice(linked: LinkedCluster) -> None:
    """A large file arrives over a slow link that is cut twice.

    The transfer takes longer than a broken connection is tried again for (`resume_timeout_s`). Earlier, it began anew
    with each cut, and the move ended with `unavailable: no answer from …`.
    """
    fill(linked, FILE_BYTES)
    linked.link.bytes_per_s = BYTES_PER_S
    begun = linked.link.sent
    linked.link.cut_at = [begun + FILE_BYTES * 3 // 4, begun + FILE_BYTES * 7 // 8]
    move = linked.migrate("Blob", [0], to="edge-0")
    seen = {report.moves[0].bytes_warm for report in move.progress() if report.moves}
    moved = move.report.moves[0]
    assert not moved.error, moved.error
    assert not linked.link.cut_at, "both cuts came"
    assert move.report.state == "COMPLETED"
    assert len(seen) > 3, "it was told how far the file is while it was on its way"
    assert linked.link.sent - begun < 2 * FILE_BYTES, "what had arrived before a cut was not sent again"
    linked.link.bytes_per_s = 0
    assert len(read(linked.cluster, "Blob", "blob")["large", None]) == FILE_BYTES


def test_what_arrived_of_a_file_is_kept_for_the_next_move(linked: LinkedCluster) -> None:
    fill(linked, FILE_BYTES)
    linked.link.bytes_per_s = BYTES_PER_S
    enough = linked.link.sent + FILE_BYTES * 3 // 4
    move = linked.migrate("Blob", [0], to="edge-0")
    eventually(lambda: linked.link.sent > enough, "more than half of it was sent", timeout_s=200)
    linked.cluster.cancel(move.id)
    assert move.wait().state != "COMPLETED"
    linked.link.bytes_per_s = 0
    again = linked.migrate("Blob", [0], to="edge-0").wait()
    assert again.state == "COMPLETED"
    assert again.moves[0].bytes_reused > FILE_BYTES // 2


def test_a_source_that_accepts_and_never_sends_ends_with_an_error(tmp_path: Path) -> None:
    asyncio.run(_fetch_from_a_silent_source(tmp_path / "file"))


async def _fetch_from_a_silent_source(path: Path) -> None:
    server = grpc.aio.server(options=OPTIONS)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(_Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    arrived: list[int] = []
    try:
        async with connect(f"127.0.0.1:{port}") as channel:
            source = SourceReplica(channel, "there:1", 5.0)
            peer = Peer(source, "s", RateLimit(0), SYSTEM_CLOCK, 0.5, arrived.append)
            with pytest.raises(Unavailable, match=r"sent no data of a base file for 0.5 s .*arrived=3 of 9 bytes"):
                await peer.fetch(BaseFile("1.sst", 9, "-"), path)
    finally:
        await server.stop(0)
    assert (arrived, path.read_bytes()) == ([3], b"abc"), "what had come is there"


def test_a_stream_of_a_controller_that_says_nothing_ends_with_an_error() -> None:
    """A watch ends with an error when its controller never answers.

    Such a controller runs and keeps the connection. Earlier, the watch waited for ever.
    """

    class Silent(controller_pb2_grpc.ControllerServiceServicer):
        def WatchReconfiguration(self, request: Any, context: Any) -> Iterator[cpb.Reconfiguration]:
            yield cpb.Reconfiguration(id="one", operator="Op")
            ended.wait(60)

    ended = threading.Event()
    server = grpc.server(ThreadPoolExecutor(1), options=OPTIONS)
    controller_pb2_grpc.add_ControllerServiceServicer_to_server(Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        stream = ControllerClient(f"127.0.0.1:{port}").stream(
            "WatchReconfiguration", cpb.ReconfigurationRequest(id="one"), silence_s=0.5
        )
        assert next(stream).id == "one"
        with pytest.raises(Unavailable, match=r"no message from .* for 0\.5 s"):
            next(stream)
    finally:
        ended.set()
        server.stop(0)
