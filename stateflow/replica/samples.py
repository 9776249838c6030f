"""Durations of requests: the newest ones, numbered, and totals by operator."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice, takewhile

from stateflow.clock import Clock
from stateflow.metrics.figures import BATCH_BUCKETS, Histogram

SAMPLES_KEPT = 100_000
OPERATORS_MAX, OTHERS = 500, "(others)"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. ``total_ms``: from its first message until the last output was handed back. ``held_ms``: the part of
    it spent waiting for a partition to come here. ``at_us``: when it ended."""

    number: int
    at_us: int
    operator: str
    rows: int
    total_ms: float
    held_ms: float


@dataclass(slots=True)
class OfOperator:
    """Totals of an operator's requests. ``held_s``: time spent waiting for partitions to come here."""

    rows: int = 0
    held_s: float = 0.0
    took: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))


class Samples:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self._number = 0
        #: rows of all requests
        self.rows = 0
        self.by_operator: dict[str, OfOperator] = {}

    def add(self, operator: str, rows: int, started: float, held_from: float | None) -> None:
        """Counts a request that has ended.

        ``started`` and ``held_from`` are monotonic seconds. ``held_from``: since when the request waited for
        partitions; None: it did not wait.
        """
        now = self._clock.monotonic()
        self._number += 1
        self.rows += rows
        of = self.by_operator.get(operator)
        if of is None:
            if len(self.by_operator) >= OPERATORS_MAX:  # callers can make up names
                operator = OTHERS
            of = self.by_operator.setdefault(operator, OfOperator())
        of.rows += rows
        of.took.observe(now - started)
        of.held_s += 0.0 if held_from is None else now - held_from
        held_ms = 0.0 if held_from is None else (now - held_from) * 1e3
        self._samples.append(Sample(self._number, self._clock.now_us(), operator, rows, (now - started) * 1e3, held_ms))

    def after(self, number: int, newest: int = 0) -> list[Sample]:
        """Returns the requests with a larger number, oldest first. ``newest``: at most this many, the newest; 0:
        all."""
        found = list(islice(takewhile(lambda each: each.number > number, reversed(self._samples)), newest or None))
        return found[::-1]
