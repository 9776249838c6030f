"""Serves the HTTP pages ``/metrics`` and ``/sd`` of a process, for Prometheus.

``/metrics`` contains the process's metrics in the formats of Prometheus (OpenMetrics and text). ``/sd`` lists the
addresses at which metrics are served, for Prometheus's discovery (``http_sd_configs``).

The process's event loop computes the metrics; a thread for each connection answers one HTTP request. Connections
beyond ``STATEFLOW_SERVER_PAGE_CONNECTIONS_MAX`` are closed at once. All others are closed after ``LIFE_S``, so that a
client that sends or reads slowly does not keep its thread. With TLS, the table of roles decides which clients may read
the pages, as it does for calls. Other clients get status 403. Replaced TLS files take effect when the next client
connects.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stateflow.clock import SYSTEM_CLOCK, Clock, Throttle
from stateflow.errors import BadCertificate, NotAllowed, StateflowError
from stateflow.metrics.figures import FIGURES, Figure, Histogram, Target, Values
from stateflow.metrics.limits import LIMIT_HITS, LimitHits
from stateflow.metrics.own import PREFIX, OwnFigures, by_name
from stateflow.security.plain import check_served, connection_settings, host_of, tls_files
from stateflow.security.refusals import REFUSALS, SAY_EVERY_S
from stateflow.security.roles import METRICS
from stateflow.settings import ConnectionSettings, ServerSettings
from stateflow.types import cannot_listen, listened_at

if TYPE_CHECKING:
    from stateflow.security.certificates import TlsFiles

log = logging.getLogger(__name__)
T = TypeVar("T")
#: seconds within which the process must compute its metrics; a request fails if it takes longer
WITHIN_S = 5.0
#: seconds of silence after which a client is disconnected, and seconds after which any client is: it has one request.
#: The pauses between a client's bytes must not add up
PATIENCE_S, LIFE_S = 10.0, 20.0
#: longest request, its headers included
REQUEST_BYTES_MAX = 16 << 10
#: seconds between looks for connections that are over their time
LOOK_S = 0.5
#: a version of a format in the header ``Accept``; the Prometheus client fails for any other
_VERSION = re.compile(r"version=(?![0-9]{1,4}(\.[0-9]{1,4}){0,3}\s*(?:[;,]|\Z))")
ANYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with the addresses of others
_USED = "stateflow_limit_used_ratio"
#: key in the environment of a WSGI request, under which the request's connection is found
_CONNECTION = "stateflow.connection"


def _asked(made: Callable[[], Awaitable[T]], loop: asyncio.AbstractEventLoop) -> T:
    """Returns the result of ``made``, which the event loop runs. Raises TimeoutError. Blocks the calling thread."""

    async def make() -> T:
        return await made()

    return asyncio.run_coroutine_threadsafe(make(), loop).result(WITHIN_S)


class _Figures(Collector):
    """Collects the process's metrics, and adds which part of the page's connections is in use."""

    def __init__(
        self, made: Callable[[], Awaitable[Values]], loop: asyncio.AbstractEventLoop, used: Callable[[], float]
    ) -> None:
        self._made, self._loop, self._used = made, loop, used

    def collect(self) -> Iterator[Any]:
        values = _asked(self._made, self._loop)
        used = {**values.get(_USED, {}), ("metrics_connections",): self._used()}
        yield from families({**values, _USED: used})

    def describe(self) -> list[Any]:
        return []


def families(values: Values) -> Iterator[Any]:
    """Yields the metrics as metric families of the package prometheus_client."""
    for name, by_labels in values.items():
        figure = FIGURES[name]
        family = _family(figure)
        for labels, value in sorted(by_labels.items()):
            if isinstance(value, Histogram):
                bounds = [*map(str, value.bounds), "+Inf"]
                buckets = list(zip(bounds, map(float, accumulate(value.counts)), strict=True))
                family.add_metric(labels, buckets=buckets, sum_value=value.total)
            else:
                family.add_metric(labels, float(value))
        yield family


class _Own(Collector):
    """Collects the metrics that operators declare. If operators describe a metric differently, the first description is
    shown."""

    def __init__(self, figures: OwnFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Any]:
        for first, operators in by_name(self._figures):
            metric = Metric(PREFIX + first.name, first.what or f"of {operators[0][0]}", first.kind)
            for operator, declared, series in operators:
                for values, value in series.items():
                    labels = {"operator": operator, **dict(zip(declared.labels, values, strict=True))}
                    _add(metric, labels, value)
            yield metric

    def describe(self) -> list[Any]:
        return []


def _add(metric: Metric, labels: dict[str, str], value: float | Histogram) -> None:
    if not isinstance(value, Histogram):
        metric.add_sample(metric.name + ("_total" if metric.type == "counter" else ""), labels, value)
        return
    bounds = [*map(str, value.bounds), "+Inf"]
    for bound, count in zip(bounds, accumulate(value.counts), strict=True):
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
    metric.add_sample(f"{metric.name}_count", labels, value.count)
    metric.add_sample(f"{metric.name}_sum", labels, value.total)


def _family(figure: Figure) -> Any:
    made: dict[str, Any] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    return made[figure.kind](figure.name, figure.what, labels=figure.labels)


def answer(targets: Iterable[Target], asked: str) -> bytes:
    """Returns the targets as JSON.

    A target that listens at all addresses of this machine gets the host under which the caller has reached this
    process, because the caller can reach the target there, too.

    Args:
        asked: host or host:port under which the caller has reached this process.
    """
    found = [{"targets": [_reached(each.address, asked)], "labels": dict(each.labels)} for each in targets]
    return json.dumps(found).encode()


def _reached(address: str, asked: str) -> str:
    if host_of(address) not in ANYWHERE:
        return address
    host, _, port = asked.rpartition(":")
    host = host if host and port.isdecimal() else asked
    return f"{host}:{address.rpartition(':')[2]}"


def _with_discovery(
    figures: Any, targets: Callable[[str], Iterable[Target]], own: str, loop: asyncio.AbstractEventLoop
) -> Any:
    """Returns a WSGI application that answers requests for ``/sd``.

    Args:
        figures: application that answers all other requests.
        targets: returns the targets, given ``own``.
        own: host:port of this process's page.
    """

    async def found_now() -> list[Target]:
        return list(targets(own))

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        if (environ["REQUEST_METHOD"], environ["PATH_INFO"]) != ("GET", "/sd"):
            return figures(environ, start_response)
        found = answer(_asked(found_now, loop), environ.get("HTTP_HOST", environ["SERVER_NAME"]))
        start_response("200 OK", [("Content-Type", "application/json")])
        return [found]

    return application


class _Tls:
    """Wraps connections in TLS. The newest TLS files are used for each new client.

    Creating an object raises BadCertificate if the files cannot be used.
    """

    def __init__(self, files: TlsFiles, settings: ConnectionSettings) -> None:
        self._files, self._settings, self._lock = files, settings, threading.Lock()
        self._number = -1
        self._context = self._made()

    def wrapped(self, client: socket.socket) -> ssl.SSLSocket:
        """Wraps a client's connection in TLS, before the handshake."""
        with self._lock:
            if self._files.current().number != self._number:
                try:
                    self._context = self._made()
                except BadCertificate as error:  # the files are read again for the next client
                    log.warning("the changed TLS files are unusable, the metrics page keeps the former ones: %s", error)
            context = self._context
        return context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)

    def check(self, client: ssl.SSLSocket) -> None:
        """Checks that the role in a client's certificate may read the page. Raises NotAllowed."""
        from stateflow.security.certificates import Caller

        shown = ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True) or b"").encode()
        try:
            Caller(self._files, SYSTEM_CLOCK, METRICS, shown).check()
        except BadCertificate as error:
            raise NotAllowed(error.what, remedy=error.remedy, **error.where) from error

    def _made(self) -> ssl.SSLContext:
        material, settings = self._files.current(), self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=material.ca.decode("ascii", "replace"))
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
        except OSError as error:
            raise BadCertificate(
                f"metrics cannot be served with this certificate: {error}",
                remedy="check the files of the certificate and its key",
                file=settings.tls_cert,
            ) from error
        self._number = material.number
        return context


def _guarded(pages: Any) -> Any:
    """Returns a WSGI application that passes on to ``pages`` only headers that the Prometheus client can read, and
    answers 503 if the metrics cannot be computed, for example in time."""

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        if _VERSION.search(environ.get("HTTP_ACCEPT", "")):
            del environ["HTTP_ACCEPT"]  # so the client gets the format that is the default
        try:
            return pages(environ, start_response)
        except (OSError, StateflowError) as error:
            log.warning(
                "the metrics cannot be computed: %s", str(error) or f"the process took more than {WITHIN_S:g} s"
            )
            start_response("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"the metrics cannot be computed now: see the log of the process\n"]

    return application


def _admitting(pages: Any, tls: _Tls) -> Any:
    """Returns a WSGI application that serves ``pages`` to clients that may read them, and refuses other clients."""

    def application(environ: dict[str, Any], start_response: Any) -> Any:
        try:
            tls.check(environ[_CONNECTION])
        except NotAllowed as error:
            REFUSALS.note(METRICS.removeprefix("/"), error, environ["REMOTE_ADDR"])
            start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{error}\n".encode()]
        return pages(environ, start_response)

    return application


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each connection in a thread, including its TLS handshake, so that a silent client does not delay others.

    Args:
        connections_max: number of connections at a time; further ones are closed.
    """

    daemon_threads = True
    tls: _Tls | None = None

    def __init__(
        self,
        address: tuple[str, int],
        connections_max: int,
        hits: LimitHits = LIMIT_HITS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._connections_max, self._hits, self._clock = connections_max, hits, clock
        self._lines = Throttle(clock, SAY_EVERY_S)
        self._lock = threading.Lock()
        #: by the id of its socket: the connection, also in TLS, and the end of its time
        self._open: dict[int, tuple[socket.socket, float]] = {}
        hits.watch("metrics_connections")
        super().__init__(address, _Handler)

    @property
    def used(self) -> float:
        """Part of the connections that are open now, of those that may be open."""
        return len(self._open) / self._connections_max

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_one_too_many = len(self._open) >= self._connections_max
            if not is_one_too_many:
                self._open[id(request)] = request, self._clock.monotonic() + LIFE_S
        if is_one_too_many:
            self._hits.note("metrics_connections")
            if self._lines.passes(""):
                log.warning(
                    "the metrics page has %d connections, more are closed, the newest from %s; %d closed so far",
                    self._connections_max,
                    client_address[0],
                    self._hits.count("metrics_connections"),
                )
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread that would end it
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(id(request), None)

    def service_actions(self) -> None:
        """Ends the connections that are over their time. Their threads notice it as an error of the connection."""
        now = self._clock.monotonic()
        with self._lock:
            for connection, until in self._open.values():
                if now >= until:
                    with suppress(OSError):  # it is closed already
                        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # the number of a closed connection may belong to another file by then
            super().shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(PATIENCE_S)
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        secure = self.tls.wrapped(request)
        with self._lock:
            _, until = self._open[id(request)]
            self._open[id(request)] = secure, until
        try:
            secure.do_handshake()
            super().finish_request(secure, client_address)
        finally:
            self.shutdown_request(secure)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if self._lines.passes(client_address[0]):
            log.warning("metrics request from %s failed: %s", client_address[0], sys.exception())


class _Head:
    """Reads a request of at most ``REQUEST_BYTES_MAX`` bytes. Raises OSError for a longer one. Python's own limit for
    the headers of a request is six MiB."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, REQUEST_BYTES_MAX
        self.close = file.close

    def readline(self, size: int = -1) -> bytes:
        return self._counted(self._file.readline, size)

    def read(self, size: int = -1) -> bytes:
        return self._counted(self._file.read, size)

    def _counted(self, read: Callable[[int], bytes], size: int) -> bytes:
        data = read(min(size, self._left + 1) if size >= 0 else self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise OSError("the request is too long")
        return data


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile: Any = _Head(self.rfile)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing, because requests are routine."""

    def get_environ(self) -> dict[str, Any]:
        return super().get_environ() | {_CONNECTION: self.connection}


class Page:
    """A page of metrics, which is served until it is closed.

    Args:
        listen: host:port of the page; port 0 picks a free port.
        made: computes the metrics, in the event loop ``loop``.
        operators: metrics that operators declare; None: there are no operators.
        targets: returns the targets of ``/sd``, given the address of this page; None: there is no ``/sd``.

    Attributes:
        address: host:port of the page.

    Raises InvalidArgument, PortInUse and BadCertificate, and InsecureRefused for an address beyond this machine without
    TLS or ``--insecure``.
    """

    def __init__(
        self,
        listen: str,
        made: Callable[[], Awaitable[Values]],
        loop: asyncio.AbstractEventLoop,
        operators: OwnFigures | None = None,
        targets: Callable[[str], Iterable[Target]] | None = None,
    ) -> None:
        host, port = listened_at(listen)
        files = tls_files()
        if files is None:
            check_served(listen, None, "read this process's metrics")
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        tls = None if files is None else _Tls(files, connection_settings())
        try:
            self._server = _Server((host, port), ServerSettings().page_connections_max)
        except OSError as error:
            raise cannot_listen(error, listen) from error
        registry.register(_Figures(made, loop, lambda: self._server.used))
        if operators is not None:
            registry.register(_Own(operators))
        self._server.tls = tls
        self.address = f"{listen.rpartition(':')[0]}:{self._server.server_port}"
        application = make_wsgi_app(registry)
        if targets is not None:
            application = _with_discovery(application, targets, self.address, loop)
        application = _guarded(application)
        self._server.set_app(application if tls is None else _admitting(application, tls))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(LOOK_S,), name="figures", daemon=True)
        self._thread.start()
        log.info("serving metrics at %s://%s/metrics", "http" if tls is None else "https", self.address)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
