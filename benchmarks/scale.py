"""T3: scaling with replicas, workers, keys and state.

* ``replicas``: rows a second with 1 and 2 replicas, of an operator for records and of a vectorised one.
* ``workers``: rows a second of one replica with 1 and 2 workers. The operator uses 50 µs of CPU time for each row.
* ``keys``: rows a second, resident memory and stored bytes for a thousand to ten million keys.
* ``state``: the same figures for 10 MB to 4 GB of state with incompressible values.

Batches are cut and encoded before the clock starts, so the senders need little CPU time. Replicas are real processes.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.operators import BUSY_US, Busy, CountSum, CountSumColumns
from benchmarks.record import Correctness, Record, Target, ratio, spread
from benchmarks.state_large import VALUE_BYTES, Archive
from stateflow import Operator
from stateflow.operator.arrow import read_batch
from stateflow.operator.operator import output_schema
from stateflow.partition.positions import Batch
from stateflow.partitioner import partition_of
from stateflow.router import Router
from stateflow.rpc.apply import BatchRows
from stateflow.testing import LocalCluster

PARTS = ("replicas", "workers", "keys", "state")
PARTITIONS = 8
SENDERS = 2
BATCH_ROWS = 20_000
PREPARED = 8  # number of batches of a sender, which it sends over and over
REPLICA_COUNTS = (1, 2)
WORKER_COUNTS = (1, 2)
WORKERS_BOUND = 1.8
REPLICA_KEYS = 100_000
KEYS, KEYS_QUICK = (10**3, 10**4, 10**5, 10**6, 10**7), (10**3, 10**4, 10**5)
STATE_MB, STATE_QUICK_MB = (10, 100, 1_000, 4_000), (10, 100)
MB = 1_000_000


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    if unknown := sorted(set(only or ()) - set(PARTS)):
        raise SystemExit(f"invalid_argument: no part {unknown[0]!r}: choose {', '.join(PARTS)}")
    seconds, runs = (3.0, 1) if quick else (20.0, 5)
    figures: dict[str, Any] = {}
    targets: list[Target] = []
    checked: list[Correctness] = []
    for part in PARTS:
        if not only or part in only:
            found, aims = globals()[f"measure_{part}"](quick, seed, seconds, runs, checked)
            figures[part] = found
            targets += aims
    return Record(
        experiment=experiment,
        figures=figures,
        targets=targets,
        correctness=Correctness.of_all(checked),
        settings={
            "quick": quick,
            "partitions": PARTITIONS,
            "senders": SENDERS,
            "rows_per_batch": BATCH_ROWS,
            "seconds": seconds,
            "runs": runs,
            "value_bytes": VALUE_BYTES,
        },
        seed=seed,
    )


def measure_replicas(
    quick: bool, seed: int, seconds: float, runs: int, checked: list[Correctness]
) -> tuple[dict[str, Any], list[Target]]:
    rates: dict[str, dict[str, list[float]]] = {}
    for _, count in itertools.product(range(runs), REPLICA_COUNTS):
        for operator in (CountSum, CountSumColumns):
            with Rig(operator, count, REPLICA_KEYS, seed) as rig:
                rate = rig.rate(seconds)
                checked.append(rig.correctness())
            name = "vectorised" if operator is CountSumColumns else "per record"
            rates.setdefault(name, {}).setdefault(f"{count}", []).append(rate)
            _say(f"  {name}, {count} replicas: {rate:,.0f} rows/s")
    figures = {name: {count: spread(values) for count, values in each.items()} for name, each in rates.items()}
    gains = {name: ratio(each["2"]["median"], each["1"]["median"]) for name, each in figures.items()}
    return {"rows_per_s": figures, "2 replicas / 1": gains}, []


def measure_workers(
    quick: bool, seed: int, seconds: float, runs: int, checked: list[Correctness]
) -> tuple[dict[str, Any], list[Target]]:
    rates: dict[str, list[float]] = {}
    for _, count in itertools.product(range(runs), WORKER_COUNTS):
        with Rig(Busy, 1, REPLICA_KEYS, seed, rows=1_000, workers=count) as rig:
            rates.setdefault(f"{count}", []).append(rig.rate(seconds))
            checked.append(rig.correctness())
        _say(f"  {BUSY_US} µs a row, {count} workers: {rates[f'{count}'][-1]:,.0f} rows/s")
    figures = {count: spread(values) for count, values in rates.items()}
    gain = ratio(figures["2"]["median"], figures["1"]["median"])
    target = Target(f"2 workers / 1, {BUSY_US} µs a row", gain, WORKERS_BOUND)
    return {"rows_per_s": figures, "2 workers / 1": gain}, [target]


def measure_keys(
    quick: bool, seed: int, seconds: float, runs: int, checked: list[Correctness]
) -> tuple[dict[str, Any], list[Target]]:
    """Measures the vectorised operator by the number of keys. All keys exist before the clock starts."""
    figures: dict[str, Any] = {}
    for keys in KEYS_QUICK if quick else KEYS:
        with Rig(CountSumColumns, 1, keys, seed) as rig:
            empty = rig.resident_bytes()
            rig.load()
            rate = rig.rate(seconds)
            figures[str(keys)] = rig.sizes(empty) | {"rows_per_s": rate}
            checked.append(rig.correctness())
        _say(f"  {keys:,} keys: {rate:,.0f} rows/s, {figures[str(keys)]['resident_bytes'] / MB:.0f} MB resident")
    return figures, []


def measure_state(
    quick: bool, seed: int, seconds: float, runs: int, checked: list[Correctness]
) -> tuple[dict[str, Any], list[Target]]:
    """Measures an operator for records by the size of its state. Each row reads, checks and rewrites a 4 kB value."""
    figures: dict[str, Any] = {}
    for size in STATE_QUICK_MB if quick else STATE_MB:
        keys = size * MB // VALUE_BYTES
        with Rig(Archive, 1, keys, seed, rows=1_000) as rig:
            empty = rig.resident_bytes()
            rig.load()
            rate = rig.rate(seconds)
            figures[f"{size} MB"] = rig.sizes(empty) | {"rows_per_s": rate}
            checked.append(rig.correctness())
        _say(f"  {size} MB: {rate:,.0f} rows/s, {figures[f'{size} MB']['resident_bytes'] / MB:.0f} MB resident")
    return figures, []


@dataclass
class Rig:
    """A context manager for a cluster with one operator. It sends batches, and counts what it sent and received."""

    operator: type[Operator]
    replicas: int
    keys: int
    seed: int
    rows: int = BATCH_ROWS
    workers: int = 1
    _counts: Any = field(init=False)
    _outputs: int = field(init=False, default=0)
    _expected: int = field(init=False, default=0)

    def __enter__(self) -> Rig:
        self.name = self.operator.__name__
        self._output_schema = output_schema(self.operator)
        self._partition = np.fromiter((partition_of(key, PARTITIONS) for key in range(self.keys)), np.int8, self.keys)
        self._counts = np.zeros(self.keys, np.int64)
        self._mutex = threading.Lock()
        self._local = LocalCluster(
            self.operator,
            sites={"cloud": self.replicas},
            partitions=PARTITIONS,
            checkpoint_interval_s=0,
            workers=self.workers,
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._local.stop()

    def load(self) -> None:
        """Sends every key once."""
        router = Router(self._local.address, self.name)
        for number, start in enumerate(range(0, self.keys, self.rows)):
            keys = np.arange(start, min(start + self.rows, self.keys))
            self._send(router, Batch("load", number, sparse=True), keys, self._message(keys))

    def rate(self, seconds: float) -> float:
        """Returns the rows a second of all senders together. Each sends its next batch when the last one is answered.

        The senders warm up for half of ``seconds``, and are then measured for ``seconds``.
        """
        done: list[list[tuple[float, int]]] = [[] for _ in range(SENDERS)]
        errors: list[BaseException] = []
        stop = threading.Event()

        def sender(number: int) -> None:
            numbers = np.random.default_rng(self.seed + number)
            router = Router(self._local.address, self.name)
            # a key belongs to one sender, so that its count does not depend on the order of senders
            mine = [
                numbers.integers(0, -(-(self.keys - number) // SENDERS), self.rows) * SENDERS + number
                for _ in range(PREPARED)
            ]
            messages = [self._message(keys) for keys in mine]
            ready.wait()
            for batch in itertools.count():
                if stop.is_set():
                    return
                keys, message = mine[batch % PREPARED], messages[batch % PREPARED]
                self._send(router, Batch(f"s{number}", batch, sparse=True), keys, message)
                done[number].append((time.perf_counter(), len(keys)))

        def guarded(number: int) -> None:
            try:
                sender(number)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)
                ready.abort()

        ready = threading.Barrier(SENDERS + 1)
        threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(SENDERS)]
        for thread in threads:
            thread.start()
        try:
            ready.wait(600)
            began = time.perf_counter() + seconds / 2
            stop.wait(seconds * 1.5)
        except threading.BrokenBarrierError:
            pass
        stop.set()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        counted = [rows for each in done for at, rows in each if began <= at < began + seconds]
        return sum(counted) / seconds

    def _message(self, keys: Any) -> BatchRows:
        partitions = self._partition[keys]
        order = np.argsort(partitions, kind="stable")
        visited, counts = np.unique(partitions, return_counts=True)
        whole = pa.record_batch({"k": keys[order], "v": np.full(len(keys), 0.25)})
        ends = np.cumsum(counts).tolist()
        return BatchRows(whole.schema.serialize().to_pybytes(), whole, visited.tolist(), ends)

    def _send(self, router: Router, batch: Batch, keys: Any, message: BatchRows) -> None:
        outputs = router.send(batch, message)
        rows = sum(read_batch(output, self._output_schema).num_rows for output in outputs.values())
        expected = len(np.unique(keys)) if self.operator is CountSumColumns else len(keys)
        with self._mutex:
            self._outputs += rows
            self._expected += expected
            np.add.at(self._counts, keys, 1)

    def correctness(self) -> Correctness:
        """Compares the number of output rows, and the count and sum of every key, with the expected values."""
        state = "changes" if self.operator is Archive else "figures"
        table = self._local.cluster.read_state(self.name, state)
        keys, counts = table["key"].to_numpy(), np.zeros(self.keys, np.int64)
        value = table["value"].combine_chunks()
        equal = True
        if state == "changes":
            counts[keys] = value.to_numpy(zero_copy_only=False)
        else:
            n, total = (each.to_numpy(zero_copy_only=False) for each in value.flatten())
            counts[keys] = n
            equal = bool((total == n * 0.25).all())
        equal &= bool((counts == self._counts).all()) and len(keys) == np.count_nonzero(self._counts)
        return Correctness(max(0, self._expected - self._outputs), max(0, self._outputs - self._expected), 0, equal)

    def resident_bytes(self) -> int:
        return sum(
            _resident(process.pid) for name, process in self._local.processes.items() if name.startswith("cloud")
        )

    def sizes(self, empty_bytes: int) -> dict[str, Any]:
        resident, stored = self.resident_bytes(), _stored(self._local.data_dir / "cloud-0")
        return {
            "resident_bytes": resident,
            "resident_bytes_per_key": max(0, resident - empty_bytes) / self.keys,
            "stored_bytes": stored,
            "stored_bytes_per_key": stored / self.keys,
        }


def _resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def _stored(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
