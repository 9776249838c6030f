"""Sweeps: long work on many nodes, a few at a time: the kinds of it, and which replica does which partitions.
Sans-io."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stateflow.errors import InvalidArgument
from stateflow.types import ranges, shown

#: numbers of partitions by operator
Partitions = dict[str, list[int]]
#: records that a node has begun; False: it must not begin any more
Begin = Callable[[], Awaitable[bool]]


class Chore(StrEnum):
    """The work that a sweep does at each node."""

    RESTART = "restart"
    CHECKPOINT = "checkpoint"
    VERIFY = "verify"

    @property
    def covers(self) -> bool:
        """Tells whether the work is about partitions, which it follows when they move, and not about the nodes."""
        return self is not Chore.RESTART

    @property
    def stops(self) -> bool:
        """Tells whether no other node begins after one has failed, as they would fail for the same reason."""
        return self is Chore.RESTART


def chore_named(name: str) -> Chore:
    """Returns the chore of that name. Raises InvalidArgument."""
    try:
        return Chore(name)
    except ValueError:
        raise InvalidArgument(f"{shown(name)} is not a kind of sweep", remedy=f"use {', '.join(Chore)}") from None


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep's plan. ``site``: name of a site, node or agent; empty: everywhere. ``limit``: nodes at a time.
    ``operator``: empty: all. ``scope``: partitions to do; empty for a chore about nodes."""

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
    """Inverse of :func:`packed`."""
    found: Partitions = {}
    for operator, words in kept.items():
        found[operator] = []
        for word in words.split():
            first, _, last = word.partition("-")
            found[operator] += range(int(first), int(last or first) + 1)
    return found


def without(partitions: Mapping[str, Collection[int]], done: Mapping[str, Collection[int]]) -> Partitions:
    """Returns the partitions that are not done."""
    left = {name: sorted(set(numbers) - set(done.get(name, ()))) for name, numbers in partitions.items()}
    return {name: numbers for name, numbers in left.items() if numbers}


def shares(partitions: Mapping[str, Collection[int]], owners: Mapping[str, Collection[str]]) -> dict[str, Partitions]:
    """Returns the partitions that each replica does, by replica.

    Args:
        owners: owners by operator, in the order of partitions. Partitions of operators that are missing, as they were
            undeployed meanwhile, are left out.
    """
    found: dict[str, Partitions] = {}
    for operator, numbers in sorted(partitions.items()):
        names = list(owners.get(operator, ()))
        for number in sorted(numbers):
            if number < len(names):
                found.setdefault(names[number], {}).setdefault(operator, []).append(number)
    return dict(sorted(found.items()))
