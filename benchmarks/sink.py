"""A collector that receives spans over OTLP/HTTP and discards them.

The collector runs in a process of its own, so that it uses no CPU time of the sender's process. It prints its port, and
then serves until its standard input closes. A GET request returns the number of bytes that have arrived.
"""

from __future__ import annotations

import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_came = {"bytes": 0}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept open, as by real collectors

    def do_POST(self) -> None:
        _came["bytes"] += len(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(b"", "application/x-protobuf")

    def do_GET(self) -> None:
        self._answer(str(_came["bytes"]).encode(), "text/plain")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)  # does not wait for open connections
