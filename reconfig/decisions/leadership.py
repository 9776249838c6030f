"""Leadership: whether this controller may decide now, by its leader lease, counted on its own monotonic clock. Sans-io.

A controller counts its lease from before it *sent* the renewal, as a replica does. The next process that takes the
lease first waits, from that moment, for as long as the former holder may go on by its own count, plus a margin for
clock drift. So no two controllers decide at once, whatever the database's clock does; that clock only says when to try.

The database's clock may have been set back, and then report the end of a lease an hour late. A waiting controller
therefore also counts, on its own clock, for how long it has seen no renewal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stateflow.errors import HoldLost

#: how many times a leader lease is renewed within its duration
RENEWALS = 3


@dataclass(slots=True)
class Leadership:
    """A controller's leader lease. ``until``: its end, in monotonic seconds. Default: never expires (single controller,
    tests)."""

    term: int = 1
    lease_s: float = math.inf
    until: float = math.inf

    def renewed(self, sent_at: float) -> None:
        self.until = max(self.until, sent_at + self.lease_s)

    def left_s(self, now: float) -> float:
        return self.until - now

    @property
    def renew_s(self) -> float:
        return self.lease_s / RENEWALS

    def check(self, now: float) -> None:
        """Checks that the leader lease has not lapsed. Raises HoldLost. Callers check before they grant a lease, send a
        command or write a record."""
        if now >= self.until:
            raise HoldLost(
                "this controller could not renew its leader lease: another one may lead by now",
                remedy="check the ledger's database; this controller leads again unless another takes the lease",
                term=self.term,
            )


@dataclass(slots=True)
class Unrenewed:
    """Counts for how long another controller has not renewed its leader lease.

    Args:
        margin: fraction by which clocks may drift apart.
    """

    margin: float
    _seen: tuple[int, int] | None = None  # term, and its end by the database's clock, which each renewal changes
    _since: float = 0.0

    def over(self, term: int, until_us: int, lease_s: float, now: float) -> bool:
        """Takes in a lease as just read. Returns whether it has lapsed: no renewal was seen for its whole duration,
        margin included."""
        if self._seen != (term, until_us):
            self._seen, self._since = (term, until_us), now
        return now - self._since > lease_s * (1 + self.margin)
