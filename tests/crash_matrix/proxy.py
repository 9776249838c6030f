"""A loopback TCP proxy before each process, which watches RPCs frame by frame and can cut connections."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.crash_matrix.steps import Moment

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM = 0, 1, 3
END_STREAM = 1


@dataclass(slots=True)
class Trap:
    """A trap at one step. The proxy calls ``spring`` once, before it passes on the frame that makes the step."""

    method: str
    moment: Moment
    spring: Callable[[], None]
    sprung: bool = False


class Proxy:
    """A proxy for one process. ``upstream``: returns the process's address; called at each connection."""

    def __init__(self, upstream: Callable[[], str]) -> None:
        self._upstream = upstream
        self.trap: Trap | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._links: list[_Link] = []
        self._lock = threading.Lock()
        self.cut = False  # holds all connections
        self.cut_clients: frozenset[int] = frozenset()  # processes whose connections it holds
        self.one_way: bool | None = None  # holds only requests (True), only answers (False), or both (None)
        self._moving = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, (_, port) = self._listener.accept()
                threading.Thread(target=self._connect, args=(client, port), daemon=True).start()

    def _connect(self, client: socket.socket, port: int) -> None:
        try:
            host, _, number = self._upstream().rpartition(":")
            server = socket.create_connection((host, int(number)), timeout=5)
        except (OSError, ValueError):
            client.close()
            return
        server.settimeout(None)
        link = _Link(self, client, server, port)
        with self._lock:
            self._links.append(link)
        link.start()

    def stands_still(self, port: int) -> bool:
        return self.cut or (bool(self.cut_clients) and _owner(port, self.cut_clients))

    def wait(self, port: int, asks: bool) -> None:
        with self._moving:
            self._moving.wait_for(lambda: self.one_way not in (None, asks) or not self.stands_still(port))

    def hold(self, clients: frozenset[int] | None = None, one_way: bool | None = None) -> None:
        """Holds all connections, or only those of these client processes.

        ``one_way``: holds only their requests (True) or only the answers to them (False); None: both.
        """
        with self._moving:
            self.one_way = one_way
            if clients is None:
                self.cut = True
            else:
                self.cut_clients = clients

    def heal(self) -> None:
        """Lets connections pass again, and closes those that were held."""
        with self._lock:
            for link in self._links:
                if self.stands_still(link.port):
                    link.close()
        with self._moving:
            self.cut, self.cut_clients, self.one_way = False, frozenset(), None
            self._moving.notify_all()

    def reset(self, clients: frozenset[int] | None = None) -> None:
        """Drops every connection, or only those of these client processes: a new one spells its headers out again."""
        with self._lock:
            kept = [link for link in self._links if clients is not None and not _owner(link.port, clients)]
            for link in self._links:
                if link not in kept:
                    link.close()
            self._links = kept

    def close(self) -> None:
        self._listener.close()
        self.reset()


class _Link:
    """One connection. ``_streams``: numbers of its streams that carry the trapped method."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket, port: int) -> None:
        self._proxy, self._client, self._server, self.port = proxy, client, server, port
        self._streams: set[int] = set()

    def start(self) -> None:
        threading.Thread(target=self._pump, args=(self._client, self._server, True), daemon=True).start()
        threading.Thread(target=self._pump, args=(self._server, self._client, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, asks: bool) -> None:
        buffer = b""
        greeted = not asks
        try:
            while data := source.recv(1 << 16):
                buffer += data
                if not greeted:
                    if len(buffer) < len(PREFACE):
                        continue
                    greeted = True
                    self._pass(sink, buffer[: len(PREFACE)], asks)
                    buffer = buffer[len(PREFACE) :]
                while len(buffer) >= 9 and len(buffer) >= 9 + (size := int.from_bytes(buffer[:3], "big")):
                    frame, buffer = buffer[: 9 + size], buffer[9 + size :]
                    self._look(frame, asks)
                    self._pass(sink, frame, asks)
        except OSError:
            pass
        self.close()

    def _pass(self, sink: socket.socket, data: bytes, asks: bool) -> None:
        self._proxy.wait(self.port, asks)
        sink.sendall(data)

    def _look(self, frame: bytes, asks: bool) -> None:
        trap = self._proxy.trap
        if trap is None or trap.sprung:
            return
        kind, flags, stream = frame[3], frame[4], int.from_bytes(frame[5:9], "big")
        moment: Moment | None = None
        if asks and kind == HEADERS and f"/stateflow.rpc.ReplicaService/{trap.method}".encode() in frame:
            self._streams.add(stream)
            moment = Moment.SENT
        elif not asks and stream in self._streams and kind == DATA:
            moment = Moment.ANSWERED
        elif stream in self._streams and (
            (asks and kind == RST_STREAM)  # the client has read all that it waited for
            or (not asks and kind == HEADERS and flags & END_STREAM)
        ):
            moment = Moment.ENDED
        if moment is trap.moment:
            trap.sprung = True
            trap.spring()

    def close(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _owner(port: int, processes: frozenset[int]) -> bool:
    """Tells whether one of these processes has this local port."""
    # gRPC's sockets are IPv6 even where they speak IPv4
    wanted = {f"0100007F:{port:04X}", f"0000000000000000FFFF00000100007F:{port:04X}"}
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] in wanted:
                inodes.add(f"socket:[{fields[9]}]")
    for process in processes:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) in inodes:
                        return True
    return False


def signal(process: int, number: int) -> None:
    os.kill(process, number)
