"""A Spark pipeline of real processes, killed again and again: state and sink are those of a run nobody disturbed.

What is expected is computed from the input files, what came from the files that the sink's log names; Spark has no part
in either.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateflow.errors import StateflowError
from stateflow.testing import LocalCluster
from tests.integration.spark_drivers import second
from tests.integration.spark_operators import LAGS, Laggard, Tally
from tests.integration.support import check_owners, eventually, read, settled, wait_alive

#: five kills each; four are twenty
ROUNDS = int(os.environ.get("STATEFLOW_TEST_KILL_ROUNDS", "0"))
pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.skipif(not ROUNDS, reason="minutes long: run by `make kills`"),
]

SEED = 20130101
PARTITIONS = 8
REPLICAS = ("cloud-0", "edge-0")
KILLS = {"driver": ROUNDS, "worker": 2 * ROUNDS, "replica": ROUNDS, "controller": ROUNDS}
FILE_ROWS = 400
AHEAD = 4  # files that wait for the query
AWAY_S = 0.7  # at most, before what was killed is started again
PATIENCE_S = 240.0
MOVE_EVERY_S = 0.25
MOMENT_S = 0.4  # a kill comes at any moment of so much of the query's work
REPOSITORY = Path(__file__).resolve().parents[2]
FIRST_FILE_S = 1_388_534_400


# -- the input, and what is to come of it ---------------------------------------------------------------------


def write_file(directory: Path, number: int, rows: list[dict[str, Any]]) -> None:
    schema = pa.schema(
        [("seq", pa.int64()), ("k", pa.string()), ("kind", pa.string()), ("v", pa.int64()), ("pad", pa.string())]
    )
    hidden = directory / f".{number:05d}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema), hidden)
    os.utime(hidden, (FIRST_FILE_S + number, FIRST_FILE_S + number))  # the file source goes by these
    hidden.rename(directory / f"{number:05d}.parquet")


def some_rows(number: int, count: int = FILE_ROWS) -> list[dict[str, Any]]:
    """Wide ones: what Spark hands a worker at once, 64 KiB, is a part of a task's rows only."""
    rng = random.Random(SEED + number)
    return [
        {
            "seq": number * count + i,
            "k": f"k{rng.randrange(40)}",
            "kind": rng.choice("abc"),
            "v": rng.randrange(-40, 60),
            "pad": "x" * 800,
        }
        for i in range(count)
    ]


class Expected:
    """One thread with dictionaries, over the input files in their order."""

    def __init__(self, directory: Path) -> None:
        self.n: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self.outputs: list[tuple[int, str, int, int]] = []
        for file in sorted(directory.glob("[0-9]*.parquet")):
            for row in pq.read_table(file).to_pylist():
                key, v = row["k"], row["v"]
                self.n[key] += 1
                self.total[key] += v
                self.by_kind[key, row["kind"]] += v
                self.outputs.append((row["seq"], key, self.n[key], self.total[key]))

    def check(self, local: LocalCluster, operator: str, output: Path) -> None:
        came = sink_rows(output)
        assert len(came) == len(self.outputs)
        assert came == sorted(self.outputs)
        wanted = {(key, None): n for key, n in self.n.items()}
        assert read(local.cluster, operator, "n") == wanted
        assert read(local.cluster, operator, "total") == {(key, None): total for key, total in self.total.items()}


def sink_rows(output: Path) -> list[tuple[int, str, int, int]]:
    """Of the files in the sink's log: what a killed batch left in the directory beside them is not output."""
    log = output / "_spark_metadata"
    numbers = {int(path.name.partition(".")[0]): path for path in log.iterdir() if path.name[0].isdigit()}
    compacted = {number for number, path in numbers.items() if path.name.endswith(".compact")}
    files: list[Path] = []
    for number in range(max(compacted, default=0), max(numbers) + 1):
        for line in numbers[number].read_text().splitlines()[1:]:
            files.append(Path(unquote(urlparse(json.loads(line)["path"]).path)))
    assert len(set(files)) == len(files)
    return sorted(tuple(row.values()) for file in files for row in pq.ParquetFile(file).read().to_pylist())


# -- processes ------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # ended meanwhile
            if int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Driver:
    """A process of ``spark_drivers``, and those it started, known by their parents: its JVM, Spark's Python workers."""

    def __init__(self, what: str, address: str, work: Path) -> None:
        self._arguments = [what, address, str(work)]
        self._log = work / "driver.log"
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.spark_drivers", *self._arguments],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},  # executors begin elsewhere
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    @property
    def popen(self) -> subprocess.Popen[bytes]:
        assert self._popen is not None
        return self._popen

    def check(self) -> None:
        assert self.popen.poll() is None, f"the driver ended by itself: {self.said()}"

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def jvm(self) -> int | None:
        return next((pid for pid in children(self.popen.pid) if "org.apache.spark" in command(pid)), None)

    def workers(self) -> list[int]:
        jvm = self.jvm()
        daemons = [] if jvm is None else [pid for pid in children(jvm) if "pyspark.daemon" in command(pid)]
        return [worker for daemon in daemons for worker in children(daemon)]

    def kill(self, rng: random.Random) -> None:
        """The JVM and the Python process, either first, and both before anything is started in their place. Workers
        are left to find out for themselves."""
        jvm = self.jvm()
        assert jvm is not None
        first, second = rng.sample([jvm, self.popen.pid], 2)
        os.kill(first, signal.SIGKILL)
        time.sleep(rng.choice([0.0, 0.1]))
        if not (gone(second) and second != self.popen.pid):
            os.kill(second, signal.SIGKILL)
        self.popen.wait()
        eventually(lambda: gone(jvm), "the JVM is gone")

    def end(self) -> None:
        if self._popen is not None and self._popen.poll() is None:
            jvm = self.jvm()
            self._popen.kill()
            self._popen.wait()
            if jvm is not None:
                eventually(lambda: gone(jvm), "the JVM goes with its driver")  # its input has ended


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "input").mkdir()
    return tmp_path


@pytest.fixture
def local() -> Iterator[LocalCluster]:
    with LocalCluster(Tally, Laggard, sites={"cloud": 1, "edge": 1}, partitions=PARTITIONS) as running:
        yield running


# -- faults ---------------------------------------------------------------------------------------------------


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
    """The query with its input, and what is done to it."""

    def __init__(self, local: LocalCluster, work: Path) -> None:
        self.local, self.work = local, work
        self.driver = Driver("tally", local.address, work)
        self.rng = random.Random(SEED)
        self.started = time.monotonic()
        self.files = 0
        self.kills: Counter[str] = Counter()

    def committed(self) -> int:
        commits = self.work / "checkpoint" / "commits"
        numbers = [int(path.name) for path in commits.iterdir() if path.name.isdigit()] if commits.is_dir() else []
        return max(numbers, default=-1) + 1  # not how many there are: Spark removes old ones

    def feed(self) -> int:
        """Committed batches; always some more files than those."""
        done = self.committed()
        while self.files < done + AHEAD:
            write_file(self.work / "input", self.files, some_rows(self.files))
            self.files += 1
        return done

    def progress(self, batches: int = 1) -> None:
        goal = self.feed() + batches

        def there() -> bool:
            self.driver.check()
            return self.feed() >= goal

        eventually(there, f"{batches} more batches", PATIENCE_S)

    def strike(self, kind: str) -> None:
        self.progress()
        time.sleep(self.rng.uniform(0, MOMENT_S))
        {"driver": self._driver, "worker": self._worker, "replica": self._replica, "controller": self._controller}[
            kind
        ]()
        self.kills[kind] += 1
        print(f"{time.monotonic() - self.started:6.1f} s: {kind} killed, {self.committed()} batches", flush=True)
        self.progress()

    def _driver(self) -> None:
        self.driver.check()
        self.driver.kill(self.rng)
        self.driver.start()

    def _worker(self) -> None:
        victim = self.rng.choice(eventually(self.driver.workers, "a Python worker"))
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: gone(victim), "the worker is gone")

    def _replica(self) -> None:
        self._restarted(self.rng.choice(REPLICAS))

    def _controller(self) -> None:
        self._restarted("controller")

    def _restarted(self, name: str) -> None:
        pid = self.local.processes[name].pid
        self.local.kill(name)
        assert gone(pid)
        time.sleep(self.rng.uniform(0, AWAY_S))
        self.local.restart(name)

    def finish(self) -> None:
        (self.work / "counted").write_text(str(self.files))
        (self.work / "counted").rename(self.work / "enough")
        assert self.driver.popen.wait(PATIENCE_S) == 0, self.driver.said()


@pytest.mark.timeout(300 + 300 * ROUNDS)
def test_a_pipeline_whose_every_process_is_killed_while_partitions_move(local: LocalCluster, work: Path) -> None:
    kinds = [kind for kind, times in KILLS.items() for _ in range(times)]
    random.Random(SEED).shuffle(kinds)
    run, mover = Run(local, work), Mover(local, "Tally")
    run.feed()
    run.driver.start()
    try:
        run.progress(2)
        mover.start()
        for kind in kinds:
            run.strike(kind)
        mover.stop()
        run.finish()
    finally:
        run.driver.end()
    assert run.kills == KILLS
    assert run.committed() == run.files >= 2 * len(kinds), "the query went on before and after every kill"
    moved = min(mover.completed[name] for name in REPLICAS)
    assert moved >= 2 * ROUNDS, f"{mover.completed} moved, {mover.failed} did not"
    wait_alive(local, *REPLICAS)
    eventually(lambda: settled(local), "the last move ends")
    check_owners(local)
    expected = Expected(work / "input")
    expected.check(local, "Tally", work / "output")
    assert read(local.cluster, "Tally", "by_kind") == dict(expected.by_kind)
    assert set(read(local.cluster, "Tally", "kinds")) == set(expected.by_kind)


# -- speculation ----------------------------------------------------------------------------------------------


def told(events: Path) -> Iterator[dict[str, Any]]:
    """Spark's own event log."""
    for file in events.rglob("events_*"):
        yield from map(json.loads, file.read_text().splitlines())


def attempts_of(events: Path) -> list[str]:
    """What executors and attempts came to, for whoever has to find out why there were too few."""
    lines = []
    for event in told(events):
        name = event["Event"].removeprefix("SparkListener")
        task = event.get("Task Info", {})
        which = f"stage {event.get('Stage ID')} task {task.get('Index')} attempt {task.get('Attempt')}"
        if name in ("ExecutorAdded", "ExecutorRemoved"):
            lines.append(f"{event['Timestamp']} {name} {event['Executor ID']} {event.get('Removed Reason', '')}")
        elif name == "TaskStart":
            lines.append(f"{task['Launch Time']} {which} on {task['Executor ID']}, speculative: {task['Speculative']}")
        elif name == "TaskEnd" and event["Task End Reason"]["Reason"] != "Success":
            lines.append(f"{task['Finish Time']} {which} ended: {str(event['Task End Reason'])[:300]}")
    return lines


@pytest.mark.timeout(600)
def test_speculative_attempts_apply_once(local: LocalCluster, work: Path) -> None:
    """One attempt is slow within the operator, so that the second finds the first's batch under way at the replica;
    another has its outputs and is slow with them, so that the second finds the batch applied."""
    for number in range(4):
        rows = some_rows(number, 60)
        if number == 2:
            rows[30] |= {"v": LAGS, "pad": str(second(work, 1))}
        write_file(work / "input", number, rows)
    driver = Driver("speculate", local.address, work)
    driver.start()
    try:
        assert driver.popen.wait(PATIENCE_S) == 0, driver.said()
    finally:
        driver.end()
    alone = [number for number in range(2) if not second(work, number).exists()]
    assert not alone, "\n".join([f"lagging attempts were left alone: {alone}", *attempts_of(work / "events")])
    starts = [event["Task Info"] for event in told(work / "events") if event["Event"] == "SparkListenerTaskStart"]
    speculative = [start for start in starts if start["Speculative"]]
    assert len(speculative) >= 2, Counter(start["Speculative"] for start in starts)
    Expected(work / "input").check(local, "Laggard", work / "output")
