"""Connections to the page: how many there may be, and what happens to a browser that sends or reads slowly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from stateflow.dashboard import connections
from stateflow.dashboard.connections import Listener, TimedConnection
from stateflow.metrics.limits import LimitHits

LONG_S = 30.0
REQUEST = b"GET /%s HTTP/1.1\r\nHost: page\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def page(scope: Any, receive: Any, send: Any) -> None:
    """Answers with a few bytes, and ``/much`` with more than any buffer holds."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(64 if scope["path"] == "/much" else 0):
        await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": b"well"})


@contextlib.asynccontextmanager
async def serving(connections_max: int = 64) -> AsyncIterator[tuple[int, LimitHits, set[Any]]]:
    """Serves the page. Yields its port, the count of limits that it reached, and its connections."""
    hits = LimitHits()
    listener = Listener(socket.create_server(("127.0.0.1", 0)), connections_max, hits)
    config = uvicorn.Config(
        page, http=TimedConnection, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    served = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()[1], hits, server.server_state.connections
    finally:
        server.should_exit = True
        await served
        listener.close()


async def opened(port: int, text: bytes = b"") -> Connection:
    made = await asyncio.open_connection("127.0.0.1", port)
    made[1].write(text)
    return made


async def answered(connection: Connection, path: bytes = b"") -> bool:
    """Tells whether a request gets an answer on a connection that stays open; False: it is closed."""
    reader, writer = connection
    try:
        writer.write(REQUEST % path)
        while b"well" not in (data := await reader.read(1 << 16)):
            if not data:
                return False
    except (ConnectionResetError, BrokenPipeError):
        return False
    return True


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, LONG_S))


def test_connections_beyond_their_number_are_closed_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with serving(4) as (port, hits, _):
            assert hits.counts() == {("dashboard_connections",): 0}
            kept = [await opened(port) for _ in range(4)]
            for _ in range(2):
                assert not await answered(await opened(port))
            assert hits.counts() == {("dashboard_connections",): 2}
            assert await asyncio.gather(*map(answered, kept)) == [True] * 4
            kept[0][1].close()
            while not await answered(await opened(port)):
                await asyncio.sleep(0.01)  # the server has not noticed yet
            for _, writer in kept:
                writer.close()

    run(work())
    said = [record.message for record in caplog.records if record.name == "stateflow.dashboard.connections"]
    assert said == ["the dashboard has 4 connections, more are closed, the newest from 127.0.0.1; 1 closed so far"]


def test_who_sends_what_is_no_request_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections._http_log, "filters", [connections._Sparing()])
    upgrade = b"GET / HTTP/1.1\r\nHost: page\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"

    async def work() -> None:
        async with serving() as (port, _, _):
            for _ in range(3):
                reader, _ = await opened(port, b"what\r\n\r\n")
                assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
                reader, _ = await opened(port, upgrade)
                assert (await reader.read()).startswith(b"HTTP/1.1 200 "), "answered like any other request"

    run(work())
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "Invalid HTTP request received."
    ]


@pytest.mark.parametrize("begun", [b"", REQUEST[:10], b"POST / HTTP/1.1\r\nHost: page\r\nContent-Length: 9\r\n\r\nabc"])
def test_a_browser_that_sends_slowly_is_cut_off(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] == "http.request":
            pass

    monkeypatch.setattr(connections, "REQUEST_S", 0.1)
    monkeypatch.setitem(globals(), "page", endless)

    async def work() -> None:
        async with serving() as (port, _, _):
            reader, _ = await opened(port, begun)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""

    run(work())


def test_the_time_of_a_request_ends_with_it_and_begins_anew_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with serving() as (port, _, there):
            connection = await opened(port)
            while not there:
                await asyncio.sleep(0.01)
            (timed,) = there
            assert timed._request is not None
            for _ in range(2):
                assert await answered(connection)
                assert timed._request is None
            monkeypatch.setattr(connections, "REQUEST_S", 0.1)
            connection[1].write(REQUEST[:10])
            with contextlib.suppress(ConnectionResetError):
                assert await connection[0].read() == b""

    run(work())


def test_a_browser_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_S", 0.1)

    async def work() -> None:
        async with serving() as (port, _, there):
            with socket.create_connection(("127.0.0.1", port), LONG_S) as silent:
                silent.sendall(REQUEST % b"much")
                while not there:
                    await asyncio.sleep(0.01)
                while there:
                    await asyncio.sleep(0.01)
            assert await answered(await opened(port))

    run(work())
