"""Capacity: how many bytes of state replicas can still take, and which partitions have no room. Decisions only.

A replica may take what its disk has free, up to the limit it was configured with. Replicas on one disk share its free
bytes. A partition that moves away frees nothing: its files stay for a move back, and count where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stateflow.errors import NoRoom
from stateflow.types import PartitionId

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """The room of one replica, in bytes. ``own``: what its limit still allows. ``free``: free bytes of its ``disk``,
    which all replicas that name the same disk share; an empty name is a disk of its own. Either is below 0 if more is
    there than should be."""

    own: float = math.inf
    disk: str = ""
    free: float = math.inf


class Space:
    """Room that is left as coming partitions are counted. A replica that has not reported its room has no limit."""

    def __init__(self, rooms: Mapping[str, Room]) -> None:
        self._own = {name: room.own for name, room in rooms.items()}
        self._disks = {name: room.disk or name for name, room in rooms.items()}
        self._free: dict[str, float] = {}
        for name, room in rooms.items():
            disk = self._disks[name]  # replicas on one disk may have reported at different times
            self._free[disk] = min(room.free, self._free.get(disk, math.inf))

    def holds(self, replica: str, size: float) -> bool:
        """Tells whether ``size`` more bytes fit. If nothing is left, not even an empty partition fits, as it will not
        stay empty."""
        return size <= (left := self.left(replica)) and left > 0

    def left(self, replica: str) -> float:
        if replica not in self._own:
            return math.inf
        return min(self._own[replica], self._free[self._disks[replica]])

    def take(self, replica: str, size: float) -> None:
        if replica in self._own:
            self._own[replica] -= size
            self._free[self._disks[replica]] -= size

    def rooms(self) -> dict[str, Room]:
        return {
            name: Room(own, disk, self._free[disk]) for name, own in self._own.items() if (disk := self._disks[name])
        }


@dataclass(frozen=True, slots=True)
class Lack:
    """Replicas to which more would come than they have room for; several are on one disk and lack room together."""

    replicas: tuple[str, ...]
    free_bytes: int
    coming_bytes: int


def lacking(coming: Iterable[tuple[str, float]], rooms: Mapping[str, Room]) -> list[Lack]:
    """Returns where more would come than there is room for: replicas by themselves, then disks.

    Args:
        coming: (replica, bytes) of each partition.
        rooms: room by replica; a replica that is missing has no limit.
    """
    own: dict[str, float] = {}
    for replica, size in coming:
        if replica in rooms:
            own[replica] = own.get(replica, 0.0) + size
    space, found = Space(rooms), list[Lack]()
    disks: dict[str, list[str]] = {}
    for replica in sorted(own):
        if not space.holds(replica, own[replica]):
            found.append(Lack((replica,), _whole(space.left(replica)), int(own[replica])))
        else:
            disks.setdefault(rooms[replica].disk or replica, []).append(replica)
    for together in disks.values():
        free, size = min(rooms[name].free for name in together), sum(own[name] for name in together)
        if size > free:
            found.append(Lack(tuple(together), _whole(free), int(size)))
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """The target of each partition. ``instead``: other replicas that may take a partition, in groups, preferred ones
    first."""

    moves: dict[PartitionId, str]
    instead: Mapping[PartitionId, Sequence[Collection[str]]] = field(default_factory=dict)

    def others(self) -> set[str]:
        return {name for ranks in self.instead.values() for rank in ranks for name in rank}

    def fitted(self, takes: Callable[[PartitionId, str], float], rooms: Mapping[str, Room]) -> dict[PartitionId, str]:
        """Returns the targets with partitions that lack room redirected, largest partition first.

        Such a partition goes to the replica with most room left, of the first group in ``instead`` that has any. A
        partition that fits nowhere keeps its target.

        Args:
            takes: bytes that a partition needs at a replica.
            rooms: room by replica.
        """
        space, found = Space(rooms), dict(self.moves)
        for partition in sorted(found, key=lambda each: -takes(each, found[each])):
            if not space.holds(found[partition], takes(partition, found[partition])):
                for rank in self.instead.get(partition, ()):
                    able = [name for name in sorted(rank) if space.holds(name, takes(partition, name))]
                    if able:
                        found[partition] = max(able, key=space.left)
                        break
            space.take(found[partition], takes(partition, found[partition]))
        return found


def _whole(left: float) -> int:
    return max(0, int(left))


def no_room(lacks: list[Lack]) -> NoRoom:
    """Returns the error for what :func:`lacking` found, which must not be empty."""
    said = "; ".join(
        f"{', '.join(each.replicas)}: {mib(each.free_bytes)} free for state, {mib(each.coming_bytes)} needed"
        for each in lacks
    )
    return NoRoom(
        f"not enough room, nothing was moved: {said}",
        remedy="free space there, move fewer partitions or move them elsewhere; `stateflow nodes` shows free space",
        replicas=[name for each in lacks for name in each.replicas],
    )


def mib(size: float) -> str:
    return f"{size / MIB:,.1f} MiB"
