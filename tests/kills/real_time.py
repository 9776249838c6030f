"""Spark's real-time mode: rows come by the clock, and each must be applied once although epochs are repeated."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from benchmarks.replay import Given, Log, make_jar
from benchmarks.replay.driver import Query
from benchmarks.replay.operators import Count
from stateflow.testing import LocalCluster
from tests.integration.support import eventually
from tests.kills.harness import PATIENCE_S, SEED, Fault, Way
from tests.kills.programs import Driver

#: partitions and keys of the input
SOURCES, KEYS = 2, 20
EVERY_US = 40_000
#: rows of each source partition: more than any run has time for
ENDLESS = 1 << 40
#: rows of each source partition still to come when the end is set
LAST = 50


class RealTime(Way):
    """A driver with a local master.

    Spark does not retry tasks of such a query: a fault that ends a task ends the query.
    """

    name = "real-time"
    operators = (Count,)
    kills: ClassVar = {"driver": 2, "worker": 1, "replica": 1, "controller": 1}
    moment_s = 5.0  # an epoch

    def __init__(self, address: str, work: Path) -> None:
        super().__init__(address, work)
        jar, checkpoint, out = make_jar(work / "replay"), self.checkpoint, work / "out"
        query = Query(str(jar), address, str(checkpoint), str(out), _now_us(), ENDLESS, EVERY_US)
        self._query = replace(query, partitions=SOURCES, keys=KEYS, epoch="5 seconds", operator="Count")
        self._log = Log(out)
        self.driver = self._driver_of(self._query)

    def _driver_of(self, query: Query) -> Driver:
        return Driver(query.command, self.work / "driver.log")

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {"worker": self._worker}

    def feed(self, done: int) -> None:
        """Adds nothing: rows come by the clock."""

    def finish(self) -> None:
        """Replaces the endless input by one with an end, and waits until all rows are committed.

        A new driver continues the query with that input.
        """
        self.driver.die(random.Random(SEED))
        rows = (_now_us() - self._query.t0_us) // EVERY_US + LAST  # later than any row that was read
        self._query = replace(self._query, rows=rows)
        self.driver = self._driver_of(self._query)
        self.driver.start()

        def done() -> bool:
            self.driver.check()
            last = self.checkpoint / "offsets" / str(self.committed() - 1)
            return last.read_text().splitlines()[-1] == str([rows] * SOURCES)

        eventually(done, "all rows are in epochs that are committed", PATIENCE_S)
        self.driver.end()

    def compare(self, local: LocalCluster) -> None:
        taken = self._log.taken()
        assert len(self._log.rows()) > len(taken), "some were given more than once"
        check_counted(taken, local, self._query.rows)

    def _worker(self, rng: random.Random) -> None:
        kill_workers(self.driver)
        self.driver.start()


def kill_workers(driver: Driver) -> None:
    """Kills Spark's Python workers until one was running a task.

    The query fails then, and the driver ends.
    """

    def ended() -> bool:
        for worker in driver.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        return not driver.runs

    eventually(ended, "its query fails", PATIENCE_S)


def check_counted(taken: list[Given], local: LocalCluster, rows: int) -> None:
    """Checks that each row is taken once, numbered without gaps within its key, and that the state counts all rows.

    ``rows``: of each source partition.
    """
    wanted = {(str(part), str(off)) for part in range(SOURCES) for off in range(rows)}
    assert Counter(each.columns[:2] for each in taken) == Counter(wanted)
    places: dict[str, list[int]] = {}
    for each in taken:
        places.setdefault(each.columns[2], []).append(int(each.columns[4]))
    assert all(sorted(found) == list(range(1, len(found) + 1)) for found in places.values())
    state = {row["key"]: row["value"] for row in local.cluster.read_state("Count", "n").to_pylist()}
    assert state == {key: len(found) for key, found in places.items()}


def _now_us() -> int:
    return round(time.time() * 1e6)
