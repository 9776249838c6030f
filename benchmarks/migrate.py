"""M1 to M8: moves of partitions under load.

* M1: pause by the size of the state.
* M2: pause by the share of keys that the load changes.
* M3: latency by the number of keys, see :mod:`benchmarks.migrate_keys`.
* M6: bytes of a move back.
* M7: latency of bystanders, which are partitions that do not move.
* M8: pause budgets.

docs/moving-state.md describes the strategies.

Partitions 0 and 1 hold the state. Partition 0 moves first, as a warm-up; the move of partition 1 is measured.
Partitions 2 and 3 are bystanders. Every run has a cluster of its own.

With ``STATEFLOW_REPLICA_ACKNOWLEDGE=standby`` each partition has a standby, and every move goes to the standby. The
latencies of M1 then also include the time until the new owner has a standby, which comes after the pause.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import migrate_keys
from benchmarks.load import Latencies, Load, Source, ccdf, completed, correctness_of, summary, unfinished
from benchmarks.operators import Ballast
from benchmarks.record import Correctness, Record, Target, ratio, spread
from stateflow.client import MoveReport, Reconfiguration
from stateflow.errors import BudgetUnreachable, StateflowError
from stateflow.partitioner import partition_of
from stateflow.testing import LocalCluster

OPERATOR = "Ballast"
PARTITIONS = 4
PAYLOAD = 1000  # bytes per key
PRELOAD_ROWS = 4000
ROWS = 20  # per batch
INTERVAL_S = 0.02
SETTLE_S = 2.0
#: the replicas' setting, which they read from the same environment variable
ACKNOWLEDGE = os.environ.get("STATEFLOW_REPLICA_ACKNOWLEDGE", "wal")
STRATEGIES = ("stop-and-restart", "pause-and-copy", "fluid", "batched", "on-demand", "warm-up")
MB = 1_000_000
#: correctness of each cluster of this run, in order
_CHECKED: list[Correctness] = []
#: a line for each cluster of this run that was given up
_FAILED: list[str] = []


@contextmanager
def noting() -> Iterator[None]:
    """Gives a block up at the first error that a cluster or a move can have, and notes the error as a failure."""
    try:
        yield
    except (StateflowError, RuntimeError, TimeoutError) as error:
        say(f"  FAILED: {error}")
        _FAILED.append(str(error))


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of one run.

    Attributes:
        size: bytes of state in each moved partition.
        hot: share of the moved partitions' keys that the load changes.
        rewrites: rows set a new payload, so that a changed key has as many bytes as an unchanged one.
        interval_s: seconds between two batches of a source.
        settle_s: seconds of load before and after each move.
    """

    size: int
    hot: float = 0.02
    rewrites: bool = False
    interval_s: float = INTERVAL_S
    settle_s: float = SETTLE_S


def keys_of(partition: int, count: int) -> list[int]:
    found: list[int] = []
    key = 0
    while len(found) < count:
        if partition_of(key, PARTITIONS) == partition:
            found.append(key)
        key += 1
    return found


@contextmanager
def rig(shape: Shape, seed: int) -> Iterator[tuple[LocalCluster, Load]]:
    """Runs a cluster with state, and a load on it, while the block runs.

    The source ``moved`` writes to partitions 0 and 1, the source ``bystander`` to partitions 2 and 3.
    """
    with (
        tempfile.TemporaryDirectory(prefix="stateflow-bench-") as folder,
        LocalCluster(
            Ballast,
            sites={"cloud": 1, "edge": 1},
            partitions=PARTITIONS,
            data_dir=folder,
            deploy_to=("cloud",),
            checkpoint_interval_s=0,
        ) as local,
    ):
        keys = {p: keys_of(p, max(50, shape.size // PAYLOAD) if p < 2 else 500) for p in range(PARTITIONS)}
        if ACKNOWLEDGE == "standby":
            _with_standbys(local)
        preload = local.stream(OPERATOR, source="preload")
        everything = [key for p in range(PARTITIONS) for key in keys[p]]
        for at in range(0, len(everything), PRELOAD_ROWS):
            preload.send([{"k": k, "v": 0.0, "size": PAYLOAD} for k in everything[at : at + PRELOAD_ROWS]])
        hot = [key for p in (0, 1) for key in keys[p][: max(1, int(len(keys[p]) * shape.hot))]]
        others = [*keys[2], *keys[3]]
        size = PAYLOAD if shape.rewrites else 0

        def pick(from_keys: list[int], payload: int) -> Callable[[random.Random], list[dict[str, Any]]]:
            return lambda rng: [{"k": rng.choice(from_keys), "v": 1.0, "size": payload} for _ in range(ROWS)]

        load = Load(
            [
                Source(local.stream(OPERATOR, source="moved"), pick(hot, size), shape.interval_s),
                Source(local.stream(OPERATOR, source="bystander"), pick(others, 0), shape.interval_s),
            ],
            seed,
        )
        load.truth.preload(everything, 0.0)
        with load:
            load.wait(shape.settle_s)
            yield local, load
            load.wait(shape.settle_s)
        _CHECKED.append(correctness_of(load, local.cluster, OPERATOR))


def _with_standbys(local: LocalCluster) -> None:
    local.cluster.standby(OPERATOR, 1)
    while sum(view.phase == "CATCHING_UP" for view in local.cluster.status().standbys) < PARTITIONS:
        time.sleep(0.1)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def move(local: LocalCluster, partitions: Sequence[int], to: str, **options: Any) -> list[MoveReport]:
    return completed(local.migrate(OPERATOR, list(partitions), to, **options).wait())


def _one(shape: Shape, strategy: str, seed: int) -> dict[str, Any]:
    """Moves partition 0 and then partition 1, and returns the figures of the second move."""
    with rig(shape, seed) as (local, load):
        move(local, [0], "edge", strategy=strategy)
        load.wait(shape.settle_s)
        began = load.sources[0].latencies.at_s[-1]
        (second,) = move(local, [1], "edge", strategy=strategy)
        load.wait(shape.settle_s)
        ended = began + second.duration_s + shape.settle_s
        during = load.sources[0].latencies.between(began, ended)
        figures = {
            "strategy": strategy,
            "size": shape.size,
            "pause_ms": second.pause_ms,
            "predicted_pause_ms": second.predicted_pause_ms,
            "duration_s": second.duration_s,
            "bytes_warm": second.bytes_warm,
            "bytes_delta": second.bytes_delta,
            "latency_ms_during": summary(during),
            "latency_ccdf_during": ccdf(during),
            "generator_stalls": load.watch.found().to_json(),
            "timeline": load.sources[0].latencies.timeline(load.began_s),
        }
    say(f"  {strategy:17} {shape.size / MB:7.0f} MB  pause {second.pause_ms:9.1f} ms  took {second.duration_s:6.2f} s")
    return figures


def _settle_s(quick: bool) -> float:
    return 1.0 if quick else SETTLE_S


# -- experiments --------------------------------------------------------------------------------------------


def _m1(quick: bool, seed: int, only: Sequence[str] | None) -> tuple[dict[str, Any], list[Target]]:
    sizes = [2 * MB, 20 * MB] if quick else [10 * MB, 100 * MB, 1000 * MB]
    runs = 1 if quick else 5
    results: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for strategy in only or STRATEGIES:
        for size in sizes:
            found = results.setdefault(strategy, {}).setdefault(size, [])
            for run in range(runs):
                with noting():
                    found.append(_one(Shape(size, settle_s=_settle_s(quick)), strategy, seed + run))
    pauses = {
        s: {str(size): spread([r["pause_ms"] for r in rs]) for size, rs in by.items()} for s, by in results.items()
    }
    small, large = str(sizes[0]), str(sizes[-1])

    def pause(strategy: str, size: str, which: str = "median") -> float | None:
        return pauses[strategy][size][which] if strategy in pauses else None

    flat = ratio(pause("warm-up", large), pause("warm-up", small))
    shorter = ratio(pause("stop-and-restart", large), pause("warm-up", large))
    small_mb, large_mb = sizes[0] // MB, sizes[-1] // MB
    targets = [
        Target(f"pause p100 at {large_mb} MB, ms", pause("warm-up", large, "max"), 50, "at_most"),
        Target(f"pause {large_mb} MB over pause {small_mb} MB", flat, 1.5, "at_most"),
        Target(f"stop-and-restart over warm-up at {large_mb} MB", shorter, 100, "at_least"),
    ]
    return {"pause_ms": pauses, "runs": results}, targets


def _m2(quick: bool, seed: int, only: Sequence[str] | None) -> tuple[dict[str, Any], list[Target]]:
    size = 5 * MB if quick else 100 * MB
    ratios = [0.02, 0.5, 1.0] if quick else [0.02, 0.10, 0.25, 0.50, 1.0]
    pauses: dict[str, dict[float, list[float]]] = {}
    for hot in ratios:
        for strategy in only or ("pause-and-copy", "warm-up", "auto"):
            found = pauses.setdefault(strategy, {}).setdefault(hot, [])
            for run in range(1 if quick else 5):
                shape = Shape(size, hot, rewrites=True, settle_s=_settle_s(quick))
                with noting():
                    found.append(_one(shape, strategy, seed + run)["pause_ms"])
    figures = {"pause_ms": {s: {str(h): spread(v) for h, v in by.items()} for s, by in pauses.items()}}
    worst = None
    if {"pause-and-copy", "auto"} <= set(pauses):
        auto, copy = figures["pause_ms"]["auto"], figures["pause_ms"]["pause-and-copy"]
        over = [each for h in auto if (each := ratio(auto[h]["median"], copy[h]["median"])) is not None]
        worst = max(over, default=None)
    return figures, [Target("auto over pause-and-copy, worst access ratio", worst, 1.1, "at_most")]


def _m6(quick: bool, seed: int, only: Sequence[str] | None) -> tuple[dict[str, Any], list[Target]]:
    """Measures the bytes of moves between two sites, to and fro.

    Between two moves, up to one per cent of the keys are written, many of them more than once. A changed key counts
    with its share of the base's bytes. A key that changes once more during a move counts twice.
    """
    size = 20 * MB if quick else 200 * MB
    shape = Shape(size, hot=0.01, rewrites=True, interval_s=0.1 if quick else INTERVAL_S)
    trips: list[dict[str, Any]] = []
    with noting(), rig(shape, seed) as (local, load):
        written = _note_keys(load.sources[0])
        move(local, [0, 1], "edge")
        written.clear()
        for trip in range(2 if quick else 6):
            load.wait(4.0)
            before = len(written)
            written.clear()
            back = move(local, [0, 1], "cloud" if trip % 2 == 0 else "edge")
            changed, during = before + len(written), len(written)
            written.clear()
            trips.append(
                {
                    "to": back[0].target,
                    "keys_changed": changed,
                    "keys_changed_while_moving": during,
                    "bytes_changed": round(changed * sum(m.base_bytes for m in back) / (2 * (size // PAYLOAD))),
                    "bytes_warm": sum(m.bytes_warm for m in back),
                    "bytes_reused": sum(m.bytes_reused for m in back),
                    "bytes_delta": sum(m.bytes_delta for m in back),
                    "base_bytes": sum(m.base_bytes for m in back),
                    "pause_ms": [m.pause_ms for m in back],
                }
            )
            say(f"  trip {trip}, MB: {trips[-1]['bytes_changed'] / MB:.2f} changed, {_sent(trips[-1]) / MB:.2f} sent")
    figures = {"trips": trips, "bytes_sent": spread([_sent(trip) for trip in trips])}
    worst = max((_sent(trip) / trip["bytes_changed"] for trip in trips), default=None)
    return figures, [Target("bytes of a return over bytes changed, worst trip", worst, 1.05, "at_most")]


def _sent(trip: dict[str, Any]) -> int:
    sent: int = trip["bytes_warm"] + trip["bytes_delta"]
    return sent


def _note_keys(source: Source) -> set[int]:
    """Returns a set to which the source adds the keys of all rows that it writes from now on."""
    written: set[int] = set()
    pick = source.pick

    def noting(rng: random.Random) -> list[dict[str, Any]]:
        rows = pick(rng)
        written.update(row["k"] for row in rows)
        return rows

    source.pick = noting
    return written


def _m7(quick: bool, seed: int, only: Sequence[str] | None) -> tuple[dict[str, Any], list[Target]]:
    """Measures the latency of bystanders before and during moves of other partitions."""
    size = 100 * MB if quick else 500 * MB  # the p99 needs long moves
    runs = []
    for run in range(3 if quick else 5):
        with noting(), rig(Shape(size), seed + run) as (local, load):
            bystander: Latencies = load.sources[1].latencies
            load.wait(3 if quick else 15)
            middle = bystander.at_s[-1]
            moves = move(local, [0], "edge") + move(local, [1], "edge")
            ended = max(bystander.at_s[-1], middle + 1.0)
            before, during = bystander.between(load.began_s + 1, middle), bystander.between(middle, ended)
            runs.append(
                {
                    "before": summary(before),
                    "during": summary(during),
                    "moving_s": sum(m.duration_s for m in moves),
                    "generator_stalls": load.watch.found().to_json(),
                    "timeline": bystander.timeline(load.began_s),
                }
            )
            say(
                f"  bystanders' p99, ms: {runs[-1]['before'].get('p99')} before, {runs[-1]['during'].get('p99')} during"
            )
    ratios = [r for run in runs if (r := ratio(run["during"].get("p99"), run["before"].get("p99"))) is not None]
    worst = statistics.median(ratios) if ratios else None
    return {"runs": runs, "p99_ratio": spread(ratios)}, [
        Target("bystanders' p99, during over before", worst, 1.1, "at_most")
    ]


def _m8(quick: bool, seed: int, only: Sequence[str] | None) -> tuple[dict[str, Any], list[Target]]:
    """Compares pause budgets with the actual pauses of moves to and fro. Each budget has another load."""
    budgets = [25.0, 100.0] if quick else [10.0, 25.0, 50.0, 100.0, 500.0]
    admitted: list[tuple[float, float, float]] = []
    refused: dict[str, int] = {}
    for number, budget in enumerate(budgets):
        shape = Shape(2 * MB if quick else 20 * MB, hot=0.2, rewrites=True, interval_s=(0.01, 0.02, 0.05)[number % 3])
        with noting(), rig(shape, seed + number) as (local, _load):
            for trip in range(4 if quick else 20):
                to = "edge" if trip % 2 == 0 else "cloud"
                report = local.migrate(OPERATOR, [0, 1], to, max_pause_ms=budget, patience_s=5.0).wait()
                left = _refused(report)
                moved = [m for m in report.moves if m.state == "COMPLETED"]
                admitted += [(budget, m.predicted_pause_ms, m.pause_ms) for m in moved]
                if left:  # both partitions must be at one site before the next trip
                    refused[f"{budget:g}"] = refused.get(f"{budget:g}", 0) + len(left)
                    move(local, left, to)
        say(
            f"  budget {budget:g} ms: {sum(b == budget for b, _, _ in admitted)} admitted, "
            f"{refused.get(f'{budget:g}', 0)} refused"
        )
    within = [actual <= budget for budget, _, actual in admitted]
    close = [0.5 <= predicted / actual <= 2.0 for _, predicted, actual in admitted if actual > 0]
    figures = {
        "moves": [{"budget_ms": b, "predicted_ms": p, "actual_ms": a} for b, p, a in admitted],
        "refused": refused,
        "share_predicted_within_2x": sum(close) / len(close) if close else None,
    }
    errors = [abs(p - a) for _, p, a in admitted]
    figures["prediction_error_ms"] = spread(errors)
    typical = spread([max(p / a, a / p) for _, p, a in admitted if a > 0 and p > 0])["median"]
    return figures, [
        Target("share of admitted moves within budget", sum(within) / len(within) if within else None, 0.99),
        Target("prediction against actual, median factor", typical, 2.0, "at_most"),
    ]


def _refused(report: Reconfiguration) -> list[int]:
    """Returns the partitions whose moves were refused because their budget was out of reach.

    Raises RuntimeError if a move failed for another reason.
    """
    left = [m for m in report.moves if m.state != "COMPLETED"]
    if any(m.fault is None or m.fault.code != BudgetUnreachable.code for m in left):
        raise RuntimeError("; ".join(unfinished(report)))
    return [m.partition for m in left]


def _m3(quick: bool, seed: int, only: Sequence[str] | None) -> tuple[dict[str, Any], list[Target]]:
    return migrate_keys.experiment(quick, seed, only, _CHECKED, noting, say)


EXPERIMENTS: dict[str, Callable[[bool, int, Sequence[str] | None], tuple[dict[str, Any], list[Target]]]] = {
    "M1": _m1,
    "M2": _m2,
    "M3": _m3,
    "M6": _m6,
    "M7": _m7,
    "M8": _m8,
}


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    del _CHECKED[:], _FAILED[:]
    figures, targets = EXPERIMENTS[experiment](quick, seed, only)
    return Record(
        experiment=experiment,
        figures=figures,
        # the figures of the other runs stay, but without all of them no target is met
        targets=[replace(target, value=None) for target in targets] if _FAILED else targets,
        correctness=Correctness.of_all(_CHECKED),
        settings={
            "quick": quick,
            "rows_per_batch": ROWS,
            "payload_bytes": PAYLOAD,
            "acknowledge": ACKNOWLEDGE,
            **asdict(Shape(0)),
        },
        seed=seed,
        failures=list(_FAILED),
    )
