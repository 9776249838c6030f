"""Sites that are apart: TCP proxies on this machine that pass everything on after half a round trip, both ways."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from contextlib import closing, suppress

PIECE_BYTES = 64 << 10
#: pieces in flight; a connection that sends more waits
PIECES_MAX = 1024


class Links:
    """One proxy for each of ``upstreams`` (``host:port``); ``addresses``: upstream → where its proxy listens.
    Connecting is not delayed; the data of a connection is. A context manager."""

    def __init__(self, upstreams: Iterable[str], rtt_s: float) -> None:
        self._upstreams, self._delay_s = list(upstreams), rtt_s / 2
        self.addresses: dict[str, str] = {}
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="links", daemon=True)

    def __enter__(self) -> Links:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        servers, connections = [], set[asyncio.Task[None]]()
        for upstream in self._upstreams:

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: str = upstream) -> None:
                connection = asyncio.create_task(self._connect(upstream, reader, writer))
                connections.add(connection)
                connection.add_done_callback(connections.discard)

            server = await asyncio.start_server(connected, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            self.addresses[upstream] = f"{host}:{port}"
            servers.append(server)
        self._listening.set()
        await self._over.wait()
        for server in servers:
            server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connect(self, upstream: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = upstream.rpartition(":")
        with suppress(OSError), closing(writer):
            there, back = await asyncio.open_connection(host, int(port))
            with closing(back):
                await asyncio.gather(self._carry(reader, back), self._carry(there, writer))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Carries data one way, until the source ends."""
        clock = asyncio.get_running_loop().time
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_MAX)

        async def receive() -> None:
            while True:
                try:
                    data = await source.read(PIECE_BYTES)
                except OSError:
                    data = b""
                await under_way.put((clock() + self._delay_s, data))
                if not data:
                    return

        receiving = asyncio.create_task(receive())
        try:
            with suppress(OSError):
                while True:
                    due, data = await under_way.get()
                    await asyncio.sleep(max(0.0, due - clock()))
                    if not data:
                        sink.write_eof()
                        return
                    sink.write(data)
                    await sink.drain()
        finally:
            receiving.cancel()
