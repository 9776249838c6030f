"""The view of a cluster that placement policies decide from, and the moves that they propose. Values only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reconfig.capacity import Room, Space
from stateflow import ring
from stateflow.types import PartitionId, ReplicaInfo, node_of

#: a pair of sites
Pair = tuple[str, str]
#: rows a second, below which it does not matter where they come from
ORIGIN_ROWS_MIN = 0.1
#: assumed round trip between two sites that was not measured, in milliseconds
RTT_MS_DEFAULT = 20.0
#: seconds within which a move must pay off; the move itself may take no longer
PAYBACK_S = 600.0
#: the most partitions of which a policy tells why they stay
LEFT_MAX = 100


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements of a partition. ``size``: bytes on disk. ``rows``, ``row_bytes``: rows and their bytes a second.
    ``origins``: rows a second by the site that they come from, of the rows that name one."""

    size: int = 0
    rows: float = 0.0
    row_bytes: float = 0.0
    origins: Mapping[str, float] = field(default_factory=dict)


_UNSEEN = Seen()


@dataclass(frozen=True, slots=True)
class Wish:
    """A proposed move. ``reason``: for people and the ledger."""

    partition: PartitionId
    source: str
    target: str
    reason: str


class Left:
    """Partitions that a policy would move but leaves where they are, and why; at most the first ``most``."""

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
    """The cluster as it is now.

    Args:
        owners: owner by partition.
        replicas: those that may be given something; other owners keep what they have.
        seen: measurements by partition.
        confined: sites to which operators are confined, see :mod:`stateflow.ring`.
        room: room by replica, of those that have reported it.
        resting: nodes that get nothing and keep what they have: in maintenance, or silent when they were asked.
        rtt_ms: round trips between two sites, in either order.
        tied: partitions that a policy wants at a site; later policies keep them there.
        copies: bytes of a partition's files at a replica that does not own it, which needs that much less room for it.
        bytes_per_s: bandwidth from one site to another.
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
        """Returns the replicas that may be given something."""
        return [info for info in self.replicas if info.weight > 0 and node_of(info.name) not in self.resting]

    def may_be_at(self, partition: PartitionId, site: str) -> bool:
        sites = self.confined.get(partition.operator, ())
        return (not sites or site in sites) and self.tied.get(partition, site) == site

    def measured_ms(self, one: str, other: str) -> float | None:
        """Returns the measured round trip between two sites, 0 within a site. None: not known."""
        if one == other:
            return 0.0
        found = self.rtt_ms.get((one, other))
        return self.rtt_ms.get((other, one)) if found is None else found

    def between_ms(self, one: str, other: str) -> float:
        found = self.measured_ms(one, other)
        return RTT_MS_DEFAULT if found is None else found

    def takes(self, partition: PartitionId, replica: str) -> int:
        """Returns the bytes of room that a partition would need at a replica."""
        return max(0, self.of(partition).size - self.copies.get((partition, replica), 0))

    def too_long(self, partition: PartitionId, here: str, there: str) -> str:
        """Returns why a move between two sites would take longer than ``PAYBACK_S``; empty: it would not, or the
        bandwidth is not known."""
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
