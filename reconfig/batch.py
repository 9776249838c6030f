"""Turns: which parts (moves) of the running batches begin now. Pure.

The batch with the fewest parts under way gets the next turn, so that a large batch does not keep a small one waiting.
Within a batch, turns follow its order and skip the parts that a limit holds back.
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
    """Limits on parts under way at a time; 0: no limit. ``per_node``: parts with the node as source or target.
    ``per_link``: parts between the same two sites."""

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
    """Returns the limits that a batch's options ask for."""
    return Limits(options.limit or 0, options.per_node or 0, options.per_link or 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a batch. ``nodes``: source and target node. ``link``: source and target site; empty: both are the
    same. ``shared``: the limits for all batches together apply, too."""

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
    """Counts parts under way against limits."""

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
    """Returns the indices in ``waiting`` of the parts that begin now, in the order of their turns.

    Args:
        waiting: parts of batches that are not paused, in the order in which they came.
        under_way: parts that have begun and not ended.
        limits: limits by batch; a batch that is missing has none.
        of_all: limits of all batches together.
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
        batch = min(queues, key=lambda name: each[name].count)  # among equals the one that came first
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
    """Takes the first part that the limits allow out of the queue, and those that it skips: as parts under way only
    become more within one call of :func:`next_turns`, the skipped ones cannot begin in it. None: no part may begin."""
    while queue and not taken.is_full:
        part = waiting[place := queue.popleft()]
        if taken.takes(part) and (not part.shared or all_.takes(part)):
            return place
        if part.shared and all_.is_full and all(waiting[each].shared for each in queue):
            break
    return None
