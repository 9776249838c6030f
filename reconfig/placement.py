"""Placement policies: from a view of the cluster to proposed moves, each with its reason. Sans-io and deterministic.

==============  ====================================================================================================
policy          aim
==============  ====================================================================================================
``ring``        every node has its weight's share of partitions, by as few moves as that takes
``load``        no node has more than 1.2 times its weight's share of rows a second and of bytes, by few moves
``locality``    partitions are where their rows have the shortest round trips: where they come from, or near to it
==============  ====================================================================================================

Every policy respects the sites to which an operator is confined and the room that replicas have, and places nothing at
a node in maintenance. Several policies are asked in order: a later one takes the moves of the earlier ones as made, and
does not move a partition away from the site where an earlier one wants it. No move is proposed that costs more than it
brings: within ``PAYBACK_S``, the bytes that no longer cross between sites must make up for the bytes of the move. The
move itself must not take longer than that either, if the bandwidth is known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from reconfig.evening import Nodes, Share, by_load
from reconfig.view import ORIGIN_ROWS_MIN, PAYBACK_S, Left, Seen, View, Wish
from stateflow import ring
from stateflow.errors import InvalidArgument
from stateflow.types import PartitionId, node_of

#: fraction by which the round trips must be shorter elsewhere: rows from two sites alike move nothing to and fro
NEARER_MIN = 0.3
#: milliseconds a row by which a site that none of the rows come from must be nearer: less is no more than noise
NEARER_MS_MIN = 1.0
#: bytes of a row, if they were not measured
ROW_BYTES_GUESS = 100.0
#: how many of the sites nearest to an origin are looked at
_NEAREST = 8


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


def decide(names: Sequence[PolicyName], view: View, left: Left | None = None) -> list[Wish]:
    """Returns the moves that the policies propose together, at most one for a partition.

    Args:
        left: collects the partitions that stay where they are, and why.
    """
    whole, left = view, left or Left()
    wishes: dict[PartitionId, Wish] = {}
    for name in names:
        found, view = POLICIES[name](view, left)
        for wish in found:
            source = whole.owners[wish.partition]
            wishes[wish.partition] = replace(wish, source=source)
        view = view.after(found)
    made = [wish for wish in wishes.values() if wish.source != wish.target]
    left.moves_after_all(made)
    return made


# -- ring -----------------------------------------------------------------------------------------------------


def by_ring(view: View, left: Left | None = None) -> tuple[list[Wish], View]:
    left = left or Left()
    sites = {
        info.name: info.site for info in view.takers()
    }  # partitions of other replicas wait for a take-over, or for their owners to come back
    free = {
        partition: owner for partition, owner in view.owners.items() if owner in sites and partition not in view.tied
    }
    found = ring.rebalance(free, view.takers(), view.confined)
    nodes = Nodes(view)
    wishes = []
    for partition, target in found.items():
        owner = view.owners[partition]
        if not nodes.has_room(target, partition):
            left.note(partition, f"{node_of(target)} has no room for it")
        elif why := view.too_long(partition, sites[owner], sites[target]):
            left.note(partition, why)
        else:
            nodes.move(partition, target)
            wishes.append(Wish(partition, owner, target, f"{node_of(target)} gets its share of partitions"))
    return wishes, view


# -- locality -------------------------------------------------------------------------------------------------


class _Near:
    """Candidate sites of a partition: those that its rows come from, and the nearest of those whose round trip to one
    of them is known."""

    def __init__(self, view: View, able: Collection[str]) -> None:
        self._view, self._able = view, able
        self._known: dict[str, list[tuple[float, str]]] = {}
        for (one, other), rtt_ms in view.rtt_ms.items():
            self._known.setdefault(one, []).append((rtt_ms, other))
            self._known.setdefault(other, []).append((rtt_ms, one))
        self._nearest: dict[tuple[str, str], list[str]] = {}  # by operator and site

    def worth_a_move(self, partition: PartitionId, seen: Seen, here: str) -> Iterator[str]:
        """Yields the sites that are worth a move, the nearest first; lazily, as callers seldom need a second one.

        A site that none of the rows come from must be nearer by ``NEARER_MS_MIN``, by measured round trips.
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
            sites = self._view.confined.get(operator, ())
            known = (each for each in sorted(self._known.get(origin, ())) if not sites or each[1] in sites)
            self._nearest[key] = [site for _, site in known if site in self._able][:_NEAREST]
        return self._nearest[key]


def by_locality(view: View, left: Left | None = None) -> tuple[list[Wish], View]:
    nodes, left = Nodes(view), left or Left()
    at_site: dict[str, list[str]] = {}
    for node, site in nodes.sites.items():
        at_site.setdefault(site, []).append(node)
    sites_of = {info.name: info.site for info in view.replicas if node_of(info.name) not in view.resting}
    near = _Near(view, at_site.keys())
    wishes, tied = [], dict(view.tied)
    for partition in sorted(view.owners, key=_order):
        seen, owner = view.of(partition), view.owners[partition]
        total = sum(seen.origins.values())
        here = sites_of.get(owner)
        if total < ORIGIN_ROWS_MIN or here is None:
            continue
        tied[partition] = here
        if len(seen.origins) == 1 and here in seen.origins:  # most partitions, once placement has settled
            continue
        for best in near.worth_a_move(partition, seen, here):
            if not _pays(seen, here, best):
                left.note(partition, f"a move to {best} costs more bytes than it saves within {PAYBACK_S / 60:.0f} min")
                break  # a move that does not pay for the nearest site does not for the next
            if why := view.too_long(partition, here, best):
                left.note(partition, why)
            elif (target := _least_loaded(nodes, at_site[best], partition)) is None:
                left.note(partition, f"{best} has no room for it")
            else:
                nodes.move(partition, target)
                tied[partition] = best
                wishes.append(Wish(partition, owner, target, _why(view, seen, here, best)))
                break
    return wishes, replace(view, tied=tied)


def _are_known(view: View, seen: Seen, here: str, there: str) -> bool:
    """Tells whether, for each origin, the round trips to both sites are measured, or to neither: a guess is not
    compared with a measurement."""
    return all(
        (view.measured_ms(origin, here) is None) == (view.measured_ms(origin, there) is None) for origin in seen.origins
    )


def _least_loaded(nodes: Nodes, there: Collection[str], partition: PartitionId) -> str | None:
    """Returns the least loaded worker at the least loaded node, of those with room. None: there is no room."""

    def load(node: str) -> tuple[float, str]:
        return nodes.rows[node] / nodes.weights[node], node

    if (target := nodes.worker(min(there, key=load), partition)) is not None:  # the usual case
        return target
    return next((target for node in sorted(there, key=load) if (target := nodes.worker(node, partition))), None)


def _why(view: View, seen: Seen, here: str, best: str) -> str:
    total = sum(seen.origins.values())
    if share := seen.origins.get(best, 0.0) / total:
        return f"{share:.0%} of its {total:,.1f} rows/s come from {best}"
    now, then = _trips(view, seen, here) / total, _trips(view, seen, best) / total
    return f"{best} is nearer to its rows: {then:.1f} ms per round trip, {now:.1f} from {here}"


def _order(partition: PartitionId) -> tuple[str, int]:
    return partition.operator, partition.partition


def _trips(view: View, seen: Seen, site: str) -> float:
    """Returns the milliseconds of round trips that a second's rows would take with the partition at ``site``."""
    return sum(rows * view.between_ms(origin, site) for origin, rows in seen.origins.items())


def _pays(seen: Seen, here: str, there: str) -> bool:
    """Tells whether the rows that no longer cross between sites make up for the bytes of the move within ``PAYBACK_S``.
    A site that no rows come from always pays: it is nearer, and saves time instead of bytes."""
    row_bytes = seen.row_bytes / seen.rows if seen.rows and seen.row_bytes else ROW_BYTES_GUESS
    saved = (seen.origins.get(there, 0.0) - seen.origins.get(here, 0.0)) * row_bytes
    return saved * PAYBACK_S >= seen.size or not seen.origins.get(there)


POLICIES: Final[Mapping[PolicyName, Callable[[View, Left], tuple[list[Wish], View]]]] = MappingProxyType(
    {PolicyName.RING: by_ring, PolicyName.LOAD: by_load, PolicyName.LOCALITY: by_locality}
)


def uneven(view: View, measure: str = "rows") -> float:
    """Returns the greatest multiple of its weight's share of ``rows`` or ``bytes`` that a node has. 1.0: every node has
    exactly its share."""
    nodes = Nodes(view)
    have = nodes.rows if measure == "rows" else nodes.bytes
    share = Share(have, nodes.weights, lambda _: 0.0)
    return max((share.uneven(node) for node in have if share.fair[node]), default=1.0)
