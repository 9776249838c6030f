"""L1: latency of a StreamClient under steady load. L2: latency by the number of partitions.

In L1, saturation is measured first: each sender sends its next batch as soon as the last one is answered. Then the same
senders send at fixed times, at a share of the saturation. Latency counts from the time at which a batch was scheduled.
The clients run in this process, so their cost is part of the figures. The record says for how long this process itself
was stalled.

In L2, one sender sends batches of 200 rows without a pause. The number of partitions grows from run to run, which shows
the cost of a partition. Making the rows and checking the answers is part of a batch's time. A second operator is
measured as well, which also writes a state with a ttl and sets a timer for each row.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.load import Ledger, Load, Source, ccdf, correctness_of, summary
from benchmarks.operators import CountSum, CountSumTimed
from benchmarks.record import Correctness, Record, Target, ratio, spread
from stateflow import Operator
from stateflow.testing import LocalCluster

OPERATOR = "CountSum"
PARTITIONS = 8
SENDERS = 2
ROWS = 20  # per batch
KEYS = 10_000
SHARES = (0.25, 0.50, 0.75)
SETTLE_S = 1.0  # not counted
SATURATION_BOUND = 30_000  # rows/s
BOUNDS_MS = {"p50": 2.0, "p99": 5.0}
SPREAD_ROWS = 200  # per batch of L2
SPREAD_PARTITIONS = (16, 128, 1_024, 4_096)
SPREAD_BOUND = 1.5
#: maximum number of partitions of CountSumTimed in the quick size, whose two minutes suffice for creating 4,096
#: partitions only once
TIMED_QUICK_MAX = 128


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    if experiment == "L2":
        return _run_spread(quick=quick, seed=seed)
    seconds, runs = (6.0, 2) if quick else (60.0, 5)
    rates: list[float] = []
    levels: dict[str, list[dict[str, Any]]] = {f"{share:.0%}": [] for share in SHARES}
    parts: list[Correctness] = []
    for number in range(runs):
        with LocalCluster(CountSum, sites={"cloud": 1}, partitions=PARTITIONS, checkpoint_interval_s=0) as local:
            truth = Ledger()
            saturation = _saturation(local, truth, seed + number, seconds)
            rates.append(saturation * ROWS)
            for share in SHARES:
                load = _load(local, truth, f"s{share}", seed + number, SENDERS / (share * saturation))
                levels[f"{share:.0%}"].append(found := _watched(load, seconds))
                _say(f"  {share:.0%} of {rates[-1]:,.0f} rows/s: p99 {found['latency_ms']['p99']:.2f} ms")
            parts.append(correctness_of(load, local.cluster, OPERATOR))
    percentiles = {
        name: {share: spread([found["latency_ms"][name] for found in each]) for share, each in levels.items()}
        for name in ("p50", "p99", "p99_9")
    }
    saturation_rows = spread(rates)
    stalled = max(found["stalls"]["share"] for each in levels.values() for found in each)
    return Record(
        experiment=experiment,
        figures={
            "saturation_rows_per_s": saturation_rows,
            **{f"{name}_ms": found for name, found in percentiles.items()},
            "generator_stalled_share_worst": stalled,
            "levels": {share: each[-1] for share, each in levels.items()},
        },
        targets=[
            Target("saturation, rows/s", saturation_rows["median"], SATURATION_BOUND),
            *(
                Target(f"{name} at {share} of saturation, ms", percentiles[name][share]["median"], bound, "at_most")
                for name, bound in BOUNDS_MS.items()
                for share in levels
            ),
        ],
        correctness=Correctness.of_all(parts),
        settings={
            "quick": quick,
            "partitions": PARTITIONS,
            "senders": SENDERS,
            "rows_per_batch": ROWS,
            "keys": KEYS,
            "seconds_per_level": seconds,
            "runs": runs,
        },
        seed=seed,
    )


def _run_spread(*, quick: bool, seed: int) -> Record:
    seconds, runs = (3.0, 1) if quick else (30.0, 5)
    measured: dict[type[Operator], dict[str, dict[str, list[float]]]] = {CountSum: {}, CountSumTimed: {}}
    parts: list[Correctness] = []
    for number in range(runs):
        for partitions in SPREAD_PARTITIONS:
            for operator, found in measured.items():
                if quick and operator is CountSumTimed and partitions > TIMED_QUICK_MAX:
                    continue
                of = found.setdefault(str(partitions), {"rows_per_s": [], "p50_ms": [], "p99_ms": []})
                parts.append(_spread_over(operator, partitions, seconds, seed + number, of))
    plain, timed = (
        {count: {name: spread(values) for name, values in of.items()} for count, of in found.items()}
        for found in measured.values()
    )
    few, many = (plain[str(count)] for count in (SPREAD_PARTITIONS[0], SPREAD_PARTITIONS[-1]))
    costs = {name: ratio(many[name]["median"], few[name]["median"]) for name in ("p50_ms", "p99_ms")}
    costs["seconds a row"] = ratio(few["rows_per_s"]["median"], many["rows_per_s"]["median"])
    return Record(
        experiment="L2",
        figures={"by_partitions": plain, "by_partitions_with_timer_and_ttl": timed},
        targets=[
            Target(
                f"{name}, {SPREAD_PARTITIONS[-1]:,}/{SPREAD_PARTITIONS[0]} partitions", cost, SPREAD_BOUND, "at_most"
            )
            for name, cost in costs.items()
        ],
        correctness=Correctness.of_all(parts),
        settings={
            "quick": quick,
            "rows_per_batch": SPREAD_ROWS,
            "keys": KEYS // SENDERS,
            "seconds": seconds,
            "runs": runs,
        },
        seed=seed,
    )


def _spread_over(
    operator: type[Operator], partitions: int, seconds: float, seed: int, found: dict[str, list[float]]
) -> Correctness:
    """Measures an operator with this number of partitions, and adds the figures to ``found``."""
    name = operator.__name__
    # two replicas: many systems limit a process to fewer open files than 4,096 partitions may need
    with LocalCluster(operator, sites={"cloud": 2}, partitions=partitions, checkpoint_interval_s=0) as local:
        load = Load([Source(local.stream(name, source="spread"), picker(0, SPREAD_ROWS), 0.0)], seed)
        with load:
            load.wait(SETTLE_S + seconds)
        # all batches are scheduled for the start of the load, so a batch takes the time since the previous answer
        ends = [end for end in load.sources[0].latencies.took_s if end >= SETTLE_S]
        each = summary([1e3 * (end - before) for before, end in pairwise(ends)])
        correctness = correctness_of(load, local.cluster, name)
    found["rows_per_s"].append((len(ends) - 1) * SPREAD_ROWS / (ends[-1] - ends[0]))
    found["p50_ms"].append(each["p50"])
    found["p99_ms"].append(each["p99"])
    _say(f"  {name}, {partitions:,} partitions: {found['rows_per_s'][-1]:,.0f} rows/s, p50 {each['p50']:.2f} ms")
    return correctness


def _saturation(local: LocalCluster, truth: Ledger, seed: int, seconds: float) -> float:
    """Returns the batches per second of all senders together, if each sends as soon as its last batch is answered."""
    load = _load(local, truth, "saturate", seed, 0.0)
    with load:
        load.wait(seconds / 2)
        before, began = _sent(load), time.monotonic()
        load.wait(seconds)
        return (_sent(load) - before) / (time.monotonic() - began)


def _sent(load: Load) -> int:
    return sum(len(source.latencies.at_s) for source in load.sources)


def _load(local: LocalCluster, truth: Ledger, name: str, seed: int, interval_s: float) -> Load:
    sources = [
        Source(local.stream(OPERATOR, source=f"{name}-{number}"), picker(number), interval_s)
        for number in range(SENDERS)
    ]
    load = Load(sources, seed)
    load.truth = truth  # the state carries over from one load to the next
    return load


def picker(number: int, rows: int = ROWS) -> Callable[[random.Random], list[dict[str, Any]]]:
    """Returns a function that returns random rows for sender ``number``.

    Sender n has the keys with remainder n after division by the number of senders, so no two senders share a key.
    """

    def pick(rng: random.Random) -> list[dict[str, Any]]:
        keys = [rng.randrange(KEYS // SENDERS) * SENDERS + number for _ in range(rows)]
        return [{"k": key, "v": rng.randrange(-4000, 4000) / 4} for key in keys]

    return pick


def _watched(load: Load, seconds: float) -> dict[str, Any]:
    with load:
        load.wait(SETTLE_S + seconds)
    begin = load.began_s + SETTLE_S
    each = [took for source in load.sources for took in source.latencies.between(begin, begin + seconds)]
    return {
        "batches": len(each),
        "rows_per_s": len(each) * ROWS / seconds,
        "latency_ms": summary(each),
        "ccdf": ccdf(each),
        "timeline": load.sources[0].latencies.timeline(load.began_s),
        "stalls": load.watch.found().to_json(),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
