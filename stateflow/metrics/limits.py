"""Counts how often a process reached its limits. docs/limits.md lists the limits, and what happens beyond them."""

from __future__ import annotations

import threading
from typing import Literal

#: values of the label ``limit`` of ``stateflow_limit_used_ratio`` and ``stateflow_limit_reached_total``
Limit = Literal[
    "batch_seconds",
    "cache_bytes",
    "calls",
    "calls_per_caller",
    "change_log_bytes",
    "commit_log_bytes",
    "dashboard_connections",
    "followers",
    "metrics_connections",
    "read_ahead_bytes",
    "sources",
    "stream_batches",
    "stream_read_ahead_bytes",
    "stream_untaken_bytes",
    "untaken_bytes",
    "waiting_bytes",
]


class LimitHits:
    """Counts, for each limit, how often it was reached. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Limit, int] = {}

    def watch(self, *limits: Limit) -> None:
        """Begins the counts of limits at 0. Prometheus would not notice the first hit of a series that begins with
        it."""
        with self._lock:
            for each in limits:
                self._counts.setdefault(each, 0)

    def note(self, limit: Limit, times: int = 1) -> None:
        with self._lock:
            self._counts[limit] = self._counts.get(limit, 0) + times

    def count(self, limit: Limit) -> int:
        with self._lock:
            return self._counts.get(limit, 0)

    def counts(self) -> dict[tuple[str], int]:
        """Returns the counts as the values of a metric, by label."""
        with self._lock:
            return {(limit,): count for limit, count in self._counts.items()}


#: the counts of this process, which its servers, partitions and pages share
LIMIT_HITS = LimitHits()
