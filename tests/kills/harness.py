"""A pipeline, what kills its processes, and what moves its partitions meanwhile."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from stateflow import Operator
from stateflow.errors import StateflowError
from stateflow.testing import LocalCluster
from tests.integration.processes import gone
from tests.integration.support import eventually
from tests.kills.programs import Driver

SEED = 20130101
PARTITIONS = 8
SITES = {"cloud": 1, "edge": 1}
REPLICAS = ("cloud-0", "edge-0")
AWAY_S = 0.7  # at most, before what was killed is started again
PATIENCE_S = 240.0
MOVE_EVERY_S = 0.25

Fault = Callable[[random.Random], None]


class Way(ABC):
    """A query, and how Spark runs it.

    ``operators``: those it needs; partitions of the first are moved. ``kills``: how many of each kind in a round, of
    the cluster's processes, too. ``moment_s``: a kill comes at any moment of so much of the query's work.
    """

    name: ClassVar[str]
    operators: ClassVar[tuple[type[Operator], ...]]
    kills: ClassVar[Mapping[str, int]]
    moment_s: ClassVar[float]
    #: where Spark plans and commits batches
    driver: Driver

    def __init__(self, address: str, work: Path) -> None:
        """Args: work: an empty directory."""
        self.address, self.work = address, work

    @property
    @abstractmethod
    def faults(self) -> Mapping[str, Fault]:
        """By kind; each kills one of Spark's processes other than the driver, and has the query go on."""

    # where the driver is all there is

    def start(self) -> None:
        """Spark, and the query."""
        self.driver.start()

    def check(self) -> None:
        """Raises AssertionError where something that nobody killed has ended."""
        self.driver.check()

    def revive(self, rng: random.Random) -> None:
        """Has the query go on when the driver is dead."""
        self.driver.start()

    def end(self) -> None:
        """Of all its processes, whatever they are at."""
        self.driver.end()

    @abstractmethod
    def feed(self, done: int) -> None:
        """Some more input than is worked off. Args: done: committed batches."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until all input is worked off, and ends the query."""

    @abstractmethod
    def compare(self, local: LocalCluster) -> None:
        """Sink and states with what has to be there. Raises AssertionError."""

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint"

    def committed(self) -> int:
        """Batches."""
        commits = self.checkpoint / "commits"
        numbers = [int(path.name) for path in commits.iterdir() if path.name.isdigit()] if commits.is_dir() else []
        return max(numbers, default=-1) + 1  # not how many there are: Spark removes old ones


class Mover(threading.Thread):
    """Moves some partitions at a time to the one or the other replica until it is stopped. A move may fail; whether
    what it leaves is right, others ask."""

    def __init__(self, local: LocalCluster, operator: str) -> None:
        super().__init__(daemon=True)
        self.local, self.operator = local, operator
        self.completed: Counter[str] = Counter()  # partitions that came to each replica
        self.failed = 0
        self.error: BaseException | None = None
        self._stop_now = threading.Event()
        self._rng = random.Random(SEED)

    def run(self) -> None:
        try:
            while not self._stop_now.wait(MOVE_EVERY_S):
                self._move()
        except BaseException as error:  # noqa: BLE001 - raised again by stop()
            self.error = error

    def _move(self) -> None:
        to = self._rng.choice(REPLICAS)
        partitions = self._rng.sample(range(PARTITIONS), self._rng.randint(1, 4))
        try:
            report = self.local.migrate(self.operator, partitions, to).wait()
        except StateflowError:  # it is there already, or somebody was just killed
            self.failed += 1
            return
        done = [move for move in report.moves if move.state == "COMPLETED"]
        self.completed[to] += len(done)
        self.failed += len(report.moves) - len(done)

    def stop(self) -> None:
        self._stop_now.set()
        self.join(90)
        if self.error:
            raise self.error
        assert not self.is_alive(), "a move hangs"


class Run:
    """What is done to a query."""

    def __init__(self, local: LocalCluster, way: Way) -> None:
        self.local, self.way = local, way
        self.rng = random.Random(SEED)
        self.started = time.monotonic()
        self.kills: Counter[str] = Counter()
        self._faults: dict[str, Fault] = {
            "driver": self._driver,
            "replica": self._replica,
            "controller": self._controller,
            **way.faults,
        }

    def feed(self) -> int:
        """Committed batches; there is always more to do than those."""
        done = self.way.committed()
        self.way.feed(done)
        return done

    def progress(self, batches: int = 1) -> None:
        goal = self.feed() + batches

        def there() -> bool:
            self.way.check()
            return self.feed() >= goal

        eventually(there, f"{batches} more batches", PATIENCE_S)

    def strike_early(self) -> None:
        """Kills the driver when it has written aside, and not yet renamed, what is first in the log of offsets: Spark
        refuses to start beside such a file. What else it may leave is up to chance."""
        driver, offsets = self.way.driver, self.way.checkpoint / "offsets"
        jvm = eventually(driver.jvm, "a JVM", PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while not any(offsets.glob("*0*")):  # as quickly as one can, for it is there for milliseconds
            assert time.monotonic() < deadline, f"no batch: {driver.said()[-6000:]}"
            time.sleep(0.001)
        os.kill(jvm, signal.SIGKILL)
        driver.kill()
        eventually(lambda: gone(jvm), "the JVM is gone")
        print("offsets that are left:", *sorted(each.name for each in offsets.iterdir()), flush=True)
        self.way.revive(self.rng)
        self._note("driver")

    def strike(self, kind: str) -> None:
        self.progress()
        self._strike(kind)
        self.progress()

    def _strike(self, kind: str) -> None:
        time.sleep(self.rng.uniform(0, self.way.moment_s))
        self.way.check()
        self._faults[kind](self.rng)
        self._note(kind)

    def _note(self, kind: str) -> None:
        self.kills[kind] += 1
        print(f"{self.seconds:6.1f} s: {kind} killed, {self.way.committed()} batches", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def told(self, mover: Mover) -> str:
        """In a line."""
        kills = ", ".join(f"{times} {kind}" for kind, times in sorted(self.kills.items()))
        return (
            f"{self.way.name}: {self.seconds:.0f} s, {self.way.committed()} batches, {self.kills.total()} kills "
            f"({kills}), {mover.completed.total()} partitions moved, {mover.failed} not"
        )

    def _driver(self, rng: random.Random) -> None:
        self.way.driver.die(rng)
        self.way.revive(rng)

    def _replica(self, rng: random.Random) -> None:
        self._restarted(rng.choice(REPLICAS))

    def _controller(self, rng: random.Random) -> None:
        self._restarted("controller")

    def _restarted(self, name: str) -> None:
        pid = self.local.processes[name].pid
        self.local.kill(name)
        assert gone(pid)
        time.sleep(self.rng.uniform(0, AWAY_S))
        self.local.restart(name)
