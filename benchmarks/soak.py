"""SOAK: random moves, kills and stops of real processes under load. No row may be lost or duplicated.

The run lasts for the given minutes. There is one fault at a time, because a partition has only one standby. A stopped
or killed replica is away for longer than its lease or for a shorter time, at random.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.drift import REPLICAS_DISK, Drift
from benchmarks.load import Ledger, Load, Source, correctness_of, summary
from benchmarks.operators import Ballast
from benchmarks.record import Correctness, Record, Target
from stateflow.errors import StateflowError
from stateflow.testing import LocalCluster

OPERATOR = "Ballast"
PARTITIONS = 8
SITES = {"cloud": 1, "edge": 2}
REPLICAS = ("cloud-0", "edge-0", "edge-1")
LEASE_S = 3.0
#: replica that is stopped and takes part in moves, but is never killed, so that leaks show over the whole run
SURVIVOR = "cloud-0"
#: load as a share of the measured peak, and seconds for which the peak is measured
LOAD, PEAK_S = 0.5, 10.0
ROWS = 20
#: range of the seconds from the end of a fault to the next fault, which suffice for sending delayed batches
APART_S = (5.0, 15.0)
KEYS = 400
SETTLE_S = 60.0


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None, minutes: float = 15.0) -> Record:
    os.environ["STATEFLOW_CONTROLLER_LEASE_S"] = str(LEASE_S)
    os.environ["STATEFLOW_REPLICA_HEARTBEAT_INTERVAL_S"] = "0.3"
    os.environ["STATEFLOW_REPLICA_ACKNOWLEDGE"] = "standby"
    # by default, checkpoints are kept for an hour and dropped every 15 minutes, so the disk would grow during the run
    os.environ["STATEFLOW_REPLICA_CHECKPOINT_KEEP_S"] = "300"
    os.environ["STATEFLOW_REPLICA_CHECKPOINT_TIDY_INTERVAL_S"] = "60"
    # caches of the default size, 256 MiB each, fill for hours, which would look like a leak
    os.environ["STATEFLOW_REPLICA_BLOCK_CACHE_BYTES"] = str(16 << 20)
    os.environ["STATEFLOW_REPLICA_WRITE_BUFFER_BYTES"] = str(16 << 20)
    rng = random.Random(seed)
    done: Counter[str] = Counter()
    failures: list[str] = []
    correctness = Correctness(None, None, None, None)
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="stateflow-soak-") as folder,
        LocalCluster(Ballast, sites=SITES, partitions=PARTITIONS, data_dir=folder, checkpoint_interval_s=10) as local,
    ):
        local.cluster.standby(OPERATOR, 1)
        _ready(local)

        def pick(number: int) -> Callable[[random.Random], list[dict[str, Any]]]:
            mine = range(number * KEYS, (number + 1) * KEYS)
            return lambda rng: [{"k": rng.choice(mine), "v": 1.0, "size": 200} for _ in range(ROWS)]

        streams = [local.stream(OPERATOR, source=f"s{n}") for n in range(2)]
        peak = _peak([Source(stream, pick(n), 0.0) for n, stream in enumerate(streams)], seed)
        interval_s = len(streams) / (LOAD * peak.rate)
        sources = [Source(stream, pick(n), interval_s) for n, stream in enumerate(streams)]
        load = Load(sources, seed, keep_sent=True)
        load.truth = peak.truth
        drift = Drift(local)
        try:
            with load, drift:
                ends = time.monotonic() + minutes * 60
                while time.monotonic() < ends:
                    what = _fault(local, rng, load)
                    done[what] += 1
                    print(f"  {what}", file=sys.stderr, flush=True)
                    _ready(local)
                    load.wait(rng.uniform(*APART_S))
            correctness = correctness_of(load, local.cluster, OPERATOR)
        except (StateflowError, TimeoutError) as error:
            failures.append(str(error))
        kinds = Counter(f"{r.kind} {r.state}" for r in local.cluster.reconfigurations())
        latencies = [took * 1e3 for source in sources for took in source.latencies.took_s]
        thirds = [summary(part) for part in _thirds(sources)]
        grown = drift.figures()
        if drift.failed is not None:
            failures.append(f"growth was not sampled to the end: {drift.failed!r}")
        figures = {
            "minutes": minutes,
            "peak_batches_per_s": round(peak.rate, 1),
            "p99_ms_by_third": [part.get("p99") for part in thirds],
            "drift": grown,
            "batches": len(latencies),
            "faults": dict(done),
            "reconfigurations": dict(kinds),
            "rewinds": sum(source.rewinds for source in sources),
            "latency_ms": summary(latencies),
        }
    return Record(
        experiment=experiment,
        figures=figures,
        targets=[
            Target("records lost or duplicated", _wrong(correctness), 0, "at_most"),
            Target("load behind, at most, s", _behind_s(figures), 60, "at_most"),
            Target("p99 of the last third over that of the first", _worsened(figures), 1.5, "at_most"),
            *_flat(figures.get("drift", {})),
        ],
        correctness=correctness,
        settings={"quick": quick, "lease_s": LEASE_S, "partitions": PARTITIONS, "sites": SITES, "standbys": 1},
        seed=seed,
        failures=failures,
    )


@dataclass(frozen=True, slots=True)
class _Peak:
    """The measured peak load.

    Attributes:
        rate: batches a second of all senders together.
        truth: expected result of the rows that were sent.
    """

    rate: float
    truth: Ledger


def _peak(sources: Sequence[Source], seed: int) -> _Peak:
    load = Load(sources, seed)
    with load:
        load.wait(PEAK_S)
    return _Peak(sum(len(source.latencies.took_s) for source in sources) / PEAK_S, load.truth)


def _thirds(sources: Sequence[Source]) -> list[list[float]]:
    parts: list[list[float]] = [[], [], []]
    for source in sources:
        took = source.latencies.took_s
        for number, seconds in enumerate(took):
            parts[number * 3 // len(took)].append(seconds * 1e3)
    return parts


def _behind_s(figures: Mapping[str, Any]) -> float | None:
    most_ms = figures.get("latency_ms", {}).get("max")
    return None if most_ms is None else most_ms / 1e3


def _worsened(figures: Mapping[str, Any]) -> float | None:
    first, _, last = figures.get("p99_ms_by_third", (None, None, None))
    return round(last / first, 3) if first and last else None


def _flat(grown: Mapping[str, Mapping[str, float]]) -> list[Target]:
    """Returns targets for the growth of series.

    There are targets for the survivor, the controller, the checkpoints, and the disks of all replicas together, because
    partitions move between replicas at random. The ledger has no target, because it grows with every record. A target
    is not met if its series was not sampled.
    """
    watched = [f"{name} {what}" for name in (SURVIVOR, "controller") for what in ("memory MB", "files", "threads")]
    watched += [REPLICAS_DISK, "checkpoints disk MB"]
    return [
        Target(f"growth of {name}", grown[name]["grew"] if name in grown else None, 0.1, "at_most") for name in watched
    ]


def _wrong(correctness: Correctness) -> float | None:
    if correctness.lost is None or correctness.duplicated is None:
        return None
    return float(correctness.lost + correctness.duplicated)


def _fault(local: LocalCluster, rng: random.Random, load: Load) -> str:
    """Causes one random fault and repairs it. Returns the fault's name."""
    kind = rng.choice(["move", "move", "move", "kill", "stop", "kill during a move", "controller", "rebalance"])
    victim = rng.choice(REPLICAS if kind == "stop" else [name for name in REPLICAS if name != SURVIVOR])
    outlast = rng.random() < 0.5
    away_s = LEASE_S * 1.5 if outlast else rng.uniform(0.0, LEASE_S * 0.3)
    match kind:
        case "move":
            _move(local, rng)
        case "rebalance":
            for migration in local.cluster.rebalance():
                migration.wait()
        case "controller":
            _move(local, rng, wait=False)
            local.kill("controller")
            load.wait(rng.uniform(0.0, 1.0))
            local.restart("controller")
        case "stop":
            local.freeze(victim)
            load.wait(away_s)
            local.thaw(victim)
        case _:
            if kind == "kill during a move":
                _move(local, rng, wait=False)
            local.kill(victim)
            load.wait(away_s)
            local.restart(victim)
    lasting = kind in ("stop", "kill", "kill during a move") and outlast
    return f"{kind}{', longer than the lease' if lasting else ''}"


def _move(local: LocalCluster, rng: random.Random, wait: bool = True) -> None:
    partitions = rng.sample(range(PARTITIONS), rng.randint(1, 3))
    strategy = rng.choice(["auto", "warm-up", "pause-and-copy", "fluid", "batched", "on-demand"])
    try:
        migration = local.migrate(OPERATOR, partitions, rng.choice(REPLICAS), strategy=strategy)
    except StateflowError:
        return  # the partitions are there already, or moving
    if wait:
        migration.wait()


def _ready(local: LocalCluster) -> None:
    """Waits until every replica answers, no move runs and each partition has its standby. Raises TimeoutError."""
    deadline = time.monotonic() + SETTLE_S
    last = ""
    while time.monotonic() < deadline:
        try:
            status = local.cluster.status()
        except StateflowError as error:
            last = str(error)
        else:
            alive = sum(bool(replica.alive) for replica in status.replicas)
            moving = [r.id for r in status.reconfigurations if r.state == "RUNNING"]
            following = {v.partition for v in status.standbys if v.phase == "CATCHING_UP"}
            if alive == len(REPLICAS) and not moving and len(following) == PARTITIONS:
                return
            last = f"{alive} replicas answer, {moving} move, {len(following)} partitions have a standby"
        time.sleep(0.1)
    raise TimeoutError(f"not recovered within {SETTLE_S:g} s: {last}")
