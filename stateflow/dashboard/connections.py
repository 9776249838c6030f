"""Limits on the connections to the page: how many are open, and how long one may take to send or to read."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from stateflow.clock import SYSTEM_CLOCK, Throttle
from stateflow.metrics.limits import LIMIT_HITS, LimitHits
from stateflow.security.refusals import SAY_EVERY_S

log = logging.getLogger(__name__)
#: the logger of uvicorn's lines about connections
_http_log = logging.getLogger(f"{__name__}.http")
#: time in which a browser sends a request, and in which it reads so much of an answer that more can be sent, in seconds
REQUEST_S, READ_S = 10.0, 30.0


class _Sparing(logging.Filter):
    """Passes each warning once in ``SAY_EVERY_S``, because anybody who reaches the page can cause many."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = Throttle(SYSTEM_CLOCK, SAY_EVERY_S)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING or self._lines.passes(str(record.msg))


_http_log.addFilter(_Sparing())


class Listener(socket.socket):
    """A listening socket that closes connections beyond a limit. TLS handshakes count, too.

    Args:
        listening: the socket, which this object takes over.
        connections_max: number of open connections.
    """

    def __init__(self, listening: socket.socket, connections_max: int, hits: LimitHits = LIMIT_HITS) -> None:
        super().__init__(fileno=listening.detach())
        self._connections_max, self._hits = connections_max, hits
        self._connections: set[socket.socket] = set()
        self._lines = Throttle(SYSTEM_CLOCK, SAY_EVERY_S)
        hits.watch("dashboard_connections")

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection. Raises ConnectionAbortedError, with which asyncio goes on, if it is one too many."""
        connection, address = super().accept()
        self._connections = {each for each in self._connections if each.fileno() >= 0}
        if len(self._connections) < self._connections_max:
            self._connections.add(connection)
            return connection, address
        connection.close()
        self._hits.note("dashboard_connections")
        if self._lines.passes(""):
            log.warning(
                "the dashboard has %d connections, more are closed, the newest from %s; %d closed so far",
                self._connections_max,
                address[0],
                self._hits.count("dashboard_connections"),
            )
        raise ConnectionAbortedError("too many connections")


class TimedConnection(H11Protocol):
    """A connection that ends if its browser sends a request too slowly, or reads an answer too slowly.

    uvicorn itself limits the time between an answer and the next request, and the size of a request's headers.
    """

    _request: asyncio.TimerHandle | None = None
    _answer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger = _http_log
        self._request = self.loop.call_later(REQUEST_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._request_came()
        elif self._request is None:  # the beginning of another request
            self._request = self.loop.call_later(REQUEST_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answer is None:
            self._answer = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._answer_is_read()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_came()
        self._answer_is_read()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except LocalProtocolError:  # the request was answered before it had arrived
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: a request for a WebSocket is answered like any other, and no library would change that."""

    def _request_came(self) -> None:
        if self._request is not None:
            self._request.cancel()
            self._request = None

    def _answer_is_read(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None
