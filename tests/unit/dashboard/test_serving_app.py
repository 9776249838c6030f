"""HTTP answers to browsers and other clients."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stateflow.clock import ManualClock
from stateflow.dashboard.acts import COOKIE
from stateflow.dashboard.serving import BODY_MAX, STATIC, Parts, make_app
from stateflow.errors import Unavailable
from stateflow.rpc import clients
from stateflow.security.authority import Authority
from stateflow.security.refusals import Refusals
from stateflow.security.roles import Identity, Role

NOW_US = round(datetime(2026, 11, 26, tzinfo=UTC).timestamp() * 1e6)
OWN = {"host": "127.0.0.1:7071", "origin": "http://127.0.0.1:7071", "x-stateflow": "1"}
SECURE = {**OWN, "origin": "https://127.0.0.1:7071"}


class FakeWatching:
    looked = 0

    def look_now(self) -> None:
        self.looked += 1

    async def changes(self) -> AsyncIterator[tuple[str, str]]:
        yield "lines", "{}"
        yield "snapshot", json.dumps({"operators": [{"name": "</script><img src=x>\nevent: lines"}]})


class FakeActs:
    """Acts that check access as the real ones do, and remember the moves."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.named: list[Identity | None] = []  # the users in whose name the cluster would be called

    def begin(self, access: Any, move: Any) -> dict[str, Any]:
        access.check(move.do)
        if move.to == "away":
            raise Unavailable("no answer", remedy="see whether it runs")
        self.begun.append(move)
        self.named.append(clients._USER.get())
        return {"begun": ["r1"]}

    def __getattr__(self, name: str) -> Any:
        return lambda *_: {}


@pytest.fixture
def parts() -> Parts:
    fakes: Any = FakeWatching(), FakeActs()
    return Parts(*fakes, None, None, None, frozenset({"page.example"}), False, ManualClock(NOW_US))


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")

    def json(self) -> Any:
        return json.loads(self.body)


def ask(app: Any, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Answer:
    place, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": place,
        "raw_path": place.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 7071),
    }
    sent: list[Any] = []

    async def run() -> None:
        over = asyncio.Event()
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if waiting:
                return waiting.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        over.set()

    asyncio.run(run())
    pairs = [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]
    return Answer(sent[0]["status"], pairs, b"".join(each.get("body", b"") for each in sent[1:]))


def begin(app: Any, headers: dict[str, str], **move: Any) -> Answer:
    return ask(app, "POST", "/api/begin", headers, json.dumps({"do": "drain", "to": "a", **move}).encode())


def test_the_page_may_load_nothing_from_elsewhere_and_run_nothing_inline(parts: Parts) -> None:
    answer = ask(make_app(parts), "GET", "/", OWN)
    assert answer.status == 200
    policy = answer.header("content-security-policy")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.header("x-content-type-options") == "nosniff"
    assert answer.header("cache-control") == "no-cache"
    page = answer.body.decode()
    assert not re.search(r"<script(?![^>]*\ssrc=)[^>]*>|\son\w+=|\sstyle=|https?://", page)
    for name in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert ask(make_app(parts), "GET", f"/{name}", OWN).status == 200, name


@pytest.mark.parametrize("file", sorted(STATIC.glob("*.js")), ids=lambda file: str(file.name))
def test_no_module_makes_markup_of_text_or_styles_of_attributes(file: Path) -> None:
    text = file.read_text()
    for forbidden in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "http://127",
    ):
        assert forbidden not in text
    assert not re.search(r"""setAttribute\(["']style|["']style["']:|https://""", text)


@pytest.mark.parametrize("host", ["evil.example:7071", "", "127.0.0.1.evil.example"])
@pytest.mark.parametrize("path", ["/", "/api/me", "/api/events", "/main.js"])
def test_under_another_name_nothing_is_said(parts: Parts, host: str, path: str) -> None:
    answer = ask(make_app(parts), "GET", path, {"host": host})
    assert (answer.status, answer.json()["error"]["code"]) == (403, "not_allowed")


@pytest.mark.parametrize(
    "wrong",
    [{"origin": "http://evil.example"}, {"origin": ""}, {"x-stateflow": ""}, {"origin": "null"}],
)
def test_another_page_changes_nothing(parts: Parts, wrong: dict[str, str]) -> None:
    answer = begin(make_app(parts), {**OWN, **wrong})
    assert answer.status == 403
    assert parts.acts.begun == []  # type: ignore[attr-defined]


def test_the_page_itself_does_and_then_looks_at_once(parts: Parts) -> None:
    answer = begin(make_app(parts), OWN)
    assert (answer.status, answer.json()) == (200, {"begun": ["r1"]})
    assert answer.header("cache-control") == "no-store"
    assert len(parts.acts.begun) == parts.watching.looked == 1  # type: ignore[attr-defined]


def test_what_the_cluster_refuses_with_is_said_whole(parts: Parts) -> None:
    answer = begin(make_app(parts), OWN, to="away")
    assert answer.status == 503
    error = answer.json()["error"]
    assert (error["code"], error["what"], error["remedy"]) == ("unavailable", "no answer", "see whether it runs")


def test_too_much_and_what_is_no_json_is_refused(parts: Parts) -> None:
    app = make_app(parts)
    assert (
        ask(app, "POST", "/api/begin", OWN, b"x" * (BODY_MAX + 1)).json()["error"]["what"] == "the request is too long"
    )
    assert ask(app, "POST", "/api/begin", OWN, b"{").status == 400
    assert ask(app, "GET", "/api/begin", OWN).status == 404
    assert ask(app, "GET", "/../app.py", OWN).status == 404
    assert ask(app, "GET", "/api/ledger?q=x", OWN).json()["error"]["code"] == "invalid_argument"


def test_the_head_of_the_events_is_answered_without_waiting_for_any(parts: Parts) -> None:
    answer = ask(make_app(parts), "HEAD", "/api/events", OWN)
    assert (answer.status, answer.body) == (200, b""), "the answer has ended"
    assert answer.header("content-type").startswith("text/event-stream")


def test_events_are_lines_that_no_name_can_break(parts: Parts) -> None:
    answer = ask(make_app(parts), "GET", "/api/events", OWN)
    assert answer.header("content-type").startswith("text/event-stream")
    events = [block.split("\n") for block in answer.body.decode().strip().split("\n\n")]
    assert [block[0] for block in events] == ["retry: 1000", "event: lines", "event: snapshot"]
    assert json.loads(events[2][1].removeprefix("data: "))["operators"][0]["name"].endswith("\nevent: lines")


# -- with certificates ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.init(tmp_path_factory.mktemp("authority") / "a", "tests", ManualClock(NOW_US))


@pytest.fixture
def secure(parts: Parts, authority: Authority) -> Parts:
    own = SimpleNamespace(identity=Identity(Role.ADMIN, "page"))
    material = SimpleNamespace(own=own, ca=(authority.crl.parent / "ca.pem").read_bytes(), revoked=frozenset())
    files: Any = SimpleNamespace(current=lambda: material)
    return replace(parts, files=files, secure=True)


def signed_in(app: Any, authority: Authority, role: str) -> dict[str, str]:
    text, _ = authority.token(Identity.of(role, "alice"), timedelta(hours=8))
    answer = ask(app, "POST", "/api/sign-in", SECURE, text.encode())
    assert answer.status == 200, answer.body
    cookie = answer.header("set-cookie")
    assert re.search(r"; HttpOnly", cookie, re.IGNORECASE)
    assert re.search(r"; SameSite=strict", cookie, re.IGNORECASE)
    assert re.search(r"; Secure", cookie, re.IGNORECASE)
    assert re.search(rf"; Max-Age={8 * 3600}(;|$)", cookie, re.IGNORECASE), "whatever the browser's clock says"
    assert text not in cookie, "the token stays where it was typed"
    return {**SECURE, "cookie": cookie.partition(";")[0]}


def test_nobody_sees_anything_before_they_signed_in(secure: Parts) -> None:
    app = make_app(secure)
    assert ask(app, "GET", "/api/me", SECURE).json()["sign_in"] is True
    for path in ("/api/events", "/api/states?operator=a", "/api/ledger?q=a", "/api/checkpoints"):
        if "states" not in path:  # states are asked of the acts, which are replaced here
            assert ask(app, "GET", path, SECURE).status == 401, path
    assert begin(app, SECURE).status == 401
    assert begin(app, {**SECURE, "cookie": f"{COOKIE}-7071=guessed"}).status == 401


def test_who_only_reads_looks_and_changes_nothing(secure: Parts, authority: Authority) -> None:
    app = make_app(secure)
    headers = signed_in(app, authority, "read")
    me = ask(app, "GET", "/api/me", headers).json()
    assert (me["who"], me["may"]["migrate"], me["may"]["plan"]) == ("read/alice", False, True)
    assert ask(app, "GET", "/api/events", headers).status == 200
    assert begin(app, headers).json()["error"]["code"] == "not_allowed"
    assert secure.acts.begun == []  # type: ignore[attr-defined]


def test_who_operates_does_until_they_sign_out(secure: Parts, authority: Authority) -> None:
    app = make_app(secure)
    headers = signed_in(app, authority, "operate")
    assert begin(app, headers).status == 200
    assert begin(app, {**headers, "origin": "https://evil.example"}).status == 403
    assert ask(app, "POST", "/api/sign-out", headers).status == 200
    assert begin(app, headers).status == 401


def test_two_pages_of_a_host_have_cookies_of_their_own(secure: Parts, authority: Authority) -> None:
    text, _ = authority.token(Identity.of("read", "alice"), timedelta(hours=8))
    names = []
    for host in ("127.0.0.1:7071", "127.0.0.1:7072", "[::1]:7073", "127.0.0.1"):
        asked = {**SECURE, "host": host, "origin": f"https://{host}"}
        given = ask(make_app(secure), "POST", "/api/sign-in", asked, text.encode()).header("set-cookie")
        names.append(given.partition("=")[0])
    assert names == [f"{COOKIE}-7071", f"{COOKIE}-7072", f"{COOKIE}-7073", f"{COOKIE}-http"]


def test_the_cluster_is_called_in_the_name_of_the_user(parts: Parts, secure: Parts, authority: Authority) -> None:
    app = make_app(secure)
    assert begin(app, signed_in(app, authority, "operate")).status == 200
    assert begin(app, signed_in(app, authority, "admin")).status == 200
    assert begin(make_app(parts), OWN).status == 200
    assert [str(each) for each in secure.acts.named] == [  # type: ignore[attr-defined]
        *("operate/alice", "admin/alice"),
        "None",
    ]
    assert clients._USER.get() is None


def test_who_looks_is_shown_nothing_once_their_token_is_revoked(secure: Parts, authority: Authority) -> None:
    material, watching = secure.files.current(), secure.watching  # type: ignore[union-attr]
    text, certificate = authority.token(Identity.of("operate", "alice"), timedelta(hours=8))
    app = make_app(secure)
    answer = ask(app, "POST", "/api/sign-in", SECURE, text.encode())
    headers = {**SECURE, "cookie": answer.header("set-cookie").partition(";")[0]}
    assert begin(app, headers).status == 200

    async def changes() -> AsyncIterator[tuple[str, str]]:
        yield "snapshot", "1"
        material.revoked = frozenset([certificate.serial])  # type: ignore[misc]
        yield "snapshot", "2"

    watching.changes = changes  # type: ignore[method-assign]
    events = ask(app, "GET", "/api/events", headers)
    assert events.body.decode() == "retry: 1000\n\nevent: snapshot\ndata: 1\n\n", "one that is open ends, too"
    assert begin(app, headers).status == 401
    assert ask(app, "GET", "/api/events", headers).status == 401
    assert ask(app, "GET", "/api/me", headers).json()["sign_in"] is True


def test_a_token_that_does_not_count_opens_nothing(secure: Parts, authority: Authority, tmp_path: Path) -> None:
    app = make_app(secure)
    other = Authority.init(tmp_path / "other", "others", ManualClock(NOW_US))
    foreign, _ = other.token(Identity.of("admin", "mallory"), timedelta(hours=8))
    some, _ = authority.token(Identity.of("data", "pumps", ("Pumps",)), timedelta(hours=8))
    for text in (foreign, some, "sftoken1_x", ""):
        answer = ask(app, "POST", "/api/sign-in", SECURE, text.encode())
        assert answer.status in (400, 403)
        assert not answer.header("set-cookie")


def test_who_may_not_sign_in_or_do_what_they_ask_for_leaves_a_trace(
    secure: Parts, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals(ManualClock())
    app = make_app(replace(secure, refusals=refusals))
    some, _ = authority.token(Identity.of("data", "pumps", ("Pumps",)), timedelta(hours=8))
    for text in ("sftoken1_x", "sftoken1_y", some):
        assert ask(app, "POST", "/api/sign-in", SECURE, text.encode()).status in (400, 403)
    assert begin(app, signed_in(app, authority, "read")).status == 403
    assert begin(app, SECURE).status == 401, "who has not signed in yet is asked to, and counts nowhere"
    assert refusals.counts() == {("sign-in", "unknown"): 2, ("sign-in", "data"): 1, ("Drain", "read"): 1}
    said = [record.message.partition(": ")[0] for record in caplog.records]
    assert said == [
        "refused a call of 127.0.0.1",
        "refused a call of data/pumps at 127.0.0.1",
        "refused a call of read/alice at 127.0.0.1",
    ]
    assert some not in caplog.text
