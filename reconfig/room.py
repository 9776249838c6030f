"""Placement of new replicas: which agents start them, and whether there is room. Decisions only.

A replica takes a core for each of its workers, and the memory that it is limited to, or else a minimum for each worker.
A stopped replica takes neither. Disk counts as free now: what replicas have written is subtracted already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stateflow.errors import NoRoom
from stateflow.fleet import AgentInfo, Request, Spawned

MIB = 1 << 20


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
            raise no_room(request, len(placed), why.items())
        best = min(fitting, key=lambda offer: (-offer.cores_left(), len(offer.has), offer.agent.name))
        name = best.agent.name
        best.has.append(Spawned("", name, True, 1, request.workers, request.weight, request.memory_bytes))
        coming[name] += 1
        placed.append(name)
    return placed


def no_room(request: Request, placed: int, why: Iterable[tuple[str, str]]) -> NoRoom:
    said = "; ".join(f"{name}: {each}" for name, each in why)
    return NoRoom(
        f"there is room for {placed} of {request.count} replicas at {request.at}, nothing was started: {said}",
        remedy="ask for fewer or smaller replicas, stop others, or start another agent there",
        at=request.at,
    )
