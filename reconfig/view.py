"""What placement is decided from, and what comes of it. Values only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reconfig.capacity import Room, Space
from stateflow import ring
from stateflow.types import PartitionId, ReplicaInfo, node_of

#: two sites
Pair = tuple[str, str]
#: rows a second, below which it does not matter where they come from
ORIGIN_ROWS_MIN = 0.1
#: between two sites of which nothing is known
RTT_MS_DEFAULT = 20.0
#: what a move costs is to be made up for within so long, and it may take no longer itself
PAYBACK_S = 600.0
#: of partitions that are left where they are, those that are named
LEFT_MAX = 100


@dataclass(frozen=True, slots=True)
class Seen:
    """What is measured of a partition: ``size`` on disk, bytes; ``rows`` and ``row_bytes`` that come a second;
    ``origins``: of the rows that say from which site they are, how many a second."""

    size: int = 0
    rows: float = 0.0
    row_bytes: float = 0.0
    origins: Mapping[str, float] = field(default_factory=dict)


_UNSEEN = Seen()


@dataclass(frozen=True, slots=True)
class Wish:
    """``reason``: for people and the ledger."""

    partition: PartitionId
    source: str
    target: str
    reason: str


class Left:
    """Partitions that a policy would have elsewhere, and why they are left where they are: the first so many."""

    def __init__(self, most: int = LEFT_MAX) -> None:
        self._most = most
        self.reasons: dict[PartitionId, str] = {}

    def note(self, partition: PartitionId, reason: str) -> None:
        if len(self.reasons) < self._most:
            self.reasons.setdefault(partition, reason)

    def moves_after_all(self, wishes: Iterable[Wish]) -> None:
        for wish in wishes:
            self.reasons.pop(wish.partition, None)


@dataclass(frozen=True, slots=True)
class View:
    """What there is now.

    Args:
        replicas: that may be given something; who else owns something keeps it.
        confined: see :mod:`stateflow.ring`.
        room: of replicas that have said it, by name.
        copies: bytes of a partition that lie at a replica which does not own it: it takes so much less room there.
        resting: nodes that are given nothing, and keep what they have: in maintenance, or silent when they were asked.
        rtt_ms: between two sites, in either order.
        bytes_per_s: from one site to another.
        tied: partitions that a policy wants at a site, which the later ones keep to.
    """

    owners: Mapping[PartitionId, str]
    replicas: Sequence[ReplicaInfo]
    seen: Mapping[PartitionId, Seen] = field(default_factory=dict)
    confined: ring.Confined = field(default_factory=lambda: ring.EVERYWHERE)
    room: Mapping[str, Room] = field(default_factory=dict)
    resting: Collection[str] = frozenset()
    rtt_ms: Mapping[Pair, float] = field(default_factory=dict)
    tied: Mapping[PartitionId, str] = field(default_factory=dict)
    copies: Mapping[tuple[PartitionId, str], int] = field(default_factory=dict)
    bytes_per_s: Mapping[Pair, float] = field(default_factory=dict)

    def of(self, partition: PartitionId) -> Seen:
        return self.seen.get(partition, _UNSEEN)

    def takers(self) -> list[ReplicaInfo]:
        """Who may be given something."""
        return [info for info in self.replicas if info.weight > 0 and node_of(info.name) not in self.resting]

    def may_be_at(self, partition: PartitionId, site: str) -> bool:
        sites = self.confined.get(partition.operator, ())
        return (not sites or site in sites) and self.tied.get(partition, site) == site

    def measured_ms(self, one: str, other: str) -> float | None:
        """None: it is not known."""
        if one == other:
            return 0.0
        found = self.rtt_ms.get((one, other))
        return self.rtt_ms.get((other, one)) if found is None else found

    def between_ms(self, one: str, other: str) -> float:
        found = self.measured_ms(one, other)
        return RTT_MS_DEFAULT if found is None else found

    def takes(self, partition: PartitionId, replica: str) -> int:
        """Bytes of room, were it there."""
        return max(0, self.of(partition).size - self.copies.get((partition, replica), 0))

    def too_long(self, partition: PartitionId, here: str, there: str) -> str:
        """Why a move from a site to another costs more than it brings by the time alone; empty: it does not, or that is
        not known."""
        rate = self.bytes_per_s.get((here, there)) if here != there else None
        if rate is None or (seconds := self.of(partition).size / rate) <= PAYBACK_S:
            return ""
        return f"a move from {here} to {there} takes {seconds / 60:,.0f} min, more than {PAYBACK_S / 60:.0f}"

    def after(self, wishes: Iterable[Wish]) -> View:
        wishes = list(wishes)
        owners = {**self.owners, **{wish.partition: wish.target for wish in wishes}}
        if not self.room:
            return replace(self, owners=owners)
        space, copies = Space(self.room), dict(self.copies)
        for wish in wishes:
            space.take(wish.target, self.takes(wish.partition, wish.target))
            copies.pop((wish.partition, wish.target), None)
            copies[wish.partition, wish.source] = self.of(wish.partition).size
        return replace(self, owners=owners, room=space.rooms(), copies=copies)
