"""Channels and servers with certificates: who is let in, whose names are checked, and what new files change.

A channel keeps no connection that is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from stateflow.errors import BadCertificate, InsecureRefused, InvalidArgument, PortInUse, Unavailable
from stateflow.local.cluster import Certificates
from stateflow.rpc import secure
from stateflow.rpc.faults import remote_error
from stateflow.rpc.secure import CHANNEL_OPTIONS, OPTIONS, _SecureChannel
from stateflow.rpc.serving import bind
from stateflow.rpc.wire import connect
from stateflow.security import certificates as files_module
from stateflow.security.certificates import TlsFiles
from stateflow.settings import ConnectionSettings

CALL = "/test/call"


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """Makes certificates whose files are checked at each use."""
    monkeypatch.setattr(files_module, "LOOK_S", 0.0)
    return Certificates(tmp_path / "certificates")


@contextlib.contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, values: Any) -> Iterator[None]:
    with monkeypatch.context() as patched:
        for name, value in values.items():
            patched.setenv(name, value)
        yield


class Echo(grpc.GenericRpcHandler):
    """Echoes a request, or each message of a stream."""

    def service(self, details: Any) -> grpc.RpcMethodHandler:
        async def once(request: bytes, _: Any) -> bytes:
            return request

        async def again(requests: Any, context: Any) -> None:
            async for request in requests:
                await context.write(request)

        if details.method == CALL:
            return grpc.unary_unary_rpc_method_handler(once)
        return grpc.stream_stream_rpc_method_handler(again)


@contextlib.asynccontextmanager
async def serving(listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((Echo(),))
    address = bind(server, listen)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def refused(channel: grpc.aio.Channel, address: str) -> Unavailable:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(CALL)(b"1", timeout=5)
    error = remote_error(caught.value, address)
    assert isinstance(error, Unavailable)
    return error


@pytest.mark.parametrize(
    ("listen", "kind", "said"),
    [
        ("127.0.0.1:99999", InvalidArgument, "'127.0.0.1:99999' is not an address.*a port up to 65535"),
        ("127.0.0.1:²", InvalidArgument, "is not an address"),
        ("no-such-host.invalid:0", InvalidArgument, "this machine has no address 'no-such-host.invalid'"),
        ("192.0.2.1:0", InvalidArgument, "this machine has no address '192.0.2.1'"),
        ("TAKEN", PortInUse, "the address cannot be bound: Address already in use.*choose another port"),
    ],
)
def test_why_nothing_listens_is_said(listen: str, kind: type[Exception], said: str) -> None:
    """An address that cannot be bound is reported with its reason: an unknown host used to count as a port in use."""

    async def run() -> None:
        server = grpc.aio.server(options=OPTIONS)
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(kind, match=said):
            bind(server, listen.replace("TAKEN", f"127.0.0.1:{taken.getsockname()[1]}"))

    asyncio.run(run())


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_members_are_reached_directly_unless_the_proxy_is_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are reached without a proxy unless one is asked for.

    Where the environment named a proxy, nothing on this machine used to be reached, without a reason.
    """

    async def answers(address: str) -> list[bytes | str]:
        found: list[bytes | str] = []
        async with connect(address) as channel:
            try:
                found.append(await channel.unary_unary(CALL)(b"1", timeout=1))
            except grpc.aio.AioRpcError as error:
                found.append(str(error.code()))
        with secure.blocking_channel(address, CHANNEL_OPTIONS) as blocking:
            try:
                found.append(await asyncio.to_thread(blocking.unary_unary(CALL), b"1", timeout=1))
            except grpc.RpcError as error:
                found.append(str(error.code()))
        return found

    async def run() -> None:
        nobody = {"no_proxy": "", "no_grpc_proxy": "", name: "http://127.0.0.1:1"}
        async with serving() as address:
            with environment(monkeypatch, nobody):
                assert await answers(address) == [b"1", b"1"]
            with environment(monkeypatch, nobody | {"STATEFLOW_HTTP_PROXY": "1"}):
                assert await answers(address) == ["StatusCode.UNAVAILABLE"] * 2

    asyncio.run(run())


def test_both_have_certificates(certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    node = certificates.issue("edge-0", "node", "127.0.0.1")
    elsewhere = certificates.issue("edge-1", "node", "edge-1.lan")
    data = certificates.issue("gw", "data")
    other = Certificates(tmp_path / "other")
    stranger = other.issue("gw", "admin")

    async def run() -> None:
        with environment(monkeypatch, node):
            async with serving() as address:
                with environment(monkeypatch, data):
                    async with connect(address) as channel:
                        assert await channel.unary_unary(CALL)(b"1", timeout=5) == b"1"
                    with secure.blocking_channel(address, CHANNEL_OPTIONS) as blocking:
                        asked = asyncio.to_thread(blocking.unary_unary(CALL), b"1", timeout=5)
                        assert await asked == b"1"
                mixed = dict(stranger) | {"STATEFLOW_TLS_CA": node["STATEFLOW_TLS_CA"]}
                for wrong in (mixed["STATEFLOW_TLS_CERT"], None):
                    credentials = grpc.ssl_channel_credentials(
                        Path(node["STATEFLOW_TLS_CA"]).read_bytes(),
                        Path(mixed["STATEFLOW_TLS_KEY"]).read_bytes() if wrong else None,
                        Path(wrong).read_bytes() if wrong else None,
                    )
                    async with grpc.aio.secure_channel(address, credentials) as channel:
                        await refused(channel, address)
                with environment(monkeypatch, stranger):  # the stranger does not trust the server either
                    async with connect(address) as channel:
                        assert "not from the authority in STATEFLOW_TLS_CA" in (await refused(channel, address)).remedy
                async with grpc.aio.insecure_channel(address) as channel:
                    assert "closes connections in plain text" in (await refused(channel, address)).remedy
        with environment(monkeypatch, elsewhere):
            async with serving() as address, connect(address) as channel:
                assert "is not for this host" in (await refused(channel, address)).remedy
        with environment(monkeypatch, data), pytest.raises(BadCertificate, match="data/gw is not a server certificate"):
            async with serving():
                pass
        async with serving() as address:
            with environment(monkeypatch, data):
                async with connect(address) as channel:
                    assert "it speaks plain text" in (await refused(channel, address)).remedy

    asyncio.run(run())


def test_new_files_are_for_calls_that_begin_then(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream keeps the connection that it has; the server shows the new certificate to the next connection."""
    node = certificates.issue("edge-0", "node", "127.0.0.1")
    data = certificates.issue("gw", "data")

    async def run() -> None:
        with environment(monkeypatch, node):
            async with serving() as address:
                with environment(monkeypatch, data):
                    channel: Any = connect(address)
                    call, echo = channel.unary_unary(CALL), channel.stream_stream("/test/stream")()
                    await echo.write(b"1")
                    assert await echo.read() == b"1"
                    assert await call(b"1", timeout=5) == b"1"
                    first = channel.current()
                    files, serial = secure.own_certificate()
                    certificates.renew()
                    assert await call(b"2", timeout=5) == b"2"
                    assert channel.current() is not first
                    await echo.write(b"2")
                    assert await echo.read() == b"2"
                    renewed = secure.own_certificate()
                    assert (renewed[0] is files, renewed[1] != serial) == (True, True)
                    await channel.close()

    asyncio.run(run())


def test_plain_text_off_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATEFLOW_INSECURE", raising=False)

    async def run() -> None:
        with pytest.raises(InsecureRefused):
            async with serving("0.0.0.0:0"):
                pass
        with pytest.raises(InsecureRefused):
            connect("10.0.0.1:7070")
        with pytest.raises(InsecureRefused):
            secure.blocking_channel("ctl:7070", CHANNEL_OPTIONS)
        with pytest.raises(InsecureRefused):
            secure.check_reach(["localhost:7070", "ctl:7070"])
        monkeypatch.setenv("STATEFLOW_INSECURE", "1")
        async with serving("0.0.0.0:0"):
            pass

    asyncio.run(run())


def test_a_former_connection_stays_until_its_last_call_ends(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = certificates.issue("edge-0", "node", "127.0.0.1")
    files = certificates.issue("a", "admin")
    own = TlsFiles(ConnectionSettings(**{k.removeprefix("STATEFLOW_").lower(): v for k, v in files.items()}))  # type: ignore[arg-type]

    async def run() -> None:
        async with serving() as address:
            channel = _SecureChannel(address, CHANNEL_OPTIONS, own)
            call, stream = channel.unary_unary(CALL), channel.stream_stream("/test/stream")()
            for _ in range(3):
                await stream.write(b"1")
                assert await stream.read() == b"1", "it goes on on its own"
                certificates.renew()
                assert await call(b"2", timeout=10) == b"2"
            await asyncio.wait_for(_until(channel, 2), 20)
            await stream.done_writing()
            while await stream.read():
                pass
            await asyncio.wait_for(_until(channel, 1), 20)
            assert await call(b"3", timeout=10) == b"3"
            open_still = channel.stream_stream("/test/stream")()
            await open_still.write(b"4")
            assert await open_still.read() == b"4"
            certificates.renew()
            assert await call(b"5", timeout=10) == b"5"
            await asyncio.wait_for(channel.close(), 20)
            assert await open_still.code() is grpc.StatusCode.CANCELLED, "closing waits for nobody"
            assert not channel._channels

    with environment(monkeypatch, node):
        asyncio.run(run())


async def _until(channel: _SecureChannel, connections: int) -> None:
    while len(channel._channels) != connections:
        await asyncio.sleep(0.005)
