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
from stateflow.metrics.limits import LimitHits
from stateflow.rpc import serving as limits
from stateflow.rpc.faults import remote_error
from stateflow.rpc.secure import OPTIONS
from stateflow.rpc.serving import CallLimits, new_server, outer_calls_max
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
async def serving(most: int, **more: Any) -> AsyncIterator[tuple[Any, Held, CallLimits]]:
    settings = ServerSettings(calls_per_caller_max=most, **more)
    held, counted = Held(), CallLimits(settings, hits=LimitHits(), clock=ManualClock())
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


async def refused(call: Any, whose: str = "ipv4:127.0.0.1") -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = remote_error(caught.value, "there")
    assert isinstance(error, Busy)
    assert error.retryable
    assert f"calls of {whose} are already in progress here" in str(error)
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


def test_calls_of_all_callers_are_limited_and_health_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(1024, calls_max=16) as (channel, held, counted):
            calls = [asyncio.ensure_future(channel.unary_unary("/t/unary")(b"x")) for _ in range(16)]
            await begun(held, 16)
            for _ in range(3):
                await refused(channel.unary_unary("/t/unary")(b"x"), "all callers")
            assert await channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"well"
            found = counted.figures()
            assert found["stateflow_calls_refused_total"] == {(): 3}
            assert found["stateflow_limit_reached_total"] == {("calls",): 3, ("calls_per_caller",): 0}
            used = found["stateflow_limit_used_ratio"]
            assert used == {("calls",): 1.0, ("calls_per_caller",): 16 / 1024}
            held.go_on.set()
            await asyncio.gather(*calls)
            assert await channel.unary_unary("/t/unary")(b"y") == b"y"

    asyncio.run(asyncio.wait_for(run(), LONG_S))
    said = [record.message for record in caplog.records if record.name == "stateflow.rpc.serving"]
    assert said == ["16 calls of all callers are in progress, more are refused; 1 refused so far"], "once a minute"


def test_a_caller_with_too_many_calls_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(4) as (channel, held, counted):
            calls = [asyncio.ensure_future(channel.unary_unary("/t/unary")(b"x")) for _ in range(4)]
            await begun(held, 4)
            for _ in range(3):
                await refused(channel.unary_unary("/t/unary")(b"x"))
            assert counted.figures()["stateflow_limit_reached_total"] == {("calls",): 0, ("calls_per_caller",): 3}
            held.go_on.set()
            await asyncio.gather(*calls)

    asyncio.run(asyncio.wait_for(run(), LONG_S))
    said = [record.message for record in caplog.records if record.name == "stateflow.rpc.serving"]
    assert said == ["caller ipv4:127.0.0.1 has 4 calls in progress, more are refused; 1 refused so far"]


def test_grpc_refuses_later_than_the_limits_do() -> None:
    assert outer_calls_max(ServerSettings(calls_max=16)) == 80
    assert outer_calls_max(ServerSettings()) == 5120


async def is_open(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    """Tells whether a server keeps a connection: it begins to speak, or closes it."""
    try:
        return await connection[0].read(1) != b""
    except ConnectionResetError:
        return False


def test_connections_beyond_their_number_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_SERVER_CONNECTIONS_MAX", "16")

    async def run() -> None:
        server = new_server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
            assert await asyncio.gather(*map(is_open, kept)) == [True] * 16
            for _ in range(3):
                assert not await is_open(await asyncio.open_connection("127.0.0.1", port))
            kept[0][1].close()
            while not await is_open(await asyncio.open_connection("127.0.0.1", port)):
                await asyncio.sleep(0.01)  # the server has not noticed yet
        finally:
            await server.stop(None)

    asyncio.run(asyncio.wait_for(run(), LONG_S))


def test_a_connection_that_is_never_set_up_or_has_no_call_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("grpc.server_handshake_timeout_ms", 20_000) in OPTIONS
    assert ("grpc.max_connection_idle_ms", 60_000) in OPTIONS
    soon = [(name, 100 if name == "grpc.server_handshake_timeout_ms" else value) for name, value in OPTIONS]
    monkeypatch.setattr(limits, "OPTIONS", soon)

    async def run() -> None:
        server = new_server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read()  # up to its end
        finally:
            await server.stop(None)

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
    assert CallLimits(ServerSettings(), refusals, LimitHits()).figures({"waiting_bytes": 0.5}) == {
        "stateflow_calls_running": {(): 0},
        "stateflow_calls_refused_total": {(): 0},
        "stateflow_calls_not_allowed_total": {("Deploy", "read"): 2, ("Drain", "read"): 1},
        "stateflow_limit_used_ratio": {("calls",): 0, ("calls_per_caller",): 0, ("waiting_bytes",): 0.5},
        "stateflow_limit_reached_total": {("calls",): 0, ("calls_per_caller",): 0},
    }
