"""Limits on a server's calls under way: a caller's refusals do not affect other callers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from stateflow.clock import ManualClock
from stateflow.errors import Busy, NotAllowed, from_wire
from stateflow.rpc import serving as limits
from stateflow.rpc.faults import remote_error
from stateflow.rpc.serving import CallLimits
from stateflow.security.refusals import Refusals
from stateflow.security.roles import Identity, Role
from stateflow.settings import ServerSettings

LONG_S = 30.0


class Held(grpc.GenericRpcHandler):
    """A handler whose calls, of each kind, last until ``go_on`` is set."""

    def __init__(self) -> None:
        self.go_on, self.begun = asyncio.Event(), 0

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        async def unary(request: bytes, context: Any) -> bytes:
            self.begun += 1
            await self.go_on.wait()
            return request

        async def many(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield await unary(request, context)

        async def both(requests: AsyncIterator[bytes], context: Any) -> None:
            async for request in requests:
                await context.write(await unary(request, context))

        async def healthy(request: bytes, context: Any) -> bytes:
            return b"well"

        return {
            "/t/unary": grpc.unary_unary_rpc_method_handler(unary),
            "/t/many": grpc.unary_stream_rpc_method_handler(many),
            "/t/both": grpc.stream_stream_rpc_method_handler(both),
            "/grpc.health.v1.Health/Check": grpc.unary_unary_rpc_method_handler(healthy),
        }.get(details.method)


@contextlib.asynccontextmanager
async def serving(most: int) -> AsyncIterator[tuple[Any, Held, CallLimits]]:
    held, counted = Held(), CallLimits(ServerSettings(calls_per_caller_max=most))
    server = grpc.aio.server(interceptors=[counted])
    server.add_generic_rpc_handlers((held,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel, held, counted
    finally:
        await server.stop(None)


async def begun(held: Held, count: int) -> None:
    async with asyncio.timeout(LONG_S):
        while held.begun < count:
            await asyncio.sleep(0.01)


async def refused(call: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = remote_error(caught.value, "there")
    assert isinstance(error, Busy)
    assert error.retryable
    assert "calls of ipv4:127.0.0.1 are already in progress here" in str(error)
    assert type(from_wire(error.to_wire())) is Busy


def test_one_more_is_refused_until_one_has_ended() -> None:
    async def run() -> None:
        async with serving(4) as (channel, held, counted):
            unary = [asyncio.ensure_future(channel.unary_unary("/t/unary")(b"x")) for _ in range(2)]
            many, both = channel.unary_stream("/t/many")(b"x"), channel.stream_stream("/t/both")()
            await both.write(b"x")
            await begun(held, 4)
            await refused(channel.unary_unary("/t/unary")(b"x"))
            await refused(channel.unary_stream("/t/many")(b"x").read())
            assert counted.refused == 2
            assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"well"
            held.go_on.set()
            assert await asyncio.gather(*unary) == [b"x", b"x"]
            assert [page async for page in many] == [b"x"]
            assert await both.read() == b"x"
            await both.done_writing()
            assert await both.read() is grpc.aio.EOF
            for _ in range(20):
                assert await channel.unary_unary("/t/unary")(b"x") == b"x"

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_who_went_away_or_failed_counts_no_more() -> None:
    async def run() -> None:
        async with serving(4) as (channel, held, _):
            calls = [channel.unary_unary("/t/unary")(b"x") for _ in range(4)]
            await begun(held, 4)
            for each in calls:
                each.cancel()
            held.go_on.set()
            async with asyncio.timeout(LONG_S):
                while True:
                    try:
                        assert await channel.unary_unary("/t/unary")(b"y") == b"y"
                        return
                    except grpc.aio.AioRpcError:  # the server has not noticed yet
                        await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), LONG_S))


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:51234", "ipv4:10.0.0.7"),
        ("ipv6:[::1]:51234", "ipv6:[::1]"),
        ("unix:", "unix:"),
        ("ipv6:%5B::1%5D:5", "ipv6:%5B::1%5D"),
    ],
)
def test_a_host_has_many_ports(peer: str, host: str) -> None:
    assert limits._host_of(peer) == host


def test_figures_are_of_calls_that_run_and_of_those_that_were_refused() -> None:
    refusals = Refusals(ManualClock())
    for call in ("Deploy", "Deploy", "Drain"):
        refusals.note(call, NotAllowed("not you", who=Identity(Role.READ, "grafana")))
    assert CallLimits(ServerSettings(), refusals).figures() == {
        "stateflow_calls_running": {(): 0},
        "stateflow_calls_refused_total": {(): 0},
        "stateflow_calls_not_allowed_total": {("Deploy", "read"): 2, ("Drain", "read"): 1},
    }
