"""Who may serve without a controller: replicas of operators whose failover is ``manual``. Pure.

A replica is told with each heartbeat which operators it may serve while nobody answers it, and by which order that is
so. It keeps both where they outlive it before it counts them as told, and says them with its next heartbeats. So
whoever leads knows of a replica that is silent what it may still be doing: what its operators are now, or were at any
order behind the one that it said last. A replica that has said nothing in a term may be doing whatever was ever so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from stateflow.errors import InvalidArgument


class Failover(StrEnum):
    """What becomes of a partition whose owner does not answer."""

    AUTOMATIC = "automatic"  # another replica takes it over when the owner's lease has lapsed
    MANUAL = "manual"  # its owner serves it on, alone, until somebody says that it is given up

    @classmethod
    def named(cls, name: str) -> Failover:
        """Raises InvalidArgument."""
        try:
            return cls(name)
        except ValueError:
            raise InvalidArgument(f"{name!r} is no failover", remedy=f"use {' or '.join(cls)}") from None


@dataclass(frozen=True, slots=True)
class Said:
    """By a replica: what it may serve alone, as of an order."""

    order: int
    operators: frozenset[str]


NOTHING = Said(0, frozenset())


@dataclass(slots=True)
class Failovers:
    """Orders: ``newest`` of each operator, as (its number, is it manual?). ``count``: all that there were."""

    newest: dict[str, tuple[int, bool]] = field(default_factory=dict)
    count: int = 0

    def order(self, operator: str, failover: Failover) -> None:
        self.count += 1
        self.newest[operator] = self.count, failover is Failover.MANUAL

    def undeployed(self, operator: str) -> None:
        """Another one of its name is automatic, until that is changed."""
        if operator in self.newest:
            self.order(operator, Failover.AUTOMATIC)

    def is_manual(self, operator: str) -> bool:
        return self.newest.get(operator, (0, False))[1]

    def manual(self) -> frozenset[str]:
        return frozenset(operator for operator, (_, manual) in self.newest.items() if manual)

    def may_be_alone(self, operator: str, said: Said | None) -> bool:
        """Whether a replica that is silent may serve it. Args: said: in this term, last; None: nothing."""
        number, manual = self.newest.get(operator, (0, False))
        if said is None:
            return number > 0
        return manual or operator in said.operators or said.order < number
