"""HTTP pages answer hostile requests, or close the connection, and serve on; and what an answer may not say is seen."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from stateflow.checkpoint import CheckpointStore
from stateflow.dashboard import Dashboard, DashboardOptions
from stateflow.ledger import Ledger
from stateflow.local.cluster import Certificates
from stateflow.metrics.figures import Target, Values
from stateflow.metrics.page import Page as Metrics
from stateflow.security.roles import Identity
from tests.fuzz import pages
from tests.fuzz.pages import Page, Requests, problem_of, serves, storm, watched
from tests.sizes import SEED, THOROUGH, sized

#: the gate draws what it has drawn before
FIRST = SEED if THOROUGH else 1
PAGE = Page("page", "127.0.0.1:1", True)


@contextmanager
def metrics() -> Iterator[Page]:
    """Serves a page of metrics by an event loop of its own."""
    ready: Future[Metrics] = Future()

    async def figures() -> Values:
        return {"stateflow_info": {("agent", "gw", "edge", "1"): 1}}

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        page = Metrics("127.0.0.1:0", figures, loop, targets=lambda own: [Target(own, {"agent": "gw"})])
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        ready.set_result(page)
        await stop.wait()
        await asyncio.to_thread(page.close)

    stops: list[object] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield Page("metrics", ready.result(20).address, False)
    finally:
        stops[0]()  # type: ignore[operator]
        thread.join(20)


@contextmanager
def dashboard(folder: Path, token: str = "") -> Iterator[Page]:
    """Serves a dashboard with a ledger and a checkpoint store, whose controller does not answer."""
    ledger = f"sqlite:///{folder / 'ledger.db'}"
    Ledger(ledger).close()
    CheckpointStore(str(folder / "store")).check(first_use=True)
    with Dashboard(DashboardOptions("127.0.0.1:1", ledger=ledger, checkpoints=str(folder / "store"))) as page:
        yield Page("dashboard", page.url.removeprefix("http://").rstrip("/"), True, token)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes clients of a controller that does not listen give up at once."""
    monkeypatch.setenv("STATEFLOW_CLIENT_CONNECT_TIMEOUT_S", "0")


def is_sent(page: Page, count: int) -> None:
    with watched() as logged:
        outcome = asyncio.run(storm([page], count, FIRST))
        outcome.wrong += filter(None, [serves(page)])
    assert outcome.wrong + logged == []
    assert outcome.said.keys() > {"closed", "400"}


def test_the_dashboard_is_sent_hostile_requests(tmp_path: Path, at_once: None) -> None:
    with dashboard(tmp_path) as page:
        is_sent(page, sized(4000))


def test_the_page_of_metrics_is_sent_hostile_requests() -> None:
    with metrics() as page:
        is_sent(page, sized(4000))


def test_who_has_no_token_is_not_let_in(tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = Certificates(tmp_path)
    for variable, file in certificates.issue("page", "operate").items():
        monkeypatch.setenv(variable, file)
    token, _ = certificates.authority.token(Identity.of("read", "somebody"), timedelta(hours=1))
    with dashboard(tmp_path, token) as page:
        is_sent(page, sized(1600))


@pytest.mark.parametrize(
    ("status", "answer", "found"),
    [
        ("500", b"", "an error inside of it"),
        ("200", b"HTTP/1.1 200 OK\r\n\r\nroot:x:0:0:root", "it says b'root:x:0'"),
        ("404", b"HTTP/1.1 404 \r\n\r\nTraceback (most recent call last)", "it says b'Traceback"),
        ("400", b'HTTP/1.1 400 \r\n\r\n{"error": {"line": "one\\ntwo"}}', "not said in one line"),
        ("400", b'HTTP/1.1 400 \r\n\r\n{"error": {"line": "one"}}', ""),
        ("503", b"", ""),
        ("closed", b"", ""),
    ],
)
def test_what_an_answer_may_not_say(status: str, answer: bytes, found: str) -> None:
    said = problem_of(PAGE, status, answer)
    assert found in said
    assert bool(found) is bool(said)


def test_a_server_that_does_not_end_a_request_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ENDS_WITHIN_S", 0.2)
    monkeypatch.setattr(Requests, "make", lambda _: pages.Request(b"GET / HTTP/1.1\r\n\r\n", "has no more"))

    async def run() -> list[str]:
        async def never(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)

        writers: list[asyncio.StreamWriter] = []
        async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            outcome = await storm([Page("silent", f"127.0.0.1:{port}", False)], 1, 1)
            for writer in writers:
                writer.close()
        return outcome.wrong

    (problem,) = asyncio.run(run())
    assert "silent: it does not end (has no more)" in problem


def test_requests_are_sound_and_hostile_ones() -> None:
    made = [Requests(PAGE, random.Random(5)).make().data for _ in range(1)]
    maker = Requests(PAGE, random.Random(5))
    made = [maker.make() for _ in range(2000)]
    assert {each.ends for each in made} == {"waits", "has no more", "headers without end", "a body without end"}
    for part in (b"GET / HTTP/1.1", b"POST /api/sign-in HTTP/1.1", b"/../", b"bytes=5-1", b"Host: 127.0.0.1:1"):
        assert any(part in each.data for each in made), part
