"""A pipeline, the kills of its processes, and the moves of its partitions meanwhile."""

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
AWAY_S = 0.7  # at most, before a killed process is started again
PATIENCE_S = 240.0
MOVE_EVERY_S = 0.25

Fault = Callable[[random.Random], None]


class Way(ABC):
    """A query, and how Spark runs it.

    ``operators``: those it needs; partitions of the first are moved. ``kills``: how many of each kind in a round, also
    of the cluster's processes. ``moment_s``: a kill comes at a random moment within so many seconds.
    """

    name: ClassVar[str]
    operators: ClassVar[tuple[type[Operator], ...]]
    kills: ClassVar[Mapping[str, int]]
    moment_s: ClassVar[float]
    #: process in which Spark plans and commits batches
    driver: Driver

    def __init__(self, address: str, work: Path) -> None:
        """Sets the way up. ``work``: an empty directory."""
        self.address, self.work = address, work

    @property
    @abstractmethod
    def faults(self) -> Mapping[str, Fault]:
        """Faults by kind; each kills one of Spark's processes other than the driver, and makes the query go on."""

    # defaults for a way whose only program is the driver

    def start(self) -> None:
        """Starts Spark and the query."""
        self.driver.start()

    def check(self) -> None:
        """Checks that the programs still run. Raises AssertionError if one ended without being killed."""
        self.driver.check()

    def revive(self, rng: random.Random) -> None:
        """Makes the query go on after the driver was killed."""
        self.driver.start()

    def end(self) -> None:
        """Ends all its processes, in any state."""
        self.driver.end()

    @abstractmethod
    def feed(self, done: int) -> None:
        """Adds input beyond what is processed. ``done``: committed batches."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until all input is processed, and ends the query."""

    @abstractmethod
    def compare(self, local: LocalCluster) -> None:
        """Compares sink and states with the expected ones. Raises AssertionError."""

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint"

    def committed(self) -> int:
        """Returns the number of committed batches."""
        commits = self.checkpoint / "commits"
        numbers = [int(path.name) for path in commits.iterdir() if path.name.isdigit()] if commits.is_dir() else []
        return max(numbers, default=-1) + 1  # counting the files would miss old ones, which Spark removes


class Mover(threading.Thread):
    """Moves some partitions at a time to one or the other replica until it is stopped.

    A move may fail; other checks tell whether its result is right.
    """

    def __init__(self, local: LocalCluster, operator: str) -> None:
        super().__init__(daemon=True)
        self.local, self.operator = local, operator
        self.completed: Counter[str] = Counter()  # partitions that moved to each replica
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
        except StateflowError:  # the partitions are there already, or a process was just killed
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
    """A query with its kills and moves."""

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
        """Adds input, so that there is always more than the committed batches. Returns the number of those."""
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
        """Kills the driver between writing and renaming the temporary file of the first offset log entry.

        Spark refuses to start beside such a file. What else is left is up to chance.
        """
        driver, offsets = self.way.driver, self.way.checkpoint / "offsets"
        jvm = eventually(driver.jvm, "a JVM", PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while not any(offsets.glob("*0*")):  # polls quickly: the file exists for milliseconds
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
        """Summarises the run in a line."""
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
