"""Ways of running Spark over files: a classic session, Spark Connect, a standalone cluster."""

from __future__ import annotations

import contextlib
import random
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from stateflow.testing import LocalCluster
from tests.integration.processes import gone, python_workers
from tests.integration.spark_drivers import STARTED
from tests.integration.spark_operators import Tally
from tests.integration.standalone import WORKERS, Machine, Machines, Spark
from tests.integration.support import eventually, read
from tests.kills.files import Expected, some_rows, write_file
from tests.kills.harness import AWAY_S, PATIENCE_S, Fault, Way
from tests.kills.programs import Driver, Program, free_port, kill_one, listening, spark_driver

AHEAD = 4  # files that wait for the query
HERE = "127.0.0.1"


class OverFiles(Way):
    """A way whose query counts files, about one in each micro-batch, until ``work/enough`` says how many there are."""

    operators = (Tally,)
    moment_s = 0.4

    def __init__(self, address: str, work: Path) -> None:
        super().__init__(address, work)
        self.files = 0
        (work / "input").mkdir()

    @property
    @abstractmethod
    def client(self) -> Program:
        """Program that started the query, and ends when the query ends."""

    def feed(self, done: int) -> None:
        while self.files < done + AHEAD:
            write_file(self.work / "input", self.files, some_rows(self.files))
            self.files += 1

    def finish(self) -> None:
        (self.work / "counted").write_text(str(self.files))
        (self.work / "counted").rename(self.work / "enough")
        self.client.check_ends(PATIENCE_S)

    def compare(self, local: LocalCluster) -> None:
        # Spark notes the file of a batch in two logs; a kill in between leaves the file to the batch of the next one
        more = self.files - self.committed()
        assert 0 <= more < self.client.starts, f"{more} files are not a batch each"
        expected = Expected(self.work / "input")
        expected.check(local, "Tally", self.work / "output")
        assert read(local.cluster, "Tally", "by_kind") == dict(expected.by_kind)
        assert set(read(local.cluster, "Tally", "kinds")) == set(expected.by_kind)


class Classic(OverFiles):
    """A driver with a local master."""

    name = "classic"
    kills: ClassVar = {"driver": 1, "worker": 2, "replica": 1, "controller": 1}

    def __init__(self, address: str, work: Path) -> None:
        super().__init__(address, work)
        self.driver = Driver(spark_driver("tally", address, work), work / "driver.log")

    @property
    def client(self) -> Program:
        return self.driver

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {"worker": self._worker}

    def _worker(self, rng: random.Random) -> None:
        kill_one("a Python worker", self.driver.workers, rng)


class Connect(OverFiles):
    """A Spark Connect server, which is the driver, and a client in another process.

    The query outlives its client; the next client starts the query again under the same checkpoint, which ends the one
    that runs.
    """

    name = "connect"
    kills: ClassVar = {"driver": 1, "client": 1, "worker": 1, "replica": 1, "controller": 1}

    def __init__(self, address: str, work: Path) -> None:
        super().__init__(address, work)
        self._port = free_port()
        self.driver = Driver(spark_driver("connect_server", self._port), work / "server.log")
        remote = f"sc://{HERE}:{self._port}"
        self._client = Program(spark_driver("connect_tally", address, work, remote), work / "client.log")

    @property
    def client(self) -> Program:
        return self._client

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {"client": self._client_dies, "worker": self._worker}

    def start(self) -> None:
        self._serve()
        self.client.start()

    def _begin(self) -> None:
        """Starts another client, and waits until its query is the one that runs."""
        before = self.client.said().count(STARTED)
        self.client.start()

        def started() -> bool:
            self.client.check()
            return self.client.said().count(STARTED) > before

        eventually(started, "the query is started", PATIENCE_S)

    def _serve(self) -> None:
        self.driver.start()

        def serves() -> bool:
            self.driver.check()
            return listening(HERE, self._port)

        eventually(serves, "the server listens", PATIENCE_S)

    def check(self) -> None:
        self.driver.check()
        self.client.check()

    def end(self) -> None:
        self.client.end()
        self.driver.end()

    def revive(self, rng: random.Random) -> None:
        """Restarts the server; the client dies with it, or is left to notice that the new server lacks its query."""
        if STARTED not in self.client.said() or rng.random() < 0.5:
            self.client.kill()
        self._serve()
        assert self.client.popen.wait(PATIENCE_S) != 0, self.client.said()[-6000:]
        self._begin()

    def _client_dies(self, rng: random.Random) -> None:
        self.client.kill()
        self._begin()

    def _worker(self, rng: random.Random) -> None:
        kill_one("a Python worker", self.driver.workers, rng)


class Standalone(OverFiles):
    """A driver with a standalone Spark cluster: a master, and workers that have an executor each."""

    name = "standalone"
    kills: ClassVar = {"driver": 1, "worker": 1, "executor": 1, "standalone worker": 1, "replica": 1, "controller": 1}

    def __init__(self, address: str, work: Path) -> None:
        super().__init__(address, work)
        addresses = {name: Machine("", f"127.0.0.{number}") for number, name in enumerate(WORKERS, 2)}
        self._spark = Spark(Machines(Machine("", HERE), addresses), work / "spark")
        self._started = contextlib.ExitStack()

    @property
    def client(self) -> Program:
        return self.driver

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {"worker": self._worker, "executor": self._executor, "standalone worker": self._standalone_worker}

    def start(self) -> None:
        url = self._started.enter_context(self._spark).url
        self.driver = Driver(spark_driver("tally", self.address, self.work, url), self.work / "driver.log")
        self.driver.start()

    def check(self) -> None:
        self._spark.check()
        self.driver.check()

    def end(self) -> None:
        if self._spark.url:
            self.driver.end()
        left = self._spark.executors()
        self._started.close()
        eventually(lambda: all(map(gone, left)), "executors go with their workers")

    def _python_workers(self) -> list[int]:
        return [worker for executor in self._spark.executors() for worker in python_workers(executor)]

    def _worker(self, rng: random.Random) -> None:
        kill_one("a Python worker", self._python_workers, rng)

    def _executor(self, rng: random.Random) -> None:
        kill_one("an executor", self._spark.executors, rng)

    def _standalone_worker(self, rng: random.Random) -> None:
        name = rng.choice(WORKERS)
        self._spark.kill_worker(name)
        time.sleep(rng.uniform(0, AWAY_S))
        self._spark.start_worker(name)
