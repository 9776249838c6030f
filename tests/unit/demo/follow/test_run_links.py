"""Slow links: they delay, and change nothing else. Bytes arrive intact both ways, and an end arrives as an end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from stateflow.demo.follow.run import Links

RTT_S = 0.06


@pytest.fixture
def echo() -> Iterator[str]:
    """Yields the address of a server that echoes what it is sent, and closes when its peer does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(client: socket.socket) -> None:
        with client:
            while data := client.recv(1 << 16):
                client.sendall(data)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    host, port = listener.getsockname()
    yield f"{host}:{port}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, "it ended early"
        data += piece
    return data


def test_a_round_trip_takes_as_long_as_it_is_told(echo: str) -> None:
    with Links([echo], RTT_S) as links, connected(links.addresses[echo]) as far, connected(echo) as near:
        took: dict[str, float] = {}
        for name, connection in (("far", far), ("near", near)):
            times = []
            for _ in range(5):
                began = time.monotonic()
                connection.sendall(b"x")
                assert received(connection, 1) == b"x"
                times.append(time.monotonic() - began)
            took[name] = min(times)
    assert took["far"] >= RTT_S
    assert took["near"] < RTT_S / 2


def test_bytes_come_as_they_were_and_pieces_do_not_wait_for_each_other(echo: str) -> None:
    data = bytes(range(256)) * 4096
    with Links([echo], RTT_S) as links, connected(links.addresses[echo]) as far:
        began = time.monotonic()
        threading.Thread(target=far.sendall, args=(data,), daemon=True).start()
        assert received(far, len(data)) == data
        assert time.monotonic() - began < 16 * RTT_S, "not a round trip for each of its pieces"


def test_what_was_sent_before_an_end_comes_before_it(echo: str) -> None:
    with Links([echo], RTT_S) as links, connected(links.addresses[echo]) as far:
        far.sendall(b"last")
        far.shutdown(socket.SHUT_WR)
        assert received(far, 4) == b"last"
        assert far.recv(1) == b""


def test_links_end_with_what_goes_through_them(echo: str) -> None:
    with Links([echo], RTT_S) as links:
        far = connected(links.addresses[echo])
        far.sendall(b"x")
        assert received(far, 1) == b"x"
    with far:
        assert far.recv(1) == b""


def test_nobody_behind_a_link_is_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with Links([address], RTT_S) as links, connected(links.addresses[address]) as far:
        assert far.recv(1) == b""
