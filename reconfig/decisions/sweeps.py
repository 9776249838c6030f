"""Sweeps, which are long work at many nodes, a few nodes at a time; and the maintenance of nodes. Sans-io.

A sweep does one chore, either at nodes or for partitions. A chore for partitions follows partitions that move: their
current owners process the remaining partitions (:func:`without`, :func:`shares`).

A node in maintenance receives no partitions, and no two nodes of a set are in maintenance at a time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from stateflow.errors import InMaintenance, InvalidArgument
from stateflow.types import ranges, shown

#: numbers of partitions by operator
Partitions = dict[str, list[int]]
#: records that a node begins; returns False if the node must no longer begin
Begin = Callable[[], Awaitable[bool]]


# -- Sweeps ----------------------------------------------------------------------------------------------------------


class Chore(StrEnum):
    """The work that a sweep does at each node."""

    RESTART = "restart"
    CHECKPOINT = "checkpoint"
    VERIFY = "verify"

    @property
    def covers(self) -> bool:
        """Tells whether the chore is for partitions rather than for nodes. Such a chore follows partitions
        that move.
        """
        return self is not Chore.RESTART

    @property
    def stops(self) -> bool:
        """Tells whether the sweep stops after a node has failed, because other nodes would fail for the same reason."""
        return self is Chore.RESTART


def chore_named(name: str) -> Chore:
    """Returns the chore of that name. Raises InvalidArgument."""
    try:
        return Chore(name)
    except ValueError:
        raise InvalidArgument(f"{shown(name)} is not a kind of sweep", remedy=f"use {', '.join(Chore)}") from None


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep's plan.

    Attributes:
        site: name of the site, node or agent that the sweep is limited to; empty: everywhere.
        limit: nodes at a time.
        operator: the operator that the sweep is limited to; empty: all.
        scope: partitions to process; empty for a chore at nodes.
    """

    chore: Chore
    nodes: tuple[str, ...]
    site: str = ""
    limit: int = 1
    operator: str = ""
    scope: Partitions = field(default_factory=dict)


def packed(partitions: Mapping[str, Collection[int]]) -> dict[str, str]:
    """Returns partitions in the form of a record: ``{"Op": "0-7 9"}``."""
    return {operator: ranges(list(numbers)) for operator, numbers in sorted(partitions.items()) if numbers}


def unpacked(kept: Mapping[str, str]) -> Partitions:
    """Reads partitions from the form that :func:`packed` returns."""
    found: Partitions = {}
    for operator, words in kept.items():
        found[operator] = []
        for word in words.split():
            first, _, last = word.partition("-")
            found[operator] += range(int(first), int(last or first) + 1)
    return found


def without(partitions: Mapping[str, Collection[int]], done: Mapping[str, Collection[int]]) -> Partitions:
    """Returns ``partitions`` except those in ``done``."""
    left = {name: sorted(set(numbers) - set(done.get(name, ()))) for name, numbers in partitions.items()}
    return {name: numbers for name, numbers in left.items() if numbers}


def shares(partitions: Mapping[str, Collection[int]], owners: Mapping[str, Collection[str]]) -> dict[str, Partitions]:
    """Returns the partitions that each replica processes, by replica.

    Args:
        owners: owners by operator, in the order of partitions. The partitions of an operator that is missing here,
            because it was undeployed, are left out.
    """
    found: dict[str, Partitions] = {}
    for operator, numbers in sorted(partitions.items()):
        names = list(owners.get(operator, ()))
        for number in sorted(numbers):
            if number < len(names):
                found.setdefault(names[number], {}).setdefault(operator, []).append(number)
    return dict(sorted(found.items()))


# -- Maintenance -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Maintenance:
    """A node's maintenance. Times are µs of the controller's clock.

    Attributes:
        until_us: when it ends by itself; 0: it ends by command.
        one_of: name of a set of nodes of which no two may be in maintenance at a time; empty: no set.
    """

    since_us: int
    until_us: int = 0
    one_of: str = ""

    def to_payload(self) -> dict[str, Any]:
        return asdict(self)

    def lasts(self, now_us: int) -> bool:
        return not self.until_us or now_us < self.until_us


def ordered(node: str, now_us: int, for_s: float, one_of: str, known: Mapping[str, Maintenance]) -> Maintenance:
    """Returns the maintenance of a node from now on.

    Args:
        for_s: duration in seconds; 0: until it is ended by command.
        known: maintenance by node, of all nodes, whether it is over or not.

    Raises InvalidArgument if ``for_s`` is negative or longer than ten years, and InMaintenance while another node of
    the set is in maintenance.
    """
    if not 0 <= for_s < 10 * 365 * 86400:
        raise InvalidArgument(f"maintenance cannot last {for_s:g} s", remedy="give a duration below 10 years, e.g. 2h")
    others = [
        name for name, each in sorted(known.items()) if name != node and each.one_of == one_of and each.lasts(now_us)
    ]
    if one_of and others:
        raise InMaintenance(
            f"{others[0]} is in maintenance, and the set {one_of} allows only one node at a time",
            remedy=f"wait, or end it: `stateflow maintenance end {others[0]}`",
            node=node,
        )
    return Maintenance(now_us, now_us + round(for_s * 1e6) if for_s else 0, one_of)
