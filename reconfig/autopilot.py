"""When what the policies wish is carried out without anybody asking: decided from what is seen, no I/O.

A wish is taken up when it has stood for a while, so that what comes and goes moves nothing; a partition that has moved
rests; and no more moves begin in a minute than was said. These are the thresholds and the cool-down of a feedback
controller with a dead band: without them two policies, or one and its own effect, move a partition to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reconfig.placement import PolicyName, decide, policies_named
from reconfig.view import View, Wish
from stateflow.errors import InvalidArgument
from stateflow.types import PartitionId

#: a wish that has stood so often as long as it is looked at for is no accident
COOL_DOWN_S = 60.0
MOVES_PER_MINUTE = 60.0
#: part of the cool-down for which a wish must stand
STANDS = 0.25
#: how often it looks, where a wish is to stand for longer
LOOK_S = 5.0
#: two looks so far apart tell rates
APART_S = 2.0


@dataclass(frozen=True, slots=True)
class Orders:
    """What people said.

    Args:
        policies: in the order of their say; none: it does nothing.
        max_pause_ms: of each move; None: no budget.
        cool_down_s: a partition that has moved is left alone for so long.
        moves_per_minute: that begin, at most.

    Raises InvalidArgument.
    """

    policies: tuple[PolicyName, ...] = ()
    max_pause_ms: float | None = None
    cool_down_s: float = COOL_DOWN_S
    moves_per_minute: float = MOVES_PER_MINUTE

    def __post_init__(self) -> None:
        for name in ("max_pause_ms", "cool_down_s", "moves_per_minute"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InvalidArgument(f"{name} cannot be {value!r}", remedy="give a positive number")

    @property
    def stands_s(self) -> float:
        """For which a wish must stand."""
        return self.cool_down_s * STANDS

    @property
    def look_s(self) -> float:
        """Until the next look: what has stood for long enough is not to wait much longer."""
        return max(APART_S, min(LOOK_S, self.stands_s))

    def to_dict(self) -> dict[str, Any]:
        return {
            "policies": [str(policy) for policy in self.policies],
            "max_pause_ms": self.max_pause_ms,
            "cool_down_s": self.cool_down_s,
            "moves_per_minute": self.moves_per_minute,
        }

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Orders:
        """Of :meth:`to_dict`. Raises InvalidArgument."""
        names = fields.get("policies") or ()
        policies = tuple(policies_named(",".join(names))) if names else ()
        rest = {name: value for name, value in fields.items() if name != "policies"}
        return cls(policies, **rest)


class Autopilot:
    """Times are monotonic seconds."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self._since: dict[tuple[PartitionId, str], float] = {}  # partition and site or node that is wished
        self._moved_at: dict[PartitionId, float] = {}
        self._tokens = self._most
        self._counted_at = -math.inf

    @property
    def _most(self) -> float:
        """That may begin at once: what a minute's share of ten seconds is, and one at least."""
        return max(1.0, self.orders.moves_per_minute / 6)

    def step(self, now_s: float, view: View, busy: Collection[PartitionId] = frozenset()) -> list[Wish]:
        """What is to begin now. Args: busy: partitions that move already."""
        if not self.orders.policies:
            return []
        wishes = decide(self.orders.policies, view)
        places = self._places(view, wishes)
        self._since = {key: self._since.get(key, now_s) for key in places}
        self._moved_at = {
            partition: at for partition, at in self._moved_at.items() if now_s - at < self.orders.cool_down_s
        }
        self._refill(now_s)
        chosen: list[Wish] = []
        for key, wish in places.items():
            if len(chosen) + 1 > self._tokens:
                break
            rests = wish.partition in busy or wish.partition in self._moved_at
            if not rests and now_s - self._since[key] >= self.orders.stands_s:
                chosen.append(wish)
        self._tokens -= len(chosen)
        return chosen

    def began(self, now_s: float, partitions: Iterable[PartitionId]) -> None:
        """These move now."""
        self._moved_at |= dict.fromkeys(partitions, now_s)

    @staticmethod
    def _places(view: View, wishes: Sequence[Wish]) -> dict[tuple[PartitionId, str], Wish]:
        """By what of a wish must stand: the site, as which node there has least may change at any time."""
        sites = {info.name: info.site for info in view.replicas}
        return {(wish.partition, sites[wish.target]): wish for wish in wishes}

    def _refill(self, now_s: float) -> None:
        passed_s = now_s - self._counted_at if math.isfinite(self._counted_at) else 0.0
        self._tokens = min(self._most, self._tokens + passed_s * self.orders.moves_per_minute / 60)
        self._counted_at = now_s
