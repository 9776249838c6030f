"""Hostile requests to HTTP pages: the dashboard and the pages of metrics.

A request is made of parts that a page knows, and of hostile ones: paths out of the directory, methods, headers,
queries, bodies, tokens. Some requests are then damaged byte by byte, or cut off, or have headers without end. Each must
end within a time, with an answer or a closed connection. No answer has an error of the server in it, the text of a
program or a file from elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import random
import re
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.fuzz.makers import HOSTILE, Outcome
from tests.property.arrow_mutants import damaged

#: requests under way at a time, seconds within which each must end, and the most of an answer that is read
TOGETHER = 16
ENDS_WITHIN_S = 10.0
ANSWER_MAX = 8 << 20
#: the most header lines and body bytes that are sent, where they have no end
LINES_MAX, BODY_MAX = 20_000, 1 << 20
#: seconds without an answer, and without the rest of one, after which a sender that could send more leaves
UNANSWERED_S, REST_S = 0.5, 0.1
OUT = (
    *("/../../../../etc/passwd", "/..%2f..%2f..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"),
    *("/..\\..\\..\\etc\\passwd", "/%5c..%5c..%5cetc%5cpasswd", "/../serving.py", "/%2e%2e/serving.py", "/../acts.py"),
    *("/%00", "/index.html%00.js", "/" + "a" * 300, "/" + "a/" * 4000, "/%ff%fe", "/%", "/%zz", "*", "http://else/x"),
    *("/static/../../view.py", "/.", "/..", "//", "/;", "/?", "/#", "/api", "/api/", "/api/../api/me", "/api/nothing"),
    *("/vendor/", "/vendor/../../serving.py", "/%c0%ae%c0%ae/etc/passwd", "x", "/é", "/?%00=%00", "/favicon.ico"),
)
METHODS = ("GET", "GET", "GET", "HEAD", "POST", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PRI", "G T")
VERSIONS = ("HTTP/1.1",) * 60 + ("HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "HTTP/1.", "", "HTTP/1.1 x", "http/1.1")
ACCEPTS = (
    *("*/*", "text/plain", "application/openmetrics-text", "application/openmetrics-text;version=1.0.0"),
    *("application/openmetrics-text;version=x", "text/plain;version=", "text/plain; version=1.0.0;escaping=nothing"),
    *("application/openmetrics-text; version=1.a", "text/plain;version=" + "9" * 5000, "text/plain;version==1"),
    *("application/openmetrics-text;version=2.0.0;escaping=allow-utf-8;q=0.6, text/plain;version=0.0.4;q=0.3", ",;=,"),
)
NUMBERS = ("0", "1", "-1", "7", "+5", "1e3", "99999999999", "9" * 5000, "0x10", "²", "", " ", "nan")
HEADERS = (
    *("Host", "Origin", "X-Stateflow", "Cookie", "Accept", "Accept-Encoding", "Content-Type", "Content-Length"),
    *("Transfer-Encoding", "Connection", "Upgrade", "Expect", "If-None-Match", "If-Modified-Since", "Range", "TE"),
    *("X-Forwarded-For", "Authorization", "Sec-WebSocket-Key", "X-HTTP-Method-Override", "Wsgi.Input", "If-Range"),
)
VALUES = (
    *HOSTILE,
    *ACCEPTS,
    *NUMBERS,
    *(
        "close",
        "keep-alive",
        "websocket",
        "100-continue",
        "chunked",
        "gzip, chunked",
        "identity",
        "gzip;q=0",
        "*",
        "W/",
    ),
    *("bytes=0-", "bytes=5-1", "bytes=-1", "bytes=0-0,0-0,", "bytes=" + "0-1," * 500, "bytes=" + "9" * 5000 + "-"),
    *("Thu, 32 Foo 99999 99:99:99 GMT", "Thu, 01 Jan 1970 00:00:00 +99999999999"),
    *("lines=1", "stateflow-session-http=x"),
    *("application/json", "multipart/form-data; boundary=", "localhost", "page.example:1", "[::1]:x", "a" * 9000),
)
WORDS = ("cloud-0", "edge-0", "Tally", "n", "s", "reconfiguration/x", "sweep/y", "batch:x", "honest-1", "job")
CODED = ("%00", "%ff", "a", "%", "%0a", "+", "%ed%a0%80", "9" * 5000)
TEXTS = (b"[" * 5000, b"\xff\xfe", b"", b'{"do":"drain"', b"null", b"1e999", b'{"to":"\\ud800"}', b"{}")
#: bodies of the dashboard, by path
BODIES: dict[str, dict[str, object]] = {
    "plan": {"do": "drain", "to": "nobody"},
    "begin": {"do": "migrate", "operator": "Nothing", "partitions": "0-3", "to": "nobody", "max_pause_ms": 5.0},
    "batch": {"name": "reconfiguration/none", "change": "pause"},
    "job": {"name": "none", "change": "run"},
    "sweep": {"chore": "verify", "operator": "Nothing"},
    "state": {"operator": "Tally", "state": "n", "key": "honest-1"},
    "sign-in": {},
    "sign-out": {},
}
GETS = ("/", "/index.html", "/main.js", "/api/me", "/api/events", "/api/ledger?q=a", "/api/checkpoints")
ASKS = "/api/states?operator=Tally"
#: what no answer contains: the text of a program, a file of the system, a stack
NEVER = (b"Traceback (most recent", b"from __future__", b"root:x:0", b"site-packages", b'File "/', b"stateflow/")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@dataclass(frozen=True, slots=True)
class Page:
    """A page. ``token``: one that it accepts; empty: it has no sign-in."""

    name: str
    address: str
    dashboard: bool
    token: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A request. ``ends``: how its sender goes on: it waits, or has no more to send, or never stops."""

    data: bytes
    ends: str


class Requests:
    """A maker of requests to one page."""

    def __init__(self, page: Page, chance: random.Random) -> None:
        self._page, self._chance = page, chance

    def make(self) -> Request:
        chance, post, path = self._chance, "", self._path()
        if self._page.dashboard and chance.random() < 0.4:
            post = chance.choice(list(BODIES))
            path = f"/api/{post}"
        method = ("POST" if post else "GET") if chance.random() < 0.8 else chance.choice(METHODS)
        body = self._body(post) if post or chance.random() < 0.1 else b""
        headers = self._headers(body)
        line = " ".join(filter(None, (method, path, chance.choice(VERSIONS))))
        lines = [line, *(f"{name}: {value}" for name, value in headers), "", ""]
        data = "\r\n".join(lines).encode("latin-1", "replace") + body
        draw = chance.random()
        if draw < 0.15:
            data = damaged(data, chance)
        elif draw < 0.25:
            data = data[: chance.randrange(len(data) + 1)]
        elif draw < 0.26:
            return Request(data[: data.index(b"\r\n") + 2], "headers without end")
        elif draw < 0.27:
            return Request(data[: -len(body) - 2 or None] + b"Content-Length: 99999999\r\n\r\n", "a body without end")
        return Request(data, chance.choice(("waits", "has no more")))

    def _path(self) -> str:
        chance = self._chance
        if chance.random() < 0.4:
            return chance.choice(OUT)
        known = (*GETS, ASKS) if self._page.dashboard else ("/metrics", "/sd", "/metrics?name[]=stateflow_info", "/")
        path = chance.choice(known)
        if chance.random() < 0.3:
            path += ("&" if "?" in path else "?") + f"{chance.choice(WORDS)}={chance.choice(CODED)}"
        return path

    def _headers(self, body: bytes) -> list[tuple[str, str]]:
        chance, address = self._chance, self._page.address
        found = [("Host", address), ("Connection", "close"), ("Origin", f"http://{address}"), ("X-Stateflow", "1")]
        if body:
            found.append(("Content-Length", str(len(body))))
        found = [each for each in found if chance.random() < 0.95]
        values = VALUES if chance.random() < 0.2 else [each for each in VALUES if each.isprintable()]
        for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 5, 150))):
            found.append((chance.choice(HEADERS), chance.choice(values)))
        if chance.random() < 0.3:
            found.append(("Accept", chance.choice(ACCEPTS)))
        if chance.random() < 0.02:
            found.append(("X", "y" * chance.choice((9_000, 70_000))))
        return found

    def _body(self, post: str) -> bytes:
        chance = self._chance
        if post == "sign-in" and self._page.token:
            token = self._page.token.encode()
            return token if chance.random() < 0.2 else damaged(token, chance)
        fields = dict(BODIES.get(post, {}))
        if fields and chance.random() < 0.5:
            name = chance.choice([*fields, "more"])
            fields[name] = chance.choice((None, 1, -1.5, True, [], {}, ["x"] * 9, 1e308, *HOSTILE, *WORDS))
        data = json.dumps(fields).encode()
        if chance.random() < 0.2:
            data = chance.choice((*TEXTS, data * 9))
        if chance.random() < 0.02:
            data = b" " * chance.choice((64 << 10, 300_000)) + data
        return damaged(data, chance) if data and chance.random() < 0.2 else data


async def storm(pages: Sequence[Page], count: int, seed: int) -> Outcome:
    """Sends ``count`` requests to pages, each of which is served by a process or a thread of its own."""
    chance, outcome = random.Random(seed), Outcome()
    makers = [(page, Requests(page, chance)) for page in pages]
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            page, maker = chance.choice(makers)
            await _send(page, maker.make(), outcome)

    await asyncio.gather(*(worker() for _ in range(TOGETHER)))
    return outcome


async def _send(page: Page, request: Request, outcome: Outcome) -> None:
    answer, ended = bytearray(), False
    try:
        async with asyncio.timeout(ENDS_WITHIN_S):
            host, _, port = page.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                sending = asyncio.create_task(_write(writer, request))
                while len(answer) < ANSWER_MAX and (data := await _read(reader, request, bool(answer))):
                    answer += data
                sending.cancel()
                ended = True
            finally:
                writer.close()
    except ConnectionError:  # the server has closed it
        ended = True
    except TimeoutError:
        pass
    status = found[1].decode() if (found := _STATUS.match(bytes(answer[:20]))) else "closed"
    outcome.said[status] += 1
    why = "" if ended else f"it does not end ({request.ends})"
    if problem := why or problem_of(page, status, bytes(answer)):
        outcome.wrong.append(f"{page.name}: {problem}; request {request.data[:2000]!r}")


async def _read(reader: asyncio.StreamReader, request: Request, answered: bool) -> bytes:
    """Returns the next piece of an answer; empty: it is over, or goes on when its reader has left."""
    if request.ends != "waits":
        return await reader.read(1 << 16)
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(reader.read(1 << 16), REST_S if answered else UNANSWERED_S)
    return b""


async def _write(writer: asyncio.StreamWriter, request: Request) -> None:
    with contextlib.suppress(OSError):  # the server has closed it
        half = len(request.data) // 2
        for part in (request.data[:half], request.data[half:]):
            writer.write(part)
            await writer.drain()
        if request.ends == "headers without end":
            for number in range(LINES_MAX):
                writer.write(b"X-%d: %s\r\n" % (number, b"y" * 50))
                await writer.drain()
        elif request.ends == "a body without end":
            for _ in range(BODY_MAX >> 12):
                writer.write(bytes(4096))
                await writer.drain()
        if request.ends != "waits":
            writer.write_eof()


@contextlib.contextmanager
def watched(ignored: str = "") -> Iterator[list[str]]:
    """Yields a list that gets what this process logs or prints with a stack.

    Args:
        ignored: beginning of the names of loggers that may log one; empty: none may.
    """
    found: list[str] = []

    class Watching(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_ignored = ignored and record.name.startswith(ignored)
            if record.exc_info and record.exc_info[0] is not None and not is_ignored:
                found.append(f"logged with a stack: {self.format(record)[-3000:]}")

    handler, printed = Watching(), io.StringIO()
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stderr(printed):
            yield found
    finally:
        logging.getLogger().removeHandler(handler)
        if "Traceback" in (said := printed.getvalue()):
            found.append(f"printed: {said[:3000]}")


def serves(page: Page) -> str:
    """Tells why a page does not serve an honest client; empty: it does."""
    path, headers = ("/", {}) if page.dashboard else ("/metrics", {"Accept": ACCEPTS[-2]})
    request = urllib.request.Request(f"http://{page.address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ENDS_WITHIN_S) as answer:
            whole = answer.read()
    except OSError as error:
        return f"{page.name} serves no more: {error}"
    return "" if (b"<html" if page.dashboard else b"stateflow_info") in whole else f"{page.name} serves {whole[:200]!r}"


def problem_of(page: Page, status: str, answer: bytes) -> str:
    """Tells what is wrong with an answer; empty: nothing."""
    if status.startswith("5") and status not in ("501", "503", "505"):
        return f"an error inside of it: {answer[:2000]!r}"
    if found := next((each for each in NEVER if each in answer), None):
        return f"it says {found!r}: {answer[:2000]!r}"
    _, _, body = answer.partition(b"\r\n\r\n")
    if page.dashboard and body.startswith(b'{"error"'):
        with contextlib.suppress(ValueError):  # it was cut off
            said = json.loads(body)["error"]["line"]
            if not said.isprintable():
                return f"not said in one line: {said!r}"
    return ""
