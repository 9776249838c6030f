"""F1: time until the partitions of a killed replica answer again, from a standby and from a checkpoint."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.load import Ledger
from benchmarks.operators import Ballast
from benchmarks.record import Correctness, Record, Target, spread
from stateflow.errors import PositionGap
from stateflow.settings import ControllerSettings
from stateflow.testing import LocalCluster

OPERATOR = "Ballast"
PARTITIONS = 8
LEASE_S = 3.0
HEARTBEAT_S = 0.3
KEYS = 2000
WAYS = ("standby", "checkpoint")


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    parts: list[Correctness] = []
    figures: dict[str, Any] = {}
    failures: list[str] = []
    took: dict[str, list[float]] = {}
    for way in only or WAYS:
        for _ in range(1 if quick else 5):
            seconds, correct = _one(way)
            took.setdefault(way, []).append(seconds)
            parts.append(correct)
            print(f"  {way}: {seconds:.2f} s", file=sys.stderr, flush=True)
        figures[way] = {"seconds_until_answered": spread(took[way])}
    waited = LEASE_S * (1 + ControllerSettings().lease_margin)
    targets = [
        Target(f"{way}: beyond lease and margin, s, worst", max(values) - waited, 2.0, "at_most")
        for way, values in took.items()
    ]
    return Record(
        experiment=experiment,
        figures=figures,
        targets=targets,
        correctness=Correctness.of_all(parts),
        settings={
            "quick": quick,
            "lease_s": LEASE_S,
            "lease_margin": ControllerSettings().lease_margin,
            "heartbeat_interval_s": HEARTBEAT_S,
            "partitions": PARTITIONS,
            "keys": KEYS,
        },
        seed=seed,
        failures=failures,
    )


def _one(way: str) -> tuple[float, Correctness]:
    os.environ["STATEFLOW_CONTROLLER_LEASE_S"] = str(LEASE_S)
    os.environ["STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S"] = str(HEARTBEAT_S)
    os.environ["STATEFLOW_REPLICA_ACKNOWLEDGE"] = "standby" if way == "standby" else "wal"
    with (
        tempfile.TemporaryDirectory(prefix="stateflow-bench-") as folder,
        LocalCluster(
            Ballast,
            sites={"cloud": 1, "edge": 2},
            partitions=PARTITIONS,
            data_dir=folder,
            deploy_to=("cloud",),
            checkpoint_interval_s=0,
        ) as local,
    ):
        if way == "standby":
            local.cluster.standby(OPERATOR, 1)
            while sum(view.phase == "CATCHING_UP" for view in local.cluster.status().standbys) < PARTITIONS:
                time.sleep(0.1)
        stream = local.stream(OPERATOR, source="s")
        truth = Ledger()
        batches = [[{"k": k, "v": float(number), "size": 100} for k in range(KEYS)] for number in range(6)]
        for number, rows in enumerate(batches[:5]):
            truth.apply(rows, stream.send(rows))
            if way == "checkpoint" and number == 2:
                local.cluster.checkpoint(OPERATOR)
        local.kill("cloud-0")
        began = time.monotonic()
        try:
            truth.apply(batches[5], stream.send(batches[5], sequence=5))
        except PositionGap as gap:
            for earlier in range(int(gap.where["expected"]), 5):
                stream.send(batches[earlier], sequence=earlier, rewind=True)
            truth.apply(batches[5], stream.send(batches[5], sequence=5))
        seconds = time.monotonic() - began
        equal = truth.equals(local.cluster, OPERATOR)
        return seconds, Correctness(truth.lost, truth.duplicated, 0, equal)
