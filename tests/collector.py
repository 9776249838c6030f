"""An OTLP collector in this process: an HTTP server that keeps the spans that are sent to it."""

from __future__ import annotations

import gzip
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class Collected:
    """``attributes`` and ``resource``: by their names, without ``stateflow.``. ``events``: their names, in order."""

    name: str
    trace: str
    id: str
    parent: str
    began_ns: int
    ended_ns: int
    failed: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    events: tuple[str, ...]


@dataclass(slots=True)
class Collector:
    endpoint: str = ""
    _spans: list[Collected] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def spans(self) -> list[Collected]:
        with self._lock:
            return list(self._spans)

    def take(self, body: bytes) -> None:
        for of in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(of.resource.attributes)
            found = [_collected(span, resource) for scope in of.scope_spans for span in scope.spans]
            with self._lock:
                self._spans += found

    def named(self, name: str, **attributes: Any) -> list[Collected]:
        return [span for span in self.spans if span.name == name and attributes.items() <= span.attributes.items()]

    def children(self, of: Collected) -> list[Collected]:
        return [span for span in self.spans if span.trace == of.trace and span.parent == of.id]


def _collected(span: Any, resource: dict[str, Any]) -> Collected:
    return Collected(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.message if span.status.code == 2 else "",
        _values(span.attributes),
        resource,
        tuple(event.name for event in span.events),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {
        each.key.removeprefix("stateflow."): getattr(each.value, each.value.WhichOneof("value")) for each in attributes
    }


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            match self.headers.get("Content-Encoding"):
                case "gzip":
                    body = gzip.decompress(body)
                case "deflate":
                    body = zlib.decompress(body)
            assert self.path == "/v1/traces"
            collector.take(body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
