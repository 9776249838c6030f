"""G1: batched appends per second to a durable SQLite ledger, and the time of look-ups as the ledger grows.

``G1`` measures look-ups in ledgers of 10⁴, 10⁵ and 10⁶ records. ``G1-1e7`` also measures them in one of 10⁷ records; it
takes 16 minutes on two idle cores, and 5 GB of disk.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from benchmarks.record import Correctness, Record, Target, ratio, spread
from stateflow.ledger import App, Entry, Ledger
from stateflow.ledger.records import RECORD

APP = App("benchmark", "1")
STATES = ("NEW", "PROCESSING", "PROCESSED")
ITEMS_PER_BATCH = 500
LOOKUPS, WARM_UP = 3000, 300
APPEND_S, APPEND_QUICK_S = 300.0, 20.0
SIZES = {"G1": (10**4, 10**5, 10**6), "G1-1e7": (10**4, 10**5, 10**6, 10**7)}


def run(experiment: str, *, quick: bool, seed: int, only: Sequence[str] | None = None) -> Record:
    rng = random.Random(seed)
    sizes = SIZES[experiment]
    append_s = APPEND_QUICK_S if quick else APPEND_S
    with tempfile.TemporaryDirectory(prefix="stateflow-ledger-bench-") as directory:
        appends, first = _appends(Path(directory) / "appends.db", append_s)
        lookups, second = _lookups(Path(directory) / "lookups.db", sizes, rng)
    p99 = {size: lookups[f"{size:.0e}"]["p99_us"] for size in sizes}
    targets = [
        Target("batched appends per second, whole run", appends["per_s"], 1000),
        Target("p99 of a look-up at 1e6 / at 1e5", ratio(p99[10**6], p99[10**5]), 2.0, "at_most"),
    ]
    if 10**7 in p99:
        targets.append(Target("p99 of a look-up at 1e7 / at 1e5", ratio(p99[10**7], p99[10**5]), 2.0, "at_most"))
    return Record(
        experiment=experiment,
        figures={"appends": appends, "lookups": lookups},
        targets=targets,
        correctness=Correctness.of_all([first, second]),
        settings={
            "quick": quick,
            "append_s": append_s,
            "items_per_batch": ITEMS_PER_BATCH,
            "records_per_item": len(STATES),
            "lookups": LOOKUPS,
            "database": "SQLite, WAL, synchronous=FULL, a new process's page cache",
        },
        seed=seed,
    )


def _batch(first: int) -> list[Entry]:
    """Returns all records of ``ITEMS_PER_BATCH`` items, from new to processed, for one transaction."""
    news = [Entry(f"item-{n:09}", APP, "NEW") for n in range(first, first + ITEMS_PER_BATCH)]
    locks = [Entry(new.item_id, APP, "PROCESSING", new) for new in news]
    ends = [Entry(lock.item_id, APP, "PROCESSED", lock, {"rows": 17}) for lock in locks]
    return [*news, *locks, *ends]


def _appends(file: Path, seconds: float) -> tuple[dict[str, Any], Correctness]:
    """Appends for ``seconds``, as fast as one writer can. A record counts as soon as its commit has returned."""
    _say(f"appends for {seconds:.0f} s")
    commits_ms: list[float] = []
    per_second: list[int] = []
    items = 0
    with Ledger(f"sqlite:///{file}") as ledger:
        started = time.perf_counter()
        while (now := time.perf_counter() - started) < seconds:
            ledger.put_many(_batch(items))
            items += ITEMS_PER_BATCH
            ended = time.perf_counter() - started
            commits_ms.append((ended - now) * 1e3)
            per_second += [0] * (int(ended) + 1 - len(per_second))
            per_second[int(ended)] += ITEMS_PER_BATCH * len(STATES)
        elapsed = time.perf_counter() - started
        found = _count(ledger)
        faults = ledger.verify()
    written = items * len(STATES)
    whole = per_second[:-1] or per_second
    figures = {
        "records": written,
        "elapsed_s": elapsed,
        "per_s": written / elapsed,
        "per_s_slowest_second": float(min(whole)),
        "transaction_ms": {key: value for key, value in spread(commits_ms).items() if key != "values"},
    }
    return figures, Correctness(max(0, written - found), max(0, found - written), 0, faults == [])


def _lookups(file: Path, sizes: Sequence[int], rng: random.Random) -> tuple[dict[str, Any], Correctness]:
    """Measures look-ups of random items at each size of the ledger.

    A look-up reads all records of an item and checks them.
    """
    figures: dict[str, Any] = {}
    items = wrong = lost = 0
    for size in sizes:
        _say(f"growing to {size:.0e} records")
        with Ledger(f"sqlite:///{file}") as ledger:
            while items * len(STATES) < size:
                ledger.put_many(_batch(items))
                items += ITEMS_PER_BATCH
        with Ledger(f"sqlite:///{file}") as ledger:  # a new connection: its page cache is empty
            took_us = []
            for _ in range(WARM_UP + LOOKUPS):
                item_id = f"item-{rng.randrange(items):09}"
                started = time.perf_counter()
                item = ledger.item(item_id)
                took_us.append((time.perf_counter() - started) * 1e6)
                wrong += item is None or len(item.records) != len(STATES) or not item.consistent
            lost += abs(items * len(STATES) - _count(ledger))
        ordered = sorted(took_us[WARM_UP:])
        figures[f"{size:.0e}"] = {
            "records": items * len(STATES),
            "p50_us": ordered[len(ordered) // 2],
            "p99_us": ordered[len(ordered) * 99 // 100],
            "max_us": ordered[-1],
            "bytes_on_disk": file.stat().st_size,
        }
    return figures, Correctness(lost, 0, 0, wrong == 0)


def _count(ledger: Ledger) -> int:
    with ledger.database.reading() as connection:
        return int(connection.execute(select(func.count()).select_from(RECORD)).scalar() or 0)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
