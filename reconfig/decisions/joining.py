"""Moves that begin without a command: the rebalance for replicas that join, and the autopilot. Decisions, no I/O.

Callers look at intervals, and hand in what was measured and the time in monotonic seconds.

A replica that owns nothing is a *newcomer* if a rebalance would give it partitions. The rebalance begins once the
newcomer has been there for a while with nothing else going on, and once only: if it fails, people decide what to do,
instead of the controller trying again and again.

The autopilot begins moves that the policies propose. A proposed move begins when it has stood for a while, so that
short-lived load moves nothing; a partition that has moved rests; and a limit bounds the moves that begin in a minute.
These are the thresholds and the cool-down of a feedback controller with a dead band: without them two policies, or one
policy and its own effect, move a partition to and fro.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from reconfig.decisions.placement import MoveProposal, PolicyName, View, decide, policies_named
from reconfig.decisions.work import Cause
from stateflow import ring
from stateflow.errors import InvalidArgument
from stateflow.types import PartitionId, ReplicaInfo, node_of

#: causes of reconfigurations by which people make a replica own less
ON_PURPOSE: Final = frozenset({Cause.DRAIN, Cause.MIGRATE})
#: a move that is still proposed after a quarter of this (``STANDS``), which is several looks, is no accident
COOL_DOWN_S = 60.0
MOVES_PER_MINUTE = 60.0
#: part of the cool-down for which a move must stay proposed
STANDS = 0.25
#: seconds between looks of the autopilot, if a move must stay proposed for longer
LOOK_S = 5.0
#: seconds between two looks from which rates can be told
APART_S = 2.0


# -- Replicas that join ----------------------------------------------------------------------------------------------


class Joining:
    """Decides when a rebalance for newcomers begins.

    Args:
        after_s: seconds for which a newcomer must have been there, and nothing else been going on.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[tuple[str, str], float] = {}
        self._served: set[tuple[str, str]] = set()
        self._quiet_from = float("-inf")

    def step(self, now_s: float, newcomers: Mapping[str, str], busy: bool) -> frozenset[str]:
        """Returns the newcomers for which a rebalance begins now; empty: it is not time.

        Args:
            now_s: monotonic seconds.
            newcomers: each newcomer that is there now, and the session that it registered with; a replica that was
                started anew has another session, and counts as another newcomer.
            busy: something moves, is restored, deployed or taken over, or a replica that owns something is silent.
        """
        if busy:
            self._quiet_from = now_s
        there = set(newcomers.items())
        self._since = {each: self._since.get(each, now_s) for each in there}
        self._served &= there
        waited = {each for each in there if now_s - max(self._since[each], self._quiet_from) >= self._after_s}
        if busy or not waited - self._served:
            return frozenset()
        self._served |= there  # one rebalance serves all newcomers that are there
        return frozenset(name for name, _ in there)


def newcomers(
    owners: Mapping[PartitionId, str],
    alive: Collection[ReplicaInfo],
    sites: Mapping[str, str],
    confined: ring.Confined = ring.EVERYWHERE,
) -> frozenset[str]:
    """Returns the replicas for which a rebalance may begin without a command.

    Returns none if any operator is missing at a site that would take part: earlier versions did not record that an
    operator was deployed to some sites on purpose.

    Args:
        owners: owner by partition.
        alive: replicas that may be given something.
        sites: site by replica, of all replicas, alive or not.
        confined: the sites to which operators are confined.
    """
    found = ring.newcomers(owners, alive, confined)
    places: dict[str, set[str]] = {}
    for partition, owner in owners.items():
        places.setdefault(partition.operator, set()).add(sites.get(owner, ""))
    taking = {info.site for info in alive if info.weight > 0}
    everywhere = all(taking & set(confined.get(operator, taking)) <= at for operator, at in places.items())
    return found if everywhere else frozenset()


def was_emptied(replica: str, moves: Iterable[tuple[str, str, Cause]]) -> bool:
    """Tells whether the last move to or from a replica's node moved a partition away on purpose.

    Args:
        moves: (source, target, cause) of completed moves, newest first.
    """
    node = node_of(replica)
    for source, target, cause in moves:
        ends = node_of(source), node_of(target)
        if node in ends and ends[0] != ends[1]:
            return ends[0] == node and cause in ON_PURPOSE
    return False


# -- The autopilot ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AutopilotSettings:
    """The autopilot's settings.

    Args:
        policies: the policies that propose moves, the first decides first; empty: the autopilot is off.
        max_pause_ms: pause budget of each move; None: no budget.
        cool_down_s: seconds for which a partition that has moved is left alone.
        moves_per_minute: the most moves that begin in a minute.

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
        """Seconds for which a move must stay proposed before it begins."""
        return self.cool_down_s * STANDS

    @property
    def look_s(self) -> float:
        """Seconds until the next look: a move that has stood for long enough does not wait much longer."""
        return max(APART_S, min(LOOK_S, self.stands_s))

    def to_dict(self) -> dict[str, Any]:
        return {
            "policies": [str(policy) for policy in self.policies],
            "max_pause_ms": self.max_pause_ms,
            "cool_down_s": self.cool_down_s,
            "moves_per_minute": self.moves_per_minute,
        }

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> AutopilotSettings:
        """Inverse of :meth:`to_dict`. Raises InvalidArgument."""
        names = fields.get("policies") or ()
        policies = tuple(policies_named(",".join(names))) if names else ()
        rest = {name: value for name, value in fields.items() if name != "policies"}
        return cls(policies, **rest)


class Autopilot:
    """Chooses the moves that begin now. Times are monotonic seconds."""

    def __init__(self, orders: AutopilotSettings) -> None:
        self.orders = orders
        self._since: dict[tuple[PartitionId, str], float] = {}  # by partition and proposed site
        self._moved_at: dict[PartitionId, float] = {}
        self._tokens = self._most
        self._counted_at = -math.inf

    @property
    def _most(self) -> float:
        """The most moves that may begin at once: ten seconds' share of a minute's, at least one."""
        return max(1.0, self.orders.moves_per_minute / 6)

    def step(self, now_s: float, view: View, busy: Collection[PartitionId] = frozenset()) -> list[MoveProposal]:
        """Returns the moves that begin now.

        Args:
            busy: partitions that move already.
        """
        if not self.orders.policies:
            return []
        proposals = decide(self.orders.policies, view)
        places = self._places(view, proposals)
        self._since = {key: self._since.get(key, now_s) for key in places}
        self._moved_at = {
            partition: at for partition, at in self._moved_at.items() if now_s - at < self.orders.cool_down_s
        }
        self._refill(now_s)
        chosen: list[MoveProposal] = []
        for key, proposal in places.items():
            if len(chosen) + 1 > self._tokens:
                break
            rests = proposal.partition in busy or proposal.partition in self._moved_at
            if not rests and now_s - self._since[key] >= self.orders.stands_s:
                chosen.append(proposal)
        self._tokens -= len(chosen)
        return chosen

    def began(self, now_s: float, partitions: Iterable[PartitionId]) -> None:
        """Starts the cool-down of partitions that move now."""
        self._moved_at |= dict.fromkeys(partitions, now_s)

    @staticmethod
    def _places(view: View, proposals: Sequence[MoveProposal]) -> dict[tuple[PartitionId, str], MoveProposal]:
        """Returns proposed moves by partition and target site. The site must stay the same, but not the node: which
        node has least there may change at any time."""
        sites = {info.name: info.site for info in view.replicas}
        return {(proposal.partition, sites[proposal.target]): proposal for proposal in proposals}

    def _refill(self, now_s: float) -> None:
        passed_s = now_s - self._counted_at if math.isfinite(self._counted_at) else 0.0
        self._tokens = min(self._most, self._tokens + passed_s * self.orders.moves_per_minute / 60)
        self._counted_at = now_s
