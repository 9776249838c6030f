"""Rows a second and durations of requests, computed from the counts that replicas report: each report is compared with
earlier ones."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stateflow.reports import ReplicaStatistics, RequestReport
from stateflow.runtime.lifecycle import SERVED

#: rates and latency cover this many seconds: micro-batches come in bursts, and one second alone has too few requests
#: for a 99th percentile
WINDOW_S = 5.0
#: a replica that has not reported for this long has no rate
STALE_S = 30.0
#: slow requests are shown for this long, and at most this many of an operator
SLOW_S, SLOW_KEPT = 300.0, 5
#: points of the time lines: half an hour of seconds
POINTS = 1800
#: requests kept for latencies, of all replicas together
REQUESTS_KEPT = 50_000
Partition = tuple[str, int]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the least value that is not below ``share`` of all; None if there are none.

    Args:
        values: sorted.
    """
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else None


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of ``count`` requests, from their first message to their last output; None: there were none."""

    p50_ms: float | None
    p99_ms: float | None
    count: int


NONE = Latency(None, None, 0)


def _latency(took: list[float]) -> Latency:
    took.sort()
    return Latency(percentile(took, 0.5), percentile(took, 0.99), len(took))


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the time lines. ``rows_per_s``: None: no replica has reported twice yet."""

    at_us: int
    rows_per_s: float | None
    p50_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Slow:
    """A request that took long, and the replica that served it."""

    replica: str
    rows: int
    total_ms: float


@dataclass(frozen=True, slots=True)
class _Count:
    """Rows since the replica was first heard, in total and by partition, across its restarts."""

    at_s: float
    rows: int
    partitions: dict[Partition, int]


@dataclass(slots=True)
class _Counted:
    """A replica's last report, and its counts of the last seconds, oldest first."""

    rows: int
    partitions: dict[Partition, int]
    last_request: int
    counts: deque[_Count]

    @property
    def at_s(self) -> float:
        return self.counts[-1].at_s

    @property
    def rows_per_s(self) -> float | None:
        """Rows a second; None: the replica was heard only once."""
        first, last = self.counts[0], self.counts[-1]
        return None if last.at_s <= first.at_s else (last.rows - first.rows) / (last.at_s - first.at_s)

    def partition_per_s(self, partition: Partition) -> float:
        first, last = self.counts[0], self.counts[-1]
        if last.at_s <= first.at_s or partition not in first.partitions:
            return 0.0
        return (last.partitions[partition] - first.partitions[partition]) / (last.at_s - first.at_s)


def _grown(before: int, now: int) -> int:
    """Returns the growth of a count; a restarted process counts from 0."""
    return now - before if now >= before else now


class Rates:
    """Rates from replicas' reports. Times in seconds are of any clock that does not run backwards."""

    def __init__(self) -> None:
        self._counted: dict[str, _Counted] = {}
        self._bytes: dict[Partition, int] = {}
        self._entries: dict[Partition, int | None] = {}
        self._requests: deque[tuple[float, RequestReport]] = deque(maxlen=REQUESTS_KEPT)
        self._slow: dict[str, list[tuple[float, Slow]]] = {}
        self.points: deque[Point] = deque(maxlen=POINTS)

    def after(self, replica: str) -> int:
        """Returns the number of the replica's last known request; 0: none is known."""
        counted = self._counted.get(replica)
        return 0 if counted is None else counted.last_request

    def add(self, replica: str, at_s: float, said: ReplicaStatistics, *, sizes: bool = False) -> None:
        """Adds a replica's report.

        Args:
            sizes: the report contains sizes and numbers of entries.
        """
        before = self._counted.get(replica)
        numbers = [request.number for request in said.requests]
        last = max(numbers, default=0 if before is None or said.rows < before.rows else before.last_request)
        here = {(each.operator, each.partition): each.rows for each in said.partitions}
        if before is None:
            counts = deque([_Count(at_s, 0, dict.fromkeys(here, 0))])
        else:
            counts, newest = before.counts, before.counts[-1]
            grown = {
                each: newest.partitions.get(each, 0) + _grown(before.partitions.get(each, rows), rows)
                for each, rows in here.items()
            }
            counts.append(_Count(at_s, newest.rows + _grown(before.rows, said.rows), grown))
            while len(counts) > 2 and counts[1].at_s <= at_s - WINDOW_S:
                counts.popleft()
        self._counted[replica] = _Counted(said.rows, here, last, counts)
        if sizes:
            self._bytes |= {(each.operator, each.partition): each.bytes for each in said.partitions}
            self._entries |= {
                (each.operator, each.partition): each.entries for each in said.partitions if each.state in SERVED
            }
        if before is not None:  # work from before the first look is no current rate
            for request in said.requests:
                self._requests.append((at_s, request))
                self._note(replica, at_s, request)

    def _note(self, replica: str, at_s: float, request: RequestReport) -> None:
        slow = self._slow.setdefault(request.operator, [])
        if len(slow) >= SLOW_KEPT and request.total_ms <= slow[-1][1].total_ms:
            return
        found = Slow(replica, request.rows, request.total_ms)
        slow.append((at_s, found))
        slow.sort(key=lambda each: -each[1].total_ms)
        del slow[SLOW_KEPT:]

    def keep(self, replicas: Collection[str], operators: Collection[str], now_s: float) -> None:
        """Forgets all other replicas and operators, and what is too old."""
        self._counted = {name: each for name, each in self._counted.items() if name in replicas}
        self._bytes = {each: size for each, size in self._bytes.items() if each[0] in operators}
        self._entries = {each: count for each, count in self._entries.items() if each[0] in operators}
        while self._requests and now_s - self._requests[0][0] > WINDOW_S:
            self._requests.popleft()
        self._slow = {
            name: [each for each in slow if now_s - each[0] <= SLOW_S]
            for name, slow in self._slow.items()
            if name in operators
        }

    def rows_per_s(self, replica: str, now_s: float) -> float | None:
        counted = self._counted.get(replica)
        return None if counted is None or now_s - counted.at_s > STALE_S else counted.rows_per_s

    def partition_rates(self, operator: str, owners: Sequence[str]) -> dict[int, float]:
        """Returns rows a second by partition, as its owner counts them.

        Args:
            owners: by partition.
        """
        found: dict[int, float] = {}
        for number, owner in enumerate(owners):
            counted = self._counted.get(owner)
            if counted is not None and (operator, number) in counted.partitions:
                found[number] = counted.partition_per_s((operator, number))
        return found

    def bytes_of(self, partition: Partition) -> int | None:
        return self._bytes.get(partition)

    def entries_of(self, partition: Partition) -> int | None:
        """Returns the number of entries that the owner last estimated; None: it cannot, or has not yet."""
        return self._entries.get(partition)

    def latencies(self, now_s: float) -> defaultdict[str, Latency]:
        """Returns latencies of the last ``WINDOW_S``, by operator; those of all operators under an empty name."""
        took: defaultdict[str, list[float]] = defaultdict(list)
        for at_s, request in self._requests:
            if now_s - at_s <= WINDOW_S:
                took[request.operator].append(request.total_ms)
        took[""] = [ms for each in took.values() for ms in each]
        return defaultdict(lambda: NONE, {name: _latency(each) for name, each in took.items()})

    def slow(self, operator: str) -> list[Slow]:
        """Returns the slow requests of an operator, slowest first."""
        return [each for _, each in self._slow.get(operator, [])]

    def tick(self, at_us: int, now_s: float) -> Point:
        """Adds the current values as a point to the time lines, and returns it."""
        rates = [rate for name in self._counted if (rate := self.rows_per_s(name, now_s)) is not None]
        latency = self.latencies(now_s)[""]
        point = Point(at_us, sum(rates) if rates else None, latency.p50_ms, latency.p99_ms)
        self.points.append(point)
        return point
