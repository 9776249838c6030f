"""The metrics page: where it is served and to whom, by the TLS files as they are at each request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from stateflow.errors import BadCertificate, InsecureRefused, InvalidArgument, PortInUse, StateflowError, Unavailable
from stateflow.local.cluster import Certificates
from stateflow.metrics import page as page_module
from stateflow.metrics.figures import Target, Values
from stateflow.metrics.limits import LimitHits
from stateflow.metrics.page import Page
from stateflow.security import certificates as certificates_module
from stateflow.security.refusals import Refusals
from stateflow.security.roles import Role


async def figures() -> Values:
    return {"stateflow_calls_running": {(): 7}}


def served(
    use: Callable[[Page], None], listen: str = "127.0.0.1:0", targets: Callable[[str], list[Target]] | None = None
) -> None:
    """Serves a page, and calls ``use`` with it in a thread."""

    async def serve() -> None:
        page = Page(listen, figures, asyncio.get_running_loop(), targets=targets)
        try:
            await asyncio.to_thread(use, page)
        finally:
            page.close()

    asyncio.run(serve())


def read(page: Page, who: ssl.SSLContext | None = None) -> str:
    url = f"{'http' if who is None else 'https'}://{page.address}/metrics"
    with urllib.request.urlopen(url, timeout=20, context=who) as answer:
        text: str = answer.read().decode()
    return text


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """Gives this process a node's certificates, whose files are checked at each connection."""
    made = Certificates(tmp_path)
    for variable, file in made.issue("edge-0", "node", "127.0.0.1").items():
        monkeypatch.setenv(variable, file)
    monkeypatch.setattr(certificates_module, "LOOK_S", 0.0)
    return made


def client(
    certificates: Certificates, name: str, role: str = "read", operators: tuple[str, ...] = ()
) -> ssl.SSLContext:
    own = certificates.issue(name, role, "127.0.0.1" if Role(role).listens else "", operators)
    context = ssl.create_default_context(cafile=own["STATEFLOW_TLS_CA"])
    context.load_cert_chain(own["STATEFLOW_TLS_CERT"], own["STATEFLOW_TLS_KEY"])
    return context


def serial(page: Page, who: ssl.SSLContext) -> str:
    host, _, port = page.address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as plain, who.wrap_socket(plain, server_hostname=host) as met:
        return str((met.getpeercert() or {})["serialNumber"])


@pytest.mark.parametrize(
    ("listen", "error", "said"),
    [
        ("0.0.0.0:0", InsecureRefused, "everybody who reaches it read this process's metrics"),
        ("nonsense", InvalidArgument, "is not an address"),
        ("127.0.0.1:x", InvalidArgument, "is not an address"),
        ("127.0.0.1:65536", InvalidArgument, "is not an address"),
    ],
)
def test_where_it_cannot_be(listen: str, error: type[StateflowError], said: str) -> None:
    with pytest.raises(error, match=said):
        served(lambda _: None, listen)


def test_who_says_so_is_warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("STATEFLOW_INSECURE", "1")
    served(lambda _: None, "0.0.0.0:0")
    assert "INSECURE: plain text, everybody who reaches 0.0.0.0:0 may read this process's metrics" in caplog.text


def test_a_port_that_is_taken() -> None:
    def use(page: Page) -> None:
        with pytest.raises(PortInUse, match="the address cannot be bound"):
            served(lambda _: None, page.address)

    served(use)


def test_ipv6_is_an_address_too() -> None:
    def use(page: Page) -> None:
        assert page.address.startswith("[::1]:")
        assert "stateflow_calls_running 7.0" in read(page)

    served(use, "[::1]:0")


@pytest.mark.parametrize(
    ("listen", "host"), [("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "localhost"), ("[::1]:0", "[::1]")]
)
def test_what_is_found_is_where_it_was_asked(listen: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATEFLOW_INSECURE", "1")

    def use(page: Page) -> None:
        port = page.address.rpartition(":")[2]
        reached = "127.0.0.1" if host == "localhost" else host
        request = urllib.request.Request(f"http://{reached}:{port}/sd", headers={"Host": f"{host}:{port}"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            found = json.loads(answer.read())
        assert found == [{"targets": [f"{host}:{port}"], "labels": {"agent": "gw"}}]

    served(use, listen, lambda own: [Target(own, {"agent": "gw"})])


def test_over_tls_it_is_found_by_whoever_may_read(certificates: Certificates) -> None:
    who = client(certificates, "prometheus")

    def use(page: Page) -> None:
        with urllib.request.urlopen(f"https://{page.address}/sd", timeout=20, context=who) as answer:
            assert json.loads(answer.read()) == [{"targets": [page.address], "labels": {}}]

    served(use, targets=lambda own: [Target(own, {})])


def test_a_certificate_that_is_renewed_is_used_at_once(certificates: Certificates) -> None:
    who = client(certificates, "prometheus")

    def use(page: Page) -> None:
        assert "stateflow_calls_running 7.0" in read(page, who)
        before = serial(page, who)
        certificates.renew()
        renewed = client(certificates, "prometheus")
        assert serial(page, renewed) != before
        assert "stateflow_calls_running 7.0" in read(page, renewed)

    served(use)


def test_who_was_revoked_is_told_nothing(certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    who, other = client(certificates, "prometheus"), client(certificates, "other")

    def use(page: Page) -> None:
        assert read(page, who)
        certificates.revoke("read/prometheus")
        with pytest.raises(OSError):
            read(page, who)
        assert read(page, other)

    served(use)
    assert "not_allowed: the certificate of read/prometheus was revoked" in caplog.text


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    """Collects what the pages of this test refuse."""
    made = Refusals()
    monkeypatch.setattr(page_module, "REFUSALS", made)
    return made


@pytest.mark.parametrize(
    ("role", "operators"), [("node", ()), ("agent", ()), ("controller", ()), ("data", ("Pumps",))], ids=str
)
def test_who_may_not_look_is_refused_on_every_page_and_leaves_a_trace(
    role: str,
    operators: tuple[str, ...],
    certificates: Certificates,
    refusals: Refusals,
    caplog: pytest.LogCaptureFixture,
) -> None:
    who = client(certificates, "other", role, operators)

    def use(page: Page) -> None:
        for path in ("metrics", "sd", "metrics?name[]=stateflow_calls_running"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"https://{page.address}/{path}", timeout=20, context=who)
            with refused.value as answer:
                assert answer.code == 403
                assert answer.read().decode().startswith(f"not_allowed: {role}/other may not call metrics")

    served(use, targets=lambda own: [Target(own, {})])
    assert refusals.counts() == {("metrics", role): 3}
    assert caplog.text.count(f"refused a call of {role}/other at 127.0.0.1: not_allowed: ") == 1


@pytest.mark.parametrize("role", ["read", "data", "operate", "admin"])
def test_who_may_see_the_cluster_reads_the_figures(role: str, certificates: Certificates, refusals: Refusals) -> None:
    def use(page: Page) -> None:
        assert "stateflow_calls_running 7.0" in read(page, client(certificates, "prometheus", role))

    served(use)
    assert refusals.counts() == {}


def test_who_has_no_certificate_is_told_nothing(certificates: Certificates) -> None:
    other = certificates.issue("edge-0", "node")["STATEFLOW_TLS_CA"]

    def use(page: Page) -> None:
        with pytest.raises(OSError):
            read(page, ssl.create_default_context(cafile=other))

    served(use)


def test_who_says_nothing_keeps_nobody_waiting(certificates: Certificates) -> None:
    who = client(certificates, "prometheus")

    def use(page: Page) -> None:
        host, _, port = page.address.rpartition(":")
        with socket.create_connection((host, int(port)), 20):
            assert read(page, who)

    served(use)


def connected(page: Page, text: bytes = b"") -> socket.socket:
    host, _, port = page.address.rpartition(":")
    made = socket.create_connection((host, int(port)), 20)
    made.sendall(text)
    return made


def is_closed(connection: socket.socket) -> bool:
    """Waits for what the page sends next. Tells whether it closed the connection."""
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> LimitHits:
    """Counts the limits that the pages of this test reach."""
    made = LimitHits()
    monkeypatch.setattr(page_module, "_Server", partial(page_module._Server, hits=made))
    return made


def test_connections_beyond_their_number_are_closed_and_counted(
    monkeypatch: pytest.MonkeyPatch, hits: LimitHits, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STATEFLOW_SERVER_PAGE_CONNECTIONS_MAX", "4")

    def use(page: Page) -> None:
        assert 'stateflow_limit_used_ratio{limit="metrics_connections"} 0.25' in read(page), "that of the reader"
        while page._server.used:
            time.sleep(0.01)
        silent = [connected(page) for _ in range(4)]
        for _ in range(2):
            with connected(page) as further:
                assert is_closed(further)
        assert hits.counts() == {("metrics_connections",): 2}
        for each in silent:
            each.close()
        while True:
            try:
                assert "stateflow_calls_running 7.0" in read(page)
                return
            except OSError:  # the page has not noticed yet
                time.sleep(0.01)

    served(use)
    assert caplog.text.count("the metrics page has 4 connections, more are closed, the newest from 127.0.0.1; 1 ") == 1


@pytest.mark.parametrize("begun", [b"", b"GET /metrics HTTP/1.1\r\nHost: "], ids=["nothing", "a part"])
def test_a_client_that_sends_slowly_is_cut_off(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "LIFE_S", 0.1)

    def use(page: Page) -> None:
        with connected(page, begun) as slow:
            assert is_closed(slow)

    served(use)


def test_a_client_that_does_not_shake_hands_is_cut_off(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(page: Page) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(page_module, "LIFE_S", 0.1)
            with connected(page) as silent:
                assert is_closed(silent)
        assert "stateflow_calls_running 7.0" in read(page, client(certificates, "prometheus"))

    served(use)


def test_a_request_that_is_too_long_is_refused() -> None:
    def use(page: Page) -> None:
        line = b"X-Long: " + b"x" * 1000 + b"\r\n"
        with connected(page, b"GET /metrics HTTP/1.1\r\n" + line * 15) as short:
            short.sendall(b"\r\n")
            assert not is_closed(short)
        with connected(page, b"GET /metrics HTTP/1.1\r\n") as long:
            with contextlib.suppress(OSError):  # it may be closed before all is sent
                long.sendall(line * 17 + b"\r\n")
            assert is_closed(long)

    served(use)


def test_files_that_do_not_belong_together_are_refused(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATEFLOW_TLS_KEY", certificates.issue("edge-1", "node", "127.0.0.1")["STATEFLOW_TLS_KEY"])
    with pytest.raises(BadCertificate, match="does not match the certificate"):
        served(lambda _: None)


# -- clients that mean no good --------------------------------------------------------------------------------


def sent(page: Page, data: bytes) -> bytes:
    """Sends bytes, and returns what comes until the page closes the connection."""
    host, _, port = page.address.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as client:
        client.sendall(data)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("text/plain;version=x", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text; version=1.a.0", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=1.0.0, text/plain; version=", "text/plain; version=0.0.4; charset=utf-8"),
        (f"text/plain;version={'9' * 5000}", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=1.0.0;escaping=dots;q=0.5", "text/plain; version=1.0.0; charset=utf-8; escaping=dots"),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.4",
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
    ],
    ids=lambda text: text[:60],
)
def test_a_version_of_a_format_that_there_is_not_is_no_error(
    accept: str, content_type: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The Prometheus client compares the parts of a version with numbers, and used to end in a stack and a 500."""

    def use(page: Page) -> None:
        answer = sent(page, f"GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.0 200 OK")
        assert f"\r\nContent-Type: {content_type}\r\n".encode() in answer

    served(use)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("error", [TimeoutError(), Unavailable("the disk is away", remedy="-"), OSError("no disk")])
def test_metrics_that_cannot_be_computed_are_one_line(
    error: Exception, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def failing() -> Values:
        raise error

    async def serve() -> bytes:
        page = Page("127.0.0.1:0", failing, asyncio.get_running_loop())
        try:
            return await asyncio.to_thread(sent, page, b"GET /metrics HTTP/1.1\r\n\r\n")
        finally:
            page.close()

    answer = asyncio.run(serve())
    assert answer.startswith(b"HTTP/1.0 503 Service Unavailable")
    assert answer.endswith(b"the metrics cannot be computed now: see the log of the process\n")
    (line,) = [each.getMessage() for each in caplog.records if "metrics cannot be computed" in each.getMessage()]
    assert (str(error) or "the process took more than 5 s") in line
    assert "Traceback" not in capfd.readouterr().err
