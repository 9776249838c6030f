"""T1: keyed count and sum under Spark. stateflow is compared with Spark's own operators and aggregation.

The contestants run one after another. Every contestant reads the same parquet files, one file for each micro-batch, in
two queries: first files with few keys, then files with many keys. At the full size, each contestant has a process and a
Spark session of its own. At the quick size, all share one session, in which stateflow runs first, so that its rivals
have a warm JVM. The first micro-batches of a query are a warm-up and are not counted. Throughput is the number of rows
of a micro-batch over its ``triggerExecution`` time, which includes Spark's own bookkeeping for all contestants.

Each contestant is verified twice: every cell of the final state of each timed run, and every output row of a smaller
run. A query that only sends its rows to Python and back is Spark's floor; the cost of stateflow is the time above the
floor.

See :mod:`benchmarks.spark_small` for T1-small and T4.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.record import REPOSITORY, Correctness, Record, Target, ratio, spread

ROWS_PER_BATCH = 100_000
KEY_COUNTS = (1_000, 100_000)
PARTITIONS = 8
OURS, COLUMNS = "stateflow rows", "stateflow columns"
TRANSFORM, NATIVE = "transformWithState", "native"
TRANSFORM_PANDAS, APPLY_PANDAS = "transformWithStateInPandas", "applyInPandasWithState"
MINE, RIVALS = (OURS, COLUMNS), (TRANSFORM, NATIVE, TRANSFORM_PANDAS, APPLY_PANDAS)
TRIVIAL = "mapInArrow"
CONTESTANTS = (*RIVALS, TRIVIAL, *MINE)
#: Spark's own Python operators, which take up to a minute for a batch with many keys
SLOW = frozenset({TRANSFORM, TRANSFORM_PANDAS, APPLY_PANDAS})
VERIFY_ROWS, VERIFY_KEYS, VERIFY_BATCHES = 2_000, 300, 3

#: lower bounds of stateflow / rival at a number of keys
TARGETS = {
    (OURS, TRANSFORM, 1_000): 6.0,
    (OURS, TRANSFORM, 100_000): 50.0,
    (OURS, NATIVE, 1_000): 1.0,
    (OURS, NATIVE, 100_000): 1.2,
    (COLUMNS, TRANSFORM, 1_000): 6.0,
    (COLUMNS, TRANSFORM, 100_000): 100.0,
    (COLUMNS, NATIVE, 1_000): 1.3,
    (COLUMNS, NATIVE, 100_000): 1.3,
}
#: upper bounds of the time above the floor, µs a row, by number of keys
ABOVE_FLOOR_US = {1_000: 0.7, 100_000: 1.5}
#: contestants at the quick size, in order; no target compares with the others. The floor runs after stateflow, so it
#: has a warmer JVM, which is no advantage for stateflow
QUICK = (*MINE, TRIVIAL, NATIVE, TRANSFORM)

FIRST_FILE_S = 1_388_534_400
_TIMEOUT_S = 3_600
_GRACE_S = 15
_FAILURE_LINES = 3


@dataclass(frozen=True, slots=True)
class Timed:
    """One timed query."""

    keys: int
    warm_up: int
    batches: int  # the warm-up included
    input: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a worker process: the runs of one contestant. ``benchmarks.spark_worker`` gets it as JSON."""

    contestant: str
    timed: list[Timed]
    verify_input: str
    work_directory: str
    result: str
    small: bool = False
    partitions: int = PARTITIONS  # of stateflow's operators


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    if experiment != "T1":
        from benchmarks import spark_small

        return spark_small.run(experiment, quick=quick, seed=seed)
    contestants = [name for name in CONTESTANTS if not only or name in only]
    if unknown := sorted(set(only or ()) - set(CONTESTANTS)):
        raise SystemExit(f"invalid_argument: no contestant {unknown[0]!r}: choose {', '.join(CONTESTANTS)}")
    if quick and not only:
        contestants = list(QUICK)
    with tempfile.TemporaryDirectory(prefix="stateflow-t1-") as directory:
        root = Path(directory)
        verify = write_input(root / "verify", seed + 1, VERIFY_KEYS, VERIFY_ROWS, VERIFY_BATCHES)
        inputs = {
            keys: write_input(
                root / f"timed-{keys}", seed, keys, ROWS_PER_BATCH,
                max(sum(batches_of(name, keys, quick=quick)) for name in contestants),
            )
            for keys in KEY_COUNTS
        }  # fmt: skip
        jobs = []
        for name in contestants:
            timed = []
            for keys, path in inputs.items():
                warm_up, counted = batches_of(name, keys, quick=quick)
                timed.append(Timed(keys, warm_up, warm_up + counted, str(path)))
            jobs.append(job_of(root / name, name, timed, verify))
        outcomes: dict[str, dict[str, Any]] = {}
        for together in [jobs] if quick else [[job] for job in jobs]:
            came = run_session(together)
            outcomes |= came
            for name, outcome in came.items():
                say(f"{name}: {_brief(outcome)}")
    return _record(experiment, outcomes, quick=quick, seed=seed)


def job_of(
    directory: Path,
    contestant: str,
    timed: list[Timed],
    verify: Path,
    *,
    small: bool = False,
    partitions: int = PARTITIONS,
) -> Job:
    directory.mkdir()
    return Job(contestant, timed, str(verify), str(directory), str(directory / "result.json"), small, partitions)


def batches_of(contestant: str, keys: int, *, quick: bool) -> tuple[int, int]:
    """Returns (number of micro-batches for the warm-up, number of micro-batches that count).

    The numbers are the same for all contestants, except that they are lower for those that take up to a minute for a
    batch. A query runs for weeks in practice, so its speed matters once the JVM has compiled its code. Spark's native
    aggregation and stateflow take half as long for the twenty-fifth batch as for the fifth, and about a tenth less
    again for the sixtieth. Times fall further, but more slowly, for hundreds of batches, for which the benchmark does
    not wait; docs/evaluation.md describes the consequences. The query with many keys needs a shorter warm-up, because
    the query with few keys has warmed up the JVM.
    """
    many = keys > KEY_COUNTS[0]
    if contestant in SLOW and many:
        return (0, 1) if quick else (5, 3)
    if many:
        return (3, 3) if quick else (30, 45)
    return (5, 3) if quick else (60, 45)


def write_input(directory: Path, seed: int, keys: int, rows: int, files: int) -> Path:
    """Writes Parquet files with uniformly distributed keys, and returns the directory.

    The files have ascending modification times, because the file source orders by them. Values are multiples of a
    quarter, so their sums are exact in any order of addition.
    """
    directory.mkdir()
    numbers = np.random.default_rng(seed)
    for index in range(files):
        table = pa.table(
            {
                "k": pa.array(numbers.integers(0, keys, rows), pa.int64()),
                "v": pa.array(numbers.integers(-4_000, 4_000, rows) / 4, pa.float64()),
            }
        )
        path = directory / f"part-{index:05d}.parquet"
        pq.write_table(table, path)
        os.utime(path, (FIRST_FILE_S + index, FIRST_FILE_S + index))
    return directory


def run_session(jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """Runs jobs in one Spark session, in a worker process.

    Returns contestant → its result, or ``{"error": …}``. All processes of the session end before this function returns.
    """
    environment = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
    }
    log = Path(jobs[0].work_directory) / "log"
    command = [sys.executable, "-m", "benchmarks.spark_worker", json.dumps([asdict(job) for job in jobs])]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            cwd=REPOSITORY, start_new_session=True,
        )  # fmt: skip
        try:
            ended = f"exit status {process.wait(timeout=_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            ended = f"no result within {_TIMEOUT_S} s"
        finally:
            _end_group(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    error = {"error": f"{ended}: " + " | ".join(lines[-_FAILURE_LINES:])}
    # the result of a contestant whose process failed does not count; those of earlier contestants do
    failed = jobs[-1] if ended != "exit status 0" else None
    return {
        job.contestant: json.loads(Path(job.result).read_text())
        if Path(job.result).exists() and job is not failed
        else error
        for job in jobs
    }


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a worker and its process group, in which the JVM is.

    A worker that still runs is first asked to end, because replicas are in process groups of their own, which only the
    worker can end.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _record(experiment: str, outcomes: dict[str, dict[str, Any]], *, quick: bool, seed: int) -> Record:
    runs = {
        f"{name}@{keys}": run for name, outcome in outcomes.items() for keys, run in outcome.get("runs", {}).items()
    }
    throughput = {name: spread(run["rows_per_s"]) for name, run in runs.items()}

    def median(name: str, keys: int) -> float | None:
        value: float | None = throughput.get(f"{name}@{keys}", {}).get("median")
        return value

    ratios = {
        f"{mine}/{rival}@{keys}": ratio(median(mine, keys), median(rival, keys))
        for keys in KEY_COUNTS
        for mine in MINE
        for rival in RIVALS
    }
    above = {
        f"{mine}@{keys}": above_floor_us(median(mine, keys), median(TRIVIAL, keys))
        for keys in KEY_COUNTS
        for mine in MINE
    }
    targets = [
        Target(f"{mine}/{rival}@{keys} keys", ratios[f"{mine}/{rival}@{keys}"], bound)
        for (mine, rival, keys), bound in TARGETS.items()
    ]
    targets += [
        Target(f"{mine}@{keys} keys above {TRIVIAL}, µs a row", above[f"{mine}@{keys}"], bound, "at_most")
        for keys, bound in ABOVE_FLOOR_US.items()
        for mine in MINE
    ]
    unknown = Correctness(None, None, None, None).to_json()
    checks = {
        name: Correctness(**outcome.get("correctness", unknown))
        for name, outcome in outcomes.items()
        if name != TRIVIAL
    }
    figures = {
        "rows_per_s": throughput,
        "ratios": ratios,
        "above_floor_us_per_row": above,
        "warm_up_batch_s": {name: run["warm_up_s"] for name, run in runs.items()},
        "correctness": {name: check.to_json() for name, check in checks.items()},
    }
    return Record(
        experiment=experiment,
        figures=figures,
        targets=targets,
        correctness=Correctness.of_all(list(checks.values())),
        settings=_settings(outcomes, runs, quick=quick),
        seed=seed,
        failures=[f"{name}: {outcome['error']}" for name, outcome in outcomes.items() if "error" in outcome],
    )


def above_floor_us(mine: float | None, floor: float | None) -> float | None:
    """Returns by how many µs a row takes longer at rate ``mine`` than at rate ``floor``, both in rows a second.

    Returns None if a rate is missing.
    """
    return 1e6 / mine - 1e6 / floor if mine and floor else None


def _settings(outcomes: dict[str, dict[str, Any]], runs: dict[str, dict[str, Any]], *, quick: bool) -> dict[str, Any]:
    ours = f"2 replicas, {PARTITIONS} partitions"
    spark_settings: dict[str, str] = next((o["spark_settings"] for o in outcomes.values() if "spark_settings" in o), {})
    return {
        "quick": quick,
        "rows_per_batch": ROWS_PER_BATCH,
        "keys": list(KEY_COUNTS),
        "key_distribution": "uniform",
        "batches_of_warm_up": {name: len(run["warm_up_s"]) for name, run in runs.items()},
        "batches_counted": {name: len(run["rows_per_s"]) for name, run in runs.items()},
        "verification": {
            "rows": VERIFY_ROWS * VERIFY_BATCHES,
            "keys": VERIFY_KEYS,
            "batches": VERIFY_BATCHES,
        },
        "sink": "noop",
        "spark": spark_settings,
        "contestants": {
            TRANSFORM: "Row mode, one ValueState of (n, total); one output row per key and batch",
            NATIVE: "groupBy(k).agg(count, sum), update mode; one output row per key and batch",
            TRANSFORM_PANDAS: "one ValueState of (n, total); one output row per key and batch",
            APPLY_PANDAS: "one state of (n, total); one output row per key and batch",
            TRIVIAL: "the floor: rows to Python and back, nothing kept",
            OURS: f"Operator, {ours}, one state.value of (n, total); one output row per input row",
            COLUMNS: f"BatchOperator, {ours}, the same state; one output row per key and batch",
        },
    }


def _brief(outcome: dict[str, Any]) -> str:
    if "error" in outcome:
        return f"failed: {outcome['error']}"
    runs = (
        f"{spread(run['rows_per_s'])['median']:,.0f} rows/s at {keys} keys" for keys, run in outcome["runs"].items()
    )
    return f"{', '.join(runs)}, {outcome.get('correctness', 'keeps nothing')}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
