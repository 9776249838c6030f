"""Decides when a node's workers are restarted, which partitions move between them, and when a surplus worker can be
removed.

Sans-io.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from stateflow.partition.lifecycle import State as Kept
from stateflow.reports import PartitionReport
from stateflow.types import PartitionId

#: a worker that was ready for this many seconds counts as healthy, and is restarted at once
WELL_S = 30.0
BACKOFF_S, BACKOFF_S_MAX = 0.5, 30.0
#: seconds from its start after which a worker that is not ready is named; it may only need longer to open its directory
SLOW_S = 60.0
#: number of deaths, without a healthy run in between, after which a worker counts as dying at every start
HOPELESS = 5
#: least difference between the loads of two workers, as a share of the greater, at which partitions move
GAIN = 0.2
#: share by which a move may leave the receiving worker busier than the giving one; without this tolerance the second of
#: two equally busy partitions would rarely move, because measured loads are never quite equal
OVER = GAIN / 4
#: share of a core below which a worker keeps all its partitions, because it keeps no caller waiting
BUSY = 0.2
#: least and greatest time over which loads are measured, in seconds; a round with moves doubles the time, and a round
#: without moves halves it
COMPARE_S, COMPARE_S_MAX = 10.0, 320.0


class State(StrEnum):
    RUNS = "RUNS"
    WAITS = "WAITS"  # it waits for its next start
    LEAVES = "LEAVES"  # it runs until it owns no partition
    ENDED = "ENDED"


@dataclass(slots=True)
class _Worker:
    state: State
    slow_at: float
    deaths: int = 0
    ready_at: float | None = None
    again_at: float = 0.0


@dataclass(slots=True)
class Supervision:
    """Decides when the workers of one node are restarted. Times are monotonic seconds.

    Args:
        wanted: number of workers, which are numbered from 0.
    """

    wanted: int
    _workers: dict[int, _Worker] = field(default_factory=dict)

    def started(self, number: int, now: float) -> None:
        known = self._workers.get(number)
        state = State.RUNS if number < self.wanted else State.LEAVES
        self._workers[number] = _Worker(state, now + SLOW_S, known.deaths if known is not None else 0)

    def ready(self, number: int, now: float) -> None:
        """Records that a worker has opened its directory and answers, which may have taken minutes."""
        self._workers[number].ready_at = now

    def slow(self, now: float) -> list[int]:
        """Returns the workers that run but have not been ready for ``SLOW_S`` since their start, each of them once."""
        starting = ((n, worker) for n, worker in self._workers.items() if worker.ready_at is None)
        slow = [n for n, worker in starting if worker.state in (State.RUNS, State.LEAVES) and worker.slow_at <= now]
        for number in slow:
            self._workers[number].slow_at = math.inf
        return slow

    def died(self, number: int, now: float) -> float:
        """Records that a worker ended unexpectedly. Returns the seconds until it is started again."""
        worker = self._workers[number]
        was_well = worker.ready_at is not None and now - worker.ready_at >= WELL_S
        worker.deaths = 1 if was_well else worker.deaths + 1
        pause = 0.0 if worker.deaths == 1 else min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (worker.deaths - 2))
        worker.state, worker.again_at = State.WAITS, now + pause
        return pause

    def ended(self, number: int) -> None:
        """Records that a surplus worker was ended, because it owned no partition any more."""
        self._workers[number].state = State.ENDED

    def due(self, now: float) -> list[int]:
        """Returns the workers to start now."""
        return [n for n, worker in self._workers.items() if worker.state is State.WAITS and worker.again_at <= now]

    def leaving(self) -> list[int]:
        """Returns the surplus workers, which run until they own no partition."""
        return [number for number, worker in self._workers.items() if worker.state is State.LEAVES]

    def gone(self) -> list[int]:
        """Returns the surplus workers that were ended."""
        return [number for number, worker in self._workers.items() if worker.state is State.ENDED]

    def dies_at_every_start(self, number: int) -> bool:
        return self._workers[number].deaths >= HOPELESS

    def deaths(self, number: int) -> int:
        """Returns the number of a worker's deaths since it was well."""
        return self._workers[number].deaths

    def is_hopeless(self) -> bool:
        """Tells whether no wanted worker is running and each of them dies at every start."""
        wanted = [worker for number, worker in self._workers.items() if number < self.wanted]
        return bool(wanted) and all(w.state is State.WAITS and w.deaths >= HOPELESS for w in wanted)


# -- which worker owns which partitions ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """A node's workers at one moment.

    Args:
        at: monotonic seconds.
        committed: worker → partition that it owns → number of the partition's last commit; 0: none yet.
        used_s: worker → CPU seconds that it has used; a worker without an entry: unknown.
    """

    at: float
    committed: Mapping[str, Mapping[PartitionId, int]]
    used_s: Mapping[str, float] = field(default_factory=dict)

    def follows(self, before: Seen) -> bool:
        """Tells whether, as far as is known, the same processes have owned the same partitions since ``before``."""
        if self.committed.keys() != before.committed.keys() or self.used_s.keys() != before.used_s.keys():
            return False
        for worker, now in self.committed.items():
            then = before.committed[worker]
            if now.keys() != then.keys() or any(then[p] > now[p] or now[p] > then[p] == 0 for p in now):
                return False
        return all(before.used_s[worker] <= used_s for worker, used_s in self.used_s.items())

    def loads(self, before: Seen) -> dict[str, dict[PartitionId, float]]:
        """Returns worker → partition → cores that the partition has used since ``before``.

        A worker's CPU time is divided among its partitions by their numbers of batches. If the CPU time is unknown,
        each batch counts as a fiftieth of a second.
        """
        seconds = self.at - before.at
        loads: dict[str, dict[PartitionId, float]] = {}
        for worker, now in self.committed.items():
            batches = {p: number - before.committed[worker][p] for p, number in now.items()}
            count = sum(batches.values())
            taken = self.used_s[worker] - before.used_s[worker] if worker in self.used_s else count / 50
            loads[worker] = {p: taken / seconds * each / count if count else 0.0 for p, each in batches.items()}
        return loads


@dataclass(slots=True)
class Balance:
    """Keeps a node's workers about equally busy.

    After each round that moved partitions, loads are measured for longer before the next round, so that moves do not
    follow short-lived loads.
    """

    _before: Seen | None = None
    _compare_s: float = COMPARE_S
    _rounds: int = 0
    _handed_on: dict[PartitionId, int] = field(default_factory=dict)  # partition → round in which it was moved last

    def look(self, seen: Seen) -> dict[PartitionId, str]:
        """Returns the partitions to move now: partition → worker. Do not call it while partitions of the node are
        moving."""
        if not all(seen.committed.values()):  # a worker owns no partition: it gets some at once, without measuring
            self._before = None
            return self._moves({worker: dict.fromkeys(owned, 0.0) for worker, owned in seen.committed.items()})
        before = self._before
        if before is None or not seen.follows(before):
            self._before = seen
            return {}
        if seen.at - before.at < self._compare_s:
            return {}
        self._before = seen
        loads = seen.loads(before)
        busiest = max(sum(each.values()) for each in loads.values())
        moves = self._moves(loads) if busiest >= BUSY else {}
        self._compare_s = min(COMPARE_S_MAX, self._compare_s * 2) if moves else max(COMPARE_S, self._compare_s / 2)
        return moves

    def _moves(self, loads: Mapping[str, Mapping[PartitionId, float]]) -> dict[PartitionId, str]:
        moves = spread(loads, self._handed_on)
        if moves:
            self._rounds += 1
            self._handed_on |= dict.fromkeys(moves, self._rounds)
        return moves


def spread(
    loads: Mapping[str, Mapping[PartitionId, float]], handed_on: Mapping[PartitionId, int] = MappingProxyType({})
) -> dict[PartitionId, str]:
    """Returns the moves within a node that make its workers about equally busy: partition → worker.

    Partitions with large loads move first, so that there are few moves. No partition moves between two workers unless
    their loads differ by more than ``GAIN``, a share of the greater load. A move may leave its target busier than its
    source, but at most by ``OVER``, a share of the target's load.

    Args:
        loads: worker → partition → load, in any unit; partitions without load are spread by their number.
        handed_on: partition → when it was moved last, in any unit. Among partitions of equal load, a partition that was
            never moved moves first, then the partition whose last move is the oldest. So if one partition makes its
            worker busy and the loads do not show which, the worker's other partitions move away one after another.
    """
    floor = max((load for each in loads.values() for load in each.values()), default=0.0) / 100 or 1.0
    left = {worker: {p: max(load, floor) for p, load in each.items()} for worker, each in loads.items()}
    total = {worker: sum(each.values()) for worker, each in left.items()}
    moves: dict[PartitionId, str] = {}
    while len(left) > 1:
        least = min(total, key=lambda worker: (total[worker], worker))
        most = max(total, key=lambda worker: (total[worker], worker))
        gap = total[most] - total[least]
        fitting = [
            (load, p)
            for p, load in left[most].items()
            if 2 * load - gap <= OVER * (total[least] + load) and p not in moves
        ]
        if not fitting or gap <= GAIN * total[most]:
            return moves
        load, partition = max(
            fitting, key=lambda each: (each[0], -handed_on.get(each[1], 0), each[1].operator, -each[1].partition)
        )
        moves[partition] = least
        left[least][partition] = left[most].pop(partition)
        total[most], total[least] = total[most] - load, total[least] + load
    return moves


# -- directories of surplus workers -------------------------------------------------------------------------


def is_spare(partitions: Iterable[PartitionReport], epochs: Mapping[PartitionId, int]) -> bool:
    """Tells whether the directory of a surplus worker may be deleted.

    The directory must be kept while the worker serves a partition. It must also be kept while the worker has a sealed
    copy whose new owner is not in the ledger yet: that copy may be the newest.

    Args:
        partitions: the partitions of which the worker has a copy.
        epochs: epoch at which each partition is owned, according to the ledger.
    """
    for each in partitions:
        if each.state in (Kept.OWNED, Kept.FENCING):
            return False
        if each.state == Kept.SEALED and epochs.get(PartitionId(each.operator, each.partition), 0) < each.epoch:
            return False
    return True
