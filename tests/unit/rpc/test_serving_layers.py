"""Refusals before any handler, over real connections: releases too far away, and bytes that are not a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from stateflow.errors import InvalidArgument, ReleaseMismatch
from stateflow.release import Release
from stateflow.rpc import controller_pb2 as cpb
from stateflow.rpc import controller_pb2_grpc, replica_pb2_grpc
from stateflow.rpc import replica_pb2 as rpb
from stateflow.rpc.faults import remote_error
from stateflow.rpc.secure import OPTIONS
from stateflow.rpc.serving import Understood, add_health, ask_health

NO_MESSAGE = b"\x0f\xff\xff"
SERVICE = "/stateflow.rpc.ReplicaService/"


class Replica(replica_pb2_grpc.ReplicaServiceServicer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def Positions(self, request: Any, context: Any) -> Any:
        self.seen.append(request)
        return rpb.PositionsReply()

    async def Fetch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.seen.append(request)
        yield rpb.FileChunk()

    async def Apply(self, requests: Any, context: Any) -> None:
        async for request in requests:
            self.seen.append(request)
            await context.write(rpb.ApplyResponse(call=request.call))


async def _serving(ask: Any, agent: str = "") -> tuple[Any, Replica]:
    server, replica = grpc.aio.server(interceptors=[Understood()], options=OPTIONS), Replica()
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(replica, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.primary_user_agent", agent)] if agent else []
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            return await ask(channel, (f"127.0.0.1:{port}", options)), replica
    finally:
        await server.stop(None)


def _both(target: str, options: Any, data: bytes) -> None:
    with grpc.insecure_channel(target, options=options) as channel:
        list(channel.stream_stream(f"{SERVICE}Apply")(iter([data])))


# A stream of requests is sent by a blocking channel, as the client does: an asynchronous one whose server ends the call
# while it sends loses the server's reason (grpc issue 36066).
ASKED: dict[str, Any] = {
    "unary": lambda channel, _, data: channel.unary_unary(f"{SERVICE}Positions")(data),
    "stream": lambda channel, _, data: channel.unary_stream(f"{SERVICE}Fetch")(data).read(),
    "both": lambda _, own, data: asyncio.to_thread(_both, *own, data),
}


@pytest.mark.parametrize("how", ASKED)
def test_what_is_no_message_is_refused_and_no_handler_sees_it(how: str) -> None:
    async def ask(channel: Any, own: Any) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            await ASKED[how](channel, own, NO_MESSAGE)
        await ASKED[how](channel, own, b"")
        return remote_error(caught.value, "it")

    error, replica = asyncio.run(_serving(ask))
    assert isinstance(error, InvalidArgument)
    assert str(error).startswith("invalid_argument: the request cannot be read: ")
    assert len(replica.seen) == 1, "the empty message, which is one"


@pytest.mark.parametrize("how", ASKED)
@pytest.mark.parametrize(
    ("release", "refused"), [(Release("0.9.0", 9, 8), True), (Release("0.3.0", 3, 2), False), (None, False)]
)
def test_a_release_too_far_away_is_refused(how: str, release: Release | None, refused: bool) -> None:
    async def ask(channel: Any, own: Any) -> Any:
        try:
            await ASKED[how](channel, own, b"")
        except grpc.RpcError as error:
            return remote_error(error, "it")

    error, replica = asyncio.run(_serving(ask, release.agent if release else ""))
    assert isinstance(error, ReleaseMismatch) is refused
    assert len(replica.seen) == (0 if refused else 1)


def test_a_handler_of_bytes_is_given_them() -> None:
    async def run() -> bool:
        server = grpc.aio.server(interceptors=[Understood()], options=OPTIONS)
        add_health(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await asyncio.get_running_loop().run_in_executor(None, ask_health, f"127.0.0.1:{port}", "live", 5.0)
        finally:
            await server.stop(None)

    assert asyncio.run(run())


def test_a_call_that_an_older_one_does_not_know_is_said_to_be_that() -> None:
    async def ask(channel: Any, _: Any) -> Any:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Status(cpb.StatusRequest())
        return remote_error(caught.value, "127.0.0.1:7070")

    error, _ = asyncio.run(_serving(ask))
    assert isinstance(error, ReleaseMismatch)
    assert "127.0.0.1:7070 does not know the call" in str(error)
