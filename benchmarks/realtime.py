"""REALTIME: time from a row's due time at the source until the sink has the row's output, in Spark's real-time mode.

For each rate, a query runs for a while without moves, and then for a while in which all partitions move from one site
to the other and back. For comparison, the same operator runs in micro-batches, and an equivalent with Spark's
transformWithState runs in the JVM, in real time. A row that is due between two epochs of Spark arrives in the next
epoch. So there are figures for all rows, and figures for only the rows that were due within an epoch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.load import summary, unfinished
from benchmarks.record import REPOSITORY, Correctness, Record, Target
from benchmarks.replay import Given, Log, has_compiler, make_jar
from benchmarks.replay.driver import IN_JVM, Query
from benchmarks.replay.operators import Count
from stateflow.testing import LocalCluster

OPERATOR, SITES, PARTITIONS, SOURCES, KEYS = "Count", ("a", "b"), 16, 2, 64
#: rows a second, of all source partitions together
RATES, RATES_QUICK = (10, 100, 1000), (100,)
MICRO_RATE = 100
EPOCH = "10 seconds"
#: seconds until the first rows are due; a Spark session starts within this time
START_S = 30.0
WARM_S, ALONE_S, MOVING_S, AFTER_S = 12.0, 30.0, 30.0, 5.0
TIMEOUT_S = 120.0
P50_MS, P99_MS, PAUSE_MS = 10.0, 30.0, 50.0


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] = ()) -> Record:
    if not has_compiler():
        nothing = Correctness(None, None, None, None)
        return Record(
            experiment, {}, [], nothing, {}, seed, skipped="javac is missing: the source of rows is written in Java"
        )
    alone_s, moving_s = (12.0, 12.0) if quick else (ALONE_S, MOVING_S)
    figures: dict[str, Any] = {}
    correct: list[Correctness] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="realtime-") as made:
        jar = make_jar(Path(made))
        for rate in RATES_QUICK if quick else RATES:
            print(f"{rate} rows/s in real time", file=sys.stderr)
            cell, sound = _cell(Path(made) / f"{rate}", jar, rate, EPOCH, alone_s, moving_s, failures)
            figures[f"{rate} rows/s"] = cell
            correct.append(sound)
        print(f"{MICRO_RATE} rows/s in micro-batches", file=sys.stderr)
        figures[f"{MICRO_RATE} rows/s, micro-batches"], sound = _cell(
            Path(made) / "micro", jar, MICRO_RATE, "", alone_s, 0.0, failures
        )
        correct.append(sound)
        print(f"{MICRO_RATE} rows/s by {IN_JVM}", file=sys.stderr)
        figures[f"{MICRO_RATE} rows/s, {IN_JVM} in the JVM"], _ = _cell(
            Path(made) / "jvm", jar, MICRO_RATE, EPOCH, alone_s, 0.0, failures, IN_JVM
        )
    return Record(
        experiment,
        figures,
        _targets(figures),
        Correctness.of_all(correct),
        {"partitions": PARTITIONS, "source_partitions": SOURCES, "epoch": EPOCH, "rates": [*figures]},
        seed,
        failures,
    )


def _targets(figures: dict[str, Any]) -> list[Target]:
    targets = []
    for name, cell in figures.items():
        if "moving" not in cell:
            continue
        within = cell["alone"]["within_an_epoch_ms"]
        targets += [
            Target(f"p50 within an epoch at {name}, ms", within.get("p50"), P50_MS, "at_most"),
            Target(f"p99 within an epoch at {name}, ms", within.get("p99"), P99_MS, "at_most"),
            Target(
                f"longest pause of a move at {name}, ms", cell["moving"]["pause_ms"].get("max"), PAUSE_MS, "at_most"
            ),
        ]
    return targets


def _cell(
    folder: Path,
    jar: Path,
    rate: int,
    epoch: str,
    alone_s: float,
    moving_s: float,
    failures: list[str],
    operator: str = OPERATOR,
) -> tuple[dict[str, Any], Correctness]:
    """Measures one rate, and adds a line for each move that did not complete to ``failures``."""
    folder.mkdir()
    interval_us = SOURCES * 1_000_000 // rate
    seconds = WARM_S + alone_s + moving_s + AFTER_S
    rows = int(seconds * 1e6 / interval_us)
    with LocalCluster(Count, sites=dict.fromkeys(SITES, 1), partitions=PARTITIONS, checkpoint_interval_s=0) as local:
        t0_us = round((time.time() + START_S) * 1e6)
        query = Query(
            str(jar), local.address, str(folder / "checkpoint"), str(folder / "out"), t0_us, rows, interval_us
        )
        query = replace(query, partitions=SOURCES, keys=KEYS, epoch=epoch, operator=operator)
        log = Log(Path(query.out))
        with _running(query) as driver:
            begin_s = t0_us / 1e6 + WARM_S
            _sleep_until(begin_s + alone_s)
            moving_until = begin_s + alone_s + moving_s
            pauses = _pauses(local, moving_until, failures)
            until = time.monotonic() + TIMEOUT_S
            while len(log.taken()) < rows * SOURCES and time.monotonic() < until and driver.poll() is None:
                time.sleep(0.5)
            given = log.rows()
            sound = _correctness(log.taken(), rows, local)
        figures: dict[str, Any] = {"alone": _latencies(given, query, begin_s, begin_s + alone_s)}
        if moving_s:
            figures["moving"] = _latencies(given, query, begin_s + alone_s, moving_until) | {
                "moves": len(pauses),
                "pause_ms": summary(pauses),
            }
    return figures, sound


def _pauses(local: LocalCluster, until_s: float, failures: list[str]) -> list[float]:
    """Moves all partitions to and fro until a time, in seconds since 1970.

    Returns the pauses of the moves that completed, in ms. Adds a line for each other move to ``failures``.
    """
    pauses: list[float] = []
    number = 0
    while time.time() < until_s:
        number += 1
        report = local.cluster.migrate(OPERATOR, range(PARTITIONS), SITES[number % 2]).wait()
        pauses += [move.pause_ms for move in report.moves if move.state == "COMPLETED"]
        failures += unfinished(report)
    return pauses


@contextmanager
def _running(query: Query) -> Iterator[subprocess.Popen[bytes]]:
    driver = subprocess.Popen(query.command, cwd=REPOSITORY, stdout=sys.stderr)
    try:
        yield driver
    finally:
        driver.terminate()
        driver.wait(60)


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.time()))


def _latencies(given: list[Given], query: Query, from_s: float, until_s: float) -> dict[str, Any]:
    """Returns a summary of the latencies of the rows that were due between two times.

    If a row has several outputs, because Spark repeated an epoch, only the first output counts.
    """
    began_us: dict[str, int] = {}
    for each in given:
        began_us.setdefault(each.attempt, each.at_us)
    took: list[float] = []
    within: list[float] = []
    seen: set[tuple[str, ...]] = set()
    for each in given:
        due_us = query.t0_us + int(each.columns[1]) * query.interval_us
        if each.columns[:2] in seen or not from_s * 1e6 <= due_us < until_s * 1e6:
            continue
        seen.add(each.columns[:2])
        took.append((each.at_us - due_us) / 1e3)
        if due_us > began_us[each.attempt]:
            within.append(took[-1])
    return {"rows": len(took), "all_ms": summary(took), "within_an_epoch_ms": summary(within), "within": len(within)}


def _correctness(taken: list[Given], rows: int, local: LocalCluster) -> Correctness:
    wanted = {(str(part), str(off)) for part in range(SOURCES) for off in range(rows)}
    came = Counter(each.columns[:2] for each in taken)
    counts = Counter(each.columns[2] for each in taken)
    places = {(each.columns[2], int(each.columns[4])) for each in taken}
    whole = places == {(key, n) for key, count in counts.items() for n in range(1, count + 1)}
    state = {row["key"]: row["value"] for row in local.cluster.read_state(OPERATOR, "n").to_pylist()}
    return Correctness(
        lost=len(wanted - came.keys()),
        duplicated=sum(came.values()) - len(came),
        late=0,
        state_equal=whole and state == dict(counts),
    )
