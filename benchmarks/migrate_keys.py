"""M3: latency of all keys while a quarter of the partitions moves, for several numbers of keys and of partitions.

Every key exists from the start, and has a count and a sum. The keys of a batch are drawn uniformly from all keys, so a
batch waits for every paused partition. A quarter of the partitions moves as a warm-up; then another quarter moves,
which is measured. Papers on the migration of state report the same measurement: Megaphone's evaluation makes it with
bins (Hoffmann et al., "Megaphone", PVLDB 12(9), 2019). A partition is a RocksDB database here, while a bin is an entry
of a vector in Megaphone.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from benchmarks.load import Latencies, Load, Source, completed, correctness_of, summary
from benchmarks.operators import CountSum
from benchmarks.record import Correctness, Target, ratio, spread
from stateflow.testing import LocalCluster

OPERATOR = "CountSum"
STRATEGIES = ("pause-and-copy", "fluid", "batched", "warm-up")
ROWS = 200  # per batch
INTERVAL_S = 0.05
PRELOAD_ROWS = 20_000
SETTLE_S = 2.0
#: (partitions, keys)
QUICK = ((64, 1 << 16),)
FULL = ((16, 1 << 16), (64, 1 << 16), (256, 1 << 16), (1024, 1 << 16), (64, 1 << 20), (64, 1 << 23))


def disruption(latencies: Latencies, before: tuple[float, float], during: tuple[float, float]) -> dict[str, float]:
    """Returns the measures of disruption that the field uses.

    They are the time for which latency exceeded the mean + 5 σ of the time before the move, and the difference between
    the peak and that mean.

    Args:
        before: begin and end of the time before the move.
        during: begin and end of the move.
    """
    calm, moving = latencies.between(*before), latencies.between(*during)
    limit = float(calm.mean() + 5 * calm.std())
    return {
        "limit_ms": limit,
        "above_limit_s": float(np.count_nonzero(moving > limit)) * INTERVAL_S,
        "peak_over_mean_ms": float(moving.max() - calm.mean()),
    }


def one(partitions: int, keys: int, strategy: str, seed: int) -> tuple[dict[str, Any], Correctness]:
    with (
        tempfile.TemporaryDirectory(prefix="stateflow-bench-") as folder,
        LocalCluster(
            CountSum,
            sites={"cloud": 1, "edge": 1},
            partitions=partitions,
            data_dir=folder,
            deploy_to=("cloud",),
            checkpoint_interval_s=0,
        ) as local,
    ):
        preload = local.stream(OPERATOR, source="preload")
        for at in range(0, keys, PRELOAD_ROWS):
            preload.send([{"k": key, "v": 0.0} for key in range(at, min(at + PRELOAD_ROWS, keys))])

        def pick(rng: random.Random) -> list[dict[str, Any]]:
            return [{"k": rng.randrange(keys), "v": 1.0} for _ in range(ROWS)]

        load = Load([Source(local.stream(OPERATOR, source="load"), pick, INTERVAL_S)], seed)
        load.truth.preload(range(keys), 0.0)
        latencies = load.sources[0].latencies
        quarter = partitions // 4
        with load:
            load.wait(SETTLE_S)
            _move(local, range(quarter), strategy)
            load.wait(SETTLE_S)
            calm_from = latencies.at_s[-1]
            load.wait(2 * SETTLE_S)
            began = latencies.at_s[-1]
            report = _move(local, range(quarter, 2 * quarter), strategy)
            ended = latencies.at_s[-1] + INTERVAL_S
            load.wait(SETTLE_S)
        figures = {
            "partitions": partitions,
            "keys": keys,
            "strategy": strategy,
            "reconfiguration_s": report["took_s"],
            "pause_ms": report["pause_ms"],
            "bytes": report["bytes"],
            "latency_ms_before": summary(latencies.between(calm_from, began)),
            "latency_ms_during": summary(latencies.between(began, ended)),
            **disruption(latencies, (calm_from, began), (began, ended)),
            "timeline": latencies.timeline(load.began_s),
        }
        return figures, correctness_of(load, local.cluster, OPERATOR)


def _move(local: LocalCluster, partitions: Sequence[int], strategy: str) -> dict[str, Any]:
    moves = completed(local.migrate(OPERATOR, list(partitions), "edge", strategy=strategy).wait())
    begun = min(m.started_us for m in moves)
    return {
        "took_s": max(m.started_us / 1e6 + m.duration_s for m in moves) - begun / 1e6,
        "pause_ms": spread([m.pause_ms for m in moves]),
        "bytes": sum(m.bytes_warm + m.bytes_delta for m in moves),
    }


def experiment(
    quick: bool,
    seed: int,
    only: Sequence[str] | None,
    checked: list[Correctness],
    noting: Callable[[], AbstractContextManager[None]],
    say: Callable[[str], None],
) -> tuple[dict[str, Any], list[Target]]:
    """Runs M3.

    Args:
        checked: gets the correctness of each run.
        noting: returns a context manager that notes the failure of a run.
    """
    runs: list[dict[str, Any]] = []
    for partitions, keys in QUICK if quick else FULL:
        for strategy, repeat in itertools.product(only or STRATEGIES, range(1 if quick else 3)):
            with noting():
                figures, correctness = one(partitions, keys, strategy, seed + repeat)
                runs.append(figures)
                checked.append(correctness)
                say(
                    f"  {partitions:5} partitions, {keys:9,} keys, {strategy:15} peak "
                    f"{figures['latency_ms_during']['max']:8.1f} ms  took {figures['reconfiguration_s']:6.2f} s"
                )
    peaks: dict[tuple[int, int], dict[str, list[float]]] = {}
    for run in runs:
        of_shape = peaks.setdefault((run["partitions"], run["keys"]), {})
        of_shape.setdefault(run["strategy"], []).append(run["latency_ms_during"]["max"])
    ratios = [
        r
        for by in peaks.values()
        if {"warm-up", "pause-and-copy"} <= set(by)
        and (r := ratio(statistics.median(by["warm-up"]), statistics.median(by["pause-and-copy"]))) is not None
    ]
    figures = {
        "peak_ms": {f"{p} partitions, {k} keys": {s: spread(v) for s, v in by.items()} for (p, k), by in peaks.items()},
        "runs": runs,
    }
    worst = max(ratios) if ratios else None
    return figures, [Target("highest latency, warm-up over all at once, worst size", worst, 1.0, "at_most")]
