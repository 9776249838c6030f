"""May this replica serve? A lease from the controller, counted on this process's monotonic clock: sans-io.

The controller answers a heartbeat with a duration. The replica counts it from when it *sent* that heartbeat, the
controller from when it received it, which is later; with clocks that drift apart by less than the controller's margin,
a replica knows that its lease has lapsed before the controller acts on it (Gray and Cheriton, "Leases", SOSP 1989). A
process that was stopped finds its lease lapsed when it goes on: the monotonic clock did not stop with it.

Of an operator whose failover is manual no lease is needed while no controller answers: nobody else is given it then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stateflow.errors import LeaseLost


@dataclass(slots=True)
class Lease:
    """``until`` on the monotonic clock, seconds. A new one is held for ever: for replicas without a controller.

    ``alone``: operators that are served without it while the replica is ``cut_off``: since it was heard last, or
    started, every controller was asked, and none answered."""

    until: float = math.inf
    alone: frozenset[str] = frozenset()
    cut_off: bool = False

    @classmethod
    def none(cls) -> Lease:
        """Not held before the controller grants it."""
        return cls(-math.inf)

    def granted(self, sent_at: float, duration_s: float) -> None:
        """The answer to a heartbeat sent at ``sent_at``. Answers may come out of order."""
        self.until = max(self.until, sent_at + duration_s)
        self.cut_off = False

    def revoke(self) -> None:
        """The controller does not know this process any more."""
        self.until = -math.inf
        self.cut_off = False

    def unanswered(self) -> None:
        """By any controller."""
        self.cut_off = True

    def holds(self, now: float, operator: str = "") -> bool:
        return now < self.until or (self.cut_off and operator in self.alone)

    def serves_some(self, now: float) -> bool:
        return now < self.until or (self.cut_off and bool(self.alone))

    def check(self, now: float, operator: str = "") -> None:
        """Raises LeaseLost. To be asked before a batch is applied, and again before it is acknowledged."""
        if not self.holds(now, operator):
            raise LeaseLost(
                "this replica's lease has lapsed: its partitions may have been given away",
                remedy="it serves again when it reaches the controller; refresh the assignment",
            )
