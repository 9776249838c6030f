"""Detects stalls of the process that generates a load.

A thread sleeps for a moment, again and again. If it wakes up late, any other thread of the process would have done so,
too, and latencies measured at this time include the generator's own delay. This delay is not subtracted from the
latencies, but it is reported.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

SLEEP_S = 0.005
#: seconds by which the thread must wake up too late for a stall
STALL_S = 0.02


@dataclass(frozen=True, slots=True)
class Stalls:
    count: int
    total_s: float
    longest_s: float
    watched_s: float

    @property
    def share(self) -> float:
        """The duration of all stalls as a share of the watched time."""
        return self.total_s / self.watched_s if self.watched_s else 0.0

    def to_json(self) -> dict[str, float]:
        return {
            "count": self.count,
            "total_s": round(self.total_s, 4),
            "longest_s": round(self.longest_s, 4),
            "share": round(self.share, 5),
        }


class StallWatch:
    """A context manager that records stalls. :meth:`found` may also be called after its end."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._began_s = self._ended_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> StallWatch:
        self._began_s = self._ended_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def found(self) -> Stalls:
        late = list(self._late_s)
        return Stalls(len(late), sum(late), max(late, default=0.0), self._ended_s - self._began_s)

    def _watch(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            time.sleep(SLEEP_S)
            self._ended_s = time.monotonic()
            over = self._ended_s - began - SLEEP_S
            if over >= STALL_S:
                self._late_s.append(over)
