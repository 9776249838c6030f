"""NATS servers: the one that ``STATEFLOW_TEST_NATS_URL`` names, and servers that a test starts and may stop."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nats
import pytest

from tests.integration.support import eventually

URL = os.environ.get("STATEFLOW_TEST_NATS_URL", "")
needs_nats = pytest.mark.skipif(not URL, reason="STATEFLOW_TEST_NATS_URL names no NATS server")


def ask(url: str, work: Callable[[Any], Any]) -> Any:
    """Returns what ``work`` returns, given a JetStream context."""

    async def run() -> Any:
        client = await nats.connect(url, allow_reconnect=False)
        try:
            return await work(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(run())


class Stream:
    """One stream, and what was published to it."""

    def __init__(self, url: str, name: str, **config: Any) -> None:
        self.url, self.name = url, name
        self.published: list[tuple[str, bytes]] = []
        self._config = {"subjects": [f"{name}.>"], "storage": "file", **config}
        self.make()

    def make(self) -> None:
        ask(self.url, lambda js: js.add_stream(name=self.name, **self._config))

    def publish(self, payloads: Iterable[Any], subject: str = "a", headers: dict[str, str] | None = None) -> None:
        async def work(js: Any) -> None:
            for payload in payloads:
                data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
                await js.publish(f"{self.name}.{subject}", data, headers=headers)
                self.published.append((f"{self.name}.{subject}", data))

        ask(self.url, work)

    def delete_message(self, seq: int) -> None:
        ask(self.url, lambda js: js.delete_msg(self.name, seq))

    def purge(self, below: int) -> None:
        ask(self.url, lambda js: js.purge_stream(self.name, seq=below))

    def delete(self) -> None:
        ask(self.url, lambda js: js.delete_stream(self.name))


class Server:
    """A NATS server of one test, on a port that stays the same when the server starts again."""

    def __init__(self, directory: Path) -> None:
        binary = shutil.which("nats-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if binary is None:
            pytest.skip("there is no nats-server to start and stop")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"nats://127.0.0.1:{port}"
        self._command = [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory), "-l", "/dev/null"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        port = int(self.url.rpartition(":")[2])

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        eventually(listens, "the NATS server listens")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
