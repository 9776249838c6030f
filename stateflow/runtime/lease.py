"""May this replica serve? A lease from the controller, counted on this process's monotonic clock: sans-io.

The controller answers a heartbeat with a duration. The replica counts it from when it *sent* that heartbeat, the
controller from when it received it, which is later; with clocks that drift apart by less than the controller's margin,
a replica knows that its lease has lapsed before the controller acts on it (Gray and Cheriton, "Leases", SOSP 1989). A
process that was stopped finds its lease lapsed when it goes on: the monotonic clock did not stop with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stateflow.errors import LeaseLost


@dataclass(slots=True)
class Lease:
    """``until`` on the monotonic clock, seconds. A new one is held for ever: for replicas without a controller.
    ``session``: the registration it goes back to."""

    until: float = math.inf
    session: str = ""

    @classmethod
    def none(cls) -> Lease:
        """Not held before the controller grants it."""
        return cls(-math.inf)

    def begin(self, session: str) -> None:
        """The controller knows this process anew. What it asked for before that is void."""
        self.session = session

    def granted(self, sent_at: float, duration_s: float) -> None:
        """The answer to a heartbeat sent at ``sent_at``. Answers may come out of order."""
        self.until = max(self.until, sent_at + duration_s)

    def revoke(self) -> None:
        """The controller does not know this process any more."""
        self.until = -math.inf

    def check_session(self, now: float, session: str) -> None:
        """Raises LeaseLost, also for what was asked of a process that may serve no more."""
        self.check(now)
        self.check_asked(session)

    def check_asked(self, session: str) -> None:
        """Raises LeaseLost. The controller gave up what it asked for in an earlier session, if it heard nothing."""
        if session != self.session:
            raise LeaseLost(
                "this replica was asked before it registered last",
                remedy="ask it again",
                session=session,
                registered=self.session,
            )

    def check(self, now: float) -> None:
        """Raises LeaseLost. To be asked before a batch is applied, and again before it is acknowledged."""
        if now >= self.until:
            raise LeaseLost(
                "this replica's lease has lapsed: its partitions may have been given away",
                remedy="it serves again when it reaches the controller; refresh the assignment",
            )
