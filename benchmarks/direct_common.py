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
        outputs: (key, count, sum) of each output, in any order.
        state: key → (count, sum); None: the contestant's state cannot be read.
    """

    began_s: float = 0.0
    ended_s: float = 0.0
    outputs: list[tuple[int, int, float]] = field(default_factory=list)
    state: State | None = None


def columns_of(seed: int, keys: int, rows: int, batches: int) -> Columns:
    """Returns (keys, values) for each batch. Values are multiples of a quarter, so their sums are exact in any
    order."""
    numbers = np.random.default_rng(seed)
    return [(numbers.integers(0, keys, rows), numbers.integers(-4_000, 4_000, rows) / 4) for _ in range(batches)]


#: runs a contestant; arguments: batches, number of batches for the warm-up, directory, whether to keep the outputs
Contest = Callable[[Columns, int, Path, bool], Outcome]


def main(contests: Mapping[str, Contest]) -> None:
    """Runs the contestant of the job twice: first a timed run, then a small run that is verified.

    Every output row of the small run is compared with the reference. The final states of both runs are compared as
    well, if they can be read.
    """
    job = Job(**json.loads(sys.argv[1]))
    directory = Path(job.directory)
    contest = contests[job.contestant]
    timed = columns_of(job.seed, job.keys, BATCH_ROWS, job.warm_up + job.batches)
    outcome = contest(timed, job.warm_up, directory / "timed", False)
    found = {"rows_per_s": job.batches * BATCH_ROWS / (outcome.ended_s - outcome.began_s)}
    small = columns_of(job.seed + 1, VERIFY_KEYS, VERIFY_ROWS, VERIFY_BATCHES)
    checked = contest(small, 1, directory / "verify", True)
    expected, state = reference(small, last_only=job.contestant == COLUMNS)
    here, wanted = Counter(checked.outputs), Counter(expected)
    found["lost"] = sum((wanted - here).values())
    found["duplicated"] = sum((here - wanted).values())
    found["state_equal"] = checked.state in (None, state) and (
        outcome.state is None or outcome.state == reference(timed, last_only=True)[1]
    )
    (directory / "result.json").write_text(json.dumps(found))


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
