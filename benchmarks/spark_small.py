"""T1-small and T4: small micro-batches under Spark.

T1-small measures the duration of micro-batches with no rows and with 1,000 rows. It compares them with those of a query
that only sends rows to Python and back, which is Spark's floor.

T4 measures the duration of micro-batches with 1,000 rows by the number of partitions.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import Correctness, Record, Target, ratio, spread
from benchmarks.spark import (
    FIRST_FILE_S,
    MINE,
    PARTITIONS,
    TRIVIAL,
    VERIFY_BATCHES,
    VERIFY_KEYS,
    VERIFY_ROWS,
    Timed,
    job_of,
    run_session,
    say,
    write_input,
)

KEYS = 1_000
ROWS = 1_000
SMALL_ROWS = (0, ROWS)
SMALL_BOUND = 1.5
SPREAD_PARTITIONS = (16, 1_024, 4_096)
SPREAD_BOUND = 1.2


class _Runs:
    """The runs of one experiment: durations of the counted micro-batches, and the results of verification."""

    def __init__(self, directory: Path, seed: int, batches: tuple[int, int], rows: Sequence[int]) -> None:
        """Writes the input files.

        Args:
            batches: (number of micro-batches for the warm-up, number of micro-batches that count).
            rows: numbers of rows of the micro-batches, which take turns.
        """
        self.seconds: dict[str, dict[str, list[float]]] = {}  # by case and rows
        self.checks: list[Correctness] = []
        self.failures: list[str] = []
        warm_up, counted = batches
        self._directory, self._number = directory, 0
        timed = write_small_input(directory / "timed", seed, warm_up + counted, rows)
        self._verify = write_input(directory / "verify", seed + 1, VERIFY_KEYS, VERIFY_ROWS, VERIFY_BATCHES)
        self._query = Timed(KEYS, warm_up, warm_up + counted, str(timed))

    def add(self, case: str, contestant: str, partitions: int = PARTITIONS) -> None:
        """Runs a contestant in a session of its own, and adds its durations to those of a case."""
        self._number += 1
        place = self._directory / f"{contestant}-{self._number}"
        job = job_of(place, contestant, [self._query], self._verify, small=True, partitions=partitions)
        outcome = run_session([job])[contestant]
        if "error" in outcome:
            self.failures.append(f"{case}: {outcome['error']}")
            return
        if contestant != TRIVIAL:  # the floor keeps no state
            self.checks.append(Correctness(**outcome["correctness"]))
        for rows, took in outcome["seconds"].items():
            self.seconds.setdefault(case, {}).setdefault(rows, []).extend(took)
        told = (f"{rows} rows {spread(took)['median']:.3f} s" for rows, took in self.seconds[case].items())
        say(f"{case}: {', '.join(told)}")

    def record(self, experiment: str, targets: list[Target], settings: dict[str, object], seed: int) -> Record:
        return Record(
            experiment=experiment,
            figures={"batch_s": self.figures},
            targets=targets,
            correctness=Correctness.of_all(self.checks),
            settings={"sink": "noop", **settings},
            seed=seed,
            failures=self.failures,
        )

    @property
    def figures(self) -> dict[str, dict[str, dict[str, float]]]:
        return {case: {rows: spread(took) for rows, took in by.items()} for case, by in self.seconds.items()}

    def over(self, one: str, other: str, rows: int) -> float | None:
        """Returns the median duration of case ``one`` over that of case ``other``; None if one of them is missing."""
        above, below = (self.figures.get(case, {}).get(str(rows), {}).get("median") for case in (one, other))
        return ratio(above, below)


def run(experiment: str, *, quick: bool, seed: int) -> Record:
    with tempfile.TemporaryDirectory(prefix="stateflow-small-") as directory:
        return (_spread if experiment == "T4" else _small)(experiment, Path(directory), quick=quick, seed=seed)


def _small(experiment: str, directory: Path, *, quick: bool, seed: int) -> Record:
    """Measures micro-batches of both sizes, which take turns in one query of each contestant.

    The contestants run one after another, and all runs are repeated.
    """
    batches, rounds = ((10, 20), 1) if quick else ((20, 60), 3)
    runs = _Runs(directory, seed, batches, SMALL_ROWS)
    for _ in range(rounds):
        for name in (TRIVIAL, *MINE):
            runs.add(name, name)
    targets = [
        Target(
            f"micro-batch of {rows:,} rows, {mine}/{TRIVIAL}", runs.over(mine, TRIVIAL, rows), SMALL_BOUND, "at_most"
        )
        for mine in MINE
        for rows in SMALL_ROWS
    ]
    settings = {"quick": quick, "batches_counted": batches[1], "rounds": rounds}
    return runs.record(experiment, targets, settings, seed)


def _spread(experiment: str, directory: Path, *, quick: bool, seed: int) -> Record:
    """Measures the floor first, then stateflow with more and more partitions. All runs are repeated."""
    batches, rounds, mine = ((8, 10), 1, MINE[:1]) if quick else ((40, 60), 3, MINE)
    runs = _Runs(directory, seed, batches, (ROWS,))

    def case(name: str, partitions: int) -> str:
        return f"{name}, {partitions:,} partitions"

    for _ in range(rounds):
        runs.add(TRIVIAL, TRIVIAL)
        for name in mine:
            for partitions in SPREAD_PARTITIONS:
                runs.add(case(name, partitions), name, partitions)
    few = SPREAD_PARTITIONS[0]
    targets = [
        Target(
            f"micro-batch of {ROWS:,} rows, {name}, {many:,}/{few} partitions",
            runs.over(case(name, many), case(name, few), ROWS),
            SPREAD_BOUND,
            "at_most",
        )
        for name in mine
        for many in SPREAD_PARTITIONS[1:]
    ]
    settings = {"quick": quick, "batches_counted": batches[1], "rounds": rounds, "partitions": SPREAD_PARTITIONS}
    return runs.record(experiment, targets, settings, seed)


def write_small_input(directory: Path, seed: int, files: int, sizes: Sequence[int] = SMALL_ROWS) -> Path:
    """Writes a file for each micro-batch. ``sizes`` are the numbers of rows of the files, which take turns."""
    directory.mkdir()
    for index in range(files):
        part = write_input(directory / f"of-{index}", seed + index, KEYS, sizes[index % len(sizes)], 1)
        path = (part / "part-00000.parquet").rename(directory / f"part-{index:05d}.parquet")
        os.utime(path, (FIRST_FILE_S + index, FIRST_FILE_S + index))
        part.rmdir()
    return directory
