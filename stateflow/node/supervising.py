"""A node's workers: when one that ended is started again, and which partitions it hands to its siblings. Sans-io."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stateflow.types import PartitionId

#: who lived so long was well: it is started again at once
WELL_S = 30.0
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
#: who died so often in a row without having been well is said to die at every start
HOPELESS = 5
#: a partition is worth handing on if that makes the busier of two workers less busy by this share at least
GAIN = 0.2


class State(StrEnum):
    RUNS = "RUNS"
    WAITS = "WAITS"  # until it is started again
    LEAVES = "LEAVES"  # it runs until it owns nothing
    ENDED = "ENDED"


@dataclass(slots=True)
class _Worker:
    state: State
    since: float
    deaths: int = 0
    again_at: float = 0.0


@dataclass(slots=True)
class Supervision:
    """Of one node. Times are monotonic seconds.

    Args:
        wanted: so many workers, numbered from 0.
    """

    wanted: int
    _workers: dict[int, _Worker] = field(default_factory=dict)

    def started(self, number: int, now: float) -> None:
        known = self._workers.get(number)
        state = State.RUNS if number < self.wanted else State.LEAVES
        self._workers[number] = _Worker(state, now, known.deaths if known is not None else 0)

    def died(self, number: int, now: float) -> float:
        """It ended, and nobody wanted that. Returns in how many seconds it is started again."""
        worker = self._workers[number]
        worker.deaths = 1 if now - worker.since >= WELL_S else worker.deaths + 1
        pause = 0.0 if worker.deaths == 1 else min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (worker.deaths - 2))
        worker.state, worker.again_at = State.WAITS, now + pause
        return pause

    def ended(self, number: int) -> None:
        """It owned nothing any more, and left."""
        self._workers[number].state = State.ENDED

    def due(self, now: float) -> list[int]:
        """Those to start now."""
        return [n for n, worker in self._workers.items() if worker.state is State.WAITS and worker.again_at <= now]

    def leaving(self) -> list[int]:
        """Those that run until they own nothing."""
        return [number for number, worker in self._workers.items() if worker.state is State.LEAVES]

    def dies_at_every_start(self, number: int) -> bool:
        return self._workers[number].deaths >= HOPELESS

    def is_hopeless(self) -> bool:
        """No worker that is wanted runs, and each dies at every start."""
        wanted = [worker for number, worker in self._workers.items() if number < self.wanted]
        return bool(wanted) and all(w.state is State.WAITS and w.deaths >= HOPELESS for w in wanted)


def spread(loads: Mapping[str, Mapping[PartitionId, float]]) -> dict[PartitionId, str]:
    """Partition → worker, of those to move within a node so that its workers are about equally busy: as few as that
    takes, and none for little.

    Args:
        loads: worker → its partitions and what each costs, in any unit; those that cost nothing are spread by number.
    """
    floor = max((load for each in loads.values() for load in each.values()), default=0.0) / 100 or 1.0
    left = {worker: {p: max(load, floor) for p, load in each.items()} for worker, each in loads.items()}
    total = {worker: sum(each.values()) for worker, each in left.items()}
    moves: dict[PartitionId, str] = {}
    while len(left) > 1:
        least = min(total, key=lambda worker: (total[worker], worker))
        most = max(total, key=lambda worker: (total[worker], worker))
        gap = total[most] - total[least]
        fitting = [(load, p) for p, load in left[most].items() if load <= gap / 2 * (1 + 1e-9) and p not in moves]
        if not fitting or gap <= GAIN * total[most]:
            return moves
        load, partition = max(fitting, key=lambda each: (each[0], each[1].operator, -each[1].partition))
        moves[partition] = least
        left[least][partition] = left[most].pop(partition)
        total[most], total[least] = total[most] - load, total[least] + load
    return moves
