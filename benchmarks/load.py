"""An open-loop load of StreamClients, which measures latencies and counts lost and duplicated rows.

The latency of a batch counts from the time at which the batch was *scheduled* to be sent. If the generator is stalled,
it sends late, and the delay counts. So a stalled system cannot hide its delays (coordinated omission; Tene, "How NOT to
Measure Latency", 2015).
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.record import Correctness
from benchmarks.stall import StallWatch
from stateflow.client import Cluster, MoveReport, Reconfiguration, StreamClient
from stateflow.errors import PositionGap, Unavailable

BUCKET_S = 0.25
PERCENTILES = {"p25": 25.0, "p50": 50.0, "p75": 75.0, "p99": 99.0, "p99_9": 99.9}


@dataclass(slots=True)
class Latencies:
    """The latencies of all batches of one source.

    Attributes:
        at_s: time for which each batch was scheduled, in monotonic seconds.
        took_s: seconds from then until the batch was acknowledged.
    """

    at_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)

    def add(self, at_s: float, took_s: float) -> None:
        self.at_s.append(at_s)
        self.took_s.append(took_s)

    def _arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Returns copies of (``at_s``, ``took_s``) of the same length, although another thread may be adding a
        batch."""
        took = np.array(self.took_s)
        return np.array(self.at_s[: len(took)]), took

    def between(self, begin_s: float, end_s: float) -> np.ndarray[Any, Any]:
        """Returns the latencies of the batches that were scheduled between two times, in milliseconds."""
        at, took = self._arrays()
        return took[(at >= begin_s) & (at < end_s)] * 1e3

    def timeline(self, begin_s: float) -> list[dict[str, float]]:
        """Returns percentiles and maximum, in milliseconds, for each interval of ``BUCKET_S`` since ``begin_s``."""
        at, took = self._arrays()
        if not len(at):
            return []
        at, took = at - begin_s, took * 1e3
        buckets = np.floor(at / BUCKET_S).astype(int)
        return [
            {"at_s": round(float(b) * BUCKET_S, 3), "count": int((buckets == b).sum()), **summary(took[buckets == b])}
            for b in np.unique(buckets)
        ]


def summary(milliseconds: np.ndarray[Any, Any] | Sequence[float]) -> dict[str, float]:
    """Returns percentiles, maximum and mean of latencies, in milliseconds; empty without values."""
    values = np.asarray(milliseconds)
    if not len(values):
        return {}
    found = {name: round(float(np.percentile(values, p)), 3) for name, p in PERCENTILES.items()}
    return {**found, "max": round(float(values.max()), 3), "mean": round(float(values.mean()), 3)}


def ccdf(milliseconds: np.ndarray[Any, Any] | Sequence[float]) -> list[tuple[float, float]]:
    """Returns (latency in ms, share of requests that took longer) for fixed shares from 1/2 down to 1 in 10,000."""
    values = np.sort(np.asarray(milliseconds))
    shares = [share for share in (0.5, 0.1, 0.05, 0.01, 0.001, 0.0001) if share * len(values) >= 1]
    return [(round(float(np.percentile(values, 100 * (1 - share))), 3), share) for share in shares]


class Ledger:
    """The reference result of an uninterrupted run: count and sum of each key, and the expected outputs.

    Each key may have only one writer.
    """

    def __init__(self) -> None:
        self.state: dict[int, tuple[int, float]] = {}
        self.lost = self.duplicated = 0

    def preload(self, keys: Iterable[int], value: float) -> None:
        for key in keys:
            n, total = self.state.get(key, (0, 0.0))
            self.state[key] = n + 1, total + value

    def apply(self, rows: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]] | None) -> None:
        """Applies a batch to the reference, and compares the outputs of the cluster with the expected outputs.

        Args:
            outputs: outputs of the batch; None: they are not compared, because earlier attempts may have returned some.
        """
        expected: dict[tuple[int, int, float], int] = {}
        for row in rows:
            n, total = self.state.get(row["k"], (0, 0.0))
            self.state[row["k"]] = n, total = n + 1, total + row["v"]
            expected[row["k"], n, total] = expected.get((row["k"], n, total), 0) + 1
        if outputs is None:
            return
        for output in outputs:
            got = output["k"], output["n"], output["total"]
            if expected.get(got, 0):
                expected[got] -= 1
            else:
                self.duplicated += 1
        self.lost += sum(expected.values())

    def equals(self, cluster: Cluster, operator: str, state: str = "figures") -> bool:
        found = {r["key"]: tuple(r["value"].values()) for r in cluster.read_state(operator, state).to_pylist()}
        return found == self.state


@dataclass(slots=True)
class Source:
    """One sender with keys of its own.

    Attributes:
        pick: returns the rows of a batch.
        interval_s: seconds between two batches.
        sent: number → rows of recent batches, if they are kept.
        rewinds: number of times that a restored partition requested earlier batches.
    """

    stream: StreamClient
    pick: Callable[[random.Random], list[dict[str, Any]]]
    interval_s: float
    latencies: Latencies = field(default_factory=Latencies)
    sent: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    rewinds: int = 0


#: number of batches that a source keeps; a restored partition never needs older ones
KEPT = 20_000
#: seconds that senders have at the end of a load for the batches that are under way
END_S = 120.0


class Load:
    """A context manager that sends batches at fixed times, from a thread for each source.

    The garbage collector skips objects that exist at the start, because examining them would stall all senders.

    Args:
        keep_sent: keep batches, so that those that a restored checkpoint lacks can be sent again.

    Attributes:
        watch: records the stalls of this process itself.
    """

    def __init__(self, sources: Sequence[Source], seed: int, *, keep_sent: bool = False) -> None:
        self.sources = sources
        self.truth = Ledger()
        self.errors: list[BaseException] = []
        self.began_s = 0.0
        self._keep = keep_sent
        self.watch = StallWatch()
        self._stop = threading.Event()
        self._mutex = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(source, random.Random(seed + number)), daemon=True)
            for number, source in enumerate(sources)
        ]

    def __enter__(self) -> Load:
        gc.collect()
        gc.freeze()
        self.watch.__enter__()
        self.began_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the senders.

        Raises the error of a sender that failed. Raises TimeoutError if a sender does not end within ``END_S``: the
        outcome of its batch is unknown, so nothing can be said about lost and duplicated rows.
        """
        self._stop.set()
        until = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.watch.__exit__()
        gc.unfreeze()
        if self.errors:
            raise self.errors[0]
        if hanging := sum(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"{hanging} of {len(self._threads)} senders did not end within {END_S:g} s")

    def wait(self, seconds: float) -> None:
        """Lets the load run for ``seconds``. Raises the error of a sender that failed."""
        self._stop.wait(seconds)
        if self.errors:
            raise self.errors[0]

    def _run(self, source: Source, rng: random.Random) -> None:
        try:
            number = 0
            while not self._stop.is_set():
                scheduled = self.began_s + number * source.interval_s
                number += 1
                delay = scheduled - time.monotonic()
                if delay > 0 and self._stop.wait(delay):
                    return
                rows = source.pick(rng)
                outputs = self._send(source, rows)
                source.latencies.add(scheduled, time.monotonic() - scheduled)
                with self._mutex:
                    self.truth.apply(rows, outputs)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.errors.append(error)
            self._stop.set()

    def _send(self, source: Source, rows: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Sends one batch. If a restored partition needs earlier batches, sends them first.

        Returns the outputs; None if earlier batches were sent, because some outputs may have been returned before.
        Raises Unavailable if the load ends before there is an answer: the batch's outcome is unknown then.
        """
        number = source.stream.position + 1
        if self._keep:
            source.sent[number] = rows
            source.sent.pop(number - KEPT, None)
        rewound = False
        while True:
            try:
                outputs = source.stream.send(rows, sequence=number)
                return None if rewound else outputs
            except Unavailable as error:  # no answer for long: the same batch is sent again
                if self._stop.is_set():
                    raise
                print(f"  {error}", file=sys.stderr, flush=True)
            except PositionGap as gap:
                source.rewinds += 1
                rewound = True  # some partitions may have given this batch's outputs already
                for earlier in range(int(gap.where["expected"]), number):
                    source.stream.send(source.sent[earlier], sequence=earlier, rewind=True)


@dataclass(frozen=True, slots=True)
class Offers:
    """Batches of an :class:`OpenLoad` since its begin.

    Attributes:
        offered: batches whose time has come.
        answered: batches that were sent and answered.
        waited: batches that found all senders waiting for answers. They waited for a sender, or were not sent.
        not_sent: batches that found no room to wait, or still waited at the end.
    """

    offered: int = 0
    answered: int = 0
    waited: int = 0
    not_sent: int = 0

    def since(self, before: Offers) -> Offers:
        return Offers(
            self.offered - before.offered,
            self.answered - before.answered,
            self.waited - before.waited,
            self.not_sent - before.not_sent,
        )


class Backlog:
    """Batches whose time has come, on their way to ``senders`` that each send one at a time. Thread-safe.

    Args:
        room: batches that may wait while all senders are busy.
    """

    def __init__(self, senders: int, room: int) -> None:
        self._senders, self._room = senders, room
        self._due: deque[float] = deque()
        self._busy = 0
        self._ended = False
        self._changed = threading.Condition()
        self.offers = Offers()

    def offer(self, at_s: float) -> None:
        """Adds a batch that is due at ``at_s``, unless there is no room for it."""
        with self._changed:
            ahead = self._busy + len(self._due)
            has_room = ahead < self._senders + self._room
            before = self.offers
            self.offers = Offers(
                before.offered + 1,
                before.answered,
                before.waited + (ahead >= self._senders),
                before.not_sent + (not has_room),
            )
            if has_room:
                self._due.append(at_s)
                self._changed.notify()

    def take(self) -> float | None:
        """Waits for a batch, which its sender then has to send. Returns when it was due; None: there is none any
        more."""
        with self._changed:
            while not self._due and not self._ended:
                self._changed.wait()
            if not self._due:
                return None
            self._busy += 1
            return self._due.popleft()

    def answered(self) -> None:
        with self._changed:
            self._busy -= 1
            self.offers = replace(self.offers, answered=self.offers.answered + 1)

    def end(self) -> None:
        """Drops what still waits, and ends the senders."""
        with self._changed:
            self._ended = True
            self.offers = replace(self.offers, not_sent=self.offers.not_sent + len(self._due))
            self._due.clear()
            self._changed.notify_all()


class OpenLoad(Load):
    """A load whose batches come at fixed times, whether or not earlier ones are answered.

    A thread per source sends them. So at most as many batches are under way as there are sources; up to ``room`` more
    wait for a free source, and the rest is not sent. Latency counts from the time at which a batch was due.

    Args:
        interval_s: seconds between two batches of all sources together.
    """

    def __init__(self, sources: Sequence[Source], seed: int, interval_s: float, room: int) -> None:
        super().__init__(sources, seed)
        self._interval_s = interval_s
        self.backlog = Backlog(len(sources), room)
        self._threads.append(threading.Thread(target=self._offer, daemon=True))

    def _offer(self) -> None:
        for number in itertools.count():
            due = self.began_s + number * self._interval_s
            if self._stop.wait(max(0.0, due - time.monotonic())):
                break
            self.backlog.offer(due)
        self.backlog.end()

    def _run(self, source: Source, rng: random.Random) -> None:
        try:
            while (due := self.backlog.take()) is not None:
                rows = source.pick(rng)
                outputs = self._send(source, rows)
                source.latencies.add(due, time.monotonic() - due)
                self.backlog.answered()
                with self._mutex:
                    self.truth.apply(rows, outputs)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.errors.append(error)
            self._stop.set()


def completed(report: Reconfiguration) -> list[MoveReport]:
    """Returns the moves of a reconfiguration.

    Raises RuntimeError if one did not complete. The report of such a move has a pause of 0 ms, which is no figure.
    """
    if report.state != "COMPLETED":
        raise RuntimeError("; ".join(unfinished(report)) or f"the moves ended {report.state}")
    return list(report.moves)


def unfinished(report: Reconfiguration) -> list[str]:
    """Returns a line for each move that did not complete."""
    return [
        f"the move of partition {move.partition} to {move.target} ended {move.state}: {move.error or 'no error'}"
        for move in report.moves
        if move.state != "COMPLETED"
    ]


def correctness_of(load: Load, cluster: Cluster, operator: str) -> Correctness:
    equal = load.truth.equals(cluster, operator)
    return Correctness(lost=load.truth.lost, duplicated=load.truth.duplicated, late=0, state_equal=equal)
