"""Addresses where the page may be served, and connections that it does not keep."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from stateflow.dashboard import Dashboard, DashboardOptions, connections
from stateflow.dashboard.connections import Listener
from stateflow.errors import InsecureRefused, InvalidArgument, PortInUse


def test_plain_text_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InsecureRefused, match=r"plain text on 0\.0\.0\.0"):
        Dashboard(DashboardOptions("127.0.0.1:1", "0.0.0.0:0"))
    monkeypatch.setenv("STATEFLOW_INSECURE", "1")
    page = Dashboard(DashboardOptions("127.0.0.1:1", "0.0.0.0:0"))
    page.close()


@pytest.mark.parametrize("listen", ["7071", "127.0.0.1:x", ":7071", "127.0.0.1:70000"])
def test_what_is_no_address(listen: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an address"):
        Dashboard(DashboardOptions("127.0.0.1:1", listen))


def test_a_port_that_is_taken_is_said_before_anything_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse):
        Dashboard(DashboardOptions("127.0.0.1:1", f"127.0.0.1:{taken.getsockname()[1]}"))


def test_the_number_of_its_connections_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_SERVER_PAGE_CONNECTIONS_MAX", "5")
    page = Dashboard(DashboardOptions("127.0.0.1:1"))
    assert isinstance(page._listener, Listener)
    assert page._listener._connections_max == 5
    page.close()


def test_a_certificate_and_its_key_belong_together() -> None:
    with pytest.raises(InvalidArgument, match="or its key is missing"):
        Dashboard(DashboardOptions("127.0.0.1:1", cert=Path("page.pem")))


# -- connections that mean no good ----------------------------------------------------------------------------


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    """A page whose controller does not answer, and whose limits are low."""
    monkeypatch.setenv("STATEFLOW_CLIENT_CONNECT_TIMEOUT_S", "0")
    monkeypatch.setenv("STATEFLOW_SERVER_PAGE_CONNECTIONS_MAX", "4")
    monkeypatch.setattr(connections, "REQUEST_S", 0.1)
    with Dashboard(DashboardOptions("127.0.0.1:1")) as made:
        yield made


def connected(page: Dashboard) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(page.url.rpartition(":")[2].rstrip("/"))), 20)


def rest(client: socket.socket) -> bytes:
    """Returns what comes until the page closes the connection."""
    found = b""
    with suppress(ConnectionError):
        while data := client.recv(1 << 16):
            found += data
    return found


def get(page: Dashboard, path: str = "/") -> bytes:
    with connected(page) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        return rest(client)


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /api/sign-out HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{",
        b"GET /api/me HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /",
    ],
    ids=["nothing", "headers", "body", "the next request"],
)
def test_a_request_that_does_not_arrive_ends_its_connection(page: Dashboard, begun: bytes) -> None:
    """The page used to keep such a connection, and with it a file of the process."""
    with connected(page) as client:
        client.sendall(begun)
        rest(client)
    assert get(page).startswith(b"HTTP/1.1 200")


def test_an_answer_may_take_as_long_as_it_likes(page: Dashboard) -> None:
    with connected(page) as client:
        client.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        client.settimeout(1.0)
        found = b""
        with pytest.raises(TimeoutError):  # ten times as long as a request may take
            while data := client.recv(1 << 16):
                found += data
    assert found.startswith(b"HTTP/1.1 200")


def test_connections_beyond_the_limit_are_closed(page: Dashboard) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(connected(page))
            client.sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        with connected(page) as further:
            assert rest(further) == b""
    for _ in range(1000):  # the page may not have noticed yet that they have gone
        if get(page).startswith(b"HTTP/1.1 200"):
            return
    raise AssertionError("no client is served any more")


def test_what_comes_behind_an_early_answer_is_not_an_error_of_the_page(
    page: Dashboard, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer to a malformed rest used to begin in the middle of another one: an error, with its stack in the
    log."""
    with connected(page) as client:
        client.sendall(b"POST /api/plan HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.1 403"
        client.sendall(b"no chunk\r\n")
        rest(client)
    assert get(page).startswith(b"HTTP/1.1 200")
    assert [each for each in caplog.records if each.exc_info] == []
