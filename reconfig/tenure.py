"""May this controller decide now? Its hold on the ledger, counted on its own monotonic clock: sans-io.

Counted from before a renewal was *sent*, as a replica counts its lease. The next process that takes the hold waits,
from when it took it, for as long as this one may go on by that count, plus a margin for clocks that drift apart. So two
never decide at once, whatever the database's clock does; that clock only says when to try.

It may have been put back, and say so an hour late. So whoever waits counts on its own clock, too, for how long it has
seen no renewal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stateflow.errors import HoldLost

#: a hold is renewed so many times in its lease
RENEWALS = 3


@dataclass(slots=True)
class Tenure:
    """``until``: monotonic seconds. One that is made without is for ever: of a controller that is tried alone."""

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
        """Raises HoldLost. To be asked before a lease is granted, a command sent, a record written."""
        if now >= self.until:
            raise HoldLost(
                "this controller could not renew its hold on the ledger: another one may decide by now",
                remedy="see to the ledger's database; it goes on by itself when nobody else has taken it",
                term=self.term,
            )


@dataclass(slots=True)
class Unrenewed:
    """Of another one's hold. Args: margin: clocks may drift apart by this share."""

    margin: float
    _seen: tuple[int, int] | None = None  # term, and when it ends by the database's clock: another one by each renewal
    _since: float = 0.0

    def over(self, term: int, until_us: int, lease_s: float, now: float) -> bool:
        """It was just read: has it not been renewed for all of its lease?"""
        if self._seen != (term, until_us):
            self._seen, self._since = (term, until_us), now
        return now - self._since > lease_s * (1 + self.margin)
