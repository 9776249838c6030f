"""What requests took, for whoever asks: the newest ones, each with a number."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stateflow.clock import Clock

SAMPLES_KEPT = 100_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. ``total_ms``: from its first message until the last output was handed back. ``held_ms``: of that,
    waiting for a partition to come here. ``at_us``: when it ended."""

    number: int
    at_us: int
    operator: str
    rows: int
    total_ms: float
    held_ms: float


class Samples:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self._number = 0
        #: of all requests
        self.rows = 0

    def add(self, operator: str, rows: int, started: float, held_from: float | None) -> None:
        """A request has ended. Monotonic seconds; ``held_from``: since when it waited for partitions, None: it did
        not."""
        now = self._clock.monotonic()
        self._number += 1
        self.rows += rows
        held_ms = 0.0 if held_from is None else (now - held_from) * 1e3
        self._samples.append(Sample(self._number, self._clock.now_us(), operator, rows, (now - started) * 1e3, held_ms))

    def after(self, number: int) -> list[Sample]:
        """Those with a larger number."""
        return [sample for sample in self._samples if sample.number > number]
