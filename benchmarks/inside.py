"""INSIDE: cost of replicas that run in Spark's own tasks, and the outage after an executor is killed.

*Pace.* Two clusters are compared: the replicas of one run in two tasks of the Spark session, those of the other run in
two processes beside it. The same files are processed by the same operator, with as many Spark tasks and partitions. The
queries of the two clusters alternate, and each round begins with another one. The figure is the number of rows of a
micro-batch over the duration of its trigger. The first micro-batches of a query and the first round are not counted.

*Kill.* Each executor is a process with one slot, and three executors run a replica. A file arrives every half second,
and a batch is acknowledged only when a standby has it. One of these three executors is killed with SIGKILL. The figure
"until outputs" is the time from the kill to the outputs of the first micro-batch that began after the kill.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import REPOSITORY, Correctness, Record, Target, ratio, spread
from stateflow.settings import ControllerSettings

INSIDE, BESIDE = "inside", "beside"
SIDES = (INSIDE, BESIDE)
REPLICAS, PARTITIONS, TASKS, KEYS = 2, 8, 2, 1_000
#: one replica is killed, one takes over, and one is the new owner's standby, without which no batch is acknowledged
KILL_REPLICAS = 3
LEAST = 0.9
LIMIT_S = 3_600.0
_FAILURE_LINES = 3


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    rounds, rows, counted, warm_up = (4, 20_000, 6, 3) if quick else (12, 100_000, 20, 5)
    kills = 1 if quick else 5
    failures: list[str] = []
    parts: list[Correctness] = []
    with tempfile.TemporaryDirectory(prefix="stateflow-inside-") as made:
        pace = {"seed": seed, "rounds": rounds, "rows": rows, "files": warm_up + counted, "warm_up": warm_up}
        paced = _driven("pace", Path(made) / "pace", pace, failures)
        killed = [_driven("kill", Path(made) / f"kill-{number}", {}, failures) for number in range(kills)]
    for came in [paced, *killed]:
        if came:
            parts.append(Correctness(**came.pop("correctness")))
    rates: dict[str, list[float]] = paced.get("rows_per_s", {side: [] for side in SIDES})
    until = [came["until_outputs_s"] for came in killed if came]
    after = Correctness.of_all(parts[1:]) if paced else Correctness.of_all(parts)
    return Record(
        experiment=experiment,
        figures={
            **{side: {"rows_per_s": spread(rates[side])} for side in SIDES},
            "of_rounds": spread(paced.get("of_rounds", [])),
            "killed": {"until_outputs_s": spread(until), "took_over": [came["took_over"] for came in killed if came]},
        },
        targets=[
            Target("throughput, inside/beside", ratio(_median(rates[INSIDE]), _median(rates[BESIDE])), LEAST),
            Target("rows lost when an executor is killed", after.lost, 0, "at_most"),
            Target("rows twice when an executor is killed", after.duplicated, 0, "at_most"),
        ],
        correctness=Correctness.of_all(parts),
        settings={
            "quick": quick,
            "replicas": REPLICAS,
            "replicas_when_one_is_killed": KILL_REPLICAS,
            "lease_s": ControllerSettings().lease_s,
            "partitions": PARTITIONS,
            "spark_tasks": TASKS,
            "keys": KEYS,
            **pace,
            "kills": kills,
        },
        seed=seed,
        failures=failures,
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _driven(what: str, folder: Path, options: dict[str, Any], failures: list[str]) -> dict[str, Any]:
    """Runs a driver process, and returns its result.

    If the driver fails, returns {} and adds the reason to ``failures``.
    """
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.inside_worker", what, str(folder), json.dumps(options)]
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": paths}  # executors start in other folders
    with (
        (folder / "log").open("wb") as said,
        subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=sys.stderr
        ) as driver,
    ):
        try:
            ended = f"exit status {driver.wait(LIMIT_S)}"
        except subprocess.TimeoutExpired:
            ended = f"no result within {LIMIT_S:.0f} s"
        finally:
            driver.terminate()
    result = folder / "result.json"
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    lines = [line for line in (folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    failures.append(f"{what}: {ended}: " + " | ".join(lines[-_FAILURE_LINES:]))
    return {}
