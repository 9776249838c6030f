"""The job, the input numbers and the reference that T2's contestants share.

The module needs only NumPy, and nothing of stateflow. So a rival whose requirements conflict with stateflow's can run
it in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PLAIN, ROWS, COLUMNS = "dict loop", "stateflow rows", "stateflow columns"
BYTEWAX, RECOVERY, RECOVERY_1S = "bytewax", "bytewax recovery", "bytewax recovery 1 s"
QUIX = "quix streams"
BATCH_ROWS = 100_000
VERIFY_ROWS, VERIFY_KEYS, VERIFY_BATCHES = 2_000, 100, 4
Columns = list[tuple[Any, Any]]
State = dict[int, tuple[int, float]]


@dataclass(frozen=True)
class Job:
    """The job of one worker process, which gets it as JSON."""

    contestant: str
    keys: int
    seed: int
    warm_up: int
    batches: int  # without the warm-up
    directory: str


@dataclass(slots=True)
class Outcome:
    """The result of one contestant.

    Attributes:
        began_s: time at which the warm-up ended.
        ended_s: time at which the run ended.
        outputs: (key, count, sum) of each output, in any order; empty: they were not kept.
        rows: number of outputs, which are counted even if they are not kept; None: not counted, the state is compared.
        state: key → (count, sum); None: the contestant's state cannot be read.
    """

    began_s: float = 0.0
    ended_s: float = 0.0
    outputs: list[tuple[int, int, float]] = field(default_factory=list)
    rows: int | None = None
    state: State | None = None


def columns_of(seed: int, keys: int, rows: int, batches: int) -> Columns:
    """Returns (keys, values) for each batch. Values are multiples of a quarter, so their sums are exact in any
    order."""
    numbers = np.random.default_rng(seed)
    return [(numbers.integers(0, keys, rows), numbers.integers(-4_000, 4_000, rows) / 4) for _ in range(batches)]


#: runs a contestant; arguments: batches, number of batches for the warm-up, directory, whether to keep the outputs
Contest = Callable[[Columns, int, Path, bool], Outcome]


def main(contests: Mapping[str, Contest]) -> None:
    """Runs the contestant of the job twice: first a timed run, then a small run whose outputs are verified."""
    job = Job(**json.loads(sys.argv[1]))
    directory = Path(job.directory)
    contest = contests[job.contestant]
    timed = columns_of(job.seed, job.keys, BATCH_ROWS, job.warm_up + job.batches)
    outcome = contest(timed, job.warm_up, directory / "timed", False)
    found: dict[str, Any] = {"rows_per_s": job.batches * BATCH_ROWS / (outcome.ended_s - outcome.began_s)}
    small = columns_of(job.seed + 1, VERIFY_KEYS, VERIFY_ROWS, VERIFY_BATCHES)
    checked = contest(small, 1, directory / "verify", True)
    found |= verdict(timed, outcome, small, checked, last_only=job.contestant == COLUMNS)
    (directory / "result.json").write_text(json.dumps(found))


def verdict(timed: Columns, outcome: Outcome, small: Columns, checked: Outcome, *, last_only: bool) -> dict[str, Any]:
    """Compares both runs with the reference. Returns the number of lost and duplicated outputs, and state_equal.

    Every output of the small run is compared. The final states of both runs are compared; state_equal is None if they
    cannot be read. In that case the outputs of the timed run are counted, if the contestant counts them.

    Args:
        timed: input of the timed run.
        outcome: result of the timed run.
        small: input of the small run.
        checked: result of the small run.
        last_only: the contestant emits one output for each key of a batch, instead of one for each row.
    """
    expected, state = reference(small, last_only=last_only)
    here, wanted = Counter(checked.outputs), Counter(expected)
    rows = sum(len(k) for k, _ in timed)
    more = 0 if outcome.rows is None else outcome.rows - rows
    equal = None
    if outcome.state is not None:
        equal = checked.state == state and outcome.state == reference(timed, last_only=True)[1]
    return {
        "lost": sum((wanted - here).values()) + max(0, -more),
        "duplicated": sum((here - wanted).values()) + max(0, more),
        "state_equal": equal,
    }


def reference(batches: Columns, *, last_only: bool) -> tuple[list[tuple[int, int, float]], State]:
    state: State = {}
    outputs = []
    for k, v in batches:
        of_batch = {}
        for key, value in zip(k.tolist(), v.tolist(), strict=True):
            n, total = state.get(key, (0, 0.0))
            state[key] = n, total = n + 1, total + value
            of_batch[key] = (key, n, total)
            if not last_only:
                outputs.append((key, n, total))
        if last_only:
            outputs += of_batch.values()
    return outputs, state
