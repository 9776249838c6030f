"""Capacity: whether there is room for partitions at replicas, and for new replicas at agents. Decisions only.

A replica may take what its disk has free, up to the limit it was configured with. Replicas on one disk share its free
bytes. A partition that moves away frees nothing: its files stay for a move back, and count where they lie. Callers
count the moves that are under way as bytes taken (:meth:`Space.take`).

At its agent, a replica takes a core for each of its workers, and the memory that it is limited to, or else a minimum
for each worker. A stopped replica takes neither. Disk counts as free now: what replicas have written is subtracted
already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stateflow.errors import NoRoom
from stateflow.fleet import AgentInfo, Request, Spawned
from stateflow.types import PartitionId

MIB = 1 << 20


# -- Partitions at replicas ------------------------------------------------------------------------------------------


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


# -- Replicas at agents ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Offer:
    """An agent that answers. ``has``: the replicas that it should have already."""

    agent: AgentInfo
    disk_free_bytes: int
    has: list[Spawned] = field(default_factory=list)

    def cores_left(self) -> int:
        return self.agent.cores - sum(each.workers for each in self.has if each.running)

    def memory_left(self, worker_bytes: int) -> int:
        return self.agent.memory_bytes - sum(taken_bytes(each, worker_bytes) for each in self.has if each.running)


def taken_bytes(spawned: Spawned | Request, worker_bytes: int) -> int:
    """Returns the memory that a replica takes, in bytes.

    Args:
        worker_bytes: memory of each worker of a replica without a limit.
    """
    return spawned.memory_bytes or spawned.workers * worker_bytes


def lacks(offer: Offer, asked: Spawned | Request, coming: int, worker_bytes: int, disk_bytes: int) -> str:
    """Returns what an agent lacks for one more replica, in words; empty: it has room.

    Args:
        coming: number of replicas that the same command has placed there.
        worker_bytes: memory of each worker of a replica without a limit.
        disk_bytes: free disk that each new replica needs.
    """
    cores, memory = offer.cores_left(), offer.memory_left(worker_bytes)
    if asked.workers > cores:
        return f"{max(cores, 0)} of {offer.agent.cores} cores are left, {asked.workers} are needed"
    needed = taken_bytes(asked, worker_bytes)
    if needed > memory:
        left = f"{max(memory, 0) // MIB} of {offer.agent.memory_bytes // MIB} MiB of memory are left"
        return f"{left}, {needed // MIB} are needed"
    if (coming + 1) * disk_bytes > offer.disk_free_bytes:
        return f"{offer.disk_free_bytes // MIB} MiB of disk are free, {(coming + 1) * disk_bytes // MIB} are needed"
    return ""


def place(offers: Sequence[Offer], request: Request, worker_bytes: int, disk_bytes: int) -> list[str]:
    """Places replicas, each at the agent with the most cores left of those with room, and returns the agents' names.
    Raises NoRoom unless all replicas fit.

    Args:
        offers: changed in place: placed replicas are added.
    """
    placed: list[str] = []
    coming = dict.fromkeys((offer.agent.name for offer in offers), 0)
    for _ in range(request.count):
        why = {o.agent.name: lacks(o, request, coming[o.agent.name], worker_bytes, disk_bytes) for o in offers}
        fitting = [offer for offer in offers if not why[offer.agent.name]]
        if not fitting:
            raise no_room_for(request, len(placed), why.items())
        best = min(fitting, key=lambda offer: (-offer.cores_left(), len(offer.has), offer.agent.name))
        name = best.agent.name
        best.has.append(Spawned("", name, True, 1, request.workers, request.weight, request.memory_bytes))
        coming[name] += 1
        placed.append(name)
    return placed


def no_room_for(request: Request, placed: int, why: Iterable[tuple[str, str]]) -> NoRoom:
    said = "; ".join(f"{name}: {each}" for name, each in why)
    return NoRoom(
        f"there is room for {placed} of {request.count} replicas at {request.at}, nothing was started: {said}",
        remedy="ask for fewer or smaller replicas, stop others, or start another agent there",
        at=request.at,
    )
