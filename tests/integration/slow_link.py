"""A loopback TCP link that delays what the server sends, and can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

PIECE_BYTES = 4096
#: bytes that the link holds without either end knowing
BUFFER_BYTES = 16 << 10


class SlowLink:
    """A link that accepts connections and forwards them to one address.

    Args:
        upstream: returns the address behind the link; called for each connection.
        bytes_per_s: rate of what the server sends, all connections together; 0: unlimited.
    """

    def __init__(self, upstream: Callable[[], str], bytes_per_s: float = 0.0) -> None:
        self._upstream = upstream
        self.bytes_per_s = bytes_per_s
        self.sent = 0  # bytes from the server
        self.cut_at: list[int] = []  # counts of sent bytes, at each of which the link is cut once
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    host, _, port = self._upstream().rpartition(":")
                    server = socket.socket()
                    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
                    server.connect((host, int(port)))
                except (OSError, ValueError):
                    client.close()
                    continue
                with self._lock:
                    self._open |= {client, server}
                for ends, slow in (((client, server), False), ((server, client), True)):
                    threading.Thread(target=self._pump, args=(*ends, slow), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if slow:
                    self._take_time(len(data))
                sink.sendall(data)
        self._close({source, sink})

    def _take_time(self, size: int) -> None:
        with self._lock:
            self.sent += size
            if self.cut_at and self.sent >= self.cut_at[0]:
                self.cut_at.pop(0)
                self._close(set(self._open))
            if not self.bytes_per_s:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self.bytes_per_s
            wait = self._free_at - now
        time.sleep(wait)

    def cut(self) -> None:
        """Breaks all open connections; new ones are accepted."""
        with self._lock:
            self._close(set(self._open))

    def _close(self, ends: set[socket.socket]) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            self._open.discard(end)

    def close(self) -> None:
        self._listener.close()
        self.cut()
