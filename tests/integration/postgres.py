"""A PostgreSQL server of a test's own, which can be stopped and started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

START_TIMEOUT_S = 30.0
#: PostgreSQL's fast and immediate shutdown: the first rolls transactions back, the second does not even flush
FAST, IMMEDIATE = signal.SIGINT, signal.SIGQUIT


class Postgres:
    """A PostgreSQL server with a data directory of its own.

    Args:
        binaries: folder of ``initdb`` and ``postgres``.
        directory: empty, and readable by the user who runs the server.
    """

    def __init__(self, binaries: Path, directory: Path) -> None:
        self._binaries, self._data, self._log = binaries, directory / "data", directory / "log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"postgresql://stateflow@127.0.0.1:{self._port}/postgres"
        self._server: subprocess.Popen[bytes] | None = None
        initialise = [str(binaries / "initdb"), "-D", str(self._data), "-U", "stateflow", "-A", "trust", "-E", "UTF8"]
        subprocess.run([*_as_owner(), *initialise, "--no-sync"], check=True, stdout=subprocess.DEVNULL, cwd="/")

    def start(self) -> None:
        options = ["-p", str(self._port), "-k", "", "-c", "listen_addresses=127.0.0.1"]
        with self._log.open("a") as log:  # the server ends with this process, however that ends
            self._server = subprocess.Popen(
                [*_as_owner(), "--pdeathsig=INT", str(self._binaries / "postgres"), "-D", str(self._data), *options],
                stdout=log,
                stderr=log,
                cwd="/",
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._server.poll() is not None:
                    raise AssertionError(f"PostgreSQL did not start: {self._log.read_text()[-1000:]}") from None
            time.sleep(0.05)

    def stop(self, how: signal.Signals = FAST) -> None:
        assert self._server is not None
        if self._server.poll() is None:
            self._server.send_signal(how)
            self._server.wait(START_TIMEOUT_S)

    def cut(self) -> None:
        """Cuts every other connection, in the middle of its work."""
        others = "pid <> pg_backend_pid() AND usename = current_user"
        self.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")

    def execute(self, *statements: str) -> None:
        with psycopg.connect(self.url, autocommit=True, connect_timeout=5) as connection:
            for statement in statements:
                connection.execute(statement.encode())


def _as_owner() -> list[str]:
    """Returns the prefix of commands that run as the owner of the data: PostgreSQL refuses to run as root."""
    if os.geteuid() == 0:
        return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    return ["setpriv"]


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """Starts a server for one test; skips the test where PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda each: int(each.parts[-3]))
    if not found or shutil.which("setpriv") is None:
        pytest.skip("no PostgreSQL is installed in /usr/lib/postgresql")
    directory = Path(tempfile.mkdtemp(prefix="stateflow-postgres-"))  # only root may look into a test's own folder
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, "postgres", "postgres")
        server = Postgres(found[-1].parent, directory)
        server.start()
        try:
            yield server
        finally:
            server.stop(IMMEDIATE)
    finally:
        shutil.rmtree(directory)
