"""Whose turn it is: which parts of the batches that are under way begin now. Pure.

Turns go to the batch that has the fewest under way, so that a large one does not keep a small one waiting; within a
batch they go in its order, past those that a limit holds back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stateflow.moves import MoveOptions
from stateflow.types import ReplicaInfo, node_of


@dataclass(frozen=True, slots=True)
class Limits:
    """At a time; 0: no limit. ``per_node``: that have it as source or target. ``per_link``: between two sites."""

    limit: int = 0
    per_node: int = 0
    per_link: int = 0

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Limits:
        return cls(**payload)

    def to_payload(self) -> dict[str, int]:
        return asdict(self)


NONE = Limits()


def limits_of(options: MoveOptions) -> Limits:
    """Those that were asked for when it was begun."""
    return Limits(options.limit or 0, options.per_node or 0, options.per_link or 0)


@dataclass(frozen=True, slots=True)
class Part:
    """``shared``: the limits for all batches apply, too. ``link``: the sites that it is between; empty: it is not."""

    batch: str
    nodes: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    shared: bool = True

    @classmethod
    def between(cls, batch: str, source: ReplicaInfo, target: ReplicaInfo, *, shared: bool = True) -> Part:
        nodes = tuple(sorted({node_of(source.name), node_of(target.name)}))
        sites = tuple(sorted({source.site, target.site}))
        return cls(batch, nodes, sites if len(sites) > 1 else (), shared)


class _Taken:
    """What is under way, counted against limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.count = 0
        self._nodes: Counter[str] = Counter()
        self._links: Counter[tuple[str, ...]] = Counter()

    def add(self, part: Part) -> None:
        self.count += 1
        self._nodes.update(part.nodes)
        self._links[part.link] += 1

    @property
    def is_full(self) -> bool:
        return 0 < self.limits.limit <= self.count

    def takes(self, part: Part) -> bool:
        limits = self.limits
        return not (
            self.is_full
            or (limits.per_node and any(self._nodes[node] >= limits.per_node for node in part.nodes))
            or (limits.per_link and part.link and self._links[part.link] >= limits.per_link)
        )


def next_turns(
    waiting: Sequence[Part], under_way: Iterable[Part], limits: Mapping[str, Limits], of_all: Limits = NONE
) -> list[int]:
    """Places in ``waiting`` of those that begin now, in the order of their turns.

    Args:
        waiting: of batches that go on, in the order in which they came.
        limits: of batches that have some; ``of_all``: of all batches together.
    """
    all_, each = _Taken(of_all), {part.batch: _Taken(limits.get(part.batch, NONE)) for part in waiting}
    for part in under_way:
        if part.shared:
            all_.add(part)
        if part.batch in each:
            each[part.batch].add(part)
    queues: dict[str, deque[int]] = {}
    for number, part in enumerate(waiting):
        queues.setdefault(part.batch, deque()).append(number)
    chosen: list[int] = []
    while queues:
        batch = min(queues, key=lambda name: each[name].count)  # of equals the one that came first
        place = _first_free(queues[batch], waiting, each[batch], all_)
        if place is None:
            del queues[batch]
            continue
        chosen.append(place)
        each[batch].add(waiting[place])
        if waiting[place].shared:
            all_.add(waiting[place])
    return chosen


def _first_free(queue: deque[int], waiting: Sequence[Part], taken: _Taken, all_: _Taken) -> int | None:
    """Takes out what it passes over: what is under way only becomes more from here."""
    while queue and not taken.is_full:
        part = waiting[place := queue.popleft()]
        if taken.takes(part) and (not part.shared or all_.takes(part)):
            return place
        if part.shared and all_.is_full and all(waiting[each].shared for each in queue):
            break
    return None
