"""Metrics of what the routers of this process sent, by operator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from stateflow.clock import Clock
from stateflow.metrics.figures import BATCH_BUCKETS, Histogram, Values
from stateflow.rpc.rows import BatchRows


@dataclass(slots=True)
class OfOperator:
    """Metrics of one operator.

    ``took``: seconds of batches that were acknowledged everywhere. ``failed``: number of those that were not.
    ``replayed``: partitions that contained their batch already.
    """

    took: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    rows: int = 0
    failed: int = 0
    replayed: int = 0
    under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def measured(self, clock: Clock, rows: BatchRows) -> Iterator[Callable[[int], None]]:
        """Measures a batch until it is acknowledged.

        The caller passes the yielded function the number of partitions that contained the batch already; otherwise the
        batch counts as failed.
        """
        began, contained = clock.monotonic(), -1

        def done(replayed: int) -> None:
            nonlocal contained
            contained = replayed

        with self.lock:
            self.under_way += 1
        try:
            yield done
        finally:
            took = clock.monotonic() - began
            with self.lock:
                self.under_way -= 1
                if contained >= 0:
                    self.replayed += contained
                    self.took.observe(took)
                    self.rows += 0 if rows.rows is None else rows.rows.num_rows
                else:
                    self.failed += 1


class Sent:
    """Metrics of all routers of a process, including those that are gone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operators: dict[str, OfOperator] = {}

    def of(self, operator: str) -> OfOperator:
        with self._lock:
            return self._operators.setdefault(operator, OfOperator())

    def figures(self) -> Values:
        with self._lock:
            operators = dict(self._operators)
        return {
            "stateflow_client_rows_total": {(name,): of.rows for name, of in operators.items()},
            "stateflow_client_batch_seconds": {(name,): of.took.copy() for name, of in operators.items()},
            "stateflow_client_batches_failed_total": {(name,): of.failed for name, of in operators.items()},
            "stateflow_client_replayed_total": {(name,): of.replayed for name, of in operators.items()},
            "stateflow_client_batches_running": {(name,): of.under_way for name, of in operators.items()},
        }


#: the metrics of this process
SENT = Sent()
