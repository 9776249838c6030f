"""Placement policies, which propose moves from a view of the cluster, each with its reason; and the autopilot, which
chooses the proposed moves that begin. Sans-io and deterministic.

==============  ====================================================================================================
policy          aim
==============  ====================================================================================================
``ring``        every node has its weight's share of partitions, by as few moves as that takes
``load``        no node has more than 1.2 times its weight's share of rows a second and of bytes, by few moves
``locality``    partitions are where their rows have the shortest round trips: where they come from, or near to it
==============  ====================================================================================================

:func:`decide` asks policies for moves. Each decides from a :class:`~reconfig.decisions.placement.View` alone, and
proposes a :class:`~reconfig.decisions.placement.MoveProposal` for each partition that it would move. If it would move
a partition but cannot, it notes the reason in :class:`~reconfig.decisions.placement.Left`.

Every policy respects the sites at which an operator is allowed and the room that replicas have, and places nothing at
a node in maintenance. Several policies are asked in order. A later policy assumes that the moves of earlier ones are
made, and keeps each partition at the site where an earlier one wants it. No move is proposed that costs more than it
brings: within ``PAYBACK_S``, the bytes that no longer cross between sites must make up for the bytes of the move. The
move itself must not take longer than that either, if the bandwidth is known.

The autopilot begins a move only after it has been proposed for a while, so that short-lived load moves nothing. A
partition that has moved is not moved again during the cool-down, and the number of moves that begin in a minute is
limited. Without this dead band, two policies, or one policy and its own effect, would move a partition to and fro. Each
move that fails doubles the partition's cool-down for moves to the same site. Callers call the autopilot at intervals,
with the view and the time in monotonic seconds.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from reconfig.decisions.placement import PAYBACK_S, Left, MoveProposal, Seen, Space, View
from stateflow import ring
from stateflow.errors import InvalidArgument
from stateflow.types import PartitionId, node_of

#: rows a second of a partition, below which their origin does not matter
ORIGIN_ROWS_MIN = 0.1
#: the most that a node may have, as a multiple of its weight's share
UNEVEN_MAX = 1.2
#: rows a second and bytes of an average node, below which it does not matter which node has more
MATTERS: Final[Mapping[str, float]] = MappingProxyType({"rows": 10.0, "bytes": float(16 << 20)})
#: number of least loaded takers to try for one partition; also the number of partitions that ``_places`` tries
_LOOKED_AT = 4
#: if the taker would exceed UNEVEN_MAX, it must end below the giver's former level by this fraction of its share
_WORTH_IT = 0.05
#: fraction by which round trips must be shorter at another site: otherwise a partition with as many rows from one site
#: as from another would move to and fro
NEARER_MIN = 0.3
#: milliseconds a row by which a site that is not the origin of any rows must be nearer: less is noise
NEARER_MS_MIN = 1.0
#: bytes of a row, if they were not measured
ROW_BYTES_GUESS = 100.0
#: number of sites nearest to an origin that are considered
_NEAREST = 8
#: seconds for which a partition that has moved is not moved again, unless the settings say otherwise
COOL_DOWN_S = 60.0
MOVES_PER_MINUTE = 60.0
#: doublings of the cool-down of a partition whose moves to a site fail again and again
MOST_DOUBLINGS = 6
#: part of the cool-down for which a move must stay proposed
STANDS = 0.25
#: seconds between looks of the autopilot, if a move must stay proposed for longer
LOOK_S = 5.0
#: seconds between two looks, at least; rates measured over less time are inexact
APART_S = 2.0


# -- Nodes, and policy load ------------------------------------------------------------------------------------------


class Nodes:
    """The load of nodes and their workers, in which proposed moves count as made.

    A *measure* is ``rows`` (a second) or ``bytes``. By measure and node, ``have`` is the amount that the node has, and
    ``fair`` its weight's share of the total.
    """

    def __init__(self, view: View, left: Left | None = None) -> None:
        self.view, self.left = view, left or Left()
        self.proposals: dict[PartitionId, MoveProposal] = {}
        self._space = Space(view.room)
        self._workers: dict[str, list[str]] = {}
        self.sites: dict[str, str] = {}
        self.weights: dict[str, float] = {}
        for info in sorted(view.takers(), key=lambda info: info.name):
            node = node_of(info.name)
            self._workers.setdefault(node, []).append(info.name)
            self.sites[node] = info.site
            self.weights[node] = self.weights.get(node, 0.0) + info.weight
        self.have = {measure: dict.fromkeys(self.weights, 0.0) for measure in MATTERS}
        self._counts: dict[str, tuple[float, int]] = {}  # rows and partitions of a worker
        for partition, owner in view.owners.items():
            self._add(partition, owner, 1)
        whole, totals = sum(self.weights.values()), {measure: sum(have.values()) for measure, have in self.have.items()}
        self.fair = {
            measure: {node: total * weight / whole for node, weight in self.weights.items()}
            for measure, total in totals.items()
        }

    def _add(self, partition: PartitionId, owner: str, sign: int) -> None:
        node, seen = node_of(owner), self.view.of(partition)
        if node in self.weights:
            self.have["rows"][node] += sign * seen.rows
            self.have["bytes"][node] += sign * seen.size
            rows, count = self._counts.get(owner, (0.0, 0))
            self._counts[owner] = rows + sign * seen.rows, count + sign

    def amount(self, partition: PartitionId, measure: str) -> float:
        seen = self.view.of(partition)
        return seen.rows if measure == "rows" else float(seen.size)

    def uneven(self, node: str, measure: str, more: float = 0.0) -> float:
        """Returns the ratio of a node's amount, with ``more`` added, to its fair share. 1.0: exactly its share."""
        return (self.have[measure][node] + more) / self.fair[measure][node]

    def workers(self, node: str) -> list[str]:
        """Returns the node's workers, the least loaded first."""
        return sorted(self._workers[node], key=lambda name: (*self._counts.get(name, (0.0, 0)), name))

    def target(self, partition: PartitionId, here: str, there: str, workers: Iterable[str], to: str) -> str | None:
        """Returns the first of ``workers`` that has room and is not avoided. Returns None, and notes why the partition
        stays, if there is none or the move would take too long.

        Args:
            here: the partition's site.
            there: the workers' site.
            to: name of the workers' node or site, for the note.
        """
        room = self.view.room
        if why := self.view.bytes_per_s and self.view.too_long(partition, here, there):
            self.left.note(partition, why)
            return None
        fits, avoided = self._space.holds, self.view.avoided.get(partition.operator, ())
        able = [name for name in workers if name not in avoided] if avoided else workers
        found = next((name for name in able if not room or fits(name, self.view.takes(partition, name))), None)
        if found is None:
            self.left.note(partition, f"{to} has no room for it" if able else f"{to} could not take it lately")
        return found

    def propose(self, partition: PartitionId, target: str, reason: str) -> None:
        owner = self.view.owners[partition]
        self._add(partition, self.proposals[partition].target if partition in self.proposals else owner, -1)
        self._add(partition, target, 1)
        if self.view.room:
            self._space.take(target, self.view.takes(partition, target))
        self.proposals[partition] = MoveProposal(partition, owner, target, reason)


def by_load(view: View, left: Left | None = None) -> tuple[list[MoveProposal], View]:
    """Proposes few moves that even out the load among nodes.

    The policy is greedy: it repeatedly moves the largest partition that fits from the node farthest above its share to
    the least loaded ones. Graham's bound for largest-first (SIAM J. Appl. Math. 17, 1969) holds if partitions are small
    compared with a node.
    """
    nodes = Nodes(view, left)
    count = len(nodes.weights)
    measures = [name for name, have in nodes.have.items() if count > 1 and sum(have.values()) / count >= MATTERS[name]]
    if measures:
        _Evening(nodes, measures).run()
    return list(nodes.proposals.values()), view


_Entry = tuple[float, str, int]  # a partition's measure, operator and number


def _places(partitions: Sequence[_Entry], too_much: float, room: float) -> Iterator[int]:
    """Yields indices of the partitions to try, in this order: the smallest ones that relieve the giver enough and fit;
    the largest of the others that fit; the smallest that does not fit, which may still improve the balance.

    Args:
        partitions: partitions of the giver, ascending by the measure.
        too_much: amount by which the giver exceeds the most that it may have.
        room: amount that the taker may still receive.
    """
    fits = bisect_right(partitions, room, key=lambda each: each[0])
    enough = bisect_left(partitions, too_much, key=lambda each: each[0])
    if enough < fits:
        yield from range(enough, min(enough + _LOOKED_AT, fits))
    for place in range(min(fits, enough) - 1, max(-1, min(fits, enough) - 1 - _LOOKED_AT), -1):
        if partitions[place][0] > 0:
            yield place
    smallest = max(fits, bisect_right(partitions, 0.0, key=lambda each: each[0]))  # one without load relieves nothing
    if smallest < len(partitions):
        yield smallest


class _Evening:
    def __init__(self, nodes: Nodes, measures: Sequence[str]) -> None:
        self._nodes, self._measures = nodes, measures
        #: by giving node and measure: the node's partitions, ascending by the measure
        self._sorted: dict[tuple[str, str], list[_Entry]] = {}
        self._theirs: dict[str, list[PartitionId]] = {}
        self._takers: list[tuple[float, str]] = []
        giving = {node for node in nodes.weights if self._most(node)[0] > UNEVEN_MAX}
        for partition, owner in nodes.view.owners.items():
            if (node := node_of(owner)) in giving:
                self._theirs.setdefault(node, []).append(partition)

    def _most(self, node: str) -> tuple[float, str]:
        return max((self._nodes.uneven(node, measure), measure) for measure in self._measures)

    def run(self) -> None:
        self._takers = [(self._most(node)[0], node) for node in self._nodes.weights]
        heapq.heapify(self._takers)
        givers = [(-self._most(node)[0], node) for node in self._theirs]
        heapq.heapify(givers)
        while givers:
            said, node = heapq.heappop(givers)
            uneven, measure = self._most(node)
            if -said != uneven:
                heapq.heappush(givers, (-uneven, node))
            elif uneven > UNEVEN_MAX and self._give(node, measure, uneven):
                heapq.heappush(givers, (-self._most(node)[0], node))

    def _give(self, node: str, measure: str, uneven: float) -> bool:
        """Moves one partition away from ``node``, if afterwards neither ``node`` nor the receiving node is as uneven as
        ``node`` was. Returns False if there is no such partition.
        """
        have, fair, partitions = self._nodes.have[measure], self._nodes.fair[measure], self._by(node, measure)
        too_much = have[node] - UNEVEN_MAX * fair[node]
        looked_at = self._least()
        try:
            for _, taker in looked_at:
                if taker == node:
                    continue
                for place in _places(partitions, too_much, UNEVEN_MAX * fair[taker] - have[taker]):
                    _, operator, number = partitions[place]
                    if target := self._target(partition := PartitionId(operator, number), node, taker):
                        self._nodes.propose(partition, target, f"{node} has {uneven:.2f} times its share of {measure}")
                        self._handed_over(partition, node, taker)
                        return True
        finally:
            for _, taker in looked_at:
                heapq.heappush(self._takers, (self._most(taker)[0], taker))
        return False

    def _least(self) -> list[tuple[float, str]]:
        """Removes the least loaded nodes from the heap, and returns them. Puts entries that are out of date back with
        their current load."""
        found: list[tuple[float, str]] = []
        while self._takers and len(found) < _LOOKED_AT:
            said, node = heapq.heappop(self._takers)
            now = self._most(node)[0]
            if said != now:
                heapq.heappush(self._takers, (now, node))
            else:
                found.append((said, node))
        return found

    def _target(self, partition: PartitionId, node: str, taker: str) -> str | None:
        """Returns the worker of ``taker`` that gets a partition; None: the move is not possible or no improvement."""
        nodes = self._nodes
        if not nodes.view.may_be_at(partition, nodes.sites[taker]) or not all(
            nodes.uneven(taker, each, nodes.amount(partition, each))
            <= max(nodes.uneven(node, each) - _WORTH_IT, UNEVEN_MAX)
            for each in self._measures
        ):
            return None
        return nodes.target(partition, nodes.sites[node], nodes.sites[taker], nodes.workers(taker), taker)

    def _handed_over(self, partition: PartitionId, node: str, taker: str) -> None:
        for each in self._measures:
            if (node, each) in self._sorted:
                self._sorted[node, each].remove(self._entry(partition, each))
            if (taker, each) in self._sorted:
                insort(self._sorted[taker, each], self._entry(partition, each))
        if taker in self._theirs:
            self._theirs[taker].append(partition)
        self._theirs[node].remove(partition)

    def _by(self, node: str, measure: str) -> list[_Entry]:
        key = node, measure
        if key not in self._sorted:
            self._sorted[key] = sorted(self._entry(partition, measure) for partition in self._theirs[node])
        return self._sorted[key]

    def _entry(self, partition: PartitionId, measure: str) -> _Entry:
        return self._nodes.amount(partition, measure), partition.operator, partition.partition


# -- Policies together -----------------------------------------------------------------------------------------------


class PolicyName(StrEnum):
    RING = "ring"
    LOAD = "load"
    LOCALITY = "locality"


def policies_named(text: str) -> list[PolicyName]:
    """Parses a list such as ``locality,load``, in the order of decision. Raises InvalidArgument."""
    names = [name.strip() for name in text.split(",")]
    known = {policy.value for policy in PolicyName}
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgument(f"there is no policy {unknown[0]!r}", remedy=f"use {', '.join(sorted(known))}")
    if len(set(names)) < len(names):
        raise InvalidArgument("a policy is named twice", remedy="name each policy once, in order of precedence")
    return [PolicyName(name) for name in names]


def decide(names: Sequence[PolicyName], view: View, left: Left | None = None) -> list[MoveProposal]:
    """Returns the moves that the policies propose together, at most one for a partition.

    Args:
        left: collects the partitions that stay where they are, and why.
    """
    whole, left = view, left or Left()
    proposals: dict[PartitionId, MoveProposal] = {}
    for name in names:
        found, view = POLICIES[name](view, left)
        for proposal in found:
            source = whole.owners[proposal.partition]
            proposals[proposal.partition] = replace(proposal, source=source)
        view = view.after(found)
    made = [proposal for proposal in proposals.values() if proposal.source != proposal.target]
    left.moves_after_all(made)
    return made


# -- Policy ring -----------------------------------------------------------------------------------------------------


def by_ring(view: View, left: Left | None = None) -> tuple[list[MoveProposal], View]:
    nodes = Nodes(view, left)
    sites = {info.name: info.site for info in view.takers()}
    # partitions of other replicas wait for a takeover, or for their owners to come back
    free = {each: owner for each, owner in view.owners.items() if owner in sites and each not in view.pinned}
    for partition, target in ring.rebalance(free, view.takers(), view.allowed).items():
        node = node_of(target)
        if nodes.target(partition, sites[view.owners[partition]], sites[target], [target], node):
            nodes.propose(partition, target, f"{node} gets its share of partitions")
    return list(nodes.proposals.values()), view


# -- Policy locality -------------------------------------------------------------------------------------------------


class _Near:
    """Candidate sites of a partition: the sites that its rows come from, and the nearest sites with a known round trip
    to one of them."""

    def __init__(self, view: View, able: Collection[str]) -> None:
        self._view, self._able = view, able
        self._known: dict[str, list[tuple[float, str]]] = {}
        for (one, other), rtt_ms in view.rtt_ms.items():
            self._known.setdefault(one, []).append((rtt_ms, other))
            self._known.setdefault(other, []).append((rtt_ms, one))
        self._nearest: dict[tuple[str, str], list[str]] = {}  # by operator and site

    def worth_a_move(self, partition: PartitionId, seen: Seen, here: str) -> Iterator[str]:
        """Yields the sites that are worth a move, nearest first; lazily, because callers seldom need a second one.

        A site that is not the origin of any rows must be nearer by at least ``NEARER_MS_MIN``, as measured.
        """
        first = next(iter(seen.origins)) if len(seen.origins) == 1 else ""
        if first and first != here and self._may_be(partition, first):
            yield first
        view, now, total = self._view, _trips(self._view, seen, here), sum(seen.origins.values())
        for then, site in sorted((_trips(view, seen, site), site) for site in self._of(partition, seen)):
            if now - then < NEARER_MIN * now:
                return
            if site in (here, first):
                continue
            if site in seen.origins or (now - then >= NEARER_MS_MIN * total and _are_known(view, seen, here, site)):
                yield site

    def _may_be(self, partition: PartitionId, site: str) -> bool:
        return site in self._able and self._view.may_be_at(partition, site)

    def _of(self, partition: PartitionId, seen: Seen) -> list[str]:
        near = set(seen.origins)
        if self._known:
            for origin in seen.origins:
                near.update(self._between(partition.operator, origin))
        return [site for site in near if self._may_be(partition, site)]

    def _between(self, operator: str, origin: str) -> list[str]:
        key = operator, origin
        if key not in self._nearest:
            sites = self._view.allowed.get(operator, ())
            known = (each for each in sorted(self._known.get(origin, ())) if not sites or each[1] in sites)
            self._nearest[key] = [site for _, site in known if site in self._able][:_NEAREST]
        return self._nearest[key]


def by_locality(view: View, left: Left | None = None) -> tuple[list[MoveProposal], View]:
    nodes = Nodes(view, left)
    at_site: dict[str, list[str]] = {}
    for node, site in nodes.sites.items():
        at_site.setdefault(site, []).append(node)
    sites_of = {info.name: info.site for info in view.replicas if node_of(info.name) not in view.cordoned}
    near = _Near(view, at_site.keys())
    pinned = dict(view.pinned)
    for partition in sorted(view.owners, key=_order):
        seen, here = view.of(partition), sites_of.get(view.owners[partition])
        if sum(seen.origins.values()) < ORIGIN_ROWS_MIN or here is None:
            continue
        pinned[partition] = here
        if len(seen.origins) == 1 and here in seen.origins:  # most partitions, once placement has settled
            continue
        for best in near.worth_a_move(partition, seen, here):
            if not _pays(seen, here, best):
                nodes.left.note(
                    partition, f"a move to {best} costs more bytes than it saves within {PAYBACK_S / 60:.0f} min"
                )
                break  # a move that does not pay for the nearest site does not for the next
            if target := nodes.target(partition, here, best, _least_loaded(nodes, at_site[best]), best):
                nodes.propose(partition, target, _why(view, seen, here, best))
                pinned[partition] = best
                break
    return list(nodes.proposals.values()), replace(view, pinned=pinned)


def _are_known(view: View, seen: Seen, here: str, there: str) -> bool:
    """Tells whether two sites can be compared: from each origin, the round trips to both are measured, or to neither. A
    guess is not compared with a measurement."""
    return all(
        (view.measured_ms(origin, here) is None) == (view.measured_ms(origin, there) is None) for origin in seen.origins
    )


def _least_loaded(nodes: Nodes, there: Collection[str]) -> Iterator[str]:
    """Yields the workers of nodes, those of the least loaded node first."""

    def load(node: str) -> tuple[float, str]:
        return nodes.have["rows"][node] / nodes.weights[node], node

    yield from nodes.workers(min(there, key=load))  # the usual case
    for node in sorted(there, key=load)[1:]:
        yield from nodes.workers(node)


def _why(view: View, seen: Seen, here: str, best: str) -> str:
    total = sum(seen.origins.values())
    if share := seen.origins.get(best, 0.0) / total:
        return f"{share:.0%} of its {total:,.1f} rows/s come from {best}"
    now, then = _trips(view, seen, here) / total, _trips(view, seen, best) / total
    return f"{best} is nearer to its rows: {then:.1f} ms per round trip, {now:.1f} from {here}"


def _order(partition: PartitionId) -> tuple[str, int]:
    return partition.operator, partition.partition


def _trips(view: View, seen: Seen, site: str) -> float:
    """Returns the sum of round trips, in milliseconds, of one second's rows if the partition were at ``site``."""
    return sum(rows * view.between_ms(origin, site) for origin, rows in seen.origins.items())


def _pays(seen: Seen, here: str, there: str) -> bool:
    """Tells whether the rows that no longer cross between sites make up for the bytes of the move within ``PAYBACK_S``.
    A move to a site that no rows come from always pays: the site is nearer, so the move saves time instead of bytes."""
    row_bytes = seen.row_bytes / seen.rows if seen.rows and seen.row_bytes else ROW_BYTES_GUESS
    saved = (seen.origins.get(there, 0.0) - seen.origins.get(here, 0.0)) * row_bytes
    return saved * PAYBACK_S >= seen.size or not seen.origins.get(there)


POLICIES: Final[Mapping[PolicyName, Callable[[View, Left], tuple[list[MoveProposal], View]]]] = MappingProxyType(
    {PolicyName.RING: by_ring, PolicyName.LOAD: by_load, PolicyName.LOCALITY: by_locality}
)


def uneven(view: View, measure: str = "rows") -> float:
    """Returns the largest ratio, over all nodes, of a node's ``rows`` or ``bytes`` to its fair share. 1.0: every node
    has exactly its share."""
    nodes = Nodes(view)
    fair = nodes.fair[measure]
    return max((nodes.uneven(node, measure) for node in fair if fair[node]), default=1.0)


# -- The autopilot ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AutopilotSettings:
    """The autopilot's settings.

    Args:
        policies: the policies that propose moves, in order of precedence; empty: the autopilot is off.
        max_pause_ms: pause budget of each move; None: no budget.
        cool_down_s: seconds for which a partition that has moved is not moved again.
        moves_per_minute: maximum number of moves that begin in a minute.

    Raises InvalidArgument for a number that is not positive and finite.
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
        """Seconds until the next look, short enough that a move begins soon after ``stands_s``."""
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
        """Reads settings from the fields that :meth:`to_dict` returns. Raises InvalidArgument."""
        names = fields.get("policies") or ()
        policies = tuple(policies_named(",".join(names))) if names else ()
        rest = {name: value for name, value in fields.items() if name != "policies"}
        return cls(policies, **rest)


@dataclass(frozen=True, slots=True)
class _Begun:
    """The newest move of a partition. ``failures`` counts the moves just before it that failed to move the partition
    between the same owner and site."""

    at_s: float
    source: str
    site: str
    failures: int = 0


class Autopilot:
    """Chooses the moves that begin now. Times are monotonic seconds."""

    def __init__(self, orders: AutopilotSettings) -> None:
        self.orders = orders
        self._since: dict[tuple[PartitionId, str], float] = {}  # by partition and proposed site
        self._begun: dict[PartitionId, _Begun] = {}
        self._tokens = self._most
        self._counted_at = -math.inf

    @property
    def _most(self) -> float:
        """Maximum number of moves that may begin at once: ``moves_per_minute`` for ten seconds, at least one."""
        return max(1.0, self.orders.moves_per_minute / 6)

    def step(self, now_s: float, view: View, busy: Collection[PartitionId] = frozenset()) -> list[MoveProposal]:
        """Returns the moves that begin now.

        Args:
            busy: partitions that are moving already.
        """
        if not self.orders.policies:
            return []
        proposals = decide(self.orders.policies, view)
        places = self._places(view, proposals)
        self._since = {key: self._since.get(key, now_s) for key in places}
        self._begun = {
            partition: begun
            for partition, begun in self._begun.items()
            if now_s - begun.at_s < self.orders.cool_down_s or view.owners.get(partition) == begun.source
        }
        self._refill(now_s)
        chosen: list[MoveProposal] = []
        for key, proposal in places.items():
            if len(chosen) + 1 > self._tokens:
                break
            rests = proposal.partition in busy or now_s < self._cool_until_s(*key, proposal.source)
            if not rests and now_s - self._since[key] >= self.orders.stands_s:
                chosen.append(proposal)
        self._tokens -= len(chosen)
        return chosen

    def began(self, now_s: float, view: View, proposals: Sequence[MoveProposal]) -> None:
        """Starts the cool-down of partitions that move now."""
        for (partition, site), proposal in self._places(view, proposals).items():
            begun, failures = self._begun.get(partition), 0
            if begun is not None and (begun.source, begun.site) == (proposal.source, site):
                failures = begun.failures + 1
            self._begun[partition] = _Begun(now_s, proposal.source, site, failures)

    def _cool_until_s(self, partition: PartitionId, site: str, owner: str) -> float:
        """Returns the end of a partition's cool-down for moves to a site. It is longer if the newest move was to that
        site and has failed, so that the partition is still at its owner."""
        begun = self._begun.get(partition)
        if begun is None:
            return -math.inf
        has_failed = (begun.source, begun.site) == (owner, site)
        doublings = min(begun.failures + 1, MOST_DOUBLINGS) if has_failed else 0
        return begun.at_s + math.ldexp(self.orders.cool_down_s, doublings)

    @staticmethod
    def _places(view: View, proposals: Sequence[MoveProposal]) -> dict[tuple[PartitionId, str], MoveProposal]:
        """Returns proposed moves by partition and target site. A proposal counts as the same if only its node changes:
        the least loaded node of a site may change at any time."""
        sites = {info.name: info.site for info in view.replicas}
        return {(proposal.partition, sites[proposal.target]): proposal for proposal in proposals}

    def _refill(self, now_s: float) -> None:
        passed_s = now_s - self._counted_at if math.isfinite(self._counted_at) else 0.0
        self._tokens = min(self._most, self._tokens + passed_s * self.orders.moves_per_minute / 60)
        self._counted_at = now_s
