"""Long work on many nodes, one after another: what there is of it, and who is to do which partitions. Sans-io."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stateflow.errors import InvalidArgument
from stateflow.types import ranges, shown

#: numbers of partitions by operator
Partitions = dict[str, list[int]]
#: records that a node has begun; False: it is not to any more
Begin = Callable[[], Awaitable[bool]]


class Chore(StrEnum):
    """What is done at each node."""

    RESTART = "restart"
    CHECKPOINT = "checkpoint"
    VERIFY = "verify"

    @property
    def covers(self) -> bool:
        """It is about partitions, wherever they go meanwhile; and not about the nodes themselves."""
        return self is not Chore.RESTART

    @property
    def stops(self) -> bool:
        """After a node that failed no other one begins: what it failed of, they would."""
        return self is Chore.RESTART


def chore_named(name: str) -> Chore:
    """Raises InvalidArgument."""
    try:
        return Chore(name)
    except ValueError:
        raise InvalidArgument(
            f"{shown(name)} is nothing that is done at every node", remedy=f"use {', '.join(Chore)}"
        ) from None


@dataclass(frozen=True, slots=True)
class Plan:
    """``site``: where, or of which node or agent; empty: everywhere. ``limit``: of nodes at a time. ``scope``: the
    partitions that are to be done; none of a chore that is about nodes."""

    chore: Chore
    nodes: tuple[str, ...]
    site: str = ""
    limit: int = 1
    operator: str = ""
    scope: Partitions = field(default_factory=dict)


def packed(partitions: Mapping[str, Collection[int]]) -> dict[str, str]:
    """As a record has them: ``{"Op": "0-7 9"}``."""
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
    """What is left of them."""
    left = {name: sorted(set(numbers) - set(done.get(name, ()))) for name, numbers in partitions.items()}
    return {name: numbers for name, numbers in left.items() if numbers}


def shares(partitions: Mapping[str, Collection[int]], owners: Mapping[str, Collection[str]]) -> dict[str, Partitions]:
    """Which replica is to do which of them. Args: owners: of each operator, by partition; what is undeployed by now is
    nobody's."""
    found: dict[str, Partitions] = {}
    for operator, numbers in sorted(partitions.items()):
        names = list(owners.get(operator, ()))
        for number in sorted(numbers):
            if number < len(names):
                found.setdefault(names[number], {}).setdefault(operator, []).append(number)
    return dict(sorted(found.items()))
