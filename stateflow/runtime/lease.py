"""Lease from the controller, without which a replica does not serve; counted on its own monotonic clock. Sans-io.

The controller answers a heartbeat with a duration. The replica counts it from when it *sent* that heartbeat, the
controller from when it received the heartbeat, which is later. If the clocks drift apart by less than the controller's
margin, a replica knows that its lease has lapsed before the controller acts on it (Gray and Cheriton, "Leases", SOSP
1989). A process that was stopped finds its lease lapsed when it continues, as the monotonic clock went on.

An operator with manual failover needs no lease while no controller answers: no other replica gets its partitions then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stateflow.errors import LeaseLost


@dataclass(slots=True)
class Lease:
    """Lease up to ``until``, monotonic seconds. Default: never expires (replicas without a controller).

    ``alone``: operators that the replica serves without a lease while it is ``cut_off``: it has asked every controller
    since the last answer or since its start, and none answered."""

    until: float = math.inf
    alone: frozenset[str] = frozenset()
    cut_off: bool = False

    @classmethod
    def none(cls) -> Lease:
        """Makes a lease that does not hold before the controller grants it."""
        return cls(-math.inf)

    def granted(self, sent_at: float, duration_s: float) -> None:
        """Extends the lease by the answer to a heartbeat sent at ``sent_at``. Answers may arrive out of order."""
        self.until = max(self.until, sent_at + duration_s)
        self.cut_off = False

    def revoke(self) -> None:
        """Ends the lease, as the controller does not know this process any more."""
        self.until = -math.inf
        self.cut_off = False

    def unanswered(self) -> None:
        """Marks the replica as cut off: no controller has answered."""
        self.cut_off = True

    def holds(self, now: float, operator: str = "") -> bool:
        return now < self.until or (self.cut_off and operator in self.alone)

    def serves_some(self, now: float) -> bool:
        return now < self.until or (self.cut_off and bool(self.alone))

    def check(self, now: float, operator: str = "") -> None:
        """Checks that the operator may be served. Called before a batch is applied, and again before the batch is
        acknowledged. Raises LeaseLost."""
        if not self.holds(now, operator):
            raise LeaseLost(
                "this replica's lease has lapsed: its partitions may have other owners",
                remedy="refresh the assignment; the replica serves again once it reaches the controller",
            )
