"""T2: cost of a record without Spark. Each contestant counts and sums values by key in one process.

Every contestant runs in a process of its own, over the same numbers. The figure of a run is rows a second, from the end
of the warm-up to the end of the run, so that a rival's last snapshot counts. stateflow commits every batch to RocksDB.
The plain loop stores nothing, and shows the limit of Python.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.direct_common import BATCH_ROWS, BYTEWAX, COLUMNS, PLAIN, QUIX, RECOVERY, RECOVERY_1S, ROWS, Job
from benchmarks.record import REPOSITORY, Correctness, Record, Target, ratio, spread

CONTESTANTS = (PLAIN, ROWS, COLUMNS, BYTEWAX, RECOVERY, RECOVERY_1S, QUIX)
KEY_COUNTS = (1_000, 100_000)
#: Python of the environment that ``make .venv/.quix`` creates
QUIX_PYTHON = REPOSITORY / ".venv" / "quix" / "bin" / "python"
_TIMEOUT_S = 600

RIVALS = {
    "bytewax": "stateful_map, one worker, string keys made beforehand, source batches of 1,000, no recovery",
    "bytewax recovery": "the same, one recovery partition, the default epoch of 10 s; a snapshot at the end of the run",
    "bytewax recovery 1 s": "the same with an epoch of 1 s",
    "quix streams": "its RocksDB state, a transaction for every batch; no Kafka, no changelog topic",
}


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    chosen = [name for name in CONTESTANTS if not only or name in only]
    if unknown := sorted(set(only or ()) - set(CONTESTANTS)):
        raise SystemExit(f"invalid_argument: no contestant {unknown[0]!r}: choose {', '.join(CONTESTANTS)}")
    if quick and not only:
        chosen.remove(RECOVERY_1S)  # no target compares with it
    missing = {name: how for name in chosen if (how := how_to_install(name))}
    contestants = [name for name in chosen if name not in missing]
    runs, warm_up, batches = (2, 2, 3) if quick else (5, 5, 40)
    rates: dict[str, dict[str, list[float]]] = {}
    parts: list[Correctness] = []
    failures: list[str] = []
    for keys in KEY_COUNTS:
        for number in range(runs):  # contestants alternate, so that a slow minute affects all of them
            for name in contestants:
                with tempfile.TemporaryDirectory(prefix="stateflow-t2-") as directory:
                    found = run_worker(Job(name, keys, seed + number, warm_up, batches, directory))
                if "error" in found:
                    failures.append(f"{name} at {keys:,} keys: {found['error']}")
                    continue
                rates.setdefault(str(keys), {}).setdefault(name, []).append(found["rows_per_s"])
                # no contestant drops late rows, and the state of some cannot be read
                unread = () if found["state_equal"] is not None else ("state_equal",)
                parts.append(Correctness(found["lost"], found["duplicated"], 0, found["state_equal"], unread))
                print(f"  {name} at {keys:,} keys: {found['rows_per_s']:,.0f} rows/s", file=sys.stderr, flush=True)
    figures = {keys: {name: spread(values) for name, values in each.items()} for keys, each in rates.items()}
    return Record(
        experiment=experiment,
        figures={"rows_per_s": figures},
        targets=_targets(figures),
        correctness=Correctness.of_all(parts),
        settings={
            "quick": quick,
            "rows_per_batch": BATCH_ROWS,
            "batches": batches,
            "warm_up_batches": warm_up,
            "runs": runs,
            "rivals": RIVALS,
        },
        seed=seed,
        failures=failures,
        skipped="; ".join(f"{name} is not installed: {how}" for name, how in missing.items()),
    )


def how_to_install(contestant: str) -> str:
    """Returns the command that installs a contestant's missing package; empty: no package is missing."""
    if contestant == QUIX and not QUIX_PYTHON.exists():
        return "make .venv/.quix"
    if contestant.startswith(BYTEWAX) and importlib.util.find_spec("bytewax") is None:
        return "pip install -e '.[bench]' with a Python older than 3.13"
    return ""


def _targets(figures: dict[str, dict[str, Any]]) -> list[Target]:
    def over(keys: int, above: str, below: str) -> float | None:
        each = figures.get(str(keys), {})
        return ratio(each.get(above, {}).get("median"), each.get(below, {}).get("median"))

    targets = [
        Target(f"{ROWS} / {BYTEWAX} @1,000 keys", over(1_000, ROWS, BYTEWAX), 2.0),
        Target(f"{COLUMNS} / {BYTEWAX} @1,000 keys", over(1_000, COLUMNS, BYTEWAX), 1.0),
        Target(f"{ROWS} / {RECOVERY} @100,000 keys", over(100_000, ROWS, RECOVERY), 4.0),
        Target(f"{COLUMNS} / {RECOVERY} @100,000 keys", over(100_000, COLUMNS, RECOVERY), 4.0),
    ]
    for keys in KEY_COUNTS:
        targets.append(Target(f"{ROWS} / {PLAIN} @{keys:,} keys", over(keys, ROWS, PLAIN), 0.3))
        targets.append(Target(f"{ROWS} / {QUIX} @{keys:,} keys", over(keys, ROWS, QUIX), 1.0))
        targets.append(Target(f"{COLUMNS} / {ROWS} @{keys:,} keys", over(keys, COLUMNS, ROWS), 5.0))
    return targets


def run_worker(job: Job) -> dict[str, Any]:
    """Runs a contestant in a process of its own. Returns its result, or ``{"error": …}``."""
    program = [sys.executable, "-m", "benchmarks.direct_worker"]
    if job.contestant == QUIX:
        program = [str(QUIX_PYTHON), "-m", "benchmarks.direct_quix"]
    command = [*program, json.dumps(asdict(job))]
    try:
        subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        return dict(json.loads((Path(job.directory) / "result.json").read_text()))
    except subprocess.CalledProcessError as error:
        return {"error": " | ".join(error.stderr.strip().splitlines()[-2:])}
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {_TIMEOUT_S} s"}
