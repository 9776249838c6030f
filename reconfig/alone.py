"""Serving without a controller: what replicas of operators whose failover is ``manual`` may do. Pure.

Each heartbeat reply names the operators that the replica may serve while no controller answers, and the number of the
newest failover order. The replica makes both durable first, and then repeats them in its next heartbeats.
The leading controller therefore knows which operators a silent replica may still be serving: those that it repeated
last, those that are manual now, and those that a later order concerns. A replica that has repeated nothing in this term
may be serving every operator that was ever manual.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stateflow.errors import InvalidArgument


class Failover(StrEnum):
    """An operator's failover: what happens to a partition whose owner does not answer."""

    AUTOMATIC = "automatic"  # another replica takes it over when the owner's lease has lapsed
    MANUAL = "manual"  # its owner goes on serving it, alone, until a command gives it up

    @classmethod
    def named(cls, name: str) -> Failover:
        """Returns the failover of that name. Raises InvalidArgument."""
        try:
            return cls(name)
        except ValueError:
            raise InvalidArgument(f"{name!r} is not a failover mode", remedy=f"use {' or '.join(cls)}") from None


@dataclass(frozen=True, slots=True)
class Said:
    """A replica's report of the operators that it may serve alone, as of a failover order."""

    order: int
    operators: frozenset[str]


NOTHING = Said(0, frozenset())


@dataclass(slots=True)
class Failovers:
    """Failover orders. ``newest``: each operator's newest order, as (number, whether it is manual). ``count``: number
    of the newest order of all."""

    newest: dict[str, tuple[int, bool]] = field(default_factory=dict)
    count: int = 0

    def order(self, operator: str, failover: Failover) -> None:
        self.count += 1
        self.newest[operator] = self.count, failover is Failover.MANUAL

    def undeployed(self, operator: str) -> None:
        """Returns the name to automatic failover, for a later operator of that name."""
        if operator in self.newest:
            self.order(operator, Failover.AUTOMATIC)

    def is_manual(self, operator: str) -> bool:
        return self.newest.get(operator, (0, False))[1]

    def manual(self) -> frozenset[str]:
        return frozenset(operator for operator, (_, manual) in self.newest.items() if manual)

    def may_be_alone(self, operator: str, said: Said | None) -> bool:
        """Tells whether a silent replica may be serving an operator.

        Args:
            said: the replica's last report in this term; None: it reported nothing.
        """
        number, manual = self.newest.get(operator, (0, False))
        if said is None:
            return number > 0
        return manual or operator in said.operators or said.order < number
