"""T5: memory and rate of batch DataFrames of growing size, and exactly-once results after kills.

The experiment shows whether memory grows with the DataFrame, and whether the rate stays the same. It also kills a
replica, a Python worker or the driver in the middle of a run, and then checks that state and outputs contain every row
once.

The rows are made by ``spark.range``: a key, a number and a text, 110 bytes in Arrow. The operator keeps a count and a
sum for each key, and outputs a row for every row. Each size has its own replica, driver and Spark session, and begins
with a small run that is not counted. The memory of a process is its high-water mark, as the kernel reports it.

The expected result is known by arithmetic: a key with c rows outputs the counts 1 to c, once each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.operators import CountSum
from benchmarks.record import REPOSITORY, Correctness, Record, Target, ratio
from stateflow.testing import LocalCluster

SIZES, QUICK_SIZES = (5_000_000, 20_000_000, 80_000_000), (500_000, 1_000_000, 2_000_000)
KEYS = 100_000
TEXT_BYTES = 90
ROW_BYTES = 8 + 8 + 4 + TEXT_BYTES
PARTITIONS = 8
TASKS = 2
WARM_UP_ROWS = 200_000
SOURCE, WARM_UP = "backfill", "warm-up"
KILLED = ("replica", "worker", "driver")
WORKER_MB_MAX, REPLICA_MB_MAX = 600.0, 1000.0
FLAT_RATE = 0.9
LOOK_S = 0.2
TIMEOUT_S = 3600.0


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    sizes = QUICK_SIZES if quick else SIZES
    by_size: dict[str, dict[str, Any]] = {}
    checks: list[Correctness] = []
    failures: list[str] = []
    for rows in sizes:
        found = _Backfill(rows).run()
        checks.append(found.correctness)
        failures += found.failures
        by_size[str(rows)] = found.figures
        say(f"  {rows:,} rows: {found.said}")
    kills: dict[str, dict[str, Any]] = {}
    for what in KILLED:
        found = _Backfill(sizes[0], what).run()
        checks.append(found.correctness)
        failures += found.failures
        kills[what] = found.figures
        say(f"  {what} killed: {found.said}")

    def most(process: str) -> float | None:
        peaks = [figures["peak_mb"].get(process) for figures in by_size.values()]
        return max(peak for peak in peaks) if all(peaks) else None  # type: ignore[type-var]

    rates = [figures["rows_per_s"] for figures in by_size.values()]
    flat = ratio(min(rates), max(rates)) if all(rates) else None
    return Record(
        experiment=experiment,
        figures={"by_rows": by_size, "killed": kills},
        targets=[
            Target("peak memory of a worker at all sizes, MB", most("worker"), WORKER_MB_MAX, "at_most"),
            Target("peak memory of the replica at all sizes, MB", most("replica"), REPLICA_MB_MAX, "at_most"),
            Target("slowest/fastest rate of the sizes", flat, FLAT_RATE),
        ],
        correctness=Correctness.of_all(checks),
        settings={
            "quick": quick,
            "rows": sizes,
            "row_bytes": ROW_BYTES,
            "keys": KEYS,
            "partitions": PARTITIONS,
            "tasks": TASKS,
            "operator": "CountSum: one output row for every input row",
            "sink": "an aggregation over all outputs",
        },
        seed=seed,
        failures=failures,
    )


@dataclass(slots=True)
class Found:
    figures: dict[str, Any]
    correctness: Correctness
    failures: list[str] = field(default_factory=list)

    @property
    def said(self) -> str:
        figures = self.figures
        peaks = ", ".join(f"{name} {peak:,.0f} MB" for name, peak in figures["peak_mb"].items())
        rate = "failed" if figures["rows_per_s"] is None else f"{figures['rows_per_s']:,.0f} rows/s"
        return f"{rate}, {peaks}, {self.correctness}"


class _Backfill:
    """One run.

    Args:
        rows: number of rows of the DataFrame.
        killed: process that is killed once in the middle of the run; None: no process is killed.
    """

    def __init__(self, rows: int, killed: str | None = None) -> None:
        self._rows, self._killed = rows, killed
        self._driver: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._peaks: dict[str, float] = {}

    def run(self) -> Found:
        with (
            tempfile.TemporaryDirectory(prefix="stateflow-t5-") as directory,
            LocalCluster(CountSum, sites={"cloud": 1}, partitions=PARTITIONS, checkpoint_interval_s=0) as local,
        ):
            work = Path(directory)
            watcher = threading.Thread(target=self._watch, args=(local,))
            watcher.start()
            try:
                came = self._drive(local, work)
                failures: list[str] = []
            except _Failed as error:
                came, failures = None, [f"{self._rows} rows, {self._killed or 'nothing'} killed: {error}"]
            finally:
                self._over.set()
                watcher.join()
                if self._driver is not None:
                    _end(self._driver)
            correctness = Correctness(None, None, None, None) if came is None else self._checked(local, came)
        rate = None if came is None else self._rows / came["seconds"]
        return Found({"rows_per_s": rate, "peak_mb": self._peaks, "outputs": came}, correctness, failures)

    # -- the driver ---------------------------------------------------------------------------------------

    def _drive(self, local: LocalCluster, work: Path) -> dict[str, Any]:
        result = work / "result.json"
        self._start(local, work, result)
        if self._killed is not None:
            self._wait_until(lambda: self._half_way(local), "half of the rows are in")
            self._kill(local, work, result)
        self._wait_until(lambda: self._process.poll() is not None, "the driver is done")
        if not result.exists():
            said = (work / "log").read_text(errors="replace").splitlines()
            raise _Failed(" | ".join(line for line in said[-5:] if line.strip()))
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._driver is not None
        return self._driver

    def _start(self, local: LocalCluster, work: Path, result: Path) -> None:
        arguments = {"address": local.address, "rows": self._rows, "work": str(work), "result": str(result)}
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        }
        with (work / "log").open("ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.backfill_worker", json.dumps(arguments)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=REPOSITORY,
                start_new_session=True,
            )  # fmt: skip

    def _half_way(self, local: LocalCluster) -> bool:
        """Tells whether the partitions have received half of the pieces that the run sends."""
        from stateflow.spark.task import PIECE_BYTES

        pieces = self._rows * ROW_BYTES / TASKS / PIECE_BYTES
        reached = [
            source.batch for source in local.cluster.sources(CountSum.__name__) if source.source.endswith(SOURCE)
        ]
        return bool(reached) and reached[0] + 1 >= pieces / 2

    def _kill(self, local: LocalCluster, work: Path, result: Path) -> None:
        if result.exists():
            raise _Failed("the run finished before anything was killed")
        if self._killed == "replica":
            local.processes["cloud-0"].kill()
            local.restart("cloud-0")
        elif self._killed == "worker":
            os.kill(_workers(self._process.pid)[0], signal.SIGKILL)
        else:
            _end(self._process)
            self._start(local, work, result)

    def _wait_until(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not happened():
            if time.monotonic() > deadline:
                raise _Failed(f"{what}: not within {TIMEOUT_S:,.0f} s")
            if self._process.poll() is not None:
                return
            time.sleep(LOOK_S)

    # -- memory -------------------------------------------------------------------------------------------

    def _watch(self, local: LocalCluster) -> None:
        while not self._over.wait(LOOK_S):
            process = self._driver
            seen = {"replica": [local.processes["cloud-0"].pid]}
            if process is not None and process.poll() is None:
                seen |= {"worker": _workers(process.pid), "JVM": _children(process.pid)}
            for name, pids in seen.items():
                for pid in pids:
                    self._peaks[name] = max(self._peaks.get(name, 0.0), _peak_mb(pid))

    # -- correctness --------------------------------------------------------------------------------------

    def _checked(self, local: LocalCluster, came: dict[str, Any]) -> Correctness:
        counts = np.bincount(np.arange(self._rows, dtype=np.int64) % KEYS, minlength=KEYS).astype(object)
        sums = {"rows": self._rows, "n": int((counts * (counts + 1) // 2).sum())}
        sums["n_squared"] = int((counts * (counts + 1) * (2 * counts + 1) // 6).sum())
        outputs = all(came[name] == wanted for name, wanted in sums.items())
        table = local.cluster.read_state(CountSum.__name__, "figures")
        stored = dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
        values = np.bincount(np.arange(self._rows) % KEYS, (np.arange(self._rows) % 8) / 4, minlength=KEYS)
        wanted = {key: (int(counts[key]), float(values[key])) for key in range(KEYS) if counts[key]}
        equal = {key: tuple(value.values()) for key, value in stored.items()} == wanted
        lost, more = max(0, self._rows - came["rows"]), max(0, came["rows"] - self._rows)
        return Correctness(lost, more, 0, equal and outputs)


class _Failed(Exception):
    pass


def _children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue  # the process has ended
            if int(parent) == pid:
                found.append(int(entry.name))
    return found


def _workers(driver: int) -> list[int]:
    """Returns the process ids of Spark's Python workers, which are grandchildren of the driver's JVM."""
    daemons = [daemon for jvm in _children(driver) for daemon in _children(jvm)]
    return [worker for daemon in daemons for worker in _children(daemon)]


def _peak_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) * 1024 / 1e6 if found else 0.0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a driver and its process group, in which the driver's JVM is."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
