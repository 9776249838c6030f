"""The HTTP pages ``/metrics`` and ``/sd`` of a process, for Prometheus.

``/metrics`` contains the process's metrics in the formats of Prometheus (OpenMetrics and text). ``/sd`` lists the
addresses at which metrics are served, for Prometheus's discovery (``http_sd_configs``).

The process's event loop computes the metrics; a thread for each client answers HTTP. With TLS, the table of roles says
which clients may read the pages, as it does for calls; others get 403. Replaced TLS files take effect when the next
client connects.

A client holds up neither the process nor other clients: it has ``PATIENCE_S`` for its whole request, and at most
``CLIENTS_MAX`` clients are served at a time.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stateflow.clock import SYSTEM_CLOCK
from stateflow.errors import BadCertificate, NotAllowed, StateflowError
from stateflow.metrics.figures import FIGURES, Figure, Histogram, Target, Values
from stateflow.metrics.own import PREFIX, OwnFigures, by_name
from stateflow.security.plain import check_served, connection_settings, host_of, tls_files
from stateflow.security.refusals import REFUSALS
from stateflow.security.roles import METRICS
from stateflow.settings import ConnectionSettings
from stateflow.types import cannot_listen, listened_at

if TYPE_CHECKING:
    from stateflow.security.certificates import TlsFiles

log = logging.getLogger(__name__)
T = TypeVar("T")
#: seconds within which the process must compute its metrics; otherwise it is too busy, and the request fails
WITHIN_S = 5.0
#: seconds within which a client's request must have arrived, and of silence after which a client is disconnected
PATIENCE_S = 10.0
#: clients served at a time; further ones are disconnected, so that they use up neither threads nor open files
CLIENTS_MAX = 64
#: a version of a format in the header ``Accept``; the Prometheus client fails for any other
_VERSION = re.compile(r"version=(?![0-9]{1,4}(\.[0-9]{1,4}){0,3}\s*(?:[;,]|\Z))")
ANYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with the addresses of others
#: key of a request's connection in its environment
_CONNECTION = "stateflow.connection"


def _asked(made: Callable[[], Awaitable[T]], loop: asyncio.AbstractEventLoop) -> T:
    """Returns, in a thread that answers HTTP, a result that the event loop computes. Raises TimeoutError."""

    async def make() -> T:
        return await made()

    return asyncio.run_coroutine_threadsafe(make(), loop).result(WITHIN_S)


class _Figures(Collector):
    def __init__(self, made: Callable[[], Awaitable[Values]], loop: asyncio.AbstractEventLoop) -> None:
        self._made, self._loop = made, loop

    def collect(self) -> Iterator[Any]:
        yield from families(_asked(self._made, self._loop))

    def describe(self) -> list[Any]:
        return []


def families(values: Values) -> Iterator[Any]:
    """Yields the metrics as families of the Prometheus client."""
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
    """Collects the metrics that operators declare. If a metric has several descriptions, the first one is shown."""

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

    Args:
        asked: host or host:port at which the caller reached this process. This host replaces that of targets that
            listen at all addresses of this machine, because the caller can reach those targets there, too.
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
    """Returns a WSGI application that answers ``/sd``.

    Args:
        figures: the application that answers all other requests.
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
    """Wraps connections in TLS, with the files as they are when a client connects. Creation raises BadCertificate for
    unusable files."""

    def __init__(self, files: TlsFiles, settings: ConnectionSettings) -> None:
        self._files, self._settings, self._lock = files, settings, threading.Lock()
        self._number = -1
        self._context = self._made()

    def handshake(self, client: socket.socket) -> ssl.SSLSocket:
        """Performs the TLS handshake with a client, within its timeout. Raises OSError."""
        with self._lock:
            if self._files.current().number != self._number:
                try:
                    self._context = self._made()
                except BadCertificate as error:  # the files are read again for the next client
                    log.warning("the changed TLS files are unusable, the metrics page keeps the former ones: %s", error)
            context = self._context
        return context.wrap_socket(client, server_side=True)

    def check(self, client: ssl.SSLSocket) -> None:
        """Checks that a client may read the page, by its certificate and the table of roles. Raises NotAllowed."""
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
    """Returns a WSGI application that answers the clients that may read ``pages``, and refuses the others."""

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
    """Serves each client in a thread, including its TLS handshake, so that a silent client does not delay others."""

    daemon_threads = True
    tls: _Tls | None = None

    def __init__(self, address: tuple[str, int]) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._places = threading.BoundedSemaphore(CLIENTS_MAX)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(PATIENCE_S)
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        secure = self.tls.handshake(request)
        try:
            super().finish_request(secure, client_address)
        finally:
            self.shutdown_request(secure)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("metrics request from %s failed: %s", client_address[0], sys.exception())


class _InTime(io.RawIOBase):
    """The bytes that a client sends, until its time is over. Reading raises TimeoutError then."""

    def __init__(self, client: socket.socket) -> None:
        self._client, self._until = client, SYSTEM_CLOCK.monotonic() + PATIENCE_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until - SYSTEM_CLOCK.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request took too long")
        self._client.settimeout(left_s)
        try:
            return self._client.recv_into(buffer)
        finally:
            self._client.settimeout(PATIENCE_S)


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_InTime(self.connection))

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing, because requests are routine."""

    def get_environ(self) -> dict[str, Any]:
        return super().get_environ() | {_CONNECTION: self.connection}


class Page:
    """A page of metrics, served until it is closed. ``address`` is its host:port.

    Args:
        made: computes the metrics, in the event loop ``loop``.
        operators: metrics that operators declare; None: there are no operators.
        targets: returns the targets of ``/sd``, given the address of this page; None: there is no ``/sd``.

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
        registry.register(_Figures(made, loop))
        if operators is not None:
            registry.register(_Own(operators))
        tls = None if files is None else _Tls(files, connection_settings())
        try:
            self._server = _Server((host, port))
        except OSError as error:
            raise cannot_listen(error, listen) from error
        self._server.tls = tls
        self.address = f"{listen.rpartition(':')[0]}:{self._server.server_port}"
        application = make_wsgi_app(registry)
        if targets is not None:
            application = _with_discovery(application, targets, self.address, loop)
        application = _guarded(application)
        self._server.set_app(application if tls is None else _admitting(application, tls))
        self._thread = threading.Thread(target=self._server.serve_forever, name="figures", daemon=True)
        self._thread.start()
        log.info("serving metrics at %s://%s/metrics", "http" if tls is None else "https", self.address)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
