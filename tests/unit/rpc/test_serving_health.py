"""gRPC's health protocol as its callers speak it: messages are written by hand here, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from stateflow.rpc.serving import NOT_SERVING, SERVING, add_health

NOTHING, LIVE, READY, OTHER = b"", b"\x0a\x04live", b"\x0a\x05ready", b"\x0a\x04what"


def asked(request: bytes, is_ready: Callable[[], bool]) -> bytes:
    async def run() -> bytes:
        server = grpc.aio.server()
        add_health(server, is_ready)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                answer: bytes = await channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=10)
                return answer
        finally:
            await server.stop(None)

    return asyncio.run(run())


def test_who_answers_lives_and_is_ready_when_it_says_so() -> None:
    assert asked(LIVE, lambda: False) == SERVING
    assert asked(READY, lambda: True) == asked(NOTHING, lambda: True) == SERVING
    assert asked(READY, lambda: False) == asked(NOTHING, lambda: False) == NOT_SERVING


@pytest.mark.parametrize("request_", [OTHER, b"\x0a", b"\x0a\x7flive", b"\xff\xff\xff"])
def test_another_service_is_not_found(request_: bytes) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        asked(request_, lambda: True)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
