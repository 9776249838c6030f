"""Serves the page: its files, its stream of events, and the requests of its users.

The web application can run in any process. It has a thread with its own event loop, so that it blocks no other loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stateflow.checkpoint import CheckpointStore
from stateflow.client import Cluster
from stateflow.clock import SYSTEM_CLOCK, Clock
from stateflow.dashboard.acts import (
    AUTHOR,
    COOKIE,
    Access,
    Acts,
    Lookup,
    Move,
    Named,
    Sessions,
    Sweep,
    check_host,
    check_same_page,
    read_body,
    shown_by,
)
from stateflow.dashboard.connections import Listener, TimedConnection
from stateflow.dashboard.view import error_view
from stateflow.dashboard.watching import Looking, Records, Watching, checkpoints
from stateflow.errors import BadCertificate, InsecureRefused, InvalidArgument, NotAllowed, StateflowError, Unavailable
from stateflow.release import VERSION
from stateflow.rpc.clients import on_behalf_of
from stateflow.rpc.faults import unexpected
from stateflow.security.certificates import TlsFiles, described, read_certificates
from stateflow.security.plain import connection_settings, host_of, is_loopback, tls_files
from stateflow.security.refusals import REFUSALS, Refusals
from stateflow.security.roles import Identity
from stateflow.settings import ServerSettings
from stateflow.types import cannot_listen, listened_at

STATIC = Path(__file__).parent / "static"
#: limit of a request's body: a token has 1,600 characters
BODY_MAX = 64 << 10
#: longest silence of an event stream, in seconds; a proxy might close a connection that is silent for longer
QUIET_S = 15.0
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the app.

    Attributes:
        files: this process's certificates; None: plain text.
        hosts: names under which the page is served.
        secure: the page is served with TLS.
        refusals: counts and logs refused sign-ins and requests.
    """

    watching: Watching
    acts: Acts
    records: Records | None
    store: CheckpointStore | None
    files: TlsFiles | None
    hosts: frozenset[str]
    secure: bool
    clock: Clock
    refusals: Refusals = REFUSALS

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now_us() / 1e6, UTC)


class _Guard:
    """Middleware for all requests.

    It checks the name under which the page was requested, and that a request which changes something comes from the
    page itself. It adds headers that limit what a browser may do with the answer.
    """

    def __init__(self, app: ASGIApp, parts: Parts) -> None:
        self._app, self._hosts = app, parts.hosts
        self._scheme = "https" if parts.secure else "http"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = list(_HEADERS)
                if scope["path"].startswith("/api/"):
                    added.append((b"cache-control", b"no-store"))
                else:
                    added.append((b"cache-control", b"no-cache"))  # the browser revalidates it by its ETag
                message["headers"] = [*message["headers"], *added]
            await send(message)

        try:
            check_host(headers.get("host", ""), self._hosts)
            if scope["method"] not in ("GET", "HEAD"):
                check_same_page(headers, self._scheme)
        except NotAllowed as error:
            return await _failed(error)(scope, receive, with_headers)
        await self._app(scope, receive, with_headers)


def _failed(error: StateflowError) -> JSONResponse:
    return JSONResponse({"error": error_view(error)}, status_code=_status_of(error))


def _status_of(error: StateflowError) -> int:
    if error.code == "sign_in_required":
        return 401
    if isinstance(error, NotAllowed):
        return 403
    return 503 if isinstance(error, Unavailable) else 400


async def _body(request: Request) -> bytes:
    """Returns the request's body. Raises InvalidArgument if it is longer than ``BODY_MAX``."""
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > BODY_MAX:
            raise InvalidArgument("the request is too long", remedy="enter less text, or reload the page")
    return bytes(found)


def _host(request: Request) -> str:
    """Returns the host from which a request came; empty: not known."""
    return "" if request.client is None else request.client.host


def _cookie(request: Request) -> str:
    """Returns the name of this page's cookie, which contains the port that the browser asked."""
    port = re.search(r":([0-9]{1,5})\Z", request.headers.get("host", ""))
    return f"{COOKIE}-{request.url.scheme if port is None else port[1]}"


Handler = Callable[[Request], Awaitable[Response]]


def _answering(handler: Handler) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except StateflowError as error:
            return _failed(error)
        except OSError as error:
            return _failed(unexpected(error))
        except ClientDisconnect:  # before its request had arrived
            return Response(status_code=400)

    return answer


def make_app(parts: Parts) -> Starlette:
    sessions, acts = Sessions(), parts.acts

    def access(request: Request) -> Access:
        if parts.files is None:
            return Access(None, None)
        material, number = parts.files.current(), request.cookies.get(_cookie(request), "")
        return Access(material.own.identity, sessions.find(number, material.revoked, parts.now()))

    async def me(request: Request) -> Response:
        found = access(request)
        said: dict[str, Any] = {"version": VERSION, "sign_in": found.needs_sign_in, "can_sign_out": False}
        if not found.needs_sign_in:
            said |= {"who": str(found.who), "may": found.may(), "can_sign_out": found.signed_in is not None}
            said |= {"ledger": parts.records is not None, "checkpoints": parts.store is not None}
        return JSONResponse(said)

    async def sign_in(request: Request) -> Response:
        if parts.files is None:
            raise InvalidArgument(
                "the page has no sign-in, because the dashboard connects without TLS", remedy="reload the page"
            )
        material, text = parts.files.current(), (await _body(request)).decode("ascii", "replace")
        try:
            shown = shown_by(text, material.ca, material.revoked, parts.now())
            Access(material.own.identity, shown.identity).check_look()
        except (BadCertificate, NotAllowed) as error:
            parts.refusals.note("sign-in", error, _host(request))
            raise
        answer = JSONResponse({"who": str(shown.identity)})
        answer.set_cookie(
            _cookie(request),
            sessions.open(shown),
            max_age=max(0, int((shown.until - parts.now()).total_seconds())),  # the clocks may differ
            path="/",
            secure=parts.secure,
            httponly=True,
            samesite="strict",
        )
        return answer

    async def sign_out(request: Request) -> Response:
        sessions.end(request.cookies.get(_cookie(request), ""))
        answer = JSONResponse({})
        answer.delete_cookie(_cookie(request), path="/", secure=parts.secure, httponly=True, samesite="strict")
        return answer

    async def events(request: Request) -> Response:
        def check() -> None:
            access(request).check_look()

        check()
        if request.method == "HEAD":  # its answer has no body, and the stream would never end
            return Response(media_type="text/event-stream")
        return StreamingResponse(_events(parts.watching, check), media_type="text/event-stream")

    def act(read: Callable[[bytes], Any], do: Callable[[Access, Any], Mapping[str, Any]], changes: bool) -> Handler:
        def done(who: Access, asked: Any) -> Mapping[str, Any]:
            with on_behalf_of(who.named):
                return do(who, asked)

        async def handle(request: Request) -> Response:
            who, asked = access(request), read(await _body(request))
            try:
                found = await run_in_threadpool(done, who, asked)
            except NotAllowed as error:
                if isinstance(error.where.get("who"), Identity):  # otherwise another process refused it, and noted it
                    parts.refusals.note(error.where["call"], error, _host(request))
                raise
            if changes:
                parts.watching.look_now()
            return JSONResponse(found)

        return handle

    async def states(request: Request) -> Response:
        who = access(request)
        return JSONResponse(await run_in_threadpool(acts.states, who, request.query_params.get("operator", "")))

    async def ledger(request: Request) -> Response:
        access(request).check_look()
        if parts.records is None:
            raise InvalidArgument(
                "the dashboard has no ledger", remedy="start the dashboard with --ledger, or on the controller"
            )
        found = await run_in_threadpool(parts.records.search, request.query_params.get("q", "")[:1000].strip())
        return JSONResponse(found)

    async def stored(request: Request) -> Response:
        access(request).check_look()
        if parts.store is None:
            raise InvalidArgument(
                "the dashboard has no checkpoint store", remedy="start the dashboard with --checkpoints"
            )
        return JSONResponse(await run_in_threadpool(checkpoints, parts.store))

    posts: dict[str, Handler] = {
        "sign-in": sign_in,
        "sign-out": sign_out,
        "plan": act(lambda data: read_body(Move, data), acts.plan, False),
        "begin": act(lambda data: read_body(Move, data), acts.begin, True),
        "batch": act(lambda data: read_body(Named, data), acts.change_batch, True),
        "job": act(lambda data: read_body(Named, data), acts.change_job, True),
        "sweep": act(lambda data: read_body(Sweep, data), acts.sweep, True),
        "state": act(lambda data: read_body(Lookup, data), acts.look_up, False),
    }
    gets: dict[str, Handler] = {
        "me": me,
        "events": events,
        "states": states,
        "ledger": ledger,
        "checkpoints": stored,
    }
    routes = [
        *(Route(f"/api/{name}", _answering(handler), methods=["POST"]) for name, handler in posts.items()),
        *(Route(f"/api/{name}", _answering(handler), methods=["GET"]) for name, handler in gets.items()),
        Mount("/", StaticFiles(directory=STATIC, html=True)),
    ]
    app = Starlette(routes=routes)
    app.add_middleware(_Guard, parts=parts)
    return app


async def _events(watching: Watching, check: Callable[[], None]) -> AsyncIterator[str]:
    """Yields events in the format of a browser's EventSource.

    Args:
        check: raises NotAllowed when the user may no longer look at the page. Then the stream ends. The page requests a
            new stream, and this request is refused with the reason.
    """
    yield "retry: 1000\n\n"
    changes = watching.changes()
    waiting: asyncio.Future[tuple[str, str]] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(changes))
            done, _ = await asyncio.wait([waiting], timeout=QUIET_S)
            try:
                check()
            except NotAllowed:
                return
            if not done:
                yield ": still there\n\n"
                continue
            try:
                name, text = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield f"event: {name}\ndata: {text}\n\n"
    finally:
        if waiting is not None:
            waiting.cancel()


log = logging.getLogger(__name__)
#: seconds after which an ending server closes open connections, because event streams do not end by themselves
GRACE_S = 1
#: maximum time for the start and for the end of the server, in seconds
WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """The options of a dashboard: the address of its page, and the sources of the page's contents.

    Args:
        controller: host:port, or comma-separated addresses of several; empty: passed to ``start``.
        listen: host:port of the page; port 0 picks a free port.
        cert, key: PEM files of a certificate that browsers accept, and its key; None: plain text.
        hosts: names under which browsers reach the page, in addition to those in the certificate.
        ledger: SQLAlchemy URL of the ledger whose batches are shown and records searched; None: no ledger.
        checkpoints: URL of the checkpoint store whose contents are shown; None: not shown.
    """

    controller: str
    listen: str = "127.0.0.1:0"
    cert: Path | None = None
    key: Path | None = None
    hosts: tuple[str, ...] = ()
    ledger: str | None = None
    checkpoints: str | None = None


class _Server(uvicorn.Server):
    """A server that reports when it is ready. It leaves signal handling to the process."""

    def __init__(self, config: uvicorn.Config, ready: Future[None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set_result(None)


class Dashboard:
    """A context manager that serves the page from ``start`` to ``close``.

    Raises InvalidArgument, PortInUse and BadCertificate; InsecureRefused if the page would be served in plain text to
    other machines.

    Attributes:
        url: address of the page.
    """

    def __init__(self, options: DashboardOptions) -> None:
        self._options = options
        self._host, self._port = listened_at(options.listen)
        self._check_plain()
        self._files = tls_files()
        self._context, names = self._tls()
        self._hosts = frozenset(each.lower() for each in (*names, *options.hosts, self._host))
        self._listener = self._bound()
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'https' if self._context else 'http'}://{host}:{self._listener.getsockname()[1]}/"
        self._ended: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._watching: Watching | None = None

    def _check_plain(self) -> None:
        options, settings = self._options, connection_settings()
        if (options.cert is None) != (options.key is None):
            raise InvalidArgument("the page's certificate or its key is missing", remedy="pass both --cert and --key")
        if options.cert is not None or is_loopback(options.listen):
            return
        if settings.tls or not settings.insecure:
            raise InsecureRefused(
                f"the page would be served in plain text on {host_of(options.listen)}",
                remedy="pass --cert and --key with a certificate that browsers accept, or listen on 127.0.0.1"
                + ("" if settings.tls else ", or allow it with --insecure"),
            )
        log.warning(
            "INSECURE: plain text, everybody who reaches the page at %s can command the cluster", options.listen
        )

    def _tls(self) -> tuple[ssl.SSLContext | None, list[str]]:
        """Returns (TLS context or None for plain text, names in the certificate). Raises BadCertificate."""
        options = self._options
        if options.cert is None or options.key is None:
            return None, []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(options.cert, options.key)
            names = described(read_certificates(options.cert.read_bytes(), options.cert)[0]).hosts
        except OSError as error:
            raise BadCertificate(
                f"the page's certificate cannot be used: {error}", remedy="check both files", file=options.cert
            ) from error
        return context, list(names)

    # -- lifecycle ----------------------------------------------------------------------------------------

    def start(self, controller: str = "") -> Dashboard:
        """Starts the thread that serves the page, and returns when the page can be reached.

        Args:
            controller: address of the controller, if the options have none.
        """
        ready: Future[None] = Future()
        address = controller or self._options.controller
        threading.Thread(target=self._run, args=(address, ready), name="dashboard page", daemon=True).start()
        ready.result(WITHIN_S)
        log.info("dashboard at %s", self.url)
        return self

    def _bound(self) -> socket.socket:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listening = socket.create_server((self._host, self._port), family=family, backlog=128)
            return Listener(listening, ServerSettings().page_connections_max)
        except OSError as error:
            raise cannot_listen(error, self._options.listen) from error

    def _run(self, controller: str, ready: Future[None]) -> None:
        try:
            asyncio.run(self._serve(controller, ready))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            else:
                log.exception("the dashboard has failed")
        finally:
            self._listener.close()
            self._ended.set_result(None)

    async def _serve(self, controller: str, ready: Future[None]) -> None:
        options = self._options
        cluster = Cluster(controller)
        records = None if options.ledger is None else Records(options.ledger, AUTHOR)
        store = None if options.checkpoints is None else CheckpointStore(options.checkpoints, create=False)
        self._watching = watching = Watching(lambda: Looking(cluster, records), controller)
        parts = Parts(
            watching,
            Acts(cluster, records),
            records,
            store,
            self._files,
            self._hosts,
            self._context is not None,
            SYSTEM_CLOCK,
        )
        config = uvicorn.Config(
            make_app(parts),
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
            http=TimedConnection,
            ws="none",
        )
        config.load()
        config.ssl = self._context
        self._loop, self._server = asyncio.get_running_loop(), _Server(config, ready)
        watching.start()
        try:
            await self._server.serve([self._listener])
        finally:
            watching.close()
            if records is not None:
                records.close()

    def close(self) -> None:
        """Ends the thread that serves the page, and the open streams."""
        loop, server, watching = self._loop, self._server, self._watching
        if loop is None or server is None or watching is None:
            self._listener.close()
            return
        if self._ended.done():
            return

        def end() -> None:
            watching.close()
            server.should_exit = True

        loop.call_soon_threadsafe(end)
        self._ended.result(WITHIN_S)

    def __enter__(self) -> Dashboard:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
