"""The measurements of a demonstration run, the figures that charts show of them, and the expected result.

A run fills in this plain data, and the report draws it. Times whose names end in ``_s`` are seconds since the stream's
start, unless said otherwise.

The expected result is computed independently of the framework: nothing of it is imported here, and there is no loop
over rows and no running state. Running values are grouped cumulative sums over the whole year. Each carrier has a bit,
and the set of carriers seen so far is a cumulative sum of bits. A key adds the bit of a carrier only once, at the
carrier's first flight, so the sum is the union. Arrival delays are whole minutes, so their sums are exact in float64 in
any order, and the comparisons need no tolerance.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

COMPLETED = "COMPLETED"


@dataclass(frozen=True, slots=True)
class MoveRow:
    """One move of one partition. ``pause_at_s`` is the begin of the pause; ``duration_s`` covers the whole move."""

    partition: int
    source: str
    target: str
    started_s: float
    pause_at_s: float
    duration_s: float
    bytes_warm: int
    bytes_reused: int
    bytes_delta: int
    rounds: int
    predicted_pause_ms: float
    pause_ms: float
    state: str
    error: str
    margin_ms: float = 0.0  # added to the prediction: the sum is compared with the budget

    @property
    def promised_ms(self) -> float:
        return self.predicted_pause_ms + self.margin_ms

    @property
    def completed(self) -> bool:
        return self.state.upper() == COMPLETED


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One micro-batch of the Spark query. ``at_s`` is the begin of the micro-batch's trigger."""

    batch: int
    at_s: float
    rows: int
    duration_ms: float


@dataclass(frozen=True, slots=True)
class RequestSample:
    """One request to a replica."""

    at_s: float
    replica: str
    rows: int
    total_ms: float


@dataclass(frozen=True, slots=True)
class Incident:
    """An action of the demonstration on a replica's process. ``kind`` is ``SIGKILL`` or ``restart``."""

    at_s: float
    kind: str
    replica: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    rows: int
    keys: int
    rows_per_s: float
    duration_s: float
    batches: Sequence[BatchRow]
    requests: Sequence[RequestSample]
    moves: Sequence[MoveRow]
    incidents: Sequence[Incident]
    state_equal: bool
    output_equal: bool
    state_keys: int
    output_rows: int
    differences: Sequence[str]
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]

    @property
    def moves_completed(self) -> int:
        return sum(move.completed for move in self.moves)

    @property
    def moves_failed(self) -> int:
        """The number of moves that did not complete, whatever their state is."""
        return len(self.moves) - self.moves_completed

    @property
    def held(self) -> bool:
        """True if state and output are equal to the reference and every move completed."""
        return self.state_equal and self.output_equal and not self.moves_failed

    @property
    def pause_ms_max(self) -> float | None:
        """The longest pause of the completed moves; None: no move completed."""
        return max(self._pauses_ms(), default=None)

    @property
    def pause_ms_median(self) -> float | None:
        return statistics.median(pauses) if (pauses := self._pauses_ms()) else None

    def summary(self) -> dict[str, Any]:
        """Returns the verdict of the run, ready for JSON."""
        return {
            "state_equal": self.state_equal,
            "output_equal": self.output_equal,
            "moves_completed": self.moves_completed,
            "moves_failed": self.moves_failed,
            "pause_ms_max": self.pause_ms_max,
            "pause_ms_median": self.pause_ms_median,
            "rows": self.rows,
            "rows_per_s": self.rows_per_s,
        }

    def _pauses_ms(self) -> list[float]:
        return [move.pause_ms for move in self.moves if move.completed]


# -- What the charts show: latency per window, throughput per window, lanes of moves ---------------------------------

LATENCY_WINDOW_S = 0.25


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """The latencies of the requests in a window of ``LATENCY_WINDOW_S``, whose middle is ``at_s``."""

    at_s: float
    requests: int
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rows per second in consecutive windows.

    Attributes:
        at_s: middle of each window.
        rows_per_s: name of a replica → one value for each window.
    """

    at_s: list[float]
    width_s: float
    rows_per_s: dict[str, list[float]]


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile by nearest rank, which is always one of ``values``. ``values`` must not be empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def latency_windows(requests: Sequence[RequestSample]) -> list[LatencyWindow]:
    """Returns the latencies of each window in which there was a request, in order of time."""
    gathered: dict[int, list[float]] = defaultdict(list)
    for request in requests:
        gathered[math.floor(request.at_s / LATENCY_WINDOW_S)].append(request.total_ms)
    return [
        LatencyWindow(
            (index + 0.5) * LATENCY_WINDOW_S, len(times), percentile(times, 50), percentile(times, 99), max(times)
        )
        for index, times in sorted(gathered.items())
    ]


def throughput(
    requests: Sequence[RequestSample], batches: Sequence[BatchRow], width_s: float | None = None
) -> Throughput:
    """Returns rows per second by replica. If there are no requests, the only series is that of the whole query."""
    arrivals = [(request.at_s, request.replica, request.rows) for request in requests]
    arrivals = arrivals or [(batch.at_s, "query", batch.rows) for batch in batches]
    if not arrivals:
        return Throughput([], 1.0, {})
    end_s = max(at_s for at_s, _, _ in arrivals)
    width = width_s or round_step(end_s / 100)
    count = math.floor(end_s / width) + 1
    series = {name: [0.0] * count for name in sorted({name for _, name, _ in arrivals})}
    for at_s, name, rows in arrivals:
        series[name][math.floor(at_s / width)] += rows / width
    return Throughput([(index + 0.5) * width for index in range(count)], width, series)


def round_step(at_least: float) -> float:
    """Returns the smallest number 1, 2 or 5 times a power of ten that is not below ``at_least`` and 0.5."""
    wanted = max(at_least, 0.5)
    decade: float = 10.0 ** math.floor(math.log10(wanted))
    return next(step * decade for step in (1, 2, 5, 10) if step * decade >= wanted * (1 - 1e-9))


def log_extent(values: Sequence[float]) -> tuple[float, float]:
    """Returns (lower end, upper end) of a log axis for ``values``, with room at the top for the names of incidents."""
    positive = [value for value in values if value > 0]
    return min(positive, default=1.0) * 0.6, max(positive, default=1000.0) * 6


def lanes(moves: Sequence[MoveRow]) -> list[int]:
    """Returns the number of a lane for each move. Moves of one lane do not overlap in time; lanes are as few as
    possible."""
    free_from: list[float] = []
    chosen = [0] * len(moves)
    for index in sorted(range(len(moves)), key=lambda position: moves[position].started_s):
        move = moves[index]
        lane = next((number for number, free in enumerate(free_from) if free <= move.started_s), len(free_from))
        free_from[lane : lane + 1] = [move.started_s + move.duration_s]
        chosen[index] = lane
    return chosen


def human_bytes(count: float) -> str:
    """Returns a size as text in decimal units: ``1.5 kB`` for 1536."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if abs(value) < 999.95:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


# -- Expected result -------------------------------------------------------------------------------------------------

UNKNOWN = "unknown"
OUTPUT_COLUMNS = ("seq", "tailnum", "flights", "mean_delay", "carriers")
DIFFERENCES_SHOWN = 10
_CARRIERS_MAX = 62  # bits of a non-negative int64


@dataclass(frozen=True, slots=True)
class FinalState:
    """The state of one key after the last row. ``delay_by_dest`` maps destinations to sums of delays; a null delay
    counts as 0.0."""

    flights: int
    delay_by_dest: dict[str, float]
    carriers: set[str]


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected result.

    Attributes:
        outputs: frame with :data:`OUTPUT_COLUMNS` and one row for each input row, in input order; ``carriers`` are
            tuples.
        state: key → state.
    """

    outputs: pd.DataFrame
    state: dict[str, FinalState]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a comparison of expected and actual items.

    Attributes:
        compared: number of items on both sides.
        missing: number of expected items that are absent.
        extra: number of unexpected items, including second copies.
        different: number of items on both sides with another value.
        differences: descriptions of the first ten differences.
    """

    equal: bool
    compared: int
    missing: int
    extra: int
    different: int
    differences: list[str]


def expected(flights: pd.DataFrame) -> Expected:
    """Returns the expected outputs and final state for ``flights`` (columns seq, tailnum, carrier, dest, arr_delay)."""
    key = flights["tailnum"].astype(object).where(flights["tailnum"].notna(), UNKNOWN).to_numpy()
    delay = flights["arr_delay"].astype("Float64").fillna(0.0).to_numpy(dtype=np.float64)
    carrier, names = pd.factorize(flights["carrier"].to_numpy(dtype=object), sort=True)
    if len(names) > _CARRIERS_MAX:
        raise ValueError(f"{len(names)} carriers do not fit the bits of one integer")
    work = pd.DataFrame(
        {"key": key, "dest": flights["dest"].to_numpy(dtype=object), "delay": delay, "carrier": carrier}
    )
    first_sight = ~work.duplicated(["key", "carrier"])
    work["bit"] = np.where(first_sight, np.int64(1) << work["carrier"].to_numpy(dtype=np.int64), np.int64(0))

    by_key = work.groupby("key", sort=False)
    count = by_key.cumcount().to_numpy() + 1
    seen, meaning = pd.factorize(by_key["bit"].cumsum().to_numpy())
    sets = np.empty(len(meaning), dtype=object)
    sets[:] = [_unpack(int(bits), names) for bits in meaning]
    outputs = pd.DataFrame(
        {
            "seq": flights["seq"].to_numpy(dtype=np.int64),
            "tailnum": key,
            "flights": count.astype(np.int64),
            "mean_delay": by_key["delay"].cumsum().to_numpy() / count,
            "carriers": sets[seen],
        }
    )
    return Expected(outputs, _final_state(work, names))


def compare_state(expected: Expected, actual: Mapping[str, FinalState]) -> Comparison:
    """Compares the final states of all keys, including every entry of every map."""
    wanted = expected.state
    missing = sorted(wanted.keys() - actual.keys())
    extra = sorted(actual.keys() - wanted.keys())
    different = [key for key in wanted if key in actual and _state_facts(wanted[key]) != _state_facts(actual[key])]
    lines = [f"key {key!r}: expected, absent" for key in missing]
    lines += [f"key {key!r}: not expected, present" for key in extra]
    for key in different[:DIFFERENCES_SHOWN]:
        lines += [f"key {key!r}: {line}" for line in _explain_state(wanted[key], actual[key])]
    return Comparison(
        equal=not (missing or extra or different),
        compared=len(wanted) - len(missing),
        missing=len(missing),
        extra=len(extra),
        different=len(different),
        differences=lines[:DIFFERENCES_SHOWN],
    )


def compare_outputs(expected: Expected, actual: pd.DataFrame) -> Comparison:
    """Compares output rows with the same ``seq``. The order of rows does not matter.

    Args:
        actual: frame of output rows; its carriers may be any kind of sequence.
    """
    absent = [column for column in OUTPUT_COLUMNS if column not in actual.columns]
    if absent:
        every = [f"column {column!r}: absent from the output" for column in absent]
        return Comparison(False, 0, len(expected.outputs), len(actual), 0, every)

    wanted = expected.outputs.set_index("seq")
    copies = actual.duplicated("seq").to_numpy(dtype=bool)
    # A missing seq becomes -1, which no input row has, and is then reported as not expected.
    came = actual.assign(seq=actual["seq"].fillna(-1).astype("int64"))
    surplus = came["seq"][copies | ~came["seq"].isin(wanted.index).to_numpy()]
    found = came[~copies].set_index("seq")
    missing = wanted.index.difference(found.index)
    both = wanted.index.intersection(found.index)
    left, right = wanted.loc[both], found.loc[both]

    wrong = {column: _cells_differ(left[column], right[column]) for column in OUTPUT_COLUMNS[1:]}
    any_wrong = np.logical_or.reduce(list(wrong.values()))
    lines = [f"seq {seq}: expected, absent" for seq in missing[:DIFFERENCES_SHOWN]]
    for seq in surplus[:DIFFERENCES_SHOWN]:
        lines.append(f"seq {seq}: " + ("duplicated" if seq in wanted.index else "not expected, present"))
    for position in np.flatnonzero(any_wrong)[:DIFFERENCES_SHOWN]:
        for column, flags in wrong.items():
            if flags[position]:
                want, got = left[column].iloc[position], right[column].iloc[position]
                lines.append(f"seq {both[position]}: {column}: expected {_show(want)}, got {_show(got)}")
    return Comparison(
        equal=not (len(missing) or len(surplus) or any_wrong.any()),
        compared=len(both),
        missing=len(missing),
        extra=len(surplus),
        different=int(any_wrong.sum()),
        differences=lines[:DIFFERENCES_SHOWN],
    )


def _unpack(bits: int, names: Any) -> tuple[str, ...]:
    return tuple(str(name) for index, name in enumerate(names) if bits >> index & 1)


def _final_state(work: pd.DataFrame, names: Any) -> dict[str, FinalState]:
    delays: dict[str, dict[str, float]] = {}
    totals = work.groupby(["key", "dest"], sort=False)["delay"].sum().reset_index()
    for key, dest, total in zip(totals["key"], totals["dest"], totals["delay"], strict=True):
        delays.setdefault(key, {})[dest] = float(total)
    bits = work.groupby("key", sort=False)["bit"].sum().to_dict()
    counts = work["key"].value_counts(sort=False).to_dict()
    return {
        str(key): FinalState(int(count), delays[str(key)], set(_unpack(int(bits[key]), names)))
        for key, count in counts.items()
    }


def _state_facts(state: FinalState) -> tuple[Any, ...]:
    return state.flights, dict(state.delay_by_dest), set(state.carriers)


def _explain_state(wanted: FinalState, actual: FinalState) -> Iterable[str]:
    if wanted.flights != actual.flights:
        yield f"flights: expected {wanted.flights}, got {actual.flights}"
    for dest in sorted(wanted.delay_by_dest.keys() | actual.delay_by_dest.keys()):
        left, right = wanted.delay_by_dest.get(dest, "nothing"), actual.delay_by_dest.get(dest, "nothing")
        if left != right:
            yield f"delay_by_dest[{dest!r}]: expected {left}, got {right}"
    if set(wanted.carriers) != set(actual.carriers):
        yield f"carriers: expected {_show(sorted(wanted.carriers))}, got {_show(sorted(actual.carriers))}"


def _cells_differ(wanted: pd.Series[Any], actual: pd.Series[Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns a flag for each row, which tells whether the cells differ. A null differs from every expected cell."""
    if wanted.name == "carriers":
        pairs = zip(wanted.to_numpy(), actual.to_numpy(), strict=True)
        return np.fromiter((_as_tuple(got) != want for want, got in pairs), dtype=bool, count=len(wanted))
    if wanted.name == "tailnum":
        got = actual.astype(object).where(actual.notna(), None).to_numpy()
        return np.asarray(got != wanted.astype(object).to_numpy(), dtype=bool)
    # Through float64, which holds every count exactly, so that 3 and 3.0 are one value and null is NaN.
    numbers = pd.to_numeric(actual, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    return np.asarray(numbers != wanted.to_numpy(dtype=np.float64), dtype=bool)


def _as_tuple(cell: object) -> tuple[object, ...] | None:
    return tuple(cell) if isinstance(cell, Iterable) and not isinstance(cell, str) else None


def _show(cell: object) -> str:
    items = _as_tuple(cell)
    return repr(cell) if items is None else "[" + ", ".join(str(item) for item in items) + "]"
