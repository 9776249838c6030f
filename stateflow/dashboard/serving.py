"""The thread that serves the page in any process: it has its own event loop, for which no other one waits."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from stateflow.checkpoint import CheckpointStore
from stateflow.client import Cluster
from stateflow.clock import SYSTEM_CLOCK
from stateflow.dashboard.acts import Acts
from stateflow.dashboard.app import Parts, make_app
from stateflow.dashboard.records import Records
from stateflow.dashboard.watching import Looking, Watching
from stateflow.errors import BadCertificate, InsecureRefused, InvalidArgument
from stateflow.security.plain import connection_settings, host_of, is_loopback, tls_files
from stateflow.security.reading import described, read_certificates
from stateflow.types import cannot_listen, listened_at

log = logging.getLogger(__name__)
#: open connections are closed after this many seconds: event streams do not end by themselves
GRACE_S = 1
#: limit of the wait for the start, and for the end, in seconds
WITHIN_S = 20.0
AUTHOR = "stateflow dashboard"


@dataclass(frozen=True, slots=True)
class DashboardOptions:
    """The options of a dashboard: where the page is served, and what it shows.

    Args:
        controller: host:port, or comma-separated addresses of several; empty: ``start`` gets it.
        listen: host:port; port 0 takes a free one.
        cert, key: PEM files of a certificate that browsers accept; None: plain text.
        hosts: names under which browsers reach the page, in addition to those in the certificate.
        ledger: SQLAlchemy URL of the ledger whose batches are shown and records searched; None: neither.
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
    """A server that reports when it answers. Signals are the process's own business."""

    def __init__(self, config: uvicorn.Config, ready: Future[None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set_result(None)


class Dashboard:
    """A context manager that serves the page from ``start`` to ``close``. ``url``: address of the page.

    Raises InvalidArgument, PortInUse, BadCertificate; InsecureRefused where it would be served in plain text beyond
    this machine.
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
            raise InvalidArgument("a certificate and its key go together", remedy="pass both --cert and --key")
        if options.cert is not None or is_loopback(options.listen):
            return
        if settings.tls or not settings.insecure:
            raise InsecureRefused(
                f"the page would be served in plain text on {host_of(options.listen)}",
                remedy="pass --cert and --key with a certificate that browsers accept, or listen on 127.0.0.1"
                + ("" if settings.tls else ", or allow it with --insecure"),
            )
        log.warning("INSECURE: plain text, and anyone who can reach %s can command the cluster", options.listen)

    def _tls(self) -> tuple[ssl.SSLContext | None, list[str]]:
        """Returns the TLS context, None: plain text, and the names in the certificate. Raises BadCertificate."""
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
        """Starts the thread, and returns when the page can be reached.

        Args:
            controller: its address, if the options have none.
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
            return socket.create_server((self._host, self._port), family=family, backlog=128)
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
            http="h11",
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
        """Ends the thread and its open streams."""
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
