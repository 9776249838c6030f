"""ROLLING: every replica and both controllers are restarted one after another while a Spark query runs.

The query gets a new file every ``EVERY_S`` seconds. The operator counts the rows of each key and emits each count, so
lost and duplicated rows are visible. A micro-batch has failed if Spark gave it up or began it again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.load import summary
from benchmarks.operators import Ballast
from benchmarks.record import Correctness, Record, Target
from stateflow.client import Cluster
from stateflow.errors import StateflowError
from stateflow.local.process import Process
from stateflow.testing import LocalCluster

OPERATOR, SITE = "Ballast", "edge"
AGENTS = ("gw-a", "gw-b")
CONTROLLERS, PARTITIONS, KEYS, ROWS = 2, 16, 500, 1000
EVERY_S, BEFORE_S, AFTER_S = 0.5, 5.0, 3.0
TIMEOUT_S = 300.0


class Sites(LocalCluster):
    """A cluster to which agents can be added. Its own replica has no partitions; the cluster needs it to start."""

    def agent(self, name: str) -> Process:
        where = ["--site", SITE, "--name", name, "--controller", self.address, "--data-dir", str(self.data_dir / name)]
        agent = self._process(name, ["agent", *where, "--cores", "64"])
        agent.start()
        agent.wait_ready()
        return agent


class Input(threading.Thread):
    """Writes a file every ``EVERY_S`` seconds, until it is stopped."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self._directory, self._over = directory, threading.Event()
        self.files = 0
        self.counts: Counter[int] = Counter()

    def run(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        while not self._over.wait(EVERY_S):
            keys = [(self.files * ROWS + n) % KEYS for n in range(ROWS)]
            hidden = self._directory / f".{self.files:06d}.parquet"
            columns = {"k": keys, "v": [1.0] * ROWS, "size": [0] * ROWS}
            pq.write_table(pa.table(columns), hidden)
            os.utime(hidden, (1_388_534_400 + self.files,) * 2)  # the file source orders by modification time
            hidden.rename(self._directory / hidden.name[1:])
            self.counts.update(keys)
            self.files += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


def run(experiment: str, *, quick: bool, seed: int) -> Record:
    figures: dict[str, Any] = {"replicas": 2 * _each(quick), "controllers": CONTROLLERS}
    failures: list[str] = []
    parts: list[Correctness] = []
    try:
        parts.append(_run(_each(quick), figures))
    except (StateflowError, TimeoutError) as error:
        failures.append(str(error))
    return Record(
        experiment=experiment,
        figures=figures,
        targets=[Target("micro-batches that failed", figures.get("failed_batches"), 0, "at_most")],
        correctness=Correctness.of_all(parts),
        settings={"quick": quick, "rows_per_file": ROWS, "file_every_s": EVERY_S, "partitions": PARTITIONS},
        seed=seed,
        failures=failures,
    )


def _each(quick: bool) -> int:
    """Returns the number of replicas that each agent starts."""
    return 1 if quick else 4


def _run(each: int, figures: dict[str, Any]) -> Correctness:
    """Runs the experiment, and adds its measurements to ``figures``. Raises StateflowError, TimeoutError."""
    with (
        tempfile.TemporaryDirectory(prefix="stateflow-bench-") as folder,
        _cluster(Path(folder) / "cluster", each) as local,
    ):
        cluster = Cluster(local.address)
        (Path(folder) / "input").mkdir()
        writing = Input(Path(folder) / "input")
        from stateflow.spark import local_session

        with query_of(local_session("rolling"), Path(folder), local.address) as query:
            writing.start()
            query.read_all(1)
            time.sleep(BEFORE_S)
            query.mark()
            with _noting_its_end(query, figures):
                _restart_all(cluster, local, figures)
                writing.stop()
                query.read_all(writing.files)
            figures |= query.figures()
        state = {r["key"]: r["value"] for r in cluster.read_state(OPERATOR, "figures").to_pylist()}
        counted = Counter({key: next(iter(value.values())) for key, value in state.items()})
        return query.correctness(writing.counts, counted)


def _restart_all(cluster: Cluster, local: Sites, figures: dict[str, Any]) -> None:
    began = time.monotonic()
    rolled = cluster.restart_all().wait()
    if rolled.state != "DONE":
        raise TimeoutError(f"the restarts ended {rolled.state}: {[n.error for n in rolled.nodes if n.error]}")
    figures["replicas_s"] = round(time.monotonic() - began, 2)
    figures["restarts_ms"] = [node.ms for node in rolled.nodes]
    for name in reversed(local.controllers):
        time.sleep(AFTER_S)
        local.kill(name)
        local.restart(name)
    figures["all_s"] = round(time.monotonic() - began, 2)
    print(f"  restarted within {figures['all_s']} s", file=sys.stderr, flush=True)
    time.sleep(AFTER_S)


@contextmanager
def _noting_its_end(query: Query, figures: dict[str, Any]) -> Iterator[None]:
    """Adds the number of failed micro-batches to ``figures`` if the block fails because the query has ended.

    A failed micro-batch ends the query, so the block then raises before the other figures exist.
    """
    try:
        yield
    except Exception:
        if query.has_failed():
            figures["failed_batches"] = query.failed_batches()
        raise


@contextmanager
def _cluster(folder: Path, each: int) -> Iterator[Sites]:
    os.environ.setdefault("STATEFLOW_CONTROLLER_SPAWN_DISK_BYTES", str(1 << 20))
    with Sites(sites={"hand": 1}, data_dir=folder, checkpoint_interval_s=0, controllers=CONTROLLERS) as local:
        for name in AGENTS:
            local.agent(name)
        cluster = Cluster(local.address)
        until = time.monotonic() + TIMEOUT_S
        while len(cluster.agents()) < len(AGENTS):
            if time.monotonic() > until:
                raise TimeoutError("the agents did not register")
            time.sleep(0.1)
        for name in AGENTS:
            cluster.spawn(name, count=each).wait()
        cluster.deploy(Ballast, PARTITIONS, sites=[SITE])
        yield local


class Query:
    """A running query, and its measurements.

    Args:
        outputs: number of times that each output (key, count) was taken.
        begun: number of the micro-batch for each time that one was begun.
        ended: (number of the micro-batch, time) for each time that outputs were taken.
    """

    def __init__(
        self, query: Any, outputs: Counter[tuple[int, int]], begun: list[int], ended: list[tuple[int, float]]
    ) -> None:
        self._query, self._outputs, self._begun, self._ended = query, outputs, begun, ended
        self._progress: dict[int, dict[str, Any]] = {}
        self._first = -1

    def _look(self) -> None:
        for each in self._query.recentProgress:
            self._progress[each["batchId"]] = each

    def progress(self) -> dict[int, dict[str, Any]]:
        """Returns number of the micro-batch → progress that Spark has reported."""
        self._look()
        return self._progress

    def ended(self) -> dict[int, float]:
        """Returns number of the micro-batch → time at which its outputs were first taken, in seconds since 1970."""
        first: dict[int, float] = {}
        for number, at in list(self._ended):
            first.setdefault(number, at)
        return first

    def mark(self) -> None:
        """Excludes all micro-batches so far from the figures, because the first ones include Spark's start."""
        self._look()
        self._first = max(self._progress)

    def read_all(self, files: int) -> None:
        until = time.monotonic() + TIMEOUT_S
        while sum(each["numInputRows"] for each in self._progress.values()) < files * ROWS:
            if self.has_failed() or time.monotonic() > until:
                raise TimeoutError(f"the query did not read all rows: {self._query.exception()}")
            time.sleep(0.2)
            self._look()

    def has_failed(self) -> bool:
        """True if a micro-batch was given up, which ends the query."""
        return self._query.exception() is not None

    def failed_batches(self) -> int:
        """Returns the number of micro-batches that were given up or begun again."""
        return len(self._begun) - len(set(self._begun)) + self.has_failed()

    def figures(self) -> dict[str, Any]:
        seen = [each for number, each in self._progress.items() if number > self._first and each["numInputRows"]]
        took = [each["durationMs"]["triggerExecution"] for each in seen]
        return {
            "batches": len(took),
            "failed_batches": self.failed_batches(),
            "batch_ms": summary([float(ms) for ms in took]),
        }

    def correctness(self, sent: Counter[int], counted: Counter[int]) -> Correctness:
        wanted = {(key, n) for key, count in sent.items() for n in range(1, count + 1)}
        lost = len(wanted - self._outputs.keys())
        extra = sum(count - (each in wanted) for each, count in self._outputs.items())
        return Correctness(lost=lost, duplicated=extra, late=0, state_equal=counted == sent)


@contextmanager
def query_of(session: Any, folder: Path, cluster: Any) -> Iterator[Query]:
    """Runs a query over the files that :class:`Input` writes while the block runs. Then stops query and session."""
    from stateflow.spark import apply_operator

    outputs: Counter[tuple[int, int]] = Counter()
    begun: list[int] = []
    ended: list[tuple[int, float]] = []

    def keep(frame: Any, number: int) -> None:
        begun.append(number)  # also if it fails below
        outputs.update((row.k, row.n) for row in frame.collect())
        ended.append((number, time.time()))

    try:
        rows = session.readStream.schema("k long, v double, size long").option("maxFilesPerTrigger", 20)
        frame = apply_operator(rows.parquet(str(folder / "input")), Ballast, cluster=cluster, tasks=1)
        query = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(folder / "checkpoint")).start()
        try:
            yield Query(query, outputs, begun, ended)
        finally:
            query.stop()
    finally:
        session.stop()
